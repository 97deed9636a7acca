"""File `checkpoint.json` beside the arrays of a checkpoint. The file may be damaged, or come from anybody.

    write(directory, {"format": 1, "iteration": 3, ...})
    meta = read_meta(directory); spaces = read_spec(meta)

A checksum detects changes. Files of earlier versions have no checksum and are accepted if all values have valid types.
Sizes are checked before anything is built from them.
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
_MAX_DEPTH = 64  # nested brackets; configs and spaces of users have a handful
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


# ---------------------------------------------------------------- the file


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


def write(directory: Path, content: Mapping[str, Any]) -> None:
    """Writes the file and flushes it to disk."""
    content = json.loads(json.dumps(plain(content), allow_nan=False))  # as read back, for the checksum
    with (directory / FILE).open("w") as file:
        json.dump({**content, _CHECKSUM: _checksum(content)}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_meta(checkpoint: Path, *, resumable: bool = False) -> dict[str, Any]:
    """Returns counters, config and spaces of a checkpoint.

    Args:
      checkpoint: directory from `jrl.run.store.checkpoint.locate`.
      resumable: require the entries that a run needs to continue.
    Raises:
      InputError: the directory is not a checkpoint of jrl, is damaged, or has a later format.
    """
    try:
        return _read_file(checkpoint, resumable)
    except InputError:
        raise
    except (*_DAMAGE, OSError) as e:
        other = next((path for path in list_others(checkpoint) if try_read_meta(path)), None)
        raise damaged_error(checkpoint, _describe_error(e), other) from e


def _read_file(checkpoint: Path, resumable: bool) -> dict[str, Any]:
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
        raise ValueError("its checksum differs")
    _check_depth(found)
    _schema(resumable).validate_python(found)
    read_spec(found)
    found["config"] = _rename_keys(found["config"])
    return found


def _describe_error(e: BaseException) -> str:
    if isinstance(e, RecursionError):
        return "nested too deep"
    if isinstance(e, OSError):
        return e.strerror or str(e)
    if hasattr(e, "errors"):  # pydantic
        first = e.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(e, KeyError):
        return f"{e} is missing"
    return (str(e).splitlines() or [type(e).__name__])[0][:200]


def _check_depth(tree: Any) -> None:
    level = [tree]
    for _ in range(_MAX_DEPTH):
        inner = [list(x.values()) if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for part in inner for x in part]
        if not level:
            return
    raise ValueError("nested too deep")


@functools.cache
def _schema(resumable: bool) -> Any:
    from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, create_model

    count = Annotated[StrictInt, Field(ge=0, lt=2**62)]
    strict = ConfigDict(extra="allow", strict=True)
    model = lambda name, **fields: create_model(name, __config__=strict, **fields)
    needed = lambda kind: (kind, ...)
    optional = lambda kind: (kind, None)
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
    resume_needs = needed if resumable else optional  # debug bundles lack these entries
    fields = {
        "iteration": needed(Annotated[StrictInt, Field(ge=0, lt=2**32)]), "env_steps": needed(count),
        "time_s": resume_needs(Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)]),
        "config": needed(dict[str, Any]), "spec": needed(spaces),
        "checksums": optional(dict[str, StrictStr]),
        "devices": resume_needs(Annotated[StrictInt, Field(ge=1, lt=2**20)]),
        "agent_steps": optional(count),
        "counted": resume_needs(count), "rows": resume_needs(rows),
        "metrics": optional(dict[str, Any]), "keep": optional(StrictBool),
        "guarantee": optional(StrictStr), "nonfinite": optional(dict[str, Any]),
        "data": optional(dict[str, StrictStr]), "met": optional(dict[str, StrictFloat | StrictInt]),
    }  # fmt: skip
    return TypeAdapter(model("checkpoint", **fields))


def damaged_error(checkpoint: Path, why: str, other: Path | None) -> InputError:
    """Returns the error of a damaged checkpoint.

    Args:
      checkpoint: directory of the checkpoint.
      why: reason.
      other: intact checkpoint of the same run; None: there is none.
    """
    fix = f"use another one, such as {other}" if other else "use that of another run: this run has no intact checkpoint"
    return InputError(f"checkpoint: {checkpoint} is damaged or not made by jrl ({why}): {fix}")


def list_others(checkpoint: Path) -> list[Path]:
    """Returns the other checkpoints of the same run, the latest first."""
    if not checkpoint.name.isdigit() or not checkpoint.parent.is_dir():
        return []
    numbers = (int(p.name) for p in checkpoint.parent.iterdir() if p.name.isdigit() and (p / FILE).is_file())
    return [checkpoint.parent / str(n) for n in sorted(numbers, reverse=True) if str(n) != checkpoint.name]


def try_read_meta(checkpoint: Path) -> dict[str, Any] | None:
    """Returns the result of `read_meta`; None if `read_meta` raises."""
    try:
        return _read_file(checkpoint, False)
    except (*_DAMAGE, OSError):
        return None


def find_best(checkpoints: Mapping[int, Mapping[str, Any]], name: str | None, mode: str) -> int | None:
    """Returns the number of the checkpoint with the best metric, the earliest of equals; None: no such metric."""
    sign = -1 if mode == "max" else 1
    score = {n: sign * to_number((m.get("metrics") or {}).get(name)) for n, m in checkpoints.items()}
    known = [n for n, value in score.items() if math.isfinite(value)]
    return min(known, key=lambda n: (score[n], n)) if known else None


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


# ---------------------------------------------------------------- spaces


def read_spec(meta: Mapping[str, Any]) -> EnvSpec:
    """Returns the spec of a checkpoint's environments, for one environment."""
    found = meta["spec"]
    optional = lambda space: None if space is None else space_from_json(space)
    env_action = optional(found["env_action"])
    env_observation = optional(found.get("env_observation"))  # missing in checkpoints of earlier versions
    observation, action = space_from_json(found["observation"]), space_from_json(found["action"])
    agents = tuple(found.get("agents", ()))
    kinds = tuple(map(tuple, found.get("kinds", ())))
    if kinds:
        if sorted(k for kind in kinds for k in kind) != list(range(len(agents))):
            raise ValueError(f"spec: kinds {list(kinds)} do not name each of {len(agents)} agents once")
        parts = [space for space in (observation, action, env_action, env_observation) if space is not None]
        if not all(isinstance(space, Tuple) and len(space.items) == len(kinds) for space in parts):
            raise ValueError(f"spec: expected tuples of {len(kinds)} spaces, one for each kind of agents")
    limit = found["max_episode_steps"]
    return EnvSpec(observation, action, max(1, len(agents)), limit, env_action, env_observation, agents, kinds)
