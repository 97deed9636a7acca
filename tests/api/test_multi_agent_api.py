"""Several agents by the names that RLlib's users know."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from jrl import load
from jrl.api import AlgorithmConfig, PPOConfig
from jrl.config import multi_agent
from jrl.envs import agent_options
from jrl.errors import InputError
from jrl.export.__main__ import main as export
from jrl.migrate import migrate
from jrl.record import main as record

ENV = "MultiAgentCartPole-v1"  # agent_0, agent_1
AGENTS = ("agent_0", "agent_1")


def by_number(agent_id, episode, worker, **kwargs):
    return f"p{agent_id[-1]}"


def spec(**config):
    """As ray.rllib.policy.policy.PolicySpec is."""
    return SimpleNamespace(policy_class=None, observation_space=None, action_space=None, config=config)


def config(**keywords):
    return PPOConfig().environment(ENV).multi_agent(**keywords)


def found(made):
    """The section with its agents filled in."""
    return multi_agent.with_agents(made.to_run_config(), AGENTS).multi_agent


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    "given",
    [
        {"p0": None, "p1": {"lr": 0.1}},
        {"p0": {}, "p1": spec(lr=0.1)},
        {"p0": (None, None, None, {}), "p1": (None, None, None, {"lr": 0.1})},
        {"p0": spec(), "p1": {"algo": {"lr": 0.1}}},
        {"p0": spec(), "p1": spec(**PPOConfig.overrides(lr=0.1))},
        {"p0": None, "p1": PPOConfig().training(lr=0.1)},
    ],
)
def test_policies_in_all_spellings(given):
    assert config(policies=given).to_dict()["multi_agent"]["policies"] == {"p0": {}, "p1": {"algo": {"lr": 0.1}}}


def test_a_set_and_a_list_of_ids_and_the_later_of_two_calls():
    made = config(policies={"b", "a"})
    assert made.policies == {"a": {}, "b": {}}
    assert made.multi_agent(policies=["c"]).policies == {"c": {}}


def test_a_team_is_named_where_policies_are():
    assert config(group={"team": list(AGENTS)}).to_dict()["multi_agent"]["group"] == {"team": list(AGENTS)}
    with pytest.raises(InputError, match=r"has no argument grop: did you mean group\?"):
        config(grop={"team": list(AGENTS)})


def test_functions_become_tables_once_the_agents_are_known():
    made = config(
        policies={"p0", "p1"},
        policy_mapping_fn=by_number,
        policies_to_train=lambda pid, batch=None: pid == "p1",
        count_steps_by="agent_steps",
    )
    assert found(made).mapping == {"agent_0": "p0", "agent_1": "p1"}
    assert found(made).policies_to_train == ("p1",)
    assert made.to_run_config().rollout.count_steps_by == "agent_steps"
    assert made.is_multi_agent and not PPOConfig().environment("CartPole-v1").is_multi_agent
    assert PPOConfig().environment(ENV).is_multi_agent


@pytest.mark.parametrize(
    "mapping", [lambda agent_id: "p0", lambda agent_id, *args, **kwargs: "p0", lambda agent_id, *, episode: "p0"]
)
def test_mappings_take_what_they_ask_for(mapping):
    assert set(found(config(policy_mapping_fn=mapping)).mapping.values()) == {"p0"}


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        (
            lambda agent_id, episode: f"p{episode.env}",
            "got a function that raises AttributeError: .*name each agent's policy",
        ),
        (lambda agent_id, episode: 3, "expected the name of a policy, got int for agent_0"),
        ("by_agnt", "did you mean by_agent"),
    ],
)
def test_mappings_that_say_nothing_of_use(mapping, says):
    with pytest.raises(InputError, match=says):
        found(config(policy_mapping_fn=mapping))


@pytest.mark.parametrize(
    "mapping",
    [lambda agent_id, episode: f"p{episode.episode_id % 2}", lambda agent_id, episode: random.choice(["p0", "p1"])],
)
def test_mappings_that_depend_on_the_episode_are_asked_for_each(mapping):
    random.seed(1)
    made = found(config(policies={"p0", "p1"}, policy_mapping_fn=mapping))
    assert made.mapping.startswith("local:")


def test_a_function_of_policies_to_train_that_raises():
    with pytest.raises(InputError, match="expected a function of a policy's name, got one that raises TypeError"):
        found(config(policies={"p0"}, policies_to_train=lambda pid, batch: batch["p0"]))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"policies": {"a": SimpleNamespace(policy_class=dict, config={})}},
            "policies.a: expected a policy class of RLlib",
        ),
        ({"policies": {"a": ("ray.rllib.examples.RandomPolicy", None, None, {})}}, "got 'ray.rllib.examples.RandomPol"),
        ({"policies": 5}, "policies: expected a list of names"),
        ({"policies": {"a": (None, None)}}, "policies.a: expected .policy_class"),
        ({"policies": {"a": {"clip_parm": 1}}}, "did you mean clip_param"),
        ({"polices": {"a"}}, "did you mean policies"),
    ],
)
def test_what_cannot_be_had_is_told_where_it_is_given(given, says):
    with pytest.raises(InputError, match=says):
        config(**given)


class DQNTorchPolicy:
    """As ray.rllib.algorithms.dqn.dqn_torch_policy has it."""

    __module__ = "ray.rllib.algorithms.dqn.dqn_torch_policy"


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (DQNTorchPolicy, "dqn"),
        (str(DQNTorchPolicy), "dqn"),
        ("ray.rllib.algorithms.sac.sac_torch_policy.SACTorchPolicy", "sac"),
        ("APPOTF2Policy", "appo"),
        ("ray.rllib.algorithms.impala.impala_tf_policy.ImpalaTF2Policy", "impala"),
        ("ray.rllib.algorithms.ppo.PPOTF1Policy_eager", None),  # the job's own
    ],
)
def test_a_class_of_rllibs_names_the_algorithm_of_its_policy(cls, name):
    given = {"p0": (cls, None, None, {"lr": 0.1}), "p1": (None, None, None, {})}
    own = {"algo": {"lr": 0.1} if name is None else {"name": name, "lr": 0.1}}
    assert config(policies=given).to_dict()["multi_agent"]["policies"] == {"p0": own, "p1": {}}
    made = migrate({"env": ENV, "policies": given}, algo="PPO")
    assert made.config["multi_agent"]["policies"] == {"p0": own, "p1": {}}
    shared = AlgorithmConfig().multi_agent(policies=given)
    made = PPOConfig().environment(ENV).update_from_dict(shared)
    assert made.to_dict()["multi_agent"]["policies"] == {"p0": own, "p1": {}}


def test_keys_of_a_policy_are_those_of_the_algorithm_that_its_class_names():
    made = migrate({"env": ENV, "policies": {"a": (DQNTorchPolicy, None, None, {"n_step": 3}), "b": None}}, algo="PPO")
    assert made.config["multi_agent"]["policies"] == {
        "a": {"algo": {"name": "dqn"}, "replay": {"n_step": 3}},
        "b": {},
    }


def test_names_that_ask_for_what_happens_by_itself():
    overrides = {"p1": PPOConfig.overrides(lr=0.1)}
    made = config(
        policies={"p0", "p1"},
        policy_map_capacity=4,
        policy_states_are_swappable=True,
        replay_mode="independent",
        algorithm_config_overrides_per_module=overrides,
    )
    assert made.to_run_config().multi_agent.policies == {"p0": {}, "p1": {"algo": {"lr": 0.1}}}
    said = "\n".join(made.translations())
    assert "policy_map_capacity: dropped: policies that differ only in their weights are stacked" in said
    assert "replay_mode: dropped: independent" in said


def rllibs(agent_obs, worker, base_env, policies, episode, **kwargs):
    return agent_obs


def test_an_observation_fn_of_rllibs_is_told_how_ours_is():
    from jrl import envs

    env = envs.make(ENV, num_envs=1)
    with pytest.raises(InputError, match=r"expected a pure function of one argument.*got parameters agent_obs, worker"):
        agent_options.apply_observation_fn(env.spec, path=f"{__name__}:rllibs")


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def algo(tmp_path_factory):
    made = config(policies={"p0": {}, "p1": {}}, policy_mapping_fn=by_number)
    made.env_runners(num_envs=4, rollout_fragment_length=32).training(num_epochs=1, num_minibatches=1)
    made.training(model={"hidden": [8]}).debugging(log=[], out=str(tmp_path_factory.mktemp("run") / "out"))
    with made.build() as built:
        built.first = built.train()
        yield built


def test_results_have_rllibs_names(algo):
    first = algo.first
    assert set(first["policy_reward_mean"]) == set(first["learners"]) - {"__all_modules__"} == {"p0", "p1"}
    assert set(first["env_runners"]["agent_episode_returns_mean"]) == set(AGENTS)
    for name in ("p0", "p1"):
        low, mean, high = (first[f"policy_reward_{of}"][name] for of in ("min", "mean", "max"))
        assert low <= mean <= high and low < high
        assert np.isfinite(first["info"]["learner"][name]["loss/policy"])
    assert first["env_runners"]["agent_episode_returns_mean"]["agent_0"] == first["policy_reward_mean"]["p0"]
    steps = first["num_env_steps_sampled_lifetime"]
    assert steps < first["agent_timesteps_total"] == first["num_agent_steps_sampled"] <= 2 * steps
    total = algo.train()["agent_timesteps_total"]
    assert total > first["agent_timesteps_total"]


def test_weights_by_policy(algo):
    weights = algo.get_weights()
    assert set(weights) == {"p0", "p1"} and set(algo.get_weights(["p1"])) == {"p1"}
    algo.set_weights({"p1": weights["p0"]})
    after = algo.get_weights()
    same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))
    assert same(after["p1"], weights["p0"]) and same(after["p0"], weights["p0"])
    assert not same(after["p1"], weights["p1"])
    algo.set_weights({"p1": weights["p1"]})
    with pytest.raises(ValueError, match=r"expected {'p0': ..., 'p1': ...}, got default_policy"):
        algo.set_weights({"default_policy": weights["p0"]})
    with pytest.raises(KeyError, match="policy_id: expected p0 or p1"):
        algo.get_weights(["p2"])


def leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_acting_by_policy(algo):
    rows = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    each = {name: algo.compute_actions(rows, policy_id=name, explore=False) for name in ("p0", "p1")}
    single = [algo.compute_single_action(row, policy_id="p1", explore=False) for row in rows[:4]]
    assert single == each["p1"][:4].tolist()
    values = [algo.get_policy(name).value_function(rows) for name in ("p0", "p1")]
    assert not np.allclose(*values)
    for ask in (algo.get_policy, lambda: algo.compute_single_action(rows[0])):
        with pytest.raises(KeyError, match="policy_id: expected p0 or p1, got 'default_policy'"):
            ask()
    worker = algo.workers.local_worker()
    assert worker.foreach_policy(lambda policy, policy_id: policy_id) == ["p0", "p1"]
    assert set(worker.get_filters()) == {"p0", "p1"}
    assert worker.get_metrics()["num_episodes"] > 0


@pytest.mark.slow
def test_by_hand_all_policies_learn_together_or_not_at_all(algo):
    before, steps = algo.get_weights(), algo.session.clock_now()
    rollout, report = algo.session.manual_steps.sample()
    algo.learn_on_batch(rollout)
    # as an iteration counts them
    assert algo.session.clock_now() == steps.after(report) and report.steps.sum() < report.agents.steps.sum()
    after = algo.get_weights()
    for name in ("p0", "p1"):
        assert not np.array_equal(leaves(before[name]["params"])[0], leaves(after[name]["params"])[0])
    rollout = algo.workers.local_worker().sample()
    for ask in (algo.sample_replay, lambda: algo.compute_gradients(rollout), lambda: algo.apply_gradients({})):
        with pytest.raises(InputError, match=r"with one policy, got p0, p1: use learn_on_batch"):
            ask()
    with pytest.raises(InputError, match="no agent follows p2"):
        algo.add_policy("p2")


def test_a_policy_leaves_by_its_name(algo, tmp_path, capsys):
    saved = algo.save(tmp_path / "saved")
    rows = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
    algo.export_policy_model(tmp_path / "exported", "p1")
    assert (tmp_path / "exported" / "policy.json").exists()
    acted = load(saved, policy="p1").act(rows)
    assert acted.tolist() == algo.compute_actions(rows, policy_id="p1", explore=False).tolist()
    assert export([str(saved), "--out", str(tmp_path / "p0"), "--policy", "p0"]) == 0
    capsys.readouterr()
    assert export([str(saved), "--out", str(tmp_path / "none")]) == 2
    assert "expected one of p0, p1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_video_of_a_saved_algorithm(algo, tmp_path, capsys):
    saved = algo.save(tmp_path / "saved")
    assert record([str(saved), "--out", str(tmp_path / "video.gif")]) == 0
    assert "drawn by its own picture" in capsys.readouterr().out


# ---------------------------------------------------------------- migration


def test_rllibs_several_agents_are_migrated():
    given = {
        "policies": {"a": [None, None, None, {"lr": 0.1, "explore": False}], "b": None},
        "policy_mapping_fn": "my.mod.fn",
        "policies_to_train": ["a"],
        "policy_map_cache": "/tmp",
        "replay_mode": "independent",
        "count_steps_by": "agent_steps",
    }
    made = migrate({"env": ENV, "multiagent": given}, algo="PPO")
    own = {"a": {"algo": {"lr": 0.1}}, "b": {}}
    assert made.config["multi_agent"] == {"policies": own, "mapping": "my.mod:fn", "policies_to_train": ["a"]}
    assert made.config["rollout"] == {"count_steps_by": "agent_steps"}
    line = "multiagent.policies.a: dropped: rollout: settings of the run; a policy can only override algo"
    assert line in str(made.lines)


def test_networks_of_rllibs_modules_are_those_of_policies():
    module = SimpleNamespace(module_class=None, model_config={"fcnet_hiddens": [8]})
    several = SimpleNamespace(rl_module_specs={"a": module, "b": SimpleNamespace(module_class=None, model_config=None)})
    made = migrate({"env": ENV, "rl_module_spec": several}, algo="PPO")
    assert made.config["multi_agent"]["policies"] == {"a": {"network": {"hidden": [8]}}, "b": {}}
    module.module_class = "ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module.DefaultPPOTorchRLModule"
    assert migrate({"env": ENV, "rl_module_spec": several}, algo="PPO").config == made.config
    module.module_class = "ray.rllib.algorithms.dreamerv3.torch.DreamerV3TorchRLModule"
    with pytest.raises(InputError, match="rl_module_spec: a class for torch"):
        migrate({"env": ENV, "rl_module_spec": several}, algo="PPO")
    module.module_class = dict
    with pytest.raises(InputError, match="rl_module_spec: a class for torch"):
        migrate({"env": ENV, "rl_module_spec": several}, algo="PPO")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policies": ["a", "b"], "policy_mapping_fn": "<function <lambda>>"}, "is not the path of a function"),
        ({"observation_fn": "my.mod.fn"}, "write a pure function"),
        ({"policies": ["a", "b"], "replay_mode": "in_step"}, "expected independent or lockstep"),
        ({"policies": {"a": {"algo": {"name": "dqm"}}}}, r"policies\.a: algo\.name: unknown algorithm 'dqm'"),
    ],
)
def test_what_no_migration_can_have_is_refused_by_name(given, says):
    with pytest.raises(InputError, match=says):
        migrate({"env": ENV, "multiagent": given}, algo="PPO")
