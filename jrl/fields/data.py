"""Facts that a Config class states about its algorithm, above all the kind of its data: Fresh, Replay or DataSets."""

from typing import Any, NamedTuple

# derived columns of a data set, [R] each
RETURN_TO_GO = "return_to_go"  # f32, sum of the environment's rewards to the end of the episode
TIMESTEP = "timestep"  # i32, number of the step in its episode


class Fresh(NamedTuple):
    """Rollouts of the current policy; each of the `updates` per new rollout draws one of the latest `kept` rollouts."""

    kept: int = 1
    updates: int = 1


class Replay(NamedTuple):
    """Samples of a replay buffer or a data set: transitions, or sequences for networks with memory."""

    sequences: bool = False


class DataSets(NamedTuple):
    """Samples of a data set only, which does not grow: transitions, or sequences for networks with memory."""

    sequences: bool = False


class Traits(NamedTuple):
    """Facts about an algorithm, each an attribute of its Config class; the defaults hold for missing attributes."""

    learns_from: type = Fresh  # Fresh, Replay or DataSets
    reads: tuple[str, ...] = ()  # extras of a sample beside the transition, such as `types.NEXT_ACTION`
    has_critic: bool = False  # a critic or value network reads `network.value_inputs`
    has_teacher: bool = False  # a trained policy, `algo.teacher`, reads `network.value_inputs`; the policy does not
    to_end: bool = False  # rewards of its batches are returns to the end of the episode
    reads_rewards: bool = True  # False: a data set without rewards is enough
    has_learning_pass: bool = False  # its losses support `network.dropout` and batch_renorm
    whole_sequences: bool = False  # minibatches split the environments, not the steps
    corrects: bool = False  # weighs each step by the present policy's probability of its action
    has_memory: bool = True  # supports networks with memory, `network.core`
    searches_env: bool = False  # acts by a search with the step of environments written in JAX, see `types.Algo.act_in`
    has_members: bool = False  # each environment acts with a member of a population; rollouts begin new episodes
    uncorrected: bool = False  # treats rollouts of older policies (rollout.mode async) as the present policy's


def traits(config: Any) -> Traits:
    """Returns the facts that a Config or its class states; a class omits facts that depend on options."""
    stated = {name: getattr(config, name) for name in Traits._fields if hasattr(config, name)}
    return Traits(**{name: value for name, value in stated.items() if not isinstance(value, property)})


def learns_from(config: Any) -> type:
    """Returns the kind of data, Fresh, Replay or DataSets, of a Config's (or Config class's) algorithm."""
    return traits(config).learns_from
