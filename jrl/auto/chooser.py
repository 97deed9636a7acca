"""The environment's id as the argument of `jrl train`: messages, the budget, and the YAML of the choice."""

import argparse
import difflib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jrl import config
from jrl.auto import ruleset, trials
from jrl.auto.facts import inspect_in_child
from jrl.errors import InputError, shown
from jrl.fields import schema, shipped
from jrl.host import files

MINUTES = 10.0  # default budget
_LEAST_MINUTES, _MOST_MINUTES = 0.1, 100_000.0
_STEPS = 1_000_000_000  # more than any budget allows: the time ends the run
_ROWS = 100  # result rows in a run
_OPTIONS = ("algo", "env", "rllib", "resume", "drop")  # options that belong to a config
_WITHOUT_TRIALS = ("stop", "seeds", "until", "rows", "init_from", "as_test")  # options of a run that has another end
_TRIALS_SHARE = 0.3  # part of the budget
_LEAST_TRIAL_S = 10.0  # training time of a trial


class Chosen(NamedTuple):
    id: str  # environment
    facts: dict[str, Any]
    choice: ruleset.Choice
    end: float  # time.monotonic() at which the budget is used up
    candidates: dict[str, ruleset.Choice]  # configs that short runs compare; empty: none do

    @property
    def seconds(self) -> int:
        """Rest of the budget."""
        return max(1, round(self.end - time.monotonic()))

    def data(self, seconds: int) -> dict[str, Any]:
        """Returns the plain data of a config that trains for `seconds`."""
        return schema.merge(self.choice.data, _budget(self.id, self.facts, seconds))

    def yaml(self, data: Any) -> str:
        """Returns the plain data of a config as YAML with the reason of each value."""
        header = f"# Settings of `jrl train {self.id}`. config.yaml has all settings, --set included.\n"
        return header + schema.dump(data, self.choice.origins)


def choose_config(given: str, args: argparse.Namespace) -> Chosen:
    """Returns the choice for an environment's id, after inspecting the environment. Prints the facts and the reasons.

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
    end = began + 60 * minutes
    candidates = ruleset.choose_trials({**facts, "minutes": minutes}, choice)
    if len(candidates) < 2 or any(getattr(args, name) for name in _WITHOUT_TRIALS):
        candidates = {}
    return Chosen(given, facts, choice, end, candidates)


def run_trials(chosen: Chosen, args: argparse.Namespace, name: str) -> tuple[Chosen, dict[str, Any]]:
    """Trains each candidate for a short time, and makes `args` continue the best one, for at least as long.

    Args:
      chosen: choice with candidates.
      args: options of `jrl train`; `out` and `resume` are set.
      name: name of a new directory below `runs`, without `--out`.
    Returns:
      The choice of the best candidate, and the data of its config, whose seconds include those of the trial.
    Raises:
      InputError: the directory holds a run, or all trials failed.
    """
    directory = Path(args.out) if args.out else files.make_numbered(Path("runs") / name)
    if (directory / "config.yaml").exists() or (directory / trials.DIRECTORY).exists():
        raise InputError(f"--out: {directory} holds a run already: choose another one")
    at_once = trials.count_at_once(chosen.facts["device"])
    rounds = math.ceil(len(chosen.candidates) / at_once)
    seconds = max(_LEAST_TRIAL_S, _TRIALS_SHARE * chosen.seconds / rounds)
    print(f"{len(chosen.candidates)} trials of {seconds:.0f} s, of which the best one continues:")
    print(*(f"  {key}: {one.reasons[-1]}" for key, one in chosen.candidates.items() if key != "rules"), sep="\n")
    each = {key: chosen._replace(choice=one) for key, one in chosen.candidates.items()}
    texts = {key: one.yaml(one.data(chosen.seconds)) for key, one in each.items()}
    best = trials.run(directory, texts, args.overrides, seconds, at_once)
    print(f"{best} continues", flush=True)
    args.out, args.resume = str(directory), "auto"
    trained = trials.read_last(directory).get("time_s", 0.0)
    return each[best], each[best].data(round(trained + max(seconds, chosen.seconds)))


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
