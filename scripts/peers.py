"""Runs another library on a work of `on_gpu.py`, without start-up and compilation: prints one JSON line.

    python scripts/peers.py rejax ppo 2048 --seconds 10        # pip install rejax==0.1.3 gymnax==0.0.9 six tfp-nightly
    python scripts/peers.py rejax sac 1
    python scripts/peers.py sbx tqc 1                          # pip install sbx-rl; also crossq, droq, simba, sac
    python scripts/peers.py sb3_contrib ars 1                  # pip install sb3-contrib
    python scripts/peers.py brax CartpoleBalance 2048          # pip install playground brax
    python scripts/peers.py craftax FOLDER 1024                # git clone MichaelTMatthews/Craftax_Baselines FOLDER
    python scripts/peers.py xminigrid FOLDER 64                # git clone dunnolab/xland-minigrid FOLDER
    python scripts/peers.py rltools sac 1                      # pip install rltools==2.2.1, a C++ compiler, BLAS
    python scripts/peers.py envpool Pong-v5 128                # EnvPool alone: random actions, nobody learns

The JSON line has `steps_per_s`, the median of calls that take `--seconds` together, and `versions`. Settings are those
of the same row in `on_gpu.py`.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REJAX: dict[str, dict[str, Any]] = {
    "ppo": {
        "env": "CartPole-v1",
        "agent_kwargs": {"activation": "tanh", "hidden_layer_sizes": (64, 64)},
        "num_steps": 128,
        "num_epochs": 4,
        "num_minibatches": 4,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_eps": 0.2,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
    },
    "dqn": {
        "env": "CartPole-v1",
        "agent": "QNetwork",
        "agent_kwargs": {"activation": "relu"},
        "buffer_size": 10_000,
        "fill_buffer": 1_000,
        "batch_size": 128,
        "learning_rate": 1e-3,
        "gamma": 0.99,
    },
    "sac": {
        "env": "Pendulum-v1",
        "agent_kwargs": {"activation": "relu"},
        "hidden_layer_sizes": (256, 256),  # rejax ignores it inside agent_kwargs
        "buffer_size": 20_000,
        "fill_buffer": 500,
        "batch_size": 256,
        "learning_rate": 1e-3,
        "gamma": 0.99,
    },
}


def rejax(algo: str, envs: int, seconds: float, scale: float) -> tuple[float, dict[str, Any]]:
    """Measures rejax's `train`, compiled once. Its number of steps is part of the program, its evaluation is empty."""
    import jax
    from rejax import get_algo

    settings = {**_REJAX[algo], "num_envs": envs}
    if algo != "ppo":
        settings["num_epochs"] = max(1, envs // 10) if algo == "dqn" else envs
    iteration = envs * settings.get("num_steps", 1)
    filling = settings.get("fill_buffer", 0)
    steps = {"ppo": 60 * iteration, "dqn": 60_000, "sac": 5_000}[algo]
    steps = iteration * max(1, round(steps * (1 if algo == "ppo" else scale) / iteration)) + filling
    runner = get_algo(algo).create(**settings, total_timesteps=steps, eval_freq=steps, skip_initial_evaluation=True)
    runner = runner.replace(eval_callback=lambda algo, state, key: ())
    key = jax.random.PRNGKey(0)
    train = jax.jit(runner.train).lower(key).compile()
    rate = repeat(lambda: jax.block_until_ready(train(key)), steps - filling, seconds)
    return rate, {"env": settings["env"], "steps_per_call": steps}


def sbx(algo: str, envs: int, seconds: float, scale: float) -> tuple[float, dict[str, Any]]:
    """Measures learning by SBX's TQC, CrossQ, DroQ or SAC with SimBa on Pendulum-v1, batch 256.

    Networks are 256 x 256; those of SimBa have one block of 128 for the policy, and two blocks of 256 for the critics.
    """
    import sbx

    updates, policy = (20 if algo == "droq" else 1), "SimbaPolicy" if algo == "simba" else "MlpPolicy"
    network: dict[str, Any] = {"net_arch": {"pi": [128], "qf": [256, 256]} if algo == "simba" else [256, 256]}
    if algo == "droq":
        network |= {"dropout_rate": 0.01, "layer_norm": True}
    made = {"tqc": sbx.TQC, "crossq": sbx.CrossQ}.get(algo, sbx.SAC)
    settings: dict[str, Any] = {"learning_starts": 500, "batch_size": 256, "buffer_size": 20_000, "learning_rate": 1e-3}
    if algo in ("crossq", "droq"):
        settings["policy_delay"] = 3 if algo == "crossq" else 20
    model = made(policy, "Pendulum-v1", gradient_steps=updates, policy_kwargs=network, **settings)
    model.learn(600)
    steps = max(1, round(2_000 * scale / updates))
    rate = repeat(lambda: model.learn(steps, reset_num_timesteps=False), steps, seconds)
    return rate, {"env": "Pendulum-v1", "updates_per_step": updates}


def sb3_contrib(algo: str, envs: int, seconds: float, scale: float) -> tuple[float, dict[str, Any]]:
    """Measures SB3-contrib's ARS of 8 linear policies on CartPole-v1, with the settings of configs/ars.yaml."""
    import sb3_contrib as contrib

    if algo != "ars":
        raise SystemExit(f"sb3_contrib: expected ars, got {algo}: use ars")
    model = contrib.ARS("LinearPolicy", "CartPole-v1", n_delta=4, learning_rate=0.1, delta_std=0.1)
    generation, rates = 8 * 500, []  # a call ends with the generation that reaches its steps
    model.learn(20_000)  # until episodes have 500 steps
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        start, before = time.perf_counter(), model.num_timesteps
        model.learn(round(5 * generation * scale), reset_num_timesteps=False)
        rates.append((model.num_timesteps - before) / (time.perf_counter() - start))
    return statistics.median(rates), {"env": "CartPole-v1", "population": 8}


def brax(name: str, envs: int, seconds: float, scale: float) -> tuple[float, dict[str, Any]]:
    """Measures brax's PPO on an environment of MuJoCo Playground, with Playground's settings for it.

    The rate is brax's own `training/sps` of its last epoch, which excludes compilation and evaluation.
    """
    import jax

    if not hasattr(jax, "device_put_replicated"):  # jax 0.10 removed it; brax 0.14.2 calls it
        stack = lambda x, devices: jax.numpy.stack([x] * len(devices))
        jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda x: stack(x, devices), tree)
    from brax.training.agents.ppo import train
    from mujoco_playground import registry, wrapper
    from mujoco_playground.config import dm_control_suite_params

    settings = dict(dm_control_suite_params.brax_ppo_config(name))
    settings["batch_size"] = max(1, round(settings["batch_size"] * envs / settings["num_envs"]))
    per_epoch = settings["batch_size"] * settings["num_minibatches"] * settings["unroll_length"]
    impl = "warp" if jax.default_backend() == "gpu" and importlib.util.find_spec("warp") else "jax"
    seen: list[dict[str, Any]] = []
    train.train(
        registry.load(name, config_overrides={"impl": impl}),
        **{**settings, "num_envs": envs, "num_timesteps": 3 * per_epoch, "num_evals": 4, "num_resets_per_eval": 0},
        num_eval_envs=min(envs, 128),
        wrap_env_fn=wrapper.wrap_for_brax_training,
        progress_fn=lambda steps, metrics: seen.append(metrics),
    )
    return float(seen[-1]["training/sps"]), {"env": name, "return": float(seen[-1]["eval/episode_reward"])}


def craftax(folder: str, envs: int, seconds: float, scale: float) -> tuple[float, dict[str, Any]]:
    """Measures `ppo.py` of a clone of Craftax_Baselines with its default settings, on Craftax-Classic-Symbolic-v1."""
    import jax

    sys.path.insert(0, folder)
    import ppo

    num_steps, updates = 64, 10
    settings = {
        "ENV_NAME": "Craftax-Classic-Symbolic-v1", "NUM_ENVS": envs, "NUM_STEPS": num_steps, "LR": 2e-4,
        "TOTAL_TIMESTEPS": envs * num_steps * updates, "UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 8, "GAMMA": 0.99,
        "GAE_LAMBDA": 0.8, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 1.0,
        "ACTIVATION": "tanh", "ANNEAL_LR": True, "DEBUG": False, "USE_WANDB": False, "LAYER_SIZE": 512,
        "USE_OPTIMISTIC_RESETS": True, "OPTIMISTIC_RESET_RATIO": min(16, envs), "TRAIN_ICM": False, "USE_E3B": False,
        "EXPLORATION_UPDATE_EPOCHS": 4, "ICM_REWARD_COEFF": 1.0, "E3B_LAMBDA": 0.1,
    }  # fmt: skip
    key = jax.random.PRNGKey(0)
    train = jax.jit(ppo.make_train(settings)).lower(key).compile()
    rate = repeat(lambda: jax.block_until_ready(train(key)), settings["TOTAL_TIMESTEPS"], seconds)
    return rate, {"env": settings["ENV_NAME"]}


def xminigrid(folder: str, envs: int, seconds: float, scale: float) -> tuple[float, dict[str, Any]]:
    """Measures `train_single_task.py` of a clone of xland-minigrid with the sizes of configs/ppo_xminigrid.yaml.

    Its evaluation after each update is replaced by an empty one.
    """
    import jax
    from flax.jax_utils import replicate

    sys.path.insert(0, f"{folder}/training")
    import train_single_task as script
    import utils

    script.rollout = lambda *args: utils.RolloutStats()
    sizes = {"rnn_hidden_dim": 64, "head_hidden_dim": 64, "num_steps": 64, "update_epochs": 4, "num_minibatches": 4}
    updates = 20
    config = script.TrainConfig(
        env_id="MiniGrid-Empty-8x8", num_envs=envs, total_timesteps=envs * 64 * updates, eval_episodes=1, **sizes
    )
    key, env, params, carry, state = script.make_states(config)
    given = jax.random.split(key, 1), replicate(state), replicate(carry)
    train = script.make_train(env, params, config).lower(*given).compile()
    rate = repeat(lambda: jax.block_until_ready(train(*given)), envs * 64 * updates, seconds)
    return rate, {"env": config.env_id}


def rltools(algo: str, envs: int, seconds: float, scale: float) -> tuple[float, dict[str, Any]]:
    """Measures RLtools' SAC (10,000 steps) or PPO (300,000 steps) on its own Pendulum in C++, networks of 2 x 64."""
    import rltools

    header = """
        #include <rl_tools/rl/environments/pendulum/operations_cpu.h>
        template <typename T, typename TI> using ENVIRONMENT_FACTORY =
            rl_tools::rl::environments::Pendulum<rl_tools::rl::environments::pendulum::Specification<T, TI>>;
    """
    settings: dict[str, Any] = {"enable_evaluation": False, "interface_name": f"peer_{algo}"}
    if algo == "ppo":
        settings |= {"N_ENVIRONMENTS": envs, "ON_POLICY_RUNNER_STEPS_PER_ENV": 1024, "BATCH_SIZE": 256, "N_EPOCHS": 2}
        settings |= {"TOTAL_STEP_LIMIT": 300_000, "GAMMA": 0.9, "EPISODE_STEP_LIMIT": 200}
        settings |= {"NORMALIZE_OBSERVATIONS": True, "ACTION_ENTROPY_COEFFICIENT": 0.0}
    steps = 10_000 if algo == "sac" else 300_000 // (1024 * envs) * 1024 * envs
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "environment.h").write_text(header)
        environment = {"path": folder, "action_dim": 1, "observation_dim": 3}
        module = {"sac": rltools.SAC, "ppo": rltools.PPO}[algo](environment, **settings)

    def train() -> None:
        state = module.State(0)
        while not state.step():
            pass

    return repeat(train, steps, seconds), {"env": "Pendulum-v1", "steps_per_call": steps}


def envpool(name: str, envs: int, seconds: float, scale: float) -> tuple[float, dict[str, Any]]:
    """Measures EnvPool alone with one thread per core: the faster of all environments per step, and of half of them."""
    import envpool
    import numpy as np

    rates = []
    for batch in {envs, max(1, envs // 2)}:
        pool = envpool.make(name, env_type="gymnasium", num_envs=envs, batch_size=batch, num_threads=os.cpu_count())
        actions = np.random.default_rng(0).integers(0, pool.action_space.n, (64, batch)).astype(np.int32)
        pool.async_reset()

        def step(pool=pool, actions=actions) -> None:
            for action in actions:
                pool.send(action, pool.recv()[-1]["env_id"])

        step()
        rates.append(repeat(step, len(actions) * batch, seconds / 2))
    return max(rates), {"env": name}


PEERS: dict[str, Callable[[str, int, float, float], tuple[float, dict[str, Any]]]] = {
    "rejax": rejax,
    "sbx": sbx,
    "sb3_contrib": sb3_contrib,
    "brax": brax,
    "craftax": craftax,
    "xminigrid": xminigrid,
    "rltools": rltools,
    "envpool": envpool,
}


PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "envpool",
    "gymnax",
    "rejax",
    "sbx-rl",
    "sb3_contrib",
    "craftax",
    "distrax",
    "brax",
    "rltools",
)
PACKAGES += ("playground", "mujoco", "mujoco-mjx", "warp-lang")


def repeat(call: Callable[[], object], steps: int, seconds: float) -> float:
    """Returns the median steps per second of calls that take `seconds` together, at least three."""
    call()
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        call()
        rates.append(steps / (time.perf_counter() - start))
    return statistics.median(rates)


def list_versions() -> dict[str, str]:
    """Returns the versions of the installed packages that these measurements depend on."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: found[name] for name in PACKAGES if name in found}


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("peer", choices=PEERS)
    p.add_argument(
        "work",
        help="rejax: ppo, dqn or sac; sbx: tqc, crossq, droq, simba or sac; sb3_contrib: ars; rltools: ppo or sac; "
        "brax, envpool: an environment; craftax, xminigrid: a folder",
    )
    p.add_argument("envs", type=int)
    p.add_argument("--seconds", type=float, default=10.0)
    p.add_argument("--scale", type=float, default=1.0, help="factor of the steps of a call")
    args = p.parse_args()
    rate, about = PEERS[args.peer](args.work, args.envs, args.seconds, args.scale)
    line = {"peer": args.peer, "work": args.work, "envs": args.envs, "steps_per_s": round(rate, 1), **about}
    print(json.dumps({**line, "versions": list_versions()}))


if __name__ == "__main__":
    main()
