"""Parts around the config in a tuned example: algorithm, environment, stop criteria, checkpoints."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jrl.errors import InputError, short
from jrl.fields.bounds import INT64, is_number
from jrl.migrate.job import Job, shown
from jrl.migrate.tables import GROUPS
from jrl.settings import metric_names

_OUTER = {name for key in GROUPS["Experiment"] for name in key.names if name != "algo_class"}


@dataclasses.dataclass(frozen=True)
class Experiment:
    algo: str | None
    algo_key: str  # where it was named
    config: dict[str, Any]
    outer: dict[str, Any]  # what stands beside the config


def is_experiment(body: Any) -> bool:
    """Returns whether this is the value under the name of a tuned example."""
    if not isinstance(body, Mapping):
        return False
    return isinstance(body.get("run", body.get("algo")), str) or (
        "env" in body and isinstance(body.get("config"), Mapping)
    )


def experiment(data: Mapping[str, Any], name: str | None = None) -> Experiment:
    """Returns the parts of a tuned example, of one experiment, or of a config dict.

    Args:
      name: which of several.
    Raises:
      InputError: there are several and none is named, or there is none of that name.
    """
    names = [str(key) for key in data]
    if names and all(is_experiment(body) for body in data.values()):
        if name is None and len(names) > 1:
            raise InputError(f"there are {len(names)} experiments, {', '.join(names)}: choose one with --name")
        if name is not None and name not in names:
            raise InputError(f"--name {name}: unknown experiment: choose one of {', '.join(names)}")
        data = data[name or names[0]]
    inner = data.get("config", {})
    if not isinstance(inner, Mapping):
        raise InputError(f"config: expected a mapping, got {short(inner)}")
    outer = {str(k): v for k, v in data.items() if str(k) in _OUTER}
    rest = {k: v for k, v in data.items() if str(k) not in _OUTER and k != "config"}
    config = {**rest, **inner}
    named = {"run": outer.get("run"), "algo": outer.get("algo"), "algo_class": config.pop("algo_class", None)}
    key = next((k for k, v in named.items() if isinstance(v, str)), "run")
    return Experiment(named[key] if isinstance(named[key], str) else None, key, config, outer)


def conditions(job: Job, found: Experiment) -> None:
    """Translates stop criteria, checkpoints and Tune's keys."""
    flat: dict[str, Any] = {}
    for key, value in found.outer.items():
        if key in ("checkpoint_config",) and isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": given for inner, given in value.items()}
        else:
            flat[key] = value
    for key, value in flat.items():
        last = key.rpartition(".")[2]
        if key in ("run", "algo"):
            if key != job.origins["algo.name"]:
                job.drop(key, f"{job.origins['algo.name']} is given, too")
            continue
        if value is None:
            job.drop(key, "null: not set")
        elif key == "stop" and isinstance(value, Mapping):
            _stop(job, value)
        elif key == "stop":
            job.wrong(key, "a mapping of metrics to numbers", value)
        elif last in ("checkpoint_freq", "checkpoint_frequency"):
            _checkpoints(job, key, value)
        elif last in ("keep_checkpoints_num", "num_to_keep"):
            job.put(key, "checkpoint.keep_last", value)
        elif last in ("checkpoint_score_attr", "checkpoint_score_attribute"):
            _best(job, key, value)
        elif last == "checkpoint_score_order":
            job.put(key, "checkpoint.keep_best", value)
        else:
            job.drop(key, next((k.note for k in GROUPS["Experiment"] if key in k.names), "of Tune"))


def _stop(job: Job, criteria: Mapping[str, Any]) -> None:
    steps: dict[str, int] = {}
    budget = "updates" if job.from_data else "env_steps"
    for name, value in criteria.items():
        key, ours = f"stop.{name}", metric_names.ours(str(name))
        if not is_number(value) or not -INT64 <= value <= INT64:
            job.wrong(key, "a number", value)
        elif name == "training_iteration":
            each = job.sizes.iteration(job)
            steps[key] = int(value) * each
            job.lines.append(f"{key} -> stop.{budget}: {steps[key]}  ({value:g} iterations of {job.steps(each)})")
        elif ours == "env_steps" and job.from_data:
            steps[key] = job.sizes.updates_of(job, value, trained="trained" in name)
            job.lines.append(f"{key} -> stop.{budget}: {steps[key]}  (of {job.sizes.drawn} rows)")
        elif ours == "env_steps":
            steps[key] = int(value)
            job.lines.append(f"{key} -> stop.env_steps: {steps[key]}")
        elif ours is not None:
            job.tree.setdefault("stop", {})[ours] = value
            job.origins[f"stop.{ours}"] = key
            note = "  (of the episodes since the last row)" if ours.startswith("episode/return_") else ""
            job.lines.append(f"{key} -> stop.{ours}: {shown(value)}{note}")
        else:
            job.drop(key, "no metric of jrl's result rows: see docs/config.md")
    if steps:
        first = min(steps, key=lambda k: steps[k])
        job.tree.setdefault("stop", {})[budget] = steps[first]
        job.origins[f"stop.{budget}"] = first
        if len(steps) > 1:
            job.lines.append(f"stop.{budget}: {steps[first]}, the first of {len(steps)} that is reached")


def _checkpoints(job: Job, key: str, value: Any) -> None:
    if not value:
        return job.drop(key, f"{value}: jrl keeps one every 5 minutes and at the end")
    if not isinstance(value, int):
        return job.wrong(key, "a whole number", value)
    each = job.sizes.iteration(job)
    return job.put(key, "checkpoint.every", value * each, f"{value} iterations of {job.steps(each)}")


def _best(job: Job, key: str, value: Any) -> None:
    name = str(value)
    ours = metric_names.ours(name.removeprefix("min-"))
    if ours is None:
        job.drop(key, f"{name} is no metric of jrl's result rows")
    else:
        job.put(key, "checkpoint.keep_best_by", ours)
    if ours is not None and name.startswith("min-"):
        job.put(key, "checkpoint.keep_best", "min")


__all__ = ["Experiment", "conditions", "experiment", "is_experiment"]
