"""Features of several agents, for scripts/rllib_feature_list.py: what tries them, and their rows."""

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from rllib_features import DIFFERS, WORKS, Feature, equal, example, has, puts, refuses, takes, value_at

GAME, AGENTS = "MultiAgentCartPole-v1", ("agent_0", "agent_1")
SEEN = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Pair:
    """RLlib's MultiAgentEnv, without its base class: `left` and `right` are paid for equal actions, eight times."""

    possible_agents: ClassVar = ["left", "right"]
    observation_spaces: ClassVar = dict.fromkeys(possible_agents, SEEN)
    action_spaces: ClassVar = dict.fromkeys(possible_agents, spaces.Discrete(2))

    def _of_each(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, value)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.t = 0
        return self._of_each(np.zeros(2, np.float32)), {}

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        self.t += 1
        over = {"__all__": self.t == 8}
        reward = float(actions["left"] == actions["right"])
        return self._of_each(np.zeros(2, np.float32)), self._of_each(reward), over, {"__all__": False}, {}


class Parallel(Pair):
    """The same as PettingZoo's ParallelEnv, without its base class either."""

    metadata: ClassVar = {"name": "pair"}

    def observation_space(self, agent: str) -> spaces.Space:
        return SEEN

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.agents = list(self.possible_agents)
        return super().reset(seed=seed)[0], self._of_each({})

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        obs, reward, over, _, _ = super().step(actions)
        self.agents = [] if over["__all__"] else self.agents
        return obs, reward, self._of_each(over["__all__"]), self._of_each(False), self._of_each({})


def by_number(agent_id: str, episode: Any = None, **kwargs: Any) -> str:
    return f"p{agent_id[-1]}"


def doubled(observations: dict[str, Any]) -> dict[str, Any]:
    """An observation_fn: each agent sees its own observation twice."""
    import jax.numpy as jnp

    return {agent: jnp.concatenate([x, x], -1) for agent, x in observations.items()}


def small(env: Any = GAME, algo: str = "PPO", training: dict[str, Any] | None = None, **several: Any) -> Any:
    """A config of several agents that trains in a moment."""
    from jrl import api

    made = getattr(api, f"{algo}Config")().environment(env).debugging(seed=0, log=[])
    made.env_runners(num_envs=4, rollout_fragment_length=16).training(model={"hidden": [8]}, **(training or {}))
    return made.reporting(min_sample_timesteps_per_iteration=256).multi_agent(**several)


def once(made: Any) -> dict[str, Any]:
    """The result of one iteration."""
    with made.build() as algo:
        return algo.train()


def own() -> Any:
    """A config in which each agent follows a policy of its own."""
    return small(policies={"p0", "p1"}, policy_mapping_fn=by_number)


# ---------------------------------------------------------------- trials


def settings_of_their_own() -> None:
    """Two policies, of which one has another learning rate and the other another algorithm."""
    made = small(policies={"p0": {"lr": 0.1}, "p1": {"algo": {"name": "dqn"}}}, policy_mapping_fn=by_number)
    result = once(made)
    assert {"p0", "p1"} <= set(result["learners"]), set(result["learners"])
    assert np.isfinite(list(result["policy_reward_mean"].values())).all()


def spec_and_class() -> None:
    from types import SimpleNamespace

    spec = SimpleNamespace(policy_class=None, observation_space=None, action_space=None, config={"lr": 0.1})
    equal(value_at(small(policies={"a": spec}), "multi_agent.policies"), {"a": {"algo": {"lr": 0.1}}})
    equal(value_at(small(policies=["a", "b"]), "multi_agent.policies"), {"a": {}, "b": {}})
    equal(value_at(small(policies={"a": (None, None, None, {"lr": 0.1})}), "multi_agent.policies.a.algo.lr"), 0.1)
    refuses("multi_agent", policies={"a": SimpleNamespace(policy_class=dict, config={})})()


def mapped() -> None:
    """Functions and tables give each agent its policy, one that depends on the episode for each game."""
    by_turns = lambda agent, episode: f"p{(episode.id_ + int(agent[-1])) % 2}"
    for mapping in (by_number, {"agent_0": "p0", ".*": "p1"}, by_turns):
        with small(policies={"p0", "p1"}, policy_mapping_fn=mapping).build() as algo:
            assert algo.workers.local_worker().foreach_policy(lambda policy, name: name) == ["p0", "p1"]
            equal(set(algo.train()["policy_reward_mean"]), {"p0", "p1"})


def come_and_gone() -> None:
    """A policy is added with another's weights and learns, and another is removed."""
    made = small(policies=["p0", "p1"], policy_mapping_fn=by_number, policies_to_train=["p0"])
    with made.build() as algo:
        algo.train()
        state = algo.get_policy("p0").get_state()
        others = lambda agent, episode, **kwargs: "p0" if agent == "agent_0" else "p2"
        algo.add_policy("p2", policy_state=state, policy_mapping_fn=others, policies_to_train=["p2"])
        algo.remove_policy("p1")
        equal(set(algo.policy_map), {"p0", "p2"})
        equal(set(algo.train()["learners"]) - {"__all_modules__"}, {"p2"})


def frozen() -> None:
    """What does not learn stays bit for bit; the other changes."""
    import jax

    with own().multi_agent(policies_to_train=["p1"]).build() as algo:
        before = algo.get_weights()
        algo.train()
        after = algo.get_weights()
    same = {
        name: all(map(np.array_equal, *(jax.tree.leaves(weights[name]["params"]) for weights in (before, after))))
        for name in ("p0", "p1")
    }
    equal(same, {"p0": True, "p1": False})


def counted() -> None:
    """A budget in steps of agents is met after fewer of them than one in steps of games."""
    taken = {}
    for unit in ("env_steps", "agent_steps"):
        with own().multi_agent(count_steps_by=unit).stop(env_steps=1_000).build() as algo:
            while not (result := algo.train())["done"]:
                pass
        taken[unit] = result["agent_timesteps_total"]
    assert 1_000 <= taken["agent_steps"] < 1_300 < taken["env_steps"] <= 2_600, taken


def seen() -> None:
    """What an observation_fn returns is what policies see."""
    with small(observation_fn=doubled).build() as algo:
        algo.train()
        equal(algo.get_policy().observation_space.shape, [8])


def grouped() -> None:
    """A team acts for its members: joint actions for PPO, one value that is a sum for VDN, QMIX's mixer."""
    group = {"team": list(AGENTS)}
    once(small("TwoStepGame-v0", group=group))
    for mixer in ("sum", "qmix"):
        made = small(
            "TwoStepGame-v0", "VDN", {"mixer": mixer, "replay_buffer_config": {"capacity": 1_000}}, group=group
        )
        once(made.multi_agent(state=True))


def of_rllibs_protocol() -> None:
    result = once(small(Pair, policy_mapping_fn="by_agent"))
    assert set(result["policy_reward_mean"]) == {"left", "right"} and 0 <= result["episode_return_mean"] <= 16


def of_pettingzoos_protocol() -> None:
    result = once(small(Parallel))
    assert 0 <= result["episode_return_mean"] <= 16 and result["episode_len_mean"] == 8


def by_id() -> None:
    """Each policy acts, has weights and a place in checkpoints by its id."""
    import jrl

    rows = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    with tempfile.TemporaryDirectory() as scratch, own().debugging(out=f"{scratch}/run").build() as algo:
        algo.train()
        each = [algo.get_policy(name).value_function(rows) for name in ("p0", "p1")]
        assert not np.allclose(*each)
        assert algo.compute_single_action(rows[0], policy_id="p1") in (0, 1)
        equal(set(algo.get_weights(["p1"])), {"p1"})
        algo.set_weights({"p0": algo.get_weights()["p1"]})
        assert np.allclose(algo.get_policy("p0").value_function(rows), each[1])
        path = algo.save(f"{scratch}/saved").checkpoint.path
        expected = algo.compute_actions(rows, policy_id="p1", explore=False)
        equal(list(jrl.load(path, policy="p1").act(rows)), list(expected))


def exported() -> None:
    with tempfile.TemporaryDirectory() as scratch, own().build() as algo:
        for name in ("p0", "p1"):
            algo.export_policy_model(f"{scratch}/{name}", policy_id=name)
            assert any(Path(scratch, name).iterdir())


def named_results() -> None:
    with own().build() as algo:
        result = algo.train()
    equal(set(result["policy_reward_mean"]), {"p0", "p1"})
    equal(set(result["env_runners"]["agent_episode_returns_mean"]), set(AGENTS))


def evaluated() -> None:
    with own().build() as algo:
        algo.train()
        equal(algo.evaluate(duration=4)["num_episodes"], 4)


def central_critic() -> None:
    """MAPPO: the critic reads the state, which the policy does not."""
    made = small("SimpleSpread-v0", state=True)
    once(made.training(model={"hidden": [8], "value_inputs": ["state"]}))


def league_of_two() -> None:
    """Copies are taken, and the league is told."""
    play = {"policy": "main", "pool": 2, "snapshot_win_rate": 0.0, "window": 8}
    made = small("TicTacToe-v0", self_play=play).env_runners(num_envs=8)
    with made.build() as algo:
        for _ in range(4):
            league = algo.train()["league"]
        assert league["copies"] >= 1 and {"win_rate", "elo", "elo_se"} <= set(league), league
        equal(algo.get_policy("main-1").action_space.n, 10)


# ---------------------------------------------------------------- the table

_QMIX = "`vdn`, with `mixer: qmix`, also `pqn`: of teams, with memory, n-step and priorities"

AGENT_FEATURES: dict[str, list[Feature]] = {
    "Multi-agent options": [
        Feature("`policies`: ids, PolicySpec, configs", WORKS,
            "the same; `DQNTorchPolicy` and its like become `algo.name`, a class of your own is not taken",
            spec_and_class),
        Feature("policies with settings and algorithms of their own, in one run", WORKS,
            "`policies={'a': {'lr': 0.1}, 'b': {'algo': {'name': 'dqn'}}}`", settings_of_their_own, True),
        Feature("`policy_mapping_fn`", WORKS, "the same, asked for each game where it depends on that; or a table",
            mapped, True),
        Feature("`policies_to_train`", WORKS, "the same: names, or a function; the others stay bit for bit",
            frozen, True),
        Feature("`policy_map_capacity`, `policy_states_are_swappable`", DIFFERS,
            "policies that are alike are stacked in one program", takes("multi_agent",
            policy_map_capacity=4, policy_states_are_swappable=True)),
        Feature("`observation_fn`", DIFFERS, "a pure function of one environment's observations", seen, True),
        Feature("`replay_mode`: independent", DIFFERS, "what happens by itself", takes("multi_agent",
            replay_mode="independent")),
        Feature("`replay_mode`: lockstep", WORKS, "the same, of uniform replays", puts("multi_agent", "replay_mode",
            "lockstep", "multi_agent.replay_mode", algo="DQN")),
        Feature("`algorithm_config_overrides_per_module`", WORKS, "the same", takes("multi_agent",
            algorithm_config_overrides_per_module={"a": {"lr": 0.1}})),
        Feature("`count_steps_by`", WORKS, "the same, of budgets and schedules, too", counted, True),
        Feature("`add_policy`, `remove_policy`, `policy_map`, `add_module`, `remove_module`", WORKS,
            "the same; the run is made anew, which takes seconds",
            come_and_gone, True),
    ],
    "Several agents": [
        Feature("`MultiAgentEnv`: dicts by agent, `__all__`", WORKS,
            "a class with its members; Ray need not be installed: [environments](environments.md#several-agents)",
            of_rllibs_protocol, True),
        Feature("`ParallelPettingZooEnv`, `PettingZooEnv`", DIFFERS,
            "`pettingzoo:MODULE`, or a class with the members of PettingZoo's, without a wrapper",
            of_pettingzoos_protocol, True),
        Feature("`make_multi_agent`: copies of an environment", DIFFERS,
            "MultiAgentCartPole-v1 and others in JAX, `options: {num_agents: n}`", takes("environment", env=GAME,
            env_config={"num_agents": 3})),
        Feature("`with_agent_groups`, grouped PPO", WORKS, "`multi_agent(group={'team': [...]})`", grouped, True),
        Feature("QMIX, VDN", WORKS, _QMIX, has("api", "VDN")),
        Feature("a centralised critic (MAPPO)", WORKS, "`model={'value_inputs': ['state']}`", central_critic, True),
        Feature("policies shared by agents, with an id of the agent", WORKS, "the default; `agent_id=True`",
            puts("multi_agent", "agent_id", True, "multi_agent.agent_id")),
        Feature("`compute_single_action(policy_id=)`, `get_policy(id)`, weights and checkpoints by id", WORKS,
            "the same; `jrl.load(path, policy='a')`", by_id, True),
        Feature("`export_policy_model(dir, policy_id)`", WORKS, "the same; `python -m jrl.export RUN --policy a`",
            exported, True),
        Feature("`policy_reward_mean`, results by agent and module", WORKS,
            "the same names; in rows `policy/NAME/return`, `agent/NAME/return`", named_results, True),
        Feature("evaluation of several agents", WORKS, "games; returns are sums over agents", evaluated, True),
        Feature("self-play by a callback (`SelfPlayCallback`)", DIFFERS,
            "`multi_agent(self_play=...)`: a pool of frozen copies, win rates and Elo with standard errors",
            league_of_two, True),
        Feature("the self-play example", WORKS, "[self_play](../examples/self_play.py)", example("self_play.py"), True),
        Feature("leagues with exploiters (AlphaStar)", WORKS, "[league](../examples/league.py)", example("league.py"),
            True),
    ],
}  # fmt: skip
