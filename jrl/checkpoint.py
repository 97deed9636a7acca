"""Checkpoints: the whole learner state, graph environments, counters and config, written by Orbax.

    with Checkpointer(run_dir / "checkpoints", keep_last=3) as checkpoints:
        checkpoints.save(iteration, {"learner": state}, meta)
    found = locate(path); meta = read_meta(found); state = restore(found, "learner", template)

A save goes to a temporary directory that is renamed when it is complete, and runs beside training. Nothing is pickled.
"""

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.config import RunConfig, to_dict
from jrl.errors import InputError
from jrl.types import PyTree

FORMAT = 1


def meta(cfg: RunConfig, *, counters: Mapping[str, float], environment_state: bool) -> dict[str, Any]:
    """What is stored beside the arrays, as JSON.

    Args:
      cfg: of the run.
      counters: iteration, env_steps, time_s.
      environment_state: whether the environments are part of the checkpoint.
    """
    config = to_dict(cfg)
    text = json.dumps(config, sort_keys=True)
    return {
        "format": FORMAT,
        "jrl": importlib.metadata.version("jrl"),
        "jax": jax.__version__,
        **counters,
        "environment_state": environment_state,
        "config": config,
        "config_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


class Checkpointer:
    """Writes the checkpoints of one run. Use as a context manager: leaving it waits for the save under way."""

    def __init__(self, directory: Path, *, keep_last: int = 3):
        self._directory, self._keep_last = directory.absolute(), keep_last
        self._manager: Any = None
        self.last_saved: int | None = None

    def __enter__(self) -> "Checkpointer":
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._directory / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as e:
            raise InputError(f"run.out: cannot write to {self._directory}: {e.strerror}: choose another --out") from e
        return self

    def __exit__(self, *exc: object) -> None:
        if self._manager is not None:
            self._manager.close()  # waits; a process that ends without it loses the save, or hangs

    def save(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        """Copies the parts of the state, such as "learner", to the host, then writes them in the background."""
        import orbax.checkpoint as ocp  # a second of imports: not before the first save

        if self._manager is None:
            logging.getLogger("absl").setLevel(logging.ERROR)
            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep_last, cleanup_tmp_directories=True)
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        host = jax.tree.map(np.asarray, jax.device_get(dict(parts)))
        arrays = {part: ocp.args.StandardSave(tree) for part, tree in host.items() if jax.tree.leaves(tree)}
        items = ocp.args.Composite(meta=ocp.args.JsonSave(meta), **arrays)
        self._manager.save(iteration, args=items, force=True)
        self.last_saved = iteration

    def wait(self) -> None:
        """Returns once every save is complete."""
        if self._manager is not None:
            self._manager.wait_until_finished()


def locate(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the latest complete one of a run directory.

    Raises:
      InputError: there is none.
    """
    path = path.absolute()
    if not path.exists():
        raise InputError(f"checkpoint: {path} does not exist: give a run directory or a checkpoint inside it")
    if (path / "meta").is_dir() and (path / "learner").is_dir():
        return path
    for parent in (path / "checkpoints", path):
        steps = [p for p in parent.glob("*") if p.name.isdigit() and (p / "meta").is_dir()]
        if steps:
            return max(steps, key=lambda p: int(p.name))
    raise InputError(f"checkpoint: {path} holds no complete checkpoint: give a run directory or a checkpoint inside it")


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Counters and config of a checkpoint.

    Raises:
      InputError: it is not a checkpoint of jrl, or of a later format.
    """
    file = checkpoint / "meta" / "metadata"
    try:
        found = json.loads(file.read_text())
        version = found["format"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"checkpoint: {checkpoint} is damaged or not made by jrl: use an earlier one") from e
    if version > FORMAT:
        raise InputError(f"checkpoint: {checkpoint} has format {version}, this jrl reads up to {FORMAT}: update jrl")
    return found


def restore(checkpoint: Path, part: str, template: PyTree) -> PyTree:
    """One part of a checkpoint, such as "learner", on the host.

    Args:
      checkpoint: from `locate`.
      part: as it was saved.
      template: arrays or ShapeDtypeStructs; a tree without leaves is returned as it is.
    Raises:
      InputError: the checkpoint holds other arrays, or is damaged.
    """
    if not jax.tree.leaves(template):
        return template
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), template)
    try:
        with ocp.StandardCheckpointer() as reader:
            found = reader.restore(checkpoint / part, like)
        # Orbax itself takes an array of another shape where the template is numpy
        for (path, a), b in zip(jax.tree.leaves_with_path(like), jax.tree.leaves(found), strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ValueError(f"{name} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}")
        return found
    except (ValueError, KeyError, TypeError, OSError) as e:
        first = str(e).strip().splitlines()[0][:200] if str(e).strip() else type(e).__name__
        raise InputError(
            f"checkpoint: {checkpoint} does not hold the {part} state that this config needs ({first}): "
            "use the config.yaml of its run, or another checkpoint"
        ) from e


def differences(saved: dict[str, Any], now: RunConfig) -> list[str]:
    """The keys in which two configs differ, as `key: saved -> now`; what does not touch learning is left out."""
    from jrl.schema import flatten

    old, new = flatten(saved), flatten(to_dict(now))
    skip = ("run.out", "run.log", "run.compile_cache", "stop", "checkpoint", "evaluation")
    keys = [k for k in {**old, **new} if not k.startswith(skip)]
    return [f"{k}: {old.get(k)} -> {new.get(k)}" for k in keys if old.get(k) != new.get(k)]
