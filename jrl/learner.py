"""What the loop drives: one interface over on-policy and replay-based algorithms."""

from collections.abc import Callable
from typing import NamedTuple

from jrl.types import Algo, Key, Metrics, PyTree, Rollout


class Learner(NamedTuple):
    """Pure functions around an Algo; `step` may be jitted, mapped over devices and scanned with collection."""

    init: Callable[[Key], PyTree]  # key -> LearnerState
    actor: Callable[[PyTree], PyTree]  # LearnerState -> Actor
    step: Callable[[PyTree, Rollout, Key], tuple[PyTree, Metrics]]  # (state, rollout, key)


def on_policy(algo: Algo) -> Learner:
    """Learns from each rollout once, when it comes; the learner's state is the algorithm's."""

    def step(state: PyTree, rollout: Rollout, key: Key) -> tuple[PyTree, Metrics]:
        state, aux = algo.update(state, rollout, key)
        return state, aux.metrics

    return Learner(algo.init, algo.actor, step)
