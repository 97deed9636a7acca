"""Checkpoint: a directory of arrays, written by Orbax, and `checkpoint.json` with counters, config and spaces.

    directory = locate(path); meta = read_meta(directory); state = restore(directory, "learner", template)

`jrl.run.store.writer` writes the checkpoints of a run. Nothing is pickled. `checkpoint.json` is written last, after the
arrays were read back: a directory that contains `checkpoint.json` can be restored. Checksums detect changes of arrays
and description; files of the first versions have no checksum of the description.
"""

import contextlib
import errno
import hashlib
import json
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

from jrl.config import CheckpointConfig, MultiAgentConfig, RunConfig, multi_agent, to_dict, with_present_names
from jrl.errors import InputError
from jrl.fields.paths import resolve
from jrl.host import files
from jrl.host.machine import version
from jrl.learn.program import LoopState
from jrl.spaces_json import plain, space_from_json, space_to_json
from jrl.types import EnvSpec, PyTree

FORMAT = 1
FILE = "checkpoint.json"
_CHECKSUM = "sha256"
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
# entries of the file, and the further entries that a run needs to continue
_ENTRIES = {"iteration": int, "env_steps": int, "config": dict, "spec": dict}
_RESUMABLE = {"counted": int, "devices": int, "time_s": float, "rows": dict}
NOT_WEIGHTS = ("opt_state", "env_steps", "updates")  # fields of a State that are not weights
Renew = Callable[[PyTree, PyTree], PyTree]
UNFINISHED = ".unfinished"  # suffix of directories during writing and deletion
_READ_BACK = 2**28  # maximum bytes of a part that is compared after writing, which needs the memory twice
# Orbax globs the whole path: a directory named `x[1]` is not found, and `a*b` also matches `acb`
_PATTERN = re.compile(r"[*?\[\]\\]" if os.sep == "/" else r"[*?\[\]]")


def copy_to_host(parts: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Returns copies of the parts for `write`, without parts that have no arrays."""
    kept = {part: tree for part, tree in parts.items() if jax.tree.leaves(tree)}
    return jax.tree.map(lambda x: np.array(x, copy=True), jax.device_get(kept))


def write(directory: Path, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
    """Writes the arrays of `parts` and `meta` to a new directory, and flushes them to disk.

    Raises:
      OSError: the directory cannot be written, or the files cannot be read back.
    """
    directory = directory.absolute()  # Orbax needs an absolute path
    import orbax.checkpoint as ocp  # a second of imports: not before the first save

    for name in ("absl", "asyncio"):  # failures are raised, too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        with _without_pattern(directory) as target:
            for part, tree in parts.items():
                with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
                    writer.save(target / part, args=ocp.args.StandardSave(_escape_names(tree)))
    except ValueError as e:
        if not files.is_disk_full(e):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory.parent)) from e
    checksums = {part: _checksum(tree) for part, tree in parts.items()}
    for part, tree in parts.items():
        try:
            _read_whole(directory, part, checksums[part] if _nbytes(tree) <= _READ_BACK else None)
        except Exception as e:  # any error of Orbax
            why = f"the files cannot be read back: {first_line(e)}"
            raise OSError(errno.EIO, why, str(directory / part)) from e
    write_meta(directory, {**meta, "checksums": checksums})
    files.sync(directory)


@contextlib.contextmanager
def _without_pattern(directory: Path) -> Iterator[Path]:
    """Yields a path of `directory` that Orbax can list: a link, if the path itself is a glob pattern."""
    if not _PATTERN.search(str(directory)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="jrl-checkpoint-") as place:
        link = Path(place) / "link"
        link.symlink_to(directory, target_is_directory=True)
        yield link


def _nbytes(tree: PyTree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def locate(path: Path, *, best: bool | None = False) -> Path:
    """Returns `path` if it is a checkpoint; of a run directory, the latest complete checkpoint.

    Args:
      path: checkpoint or run directory.
      best: of a run directory, True: the best checkpoint by the run's `checkpoint.keep_best_by`; None: the best, or the
        latest if no checkpoint has that metric.
    Raises:
      InputError: there is no such checkpoint.
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
            number = find_best(metas(parent), by, keep.get("keep_best", "max"))
            if number is None and best:
                raise InputError(
                    f"checkpoint: no checkpoint of {path} has the metric of its checkpoint.keep_best_by "
                    f"({by or 'null'}): leave out --best"
                )
            return parent / str(steps[-1] if number is None else number)
    fix = "give a run directory or a checkpoint inside it"
    if (path / "config.yaml").is_file():
        fix = f"the run ended before its first checkpoint: restart it with train --out {path} --resume auto"
    raise InputError(f"checkpoint: {path} holds no complete checkpoint: {fix}")


def exists(directory: Path) -> bool:
    """Returns whether a directory is a complete checkpoint, or a run directory with a complete checkpoint."""
    return (directory / FILE).is_file() or any(saved_steps(parent) for parent in (directory / "checkpoints", directory))


def find_run_directory(path: Path) -> Path | None:
    """Returns the run directory of a run or checkpoint; None: a checkpoint outside of a run directory."""
    if not (path / FILE).is_file():
        return path.parent if path.name == "checkpoints" else path
    return path.parent.parent if path.parent.name == "checkpoints" else None


def restore(checkpoint: Path, part: str, template: PyTree, renew: Renew | None = None) -> PyTree:
    """Returns one part of a checkpoint, such as "learner", on the host. Raises as `read` and `check_fits`.

    Args:
      template: arrays or ShapeDtypeStructs; a tree without leaves is returned unchanged.
      renew: see `read`.
    """
    if not jax.tree.leaves(template):
        return template
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), template)
    return check_fits(checkpoint, part, read(checkpoint, part, like, renew), like)


def check_fits(checkpoint: Path, part: str, found: PyTree, like: PyTree) -> PyTree:
    """Returns `found`, if its arrays have the shapes and dtypes of `like`.

    Raises:
      InputError: shapes or dtypes differ. Orbax accepts another shape where the template is numpy.
    """
    for (path, a), b in zip(jax.tree.leaves_with_path(like), jax.tree.leaves(found), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise _misfit_error(
                checkpoint, part, f"{_name(path)} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
            )
    return found


def read(checkpoint: Path, part: str, like: PyTree = None, renew: Renew | None = None) -> PyTree:
    """Returns the arrays of one part as they were saved.

    Args:
      like: tree of the wanted structure; None: dicts and lists.
      renew: (saved tree as dicts, like) -> saved tree in the layout of this version.
    Raises:
      InputError: the part is missing, has another structure, or is damaged.
    """
    known = read_meta(checkpoint).get("checksums", {})
    if part not in known:
        raise _misfit_error(checkpoint, part, "it holds " + (", ".join(known) or "nothing"))
    try:
        found = _read_whole(checkpoint, part, known[part])
    # any fault of unchecked files; without a template, every structure fits
    except (Exception, MemoryError) as e:
        raise damaged_error(checkpoint, f"its {part}: {first_line(e)}") from e
    if part == "learner":
        found = move_renamed_fields(found)
    if renew is not None:
        found = renew(found, like)
    return found if like is None else _restructure(checkpoint, part, found, like)


def damaged_error(checkpoint: Path, why: str) -> InputError:
    """Returns the error of a damaged checkpoint, which names the latest other intact checkpoint of the run."""
    others = reversed(saved_steps(checkpoint.parent)) if checkpoint.name.isdigit() else ()
    paths = (checkpoint.parent / str(n) for n in others if str(n) != checkpoint.name)
    other = next(filter(_is_intact, paths), None)
    fix = f"use another one, such as {other}" if other else "use that of another run: this run has no intact checkpoint"
    return InputError(f"checkpoint: {checkpoint} is damaged or not made by jrl ({why}): {fix}")


def _read_whole(checkpoint: Path, part: str, checksum: str | None) -> PyTree:
    """Reads the arrays of a part; without a checksum only their description. Raises any error if they are damaged."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    with _mute_event_loop(), _without_pattern(checkpoint.absolute()) as place, ocp.StandardCheckpointer() as reader:
        described = reader.metadata(place / part).item_metadata
        if described is None:
            raise ValueError("its files cannot be read")
        if checksum is None:
            return None
        found = _unescape_names(reader.restore(place / part))
    if _checksum(found) != checksum:
        raise ValueError("its checksum differs")
    return found


@contextlib.contextmanager
def _mute_event_loop() -> Iterator[None]:
    """Mutes the message that tensorstore calls the event loop that Orbax has closed after an error."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda e: None if "Event loop is closed" in str(e.exc_value) else before(e)
    yield
    sys.unraisablehook = before  # not after an error: the calls come late


def _is_intact(checkpoint: Path) -> bool:
    try:
        for part, checksum in _read_file(checkpoint, False)["checksums"].items():
            _read_whole(checkpoint, part, checksum)
    except (Exception, MemoryError):
        return False
    return True


# rounding error of a sum (`ops.scans`) -> name of the sum
SUM_OF_REST = {"mean_rest": "mean", "m2_rest": "m2", "return_rest": "episode_return"}


def _restructure(checkpoint: Path, part: str, found: PyTree, like: PyTree) -> PyTree:
    """Returns the arrays of `found` in the containers of `like`, matched by name.

    Rounding errors of sums, which older checkpoints lack, are 0.

    Raises:
      InputError: names differ.
    """
    saved, wanted = _by_name(found), _by_name(like)
    for name in wanted:
        sum_name = tuple(SUM_OF_REST.get(part, part) for part in name)
        if name not in saved and sum_name in saved:
            saved[name] = np.zeros_like(saved[sum_name])
        if name not in saved:
            raise _misfit_error(checkpoint, part, f"{'.'.join(name)} is not in it")
    for name in saved:
        if name not in wanted:
            raise _misfit_error(checkpoint, part, f"it also has {'.'.join(name)}")
    return jax.tree.map_with_path(lambda path, _: saved[_path_names(path)], like)


def _name(path: Any) -> str:
    return ".".join(_path_names(path))


def _path_names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _by_name(tree: PyTree) -> dict[tuple[str, ...], Any]:
    return {_path_names(path): x for path, x in jax.tree.leaves_with_path(tree)}


_ESCAPED = "~apart"  # the only item of a part whose names are escaped


def _escape_names(tree: PyTree) -> PyTree:
    """Returns a tree in which Orbax's names of arrays, the paths joined by dots, are unique.

    If two names are equal, as of {"a.b": x, "a": {"b": y}}, the names in all dicts are escaped.
    """
    paths = [_path_names(path) for path, _ in jax.tree.leaves_with_path(tree)]
    if len({".".join(names) for names in paths}) == len(paths):
        return tree
    return {_ESCAPED: _rename_dicts(tree, lambda name: name.replace("~", "~0").replace(".", "~1"))}


def _unescape_names(found: PyTree) -> PyTree:
    if not isinstance(found, dict) or set(found) != {_ESCAPED}:
        return found
    return _rename_dicts(found[_ESCAPED], lambda name: name.replace("~1", ".").replace("~0", "~"))


def _rename_dicts(tree: PyTree, rename: Callable[[str], str]) -> PyTree:
    is_dict = lambda x: isinstance(x, Mapping)
    inner = lambda x: {rename(str(k)): _rename_dicts(v, rename) for k, v in x.items()} if is_dict(x) else x
    return jax.tree.map(inner, tree, is_leaf=is_dict)


# ---------------------------------------------------------------- directories and checksums


def saved_steps(directory: Path) -> list[int]:
    """Returns the numbers of the complete checkpoints of a directory, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit() and (p / FILE).is_file())


def metas(directory: Path) -> dict[int, dict[str, Any]]:
    """Returns number -> description of each readable checkpoint of a directory."""
    found = {n: try_read_meta(directory / str(n)) for n in saved_steps(directory)}
    return {n: meta for n, meta in found.items() if meta is not None}


def delete(directory: Path) -> None:
    """Deletes a checkpoint; an interrupted deletion leaves no checkpoint that looks complete."""
    renamed = directory.with_name(directory.name + ".old" + UNFINISHED)
    directory.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def _checksum(tree: PyTree) -> str:
    """Returns the checksum of all bytes, in the order of the names: containers do not matter."""
    value = 0
    named = [(".".join(names), names, x) for names, x in _by_name(tree).items()]
    for name, _, x in sorted(named, key=lambda item: item[:2]):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, value)
    return f"{value:08x}"


def _misfit_error(checkpoint: Path, part: str, why: str) -> InputError:
    return InputError(
        f"checkpoint: {checkpoint} does not hold the {part} state that this config needs ({why}): "
        "use the config.yaml of its run, or another checkpoint"
    )


def first_line(e: BaseException) -> str:
    text = str(e.strerror if isinstance(e, OSError) and e.strerror else e).strip()
    return text.splitlines()[0][:200] if text else type(e).__name__


# ---------------------------------------------------------------- checkpoint.json


def build_meta(cfg: RunConfig, spec: EnvSpec, *, counters: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """Returns the description of a checkpoint: format, versions, counters, config and spaces.

    Args:
      cfg: config of the run.
      spec: spec of the environments.
      counters: iteration, env_steps, time_s.
      more: further entries; numbers that are not finite become strings.
    """
    config = to_dict(cfg)
    text = json.dumps(config, sort_keys=True)
    to_json = lambda space: None if space is None else space_to_json(space)
    return {
        "format": FORMAT,
        "jrl": version("jrl"),
        "jax": jax.__version__,
        **counters,
        "config": config,
        "config_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
        "spec": {
            "observation": to_json(spec.observation),
            "action": to_json(spec.action),
            "env_action": to_json(spec.env_action),
            "env_observation": to_json(spec.env_observation),
            "max_episode_steps": spec.max_episode_steps,
            **({"agents": list(spec.agents)} if spec.agents else {}),
            **({"kinds": [list(kind) for kind in spec.kinds]} if spec.kinds else {}),
        },
        **more,
    }


def write_meta(directory: Path, content: Mapping[str, Any]) -> None:
    """Writes `checkpoint.json` and flushes it to disk."""
    content = json.loads(json.dumps(plain(content), allow_nan=False))  # as read back, for the checksum
    with (directory / FILE).open("w") as file:
        json.dump({**content, _CHECKSUM: _hash(content)}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_meta(checkpoint: Path, *, resumable: bool = False) -> dict[str, Any]:
    """Returns counters, config and spaces of a checkpoint.

    Args:
      checkpoint: directory from `locate`.
      resumable: require the entries that a run needs to continue.
    Raises:
      InputError: the directory is not a checkpoint of jrl, is damaged, or has a later format.
    """
    try:
        return _read_file(checkpoint, resumable)
    except InputError:
        raise
    except KeyError as e:
        raise damaged_error(checkpoint, f"{e} is missing") from e
    except (*_DAMAGE, OSError) as e:
        raise damaged_error(checkpoint, first_line(e)) from e


def try_read_meta(checkpoint: Path) -> dict[str, Any] | None:
    """Returns the result of `read_meta`; None if `read_meta` raises."""
    try:
        return _read_file(checkpoint, False)
    except (*_DAMAGE, OSError):
        return None


def _read_file(checkpoint: Path, resumable: bool) -> dict[str, Any]:
    found = json.loads((checkpoint / FILE).read_text())
    version = found.get("format")
    if type(version) is not int:
        raise ValueError(f"format: expected a whole number, got {str(version)[:40]!r}")
    if version > FORMAT:
        raise InputError(f"checkpoint: {checkpoint} has format {version}, this jrl reads up to {FORMAT}: update jrl")
    checksum = found.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _hash(found):
        raise ValueError("its checksum differs")
    for name, kind in (_ENTRIES | _RESUMABLE if resumable else _ENTRIES).items():
        if not isinstance(found[name], kind):
            raise ValueError(f"{name}: expected {kind.__name__}, got {str(found[name])[:40]!r}")
    read_spec(found)
    found["config"] = _rename_keys(found["config"])
    return found


def find_best(checkpoints: Mapping[int, Mapping[str, Any]], name: str | None, mode: str) -> int | None:
    """Returns the number of the checkpoint with the best metric, the latest of equals; None: no such metric."""
    sign = -1 if mode == "max" else 1
    score = {n: sign * to_number((m.get("metrics") or {}).get(name)) for n, m in checkpoints.items()}
    known = [n for n, value in score.items() if math.isfinite(value)]
    return min(known, key=lambda n: (score[n], -n)) if known else None


def to_number(x: Any) -> float:
    """Returns a metric as a float; NaN if it is not a number."""
    try:
        return float(x)
    except (TypeError, ValueError):
        return math.nan


# fields of a State in earlier versions -> present path
MOVED = {
    "target_critic": ("target_params", "critic"),
    "kl_coef": ("own", "kl_coef"),
    "noise": ("own", "noise"),
    "policy_loss": ("own", "policy_loss"),
    "policy_metrics": ("own", "policy_metrics"),
}


def move_renamed_fields(saved: Any) -> Any:
    """Returns a saved State, as dicts, with the field names of this version."""
    if not isinstance(saved, dict) or "params" not in saved or "env_steps" not in saved:
        return saved
    state = {"updates": np.zeros((), np.uint32), **saved}
    for old in MOVED.keys() & saved.keys():
        field, name = MOVED[old]
        state[field] = {**state.get(field, {}), name: state.pop(old)}
    return state


def _rename_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a stored config with the keys of this version; changes `config` in place."""
    if (devices := config.get("run", {}).pop("devices", 1)) > 1:
        config["devices"] = {"learners": list(range(devices))}
    if "episodes" in (evaluation := config.get("evaluation", {})):
        evaluation["duration"] = evaluation.pop("episodes")
    return dict(with_present_names(config))


def read_spec(meta: Mapping[str, Any]) -> EnvSpec:
    """Returns the spec of a checkpoint's environments, for one environment."""
    found = meta["spec"]
    optional = lambda space: None if space is None else space_from_json(space)
    env_action = optional(found["env_action"])
    env_observation = optional(found.get("env_observation"))  # missing in checkpoints of earlier versions
    observation, action = space_from_json(found["observation"]), space_from_json(found["action"])
    agents = tuple(found.get("agents", ()))
    kinds = tuple(map(tuple, found.get("kinds", ())))
    limit = found["max_episode_steps"]
    return EnvSpec(observation, action, max(1, len(agents)), limit, env_action, env_observation, agents, kinds)


# ---------------------------------------------------------------- arrays of a run


def state_parts(state: LoopState, section: CheckpointConfig, given: MultiAgentConfig | None) -> dict[str, PyTree]:
    """Names what a checkpoint holds of the state that `Program.keep` gave."""
    replay = state.replay if section.replay == "full" else ()
    return {"learner": kept_policies(state.learner, section, given), "replay": replay, "source": state.source}


def kept_policies(learner: PyTree, section: CheckpointConfig, given: MultiAgentConfig | None) -> PyTree:
    """Returns the State that a checkpoint stores: with `checkpoint.policies: trainable`, the policies that learn."""
    if section.policies == "all" or not isinstance(learner, dict):
        return learner
    frozen = set(multi_agent.followers(given)) - set(multi_agent.learning(given))
    return {name: one for name, one in learner.items() if name not in frozen}
