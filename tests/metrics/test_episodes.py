"""Episode statistics against a plain loop over every environment and step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.metrics import episodes

track = jax.jit(episodes.track)
reduce = jax.jit(episodes.reduce)


def rows(seed, T, B, done_before, end_rate=0.3):
    """Rewards, ends and masks under the contract; void rewards are garbage. `done_before` [B]: row 0 is a reset row."""
    rng = np.random.default_rng(seed)
    reward = rng.normal(size=(T, B)).astype(np.float32)
    done, mask = np.zeros((T, B), bool), np.zeros((T, B), bool)
    for t in range(T):
        before = done_before if t == 0 else done[t - 1]
        mask[t] = ~before
        done[t] = ~before & (rng.random(B) < end_rate)
    reward[~mask] = 1e6
    return reward, done, mask


class Loop:
    """The same in Python."""

    def __init__(self, num_envs, gamma):
        self.gamma = gamma
        self.total, self.length = np.zeros(num_envs), np.zeros(num_envs, int)
        self.running = np.zeros(num_envs)
        self.ended = []  # (return, length), in the order of time, then of environments

    def rollout(self, reward, done, mask):
        running, ended, steps = np.zeros(reward.shape), [], 0
        for t in range(reward.shape[0]):
            for b in range(reward.shape[1]):
                if mask[t, b]:
                    self.total[b] += reward[t, b]
                    self.length[b] += 1
                    self.running[b] = reward[t, b] + self.gamma * self.running[b]
                    steps += 1
                running[t, b] = self.running[b]
                if done[t, b]:
                    ended.append((self.total[b], self.length[b]))
                    self.total[b], self.length[b], self.running[b] = 0, 0, 0
        self.ended += ended
        return running, ended, steps


@pytest.mark.parametrize("gamma", [None, 0.9])
def test_against_a_plain_loop(gamma):
    T, B = 20, 4
    loop, columns = Loop(B, gamma or 0.0), episodes.init(B, window=30)
    done_before = np.zeros(B, bool)
    for seed in range(5):
        reward, done, mask = rows(seed, T, B, done_before)
        done_before = done[-1]
        columns, tracked = track(columns, reward, done, mask, gamma)
        columns, report = reduce(columns, tracked, done, mask)
        running, ended, steps = loop.rollout(reward, done, mask)
        returns, lengths = np.array([r for r, _ in ended]), np.array([n for _, n in ended])
        assert (int(report.count), int(report.steps)) == (len(ended), steps)
        assert int(report.length_sum) == lengths.sum()
        got = (report.return_sum, report.return_min, report.return_max)
        np.testing.assert_allclose(got, (returns.sum(), returns.min(), returns.max()), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(columns.episode_return, loop.total, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(columns.length, loop.length)
        if gamma is not None:
            np.testing.assert_allclose(tracked.running_return * mask, running * mask, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(columns.running_return, loop.running, rtol=1e-4, atol=1e-4)
        assert len(ended) < 30  # a rollout's episodes take the place of the oldest, not of all
        window = np.array(sorted(loop.ended[-30:]))
        got = np.array(sorted(zip(*(x[: len(loop.ended)] for x in (report.window_return, report.window_length)))))
        np.testing.assert_allclose(got, window, rtol=1e-4, atol=1e-4)
        assert np.isnan(report.window_return).sum() == max(0, 30 - len(loop.ended))
    assert len(loop.ended) > 60  # the ring has turned over


def test_a_million_steps_are_added_up():
    """0.1 a step: float32 alone says 100,958."""
    T, B = 1_000, 1
    columns, on = episodes.init(B), np.ones((T, B), bool)
    for _ in range(1_000):
        columns, tracked = track(columns, np.full((T, B), 0.1, np.float32), ~on, on)
    np.testing.assert_allclose(columns.episode_return, 1e5, rtol=5e-5)
    np.testing.assert_array_equal(columns.episode_return, tracked.episode_return[-1])
    columns, _ = track(columns, np.full((2, B), 0.1, np.float32), on[:2], on[:2])
    assert (columns.episode_return, columns.return_rest) == (0, 0)  # the next episode begins with nothing


def test_more_episodes_than_the_window_in_one_rollout():
    """Every row ends an episode: 300 of them, of which the last 100 count."""
    T, B = 150, 2
    reward = np.arange(T * B, dtype=np.float32).reshape(T, B)
    done, mask = np.ones((T, B), bool), np.ones((T, B), bool)
    columns, tracked = track(episodes.init(B), reward, done, mask)
    columns, report = reduce(columns, tracked, done, mask)
    assert int(report.count) == 300
    np.testing.assert_array_equal(np.sort(report.window_return), np.arange(200, 300))
    np.testing.assert_array_equal(report.window_length, 1)
    # and the ring goes on behind the newest: three more replace the three oldest
    done = np.zeros((T, B), bool)
    done[:3, 0] = True
    columns, tracked = track(columns, reward * 0 - 1, done, mask)
    _, report = reduce(columns, tracked, done, mask)
    np.testing.assert_array_equal(np.sort(report.window_return), [-1, -1, -1, *range(203, 300)])


def test_no_episode_yet():
    columns = episodes.init(3)
    nothing = np.zeros((4, 3), bool)
    columns, tracked = track(columns, np.ones((4, 3), np.float32), nothing, ~nothing)
    _, report = reduce(columns, tracked, nothing, ~nothing)
    row = episodes.summarize([report])
    assert row["episode/count"] == row["episode/window"] == 0
    for name in ("return", "length", "return_min", "return_max"):
        assert np.isnan(row[f"episode/{name}"])
    assert episodes.count_steps(report) == 12


def report_of(returns, lengths, window=5):
    """Episodes of one iteration whose ended episodes are these."""
    T = max(len(returns), 1)
    columns = episodes.init(1, window)
    done = np.zeros((T, 1), bool)
    done[: len(returns)] = True
    tracked = episodes.EpisodeRows(
        jnp.asarray([*returns, *[0.0] * (T - len(returns))], jnp.float32)[:, None],
        jnp.asarray([*lengths, *[0] * (T - len(lengths))], jnp.int32)[:, None],
        jnp.zeros((T, 1)),
    )
    return reduce(columns, tracked, done, np.ones((T, 1), bool))[1]


def test_summary_over_devices_and_iterations():
    """Devices are a leading axis; the windows are the last report's, counts and extremes are of all reports."""
    stack = lambda *reports: jax.tree.map(lambda *x: np.stack(x), *reports)
    first = stack(report_of([1.0, 9.0], [1, 2]), report_of([], []))
    last = stack(report_of([2.0, 4.0], [3, 5]), report_of([-6.0], [10]))
    row = episodes.summarize([first, last])
    assert row == {
        "episode/return": 0.0,  # (2 + 4 - 6) / 3
        "episode/length": 6.0,
        "episode/return_p10": pytest.approx(-4.4),  # of -6, 2 and 4: a fifth of the way from the first to the second
        "episode/return_p90": pytest.approx(3.6),
        "episode/window": 3,
        "episode/count": 5,
        "episode/return_min": -6.0,
        "episode/return_max": 9.0,
    }
    assert episodes.count_steps(last) == 3
    silent = stack(report_of([], []), report_of([], []))
    assert np.isnan(episodes.summarize([silent])["episode/return"])
    assert episodes.summarize([last, silent])["episode/return_max"] == 4.0


def test_steps_do_not_wrap():
    report = report_of([], [])
    many = report.replace(steps=np.full((4,), 2**31 - 1, np.int32))
    assert episodes.count_steps(many) == 4 * (2**31 - 1)


def test_reports_add_up():
    """Of two rollouts, one after the other: the report that one rollout of both would have given."""
    first, last = report_of([1.0, 9.0], [1, 2]), report_of([-4.0], [7])
    both = episodes.add_reports([first, last])
    assert [float(x) for x in (both.count, both.return_sum, both.length_sum, both.steps)] == [3, 6, 10, 3]
    assert (float(both.return_min), float(both.return_max)) == (-4.0, 9.0)
    np.testing.assert_array_equal(both.window_return, last.window_return)
    assert both.steps.dtype == first.steps.dtype
    stack = lambda *reports: jax.tree.map(lambda *x: np.stack(x), *reports)
    of_devices = episodes.add_reports([stack(first, last), stack(last, last)])
    assert of_devices.return_sum.tolist() == [6.0, -8.0]
    assert of_devices.return_max.tolist() == [9.0, -4.0]
    assert of_devices.window_return.shape == (2, 5)


def test_where_nothing_was_played_the_windows_are_those_from_before():
    done, mask = np.array([[True], [False]]), np.ones((2, 1), bool)
    columns, tracked = track(episodes.init(1, 3), np.array([[5.0], [1.0]], np.float32), done, mask)
    columns, report = reduce(columns, tracked, done, mask)
    silent = episodes.empty_report(columns)
    assert jax.tree.map(np.shape, silent) == jax.tree.map(np.shape, report)
    assert jax.tree.map(lambda x: np.asarray(x).dtype, silent) == jax.tree.map(lambda x: np.asarray(x).dtype, report)
    assert episodes.summarize([report, silent]) == episodes.summarize([report])
    assert episodes.count_steps(silent) == episodes.summarize([silent])["episode/count"] == 0
    assert episodes.summarize([silent])["episode/return"] == 5.0
    assert episodes.empty_report(jax.tree.map(lambda x: x[None], columns)).count.shape == (1,)


@pytest.mark.parametrize(("parts", "smoothing", "window"), [(1, 100, 100), (3, 100, 34), (4, 10, 3), (8, 5, 1)])
def test_all_windows_together_hold_what_is_smoothed_over(parts, smoothing, window):
    assert episodes.window_per_pool(parts, smoothing) == window
    assert window * parts >= smoothing > (window - 1) * parts
    assert episodes.window_per_pool(parts) == episodes.window_per_pool(parts, episodes.WINDOW)
