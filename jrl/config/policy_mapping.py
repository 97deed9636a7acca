"""Mappings that are asked for each episode, so that the policy of an agent may differ by game."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jrl.errors import InputError

SHARED = "shared"  # the policy of all agents, where the config names none
BY_AGENT = "by_agent"
TABLE = "roster"  # the item of a State that says which policies agents follow, and so no name of a policy
_ASKED = 8  # times that a mapping is asked first: one that draws its answers gives two


def by_game(given: Any) -> bool:
    """Returns whether a section `multi_agent` whose agents are known lets an agent's policy change from game to game.

    So it is where a mapping was left a function, as its answers depend on the episode.
    """
    if given is None or given.agents is None or given.self_play is not None:
        return False
    return isinstance(given.mapping, str) and given.mapping not in (SHARED, BY_AGENT)


class NewEpisode:
    """Episode that a mapping is asked for: a game that is yet to begin.

    Attributes:
      id_, episode_id: a whole number that no other game of the run has; game i of environment e of n is i * n + e.
      env_index, vector_index: the number of its environment.
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


class _Watched(NewEpisode):
    def __init__(self) -> None:
        object.__setattr__(self, "looked_at", False)
        super().__init__(0, 0)
        object.__setattr__(self, "looked_at", False)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and name != "looked_at":
            object.__setattr__(self, "looked_at", True)
        return object.__getattribute__(self, name)

    def __hash__(self) -> int:
        object.__setattr__(self, "looked_at", True)
        return 0

    __eq__ = NewEpisode.__eq__


def asking(fn: Callable[..., Any]) -> Callable[[str, NewEpisode], Any]:
    """Makes a mapping a function of agent and episode. RLlib's may take an episode and a worker, which is None."""
    parameters = inspect.signature(fn).parameters
    kinds = inspect.Parameter
    plain = [p for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    second = any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values()) or len(plain) > 1
    taken = {p.name for p in plain[:2]} if second else {plain[0].name if plain else ""}
    named = {"episode", "worker"} & set(parameters) - taken

    def ask(agent: str, episode: NewEpisode) -> Any:
        told = {name: episode if name == "episode" else None for name in named}
        return fn(agent, *([episode] if second else []), **told)

    return ask


def answers(fn: Callable[..., Any], agents: Sequence[str], key: str) -> dict[str, str] | None:
    """Asks a mapping for each agent.

    Args:
      fn: (agent, episode) -> policy, of which it need not take the episode.
      agents: their names.
      key: of the config, for errors.
    Returns:
      Agent -> policy; None where that depends on the episode: the function looks at it, or does not say the same twice.
    Raises:
      InputError: it raises, or gives something else than a text.
    """
    episode = _Watched()
    try:
        ask = asking(fn)
        said = {agent: [ask(agent, episode) for _ in range(_ASKED)] for agent in agents}
    except Exception as e:  # whatever the user's function raises
        told = f"{type(e).__name__}: {str(e)[:200]}"
        raise InputError(
            f"{key}: expected a function of an agent's name and its episode, got one that raises {told}: name each "
            "agent's policy in a table, or mend it"
        ) from e
    for agent, found in said.items():
        if odd := [policy for policy in found if not isinstance(policy, str)]:
            kind = type(odd[0]).__name__
            raise InputError(f"{key}: expected the name of a policy, got {kind} for {agent}: return a text")
    if episode.looked_at or any(len(set(found)) > 1 for found in said.values()):
        return None
    return {agent: found[0] for agent, found in said.items()}
