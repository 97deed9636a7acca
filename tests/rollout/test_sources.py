"""Several sources as one, and one that collects in a thread: the same rows, the lag asked for, no thread left."""

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.envs import classic
from jrl.envs.jax_env import build
from jrl.learn import parallel
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout import sources
from jrl.rollout.source import Source
from jrl.types import ActOut

T, B = 5, 4
KEY = jax.random.key(3)


def act(actor, obs, carry, key, explore=True):
    """Acts by its parameter alone, which it also records."""
    action = jnp.broadcast_to(actor["action"], obs.shape[:1])
    return ActOut(action, carry, {"version": jnp.broadcast_to(actor["version"], obs.shape[:1])})


def actor(version, action=1):
    return {"action": jnp.int32(action), "version": jnp.float32(version)}


def graph(i=0, device=None):
    env = build(classic.cartpole(), B)
    return sources.make(env, act, key=jax.random.fold_in(KEY, i), length=T, device=device)


class Slow(Source):
    """A source whose rollouts tell of the calls: reward is the version that acted, obs the number of the rollout."""

    def __init__(self, seconds=0.0, fail_at=None):
        self.columns, self._metrics, self.count, self.seconds = episodes.init(1), {}, 0, seconds
        self.fail_at, self.closed, self.keys, self.thread = fail_at, False, [], None

    def next(self, actor, key):
        self.thread = threading.current_thread().name
        time.sleep(self.seconds)
        if self.count == self.fail_at:
            raise ZeroDivisionError("the third rollout")
        self.keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        self.count += 1
        rollout = {"version": np.asarray(actor["version"]), "number": self.count - 1}
        return rollout, {"count": self.count}

    def reset(self, key):
        self.count = 0

    def foreach_env(self, fn):
        return [fn((self, i)) for i in range(2)]

    def close(self):
        self.closed = True


def collecting_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("jrl-")]


# ---------------------------------------------------------------- pools


def pools(parts, devices, mesh):
    join = functools.partial(parallel.deal, mesh=mesh)
    return sources.Pools(parts, devices=devices, join=join, stack=parallel.stack)


@pytest.mark.parametrize(
    ("actors", "learners"),
    [(2, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 4), (4, 2)))],
)
def test_pools_put_columns_side_by_side(actors, learners):
    devices = jax.devices()[:actors]
    together = pools([graph(i, d) for i, d in enumerate(devices)], devices, parallel.make_mesh(learners))
    alone = [graph(i) for i in range(actors)]
    for n in range(2):
        key = jax.random.fold_in(KEY, n)
        rollout, report = together.next(actor(n), key)
        made = [s.next(actor(n), jax.random.fold_in(key, i) if actors > 1 else key) for i, s in enumerate(alone)]
        for name in ("obs", "reward", "mask", "action", "terminated"):
            expected = np.concatenate([np.asarray(getattr(r, name)) for r, _ in made], 1)
            np.testing.assert_array_equal(getattr(rollout, name), expected)
        for name in ("last_obs", "contiguous"):
            expected = np.concatenate([np.asarray(getattr(r, name)) for r, _ in made])
            np.testing.assert_array_equal(getattr(rollout, name), expected)
        for leaf in jax.tree.leaves(rollout):
            assert len(leaf.sharding.device_set) == learners
        assert episodes.count_steps(report) == sum(episodes.count_steps(r) for _, r in made) > 0
        steps = np.asarray(report.steps)
        np.testing.assert_array_equal(steps, np.asarray([r.steps for _, r in made]).reshape(steps.shape))
    together.close()
    assert not [t for t in collecting_threads() if t.startswith("jrl-collect")]


def test_pools_keep_the_statistics_of_each_part():
    devices = jax.devices()[:2]
    one, other = (pools([graph(i, d) for i, d in enumerate(devices)], devices, parallel.make_mesh(1)) for _ in "ab")
    one.next(actor(0), KEY)
    columns = jax.device_get(one.columns)
    assert columns.length.shape == (2, B) and columns.window_next.shape == (2,)
    assert columns.length.sum() == 2 * T * B  # nobody has fallen yet
    other.columns = columns
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.columns), columns)
    for source in (one, other):
        source.close()


def test_the_error_of_a_part_is_raised_with_its_own_traceback():
    parts = [Slow(), Slow(fail_at=0)]
    source = sources.Pools(parts, devices=jax.devices()[:2], join=list, stack=list)
    with pytest.raises(ZeroDivisionError, match="the third rollout") as found:
        source.next(actor(0), KEY)
    assert "self.count == self.fail_at" in str(found.traceback[-1].statement) or found.traceback[-1].name == "next"
    source.close()
    assert all(part.closed for part in parts)


def test_functions_of_each_part_and_each_environment():
    parts = [Slow(), Slow()]
    source = sources.Async(sources.Pools(parts, devices=jax.devices()[:2], join=list, stack=list), lag=1)
    assert source.foreach_worker(lambda part: (part, threading.current_thread().name)) == [
        (parts[0], "jrl-collect-0"),
        (parts[1], "jrl-collect-1"),
    ]
    assert source.foreach_env(lambda env: env) == [(parts[0], 0), (parts[0], 1), (parts[1], 0), (parts[1], 1)]
    source.close()


def test_a_program_of_a_pool_is_not_written_to_the_compile_cache():
    name, seen = "jax_persistent_cache_min_compile_time_secs", []
    before = getattr(jax.config, name)
    call = sources.outside_compile_cache(lambda: seen.append(getattr(jax.config, name)))
    call()
    call()
    assert seen == [float("inf"), before] and getattr(jax.config, name) == before


# ---------------------------------------------------------------- async


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_every_rollout_comes_once_and_lags_as_long_as_asked(lag):
    source = sources.Async(Slow(), lag=lag)
    for n in range(8):
        rollout, report = source.next(actor(n), jax.random.fold_in(KEY, n))
        assert rollout["number"] == n and report["count"] == n + 1
        assert rollout["version"] == max(0, n - lag)
        assert source.metrics == {"rollout/policy_lag": min(n, lag)}
    inner = source._source
    source.close()
    assert len(set(inner.keys)) == len(inner.keys) >= 8  # no rollout has the random numbers of another


def test_the_thread_works_while_the_caller_does():
    """The caller learns until the thread has begun the next rollout, which ends when the caller has learned."""
    timers, inner = Timers(), Slow()
    begun, learned, make = threading.Semaphore(0), threading.Semaphore(2), inner.next

    def next(actor, key):
        begun.release()
        assert learned.acquire(timeout=60.0)
        return make(actor, key)

    inner.next = next
    source = sources.Async(inner, lag=1, timers=timers)
    source.next(actor(0), KEY)
    for _ in range(2):
        assert begun.acquire(timeout=60.0)
    for n in range(1, 5):
        source.next(actor(n), KEY)
        assert begun.acquire(timeout=60.0)  # it is under way, and cannot end before this does
        learned.release()
    source.close()
    assert timers.drain()["time/collect"] > 0


def test_nothing_depends_on_which_thread_is_quicker():
    def rollouts(pause):
        source = sources.Async(graph(), lag=2)
        made = []
        for n in range(4):
            rollout, _ = source.next(actor(n, action=n % 2), jax.random.fold_in(KEY, n))
            made.append(jax.device_get(rollout))
            time.sleep(pause)
        columns = jax.device_get(source.columns)
        source.close()
        return made, columns

    jax.tree.map(np.testing.assert_array_equal, rollouts(0.0), rollouts(0.05))


def test_the_learner_may_donate_what_it_has_given():
    source = sources.Async(graph(), lag=1)
    donate = jax.jit(lambda a: jax.tree.map(lambda x: x + 1, a), donate_argnums=0)
    given = actor(0)
    for n in range(5):
        rollout, _ = source.next(given, jax.random.fold_in(KEY, n))
        given = donate(given)
        given["action"] = jnp.int32(1)
        np.testing.assert_array_equal(rollout.extras["version"], np.full((T, B), max(0, n - 1), np.float32))
    source.close()


def test_an_error_in_the_thread_is_raised_where_its_rollout_is_due():
    source = sources.Async(Slow(fail_at=2), lag=1)
    for n in range(2):
        source.next(actor(n), KEY)
    with pytest.raises(ZeroDivisionError, match="the third rollout") as found:
        source.next(actor(2), KEY)
    assert found.traceback[-1].name == "next" and found.traceback[-1].path.name == "test_sources.py"
    source.close()
    assert source._source.closed and "jrl-async" not in collecting_threads()


def test_close_does_not_wait_for_an_environment_that_hangs():
    source = sources.Async(Slow(seconds=60.0), lag=1)
    order = threading.Thread(target=lambda: source.next(actor(0), KEY), daemon=True)
    order.start()
    while not source._orders and not source._calls:
        time.sleep(0.01)
        if source._source.thread:
            break
    source.close()
    assert source._source.closed and source._source.count == 0  # its first rollout is still under way


def test_reset_drops_what_is_under_way():
    source = sources.Async(Slow(), lag=2)
    for n in range(3):
        source.next(actor(n), KEY)
    source.reset(KEY)
    rollout, _ = source.next(actor(9), KEY)
    assert (rollout["number"], rollout["version"]) == (0, 9)
    source.close()


def test_a_lag_of_nothing_is_refused():
    with pytest.raises(ValueError, match="lag: expected at least 1, got 0"):
        sources.Async(Slow(), lag=0)
