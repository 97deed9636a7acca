"""Small environments of several agents, with the members of PettingZoo's and RLlib's interfaces but not their bases."""

from typing import ClassVar

import numpy as np
from gymnasium import spaces

SEEN = spaces.Box(-100.0, 100.0, (2,), np.float32)


class Walkers:
    """Agent w_k pays k + 1 a step and ends after `ends[k]` steps; w_2 comes at step `born`. What they see is (k, t)."""

    possible_agents: ClassVar = ["w_0", "w_1", "w_2"]
    metadata: ClassVar = {"name": "walkers"}

    def __init__(self, ends=(2, 4, 5), born=0, truncates=()):
        self._ends, self._born, self._truncates = ends, born, truncates
        self._spaces = {agent: (SEEN, spaces.Discrete(3)) for agent in self.possible_agents}
        self.seeds, self.given = [], []

    def observation_space(self, agent):
        return self._spaces[agent][0]

    def action_space(self, agent):
        return self._spaces[agent][1]

    def _see(self, agent):
        return np.array([self.possible_agents.index(agent), self.t], np.float32)

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.t = 0
        self.agents = [agent for agent in self.possible_agents if agent != "w_2" or not self._born]
        return {agent: self._see(agent) for agent in self.agents}, {agent: {"t": 0} for agent in self.agents}

    def step(self, actions):
        self.given.append(dict(actions))
        self.t += 1
        acted = list(self.agents)
        over = {agent: self.t >= self._ends[self.possible_agents.index(agent)] for agent in acted}
        self.agents = [agent for agent in acted if not over[agent]]
        if self._born and self.t == self._born:
            self.agents.append("w_2")
        rewards = {agent: self.possible_agents.index(agent) + 1.0 for agent in acted}
        terminations = {agent: over[agent] and agent not in self._truncates for agent in acted}
        truncations = {agent: over[agent] and agent in self._truncates for agent in acted}
        obs = {agent: self._see(agent) for agent in dict.fromkeys([*acted, *self.agents])}
        return obs, rewards, terminations, truncations, {agent: {"t": self.t} for agent in obs}

    def state(self):
        return np.array([self.t, len(self.agents), 7.0], np.float32)

    def close(self):
        pass


class Nim:
    """Agents take 1 to 3 of seven matches in turn; who takes the last wins 1 off the other. PettingZoo's AECEnv."""

    possible_agents: ClassVar = ["p_0", "p_1"]
    metadata: ClassVar = {"name": "nim", "is_parallelizable": False}

    def __init__(self, masked=True, actions=None):
        self._masked = masked
        plain = spaces.Box(0.0, 7.0, (1,), np.float32)
        self._seen = spaces.Dict({"left": plain, "action_mask": spaces.MultiBinary(3)}) if masked else plain
        self._actions = spaces.Discrete(3) if actions is None else actions

    def observation_space(self, agent):
        return self._seen

    def action_space(self, agent):
        return self._actions

    def reset(self, seed=None, options=None):
        self.left, self.agents, self.agent_selection = 7, list(self.possible_agents), "p_0"
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def observe(self, agent):
        left = np.array([self.left], np.float32)
        allowed = np.array([n <= self.left and agent == self.agent_selection for n in (1, 2, 3)], np.int8)
        return {"left": left, "action_mask": allowed} if self._masked else left

    def last(self, observe=True):
        agent = self.agent_selection
        flags = self.terminations[agent], self.truncations[agent]
        seen = self.observe(agent) if observe else None
        return seen, self._cumulative_rewards[agent], *flags, self.infos[agent]

    @property
    def num_agents(self):
        return len(self.agents)

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            assert action is None
            self._remove(agent)
            self.rewards = dict.fromkeys(self.agents, 0.0)
            self.agent_selection = self.agents[0] if self.agents else None
            return
        other = "p_1" if agent == "p_0" else "p_0"
        self._cumulative_rewards[agent] = 0.0
        self.left -= min(int(action) + 1, self.left)
        self.rewards = {agent: 1.0, other: -1.0} if self.left == 0 else dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, self.left == 0)
        for name, reward in self.rewards.items():
            self._cumulative_rewards[name] += reward
        self.agent_selection = other

    def _remove(self, agent):
        for part in (self.rewards, self._cumulative_rewards, self.terminations, self.truncations, self.infos):
            del part[agent]
        self.agents.remove(agent)

    def close(self):
        pass


class FaultyNim(Nim):
    """Nim with one fault, which `fault` names."""

    def __init__(self, fault):
        super().__init__()
        self._fault = fault

    def step(self, action):
        super().step(action)
        match self._fault:
            case "vanishes" if 0 < self.left <= 3 and len(self.agents) == 2:
                self._remove(next(agent for agent in self.agents if agent != self.agent_selection))
            case "flag" if self.agents:
                self.truncations[self.agents[0]] = None
            case "unknown":
                self.rewards["p_9"] = 0.0
            case "unpaid" if self.agents:
                del self.rewards["p_1"]
            case "unseen":
                self.observe = lambda agent: None


class Pour(Nim):
    """Nim whose agents say by a number from 0 to 1, the first of two, how many they take; `taken` keeps that."""

    def __init__(self):
        super().__init__(masked=False, actions=spaces.Box(0.0, 1.0, (2,), np.float32))
        self.taken: list = []

    def step(self, action):
        if action is not None:
            self.taken.append((self.agent_selection, action))
        super().step(None if action is None else min(int(action[0] * 3), 2))


class Undying(Nim):
    """Nim whose agents stay when they have ended."""

    def step(self, action):
        if not self.terminations[self.agent_selection]:
            super().step(action)


class Turns:
    """RLlib's interface: a and b act in turn for `length` steps; each pays 1 to who acts and 10 to the other."""

    def __init__(self, config=None, length=4):
        self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, SEEN)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(2))
        self._length = (config or {}).get("length", length)

    def _see(self):
        return {self.possible_agents[self.t % 2]: np.array([self.t % 2, self.t], np.float32)}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see(), {}

    def step(self, actions):
        (actor,) = actions
        self.t += 1
        rewards = {agent: 1.0 if agent == actor else 10.0 for agent in self.possible_agents}
        over = {"__all__": self.t >= self._length}
        return self._see(), rewards, over, {"__all__": False}, {}

    def close(self):
        pass


class FaultyTurns(Turns):
    """Turns with one fault, which `fault` names."""

    turn_based = True

    def __init__(self, config=None):
        super().__init__(length=4)
        self._fault = (config or {}).get("fault", "")

    def step(self, actions):
        obs, rewards, over, cut, infos = super().step(actions)
        match self._fault:
            case "unknown":
                rewards["c"] = 1.0
            case "unseen":
                obs = dict.fromkeys(obs)
            case "endless":
                del over["__all__"]
            case "infos":
                infos = {"c": {}}
        return obs, rewards, over, cut, infos


class PatientTurns(Turns):
    """Turns whose agents say that they wait."""

    turn_based = True


class Faulty(Walkers):
    """Walkers with one fault, which `fault` names."""

    def __init__(self, fault):
        super().__init__()
        self._fault = fault

    def reset(self, seed=None, options=None):
        if self._fault == "unseeded":
            self._noise = np.random.default_rng()
        obs, infos = super().reset(seed)
        if self._fault == "pair":
            return obs
        if self._fault == "nobody":
            self.agents = []
        return obs, infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = super().step(actions)
        match self._fault:
            case "four":
                return obs, rewards, terminations, infos
            case "list":
                rewards = list(rewards.values())
            case "stranger":
                self.agents.append("w_9")
            case "no observation":
                obs.pop("w_2")
            case "no reward":
                rewards.pop("w_1", None)
            case "nothing":
                obs["w_2"] = None
            case "unknown":
                rewards["w_9"] = 1.0
            case "no flag":
                terminations.pop("w_2")
            case "shape":
                obs["w_1"] = np.zeros(3, np.float32)
            case "flag":
                terminations["w_2"] = 2
            case "forms":
                forms = (int, float, np.asarray)
                terminations = {agent: form(flag) for (agent, flag), form in zip(terminations.items(), forms)}
            case "reward":
                rewards["w_2"] = "much"
            case "stays":
                self.agents = list(dict.fromkeys([*self.agents, *actions]))
            case "leaves":
                self.agents = [agent for agent in self.agents if agent != "w_1"]
                rewards.pop("w_1", None) if "w_1" not in actions else None
            case "back":
                self.agents += ["w_0"] if self.t == 4 else []
                obs |= {"w_0": self._see("w_0")} if self.t == 4 else {}
            case "unseeded":
                obs["w_2"] = self._noise.uniform(size=2).astype(np.float32)
        return obs, rewards, terminations, truncations, infos


class FaultyPair(Faulty):
    """Two agents, as many as a reset returns parts, without a method close."""

    possible_agents: ClassVar = ["w_0", "w_1"]
    close = None


class Unequal(Walkers):
    """Walkers of whom w_1 sees a dict and acts in a Box."""

    def __init__(self, **how):
        super().__init__(**how)
        own = spaces.Dict({"k": spaces.Discrete(3), "t": spaces.Box(-100.0, 100.0, (1, 2), np.float32)})
        self._spaces["w_1"] = own, spaces.Box(-2.0, 4.0, (2,), np.float32)

    def _see(self, agent):
        return {"k": 1, "t": np.full((1, 2), self.t, np.float32)} if agent == "w_1" else super()._see(agent)


class UnequalDicts(Unequal):
    """As RLlib's interface has them: dicts of spaces; each agent that is there acts."""

    observation_space = action_space = None

    def __init__(self, config=None):
        super().__init__()
        self.observation_spaces, self.action_spaces = ({a: s[i] for a, s in self._spaces.items()} for i in range(2))

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = super().step(actions)
        return obs, rewards, {**terminations, "__all__": not self.agents}, {**truncations, "__all__": False}, infos


class Duel(Nim):
    """Nim of whom p_1 takes one or two matches at most; PettingZoo's AECEnv."""

    def __init__(self):
        super().__init__()
        self._of_p_1 = spaces.Dict({**self._seen.spaces, "action_mask": spaces.MultiBinary(2)}), spaces.Discrete(2)

    def observation_space(self, agent):
        return self._of_p_1[0] if agent == "p_1" else self._seen

    def action_space(self, agent):
        return self._of_p_1[1] if agent == "p_1" else self._actions

    def observe(self, agent):
        seen = super().observe(agent)
        return {**seen, "action_mask": seen["action_mask"][:2]} if agent == "p_1" else seen


class MaskedByInfos(Walkers):
    """Walkers whose infos say which actions can be taken: k is not for w_k."""

    def _allowed(self, infos):
        return {a: {"action_mask": np.arange(3) != self.possible_agents.index(a)} for a in infos}

    def reset(self, seed=None, options=None):
        obs, infos = super().reset(seed)
        return obs, self._allowed(infos)

    def step(self, actions):
        *rest, infos = super().step(actions)
        return *rest, self._allowed(infos)


class Breaks(Walkers):
    """Walkers that raise at the third step of the first game."""

    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        self._breaks = type(self).made == 1

    def step(self, actions):
        if self._breaks and self.t == 2:
            raise RuntimeError("it broke")
        return super().step(actions)


def make_walkers(ends=(2, 4, 5)):
    """A function that does not say what it makes."""
    return Walkers(ends=tuple(ends))
