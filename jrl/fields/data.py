"""Kind of data that an algorithm learns from: its Config class says it, and its Algo with what belongs to it."""

from typing import Any, NamedTuple

# columns of a data set that algorithms may read beside its own, [R] each
RETURN_TO_GO = "return_to_go"  # f32, the sum of rewards to the end of the episode, as the environment gave them
TIMESTEP = "timestep"  # i32, the number of the step in its episode


class Fresh(NamedTuple):
    """Rollouts as they come: of the latest `kept`, one is drawn for each of `updates` updates per new rollout."""

    kept: int = 1
    updates: int = 1


class Replay(NamedTuple):
    """Samples of a replay buffer: transitions, or sequences for networks with memory."""

    sequences: bool = False


class Fixed(NamedTuple):
    """Samples of a data set alone, to which nothing is added: transitions, or sequences for networks with memory.

    Algorithms of `Replay` learn from data sets, too; these learn from nothing else.
    """

    sequences: bool = False


def learns_from(config_class: type | None) -> type:
    """Returns Fresh, Replay or Fixed: the `learns_from` of an algorithm's Config class; Fresh where it names none."""
    return getattr(config_class, "learns_from", Fresh)


def reads(config: Any) -> tuple[str, ...]:
    """Names what an algorithm needs in the extras of a sample beside a transition, such as `types.NEXT_ACTION`: what
    its Config names in `reads`; nothing where it names none."""
    return getattr(config, "reads", ())
