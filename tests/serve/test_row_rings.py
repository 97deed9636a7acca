"""Rows of clients' episodes, compared with a list for each column."""

import numpy as np
import pytest

from jrl.serve.row_rings import RowResults, RowRings


class Lists:
    """`RowRings` as lists of dicts."""

    def __init__(self, num, length, capacity):
        self.length, self.capacity = length, max(capacity, length)
        self.rows, self.latest = [[] for _ in range(num)], [None] * num
        self.continues, self.lost = [False] * num, [[False, 0.0, 0] for _ in range(num)]

    def write(self, column, obs, version, reward, terminated, final):
        if (latest := self.latest[column]) is not None:
            real = latest["kind"] == "step"
            latest |= {"reward": reward if real else 0.0, "terminated": real and terminated, "mask": real}
            self.rows[column].append(latest)
            if len(self.rows[column]) > self.capacity:
                self.drop(column)
        self.latest[column] = {"obs": obs, "version": version, "kind": "final" if final else "step"}

    def drop(self, column):
        row = self.rows[column].pop(0)
        if row["mask"]:
            self.lost[column][1] += row["reward"]
            self.lost[column][2] += 1
        if row["terminated"] or row["kind"] == "broken":
            self.lost[column] = [True, 0.0, 0]
        self.continues[column] = False

    def drop_before(self, oldest):
        for column, rows in enumerate(self.rows):
            while any(row["version"] < oldest for row in rows):
                self.drop(column)

    def break_off(self, column):
        if self.latest[column] is not None and self.latest[column]["kind"] == "step":
            self.latest[column]["kind"] = "broken"

    def take(self, column):
        rows, continues, lost = self.rows[column][: self.length], self.continues[column], self.lost[column]
        self.rows[column] = self.rows[column][self.length :]
        self.continues[column] |= bool(rows)
        self.lost[column] = [False, 0.0, 0]
        after = self.rows[column][0] if self.rows[column] else self.latest[column]
        return rows, after, continues, lost


@pytest.mark.parametrize("seed", range(2))
def test_rings_hold_the_rows_of_lists(seed):
    rng = np.random.default_rng(seed)
    num, length, capacity = 3, 4, (4, 9)[seed % 2]
    rings, lists = RowRings(num, length, capacity), Lists(num, length, capacity)
    over, num_rows, dropped = [True] * num, 0, 0
    for step in range(400):
        version = step // 25
        chosen = np.flatnonzero(rng.random(num) < 0.6)
        if len(chosen):
            obs = rng.normal(size=(len(chosen), 2)).astype(np.float32)
            reward = rng.normal(size=len(chosen)).astype(np.float32)
            final = np.array([not over[c] and rng.random() < 0.2 for c in chosen])
            for i, c in enumerate(chosen):
                lists.write(c, obs[i], version, reward[i], bool(final[i]), bool(final[i]))
                over[c] = bool(final[i])
            row = obs, np.arange(len(chosen)), {}, ()
            rings.write(chosen, row, version, RowResults(reward, final, np.zeros_like(final)), final)
        if rng.random() < 0.05:
            c = int(rng.integers(num))
            rings.break_off([c])
            lists.break_off(c)
        if rng.random() < 0.1:
            rings.drop_before(version - 1)
            lists.drop_before(version - 1)
        if rng.random() < 0.15 and rings.find_wait() == 0:
            batch = rings.take()
            for c in range(num):
                rows, after, continues, lost = lists.take(c)
                num_rows += len(rows)
                assert batch.filled[c] == len(rows)
                assert batch.contiguous[c] == continues
                for t, expected in enumerate(rows):
                    assert np.array_equal(batch.rows[0][t, c], expected["obs"])
                    assert batch.mask[t, c] == expected["mask"]
                    assert batch.results.reward[t, c] == np.float32(expected["reward"])
                    assert batch.results.terminated[t, c] == expected["terminated"]
                    assert batch.failed[t, c] == (expected["kind"] == "broken")
                    assert batch.version[t, c] == expected["version"]
                assert not batch.mask[len(rows) :, c].any()
                assert not batch.results.terminated[len(rows) :, c].any()
                if after is not None:
                    assert np.array_equal(batch.last_obs[c], after["obs"])
                    assert (batch.rows[0][len(rows) :, c] == after["obs"][None]).all()
                restarted, total, steps = (x[c] for x in batch.dropped)
                assert (restarted, steps) == (lost[0], lost[2])
                assert total == pytest.approx(lost[1], abs=1e-4)
        dropped = rings.dropped
    assert num_rows > 100
    assert dropped > 0


def test_a_rollout_waits_for_all_active_columns_at_most_twice_the_time_of_the_first(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    rings = RowRings(3, 2, 2)

    def write(column):
        one = np.zeros(1, bool)
        rings.write(
            np.array([column]), (np.zeros((1, 1)), np.zeros(1), {}, ()), 0, RowResults(np.zeros(1), one, one), one
        )

    write(0)
    write(1)
    assert rings.find_wait() is None
    now[0] = 104.0
    for _ in range(2):
        write(0)
    assert rings.find_wait() == pytest.approx(4.0)  # column 1 is active, column 2 is not
    now[0] = 106.0
    write(1)
    assert rings.find_wait() == pytest.approx(2.0)
    now[0] = 108.5
    assert rings.find_wait() == 0.0
    assert list(rings.take().filled) == [2, 1, 0]
    now[0] = 110.0
    for _ in range(2):
        write(0)
    assert rings.find_wait() == 0.0  # column 1 is not active any more
