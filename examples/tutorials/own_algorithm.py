# %% [markdown]
# # Your own algorithm
#
# For people who want to try an idea of their own. An algorithm of jrl is a dataclass of hyper-parameters and a function
# that returns pure functions. This tutorial writes REINFORCE with a baseline (Williams, 1992), tests it without
# training, trains it, and compares two values of a hyper-parameter that it defines. All keys of the contract are in
# [Your own algorithm](../own-algorithm.md).

# %%
import jax
import jax.numpy as jnp

import jrl
from jrl import envs
from jrl.algos import actor_critic, parts
from jrl.algos import agent as agents
from jrl.api import config_class
from jrl.fields.bounds import NonNegative, NonNegativeSchedule
from jrl.networks import NetworkConfig
from jrl.ops import returns
from jrl.rollout import unroll
from jrl.types import UpdateAux, hyperparams

# %% [markdown]
# ## Hyper-parameters
#
# Each field is a key of the section `algo` in YAML, and an argument of `training(...)`. The types are the accepted
# ranges: a negative `baseline_coef` is an error before anything starts. `agents.Common` has the fields that every
# algorithm has, such as `gamma`.


# %%
@hyperparams
class Config(agents.Common):
    """Hyper-parameters of REINFORCE."""

    lr: NonNegativeSchedule = 5e-3
    baseline_coef: NonNegative = 0.5  # weight of the baseline's loss


# %% [markdown]
# ## The update
#
# `update` gets a rollout: arrays of T steps of B environments. It returns the next state and metrics. Three rules make
# the same function work on one device and on many, with and without memory:
#
# * Targets come from `jrl.ops.returns`, which knows time limits from true ends. Here it is the discounted sum of
#   rewards, or of the value where the rollout is cut.
# * A loss is `mean(weight * x)`: steps that do not count, such as the reset after an end, have weight 0.
# * Gradients go through `parts.pmean`, the mean over devices.


# %%
def update(cfg, agent, state, rollout, key):
    """Returns the state after a step along the gradient of log pi(action) (G - V), and metrics."""
    (value, memory), done = actor_critic.values(agent, state, rollout), rollout.terminated | rollout.truncated
    target = returns.lambda_returns(rollout.reward, rollout.terminated, done, value, gamma=cfg.gamma, lambda_=1.0)
    obs, advantage = agent.observer.see(state.obs_stats, rollout.obs), target - value[:-1]
    rows, metrics = actor_critic.make_rows(obs, rollout, advantage, target, value[:-1], axis_name=agent.axis_name)
    rows = agents.cut(agent, rows, memory)  # single steps, or sequences for a network with memory

    def objective(params):
        dist, baseline = agent.net.apply(params, rows.obs)
        policy = -jnp.mean(rows.weight * rows.advantage * dist.log_prob(rows.action))
        error = jnp.mean(rows.weight * (baseline - rows.target) ** 2)
        return policy + cfg.baseline_coef * error, {"loss/policy": policy, "loss/value": error}

    gradient, losses = parts.pmean(jax.grad(objective, has_aux=True)(state.params), agent.axis_name)
    params, opt_state = agents.descend(cfg, agent, cfg.lr, gradient, state.opt_state, state.params)
    state = state.replace(params=params, opt_state=opt_state, updates=state.updates + 1)
    return agents.observed(agent, state, rollout), UpdateAux(metrics | losses)


def make(cfg, spec, network=None, *, axis_name=None, loss=None):
    """Returns REINFORCE as pure functions, for the spaces of an environment."""
    agent = actor_critic.make_agent(cfg, spec, network or NetworkConfig(), axis_name=axis_name, loss=loss)
    return actor_critic.make_algo(cfg, agent, update)


# %% [markdown]
# `make_agent` builds policy and value networks for any space. `make_algo` puts `update` in the middle of an `Algo`,
# whose other functions (acting, initial state) are those of every actor-critic.
#
# ## A test without training
#
# All functions are pure, so a mistake shows before a run. `jax.eval_shape` traces an iteration and computes nothing:

# %%
env = envs.make("CartPole-v1", backend="jax", num_envs=4)
algo = make(Config(), env.spec)
collect = unroll.make(env, algo.act, length=8)


def iteration(key):
    state = algo.init(key)
    _, rollout, _ = collect.step(collect.init(key), algo.actor(state), key)
    return rollout, *algo.update(state, rollout, key)


rollout, state, aux = jax.eval_shape(iteration, jax.random.key(0))
print("actions:", rollout.action.shape, rollout.action.dtype)
print("metrics:", *sorted(aux.metrics))

# %% [markdown]
# ## Training
#
# The name of an algorithm is that of its module. In a notebook or script this is `__main__`; in a project it is
# `my_project.reinforce`, and the command line has it too: `python -m jrl.train --algo my_project.reinforce --env
# CartPole-v1`. Everything else of a run works as for the algorithms that come with jrl.

# %%
ReinforceConfig = config_class("__main__")


def train(seed, **hyperparameters):
    """Returns the mean returns of the latest 100 episodes, one per 50,000 steps, and the checkpoint."""
    config = (
        ReinforceConfig()
        .environment("CartPole-v1", backend="jax")
        .env_runners(num_envs=8, rollout_fragment_length=32)
        .training(**hyperparameters)
        .reporting(min_sample_timesteps_per_iteration=50_000)
        .debugging(seed=seed)
    )
    with config.build() as algorithm:
        curve = [algorithm.train()["episode_return_mean"] for _ in range(4)]
        return curve, algorithm.save()


# %%
for seed in range(3):
    curve, checkpoint = train(seed)
    print(f"seed {seed}:", *(f"{value:.0f}" for value in curve))

# %% [markdown]
# A random policy has a return of about 20, the best possible is 500. Is the baseline any good? With
# `baseline_coef=0` the value network never learns, so nothing is subtracted but the noise of its first weights:

# %%
for seed in range(3):
    curve, _ = train(seed, baseline_coef=0.0)
    print(f"seed {seed} without a baseline:", *(f"{value:.0f}" for value in curve))

# %% [markdown]
# Three seeds are few: [Seeds, sweeps and honest comparison](comparison.md) shows how to be sure. The checkpoint is a
# policy like any other:

# %%
policy = jrl.load(checkpoint.path)
print("action:", policy.act([0.0, 0.1, 0.0, -0.1]), "after", f"{policy.env_steps:,}", "steps")

# %% [markdown]
# A mistyped hyper-parameter is an error in the call, and a value out of its range is one, too:

# %%
from jrl.errors import InputError

for wrong in ({"baseline_coeff": 1.0}, {"baseline_coef": -1.0}):
    try:
        ReinforceConfig().environment("CartPole-v1").training(**wrong).validate()
    except InputError as error:
        print(error)

# %% [markdown]
# ## Next
#
# * An algorithm that learns from a replay buffer: [With replay](../own-algorithm.md#with-replay).
# * To change only the loss of an existing algorithm: [Another loss only](../own-algorithm.md#another-loss-only).
# * `jrl/algos/ppo.py` is written the same way, and reads from top to bottom.
