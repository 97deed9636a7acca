"""Sample-efficiency curves: what score methods have after so many steps, updates or seconds, with an interval."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jrl.metrics import report
from jrl.report import statistics
from jrl.report.statistics import Estimate, Statistic

POINTS = 100
REPLICATES = 2_000  # rliable's number for what is drawn


class Efficiency(NamedTuple):
    """A statistic over an axis."""

    grid: np.ndarray  # [points] of the axis
    estimate: Estimate  # [points]


def efficiency(
    tasks: Sequence[Sequence[report.Curve]],
    statistic: Statistic = statistics.interquartile_mean,
    *,
    points: int = POINTS,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Efficiency | None:
    """Returns a statistic of runs over a common axis, with its interval at each point.

    Runs were reported at different points. Between two of them a curve is linear (`jrl.metrics.report.on_one_grid` says
    why), and nothing is continued beyond a run's last point: the axis ends where the shortest run does. All points of a
    run are drawn together, as they belong to each other.

    Args:
      tasks: the curves of the runs of each task.
      statistic: of Scores.
      points: of the axis.
      replicates, seed: as of `statistics.bootstrap`.
    Returns:
      None where there is no part of the axis that all runs have.
    """
    together = [curve for own in tasks for curve in own]
    if not all(len(x) for x, _ in together) or max(x[0] for x, _ in together) >= min(x[-1] for x, _ in together):
        return None
    grid, values = report.on_one_grid(together, points)
    ends = np.cumsum([len(own) for own in tasks])[:-1]
    scores = [part.T for part in np.split(values, ends)]
    return Efficiency(grid, statistics.estimate(statistic, scores, replicates=replicates, seed=seed))


def thin(x: np.ndarray, y: np.ndarray, most: int = 500) -> report.Curve:
    """Thins a curve to at most so many points, evenly taken, the first and the last among them."""
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), most)).round().astype(int))
    return x[kept], y[kept]
