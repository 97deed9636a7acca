"""python -m jrl.evaluate CHECKPOINT: plays episodes with a trained policy."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jrl import command
from jrl.errors import InputError


def parser() -> argparse.ArgumentParser:
    """The command line. Neither jax nor an environment library is imported for it."""
    p = command.parser("evaluate", "Play episodes with a trained policy.")
    p.add_argument("checkpoint", help="run directory, or a checkpoint inside it")
    p.add_argument("--best", action="store_true", help="the run's best checkpoint by checkpoint.keep_best_by")
    p.add_argument("--episodes", type=int, default=100, help="exactly so many (default 100)")
    p.add_argument("--unit", choices=("episodes", "timesteps"), default="episodes", help="of --episodes")
    p.add_argument("--envs", type=int, help="environments at once (default: up to 16)")
    p.add_argument("--num-env-runners", type=int, default=0, help="processes that play (default: this one)")
    p.add_argument("--seed", type=int, help="of the environments (default: the run's, never those of training)")
    p.add_argument("--explore", action="store_true", help="sample actions as in training")
    p.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides", help="override the config")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object; exit status 0, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        print(json.dumps(evaluate(args)))
    except InputError as e:
        return command.refused(e)
    return 0


def evaluate(args: argparse.Namespace) -> dict[str, float | str]:
    """Mean, deviation and range of the returns, and the mean length, in environments as the run evaluates in."""
    if args.episodes < 1:
        raise InputError(f"--episodes: expected at least 1, got {args.episodes}")
    if args.num_env_runners < 0:
        raise InputError(f"--num-env-runners: expected 0 or more, got {args.num_env_runners}")
    import jax

    from jrl import build, checkpoint, config, runtime
    from jrl.evaluation import Evaluations

    found = checkpoint.locate(Path(args.checkpoint), best=args.best)
    meta = checkpoint.read_meta(found)
    seed = [] if args.seed is None else [f"run.seed={args.seed}"]
    cfg = config.override(meta["config"], [*args.overrides, *seed])
    runtime.apply(cfg.runtime)
    own = config.EvaluationConfig(
        duration=args.episodes,
        unit=args.unit,
        num_envs=max(args.num_env_runners, min(args.episodes, args.envs or 16)),
        num_env_runners=args.num_env_runners,
        config=config.merge(cfg.evaluation.config, {"rollout": {"explore": args.explore}}),
        timeout_s=None,
    )
    cfg = config.without_loss(cfg)
    cfg = dataclasses.replace(cfg, evaluation=own, custom=dataclasses.replace(cfg.custom, evaluation=None))
    build.enable_compile_cache()
    spec = checkpoint.spec(meta)
    algo = build.algorithm(cfg, spec)
    evaluations = Evaluations(cfg, spec=spec)
    try:
        evaluations.prepare()
        learner = checkpoint.restore(found, "learner", jax.eval_shape(algo.init, jax.random.key(0)))
        row = evaluations.play(algo.actor(learner), count=0, version=meta["iteration"])
    finally:
        evaluations.close()
    return {"checkpoint": str(found), "env_steps": meta["env_steps"], **{name: row[name] for name in _KEYS}}


_KEYS = ("return", "return_std", "return_min", "return_max", "length", "episodes", "timesteps")


if __name__ == "__main__":
    sys.exit(main())
