"""Models that Stable-Baselines3 trains here act, value and continue identically as runs of jrl.

Skipped without stable_baselines3 and torch, which jrl does not need.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import model_envs
import numpy as np
import pytest

import jrl
from jrl.importer.__main__ import main

sb3 = pytest.importorskip("stable_baselines3")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

_OFF = {"learning_starts": 30, "buffer_size": 500, "batch_size": 16}
_HERE = "model_envs:"
# name -> algorithm, policy, environment of jrl, arguments
MODELS = {
    "ppo": ("PPO", "MlpPolicy", "CartPole-v1", {"n_steps": 64, "batch_size": 32, "n_epochs": 2}),
    "ppo_normalized": ("PPO", "MlpPolicy", "Pendulum-v1", {"n_steps": 64, "batch_size": 32, "n_epochs": 2}),
    "ppo_cnn": ("PPO", "CnnPolicy", f"{_HERE}make_last",
                {"n_steps": 32, "batch_size": 16, "n_epochs": 1, "policy_kwargs": {"net_arch": [24]}}),
    "a2c": ("A2C", "MlpPolicy", "Pendulum-v1",
            {"policy_kwargs": {"net_arch": {"pi": [24, 16], "vf": [32]}, "activation_fn": torch.nn.ELU}}),
    "a2c_choices": ("A2C", "MlpPolicy", f"{_HERE}make_choices", {}),
    "a2c_bits": ("A2C", "MlpPolicy", f"{_HERE}make_bits", {}),
    "dqn": ("DQN", "MlpPolicy", "CartPole-v1", {**_OFF, "target_update_interval": 50}),
    "dqn_cnn": ("DQN", "CnnPolicy", f"{_HERE}make_first", {**_OFF, "policy_kwargs": {"net_arch": [20]}}),
    "sac": ("SAC", "MlpPolicy", "Pendulum-v1", {**_OFF, "policy_kwargs": {"net_arch": {"pi": [32], "qf": [24, 24]}}}),
    "sac_cnn": ("SAC", "CnnPolicy", f"{_HERE}make_continuous", _OFF),
    "td3": ("TD3", "MlpPolicy", "Pendulum-v1",
            {**_OFF, "action_noise": sb3.common.noise.NormalActionNoise(np.zeros(1), 0.2 * np.ones(1))}),
    "ddpg": ("DDPG", "MlpPolicy", "Pendulum-v1", _OFF),
}  # fmt: skip


def _train(name, directory):
    """Returns the model after 128 steps, its environment, and options of the import."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    algo, policy, env_id, options = MODELS[name]
    make = getattr(model_envs, env_id.removeprefix(_HERE), None)
    env = make_vec_env(make or env_id, n_envs=2 if algo in ("PPO", "A2C") else 1, seed=1)
    more = []
    if name == "ppo_normalized":
        env = VecNormalize(env)
        more = ["--vec-normalize", str(directory / "vec_normalize.pkl")]
    model = getattr(sb3, algo)(policy, env, seed=1, device="cpu", **options)
    model.learn(128)
    model.save(directory / "model.zip")
    if more:
        env.save(more[1])
    return model, env, ["--env", env_id, *more]


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """The trained model, observations of jrl's and of its own kind, the run directory, and the loaded policy."""
    directory = tmp_path_factory.mktemp(request.param)
    model, env, options = _train(request.param, directory)
    out = directory / "run"
    assert main([str(directory / "model.zip"), *options, "--set", "env.backend=gymnasium", "--out", str(out)]) == 0
    policy = jrl.load(out)
    space, rng = policy.observation_space, np.random.default_rng(0)
    if len(space.shape) == 3:
        given = rng.integers(0, 256, (50, *space.shape)).astype(np.uint8)
        own = given if given.shape[1:] == model.observation_space.shape else given.transpose(0, 3, 1, 2)
    else:
        given = rng.normal(size=(50, *space.shape)).astype(np.float32)
        own = env.normalize_obs(given).astype(np.float32) if request.param == "ppo_normalized" else given
    return model, given, own, out, policy


def _state(out):
    from jrl.config import override
    from jrl.run import build
    from jrl.run.store import checkpoint, resume

    saved = checkpoint.locate(out)
    meta = checkpoint.read_meta(saved)
    algo = build.algorithm(override(meta["config"], []), checkpoint.read_spec(meta))
    return algo, resume.restore_learner(saved, jax.eval_shape(algo.init, jax.random.key(0)))


def test_actions(pair):
    model, given, own, _, policy = pair
    expected, _ = model.predict(own, deterministic=True)
    found = np.stack([np.asarray(policy.act(x)) for x in given])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_values_and_distributions(pair):
    model, given, own, out, _ = pair
    algo, state = _state(out)
    outputs = algo.outputs(state, given)
    with torch.no_grad():
        obs = torch.as_tensor(own)
        if isinstance(model, sb3.DQN):
            close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
            close(outputs["q"], model.q_net(obs).numpy())
            target = algo.outputs(state.replace(params=state.target_params), given)
            close(target["q"], model.q_net_target(obs).numpy())
        elif isinstance(model, sb3.PPO | sb3.A2C):
            np.testing.assert_allclose(outputs["value"], model.policy.predict_values(obs)[:, 0], rtol=1e-5, atol=1e-5)
            dist = model.policy.get_distribution(obs)
            action = outputs["distribution"].mode()
            log_prob = dist.log_prob(torch.as_tensor(np.array(action, np.float32)))
            np.testing.assert_allclose(outputs["distribution"].log_prob(action), log_prob, rtol=1e-5, atol=1e-5)
        else:
            action = model.policy.scale_action(model.predict(own, deterministic=True)[0])
            value = lambda critic: torch.min(torch.cat(critic(obs, torch.as_tensor(action)), 1), 1).values
            np.testing.assert_allclose(outputs["value"], value(model.critic), rtol=1e-5, atol=1e-5)
            slow = state.replace(params={**state.params, "critic": state.target_params["critic"]})
            np.testing.assert_allclose(algo.outputs(slow, given)["value"], value(model.critic_target), rtol=1e-5,
                                       atol=1e-5)  # fmt: skip
            if isinstance(model, sb3.SAC):
                mean, log_std, _ = model.actor.get_action_dist_params(obs)
                np.testing.assert_allclose(outputs["distribution"].mean, mean, rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(outputs["distribution"].log_std, log_std, rtol=1e-5, atol=1e-5)
                assert float(state.params["log_ent_coef"]) == float(model.log_ent_coef)


def test_counters_and_optimizers(pair):
    model, given, _, out, _ = pair
    _, state = _state(out)
    assert int(state.env_steps) == model.num_timesteps
    if isinstance(model, sb3.SAC | sb3.TD3):
        optimizers = [model.actor.optimizer, model.critic.optimizer]
    else:
        optimizers = [model.policy.optimizer]
    if isinstance(model, sb3.SAC):
        optimizers.append(model.ent_coef_optimizer)
    second = lambda entry: entry["square_avg"] if "square_avg" in entry else entry["exp_avg_sq"]
    theirs = np.concatenate([second(entry).numpy().ravel() for x in optimizers for entry in x.state.values()])
    named = jax.tree.leaves_with_path(state.opt_state)
    mine = np.concatenate([np.ravel(x) for path, x in named if ".nu" in jax.tree_util.keystr(path)])
    # critics of jrl have a CNN each, those of Stable-Baselines3 share one
    order = np.unique if isinstance(model, sb3.SAC) and given.ndim == 4 else np.sort
    np.testing.assert_array_equal(order(mine), order(theirs))


def test_the_run_goes_on_and_is_exported(pair, tmp_path):
    model, _, _, out, _ = pair
    steps = model.num_timesteps
    common = ["--set", "runtime.cpu_threads=1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    run = lambda *args: subprocess.run([sys.executable, "-m", *args], capture_output=True, text=True, env=env)
    done = run("jrl.evaluate", str(out), "--episodes", "2")
    assert done.returncode == 0, done.stderr
    done = run("jrl.export", str(out), "--out", str(tmp_path / "exported"))
    assert done.returncode == 0, done.stderr
    done = run("jrl.train", "--resume", str(out), "--stop", f"env_steps={steps + 200}", *common)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "stopped" in done.stdout
