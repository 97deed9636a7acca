"""The config tree, written as calls: every key has one place, and builder and YAML convert without loss."""

import dataclasses
import inspect

import pytest

from jrl import algos, api, config, schema
from jrl.api import Algorithm, AlgorithmConfig, DQNConfig, PPOConfig, SACConfig
from jrl.api.groups import GROUPS
from jrl.errors import InputError


def test_the_builder_writes_the_tree_that_yaml_holds(tmp_path):
    made = (
        PPOConfig()
        .environment("CartPole-v1", backend="graph")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8, rollout_fragment_length=64)
        .training(lr=[[0, 1e-3], [100_000, 1e-4]], gamma=0.98, model={"hidden": [32, 32]})
        .evaluation(evaluation_interval=2, evaluation_config=PPOConfig.overrides(explore=False))
        .stop(env_steps=1000)
    )
    (tmp_path / "c.yaml").write_text(
        """
algo: {name: ppo, lr: [[0, 1e-3], [100000, 1e-4]], gamma: 0.98}
env: {id: CartPole-v1, backend: graph, num_envs: 16}
env_runners: {num: 2}
rollout: {length: 64}
network: {hidden: [32, 32]}
evaluation: {interval: 2, config: {rollout: {explore: false}}}
stop: {env_steps: 1000}
"""
    )
    assert made.to_run_config() == config.load(tmp_path / "c.yaml")


@pytest.mark.parametrize("name", algos.names())
def test_there_and_back(name, tmp_path):
    made = api.config_class(name)().environment("Pendulum-v1").training(gamma=0.9).debugging(seed=3)
    path = tmp_path / "c.yaml"
    made.to_yaml(path)
    for back in (AlgorithmConfig.from_dict(made.to_dict()), AlgorithmConfig.from_yaml(path)):
        assert type(back) is type(made)
        assert back == made and back.to_run_config() == made.to_run_config()
    assert config.from_dict(schema.read_yaml(path)) == made.to_run_config()
    assert made.copy() == made and made.copy().training(gamma=0.8) != made


@pytest.mark.parametrize("name", algos.names())
def test_every_key_of_the_tree_is_an_argument_once(name):
    """But for `stop`, which has a method of its own, and what `exploration` offers a second time."""
    made = api.config_class(name)
    found = [a.key for group, known in made._arguments.items() for a in known.values() if group != "exploration"]
    keys = [key for key in found if key is not None]
    assert len(keys) == len(set(keys))
    whole = {"network", "replay", "algo.exploration", "env.options", "evaluation.config"}
    tree = {**config.to_dict(made().environment("CartPole-v1").to_run_config())}
    tree = {k: v for k, v in schema.flatten(tree).items() if not k.startswith("stop") and v != {}}
    cover = lambda key: key in keys or any(key.startswith(w + ".") for w in whole & set(keys))
    assert [key for key in tree if not cover(key) and key not in ("algo.name", "replay")] == []


def test_arguments_come_from_the_sections():
    fields = {f.name: f for f in dataclasses.fields(algos.get_config_class("ppo"))}
    signature = inspect.signature(PPOConfig.training)
    assert signature.parameters["lr"].default == fields["lr"].default
    assert signature.parameters["clip_eps"].kind is inspect.Parameter.KEYWORD_ONLY
    text = inspect.getdoc(PPOConfig.training)
    for name, doc in schema.docs(algos.get_config_class("ppo")).items():
        if name != "exploration":
            assert f"{name}: {doc}" in text
    assert "num_atoms" in inspect.signature(DQNConfig.training).parameters
    assert "num_atoms" not in signature.parameters
    assert set(inspect.signature(PPOConfig.evaluation).parameters) == {"self", *GROUPS["evaluation"]}


def test_what_is_derived_follows_the_other_keys_whatever_the_order():
    made = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=4)
    assert made.to_run_config().env.num_envs == 4
    made.env_runners(num_env_runners=3)
    assert made.to_run_config().env.num_envs == 12
    made.training(train_batch_size=12 * 50, minibatch_size=100)
    cfg = made.to_run_config()
    assert (cfg.rollout.length, cfg.algo.num_minibatches) == (50, 6)
    assert (
        made.env_runners(num_envs=8, num_env_runners=0).training(train_batch_size=400).to_run_config().env.num_envs == 8
    )
    assert DQNConfig().environment("CartPole-v1").training(train_batch_size=32).to_run_config().replay.batch_size == 32
    with pytest.raises(InputError, match="train_batch_size 401 is not divisible by 8 environments: 400 or 408"):
        made.training(train_batch_size=401).to_run_config()
    with pytest.raises(InputError, match="minibatch_size 99 does not divide the 400 rows of an iteration: 80 or 100"):
        made.training(train_batch_size=400, minibatch_size=99).to_run_config()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda c: c.training(lrr=1), "training: ppo has no argument lrr: did you mean lr"),
        (lambda c: c.training(clip_param=0.1), "did you mean clip_eps"),
        (lambda c: c.training(use_lstm=True), r"did you mean model, with core\.name\?"),
        (lambda c: c.training(max_seq_len=20), r"did you mean model, with max_seq_len\?"),
        (lambda c: c.training(model={"use_lstm": True}).to_run_config(), r"did you mean network\.core\.name\?"),
        (
            lambda c: c.training(model={"core": {"name": "lstm"}, "lstm_cell_size": 9}).to_run_config(),
            r"did you mean network\.core\.size\?",
        ),
        (lambda c: c.training(model={"custom_model": "my.Net"}).to_run_config(), r"did you mean network\.torso\?"),
        (lambda c: c.training(model={"framestack": True}).to_run_config(), r"did you mean env\.frame_stack\?"),
        (lambda c: c.environment(action_mask_key="legal"), r"did you mean action_mask_info\?"),
        (lambda c: c.training(horizon=3), r"horizon is an argument of environment\(\)"),
        (lambda c: c.env_runners(num_workers=2), "did you mean num_env_runners"),
        (lambda c: c.update_from_dict({"nonsense_key": 1}), "ppo has no argument nonsense_key"),
        (lambda c: c.training(gamma=2).to_run_config(), r"algo.gamma: expected a number in \[0, 1\]"),
        (lambda c: c.copy().environment("CartPole-v99").validate(), "CartPole-v99"),
        (lambda c: AlgorithmConfig(), "choose an algorithm's"),
        (lambda c: AlgorithmConfig.from_dict({"algo": {"name": "ppoo"}}), "unknown algorithm 'ppoo'"),
        (lambda c: c.update_from_dict({"algo": {"name": "dqn"}}), "use jrl.api.DQNConfig"),
        (lambda c: c.env_runners(exploration_config={"type": "SoftQQ"}), "SoftQQ"),
    ],
)
def test_what_is_wrong_is_said_at_once(wrong, message):
    with pytest.raises(InputError, match=message):
        wrong(PPOConfig().environment("CartPole-v1"))


def test_frozen_configs_do_not_change():
    made = PPOConfig().environment("CartPole-v1")
    made.freeze()
    with pytest.raises(AttributeError, match="frozen"):
        made.training(lr=1)
    assert made.copy(copy_frozen=False).training(lr=1).lr == 1
    with pytest.raises(AttributeError, match="frozen"):
        made.copy().training(lr=1)


def test_values_are_read_by_the_names_of_arguments():
    made = DQNConfig().environment("CartPole-v1").training(replay_buffer_config={"capacity": 5000})
    assert (made.lr, made["gamma"], made.num_env_runners) == (5e-4, 0.99, 0)
    assert made.replay_buffer_config["capacity"] == 5000 and made.replay_buffer_config["batch_size"] == 256
    assert made.get("nothing", 7) == 7
    with pytest.raises(AttributeError, match="has no argument lrr"):
        made.lrr  # noqa: B018


def test_exploration_in_the_words_of_both():
    made = DQNConfig().environment("CartPole-v1")
    made.env_runners(exploration_config={"type": "EpsilonGreedy", "final_epsilon": 0.1, "epsilon_timesteps": 500})
    assert made.to_run_config().algo.exploration.epsilon == ((0, 1.0), (500, 0.1))
    made.exploration(exploration_config={"type": "SoftQ", "temperature": 0.5})  # another kind: nothing of the old stays
    assert made.to_dict()["algo"]["exploration"] == {"name": "soft_q", "temperature": 0.5}
    made.env_runners(exploration_config={"name": "epsilon_greedy", "epsilon": 0.2}, explore=False)
    assert made.to_run_config().algo.exploration.epsilon == 0.2 and not made.to_run_config().rollout.explore


def test_grid_search_waits_for_tune():
    made = SACConfig().environment("Pendulum-v1").training(lr={"grid_search": [1e-3, 1e-4]})
    assert made.to_dict()["algo"]["lr"] == {"grid_search": [1e-3, 1e-4]}
    with pytest.raises(InputError, match=r"algo\.lr"):
        made.to_run_config()


def fourier(space, width=4):
    """Stands for a network of the user's own."""


def halved(rewards):
    """Stands for a function of the user's own."""


def test_the_users_own_objects_are_held_by_their_names():
    made = (
        PPOConfig()
        .environment("CartPole-v1", frame_stack=4, reward_scale=0.5, action_mask_info="legal")
        .training(model={"torso": fourier, "core": {"name": "gru"}}, reward_fn=halved, batch_transforms=halved)
    )
    cfg = made.to_run_config()
    assert (cfg.env.frame_stack, cfg.env.reward_scale, cfg.env.action_mask_info) == (4, 0.5, "legal")
    assert (cfg.network.torso, cfg.network.core.name) == (f"{__name__}:fourier", "gru")
    assert (cfg.custom.reward, cfg.custom.batch) == (f"{__name__}:halved", (f"{__name__}:halved",))
    searched = PPOConfig().training(model={"torso": {"grid_search": [fourier, "impala"]}, "transform": None})
    assert searched._given["network"] == {
        "torso": {"grid_search": [f"{__name__}:fourier", "impala"]}, "transform": None,
    }  # fmt: skip


def test_names_of_the_api():
    assert {"PPO", "PPOConfig", "SACConfig", "Callbacks", "register_env"} <= set(dir(api))
    assert issubclass(api.PPO, Algorithm) and api.PPO is api.algorithm_class("ppo")
    with pytest.raises(AttributeError, match=r"jrl\.api has no PPPO"):
        api.PPPO  # noqa: B018


def test_what_rllib_has_and_jrl_has_not_is_said():
    with pytest.raises(AttributeError, match=r"no method rollouts: use env_runners\(\)"):
        PPOConfig().rollouts(num_rollout_workers=2)
    with pytest.raises(AttributeError, match="not part of jrl yet"):
        PPOConfig().multi_agent(policies={})


def test_a_dict_of_arguments_is_no_old_config():
    made = api.PPO.read_config({"env": "CartPole-v1", "backend": "graph", "num_envs": 4, "lr": 1e-2})
    assert (made.backend, made.num_envs, made.lr) == ("graph", 4, 1e-2)
    assert (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(rollout_fragment_length="auto")
        .to_run_config()
        .rollout.length
        is None
    )
