"""Checkpoints: a directory of arrays, written by Orbax, with counters, config and spaces in `checkpoint.json`.

    with Checkpointer(run_dir / "checkpoints", keep_last=3) as checkpoints:
        checkpoints.save(iteration, {"learner": state}, meta)
    found = locate(path); meta = read_meta(found); state = restore(found, "learner", template)

A save goes to a temporary directory that is renamed when it is complete, and runs beside training. Nothing is pickled.
`checkpoint.json` is read by `jrl.run.checkpoint_file`, which trusts nothing of it.
"""

import concurrent.futures
import contextlib
import errno
import logging
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from jrl.errors import InputError
from jrl.host import files
from jrl.run import checkpoint_file
from jrl.run.checkpoint_file import FILE, FORMAT, meta, read_meta, spec
from jrl.settings.config import CheckpointConfig
from jrl.types import PyTree

__all__ = [
    "FORMAT", "Checkpointer", "damaged", "exists", "fitting", "locate", "meta", "on_host", "read",
    "read_meta", "restore", "run_of", "spec", "write",
]  # fmt: skip

Renew = Callable[[PyTree, PyTree], PyTree]
_OVERHEAD = 1_000_000  # bytes of a checkpoint beside its arrays
_UNFINISHED = ".unfinished"  # suffix of what is being written or deleted


class Checkpointer:
    """Writes the checkpoints of one run. Use as a context manager: leaving it waits for the save under way.

    Args:
      directory: of the checkpoints.
      keep: which of them stay.
      pool: that writes, which is shut down by whoever gives it; None: a thread of its own.
    """

    def __init__(
        self,
        directory: Path,
        keep: CheckpointConfig | None = None,
        pool: concurrent.futures.ThreadPoolExecutor | None = None,
    ):
        self._directory, self._keep = files.absolute(directory), keep or CheckpointConfig()
        self._reserve, self._room = files.Reserve(self._directory / f"reserve{_UNFINISHED}"), 0
        self._spent: int | None = None  # the checkpoint that took the room that was kept, while there is no other
        self._own_pool = pool is None
        self._pool = pool or concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self.last_saved: int | None = None

    def __enter__(self) -> "Checkpointer":
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._directory / f"probe{_UNFINISHED}"
            probe.touch()
            probe.unlink()
            self._reserve.release()
            for left in self._directory.glob(f"*{_UNFINISHED}"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        except OSError as e:
            raise files.unwritable(self._directory, e) from e
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if self._own_pool:
                self._pool.shutdown()  # waits: a process that ended now would lose the save
            self._reserve.release()

    def reserve(self, parts: Mapping[str, PyTree]) -> bool:
        """Keeps room on the disk for one more checkpoint of these parts; returns whether there is that much."""
        self._room = _size(parts) + _OVERHEAD // 2
        return self._reserve.keep(self._room)

    def make_room(self) -> bool:
        """Gives up the room that was kept; returns whether there was any."""
        return self._reserve.release()

    def save(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        """Copies the parts of the state, such as "learner", to the host, then writes them in the background.

        Args:
          iteration: names the checkpoint. Later ones in the directory are of a run that was gone back on: they go.
          parts: name -> tree of arrays; one without arrays is left out.
          meta: see `meta`; with `keep_best_by` it has the metric under "metrics".
        Raises:
          InputError: this save or the one before it could not be written.
        """
        self.wait()
        self._pending = self._pool.submit(self._write, iteration, on_host(parts), dict(meta))
        self.last_saved = iteration

    def wait(self) -> None:
        """Returns once every save is complete.

        Raises:
          InputError: the save could not be written. What was there before stays.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except (OSError, ValueError) as e:
                self.last_saved = None
                raise InputError(
                    f"checkpoint: cannot write to {self._directory}: {_first_line(e)}: "
                    "earlier checkpoints are complete: free space, then continue with --resume"
                ) from e

    def check(self) -> None:
        """Reports a save that has ended; does not wait for one that is under way.

        Raises:
          InputError: it could not be written; or it is complete, but took the room that was kept and left none to keep
            for another.
        """
        if self._pending is not None and self._pending.done():
            self.wait()
        if self._spent is not None:
            raise InputError(
                f"checkpoint: the disk of {self._directory} is full: checkpoint {self._spent} took the room that was "
                "kept for a last one, and is complete: free space, then continue with --resume"
            )

    def rescue(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> bool:
        """Saves what a failing run has learned, in the kept room if there is no other; returns whether it could."""
        with contextlib.suppress(InputError):
            self.wait()  # the save before this one may be what failed
        if self.last_saved == iteration:
            return True
        self.make_room()
        try:
            self.save(iteration, parts, meta)
            self.wait()
        except InputError:
            return False
        return True

    def improves(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether a checkpoint with these metrics would be the best by `checkpoint.keep_best_by`."""
        name = self._keep.keep_best_by
        if name is None or not math.isfinite(checkpoint_file.number(metrics.get(name))):
            return False
        self.wait()
        mine = 1 + max(known := _metas(self._directory), default=0)
        return checkpoint_file.best({**known, mine: {"metrics": metrics}}, name, self._keep.keep_best) == mine

    def _write(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        spent = self._spent
        try:
            self._write_in(iteration, parts, meta)
        except (OSError, ValueError) as e:
            if not files.no_room(e) or not self.make_room():
                raise
            self._write_in(iteration, parts, meta)
            spent = iteration
        if self._room and self._reserve.keep(self._room):  # what was deleted may have made some
            spent = None
        self._spent = spent

    def _write_in(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        earlier = {n: m for n, m in _metas(self._directory).items() if n < iteration}
        every = self._keep.keep_every
        before = max((m["env_steps"] for m in earlier.values()), default=-1)
        meta["keep"] = every is not None and meta["env_steps"] // every > before // every
        target = self._directory / str(iteration)
        unfinished = self._directory / f"{iteration}{_UNFINISHED}"
        try:
            write(unfinished, parts, meta)
            if target.exists():
                _discard(target)
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        files.sync(self._directory)
        for n in _steps(self._directory):
            if n > iteration:
                _discard(self._directory / str(n))
        every_meta = {**earlier, iteration: meta}
        latest = sorted(every_meta)[-self._keep.keep_last :]
        best = checkpoint_file.best(every_meta, self._keep.keep_best_by, self._keep.keep_best)
        for n, m in every_meta.items():
            if n not in latest and n != best and not m.get("keep"):
                _discard(self._directory / str(n))


def on_host(parts: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Copies for `write`; a part without arrays is left out."""
    kept = {part: tree for part, tree in parts.items() if jax.tree.leaves(tree)}
    return jax.tree.map(lambda x: np.array(x, copy=True), jax.device_get(kept))


def write(directory: Path, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
    """Writes the arrays of `parts` and `meta` to a new directory; complete once this returns."""
    directory = directory.absolute()  # which Orbax asks for
    import orbax.checkpoint as ocp  # a second of imports: not before the first save

    for name in ("absl", "asyncio"):  # what fails is raised as well, once
        logging.getLogger(name).setLevel(logging.CRITICAL)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    needed, free = _size(parts), shutil.disk_usage(directory).free
    if free < needed:  # before a hundred threads find out
        raise OSError(
            errno.ENOSPC, f"{needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free", str(directory.parent)
        )
    try:
        for part, tree in parts.items():
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
                writer.save(directory / part, args=ocp.args.StandardSave(tree))
    except ValueError as e:
        if not files.no_room(e):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory.parent)) from e
    checkpoint_file.write(directory, {**meta, "checksums": {part: _checksum(tree) for part, tree in parts.items()}})
    files.sync(directory)


def _size(parts: Mapping[str, PyTree]) -> int:
    """Returns the bytes that a checkpoint takes at most."""
    return sum(x.nbytes for x in jax.tree.leaves(parts)) + _OVERHEAD


def locate(path: Path, *, best: bool | None = False) -> Path:
    """Returns the checkpoint that `path` means: itself, or the latest complete one of a run directory.

    Args:
      best: of a run directory, the best by the run's `checkpoint.keep_best_by`; None: the best if any has that metric.
    Raises:
      InputError: there is none.
    """
    path = files.absolute(path)
    if not path.exists():
        raise InputError(f"checkpoint: {path} does not exist: give a run directory or a checkpoint inside it")
    if (path / FILE).is_file():
        return path
    for parent in (path / "checkpoints", path):
        steps = _steps(parent)
        if steps and best is False:
            return parent / str(steps[-1])
        if steps:
            keep = read_meta(parent / str(steps[-1]))["config"].get("checkpoint", {})
            by = keep.get("keep_best_by")
            found = checkpoint_file.best(_metas(parent), by, keep.get("keep_best", "max"))
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
    return (directory / FILE).is_file() or any(_steps(parent) for parent in (directory / "checkpoints", directory))


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
        raise damaged(checkpoint, f"its {part}: {_first_line(e)}") from e
    if part == "learner":
        found = checkpoint_file.renewed_state(found)
    if renew is not None:
        found = renew(found, like)
    return found if like is None else _in_structure(checkpoint, part, found, like)


def damaged(checkpoint: Path, why: str) -> InputError:
    """Returns the error of a damaged checkpoint; it names the latest other one that is whole."""
    return checkpoint_file.damaged(checkpoint, why, next(filter(_is_whole, checkpoint_file.others(checkpoint)), None))


def _whole(checkpoint: Path, part: str, checksum: str) -> PyTree:
    """Reads the arrays of a part. Raises whatever shows that they are not what was written."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    with _quiet(), ocp.StandardCheckpointer() as reader:
        described = reader.metadata(checkpoint / part).item_metadata
        if described is None:
            raise ValueError("its files cannot be read")
        size = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(described.tree))
        if size > (there := psutil.virtual_memory().total):
            raise ValueError(f"it would take {size / 2**30:,.0f} GiB of memory, of {there / 2**30:,.0f} GiB")
        found = reader.restore(checkpoint / part)
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


# what rounding has lost of a sum (`ops.sums`) -> the sum
BESIDE = {"mean_rest": "mean", "m2_rest": "m2", "return_rest": "episode_return"}


def _in_structure(checkpoint: Path, part: str, found: PyTree, like: PyTree) -> PyTree:
    """Returns `found` in the containers of `like`, by the names of arrays; parts empty there may be missing in `found`.

    What older checkpoints do not hold yet is 0, in the shape of the array that it stands beside.

    Raises:
      InputError: other names.
    """
    there, wanted = _named(found), _named(like)
    for name in wanted:
        beside = ".".join(BESIDE.get(part, part) for part in name.split("."))
        if name not in there and beside in there:
            there[name] = np.zeros_like(there[beside])
        if name not in there:
            raise _misfit(checkpoint, part, f"{name} is not in it")
    for name in there:
        if name not in wanted:
            raise _misfit(checkpoint, part, f"it has {name} beside")
    return jax.tree.map_with_path(lambda path, _: there[_name(path)], like)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _named(tree: PyTree) -> dict[str, Any]:
    return {_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


# ---------------------------------------------------------------- details


def _steps(directory: Path) -> list[int]:
    """Returns the complete checkpoints of a directory, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit() and (p / FILE).is_file())


def _metas(directory: Path) -> dict[int, dict[str, Any]]:
    """Returns `read_meta` of each checkpoint that it can read."""
    found = {n: checkpoint_file.readable(directory / str(n)) for n in _steps(directory)}
    return {n: meta for n, meta in found.items() if meta is not None}


def _discard(directory: Path) -> None:
    """Deletes a checkpoint so that a process that dies meanwhile leaves nothing that looks complete."""
    gone = directory.with_name(directory.name + ".old" + _UNFINISHED)
    directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _checksum(tree: PyTree) -> str:
    """Returns the checksum of all bytes, in the order of the names, so that it does not depend on the containers."""
    value = 0
    for name, x in sorted(_named(tree).items()):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, value)
    return f"{value:08x}"


def _misfit(checkpoint: Path, part: str, why: str) -> InputError:
    return InputError(
        f"checkpoint: {checkpoint} does not hold the {part} state that this config needs ({why}): "
        "use the config.yaml of its run, or another checkpoint"
    )


def _first_line(e: BaseException) -> str:
    text = str(e.strerror if isinstance(e, OSError) and e.strerror else e).strip()
    return text.splitlines()[0][:200] if text else type(e).__name__
