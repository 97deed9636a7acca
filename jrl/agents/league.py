"""League of self-play: its state on the device, the rules for new copies and opponents, and its metrics.

Decisions depend only on the state on the device, the row's number and the seed. A resumed run therefore decides like an
uninterrupted run.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.metrics import payoff

_PRIOR = 1.0  # draws added to each pair, so that a player without a loss has a finite rating


@struct.dataclass
class League:
    """State of a pool of K slots, the same on all devices; jax or numpy arrays. Results are wins, draws, losses."""

    counts: Any  # [K, 3] i32, results of the learner against each slot, in games since the last swap
    since: Any  # [] i32, number of the last swap, any change of opponents
    pick: Any  # [K] i32, slot whose copy plays in slot k
    latest: Any  # [K, 3] i32, counts of the previous window, against the same pool
    generation: Any  # [K] i32, number of each slot's copy; 0: the initial learner
    copies: Any  # [] i32, number of copies taken
    payoff: Any  # [K, K, 3] i32, results of copy i, when it was taken, against copy j
    rating: Any  # [K] f32, latest Elo rating of each copy
    marks: Any  # [] i32, multiples of snapshot_every reached


def init(pool: int) -> League:
    """Returns the initial league: each slot has the initial learner."""
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


def size(league: League) -> int:
    """Returns the number of players: the policy and the distinct copies in the pool."""
    return 1 + num_held(league)


def num_held(league: League) -> int:
    """Returns the number of distinct copies, which are in the first slots."""
    return min(int(league.copies) + 1, len(league.pick))


def _recent(league: League) -> np.ndarray:
    """Returns the results against each slot in this and the previous window, [K, 3]."""
    return league.latest + league.counts


def _shares(results: np.ndarray) -> np.ndarray:
    """Returns the share of won games, [...], of results [..., 3]; NaN without games."""
    games = results.sum(-1)
    return np.divide(results[..., 0], games, out=np.full(games.shape, np.nan), where=games > 0)


def _errors(share: np.ndarray, games: np.ndarray | int) -> np.ndarray:
    return np.sqrt(share * (1 - share) / np.maximum(games, 1))


# ---------------------------------------------------------------- decisions


def decide(league: League, own: Any, env_steps: int, seed: tuple[int, int]) -> tuple[League, int]:
    """Returns the league after a row, and the slot of a new copy.

    Args:
      league: league in numpy.
      own: the `SelfPlayConfig`.
      env_steps: environment steps of the run.
      seed: seed of random opponents.
    Returns:
      The league, the same object if nothing changes; and the slot, K if no copy is taken.
    """
    pool, marks = len(league.pick), int(league.marks)
    judged = league.counts.sum() >= own.window
    strong = own.snapshot_win_rate is not None and _shares(league.counts.sum(0)) >= own.snapshot_win_rate
    now = marks if own.snapshot_every is None else env_steps // own.snapshot_every
    if (judged and strong) or now > marks:
        place = least_useful(league, own)
        after = _with_copy(league, place)
        pick = pick_opponents(after, own, seed)
        return dataclasses.replace(after, pick=pick, marks=np.int32(now)), place
    if not judged:
        return league, pool
    after = dataclasses.replace(league, latest=league.counts, counts=np.zeros_like(league.counts))
    if own.opponents == "prioritised":
        pick = pick_opponents(after, own, seed)
        # games with a change of copies do not count
        since = league.since if np.array_equal(pick, league.pick) else np.int32(league.since + 1)
        after = dataclasses.replace(after, pick=pick, since=since)
    rating, _ = ratings(after)
    return dataclasses.replace(after, rating=_filled(rating[:-1], after)), pool


def least_useful(league: League, own: Any) -> int:
    """Returns the slot of the next copy: the first slot without a distinct copy, if there is any.

    Otherwise the slot of the copy against which the learner wins most games, except the newest. Among equals, and with
    opponents `latest`, the oldest copy.
    """
    pool, held = len(league.pick), num_held(league)
    if held < pool or pool == 1:
        return held % pool
    shares = np.nan_to_num(_shares(_recent(league)), nan=-1.0)
    if own.opponents == "latest":
        shares = np.zeros_like(shares)
    others = [k for k in range(pool) if league.generation[k] != league.generation.max()]
    return min(others, key=lambda k: (-shares[k], league.generation[k]))


def _with_copy(league: League, place: int) -> League:
    rating, _ = ratings(league)
    found, results = league.payoff.copy(), _recent(league)
    found[place], found[:, place] = results, 0
    found[place, place] = 0  # no games of a copy against itself
    known, generation = _filled(rating[:-1], league), league.generation.copy()
    known[place] = rating[-1] if np.isfinite(rating[-1]) else known[int(np.argmax(generation))]
    generation[place] = league.copies + 1
    return dataclasses.replace(
        league,
        counts=np.zeros_like(league.counts),
        latest=np.zeros_like(league.latest),
        since=np.int32(league.since + 1),
        generation=generation,
        copies=np.int32(league.copies + 1),
        payoff=found,
        rating=known,
    )


def pick_opponents(league: League, own: Any, seed: tuple[int, int]) -> np.ndarray:
    """Returns the slot whose copy plays in slot k, i32 [K].

    Uniform: all copies in turn. Latest: the newest copy. Prioritised: drawn in proportion to the share of games not won
    against a copy (arXiv:1912.06680, appendix N), which is 1 without games.
    """
    pool, held = len(league.pick), num_held(league)
    if own.opponents == "latest":
        return np.full(pool, np.argmax(league.generation), np.int32)
    if own.opponents == "uniform":
        return (np.arange(pool) % held).astype(np.int32)
    weight = 1 - np.nan_to_num(_shares(_recent(league)[:held]), nan=0.0)
    chance = weight / weight.sum() if weight.sum() > 0 else np.full(held, 1 / held)
    return np.random.default_rng(seed).choice(held, pool, p=chance).astype(np.int32)


# ---------------------------------------------------------------- reports


def table(league: League) -> np.ndarray:
    """Returns the results of all pairs, [N + 1, N + 1, 3], of N copies and the present policy."""
    held = num_held(league)
    found = np.zeros((held + 1, held + 1, 3), np.int64)
    found[:held, :held] = league.payoff[:held, :held]
    found[held, :held] = _recent(league)[:held]
    return found


def ratings(league: League) -> tuple[np.ndarray, np.ndarray]:
    """Returns Elo ratings and their standard errors, [N + 1], of the players of `table`.

    The oldest copy keeps its rating; errors are those of differences to it. The initial learner has the rating 0.
    """
    held = num_held(league)
    anchor = int(np.argmin(league.generation[:held]))
    rating, error = payoff.compute_elo(payoff.compute_scores(table(league)), anchor=anchor, prior=_PRIOR)
    return rating + league.rating[anchor], error


def _filled(rating: np.ndarray, league: League) -> np.ndarray:
    """Returns the ratings of all slots, [K] f32: new ratings where finite, else the previous ratings."""
    known = league.rating.copy()
    known[: len(rating)] = np.where(np.isfinite(rating), rating, known[: len(rating)])
    return known


def metrics(league: League, own: Any) -> dict[str, float]:
    """Returns the metrics of the games of this and the previous window.

    `league/games`; `league/win_rate` and `league/draw_rate`, NaN before `window` games; `league/win_rate/k` of slot k,
    NaN without games; `league/elo`; and standard errors `league/win_rate_se`, `league/win_rate_se/k`, `league/elo_se`.
    """
    recent = _recent(league)
    games = int(recent.sum())
    shares = recent.sum(0) / games if games >= own.window else np.full(3, np.nan)
    rating, error = ratings(league)
    found = {
        "league/games": games,
        "league/win_rate": float(shares[0]),
        "league/win_rate_se": float(_errors(shares[0], games)),
        "league/draw_rate": float(shares[1]),
        "league/elo": float(rating[-1]),
        "league/elo_se": float(error[-1]),
    }
    each, own_games = _shares(recent), recent.sum(-1)
    found |= {f"league/win_rate/{k + 1}": float(x) for k, x in enumerate(each)}
    return found | {f"league/win_rate_se/{k + 1}": float(x) for k, x in enumerate(_errors(each, own_games))}
