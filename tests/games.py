"""Environments with several agents, written by hand under the contract of `types.Several`."""

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from jrl.envs.multi_agent import MultiDefinition
from jrl.types import Box, Dict, Discrete, EnvSpec, JaxEnv, MultiBinary, Several, StepResult

PAYOFF = np.array([[0.0, 1.0], [1.0, 8.0]], np.float32)  # of the second step, if the first agent took 1; else it is 7


def two_step(num_envs):
    """The two-step game of QMIX (arXiv:1803.11485, section 5), each of two agents earning half of the reward."""
    observation = Dict((("obs", Box((3,))), ("state", Box((3,)))))
    spec = EnvSpec(observation, Discrete(2), 2 * num_envs, 2, agents=("first", "second"))

    def observe(stage):
        shown = jax.nn.one_hot(stage, 3)
        return jax.tree.map(lambda x: jnp.repeat(x, 2, 0), {"obs": shown, "state": shown + 0})

    def reset(key):
        stage = jnp.zeros((num_envs,), jnp.int32)
        return stage, observe(stage)

    def step(stage, action, key):
        action = action.reshape(num_envs, 2)
        fresh, begins = stage == 3, stage == 0
        second = jnp.asarray(PAYOFF)[action[:, 0], action[:, 1]]
        reward = jnp.where(fresh | begins, 0.0, jnp.where(stage == 1, 7.0, second))
        stage = jnp.where(fresh, 0, jnp.where(begins, 1 + action[:, 0], 3))
        over = stage == 3
        both = lambda x: jnp.repeat(x, 2)
        several = Several(both(fresh), over)
        result = StepResult(observe(stage), both(reward / 2), both(over), jnp.zeros_like(both(over)), several=several)
        return stage, result

    return JaxEnv(spec, reset, step)


SCRIPT_AGENTS = ("a", "b", "c")
# rows of one game of three agents with two actions: (what they see, reward, terminated, truncated, absent, over, mask)
# b ends on the second row, c comes late; the time limit cuts a and c off on the fourth; the fifth begins a game
SCRIPT = (
    ([1, 11, 0], [1, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1], 0, [[1, 1], [0, 1], [0, 0]]),
    ([2, 12, 21], [1, 4, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1], 0, [[1, 0], [0, 0], [1, 1]]),
    ([3, 12, 22], [1, 0, 8], [0, 0, 0], [0, 0, 0], [0, 1, 0], 0, [[1, 1], [0, 0], [1, 0]]),
    ([4, 12, 23], [1, 0, 8], [0, 0, 0], [1, 0, 1], [0, 1, 0], 1, [[0, 0], [0, 0], [0, 0]]),
    ([5, 15, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1], 0, [[1, 1], [1, 1], [0, 0]]),
)


class Script:
    """A host environment of two games side by side that plays SCRIPT, the second ten times its observations."""

    def __init__(self):
        observation = Dict((("action_mask", MultiBinary((2,))), ("obs", Box((1,))), ("state", Box((2,)))))
        self.spec = EnvSpec(observation, Discrete(2), 6, agents=SCRIPT_AGENTS)
        self.actions = []

    def _obs(self, seen, mask):
        seen = np.array([*seen, *(10 * x for x in seen)], np.float32)[:, None]
        state = np.repeat(np.array([[1, 2], [3, 4]], np.float32), 3, 0)
        return {"obs": seen, "state": state, "action_mask": np.array([*mask, *mask], np.int8)}

    def reset(self):
        return self._obs([0, 10, 0], [[1, 1], [1, 1], [0, 0]])

    def step(self, action):
        seen, reward, terminated, truncated, absent, over, mask = SCRIPT[len(self.actions)]
        self.actions.append(np.asarray(action))
        twice = lambda x, dtype: np.array([*x, *x], dtype)
        later = SCRIPT[min(len(self.actions), len(SCRIPT) - 1)]  # the last row is the first of a game
        there = np.ones(3, bool) if later is SCRIPT[-1] and not over else ~np.array(later[4], bool)
        several = Several(twice(absent, bool), np.array([over, over], bool), twice(there, bool))
        flags = (twice(x, bool) for x in (terminated, truncated))
        return StepResult(self._obs(seen, mask), twice(reward, np.float32), *flags, several=several)

    def close(self):
        pass


def numbered() -> MultiDefinition:
    """Games of 2 to 4 steps whose agents see the environment's number, the step and the sum of their actions."""

    def reset(draws):
        zeros = jnp.zeros(draws.shape[1], jnp.int32)
        return {"step": zeros, "length": 2 + (draws[0] * 3).astype(jnp.int32), "done": jnp.zeros((draws.shape[1], 2))}

    def step(state, action, draws):
        state = {**state, "step": state["step"] + 1, "done": state["done"] + action}
        end = jnp.broadcast_to((state["step"] >= state["length"])[:, None], action.shape)
        return state, 1.0 + action.astype(jnp.float32), end

    def observe(state):
        of_both = lambda x: jnp.broadcast_to(x.astype(jnp.float32)[:, None], state["done"].shape)
        number = jnp.arange(state["step"].shape[0])
        return jnp.stack([of_both(number), of_both(state["step"]), state["done"]], -1)

    return MultiDefinition(("left", "right"), Box((3,)), Discrete(2), None, 1, reset, step, observe)


class Numbered:
    """As `numbered`, one game on the host with the members of RLlib's MultiAgentEnv; its number is always 0."""

    def __init__(self, config=None):
        self.possible_agents = ["left", "right"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Box(0.0, 9.0, (3,), np.float32))
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(2))

    def _see(self):
        return {agent: np.array([0, self.t, self.done[agent]], np.float32) for agent in self.possible_agents}

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.draws = np.random.default_rng(seed)
        self.t, self.length, self.done = 0, int(self.draws.integers(2, 5)), dict.fromkeys(self.possible_agents, 0)
        return self._see(), {}

    def step(self, actions):
        self.t += 1
        self.done = {agent: self.done[agent] + int(actions[agent]) for agent in self.possible_agents}
        rewards = {agent: 1.0 + int(actions[agent]) for agent in self.possible_agents}
        return self._see(), rewards, {"__all__": self.t >= self.length}, {"__all__": False}, {}

    def close(self):
        pass
