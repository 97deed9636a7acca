"""An Algorithm as a trainable of Ray Tune: search spaces, resources, checkpoints, and the examples that use it."""

import importlib.util
import types
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest
import ray
from ray import tune as theirs

import jrl
from jrl import registry
from jrl.api import DQN, PPO, Callbacks, DQNConfig, PPOConfig, tune
from jrl.errors import InputError
from jrl.rollout.ray_cluster import Cluster, RunnerOptions

SMALL = {
    "env": "CartPole-v1",
    "backend": "jax",
    "num_envs": 4,
    "rollout_fragment_length": 16,
    "iterations_per_call": 1,
    "num_minibatches": 1,
    "num_epochs": 1,
    "min_sample_timesteps_per_iteration": 64,
    "model": {"hidden": (8,)},
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder for what is written; trials keep their programs where the tests do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path / "results"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    return tmp_path


@pytest.fixture
def two_cpus(here):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield here
    ray.shutdown()


def weights(trial):
    return trial.algorithm.get_weights()["default_policy"]["params"]


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


# ---------------------------------------------------------------- the trainable, without Tune


@pytest.mark.slow
def test_a_trial_takes_over_weights_and_counters_but_keeps_its_own_hyper_parameters(here):
    made = tune.trainable("PPO")
    assert issubclass(made, theirs.Trainable) and made.__name__ == "PPO"
    first = made({**SMALL, "lr": 1e-2})
    assert [first.train()["training_iteration"] for _ in range(2)] == [1, 2]
    saved = str(here / "saved")
    first.save(saved)
    learned = weights(first)
    first.stop()
    assert jrl.load(saved).act(np.zeros(4, np.float32)) in (0, 1)

    other = made({**SMALL, "lr": 0.0})
    assert not same(weights(other), learned) or not other.train()
    other.restore(saved)
    assert same(weights(other), learned)
    found = other.train()
    assert found["training_iteration"] == 3 == found["iterations_since_restore"] + 2
    assert found["timesteps_total"] == found["num_env_steps_sampled_lifetime"] > 2 * 64 - 8
    assert found["episode_reward_mean"] == found["env_runners"]["episode_return_mean"]
    assert same(weights(other), learned)  # with its own learning rate, which is zero

    assert other.reset({**SMALL, "lr": 1e-2})
    found = other.train()
    assert found["training_iteration"] == 1 and not same(weights(other), learned)
    other.stop()
    other.stop()


def test_what_is_registered_travels_with_the_trainable(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})

    class Mine(gymnasium.Env):
        pass

    config = PPOConfig().environment(Mine)
    made, space = tune._prepare(tune.trainable("PPO"), config)
    assert list(made.registered.items()) == [(space["env"], Mine)]
    fn, _ = tune._prepare(lambda config: registry.load(config["env"], "env"), config)
    registry._registered.clear()  # another process
    assert fn(space) is Mine


def test_trials_have_directories_of_their_own(here):
    with pytest.raises(
        InputError, match=r"run\.out: expected a path relative to the trial's directory, got /somewhere"
    ):
        tune.trainable(PPO)({**SMALL, "out": "/somewhere"})


# ---------------------------------------------------------------- resources


def test_resources_follow_from_the_config(monkeypatch):
    request = tune.trainable("PPO").default_resource_request
    assert request(SMALL).bundles == [{"CPU": 1.0}]
    runners = {"num_env_runners": 2, "num_cpus_per_env_runner": 0.5, "custom_resources_per_env_runner": {"disk": 1}}
    found = request({**SMALL, **runners, "evaluation_num_env_runners": 1, "placement_strategy": "SPREAD"})
    assert found.bundles == [{"CPU": 1.0}, *[{"CPU": 0.5, "disk": 1.0}] * 3] and found.strategy == "SPREAD"
    nothing = {"num_env_runners": 2, "num_cpus_per_env_runner": 0}
    assert request({**SMALL, **nothing}).bundles == [{"CPU": 1.0}]
    assert request({**SMALL, "num_envs": "many"}) is None  # the trial says what is wrong

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0})
    assert request(SMALL).bundles == [{"CPU": 1.0, "GPU": 1.0}]
    assert request({**SMALL, "learners": [0, 1], "actors": [1, 2]}).bundles == [{"CPU": 1.0, "GPU": 3.0}]
    assert request({**SMALL, "fake_devices": 2}).bundles == [{"CPU": 1.0}]
    assert tune.with_resources("PPO", {"cpu": 3}).default_resource_request(SMALL).bundles == [{"CPU": 3}]


@pytest.mark.parametrize(("bundles", "message"), [(1, "2 runners need 2 CPU.* 0 is left"), (2, "1 is left"), (3, None)])
def test_runners_of_a_trial_take_what_it_has_reserved(bundles, message):
    group = types.SimpleNamespace(bundle_specs=[{"CPU": 1.0}] * bundles)
    context = types.SimpleNamespace(
        should_capture_child_tasks_in_placement_group=True, get_assigned_resources=lambda: {"CPU": 1.0}
    )
    cluster = Cluster.__new__(Cluster)
    cluster._ray = types.SimpleNamespace(
        util=types.SimpleNamespace(get_current_placement_group=lambda: group),
        get_runtime_context=lambda: context,
    )
    cluster._options, cluster._shared = RunnerOptions(num=2), False
    if message:
        with pytest.raises(InputError, match=message):
            cluster._place()
    else:
        cluster._place()
        assert cluster._group is group and cluster._shared


# ---------------------------------------------------------------- search spaces


def test_a_config_with_searches_is_a_search_space_by_the_names_of_arguments():
    rates, sizes = tune.grid_search([1e-3, 1e-4]), tune.grid_search([256, 512])
    config = PPOConfig().environment("CartPole-v1", env_config={"a": 1})
    config.env_runners(num_envs=4, num_envs_per_env_runner=8).stop(env_steps=100)
    config.training(lr=rates, train_batch_size=sizes)
    found = config.arguments()
    assert found == {
        "env": "CartPole-v1",
        "env_config": {"a": 1},
        "lr": rates,
        "num_envs": 4,
        "num_envs_per_env_runner": 8,
        "train_batch_size": sizes,
        "stop": {"env_steps": 100},
    }
    chosen = PPO.read_config({**found, "lr": 1e-4, "train_batch_size": 512}).to_run_config()
    assert (chosen.algo.lr, chosen.env.num_envs, chosen.rollout.length) == (1e-4, 8, 64)
    plain = PPOConfig().environment("x").evaluation(evaluation_interval=2, evaluation_config={"explore": True})
    assert PPOConfig().update_from_dict(plain.arguments()) == plain


def test_dicts_of_ours_and_of_rllib():
    ours = PPO.read_config({**SMALL, "lr": 1e-2}).to_run_config()
    assert (ours.env.backend, ours.env.num_envs, ours.algo.lr) == ("jax", 4, 1e-2)
    tree = PPO.read_config(ours_tree := PPOConfig().update_from_dict(SMALL).to_dict()).to_dict()
    assert tree == ours_tree
    old = PPO.read_config({"env": "CartPole-v1", "num_workers": 2, "num_envs_per_worker": 3, "lambda": 0.5})
    assert (old.to_run_config().env.num_envs, old.to_run_config().algo.gae_lambda) == (6, 0.5)
    both = PPO.read_config({"env": "CartPole-v1", "model": {"fcnet_hiddens": [7]}})
    assert both.to_run_config().network.hidden == (7,)


@pytest.mark.parametrize(
    ("trainable", "space", "message"),
    [
        ("POO", SMALL, "algo.name: unknown algorithm 'POO'"),
        ("PPO", {**SMALL, "num_epochs": theirs.grid_search([1, 0.5])}, r"num_epochs.*\(with num_epochs=0.5\)"),
        ("PPO", {**SMALL, "gamma": theirs.uniform(2.0, 3.0)}, r"algo.gamma.*\(with gamma=2"),
        ("PPO", {**SMALL, "backend": "grph"}, "env.backend"),
        ("PPO", {**SMALL, "learning_rat": 1}, "learning_rat"),
        (PPO, DQNConfig().environment("CartPole-v1"), "param_space: expected a config of ppo, got one of dqn"),
        ("DQN", PPOConfig().environment("CartPole-v1"), "param_space: expected a config of dqn, got one of ppo"),
    ],
)
def test_a_wrong_search_space_is_told_before_anything_starts(here, trainable, space, message):
    with pytest.raises(InputError, match=message):
        tune.Tuner(trainable, param_space=space)
    assert not ray.is_initialized() and not list(here.iterdir())


def test_all_of_tune_is_here():
    assert tune.grid_search is theirs.grid_search and tune.RunConfig is theirs.RunConfig
    assert issubclass(tune.Tuner, theirs.Tuner)
    hidden = set(vars(tune)) & set(theirs.__all__)
    assert hidden == {"run", "with_parameters", "with_resources"}
    with pytest.raises(AttributeError, match=r"ray\.tune have no Tunr"):
        tune.Tunr  # noqa: B018
    assert tune._build_trainable("dqn").algorithm_class is DQN


# ---------------------------------------------------------------- Tune


@pytest.mark.slow
def test_two_trials_and_the_policy_of_the_better_one(two_cpus):
    class Guess(gymnasium.Env):
        """The action 1 is worth 1, in episodes of ten steps."""

        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.steps = 0
            return np.zeros(2, np.float32), {}

        def step(self, action):
            self.steps += 1
            return np.zeros(2, np.float32), float(action), self.steps == 10, False, {}

    config = PPOConfig().environment(Guess).training(lr=tune.grid_search([0.0, 0.1]), model={"hidden": (4,)})
    config.env_runners(num_envs=4, rollout_fragment_length=64).reporting(min_sample_timesteps_per_iteration=512)
    config.reporting(metrics_num_episodes_for_smoothing=20)
    run_config = tune.RunConfig(storage_path=str(two_cpus / "results"), stop={"training_iteration": 2}, verbose=0)
    results = tune.Tuner("PPO", param_space=config, run_config=run_config).fit()
    assert not results.errors and len(results) == 2
    best = results.get_best_result(metric="episode_return_mean", mode="max")
    other = results.get_best_result(metric="episode_return_mean", mode="min")
    assert (best.config["lr"], other.config["lr"]) == (0.1, 0.0)
    assert best.metrics["episode_return_mean"] > 8.0 > 7.0 > other.metrics["episode_return_mean"]
    assert best.metrics["training_iteration"] == best.metrics["iterations_since_restore"] == 2
    policy = jrl.load(best.checkpoint.path)
    assert policy.act(np.zeros(2, np.float32)) == 1 and policy.config.algo.lr == 0.1


@pytest.mark.slow
def test_a_trial_with_runners_that_failed_continues_from_its_checkpoint(two_cpus):
    mended = two_cpus / "mended"

    class FailsOnce(Callbacks):
        def on_train_result(self, *, algorithm, result, **kwargs):
            if algorithm.iteration == 2 and not mended.exists():
                raise RuntimeError("the disk is full")

    # two CPUs: the runner has its place in what the trial has reserved, or none
    space = {**SMALL, "num_env_runners": 1, "callbacks_class": FailsOnce, "lr": tune.grid_search([1e-2])}
    run_config = tune.RunConfig(
        storage_path=str(two_cpus / "results"),
        name="mine",
        stop={"training_iteration": 3},
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        verbose=0,
    )
    (failed,) = tune.Tuner(PPO, param_space=space, run_config=run_config).fit()
    assert "the disk is full" in str(failed.error) and failed.metrics["training_iteration"] == 1
    mended.touch()
    again = tune.Tuner.restore(str(two_cpus / "results" / "mine"), PPO, resume_errored=True, param_space=space)
    (found,) = again.fit()
    assert found.error is None
    assert (found.metrics["training_iteration"], found.metrics["iterations_since_restore"]) == (3, 2)


def example(name):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.mark.slow
def test_example_three_learning_rates(two_cpus):
    lr, total = example("tune_three_learning_rates")(10, str(two_cpus))
    assert lr in (1e-2, 1e-3) and total > 200


@pytest.mark.slow
@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_example_custom_training_function(two_cpus, num_env_runners):
    fast, slow = example("tune_custom_training_function")(8, num_env_runners, str(two_cpus))
    assert fast[0] == 2 and slow[0] < 2


@pytest.mark.slow
def test_example_pbt(two_cpus):
    found = example("tune_pbt")(15, str(two_cpus))
    assert found["population"] > 1.5 * found["fixed"]
    assert found["population, lr"] not in (1e-6, 3e-6, 1e-5)  # one that was taken over and changed
