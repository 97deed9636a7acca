"""The environment's id as the argument of `jrl train`: messages, the budget, and the YAML of the choice."""

import argparse
import difflib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jrl import config
from jrl.auto import ruleset
from jrl.auto.facts import inspect_in_child
from jrl.errors import InputError, shown
from jrl.fields import schema, shipped

MINUTES = 10.0  # default budget
_LEAST_MINUTES, _MOST_MINUTES = 0.1, 100_000.0
_STEPS = 1_000_000_000  # more than any budget allows: the time ends the run
_ROWS = 100  # result rows in a run
_OPTIONS = ("algo", "env", "rllib", "resume", "drop")  # options that belong to a config


class Chosen(NamedTuple):
    data: dict[str, Any]  # plain data of the config
    yaml: str  # the same, with the reason of each value


def choose_config(given: str, args: argparse.Namespace) -> Chosen:
    """Returns the config for an environment's id, after inspecting the environment. Prints the facts and the reasons.

    Args:
      given: argument of `jrl train` that does not name a config.
      args: options of `jrl train`.
    Raises:
      InputError: no environment has this name, an option does not go with an id, or the environment cannot be made or
        stepped.
    """
    began = time.monotonic()
    if wrong := [name for name in _OPTIONS if getattr(args, name)]:
        flag = {"rllib": "config"}.get(wrong[0], wrong[0])
        fix = f"leave it out, or choose the settings yourself: --algo ppo --env {given} --stop env_steps=100000"
        raise InputError(f"--{flag}: expected no such option beside {given}, an environment's id: {fix}")
    if any(text.partition("=")[0].strip() == "algo.name" for text in args.overrides):
        fix = f"leave it out, or choose the settings yourself: --algo ppo --env {given} --stop env_steps=100000"
        raise InputError(f"--set algo.name: expected no such key beside {given}, whose algorithm is chosen: {fix}")
    minutes = MINUTES if args.minutes is None else args.minutes
    if not _LEAST_MINUTES <= minutes <= _MOST_MINUTES:
        raise InputError(f"--minutes: expected a number in [{_LEAST_MINUTES:g}, {_MOST_MINUTES:,.0f}], got {minutes:g}")
    own = [text for text in args.overrides if text.lstrip().startswith("env.")]
    env = config.override({"algo": {"name": "ppo"}, "env": {"id": given}}, own).env
    _check_id(env.id)
    print(f"inspecting {given}", flush=True)
    facts = inspect_in_child(env)
    choice = ruleset.choose({**facts, "minutes": minutes})
    print(*describe(facts), sep="\n")
    print("chosen:", *(f"  {reason}" for reason in choice.reasons), sep="\n", flush=True)
    seconds = max(1, round(60 * minutes - (time.monotonic() - began)))
    data = schema.merge(choice.data, _budget(given, facts, seconds))
    header = f"# Settings of `jrl train {given} --minutes {minutes:g}`. config.yaml has all settings, --set included.\n"
    return Chosen(data, header + schema.dump(data, choice.origins))


def _check_id(id: str) -> None:
    """Raises InputError: no backend has this id."""
    from jrl.envs import backends

    try:
        backends.resolve(id)
    except InputError as e:
        near = difflib.get_close_matches(id[:80], shipped.names(), 3)
        hint = f": did you mean {' or '.join(near)}?" if near else " (`jrl config list` has the names)"
        raise InputError(f"{shown(id)}: there is no such config{hint}", *e.errors) from None


def _budget(id: str, facts: Mapping[str, Any], seconds: int) -> dict[str, Any]:
    return {
        "env": {"id": id, "backend": facts["backend"]},
        "run": {"report_every_s": round(seconds / _ROWS, 2)},
        "stop": {"env_steps": _STEPS, "time_s": seconds},
    }


def describe(facts: Mapping[str, Any]) -> list[str]:
    """Returns the facts in words, a line for each subject."""
    agents = f"{facts['agents']} agents, " if facts["agents"] > 1 else ""
    masks = ", with masks" if facts["mask"] else ""
    arrays = f" in {facts['arrays']} arrays" if facts["arrays"] > 1 else ""
    end = f"at most {facts['limit']} steps" if facts["limit"] else "no limit"
    played = "" if facts["return"] is None else f", return {facts['return']:g}"
    return [
        f"environment: {facts['backend']}, {facts['steps_per_s']:,} steps per second ({facts['device']})",
        f"  {agents}{facts['action']} actions ({facts['actions']}){masks}",
        f"  observations: {facts['observation']}, {facts['elements']:,} numbers{arrays}",
        f"  episodes: {end}; random actions: {facts['length']:g} steps{played}",
        f"  rewards: {facts['reward']}, deviation {facts['reward_std']:g}",
    ]
