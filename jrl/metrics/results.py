"""Result rows under RLlib's names, nested as in RLlib."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jrl.spaces import join_paths

# jrl's name -> RLlib's; episode metrics are at the top and under `env_runners`
EPISODES = {
    "episode/return": "episode_return_mean",
    "episode/return_p10": "episode_return_p10",
    "episode/return_p90": "episode_return_p90",
    "episode/return_min": "episode_return_min",
    "episode/return_max": "episode_return_max",
    "episode/length": "episode_len_mean",
    "episode/count": "episodes_this_iter",
}
COUNTS = {
    "env_steps": "num_env_steps_sampled_lifetime",
    "time_s": "time_total_s",
    "timestamp": "timestamp",
    "env_runners/num_healthy_workers": "num_healthy_workers",
}
# first part of jrl's names -> RLlib's section
_SECTIONS = {
    "time": "timers",
    "evaluation": "evaluation",
    "custom": "custom_metrics",
    "league": "league",
    "hist": "hist_stats",
    "perf": "perf",
    "sys": "perf",
    "env_runners": "env_runners",
    "env": "env_runners",
    "rollout": "env_runners",
}
_LISTS = ("evaluation/returns", "evaluation/lengths")
# jrl's name of an evaluation metric -> RLlib's
_EVALUATION = {
    "return": "episode_return_mean",
    "return_std": "episode_return_std",
    "return_min": "episode_return_min",
    "return_max": "episode_return_max",
    "length": "episode_len_mean",
    "episodes": "num_episodes",
}


# RLlib's former name -> its present name
_FORMER = {
    "episode_reward_mean": "episode_return_mean",
    "episode_reward_min": "episode_return_min",
    "episode_reward_max": "episode_return_max",
    "timesteps_total": "num_env_steps_sampled_lifetime",
    "num_env_steps_sampled_this_iter": "num_env_steps_sampled",
    "timesteps_this_iter": "num_env_steps_sampled",
    "num_env_steps_trained_this_iter": "num_env_steps_trained",
}
# with a single agent, agent steps equal environment steps
_SINGLE_AGENT = {
    "agent_timesteps_total": "num_env_steps_sampled_lifetime",
    "num_agent_steps_sampled_lifetime": "num_env_steps_sampled_lifetime",
    "num_agent_steps_sampled": "num_env_steps_sampled",
    "num_agent_steps_trained": "num_env_steps_trained",
    "num_agent_steps_trained_lifetime": "num_env_steps_trained_lifetime",
}
# metric of an agent or policy -> (RLlib's name under `env_runners`, at the top); each is a dict by agent or policy
_AGENT = {
    "return": ("agent_episode_returns_mean", ""),
    "length": ("agent_episode_lens_mean", ""),
    "count": ("agent_episodes_this_iter", ""),
}
_POLICY = {
    "return": ("module_episode_returns_mean", "policy_reward_mean"),
    "return_min": ("module_episode_returns_min", "policy_reward_min"),
    "return_max": ("module_episode_returns_max", "policy_reward_max"),
}
_ALL = "__all_modules__"  # key in `learners` of metrics that are not of one policy


def build_result(
    row: Mapping[str, Any],
    *,
    iteration: int,
    trained: int,
    episodes: int = 0,
    before: Mapping[str, Any] | None,
    trained_before: int = 0,
    collects: bool = True,
    lists: bool = False,
) -> dict[str, Any]:
    """Returns the dict of `Algorithm.train`.

    Args:
      row: row of the loggers.
      iteration: number of the row.
      trained: environment steps learned from so far.
      episodes: episodes that have ended so far.
      before: previous row; None: this is the first.
      trained_before: environment steps learned from until the previous row.
      collects: whether there are environments; otherwise a row counts updates, and no step is sampled.
      lists: whether to keep the returns and lengths of an evaluation's episodes, up to 2,000 numbers.
    """
    learner: dict[str, Any] = {}
    found: dict[str, Any] = {
        "training_iteration": iteration,
        "num_env_steps_trained_lifetime": trained,
        "num_env_steps_trained": trained - trained_before,
        "episodes_total": episodes,
        "num_env_steps_sampled": row["env_steps"] - (before["env_steps"] if before else 0),
        "time_this_iter_s": row["time_s"] - (before["time_s"] if before else 0.0),
        "env_runners": {},
        "learners": {"default_policy": learner},
        "timers": {},
        "custom_metrics": {},
    }
    several = "agent_steps" in row
    if several:
        found["learners"] = {_ALL: learner}
        found |= _count_agent_steps(row, before)
    for name, value in row.items():
        first, _, rest = name.partition("/")
        owner, _, inner = rest.partition("/") if first == "policy" else rest.rpartition("/")
        if several and first in ("agent", "policy"):
            places = (_AGENT if first == "agent" else _POLICY).get(inner, ("", ""))
            for place, key in ((found["env_runners"], places[0]), (found, places[1])):
                if key:
                    place.setdefault(key, {})[owner] = value
            if not any(places) and inner != "window":
                found["learners"].setdefault(owner, {})[inner.removeprefix("learner/")] = value
        elif name in EPISODES:
            found[EPISODES[name]] = found["env_runners"][EPISODES[name]] = value
        elif name in COUNTS:
            found[COUNTS[name]] = value
        elif name in _LISTS and not lists:
            continue
        elif first == "evaluation":
            _add_evaluation_metric(found.setdefault("evaluation", {}), rest, value)
        elif first == "estimate":
            found.setdefault("evaluation", {})
        elif rest and first in _SECTIONS:
            found.setdefault(_SECTIONS[first], {})[rest] = value
        elif name not in ("iteration", "episode/window", "agent_steps"):
            learner[name.removeprefix("learner/")] = value
    if not collects:
        found |= {"num_env_steps_sampled": 0, "num_env_steps_sampled_lifetime": 0}
    if "evaluation" in found:
        found["evaluation"] = _add_former_names(found["evaluation"]) | _build_estimates(row)
    if several:
        found["info"] = {"learner": found["learners"]}
    else:
        found |= {name: found[of] for name, of in _SINGLE_AGENT.items() if of in found}
    return _add_former_names(found)


def _count_agent_steps(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    total = row["agent_steps"]
    now = {"num_agent_steps_sampled": total - (before.get("agent_steps", 0) if before else 0)}
    return {**now, "num_agent_steps_sampled_lifetime": total, "agent_timesteps_total": total}


def _add_former_names(found: dict[str, Any]) -> dict[str, Any]:
    return found | {former: found[name] for former, name in _FORMER.items() if name in found}


def build_evaluation(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an evaluation's metrics under RLlib's names, at the top and under `env_runners`."""
    named: dict[str, Any] = {}
    for name, value in found.items():
        if not name.startswith("estimate/"):
            _add_evaluation_metric(named, name, value)
    named = _add_former_names(named) | _build_estimates(found)
    return {**named, "env_runners": dict(named)}


def _add_evaluation_metric(found: dict[str, Any], name: str, value: Any) -> None:
    kind, _, owner = name.removesuffix("/return").partition("/")
    if owner and kind in ("agent", "policy") and name.endswith("/return"):
        for key in filter(None, (_AGENT if kind == "agent" else _POLICY)["return"]):
            found.setdefault(key, {})[owner] = value
    else:
        found[_EVALUATION.get(name, name)] = value


def _build_estimates(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns off-policy estimates under RLlib's names, `off_policy_estimator`; {}: the row has none.

    RLlib's is and wis weigh each step, as pdis and wpdis do. The latter are therefore copied to RLlib's names, unless
    the row has estimates that weigh whole episodes.
    """
    found: dict[str, dict[str, Any]] = {}
    named = {name.removeprefix("estimate/"): value for name, value in row.items() if name.startswith("estimate/")}
    behavior = {"v_behavior": named.pop("return", None), "ess": named.pop("ess", None)}
    for name, value in named.items():
        method, _, end = name.partition("_")
        found.setdefault(method, dict(behavior))["_".join(filter(None, ("v_target", end)))] = value
    copies = {name: found[own] for own, name in (("pdis", "is"), ("wpdis", "wis")) if own in found}
    return {"off_policy_estimator": copies | found} if found else {}


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested mappings as one, names joined by / and unique (`jrl.spaces.join_paths`).

    >>> flatten({"info": {"learner": {"loss": 0.5}}, "iteration": 3})
    {'info/learner/loss': 0.5, 'iteration': 3}
    """
    found = dict(_leaves(tree, ()))
    return dict(zip(join_paths([*found]), found.values(), strict=True))


def _leaves(tree: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*at, str(name)))
        else:
            yield (*at, str(name)), value


def select_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers and texts of `after` that are new or differ from `before`."""
    nan = lambda x: isinstance(x, float) and math.isnan(x)
    other = lambda k, v: k not in before or not (before[k] is v or before[k] == v or (nan(before[k]) and nan(v)))
    return {k: v for k, v in after.items() if isinstance(v, int | float | str) and other(k, v)}
