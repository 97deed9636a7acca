"""Contents of `checkpoint.json`, beside the arrays of a checkpoint. It may be damaged, or made by anybody.

    write(directory, {"format": 1, "iteration": 3, ...})
    found = read_meta(directory); spaces = spec(found)

A checksum tells what is not as it was written; files without one, of earlier versions, are taken if all they hold is of
the right kind. Sizes are looked at before anything is made of them.
"""

import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from jrl.config import RunConfig, to_dict, with_present_names
from jrl.errors import InputError
from jrl.host.machine import version
from jrl.spaces_json import plain, space_from_json, space_to_json
from jrl.types import EnvSpec, Tuple

FORMAT = 1
FILE = "checkpoint.json"
_CHECKSUM = "sha256"
_DEPTH = 64  # of nested brackets; configs and spaces of users have a handful
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


# ---------------------------------------------------------------- the file


def meta(cfg: RunConfig, spec: EnvSpec, *, counters: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """Returns the description of a checkpoint: format, versions, counters, config and spaces.

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
        "jrl": version("jrl"),
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
            **({"agents": list(spec.agents)} if spec.agents else {}),
            **({"kinds": [list(kind) for kind in spec.kinds]} if spec.kinds else {}),
        },
        **more,
    }


def write(directory: Path, content: Mapping[str, Any]) -> None:
    """Writes the file; it is on disk once this returns."""
    content = json.loads(json.dumps(plain(content), allow_nan=False))  # what reading will give
    with (directory / FILE).open("w") as file:
        json.dump({**content, _CHECKSUM: _checksum(content)}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_meta(checkpoint: Path, *, resumable: bool = False) -> dict[str, Any]:
    """Reads counters, config and spaces of a checkpoint.

    Args:
      checkpoint: from `jrl.run.store.checkpoint.locate`.
      resumable: it has to hold what a run needs to go on.
    Raises:
      InputError: it is not a checkpoint of jrl, is damaged, or of a later format.
    """
    try:
        return _load(checkpoint, resumable)
    except InputError:
        raise
    except (*_DAMAGE, OSError) as e:
        other = next((path for path in others(checkpoint) if readable(path)), None)
        raise damaged(checkpoint, _why(e), other) from e


def _load(checkpoint: Path, resumable: bool) -> dict[str, Any]:
    found = json.loads((checkpoint / FILE).read_text())
    if not isinstance(found, dict):
        raise ValueError("expected a mapping")
    version = found.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(f"format: expected a whole number, got {str(version)[:40]!r}")
    if version > FORMAT:
        raise InputError(f"checkpoint: {checkpoint} has format {version}, this jrl reads up to {FORMAT}: update jrl")
    checksum = found.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(found):
        raise ValueError("it is not what was written")
    _check_depth(found)
    _schema(resumable).validate_python(found)
    spec(found)
    found["config"] = _renewed(found["config"])
    return found


def _why(e: BaseException) -> str:
    if isinstance(e, RecursionError):
        return "nested too deep"
    if isinstance(e, OSError):
        return e.strerror or str(e)
    if hasattr(e, "errors"):  # of pydantic
        first = e.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(e, KeyError):
        return f"{e} is missing"
    return (str(e).splitlines() or [type(e).__name__])[0][:200]


def _check_depth(tree: Any) -> None:
    level = [tree]
    for _ in range(_DEPTH):
        inner = [list(x.values()) if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for part in inner for x in part]
        if not level:
            return
    raise ValueError("nested too deep")


@functools.cache
def _schema(resumable: bool) -> Any:
    from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, create_model

    count = Annotated[StrictInt, Field(ge=0, lt=2**62)]
    kind = ConfigDict(extra="allow", strict=True)
    model = lambda name, **fields: create_model(name, __config__=kind, **fields)
    needed = lambda of: (of, ...)
    optional = lambda of: (of, None)
    pending = model(
        "pending",
        iteration=needed(count), env_steps=needed(count), agent_steps=optional(count),
        metrics=needed(dict[str, Any]), episodes=needed(dict[str, Any]),
    )  # fmt: skip
    rows = model(
        "rows",
        env_steps=needed(count), extra=needed(dict[str, Any]), pending=(pending | None, ...),
        count=optional(count), trained=optional(count), episodes=optional(count),
    )  # fmt: skip
    spaces = model(
        "spec",
        observation=needed(dict[str, Any]), action=needed(dict[str, Any]),
        env_action=(dict[str, Any] | None, ...), env_observation=optional(dict[str, Any] | None),
        max_episode_steps=(count | None, ...), agents=optional(list[StrictStr]),
        kinds=optional(list[list[count]]),
    )  # fmt: skip
    more = needed if resumable else optional  # debug bundles have less
    fields = {
        "iteration": needed(Annotated[StrictInt, Field(ge=0, lt=2**32)]), "env_steps": needed(count),
        "time_s": more(Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)]),
        "config": needed(dict[str, Any]), "spec": needed(spaces),
        "checksums": optional(dict[str, StrictStr]), "devices": more(Annotated[StrictInt, Field(ge=1, lt=2**20)]),
        "agent_steps": optional(count),
        "counted": more(count), "rows": more(rows), "metrics": optional(dict[str, Any]), "keep": optional(StrictBool),
        "guarantee": optional(StrictStr), "nonfinite": optional(dict[str, Any]),
        "data": optional(dict[str, StrictStr]), "met": optional(dict[str, StrictFloat | StrictInt]),
    }  # fmt: skip
    return TypeAdapter(model("checkpoint", **fields))


def damaged(checkpoint: Path, why: str, other: Path | None) -> InputError:
    """Returns the error of a damaged checkpoint.

    Args:
      checkpoint: the directory.
      why: what shows it.
      other: checkpoint of the run that can be used instead.
    """
    mend = f"use another one, such as {other}" if other else "use that of another run: none beside it is whole"
    return InputError(f"checkpoint: {checkpoint} is damaged or not made by jrl ({why}): {mend}")


def others(checkpoint: Path) -> list[Path]:
    """Returns the other checkpoints in its directory, the latest first."""
    if not checkpoint.name.isdigit() or not checkpoint.parent.is_dir():
        return []
    numbers = (int(p.name) for p in checkpoint.parent.iterdir() if p.name.isdigit() and (p / FILE).is_file())
    return [checkpoint.parent / str(n) for n in sorted(numbers, reverse=True) if str(n) != checkpoint.name]


def readable(checkpoint: Path) -> dict[str, Any] | None:
    """Returns `read_meta` of a checkpoint; None where it would raise."""
    try:
        return _load(checkpoint, False)
    except (*_DAMAGE, OSError):
        return None


def best(checkpoints: Mapping[int, Mapping[str, Any]], name: str | None, mode: str) -> int | None:
    """Finds the number of the checkpoint with the best metric, of equals the earlier; None if none has it."""
    sign = -1 if mode == "max" else 1
    score = {n: sign * number((m.get("metrics") or {}).get(name)) for n, m in checkpoints.items()}
    known = [n for n, value in score.items() if math.isfinite(value)]
    return min(known, key=lambda n: (score[n], n)) if known else None


def number(x: Any) -> float:
    """Reads a metric; anything but a number is NaN."""
    try:
        return float(x)
    except (TypeError, ValueError):
        return math.nan


# fields of an algorithm's State before it was the same of all algorithms -> where they are now
MOVED = {
    "target_critic": ("target_params", "critic"),
    "kl_coef": ("own", "kl_coef"),
    "noise": ("own", "noise"),
    "policy_loss": ("own", "policy_loss"),
    "policy_metrics": ("own", "policy_metrics"),
}


def renewed_state(found: Any) -> Any:
    """Moves the fields of a State, in dicts, to their present places."""
    if not isinstance(found, dict) or "params" not in found or "env_steps" not in found:
        return found
    state = {"updates": np.zeros((), np.uint32), **found}
    for old in MOVED.keys() & found.keys():
        field, name = MOVED[old]
        state[field] = {**state.get(field, {}), name: state.pop(old)}
    return state


def _renewed(config: dict[str, Any]) -> dict[str, Any]:
    """Changes a stored config in place to the present names of keys of earlier versions."""
    if (devices := config.get("run", {}).pop("devices", 1)) > 1:
        config["devices"] = {"learners": list(range(devices))}
    if "episodes" in (evaluation := config.get("evaluation", {})):
        evaluation["duration"] = evaluation.pop("episodes")
    return dict(with_present_names(config))


# ---------------------------------------------------------------- spaces


def spec(meta: Mapping[str, Any]) -> EnvSpec:
    """Returns the spaces that a checkpoint was trained in, for one environment, and its agents: names and kinds."""
    found = meta["spec"]
    optional = lambda space: None if space is None else space_from_json(space)
    env_action = optional(found["env_action"])
    own = optional(found.get("env_observation"))  # checkpoints of earlier versions have no such entry
    observation, action = space_from_json(found["observation"]), space_from_json(found["action"])
    agents = tuple(found.get("agents", ()))
    kinds = tuple(map(tuple, found.get("kinds", ())))
    if kinds:
        if sorted(k for kind in kinds for k in kind) != list(range(len(agents))):
            raise ValueError(f"spec: kinds {list(kinds)} do not name each of {len(agents)} agents once")
        parts = [space for space in (observation, action, env_action, own) if space is not None]
        if not all(isinstance(space, Tuple) and len(space.items) == len(kinds) for space in parts):
            raise ValueError(f"spec: expected tuples of {len(kinds)} spaces, one for each kind of agents")
    limit = found["max_episode_steps"]
    return EnvSpec(observation, action, max(1, len(agents)), limit, env_action, own, agents, kinds)
