"""Results of players against each other: Elo ratings of several players from their results, and both as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jrl.metrics import report

SCALE = 400 / math.log(10)  # Elo points of one unit of log odds
_STEPS = 100  # of Newton's method, which takes a dozen


def score(results: np.ndarray) -> np.ndarray:
    """Returns what each player has scored against each, f64 [P, P], of results [P, P, 3], its wins, draws and losses.

    A draw is half a win. What only one of two has noted counts for both: the results of i against j are those at
    [i, j] and, turned around, those at [j, i].

    >>> score(np.array([[[0, 0, 0], [3, 2, 1]], [[0, 0, 0], [0, 0, 0]]])).tolist()
    [[0.0, 4.0], [2.0, 0.0]]
    """
    both = np.asarray(results, np.float64) + np.swapaxes(results, 0, 1)[..., ::-1]
    return both[..., 0] + both[..., 1] / 2


def elo(scores: np.ndarray, *, anchor: int = 0, prior: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the Elo ratings of P players and their standard errors, each f64 [P]; those of the anchor are 0.

    Maximum likelihood under the model of Bradley and Terry (Biometrika 39, 1952), that i scores against j with the
    probability `1 / (1 + 10 ** ((r_j - r_i) / 400))`; the errors are those of the differences to the anchor, by the
    observed information. Both are NaN for whom the results do not tie to the anchor: who has never met it or anybody
    who has, and who has lost, or won, all games against those.

    Args:
      scores: [P, P], of each against each, as `score` gives them.
      anchor: whose rating is 0.
      prior: drawn games that each pair which has met is taken to have played beside; above 0, nobody who has played
        has won everything.
    """
    scores = np.asarray(scores, np.float64)
    met = (scores + scores.T) > 0
    scores = scores + met * prior / 2
    tied = _reached(scores > 0, anchor) & _reached(scores.T > 0, anchor)
    rating, error = (np.full(len(scores), np.nan) for _ in range(2))
    rating[anchor] = error[anchor] = 0.0
    free = np.flatnonzero(tied & (np.arange(len(scores)) != anchor))
    if not len(free):
        return rating, error
    won, games = scores * np.outer(tied, tied), (scores + scores.T) * np.outer(tied, tied)
    theta = np.zeros(len(scores))
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(theta[None] - theta[:, None]))
        gradient = (won - games * chance).sum(1)[free]
        weight = games * chance * (1 - chance)
        information = (np.diag(weight.sum(1)) - weight)[np.ix_(free, free)]
        change = np.linalg.solve(information, gradient)
        theta[free] += np.clip(change, -2, 2)  # far from the maximum a whole step may lead farther away
        if np.abs(change).max() < 1e-10:
            break
    rating[free] = SCALE * theta[free]
    error[free] = SCALE * np.sqrt(np.diag(np.linalg.inv(information)))
    return rating, error


def _reached(arcs: np.ndarray, start: int) -> np.ndarray:
    """Returns whom one gets to from `start` along arcs [P, P] bool, itself included, [P] bool."""
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
    """Draws what share each of the P players has scored against each, and their ratings with their errors, to `png`.

    `results` are as `score` takes them, `rating` and `error` [P] as `elo` gives them.
    """
    scores = score(results)
    games = scores + scores.T
    share = np.divide(scores, games, out=np.full(scores.shape, np.nan), where=games > 0)
    picture = report.figure_of((10, 4.5))
    left, right = picture.subplots(1, 2)
    image = left.imshow(share, cmap="RdYlGn", vmin=0, vmax=1)
    at = range(len(names))
    left.set(xticks=at, yticks=at, xticklabels=names, yticklabels=names, title="score of the row against the column")
    left.tick_params(axis="x", rotation=90)
    for i, j in zip(*np.nonzero(games), strict=True):
        left.text(j, i, f"{share[i, j]:.2f}", ha="center", va="center", fontsize=8)
    picture.colorbar(image, ax=left)
    right.errorbar(rating, at, xerr=np.nan_to_num(error), fmt="o", capsize=3)
    right.set(yticks=at, yticklabels=names, xlabel="Elo, with standard errors", title=title)
    right.invert_yaxis()
    right.grid(alpha=0.3)
    return report.save(picture, png)


__all__ = ["SCALE", "draw", "elo", "score"]
