"""Self-play in a program: a policy learns from games against a stacked pool of frozen copies of itself.

Game g of a device has the learner in seat g % A, and slot (g // A) % K of the pool in the other seats. A block of A x K
games has the learner in every seat against every slot once. Seats and shapes are fixed: a new copy overwrites a
slot, and an array of indices selects the copy that plays in each slot. Nothing compiles again.

Memory and extras have the number of the last swap when a row's game began (`LEAGUE`), so that late games are counted
for the right opponents.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.agents import fixed, league
from jrl.agents.fixed import Group
from jrl.agents.league import League
from jrl.agents.policies import MakeAlgo, Policies, mean
from jrl.config import RunConfig, multi_agent
from jrl.config.multi_agent import LEAGUE
from jrl.host import files
from jrl.learn import parallel
from jrl.learn.learner import Learner
from jrl.learn.program import LoopState, Program
from jrl.metrics import payoff
from jrl.ops import collectives
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import ActOut, Algo, Array, EnvSpec, Key, PyTree, Rollout

OPPONENTS = "opponents"  # label of all copies in recorded data
_NOT_BEGUN = -1  # in memory: the game has not begun


class SelfPlay(Policies):
    """One policy that learns, and K frozen copies of it; the State also has the `League` of their games.

    Memory and extras have `LEAGUE`: the number of the latest swap when the game began, [B] i32.
    """

    watches_games = True
    decides_by_row = True  # the next opponents must not depend on the progress of the device

    def __init__(self, cfg: RunConfig, spec: EnvSpec | None):
        super().__init__(cfg, spec)
        assert cfg.multi_agent is not None and cfg.multi_agent.self_play is not None
        self.section = cfg.multi_agent.self_play
        self._num_agents = len(cfg.multi_agent.agents or ())
        self._swap: Any = None

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        cfg, spec = self.of(self.section.policy)
        seated = zip((self.names[:1], self.names[1:]), seats(self._num_agents, self.section.pool), strict=True)
        return tuple(Group(names, columns, cfg=cfg, spec=spec) for names, columns in seated)

    @property
    def reported(self) -> Mapping[str, Sequence[str]]:
        return {}

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(name if name == self.section.policy else OPPONENTS for name in self.column_policies)

    def whole_games(self, games: int) -> int:
        unit = self._num_agents * self.section.pool or 1  # 1: the agents are unknown
        return -(-games // unit) * unit

    @property
    def rewards_of(self) -> Callable[[int], tuple[np.ndarray, int]] | None:
        """Returns the learner's columns: an evaluation reports its rewards."""
        pool = self.section.pool
        return lambda agents: (seats(agents, pool)[0][0], agents**2 * pool)

    def returns(self, played: Any) -> dict[str, float]:
        return {f"policy/{self.section.policy}/return": mean(played.returns) if played else float("nan")}

    # ------------------------------------------------------------ acting and learning

    def bind(self, make: MakeAlgo) -> tuple[Group, ...]:
        mine, pool = self.groups
        algo = make(mine.cfg, mine.spec)
        copies = algo._replace(init=lambda key: frozen(algo.init(key)))
        return mine._replace(algo=algo), pool._replace(algo=copies)

    def acting(self, groups: Sequence[Group]) -> Algo:
        """Returns an Algo that acts in blocks of games of the learner and its pool."""
        mine, pool = groups
        algo = fixed.acting(groups, _width(groups))

        def init(key: Key) -> dict[str, PyTree]:
            found = algo.init(key)
            copies = pool.stack(dict.fromkeys(pool.names, frozen(found[mine.names[0]])))
            return {**found, **pool.unstack(copies), LEAGUE: league.init(len(pool.names))}

        def carry(batch_size: int, **place: Any) -> dict[str, PyTree]:
            return {**algo.carry(batch_size, **place), LEAGUE: jnp.full((batch_size,), _NOT_BEGUN, jnp.int32)}

        def act(
            actor: Mapping[str, PyTree], obs: PyTree, carry: Mapping[str, PyTree], key: Key, explore: bool = True
        ) -> ActOut:
            out, began = algo.act(actor, obs, carry, key, explore), carry[LEAGUE]
            began = jnp.where(began == _NOT_BEGUN, actor[LEAGUE], began)
            return out._replace(carry={**out.carry, LEAGUE: began}, extras={**out.extras, LEAGUE: began})

        return algo._replace(init=init, actor=_playing(algo.actor, pool), carry=carry, act=act)

    def learning(self, groups: Sequence[Group], *, axis_name: str | None = None) -> Learner:
        """Returns a Learner of the first group, which also counts its results over `axis_name`."""
        mine, pool = groups
        inner, num_agents = fixed.learning(groups, _width(groups)), self._num_agents
        keep_one = fixed.learner_of(mine).keep

        def init(key: Key) -> dict[str, PyTree]:
            found = inner.init(key)
            copies = pool.stack(dict.fromkeys(pool.names, frozen(keep_one(found[mine.label]))))
            return {**found, pool.label: copies, LEAGUE: league.init(len(pool.names))}

        def step(state: Mapping[str, PyTree], replay: PyTree, rollout: Rollout, key: Key):
            learned, replay, metrics = inner.step(fixed.without(state, LEAGUE), replay, rollout, key)
            return {**learned, LEAGUE: counted(state[LEAGUE], rollout, num_agents, axis_name)}, replay, metrics

        return inner._replace(
            init=init,
            actor=_playing(inner.actor, pool),
            step=step,
            keep=fixed.with_item(inner.keep, LEAGUE),
            resume=fixed.with_item(inner.resume, LEAGUE),
        )

    # ------------------------------------------------------------ on the host, after a row

    def on_row(
        self, program: Program, state: LoopState, row: dict[str, Any], count: int, directory: Path | None
    ) -> LoopState:
        """Adds the league's metrics to a row; takes a copy and changes the opponents, if due."""
        before = on_host(state)
        after, place = league.decide(before, self.section, row["env_steps"], (self.cfg.run.seed, count))
        row.update(league.metrics(before, self.section))
        row.update({"league/size": league.size(after), "league/copies": int(after.copies)})
        if after is not before:
            if self._swap is None:
                same = parallel.REPLICATED
                swap = functools.partial(_swapped, self.groups, program.learner.keep)
                self._swap = parallel.pmap(swap, program.mesh, (same, same, same), same, donate_argnums=(0,))
            state = dataclasses.replace(state, learner=self._swap(state.learner, np.int32(place), after))
        if directory is not None and directory.is_dir():
            self._write(on_host(state), directory)
        return state

    def _players(self, known: League) -> list[str]:
        """Returns the names of the copies and of the policy, in the order of the table."""
        held = [f"{self.section.policy} {n}" for n in known.generation[: league.num_held(known)]]
        return [*held, f"{self.section.policy} now"]

    def _write(self, known: League, directory: Path) -> None:
        """Writes league.json: the players of the pool, all results, ratings and their standard errors."""
        results, (rating, error) = league.table(known), league.ratings(known)
        number = lambda x: round(float(x), 3) if np.isfinite(x) else None
        content = {
            "players": self._players(known),
            "places": dict(zip(multi_agent.places(self.section), map(int, known.generation), strict=True)),
            "copies": int(known.copies),
            "wins_draws_losses": results.tolist(),
            "elo": [number(x) for x in rating],
            "elo_se": [number(x) for x in error],
        }
        files.replace(directory / "league.json", json.dumps(content, indent=1) + "\n")

    def draw(self, state: LoopState, directory: Path, title: str) -> Path | None:
        """Draws league.png: the payoff matrix and the ratings."""
        known = on_host(state)
        results, names = league.table(known), self._players(known)
        return payoff.draw(directory / "league.png", names, results, *league.ratings(known), title=title)


def on_host(state: LoopState) -> League:
    """Returns the league of a run, in numpy; waits for the device."""
    return jax.tree.map(np.asarray, state.learner[LEAGUE])


def seats(num_agents: int, pool: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the columns of a block of A x K games, i32: the learner's [1, A * K], the slots' [K, A * (A - 1)].

    With two agents and a pool of one, game 0 has columns 0 and 1, game 1 has columns 2 and 3:

    >>> [x.tolist() for x in seats(2, 1)]
    [[[0, 3]], [[1, 2]]]
    """
    games = np.arange(num_agents * pool)
    column = games[:, None] * num_agents + np.arange(num_agents)[None]
    learns = np.arange(num_agents)[None] == (games % num_agents)[:, None]
    others = [column[games // num_agents == k][~learns[games // num_agents == k]] for k in range(pool)]
    return column[learns][None].astype(np.int32), np.stack(others).astype(np.int32)


def frozen(state: PyTree) -> PyTree:
    """Returns a copy of an algorithm's State without its optimizer state."""
    kept = dataclasses.replace(state, opt_state=()) if hasattr(state, "opt_state") else state
    return jax.tree.map(jnp.copy, kept)


def _swapped(
    groups: Sequence[Group], keep: Callable[[PyTree], PyTree], state: Mapping[str, PyTree], place: Array, after: League
) -> dict[str, PyTree]:
    """Returns the state with the learner's copy in slot `place` of the pool, and with the league `after`.

    If `place` is K, the pool does not change.
    """
    mine, pool = groups
    copy, copies = frozen(keep(state)[mine.names[0]]), state[pool.label]
    here = jnp.arange(len(pool.names)) == place
    if pool.stacked:
        write = lambda x, new: jnp.where(here.reshape(-1, *[1] * new.ndim), new[None], x)
    else:
        write = lambda x, new: jnp.where(here[0], new, x)
    return {**state, pool.label: jax.tree.map(write, copies, copy), LEAGUE: after}


def counted(known: League, rollout: Rollout, num_agents: int, axis_name: str | None = None) -> League:
    """Adds the results of games that ended in a rollout [T, G * A] and began after the last swap.

    The learner wins if its return is above all others on the game's last row, and loses if it is below one of them.
    Rollouts without `jrl.rollout.unroll.RAW_STEPS` add nothing.
    """
    if RAW_STEPS not in rollout.extras:
        return known
    steps, columns = rollout.mask.shape
    record: Any = rollout.extras[RAW_STEPS]
    games = columns // num_agents
    seat, pool = jnp.arange(games) % num_agents, known.pick.shape[0]
    learns = jnp.arange(num_agents)[None] == seat[:, None]  # [G, A]
    split = lambda x: x.reshape(steps, games, num_agents)
    of_mine = lambda x: jnp.take_along_axis(split(x), seat[None, :, None], -1)[..., 0]
    ended = of_mine((record["terminated"] | record["truncated"]) & rollout.mask)
    counts = ended & (of_mine(rollout.extras[LEAGUE]) == known.since)
    mine = of_mine(record["episode_return"])
    best = jnp.where(learns, -jnp.inf, split(record["episode_return"])).max(-1)
    results = jnp.stack([mine > best, mine == best, mine < best], -1) & counts[..., None]  # [T, G, 3]
    place = known.pick[jnp.arange(games) // num_agents % pool]
    found = jnp.zeros((pool, 3), jnp.int32).at[place].add(results.sum(0, dtype=jnp.int32))
    return dataclasses.replace(known, counts=known.counts + collectives.psum(found, axis_name))


def _playing(actor: Callable[[PyTree], Any], pool: Group) -> Callable[[Mapping[str, PyTree]], dict[str, PyTree]]:
    """Returns `actor` with the selected copy of each slot, and the number of the last swap."""

    def read(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        known, found = state[LEAGUE], actor(fixed.without(state, LEAGUE))
        if pool.stacked:
            found = {**found, pool.label: jax.tree.map(lambda x: x[known.pick], found[pool.label])}
        return {**found, LEAGUE: known.since}

    return read


def _width(groups: Sequence[Group]) -> int:
    return sum(group.agents.size for group in groups)
