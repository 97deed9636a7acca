"""What happens beside the loop: rows that are reported, criteria that end a run, what is due when."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learn.program import Clock, StepInfo
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.run import reporter as reporters
from jrl.types import BROKEN_STACKS, VALID_SHARE, Episodes, InputError


def info_of(env_steps, steps, iteration, count=1, window=1, metrics=None):
    """A StepInfo of a call of `steps` steps that began after `env_steps`."""
    returns = np.full((episodes.WINDOW,), np.nan, np.float32)
    returns[:window] = 10.0
    report = Episodes(
        *(np.asarray(x) for x in (count, 10.0 * count, 10.0, 10.0, 5 * count, steps)), returns, returns / 2
    )
    metrics = metrics or {"loss/policy": jnp.float32(iteration)}
    return StepInfo("state", metrics, report, iteration, Clock(env_steps, env_steps), Timers())


KEYS = {
    "env_steps", "iteration", "updates", "time_s", "perf/steps_per_s", "loss/policy",
    "episode/return", "episode/length", "episode/window", "episode/count", "episode/return_min", "episode/return_max",
    "time/env", "time/act", "time/transfer", "time/collect", "time/update", "time/log", "evaluation/return",
}  # fmt: skip


def test_reporter():
    rows = []
    now = iter(range(100))
    reporter = reporters.Reporter(
        [lambda row: rows.append(row)], every=250, updates_per_iteration=8, clock=lambda: next(now)
    )
    reporter.extra["evaluation/return"] = 1.5
    for i in range(8):
        assert reporter(info_of(100 * i, 100, i + 1, count=0 if i == 0 else 1)) is None
    assert [row["env_steps"] for row in rows] == [300, 600]  # the calls that are complete: never the one just begun
    reporter.flush()
    assert [row["env_steps"] for row in rows] == [300, 600, 800]
    assert reporter.flush() is None
    assert len(rows) == 3  # nothing was pending
    assert [row["iteration"] for row in rows] == [3, 6, 8]
    assert [row["updates"] for row in rows] == [24, 48, 64]
    assert [row["loss/policy"] for row in rows] == [3.0, 6.0, 8.0]
    assert [row["episode/count"] for row in rows] == [2, 3, 2]
    for row in rows:
        assert set(row) >= KEYS  # always the same columns
        assert set(row) == set(rows[0])
        assert not any(isinstance(value, jax.Array) for value in row.values())
    assert reporter.row is rows[-1]


def test_reporter_keys_before_the_first_episode():
    reporter = reporters.Reporter([], every=1, updates_per_iteration=1)
    reporter(info_of(0, 100, 1, count=0, window=0))
    reporter.flush()
    assert set(reporter.row) >= KEYS - {"evaluation/return"}
    assert np.isnan(reporter.row["episode/return"])


def test_a_replay_of_little_but_void_rows_is_told_of_once():
    reporter = reporters.Reporter([], every=1, updates_per_iteration=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reporter(info_of(0, 100, 1, metrics={VALID_SHARE: jnp.float32(0.5)}))
        reporter.flush()
        assert reporter.row["replay/valid_share"] == 0.5
    with pytest.warns(RuntimeWarning, match=r"replay/valid_share 0.31: .*longer rollouts \(replay.train_every") as told:
        for i in range(3):
            reporter(info_of(100 + 100 * i, 100, 2 + i, metrics={VALID_SHARE: jnp.float32(0.31)}))
        reporter.flush()
    assert len(told) == 1


def test_a_sink_ends_the_run():
    reporter = reporters.Reporter([lambda row: None, lambda row: "enough"], every=100, updates_per_iteration=1)
    assert reporter(info_of(0, 100, 1)) is None
    assert reporter(info_of(100, 100, 2)) == "enough"


def test_stacks_that_replay_cannot_rebuild_end_the_run():
    reporter = reporters.Reporter([], every=100, updates_per_iteration=1)
    info = info_of(0, 100, 1)
    for share in (0.0, 0.25):
        reporter(info._replace(metrics={**info.metrics, BROKEN_STACKS: np.float32(share)}))
        if share == 0:
            reporter.flush()
            assert BROKEN_STACKS not in reporter.row
    with pytest.raises(InputError, match=r"replay\.frame_stack: .* use 1"):
        reporter.flush()


def test_stop_at_waits_for_a_full_window():
    stop = reporters.end_by_criteria({"env_steps": 5, "episode/return": 9.5, "loss/value": 2.0})
    row = {"env_steps": 100, "episode/return": 10.0, "episode/window": episodes.WINDOW - 1, "loss/value": 1.0}
    assert stop(row) is None
    assert stop(row | {"episode/window": episodes.WINDOW}) == "episode/return 10 reached 9.5"
    assert stop(row | {"episode/return": 9.0, "episode/window": episodes.WINDOW}) is None
    assert stop(row | {"loss/value": 2.0}) == "loss/value 2 reached 2"  # others do not wait
    assert stop(row | {"episode/return": float("nan"), "episode/window": episodes.WINDOW}) is None


@pytest.mark.parametrize("name", ["agent/a_0/return", "agent/a_0/length", "policy/main.1/return"])
def test_stop_at_waits_for_the_window_of_an_agent_or_policy(name):
    stop, window = reporters.end_by_criteria({name: 9.5}), f"{name.rpartition('/')[0]}/window"
    row = {"env_steps": 100, name: 10.0, "episode/window": episodes.WINDOW, window: episodes.WINDOW - 1}
    assert stop(row) is None
    assert stop(row | {window: episodes.WINDOW}) == f"{name} 10 reached 9.5"
    del row[window]  # of a run of before, which the report reads
    assert stop(row) is not None and stop(row | {"episode/window": 3}) is None
    of_a_loss = {"env_steps": 100, "episode/window": 3, "policy/main.1/loss/length": 10.0}
    assert reporters.end_by_criteria({"policy/main.1/loss/length": 9.5})(of_a_loss) is not None


def waited_for(before, after):
    """A call after `before` steps that ends at `after`, and the times that somebody waited for it."""
    waits = []
    call = types.SimpleNamespace(env_steps=before, env_steps_after=lambda: waits.append(1) or after)
    return call, waits


def test_reached_by_the_call_that_takes_the_run_there():
    """Only calls that may get there are waited for; nothing is made up for."""
    due, found, waited = reporters.every_steps(100, most=60), [], []
    for before, after in ((0, 30), (30, 55), (55, 110), (110, 170), (170, 199), (199, 450), (450, 460), (460, 500)):
        call, waits = waited_for(before, after)
        found += [after] if due(call) else []
        waited += [before] if waits else []
    assert found == [110, 450, 500]
    assert waited == [55, 170, 199, 450, 460]
    late = reporters.every_steps(100, env_steps=250)  # a call that takes more than `most`
    assert [late(waited_for(before, before + 30)[0]) for before in (250, 280, 310, 340)] == [False, False, True, False]


def test_seconds_passed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(reporters.time, "monotonic", lambda: now[0])
    due, called = reporters.every_seconds(10), []
    for now[0] in (5.0, 11.0, 12.0, 20.0, 21.5):
        called += [now[0]] if due(info_of(0, 10, 1)) else []
    assert called == [11.0, 21.5]
