"""The config tree, written as calls: every key has one place, and builder and YAML convert without loss."""

import dataclasses
import importlib
import inspect

import gymnasium
import pytest

import jrl
from jrl import algos, api, config, registry
from jrl.api import AlgorithmConfig, DQNConfig, PPOConfig, SACConfig
from jrl.errors import InputError
from jrl.fields import schema, validation
from jrl.fields.data import DataSets, learns_from
from jrl.migrate import KEYS


def test_the_builder_writes_the_tree_that_yaml_holds(tmp_path):
    made = (
        PPOConfig()
        .environment("CartPole-v1", backend="jax")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=8, rollout_fragment_length=64)
        .training(lr=[[0, 1e-3], [100_000, 1e-4]], gamma=0.98, model={"hidden": [32, 32]})
        .evaluation(evaluation_interval=2, evaluation_config=PPOConfig.overrides(explore=False))
        .stop(env_steps=1000)
    )
    (tmp_path / "c.yaml").write_text(
        """
algo: {name: ppo, lr: [[0, 1e-3], [100000, 1e-4]], gamma: 0.98}
env: {id: CartPole-v1, backend: jax, num_envs: 16}
env_runners: {num: 2}
rollout: {length: 64}
network: {hidden: [32, 32]}
evaluation: {interval: 2, config: {rollout: {explore: false}}}
stop: {env_steps: 1000}
"""
    )
    assert made.to_run_config() == config.load(tmp_path / "c.yaml")


def with_data(name, made):
    """The config with data, or with a teacher, if the algorithm learns from nothing else."""
    if algos.get_config_class(name).has_teacher:
        made = made.training(teacher="runs/teacher")
    return made.offline_data(input_="data") if learns_from(algos.get_config_class(name)) is DataSets else made


@pytest.mark.parametrize("name", algos.names())
def test_there_and_back(name, tmp_path):
    made = with_data(name, api.config_class(name)().environment("Pendulum-v1").training(gamma=0.9).debugging(seed=3))
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
    found = [a.key for group, known in made.methods().items() for a in known.values() if group != "exploration"]
    keys = [key for key in found if key is not None]
    assert len(keys) == len(set(keys))
    whole = {
        "network",
        "replay",
        "algo.exploration",
        "algo.optimizer",
        "algo.critic",
        "algo.resets",
        "algo.search",
        "env.options",
        "evaluation.config",
        "data.reward",
    }
    tree = {**config.to_dict(with_data(name, made().environment("CartPole-v1")).to_run_config())}
    tree = {k: v for k, v in schema.flatten(tree).items() if not k.startswith("stop") and v != {}}
    cover = lambda key: key in keys or any(key.startswith(w + ".") for w in whole & set(keys))
    elsewhere = ("algo.name", "replay", "multi_agent", "external")
    assert [key for key in tree if not cover(key) and key not in elsewhere] == []


def test_arguments_come_from_the_sections():
    fields = {f.name: f for f in dataclasses.fields(algos.get_config_class("ppo"))}
    signature = inspect.signature(PPOConfig.training)
    assert signature.parameters["lr"].default == fields["lr"].default
    assert signature.parameters["clip_eps"].kind is inspect.Parameter.KEYWORD_ONLY
    text = inspect.getdoc(PPOConfig.training)
    for name, doc in validation.docs(algos.get_config_class("ppo")).items():
        if name != "exploration":
            assert f"{name}: {doc}" in text
    assert "num_atoms" in inspect.signature(DQNConfig.training).parameters
    assert "num_atoms" not in signature.parameters
    assert set(inspect.signature(PPOConfig.evaluation).parameters) == {"self", *PPOConfig.methods()["evaluation"]}


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
    assert made.training(train_batch_size=401, minibatch_size=99).to_run_config().rollout.length == 50
    assert made.to_run_config().algo.num_minibatches == 4
    assert made.translations() == [
        "train_batch_size -> rollout.length: 50  (the nearest: 8 environments x 50 steps = 400 rows, not 401)",
        "minibatch_size -> algo.num_minibatches: 4  (the nearest divisor of 400 rows: 4 x 100 rows, not 99)",
    ]


def test_names_of_rllib_are_imported_or_answered():
    """An import statement says what an attribute would, and not only that there is no such name."""
    from jrl.api import APEX, ApexDQNConfig, IMPALAConfig, ImpalaConfig, MemoryTrackingCallbacks, PolicySpec

    assert ImpalaConfig is IMPALAConfig
    apex = ApexDQNConfig().environment("CartPole-v1")
    cfg = apex.evaluation(evaluation_interval=1, evaluation_config={"explore": False}).to_run_config()
    assert (cfg.replay.prioritized, cfg.replay.n_step, cfg.algo.exploration.ladder) == (True, 3, True)
    assert cfg.evaluation.config == {"rollout": {"explore": False}}
    assert APEX.variant == "apex" and not DQNConfig().environment("CartPole-v1").to_run_config().replay.prioritized
    several = apex.multi_agent(policies={"a": PolicySpec(config={"lr": 1e-4}), "b": PolicySpec()})
    assert several.to_run_config().multi_agent.policies == {"a": {"algo": {"lr": 1e-4}}, "b": {}}
    (path,) = apex.callbacks(MemoryTrackingCallbacks).to_run_config().custom.callbacks
    assert path == "jrl.rllib.memory_tracking:MemoryTrackingCallbacks"
    for wanted, answer in (
        ("jrl.api import SampleBatch", r"sample_replay\(\) a Batch"),
        ("jrl.api import PPOConifg", r"did you mean PPOConfig\?"),
        ("jrl.api import CrossQ", "from-sb3.md"),
        ("jrl.api import DDPGConfig", r"configs/ddpg\.yaml"),
        ("jrl.api import CRR", "weight=.binary"),
        ("jrl.api import RLModule", "torso"),
        ("jrl import PPOConfig", "from jrl.api import PPOConfig"),
        ("jrl import make_vec_env", r"jrl\.envs\.make"),
    ):
        with pytest.raises(ImportError, match=answer):
            exec(f"from {wanted}")
    assert not hasattr(api, "SampleBatch") and not hasattr(jrl, "make_vec_env") and not hasattr(jrl, "nothing")
    assert api.PPO is api.algorithm_class("ppo") and issubclass(api.CQLConfig, api.SACConfig)
    assert importlib.import_module("jrl.api.tune") is api.tune
    names: dict = {}
    exec("from jrl.api import *", names)
    assert {*dir(api)} <= {*names}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda c: c.training(lrr=1), "training: ppo has no argument lrr: did you mean lr"),
        (lambda c: c.training(clip_parm=0.1), "did you mean clip_param"),
        (lambda c: c.training(clip_param="high").to_run_config(), r"algo\.clip_eps: expected"),
        (lambda c: c.training(use_lstm=True), r"did you mean model, with core\.name\?"),
        (lambda c: c.training(max_seq_len=20), r"did you mean model, with max_seq_len\?"),
        (lambda c: c.training(model={"custom_model": "my.Net"}), r"training: model\.custom_model: .* network\.torso"),
        (lambda c: c.training(optimizer={"nesterov": 1}).to_run_config(), r"algo\.optimizer has name, b1, b2, eps"),
        (lambda c: c.environment(action_mask_key="legal"), "name the item of the observation action_mask"),
        (lambda c: c.training(batch_size=64), r"batch_size: algo\.num_minibatches counts the minibatches"),
        (lambda c: c.training(total_timesteps=9), r"did you mean stop\(env_steps=\.\.\.\)\?"),
        (lambda c: c.training(target_policy_noise=1), "target_noise is an argument of other algorithms: leave it out"),
        (lambda c: c.training(env_wrapper=1), r"env\.id=package\.module:make"),
        (lambda c: c.training(lr=lambda left: left * 1e-3).stop(env_steps=9).to_run_config(), "lin_0.0003 falls"),
        (lambda c: c.training(frame_stack=3), r"frame_stack is an argument of environment\(\)"),
        (lambda c: c.multi_agent(replay_mode="both").to_run_config(), "expected independent or lockstep, got 'both'"),
        (
            lambda c: c.offline_data(input_="/data"),
            "offline_data: input_: ppo learns from its own rollouts: bc, marwil",
        ),
        (lambda c: c.callbacks(on_train_result=print), "derived from jrl.api.Callbacks"),
        (lambda c: c.build(logger_creator=print), "logger_creator: use debugging"),
        (lambda c: c.update_from_dict({"nonsense_key": 1}), "ppo has no argument nonsense_key"),
        (lambda c: c.training(gamma=2).to_run_config(), r"algo.gamma: expected a number in \[0, 1\]"),
        (lambda c: c.copy().environment("CartPole-v99").validate(), "CartPole-v99"),
        (lambda c: AlgorithmConfig().build(), "expected a config with an algorithm: use one such as"),
        (lambda c: AlgorithmConfig.from_dict({"algo": {"name": "ppoo"}}), "unknown algorithm 'ppoo'"),
        (lambda c: c.update_from_dict({"algo": {"name": "dqn"}}), r"config_class\('dqn'\)"),
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


class Corridor(gymnasium.Env):
    """Stands for an environment of the user's own."""

    observation_space, action_space = gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(2)


def test_environments_by_their_names(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    for given in (f"{__name__}.Corridor", f"{__name__}:Corridor", Corridor):
        cfg = PPOConfig().environment(given, backend="gymnasium").validate().to_run_config()
        assert cfg.env.id == f"{__name__}:Corridor"
    theirs = pytest.importorskip("ray.tune")
    made = PPOConfig().environment("jrl-test-corridor")
    with pytest.raises(InputError, match="not in any backend"):
        made.validate()
    theirs.register_env("jrl-test-corridor", lambda config: Corridor())
    made.environment("jrl-test-corridor", backend="gymnasium").validate()
    assert isinstance(registry.load("jrl-test-corridor", "env.id")({}), Corridor)


# ---------------------------------------------------------------- RLlib's names


def test_rllibs_names_become_ours_and_it_is_said():
    made = (
        PPOConfig()
        .environment("CartPole-v1", disable_env_checking=True)
        .framework("torch")
        .api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
        .rollouts(num_rollout_workers=0, observation_filter="MeanStdFilter")
        .resources(num_gpus=0)
        .training(
            num_sgd_iter=6, clip_param=0.3, vf_loss_coeff=0.5, model={"fcnet_hiddens": [32], "vf_share_layers": True}
        )
    )
    cfg = made.to_run_config()
    assert (cfg.algo.num_epochs, cfg.algo.clip_eps, cfg.algo.vf_coef, cfg.algo.normalize_obs) == (6, 0.3, 1.0, True)
    assert (cfg.network.hidden, cfg.network.shared, cfg.env_runners.num) == ((32,), True, 0)
    said = made.translations()
    for line in (
        "num_rollout_workers -> env_runners.num: 0",
        "framework: dropped: JAX is the only framework",
        "observation_filter -> algo.normalize_obs: true  (MeanStdFilter: true)",
        "clip_param -> algo.clip_eps: 0.3",
        "vf_loss_coeff -> algo.vf_coef: 1.0  (PPO: doubled, because jrl has half the squared error)",
        "model.fcnet_hiddens -> network.hidden: [32]",
    ):
        assert line in said, (line, said)
    assert PPOConfig().training(lr=1.0, train_batch_size=1024).environment("x").translations() == []


def test_the_later_of_two_names_counts():
    made = PPOConfig().environment("CartPole-v1").training(clip_param=0.3).training(clip_eps=0.1)
    assert made.clip_eps == made.to_run_config().algo.clip_eps == 0.1
    assert made.training(clip_param=0.4).to_run_config().algo.clip_eps == made.clip_param == 0.4
    assert made.training(num_sgd_iter=3).training(num_epochs=5).to_run_config().algo.num_epochs == 5
    assert made.training(minibatch_size=64).training(num_minibatches=2).to_run_config().algo.num_minibatches == 2
    made.training(model={"fcnet_hiddens": [8]}).training(model={"hidden": [16]})
    assert made.to_run_config().network.hidden == (16,)


def test_sizes_follow_from_both_kinds_of_names():
    made = DQNConfig().environment("CartPole-v1").training(replay_buffer_config={"updates_per_step": 0.25})
    made.training(target_network_update_freq=400, double_q=True, n_step=3, num_atoms=11)
    cfg = made.to_run_config()
    assert (cfg.algo.target_update_every, cfg.algo.double, cfg.replay.n_step) == (100, True, 3)
    assert (cfg.algo.head, cfg.algo.num_atoms) == ("c51", 11)
    made.training(replay_buffer_config={"type": "PrioritizedEpisodeReplayBuffer", "alpha": 0.5, "capacity": 500})
    cfg = made.to_run_config()
    assert (cfg.replay.prioritized, cfg.replay.priority_alpha, cfg.replay.capacity) == (True, 0.5, 500)
    made = PPOConfig().environment("CartPole-v1").env_runners(num_envs=16)
    made.training(model={"use_lstm": True, "lstm_cell_size": 32, "max_seq_len": 16}, minibatch_size=128)
    cfg = made.to_run_config()
    assert (cfg.network.core.name, cfg.network.core.size, cfg.network.max_seq_len) == ("lstm", 32, 16)
    assert cfg.algo.num_minibatches == 16
    made = PPOConfig().environment("x").training(model={"core": {"name": "lstm"}, "lstm_cell_size": 9})
    assert made.to_run_config().network.core.size == 9


def test_every_name_that_the_migration_knows_is_taken():
    """By all configs, whatever becomes of it: what jrl has nothing for says so."""
    for name, key in KEYS.items():
        if name in ("stop", "run", "algo", "algo_class", "config"):
            continue
        for made in (PPOConfig(), DQNConfig(), SACConfig()):
            try:
                made.update_from_dict({name: None if key.refused else False})
            except InputError as e:
                assert "has no argument" not in str(e), name
            assert not key.refused or made.translations() or name in ("learner_connector", "observation_fn")


def test_settings_that_several_share():
    shared = AlgorithmConfig().environment("CartPole-v1").training(lr=0.1, gamma=0.9, num_sgd_iter=2).debugging(seed=3)
    for made in (PPOConfig().update_from_dict(shared), PPOConfig().update_from_dict(shared.to_dict())):
        cfg = made.to_run_config()
        assert (cfg.env.id, cfg.algo.lr, cfg.algo.gamma, cfg.algo.num_epochs) == ("CartPole-v1", 0.1, 0.9, 2)
        assert cfg.run.seed == 3
    assert DQNConfig().update_from_dict(shared).gamma == 0.9
    assert type(AlgorithmConfig(algo_class=api.PPO)) is PPOConfig
    with pytest.raises(InputError, match="has no argument lrr"):
        AlgorithmConfig().training(lrr=1)
    with pytest.raises(InputError, match="dqn has no argument clip_eps"):
        DQNConfig().update_from_dict(AlgorithmConfig().training(clip_eps=0.1))


def test_settings_by_assignment():
    made = PPOConfig().environment("CartPole-v1")
    made.lr, made["gamma"], made.num_sgd_iter = 0.1, 0.9, 3
    cfg = made.to_run_config()
    assert (cfg.algo.lr, cfg.algo.gamma, cfg.algo.num_epochs) == (0.1, 0.9, 3)
    assert (made.num_sgd_iter, made.copy().num_epochs, made.num_gpus_per_worker) == (3, 3, 0.0)
    with pytest.raises(InputError, match="has no argument lrr"):
        made.lrr = 1
    assert PPOConfig().update_from_dict(made.arguments()) == made


def test_a_dict_of_arguments_and_of_rllibs_keys():
    made = api.PPO.read_config({"env": "CartPole-v1", "backend": "jax", "num_envs": 4, "lr": 1e-2, "num_sgd_iter": 3})
    assert (made.backend, made.num_envs, made.lr, made.num_epochs) == ("jax", 4, 1e-2, 3)
    made = made.env_runners(rollout_fragment_length="auto")
    assert made.to_run_config().rollout.length is None
