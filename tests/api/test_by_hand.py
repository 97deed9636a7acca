"""Beside the iterations: samples, updates, gradients, filters, weights in and out, of each worker and the Algorithm."""

import copy
import dataclasses
import pickle
from typing import ClassVar

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jrl.api import A2CConfig, Algorithm, DQNConfig, PPOConfig, SACConfig, concat_samples
from jrl.errors import InputError
from jrl.types import Rollout

T, B = 8, 4


def on_policy(made=None, **training):
    made = (made or A2CConfig()).environment("CartPole-v1", backend="jax")
    made = made.env_runners(num_envs=B, rollout_fragment_length=T).debugging(seed=3, log=[])
    return made.training(model={"hidden": [8]}, **training).reporting(min_sample_timesteps_per_iteration=1)


def dqn(**training):
    made = DQNConfig().environment("CartPole-v1", backend="jax").debugging(seed=3, log=[])
    made = made.env_runners(num_envs=B, rollout_fragment_length=T).training(model={"hidden": [8]}, **training)
    made = made.training(replay_buffer_config={"capacity": 400}, train_batch_size=16, learning_starts=32)
    return made.reporting(min_sample_timesteps_per_iteration=1)


def same(a, b, **near):
    check = np.testing.assert_allclose if near else np.testing.assert_array_equal
    jax.tree.map(lambda x, y: check(x, y, **near), a, b)


def differ(a, b):
    return any(
        (np.asarray(x) != np.asarray(y)).any() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.fixture(scope="module")
def a2c():
    with on_policy(normalize_obs=True).build() as made:
        made.train()
        yield made


@pytest.fixture(scope="module")
def q():
    with dqn().build() as made:
        for _ in range(3):
            made.train()
        yield made


def test_a_worker_samples_and_training_goes_on_behind_it(a2c):
    worker = a2c.workers.local_worker()
    before, steps = a2c.session.state.source.obs[0], a2c.env_steps
    rollout, count = worker.sample_with_count()
    assert isinstance(rollout, Rollout) and rollout.reward.shape == (T, B) and count == rollout.mask.sum() > 0
    np.testing.assert_array_equal(rollout.obs[0], before)
    np.testing.assert_array_equal(a2c.session.state.source.obs[0], rollout.last_obs)
    assert not np.asarray(a2c.session.state.source.started).any()  # what is learned next continues nothing
    assert a2c.env_steps == steps  # it was not learned from
    again = a2c.workers.foreach_worker(lambda w: w.sample())[0]
    np.testing.assert_array_equal(again.obs[0], rollout.last_obs)
    assert a2c.train()["num_env_steps_sampled_lifetime"] > steps


def test_an_update_on_a_rollout_is_that_of_the_run(a2c):
    rollout = a2c.workers.local_worker().sample()
    state, steps = a2c.session.learner_state(), a2c.env_steps
    found = a2c.learn_on_batch(rollout)
    algo = a2c.session.run.algo
    of_one = jax.tree.map(lambda x: x[None], (state, rollout))
    expected, aux = jax.jit(jax.vmap(algo.update, axis_name="device"))(*of_one, jax.random.split(jax.random.key(0), 1))
    same(a2c.session.learner_state().params, jax.tree.map(lambda x: x[0], expected.params), rtol=1e-5, atol=1e-6)
    assert found["loss/policy"] == pytest.approx(float(aux.metrics["loss/policy"][0]), rel=1e-4)
    assert a2c.env_steps == steps + rollout.mask.sum()
    with pytest.raises(InputError, match=r"learn_on_batch: expected a rollout of 8 steps of 4 environments"):
        a2c.learn_on_batch(dataclasses.replace(rollout, reward=rollout.reward[:4]))
    with pytest.raises(InputError, match="learns from a Rollout"):
        a2c.learn_on_batch({"obs": 1})


def test_gradients_then_a_step_are_an_update(a2c):
    """Of an algorithm that makes one step per rollout."""
    rollout, before = a2c.workers.local_worker().sample(), a2c.session.learner_state()
    gradients, info = a2c.compute_gradients(rollout)
    same(a2c.session.learner_state(), before)
    assert jax.tree.structure(gradients) == jax.tree.structure(before.params) and "loss/policy" in info
    a2c.apply_gradients(gradients)
    stepped = a2c.session.learner_state()
    assert differ(stepped.params, before.params)
    same((stepped.obs_stats, stepped.env_steps), (before.obs_stats, before.env_steps))
    a2c.session.replace_state(a2c.session.run.program.assign(a2c.session.state, before))
    a2c.get_policy().learn_on_batch(rollout)
    learned = a2c.session.learner_state()
    same((stepped.params, stepped.opt_state), (learned.params, learned.opt_state), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="apply_gradients: expected the shapes"):
        a2c.apply_gradients({"x": np.zeros(3)})
    with pytest.raises(ValueError, match="finite gradients"):
        a2c.apply_gradients(jax.tree.map(lambda x: x * np.nan, gradients))


@pytest.mark.slow
def test_with_replay_batches_are_learned_from(q):
    batch, before = q.sample_replay(), q.session.learner_state()
    gradients, info = q.workers.local_worker().compute_gradients(batch)
    assert len(batch.weight) == 16 and np.isfinite(info["loss/value"])
    q.workers.local_worker().apply_gradients(gradients)
    stepped = q.session.learner_state()
    assert stepped.updates == before.updates + 1
    q.session.replace_state(q.session.run.program.assign(q.session.state, before))
    q.learn_on_batch(batch)
    learned = q.session.learner_state()
    same((stepped.params, stepped.opt_state), (learned.params, learned.opt_state), rtol=1e-4, atol=1e-6)
    assert differ(learned.params, before.params)
    with pytest.raises(InputError, match=r"compute_gradients: dqn learns from a Batch, as from sample_replay\(\)"):
        q.compute_gradients(q.workers.local_worker().sample())
    with pytest.raises(InputError, match="expected 16 rows"):
        q.learn_on_batch(jax.tree.map(lambda x: x[:4], batch))


@pytest.mark.slow
def test_a_rollout_by_hand_stands_behind_a_seam_in_replay(q):
    """What is stored of it has true successors, and so has what training stores behind it."""
    first = q.workers.local_worker().sample()
    q.workers.local_worker().sample()  # nobody learns from this one
    q.learn_on_batch(first)
    q.train()
    seen = set()
    for _ in range(60):
        batch = q.sample_replay()
        live = batch.weight > 0
        seen |= {obs.tobytes() for obs in batch.obs[live]}
        # CartPole's own: the position moves by the velocity, which it does not from one rollout to another
        np.testing.assert_allclose(batch.next_obs[live, 0], (batch.obs[:, 0] + 0.02 * batch.obs[:, 1])[live], atol=1e-5)
    assert seen & {obs.tobytes() for obs in first.obs.reshape(-1, 4)}


@pytest.mark.slow
def test_sacs_parts_have_their_gradients():
    made = SACConfig().environment("Pendulum-v1", backend="jax").env_runners(num_envs=2, rollout_fragment_length=4)
    made = made.training(model={"hidden": [8]}, train_batch_size=8, learning_starts=8).debugging(seed=0, log=[])
    made = made.training(replay_buffer_config={"capacity": 100}).reporting(min_sample_timesteps_per_iteration=1)
    with made.build() as algo:
        with pytest.raises(InputError, match="replay is empty"):
            algo.sample_replay()
        for _ in range(3):
            algo.train()
        gradients, _ = algo.compute_gradients(algo.sample_replay())
        before = algo.session.learner_state()
        assert set(gradients) == {"actor", "critic", "log_ent_coef"}
        assert all(np.abs(x).sum() > 0 for x in map(np.asarray, jax.tree.leaves(gradients)))
        algo.apply_gradients(gradients)
        after = algo.session.learner_state()
        assert all(differ(after.params[name], before.params[name]) for name in gradients)
        assert differ(after.target_params, before.target_params)


@pytest.mark.slow
def test_ppos_gradient_is_that_over_the_whole_rollout():
    found = []
    for parts in ({"num_epochs": 1, "num_minibatches": 1}, {"num_epochs": 3, "num_minibatches": 2}):
        with on_policy(PPOConfig(), **parts).build() as algo:
            found.append(algo.compute_gradients(algo.workers.local_worker().sample())[0])
            if parts["num_epochs"] == 3:
                algo.apply_gradients(found[-1])
                assert int(np.max(algo.session.learner_state().opt_state[-1][-1].count)) == 1  # Adam's own count
    same(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_environments_in_python_are_sampled_by_part():
    with on_policy().environment(backend="gymnasium").build() as algo:
        parts = algo.workers.foreach_worker(lambda w: (w.sample_with_count(), w.worker_index))
        (rollout, count), index = parts[0]
        assert rollout.reward.shape == (T, B) and count == rollout.mask.sum() and index == 0
        step = algo.session.run.program
        _, after, _ = step.collect(algo.session.state, 3, 0, 0)
        assert not np.asarray(after.contiguous).any()
        np.testing.assert_array_equal(after.obs[0], rollout.last_obs)
        whole, _ = algo.workers.sample()
        _, again, _ = step.collect(algo.session.state, 3, 0, 0)
        assert np.asarray(whole.contiguous).all() and not np.asarray(again.contiguous).any()
        assert algo.learn_on_batch(concat_samples([whole]))["loss/policy"] is not None
        assert concat_samples([whole, whole]).obs.shape == (T, 2 * B, 4)


def test_metrics_of_a_worker(a2c):
    for _ in range(20):
        a2c.train()
    found = a2c.workers.local_worker().get_metrics()
    result = a2c.train()
    assert found["num_episodes"] == len(found["hist_stats"]["episode_return"]) > 0
    assert found["episode_return_mean"] == pytest.approx(np.mean(found["hist_stats"]["episode_lengths"]))
    assert found["episode_return_max"] <= 500 and {"episode_return_mean", "episode_len_mean"} <= set(result)


def test_filters_are_read_and_set(a2c, q):
    worker = a2c.workers.local_worker()
    found = worker.get_filters()
    same(found["default_policy"], a2c.session.learner_state().obs_stats)
    moved = jax.tree.map(lambda x: np.asarray(x) + 1, found)
    worker.sync_filters(moved)
    same(a2c.session.learner_state().obs_stats, moved["default_policy"])
    same(a2c.workers.foreach_worker(lambda w: w.get_filters(flush_after=True)), [moved])
    worker.sync_filters(found)
    with pytest.raises(ValueError, match="sync_filters: expected"):
        worker.sync_filters({"other": ()})
    assert q.workers.local_worker().get_filters() == {"default_policy": ()}


def test_every_worker_acts_with_weights_that_were_set(a2c):
    before = a2c.get_weights()
    zeros = jax.tree.map(np.zeros_like, before["default_policy"]["params"])
    a2c.workers.local_worker().set_weights({"default_policy": {"params": zeros}})
    a2c.workers.sync_weights()
    same(a2c.workers.foreach_worker(lambda w: w.get_weights()["default_policy"]["params"]), [zeros])
    of = lambda policy, policy_id: (policy_id, policy.get_weights()["params"])
    assert [name for name, _ in a2c.workers.foreach_policy(of)] == ["default_policy"]
    same(a2c.workers.foreach_trainable_policy(of)[0][1], zeros)
    worker = a2c.workers.local_worker()
    worker.for_policy(lambda policy: policy.set_weights(before["default_policy"]))
    same(a2c.get_weights(), before)
    worker.set_weights(jax.tree.map(np.zeros_like, worker.get_weights()))  # what it gives it takes
    same(a2c.get_weights()["default_policy"]["params"], zeros)
    worker.for_policy(lambda policy: policy.set_weights(policy.get_weights()))
    a2c.set_weights(before)
    same(worker.get_weights(), before)
    with pytest.raises(KeyError, match="policy_id: expected default_policy, got 'other'"):
        worker.get_policy("other")


def test_an_algorithm_gives_and_takes_its_state(a2c, tmp_path):
    state = a2c.__getstate__()
    with pickle.loads(pickle.dumps(a2c)) as twin:
        assert isinstance(twin, Algorithm) and twin.iteration == a2c.iteration and twin.env_steps == a2c.env_steps
        same(twin.session.learner_state(), a2c.session.learner_state())
        twin.set_weights(jax.tree.map(np.zeros_like, twin.get_weights()))
        assert differ(twin.get_weights(), a2c.get_weights())
        twin.__setstate__(state)
        same(twin.get_weights(), a2c.get_weights())
    assert a2c.get_config() is a2c.config


@pytest.mark.slow
def test_results_are_logged_by_a_subclass():
    class Noted(Algorithm):
        algo_name = "a2c"
        seen: ClassVar = []

        def log_result(self, result):
            self.seen.append(result["training_iteration"])
            result["mine"] = 7

    with Noted(on_policy()) as algo:
        assert algo.train()["mine"] == 7 and algo.train()["training_iteration"] == 2
    assert Noted.seen == [1, 2]


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_weights_come_from_files_of_others(q, tmp_path, kind):
    path, names = tmp_path / f"w.{kind}", [name for name, _, _ in q.get_policy().parameters()]
    before = copy.deepcopy(q.get_weights())
    flat = {
        jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x)
        for p, x in jax.tree.leaves_with_path(before["default_policy"]["params"])
    }
    kernel = next(n for n in names if flat[n].ndim == 2 and flat[n].shape[0] != flat[n].shape[1])
    given = {
        "net.0.weight": np.ascontiguousarray(flat[kernel].T + 1),
        **{n: x * 2 for n, x in flat.items() if n != kernel},
    }
    np.savez(path, **given) if kind == "npz" else save_file(given, path)
    assert q.import_weights(path) == sorted(set(names) - {kernel})
    assert q.import_weights(path, {kernel: "net.0.weight.T"}) == [kernel]
    found = q.get_weights()["default_policy"]
    expected = {n: x + 1 if n == kernel else x * 2 for n, x in flat.items()}
    for tree in (found["params"], found["target_params"]):
        for p, x in jax.tree.leaves_with_path(tree):
            np.testing.assert_array_equal(x, expected[jax.tree_util.keystr(p, simple=True, separator="/")])
    with pytest.raises(InputError, match=r"expected the shape .*\.T\" transposes it"):
        q.import_weights(path, {kernel: "net.0.weight"})
    with pytest.raises(InputError, match=r"unknown parameter .*did you mean"):
        q.import_weights(path, {kernel + "x": "net.0.weight.T"})
    with pytest.raises(InputError, match=r"has no net\.0\.weigth \(did you mean net\.0\.weight\?\)"):
        q.import_weights(path, {kernel: "net.0.weigth"})
    q.set_weights(before)


def test_files_that_are_no_weights_are_refused(q, tmp_path):
    class Planted:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    np.savez(tmp_path / "planted.npz", x=np.array([Planted()], dtype=object))
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "x.pkl").write_bytes(b"")
    np.savez(tmp_path / "others.npz", fc=np.zeros(3))
    for name, said in {
        "planted.npz": "cannot be read as npz",
        "broken.safetensors": "cannot be read as safetensors",
        "x.pkl": "expected *.npz or *.safetensors",
        "none.npz": "cannot be read as npz",
        "others.npz": "give mapping=",
    }.items():
        with pytest.raises(InputError, match=said.replace("*", r"\*").replace(".", r"\.")):
            q.import_weights(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_env_runners_sample_by_hand():
    made = on_policy().environment(backend="gymnasium").env_runners(num_env_runners=2)
    made.fault_tolerance(env_runner_health_probe_timeout_s=300)
    with made.build() as algo:
        algo.train()
        found = algo.workers.foreach_worker(lambda w: (w.worker_index, *w.sample_with_count(), w.get_metrics()))
        assert [index for index, *_ in found] == [1, 2]
        rollouts = [rollout for _, rollout, *_ in found]
        assert all(rollout.reward.shape == (T, B // 2) for rollout in rollouts)
        assert (rollouts[0].action != rollouts[1].action).any()
        assert np.isfinite(algo.learn_on_batch(concat_samples(rollouts))["loss/policy"])
        assert algo.workers.local_worker().sample().reward.shape == (T, B)
        for call in (lambda w: w.set_weights({}), lambda w: w.sync_filters({}), lambda w: w.learn_on_batch(None)):
            with pytest.raises(Exception, match="expected a call in the process that learns"):
                algo.workers.foreach_worker(call)
        same(*[f["default_policy"] for f in algo.workers.foreach_worker(lambda w: w.get_filters())])
        assert algo.train()["training_iteration"] == 2


@pytest.mark.slow
def test_two_devices_do_what_one_does():
    rollout, found = None, []
    for learners in ([0], [0, 1]):
        with on_policy().learners(learners=learners).build() as algo:
            sampled = algo.workers.local_worker().sample()
            assert sampled.reward.shape == (T, B)
            rollout = rollout or sampled
            gradients, _ = algo.compute_gradients(rollout)
            algo.apply_gradients(gradients)
            algo.learn_on_batch(rollout)
            found.append((gradients, algo.get_weights()))
    same(*found, rtol=1e-4, atol=1e-6)
    with dqn().learners(learners=[0, 1]).build() as algo:
        for _ in range(3):
            algo.train()
        batch = algo.sample_replay()
        assert batch.weight.shape == (16,) and np.isfinite(algo.learn_on_batch(batch)["loss/value"])
        algo.apply_gradients(algo.compute_gradients(batch)[0])
        algo.learn_on_batch(algo.workers.local_worker().sample())
        algo.train()
