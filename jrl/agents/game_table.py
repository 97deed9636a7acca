"""The mapping of agents to policies, where it depends on the game: it is asked for games before they begin.

The host asks for more games than a call of the program can begin, and writes the answers into the table on the device
(`jrl.agents.by_game.Roster`) before the call. The answers depend on the mapping and on the number of the game alone,
and a resumed run goes on with the games that it has asked for.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jrl import registry
from jrl.config import RunConfig, multi_agent
from jrl.config.policy_mapping import ROSTER, NewEpisode, asking
from jrl.errors import InputError
from jrl.learn import parallel
from jrl.learn.program import LoopState
from jrl.run import build_policies


class Games:
    """Keeps the table of games to come filled.

    Args:
      cfg: of the run.
      run: its parts, a `jrl.run.build.Run`.
    """

    def __init__(self, cfg: RunConfig, run: Any):
        self._mesh, self._program = run.mesh, run.program
        self._source: Any = None  # of the environments whose games are counted
        self._sizes = build_policies.sizes(cfg)
        self._answers = _answers(cfg)
        self._table = np.zeros(self._sizes[:3], np.int32)
        self._asked = np.zeros(self._sizes.games, np.int32)

    def begin(self, state: LoopState, *, resumed: bool) -> LoopState:
        """Returns the state in which all games that the first call can begin are in the table.

        Raises:
          InputError: the mapping names an unknown policy.
        """
        if resumed:
            roster = parallel.first_copy(state.learner[ROSTER])
            self._table, self._asked = np.array(roster.table), np.array(roster.asked)
        return self.ahead(state)

    def ahead(self, state: LoopState) -> LoopState:
        """Returns the state in which all games that the next call can begin are in the table; waits for the last call.

        Raises:
          InputError: the mapping names an unknown policy.
        """
        latest = np.asarray(parallel.first_copy(state.learner[ROSTER].latest))
        if self._program.source is not self._source:  # environments that were made anew, whose games count from 0
            self._source, self._asked, latest = self._program.source, np.zeros_like(self._asked), np.zeros_like(latest)
            state = self._with(state, latest=latest)
        wanted = latest + self._sizes.ahead
        if (self._asked >= wanted).all():
            return state
        for game in np.flatnonzero(self._asked < wanted).tolist():
            for number in range(int(self._asked[game]), int(wanted[game])):
                self._table[number % self._sizes.ahead, game] = self._answers(number, game)
        self._asked = np.maximum(self._asked, wanted).astype(np.int32)
        return self._with(state, table=self._table, asked=self._asked)

    def _with(self, state: LoopState, **changes: Any) -> LoopState:
        changed = {name: parallel.replicate(x, self._mesh) for name, x in changes.items()}
        roster = dataclasses.replace(state.learner[ROSTER], **changed)
        return dataclasses.replace(state, learner={**state.learner, ROSTER: roster})


def check(cfg: RunConfig) -> None:
    """Asks the mapping for the first game of each environment. Raises InputError: it names an unknown policy."""
    answers = _answers(cfg)
    for game in range(cfg.env.num_envs):
        answers(0, game)


def _answers(cfg: RunConfig) -> Callable[[int, int], list[int]]:
    given, names = cfg.multi_agent, multi_agent.numbered(cfg)
    assert given is not None and given.agents is not None and isinstance(given.mapping, str)
    ask, agents = asking(registry.load(given.mapping, "multi_agent.mapping")), given.agents

    def answers(number: int, game: int) -> list[int]:
        episode = NewEpisode(number * cfg.env.num_envs + game, game)
        found = [ask(agent, episode) for agent in agents]
        for agent, name in zip(agents, found, strict=True):
            if name not in names:
                raise InputError(
                    f"multi_agent.mapping: expected one of the policies {', '.join(names)}, got {name!r} for {agent} "
                    f"in {episode!r}: add it with add_policy, or change the mapping"
                )
        return [names.index(name) for name in found]

    return answers
