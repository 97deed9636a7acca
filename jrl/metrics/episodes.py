"""Episode statistics, computed on the device from what a rollout recorded."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.ops import scans, sums
from jrl.types import Array, Episodes, PyTree

WINDOW = 100  # episodes over which the reported mean return is taken, unless a run says otherwise


@struct.dataclass
class Columns:
    """Statistics of the episodes in flight, one per environment, and of the latest that ended."""

    episode_return: Array  # [B] f32, undiscounted, so far
    return_rest: Array  # [B] f32, what that sum is beyond float32: a million steps would be 1 % off without it
    length: Array  # [B] i32, steps so far
    running_return: Array  # [B] f32, discounted return so far; 0 where it is not recorded
    window_return: Array  # [W] f32, ring of the last W returns; NaN where there is none yet
    window_length: Array  # [W] f32
    window_next: Array  # [] i32, where the next episode is written
    games: Any = ()  # Columns or (), of several agents, whose windows then are [A, W] and [A]: the same of games


_FLYING = ("episode_return", "return_rest", "length", "running_return")
_WINDOWS = ("window_return", "window_length", "window_next")


class Tracked(NamedTuple):
    """Numbers per row of a rollout; `episode_return` and `length` are those of an episode on the row where it ends."""

    episode_return: Array  # [T, B] f32, so far, this row included
    length: Array  # [T, B] i32
    running_return: Array  # [T, B] f32


def window_of(parts: int, smoothing: int = WINDOW) -> int:
    """Returns the latest episodes that each of so many pools reports on, so that all report on `smoothing` at least."""
    return -(-smoothing // parts)


def init(num_envs: int, window: int = WINDOW, *, agents: int = 0) -> Columns:
    """Makes the columns of environments that have just been reset.

    Args:
      num_envs: B.
      window: W.
      agents: A, of each environment, where it has several.
    """
    if agents:
        of_agents = init(num_envs, window)
        stack = lambda x: jnp.repeat(x[None], agents, 0)
        return dataclasses.replace(
            of_agents,
            **{name: stack(getattr(of_agents, name)) for name in _WINDOWS},
            games=init(num_envs // agents, window),
        )
    nothing = jnp.full((window,), jnp.nan, jnp.float32)
    zeros = jnp.zeros((num_envs,), jnp.float32)
    # copies: each leaf is donated, and no buffer may be donated twice
    return Columns(
        episode_return=zeros,
        return_rest=jnp.copy(zeros),
        length=jnp.zeros((num_envs,), jnp.int32),
        running_return=jnp.copy(zeros),
        window_return=nothing,
        window_length=jnp.copy(nothing),
        window_next=jnp.int32(0),
    )


def restarted(columns: Columns) -> Columns:
    """Returns the columns with no episode in flight, as after a reset; episodes that have ended still count."""
    clear = lambda x: jnp.zeros(x.shape, x.dtype)
    games = restarted(columns.games) if isinstance(columns.games, Columns) else ()
    return dataclasses.replace(columns, games=games, **{name: clear(getattr(columns, name)) for name in _FLYING})


def track(columns: Columns, reward, done, mask, gamma=None, learned=None) -> tuple[Columns, Tracked]:
    """Follows the episodes through a rollout.

    Args:
      columns: of the B environments, before the rollout.
      reward: [T, B] f32, as the environment gave it.
      done: [T, B] bool, terminated or truncated.
      mask: [T, B] bool, False on masked steps, which count neither as reward nor as step.
      gamma: discount of the running return; None: not recorded (0).
      learned: [T, B] f32, the rewards of the running return, as the learner sees them; None: `reward`.
    Returns:
      The columns after the rollout, and Tracked.
    """

    # what rounding loses is reckoned once per rollout, of what the episodes had before and what it brings: in the loop
    # that takes six times as long on CPU
    def body(carry, row):
        before, total, length = carry
        reward, done, mask = row
        total, length = total + jnp.where(mask, reward, 0.0), length + mask
        keep = ~done
        return (before * keep, total * keep, length * keep), (before + total, length)

    start = (columns.episode_return, jnp.zeros_like(columns.episode_return), columns.length)
    (before, total, length), (returns, lengths) = scans.elementwise(body, start, (reward, done, mask))
    # 0 behind an end, where nothing is left of the rest either
    total, rest = sums.add(before, jnp.where(before == 0, 0.0, columns.return_rest), total)
    after = dataclasses.replace(columns, episode_return=total, return_rest=rest, length=length)
    if gamma is None:
        return after, Tracked(returns, lengths, jnp.zeros_like(returns))

    def discounted(running, row):
        reward, done, mask = row
        running = jnp.where(mask, reward + gamma * running, running)  # a masked row leaves it as it is
        return running * ~done, running

    learned = reward if learned is None else learned
    running, running_rows = scans.elementwise(discounted, columns.running_return, (learned, done, mask))
    return dataclasses.replace(after, running_return=running), Tracked(returns, lengths, running_rows)


def reduce(columns: Columns, rows: Tracked, done, mask) -> tuple[Columns, Episodes]:
    """Statistics of the episodes that ended in a rollout; the latest W of them enter the window.

    Args:
      columns: after `track`.
      rows, done, mask: [T, B].
    """
    ended = done & mask
    count = ended.sum(dtype=jnp.int32)
    flat_ended = ended.reshape(-1)
    window = columns.window_return.shape[0]
    rank = jnp.cumsum(flat_ended.astype(jnp.int32)) - 1
    latest = flat_ended & (rank >= count - window)  # more would overwrite one another, in no defined order
    slot = jnp.where(latest, (columns.window_next + rank) % window, window)  # window: out of bounds, dropped
    write = lambda ring, values: ring.at[slot].set(values.reshape(-1).astype(jnp.float32), mode="drop")
    returns = rows.episode_return
    columns = dataclasses.replace(
        columns,
        window_return=write(columns.window_return, returns),
        window_length=write(columns.window_length, rows.length),
        window_next=(columns.window_next + count) % window,
    )
    episodes = Episodes(
        count=count,
        return_sum=jnp.sum(jnp.where(ended, returns, 0.0)),
        return_min=jnp.min(jnp.where(ended, returns, jnp.inf)),
        return_max=jnp.max(jnp.where(ended, returns, -jnp.inf)),
        length_sum=jnp.sum(jnp.where(ended, rows.length, 0)),
        steps=mask.sum(dtype=jnp.int32),
        window_return=columns.window_return,
        window_length=columns.window_length,
    )
    return columns, episodes


def of_games(reward, mask, over) -> tuple[Array, Array]:
    """Reads the columns of several agents [T, G * A] as games.

    Returns:
      reward [T, G] f32, the sum over the agents who are there; mask [T, G] bool, whether anybody is.
    """
    split = lambda x: x.reshape(*over.shape, -1)
    return split(jnp.where(mask, reward, 0.0)).sum(-1), split(mask).any(-1)


def reduce_games(columns: Columns, rows: Tracked, reward, done, mask, over) -> tuple[Columns, Episodes]:
    """Statistics of games and, in `Episodes.agents`, of each agent's own episodes.

    Args:
      columns: after `track`, but for `columns.games`, which are tracked here.
      rows, reward, done, mask: [T, G * A], of the agents.
      over: [T, G], where games end.
    """
    assert isinstance(columns.games, Columns)
    earned, played = of_games(reward, mask, over)
    games, found = track(columns.games, earned, over, played)
    return _of_each(columns, rows, done, mask, *reduce(games, found, over, played))


class Told(NamedTuple):
    """Results of games whose agents' rows do not stand side by side."""

    steps: Array  # [T, G * A] bool: rows that stand for a step of their game, one for each
    over: Array  # [N] bool: of the rest, how many are games that have ended
    episode_return: Array  # [N] f32, the sum over the agents
    length: Array  # [N] i32


def reduce_told(columns: Columns, rows: Tracked, done, mask, told: Told) -> tuple[Columns, Episodes]:
    """Reduces, as `reduce_games`, games that somebody else has followed to their ends."""
    assert isinstance(columns.games, Columns)
    ended = told.over[None]
    games, report = reduce(columns.games, Tracked(told.episode_return[None], told.length[None], ended), ended, ended)
    report = dataclasses.replace(report, steps=(told.steps & mask).sum(dtype=jnp.int32))
    return _of_each(columns, rows, done, mask, games, report)


def _of_each(columns: Columns, rows: Tracked, done, mask, games: Columns, report: Episodes) -> tuple[Columns, Episodes]:
    """Adds each agent's own episodes to what is known of games."""
    num_agents = columns.window_next.shape[0]
    # an agent may end before its game does, and what it is part of when the game ends has ended, too
    by_agent = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], -1, num_agents), -1, 0)
    cut = {name: by_agent(getattr(columns, name)) for name in _FLYING}
    of_each = dataclasses.replace(columns, games=(), **cut)
    of_each, agents = jax.vmap(reduce)(of_each, jax.tree.map(by_agent, rows), by_agent(done), by_agent(mask))
    windows = {name: getattr(of_each, name) for name in _WINDOWS}
    return dataclasses.replace(columns, games=games, **windows), dataclasses.replace(report, agents=agents)


def summary(reports: list[Episodes]) -> dict[str, Any]:
    """Returns one row's episode metrics from the reports of one or more iterations, oldest first, on the host.

    Leaves may have leading axes (devices, iterations of one call); the windows are those of the last report. NaN until
    an episode has ended.

    Returns:
      `episode/return` and `episode/length` (means over the window), `episode/window` (episodes in it), `episode/count`,
      `episode/return_p10`, `episode/return_p90` (tenth and ninetieth percentile over the window),
      `episode/return_min`, `episode/return_max` (of the episodes that ended since the last row).
    """
    reports = [jax.tree.map(np.asarray, r) for r in reports]
    last = reports[-1]
    mean = lambda x: float(x[np.isfinite(x)].mean()) if np.isfinite(x).any() else float("nan")
    returns = last.window_return[np.isfinite(last.window_return)]
    low, high = np.percentile(returns, (10, 90)) if returns.size else (float("nan"), float("nan"))
    count = int(sum(r.count.sum() for r in reports))
    return {
        "episode/return": mean(last.window_return),
        "episode/length": mean(last.window_length),
        "episode/return_p10": float(low),
        "episode/return_p90": float(high),
        "episode/window": returns.size,
        "episode/count": count,
        "episode/return_min": float(min(r.return_min.min() for r in reports)) if count else float("nan"),
        "episode/return_max": float(max(r.return_max.max() for r in reports)) if count else float("nan"),
    }


def of_agents(reports: list[Episodes], agents: Sequence[str], policies: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Makes one row's metrics of the agents' own episodes; as `summary`.

    Args:
      reports: of several agents.
      agents: their A names.
      policies: name -> the agents that follow it.
    Returns:
      `agent/NAME/return`, `agent/NAME/length`, `agent/NAME/window`, `agent/NAME/count`, and `policy/NAME/return`, the
      mean over its agents; `policy/NAME/window` is the least of those agents that are in the mean;
      `policy/NAME/return_min` and `return_max` are over the episodes of its agents since the last row.
    """
    known = [r.agents for r in reports if isinstance(r.agents, Episodes)]
    windows = ("window_return", "window_length")
    kept = ("return", "length", "window", "count")
    found: dict[str, Any] = {}
    extremes: dict[str, tuple[float, float]] = {}
    for i, agent in enumerate(agents):
        pick = lambda name, x, i=i: np.asarray(x)[(..., i, slice(None)) if name in windows else (..., i)]
        of_it = lambda r: {n: pick(n, x) for n, x in vars(r).items() if n != "agents"}  # noqa: B023 - called at once
        cut = [dataclasses.replace(r, **of_it(r)) for r in known]
        of_one = summary(cut)
        found |= {f"agent/{agent}/{name}": of_one[f"episode/{name}"] for name in kept}
        extremes[agent] = of_one["episode/return_min"], of_one["episode/return_max"]
    for policy, followers in policies.items():
        returns = np.array([found[f"agent/{agent}/return"] for agent in followers])
        known_returns = returns[np.isfinite(returns)]
        found[f"policy/{policy}/return"] = float(known_returns.mean()) if known_returns.size else float("nan")
        windows_known = [found[f"agent/{a}/window"] for a, seen in zip(followers, np.isfinite(returns)) if seen]
        found[f"policy/{policy}/window"] = min(windows_known, default=0)
        low, high = zip(*(extremes[agent] for agent in followers), strict=True)
        found[f"policy/{policy}/return_min"] = float(np.fmin.reduce(low))
        found[f"policy/{policy}/return_max"] = float(np.fmax.reduce(high))
    return found


def merge(reports: list[Episodes]) -> Episodes:
    """Returns several reports, oldest first, as one, on the host; `steps` and windows are those of the last."""
    agents = [r.agents for r in reports if isinstance(r.agents, Episodes)]
    reports = [jax.tree.map(np.asarray, r) for r in reports]
    over = lambda fn, name: fn(np.stack([getattr(r, name) for r in reports]), 0)
    total = lambda name: over(np.sum, name).astype(getattr(reports[-1], name).dtype)
    return dataclasses.replace(
        reports[-1],
        count=total("count"),
        return_sum=total("return_sum"),
        length_sum=total("length_sum"),
        return_min=over(np.min, "return_min"),
        return_max=over(np.max, "return_max"),
        agents=merge(agents) if agents else (),
    )


def add_up(reports: Sequence[Episodes]) -> Episodes:
    """Reports of one part of a run after the other, oldest first, as one, on the device; windows are the last one's."""
    return add_up_stacked(jax.tree.map(lambda *x: jnp.stack(x), *reports))


def add_up_stacked(reports: Episodes, among=None) -> Episodes:
    """Adds up, as `add_up`, reports whose leaves are stacked along a first axis; of the first `among`, None: of all."""
    if reports.count.shape[0] == 1:
        return jax.tree.map(lambda x: x[0], reports)
    last = -1 if among is None else among - 1

    def first(x, fill):
        if among is None:
            return x
        index = jnp.arange(x.shape[0], dtype=jnp.uint32).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(index < among, x, fill)

    total = lambda x: first(x, jnp.zeros((), x.dtype)).sum(0, dtype=x.dtype)
    return Episodes(
        count=total(reports.count),
        return_sum=total(reports.return_sum),
        return_min=first(reports.return_min, reports.return_min[0]).min(0),
        return_max=first(reports.return_max, reports.return_max[0]).max(0),
        length_sum=total(reports.length_sum),
        steps=total(reports.steps),
        window_return=reports.window_return[last],
        window_length=reports.window_length[last],
        agents=add_up_stacked(reports.agents, among) if isinstance(reports.agents, Episodes) else (),
    )


def empty_report(columns: Columns) -> Episodes:
    """Returns the report of a time in which no step was taken, in numpy; leaves of `columns` may have leading axes."""
    if isinstance(columns.games, Columns):
        agents = empty_report(dataclasses.replace(columns, games=()))
        return dataclasses.replace(empty_report(columns.games), agents=agents)
    of = lambda value, dtype: np.full(columns.window_next.shape, value, dtype)
    return Episodes(
        count=of(0, np.int32),
        return_sum=of(0, np.float32),
        return_min=of(np.inf, np.float32),
        return_max=of(-np.inf, np.float32),
        length_sum=of(0, np.int32),
        steps=of(0, np.int32),
        # copies: the next rollout takes over the buffers of the columns
        window_return=np.array(columns.window_return),
        window_length=np.array(columns.window_length),
    )


def to_lists(report: Episodes) -> dict[str, Any]:
    """Returns the arrays of a report as lists, for JSON."""
    found = {name: np.asarray(x).tolist() for name, x in vars(report).items() if name != "agents"}
    return found | ({"agents": to_lists(report.agents)} if isinstance(report.agents, Episodes) else {})


def from_lists(found: Mapping[str, Any]) -> Episodes:
    """Returns a report from what `to_lists` made of its arrays; numbers that are not finite may be strings."""
    whole = ("count", "length_sum", "steps")
    arrays = {n: np.asarray(x, np.int32 if n in whole else np.float32) for n, x in found.items() if n != "agents"}
    return Episodes(**arrays, agents=from_lists(found["agents"]) if found.get("agents") else ())


def steps(reports: PyTree) -> int:
    """Returns environment steps of one report (all devices and iterations in it)."""
    return int(np.asarray(reports.steps).astype(np.int64).sum())
