"""Trains a tiny policy with the installed rsl_rl: a checkpoint, and what the policy returns for some observations.

    python scripts/make_rsl_rl_models.py tests/fixtures/rsl_rl/v5     # needs torch and rsl-rl-lib, 2.3 to 5.x, not jrl

`tests/importer/test_rsl_rl.py` reads the fixtures without either. The policy reads 3 numbers and has 1 action, as in
Pendulum-v1; observations and rewards of the training are random.
"""

import argparse
import json
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from make_sb3_models import recompress
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

NUM_ENVS = 4
RELEASE = int(version("rsl-rl-lib").partition(".")[0])


class Env(VecEnv):
    """Random observations: 3 for the actor, `critic_size` for the critic; random rewards."""

    def __init__(self, critic_size: int):
        self.num_envs, self.num_actions, self.max_episode_length = NUM_ENVS, 1, 50
        self.episode_length_buf = torch.zeros(NUM_ENVS, dtype=torch.long)
        self.device, self.cfg, self.critic_size = "cpu", {}, critic_size

    def draw(self) -> Any:
        obs = {"policy": 1 + 2 * torch.randn(NUM_ENVS, 3)}
        if self.critic_size != 3:
            obs["critic"] = torch.randn(NUM_ENVS, self.critic_size)
        return obs if RELEASE == 2 else TensorDict(obs, batch_size=[NUM_ENVS])

    def reset(self) -> Any:  # abstract in release 2
        return self.get_observations()

    def get_observations(self) -> Any:
        obs = self.draw()
        return (obs["policy"], {"observations": obs}) if RELEASE == 2 else obs

    def step(self, actions: torch.Tensor) -> Any:
        obs, extras = self.draw(), {"time_outs": torch.zeros(NUM_ENVS)}
        if RELEASE == 2:
            obs, extras = obs["policy"], {**extras, "observations": obs}
        return obs, torch.randn(NUM_ENVS), torch.zeros(NUM_ENVS, dtype=torch.long), extras


def make_config(activation: str, std: str, normalize: bool, critic_size: int) -> dict[str, Any]:
    """Returns the runner's config in the layout of the installed release."""
    critic = "policy" if critic_size == 3 else "critic"
    cfg: dict[str, Any] = {
        "num_steps_per_env": 8,
        "save_interval": 100,
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2, "gamma": 0.97,
                      "rnd_cfg": None, "symmetry_cfg": None},
    }  # fmt: skip
    if RELEASE <= 3:
        policy = {"class_name": "ActorCritic", "actor_hidden_dims": [6, 5], "critic_hidden_dims": [7],
                  "activation": activation, "noise_std_type": std}  # fmt: skip
        if RELEASE == 2:
            return {**cfg, "policy": policy, "empirical_normalization": normalize}
        policy |= {"actor_obs_normalization": normalize, "critic_obs_normalization": normalize}
        return {**cfg, "policy": policy, "obs_groups": {"policy": ["policy"], "critic": [critic]}}
    common = {"class_name": "MLPModel", "activation": activation, "obs_normalization": normalize}
    gaussian: dict[str, Any] = {"distribution_cfg": {"class_name": "GaussianDistribution", "std_type": std}}
    if RELEASE == 4:
        gaussian = {"stochastic": True, "noise_std_type": std}
    return {
        **cfg,
        "obs_groups": {"actor": ["policy"], "critic": [critic]},
        "actor": {**common, "hidden_dims": [6, 5], **gaussian},
        "critic": {**common, "hidden_dims": [7]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--activation", default="elu")
    parser.add_argument("--std", default="scalar", choices=["scalar", "log"])
    parser.add_argument("--plain", action="store_true", help="do not normalise observations")
    parser.add_argument("--critic-size", type=int, default=3, help="numbers that the critic reads")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    (args.out / "params").mkdir(parents=True, exist_ok=True)
    cfg = make_config(args.activation, args.std, not args.plain, args.critic_size)
    (args.out / "params" / "agent.yaml").write_text(json.dumps(cfg, indent=1) + "\n")  # JSON is YAML, too
    with tempfile.TemporaryDirectory() as logs:
        runner = OnPolicyRunner(Env(args.critic_size), cfg, log_dir=logs)
        runner.learn(6)
        runner.save(str(args.out / "model_5.pt"))
    file = args.out / "model_5.pt"
    file.write_bytes(recompress(file.read_bytes(), zipfile.ZIP_DEFLATED))
    size = args.critic_size
    obs, seen = 1 + 2 * torch.randn(8, 3), torch.randn(8, size)
    given = TensorDict({"policy": obs, "critic": obs if size == 3 else seen}, batch_size=[8])
    policy = runner.get_inference_policy()
    with torch.no_grad():
        if RELEASE == 2:
            action, value = policy(obs), runner.alg.policy.evaluate(runner.obs_normalizer(obs))
        else:
            action = policy(given)
            value = runner.alg.policy.evaluate(given) if RELEASE == 3 else runner.alg.critic(given)
    found = {"obs": obs.tolist(), "action": action.tolist(), "value": value[:, 0].tolist()}
    (args.out / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
