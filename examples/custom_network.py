"""Networks of your own: a flax.linen class, a flax.nnx class, and two pure functions, each behind PPO.

    python examples/custom_network.py [ITERATIONS]

Each makes features of the observation; policy and value have one each. Prints the number of their parameters, and the
return in CartPole after training.
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jrl.api import PPOConfig


class Residual(nn.Module):
    width: int = 64

    @nn.compact
    def __call__(self, obs):
        x = nn.tanh(nn.Dense(self.width)(obs))
        return x + nn.tanh(nn.Dense(self.width)(x))


class Wide(nnx.Module):
    def __init__(self, space, *, width=64, rngs):
        self.layer = nnx.Linear(space.shape[0], width, rngs=rngs)

    def __call__(self, obs):
        return nnx.gelu(self.layer(obs))


def fourier(space, width=64):
    """Sines and cosines of learned frequencies."""

    def init(key):
        return {"frequency": jax.random.normal(key, (space.shape[0], width))}

    def apply(params, obs):
        x = obs @ params["frequency"]
        return jnp.concatenate([jnp.sin(x), jnp.cos(x)], -1)

    return init, apply


def main(iterations: int = 20) -> dict[str, tuple[int, float]]:
    config = PPOConfig().environment("CartPole-v1", backend="jax").env_runners(num_envs=8).training(lr=1e-3)
    torsos: dict[str, Any] = {"linen": Residual, "nnx": Wide, "functions": fourier}
    found = {}
    for kind, torso in torsos.items():
        with config.copy().training(model={"torso": torso, "torso_options": {"width": 32}}).build() as algo:
            for _ in range(iterations):
                result = algo.train()
            params = algo.get_weights()["default_policy"]["params"]
        count = sum(x.size for name in ("policy_torso", "value_torso") for x in jax.tree.leaves(params[name]))
        found[kind] = count, result["episode_return_mean"]
        print(f"{kind}: {count:,} parameters, return {result['episode_return_mean']:.0f}")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
