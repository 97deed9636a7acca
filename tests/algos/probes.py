"""Probe environments with known answers, and the one place that trains an algorithm on them.

Each asks one question: if an algorithm fails a probe and passes the ones before it, the question says where to look.
"""

import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
from cases import CASES

from jrl.algos import actor_critic
from jrl.envs.jax_env import Definition, build
from jrl.learn import learner
from jrl.networks import NetworkConfig
from jrl.replay import ring
from jrl.rollout import unroll
from jrl.types import Box, Discrete, EnvSpec, Rollout, element

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
MAX_LAG = 4
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


def train(name, task, **more):
    """`train_each` of the one task."""
    return train_each(name, (task,), **more)[0]


def train_each(name, tasks, *, iterations=60, mutate=lambda rollout, which: rollout, lag=None, gamma=(), **overrides):
    """An algorithm trained on each of some probes, in one compiled scan for all of them.

    `mutate` changes each rollout of the task of that number before it is learned from. With `lag`, a number in
    0..MAX_LAG for each task, each rollout is made by the actor of so many updates before. `gamma` is that of each task.

    Returns:
      for each task value(obs [N]) -> [N], and act(obs [N]) -> [N, *] without exploration.
    """
    signed = isinstance(tasks[0].action, Discrete) and not fakes.acts_in(name, Discrete)
    tasks = [_with_sign(task) for task in tasks] if signed else tasks
    overrides = {**CASES[name].probe, **overrides}
    spec = build(tasks[0], NUM_ENVS).spec
    gamma = np.asarray(gamma or [fakes.config(name, **overrides).gamma] * len(tasks), np.float32)

    def run(which, key, lag, gamma):
        algo = fakes.make(name, spec, NETWORK, **{**overrides, "gamma": gamma})
        learn = _learner(algo, spec, gamma)
        env = build(one_of(which, tasks), NUM_ENVS)
        gammas = algo.running_return_gamma
        collect = unroll.make(env, algo.act, length=LENGTH, carry=algo.carry, running_return_gamma=gammas)

        def iteration(carry, key):
            state, replay, source, actors = carry
            collect_key, update_key = jax.random.split(key)
            actor = algo.actor(state)
            if lag is not None:  # [MAX_LAG + 1, ...], the latest first
                actors = jax.tree.map(lambda old, new: jnp.concatenate([new[None], old[:-1]]), actors, actor)
                actor = jax.tree.map(lambda x: x[lag], actors)
            source, rollout, _ = collect.step(source, actor, collect_key)
            state, replay, _ = learn.step(state, replay, mutate(rollout, which), update_key)
            return (state, replay, source, actors), None

        init_key, env_key, key = jax.random.split(key, 3)
        state = learn.init(init_key)
        actors = jax.tree.map(lambda x: jnp.stack([x] * (MAX_LAG + 1)), algo.actor(state)) if lag is not None else ()
        carry = (state, learn.init_replay(), collect.init(env_key), actors)
        keys = jax.random.split(key, iterations * CASES[name].rollouts)
        return jax.lax.scan(iteration, carry, keys)[0][0]

    key, lags = jax.random.key(0), None if lag is None else np.asarray(lag, np.int32)
    answers = _answers(fakes.make(name, spec, NETWORK, **overrides), signed)
    if len(tasks) == 1:
        return [answers(jax.jit(run)(0, key, lags if lag is None else lags[0], gamma[0]))]
    every = jax.jit(jax.vmap(run, in_axes=(0, None, None if lag is None else 0, 0)))
    states = every(np.arange(len(tasks)), key, lags, gamma)
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


# A chain of two states, the same for both actions: at state s action a is worth CHAIN_REWARD[s, a].
CHAIN_REWARD = np.array([[1.0, -0.5], [0.2, 1.0]])
CHAIN_POLICY = np.array([[0.75, 0.25], [0.5, 0.5]])  # that acts, whatever is learned
CHAIN_GAMMA = 0.8
CHAIN_SPEC = EnvSpec(Box((2,)), Discrete(2), 8)
CHAIN_OBS = jnp.eye(2)


def chain_rollout():
    """One episode [2, 8] in each column, every sequence of actions exactly as often as CHAIN_POLICY takes it."""
    action = np.array([[0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0, 1]])
    state = np.arange(2)[:, None]
    ends = np.broadcast_to(state == 1, (2, 8))
    return Rollout(
        obs=jnp.asarray(np.broadcast_to(np.eye(2)[:, None], (2, 8, 2)), jnp.float32),
        last_obs=jnp.zeros((8, 2)),
        action=jnp.asarray(action, jnp.int32),
        reward=jnp.asarray(CHAIN_REWARD[state, action], jnp.float32),
        terminated=jnp.asarray(ends),
        truncated=jnp.zeros((2, 8), bool),
        mask=jnp.ones((2, 8), bool),
        contiguous=jnp.zeros((8,), bool),
        extras={"log_prob": jnp.asarray(np.log(CHAIN_POLICY[state, action]), jnp.float32)},
        carry=(),
    )


def learn_chain(name, *, corrected=True, updates=600, **overrides):
    """(pi [2, 2], V [2]) after many updates on the chain; not `corrected`: as if the policy that learns had acted."""
    algo = fakes.make(name, CHAIN_SPEC, NETWORK, gamma=CHAIN_GAMMA, num_epochs=1, num_minibatches=1, **overrides)
    net, rollout = actor_critic.make(CHAIN_SPEC, NETWORK), chain_rollout()

    @jax.jit
    def run(key):
        def update(state, key):
            acted = rollout
            if not corrected:
                dist, _ = net.apply(state.params, rollout.obs)
                acted = rollout.replace(extras={"log_prob": dist.log_prob(rollout.action)})
            return algo.update(state, acted, key)[0], None

        state = jax.lax.scan(update, algo.init(key), jax.random.split(key, updates))[0]
        dist, value = net.apply(state.params, CHAIN_OBS)
        return jax.nn.softmax(dist.logits), value

    return tuple(np.asarray(x, np.float64) for x in run(jax.random.key(0)))


def chain_values(policy):
    """V [2] of a policy [2, 2] on the chain."""
    reward = (policy * CHAIN_REWARD).sum(1)
    return np.array([reward[0] + CHAIN_GAMMA * reward[1], reward[1]])


def between(policy, clip_rho):
    """The policy that V-trace's values are of (arXiv:1802.01561, eq. 3): pi, but no more than clip_rho mu."""
    clipped = np.minimum(clip_rho * CHAIN_POLICY, policy)
    return clipped / clipped.sum(1, keepdims=True)
