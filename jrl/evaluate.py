"""python -m jrl.evaluate CHECKPOINT: plays episodes with a trained policy."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jrl.errors import InputError


def parser() -> argparse.ArgumentParser:
    """The command line. Neither jax nor an environment library is imported for it."""
    p = argparse.ArgumentParser(prog="python -m jrl.evaluate", description="Play episodes with a trained policy.")
    p.add_argument("checkpoint", help="run directory, or a checkpoint inside it")
    p.add_argument("--best", action="store_true", help="the run's best checkpoint by checkpoint.keep_best_by")
    p.add_argument("--episodes", type=int, default=100, help="exactly so many (default 100)")
    p.add_argument("--envs", type=int, help="environments at once (default: up to 16)")
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
        print(*(f"error: {line}" for line in e.errors), sep="\n", file=sys.stderr)
        return 2
    return 0


def evaluate(args: argparse.Namespace) -> dict[str, float | str]:
    """Mean, deviation and range of the returns, and the mean length."""
    if args.episodes < 1:
        raise InputError(f"--episodes: expected at least 1, got {args.episodes}")
    import jax

    from jrl import build, checkpoint, config, loop
    from jrl.rollout.evaluate import evaluator

    found = checkpoint.locate(Path(args.checkpoint), best=args.best)
    meta = checkpoint.read_meta(found)
    seed = [] if args.seed is None else [f"run.seed={args.seed}"]
    cfg = config.override(meta["config"], [*args.overrides, *seed])
    build.enable_compile_cache()
    num_envs = min(args.episodes, args.envs or 16)
    env = build.environment(cfg, num_envs=num_envs, role="eval")
    try:
        algo = build.algorithm(cfg, env.spec)
        learner = checkpoint.restore(found, "learner", jax.eval_shape(algo.init, jax.random.key(0)))
        play = evaluator(env, algo.act, num_episodes=args.episodes, carry=algo.carry, explore=args.explore)
        result = play(algo.actor(learner), loop.role_key(cfg.run.seed, loop.Role.EVALUATE))
    finally:
        env.close()
    return {"checkpoint": str(found), "env_steps": meta["env_steps"], **result.summary()}


if __name__ == "__main__":
    sys.exit(main())
