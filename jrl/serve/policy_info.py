"""What a server knows of a policy and its agents."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl import spaces
from jrl.serve import space_values
from jrl.serve.wire import Refused
from jrl.types import Dict, PyTree, Space


class AgentInfo(NamedTuple):
    """One agent, where an episode has several."""

    number: int
    policy: int  # number of the policy that it follows
    observation: Space
    action: Space
    own_action: Callable[[PyTree], PyTree] | None  # as in `PolicyInfo`


class PolicyInfo(NamedTuple):
    """One policy."""

    algorithm: str
    observation: Space  # sent by clients
    action: Space  # sent to clients
    # from actions of the environment to actions of the policy, [*]; None: clients may not choose, for the reason `why`
    own_action: Callable[[PyTree], PyTree] | None
    why: str
    learns: bool
    remembers: bool = False  # actions depend on earlier observations of an episode
    policy_action: Space | None = None  # in the policy's units; None: as `action`
    agents: Mapping[str, AgentInfo] = {}  # where an episode has several; spaces above then may be tuples by kind
    max_lag: int | None = None  # updates that weights may be behind when their steps are learned from; None: any number

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the agents."""
        return tuple(self.agents)


def observed(
    of: PolicyInfo | AgentInfo, given: Any, name: str, lead: tuple[int, ...] = (), *, acts: bool = True
) -> PyTree:
    """Returns observations [*lead, *].

    Raises:
      Refused: as `space_values.read`; with `acts` also a mask that allows no action. An episode's last observation may
        allow none; elsewhere the learner would end the run for it.
    """
    found = space_values.read(of.observation, given, name, lead)
    mask = found.get(spaces.ACTION_MASK) if acts and isinstance(of.observation, Dict) else None
    if mask is not None and not spaces.any_allowed(of.action, mask).all():
        raise Refused(422, f"{name}/{spaces.ACTION_MASK}: it allows no action: end the episode there, or allow one")
    return found
