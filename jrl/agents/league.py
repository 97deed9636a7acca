"""A league: its state on the device, when copies are taken, which of them play, and what result rows report of it.

All that is decided follows from the counts on the device, the row's number and the seed, and all that is remembered is
written back there: so a run that is resumed decides as one that was never interrupted.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.metrics import payoff

_PRIOR = 1.0  # drawn games beside those of each pair: a player that has won all games is not infinitely strong


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


def init(pool: int) -> League:
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


def size(league: League) -> int:
    """Returns the players of a league: the policy, and the different copies in its pool."""
    return 1 + num_held(league)


def num_held(league: League) -> int:
    """Returns how many different copies are in the pool; they are in its first places."""
    return min(int(league.copies) + 1, len(league.pick))


def _recent(league: League) -> np.ndarray:
    """Returns the results against each place in this window and the one before, [K, 3]."""
    return league.latest + league.counts


def _shares(results: np.ndarray) -> np.ndarray:
    """Returns the share of games won of each row of results [..., 3]; NaN where none was played."""
    games = results.sum(-1)
    return np.divide(results[..., 0], games, out=np.full(games.shape, np.nan), where=games > 0)


def _errors(share: np.ndarray, games: np.ndarray | int) -> np.ndarray:
    return np.sqrt(share * (1 - share) / np.maximum(games, 1))


# ---------------------------------------------------------------- what is decided


def decided(league: League, own: Any, env_steps: int, seed: tuple[int, int]) -> tuple[League, int]:
    """Returns the league after a look at its counts, the same object if nothing is decided, and the place of a new
    copy.

    Args:
      league: in numpy.
      own: `SelfPlayConfig`.
      env_steps: so far.
      seed: of what is drawn.
    Returns:
      The place is K where no copy is taken.
    """
    pool, marks = len(league.pick), int(league.marks)
    judged = league.counts.sum() >= own.window
    strong = own.snapshot_win_rate is not None and _shares(league.counts.sum(0)) >= own.snapshot_win_rate
    now = marks if own.snapshot_every is None else env_steps // own.snapshot_every
    if (judged and strong) or now > marks:
        place = least_useful(league, own)
        after = _with_copy(league, place)
        pick = picked(after, own, seed)
        return dataclasses.replace(after, pick=pick, marks=np.int32(now)), place
    if not judged:
        return league, pool
    after = dataclasses.replace(league, latest=league.counts, counts=np.zeros_like(league.counts))
    if own.opponents == "prioritised":
        pick = picked(after, own, seed)
        # games that one copy has begun and another goes on with say nothing of either
        since = league.since if np.array_equal(pick, league.pick) else np.int32(league.since + 1)
        after = dataclasses.replace(after, pick=pick, since=since)
    rating, _ = ratings(after)
    return dataclasses.replace(after, rating=_filled(rating[:-1], after)), pool


def least_useful(league: League, own: Any) -> int:
    """Returns the place that the next copy is written over: one without a copy of its own, while there are such.

    Then that of the copy against which most games are won, and of several such, or with opponents `latest`, the oldest;
    the newest stays.
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
    found[place, place] = 0  # against whom the copy takes the place of
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


def picked(league: League, own: Any, seed: tuple[int, int]) -> np.ndarray:
    """Returns the place that plays where place k would, i32 [K].

    Uniform: the copies that there are by turns; latest: the newest; prioritised: drawn in proportion to the share of
    games that are not won against them (arXiv:1912.06680, appendix N), 1 for whom nobody has met.
    """
    pool, held = len(league.pick), num_held(league)
    if own.opponents == "latest":
        return np.full(pool, np.argmax(league.generation), np.int32)
    if own.opponents == "uniform":
        return (np.arange(pool) % held).astype(np.int32)
    weight = 1 - np.nan_to_num(_shares(_recent(league)[:held]), nan=0.0)
    chance = weight / weight.sum() if weight.sum() > 0 else np.full(held, 1 / held)
    return np.random.default_rng(seed).choice(held, pool, p=chance).astype(np.int32)


# ---------------------------------------------------------------- what is told


def table(league: League) -> np.ndarray:
    """Returns the results of all against all, [N + 1, N + 1, 3]: of the copies, and of the policy as it is now."""
    held = num_held(league)
    found = np.zeros((held + 1, held + 1, 3), np.int64)
    found[:held, :held] = league.payoff[:held, :held]
    found[held, :held] = _recent(league)[:held]
    return found


def ratings(league: League) -> tuple[np.ndarray, np.ndarray]:
    """Returns Elo ratings and their standard errors, [N + 1], of the players of `table`.

    The oldest copy of the pool keeps the rating that it had; errors are of the differences to it. The untrained copy
    that a league begins with has the rating 0.
    """
    held = num_held(league)
    anchor = int(np.argmin(league.generation[:held]))
    rating, error = payoff.compute_elo(payoff.compute_scores(table(league)), anchor=anchor, prior=_PRIOR)
    return rating + league.rating[anchor], error


def _filled(rating: np.ndarray, league: League) -> np.ndarray:
    """Returns the ratings of all places, [K] f32: the new ones, and where there is none, those that there were."""
    known = league.rating.copy()
    known[: len(rating)] = np.where(np.isfinite(rating), rating, known[: len(rating)])
    return known


def metrics(league: League, own: Any) -> dict[str, float]:
    """Returns what a row tells of the games of this window and the one before.

    `league/games`, `league/win_rate` and `league/draw_rate` over all, NaN before there are `window` games, and
    `league/win_rate/k` of place k, NaN where none was played; `league/elo`. Win rates and Elo have standard errors:
    `league/win_rate_se`, `league/win_rate_se/k`, `league/elo_se`.
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
