"""Games of PettingZoo and mpe2 as they are installed."""

import numpy as np
import pytest

from jrl.envs.make import make
from jrl.types import Dict, Discrete


def played(env, steps, seed=0):
    """Returns of the agents in each game that ended [n, A], by random actions that masks allow."""
    rng, size = np.random.default_rng(seed), len(env.spec.agents)
    obs, sums, found = env.reset(), np.zeros(env.spec.num_envs), []
    for _ in range(steps):
        if isinstance(env.spec.observation, Dict) and "action_mask" in obs:
            weights = rng.random(obs["action_mask"].shape) * (obs["action_mask"] + 1e-9)
            action = weights.argmax(-1).astype(np.int32)
        else:
            action = rng.integers(0, env.spec.action.n, env.spec.num_envs).astype(np.int32)
        result = env.step(action)
        obs, sums = result.obs, sums + result.reward
        for game in np.flatnonzero(result.several.over):
            columns = slice(game * size, (game + 1) * size)
            found.append(sums[columns].copy())
            sums[columns] = 0
    return np.array(found)


def test_simple_spread_of_mpe2():
    pytest.importorskip("mpe2")
    env = make("pettingzoo:mpe2.simple_spread_v3", num_envs=4, options={"state": True})
    assert env.spec.agents == ("agent_0", "agent_1", "agent_2")
    assert env.spec.observation["state"].shape == (54,) and env.spec.observation["obs"].shape == (18,)
    env.reset()
    for t in range(26):
        result = env.step(np.zeros(12, np.int32))
        assert not result.terminated.any()
        assert result.truncated.all() == result.several.over.all() == (t == 24)  # 25 steps, none lost, none too many
    assert result.several.absent.all()
    # nobody moves: -71.8 is the mean of the sums of three agents (standard error .2 to .5 over 2000 episodes)
    idle, returns = np.zeros(12, np.int32), []
    for _ in range(40):
        returns += list(sum(env.step(idle).reward for _ in range(25)).reshape(4, 3).sum(-1))
        env.step(idle)
    assert abs(np.mean(returns) + 71.8) < 4 * np.std(returns) / np.sqrt(len(returns))


def test_tictactoe_of_pettingzoo_is_played_in_turns():
    pytest.importorskip("pettingzoo.classic.tictactoe_v3", exc_type=ImportError)  # which asks for pygame
    env = make("pettingzoo:classic.tictactoe_v3", num_envs=3)
    assert env.spec.action == Discrete(10)
    returns = played(env, 60)
    assert len(returns) >= 12 and set(np.unique(returns)) <= {-1.0, 0.0, 1.0}
    np.testing.assert_array_equal(returns.sum(-1), 0)  # nobody moved out of turn, which pays -1 to one alone
    assert (returns[:, 0] == 1).any() and (returns[:, 0] == -1).any()
