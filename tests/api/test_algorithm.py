"""A run as an object: what `train` returns and never changes, weights, checkpoints, own steps, and its end."""

import contextlib
import gc
import io
import math
import os
import re
import threading
import types
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

import jrl
from jrl import api, evaluate, registry
from jrl.api import PPO, Algorithm, DQNConfig, PPOConfig, SACConfig
from jrl.errors import InputError
from jrl.rllib import hints
from jrl.rllib.algorithm import to_path
from jrl.rllib.table import KEYS
from jrl.run.session import Session

RLLIB = Path(__file__).parent.parent / "fixtures" / "rllib"


def small(**reporting):
    made = PPOConfig().environment("CartPole-v1", backend="jax").env_runners(num_envs=4, rollout_fragment_length=16)
    made.training(num_epochs=1, num_minibatches=1, model={"hidden": [8]})
    return made.reporting(**reporting).debugging(seed=5, log=[])


@pytest.fixture(scope="module")
def algo():
    """Made from a dict with names of RLlib and jrl; `said` is what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        made = PPO({**small().arguments(), "framework": "torch"})
    made.said = said.getvalue()
    with made:
        yield made


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_result_has_the_names_that_rllib_users_know(algo):
    assert algo.said == "translated: framework: dropped: JAX is the only framework\n"
    first, second = algo.train(), algo.train()
    assert (first["training_iteration"], second["training_iteration"]) == (1, 2)
    for result in (first, second):
        returns = [result[f"episode_return_{x}"] for x in ("mean", "min", "max")]
        assert [result[f"episode_reward_{x}"] for x in ("mean", "min", "max")] == returns
        assert result["episode_len_mean"] > 0 and result["num_env_steps_sampled"] >= 1000 and not result["done"]
        assert math.isfinite(result["learners"]["default_policy"]["loss/policy"])
    new, total = second["num_env_steps_sampled"], second["num_env_steps_sampled_lifetime"]
    assert total == first["num_env_steps_sampled_lifetime"] + new == algo.env_steps
    assert total == second["num_env_steps_trained_lifetime"] == second["timesteps_since_restore"]
    for former in ("num_env_steps_sampled_this_iter", "timesteps_this_iter", "num_env_steps_trained_this_iter"):
        assert second[former] == new, former
    for former in ("timesteps_total", "agent_timesteps_total", "num_agent_steps_sampled_lifetime"):
        assert second[former] == total, former
    assert second["episodes_total"] == first["episodes_total"] + second["episodes_this_iter"] > 0
    assert second["config"] == algo.config.to_dict() and second["pid"] == os.getpid()
    assert {"hostname", "node_ip", "date", "trial_id", "timestamp", "time_this_iter_s"} <= set(second)
    assert second["iterations_since_restore"] == second["training_iteration"] == algo.iteration
    assert second["time_total_s"] >= first["time_total_s"] > 0


METHODS = {words[0]: words[1:] for words in map(str.split, (RLLIB / "methods.txt").read_text().split("\n\n"))}


@pytest.mark.parametrize("kind", METHODS)
def test_methods_of_rllib_are_here_or_the_error_says_what_to_use(kind, algo):
    made = {"algorithm": algo, "policy": algo.get_policy(), "config": algo.config}
    owner = (made | {"workers": algo.workers, "worker": algo.workers.local_worker()})[kind]
    assert [name for name in METHODS[kind] if not hasattr(owner, name) and name not in KEYS] == []
    for name, fix in hints.HINTS.get(kind, {"save": "Algorithm.save(path)"}).items():
        with pytest.raises(AttributeError, match=re.escape(f"has no {name}: {fix}")):
            getattr(owner, name)
    with pytest.raises(AttributeError, match=r"did you mean|has no argument|docs/api\.md"):
        owner.get_weightz  # noqa: B018


def test_workers_and_distributions_have_the_words_of_rllib(algo):
    worker, obs = algo.workers.local_worker(), np.zeros((2, 4), np.float32)
    assert [*worker.policy_map] == ["default_policy"]
    same(worker.policy_map["default_policy"].get_weights(), algo.get_weights()["default_policy"])
    assert algo.workers.remote_workers() == []
    assert algo.foreach_worker(func=lambda worker: worker.worker_index) == [0]
    assert algo.workers.foreach_worker_with_index(func=lambda worker, index: index) == [0]
    assert algo.workers.foreach_worker_with_id(lambda index, worker: index) == [0]
    names = [algo.workers.foreach_policy(func=lambda policy, name: name), worker.foreach_policy(func=lambda p, n: n)]
    assert names == [["default_policy"]] * 2 and worker.for_policy(func=lambda policy: policy.policy_id) == names[0][0]
    dist = algo.get_policy().distribution(obs)
    np.testing.assert_array_equal(dist.logp(np.array([0, 1])), dist.log_prob(np.array([0, 1])))
    np.testing.assert_array_equal(dist.deterministic_sample(), dist.mode())
    with pytest.raises(InputError, match=r"model\.conv_filters: CNNs are network\.torso"):
        algo.config.copy(copy_frozen=False).training(model={"conv_filters": [[16, [4, 4], 2]]})
    sac = SACConfig().environment("Pendulum-v1").training(target_entropy="auto")
    assert sac.to_run_config().algo.target_entropy is None and sac.target_entropy == "auto"
    assert sac.training(target_entropy=-2.0).to_run_config().algo.target_entropy == -2.0


@pytest.mark.slow
def test_from_checkpoint_beside_the_algorithm_that_goes_on(tmp_path, monkeypatch, capsys):
    """The second one of the same directory writes to one of its own; the first goes on in its directory."""
    monkeypatch.chdir(tmp_path)
    with small(min_sample_timesteps_per_iteration=1).debugging(out="run", log=["jsonl"]).build() as algo:
        algo.train()
        with Algorithm.from_checkpoint(algo.save()) as other:
            assert other.train()["training_iteration"] == algo.train()["training_iteration"] == 2
            assert other.logdir != algo.logdir == tmp_path / "run" and other.logdir.parent == tmp_path / "runs"
        assert f"another Algorithm of this process writes to {tmp_path / 'run'}" in capsys.readouterr().out
        path = algo.save()
    with Algorithm.from_checkpoint(path) as again:  # when the first has ended
        assert again.logdir == tmp_path / "run"


def test_predict_has_the_arguments_of_sb3(algo, tmp_path):
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    best = algo.compute_actions(obs, explore=False)
    actions, state = algo.get_policy().predict(obs, deterministic=True)
    np.testing.assert_array_equal(actions, best)
    assert state is None and algo.get_policy().predict(obs[0], deterministic=True) == (best[0], None)
    assert {int(algo.get_policy().predict(obs[0])[0]) for _ in range(50)} == {0, 1}
    said = algo.get_policy().compute_log_likelihoods(best, obs)
    np.testing.assert_allclose(said, algo.get_policy().distribution(obs).log_prob(best))
    loaded = jrl.load(algo.save(tmp_path / "c"))
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], best)
    with pytest.raises(AttributeError, match=r"Policy has no model: .*\.from_checkpoint\(path\)\.get_policy\(\)"):
        loaded.model  # noqa: B018


def test_what_save_returns_is_a_path_and_has_rllibs_attributes(algo, tmp_path):
    saved = algo.save(tmp_path / "c")
    assert isinstance(saved, str) and saved == str(tmp_path / "c") == saved.checkpoint.path == saved.path
    assert Path(saved).is_dir() and os.path.join(saved, "x") == f"{tmp_path}/c/x"
    assert saved.metrics.get("training_iteration", 0) == algo.iteration
    assert to_path(saved.checkpoint) == to_path(types.SimpleNamespace(path=str(saved))) == Path(saved)


def test_it_is_the_run_that_the_command_makes():
    """After as many iterations: the same parameters as the loop alone gives."""
    cfg = small().to_run_config()
    with small().build() as algo:
        algo.train()
        found, iteration = algo.get_weights()["default_policy"], algo.session.iteration
    with Session(cfg) as session:
        session.start()
        while session.advance().iteration < iteration:
            pass
        same(session.get_weights(), found)


@pytest.mark.slow
def test_how_long_an_iteration_is_never_changes_learning():
    steps, weights = [], []
    for reporting in (
        {"min_sample_timesteps_per_iteration": 1},
        {"min_sample_timesteps_per_iteration": 250},
        {"min_sample_timesteps_per_iteration": 1, "min_time_s_per_iteration": 0.05},
        {"min_sample_timesteps_per_iteration": 1, "min_train_timesteps_per_iteration": 200},
    ):
        with small(**reporting).build() as algo:
            while algo.session.iteration < 24:
                result = algo.train()
                assert result["num_env_steps_sampled"] >= reporting["min_sample_timesteps_per_iteration"]
                if "min_time_s_per_iteration" in reporting:
                    assert result["time_this_iter_s"] >= 0.049
                    break
            while algo.session.iteration < 24:
                algo.session.advance()
            steps.append(algo.session.iteration)
            weights.append(algo.get_weights())
    at = [w for w, n in zip(weights, steps) if n == 24]
    assert len(at) >= 2
    for other in at[1:]:
        same(at[0], other)


def test_actions(algo):
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(6, 4)).astype(np.float32)
    alone = [algo.compute_single_action(o, explore=False) for o in obs]
    np.testing.assert_array_equal(algo.compute_actions(obs, explore=False), alone)
    named = algo.compute_actions({"a": obs[0], "b": obs[1]}, explore=False)
    assert named == {"a": alone[0], "b": alone[1]}
    drawn = [int(algo.compute_single_action(obs[0])) for _ in range(50)]  # explore is on, as in training
    assert set(drawn) == {0, 1}
    action, state, extras = algo.compute_single_action(obs[0], explore=False, full_fetch=True)
    dist = algo.get_policy().distribution(obs[:1])
    assert action == alone[0] and state == ()
    assert float(extras["log_prob"]) == pytest.approx(float(dist.log_prob(np.asarray([alone[0]]))[0]), rel=1e-5)
    with pytest.raises(ValueError, match=r"observation: expected float32 \(4,\)"):
        algo.compute_single_action(np.zeros(3, np.float32))


@pytest.mark.slow
def test_continuous_actions_are_in_the_environments_units():
    made = PPOConfig().environment("Pendulum-v1", backend="jax").env_runners(num_envs=2, rollout_fragment_length=8)
    with made.training(model={"hidden": [8], "log_std_init": 2.0}).build() as algo:
        obs = np.zeros(3, np.float32)
        raw = [algo.compute_single_action(obs, unsquash_action=False, clip_action=False) for _ in range(30)]
        assert max(abs(x[0]) for x in raw) > 2.0
        clipped = [algo.compute_single_action(obs)[0] for _ in range(30)]
        assert max(map(abs, clipped)) == 2.0


def test_weights_go_out_and_in(algo):
    weights = algo.get_weights()
    nothing = jax.tree.map(np.zeros_like, weights)
    algo.set_weights(nothing)
    (held,) = algo.workers.foreach_worker(lambda worker: worker.get_weights())
    assert not any(x.any() for x in jax.tree.leaves(held["default_policy"]["params"]))
    assert algo.compute_single_action(np.ones(4, np.float32), explore=False, full_fetch=True)[2]["log_prob"] == np.log(
        np.float32(0.5)
    )
    algo.set_weights(weights)
    same(algo.get_weights(), weights)
    before = algo.env_steps
    algo.train()
    assert algo.env_steps > before
    with pytest.raises(ValueError, match=r"set_weights: expected some of params.*, got nonsense"):
        algo.set_weights({"default_policy": {"nonsense": 1}})
    with pytest.raises(ValueError, match="expected the shapes"):
        algo.set_weights(
            {"default_policy": {"params": jax.tree.map(lambda x: x[:1], weights["default_policy"]["params"])}}
        )


def test_a_policy_shows_what_its_networks_say(algo):
    obs = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    policy = algo.get_policy()
    assert policy.dist_class.__name__ == "Categorical"
    assert policy.value_function(obs).shape == (3,)
    names = [name for name, _, _ in policy.parameters()]
    assert len(names) == 8 and sum(n for _, _, n in policy.parameters()) == 2 * (4 * 8 + 8) + (8 * 2 + 2) + (8 + 1)
    assert policy.summary().splitlines()[-1].split()[-1] == "107"
    with pytest.raises(ValueError, match="has no q: it has distribution, value"):
        policy.q_values(obs)
    with pytest.raises(KeyError, match="policy_id: expected default_policy, got 'other'"):
        algo.get_policy("other")


@pytest.mark.slow
def test_q_values():
    with DQNConfig().environment("CartPole-v1", backend="jax").training(model={"hidden": [8]}).build() as algo:
        obs = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32)
        q = algo.get_policy().q_values(obs)
        np.testing.assert_array_equal(q.argmax(-1), algo.compute_actions(obs, explore=False))
        np.testing.assert_array_equal(q.max(-1), algo.get_policy().value_function(obs))


@pytest.mark.slow
def test_an_algorithm_of_ones_own_is_an_algorithm(tmp_path, monkeypatch):
    """By the name of its module, also where that is one file in the working directory."""
    reinforce = (Path(__file__).parents[2] / "examples" / "reinforce.py").read_text()
    (tmp_path / "my_reinforce.py").write_text(reinforce)
    monkeypatch.syspath_prepend(tmp_path)
    made = api.config_class("my_reinforce")().environment("CartPole-v1", backend="jax").debugging(seed=5, log=[])
    made.env_runners(num_envs=4, rollout_fragment_length=16).training(baseline_coef=0.3, model={"hidden": [8]})
    with made.build() as algo:
        assert type(algo).__name__ == "MyReinforce" and type(made).__name__ == "MyReinforceConfig"
        assert math.isfinite(algo.train()["learners"]["default_policy"]["loss/policy"])
        path = algo.save(tmp_path / "saved")
    with Algorithm.from_checkpoint(path) as again:
        assert again.env_steps == algo.env_steps and type(again) is type(algo)
        assert again.session.config.algo.baseline_coef == 0.3
    with pytest.raises(InputError, match=r"algo\.name: unknown algorithm 'my_reinforced'"):
        api.config_class("my_reinforced")


@pytest.mark.slow
def test_a_subclass_replaces_the_training_step():
    calls = []

    class Twice(PPO):
        def training_step(self, step):
            for _ in range(2):
                step.learn(step.sample())
            calls.append(step.iteration)

    with Twice(small(min_sample_timesteps_per_iteration=1)) as algo:
        result = algo.train()
        assert calls == [0]
        assert 64 < result["num_env_steps_sampled"] <= 128


def test_a_subclass_replaces_the_loss(tmp_path, monkeypatch):
    class Still(PPO):
        @staticmethod
        def loss(default, net, params, batch):
            value, metrics = default(params, batch)
            return 0.0 * value, metrics

    with Still(small()) as algo:
        before = algo.get_weights()["default_policy"]["params"]
        algo.train()
        same(algo.get_weights()["default_policy"]["params"], before)
        path, obs = algo.save(tmp_path / "c"), np.ones(4, np.float32)
        action = algo.compute_single_action(obs, explore=False)
    monkeypatch.setattr(registry, "_registered", {})  # as in another process, which does not know the loss
    assert jrl.load(path).act(obs) == action
    assert evaluate.main([path, "--episodes", "2"]) == 0
    with pytest.raises(InputError, match=r"custom\.loss: local:.* cannot be imported"):
        Algorithm.from_checkpoint(path)


@pytest.mark.slow
def test_a_transform_between_collecting_and_learning():
    def doubled(rollout):
        return rollout.replace(reward=2.0 * rollout.reward)

    targets = []
    for transforms in ([], [doubled]):
        made = small(min_sample_timesteps_per_iteration=1).training(
            learner_connector=transforms, gae_lambda=0.0, gamma=0.0
        )
        with made.build() as algo:
            targets.append(algo.train()["learners"]["default_policy"]["value/target"])
    assert targets == pytest.approx([1.0, 2.0])


def test_evaluation_in_the_result():
    made = small(min_sample_timesteps_per_iteration=1)
    with made.evaluation(
        evaluation_interval=2, evaluation_duration=3, always_attach_evaluation_results=False
    ).build() as algo:
        results = [algo.train() for _ in range(4)]
        attached = [not math.isnan(r["evaluation"]["episode_return_mean"]) for r in results]
        assert attached == [False, True, False, True]
        assert results[1]["evaluation"]["num_episodes"] == 3
        assert results[1]["evaluation"]["weights_version"] == 2
        own = algo.evaluate(duration=2)
        assert own["num_episodes"] == 2 and own["episode_return_min"] <= own["episode_return_mean"]


def test_nothing_is_left_after_stop():
    before = set(threading.enumerate())
    algo = PPO(small().environment("CartPole-v1", backend="gymnasium").env_runners(sample_mode="async"))
    algo.train()
    algo.stop()
    algo.stop()
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("jrl")]
    for thread in left:
        thread.join(5)
    assert not any(thread.is_alive() for thread in left)


def test_bad_input_is_found_before_anything_is_made():
    with pytest.raises(InputError, match=r"env\.id is missing"):
        PPOConfig().build()
    with pytest.raises(InputError, match="rollback needs the checkpoints"):
        small().debugging(on_nonfinite="rollback").build()
    with pytest.raises(InputError, match="use the class of an algorithm"):
        Algorithm({})


@pytest.mark.parametrize("kind", ["algorithm", "policy", "loaded"])
def test_names_of_sb3_have_a_word_that_says_what_does_it_instead(kind, algo, tmp_path):
    owners = {"algorithm": algo, "policy": algo.get_policy()}
    owner = owners.get(kind) or jrl.load(algo.save(tmp_path / "c"))
    sb3 = {
        "algorithm": "predict learn load get_env env optimizer replay_buffer",
        "policy": "model optimizer save loss device",
        "loaded": "compute_single_action model set_env learn export_policy_model get_weights",
    }
    for name in sb3[kind].split():
        with pytest.raises(AttributeError) as e:
            getattr(owner, name)
        assert "docs/api.md" not in str(e.value), name
        for given in re.findall(
            r"(?<![\w.])(\w+)\((?:obs)?\)", str(e.value).partition(": ")[2]
        ):  # what it names is there
            assert hasattr(owner, given), (name, given)


@pytest.mark.slow
def test_a_task_of_envpool_is_its_options():
    made = small(min_sample_timesteps_per_iteration=1).environment("CartPole-v1", backend="envpool")
    with made.env_runners(rollout_fragment_length=32).build() as algo:
        algo.train()
        algo.set_task({"max_episode_steps": 5})
        algo.train()
        longest = [algo.train() for _ in range(3)][-1]
        assert longest["num_env_steps_sampled"] > 0 and longest["episode_len_mean"] <= 12
        with pytest.raises(InputError, match="a mapping of its options"):
            algo.set_task(7)


@pytest.mark.slow
@pytest.mark.parametrize("collector", ["program", "host"])
def test_an_algorithm_on_envpool_leaves_no_thread_behind(collector):
    """EnvPool's threads end with its pool, which nothing may hold once the algorithm is stopped."""
    data = {
        "env": {"id": "CartPole-v1", "backend": "envpool", "num_envs": 4}, "network": {"hidden": [8]},
        "algo": {"name": "ppo", "num_minibatches": 1}, "rollout": {"length": 8, "collector": collector},
        "run": {"log": []},
    }  # fmt: skip
    counts = []
    for _ in range(3):
        with api.AlgorithmConfig.from_dict(data).build() as made:
            made.train()
        gc.collect()
        counts.append(psutil.Process().num_threads())
    assert counts[1] == counts[2]  # the first starts those of jax
