# %% [markdown]
# # Several agents
#
# For games and teams. The question in every such run is: which policy plays which agent? This tutorial shows three
# answers: one policy for all, a policy each, and a policy against copies of itself. All keys:
# [several agents](../multi-agent.md).

# %%
import numpy as np

import jrl
from jrl.api import PPOConfig
from jrl.envs import make

# %% [markdown]
# ## An environment with two agents
#
# In `MultiAgentCartPole-v1` each agent balances a pole of its own. An agent whose pole falls leaves, and the other goes
# on. Each agent has its own observations, actions, rewards and ends. Four environments of two agents are a batch of 8.

# %%
env = make("MultiAgentCartPole-v1", num_envs=4)
print("agents:", *env.spec.agents)
print("observation and action of each:", env.spec.observation.shape, env.spec.action.n)

# %% [markdown]
# ## One policy for all agents
#
# This is the default. The policy learns from the steps of both agents, so it has twice the data.


# %%
def train(config, iterations=4):
    """Trains; prints the return of games (the sum over agents) and that of each policy, and returns the checkpoint."""
    config = config.environment("MultiAgentCartPole-v1").env_runners(num_envs=8, rollout_fragment_length=128)
    config = config.training(lr=2.5e-3, gamma=0.98, gae_lambda=0.9).reporting(min_sample_timesteps_per_iteration=10_000)
    with config.debugging(seed=0).build() as algo:
        for _ in range(iterations):
            result = algo.train()
            each = {name: round(value) for name, value in result["policy_reward_mean"].items()}
            print(f"{algo.env_steps:,} steps: game {result['episode_return_mean']:.0f}, by policy {each}")
        return algo.save().path


shared = train(PPOConfig())

# %% [markdown]
# ## A policy for each
#
# `by_agent` gives each agent a policy of its own name. Policies that are alike are stacked and trained by one program.

# %%
separate = train(PPOConfig().multi_agent(policy_mapping_fn="by_agent"))

# %% [markdown]
# A mapping may be a function of the agent's name. `policies_to_train` freezes the others, bit for bit. Here `left`
# learns beside a partner that never changes:

# %%
config = PPOConfig().multi_agent(
    policies=["left", "right"],
    policy_mapping_fn=lambda agent_id, episode, **_: "left" if agent_id == "agent_0" else "right",
    policies_to_train=["left"],
)
checkpoint = train(config)

# %% [markdown]
# `right` stays at what random weights are worth. A policy of the run acts on its own:

# %%
policy = jrl.load(checkpoint, policy="left")
print("action of left:", policy.act(np.array([0.0, 0.1, 0.05, -0.1], np.float32)))

# %% [markdown]
# ## A policy against copies of itself
#
# In TicTacToe-v0 two agents move by turns. A win pays +1, a loss -1. If one policy plays both seats, its own progress
# makes its opponent stronger and the return says nothing. With `self_play` the policy plays frozen copies of itself.
# Whenever it wins often enough, another copy joins the pool.

# %%
config = (
    PPOConfig()
    .environment("TicTacToe-v0")
    .env_runners(num_envs=32, rollout_fragment_length=32)
    .training(lr=1e-3, model={"hidden": [64]})
    .multi_agent(self_play={"policy": "main", "pool": 4, "snapshot_win_rate": 0.55, "window": 200})
    .reporting(min_sample_timesteps_per_iteration=10_000)
    .debugging(seed=0)
)
game = config.build()
for _ in range(5):
    league = game.train()["league"]
    wins = f"wins {league['win_rate']:.0%} against {league['size'] - 1} copies"
    print(f"{game.env_steps:,} steps: {wins}, Elo {league['elo']:.0f}")

# %% [markdown]
# The win rate does not rise to 100 %, because the opponents improve too. Elo rates the policy against all its copies.
# What does the policy do on the empty board? The observation holds the board as the player sees it, and an action mask.
# The last action means to wait, which only the other player may do.

# %%
board = {"obs": np.eye(19, dtype=np.float32)[18], "action_mask": np.array([1] * 9 + [0], np.int8)}
first = [int(game.compute_single_action(board, policy_id="main")) for _ in range(300)]
print(np.bincount(first, minlength=9)[:9].reshape(3, 3) / 300)
game.stop()

# %% [markdown]
# Each number is the share of first moves in this field. The centre, the strongest first move, is nearly always chosen.
#
# ## Next
#
# * Your own game in JAX is a `MultiDefinition`, and PettingZoo's and RLlib's classes work as they are:
#   [environments](../environments.md#several-agents).
# * Critics that see everything, teams: [several agents](../multi-agent.md#a-critic-that-sees-more-mappo).
# * Leagues with policies that come and go: `examples/league.py`.
