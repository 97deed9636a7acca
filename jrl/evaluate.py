"""python -m jrl.evaluate CHECKPOINT: play episodes with a trained policy and report their returns."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.errors import EnvironmentFailed, InputError, counted, short
from jrl.host import command


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Neither jax nor an environment library is imported for it."""
    p = command.parser("evaluate", "Play episodes with a trained policy.")
    command.add_checkpoint_arguments(p)
    p.add_argument("--algo", "--run", help="expected algorithm of the checkpoint; another algorithm is an error")
    p.add_argument("--env", help="short for --set env.id=...")
    p.add_argument("--episodes", type=int, default=100, help="number of episodes, exactly (default 100)")
    p.add_argument("--unit", choices=("episodes", "timesteps"), default="episodes", help="unit of --episodes")
    p.add_argument("--envs", type=int, help="environments at once (default: up to 16)")
    p.add_argument("--num-env-runners", type=int, default=0, help="processes that play (default: this one)")
    p.add_argument("--seed", type=int, help="seed of the environments (default: the run's, never those of training)")
    how = p.add_mutually_exclusive_group()
    sample_help = "sample actions as in training (default: evaluation.explore of the run)"
    how.add_argument("--explore", action="store_true", default=None, help=sample_help)
    how.add_argument("--greedy", action="store_false", dest="explore", default=None, help="take the best actions")
    p.add_argument("--per-episode", action="store_true", help="print the return and length of each episode, too")
    p.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    p.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides", help="override the config")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints lines, or one JSON object; returns the exit status 0, 1 if an environment fails, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        result = evaluate(args)
    except InputError as e:
        return command.report_input_error(e)
    except EnvironmentFailed as e:
        return command.report_failure(e)
    if args.json:
        print(json.dumps(result))
    else:
        print(*lines(result), sep="\n")
    return 0


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of text for a result of `evaluate`."""
    for i, (total, steps) in enumerate(zip(result.get("returns", ()), result.get("lengths", ())), start=1):
        yield f"episode {i}: return {total:g}, {counted(steps, 'step')}"
    where = f"{result['checkpoint']} after {result['env_steps']:,} steps of training"
    if not result["episodes"]:
        yield f"no episode has ended in {result['timesteps']:,} steps: {where}"
        return
    spread = f"{result['return_min']:g} to {result['return_max']:g}"
    for name, value in result.items():
        kind, _, rest = name.partition("/")
        # omit a policy with the name of its only agent
        if kind == "agent" or (kind == "policy" and f"agent/{rest}" not in result):
            yield f"{kind} {rest.removesuffix('/return')}: return {value:.2f}"
    yield (
        f"return {result['return']:.2f} ± {result['return_std']:.2f} ({spread}), "
        f"length {result['length']:.1f} ± {result['length_std']:.1f}, {counted(result['episodes'], 'episode')}"
    )
    yield where


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluates a checkpoint in the environments of the run's evaluations.

    Returns:
      Mean, deviation and range of the returns, mean and deviation of the lengths; with several agents the mean return
      of each agent and policy; with `args.per_episode` the lists `returns` and `lengths`.
    """
    if args.episodes < 1:
        raise InputError(f"--episodes: expected at least 1, got {args.episodes}")
    if args.num_env_runners < 0:
        raise InputError(f"--num-env-runners: expected 0 or more, got {args.num_env_runners}")
    from jrl import config
    from jrl.host import runtime
    from jrl.play import actor
    from jrl.play.evaluation import Evaluations
    from jrl.rllib.table import ALGORITHMS
    from jrl.run import build
    from jrl.run.store import checkpoint

    found = checkpoint.locate(Path(args.checkpoint), best=args.best)
    meta = checkpoint.read_meta(found)
    settings = [] if args.env is None else [f"env.id={args.env}"]
    settings += [] if args.seed is None else [f"run.seed={args.seed}"]
    settings += args.overrides
    cfg = config.override(meta["config"], settings)
    algo = (args.algo or "").lower()
    name = ALGORITHMS[algo].name if algo in ALGORITHMS else algo
    if algo and config.algo_name(cfg) not in (args.algo, algo, name):
        expected = f"{config.algo_name(cfg)}, the checkpoint's algorithm"
        raise InputError(f"--algo: expected {expected}, got {short(args.algo)}: leave it out")
    runtime.apply(cfg.runtime)
    explore = {} if args.explore is None else {"rollout": {"explore": args.explore}}
    own = config.EvaluationConfig(
        duration=args.episodes,
        unit=args.unit,
        num_envs=max(args.num_env_runners, min(args.episodes, args.envs or 16)),
        num_env_runners=args.num_env_runners,
        explore=cfg.evaluation.explore,
        config=config.merge(cfg.evaluation.config, explore),
        timeout_s=None,
    )
    cfg = dataclasses.replace(cfg, evaluation=own, custom=dataclasses.replace(cfg.custom, evaluation=None))
    build.enable_compile_cache()
    evaluations = Evaluations(cfg, spec=checkpoint.read_spec(meta))
    try:
        evaluations.prepare()
        row = evaluations.play(actor.load_all(found, settings=settings).weights, count=0, version=meta["iteration"])
    finally:
        evaluations.close()
    played = evaluations.latest
    assert played is not None
    more: dict[str, Any] = {"length_std": float(played.lengths.std()) if len(played.lengths) else math.nan}
    if args.per_episode:
        more |= {"returns": played.returns.tolist(), "lengths": played.lengths.tolist()}
    of_agents = {name: value for name, value in row.items() if name.startswith(("agent/", "policy/"))}
    shown = {**{name: row[name] for name in _KEYS}, **of_agents}
    return {"checkpoint": str(found), "env_steps": meta["env_steps"], **shown, **more}


_KEYS = ("return", "return_std", "return_min", "return_max", "length", "episodes", "timesteps")


if __name__ == "__main__":
    sys.exit(command.run(main))
