"""Environments that answer in any order, against a Python loop over each environment's own stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tasks import ACTOR, AsyncStreams, Streams, act, carry, expected, scripts
from test_collect import check, check_report, same

from jrl.rollout.collect import HostCollector
from jrl.rollout.collect_async import AsyncCollector
from jrl.types import ActOut, InputError

T, B, GAMMA, ROLLOUTS = 7, 6, 0.9, 6


def random_order():
    draws = np.random.default_rng(5)
    return lambda b: draws.exponential()


def one_slow():
    return lambda b: 40.0 if b == 2 else 1.0 + 0.1 * b


def all_equal():
    return lambda b: 1.0


# order of arrival, batch_size, least
CASES = {
    "random, as workers": (random_order, 4, 1),
    "random, uneven batches": (random_order, 4, 2),
    "one slow, as a pool": (one_slow, 2, 2),
    "equal, in halves": (all_equal, 3, 3),
}


def collect(env, actors, **options):
    """(rollouts with their reports, results given before each and after the last, void shares)."""
    collector = AsyncCollector(env, act, length=T, carry=carry, running_return_gamma=GAMMA, **options)
    found, given, metrics = [], [env.given.copy()], []
    for i, actor in enumerate(actors):
        found.append(collector.next(actor, jax.random.key(i)))
        given.append(env.given.copy())
        metrics.append(collector.metrics)
    return found, given, metrics


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """(scripts, rollouts with reports, what they should be, metrics); the environments break in some cases."""
    order, batch_size, least = CASES[request.param]
    env_scripts = scripts(B, seed=least, events="....elff" if "uneven" in request.param else "....el")
    actors = [{"w": ACTOR["w"] * (1 + 0.2 * i)} for i in range(ROLLOUTS)]  # each acts in another way
    env = AsyncStreams(env_scripts, batch_size=batch_size, least=least, delay=order())
    found, given, metrics = collect(env, actors)
    right = list(expected(env_scripts, [r for r, _ in found], given, actors, GAMMA))
    return env, found, right, metrics


def test_rows_are_those_of_each_stream(case):
    """Every row of every stream stands once, in its order, made by the right actor with the right memory."""
    env, found, right, _ = case
    for (rollout, _), want in zip(found, right):
        check(rollout, want.rollout)
        under_way = want.rows < T
        assert under_way.sum() < env.least
    np.testing.assert_array_equal(sum(want.rows for want in right), np.maximum(env.given, 0))


def test_statistics_are_those_of_the_streams(case):
    _, found, right, metrics = case
    failures = 0
    for (_, report), want, said in zip(found, right, metrics):
        check_report(report, want)
        assert said["rollout/void"] == pytest.approx(1 - want.rows.sum() / (T * B))
        failures = said.get("env/failures", 0)
    scripts_failed = sum(
        (s.script * 99)[: s.steps - (given < s.steps)].count("f") for s, given in zip(case[0].streams, case[0].given)
    )
    assert failures == scripts_failed
    assert ("env/failures" in metrics[0]) == case[0].can_fail


def test_the_cases_ask_every_question():
    """Columns that are cut short, at once, in mid-episode, on a reset row, and for several rollouts."""
    env_scripts = scripts(B, seed=2, events="....elff")
    draws = np.random.default_rng(5)
    env = AsyncStreams(env_scripts, batch_size=4, least=4, delay=lambda b: draws.pareto(0.6))
    found, given, metrics = collect(env, [ACTOR] * 30)
    right = list(expected(env_scripts, [r for r, _ in found], given, [ACTOR] * 30, GAMMA))
    for (rollout, report), want in zip(found, right):
        check(rollout.replace(extras={}), want.rollout)
        check_report(report, want)
    rows = np.stack([want.rows for want in right])
    assert (rows == 0).any()
    assert ((rows > 0) & (rows < T)).sum() > 20
    cut = [
        (w.rollout.truncated[n - 1, b], w.rollout.mask[n - 1, b])
        for w in right
        for b, n in enumerate(w.rows)
        if 0 < n < T
    ]
    assert {(bool(a), bool(b)) for a, b in cut} >= {(True, True), (False, True), (False, False)}
    assert all(m["rollout/void"] < 3 / B for m in metrics)


def test_in_lockstep_the_rows_of_the_host_collector():
    env_scripts = scripts(B, seed=3, events="....elff")
    options = {"length": T, "carry": carry, "explore": False, "running_return_gamma": GAMMA}
    host = HostCollector(Streams(env_scripts), act, reward_transform=lambda r: 2.0 * r, **options)
    env = AsyncStreams(env_scripts, batch_size=B, least=B, delay=all_equal())
    other = AsyncCollector(env, act, reward_transform=lambda r: 2.0 * r, **options)
    for i in range(4):
        (a, report_a), (b, report_b) = host.next(ACTOR, jax.random.key(i)), other.next(ACTOR, jax.random.key(i))
        np.testing.assert_array_equal(b.count, T)
        same(a, b.replace(count=None), 1e-5)
        same(report_a, report_b, 1e-4)
        assert other.metrics == {**host.metrics, "rollout/void": 0.0}
    assert host.metrics["env/failures"] > 0
    same(host.columns, other.columns, 1e-4)
    assert other.foreach_env(lambda stream: stream.index) == list(range(B))
    other.close()
    assert env.closed


def test_a_new_start():
    """Also in mid-way: actions under way are forgotten."""
    env = AsyncStreams(scripts(B, seed=4), batch_size=2, least=2, delay=one_slow())
    collector = AsyncCollector(env, act, length=T, carry=carry)
    found = []
    for _ in range(2):
        found.append([collector.next(ACTOR, jax.random.key(i)) for i in range(2)])
        env._sizes = np.random.default_rng(0)
        collector.reset()
    for a, b in zip(*found):
        same(a[0], b[0], 0)
        same(a[1], b[1], 0)
    assert not np.asarray(found[1][0][0].contiguous).any()


def test_nothing_is_compiled_twice_and_all_of_it_where_the_actor_lies():
    device = jax.devices()[1]
    env = AsyncStreams(scripts(B, seed=7), batch_size=3, least=3, delay=random_order())
    collector = AsyncCollector(env, act, length=T, carry=carry)
    for i in range(3):
        rollout, _ = collector.next(jax.device_put(ACTOR, device), jax.random.key(i))
    assert {d for x in jax.tree.leaves(rollout) for d in x.devices()} == {device}
    assert collector._record._cache_size() == collector._pad._cache_size() == collector._finish._cache_size() == 1


@pytest.mark.parametrize("least", [0, B + 1])
def test_an_environment_that_would_never_answer_is_refused(least):
    env = AsyncStreams(scripts(B, seed=0), batch_size=B, least=least, delay=all_equal())
    with pytest.raises(ValueError, match=f"expected 1 .. {B}, the number of environments, got {least}"):
        AsyncCollector(env, act, length=T)
    with pytest.raises(InputError):
        HostCollector(_Bare(), act, length=T).foreach_env(print)


class _Bare:
    spec = Streams(["."]).spec

    def reset(self):
        return np.zeros((1, 3), np.float32)


def test_each_environment_explores_in_its_own_way():
    """What an exploration starts an episode with is that of the environment, in whatever row of a batch it is."""
    env_scripts = scripts(B, seed=1, events="....ell")
    env = AsyncStreams(env_scripts, batch_size=2, least=2, delay=random_order())

    def act(actor, obs, carry, key, explore=True):
        return ActOut(jax.random.randint(key, carry.shape, 0, 2), carry, {"who": carry})

    collector = AsyncCollector(env, act, length=T, carry=lambda batch_size: jnp.arange(batch_size, dtype=jnp.float32))
    for i in range(6):
        rollout, _ = collector.next((), jax.random.key(i))
        there = np.arange(T)[:, None] < np.asarray(rollout.count)
        np.testing.assert_array_equal(
            np.asarray(rollout.extras["who"])[there], np.broadcast_to(np.arange(B), (T, B))[there]
        )
