"""Implicit quantile networks (Dabney et al., arXiv:1806.06923): quantiles of the return at random levels.

    q(s, a; level) = f(psi(s) * phi(level))_a,   phi(level) = relu(W cos(pi i level) + b), i = 0 .. 63     (eq. 3 and 4)

psi is the torso and a layer of `width`; f is another such layer and the output layer. Each evaluation of the network
draws `num_quantiles` levels (the paper's N, N' and K). All rows of a batch share the levels, so devices that share a
batch draw the same levels. Greedy acting takes the levels (i + 1/2) / K.
Targets, double, munchausen, memory, masks and replay are those of DQN.

    algo = iqn.make(iqn.Config(), spec)
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step
"""

import math
from dataclasses import replace
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
from annotated_types import Interval

from jrl import networks as nets
from jrl.algos import dqn, parts
from jrl.algos.agent import MakeOptions
from jrl.algos.observer import Observer
from jrl.algos.q_heads import QHead
from jrl.networks import Head, Network, NetworkConfig
from jrl.networks.dense import dense, layer
from jrl.ops import distributional, random
from jrl.types import Algo, Array, Discrete, EnvSpec, Key, PyTree, hyperparams

DEFAULT_NETWORK = NetworkConfig(activation="relu", init="uniform")
_COSINES = 64  # number of cosine features of a level (section 4)


@hyperparams
class Config(dqn.QLearning):
    """Hyper-parameters of IQN; a Schedule is a number or `[[env_steps, value], ...]`."""

    num_quantiles: Annotated[int, Interval(ge=1, le=1024)] = 32  # levels per evaluation of the network
    width: Annotated[int, Interval(ge=1, le=65_536)] = 128  # width of the layers of psi, phi and f

    def q_head(self) -> QHead:
        """Returns the head with K quantiles and their K levels per action."""
        num = self.num_quantiles
        mean = lambda outputs: jnp.mean(outputs[..., :num], -1)

        def backup(outputs, policy, bonus, reward, discount):
            after = outputs[..., :num] if bonus is None else outputs[..., :num] + bonus[..., None]
            return reward[:, None] + discount[:, None] * jnp.sum(policy[..., None] * after, 1)

        loss = lambda outputs, target: distributional.quantile_huber(outputs[:, :num], target, outputs[:, num:])
        return QHead(2 * num, mean, backup, loss, lambda target: jnp.mean(target, -1), False)

    @property
    def draws(self) -> bool:
        return True


def networks(cfg: Config, observer: Observer, network: NetworkConfig) -> Network:
    """Returns networks with one output `q` [A * 2K]: for each action the quantiles and their levels."""
    assert isinstance(observer.spec.action, Discrete)
    num_actions, width = observer.spec.action.n, cfg.width
    base = nets.build(observer.spec, replace(network, shared=True), {"embedding": Head(width, math.sqrt(2))})
    sizes = {"level": (_COSINES, width), "hidden": (width, width), "q_head": (width, num_actions)}

    def init(key: Key) -> PyTree:
        key, *keys = jax.random.split(key, 4)
        return {"base": base.init(key)} | {name: layer(k, *sizes[name]) for name, k in zip(sizes, keys, strict=True)}

    def quantiles(params: PyTree, embedding: Array, key: Key | None) -> tuple[Array]:
        """Returns outputs [..., A * 2K] for embeddings [..., width]; all rows share the levels [K]."""
        num, x = cfg.num_quantiles, jax.nn.relu(embedding.reshape(-1, 1, width))
        middles = (jnp.arange(num, dtype=jnp.float32) + 0.5) / num
        levels = middles if key is None else random.uniform(key, (num,))
        cosines = jnp.cos(math.pi * levels[:, None] * jnp.arange(_COSINES, dtype=jnp.float32)[None])
        x = x * jax.nn.relu(dense(params["level"], cosines))[None]
        q = jnp.swapaxes(dense(params["q_head"], jax.nn.relu(dense(params["hidden"], x))), 1, 2)  # [rows, A, K]
        both = jnp.concatenate([q, jnp.broadcast_to(levels[None, None], q.shape)], -1)
        return (both.reshape(*embedding.shape[:-1], -1),)

    def apply(params, obs, *names, key=None, **rows):
        return quantiles(params, base.apply(params["base"], obs, key=key if network.drops else None, **rows)[0], key)

    def step(params, obs, carry, *names, key=None):
        (embedding,), carry = base.step(params["base"], obs, carry)
        return quantiles(params, embedding, key), carry

    def unroll(params, window, *names, key=None):
        (embedding,), carry = base.unroll(params["base"], window)
        return quantiles(params, embedding, key), carry

    return Network(init, apply, base.carry, step, unroll)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes IQN, a replay-based Algo. Arguments and errors: see `jrl.algos`."""
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    return dqn.assemble(cfg, spec, network, networks, **options)
