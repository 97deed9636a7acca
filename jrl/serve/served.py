"""The policies that a server answers with, the steps of several episodes that they get, and answers to several."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.serve import protocol
from jrl.serve.inference import Inference
from jrl.serve.local import Local
from jrl.serve.protocol import Refused
from jrl.types import Dict, PyTree, Space

# fields of a body with steps; the first two are needed
STEPS = ("episode_ids", "observations", "rewards", "terminated", "truncated", "final_observations")


class Agent(NamedTuple):
    """Facts of an agent, where an episode has several."""

    number: int
    policy: int  # number of that which it follows
    observation: Space
    action: Space
    own_action: Callable[[PyTree], PyTree] | None  # as in `Facts`


class Facts(NamedTuple):
    """Facts of a policy that a server needs."""

    algorithm: str
    observation: Space  # what clients send
    action: Space  # what they get
    # from actions of the environment to those of the policy, [*]; None: clients may not choose, for the reason `why`
    own_action: Callable[[PyTree], PyTree] | None
    why: str
    learns: bool
    remembers: bool = False  # what it does depends on earlier observations of an episode
    policy_action: Space | None = None  # in the policy's units; None: as `action`
    agents: Mapping[str, Agent] = {}  # of an episode, where it has several; spaces above then may be tuples by kind
    max_lag: int | None = None  # updates that weights may be behind when their steps are learned from; None: any number

    @property
    def names(self) -> tuple[str, ...]:
        """Returns names of the agents."""
        return tuple(self.agents)


class Served(NamedTuple):
    """A policy that clients may ask."""

    facts: Facts
    inference: Inference
    local: Local  # for clients that act by themselves


class Answer:
    """Collects the answers to the items of one request, and gives the whole once all are there."""

    def __init__(self, count: int, done: Callable[[list[PyTree], int], None]):
        self._left, self._done = count, done
        self._actions: list[PyTree] = [None] * count

    def add(self, i: int, action: PyTree, version: int) -> None:
        self._actions[i] = action
        self._left -= 1
        if not self._left:
            self._done(self._actions, version)


def seen(of: Facts | Agent, given: Any, name: str, lead: tuple[int, ...] = (), *, acts: bool = True) -> PyTree:
    """Returns observations [*lead, *]. Raises Refused as `protocol.read`; where somebody `acts`, also of what allows no
    action.

    An episode's last observation may allow none. Elsewhere the learner would end the run for it.
    """
    found = protocol.read(of.observation, given, name, lead)
    mask = found.get(spaces.ACTION_MASK) if acts and isinstance(of.observation, Dict) else None
    if mask is not None and not spaces.any_allowed(of.action, mask).all():
        raise Refused(422, f"{name}/{spaces.ACTION_MASK}: it allows no action: end the episode there, or allow one")
    return found


def at(tree: PyTree, i: Any) -> PyTree:
    """Returns index `i` of all arrays."""
    return jax.tree.map(lambda x: x[i], tree)


def together(space: Space, actions: list[PyTree]) -> PyTree:
    """Returns actions [N, *] of N actions."""
    return spaces.map_leaves(lambda leaf, *parts: np.stack(parts), space, *actions)


def came(facts: Facts, given: Mapping[str, Any], lead: tuple[int, ...]) -> tuple[PyTree, ...]:
    """Returns (observations, rewards, truncated, over, last observations) of a body with steps, [*lead, *]."""
    obs = seen(facts, given["observations"], "observations", lead)
    rewards = protocol.numbers(given.get("rewards"), lead, "rewards")
    terminated, truncated = (protocol.flags(given.get(name), lead, name) for name in ("terminated", "truncated"))
    over = terminated | truncated
    last: PyTree = obs
    if over.any():
        if given.get("final_observations") is None:
            raise Refused(400, "final_observations is missing: an episode ends with the observation after it")
        last = protocol.read(facts.observation, given["final_observations"], "final_observations", lead)
    return obs, rewards, truncated & ~terminated, over, last
