"""A callback that is compiled into the training program: reward shaping without leaving the device.

    python examples/callbacks_in_program.py [ITERATIONS]

`on_sample_end`, marked `in_program`, is a pure function of the rollout: here it adds gamma phi(s') - phi(s), which
changes no optimal policy (Ng, Harada and Russell, 1999), with phi the share of the corridor that lies behind. A walk of
48 fields that only pays at its end is then learned in a few iterations. `on_learn_on_batch` sees each minibatch, and
what it counts is reported. Prints the mean return with and without shaping; returns are those of the environment.
"""

import sys

import jax.numpy as jnp

from jrl.api import Callbacks, PPOConfig, in_program

GAMMA, LENGTH = 0.99, 48


class Shaping(Callbacks):
    @in_program
    def on_sample_end(self, samples):
        following = jnp.concatenate([samples.obs[1:], samples.last_obs[None]])
        progress = lambda obs: obs[..., 0] / obs[..., 1]  # position, length: [T, B]
        # what follows an end counts as 0, or else the sum over an episode would depend on where it ended
        added = GAMMA * jnp.where(samples.terminated, 0.0, progress(following)) - progress(samples.obs)
        return samples.replace(reward=samples.reward + added)

    @in_program
    def on_learn_on_batch(self, train_batch):
        return train_batch, {"mean_reward": jnp.mean(train_batch.reward)}


def main(iterations: int = 12) -> dict[str, float]:
    config = PPOConfig().environment("Corridor-v0", env_config={"length": LENGTH}, backend="jax")
    config.env_runners(num_envs=16).training(lr=1e-3, gamma=GAMMA).reporting(metrics_num_episodes_for_smoothing=32)
    found = {}
    for name, shaped in (("without", config), ("with", config.copy().callbacks(Shaping))):
        with shaped.build() as algo:
            for _ in range(iterations):
                result = algo.train()
        found[name] = result["episode_return_mean"]
        print(f"{name} shaping: return {found[name]:.2f}")
    counted = {k: v for k, v in result["learners"]["default_policy"].items() if "mean_reward" in k}
    print("reported:", counted)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
