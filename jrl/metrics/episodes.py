"""Episode statistics, computed on the device from a rollout."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.ops import scans
from jrl.types import Array, Episodes, PyTree

WINDOW = 100  # default number of episodes in the reported mean return


@struct.dataclass
class EpisodeState:
    """Statistics of the running episode of each environment, and of the latest finished episodes."""

    episode_return: Array  # [B] f32, undiscounted return so far
    return_rest: Array  # [B] f32, rounding error of that sum: without it, a million steps would be 1 % off
    length: Array  # [B] i32, steps so far
    running_return: Array  # [B] f32, discounted return so far; 0: not recorded
    window_return: Array  # [W] f32, ring of the last W returns; NaN: no episode yet
    window_length: Array  # [W] f32
    window_next: Array  # [] i32, ring index of the next episode
    games: Any = ()  # with several agents, the EpisodeState of games; windows of agents are [A, W] and [A]


_PARTS = ("agents", "nonfinite")  # fields of Episodes that most reports do not have
_RUNNING = ("episode_return", "return_rest", "length", "running_return")
_WINDOWS = ("window_return", "window_length", "window_next")


class EpisodeRows(NamedTuple):
    """Return and length so far on each step of a rollout; on the step of an end they are the episode's."""

    episode_return: Array  # [T, B] f32, including this step
    length: Array  # [T, B] i32
    running_return: Array  # [T, B] f32


def window_per_pool(parts: int, smoothing: int = WINDOW) -> int:
    """Returns the window size of each of several pools, so that together they cover at least `smoothing` episodes."""
    return -(-smoothing // parts)


def init(num_envs: int, window: int = WINDOW, *, agents: int = 0) -> EpisodeState:
    """Returns the state of environments that have just been reset.

    Args:
      num_envs: B.
      window: W.
      agents: A, agents per environment; 0: single agent.
    """
    if agents:
        combine_agents = init(num_envs, window)
        stack = lambda x: jnp.repeat(x[None], agents, 0)
        return dataclasses.replace(
            combine_agents,
            **{name: stack(getattr(combine_agents, name)) for name in _WINDOWS},
            games=init(num_envs // agents, window),
        )
    empty = jnp.full((window,), jnp.nan, jnp.float32)
    zeros = jnp.zeros((num_envs,), jnp.float32)
    # copies: leaves are donated, and no buffer may be donated twice
    return EpisodeState(
        episode_return=zeros,
        return_rest=jnp.copy(zeros),
        length=jnp.zeros((num_envs,), jnp.int32),
        running_return=jnp.copy(zeros),
        window_return=empty,
        window_length=jnp.copy(empty),
        window_next=jnp.int32(0),
    )


def clear_running(state: EpisodeState) -> EpisodeState:
    """Returns the state without running episodes, as after a reset; finished episodes still count."""
    clear = lambda x: jnp.zeros(x.shape, x.dtype)
    games = clear_running(state.games) if isinstance(state.games, EpisodeState) else ()
    return dataclasses.replace(state, games=games, **{name: clear(getattr(state, name)) for name in _RUNNING})


def track(state: EpisodeState, reward, done, mask, gamma=None, learned=None) -> tuple[EpisodeState, EpisodeRows]:
    """Accumulates returns and lengths over a rollout.

    Args:
      state: state of the B environments before the rollout.
      reward: [T, B] f32, environment's reward.
      done: [T, B] bool, terminated or truncated.
      mask: [T, B] bool, False on masked steps, whose reward and length do not count.
      gamma: discount of the running return; None: not recorded (0).
      learned: [T, B] f32, the learner's rewards, for the running return; None: `reward`.
    Returns:
      The state after the rollout, and EpisodeRows.
    """

    # the rounding error is corrected once per rollout: inside the loop it takes six times as long on CPU
    def body(carry, row):
        before, total, length = carry
        reward, done, mask = row
        total, length = total + jnp.where(mask, reward, 0.0), length + mask
        keep = ~done
        return (before * keep, total * keep, length * keep), (before + total, length)

    start = (state.episode_return, jnp.zeros_like(state.episode_return), state.length)
    (before, total, length), (returns, lengths) = scans.elementwise(body, start, (reward, done, mask))
    # before is 0 after an end, where the rounding error is dropped, too
    total, rest = scans.compensated_add(before, jnp.where(before == 0, 0.0, state.return_rest), total)
    after = dataclasses.replace(state, episode_return=total, return_rest=rest, length=length)
    if gamma is None:
        return after, EpisodeRows(returns, lengths, jnp.zeros_like(returns))

    def discounted(running, row):
        reward, done, mask = row
        running = jnp.where(mask, reward + gamma * running, running)  # a masked step changes nothing
        return running * ~done, running

    learned = reward if learned is None else learned
    running, running_rows = scans.elementwise(discounted, state.running_return, (learned, done, mask))
    return dataclasses.replace(after, running_return=running), EpisodeRows(returns, lengths, running_rows)


def reduce(state: EpisodeState, rows: EpisodeRows, done, mask) -> tuple[EpisodeState, Episodes]:
    """Returns the state and the statistics of the episodes that ended in a rollout; the latest W enter the window.

    Args:
      state: state after `track`.
      rows, done, mask: [T, B].
    """
    ended = done & mask
    count = ended.sum(dtype=jnp.int32)
    flat_ended = ended.reshape(-1)
    window = state.window_return.shape[0]
    rank = jnp.cumsum(flat_ended.astype(jnp.int32)) - 1
    latest = flat_ended & (rank >= count - window)  # more would overwrite one another in undefined order
    slot = jnp.where(
        latest, (state.window_next + rank) % window, window
    )  # index `window` is out of bounds, so the write is dropped
    write = lambda ring, values: ring.at[slot].set(values.reshape(-1).astype(jnp.float32), mode="drop")
    returns = rows.episode_return
    state = dataclasses.replace(
        state,
        window_return=write(state.window_return, returns),
        window_length=write(state.window_length, rows.length),
        window_next=(state.window_next + count) % window,
    )
    episodes = Episodes(
        count=count,
        return_sum=jnp.sum(jnp.where(ended, returns, 0.0)),
        return_min=jnp.min(jnp.where(ended, returns, jnp.inf)),
        return_max=jnp.max(jnp.where(ended, returns, -jnp.inf)),
        length_sum=jnp.sum(jnp.where(ended, rows.length, 0)),
        steps=mask.sum(dtype=jnp.int32),
        window_return=state.window_return,
        window_length=state.window_length,
    )
    return state, episodes


def to_games(reward, mask, over) -> tuple[Array, Array]:
    """Returns the agents' arrays [T, G * A] as games.

    Returns:
      reward [T, G] f32, summed over present agents; mask [T, G] bool, whether any agent is present.
    """
    split = lambda x: x.reshape(*over.shape, -1)
    return split(jnp.where(mask, reward, 0.0)).sum(-1), split(mask).any(-1)


def reduce_games(state: EpisodeState, rows: EpisodeRows, reward, done, mask, over) -> tuple[EpisodeState, Episodes]:
    """Returns the state and the statistics of games; `Episodes.agents` has those of the agents' own episodes.

    Args:
      state: state after `track`; `state.games` is tracked here.
      rows, reward, done, mask: [T, G * A], by agent.
      over: [T, G], ends of games.
    """
    assert isinstance(state.games, EpisodeState)
    game_reward, game_mask = to_games(reward, mask, over)
    games, game_rows = track(state.games, game_reward, over, game_mask)
    return _reduce_agents(state, rows, done, mask, *reduce(games, game_rows, over, game_mask))


class FinishedGames(NamedTuple):
    """Results of games whose agents' steps are not adjacent in the batch."""

    steps: Array  # [T, G * A] bool, marks one agent per game step, so that steps are counted once
    over: Array  # [N] bool, whether the entry is a finished game; other entries are padding
    episode_return: Array  # [N] f32, sum over agents
    length: Array  # [N] i32


def reduce_finished(
    state: EpisodeState, rows: EpisodeRows, done, mask, finished: FinishedGames
) -> tuple[EpisodeState, Episodes]:
    """Does as `reduce_games` for games whose results are known."""
    assert isinstance(state.games, EpisodeState)
    ended = finished.over[None]
    games, report = reduce(
        state.games, EpisodeRows(finished.episode_return[None], finished.length[None], ended), ended, ended
    )
    report = dataclasses.replace(report, steps=(finished.steps & mask).sum(dtype=jnp.int32))
    return _reduce_agents(state, rows, done, mask, games, report)


def _reduce_agents(
    state: EpisodeState, rows: EpisodeRows, done, mask, games: EpisodeState, report: Episodes
) -> tuple[EpisodeState, Episodes]:
    num_agents = state.window_next.shape[0]
    by_agent = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], -1, num_agents), -1, 0)
    running = {name: by_agent(getattr(state, name)) for name in _RUNNING}
    each = dataclasses.replace(state, games=(), **running)
    each, agents = jax.vmap(reduce)(each, jax.tree.map(by_agent, rows), by_agent(done), by_agent(mask))
    windows = {name: getattr(each, name) for name in _WINDOWS}
    return dataclasses.replace(state, games=games, **windows), dataclasses.replace(report, agents=agents)


def summarize(reports: list[Episodes]) -> dict[str, Any]:
    """Returns a row's episode metrics from the reports of one or more iterations, oldest first, on the host.

    Leaves may have leading axes (devices, iterations of one call). The windows are the last report's. NaN: no episode
    has ended.

    Returns:
      `episode/return` and `episode/length` (means over the window), `episode/window` (episodes in it), `episode/count`,
      `episode/return_p10`, `episode/return_p90` (percentiles over the window), `episode/return_min`,
      `episode/return_max` (of the episodes that ended since the last row); with `env.on_nonfinite` also
      `env/nonfinite`, the steps since the last row that were not finite.
    """
    reports = [jax.tree.map(np.asarray, r) for r in reports]
    last = reports[-1]
    mean = lambda x: float(x[np.isfinite(x)].mean()) if np.isfinite(x).any() else float("nan")
    returns = last.window_return[np.isfinite(last.window_return)]
    checked = [r.nonfinite for r in reports if not isinstance(r.nonfinite, tuple)]
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
        **({"env/nonfinite": int(sum(x.sum() for x in checked))} if checked else {}),
    }


def summarize_agents(
    reports: list[Episodes], agents: Sequence[str], policies: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Returns a row's metrics of the agents' own episodes, as `summarize`.

    Args:
      reports: reports of several agents.
      agents: A names.
      policies: policy -> names of its agents.
    Returns:
      `agent/NAME/return`, `agent/NAME/length`, `agent/NAME/window`, `agent/NAME/count`; `policy/NAME/return`, the mean
      over its agents; `policy/NAME/window`, the smallest window of these agents; `policy/NAME/return_min` and
      `return_max`, over its agents' episodes since the last row.
    """
    known = [r.agents for r in reports if isinstance(r.agents, Episodes)]
    windows = ("window_return", "window_length")
    kept = ("return", "length", "window", "count")
    found: dict[str, Any] = {}
    extremes: dict[str, tuple[float, float]] = {}
    for i, agent in enumerate(agents):
        pick = lambda name, x, i=i: np.asarray(x)[(..., i, slice(None)) if name in windows else (..., i)]
        select = lambda r: {n: pick(n, x) for n, x in vars(r).items() if n not in _PARTS}  # noqa: B023 - called at once
        metrics = summarize([dataclasses.replace(r, **select(r)) for r in known])
        found |= {f"agent/{agent}/{name}": metrics[f"episode/{name}"] for name in kept}
        extremes[agent] = metrics["episode/return_min"], metrics["episode/return_max"]
    for policy, members in policies.items():
        returns = np.array([found[f"agent/{agent}/return"] for agent in members])
        known_returns = returns[np.isfinite(returns)]
        found[f"policy/{policy}/return"] = float(known_returns.mean()) if known_returns.size else float("nan")
        windows_known = [found[f"agent/{a}/window"] for a, known in zip(members, np.isfinite(returns)) if known]
        found[f"policy/{policy}/window"] = min(windows_known, default=0)
        low, high = zip(*(extremes[agent] for agent in members), strict=True)
        found[f"policy/{policy}/return_min"] = float(np.fmin.reduce(low))
        found[f"policy/{policy}/return_max"] = float(np.fmax.reduce(high))
    return found


def merge(reports: list[Episodes]) -> Episodes:
    """Merges reports, oldest first, on the host; `steps` and windows are the last report's."""
    last = reports[-1]
    if any(not isinstance(r.nonfinite, tuple) for r in reports):  # a resumed run may have begun to check environments
        none = lambda r: np.zeros_like(r.steps) if isinstance(r.nonfinite, tuple) else r.nonfinite
        reports = [dataclasses.replace(r, nonfinite=none(r)) for r in reports]
    merged = add_stacked_reports(jax.tree.map(lambda *x: np.stack(x), *reports))
    is_several = isinstance(last.agents, Episodes)
    agents = dataclasses.replace(merged.agents, steps=last.agents.steps) if is_several else ()
    return dataclasses.replace(merged, steps=last.steps, agents=agents)


def add_reports(reports: Sequence[Episodes]) -> Episodes:
    """Adds consecutive reports of one part of a run, oldest first, on the device; windows are the last report's."""
    return add_stacked_reports(jax.tree.map(lambda *x: jnp.stack(x), *reports))


def add_stacked_reports(reports: Episodes, among=None) -> Episodes:
    """Adds reports stacked along a first axis, as `add_reports`; `among`: number of reports to add, None: all."""
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
        agents=add_stacked_reports(reports.agents, among) if isinstance(reports.agents, Episodes) else (),
        nonfinite=jax.tree.map(total, reports.nonfinite),
    )


def empty_report(state: EpisodeState) -> Episodes:
    """Returns a report without steps, in numpy; leaves of `state` may have leading axes."""
    if isinstance(state.games, EpisodeState):
        agents = empty_report(dataclasses.replace(state, games=()))
        return dataclasses.replace(empty_report(state.games), agents=agents)
    full = lambda value, dtype: np.full(state.window_next.shape, value, dtype)
    return Episodes(
        count=full(0, np.int32),
        return_sum=full(0, np.float32),
        return_min=full(np.inf, np.float32),
        return_max=full(-np.inf, np.float32),
        length_sum=full(0, np.int32),
        steps=full(0, np.int32),
        # copies: the next rollout donates the buffers
        window_return=np.array(state.window_return),
        window_length=np.array(state.window_length),
    )


def to_lists(report: Episodes) -> dict[str, Any]:
    """Returns a report's arrays as lists, for JSON."""
    found = {name: np.asarray(x).tolist() for name, x in vars(report).items() if not isinstance(x, tuple | Episodes)}
    return found | ({"agents": to_lists(report.agents)} if isinstance(report.agents, Episodes) else {})


def from_lists(found: Mapping[str, Any]) -> Episodes:
    """Returns a report from `to_lists`; non-finite numbers may be strings."""
    whole = ("count", "length_sum", "steps", "nonfinite")
    arrays = {n: np.asarray(x, np.int32 if n in whole else np.float32) for n, x in found.items() if n != "agents"}
    return Episodes(**arrays, agents=from_lists(found["agents"]) if found.get("agents") else ())


def count_steps(reports: PyTree) -> int:
    """Returns the environment steps of a report, over all devices and iterations."""
    return int(np.asarray(reports.steps).astype(np.int64).sum())
