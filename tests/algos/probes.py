"""Probe environments with known answers, and the one place that trains an algorithm on them.

Each asks one question: if an algorithm fails a probe and passes the ones before it, the question says where to look.
"""

import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
from cases import CASES

from jrl.envs.jax_env import Definition, build
from jrl.learn import learner
from jrl.networks import NetworkConfig
from jrl.replay import ring
from jrl.rollout import unroll
from jrl.types import Box, Discrete, element

OBS = Box((1,))
NETWORK = NetworkConfig(hidden=(16,))


def _one_step(reward, action=None, observe=lambda sign: sign):
    """One step; the state is +1 or -1, by chance; `reward(sign, action)`."""
    return Definition(
        observation=OBS,
        action=action or Discrete(2),
        max_episode_steps=None,
        num_draws=1,
        reset=lambda draws: jnp.where(draws[0] < 0.5, -1.0, 1.0),
        step=lambda sign, action, draws: (sign, reward(sign, action), jnp.ones(sign.shape, bool)),
        observe=lambda sign: observe(sign)[:, None],
    )


def one_of(which, tasks):
    """The task with the number `which`, which may be traced; their states are a number each, their actions the same."""
    pick = lambda *found: jax.tree.map(lambda *x: jnp.stack(x)[which], *found)
    return tasks[0]._replace(
        reset=lambda draws: pick(*(task.reset(draws) for task in tasks)),
        step=lambda state, action, draws: pick(*(task.step(state, action, draws) for task in tasks)),
        observe=lambda state: pick(*(task.observe(state) for task in tasks)),
        max_episode_steps=max(task.max_episode_steps or 0 for task in tasks) or None,  # the others end before
    )


def constant_reward():
    """V = 1 everywhere: does the value learn at all?"""
    return _one_step(lambda sign, action: jnp.ones_like(sign), observe=jnp.zeros_like)


def obs_dependent_reward():
    """V(obs) = obs: does the value see the observation?"""
    return _one_step(lambda sign, action: sign)


def delayed_reward():
    """Two steps, obs 0 then 1, reward 1 at the end: V(0) = gamma, V(1) = 1. Is it discounted, and carried back?"""
    return Definition(
        observation=OBS,
        action=Discrete(2),
        max_episode_steps=None,
        num_draws=1,
        reset=lambda draws: jnp.zeros_like(draws[0]),
        step=lambda stage, action, draws: (stage + 1.0, stage, stage > 0.5),
        observe=lambda stage: stage[:, None],
    )


def action_dependent_reward():
    """+1 for action 1, -1 for action 0: does the policy follow the advantage?"""
    return _one_step(lambda sign, action: 2.0 * action - 1.0, observe=jnp.zeros_like)


def obs_and_action_dependent_reward():
    """+1 if the action is the sign of obs: do policy and observation belong together?"""
    return _one_step(lambda sign, action: jnp.where((sign > 0) == (action == 1), 1.0, -1.0))


def continuous_action():
    """-(action - obs / 2)^2: does a Gaussian policy find its mean?"""
    action = Box((1,), low=-1.0, high=1.0)
    return _one_step(lambda sign, action: -((action[:, 0] - 0.5 * sign) ** 2), action=action)


def endless(time_limit=10):
    """Reward 1 for ever, cut by a time limit: V = 1 / (1 - gamma), if a time limit is not taken for an end."""
    return Definition(
        observation=OBS,
        action=Discrete(2),
        max_episode_steps=time_limit,
        num_draws=1,
        reset=lambda draws: draws[0],
        step=lambda state, action, draws: (state, jnp.ones_like(state), jnp.zeros(state.shape, bool)),
        observe=lambda state: jnp.zeros_like(state)[:, None],
    )


NUM_ENVS, LENGTH = 16, 16
REPLAY = {"updates": 16, "batch_size": 32, "capacity": 4 * NUM_ENVS * LENGTH}  # of algorithms that learn from one


def _learner(algo, spec, gamma):
    if algo.on_policy:
        return learner.on_policy(algo)
    buffer = ring.make(
        element(spec.observation),
        element(spec.action),
        capacity=REPLAY["capacity"],
        num_envs=NUM_ENVS,
        batch_size=REPLAY["batch_size"],
        gamma=gamma,
    )
    return learner.off_policy(algo, buffer, updates=REPLAY["updates"], learning_starts=NUM_ENVS * LENGTH)


def _with_sign(task):
    """The task for an algorithm of continuous actions: a positive number is action 1, any other action 0."""
    step = lambda state, action, draws: task.step(state, (action[:, 0] > 0).astype(jnp.int32), draws)
    return task._replace(action=Box((1,), low=-1.0, high=1.0), step=step)


def train_each(name, tasks, *, iterations, mutate=lambda rollout, which: rollout, gamma=(), **overrides):
    """An algorithm trained on each of some probes, in one compiled scan for all of them.

    `mutate` changes each rollout of the task of that number before it is learned from. `gamma` is that of each task.

    Returns:
      for each task value(obs [N]) -> [N], and act(obs [N]) -> [N, *] without exploration.
    """
    signed = isinstance(tasks[0].action, Discrete) and not fakes.acts_in(name, Discrete)
    tasks = [_with_sign(task) for task in tasks] if signed else tasks
    overrides = {**CASES[name].probe, **overrides}
    spec = build(tasks[0], NUM_ENVS).spec
    gamma = np.asarray(gamma or [fakes.config(name, **overrides).gamma] * len(tasks), np.float32)

    def run(which, key, gamma):
        algo = fakes.make(name, spec, NETWORK, **{**overrides, "gamma": gamma})
        learn = _learner(algo, spec, gamma)
        env = build(one_of(which, tasks), NUM_ENVS)
        gammas = algo.running_return_gamma
        collect = unroll.make(env, algo.act, length=LENGTH, carry=algo.carry, running_return_gamma=gammas)

        def iteration(carry, key):
            state, replay, source = carry
            collect_key, update_key = jax.random.split(key)
            source, rollout, _ = collect.step(source, algo.actor(state), collect_key)
            state, replay, _ = learn.step(state, replay, mutate(rollout, which), update_key)
            return (state, replay, source), None

        init_key, env_key, key = jax.random.split(key, 3)
        carry = (learn.init(init_key), learn.init_replay(), collect.init(env_key))
        keys = jax.random.split(key, iterations * CASES[name].rollouts)
        return jax.lax.scan(iteration, carry, keys)[0][0]

    answers = _answers(fakes.make(name, spec, NETWORK, **overrides), signed)
    states = jax.jit(jax.vmap(run, in_axes=(0, None, 0)))(np.arange(len(tasks)), jax.random.key(0), gamma)
    return [answers(fakes.part(states, i)) for i in range(len(tasks))]


def _answers(algo, signed):
    """From a State of a trained algorithm to (value, act), which are compiled once for all of its States."""
    obs = lambda x: np.asarray(x, np.float32)[:, None]

    @jax.jit
    def asked(state, seen):
        found = algo.outputs(state, seen)
        acted = algo.act(algo.actor(state), seen, algo.carry(len(seen)), jax.random.key(0), explore=False)
        return found["value"] if "value" in found else found["q"].max(-1), acted.action

    def act(state, x):
        action = np.asarray(asked(state, obs(x))[1])
        return (action[:, 0] > 0).astype(np.int32) if signed else action

    value = lambda state, x: np.asarray(asked(state, obs(x))[0])
    return lambda state: (functools.partial(value, state), functools.partial(act, state))
