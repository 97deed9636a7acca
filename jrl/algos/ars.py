"""Augmented random search (arXiv:1803.07055).

    algo = ars.make(ars.Config(), spec, NetworkConfig(hidden=()))       # a linear policy, as in the paper
    state, aux = jax.jit(algo.update)(state, rollout, key)              # rollout: jrl.types.Rollout [T, B]

Members are pairs, theta + noise_std delta_k and theta - noise_std delta_k, with returns r+ and r-. The step is

    lr / (b sigma_R) sum_k (r+_k - r-_k) delta_k

over the b directions of greatest max(r+, r-), and sigma_R is the standard deviation of their 2 b returns. With
`normalize_obs` this is V2-t of the paper, without it V1-t. `jrl.algos.evolution` has acting and scores.
"""

from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from jax import lax

from jrl.algos import evolution
from jrl.algos.agent import MakeOptions
from jrl.algos.evolution import Evolution, Strategy
from jrl.algos.optimizers import Optimizer, Sgd
from jrl.fields.bounds import Count, NonNegativeSchedule
from jrl.networks import NetworkConfig
from jrl.types import Algo, Array, EnvSpec, hyperparams

DEFAULT_NETWORK = evolution.DEFAULT_NETWORK


@hyperparams
class Config(Evolution):
    """Hyper-parameters of ARS; a Schedule is a number or `[[env_steps, value], ...]`."""

    in_pairs: ClassVar[bool] = True

    lr: NonNegativeSchedule = 0.02
    top_directions: Count | None = None  # most pairs of members that the step uses, the best ones; null: all
    normalize_obs: bool = True
    optimizer: Optimizer = Sgd()


def learn(
    cfg: Config, own: dict[str, Any], deviations: Array, scores: Array, generation: Array
) -> tuple[Array, dict[str, Any]]:
    """Returns the step [P] before the factor lr; arguments as for `evolution.Strategy.learn`."""
    pairs = scores.reshape(2, -1)
    best, index = lax.top_k(pairs.max(0), min(cfg.top_directions or pairs.shape[1], pairs.shape[1]))
    plus, minus = pairs[:, index]
    deltas = deviations[index] / cfg.noise_std
    return (plus - minus) @ deltas / (len(best) * jnp.std(pairs[:, index]) + 1e-6), own


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes ARS, an on-policy Algo. Arguments and errors as for `evolution.make`."""
    strategy = Strategy(lambda cfg, size: {}, evolution.mirrored, learn)
    return evolution.make(strategy, cfg, spec, network, **options)
