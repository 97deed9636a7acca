"""Proximal policy optimisation (arXiv:1707.06347), with the options of the field's implementations.

    algo = ppo.make(ppo.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B], out.extras: log_prob
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B]

`make(..., axis_name="d")` gives functions for `jax.pmap(..., axis_name="d")` or `jrl.parallel.pmap`: gradients and
statistics are reduced over that axis. Float hyper-parameters are pytree leaves of Config, so they can be vmapped.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

from jrl import networks
from jrl.algos import actor_critic, parts
from jrl.hyper import Schedule
from jrl.networks import NetworkConfig
from jrl.ops import losses, minibatch, normalize, returns, schedules
from jrl.types import ActOut, Algo, Array, Box, EnvSpec, Key, PyTree, Rollout, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config:
    """Hyper-parameters of PPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    lr: Schedule = 3e-4  # Adam's step size
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # of generalised advantage estimation
    clip_eps: Schedule = 0.2  # the probability ratio is clipped to [1 - clip_eps, 1 + clip_eps]
    value_clip_eps: float | None = None  # clips the value's move likewise; null: no clipping
    vf_coef: float = 0.5  # weight of the value loss
    ent_coef: Schedule = 0.0  # weight of the entropy bonus
    num_epochs: int = 4  # passes over each rollout
    num_minibatches: int = 4  # gradient steps per pass
    normalize_advantage: bool = True  # to mean 0 and deviation 1 over the rollout's unmasked rows
    normalize_obs: bool = False  # by running mean and deviation; images stay as they are
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    max_grad_norm: float | None = 0.5  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: float | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: float | None = None  # clips each element of the gradient
    adam_eps: float = 1e-5  # added to Adam's denominator
    target_kl: float | None = None  # no more gradient steps on a rollout once the KL from the acting policy exceeds it
    kl_coef: float = 0.0  # weight of a penalty on the KL from the acting policy (at the start, if kl_target is set)
    kl_target: float | None = None  # adapts the weight: x 1.5 above twice this KL, x 0.5 below half of it
    microbatch_size: int | None = None  # rows whose gradient is computed at once; null: chosen for the device

    def validate(self) -> list[str]:
        """What is wrong with the values, each with its mend."""
        errors = parts.out_of_range(
            self,
            unit=("gamma", "gae_lambda"),
            positive=(
                "num_epochs",
                "num_minibatches",
                "value_clip_eps",
                "target_kl",
                "kl_target",
                "microbatch_size",
                *parts.CLIPPING,
            ),
        )
        if self.kl_target is not None and self.kl_coef <= 0:
            errors.append("kl_target adapts kl_coef, which must then start above 0: try 0.2")
        return errors


@struct.dataclass
class State:
    params: PyTree
    opt_state: PyTree
    obs_stats: PyTree  # normalize.RunningStats, or () without normalize_obs
    return_stats: PyTree  # normalize.RunningStats of the discounted return, or () without normalize_reward
    kl_coef: Array  # [] f32
    env_steps: Array  # [] u32, environment steps learned from, over all devices


@struct.dataclass
class Actor:
    """What acting needs of the State."""

    params: PyTree
    obs_stats: PyTree


@struct.dataclass
class Rows:
    """One row per environment step, as the loss reads it; N rows."""

    obs: PyTree  # [N, *], normalised
    action: PyTree  # [N, *]
    log_prob: Array  # [N] f32, of the acting policy
    advantage: Array  # [N] f32
    target: Array  # [N] f32, for the value
    weight: Array  # [N] f32, 0 on masked rows, 1 on average
    value: PyTree  # [N] f32, when the rollout was made; () unless values are clipped
    dist: PyTree  # the acting policy's distribution; () without a KL penalty


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, *, axis_name: str | None = None) -> Algo:
    """PPO as pure functions.

    Args:
      cfg: hyper-parameters; floats may be traced.
      spec: spaces of the environment; `num_envs` is not read, the rollout's shape counts.
      network: shape of policy and value network.
      axis_name: of the mapped axis over devices; None outside of one.
    Returns:
      An on-policy Algo.
    Raises:
      InputError: a space or torso that PPO cannot handle.
    """
    net = actor_critic.make(spec, network)
    optimizer = parts.adam(cfg)
    # integers are one-hot and images are scaled by the network, which reads them as they are
    space = spec.observation
    floats = isinstance(space, Box) and space.dtype != "uint8" and not networks.is_image(space)
    normalize_obs = cfg.normalize_obs and floats
    row_bytes = math.prod(spec.observation.shape) * jnp.dtype(spec.observation.dtype).itemsize
    penalise_kl = cfg.kl_target is not None or not (isinstance(cfg.kl_coef, float | int) and cfg.kl_coef == 0)

    def init(key: Key) -> State:
        params = net.init(key)
        return State(
            params=params,
            opt_state=optimizer.init(params),
            obs_stats=normalize.init(spec.observation.shape) if normalize_obs else (),
            return_stats=normalize.init(()) if cfg.normalize_reward else (),
            kl_coef=jnp.asarray(cfg.kl_coef, jnp.float32),
            env_steps=jnp.zeros((), jnp.uint32),
        )

    def actor(state: State) -> Actor:
        return Actor(state.params, state.obs_stats)

    def see(obs_stats, obs):
        return normalize.normalize(obs_stats, obs) if normalize_obs else obs

    def act(actor: Actor, obs, carry, key: Key, explore: bool = True) -> ActOut:
        dist, value = net.apply(actor.params, see(actor.obs_stats, obs))
        action = dist.sample(key) if explore else dist.mode()
        extras = {"log_prob": dist.log_prob(action)}
        if network.shared:  # then the value costs no more than its head; otherwise `values` is cheaper
            extras["value"] = value
        if penalise_kl:
            batch = value.shape
            extras["dist"] = jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, x.shape[-1])), dist)
        return ActOut(action, carry, extras)

    def values(state: State, rollout: Rollout) -> Array:
        """V(obs_0) .. V(obs_T), [T + 1, B], by the parameters that acted (without gradient)."""
        value = lambda obs: net.value(state.params, see(state.obs_stats, obs))
        last = value(rollout.last_obs)[None]
        if network.shared:
            return jnp.concatenate([rollout.extras["value"], last])
        # one pass in large batches, instead of a second tower in each of T small steps
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout.obs)
        num_rows = rollout.reward.size
        chunk = minibatch.chunk_rows(num_rows, row_bytes)
        return jnp.concatenate([minibatch.map_rows(value, flat, chunk).reshape(rollout.reward.shape), last])

    def loss(params, rows: Rows, clip_eps, ent_coef, kl_coef):
        dist, value = net.apply(params, rows.obs)
        # on a masked row the ratio is 1 before it is exponentiated: weight 0 alone would not undo an overflow
        log_prob = jnp.where(rows.weight > 0, dist.log_prob(rows.action), rows.log_prob)
        mean = lambda x: jnp.mean(rows.weight * x)
        surrogate, clipped = losses.clipped_surrogate(log_prob, rows.log_prob, rows.advantage, clip_eps=clip_eps)
        old_value = rows.value if cfg.value_clip_eps is not None else value
        policy_loss = mean(surrogate)
        value_loss = mean(losses.clipped_value_loss(value, old_value, rows.target, clip_eps=cfg.value_clip_eps))
        entropy = mean(dist.entropy())
        total = policy_loss + cfg.vf_coef * value_loss - ent_coef * entropy
        metrics = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "policy/entropy": entropy,
            "policy/approx_kl": mean(losses.approx_kl(log_prob, rows.log_prob)),
            "policy/clip_fraction": mean(clipped),
        }
        if penalise_kl:
            metrics["policy/kl"] = mean(rows.dist.kl(dist))
            total = total + kl_coef * metrics["policy/kl"]
        return total, metrics

    def rows_of(state: State, rollout: Rollout):
        """GAE, reward scaling and weights: [T, B] rollout -> [T * B] rows, and the updated return statistics."""
        weight = rollout.mask.astype(jnp.float32)
        reward, return_stats = rollout.reward, state.return_stats
        if cfg.normalize_reward:
            return_stats = normalize.update(return_stats, rollout.extras["running_return"], weight, axis_name=axis_name)
            reward = reward / (normalize.std(return_stats) + 1e-8)
        value = values(state, rollout)
        advantage, target = returns.gae(
            reward,
            rollout.terminated,
            rollout.terminated | rollout.truncated,
            value,
            gamma=cfg.gamma,
            gae_lambda=cfg.gae_lambda,
        )
        # what stands on a masked row is void, whatever it is: 0 * nan would not be
        valid = lambda x: jnp.where(jnp.expand_dims(rollout.mask, tuple(range(2, x.ndim))), x, jnp.zeros_like(x))
        advantage, target = valid(advantage), valid(target)
        weight = weight / jnp.maximum(parts.pmean(weight.mean(), axis_name), 1e-8)
        if cfg.normalize_advantage:
            mean = parts.pmean(jnp.mean(weight * advantage), axis_name)
            variance = parts.pmean(jnp.mean(weight * (advantage - mean) ** 2), axis_name)
            advantage = (advantage - mean) / (jnp.sqrt(variance) + 1e-8)
        rows = Rows(
            obs=see(state.obs_stats, rollout.obs),
            action=valid(rollout.action),
            log_prob=valid(rollout.extras["log_prob"]),
            advantage=advantage,
            target=target,
            weight=weight,
            value=valid(value[:-1]) if cfg.value_clip_eps is not None else (),
            dist=rollout.extras["dist"] if penalise_kl else (),
        )
        error = parts.pmean(jnp.mean(weight * (target - value[:-1]) ** 2), axis_name)
        target_mean = parts.pmean(jnp.mean(weight * target), axis_name)
        spread = parts.pmean(jnp.mean(weight * (target - target_mean) ** 2), axis_name)
        metrics = {"value/explained_variance": 1.0 - error / jnp.maximum(spread, 1e-8), "value/target": target_mean}
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), return_stats, metrics

    def update(state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
        num_steps, num_envs = rollout.reward.shape
        rows, return_stats, value_metrics = rows_of(state, rollout)
        take = minibatch.row_taker(rows)
        size = num_steps * num_envs // cfg.num_minibatches
        chunk = minibatch.chunk_rows(size, row_bytes, cfg.microbatch_size)
        at = lambda schedule: schedules.value(schedule, state.env_steps)
        lr, clip_eps, ent_coef = at(cfg.lr), at(cfg.clip_eps), at(cfg.ent_coef)
        rows_loss = lambda params, rows: loss(params, rows, clip_eps, ent_coef, state.kl_coef)

        def step(carry, batch: Rows):
            params, opt_state, stopped = carry
            gradient, metrics = minibatch.mean_gradient(rows_loss, params, batch, chunk)
            gradient, metrics = parts.pmean((gradient, metrics), axis_name)
            new_params, new_opt_state = parts.descend(optimizer, lr, gradient, opt_state, params)
            if cfg.target_kl is not None:
                stopped = stopped | (metrics["policy/approx_kl"] > cfg.target_kl)
                keep = lambda old, new: jax.tree.map(lambda o, n: jnp.where(stopped, o, n), old, new)
                new_params, new_opt_state = keep(params, new_params), keep(opt_state, new_opt_state)
            return (new_params, new_opt_state, stopped), metrics

        def epoch(carry, key):
            index = minibatch.shuffle(key, num_steps, num_envs, cfg.num_minibatches, axis_name=axis_name)
            shuffled = take(index.reshape(-1))  # one gather for the epoch: 3% less than one for each minibatch
            return jax.lax.scan(step, carry, jax.tree.map(lambda x: x.reshape(*index.shape, *x.shape[1:]), shuffled))

        start = (state.params, state.opt_state, jnp.zeros((), bool))
        (params, opt_state, stopped), metrics = jax.lax.scan(epoch, start, jax.random.split(key, cfg.num_epochs))
        last = jax.tree.map(lambda x: x[-1].mean(), metrics)  # KL and clipping after the last pass, not on average
        metrics = jax.tree.map(jnp.mean, metrics) | {k: last[k] for k in last if "kl" in k or "clip" in k}
        if cfg.target_kl is not None:
            metrics["policy/stopped_early"] = stopped.astype(jnp.float32)

        kl_coef = state.kl_coef
        if cfg.kl_target is not None:
            kl = last["policy/kl"]
            kl_coef = jnp.where(kl > 2.0 * cfg.kl_target, 1.5 * kl_coef, kl_coef)
            kl_coef = jnp.where(kl < 0.5 * cfg.kl_target, 0.5 * kl_coef, kl_coef)
            metrics["policy/kl_coef"] = kl_coef
        obs_stats = state.obs_stats
        if normalize_obs:
            obs_stats = normalize.update(obs_stats, rollout.obs, rollout.mask.astype(jnp.float32), axis_name=axis_name)
        env_steps = parts.count_steps(state.env_steps, rollout.mask, axis_name)
        state = State(params, opt_state, obs_stats, return_stats, kl_coef, env_steps)
        return state, UpdateAux(metrics | value_metrics | {"train/lr": lr})

    return Algo(
        init=init,
        actor=actor,
        carry=lambda batch_size: (),
        act=act,
        update=update,
        on_policy=True,
        running_return_gamma=cfg.gamma if cfg.normalize_reward else None,
    )


__all__ = ["Actor", "Config", "State", "make"]
