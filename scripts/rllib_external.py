"""How fast does RLlib learn from a client? Its own example of an external environment, for so many seconds.

    python -m venv /tmp/rllib                                     # apart from jrl's environment
    /tmp/rllib/bin/pip install torch "ray[rllib]==2.60.0" msgpack msgpack_numpy
    /tmp/rllib/bin/python scripts/rllib_external.py --seconds 45

PPO learns from RLlib's CartPole client (`_dummy_external_client`), in a process of its own, which acts by itself and
waits while PPO learns: the settings are those of `env_connecting_to_rllib_w_tcp_client.py`. Prints one JSON line with
the environment steps per second that were learned from, the start left out. `scripts/bench_serve.py one --rllib PYTHON`
runs it beside jrl's server.
"""

import argparse
import json
import multiprocessing
import time

import gymnasium
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.external.env_runner_server_for_external_inference import EnvRunnerServerForExternalInference
from ray.rllib.examples.envs.classes.utils.dummy_external_client import _dummy_external_client

_STEPS = "num_env_steps_sampled_lifetime"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--seconds", type=float, default=45.0)
    p.add_argument("--port", type=int, default=5555)
    args = p.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    client = multiprocessing.get_context("spawn").Process(
        target=_dummy_external_client, args=(args.port + 1,), daemon=True
    )
    client.start()
    config = (
        PPOConfig()
        .environment(
            observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32),
            action_space=gymnasium.spaces.Discrete(2),
            env_config={"port": args.port},
        )
        .env_runners(num_env_runners=1, env_runner_cls=EnvRunnerServerForExternalInference)
        .training(num_epochs=10, vf_loss_coeff=0.01)
        .rl_module(model_config=DefaultModelConfig(vf_share_layers=True))
    )
    algo = config.build_algo()
    first = algo.train()["env_runners"]  # with what starts
    begin, steps, found = time.perf_counter(), int(first[_STEPS]), first
    while time.perf_counter() - begin < args.seconds:
        found = algo.train()["env_runners"]
    rate = (int(found[_STEPS]) - steps) / (time.perf_counter() - begin)
    told = {"work": "rllib", "version": ray.__version__, "steps_per_s": round(rate, 1)}
    print(json.dumps({**told, "return": found.get("episode_return_mean")}), flush=True)
    client.kill()
    algo.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
