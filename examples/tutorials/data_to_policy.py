# %% [markdown]
# # From a data set to a fine-tuned policy
#
# For people who have recorded episodes: of a controller, a person, or an older policy. The tutorial records some,
# inspects them, imitates them, and improves the result in the environment. [Data sets](../data.md) has all formats and
# commands.

# %%
import json
from pathlib import Path

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
# limit. The task is MountainCar-v0: each step costs 1 until a weak engine has brought the car out of a valley, for at
# most 200 steps. Learning from nothing is hard, because random actions never reach the end. A simple idea does: push in
# the direction in which the car moves. The controller does so in two of three steps, and acts at random in the others.

# %%
env, rng = gymnasium.make("MountainCar-v0"), np.random.default_rng(0)


def play(seed):
    """Returns an episode of the controller."""
    obs, actions, rewards, over = [env.reset(seed=seed)[0]], [], [], False
    while not over:
        action = int(rng.integers(3)) if rng.random() < 1 / 3 else 2 * int(obs[-1][1] > 0)
        after, reward, terminated, truncated, _ = env.step(action)
        obs.append(after)
        actions.append(action)
        rewards.append(float(reward))
        over = terminated or truncated
    return data.Episode(np.array(obs), np.array(actions), np.array(rewards), terminated=terminated, truncated=truncated)


episodes = [play(seed) for seed in range(60)]
store = data.of_episodes(Box((2,)), Discrete(3), episodes, meta={"env": "MountainCar-v0", "source": "controller"})
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
# Velocities are at most 0.07 here, so `normalize_obs` scales the observations by the statistics of the data.

# %%
task = ["--env", "MountainCar-v0", "--set", "env.backend=jax", "--set", "algo.normalize_obs=true"]
sources = ["--set", "data.input=sets/controller", "--set", "data.validation=0.2", "--set", "algo.lr=1e-3"]
status = train(["--algo", "bc", *task, *sources, "--stop", "updates=600", "--out", "runs/imitation"])

# %%
status = evaluate(["runs/imitation", "--episodes", "100"])

# %% [markdown]
# The data have random actions in between. The best actions of the imitating policy leave these out, so it is better
# than what it imitates. It cannot be better than the controller's idea, though.
#
# Can you judge a policy without an environment? Often: [estimates](../data.md#judging-a-policy-without-running-it).
#
# ## Fine-tune
#
# `--init-from` takes the weights of a run into another one. PPO has a value network beside the policy; behaviour
# cloning had none. An untrained value would spoil the policy at once, so `configs/ppo_from_bc.yaml` trains the value
# alone in the first 8 updates (`algo.policy_after: 8`), with a larger step size.

# %%
budget = ["--stop", "env_steps=32768", "--stop", "evaluation/return=null", "--set", "evaluation.every=8192"]
status = train(["ppo_from_bc", *task, *budget, "--init-from", "runs/imitation", "--out", "runs/tuned"])

# %%
status = evaluate(["runs/tuned", "--episodes", "100", "--latest"])

# %% [markdown]
# ## Was the data set worth it?
#
# The control is the same run with no weights to begin with. Without this comparison there is no telling what the data
# contributed. Its policy may change from the first update on.

# %%
status = train(["ppo_from_bc", *task, *budget, "--set", "algo.policy_after=0", "--out", "runs/scratch"])

# %%
for name in ("tuned", "scratch"):
    rows = [json.loads(line) for line in Path(f"runs/{name}/result.jsonl").read_text().splitlines()]
    found = [round(row["evaluation/return"]) for row in rows if row.get("evaluation/return")]
    print(f"{name}:", *dict.fromkeys(found))  # rows repeat an evaluation until the next

# %% [markdown]
# Without the data the car did not reach the end once in 32,768 steps, so there was nothing to learn from. With them the
# policy began with what the controller knew, and became better than it. This is one seed of each: to be sure, run
# several, as in [Seeds, sweeps and honest comparison](comparison.md).
#
# ## Next
#
# * Learn from the rewards of the data, too: [`iql`](../algorithms/iql.md), [`fql`](../algorithms/fql.md).
# * Learn from data and the environment at once: `data.input: {sampler: 0.5, sets/controller: 0.5}`, in
#   [data sets](../data.md#pre-train-then-fine-tune).
