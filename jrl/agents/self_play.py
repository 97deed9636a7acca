"""Self-play in a program: a policy learns from games against a stacked pool of frozen copies of itself.

Who sits where is fixed (`seats`), so that shapes are, too: a copy that is taken is written over
a place of the pool, and which place plays is an array of indices. Nothing is compiled again, and memory stays as it is.

A rollout says of each row against which opponents its game began: who acts remembers it (`LEAGUE` in its memory and its
extras). So games are counted rightly whoever collects, and however late they come.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.agents import fixed
from jrl.agents.fixed import Group
from jrl.config.seats import LEAGUE
from jrl.learn.learner import Learner
from jrl.ops import collectives
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import ActOut, Algo, Array, Key, PyTree, Rollout

_YET = -1  # in memory: the game is yet to begin


@struct.dataclass
class League:
    """State of a pool of K places, the same on all devices. Results are wins, draws and losses.

    Arrays of jax in a program, of numpy where it is decided what comes next.
    """

    counts: Any  # [K, 3] i32, of the learner against each place, in games that began since the latest swap
    since: Any  # [] i32, the number of the latest swap, which is any change of opponents
    pick: Any  # [K] i32, the place that plays where place k would
    latest: Any  # [K, 3] i32, the counts of the window before, against the same pool
    generation: Any  # [K] i32, the number of each place's copy; 0 is the learner as it began
    copies: Any  # [] i32, taken so far
    payoff: Any  # [K, K, 3] i32, of the copy in place i, when it was taken, against the copy in place j
    rating: Any  # [K] f32, Elo of each copy when it was last reckoned
    marks: Any  # [] i32, multiples of snapshot_every that were passed


def begun(pool: int) -> League:
    """Returns the league of a pool whose places all hold the learner as it begins."""
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
    return League(
        counts=zeros(pool, 3),
        since=zeros(),
        pick=zeros(pool),
        latest=zeros(pool, 3),
        generation=zeros(pool),
        copies=zeros(),
        payoff=zeros(pool, pool, 3),
        rating=jnp.zeros((pool,), jnp.float32),
        marks=zeros(),
    )


def seats(num_agents: int, pool: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the columns of a block of A x K games, i32: the learner's [1, A * K], the places' [K, A * (A - 1)].

    Of two agents and a pool of one, game 0 is columns 0 and 1, game 1 columns 2 and 3:

    >>> [x.tolist() for x in seats(2, 1)]
    [[[0, 3]], [[1, 2]]]
    """
    games = np.arange(num_agents * pool)
    column = games[:, None] * num_agents + np.arange(num_agents)[None]
    learns = np.arange(num_agents)[None] == (games % num_agents)[:, None]
    others = [column[games // num_agents == k][~learns[games // num_agents == k]] for k in range(pool)]
    return column[learns][None].astype(np.int32), np.stack(others).astype(np.int32)


def groups(policy: str, places: Sequence[str], algo: Algo, num_agents: int) -> list[Group]:
    """Returns the learner and its pool as groups over blocks of games, of the columns that `seats` says."""
    mine, theirs = seats(num_agents, len(places))
    copies = algo._replace(init=lambda key: frozen(algo.init(key)))
    return [Group((policy,), mine, algo), Group(tuple(places), theirs, copies)]


def frozen(state: PyTree) -> PyTree:
    """Returns a copy of an algorithm's State without its optimizer's, which nobody asks of it."""
    kept = dataclasses.replace(state, opt_state=()) if hasattr(state, "opt_state") else state
    return jax.tree.map(jnp.copy, kept)


def acting(made: Sequence[Group]) -> Algo:
    """Makes an Algo that acts in blocks of games, of the learner and its pool; its State has the league, too.

    Memory and extras have `LEAGUE`, too: the number of the latest swap when the game began, [B] i32.
    """
    learner, pool = made
    algo = fixed.acting(made, _width(made))

    def init(key: Key) -> dict[str, PyTree]:
        found = algo.init(key)
        copies = pool.stack(dict.fromkeys(pool.names, frozen(found[learner.names[0]])))
        return {**found, **pool.unstack(copies), LEAGUE: begun(len(pool.names))}

    def actor(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return _playing(algo.actor(_policies(state)), pool, state[LEAGUE])

    def carry(batch_size: int, **place: Any) -> dict[str, PyTree]:
        return {**algo.carry(batch_size, **place), LEAGUE: jnp.full((batch_size,), _YET, jnp.int32)}

    def act(
        actor: Mapping[str, PyTree], obs: PyTree, carry: Mapping[str, PyTree], key: Key, explore: bool = True
    ) -> ActOut:
        out, began = algo.act(actor, obs, carry, key, explore), carry[LEAGUE]
        began = jnp.where(began == _YET, actor[LEAGUE], began)
        return out._replace(carry={**out.carry, LEAGUE: began}, extras={**out.extras, LEAGUE: began})

    return algo._replace(init=init, actor=actor, carry=carry, act=act)


def learning(made: Sequence[Group], num_agents: int, *, axis_name: str | None = None) -> Learner:
    """Makes a Learner of which the first group learns, and counts what it wins.

    Args:
      made: the learner, with its Learner, and the pool.
      num_agents: A.
      axis_name: of the mapped axis over devices, over which games are counted.
    """
    taught, pool = made
    inner = fixed.learning(made, _width(made))
    assert taught.learner is not None
    keep_one = taught.learner.keep

    def init(key: Key) -> dict[str, PyTree]:
        found = inner.init(key)
        copy = frozen(keep_one(found[taught.label]))
        copies = pool.stack(dict.fromkeys(pool.names, copy))
        return {**found, pool.label: copies, LEAGUE: begun(len(pool.names))}

    def actor(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return _playing(inner.actor(_policies(state)), pool, state[LEAGUE])

    def step(state: Mapping[str, PyTree], replay: PyTree, rollout: Rollout, key: Key):
        learned, replay, metrics = inner.step(_policies(state), replay, rollout, key)
        return {**learned, LEAGUE: counted(state[LEAGUE], rollout, num_agents, axis_name)}, replay, metrics

    def keep(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {**inner.keep(_policies(state)), LEAGUE: state[LEAGUE]}

    def resume(kept: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {**inner.resume(_policies(kept)), LEAGUE: kept[LEAGUE]}

    return inner._replace(init=init, actor=actor, step=step, keep=keep, resume=resume)


def swapping(made: Sequence[Group]) -> Callable[..., dict[str, PyTree]]:
    """Makes (state, place [] i32, league) -> state, which writes the learner over a place of the pool.

    Without a place among the K, such as K itself, the pool stays; the league is replaced in any case.
    """
    taught, pool = made
    assert taught.learner is not None
    keep_one = taught.learner.keep

    def swap(state: Mapping[str, PyTree], place: Array, league: League) -> dict[str, PyTree]:
        copy, copies = frozen(keep_one(state[taught.label])), state[pool.label]
        here = jnp.arange(len(pool.names)) == place
        if pool.stacked:
            write = lambda x, new: jnp.where(here.reshape(-1, *[1] * new.ndim), new[None], x)
        else:
            write = lambda x, new: jnp.where(here[0], new, x)
        return {**state, pool.label: jax.tree.map(write, copies, copy), LEAGUE: league}

    return swap


def counted(league: League, rollout: Rollout, num_agents: int, axis_name: str | None = None) -> League:
    """Counts the games that ended in a rollout [T, G * A] and began after the latest swap.

    The learner has won a game when its return is above those of all others on the row where it ends, and lost it when
    it is below one of them. A rollout that nobody recorded (`jrl.rollout.unroll.RAW_STEPS`) counts none.
    """
    if RAW_STEPS not in rollout.extras:
        return league
    steps, columns = rollout.mask.shape
    record: Any = rollout.extras[RAW_STEPS]
    games = columns // num_agents
    seat, pool = jnp.arange(games) % num_agents, league.pick.shape[0]
    learns = jnp.arange(num_agents)[None] == seat[:, None]  # [G, A]
    split = lambda x: x.reshape(steps, games, num_agents)
    of_mine = lambda x: jnp.take_along_axis(split(x), seat[None, :, None], -1)[..., 0]
    ended = of_mine((record["terminated"] | record["truncated"]) & rollout.mask)
    counts = ended & (of_mine(rollout.extras[LEAGUE]) == league.since)
    mine = of_mine(record["episode_return"])
    best = jnp.where(learns, -jnp.inf, split(record["episode_return"])).max(-1)
    results = jnp.stack([mine > best, mine == best, mine < best], -1) & counts[..., None]  # [T, G, 3]
    place = league.pick[jnp.arange(games) // num_agents % pool]
    found = jnp.zeros((pool, 3), jnp.int32).at[place].add(results.sum(0, dtype=jnp.int32))
    return dataclasses.replace(league, counts=league.counts + collectives.psum(found, axis_name))


def _playing(actor: Mapping[str, PyTree], pool: Group, league: League) -> dict[str, PyTree]:
    """Puts the copies that play in the places where they do, and tells since when they play."""
    if pool.stacked:
        actor = {**actor, pool.label: jax.tree.map(lambda x: x[league.pick], actor[pool.label])}
    return {**actor, LEAGUE: league.since}


def _policies(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    return {name: one for name, one in state.items() if name != LEAGUE}


def _width(made: Sequence[Group]) -> int:
    return sum(group.agents.size for group in made)
