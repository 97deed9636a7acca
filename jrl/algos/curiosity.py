"""Intrinsic rewards for exploration, `algo.curiosity` of PPO and A2C: RND (arXiv:1810.12894), ICM (arXiv:1705.05363).

A predictor learns from each rollout, and its error on a step is the step's intrinsic reward: large where the policy has
rarely been. A second value head estimates the intrinsic return, with a discount of its own. This return continues over
episode ends, so that an agent can risk an episode for novelty (RND's section 2.3). The advantage is

    A = A of the rewards + coef * A of the intrinsic rewards

Intrinsic rewards are divided by the deviation of their running discounted sum (section 2.4). The predictor reads
observations scaled by running statistics, images too; without them the errors would depend on the scale of each input.

    state = begin(...)                                                # `State.own["curiosity"]` is a Predictor
    after, intrinsic, metrics = explore(cfg, agent, state, rollout, key)    # intrinsic [T, B]; None without curiosity
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions
from jrl import networks as nets
from jrl.algos import agent as agents
from jrl.algos import observer as observers
from jrl.algos import parts, sequences
from jrl.algos.agent import Agent, State
from jrl.algos.observer import Observer
from jrl.fields.bounds import Amount, Count, NonNegativeSchedule, Share, Unit, Width, Widths
from jrl.fields.validation import section
from jrl.networks import Head, NetworkConfig
from jrl.networks.encoders import CNNS
from jrl.ops import normalize, random, returns, schedules
from jrl.types import Array, Box, Dict, EnvSpec, Key, Metrics, PyTree, Rollout, Space

NAME = "curiosity"  # key of `State.own`


@section
class Rnd:
    """Random network distillation: a network learns the features of a constant random network (arXiv:1810.12894)."""

    name: Literal["rnd"] = "rnd"
    coef: NonNegativeSchedule = 0.5  # weight of the intrinsic advantages; that of the rewards' advantages is 1
    gamma: Unit = 0.99  # discount of intrinsic rewards per step of the environment
    lr: NonNegativeSchedule = 1e-4  # step size of the predictor, with the algorithm's optimizer
    hidden: Widths = (256, 256)  # widths of the dense layers of each network
    features: Width = 64  # number of predicted features
    share: Share = 0.25  # share of a rollout's steps that train the predictor
    num_minibatches: Count = 4  # gradient steps of the predictor per rollout, each on its part of this share
    # number of first rollouts that only add to the statistics of observations; the policy does not learn, either
    statistics_rollouts: Amount = 0


@section
class Icm(Rnd):
    """Intrinsic curiosity module: predicts the next features from the action (arXiv:1705.05363).

    The features are those from which the action between two observations can be inferred.
    """

    name: Literal["icm"] = "icm"  # type: ignore[assignment]  # the name selects the class, so it differs
    forward_share: Unit = 0.2  # weight of the loss of predicted features; that of inferred actions has the rest


Curiosity = Rnd | Icm


@struct.dataclass
class Predictor:
    """State of an intrinsic reward, `State.own["curiosity"]`."""

    params: PyTree  # trained parameters
    fixed: PyTree  # RND's random network; () for ICM
    opt_state: PyTree
    obs_stats: PyTree  # normalize.RunningStats of the observations that it has read
    return_stats: normalize.RunningStats  # statistics of the running discounted sums of intrinsic rewards
    # [] f32, mean of these sums at the end of the latest rollout: with it the sums of the next rollout begin, because a
    # State has no arrays per environment
    mean_return: Array


class Model(NamedTuple):
    """Networks of an intrinsic reward as pure functions."""

    observer: Observer  # converts observations to the networks' inputs
    init: Callable[[Key], tuple[PyTree, PyTree]]  # key -> (trained parameters, constant parameters)
    # (params, fixed, obs, action, next_obs), rows [N, *] -> (intrinsic reward [N], loss [N])
    error: Callable[..., tuple[Array, Array]]


# ---------------------------------------------------------------- networks


def make(cfg: Curiosity | None, spec: EnvSpec, network: NetworkConfig, axis_name: str | None) -> Model | None:
    """Returns the networks of an intrinsic reward; None without curiosity.

    Each reads the whole observation without its action mask: images through the policy's CNN, integers one-hot. None
    has memory.

    Args:
      cfg: kind and sizes.
      spec: environment's spaces.
      network: config of the policy network, for its transform, CNN and dtype.
      axis_name: mapped axis over devices, or None.
    """
    if cfg is None:
        return None
    observer = observers.make(spec, network, normalize_obs=True, normalize_images=True, axis_name=axis_name)
    torso = network.torso if network.torso in (*CNNS, "mlp") else "auto"
    plain = NetworkConfig(hidden=cfg.hidden, activation="relu", dtype=network.dtype)
    encoder = replace(plain, torso=torso, flatten=network.flatten)
    features = nets.build(observer.spec, encoder, {"out": Head(cfg.features)})
    functions = _icm(cfg, spec.action, features, plain) if isinstance(cfg, Icm) else _rnd(features)
    return Model(observer, *functions)


def _rnd(features: nets.Network) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def init(key: Key) -> tuple[PyTree, PyTree]:
        trained, constant = jax.random.split(key)
        return features.init(trained), features.init(constant)

    def error(params, fixed, obs, action, next_obs) -> tuple[Array, Array]:
        (predicted,), (target,) = features.apply(params, next_obs), features.apply(fixed, next_obs)
        squared = jnp.square(predicted - target).mean(-1)
        return squared, squared

    return init, error


def _icm(
    cfg: Icm, action_space: Space, features: nets.Network, plain: NetworkConfig
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    build = lambda space, size: nets.build(EnvSpec(space, action_space, 1), plain, {"out": Head(size)})
    head = distributions.action_distribution(action_space)
    both, chosen = Box((2 * cfg.features,)), Dict((("action", action_space), ("features", Box((cfg.features,)))))
    networks = {"features": features, "inverse": build(both, head.size), "forward": build(chosen, cfg.features)}

    def init(key: Key) -> tuple[PyTree, PyTree]:
        keys = jax.random.split(key, len(networks))
        return {name: net.init(key) for key, (name, net) in zip(keys, networks.items(), strict=True)}, ()

    def error(params, fixed, obs, action, next_obs) -> tuple[Array, Array]:
        before, after = (features.apply(params["features"], x)[0] for x in (obs, next_obs))
        outputs = networks["inverse"].apply(params["inverse"], jnp.concatenate([before, after], -1))[0]
        deviation = jnp.zeros(head.num_gaussian) if head.num_gaussian else None  # log of 1: squared errors
        inferred = -head.make(outputs, deviation).log_prob(action)
        predicted = networks["forward"].apply(params["forward"], {"action": action, "features": before})[0]
        reward = 0.5 * jnp.square(predicted - after).sum(-1)
        return reward, cfg.forward_share * reward + (1.0 - cfg.forward_share) * inferred

    return init, error


# ---------------------------------------------------------------- learning


def init(cfg: Any, agent: Agent, key: Key) -> dict[str, Any]:
    """Returns the part of `State.own` of an intrinsic reward; {} without curiosity."""
    model = agent.net.curiosity
    if model is None:
        return {}
    params, fixed = model.init(jax.random.fold_in(key, 0x63757269))  # another stream than the parameters
    opt_state, mean_return = agent.optimizer(cfg).init(params), jnp.zeros((), jnp.float32)
    return {NAME: Predictor(params, fixed, opt_state, model.observer.init(), normalize.init(()), mean_return)}


def explore(cfg: Any, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, Array | None, Metrics]:
    """Computes the intrinsic rewards of a rollout, then trains the predictor on it.

    Args:
      state: State whose `own` has a Predictor.
      rollout: [T, B].
      key: the same on all devices.
    Returns:
      The State with the trained Predictor, the scaled rewards [T, B] f32 with 0 on masked rows, and metrics. Without
      curiosity (state, None, {}).
    """
    model: Model | None = agent.net.curiosity
    if model is None:
        return state, None, {}
    own, mask = state.own[NAME], rollout.mask
    next_obs = jax.tree.map(lambda x, last: jnp.concatenate([x[1:], last[None]]), rollout.obs, rollout.last_obs)
    obs_stats = model.observer.observe(own.obs_stats, next_obs, mask)
    steps = rollout.obs, parts.zero_masked(mask, rollout.action), next_obs

    def error(params: PyTree, step: tuple[PyTree, PyTree, PyTree]) -> tuple[Array, Array]:
        obs, action, next_obs = step
        see = lambda obs: model.observer.see(obs_stats, obs)
        return model.error(params, own.fixed, see(obs), action, see(next_obs))

    intrinsic = agents.map_rows(agent, lambda step: error(own.params, step)[0], steps)
    intrinsic = parts.zero_masked(mask, jax.lax.stop_gradient(intrinsic))
    sums = returns.running_returns(intrinsic, mask, own.mean_return, gamma=cfg.curiosity.gamma)
    return_stats = normalize.update(own.return_stats, sums, mask.astype(jnp.float32), axis_name=agent.axis_name)
    weight = parts.weights(mask, agent.axis_name)
    params, opt_state, loss = _train(cfg, agent, state, error, (steps, weight), key)
    after = Predictor(
        params, own.fixed, opt_state, obs_stats, return_stats, parts.pmean(sums[-1].mean(), agent.axis_name)
    )
    intrinsic = intrinsic / (normalize.std(return_stats) + 1e-8)
    metrics = {
        "curiosity/reward": parts.pmean(jnp.mean(weight * intrinsic), agent.axis_name),
        "loss/curiosity": loss,
    }
    return replace(state, own={**state.own, NAME: after}), intrinsic, metrics


def _train(
    cfg: Any, agent: Agent, state: State, error: Callable[..., tuple[Array, Array]], rows: PyTree, key: Key
) -> tuple[PyTree, PyTree, Array]:
    """Returns the predictor's parameters and optimizer after its gradient steps on random steps, and the mean loss."""
    own, options = state.own[NAME], cfg.curiosity
    num_steps, num_envs = rows[1].shape
    num = min(options.num_minibatches, num_steps)
    size = max(1, min(round(options.share * num_steps / num), num_steps // num))
    # whole steps of all environments, the same on all devices
    order = random.permutation(jax.random.fold_in(key, 0x63757269), num_steps)[: num * size].reshape(num, size)
    chunk = agents.chunk(cfg, agent, size * num_envs)
    lr = schedules.value(options.lr, state.env_steps)

    def mean_loss(params: PyTree, batch: PyTree) -> tuple[Array, Array]:
        step, weight = batch
        loss = jnp.mean(weight * error(params, step)[1])
        return loss, loss

    def step(carry, index):
        params, opt_state = carry
        batch = sequences.flat(jax.tree.map(lambda x: x[index], rows))
        gradient, loss = agents.mean_gradient(agent, mean_loss, params, batch, chunk)
        return agents.descend(cfg, agent, lr, gradient, opt_state, params), loss

    (params, opt_state), loss = jax.lax.scan(step, (own.params, own.opt_state), order)
    return params, opt_state, loss.mean()


def without_learning(cfg: Any, agent: Agent, before: State, after: State) -> State:
    """Returns `after`; in the first `statistics_rollouts` updates `before` with the statistics of observations."""
    if agent.net.curiosity is None or not cfg.curiosity.statistics_rollouts:
        return after
    gathers = before.updates < cfg.curiosity.statistics_rollouts
    stats = after.own[NAME].obs_stats
    held = {**before.own, NAME: replace(before.own[NAME], obs_stats=stats)}
    pick = lambda old, new: jax.tree.map(lambda o, n: jnp.where(gathers, o, n), old, new)
    return replace(
        after,
        params=pick(before.params, after.params),
        opt_state=pick(before.opt_state, after.opt_state),
        own=pick(held, after.own),
    )
