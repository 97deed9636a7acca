"""Policy mappings that are functions of the agent and its episode, called once per game."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jrl.errors import InputError

SHARED = "shared"  # default policy of all agents
BY_AGENT = "by_agent"
TABLE = "roster"  # item of a State with the policy of each agent and game; reserved, not a policy name
_CALLS = 8  # calls per agent that show whether a mapping is random


def by_game(section: Any) -> bool:
    """Returns whether a section `multi_agent` whose agents are known lets an agent's policy change from game to game.

    This is so if the mapping is still a function; a mapping that ignores the episode was replaced by a table.
    """
    if section is None or section.agents is None or section.self_play is not None:
        return False
    return isinstance(section.mapping, str) and section.mapping not in (SHARED, BY_AGENT)


class NewEpisode:
    """Argument of a mapping: an episode (game) that has not begun.

    Attributes:
      id_, episode_id: number of the game, unique in the run: game i of environment e of n is i * n + e.
      env_index, vector_index: index of its environment.
    """

    def __init__(self, episode_id: int, env_index: int):
        self.id_ = self.episode_id = episode_id
        self.env_index = self.vector_index = env_index

    def __hash__(self) -> int:
        return hash(self.id_)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NewEpisode) and self.id_ == other.id_

    def __repr__(self) -> str:
        return f"NewEpisode({self.id_})"


class _TrackedEpisode(NewEpisode):
    """Episode that records whether a mapping reads it."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        object.__setattr__(self, "was_read", False)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and name != "was_read":
            object.__setattr__(self, "was_read", True)
        return object.__getattribute__(self, name)

    def __hash__(self) -> int:
        object.__setattr__(self, "was_read", True)
        return 0

    __eq__ = NewEpisode.__eq__


def with_episode(fn: Callable[..., Any]) -> Callable[[str, NewEpisode], Any]:
    """Returns a mapping as a function of agent and episode.

    The user's function may take the agent only, or, as in RLlib, also an `episode` and a `worker` (here None).
    """
    parameters = inspect.signature(fn).parameters
    kinds = inspect.Parameter
    positional = [p for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    takes_two = any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values()) or len(positional) > 1
    used = {p.name for p in positional[: 1 + takes_two]}
    keywords = {"episode", "worker"} & set(parameters) - used

    def call(agent: str, episode: NewEpisode) -> Any:
        named = {name: episode if name == "episode" else None for name in keywords}
        return fn(agent, *([episode] if takes_two else []), **named)

    return call


def call_mapping(fn: Callable[..., Any], agents: Sequence[str], key: str) -> dict[str, str] | None:
    """Calls a mapping for each agent.

    Args:
      fn: function (agent, episode) -> policy, or (agent) -> policy.
      agents: names of the agents.
      key: config key, for errors.
    Returns:
      Agent -> policy; None if the policy depends on the episode: the function reads it, or is random.
    Raises:
      InputError: the function raises, or returns something other than text.
    """
    episode = _TrackedEpisode()
    try:
        call = with_episode(fn)
        policies = {agent: [call(agent, episode) for _ in range(_CALLS)] for agent in agents}
    except Exception as e:  # any exception of the user's function
        error = f"{type(e).__name__}: {str(e)[:200]}"
        raise InputError(
            f"{key}: expected a function of an agent's name and its episode, got a function that raises {error}: fix "
            "it, or name each agent's policy in a table"
        ) from e
    for agent, names in policies.items():
        if wrong := [name for name in names if not isinstance(name, str)]:
            kind = type(wrong[0]).__name__
            raise InputError(f"{key}: expected the name of a policy, got {kind} for {agent}: return text")
    if episode.was_read or any(len(set(names)) > 1 for names in policies.values()):
        return None
    return {agent: names[0] for agent, names in policies.items()}
