"""Statistics of scores over runs and tasks, with bootstrap intervals that repeat.

`Scores` are f64 [N, K], the scores of N runs on each of K tasks, or, where tasks have other numbers of runs, K arrays
f64 [..., n_k] whose last axis is that of runs. What stands before it, such as the points of a curve, stays. Every task
weighs the same, however many runs it has.

The measures are those of Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice
(arXiv:2108.13264), and equal those of their library rliable, whose intervals cannot be seeded.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.metrics import report

Scores = np.ndarray | Sequence[np.ndarray]
Statistic = Callable[..., np.ndarray]  # of one Scores or several: the axes that stand before that of runs

REPLICATES = 10_000
CURVE_REPLICATES = 2_000  # rliable's number for what is drawn
_AT_ONCE = 2**20  # numbers that are resampled together: they fit the cache


class Estimate(NamedTuple):
    """A statistic and the interval around it; numbers, or arrays of one shape."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


def by_task(scores: Scores) -> list[np.ndarray]:
    """Returns K arrays f64 [..., n_k] of `Scores` of either form.

    Raises:
      ValueError: there is no task, or a task without runs.
    """
    columns = scores.T if isinstance(scores, np.ndarray) and scores.ndim == 2 else scores
    tasks = [np.asarray(column, np.float64) for column in columns]
    if not tasks or any(task.ndim == 0 or task.shape[-1] == 0 for task in tasks):
        raise ValueError("expected the scores of one task at least, and of one run at least for each")
    return tasks


# ---------------------------------------------------------------- one number of many scores


def interquartile_mean(scores: Scores) -> np.ndarray:
    """Returns the mean of the middle half of all scores, of all tasks together [...].

    With as many runs of each task it is `scipy.stats.trim_mean(scores, 0.25, axis=None)`, as rliable's `aggregate_iqm`:
    int(0.25 N K) scores go at either end. Else scores weigh 1 / n_k, and a quarter of the weight goes at either end.
    """
    tasks = by_task(scores)
    sizes = [task.shape[-1] for task in tasks]
    pooled = np.concatenate(tasks, axis=-1)
    if len({*sizes}) == 1:
        cut = int(0.25 * pooled.shape[-1])
        return np.sort(pooled, axis=-1)[..., cut : pooled.shape[-1] - cut].mean(-1)
    order = np.argsort(pooled, axis=-1)
    weight = np.concatenate([np.full(size, 1 / (size * len(sizes))) for size in sizes])[order]
    end = np.cumsum(weight, axis=-1)
    kept = np.clip(end, 0.25, 0.75) - np.clip(end - weight, 0.25, 0.75)
    return (kept * np.take_along_axis(pooled, order, axis=-1)).sum(-1) / kept.sum(-1)


def mean(scores: Scores) -> np.ndarray:
    """Returns the mean over tasks of the mean over runs [...], as rliable's `aggregate_mean`."""
    return _of_tasks(np.mean, scores).mean(-1)


def median(scores: Scores) -> np.ndarray:
    """Returns the median over tasks of the mean over runs [...], as rliable's `aggregate_median`."""
    return np.median(_of_tasks(np.mean, scores), axis=-1)


def median_run(scores: Scores) -> np.ndarray:
    """Returns the mean over tasks of the median over runs [...]: of one task the median of its runs."""
    return _of_tasks(np.median, scores).mean(-1)


def _of_tasks(measure: Callable[..., Any], scores: Scores) -> np.ndarray:
    return np.stack([measure(task, axis=-1) for task in by_task(scores)], axis=-1)


def optimality_gap(scores: Scores, gamma: float = 1.0) -> np.ndarray:
    """Returns the mean shortfall of scores from `gamma`; scores above it count as `gamma` [...].

    As rliable's `aggregate_optimality_gap`: gamma - mean(min(score, gamma)). It says something of scores that were
    normalised, so that `gamma` means the same on all tasks.
    """
    return gamma - mean([np.minimum(task, gamma) for task in by_task(scores)])


def performance_profile(scores: Scores, thresholds: np.ndarray) -> np.ndarray:
    """Returns the share of a method's runs, averaged over tasks, whose score is above each threshold [T, ...].

    As rliable's `run_score_deviation` (arXiv:2108.13264, eq. 1).
    """
    tasks = by_task(scores)
    return np.stack([mean([task > threshold for task in tasks]) for threshold in thresholds])


def probability_of_improvement(ours: Scores, theirs: Scores) -> np.ndarray:
    """Returns the probability that a run of ours is better than one of theirs, averaged over tasks; a tie is a half
    [...].

    Of a task that is the U statistic of Mann and Whitney over n * m, as rliable's `probability_of_improvement`.

    Raises:
      ValueError: the numbers of tasks differ.
    """
    wins = []
    for x, y in zip(by_task(ours), by_task(theirs), strict=True):
        first, second = x[..., :, None], y[..., None, :]
        wins.append(((first > second).mean((-2, -1)) + (first >= second).mean((-2, -1))) / 2)
    return np.stack(wins, axis=-1).mean(-1)


# ---------------------------------------------------------------- intervals


def bootstrap(statistic: Statistic, *samples: Scores, replicates: int = REPLICATES, seed: int = 0) -> np.ndarray:
    """Returns a statistic of scores drawn anew with replacement, among the runs of each task: [..., replicates].

    That is the stratified bootstrap of arXiv:2108.13264, section 4.1. The draws depend on `seed` and shapes alone.

    Args:
      statistic: of as many Scores as there are samples, to be taken over the last axis.
      samples: each is drawn from by itself.
      replicates: number of draws.
      seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    given = [by_task(scores) for scores in samples]
    step = max(1, _AT_ONCE // sum(task.size for tasks in given for task in tasks))

    def drawn(task: np.ndarray, count: int) -> np.ndarray:
        runs = task.shape[-1]
        return np.take(task, rng.integers(runs, size=(count, runs), dtype=np.uint32), axis=-1)

    found = []
    for start in range(0, replicates, step):
        count = min(step, replicates - start)
        found.append(statistic(*([drawn(task, count) for task in tasks] for tasks in given)))
    return np.concatenate(found, axis=-1)


def estimate(statistic: Statistic, *samples: Scores, replicates: int = REPLICATES, seed: int = 0) -> Estimate:
    """Returns a statistic of the scores, with the 95 % percentile interval of its bootstrap; arguments as `bootstrap`.

    Where a task has a single run, nothing is known of how runs vary, and the interval is NaN. Of few runs it is too
    narrow: on normal data of one task it holds the true mean in 75 % of cases with 3 runs, in 84 % with 5 and in 90 %
    with 10.
    """
    given = [by_task(scores) for scores in samples]
    value = np.asarray(statistic(*given))
    if min(task.shape[-1] for tasks in given for task in tasks) < 2:
        return Estimate(value, np.full_like(value, np.nan), np.full_like(value, np.nan))
    found = bootstrap(statistic, *given, replicates=replicates, seed=seed)
    low, high = np.quantile(found, [(1 - 0.95) / 2, (1 + 0.95) / 2], axis=-1)
    return Estimate(value, low, high)


def efficiency(
    tasks: Sequence[Sequence[report.Curve]], *, points: int = 100, replicates: int = CURVE_REPLICATES, seed: int = 0
) -> tuple[np.ndarray, Estimate] | None:
    """Returns an axis [points] and the interquartile mean of runs over it, with its interval at each point.

    Between two reported points a curve is linear (`jrl.metrics.report.on_one_grid` says why). The axis ends where the
    shortest run does. All points of a run are drawn together, as they belong to each other.

    Args:
      tasks: the curves of the runs of each task.
      replicates, seed: as of `bootstrap`.
    Returns:
      None where there is no part of the axis that all runs have.
    """
    together = [curve for own in tasks for curve in own]
    if not all(len(x) for x, _ in together) or max(x[0] for x, _ in together) >= min(x[-1] for x, _ in together):
        return None
    grid, values = report.on_one_grid(together, points)
    scores = [part.T for part in np.split(values, np.cumsum([len(own) for own in tasks])[:-1])]
    return grid, estimate(interquartile_mean, scores, replicates=replicates, seed=seed)


# ---------------------------------------------------------------- what a hyper-parameter has to do with scores


def ranks(values: np.ndarray) -> np.ndarray:
    """Returns the ranks 1 .. N of values [N]; those that are equal share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Spearman's rank correlation of x and y [N], in [-1, 1]; NaN where one of them is constant."""
    first, second = (r - r.mean() for r in (ranks(x), ranks(y)))
    norm = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / norm) if norm else float("nan")


def rank_share(groups: Sequence[object], y: np.ndarray) -> float:
    """Returns the share of the variance of the ranks of y [N] that lies between groups, in [0, 1]; NaN where y is
    constant.

    It is the statistic H of Kruskal and Wallis over N - 1. For choices without an order, such as names.
    """
    found = ranks(y) - (len(y) + 1) / 2
    members: dict[object, list[float]] = {}
    for group, rank in zip(groups, found, strict=True):
        members.setdefault(group, []).append(float(rank))
    total = float((found**2).sum())
    between = sum(len(member) * np.mean(member) ** 2 for member in members.values())
    return float(between / total) if total else float("nan")
