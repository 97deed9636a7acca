"""Checkpoints: a directory of arrays, written by Orbax, with counters, config and spaces in `checkpoint.json`.

    found = locate(path); meta = read_meta(found); state = restore(found, "learner", template)

Those of a run are written by `jrl.run.store.writer`. Nothing is pickled. `checkpoint.json` is read by
`jrl.run.store.meta`, which trusts nothing of it. It is written last, once the arrays were read back: a directory
that has it can be restored.
"""

import contextlib
import errno
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from jrl.config import CheckpointConfig, MultiAgentConfig, multi_agent
from jrl.errors import InputError
from jrl.fields.paths import resolve
from jrl.host import files
from jrl.learn.program import LoopState
from jrl.run.store import meta as checkpoint_file
from jrl.run.store.meta import FILE, FORMAT, meta, read_meta, spec
from jrl.types import PyTree

__all__ = [
    "FORMAT", "damaged", "exists", "fitting", "locate", "meta", "on_host", "read",
    "read_meta", "restore", "run_of", "spec", "write",
]  # fmt: skip

Renew = Callable[[PyTree, PyTree], PyTree]
OVERHEAD = 1_000_000  # bytes of a checkpoint beside its arrays
UNFINISHED = ".unfinished"  # suffix of what is being written or deleted
_READ_BACK = 2**28  # bytes of a part that is compared with what was written; larger ones would need the memory twice
# Orbax lists files by a glob of the whole path: a directory named `x[1]` is not found, and `a*b` means `acb` as well
_PATTERN = re.compile(r"[*?\[\]\\]" if os.sep == "/" else r"[*?\[\]]")


def on_host(parts: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Copies for `write`; a part without arrays is left out."""
    kept = {part: tree for part, tree in parts.items() if jax.tree.leaves(tree)}
    return jax.tree.map(lambda x: np.array(x, copy=True), jax.device_get(kept))


def write(directory: Path, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
    """Writes the arrays of `parts` and `meta` to a new directory; complete once this returns.

    Raises:
      OSError: the directory cannot be written, or what was written cannot be read back.
    """
    directory = directory.absolute()  # which Orbax asks for
    import orbax.checkpoint as ocp  # a second of imports: not before the first save

    for name in ("absl", "asyncio"):  # what fails is raised as well, once
        logging.getLogger(name).setLevel(logging.CRITICAL)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    needed, free = size_of(parts), shutil.disk_usage(directory).free
    if free < needed:  # before a hundred threads find out
        raise OSError(
            errno.ENOSPC, f"{needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free", str(directory.parent)
        )
    try:
        with _without_pattern(directory) as target:
            for part, tree in parts.items():
                with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
                    writer.save(target / part, args=ocp.args.StandardSave(_apart(tree)))
    except ValueError as e:
        if not files.is_disk_full(e):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory.parent)) from e
    checksums = {part: _checksum(tree) for part, tree in parts.items()}
    for part, tree in parts.items():
        try:
            _whole(directory, part, checksums[part] if _nbytes(tree) <= _READ_BACK else None)
        except Exception as e:  # whatever keeps Orbax from reading its own files
            why = f"what was written cannot be read back: {first_line(e)}"
            raise OSError(errno.EIO, why, str(directory / part)) from e
    checkpoint_file.write(directory, {**meta, "checksums": checksums})
    files.sync(directory)


@contextlib.contextmanager
def _without_pattern(directory: Path) -> Iterator[Path]:
    """Yields a path of `directory` that Orbax can list: a link to it, where its own path would be a pattern."""
    if not _PATTERN.search(str(directory)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="jrl-checkpoint-") as place:
        link = Path(place) / "link"
        link.symlink_to(directory, target_is_directory=True)
        yield link


def size_of(parts: Mapping[str, PyTree]) -> int:
    """Returns the bytes that a checkpoint takes at most."""
    return _nbytes(parts) + OVERHEAD


def _nbytes(tree: PyTree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def locate(path: Path, *, best: bool | None = False) -> Path:
    """Returns the checkpoint that `path` means: itself, or the latest complete one of a run directory.

    Args:
      best: of a run directory, the best by the run's `checkpoint.keep_best_by`; None: the best if any has that metric.
    Raises:
      InputError: there is none.
    """
    path = resolve(path, "checkpoint", "any")
    if not path.exists():
        raise InputError(f"checkpoint: {path} does not exist: give a run directory or a checkpoint inside it")
    if (path / FILE).is_file():
        return path
    for parent in (path / "checkpoints", path):
        steps = saved_steps(parent)
        if steps and best is False:
            return parent / str(steps[-1])
        if steps:
            keep = read_meta(parent / str(steps[-1]))["config"].get("checkpoint", {})
            by = keep.get("keep_best_by")
            found = checkpoint_file.best(metas(parent), by, keep.get("keep_best", "max"))
            if found is None and best:
                raise InputError(
                    f"checkpoint: no checkpoint of {path} has the metric of its checkpoint.keep_best_by "
                    f"({by or 'null'}): leave out --best"
                )
            return parent / str(steps[-1] if found is None else found)
    mend = "give a run directory or a checkpoint inside it"
    if (path / "config.yaml").is_file():
        mend = f"this run ended before its first one; train with --out {path} --resume auto begins it anew"
    raise InputError(f"checkpoint: {path} holds no complete checkpoint: {mend}")


def exists(directory: Path) -> bool:
    """Returns whether a run directory has a complete checkpoint, or is one."""
    return (directory / FILE).is_file() or any(saved_steps(parent) for parent in (directory / "checkpoints", directory))


def run_of(path: Path) -> Path | None:
    """Returns the run directory of a path, which may be a checkpoint in it; None for a checkpoint that lies alone."""
    if not (path / FILE).is_file():
        return path.parent if path.name == "checkpoints" else path
    return path.parent.parent if path.parent.name == "checkpoints" else None


def restore(checkpoint: Path, part: str, template: PyTree, renew: Renew | None = None) -> PyTree:
    """Restores one part of a checkpoint, such as "learner", on the host.

    Args:
      checkpoint: from `locate`.
      part: as it was saved.
      template: arrays or ShapeDtypeStructs; a tree without leaves is returned as it is.
      renew: see `read`.
    Raises:
      InputError: the checkpoint holds other arrays, or is damaged.
    """
    if not jax.tree.leaves(template):
        return template
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), template)
    return fitting(checkpoint, part, read(checkpoint, part, like, renew), like)


def fitting(checkpoint: Path, part: str, found: PyTree, like: PyTree) -> PyTree:
    """Returns `found`, if its arrays have the shapes and dtypes of `like`.

    Raises:
      InputError: they have not. Orbax itself takes an array of another shape where the template is numpy.
    """
    for (path, a), b in zip(jax.tree.leaves_with_path(like), jax.tree.leaves(found), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise _misfit(checkpoint, part, f"{_name(path)} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}")
    return found


def read(checkpoint: Path, part: str, like: PyTree = None, renew: Renew | None = None) -> PyTree:
    """Reads the arrays of one part as they were saved: in the structure of `like`, or without it in dicts and lists.

    Args:
      checkpoint: from `locate`.
      part: as it was saved.
      like: see above.
      renew: from what was saved, in dicts, and `like` to what this version would have saved.
    Raises:
      InputError: the part is not there, has another structure, or is damaged.
    """
    known = read_meta(checkpoint).get("checksums", {})
    if part not in known:
        raise _misfit(checkpoint, part, "it holds " + (", ".join(known) or "nothing"))
    try:
        found = _whole(checkpoint, part, known[part])
    # whatever is wrong in files that nobody has looked at yet; without a template there is nothing that may not fit
    except (Exception, MemoryError) as e:
        raise damaged(checkpoint, f"its {part}: {first_line(e)}") from e
    if part == "learner":
        found = checkpoint_file.renewed_state(found)
    if renew is not None:
        found = renew(found, like)
    return found if like is None else _in_structure(checkpoint, part, found, like)


def damaged(checkpoint: Path, why: str) -> InputError:
    """Returns the error of a damaged checkpoint; it names the latest other one that is whole."""
    return checkpoint_file.damaged(checkpoint, why, next(filter(_is_whole, checkpoint_file.others(checkpoint)), None))


def _whole(checkpoint: Path, part: str, checksum: str | None) -> PyTree:
    """Reads the arrays of a part; without a checksum their description alone. Raises whatever shows that they are not
    what was written.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    with _quiet(), _without_pattern(checkpoint.absolute()) as place, ocp.StandardCheckpointer() as reader:
        described = reader.metadata(place / part).item_metadata
        if described is None:
            raise ValueError("its files cannot be read")
        size = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(described.tree))
        if size > (there := psutil.virtual_memory().total):
            raise ValueError(f"it would take {size / 2**30:,.0f} GiB of memory, of {there / 2**30:,.0f} GiB")
        if checksum is None:
            return None
        found = _as_named(reader.restore(place / part))
    if _checksum(found) != checksum:
        raise ValueError("it is not what was written")
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Does not print that Orbax, after an error, has closed the event loop that tensorstore still calls."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda e: None if "Event loop is closed" in str(e.exc_value) else before(e)
    yield
    sys.unraisablehook = before  # not after an error: the calls come late


def _is_whole(checkpoint: Path) -> bool:
    meta = checkpoint_file.readable(checkpoint)
    try:
        for part, checksum in (meta or {"checksums": {"": ""}})["checksums"].items():
            _whole(checkpoint, part, checksum)
    except (Exception, MemoryError):
        return False
    return True


# what rounding has lost of a sum (`ops.scans`) -> the sum
BESIDE = {"mean_rest": "mean", "m2_rest": "m2", "return_rest": "episode_return"}


def _in_structure(checkpoint: Path, part: str, found: PyTree, like: PyTree) -> PyTree:
    """Returns `found` in the containers of `like`, by the names of arrays; parts empty there may be missing in `found`.

    What older checkpoints do not hold yet is 0, in the shape of the array that it stands beside.

    Raises:
      InputError: other names.
    """
    there, wanted = _named(found), _named(like)
    for name in wanted:
        beside = tuple(BESIDE.get(part, part) for part in name)
        if name not in there and beside in there:
            there[name] = np.zeros_like(there[beside])
        if name not in there:
            raise _misfit(checkpoint, part, f"{'.'.join(name)} is not in it")
    for name in there:
        if name not in wanted:
            raise _misfit(checkpoint, part, f"it has {'.'.join(name)} beside")
    return jax.tree.map_with_path(lambda path, _: there[_names(path)], like)


def _name(path: Any) -> str:
    return ".".join(_names(path))


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _named(tree: PyTree) -> dict[tuple[str, ...], Any]:
    return {_names(path): x for path, x in jax.tree.leaves_with_path(tree)}


_APART = "~apart"  # the one item of a part whose names are escaped


def _apart(tree: PyTree) -> PyTree:
    """Returns a tree whose arrays Orbax does not mix up: it names each by the names on its path, joined by dots.

    Where two would have one name, such as those of {"a.b": x, "a": {"b": y}}, the names of all dicts are escaped.
    """
    paths = [_names(path) for path, _ in jax.tree.leaves_with_path(tree)]
    if len({".".join(names) for names in paths}) == len(paths):
        return tree
    return {_APART: _renamed(tree, lambda name: name.replace("~", "~0").replace(".", "~1"))}


def _as_named(found: PyTree) -> PyTree:
    if not isinstance(found, dict) or set(found) != {_APART}:
        return found
    return _renamed(found[_APART], lambda name: name.replace("~1", ".").replace("~0", "~"))


def _renamed(tree: PyTree, rename: Callable[[str], str]) -> PyTree:
    is_dict = lambda x: isinstance(x, Mapping)
    inner = lambda x: {rename(str(k)): _renamed(v, rename) for k, v in x.items()} if is_dict(x) else x
    return jax.tree.map(inner, tree, is_leaf=is_dict)


# ---------------------------------------------------------------- details


def saved_steps(directory: Path) -> list[int]:
    """Returns the complete checkpoints of a directory, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit() and (p / FILE).is_file())


def metas(directory: Path) -> dict[int, dict[str, Any]]:
    """Returns `read_meta` of each checkpoint that it can read."""
    found = {n: checkpoint_file.readable(directory / str(n)) for n in saved_steps(directory)}
    return {n: meta for n, meta in found.items() if meta is not None}


def discard(directory: Path) -> None:
    """Deletes a checkpoint so that a process that dies meanwhile leaves nothing that looks complete."""
    gone = directory.with_name(directory.name + ".old" + UNFINISHED)
    directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _checksum(tree: PyTree) -> str:
    """Returns the checksum of all bytes, in the order of the names, so that it does not depend on the containers."""
    value = 0
    named = [(".".join(names), names, x) for names, x in _named(tree).items()]
    for name, _, x in sorted(named, key=lambda one: one[:2]):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, value)
    return f"{value:08x}"


def _misfit(checkpoint: Path, part: str, why: str) -> InputError:
    return InputError(
        f"checkpoint: {checkpoint} does not hold the {part} state that this config needs ({why}): "
        "use the config.yaml of its run, or another checkpoint"
    )


def first_line(e: BaseException) -> str:
    text = str(e.strerror if isinstance(e, OSError) and e.strerror else e).strip()
    return text.splitlines()[0][:200] if text else type(e).__name__


# ---------------------------------------------------------------- arrays of a run


def state_parts(state: LoopState, section: CheckpointConfig, given: MultiAgentConfig | None) -> dict[str, PyTree]:
    """Names what a checkpoint holds of the state that `Program.keep` gave."""
    replay = state.replay if section.replay == "full" else ()
    return {"learner": kept_policies(state.learner, section, given), "replay": replay, "source": state.source}


def kept_policies(learner: PyTree, section: CheckpointConfig, given: MultiAgentConfig | None) -> PyTree:
    """Returns what a checkpoint holds of an algorithm's State: of several policies those that learn, if so told."""
    if section.policies == "all" or not isinstance(learner, dict):
        return learner
    frozen = set(multi_agent.followers(given)) - set(multi_agent.learning(given))
    return {name: one for name, one in learner.items() if name not in frozen}
