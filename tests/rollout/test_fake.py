"""Learning from one rollout again and again: nothing is stepped, and the learner leaves the rollout as it is."""

import itertools

import jax
import numpy as np
import pytest
import tasks

from jrl.algos import a2c
from jrl.envs.jax_env import build
from jrl.learn import learner, parallel
from jrl.learn.program import train
from jrl.learn.staged import Staged
from jrl.metrics.timers import Timers
from jrl.networks import NetworkConfig
from jrl.rollout.fake import Fake
from jrl.rollout.sources import JaxSource

T, B = 4, 3


@pytest.mark.slow
def test_a_run_collects_once_and_goes_on_learning():
    env = build(tasks.drift(), B)
    algo = a2c.make(a2c.Config(), env.spec, NetworkConfig(hidden=(8,)), axis_name=parallel.AXIS)
    collected, given = [], []

    class Counted(JaxSource):
        def next(self, actor, key):
            collected.append(super().next(actor, key))
            return collected[-1]

    class Noted(Fake):
        def next(self, actor, key):
            given.append(super().next(actor, key))
            return given[-1]

    make = lambda key: Noted(Counted(env, algo.act, key=key, length=T))
    program = Staged(learner.on_policy(algo), make, parallel.make_mesh(1), rows=T * B, timers=Timers())
    params, state = [], program.init(0)
    for info in train(program, state, seed=0, total_env_steps=10**9):
        params.append(jax.device_get(info.state.learner.params))
        if len(params) == 3:
            break
    assert len(collected) == 1
    first = jax.device_get(collected[0])  # not donated: all of it can be read
    assert all(x is given[0] for x in given)
    assert [int(report.steps) for _, report in given] == [int(np.sum(first[0].mask))] * 3
    assert info.env_steps_after() == 3 * int(np.sum(first[0].mask))
    moved = [any((a != b).any() for a, b in zip(*map(jax.tree.leaves, pair))) for pair in itertools.pairwise(params)]
    assert moved == [True, True]
    source = program.source
    assert source.columns.length.shape == (B,)
    source.reset(jax.random.key(1))
    source.next(program.actor(info.state), jax.random.key(2))
    assert len(collected) == 2
