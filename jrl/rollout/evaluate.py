"""Exactly N episodes, chosen without bias."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.metrics import episodes
from jrl.rollout import sources
from jrl.types import ActOut, AsyncEnv, Env, GraphEnv, Key, PyTree

_LENGTH = 64  # steps between two looks at who has finished


class Evaluation(NamedTuple):
    """Undiscounted returns and lengths of N episodes, slot by slot."""

    returns: np.ndarray  # [N] f32
    lengths: np.ndarray  # [N] i32

    def summary(self) -> dict[str, float]:
        """`return`, `return_std`, `return_min`, `return_max`, `length`, `episodes`."""
        return {
            "return": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length": float(self.lengths.mean()),
            "episodes": len(self.returns),
        }


def evaluator(
    env: GraphEnv | Env | AsyncEnv,
    act: Callable[..., ActOut],
    *,
    num_episodes: int,
    carry: Callable[[int], PyTree] = lambda batch_size: (),
    explore: bool = False,
    max_steps: int = 1_000_000,
) -> Callable[[PyTree, Key], Evaluation]:
    """Builds `evaluate(actor, key)`, which plays `num_episodes` episodes.

    Each of the B environments plays a fixed share, `num_episodes / B` rounded up or down, and only its first episodes
    count: the first N to finish, over all environments, would favour short ones. Every evaluation starts from a reset.
    An episode that broke off with its environment does not count.

    Args:
      env: B environments of its own, B <= num_episodes.
      act, carry: of the Algo.
      explore: passed to `act`.
      max_steps: per environment, against environments that never end.
    Raises (by evaluate):
      RuntimeError: the episodes have not ended within `max_steps`.
    """
    num_envs = env.spec.num_envs
    quota = np.full(num_envs, num_episodes // num_envs)
    quota[: num_episodes % num_envs] += 1
    track = jax.jit(episodes.track)
    source: list[sources.Source] = []

    def evaluate(actor: PyTree, key: Key) -> Evaluation:
        if not source:
            options: dict[str, Any] = {"length": _LENGTH, "carry": carry, "explore": explore}
            if not isinstance(env, GraphEnv):
                options["cut"] = False
            source.append(sources.make(env, act, key=key, **options))
        else:
            source[0].reset(key)
        columns = episodes.init(num_envs)
        found: list[list[tuple[float, int]]] = [[] for _ in range(num_envs)]
        for block in range(-(-max_steps // _LENGTH)):
            rollout, _ = source[0].next(actor, jax.random.fold_in(key, block))
            # an episode whose environment broke is followed by a void row, too: it does not count
            done = rollout.terminated | rollout.truncated | ~rollout.mask
            columns, tracked = track(columns, rollout.reward, done, rollout.mask)
            ended, returns, lengths = (
                np.asarray(x) for x in (done & rollout.mask, tracked.episode_return, tracked.length)
            )
            for t, b in zip(*np.nonzero(ended)):
                if len(found[b]) < quota[b]:
                    found[b].append((float(returns[t, b]), int(lengths[t, b])))
            if all(len(f) >= q for f, q in zip(found, quota)):
                flat = [e for f in found for e in f]
                return Evaluation(np.array([r for r, _ in flat], np.float32), np.array([n for _, n in flat], np.int32))
        raise RuntimeError(
            f"evaluation: {sum(len(f) for f in found)} of {num_episodes} episodes ended within {max_steps} steps per "
            "environment: give the environment a time limit (env.options.max_episode_steps)"
        )

    return evaluate
