# %% [markdown]
# # A first run
#
# For newcomers: train a policy, look at what a run leaves behind, measure the policy and use it. You need jrl and a few
# seconds of two cores. The same with commands in a terminal: [quick start](../quickstart.md).

# %%
import json

import gymnasium

import jrl
from jrl.api import PPOConfig
from jrl.plot import plot

# %% [markdown]
# ## Train
#
# The task is CartPole-v1: push a cart left or right so that the pole on it does not fall. Each step pays 1, and an
# episode ends after 500 steps, so the best return is 500.
#
# A config has a method for each subject. Everything that it does not say has a default.

# %%
config = (
    PPOConfig()
    .environment("CartPole-v1", backend="jax")
    .env_runners(num_envs=8)
    .training(lr=2.5e-3, gamma=0.98, gae_lambda=0.9)
    .reporting(min_sample_timesteps_per_iteration=10_000)
    .debugging(out="runs/first", seed=0)
)
algo = config.build()
for _ in range(8):
    result = algo.train()
    print(f"{result['num_env_steps_sampled_lifetime']:,} steps: return {result['episode_return_mean']:.0f}")

# %% [markdown]
# Eight environments run at the same time, inside one compiled program together with the updates. The return is the mean
# of the latest 100 episodes.
#
# You may interrupt the cell at any time: call `algo.train()` again to go on. `stop()` writes a last checkpoint.

# %%
algo.stop()
plot("runs/first")

# %% [markdown]
# ## Look at the run directory
#
# `result.jsonl` has a row per report, `config.yaml` every setting. [Config](../config.md) explains the keys of both.

# %%
print(*sorted(path.name for path in algo.logdir.iterdir()), sep="\n")

# %%
rows = [json.loads(line) for line in (algo.logdir / "result.jsonl").read_text().splitlines()]
for name in ("env_steps", "episode/return", "loss/policy", "policy/entropy", "perf/steps_per_s"):
    print(f"{name}: {rows[-1][name]:.4g}")

# %% [markdown]
# The entropy began at ln 2 = 0.69, the entropy of two equally likely actions. It falls as the policy becomes sure.
#
# ## Use the policy
#
# `jrl.load` reads a checkpoint and needs no environment. It takes the best action; `explore=True` samples as in
# training. The environment here is Gymnasium's, which the policy has never seen: the task is the same.

# %%
policy = jrl.load("runs/first")
env = gymnasium.make("CartPole-v1")
for episode in range(3):
    obs, _ = env.reset(seed=episode)
    total, over = 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        total, over = total + float(reward), terminated or truncated
    print(f"episode {episode}: return {total:.0f}")

# %% [markdown]
# ## Measure it
#
# The mean return in training is of a policy that explores, and of weights that change. An evaluation plays separate
# episodes with the best actions and one set of weights:

# %%
again = PPOConfig.from_yaml("runs/first/config.yaml").debugging(out="runs/second").build()
again.restore("runs/first")
found = again.evaluate(50)
print(f"50 episodes: return {found['episode_return_mean']:.0f}, at least {found['episode_return_min']:.0f}")

# %% [markdown]
# ## Continue
#
# A restored run has the weights, the optimizer, the counters and the environments of the checkpoint. So it goes on
# where the first one ended:

# %%
result = again.train()
print(f"iteration {result['training_iteration']}, {result['num_env_steps_sampled_lifetime']:,} steps")
again.stop()

# %% [markdown]
# ## When something is wrong
#
# An error names the key, the fix, and comes before anything slow starts:

# %%
try:
    PPOConfig().training(gama=0.98)
except Exception as error:
    print(error)

# %% [markdown]
# ## Next
#
# * [Your own environment](own_environment.md).
# * [Seeds, sweeps and honest comparison](comparison.md): one seed says little.
# * All algorithms, with keys and measured results: [algorithms](../algorithms/index.md).
