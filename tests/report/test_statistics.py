"""Statistics of scores: against plain references, scipy and rliable, and what their intervals promise."""

import itertools

import numpy as np
import pytest
from scipy import stats

from jrl.report import statistics

OURS = np.array(
    [
        [0.60, 0.89, 0.42, 0.73], [0.46, 0.50, 0.52, 1.40], [0.45, 0.61, 0.65, 1.11],
        [0.63, 0.52, 0.49, 1.21], [0.20, 0.66, -0.07, 0.61], [0.05, 0.73, 0.12, 1.08],
    ]
)  # fmt: skip
THEIRS = np.array(
    [
        [0.55, 0.64, -0.36, 0.74], [0.49, 0.73, -0.06, 0.76], [0.21, 0.46, 0.72, 0.66],
        [0.49, 0.97, 0.22, 0.87], [0.53, 0.72, 0.03, 0.92],
    ]
)  # fmt: skip
# of rliable 1.2.0 (with arch 7.2.0), library.get_interval_estimates of OURS, 50,000 replicates: value, low, high
RLIABLE = {
    statistics.interquartile_mean: (0.58166667, 0.5175, 0.6475),
    statistics.median: (0.525, 0.45333333, 0.62833333),
    statistics.mean: (0.60708333, 0.51666667, 0.69416667),
    statistics.optimality_gap: (0.42625, 0.35125, 0.505),
}
THRESHOLDS = np.array([0.0, 0.5, 0.75, 1.0])


def ragged(sizes=(3, 4, 9), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=size) for size in sizes]


@pytest.mark.parametrize("statistic", RLIABLE, ids=lambda f: f.__name__)
def test_aggregates_and_intervals_are_those_of_rliable(statistic):
    found = statistics.estimate(statistic, OURS, replicates=50_000)
    assert found.value == pytest.approx(RLIABLE[statistic][0], abs=1e-8)
    assert (found.low, found.high) == pytest.approx(RLIABLE[statistic][1:], abs=0.004)


def test_the_probability_of_improvement_is_that_of_rliable():
    found = statistics.estimate(statistics.probability_of_improvement, OURS, THEIRS, replicates=20_000)
    assert found.value == pytest.approx(0.5458333333333334, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((0.36666667, 0.725), abs=0.01)


def test_the_performance_profile_is_that_of_rliable():
    profile = lambda scores: statistics.performance_profile(scores, THRESHOLDS)
    found = statistics.estimate(profile, OURS, replicates=20_000)
    assert found.value == pytest.approx([0.95833333, 0.625, 0.20833333, 0.16666667])
    step = 1.001 / OURS.size  # the shares go by one run, and so do their quantiles
    assert found.low == pytest.approx([0.875, 0.5, 0.08333333, 0.08333333], abs=step)
    assert found.high == pytest.approx([1.0, 0.79166667, 0.33333333, 0.25], abs=step)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 1), (4, 2), (7, 3), (10, 26)])
def test_the_interquartile_mean_is_scipys_trimmed_mean(shape):
    scores = np.random.default_rng(1).normal(size=shape)
    assert statistics.interquartile_mean(scores) == pytest.approx(stats.trim_mean(scores, 0.25, axis=None))


def test_tasks_weigh_the_same_however_many_runs_they_have():
    scores = ragged()
    repeated = [np.tile(task, times) for task, times in zip(scores, (12, 9, 4), strict=True)]  # 36 runs each
    for statistic in RLIABLE:
        assert statistic(scores) == pytest.approx(statistic(repeated))
    assert statistics.mean(scores) == pytest.approx(np.mean([task.mean() for task in scores]))
    assert statistics.median_run(scores) == pytest.approx(np.mean([np.median(task) for task in scores]))


def test_the_weighted_middle_half_by_hand():
    # weights: a half for 0, a quarter each for 4 and 8; a quarter goes at either end: 0 keeps a quarter, 4 a quarter
    assert statistics.interquartile_mean([np.array([0.0]), np.array([8.0, 4.0])]) == pytest.approx(2.0)


def test_wins_are_counted_pair_by_pair():
    ours, theirs = ragged(), ragged((5, 2, 6), seed=1)
    theirs[0][1] = ours[0][2]  # a tie
    wins = [
        np.mean([(x > y) + (x == y) / 2 for x, y in itertools.product(first, second)])
        for first, second in zip(ours, theirs, strict=True)
    ]
    found = statistics.probability_of_improvement(ours, theirs)
    assert found == pytest.approx(np.mean(wins))
    assert found + statistics.probability_of_improvement(theirs, ours) == pytest.approx(1.0)
    u = [stats.mannwhitneyu(x, y).statistic / (len(x) * len(y)) for x, y in zip(ours, theirs, strict=True)]
    assert found == pytest.approx(np.mean(u))
    with pytest.raises(ValueError):
        statistics.probability_of_improvement(ours, theirs[:2])


def test_axes_before_that_of_runs_stay():
    points = [np.stack([task, task**2, -task]) for task in ragged()]
    for statistic in (*RLIABLE, statistics.median_run):
        each = [statistic([task[i] for task in points]) for i in range(3)]
        assert statistic(points) == pytest.approx(each)
        together = statistics.estimate(statistic, points, replicates=500)
        assert together.low.shape == (3,) and (together.low < together.value).all()
        assert (together.value < together.high).all()


@pytest.mark.parametrize("sizes", [(6, 6), (4, 9)])
def test_the_bootstrap_draws_runs_within_each_task(sizes):
    """Each replicate has as many runs of each task as there are, all of them of that task."""
    scores = [np.arange(size) + 100.0 * k for k, size in enumerate(sizes)]
    seen = []
    statistics.bootstrap(lambda tasks: seen.append(tasks) or tasks[0].mean(-1), scores, replicates=300, seed=3)
    drawn = [np.concatenate([tasks[k] for tasks in seen]) for k in range(2)]
    for k, size in enumerate(sizes):
        assert drawn[k].shape == (300, size) and {*drawn[k].ravel()} == {*scores[k]}
        # with replacement: of n runs (1 - 1/n)^n are left out
        missing = 1 - np.mean([len({*row}) for row in drawn[k]]) / size
        assert missing == pytest.approx((1 - 1 / size) ** size, abs=0.03)


def test_intervals_repeat_with_their_seed():
    first = statistics.estimate(statistics.mean, OURS, replicates=1000, seed=5)
    assert first == statistics.estimate(statistics.mean, OURS, replicates=1000, seed=5)
    other = statistics.estimate(statistics.mean, OURS, replicates=1000, seed=6)
    assert other.value == first.value and (other.low, other.high) != (first.low, first.high)
    state = np.random.get_state()[1]  # noqa: NPY002 - that of the whole process, which stays as it is
    statistics.estimate(statistics.mean, OURS, replicates=10)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


def test_a_task_with_one_run_has_no_interval():
    found = statistics.estimate(statistics.mean, [np.array([1.0, 2.0]), np.array([3.0])])
    assert found.value == pytest.approx(2.25) and np.isnan([found.low, found.high]).all()


@pytest.mark.parametrize("scores", [[], [np.array([])], np.zeros((0, 3)), [np.float64(1.0)]])
def test_no_scores_are_refused(scores):
    with pytest.raises(ValueError, match="at least"):
        statistics.mean(scores)


def test_ranks_and_what_is_made_of_them_are_scipys():
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 6, 40).astype(float), rng.normal(size=40).round(1)
    assert statistics.ranks(x) == pytest.approx(stats.rankdata(x))
    assert statistics.rank_correlation(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert statistics.rank_correlation(10.0**x, y) == pytest.approx(statistics.rank_correlation(x, y))
    names = ["abc"[int(value) % 3] for value in x]
    by_name = [[score for name, score in zip(names, y, strict=True) if name == wanted] for wanted in "abc"]
    assert statistics.rank_share(names, y) == pytest.approx(stats.kruskal(*by_name).statistic / (len(y) - 1))
    constant = np.ones(40)
    assert np.isnan(statistics.rank_correlation(x, constant)) and np.isnan(statistics.rank_share(names, constant))
