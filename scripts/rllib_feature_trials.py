"""What takes more than a line to try, of the features in scripts/rllib_feature_list.py."""

from collections.abc import Callable
from typing import Any

from rllib_features import ROOT, config_of, equal, has, refuses, unmigrated, value_at


def tiny(algo: str = "PPO", **training: Any) -> Any:
    """A config that trains in a moment."""
    made = config_of(algo).debugging(seed=0, log=[])
    made.env_runners(num_envs=4, rollout_fragment_length=16).training(model={"hidden": [8]}, **training)
    return made.reporting(min_sample_timesteps_per_iteration=1)


def first_snippet() -> None:
    from jrl.api import PPOConfig

    made = PPOConfig().environment("CartPole-v1").resources(num_gpus=0).framework("torch").debugging(log=[])
    made.env_runners(num_env_runners=0).training(gamma=0.9, lr=0.01, train_batch_size=256)
    with made.build() as algo:
        for _ in range(2):
            result = algo.train()
        assert {"episode_reward_mean", "timesteps_total", "training_iteration"} <= set(result)
        assert algo.evaluate(duration=1)["num_episodes"] == 1


def saves() -> None:
    import tempfile

    from jrl.api import Algorithm

    with tempfile.TemporaryDirectory() as scratch, tiny().build() as algo:
        algo.train()
        path = algo.save(f"{scratch}/c").checkpoint.path
        with Algorithm.from_checkpoint(path) as other:
            assert other.iteration == 1
        algo.restore(path)
        algo.export_policy_model(f"{scratch}/out")


def commands() -> None:
    """`train file x.yaml` and `evaluate CHECKPOINT --algo A --env E`, as RLlib's command has them."""
    import tempfile

    from jrl import evaluate, train

    with tempfile.TemporaryDirectory() as scratch:
        given = ["file", str(ROOT / "tests/fixtures/rllib/cartpole-ppo.yaml"), "--stop", '{"timesteps_total": 200}']
        small = ["env.num_envs=2", "rollout.length=16", "algo.num_minibatches=1", "env_runners.num=0"]
        small = [f"--set={one}" for one in small]
        assert train.main([*given, *small, "--out", f"{scratch}/run"]) == 0
        assert evaluate.main([f"{scratch}/run", "--algo", "PPO", "--env", "CartPole-v1", "--episodes", "2"]) == 0
        assert evaluate.main([f"{scratch}/run", "--run", "DQN"]) == 2


def told_option(name: str, *words: str) -> Callable[[], None]:
    """A command refuses these options, each by its name."""

    def check() -> None:
        import contextlib
        import importlib
        import io

        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                importlib.import_module(f"jrl.{name}").main([*words])
        except SystemExit as e:
            assert e.code == 2, e.code
        missing = [word for word in words if word.startswith("--") and f"{word}: " not in said.getvalue()]
        assert not missing, f"no word of {missing}: {said.getvalue()}"

    return check


def ends_a_run() -> None:
    from jrl.api import DefaultCallbacks

    class Ending(DefaultCallbacks):
        def on_train_result(self, *, algorithm, result, **kwargs):
            result["done"] = result["training_iteration"] == 2

    with tiny().callbacks(Ending).build() as algo:
        equal([algo.train()["done"] for _ in range(2)], [False, True])


def learns_from_data() -> None:
    """A run writes its episodes; each algorithm of data sets learns from them, without an environment."""
    import tempfile

    from jrl import api

    with tempfile.TemporaryDirectory() as scratch:
        written = tiny("SAC").training(replay_buffer_config={"learning_starts": 1_000, "capacity": 2_000})
        written.offline_data(output=f"{scratch}/set", output_config={"format": "json"})
        with written.build() as algo:
            for _ in range(8):
                algo.train()
        for name in ("BC", "MARWIL", "CQL", "IQL"):
            made = getattr(api, f"{name}Config")().debugging(log=[]).training(model={"hidden": [8]})
            made.offline_data(input_=f"{scratch}/set", dataset_num_iters_per_learner=2)
            with made.build() as algo:
                found = algo.train()
                equal(found["num_env_steps_sampled_lifetime"], 0)
                equal(found["learners"]["default_policy"]["updates"], 2)
                equal(len(algo.sample_replay().reward), 256)


def by_hand() -> None:
    with tiny("A2C").build() as algo:
        worker = algo.workers.local_worker()
        rollout, count = worker.sample_with_count()
        gradients, _ = worker.compute_gradients(rollout)
        worker.apply_gradients(gradients)
        worker.learn_on_batch(rollout)
        assert 0 < count <= 64 and worker.get_metrics()["num_episodes"] >= 0
        assert worker.get_filters() == {"default_policy": ()}
        assert worker.foreach_policy(lambda policy, name: name) == ["default_policy"]


def acts() -> None:
    import numpy as np

    with tiny().build() as algo:
        obs = np.zeros(4, np.float32)
        assert algo.compute_single_action(obs, explore=False) in (0, 1)
        assert len(algo.compute_single_action(obs, full_fetch=True)) == 3
        assert set(algo.compute_actions({"a": obs, "b": obs})) == {"a", "b"}
        policy = algo.get_policy()
        assert policy.value_function(obs[None]).shape == (1,) and "in all" in policy.summary()


def stops() -> None:
    with tiny().stop(env_steps=128).build() as algo:
        while not algo.train()["done"]:
            pass
        assert algo.env_steps >= 128


def switched_exploration() -> None:
    soft = config_of("DQN").exploration(exploration_config={"type": "SoftQ", "temperature": 0.5})
    found = value_at(soft, "algo.exploration")
    assert found["name"] == "soft_q" and "epsilon" not in found, found


def overriding() -> None:
    made = config_of().evaluation(evaluation_config=type(config_of()).overrides(explore=False))
    made.to_run_config()
    made.freeze()
    try:
        made.training(lr=1)
    except Exception as e:
        assert "frozen" in str(e)
    else:
        raise AssertionError("a frozen config was changed")


def updated() -> None:
    shared = config_of().training(gamma=0.5)
    equal(value_at(type(shared)().update_from_dict(shared.to_dict()), "algo.gamma"), 0.5)


def unknown_key() -> None:
    refuses("training", gama=0.9)()
    unmigrated({"gama": 0.9})()


def every_callback() -> None:
    names = "on_algorithm_init on_workers_recreated on_checkpoint_loaded on_create_policy on_environment_created "
    names += "on_sub_environment_created on_episode_created on_episode_start on_episode_step on_episode_end "
    names += "on_evaluate_start on_evaluate_end on_postprocess_trajectory on_sample_end on_learn_on_batch "
    has("callbacks", *(names + "on_train_result").split())()


def unknown_algorithms(*names: str) -> None:
    from jrl import migrate
    from jrl.errors import InputError

    for name in names:
        try:
            migrate.migrate({"env": "CartPole-v1"}, algo=name)
        except InputError:
            continue
        raise AssertionError(f"{name} is an algorithm")


def no_name(*names: str) -> None:
    from jrl import api

    for name in names:
        try:
            getattr(api, name)
        except AttributeError as e:
            assert "jrl.api has no" in str(e)
        else:
            raise AssertionError(f"jrl.api has {name}")
