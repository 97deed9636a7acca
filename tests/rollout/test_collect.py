"""The host path gives the rollouts of the graph path: on a task of ours, and on EnvPool. Environments that break."""

import jax
import numpy as np
import pytest
from tasks import ACTOR, Hosted, Streams, act, carry, drift, expected, scripts

from jrl import envs
from jrl.algos import ppo
from jrl.envs.jax_env import build
from jrl.metrics.timers import Timers
from jrl.networks import NetworkConfig
from jrl.rollout import sources
from jrl.rollout.collect import HostCollector
from jrl.rollout.sources import JaxSource
from jrl.types import InputError

T, B = 9, 5


def same(host, graph, atol):
    """Two Rollouts: flags and actions exactly, numbers within `atol`."""
    assert jax.tree.structure(host) == jax.tree.structure(graph)
    pairs = zip(jax.tree_util.tree_leaves_with_path(host), jax.tree.leaves(graph))
    for (path, a), b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        exact = not np.issubdtype(a.dtype, np.floating)
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if exact else atol, err_msg=jax.tree_util.keystr(path))


def test_a_recurrent_policy_on_a_task_of_ours():
    options = {"length": T, "carry": carry, "running_return_gamma": 0.9, "reward_transform": lambda r: 2.0 * r}
    start, *keys = jax.random.split(jax.random.key(7), 4)
    hosted, timers = Hosted(drift(), B, start), Timers()
    host = HostCollector(hosted, act, timers=timers, **options)
    graph = JaxSource(build(drift(), B), act, key=start, **options)
    rollouts = []
    for key in keys:
        hosted.follow(key, T)
        (a, report_a), (b, report_b) = host.next(ACTOR, key), graph.next(ACTOR, key)
        same(a, b, 1e-5)
        same(report_a, report_b, 1e-4)
        rollouts.append((a, jax.tree.map(np.array, a)))
    for a, copy in rollouts:  # no rollout lives in a buffer that a later one is written to
        same(a, copy, 0)
    assert set(timers.drain()) == {"time/act", "time/env", "time/transfer"}
    host.close()
    assert hosted.closed


def test_reset_starts_anew():
    start, key = jax.random.split(jax.random.key(1))
    hosted = Hosted(drift(), B, start)
    host = HostCollector(hosted, act, length=T, carry=carry)
    found = []
    for _ in range(2):
        hosted.follow(key, T)
        found.append(host.next(ACTOR, key))
        host.reset()
    same(*(rollout for rollout, _ in found), 0)
    same(*(report for _, report in found), 0)
    assert not np.asarray(found[1][0].contiguous).any()

    graph = JaxSource(build(drift(), B), act, key=start, length=T, carry=carry)
    first = graph.next(ACTOR, key)
    graph.reset(start)
    same(first[0], graph.next(ACTOR, key)[0], 0)


@pytest.fixture(scope="module")
def cartpole():
    """(host collector, graph source, actor) on pools of the same seed."""
    pools = [envs.make("CartPole-v1", backend="envpool", num_envs=6, seed=3, host=host) for host in (True, False)]
    algo = ppo.make(ppo.Config(normalize_reward=True), pools[0].spec, NetworkConfig(hidden=(16, 16), shared=True))
    options = {"length": 32, "running_return_gamma": algo.running_return_gamma}
    made = [sources.make(pool, algo.act, key=jax.random.key(0), **options) for pool in pools]
    assert [type(source) for source in made] == [HostCollector, JaxSource]
    yield *made, algo.actor(algo.init(jax.random.key(0)))
    for source in made:
        source.close()


def test_envpool_from_the_host_and_inside_a_program(cartpole):
    host, graph, actor = cartpole
    ends = 0
    for i in range(5):
        (a, report_a), (b, report_b) = host.next(actor, jax.random.key(i)), graph.next(actor, jax.random.key(i))
        same(a.replace(extras={}), b.replace(extras={}), 0)
        assert set(a.extras) == {"log_prob", "value", "running_return"}
        for name in a.extras:
            np.testing.assert_allclose(a.extras[name], b.extras[name], atol=1e-5, rtol=1e-6, err_msg=name)
        same(report_a, report_b, 1e-4)
        ends += int(report_a.count)
        # the contract: the row after an end is masked, has no reward and does not end
        done, mask = np.asarray(a.terminated | a.truncated), np.asarray(a.mask)
        np.testing.assert_array_equal(~mask[1:], done[:-1])
        assert (np.asarray(a.reward)[~mask] == 0).all()
        assert not done[~mask].any()
    assert ends > 10


SCRIPTS = ["..f...", "f.....", "ef....", "...ef.", "....f.", ".ff...", "..lf.f"]  # of what happens at each step


def test_where_an_environment_breaks():
    """Two rollouts of four rows each; the flags are written down by hand, one string per column."""
    collector = HostCollector(Streams(SCRIPTS), act, length=4, carry=carry)
    found = [collector.next(ACTOR, jax.random.key(i))[0] for i in range(2)]
    # row t is void; row t - 1 is truncated, unless it was an end or is void itself
    mask = ["1101 1111", "0111 1101", "1011 1110", "1111 0111", "1111 0111", "1001 1110", "1110 1011"]
    truncated = ["0100 0000", "0000 0100", "0000 0000", "0000 0000", "0000 0000", "1000 0010", "0010 1000"]
    terminated = ["0000 0000", "0000 0000", "1000 0010", "0001 0000", "0000 0000", "0000 0000", "0000 0000"]
    # broken in row 0: its episode does not continue the rollout before. But column 3 had ended there, and goes on
    contiguous = ["0 1", "0 1", "0 1", "0 1", "0 0", "0 1", "0 1"]
    parts = lambda rows, i: np.array([[c == "1" for c in row.split()[i]] for row in rows]).T
    for i, rollout in enumerate(found):
        for name, rows in {"mask": mask, "truncated": truncated, "terminated": terminated}.items():
            np.testing.assert_array_equal(getattr(rollout, name), parts(rows, i), err_msg=f"{name} of rollout {i}")
        np.testing.assert_array_equal(rollout.contiguous, parts(contiguous, i)[0])
    failures = sum((script * 2)[:8].count("f") for script in SCRIPTS)
    assert collector.metrics == {"env/failures": failures}
    collector.reset()
    assert collector.metrics == {"env/failures": failures}


def test_rows_and_statistics_where_environments_break():
    env_scripts = scripts(6, seed=1, events="....elff")
    collector = HostCollector(Streams(env_scripts), act, length=T, carry=carry, running_return_gamma=0.9)
    found = [collector.next(ACTOR, jax.random.key(i)) for i in range(4)]
    given = [np.full(6, -1)] + [np.full(6, T * (i + 1)) for i in range(4)]
    right = list(expected(env_scripts, [r for r, _ in found], given, [ACTOR] * 4, 0.9))
    for (rollout, report), want in zip(found, right):
        check(rollout, want.rollout)
        check_report(report, want)
    assert sum(len(want.ended) for want in right) > 10
    assert sum((~want.rollout.mask).sum() for want in right) > 20


def check(rollout, want):
    """A Rollout against `expected`; what is recorded on void rows does not matter."""
    for name in ("action", "reward", "terminated", "truncated", "mask", "contiguous", "obs", "last_obs"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(want, name), err_msg=name)
    np.testing.assert_allclose(rollout.carry["memory"], want.carry["memory"], atol=1e-5)
    for name in want.extras.keys() & rollout.extras.keys():
        np.testing.assert_allclose(
            np.asarray(rollout.extras[name])[want.mask], want.extras[name][want.mask], atol=1e-4, err_msg=name
        )


def check_report(report, want):
    returns, lengths = np.array(want.ended).reshape(-1, 2).T
    assert (int(report.count), int(report.steps)) == (len(returns), want.rollout.mask.sum())
    assert int(report.length_sum) == lengths.sum()
    np.testing.assert_allclose(report.return_sum, returns.sum(), rtol=1e-4, atol=1e-5)


def test_for_those_who_count_episodes_breaking_is_no_end():
    env = Streams([".f..", "l..."])
    rollout, _ = HostCollector(env, act, length=3, carry=carry, cut=False).next(ACTOR, jax.random.key(0))
    np.testing.assert_array_equal(rollout.truncated, np.array([[0, 0, 0], [1, 0, 0]], bool).T)
    np.testing.assert_array_equal(rollout.mask, np.array([[1, 0, 1], [1, 0, 1]], bool).T)


def test_each_environment_is_called():
    collector = HostCollector(Streams(["..", "e."]), act, length=3, carry=carry)
    assert collector.foreach_env(lambda stream: stream.script) == ["..", "e."]
    assert collector.metrics == {}
    hosted = HostCollector(Hosted(drift(), B, jax.random.key(0)), act, length=T, carry=carry)
    with pytest.raises(InputError, match="expected environments that are Python objects, got Hosted"):
        hosted.foreach_env(lambda env: env)


def test_acting_where_the_actor_lies():
    """Each program is compiled once: the state lies there from the first step on, too."""
    device = jax.devices()[2]
    collector = HostCollector(Streams(["..f", "e.."]), act, length=3, carry=carry)
    for i in range(3):
        rollout, _ = collector.next(jax.device_put(ACTOR, device), jax.random.key(i))
    assert {d for x in jax.tree.leaves(rollout) for d in x.devices()} == {device}
    assert collector._record._cache_size() == collector._finish._cache_size() == 1
