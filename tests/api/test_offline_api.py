"""Runs from data by the calls of a config: RLlib's snippets, what they become, iterations, results, steps by hand."""

import math

import jax
import numpy as np
import pytest

from jrl import api, data
from jrl.api import BCConfig, CQLConfig, DQNConfig, IQLConfig, MARWILConfig, PPOConfig
from jrl.config import datasets
from jrl.errors import InputError
from jrl.types import Batch, Box, Discrete

SPACES = {
    "CartPole-v1": (Box((4,), "float32"), Discrete(2, "int64")),
    "Pendulum-v1": (Box((3,), "float32"), Box((1,), "float32", -2.0, 2.0)),
}


def episodes(action, size):
    """An episode for each of a few lengths, the last at a time limit."""
    rng, made = np.random.default_rng(0), []
    for steps in (20, 35, 11, 30):
        taken = rng.integers(0, 2, steps) if isinstance(action, Discrete) else rng.uniform(-2, 2, (steps, 1))
        obs = rng.normal(size=(steps + 1, size)).astype(np.float32)
        made.append(data.Episode(obs, taken, rng.normal(size=steps), terminated=steps != 30, truncated=steps == 30))
    return made


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Directories of RLlib's files, by the environment."""
    made = tmp_path_factory.mktemp("sets")
    for (env, (obs, action)), kind in zip(SPACES.items(), ("rllib-json", "rllib-parquet"), strict=True):
        store = data.of_episodes(obs, action, episodes(action, obs.shape[0]), meta={"env": env})
        data.write(store, made / env, kind)
    return {env: str(made / env) for env in SPACES}


def small(config):
    return config.debugging(log=[], seed=1).training(model={"fcnet_hiddens": [8]})


# ---------------------------------------------------------------- RLlib's documented snippets


def bc(sets):
    config = BCConfig().training(lr=0.00001, gamma=0.99)
    return config.offline_data(input_=sets["CartPole-v1"], dataset_num_iters_per_learner=3)


def marwil(sets):
    config = MARWILConfig()
    config.api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
    assert config.beta == 1.0
    config.training(beta=0.75, lr=1e-5, gamma=0.99, train_batch_size_per_learner=64)
    config.offline_data(input_=[sets["CartPole-v1"]], dataset_num_iters_per_learner=1)
    return config.environment(observation_space="a Box", action_space="Discrete(2)")


def cql(sets):
    config = CQLConfig().training(gamma=0.9, lr=0.01, bc_iters=2, min_q_weight=3.0, num_actions=2, temperature=0.5)
    config = config.resources(num_gpus=0).environment("Pendulum-v1")
    config.training(train_batch_size_per_learner=32, deterministic_backup=True)
    return config.offline_data(
        input_=[sets["Pendulum-v1"]], dataset_num_iters_per_learner=2, actions_in_input_normalized=False,
        input_read_method="read_parquet", map_batches_kwargs={"concurrency": 2}, iter_batches_kwargs={},
    )  # fmt: skip


def iql(sets):
    config = IQLConfig().training(actor_lr=0.00001, gamma=0.99, twin_q=True, expectile=0.8, value_lr=1e-4)
    return config.offline_data(input_=sets["Pendulum-v1"], dataset_num_iters_per_learner=2)


@pytest.mark.parametrize(
    ("snippet", "updates", "rows"),
    [
        (bc, 3, 256),
        pytest.param(marwil, 1, 64, marks=pytest.mark.slow),
        pytest.param(cql, 2, 32, marks=pytest.mark.slow),
        pytest.param(iql, 2, 256, marks=pytest.mark.slow),
    ],
)
def test_rllibs_snippets_train(snippet, updates, rows, sets):
    with small(snippet(sets)).build() as algo:
        found = algo.train()
        assert found["learners"]["default_policy"]["updates"] == updates
        assert found["num_env_steps_trained"] == updates * rows == found["num_env_steps_trained_lifetime"]
        assert all(math.isfinite(x) for x in found["learners"]["default_policy"].values())


def test_what_they_become(sets):
    cfg = cql(sets).to_run_config()
    assert (cfg.algo.conservative, cfg.algo.bc_updates, cfg.algo.cql_weight, cfg.algo.cql_actions) == (True, 4, 3.0, 2)
    assert (cfg.algo.cql_temperature, cfg.algo.deterministic_backup, cfg.algo.lr) == (0.5, True, 0.01)
    assert (cfg.data.format, cfg.data.actions_in_input_normalized) == ("rllib-parquet", False)
    cfg = iql(sets).to_run_config()
    assert (cfg.algo.actor_lr, cfg.algo.value_lr, cfg.algo.num_critics, cfg.algo.expectile) == (1e-5, 1e-4, 2, 0.8)
    cfg = marwil(sets).to_run_config()
    assert (cfg.algo.beta, cfg.replay.batch_size, cfg.run.report_every) == (0.75, 64, 1)
    assert not cfg.env.id and datasets.alone(cfg)


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def algo(sets):
    config = small(BCConfig()).offline_data(input_=sets["CartPole-v1"], updates_per_iteration=4, validation=0.3)
    config.environment("CartPole-v1", backend="jax").training(replay_buffer_config={"batch_size": 16})
    with config.build() as made:
        yield made


def test_an_iteration_is_so_many_updates_and_samples_nothing(algo):
    before = algo.iteration
    found = algo.train()
    assert algo.iteration == found["training_iteration"] == before + 1
    assert found["num_env_steps_trained"] == found["num_env_steps_trained_this_iter"] == 4 * 16
    assert found["learners"]["default_policy"]["updates"] == 4 * algo.iteration == algo.env_steps
    for name in ("num_env_steps_sampled", "num_env_steps_sampled_lifetime", "timesteps_total", "timesteps_this_iter"):
        assert found[name] == 0, name
    assert found["timesteps_since_restore"] == 0 and found["iterations_since_restore"] == algo.iteration
    assert math.isfinite(found["learners"]["default_policy"]["validation/loss/policy"])


def test_evaluations_and_actions(algo):
    found = algo.evaluate(3)
    assert found["num_episodes"] == 3 and found["episode_return_mean"] >= 8
    assert algo.compute_single_action(np.zeros(4, np.float32), explore=False) in (0, 1)


def test_it_goes_on_from_a_checkpoint_to_the_bit(algo, tmp_path):
    saved = algo.save(tmp_path / "c")
    algo.train()
    then = algo.get_weights()
    algo.restore(saved)
    algo.train()
    jax.tree.map(np.testing.assert_array_equal, then, algo.get_weights())


def test_batches_of_the_data_by_hand(algo):
    batch = algo.sample_replay()
    assert isinstance(batch, Batch) and batch.obs.shape == (16, 4)
    before = algo.get_weights()
    gradients, metrics = algo.compute_gradients(batch)
    assert set(metrics) >= {"loss/policy"} and algo.env_steps == 4 * algo.iteration
    algo.apply_gradients(gradients)
    algo.learn_on_batch(batch)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, algo.get_weights())
    assert any(jax.tree.leaves(changed["default_policy"]["params"]))
    assert not np.array_equal(algo.sample_replay().obs, batch.obs)  # another draw


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda algo: algo.workers.local_worker().sample(), r"sample: .* use sample_replay\(\)"),
        (lambda algo: algo.learn_on_batch(algo.sample_replay().obs), "learn_on_batch: bc learns from a Batch"),
        (lambda algo: algo.set_task(1), "set_task: .* there are no environments"),
        (lambda algo: algo.evaluate_offline(), "has no evaluate_offline: offline_data"),
    ],
)
def test_what_needs_environments_says_so(act, message, algo):
    with pytest.raises((InputError, AttributeError), match=message):
        act(algo)


def test_batches_from_the_hosts_memory_are_those_on_the_devices(sets):
    config = small(BCConfig()).offline_data(input_=sets["CartPole-v1"])
    drawn = []
    for placement in ("device", "host"):
        with config.copy().offline_data(placement=placement).build() as algo:
            drawn.append(algo.sample_replay())
            with pytest.raises(InputError, match=r"env\.id is missing"):
                algo.evaluate()
    jax.tree.map(np.testing.assert_array_equal, *drawn)


# ---------------------------------------------------------------- what is refused, what is beside data


def test_what_is_wrong_is_said(sets):
    here = sets["CartPole-v1"]
    for wrong, message in (
        (lambda: BCConfig().build("CartPole-v1"), "bc learns from a data set alone: set it"),
        (lambda: BCConfig().offline_data(input_=lambda io_context: None), "a reader of RLlib takes an IOContext"),
        (
            lambda: (
                PPOConfig()
                .environment("CartPole-v1")
                .offline_data(input_=lambda io: PolicyServerInput(io, "localhost", 9900))  # noqa: F821
                .build_algo()
            ),
            "external: clients play the episodes of this run: start it with python -m jrl.serve",
        ),
        (lambda: BCConfig().offline_data(input_=here, prelearner_class=dict), "a function .* -> EpisodeStore"),
        (lambda: BCConfig().offline_data(input_=here, input_read_schema={"o": "obs"}), "columns have RLlib's names"),
        (lambda: BCConfig().offline_data(input=here, shuffle=3), "bc has no argument shuffle"),
        (lambda: PPOConfig().offline_data(input_=here), "ppo learns from its own rollouts"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()


def store_of_mine():
    obs, action = SPACES["CartPole-v1"]
    return data.of_episodes(obs, action, episodes(action, 4))


def test_a_function_of_ones_own_gives_the_data():
    config = small(BCConfig()).offline_data(input_=store_of_mine, updates_per_iteration=1)
    assert config.to_run_config().data.input == f"{__name__}:store_of_mine"
    with config.build() as algo:
        assert algo.train()["num_env_steps_trained"] == 256


@pytest.mark.slow
def test_data_beside_environments(sets, tmp_path):
    """RLlib's mix, an exact split here; and the run writes what it samples."""
    config = small(DQNConfig()).environment("CartPole-v1", backend="jax").env_runners(num_envs=4)
    config.offline_data(input_={"sampler": 0.25, sets["CartPole-v1"]: 0.75}, output=str(tmp_path / "out"))
    config.training(train_batch_size=16, replay_buffer_config={"learning_starts": 16, "capacity": 256})
    cfg = config.reporting(min_sample_timesteps_per_iteration=64).to_run_config()
    assert datasets.is_mixed(cfg.data) and cfg.data.output.path == str(tmp_path / "out")
    with config.build() as algo:
        found = algo.train()
        assert found["num_env_steps_sampled"] == found["num_env_steps_sampled_lifetime"] >= 64
    assert data.read(str(tmp_path / "out")).num_steps == found["num_env_steps_sampled_lifetime"]


def test_cql_is_sac_with_its_flag(tmp_path, sets):
    config = CQLConfig().offline_data(input_=sets["Pendulum-v1"])
    assert config["conservative"] and config.copy()["conservative"] and api.CQL.get_default_config()["conservative"]
    config.to_yaml(tmp_path / "c.yaml")
    back = api.AlgorithmConfig.from_yaml(tmp_path / "c.yaml")
    assert type(back) is api.SACConfig and back.to_run_config() == config.to_run_config()
    assert CQLConfig().training(lagrangian=True, lagrangian_thresh=10.0, min_q_weight=2.0)["cql_target_gap"] == 5.0
    assert not api.SACConfig()["conservative"]
