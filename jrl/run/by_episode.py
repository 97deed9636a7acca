"""Several policies of which it may change from game to game who follows which.

Every agent's column is every policy's: all act in all columns, of which each takes the action of the policy that its
agent follows in this game, and each policy learns from the rows that are its own, the others being masked. Who follows
which is a table of games to come, which the host fills (`jrl.run.roster`): an array, so that policies are added and
removed without compiling anything.

An agent looks it up when its game begins, and remembers it. Policies have numbers that are never given twice, and the
rollout says of each row whose it is and of which game: so it does not matter who collects, how late a rollout comes,
and what has become of table and policies meanwhile.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.envs.views import GAME, OBS
from jrl.errors import InputError
from jrl.metrics import episodes
from jrl.ops import collectives
from jrl.rollout.unroll import RECORD
from jrl.run import several
from jrl.run.learner import Learner
from jrl.run.several import Group
from jrl.settings.by_episode import ROSTER
from jrl.types import (
    BROKEN_STACKS,
    LEADS,
    NOT_FINITE,
    PLACE,
    VALID_SHARE,
    ActOut,
    Algo,
    Array,
    Key,
    Metrics,
    PyTree,
    Rollout,
)

NOBODY = -1  # in the place of one that there is: of a policy that was removed while a game was under way
FREE = -2  # in the place of the number of a policy
NUMBER = "number"  # leaf of the memory: the number of the column in the run, [B] i32
COUNT = "game"  # the number of the game, in the extras and the memory, where it is below 0 until the game begins
_IDLE = {NOT_FINITE: 0.0, BROKEN_STACKS: 0.0, VALID_SHARE: 1.0}  # metrics of who does not learn, else NaN


class Sizes(NamedTuple):
    """The shape of a table."""

    ahead: int  # M, games of each environment that are told at a time
    games: int  # G, environments of the run
    agents: int  # A, of each
    policies: int  # C, places


@struct.dataclass
class Roster:
    """Roster of who follows which policy, the same on all devices; beside the policies in a run's State.

    Game i of environment g is row i % M of the table; one that the table is not of, as in a long evaluation or of an
    env runner in the place of another, is played as the game that has its row.
    """

    table: Any  # [M, G, A] i32, numbers of policies
    asked: Any  # [G] i32, games that were asked for: the table has the latest M of them
    latest: Any  # [G] i32, the game that was acted in
    numbers: Any  # [C] i32, of the policy in each place; FREE
    given: Any  # [] i32, numbers that were given so far
    trained: Any  # [C] bool, which learn
    floats: Any  # group -> ([P] f32, ...), those of the algorithms in its places
    recent: episodes.Columns  # [C, ...], of the agents' episodes that followed each


def begun(sizes: Sizes, trained: Sequence[bool], groups: Sequence[Group] = ()) -> Roster:
    """Returns a roster whose table is yet to be filled."""
    floats = {group.label: group.floats for group in groups if group.of_floats is not None}
    recent = jax.vmap(lambda _: episodes.init(1))(jnp.arange(sizes.policies))
    return Roster(
        table=jnp.full((sizes.ahead, sizes.games, sizes.agents), NOBODY, jnp.int32),
        asked=jnp.zeros(sizes.games, jnp.int32),
        latest=jnp.zeros(sizes.games, jnp.int32),
        numbers=jnp.arange(sizes.policies, dtype=jnp.int32),
        given=jnp.int32(sizes.policies),
        trained=jnp.asarray(trained, bool),
        floats={name: tuple(map(jnp.asarray, own.values())) for name, own in floats.items()},
        recent=recent,
    )


def acting(groups: Sequence[Group], sizes: Sizes, trained: Sequence[bool]) -> Algo:
    """Makes an Algo that acts with all policies; its State is a dict by place that has the roster, too.

    It acts on observations with the number of the game (`views.with_game_numbers`), and its memory has each column's
    number in the run, and the policy and the game that it began with. Extras are dicts by group, beside these two.
    """
    inner = several.acting(groups, sizes.agents)

    def init(key: Key) -> dict[str, PyTree]:
        return {**inner.init(key), ROSTER: begun(sizes, trained, groups)}

    def actor(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        own = several.acting(_now(groups, state[ROSTER].floats), sizes.agents)
        return {**own.actor(_policies(state)), ROSTER: _told(state[ROSTER])}

    def carry(batch_size: int, first: Any = 0, total: int | None = None) -> dict[str, PyTree]:
        numbers = first + jnp.arange(batch_size, dtype=jnp.int32)
        nothing = jnp.full((batch_size,), -1, jnp.int32)
        found = inner.carry(batch_size, first=first, total=total)
        return {**found, NUMBER: numbers, PLACE: nothing, COUNT: nothing}

    def act(
        actor: Mapping[str, PyTree], obs: PyTree, carry: Mapping[str, PyTree], key: Key, explore: bool = True
    ) -> ActOut:
        own = _follows(actor[ROSTER], obs[GAME], carry, sizes)
        place, start, action = _place_of(own[PLACE], actor[ROSTER].numbers), 0, None
        memories: dict[str, PyTree] = {NUMBER: carry[NUMBER], **own}
        extras: dict[str, PyTree] = {**own}
        for i, group in enumerate(_now(groups, actor[ROSTER].floats)):
            memory = carry[group.label]
            pick = lambda one, memory=memory: lambda actor, key: one.algo.act(actor, obs[OBS], memory, key, explore)
            out = group.mapped(pick)(actor[group.label], group.keys(jax.random.fold_in(key, i)))
            mine, start = place - start, start + len(group.names)
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

    Without replay one after the other, so that those that do not learn, and places that are free, cost nothing. Metrics
    are `policy/PLACE/...`, `return` among them, the mean over the latest episodes of the agents that followed it.

    Args:
      axis_name: of the mapped axis over devices.
    """
    inner = several.learning(groups, sizes.agents)

    def init(key: Key) -> dict[str, PyTree]:
        return {**inner.init(key), ROSTER: begun(sizes, trained, groups)}

    def actor(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        own = several.learning(_now(groups, state[ROSTER].floats), sizes.agents)
        return {**own.actor(_policies(state)), ROSTER: _told(state[ROSTER])}

    def step(state: Mapping[str, PyTree], replay: Mapping[str, PyTree], rollout: Rollout, key: Key):
        roster, who = state[ROSTER], rollout.extras[PLACE]
        state, replay, metrics, start = dict(state), dict(replay), dict[str, Metrics](), 0
        for i, group in enumerate(groups):
            place = jnp.arange(start, start := start + len(group.names))
            teach = functools.partial(_taught, group, _rollout_of(group, rollout), who, axis_name)
            floats = roster.floats.get(group.label, ())
            each = (roster.numbers[place], roster.trained[place], floats, state[group.label], replay[group.label])
            keys = group.keys(jax.random.fold_in(key, i))
            if not group.stacked:
                learned = teach(each[0][0], each[1][0], *each[2:], keys)
            elif group.algo.on_policy:  # one after the other: who does not learn costs nothing
                learned = jax.lax.map(lambda one, teach=teach: teach(*one), (*each, keys))
            else:  # side by side: no replay is copied
                learned = jax.vmap(teach)(*each, keys)
            state[group.label], replay[group.label], told = learned
            metrics |= group.apart(told)
        state[ROSTER] = watched(roster, rollout, sizes, axis_name)
        found = several.told(metrics)
        latest = state[ROSTER].recent.window_return
        returns, window = jnp.nanmean(latest, -1), jnp.isfinite(latest).sum(-1, dtype=jnp.float32)
        for k, name in enumerate(name for group in groups for name in group.names):
            found |= {f"policy/{name}/return": returns[k], f"policy/{name}/window": window[k]}
        return state, replay, found

    def keep(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {**inner.keep(_policies(state)), ROSTER: state[ROSTER]}

    def resume(kept: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {**inner.resume(_policies(kept)), ROSTER: kept[ROSTER]}

    return inner._replace(init=init, actor=actor, step=step, keep=keep, resume=resume)


def watched(roster: Roster, rollout: Rollout, sizes: Sizes, axis_name: str | None = None) -> Roster:
    """Notes which games were played, and what the agents that followed each policy earned, in a rollout [T, B]."""
    number: Any = rollout.carry[NUMBER]
    rows: Any = (rollout.extras[PLACE], rollout.extras[COUNT], rollout.extras[RECORD], rollout.mask)
    number = collectives.all_gather(number, axis_name)  # the same on all devices
    rows = collectives.all_gather(rows, axis_name, axis=1)
    who, count, record, mask = rows
    ended = record["terminated"] | record["truncated"]
    tracked = episodes.Tracked(record["episode_return"], record["length"], record["episode_return"])
    count_one = lambda recent, number: episodes.reduce(recent, tracked, ended, mask & (who == number))[0]
    recent = jax.vmap(count_one)(roster.recent, roster.numbers)
    latest = roster.latest.at[number // sizes.agents].max(count.max(0))
    return dataclasses.replace(roster, latest=latest, recent=recent)


def writing(group: Group) -> Callable[..., tuple[dict[str, PyTree], dict[str, PyTree]]]:
    """Makes (state, replay, place [] i32, key, given, takes [] bool, floats) -> state, replay: a policy in a place.

    It has fresh weights or, where `takes` holds, those of `given`, which is what is kept of one, and an empty replay.
    Where there is no such place in the group nothing is written. Floats are those of its algorithm, () where all have
    those of the first.
    """

    def write(
        state: Mapping[str, PyTree], replay: PyTree, place: Array, key: Key, given: PyTree, takes: Array, floats: PyTree
    ):
        learner = _of_one(group, floats)
        choose = lambda new, old: jnp.where(takes, new.astype(old.dtype), old)
        fresh = jax.tree.map(choose, given, learner.keep(learner.init(key)))
        put = lambda stack, new: stack.at[place].set(new) if group.stacked else stack
        state = {**state, group.label: jax.tree.map(put, state[group.label], learner.resume(fresh))}
        return state, {**replay, group.label: jax.tree.map(put, replay[group.label], learner.init_replay())}

    return write


def moved(group: Group, state: Mapping[str, PyTree], replay: Mapping[str, PyTree], gone: Array, last: Array):
    """Returns the state and replay in which the policy in the place `last` of a group is in that of `gone`, too."""
    move = lambda x: x.at[gone].set(x[last]) if group.stacked else x
    of_group = lambda trees: {**trees, group.label: jax.tree.map(move, trees[group.label])}
    return of_group(state), of_group(replay)


def _now(groups: Sequence[Group], floats: Mapping[str, PyTree]) -> list[Group]:
    """Returns the groups with the present floats of their policies."""
    return [group._replace(floats=dict(enumerate(floats.get(group.label, ())))) for group in groups]


def _of_one(group: Group, floats: PyTree) -> Learner:
    """Returns the learner of a policy with these floats, of a group where policies have their own."""
    if group.of_floats is not None:
        group = group.of_floats(dict(enumerate(floats)))
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
    if several.UPDATES in idle:
        idle[several.UPDATES] = state.updates
    if group.algo.on_policy:
        there = collectives.somewhere(rows.any(), axis_name)
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
    extras |= {name: rollout.extras[name] for name in ("running_return", LEADS) if name in rollout.extras}
    seen: Any = rollout.obs
    last: Any = rollout.last_obs
    return dataclasses.replace(
        rollout, obs=seen[OBS], last_obs=last[OBS], extras=extras, carry=rollout.carry[group.label]
    )


class _Told(NamedTuple):
    """Parts of a Roster that acting needs."""

    table: Array
    asked: Array
    numbers: Array
    floats: Mapping[str, PyTree]


def _told(roster: Roster) -> _Told:
    return _Told(roster.table, roster.asked, roster.numbers, roster.floats)


def _follows(told: _Told, game: Array, memory: Mapping[str, PyTree], sizes: Sizes) -> dict[str, Array]:
    """Returns the policy and game of each column [B]: what it remembers, or what the table says of a new game.

    Args:
      told: of the games to come.
      game: [B] i32, as the environment counts.
      memory: of the columns.
      sizes: of the table.
    """
    number, begun = memory[NUMBER], memory[COUNT] >= 0
    environment, agent = number // sizes.agents % sizes.games, number % sizes.agents
    last = told.asked[environment] - 1
    count = last - (last - game) % sizes.ahead  # the game itself, if the table is of it
    found = told.table[count % sizes.ahead, environment, agent]
    return {PLACE: jnp.where(begun, memory[PLACE], found), COUNT: jnp.where(begun, memory[COUNT], count)}


def _place_of(who: Array, numbers: Array) -> Array:
    """Returns the places [B] of policies by their numbers [B]; NOBODY where there is no such policy any more."""
    there = who[:, None] == numbers[None]
    return jnp.where(there.any(-1), there.argmax(-1).astype(jnp.int32), NOBODY)


def _picked(out: ActOut, place: Array) -> ActOut:
    """Picks, of the outputs of a group's P policies, [P, B, ...], those of the policy in `place` [B]."""
    columns = jnp.arange(place.shape[0])
    return jax.tree.map(lambda x: x[jnp.clip(place, 0, x.shape[0] - 1), columns], out)


def _where(rows: Array, new: PyTree, old: PyTree) -> PyTree:
    pick = lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    return jax.tree.map(pick, new, old)


def _policies(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    return {name: one for name, one in state.items() if name != ROSTER}
