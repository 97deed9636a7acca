"""Parallelised Q-network: Q-learning from rollouts, without replay and without target network (arXiv:2407.04811).

    algo = pqn.make(pqn.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B], out.extras: value
    state, aux = jax.jit(algo.update)(state, rollout, key)                 # rollout: jrl.types.Rollout [T, B]

Layer norm makes this stable (`network.layer_norm`, on in DEFAULT_NETWORK): without it Q-learning may diverge. The
targets are Peng's Q(lambda): lambda-returns whose values are max_a Q, which acting has computed already. The optimizer
is Adam; the paper's RAdam was not better on CartPole. Gradients and statistics are reduced over
`make(..., axis_name="d")`; float hyper-parameters are leaves of Config and can be vmapped.
"""

import math
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jrl import networks
from jrl.algos import custom_loss, exploration, parameter_noise, parts
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import EpsilonGreedy, OverQ
from jrl.hyper import Schedule
from jrl.networks import Head, NetworkConfig
from jrl.ops import losses, minibatch, normalize, returns, schedules
from jrl.types import (
    ActOut,
    Algo,
    Array,
    Discrete,
    EnvSpec,
    InputError,
    Key,
    PyTree,
    Rollout,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(128, 128), activation="relu", layer_norm=True)


@hyperparams
class Config:
    """Hyper-parameters of PQN; a Schedule is a number or `[[env_steps, value], ...]`."""

    lr: Schedule = 5e-4  # step size
    gamma: float = 0.99  # discount per step
    q_lambda: float = 0.65  # of the lambda-returns: 0 is one-step Q-learning, 1 the return of the whole rollout
    num_epochs: int = 2  # passes over each rollout
    num_minibatches: int = 4  # gradient steps per pass
    loss: Literal["mse", "huber"] = "mse"  # half the squared error, or huber
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    # how actions are chosen while training
    exploration: OverQ = EpsilonGreedy(epsilon=((0, 1.0), (100_000, 0.05)))
    max_grad_norm: float | None = 10.0  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: float | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: float | None = None  # clips each element of the gradient
    adam_eps: float = 1e-8  # added to Adam's denominator

    def validate(self) -> list[str]:
        """What is wrong with the values, each with its mend."""
        errors = parts.out_of_range(
            self,
            unit=("gamma", "q_lambda"),
            positive=("num_epochs", "num_minibatches", *parts.CLIPPING),
        )
        return errors + exploration.validate(self.exploration)


@struct.dataclass
class State:
    params: PyTree
    opt_state: PyTree
    return_stats: PyTree  # normalize.RunningStats of the discounted return, or () without normalize_reward
    env_steps: Array  # [] u32, environment steps learned from, over all devices


@struct.dataclass
class NoisyState(State):
    """With exploration by parameter noise."""

    noise: parameter_noise.Noise


@struct.dataclass
class Rows:
    """One row per environment step, as the loss reads it; N rows."""

    obs: PyTree  # [N, *]
    action: Array  # [N] i32
    target: Array  # [N] f32
    weight: Array  # [N] f32, 0 on masked rows, 1 on average


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    axis_name: str | None = None,
    loss: Loss | None = None,
) -> Algo:
    """PQN as pure functions.

    Args:
      cfg: hyper-parameters; floats may be traced.
      spec: spaces of the environment; `num_envs` is not read, the rollout's shape counts.
      network: shape of the Q network.
      axis_name: of the mapped axis over devices; None outside of one.
      loss: takes the place of the algorithm's own, of Rows [N] (`jrl.algos`); None: none does.
    Returns:
      An on-policy Algo.
    Raises:
      InputError: a space or torso that PQN cannot handle, or an exploration that needs more than Q values.
    """
    if not isinstance(spec.action, Discrete):
        raise InputError(f"pqn needs a Discrete action space, not {spec.action}: use ppo, or sac or td3 for a Box")
    net = networks.build(spec, network, {"q": Head(spec.action.n)})
    q_values = lambda params, obs: net.apply(params, obs, "q")[0]  # [N, A]
    explorer = exploration.make(cfg.exploration, spec.action, kinds=("q",))
    noise = parameter_noise.make(cfg.exploration, q_values, spec.action, NoisyState, axis_name=axis_name)
    custom_loss.check(loss)
    optimizer = parts.adam(cfg)
    distance = losses.huber if cfg.loss == "huber" else lambda x: 0.5 * jnp.square(x)
    row_bytes = math.prod(spec.observation.shape) * jnp.dtype(spec.observation.dtype).itemsize

    def init(key: Key) -> State:
        params = net.init(key)
        return_stats = normalize.init(()) if cfg.normalize_reward else ()
        return noise.init(State(params, optimizer.init(params), return_stats, jnp.zeros((), jnp.uint32)), key)

    def actor(state: State) -> parts.Actor:
        return parts.Actor(state.params, state.env_steps, noise.perturbed(state, state.params))

    def act(actor: parts.Actor, obs, carry, key: Key, explore: bool = True) -> ActOut:
        q = q_values(actor.params, obs)
        extras = {"value": jnp.max(q, -1)}
        if explore:
            # values are those of the parameters that learn, whatever acts
            q = q if actor.noisy == () else q_values(actor.noisy, obs)
            action, carry = explorer.sample(q, key, actor.env_steps, carry)
        else:
            action = jnp.argmax(q, -1).astype(jnp.int32)
        return ActOut(action, carry, extras)

    def rows_of(state: State, rollout: Rollout) -> tuple[Rows, PyTree]:
        """Q(lambda) targets and weights: [T, B] rollout -> [T * B] rows, and the updated return statistics."""
        return_stats = parts.observe_returns(state.return_stats, rollout, axis_name)
        # Q does not change while a rollout is collected, so that what acting computed is what a second pass would
        last = jnp.max(q_values(state.params, rollout.last_obs), -1)
        target = returns.lambda_returns(
            parts.scaled_reward(return_stats, rollout.reward),
            rollout.terminated,
            rollout.terminated | rollout.truncated,
            jnp.concatenate([rollout.extras["value"], last[None]]),
            gamma=cfg.gamma,
            lambda_=cfg.q_lambda,
        )
        action, target = parts.cleared(rollout.mask, (rollout.action, target))
        rows = Rows(rollout.obs, action, target, parts.weights(rollout.mask, axis_name))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), return_stats

    def own_loss(params, rows: Rows):
        q = q_values(params, rows.obs)
        # a comparison instead of an index: its gradient is a select, that of an index a scatter
        taken = jax.lax.broadcasted_iota(jnp.int32, q.shape, 1) == rows.action[:, None]
        value = jnp.sum(jnp.where(taken, q, 0.0), -1)
        mean = lambda x: jnp.mean(rows.weight * x)
        error = mean(distance(value - rows.target))
        return error, {"loss/q": error, "value/q": mean(value), "value/target": mean(rows.target)}

    rows_loss = custom_loss.over_rows(loss, own_loss, parts.QNetwork(net.init, q_values))

    def update(state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
        num_steps, num_envs = rollout.reward.shape
        rows, return_stats = rows_of(state, rollout)
        take = minibatch.row_taker(rows)
        chunk = minibatch.chunk_rows(num_steps * num_envs // cfg.num_minibatches, row_bytes)
        lr = schedules.value(cfg.lr, state.env_steps)

        def step(carry, index):
            params, opt_state = carry
            gradient, metrics = minibatch.mean_gradient(rows_loss, params, take(index), chunk)
            gradient, metrics = parts.pmean((gradient, metrics), axis_name)
            return parts.descend(optimizer, lr, gradient, opt_state, params), metrics

        def epoch(carry, key):
            index = minibatch.shuffle(key, num_steps, num_envs, cfg.num_minibatches, axis_name=axis_name)
            return jax.lax.scan(step, carry, index)

        start = (state.params, state.opt_state)
        (params, opt_state), metrics = jax.lax.scan(epoch, start, jax.random.split(key, cfg.num_epochs))
        state = noise.adapted(state, state.params, rollout.last_obs)  # of the parameters that acted
        env_steps = parts.count_steps(state.env_steps, rollout.mask, axis_name)
        metrics = jax.tree.map(jnp.mean, metrics) | {"train/lr": lr} | noise.metrics(state)
        state = replace(state, params=params, opt_state=opt_state, return_stats=return_stats, env_steps=env_steps)
        return state, UpdateAux(metrics)

    return Algo(
        init=init,
        actor=actor,
        carry=explorer.carry,
        act=act,
        update=update,
        on_policy=True,
        outputs=lambda state, obs: {"q": q_values(state.params, obs)},
        running_return_gamma=cfg.gamma if cfg.normalize_reward else None,
    )


__all__ = ["Config", "NoisyState", "State", "make"]
