"""Roster of games to come: a mapping that is asked for each, policies that are added and removed.

The host asks for more games than a call of the program can begin, and writes the answers into the table on the device
(`jrl.run.by_episode.Roster`) before the call. So who plays follows from the mapping and the number of the game alone,
and a run that is resumed goes on with the games that it has asked for.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrl import registry
from jrl.errors import InputError
from jrl.fields.schema import merge
from jrl.run import build_policies, by_episode, parallel
from jrl.run.keys import Role, role_key
from jrl.run.program import LoopState, joined_replay, own_replay
from jrl.settings import multi_agent
from jrl.settings.by_episode import BY_AGENT, ROSTER, SHARED, NewEpisode, asking, places
from jrl.settings.config import RunConfig
from jrl.types import PyTree

_NAME = re.compile(r"policy/(place-\d+)/(.*)")  # of a metric
_MAPPING = str | Mapping[str, str] | Callable[..., str] | None


class Seats:
    """Says who follows which policy, and adds and removes policies.

    Args:
      cfg: of the run.
      run: its parts, a `jrl.run.build.Run`.
    Attributes:
      config: of the run, with the policies that there are.
    """

    def __init__(self, cfg: RunConfig, run: Any):
        self.config, self._mesh, self._groups, self._program = cfg, run.mesh, run.groups, run.program
        self._source: Any = None  # of the environments whose games are counted
        self._sizes = build_policies.sizes(cfg)
        self._table = np.full(self._sizes[:3], by_episode.NOBODY, np.int32)
        self._asked = np.zeros(self._sizes.games, np.int32)
        self._numbers = np.arange(self._sizes.policies, dtype=np.int32)  # of the policies, by place
        self._given = np.int32(self._sizes.policies)
        self._names: dict[int, str] = {}  # of all policies that there have been, by number
        self.take(cfg)
        group, learner = run.groups[0], run.groups[0].learner
        self._kept = jax.eval_shape(lambda key: learner.keep(learner.init(key)), jax.random.key(0))  # of one policy
        same, each = parallel.REPLICATED, parallel.PER_DEVICE
        write, size = by_episode.writing(group), len(group.names)
        seed = role_key(jax.random.key(cfg.run.seed), Role.INIT)

        def added(state, replay, place, number, *given):  # its State, whether it takes that, its floats
            key = jax.random.fold_in(seed, number)
            state, replay = write(state, own_replay(replay, run.learn), place, key, *given)
            return state, joined_replay(replay)

        def moved(state, replay, gone, last):
            state, replay = by_episode.moved(group, state, own_replay(replay, run.learn), gone, last)
            return state, joined_replay(replay)

        self._add = parallel.pmap(added, self._mesh, (same, each, *[same] * 5), (same, each), donate_argnums=(0, 1))
        self._move = parallel.pmap(moved, self._mesh, (same, each, same, same), (same, each), donate_argnums=(0, 1))
        self._nowhere = np.int32(size)  # a place that there is not: nothing is written

    def take(self, cfg: RunConfig) -> None:
        """Goes by the policies and the mapping of a config."""
        given = cfg.multi_agent
        assert given is not None and given.agents is not None
        keys = places(multi_agent.capacity(cfg))
        self.config, self._agents = cfg, given.agents
        self._places = {name: keys.index(key) for name, key in multi_agent.places(cfg).items()}
        self._names |= {int(self._numbers[place]): name for name, place in self._places.items()}
        if isinstance(given.mapping, str) and given.mapping not in (SHARED, BY_AGENT):
            self._ask = asking(registry.load(given.mapping, "multi_agent.mapping"))
        else:
            table = multi_agent.follows(given)
            self._ask = lambda agent, episode: table[agent]

    def begin(self, state: LoopState, *, resumed: bool) -> LoopState:
        """Returns the state in which all games that the first call can begin are told, and nothing is left to compile.

        Raises:
          InputError: the mapping names a policy that there is not.
        """
        roster = parallel.first(state.learner[ROSTER])
        if resumed:
            self._table, self._asked = np.array(roster.table), np.array(roster.asked)
            self._numbers, self._given = np.array(roster.numbers), np.int32(roster.given)
            self._names = {}
            self.take(self.config)
        state = self.ahead(state)  # of games from the first on, where the environments are no part of a checkpoint
        state = self._with(state, floats=build_policies.floats(self.config, self._groups))
        if not self._groups[0].stacked:
            return state
        # once for nothing, so that it is compiled
        nothing = self._blank(), np.bool_(False), self._floats(self.config, 0)
        state = self._changed(state, self._add, self._nowhere, np.uint32(0), *nothing)
        state = self._changed(state, self._move, self._nowhere, self._nowhere)
        return self._written(state, np.arange(self._sizes.policies), forget=slice(0, 0))

    def ahead(self, state: LoopState) -> LoopState:
        """Returns the state in which all games that the next call can begin are told; waits for the call before."""
        if self._program.source is not self._source:  # environments that were made anew, whose games count from 0
            self._source, self._asked = self._program.source, np.zeros_like(self._asked)
            state = self._with(state, latest=np.zeros_like(self._asked))
        return self._with(state, **self._table_of()) if self._fill(_latest(state)) else state

    def _fill(self, latest: np.ndarray) -> bool:
        """Asks who follows which policy in the games to come, and returns whether there was something to ask."""
        wanted = latest + self._sizes.ahead
        if (self._asked >= wanted).all():
            return False
        for game in np.flatnonzero(self._asked < wanted).tolist():
            for number in range(int(self._asked[game]), int(wanted[game])):
                self._table[number % self._sizes.ahead, game] = self._answers(number, game)
        self._asked = np.maximum(self._asked, wanted).astype(np.int32)
        return True

    def _table_of(self) -> dict[str, Any]:
        return {"table": self._table, "asked": self._asked}

    def _answers(self, number: int, game: int) -> list[int]:
        """Returns the numbers of the policies that agents follow in a game of an environment. Raises InputError: a
        policy that there is not.
        """
        episode = NewEpisode(number * self._sizes.games + game, game)
        found = []
        for agent in self._agents:
            name = self._ask(agent, episode)
            if (place := self._places.get(name)) is None:
                known = ", ".join(self._places)
                raise InputError(
                    f"multi_agent.mapping: expected one of the policies {known}, got {name!r} for {agent} in "
                    f"{episode!r}: add it with add_policy, or mend the mapping"
                )
            found.append(int(self._numbers[place]))
        return found

    def _with(self, state: LoopState, **changes: Any) -> LoopState:
        changed = {name: parallel.replicate(x, self._mesh) for name, x in changes.items()}
        roster = dataclasses.replace(state.learner[ROSTER], **changed)
        return dataclasses.replace(state, learner={**state.learner, ROSTER: roster})

    def _changed(self, state: LoopState, program: Callable[..., Any], *which: Any) -> LoopState:
        learner, replay = program(state.learner, state.replay, *which)
        return dataclasses.replace(state, learner=learner, replay=replay)

    def _floats(self, cfg: RunConfig, place: int) -> tuple[np.float32, ...]:
        """Returns the floats of the algorithm in a place of the first group; () where all have those of the first."""
        held = build_policies.floats(cfg, self._groups).get(self._groups[0].label, ())
        return tuple(x[place] for x in held)

    def _blank(self) -> PyTree:
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._kept)

    # ------------------------------------------------------------ policies come and go

    def add(
        self,
        state: LoopState,
        name: str,
        *,
        given: PyTree | None = None,
        own: Mapping[str, Any] | None = None,
        mapping: _MAPPING = None,
        train: Sequence[str] | Callable[[str], bool] | None = None,
    ) -> LoopState:
        """Returns the state with one policy more, like the first of the run.

        Args:
          state: taken over.
          name: of the policy.
          given: an algorithm's State to begin with; None: a fresh one.
          own: sections of the config that differ from the first policy's, in floats of `algo` alone.
          mapping: who follows which policy in games that have not begun; None: as before.
          train: which policies learn; None: as before.
        Raises:
          InputError: the name is taken, all places are, mapping and training name an unknown policy, or `own` is wrong
            or makes a policy of another program.
        """
        first = multi_agent.alike(self.config)[0]
        self._check_new(name)
        policies = dict(self._own.policies)
        cfg = self._told({**policies, name: merge(policies[first[0]], dict(own or {}))}, mapping, train)
        _check_like(cfg, name, first[0])
        place, numbers, number = np.int32(len(first)), self._numbers.copy(), np.uint32(self._given)
        numbers[place] = number
        self._seated(cfg, numbers, _latest(state), anew=mapping is not None)
        self._given, takes = np.int32(number + 1), np.bool_(given is not None)
        begins = self._blank() if given is None else given, takes, self._floats(cfg, int(place))
        state = self._changed(state, self._add, place, number, *begins)
        return self._written(state, np.arange(self._sizes.policies), forget=place)

    def remove(
        self,
        state: LoopState,
        name: str,
        *,
        mapping: _MAPPING = None,
        train: Sequence[str] | Callable[[str], bool] | None = None,
    ) -> LoopState:
        """Returns the state without a policy; nobody learns from what is left of games under way that its agents follow
        it in.

        Args: as `add`.
        Raises:
          InputError: there is no such policy, it is none that is like the first, or the last of those.
        """
        first, *others = multi_agent.alike(self.config)
        if name not in first or len(first) == 1:
            rest = [other for other in first if other != name]
            why = f"expected one of {', '.join(first)}" if name not in first else f"{name} is the only one of its kind"
            raise InputError(f"remove_policy: {why}, got {name!r}: the others stay: {', '.join(rest)}")
        gone, last = first.index(name), len(first) - 1
        kept = [first[-1] if other == name else other for other in first[:-1]]
        policies = self._own.policies
        order = [*kept, *(other for names in others for other in names)]
        learns = self._own.policies_to_train
        if train is None and learns is not None:
            train = [other for other in learns if other != name]
        cfg = self._told({other: policies[other] for other in order}, mapping, train)
        numbers = self._numbers.copy()
        numbers[gone], numbers[last] = numbers[last], by_episode.FREE
        self._seated(cfg, numbers, _latest(state), anew=True)
        state = self._changed(state, self._move, np.int32(gone), np.int32(last))
        sources = np.arange(self._sizes.policies)
        sources[gone] = last
        return self._written(state, sources, forget=last)

    def _seated(self, cfg: RunConfig, numbers: np.ndarray, latest: np.ndarray, *, anew: bool) -> None:
        """Goes by other policies, in games that have not begun if `anew`; all or, where a mapping fails, nothing."""
        before = self._numbers, self._table, self._asked, self._names, self.config
        try:
            self._numbers, self._table, self._names = numbers, self._table.copy(), dict(self._names)
            self.take(cfg)
            self._asked = latest + 1 if anew else self._asked
            self._fill(latest)
        except BaseException:
            self._numbers, self._table, self._asked, self._names, cfg = before
            self.take(cfg)
            raise

    def _written(self, state: LoopState, sources: np.ndarray, *, forget: int | np.integer | slice) -> LoopState:
        """Returns the state with the table, with who learns, and with each place's episodes those of another, of one
        none.
        """
        recent = jax.tree.map(lambda x: np.array(x)[sources], parallel.first(state.learner[ROSTER].recent))
        recent.window_return[forget], recent.window_length[forget] = np.nan, np.nan
        recent.window_next[forget] = 0
        own: dict[str, Any] = {"trained": np.array(build_policies.trained(self.config))}
        own |= {"numbers": self._numbers, "given": self._given}
        own |= {"floats": build_policies.floats(self.config, self._groups)}
        return self._with(state, **self._table_of(), recent=recent, **own)

    @property
    def _own(self) -> Any:
        return self.config.multi_agent

    def _check_new(self, name: str) -> None:
        """Raises InputError where no policy of that name can be added."""
        capacity = multi_agent.capacity(self.config)
        if name in self._places:
            raise InputError(f"add_policy: there is a policy {name!r} already: choose another name")
        if len(self._places) == capacity:
            raise InputError(
                f"add_policy: all {capacity} places are taken ({', '.join(self._places)}): remove a policy first, or "
                "begin with a larger multi_agent.capacity"
            )

    def _told(self, policies: dict[str, Any], mapping: _MAPPING, train: Any) -> RunConfig:
        """Returns the config with other policies. Raises InputError: what there is not."""
        changes: dict[str, Any] = {"policies": policies}
        if mapping is not None:
            changes["mapping"] = dict(mapping) if isinstance(mapping, Mapping) else registry.reference(mapping)
        if callable(train):
            train = [name for name in policies if train(name)]
        if train is not None:
            changes["policies_to_train"] = tuple(train)
        cfg = dataclasses.replace(self.config, multi_agent=dataclasses.replace(self._own, **changes))
        if errors := list(multi_agent.faults(cfg)):
            raise InputError(*errors)
        return cfg

    def name_of(self, number: int) -> str:
        """Returns the name of the policy of that number, which may be gone by now."""
        return self._names[number]

    def tell(self, callback_list: Any) -> None:
        """Makes callbacks name the policies of games as they are here."""
        if callback_list:
            callback_list.games["named"] = self.name_of

    # ------------------------------------------------------------ result rows

    def named(self, row: dict[str, Any]) -> None:
        """Puts the names of policies in place of those of places, and leaves out what nobody has learned."""
        keys = places(multi_agent.capacity(self.config))
        names = {keys[place]: name for name, place in self._places.items()}
        for metric in [metric for metric in row if _NAME.match(metric)]:
            value = row.pop(metric)
            place, rest = _NAME.fullmatch(metric).groups()  # type: ignore[union-attr]  # it matched above
            name = names.get(place, "")
            if name and (rest in ("return", "window") or multi_agent.is_trained(self.config, name)):
                row[f"policy/{name}/{rest}"] = value


def _check_like(cfg: RunConfig, name: str, first: str) -> None:
    """Raises InputError where a policy would need another program than the first one."""
    if name not in multi_agent.alike(cfg)[0]:
        raise InputError(
            f"add_policy: {name} may differ from {first} in numbers of its algo alone, such as lr, and not in whole "
            "numbers, flags, network or replay: name it in multi_agent.policies, before the run begins"
        )
    own, other = (multi_agent.policy_config(cfg, policy).algo for policy in (name, first))
    if getattr(own, "normalize_reward", False) and own.gamma != other.gamma:
        raise InputError(
            f"add_policy: with algo.normalize_reward, policies that an agent follows by turns need one gamma, got "
            f"{own.gamma} for {name} and {other.gamma} for {first}: give them the same"
        )


def _latest(state: LoopState) -> np.ndarray:
    """Returns the games that were acted in, [G] i32; waits for the call before."""
    return np.asarray(parallel.first(state.learner[ROSTER].latest))
