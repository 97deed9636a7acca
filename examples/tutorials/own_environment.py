# %% [markdown]
# # Your own environment, in NumPy and in JAX
#
# For people with a problem of their own. This tutorial writes one task twice: as a plain Python class, which any code
# can be in, and as JAX functions, which run inside the training program. Then it compares them.
#
# The task: a boat on a river of one dimension. The policy pushes left, not at all, or right, and must hold the boat at
# the buoy, position 0, against a current that each episode draws.

# %%
import time

import gymnasium
import jax.numpy as jnp
import numpy as np

import jrl
from jrl import registry
from jrl.api import PPOConfig
from jrl.envs.jax_env import Definition
from jrl.types import Box, Discrete

# %% [markdown]
# ## A class in NumPy
#
# Gymnasium's interface: two spaces, `reset` and `step`. `terminated` is a true end, with value 0 after it. `truncated`
# is a time limit, and the learner estimates what would have followed. Do not mix them up: an agent that learns that
# time limits are ends drives badly before them.


# %%
class Boat(gymnasium.Env):
    """Hold the boat at 0. The boat is lost at a distance of 3."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)  # position, velocity
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.velocity = self.np_random.uniform(-1, 1), 0.0
        self.current = self.np_random.uniform(-0.05, 0.05)
        return self._observe(), {}

    def step(self, action):
        self.velocity = 0.9 * self.velocity + 0.1 * (action - 1) + self.current
        self.position += self.velocity
        is_lost = abs(self.position) > 3.0
        return self._observe(), 1.0 - abs(self.position), is_lost, False, {}

    def _observe(self):
        return np.array([self.position, self.velocity], np.float32)


# %% [markdown]
# `check_env` plays the class at random and reports faults, each with a fix. A wrong shape, a NaN, or a seed that is
# ignored is a problem. The class has no time limit; `horizon` sets one below.

# %%
report = jrl.check_env(Boat)
print("ok:", report.ok)


# %%
class Broken(Boat):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs[:1], reward, *rest


print(*jrl.check_env(Broken).problems, sep="\n")

# %% [markdown]
# ## Train on it
#
# A config takes the class. From a terminal it is `--env my_module:Boat`.


# %%
def train(env, steps, **options):
    """Trains PPO; prints the mean return and the speed of each report."""
    config = (
        PPOConfig()
        .environment(env, horizon=100, **options)
        .env_runners(num_envs=8, rollout_fragment_length=128)
        .training(lr=1e-3, gamma=0.97)
        .reporting(min_sample_timesteps_per_iteration=steps // 4)
        .debugging(log=[])
    )
    with config.build() as algo:
        algo.train()  # compiles
        start, before = time.perf_counter(), algo.env_steps
        for _ in range(3):
            result = algo.train()
            print(f"{algo.env_steps:,} steps: return {result['episode_return_mean']:.0f}")
        print(f"{(algo.env_steps - before) / (time.perf_counter() - start):,.0f} steps/s of learning")


train(Boat, 40_000)

# %% [markdown]
# The best possible is below 100: 1 per step at the buoy, less for the way there. Most of the time goes to Python: each
# step is a call of the class, one environment after the other.
#
# ## The same in JAX
#
# A `Definition` describes B environments at once, with a limit of 100 steps here. Its state is a tree of arrays whose
# first axis is B. `draws`, numbers in [0, 1) of shape [num_draws, B], are all the randomness there is, so that a run
# can be repeated exactly. There is no `if` on values: use `jnp.where`.


# %%
def boat() -> Definition:
    """Hold the boat at 0."""

    def reset(draws):
        position = 2.0 * draws[0] - 1.0
        return {"position": position, "velocity": jnp.zeros_like(position), "current": 0.1 * draws[1] - 0.05}

    def step(state, action, draws):
        velocity = 0.9 * state["velocity"] + 0.1 * (action - 1) + state["current"]
        position = state["position"] + velocity
        state = state | {"position": position, "velocity": velocity}
        return state, 1.0 - jnp.abs(position), jnp.abs(position) > 3.0  # state, reward, true end

    def observe(state):
        return jnp.stack([state["position"], state["velocity"]], -1)

    return Definition(Box((2,)), Discrete(3), 100, num_draws=2, reset=reset, step=step, observe=observe)


registry.register("boat", boat)  # a name, because a notebook is no module
print("ok:", jrl.check_env("boat").ok)

# %%
train("boat", 400_000)

# %% [markdown]
# Now environments, policy and updates are one compiled program, and ten times the steps take less time. The definition
# also trains many seeds in one program, and on a GPU.
#
# ## Is it the same task?
#
# Two versions of a task differ easily. Compare them where nothing is random: from one state, with the same actions.

# %%
env, definition = Boat(), boat()
env.reset(seed=0)
state = {name: jnp.array([getattr(env, name)]) for name in ("position", "velocity", "current")}
differences = []
for t in range(20):
    obs, reward, *_ = env.step(t % 3)
    state, reward_in_jax, _ = definition.step(state, jnp.array([t % 3]), None)
    differences.append(max(abs(obs - definition.observe(state)[0]).max(), abs(reward - float(reward_in_jax[0]))))
print(f"largest difference in 20 steps: {max(differences):.1e}")

# %% [markdown]
# ## Next
#
# * Dictionaries, images, action masks, options, slow environments: [environments](../environments.md).
# * Several agents: [tutorial](several_agents.md). A simulator that jrl cannot step: [tutorial](simulator.md).
# * Environments to train on at once: [gallery](../gallery.md).
