"""Probe environments with known answers, and the one place that trains an algorithm on them.

Each asks one question: if an algorithm fails a probe and passes the ones before it, the question says where to look.
"""

from dataclasses import replace

import fakes
import jax
import jax.numpy as jnp

from jrl import learner, networks
from jrl.algos import actor_critic
from jrl.algos.exploration import EpsilonGreedy, Gaussian
from jrl.envs.graph import Definition, build
from jrl.networks import NetworkConfig
from jrl.networks.critics import build_critics
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
# learning that is quick and forgets quickly, as these tasks are
HYPER = {
    "ppo": {"lr": 1e-2, "num_epochs": 4, "num_minibatches": 2, "gamma": 0.9, "adam_eps": 1e-5},
    "dqn": {"lr": 3e-3, "gamma": 0.9, "target_update_every": 16, "exploration": EpsilonGreedy(epsilon=0.2)},
    "pqn": {"lr": 1e-2, "num_epochs": 4, "num_minibatches": 2, "gamma": 0.9, "exploration": EpsilonGreedy(epsilon=0.2)},
    "sac": {"lr": 3e-3, "gamma": 0.9, "tau": 0.05, "learn_ent_coef": False, "ent_coef": 0.02},
    "td3": {"lr": 3e-3, "gamma": 0.9, "tau": 0.05, "exploration": Gaussian(std=0.5)},
}
REPLAY = {"updates": 16, "batch_size": 64, "capacity": 4 * NUM_ENVS * LENGTH}  # of algorithms that learn from one


def _learner(name, algo, spec, **overrides):
    if algo.on_policy:
        return learner.on_policy(algo)
    buffer = ring.make(
        element(spec.observation),
        element(spec.action),
        capacity=REPLAY["capacity"],
        num_envs=NUM_ENVS,
        batch_size=REPLAY["batch_size"],
        gamma=fakes.config(name, **overrides).gamma,
    )
    return learner.off_policy(algo, buffer, updates=REPLAY["updates"], learning_starts=NUM_ENVS * LENGTH)


def _with_sign(task):
    """The task for an algorithm of continuous actions: a positive number is action 1, any other action 0."""
    step = lambda state, action, draws: task.step(state, (action[:, 0] > 0).astype(jnp.int32), draws)
    return task._replace(action=Box((1,), low=-1.0, high=1.0), step=step)


def train(name, task, *, iterations=60, mutate=lambda rollout: rollout, **overrides):
    """An algorithm trained on a probe in one compiled scan; `mutate` changes each rollout before it is learned from.

    Returns:
      value(obs [N]) -> [N], and act(obs [N]) -> [N, *] without exploration.
    """
    discrete = isinstance(task.action, Discrete)
    signed = discrete and Discrete not in fakes.SUPPORTS[name]
    env = build(_with_sign(task) if signed else task, NUM_ENVS)
    overrides = {**HYPER.get(name, {}), **overrides}
    algo = fakes.make(name, env.spec, NETWORK, **overrides)
    learn = _learner(name, algo, env.spec, **overrides)
    collect = unroll.make(
        env, algo.act, length=LENGTH, carry=algo.carry, running_return_gamma=algo.running_return_gamma
    )

    @jax.jit
    def run(key):
        def iteration(carry, key):
            state, replay, source = carry
            collect_key, update_key = jax.random.split(key)
            source, rollout, _ = collect.step(source, algo.actor(state), collect_key)
            state, replay, _ = learn.step(state, replay, mutate(rollout), update_key)
            return (state, replay, source), None

        init_key, env_key, key = jax.random.split(key, 3)
        carry = (learn.init(init_key), learn.init_replay(), collect.init(env_key))
        return jax.lax.scan(iteration, carry, jax.random.split(key, iterations))[0][0]

    state = run(jax.random.key(0))
    obs = lambda x: jnp.asarray(x, jnp.float32)[:, None]

    def act(x):
        action = algo.act(algo.actor(state), obs(x), algo.carry(len(x)), jax.random.key(0), explore=False).action
        return (action[:, 0] > 0).astype(jnp.int32) if signed else action

    return lambda x: _VALUES[name](env.spec, state, obs(x)), act


def _state_value(spec, state, obs):
    return actor_critic.make(spec, NETWORK).value(state.params, obs)


def _best_action_value(spec, state, obs):
    network = networks.build(spec, NETWORK, {"q": networks.Head(spec.action.n)})
    return network.apply(state.params, obs, "q")[0].max(-1)


def _best_action_value_shared(spec, state, obs):
    network = networks.build(spec, replace(NETWORK, shared=True), {"q": networks.Head(spec.action.n)})
    return network.apply(state.params, obs, "q")[0].max(-1)


def _best_of_critics(spec, state, obs):
    critics = build_critics(spec, NETWORK, 2)
    return critics.apply(state.params["critic"], obs).min(0).max(-1)


def _critics_of_policy(spec, state, obs):
    algo = fakes.make("td3", spec, NETWORK)
    action = algo.act(algo.actor(state), obs, algo.carry(len(obs)), None, explore=False).action
    return build_critics(spec, NETWORK, 2).apply(state.params["critic"], obs, action).min(0)


# how to read an algorithm's value of an observation
_VALUES = {
    "ppo": _state_value,
    "pqn": _best_action_value,
    "dqn": _best_action_value_shared,
    "sac": _best_of_critics,
    "td3": _critics_of_policy,
}
