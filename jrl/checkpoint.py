"""Checkpoints: a directory of arrays, written by Orbax, with counters, config and spaces in `checkpoint.json`.

    with Checkpointer(run_dir / "checkpoints", keep_last=3) as checkpoints:
        checkpoints.save(iteration, {"learner": state}, meta)
    found = locate(path); meta = read_meta(found); state = restore(found, "learner", template)

A save goes to a temporary directory that is renamed when it is complete, and runs beside training. Nothing is pickled.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.config import CheckpointConfig, RunConfig, to_dict
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, PyTree, Space, Tuple

FORMAT = 1
Renew = Callable[[PyTree, PyTree], PyTree]
_FILE = "checkpoint.json"
_OVERHEAD = 1_000_000  # bytes of a checkpoint beside its arrays
_UNFINISHED = ".unfinished"  # suffix of a directory that is being written or deleted


def meta(cfg: RunConfig, spec: EnvSpec, *, counters: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """What is stored beside the arrays, as JSON.

    Args:
      cfg: of the run.
      spec: of its environments.
      counters: iteration, env_steps, time_s.
      more: further entries; numbers that are not finite become strings.
    """
    config = to_dict(cfg)
    text = json.dumps(config, sort_keys=True)
    written = lambda space: None if space is None else space_to_json(space)
    return {
        "format": FORMAT,
        "jrl": importlib.metadata.version("jrl"),
        "jax": jax.__version__,
        **counters,
        "config": config,
        "config_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
        "spec": {
            "observation": written(spec.observation),
            "action": written(spec.action),
            "env_action": written(spec.env_action),
            "env_observation": written(spec.env_observation),
            "max_episode_steps": spec.max_episode_steps,
        },
        **more,
    }


def spec(meta: Mapping[str, Any]) -> EnvSpec:
    """The spaces that a checkpoint was trained in, for one environment."""
    found = meta["spec"]
    env_action = None if found["env_action"] is None else _space_from_json(found["env_action"])
    observation, action = _space_from_json(found["observation"]), _space_from_json(found["action"])
    return EnvSpec(observation, action, 1, found["max_episode_steps"], env_action)


def env_observation(meta: Mapping[str, Any]) -> Space | None:
    """The environment's own observation space, where the policy sees another; None: it sees the environment's."""
    found = meta["spec"].get("env_observation")  # checkpoints of earlier versions have no such entry
    return None if found is None else _space_from_json(found)


class Checkpointer:
    """Writes the checkpoints of one run. Use as a context manager: leaving it waits for the save under way."""

    def __init__(self, directory: Path, keep: CheckpointConfig | None = None):
        self._directory, self._keep = directory.absolute(), keep or CheckpointConfig()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self.last_saved: int | None = None

    def __enter__(self) -> "Checkpointer":
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._directory / f"probe{_UNFINISHED}"
            probe.touch()
            probe.unlink()
            for left in self._directory.glob(f"*{_UNFINISHED}"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        except OSError as e:
            raise InputError(f"run.out: cannot write to {self._directory}: {e.strerror}: choose another --out") from e
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown()  # waits: a process that ended now would lose the save

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
            except (OSError, ValueError) as e:  # tensorstore has errors of its own kind for a full disk
                raise InputError(
                    f"checkpoint: cannot write to {self._directory}: {_first_line(e)}: "
                    "earlier checkpoints are complete: free space, then continue with --resume"
                ) from e

    def _write(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        earlier = {n: read_meta(self._directory / str(n)) for n in _steps(self._directory) if n < iteration}
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
        _sync(self._directory)
        for n in _steps(self._directory):
            if n > iteration:
                _discard(self._directory / str(n))
        every_meta = {**earlier, iteration: meta}
        latest = sorted(every_meta)[-self._keep.keep_last :]
        best = _best(every_meta, self._keep.keep_best_by, self._keep.keep_best)
        for n, m in every_meta.items():
            if n not in latest and n != best and not m.get("keep"):
                _discard(self._directory / str(n))


def on_host(parts: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Copies for `write`; a part without arrays is left out."""
    kept = {part: tree for part, tree in parts.items() if jax.tree.leaves(tree)}
    return jax.tree.map(lambda x: np.array(x, copy=True), jax.device_get(kept))


def write(directory: Path, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
    """Writes the arrays of `parts` and `meta` to a new directory; complete once this returns."""
    import orbax.checkpoint as ocp  # a second of imports: not before the first save

    for name in ("absl", "asyncio"):  # what fails is raised as well, once
        logging.getLogger(name).setLevel(logging.CRITICAL)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    needed, free = sum(x.nbytes for x in jax.tree.leaves(parts)) + _OVERHEAD, shutil.disk_usage(directory).free
    if free < needed:  # before a hundred threads find out
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free")
    for part, tree in parts.items():
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(directory / part, args=ocp.args.StandardSave(tree))
    content = {**meta, "checksums": {part: _checksum(tree) for part, tree in parts.items()}}
    with (directory / _FILE).open("w") as file:
        json.dump(_plain(content), file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    _sync(directory)


def locate(path: Path, *, best: bool = False) -> Path:
    """The checkpoint that `path` means: itself, or the latest complete one of a run directory.

    Args:
      best: of a run directory, the best by the run's `checkpoint.keep_best_by`.
    Raises:
      InputError: there is none.
    """
    path = path.absolute()
    if not path.exists():
        raise InputError(f"checkpoint: {path} does not exist: give a run directory or a checkpoint inside it")
    if (path / _FILE).is_file():
        return path
    for parent in (path / "checkpoints", path):
        steps = _steps(parent)
        if steps and not best:
            return parent / str(steps[-1])
        if steps:
            metas = {n: read_meta(parent / str(n)) for n in steps}
            keep = metas[steps[-1]]["config"]["checkpoint"]
            found = _best(metas, keep["keep_best_by"], keep["keep_best"])
            if found is None:
                raise InputError(f"checkpoint: {path} was not trained with checkpoint.keep_best_by: leave out --best")
            return parent / str(found)
    raise InputError(f"checkpoint: {path} holds no complete checkpoint: give a run directory or a checkpoint inside it")


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Counters, config and spaces of a checkpoint.

    Raises:
      InputError: it is not a checkpoint of jrl, or of a later format.
    """
    try:
        found = json.loads((checkpoint / _FILE).read_text())
        version = found["format"]
        if not isinstance(version, int):
            raise ValueError(f"format {version!r}")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"checkpoint: {checkpoint} is damaged or not made by jrl: use an earlier one") from e
    if version > FORMAT:
        raise InputError(f"checkpoint: {checkpoint} has format {version}, this jrl reads up to {FORMAT}: update jrl")
    _renamed(found.get("config", {}))
    return found


def _renamed(config: dict[str, Any]) -> None:
    """Brings names of earlier versions in a stored config to the present ones."""
    if (devices := config.get("run", {}).pop("devices", 1)) > 1:
        config["devices"] = {"learners": list(range(devices))}
    if "episodes" in (evaluation := config.get("evaluation", {})):
        evaluation["duration"] = evaluation.pop("episodes")


def restore(checkpoint: Path, part: str, template: PyTree, renew: Renew | None = None) -> PyTree:
    """One part of a checkpoint, such as "learner", on the host.

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
    like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), template)
    return fitting(checkpoint, part, read(checkpoint, part, like, renew), like)


def fitting(checkpoint: Path, part: str, found: PyTree, like: PyTree) -> PyTree:
    """`found`, if its arrays have the shapes and dtypes of `like`.

    Raises:
      InputError: they have not. Orbax itself takes an array of another shape where the template is numpy.
    """
    for (path, a), b in zip(jax.tree.leaves_with_path(like), jax.tree.leaves(found), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise _misfit(checkpoint, part, f"{_name(path)} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}")
    return found


def read(checkpoint: Path, part: str, like: PyTree = None, renew: Renew | None = None) -> PyTree:
    """The arrays of one part as they were saved: in the structure of `like`, or without it in dicts and lists.

    Args:
      checkpoint: from `locate`.
      part: as it was saved.
      like: see above.
      renew: from what was saved, in dicts, and `like` to what this version would have saved.
    Raises:
      InputError: the part is not there, has another structure, or is damaged.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    known = read_meta(checkpoint).get("checksums", {})
    if part not in known:
        raise _misfit(checkpoint, part, "it holds " + (", ".join(known) or "nothing"))
    try:
        with ocp.StandardCheckpointer() as reader:
            found = reader.restore(checkpoint / part)
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise _misfit(checkpoint, part, _first_line(e)) from e
    if _checksum(found) != known[part]:
        raise InputError(f"checkpoint: {checkpoint} is damaged: its {part} is not what was written: use an earlier one")
    if renew is not None:
        found = renew(found, like)
    return found if like is None else _in_structure(checkpoint, part, found, like)


# what rounding has lost of a sum (`ops.sums`) -> the sum
_BESIDE = {"mean_rest": "mean", "m2_rest": "m2", "return_rest": "episode_return"}


def _in_structure(checkpoint: Path, part: str, found: PyTree, like: PyTree) -> PyTree:
    """`found` in the containers of `like`, by the names of the arrays: what is empty there need not be in `found`.

    What older checkpoints do not hold yet is 0, in the shape of the array that it stands beside.

    Raises:
      InputError: other names.
    """
    there, wanted = _named(found), _named(like)
    for name in wanted:
        beside = ".".join(_BESIDE.get(part, part) for part in name.split("."))
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


def differences(saved: dict[str, Any], now: RunConfig) -> list[str]:
    """The keys in which two configs differ, as `key: saved -> now`; what does not touch learning is left out."""
    from jrl.schema import flatten

    old, new = flatten(saved), flatten(to_dict(now))
    skip = ("run.out", "run.log", "run.compile_cache", "stop", "checkpoint", "evaluation")
    keys = [k for k in {**old, **new} if not k.startswith(skip)]
    return [f"{k}: {old.get(k)} -> {new.get(k)}" for k in keys if old.get(k) != new.get(k)]


# ---------------------------------------------------------------- details


def _steps(directory: Path) -> list[int]:
    """The complete checkpoints of a directory, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit() and (p / _FILE).is_file())


def _best(checkpoints: Mapping[int, Mapping[str, Any]], name: str | None, mode: str) -> int | None:
    """The one with the best metric, of equals the earlier; None if none has it."""
    sign = -1 if mode == "max" else 1
    score = {n: sign * float(m.get("metrics", {}).get(name, math.nan)) for n, m in checkpoints.items()}
    known = [n for n, value in score.items() if math.isfinite(value)]
    return min(known, key=lambda n: (score[n], n)) if known else None


def _discard(directory: Path) -> None:
    """Deletes it so that a process that dies meanwhile leaves nothing that looks complete."""
    gone = directory.with_name(directory.name + ".old" + _UNFINISHED)
    directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sync(directory: Path) -> None:
    """The directory's entries are on disk; where directories cannot be opened, as on Windows, the system decides."""
    with contextlib.suppress(PermissionError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _checksum(tree: PyTree) -> str:
    """Of all bytes, in the order of the names, so that it does not depend on the containers."""
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


def _plain(tree: Any) -> Any:
    """JSON has no numbers that are not finite: `float` reads them from these strings."""
    if isinstance(tree, Mapping):
        return {k: _plain(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(v) for v in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return str(tree)
    return tree


def space_to_json(space: Space) -> dict[str, Any]:
    """A space as JSON: `kind` and its fields; Dict and Tuple have their parts under `spaces`, by name or in a list."""
    match space:
        case Dict():
            return {"kind": "Dict", "spaces": {name: space_to_json(part) for name, part in space.items}}
        case Tuple():
            return {"kind": "Tuple", "spaces": [space_to_json(part) for part in space.items]}
    return {"kind": type(space).__name__, **vars(space)}


def _space_from_json(found: Mapping[str, Any]) -> Space:
    number = lambda x: tuple(map(float, x)) if isinstance(x, list) else float(x)
    match found:
        case {"kind": "Discrete", "n": n, "dtype": dtype}:
            return Discrete(n, dtype)
        case {"kind": "MultiDiscrete", "nvec": nvec, "dtype": dtype}:
            return MultiDiscrete(tuple(nvec), dtype)
        case {"kind": "MultiBinary", "shape": shape, "dtype": dtype}:
            return MultiBinary(tuple(shape), dtype)
        case {"kind": "Box", "shape": shape, "dtype": dtype, "low": low, "high": high}:
            return Box(tuple(shape), dtype, number(low), number(high))
        case {"kind": "Dict", "spaces": dict(parts)}:
            return Dict(tuple((name, _space_from_json(part)) for name, part in parts.items()))
        case {"kind": "Tuple", "spaces": list(parts)}:
            return Tuple(tuple(map(_space_from_json, parts)))
    raise InputError(f"checkpoint: unknown space {found}: update jrl")
