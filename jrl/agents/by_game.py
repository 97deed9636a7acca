"""Policies whose agents can change from game to game.

All policies act for all agents, and each agent takes the action of its policy in the present game. Each policy learns
from its own rows; the other rows are masked. A table has each agent's policy in the next games. Before each call of the
program the host calls the policy mapping for more games than a call can begin, and fills the table. The mapping depends
only on the number of the game, and a resumed run continues with the saved table.

An agent reads the table when its game begins, and keeps the policy until the game ends. Each row of a rollout has the
numbers of its policy and game. Policy numbers are never reused, so late rollouts still find their policy.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl import registry
from jrl.agents import fixed, policies
from jrl.agents.fixed import Group
from jrl.config import Sizes, multi_agent
from jrl.config.policy_mapping import TABLE, NewEpisode, with_episode
from jrl.envs.agent_options import GAME, OBS
from jrl.errors import InputError
from jrl.learn import parallel
from jrl.learn.learner import Learner
from jrl.learn.program import LoopState, Program
from jrl.metrics import episodes
from jrl.ops import collectives
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import (
    BROKEN_STACKS,
    COUNTS_STEP,
    NOT_FINITE,
    POLICY_ID,
    VALID_SHARE,
    ActOut,
    Algo,
    Array,
    Dict,
    EnvSpec,
    Key,
    Metrics,
    PyTree,
    Rollout,
)

NUMBER = "number"  # item of the memory: number of the column in the run, [B] i32
GAME_NUMBER = "game"  # item of extras and memory: number of the game; in the memory below 0 before the game begins
_IDLE = {NOT_FINITE: 0.0, BROKEN_STACKS: 0.0, VALID_SHARE: 1.0}  # metrics of a policy without an update; others are NaN


@struct.dataclass
class PolicyTable:
    """The policy of each agent in the next games, the same on all devices; an item of a run's State.

    Game i of environment g is row i % M of the table. Games outside the table reuse a row (modulo), as in a long
    evaluation or in a restarted env runner.
    """

    table: Any  # [M, G, A] i32, numbers of policies
    asked: Any  # [G] i32, number of games that the mapping was called for; the table has the latest M
    latest: Any  # [G] i32, latest game with a step
    recent: Any  # `episodes.EpisodeState` [P, ...], latest episodes of each policy's agents


def empty(ahead: int, games: int, agents: int, num_policies: int) -> PolicyTable:
    """Returns an empty table [ahead, games, agents]."""
    return PolicyTable(
        table=jnp.zeros((ahead, games, agents), jnp.int32),
        asked=jnp.zeros(games, jnp.int32),
        latest=jnp.zeros(games, jnp.int32),
        recent=jax.vmap(lambda _: episodes.init(1))(jnp.arange(num_policies)),
    )


class ByGame(policies.Policies):
    """Policies whose agents can change from game to game.

    Observations have the number of the game (`agent_options.with_game_numbers`). Memories have the number of each
    column in the run, and the policy and game that the column began with. Extras are dicts by group, beside these two.

    Attributes:
      numbered: names of the policies, in the order of their numbers.
    """

    watches_games = True
    in_checkpoint = True

    _source: Any = None  # source of the environments whose games are counted

    @functools.cached_property
    def _shape(self) -> tuple[int, int, int, int]:
        """Returns the table's axes [games ahead, environments, agents], and the number of policies."""
        # a game has at least two rows, one of them its reset; one game is unfinished, and one more may have begun
        sizes, cfg = Sizes(self.cfg), self.cfg
        rollouts = sizes.iterations_per_call + sizes.rollouts_ahead
        waits = cfg.rollout.batch_mode != "truncate_episodes"  # whole episodes are reported at their end
        agents = (cfg.multi_agent and cfg.multi_agent.agents) or ()
        return sizes.length * rollouts // 2 + 3 + waits, cfg.env.num_envs, len(agents), len(self.names)

    @functools.cached_property
    def numbered(self) -> tuple[str, ...]:
        return tuple(name for names in self.similar for name in names)

    @property
    def policy_spec(self) -> EnvSpec:
        assert isinstance(self.spec.observation, Dict)
        return self.spec._replace(observation=self.spec.observation[OBS])

    def policy_obs(self, obs: PyTree) -> PyTree:
        return obs[OBS]

    def _likeness(self, name: str) -> Any:
        return policies.without_floats(multi_agent.policy_config(self.cfg, name))

    def learns(self, group: Group) -> bool:
        return True

    @property
    def reported(self) -> Mapping[str, Sequence[str]]:
        return {}

    @property
    def column_policies(self) -> tuple[str, ...]:
        return self.names[:1] * self._shape[2]

    def _extras(self) -> dict[str, tuple[int, ...]]:
        return {}

    @property
    def game_options(self) -> dict[str, Any]:
        return {**super().game_options, "named": self.numbered.__getitem__}

    def _rows_of(self, played: Any, agents: Sequence[str]) -> list[tuple[str, Any]]:
        if played is None or played.policy_ids is None:
            return super()._rows_of(played, agents)
        return [(name, played.policy_ids == self.numbered.index(name)) for name in self.names]

    # ------------------------------------------------------------ acting and learning

    def acting(self, groups: Sequence[Group]) -> Algo:
        inner, shape = fixed.acting(groups, self._shape[2]), self._shape

        def carry(batch_size: int, first: Any = 0, total: int | None = None) -> dict[str, PyTree]:
            numbers = first + jnp.arange(batch_size, dtype=jnp.int32)
            nothing = jnp.full((batch_size,), -1, jnp.int32)
            found = inner.carry(batch_size, first=first, total=total)
            return {**found, NUMBER: numbers, POLICY_ID: nothing, GAME_NUMBER: nothing}

        def act(
            actor: Mapping[str, PyTree], obs: PyTree, carry: Mapping[str, PyTree], key: Key, explore: bool = True
        ) -> ActOut:
            own = _follows(actor[TABLE], obs[GAME], carry)
            policy, start, action = own[POLICY_ID], 0, None
            memories: dict[str, PyTree] = {NUMBER: carry[NUMBER], **own}
            extras: dict[str, PyTree] = {**own}
            for i, group in enumerate(groups):
                memory = carry[group.label]
                pick = lambda one, memory=memory: lambda actor, key: one.algo.act(actor, obs[OBS], memory, key, explore)
                out = group.mapped(pick)(actor[group.label], group.keys(jax.random.fold_in(key, i)))
                mine, start = policy - start, start + len(group.names)
                picked = _picked(out, mine) if group.stacked else out
                action = picked.action if action is None else _where(mine >= 0, picked.action, action)
                memories[group.label], extras[group.label] = picked.carry, picked.extras
            return ActOut(action, memories, extras)

        gammas = {float(f"{x:.7g}") for group in groups for x in fixed.gammas(group)}
        if len(gammas) > 1:
            raise InputError(
                "multi_agent.policies: with algo.normalize_reward, policies that an agent follows by turns need one "
                f"gamma, got {', '.join(map(str, sorted(gammas)))}: give them the same"
            )
        return inner._replace(
            init=lambda key: {**inner.init(key), TABLE: empty(*shape)},
            actor=fixed.with_item(inner.actor, TABLE, _for_acting),
            carry=carry,
            act=act,
            running_return_gamma=next(iter(gammas), None),
        )

    def learning(self, groups: Sequence[Group], *, axis_name: str | None = None) -> Learner:
        """Returns a Learner in which each policy learns from the rows of its agents.

        Without replay the policies learn one after the other, so that policies that do not learn cost nothing. Metrics
        are `policy/NAME/...`. `policy/NAME/return` is the mean over the latest episodes of the policy's agents.
        """
        inner, shape = fixed.learning(groups, self._shape[2]), self._shape
        trained = [name in self.trained for name in self.numbered]

        def step(state: Mapping[str, PyTree], replay: Mapping[str, PyTree], rollout: Rollout, key: Key):
            follows = rollout.extras[POLICY_ID]
            state, replay, metrics, start = dict(state), dict(replay), dict[str, Metrics](), 0
            for i, group in enumerate(groups):
                numbers = jnp.arange(start, start := start + len(group.names))
                teach = functools.partial(_taught, group, _rollout_of(group, rollout), follows, axis_name)
                each = (numbers, jnp.asarray(trained)[numbers], group.floats, state[group.label], replay[group.label])
                keys = group.keys(jax.random.fold_in(key, i))
                if not group.stacked:
                    learned = teach(each[0][0], each[1][0], *each[2:], keys)
                elif group.algo.on_policy:  # in sequence: policies that do not learn cost nothing
                    learned = jax.lax.map(lambda one, teach=teach: teach(*one), (*each, keys))
                else:  # in parallel: no replay is copied
                    learned = jax.vmap(teach)(*each, keys)
                state[group.label], replay[group.label], found = learned
                metrics |= group.unstack(found)
            state[TABLE] = watched(state[TABLE], rollout, axis_name)
            row = fixed.join_metrics(metrics)
            latest = state[TABLE].recent.window_return
            returns, window = jnp.nanmean(latest, -1), jnp.isfinite(latest).sum(-1, dtype=jnp.float32)
            for k, name in enumerate(self.numbered):
                row |= {f"policy/{name}/return": returns[k], f"policy/{name}/window": window[k]}
            return state, replay, row

        return inner._replace(
            init=lambda key: {**inner.init(key), TABLE: empty(*shape)},
            actor=fixed.with_item(inner.actor, TABLE, _for_acting),
            step=step,
            keep=fixed.with_item(inner.keep, TABLE),
            resume=fixed.with_item(inner.resume, TABLE),
        )

    # ------------------------------------------------------------ on the host: the table

    def check(self) -> None:
        """Calls the mapping for the first game of each environment. Raises InputError: unknown policy."""
        for game in range(self._shape[1]):
            self._answers(0, game)

    def prepare(self, program: Program, state: LoopState) -> LoopState:
        """Returns the state with a table of all games that the next call can begin; waits for the last call.

        Raises:
          InputError: the mapping returns an unknown policy.
        """
        known = parallel.first_copy(state.learner[TABLE])
        latest, asked = np.asarray(known.latest), np.asarray(known.asked)
        if program.source is not self._source:  # new environments, whose games count from 0
            self._source, asked, latest = program.source, np.zeros_like(asked), np.zeros_like(latest)
            state = _with_table(program, state, latest=latest)
        wanted = latest + self._shape[0]
        if (asked >= wanted).all():
            return state
        table = np.array(known.table)
        for game in np.flatnonzero(asked < wanted).tolist():
            for number in range(int(asked[game]), int(wanted[game])):
                table[number % len(table), game] = self._answers(number, game)
        return _with_table(program, state, table=table, asked=np.maximum(asked, wanted).astype(np.int32))

    def on_row(
        self, program: Program, state: LoopState, row: dict[str, Any], count: int, directory: Path | None
    ) -> LoopState:
        """Removes the metrics of policies that do not learn, except those of their agents' episodes."""
        for metric in [metric for metric in row if metric.startswith("policy/")]:
            _, name, rest = metric.split("/", 2)
            if name not in self.trained and rest not in ("return", "window"):
                del row[metric]
        return state

    def _beside(
        self, new: Mapping[str, PyTree], old: Mapping[str, PyTree], before: policies.Policies
    ) -> dict[str, PyTree]:
        recent = new[TABLE].recent
        if isinstance(before, ByGame):
            places = [before.numbered.index(name) if name in before.numbered else None for name in self.numbered]
            pick = lambda x, y: np.stack([x[i] if place is None else y[place] for i, place in enumerate(places)])
            recent = jax.tree.map(pick, recent, old[TABLE].recent)
        return {TABLE: new[TABLE].replace(recent=recent)}

    @functools.cached_property
    def _mapping(self) -> Any:
        assert self.cfg.multi_agent is not None and isinstance(self.cfg.multi_agent.mapping, str)
        return with_episode(registry.load(self.cfg.multi_agent.mapping, "multi_agent.mapping"))

    def _answers(self, number: int, game: int) -> list[int]:
        """Returns the number of the policy of each agent in one game of an environment."""
        assert self.cfg.multi_agent is not None
        agents, episode = self.cfg.multi_agent.agents or (), NewEpisode(number * self._shape[1] + game, game)
        found = [self._mapping(agent, episode) for agent in agents]
        for agent, name in zip(agents, found, strict=True):
            if name not in self.numbered:
                raise InputError(
                    f"multi_agent.mapping: expected one of the policies {', '.join(self.numbered)}, got {name!r} for "
                    f"{agent} in {episode!r}: add it with add_policy, or change the mapping"
                )
        return [self.numbered.index(name) for name in found]


def _with_table(program: Program, state: LoopState, **changes: Any) -> LoopState:
    changed = {name: parallel.replicate(x, program.mesh) for name, x in changes.items()}
    table = dataclasses.replace(state.learner[TABLE], **changed)
    return dataclasses.replace(state, learner={**state.learner, TABLE: table})


def watched(known: PolicyTable, rollout: Rollout, axis_name: str | None = None) -> PolicyTable:
    """Returns the table with the games and returns of a rollout [T, B]."""
    number: Any = rollout.carry[NUMBER]
    rows: Any = (rollout.extras[POLICY_ID], rollout.extras[GAME_NUMBER], rollout.extras[RAW_STEPS], rollout.mask)
    number = collectives.all_gather(number, axis_name)  # the same on all devices
    rows = collectives.all_gather(rows, axis_name, axis=1)
    who, count, record, mask = rows
    ended = record["terminated"] | record["truncated"]
    tracked = episodes.EpisodeRows(record["episode_return"], record["length"], record["episode_return"])
    count_one = lambda recent, number: episodes.reduce(recent, tracked, ended, mask & (who == number))[0]
    recent = jax.vmap(count_one)(known.recent, jnp.arange(known.recent.window_next.shape[0]))
    latest = known.latest.at[number // known.table.shape[2]].max(count.max(0))
    return dataclasses.replace(known, latest=latest, recent=recent)


def _taught(
    group: Group, rollout: Rollout, who: Array, axis_name: str | None, number, trained, floats, state, replay, key
):
    """Updates the policy `number` from its rows; a policy that does not learn is returned unchanged."""
    learner = fixed.learner_of(group if group.with_values is None else group.with_values(floats))
    rows = rollout.mask & (who == number)
    own = dataclasses.replace(rollout, mask=rows)
    like = jax.eval_shape(learner.step, state, replay, own, key)[2]
    blank = lambda name, x: jnp.full(x.shape, _IDLE.get(name, np.nan if x.dtype.kind == "f" else 0), x.dtype)
    idle = {name: blank(name, x) for name, x in like.items()}
    if fixed.UPDATES in idle:
        idle[fixed.UPDATES] = state.updates
    if group.algo.on_policy:
        there = collectives.any_device(rows.any(), axis_name)
        return jax.lax.cond(
            trained & there, lambda: learner.step(state, replay, own, key), lambda: (state, replay, idle)
        )
    # replay also stores rows of policies that do not learn: later transitions may refer to them
    new, replay, told = learner.step(state, replay, own, key)
    keep = lambda a, b: jnp.where(trained, a, b)
    return jax.tree.map(keep, new, state), replay, jax.tree.map(keep, told, idle)


def _rollout_of(group: Group, rollout: Rollout) -> Rollout:
    """Returns the rollout of a group, with the rows of all policies."""
    extras = dict(rollout.extras[group.label])
    extras |= {name: rollout.extras[name] for name in ("running_return", COUNTS_STEP) if name in rollout.extras}
    seen: Any = rollout.obs
    last: Any = rollout.last_obs
    return dataclasses.replace(
        rollout, obs=seen[OBS], last_obs=last[OBS], extras=extras, carry=rollout.carry[group.label]
    )


def _for_acting(known: PolicyTable) -> PolicyTable:
    return dataclasses.replace(known, latest=(), recent=())


def _follows(known: PolicyTable, game: Array, memory: Mapping[str, PyTree]) -> dict[str, Array]:
    """Returns the policy and game of each column [B]: from its memory, or from the table if a new game begins.

    Args:
      known: table of the next games.
      game: [B] i32, number of the game by the environment.
      memory: memory of the columns.
    """
    (ahead, games, agents), number, begun = known.table.shape, memory[NUMBER], memory[GAME_NUMBER] >= 0
    environment, agent = number // agents % games, number % agents
    last = known.asked[environment] - 1
    count = last - (last - game) % ahead  # the game itself, if it is in the table
    found = known.table[count % ahead, environment, agent]
    return {
        POLICY_ID: jnp.where(begun, memory[POLICY_ID], found),
        GAME_NUMBER: jnp.where(begun, memory[GAME_NUMBER], count),
    }


def _picked(out: ActOut, place: Array) -> ActOut:
    """Returns, from the outputs [P, B, ...] of P policies, the output of policy `place` [B] of each column."""
    columns = jnp.arange(place.shape[0])
    return jax.tree.map(lambda x: x[jnp.clip(place, 0, x.shape[0] - 1), columns], out)


def _where(rows: Array, new: PyTree, old: PyTree) -> PyTree:
    pick = lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    return jax.tree.map(pick, new, old)
