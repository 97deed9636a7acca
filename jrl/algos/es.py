"""OpenAI's evolution strategy (arXiv:1703.03864).

    algo = es.make(es.Config(population=64), spec)
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B]

The gradient of the mean return is estimated by N members theta + noise_std eps_i, in antithetic pairs:

    1 / (N noise_std) sum_i u_i eps_i

The utility u_i is the member's rank, from 1/2 for the best return to -1/2 for the worst. `algo.optimizer` makes the
step; the paper's weight decay is that of adamw. `jrl.algos.evolution` has acting and scores.
"""

from typing import Any, ClassVar, Unpack

import jax.numpy as jnp

from jrl.algos import evolution
from jrl.algos.agent import MakeOptions
from jrl.algos.evolution import Evolution, Strategy
from jrl.fields.bounds import NonNegativeSchedule
from jrl.networks import NetworkConfig
from jrl.types import Algo, Array, EnvSpec, hyperparams

DEFAULT_NETWORK = evolution.DEFAULT_NETWORK


@hyperparams
class Config(Evolution):
    """Hyper-parameters of OpenAI-ES; a Schedule is a number or `[[env_steps, value], ...]`."""

    in_pairs: ClassVar[bool] = True

    lr: NonNegativeSchedule = 0.01
    normalize_obs: bool = True


def learn(
    cfg: Config, own: dict[str, Any], deviations: Array, scores: Array, generation: Array
) -> tuple[Array, dict[str, Any]]:
    """Returns the gradient [P]; arguments as for `evolution.Strategy.learn`."""
    utilities = evolution.rank_weights(scores, jnp.linspace(0.5, -0.5, len(scores)))
    return utilities @ deviations / (len(scores) * cfg.noise_std**2), own


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes OpenAI-ES, an on-policy Algo. Arguments and errors as for `evolution.make`."""
    strategy = Strategy(lambda cfg, size: {}, evolution.mirrored, learn)
    return evolution.make(strategy, cfg, spec, network, **options)
