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


class Traits(NamedTuple):
    """Facts of an algorithm, each an attribute of its Config class, with the value of one that leaves it out."""

    learns_from: type = Fresh  # Fresh, Replay or Fixed
    reads: tuple[str, ...] = ()  # extras of a sample that it needs beside a transition, such as `types.NEXT_ACTION`
    has_critic: bool = False  # beside the policy: something reads `network.value_inputs`
    to_end: bool = False  # rewards of its batches are returns to the end of the episode
    reads_rewards: bool = True  # False: it learns from a data set without rewards, too
    whole_sequences: bool = False  # a minibatch is a share of the environments, not of the steps
    corrects: bool = False  # it weighs each step by how likely the present policy is to take it
    uncorrected: bool = False  # rollouts count as the policy's own, which with rollout.mode async they are not


def traits(config: Any) -> Traits:
    """Returns what a Config, or its class, states of its algorithm; of a class none that depends on options."""
    found = {name: getattr(config, name) for name in Traits._fields if hasattr(config, name)}
    return Traits(**{name: value for name, value in found.items() if not isinstance(value, property)})


def learns_from(config: Any) -> type:
    """Returns the kind of data, Fresh, Replay or Fixed, that the algorithm of a Config or Config class learns from."""
    return traits(config).learns_from
