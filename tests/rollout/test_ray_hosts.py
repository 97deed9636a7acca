"""Environment runners: order, lag, faults and ends, with sources of a few numbers in real processes."""

import collections
import functools
import logging
import os
import signal
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray_sources
from processes import gone
from ray_sources import B, T

from jrl.errors import EnvironmentFailed, InputError, RunnersLost, details
from jrl.metrics.episodes import summarize
from jrl.metrics.timers import Timers
from jrl.rollout.ray_cluster import Cluster
from jrl.rollout.ray_hosts import EnvRunners, RunnerOptions

K = 2
KEY = jax.random.key(7)
OPTIONS = RunnerOptions(num=K, num_cpus=0.5)


def test_an_address_where_nobody_is_is_an_error_at_once():
    for address in ("127.0.0.1:1", "nowhere"):
        with pytest.raises(InputError, match=f"env_runners.address: no answer from {address}"):
            runners(OPTIONS._replace(address=address))


@pytest.fixture(scope="module")
def cluster():
    """Ray, begun by the caller: runners attach to it and leave it."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks, while jax has threads
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            configure_logging=False, namespace="jrl", object_store_memory=100 * 2**20,
        )  # fmt: skip
    yield ray
    ray.shutdown()


def runners(options=OPTIONS, make=ray_sources.counting, faults=None, **other):
    make = functools.partial(make, faults or {}) if make is ray_sources.counting else make
    other.setdefault("join", ray_sources.join)
    return EnvRunners(make, options, num_envs=options.num * B, like=ray_sources.like(), **other)


@pytest.fixture(scope="module")
def steady(cluster):
    """Two runners, synchronous, without faults."""
    source = runners()
    yield source
    source.close()


def weights(version):
    return {"version": jnp.int32(version)}


def rows(rollout):
    """What stands in the first row, by column: runner, its rollouts before, weights; None where it is void."""
    made, version = (rollout.extras[name][0] for name in ("made", "version"))
    found = zip(rollout.obs[0], made, version, rollout.mask[0])
    return [tuple(map(int, x)) if there else None for *x, there in found]


@pytest.mark.slow
def test_parts_stand_in_the_order_of_runners_whichever_comes_first(steady):
    def collect(slow):
        steady.reset(KEY)
        steady.foreach_worker(lambda s: vars(s).update(made=0, delay=0.3 * (s.index == slow)))
        return [steady.next(weights(v), jax.random.fold_in(KEY, v)) for v in range(2)]

    expected, found = collect(slow=0), collect(slow=1)
    assert [rows(r) for r, _ in found] == [[(0, v, v)] * B + [(1, v, v)] * B for v in range(2)]
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    assert [r.contiguous.tolist() for r, _ in found] == [[False] * 4, [True] * 4]
    draw = [r.extras["draw"][0, ::B] for r, _ in found]
    for version, numbers in enumerate(draw):  # each runner has its own key, a function of the call's and its index
        key = jax.random.fold_in(KEY, version)
        assert numbers.tolist() == [int(jax.random.key_data(jax.random.fold_in(key, i))[-1]) for i in range(K)]
    assert found[0][1].steps.tolist() == [T * B] * K
    steady.foreach_worker(lambda s: vars(s).update(delay=0.0))


@pytest.mark.slow
def test_weights_are_put_once_per_version_and_rollouts_are_read_in_place(steady, monkeypatch):
    put, joined = [], []
    monkeypatch.setattr(Cluster, "put", lambda self, value: put.append(value) or self._ray.put(value))
    monkeypatch.setattr(steady, "_join", lambda parts: joined.extend(parts) or ray_sources.join(parts))
    for version in range(3):
        steady.next(weights(version), KEY)
    assert [int(x["version"]) for x in put] == [0, 1, 2]
    # arrays of the object store, which nobody may write to
    assert all(not part.obs.flags.writeable and not part.obs.flags.owndata for part in joined)


@pytest.mark.slow
def test_metrics_and_stages(steady, monkeypatch):
    timers = Timers()
    monkeypatch.setattr(steady, "_timers", timers)
    steady.foreach_worker(lambda s: vars(s).update(made=s.index))
    steady.next(weights(0), KEY)
    assert steady.metrics == {
        "rollout/policy_lag": 0.0,
        "rollout/policy_lag_max": 0.0,
        "env_runners/num_healthy_workers": 2.0,
        "env_runners/num_restarts": 0.0,
        "env_runners/dropped": 0.0,
        "env/failures": 2.0,  # a count: of both
        "rollout/made": 1.5,  # any other: their mean
    }
    assert set(timers.drain()) == {"time/wait", "time/receive", "time/join", "time/send"}


@pytest.mark.slow
def test_functions_run_in_every_runner_and_every_environment(steady):
    assert steady.foreach_worker(lambda s: s.index) == [0, 1]
    assert steady.foreach_env(lambda env: env.upper()) == ["0.0", "0.1", "1.0", "1.1"]
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        steady.foreach_worker(lambda s: 1 / s.index)
    assert steady.foreach_worker(lambda s: s.index) == [0, 1]  # that was no failure of a runner


@pytest.mark.slow
def test_statistics_are_those_of_the_runners(steady):
    steady.reset(KEY)
    assert steady.columns.length.tolist() == [[0, 0], [0, 0]]
    set_to = [ray_sources.columns(5, window=1.0), ray_sources.columns(7, window=4.0)]
    steady.columns = jax.tree.map(lambda *x: jnp.stack(x), *set_to)
    rollout, report = steady.next(weights(0), KEY)
    assert steady.columns.length.tolist() == [[5 + T] * B, [7 + T] * B]
    assert summarize([report])["episode/return"] == 2.5
    assert not rollout.contiguous.any()  # after a reset
    with pytest.raises(ValueError, match="columns: expected 2 runners, got 3"):
        steady.columns = jax.tree.map(lambda *x: jnp.stack(x), *set_to, set_to[0])


@pytest.mark.slow
def test_runners_find_an_actor_of_the_caller_by_its_name(steady, cluster):
    class Counter:
        def __init__(self):
            self.value = 0

        def add(self, amount):
            self.value += amount
            return self.value

    def count(source):
        import ray

        return ray.get(ray.get_actor("counter").add.remote(source.index + 1))

    counter = cluster.remote(Counter).options(name="counter", num_cpus=0).remote()
    found = steady.foreach_worker(count) + steady.foreach_worker(count)
    assert max(found) == 6
    assert len(set(found)) == 4
    assert cluster.get(counter.add.remote(0)) == 6


def goes_on(seen, rollout):
    """Whether each block continues the rollout that stood there before, by a plain look at who made which."""
    now = [(*row[:2], restarts) if row else None for row, restarts in zip(rows(rollout), rollout.extras["restarts"][0])]
    expected = [
        bool(x and before and (x[0], x[1] - 1, x[2]) == before)
        for x, before in zip(now, seen[-1] if seen else [None] * len(now))
    ]
    seen.append(now)
    return expected


@pytest.mark.slow
def test_asynchronous_rollouts_come_as_they_are_made_and_never_too_late(cluster, monkeypatch):
    put = []
    monkeypatch.setattr(Cluster, "put", lambda self, value: put.append(value) or self._ray.put(value))
    source, lag = runners(lag=3, faults={0: {"delay": 0.1}, 1: {"delay": 0.001}}), 3
    seen, lags, dealt = [], [], collections.Counter()
    for call in range(16):
        rollout, _ = source.next(weights(call), jax.random.fold_in(KEY, call))
        assert rollout.contiguous.tolist() == goes_on(seen, rollout)
        versions = [version for _, _, version in rows(rollout)[::B]]
        dealt.update(runner for runner, _, _ in rows(rollout)[::B])
        assert source.metrics["rollout/policy_lag"] == np.mean([call - v for v in versions])
        assert source.metrics["rollout/policy_lag_max"] == max(call - v for v in versions)
        lags += [call - v for v in versions]
    assert max(lags) <= lag
    assert dealt[1] > dealt[0] > 2  # the quick runner fills blocks of the slow one, which is not forgotten
    numbers = [sorted(made for at in seen for runner, made, _ in at[::B] if runner == i) for i in range(K)]
    assert numbers == [list(range(dealt[i])) for i in range(K)]  # each rollout once, none left out
    assert len(put) == 16

    # runners go on while the learner works: what they had on order is there
    source.foreach_worker(lambda s: vars(s).update(delay=0.4))
    source.next(weights(16), KEY)
    for runner in source._ready():
        assert source._cluster.wait([runner.requests[-1].ref], 60.0) == 0
    source.next(weights(16), KEY)
    # one dies: its rollouts are lost, the other fills in, no block is void
    pids = source.foreach_worker(lambda s: os.getpid())
    source._options = source._options._replace(ignore_env_runner_failures=True)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="environment runner 0 failed, the others go on without it"):
        while source.metrics["env_runners/num_healthy_workers"] == K:
            source.next(weights(17), KEY)
    rollout, _ = source.next(weights(17), KEY)
    assert {row[0] for row in rows(rollout)} == {1}
    assert source.metrics["env_runners/dropped"] == 2
    source.close()


@pytest.mark.slow
def test_a_runner_that_is_killed_or_stalls_costs_its_batch_and_is_replaced(cluster):
    options = OPTIONS._replace(recreate_failed_env_runners=True, max_restarts=2, sample_timeout_s=3.0)
    source = runners(options)
    set_to = [ray_sources.columns(0, window=1.0), ray_sources.columns(0, window=4.0)]
    source.columns = jax.tree.map(lambda *x: np.stack(x), *set_to)
    first, _ = source.next(weights(0), KEY)
    pids = source.foreach_worker(lambda s: os.getpid())

    def void(rollout, report):
        """Blocks 1 is void, block 0 goes on, nothing has another shape."""
        assert rows(rollout)[B:] == [None] * B
        assert rollout.contiguous.tolist() == [True] * B + [False] * B
        assert jax.tree.map(np.shape, rollout) == jax.tree.map(np.shape, first)
        assert jax.tree.map(lambda x: x.dtype, rollout) == jax.tree.map(lambda x: x.dtype, first)
        assert all(not x[..., B:].any() for x in jax.tree.leaves(rollout))
        assert report.steps.tolist() == [T * B, 0]
        assert summarize([report])["episode/return"] == 2.5  # what was known stays
        assert summarize([report])["episode/return_min"] is not None

    def until_replaced(version, count):
        replaced = False
        while not replaced:  # one that starts during a call is healthy after it, and has no part in it
            time.sleep(0.05)
            rollout, report = source.next(weights(version), KEY)
            replaced = rows(rollout)[B] is not None
            if not replaced:
                void(rollout, report)
        assert source.metrics["env_runners/num_healthy_workers"] == K
        assert rows(rollout)[B] == (1, 0, version)  # a new one, with the newest weights
        assert rollout.extras["restarts"][0].tolist() == [0.0] * B + [count] * B
        assert rollout.contiguous.tolist() == [True] * B + [False] * B
        assert source.columns.length[1].tolist() == [T] * B
        assert source.columns.window_return[1, 0] == 4.0
        assert source.metrics["env_runners/num_restarts"] == count
        assert source.metrics["env/failures"] == K + count  # also of those that are no more
        assert source.recreated == [1] * count
        assert source.blocks[1][:2] == (1, count)

    os.kill(pids[1], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="environment runner 1 failed, another starts in its place"):
        void(*source.next(weights(1), KEY))
    assert source.metrics["env_runners/dropped"] == 1
    assert source.metrics["env_runners/num_healthy_workers"] == 1
    until_replaced(2, 1)

    pid = source.foreach_worker(lambda s: vars(s).update(stall=1) or os.getpid() if s.index == 1 else None)[1]
    with pytest.warns(RuntimeWarning, match=r"nothing within 3 s \(env_runners.sample_timeout_s\)"):
        void(*source.next(weights(3), KEY))
    assert gone(pid)
    until_replaced(4, 2)

    source.foreach_worker(lambda s: vars(s).update(fail=s.made) if s.index == 0 else None)
    with pytest.raises(RunnersLost, match=r"(?s)runner 0 failed.*2 runners have been replaced.*max_restarts"):
        source.next(weights(5), KEY)
    source.close()


@pytest.mark.slow
def test_a_failure_ends_the_run_with_its_own_traceback_and_close_leaves_nothing(cluster):
    source = runners(OPTIONS._replace(num=1), faults={0: {"fail": 0}})
    (pid,) = source.foreach_worker(lambda s: os.getpid())
    with pytest.raises(RunnersLost) as e:
        source.next(weights(0), KEY)
    text = str(e.value)
    assert "environment runner 0 failed" in text
    assert 'raise ArithmeticError("the sum of its parts")' in text  # the line, from the traceback of the process
    assert "recreate_failed_env_runners=true" in text
    assert "ignore_env_runner_failures=true" in text
    assert "\x1b" not in text
    source.close()
    source.close()
    assert gone(pid)
    assert cluster.is_initialized()
    groups = cluster.util.placement_group_table().values()
    assert sum(group["state"] == "CREATED" for group in groups) <= 1  # that of the runners that other tests share


@pytest.mark.slow
def test_what_an_environment_did_comes_without_our_frames(cluster):
    def breaks(error):
        def next(actor, key):
            raise error

        return lambda source: setattr(source, "next", next)

    source = runners(OPTIONS._replace(num=1))
    failed = EnvironmentFailed("maze.py:3: KeyError: 'wall'\n  maze.py:3, in step: self.grid['wall']")
    source.foreach_worker(breaks(failed))
    with pytest.raises(RunnersLost, match=r"runner 0 failed: maze.py:3: KeyError: 'wall'") as e:
        source.next(weights(0), KEY)
    assert "ray_hosts.py" not in str(e.value) and "ray_hosts.py" in details(e.value)
    source.close()
    source = runners(OPTIONS._replace(num=1, recreate_failed_env_runners=True))
    source.foreach_worker(breaks(InputError("env.id maze: environment 0: step 3 returned 4 values")))
    with pytest.raises(InputError, match=r"^env.id maze: environment 0: step 3 returned 4 values$"):
        source.next(weights(0), KEY)
    source.close()


@pytest.mark.slow
def test_compressed_observations_arrive_as_they_were_made(cluster):
    """Stacks of frames, from a runner that compresses them; everything else as without."""

    def with_frames(source):
        make = source.next

        def next(actor, key):
            rollout, report = make(actor, key)
            numbers = np.arange(T + 4)[:, None] + 10 * np.arange(B)[None]
            frames = np.broadcast_to(numbers[..., None, None], (T + 4, B, 30, 30)).astype(np.uint8)
            obs = np.stack([frames[i : i + T + 1] for i in range(4)], 2)  # [T + 1, B, 4, 30, 30]
            return rollout.replace(obs=obs[:-1], last_obs=obs[-1]), report

        source.next = next

    source = runners(OPTIONS._replace(num=1), join=lambda parts: parts[0], compress=True)
    try:
        source.foreach_worker(with_frames)
        rollout, _ = source.next(weights(3), KEY)
    finally:
        source.close()
    numbers = np.arange(T)[:, None, None] + 10 * np.arange(B)[None, :, None] + np.arange(4)[None, None]
    np.testing.assert_array_equal(rollout.obs, np.broadcast_to(numbers[..., None, None], (T, B, 4, 30, 30)))
    np.testing.assert_array_equal(rollout.last_obs[:, -1, 0, 0], [T + 3, T + 13])
    assert rollout.obs.dtype == np.uint8
    assert rollout.extras["version"].tolist() == [[3.0] * B] * T
    # 3600 bytes of each observation and as many of the last; the actions, rewards and so on of a step are 40
    assert 30 < source.metrics["env_runners/bytes_per_step"] < 360
