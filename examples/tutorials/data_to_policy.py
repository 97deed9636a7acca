# %% [markdown]
# # From a data set to a fine-tuned policy
#
# For people who have recorded episodes: of a controller, a person, or an older policy. The tutorial records some,
# inspects them, imitates them, and improves the result in the environment. [Data sets](../data.md) has all formats and
# commands.

# %%
import gymnasium
import numpy as np

from jrl import data
from jrl.data.__main__ import main as data_command
from jrl.evaluate import main as evaluate
from jrl.train import main as train
from jrl.types import Box, Discrete

# %% [markdown]
# The commands of jrl are functions, too. Their arguments are the words of the command line, without `python -m`.
#
# ## Record episodes
#
# An episode of T steps has T + 1 observations, T actions and T rewards. `terminated` is a true end, `truncated` a time
# limit. A simple controller plays CartPole-v1 here: it pushes to the side to which the pole falls. Every third action
# is random, so that the data also show how to recover.

# %%
env, rng = gymnasium.make("CartPole-v1"), np.random.default_rng(0)


def play(seed):
    """Returns an episode of the controller."""
    obs, actions, rewards, over = [env.reset(seed=seed)[0]], [], [], False
    while not over:
        fall = obs[-1][2] + 0.3 * obs[-1][3]  # angle and its velocity
        action = int(rng.integers(2)) if rng.random() < 1 / 3 else int(fall > 0)
        after, reward, terminated, truncated, _ = env.step(action)
        obs.append(after)
        actions.append(action)
        rewards.append(float(reward))
        over = terminated or truncated
    return data.Episode(np.array(obs), np.array(actions), np.array(rewards), terminated=terminated, truncated=truncated)


episodes = [play(seed) for seed in range(60)]
store = data.of_episodes(Box((4,)), Discrete(2), episodes, meta={"env": "CartPole-v1", "source": "controller"})
data.write(store, "sets/controller")
print(f"{store.num_episodes} episodes, mean return {store.returns().mean():.0f}")

# %% [markdown]
# ## Inspect them
#
# Wrong data look like a bad algorithm. So look at them first: `inspect` prints what is in a data set, and its findings,
# such as shifted ends, values out of range, or copies.

# %%
status = data_command(["inspect", "sets/controller"])

# %% [markdown]
# ## Imitate
#
# Behaviour cloning (`bc`) makes the actions of the data likely. It steps no environment. A fifth of the episodes is
# held out, to see whether the policy learns them by heart. `stop` counts updates, since there are no steps to count.

# %%
imitation = ["--algo", "bc", "--env", "CartPole-v1", "--set", "env.backend=jax", "--set", "algo.lr=1e-3"]
sources = ["--set", "data.input=sets/controller", "--set", "data.validation=0.2"]
status = train([*imitation, *sources, "--stop", "updates=1500", "--out", "runs/imitation"])

# %%
status = evaluate(["runs/imitation", "--episodes", "100"])

# %% [markdown]
# The data have random actions in between. The best actions of the imitating policy leave these out, so it may
# well be better than what it imitates. It cannot be better than the controller's idea, though.
#
# Can you judge a policy without an environment? Often: [estimates](../data.md#judging-a-policy-without-running-it).
#
# ## Fine-tune
#
# `--init-from` takes the weights of a run into another one. PPO has a value network beside the policy, and the imitating
# run had none. An untrained value would spoil the policy at once, so `configs/ppo_from_bc.yaml` trains the value alone
# in the first 8 updates (`algo.policy_after: 8`), with a larger step size.

# %%
status = train(["ppo_from_bc", "--init-from", "runs/imitation", "--stop", "env_steps=24576", "--out", "runs/tuned"])

# %%
status = evaluate(["runs/tuned", "--episodes", "100"])

# %% [markdown]
# ## Was the data set worth it?
#
# The control is the same run with no weights to begin with. Without this comparison there is no telling what the data
# contributed. It may change its policy from the first update on.

# %%
status = train(["ppo_from_bc", "--set", "algo.policy_after=0", "--stop", "env_steps=24576", "--out", "runs/scratch"])

# %%
import json
from pathlib import Path

for name in ("tuned", "scratch"):
    rows = [json.loads(line) for line in Path(f"runs/{name}/result.jsonl").read_text().splitlines()]
    found = {row["evaluation/env_steps"] if "evaluation/env_steps" in row else row["env_steps"]: row for row in rows}
    points = [(steps, row["evaluation/return"]) for steps, row in found.items() if row.get("evaluation/return")]
    print(f"{name}:", *(f"{steps:,}: {value:.0f}" for steps, value in points))

# %% [markdown]
# This is one seed of each. To be sure, run several: [Seeds, sweeps and honest comparison](comparison.md).
#
# ## Next
#
# * Learn from rewards in the data, not only from its actions: [`iql`](../algorithms/iql.md), [`fql`](../algorithms/fql.md).
# * Learn from data and the environment at once: `data.input: {sampler: 0.5, sets/controller: 0.5}`, in
#   [data sets](../data.md#pre-train-then-fine-tune).
