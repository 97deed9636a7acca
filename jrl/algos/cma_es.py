"""CMA-ES: evolution with an adapted covariance matrix and step size (Hansen, arXiv:1604.00772; equations by its
numbers).

    algo = cma_es.make(cma_es.Config(population=16), spec, NetworkConfig(hidden=()))
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B]

Members are theta + sigma C^(1/2) z with z normal, C the identity and sigma `noise_std` at first. The step is the mean
of the better half, weighted by rank. A full matrix has P^2 numbers, and a generation takes its eigenvectors, so P is
limited. `covariance: diagonal` has P numbers (sep-CMA-ES, Ros and Hansen, 2008). Weights of the worse half are 0.
`jrl.algos.evolution` has acting and scores.
"""

import math
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jrl.algos import evolution
from jrl.algos.agent import MakeOptions
from jrl.algos.evolution import Evolution, Strategy
from jrl.algos.optimizers import Optimizer, Sgd
from jrl.errors import InputError
from jrl.fields.bounds import NonNegativeSchedule, Positive
from jrl.networks import NetworkConfig
from jrl.types import Algo, Array, EnvSpec, Key, hyperparams

DEFAULT_NETWORK = evolution.DEFAULT_NETWORK
_MOST_PARAMETERS = 1000  # limit for a full matrix, whose eigenvectors take 0.3 s on two CPU cores


@hyperparams
class Config(Evolution):
    """Hyper-parameters of CMA-ES; a Schedule is a number or `[[env_steps, value], ...]`."""

    lr: NonNegativeSchedule = 1.0  # learning rate c_m of the mean
    noise_std: Positive = 0.5  # initial step size sigma
    covariance: Literal["full", "diagonal"] = "full"  # diagonal: for many parameters
    optimizer: Optimizer = Sgd()


class Rates(NamedTuple):
    """Constants of CMA-ES for N members with P parameters."""

    weights: Array  # [N], best to worst
    mu_eff: float  # variance-effective number of members
    c_sigma: float
    d_sigma: float
    c_c: float
    c_1: float
    c_mu: float
    norm: float  # expected length of a normal vector [P]


def rates(population: int, size: int, *, diagonal: bool) -> Rates:
    """Returns the defaults of table 1; for a diagonal matrix c_1 and c_mu are (P + 2) / 3 times as large."""
    raw = [max(0.0, math.log((population + 1) / 2) - math.log(i + 1)) for i in range(population)]
    weights = [w / sum(raw) for w in raw]
    mu, n = 1.0 / sum(w * w for w in weights), float(size)
    c_sigma = (mu + 2) / (n + mu + 5)
    d_sigma = 1 + 2 * max(0.0, math.sqrt((mu - 1) / (n + 1)) - 1) + c_sigma
    faster = (n + 2) / 3 if diagonal else 1.0
    c_1 = min(1.0, faster * 2 / ((n + 1.3) ** 2 + mu))
    c_mu = min(1 - c_1, faster * 2 * (0.25 + mu + 1 / mu - 2) / ((n + 2) ** 2 + mu))
    c_c = (4 + mu / n) / (n + 4 + 2 * mu / n)
    norm = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))
    return Rates(jnp.array(weights), mu, c_sigma, d_sigma, c_c, c_1, c_mu, norm)


@jax.custom_batching.sequential_vmap
def _eigh(matrix):
    # one by one under vmap: LAPACK's batched decompositions hang on jaxlib 0.10 with two cores
    return jnp.linalg.eigh(matrix)


def init(cfg: Config, size: int) -> dict[str, Any]:
    """Returns sigma [], both evolution paths [P], and C with its factors: [P, P], or [P] of a diagonal."""
    own = {name: jnp.zeros(size) for name in ("path_sigma", "path_c")}
    own |= {"sigma": jnp.asarray(cfg.noise_std, jnp.float32), "lengths": jnp.ones(size)}
    if cfg.covariance == "diagonal":
        return own | {"matrix": jnp.ones(size)}
    return own | {"matrix": jnp.eye(size), "axes": jnp.eye(size)}


def sample(cfg: Any, own: dict[str, Any], key: Key, size: int) -> Array:
    """Returns deviations [N, P], sigma B D z (equations 38 to 40)."""
    scaled = own["sigma"] * own["lengths"][None] * jax.random.normal(key, (cfg.population, size))
    return scaled if cfg.covariance == "diagonal" else scaled @ own["axes"].T


def learn(
    cfg: Config, own: dict[str, Any], deviations: Array, scores: Array, generation: Array
) -> tuple[Array, dict[str, Any]]:
    """Returns the step [P] and the adapted arrays; arguments as for `evolution.Strategy.learn`."""
    diagonal, size = cfg.covariance == "diagonal", deviations.shape[1]
    r = rates(len(scores), size, diagonal=diagonal)
    weights = evolution.rank_weights(scores, r.weights)
    step = weights @ deviations
    y, y_w = deviations / own["sigma"], step / own["sigma"]  # equation 41
    white = y_w / own["lengths"] if diagonal else own["axes"] @ ((y_w @ own["axes"]) / own["lengths"])
    path_sigma = (1 - r.c_sigma) * own["path_sigma"] + math.sqrt(r.c_sigma * (2 - r.c_sigma) * r.mu_eff) * white  # 43
    length = jnp.linalg.norm(path_sigma)
    sigma = own["sigma"] * jnp.exp(jnp.minimum(1.0, r.c_sigma / r.d_sigma * (length / r.norm - 1)))  # 44
    unbiased = jnp.sqrt(1 - (1 - r.c_sigma) ** (2.0 * (generation + 1.0)))
    is_short = length / unbiased < (1.4 + 2 / (size + 1)) * r.norm  # h_sigma
    path_c = (1 - r.c_c) * own["path_c"] + is_short * math.sqrt(r.c_c * (2 - r.c_c) * r.mu_eff) * y_w  # 45
    kept = 1 - r.c_1 - r.c_mu + (1 - is_short) * r.c_1 * r.c_c * (2 - r.c_c)
    outer: Any = (lambda w, x: w @ x**2) if diagonal else (lambda w, x: (x.T * w[None]) @ x)
    matrix = kept * own["matrix"] + r.c_1 * outer(jnp.ones(1), path_c[None]) + r.c_mu * outer(weights, y)  # 47
    own = {"sigma": sigma, "path_sigma": path_sigma, "path_c": path_c, "matrix": matrix}
    if diagonal:
        return step, own | {"lengths": jnp.sqrt(matrix)}
    squares, axes = _eigh(matrix)
    return step, own | {"lengths": jnp.sqrt(jnp.maximum(squares, 1e-12 * squares[-1])), "axes": axes}


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes CMA-ES, an on-policy Algo. Arguments as for `evolution.make`.

    Raises:
      InputError: too many parameters for a full matrix; see also `evolution.make`.
    """
    strategy = Strategy(init, sample, learn)
    algo = evolution.make(strategy, cfg, spec, network, **options)
    size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(algo.init, jax.random.key(0)).params))
    if cfg.covariance == "full" and size > _MOST_PARAMETERS:
        raise InputError(
            f"algo.covariance full: expected at most {_MOST_PARAMETERS} parameters, got {size}: set "
            "algo.covariance=diagonal, or a smaller network.hidden, such as [] for a linear policy"
        )
    return algo
