"""Policies that differ in floats of their algorithm alone: one program, and what each would be alone."""

import jax
import jax.extend
import numpy as np
import pytest
from test_several_agents import GAMES, REPLAY, STEPS, made

from jrl import config
from jrl.agents import fixed
from jrl.learn import parallel
from jrl.learn.program import own_replay
from jrl.rollout import unroll
from jrl.run import build, build_learner
from jrl.run.session import Session


def session_of(own, agents=3, **sections):
    """A run whose agent_0, agent_1, ... have these values of their own."""
    policies = {f"agent_{i}": own[i] if i < len(own) else {} for i in range(agents)}
    sections = config.merge(
        {"env": {"options": {"num_agents": agents}}, "multi_agent": {"policies": policies}}, sections
    )
    return Session(made(**sections), endless=True)


def labels(own, **sections):
    with session_of(own, **sections) as session:
        return [group.label for group in session.run.policies.groups]


def equations(jaxpr):
    """How many equations a program has, those of its parts included."""
    inner = (sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(map(equations, inner))


def size(own, agents):
    """Equations of the step that teaches all policies of a run, and how many groups these are."""
    with session_of(own, agents) as session:
        run, key = session.run, jax.random.key(0)
        rollout = unroll.rollout_like(run.spec, run.algo, length=STEPS, num_envs=run.spec.num_envs)
        step = jax.vmap(lambda s, r: run.learn.step(s, run.learn.init_replay(), r, key), axis_name=parallel.AXIS)
        add = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), tree)
        shapes = add(jax.eval_shape(run.learn.init, key)), add(rollout)
        return equations(jax.make_jaxpr(step)(*shapes).jaxpr), len(run.policies.groups)


def test_twenty_learning_rates_are_one_group_and_one_program():
    rates = [{"algo": {"lr": 1e-4 * (i + 1)}} for i in range(20)]
    (of_rates, groups), (of_one_rate, _) = size(rates, 20), size([], 20)
    assert groups == 1 and of_rates <= of_one_rate + 20


def test_what_differs_in_more_than_floats_stays_apart():
    algo = lambda **values: {"algo": values}
    assert labels([algo(lr=1e-4), algo(gamma=0.9), algo(ent_coef=0.1)]) == ["agent_0+2"]
    assert labels([algo(lr=[[0, 1e-3], [500, 0]]), algo(lr=[[0, 1e-4], [900, 1e-5]])]) == ["agent_0+1", "agent_2"]
    assert labels([algo(kl_coef=0.1), algo(kl_coef=0.2)]) == ["agent_0+1", "agent_2"]  # null is another loss
    assert labels([algo(num_epochs=2), {"network": {"hidden": [4]}}]) == ["agent_0", "agent_1", "agent_2"]
    frozen = {"multi_agent": {"policies_to_train": ["agent_1", "agent_2"]}}
    assert labels([algo(lr=1e-4), algo(lr=1e-2)], **frozen) == ["agent_0", "agent_1+1"]
    assert labels([{}, algo(lr=1e-4)], algo={"name": "examples.reinforce"}) == ["agent_0+1", "agent_1"]


OWN = {
    "ppo": (
        {"normalize_reward": True, "ent_coef": 0.01, "vf_coef": 0.5, "num_epochs": 2, "num_minibatches": 2},
        [
            {"algo": {"gamma": 0.9, "lr": 1e-2, "clip_eps": 0.1}},
            {"algo": {"gae_lambda": 0.5, "ent_coef": 0.1, "max_grad_norm": 0.1, "normalize_reward_clip": 1.0}},
        ],
        {},
    ),
    "dqn": (
        {"name": "dqn"},
        [
            {"algo": {"gamma": 0.5, "lr": 1e-2, "exploration": {"epsilon": [[0, 0.5], [100, 0.0]]}}},
            {"algo": {"adam_eps": 1e-3}},
        ],
        {**REPLAY, "replay": {**REPLAY["replay"], "n_step": 3, "prioritized": True}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_each_policy_acts_and_learns_as_it_would_alone(name):
    algo, own, sections = OWN[name]
    with session_of(own, 2, **{**sections, "algo": algo}) as session:
        session.start()
        (group,), program, state = session.run.policies.groups, session.run.program, session.state
        steps = {policy: alone(session, policy) for policy in group.names}
        apart = jax.jit(lambda rollout, key: (fixed._rollout_of(group, 2, rollout), group.keys(key)))
        for i in range(3):
            state, rollout, _ = program.collect(state, 0, i)
            before = jax.device_get((state.learner, own_replay(state.replay, program.learner)))
            state, told = program.learn(state, rollout, 0, i)
            rows, keys = apart(rollout, jax.random.fold_in(program._keys(0, i, 0)[1], 0))
            inputs = *(group.unstack(part[group.label]) for part in before), jax.device_get(rows)
            after = group.unstack(jax.device_get(state.learner[group.label]))
            for p, policy in enumerate(group.names):
                mine = jax.tree.map(lambda x, p=p: x[p], (inputs[2], keys))
                mine = jax.tree.map(lambda x: x[None], (inputs[0][policy], inputs[1][policy], *mine))
                found, _, metrics = jax.device_get(steps[policy](*mine))
                close = lambda a, b: np.testing.assert_allclose(a, b[0], rtol=2e-4, atol=1e-6)
                jax.tree.map(close, after[policy], found)
                for metric in ("train/lr", "loss/value"):
                    close(told[f"policy/{policy}/{metric}"], metrics[metric])
        acts_alone(session, group, session.run.learn.keep(state.learner), rollout.obs[0])


def alone(session, policy):
    """The step of the policy's own learner, with a leading axis of one device."""
    cfg, spec = session.run.policies.of(policy)
    algo = build.algorithm(cfg, spec, axis_name=parallel.AXIS)
    make, _ = build_learner.maker(config.Sizes(cfg), algo, spec, devices=1, length=STEPS)
    learn = make(cfg.algo, algo)
    return jax.jit(jax.vmap(learn.step, axis_name=parallel.AXIS))


def acts_alone(session, group, kept, obs):
    """Each policy's actions are those of its own algorithm in its own columns."""
    of_all, key = session.run.algo, jax.random.key(9)
    act = lambda algo, kept, *args: jax.jit(lambda kept, *args: algo.act(algo.actor(kept), *args))(kept, *args)
    out = act(of_all, kept, obs, of_all.carry(2 * GAMES), key)
    keys = group.keys(jax.random.fold_in(key, 0))
    for p, policy in enumerate(group.names):
        algo = build.algorithm(*session.run.policies.of(policy))
        expected = act(algo, kept[policy], np.asarray(obs)[p::2], algo.carry(GAMES), keys[p])
        np.testing.assert_array_equal(np.asarray(out.action)[p::2], expected.action)


def test_each_column_has_the_running_return_of_its_policys_gamma():
    own = [{"algo": {"gamma": 0.5}}, {"algo": {"gamma": 0.8}}]
    with session_of(own, algo={"normalize_reward": True, "gamma": 0.9}) as session:
        np.testing.assert_array_equal(session.run.algo.running_return_gamma, np.float32([0.5, 0.8, 0.9]))
