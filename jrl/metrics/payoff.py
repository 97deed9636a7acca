"""Results of players against each other: Elo ratings from results, and a plot of both."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jrl.metrics import plots

SCALE = 400 / math.log(10)  # Elo points of one unit of log odds
_STEPS = 100  # maximum of Newton's method, which needs about twelve


def compute_scores(results: np.ndarray) -> np.ndarray:
    """Returns the score of each player against each, f64 [P, P], from results [P, P, 3]: wins, draws and losses.

    A draw counts half. Results noted by one side count for both: the results of i against j are the sum of entry [i, j]
    and the swapped entry [j, i].

    >>> compute_scores(np.array([[[0, 0, 0], [3, 2, 1]], [[0, 0, 0], [0, 0, 0]]])).tolist()
    [[0.0, 4.0], [2.0, 0.0]]
    """
    both = np.asarray(results, np.float64) + np.swapaxes(results, 0, 1)[..., ::-1]
    return both[..., 0] + both[..., 1] / 2


def compute_elo(scores: np.ndarray, *, anchor: int = 0, prior: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the Elo ratings of P players and their standard errors, f64 [P] each; the anchor's are 0.

    Maximum likelihood under the Bradley-Terry model (Biometrika 39, 1952): i scores against j with probability
    `1 / (1 + 10 ** ((r_j - r_i) / 400))`. The errors are those of the difference to the anchor, by the observed
    information. Both are NaN for players that no chain of games connects to the anchor, with wins and losses in it.

    Args:
      scores: [P, P], result of `compute_scores`.
      anchor: index of the player with rating 0.
      prior: number of drawn games added for each pair that has met; above 0, ratings stay finite without losses.
    """
    scores = np.asarray(scores, np.float64)
    have_met = (scores + scores.T) > 0
    scores = scores + have_met * prior / 2
    connected = _find_reachable(scores > 0, anchor) & _find_reachable(scores.T > 0, anchor)
    rating, error = (np.full(len(scores), np.nan) for _ in range(2))
    rating[anchor] = error[anchor] = 0.0
    free = np.flatnonzero(connected & (np.arange(len(scores)) != anchor))
    if not len(free):
        return rating, error
    won, games = scores * np.outer(connected, connected), (scores + scores.T) * np.outer(connected, connected)
    theta = np.zeros(len(scores))
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(theta[None] - theta[:, None]))
        gradient = (won - games * chance).sum(1)[free]
        weight = games * chance * (1 - chance)
        information = (np.diag(weight.sum(1)) - weight)[np.ix_(free, free)]
        change = np.linalg.solve(information, gradient)
        theta[free] += np.clip(change, -2, 2)  # damped: far from the maximum a full Newton step may diverge
        if np.abs(change).max() < 1e-10:
            break
    rating[free] = SCALE * theta[free]
    error[free] = SCALE * np.sqrt(np.diag(np.linalg.inv(information)))
    return rating, error


def _find_reachable(arcs: np.ndarray, start: int) -> np.ndarray:
    """Returns the players reachable from `start` along arcs [P, P] bool, [P] bool; `start` is included."""
    found = np.arange(len(arcs)) == start
    while (more := found | arcs[found].any(0)).sum() > found.sum():
        found = more
    return found


def draw(
    png: str | Path,
    names: Sequence[str],
    results: np.ndarray,
    rating: np.ndarray,
    error: np.ndarray,
    *,
    title: str = "",
) -> Path:
    """Plots each player's share of points against each other player, and the ratings with errors, to `png`.

    `results` as in `compute_scores`; `rating` and `error` [P] from `compute_elo`.
    """
    scores = compute_scores(results)
    games = scores + scores.T
    share = np.divide(scores, games, out=np.full(scores.shape, np.nan), where=games > 0)
    picture = plots.make_figure((10, 4.5))
    left, right = picture.subplots(1, 2)
    image = left.imshow(share, cmap="RdYlGn", vmin=0, vmax=1)
    positions = range(len(names))
    left.set(
        xticks=positions,
        yticks=positions,
        xticklabels=names,
        yticklabels=names,
        title="score of the row against the column",
    )
    left.tick_params(axis="x", rotation=90)
    for i, j in zip(*np.nonzero(games), strict=True):
        left.text(j, i, f"{share[i, j]:.2f}", ha="center", va="center", fontsize=8)
    picture.colorbar(image, ax=left)
    right.errorbar(rating, positions, xerr=np.nan_to_num(error), fmt="o", capsize=3)
    right.set(yticks=positions, yticklabels=names, xlabel="Elo, with standard errors", title=title)
    right.invert_yaxis()
    right.grid(alpha=0.3)
    return plots.save(picture, png)


__all__ = ["SCALE", "compute_elo", "compute_scores", "draw"]
