"""The host path gives the rollouts of the graph path: on a task of ours, and on EnvPool itself."""

import jax
import numpy as np
import pytest
from tasks import ACTOR, Hosted, act, carry, drift

from jrl import envs
from jrl.algos import ppo
from jrl.envs.graph import build
from jrl.metrics.timers import Timers
from jrl.networks import NetworkConfig
from jrl.rollout import sources
from jrl.rollout.collect import HostCollector
from jrl.rollout.sources import GraphSource

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
    graph = GraphSource(build(drift(), B), act, key=start, **options)
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

    graph = GraphSource(build(drift(), B), act, key=start, length=T, carry=carry)
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
    assert [type(source) for source in made] == [HostCollector, GraphSource]
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
