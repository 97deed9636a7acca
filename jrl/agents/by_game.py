"""Policies whose agents can change from game to game.

All policies act for all agents, and each agent takes the action of the policy that it follows in this game. Each
policy learns from its own rows; the other rows are masked. A table of games to come says which policy an agent
follows. The host fills the table (`jrl.agents.game_table`).

An agent reads the table when its game begins, and keeps the policy until the game ends. Each row of a rollout has the
numbers of its policy and of its game, so that a late rollout still finds its policy.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.agents import fixed
from jrl.agents.fixed import Group
from jrl.config.policy_mapping import ROSTER
from jrl.envs.agent_options import GAME, OBS
from jrl.errors import InputError
from jrl.learn.learner import Learner
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
    Key,
    Metrics,
    PyTree,
    Rollout,
)

NUMBER = "number"  # leaf of the memory: the number of the column in the run, [B] i32
GAME_NUMBER = "game"  # the number of the game, in the extras and the memory, where it is below 0 until the game begins
_IDLE = {NOT_FINITE: 0.0, BROKEN_STACKS: 0.0, VALID_SHARE: 1.0}  # metrics of who does not learn, else NaN


class Sizes(NamedTuple):
    """The shape of a table."""

    ahead: int  # M, games of each environment that are known at a time
    games: int  # G, environments of the run
    agents: int  # A, of each
    policies: int  # P


@struct.dataclass
class Roster:
    """The policy of each agent in games to come, the same on all devices; beside the policies in a run's State.

    Game i of environment g is row i % M of the table. Games outside the table reuse a row of it (modulo), as in a long
    evaluation or of an env runner that replaces another.
    """

    table: Any  # [M, G, A] i32, numbers of policies
    asked: Any  # [G] i32, games that the mapping was asked for: the table has the latest M of them
    latest: Any  # [G] i32, the game that was acted in
    recent: episodes.EpisodeState  # [P, ...], latest episodes of the agents that followed each policy


def empty(sizes: Sizes) -> Roster:
    """Returns a roster whose table is yet to be filled."""
    return Roster(
        table=jnp.zeros((sizes.ahead, sizes.games, sizes.agents), jnp.int32),
        asked=jnp.zeros(sizes.games, jnp.int32),
        latest=jnp.zeros(sizes.games, jnp.int32),
        recent=jax.vmap(lambda _: episodes.init(1))(jnp.arange(sizes.policies)),
    )


def acting(groups: Sequence[Group], sizes: Sizes) -> Algo:
    """Makes an Algo that acts with all policies; its State is a dict by policy, with the roster beside them.

    Its observations have the number of the game (`views.with_game_numbers`). Its memory has the number of each column
    in the run, and the policy and game that the column began with. Extras are dicts by group, beside these two.
    """
    inner = fixed.acting(groups, sizes.agents)

    def init(key: Key) -> dict[str, PyTree]:
        return {**inner.init(key), ROSTER: empty(sizes)}

    def actor(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {**inner.actor(_policies(state)), ROSTER: _table(state[ROSTER])}

    def carry(batch_size: int, first: Any = 0, total: int | None = None) -> dict[str, PyTree]:
        numbers = first + jnp.arange(batch_size, dtype=jnp.int32)
        nothing = jnp.full((batch_size,), -1, jnp.int32)
        found = inner.carry(batch_size, first=first, total=total)
        return {**found, NUMBER: numbers, POLICY_ID: nothing, GAME_NUMBER: nothing}

    def act(
        actor: Mapping[str, PyTree], obs: PyTree, carry: Mapping[str, PyTree], key: Key, explore: bool = True
    ) -> ActOut:
        own = _follows(actor[ROSTER], obs[GAME], carry, sizes)
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

    gammas: set[float] = set()
    for group in groups:
        if group.algo.running_return_gamma is not None:
            gamma = group.mapped(lambda one: lambda _: jnp.asarray(one.algo.running_return_gamma, jnp.float32))
            gammas |= {float(f"{x:.7g}") for x in np.reshape(gamma(np.zeros(len(group.names))), -1)}
    if len(gammas) > 1:
        raise InputError(
            "multi_agent.policies: with algo.normalize_reward, policies that an agent follows by turns need one gamma, "
            f"got {', '.join(map(str, sorted(gammas)))}: give them the same"
        )
    return inner._replace(init=init, actor=actor, carry=carry, act=act, running_return_gamma=next(iter(gammas), None))


def learning(
    groups: Sequence[Group], sizes: Sizes, trained: Sequence[bool], *, axis_name: str | None = None
) -> Learner:
    """Makes a Learner of which each policy that learns does so from the rows on which it was followed.

    Without replay the policies learn one after the other, so that policies that do not learn cost nothing. Metrics are
    `policy/NAME/...`, among them `return`, the mean over the latest episodes of the agents that followed the policy.

    Args:
      groups, sizes: of the policies and of their table.
      trained: whether each policy learns, in the order of the groups.
      axis_name: of the mapped axis over devices.
    """
    inner = fixed.learning(groups, sizes.agents)

    def init(key: Key) -> dict[str, PyTree]:
        return {**inner.init(key), ROSTER: empty(sizes)}

    def actor(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {**inner.actor(_policies(state)), ROSTER: _table(state[ROSTER])}

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
            elif group.algo.on_policy:  # one after the other: policies that do not learn cost nothing
                learned = jax.lax.map(lambda one, teach=teach: teach(*one), (*each, keys))
            else:  # side by side: no replay is copied
                learned = jax.vmap(teach)(*each, keys)
            state[group.label], replay[group.label], found = learned
            metrics |= group.unstack(found)
        state[ROSTER] = watched(state[ROSTER], rollout, sizes, axis_name)
        row = fixed.told(metrics)
        latest = state[ROSTER].recent.window_return
        returns, window = jnp.nanmean(latest, -1), jnp.isfinite(latest).sum(-1, dtype=jnp.float32)
        for k, name in enumerate(name for group in groups for name in group.names):
            row |= {f"policy/{name}/return": returns[k], f"policy/{name}/window": window[k]}
        return state, replay, row

    def keep(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {**inner.keep(_policies(state)), ROSTER: state[ROSTER]}

    def resume(kept: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {**inner.resume(_policies(kept)), ROSTER: kept[ROSTER]}

    return inner._replace(init=init, actor=actor, step=step, keep=keep, resume=resume)


def watched(roster: Roster, rollout: Rollout, sizes: Sizes, axis_name: str | None = None) -> Roster:
    """Notes which games were played, and what the agents that followed each policy earned, in a rollout [T, B]."""
    number: Any = rollout.carry[NUMBER]
    rows: Any = (rollout.extras[POLICY_ID], rollout.extras[GAME_NUMBER], rollout.extras[RAW_STEPS], rollout.mask)
    number = collectives.all_gather(number, axis_name)  # the same on all devices
    rows = collectives.all_gather(rows, axis_name, axis=1)
    who, count, record, mask = rows
    ended = record["terminated"] | record["truncated"]
    tracked = episodes.EpisodeRows(record["episode_return"], record["length"], record["episode_return"])
    count_one = lambda recent, number: episodes.reduce(recent, tracked, ended, mask & (who == number))[0]
    recent = jax.vmap(count_one)(roster.recent, jnp.arange(sizes.policies))
    latest = roster.latest.at[number // sizes.agents].max(count.max(0))
    return dataclasses.replace(roster, latest=latest, recent=recent)


def _of_one(group: Group, floats: PyTree) -> Learner:
    if group.with_values is not None:
        group = group.with_values(floats)
    assert group.learner is not None
    return group.learner


def _taught(
    group: Group, rollout: Rollout, who: Array, axis_name: str | None, number, trained, floats, state, replay, key
):
    """Trains the policy of that number on its rows, or leaves it bit for bit."""
    learner, rows = _of_one(group, floats), rollout.mask & (who == number)
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
    # a replay takes the rows of who does not learn, too, as what follows upon them may be learned from
    new, replay, told = learner.step(state, replay, own, key)
    keep = lambda a, b: jnp.where(trained, a, b)
    return jax.tree.map(keep, new, state), replay, jax.tree.map(keep, told, idle)


def _rollout_of(group: Group, rollout: Rollout) -> Rollout:
    """Returns a rollout as the policies of a group see it, with all rows."""
    extras = dict(rollout.extras[group.label])
    extras |= {name: rollout.extras[name] for name in ("running_return", COUNTS_STEP) if name in rollout.extras}
    seen: Any = rollout.obs
    last: Any = rollout.last_obs
    return dataclasses.replace(
        rollout, obs=seen[OBS], last_obs=last[OBS], extras=extras, carry=rollout.carry[group.label]
    )


class _Table(NamedTuple):
    """Parts of a Roster that acting needs."""

    table: Array
    asked: Array


def _table(roster: Roster) -> _Table:
    return _Table(roster.table, roster.asked)


def _follows(known: _Table, game: Array, memory: Mapping[str, PyTree], sizes: Sizes) -> dict[str, Array]:
    """Returns the policy and game of each column [B]: what it remembers, or what the table says of a new game.

    Args:
      known: the table of games to come.
      game: [B] i32, as the environment counts.
      memory: of the columns.
      sizes: of the table.
    """
    number, begun = memory[NUMBER], memory[GAME_NUMBER] >= 0
    environment, agent = number // sizes.agents % sizes.games, number % sizes.agents
    last = known.asked[environment] - 1
    count = last - (last - game) % sizes.ahead  # the game itself, if the table is of it
    found = known.table[count % sizes.ahead, environment, agent]
    return {
        POLICY_ID: jnp.where(begun, memory[POLICY_ID], found),
        GAME_NUMBER: jnp.where(begun, memory[GAME_NUMBER], count),
    }


def _picked(out: ActOut, place: Array) -> ActOut:
    """Picks, of the outputs of a group's P policies, [P, B, ...], those of the policy in `place` [B]."""
    columns = jnp.arange(place.shape[0])
    return jax.tree.map(lambda x: x[jnp.clip(place, 0, x.shape[0] - 1), columns], out)


def _where(rows: Array, new: PyTree, old: PyTree) -> PyTree:
    pick = lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    return jax.tree.map(pick, new, old)


def _policies(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    return {name: one for name, one in state.items() if name != ROSTER}
