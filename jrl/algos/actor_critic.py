"""What A2C, PPO, IMPALA and APPO share: policy and value on one set of parameters, running statistics, rows."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jrl import distributions, networks, spaces
from jrl.algos import exploration, observer, parts, sequences
from jrl.algos.sequences import flat
from jrl.networks import Head, NetworkConfig
from jrl.ops import minibatch, normalize, returns
from jrl.types import ActOut, Algo, Array, EnvSpec, Key, Metrics, PyTree, Rollout, UpdateAux, Window


class ActorCritic(NamedTuple):
    """Where observations [..., *] are read, with a core a Window [N, L] is; the results are [N, L] then."""

    init: Callable[[Key], PyTree]  # key -> params
    apply: Callable[[PyTree, PyTree], tuple[Any, Array]]  # (params, obs[..., *]) -> (distribution [...], value [...])
    value: Callable[[PyTree, PyTree], Array]  # (params, obs[..., *]) -> [...]
    carry: Callable[[int], PyTree]  # batch_size -> memory [B, ...] at an episode's start; () without a core
    step: Callable[[PyTree, PyTree, PyTree], tuple[Any, Array, PyTree]]  # (params, obs [B, *], carry) -> ..., carry
    # (params, Window) -> (value [N, L], the memory after it)
    unroll: Callable[[PyTree, Window], tuple[Array, PyTree]]


def make(spec: EnvSpec, cfg: NetworkConfig, mask: Callable[[PyTree], Array | None] = lambda obs: None) -> ActorCritic:
    """Policy head (gain 0.01, so that the first policy is nearly uniform) and value head (gain 1) on `cfg`'s torsos.

    A Gaussian policy's log standard deviation is a parameter per action element, or an output of the network with
    `cfg.state_dependent_std`.

    Args:
      spec, cfg: see `networks.build`.
      mask: of an observation, the actions that can be taken; None: all.
    Raises:
      InputError: an action space without a distribution, or a torso that does not fit the observations.
    """
    action = distributions.action_distribution(spec.action)
    free_std = action.num_gaussian > 0 and not cfg.state_dependent_std
    predicted_std = action.num_gaussian > 0 and cfg.state_dependent_std
    outputs = action.size + (action.num_gaussian if predicted_std else 0)
    network = networks.build(spec, cfg, {"policy": Head(outputs, 0.01), "value": Head(1, 1.0)})

    def init(key):
        params = dict(network.init(key))
        if free_std:
            params["log_std"] = jnp.full((action.num_gaussian,), cfg.log_std_init, jnp.float32)
        return params

    def distribution(params, outputs, obs):
        log_std = params["log_std"] if free_std else None
        if predicted_std:
            outputs, log_std = jnp.split(outputs, [action.size], -1)
            log_std = log_std + cfg.log_std_init
        return action.make(outputs, log_std, mask(obs))

    def apply(params, obs):
        outputs, value = network.apply(params, obs, "policy", "value")
        return distribution(params, outputs, obs), value[..., 0]

    def value(params, obs):
        return network.apply(params, obs, "value")[0][..., 0]

    def step(params, obs, carry):
        (outputs, value), carry = network.step(params, obs, carry, "policy", "value")
        return distribution(params, outputs, obs), value[..., 0], carry

    def unroll(params, window: Window):
        # of all heads: the memory of each goes on
        (_, value), carry = network.unroll(params, window, "policy", "value")
        return value[..., 0], carry

    return ActorCritic(init, apply, value, network.carry, step, unroll)


@struct.dataclass
class State:
    params: PyTree
    opt_state: PyTree
    obs_stats: PyTree  # normalize.RunningStats, or () without normalize_obs
    return_stats: PyTree  # normalize.RunningStats of the discounted return, or () without normalize_reward
    env_steps: Array  # [] u32, environment steps learned from, over all devices


@struct.dataclass
class Actor:
    """What acting needs of the State."""

    params: PyTree
    obs_stats: PyTree
    env_steps: PyTree = ()  # [] u32 where the exploration reads them


@struct.dataclass
class Rows:
    """One row per environment step, as a loss reads it: [T, B, *], or [N, *]; with a core sequences [N, L, *]."""

    obs: PyTree  # as networks read it: normalised, and of sequences a Window
    action: PyTree
    advantage: Array  # f32
    target: Array  # f32, for the value
    weight: Array  # f32, 0 on masked rows, 1 on average


class Settings(parts.Clipping, Protocol):
    """The fields of a Config that `agent` reads."""

    exploration: exploration.OverDistributions
    gamma: float
    normalize_obs: bool
    normalize_reward: bool


class Corrections(Protocol):
    """The fields of a Config that `vtrace` reads."""

    gamma: float
    vtrace_lambda: float
    clip_rho: float
    clip_c: float
    clip_pg_rho: float


class Agent(NamedTuple):
    """The parts of an actor-critic algorithm that do not depend on its loss."""

    net: ActorCritic
    optimizer: optax.GradientTransformation
    row_bytes: int  # of an observation
    init: Callable[[Key], State]
    mask: Callable[[PyTree], Array | None]  # of what the network reads: the actions that can be taken [..., K]
    see: Callable[[PyTree, PyTree], PyTree]  # (obs_stats, obs [..., *]) -> obs as the network reads it
    begun: Callable[[Any, Rollout], Any]  # (state, rollout) -> the state to read the rollout by: see `observer.begun`
    recall: Callable[[PyTree, Rollout], PyTree]  # (obs_stats, rollout) -> its obs [T, B, *], as acting saw them
    # (fn, tree [T, B, ...]) -> [T, B, ...]: `fn` of rows [N, ...], in chunks that fit the cache
    map_rows: Callable[[Callable[[PyTree], PyTree], PyTree], PyTree]
    # (state, rollout) -> V(obs_0) .. V(obs_T) [T + 1, B] by the parameters that acted, and the memory before each
    # sequence of the rollout [K, B, ...]; () without a core
    values: Callable[[State, Rollout], tuple[Array, PyTree]]
    # (rows [T, B, *], memory before each sequence) -> what minibatches are made of [N, *]: steps, or sequences
    cut: Callable[[Any, PyTree], Any]
    grid: Callable[[int, int], tuple[int, int]]  # (T, B) -> of how many [K, B] these N are
    observe: Callable[[Any, Rollout], Any]  # (state, rollout) -> state: statistics of observations, count of steps
    # update -> Algo; what differs from an ordinary on-policy one as keywords
    algo: Callable[..., Algo]


def agent(
    cfg: Settings,
    spec: EnvSpec,
    network: NetworkConfig,
    *,
    axis_name: str | None,
    record_value: bool = False,
) -> Agent:
    """Network, optimizer, acting and running statistics of an actor-critic algorithm.

    Args:
      cfg, spec, network, axis_name: as of the algorithm's `make`.
      record_value: acting leaves extras["value"], which `values` then reads.
    Raises:
      InputError: a space, torso or exploration that cannot be handled.
    """
    watch = observer.make(spec, network, normalize_obs=cfg.normalize_obs, axis_name=axis_name)
    net = make(watch.spec, network, watch.mask)
    explorer = exploration.make(cfg.exploration, spec.action, kinds=("distribution",))
    optimizer = parts.adam(cfg)
    see, recurrent = watch.see, network.recurrent
    row_bytes = spaces.num_bytes(spec.observation)

    def init(key: Key) -> State:
        params = net.init(key)
        return State(
            params=params,
            opt_state=optimizer.init(params),
            obs_stats=watch.init(),
            return_stats=normalize.init(()) if cfg.normalize_reward else (),
            env_steps=jnp.zeros((), jnp.uint32),
        )

    def actor(state) -> Actor:
        return Actor(state.params, state.obs_stats, state.env_steps if explorer.reads_env_steps else ())

    def act(actor: Actor, obs, carry, key: Key, explore: bool = True) -> ActOut:
        memory, own = parts.split_carry(carry)
        obs = see(actor.obs_stats, obs)
        dist, value, memory = net.step(actor.params, obs, memory)
        if explore:
            action, log_prob, own = explorer.sample_and_log_prob(dist, key, actor.env_steps, own, watch.mask(obs))
        else:
            action = dist.mode()
            log_prob = dist.log_prob(action)
        extras = {"log_prob": log_prob, **watch.record(actor.obs_stats, obs)}
        if record_value:
            extras["value"] = value
        return ActOut(action, parts.join_carry(memory, own), extras)

    def map_rows(fn, tree):
        num_steps, num_envs = jax.tree.leaves(tree)[0].shape[:2]
        chunk = minibatch.chunk_rows(num_steps * num_envs, row_bytes)
        out = minibatch.map_rows(fn, flat(tree), chunk)
        return jax.tree.map(lambda x: x.reshape(num_steps, num_envs, *x.shape[1:]), out)

    def grid(num_steps: int, num_envs: int) -> tuple[int, int]:
        return num_steps // sequences.length_of(network, num_steps), num_envs

    def cut(rows, memory):
        return (
            sequences.cut(rows, memory, sequences.length_of(network, rows.weight.shape[0])) if recurrent else flat(rows)
        )

    def values(state: State, rollout: Rollout) -> tuple[Array, PyTree]:
        if not recurrent:
            value = lambda obs: net.value(state.params, obs)
            # where it was not recorded: one pass in large batches, not a second tower in each of T small steps
            anew = lambda: map_rows(value, watch.recall(state.obs_stats, rollout))
            before = observer.values_seen(rollout, rollout.extras["value"], anew) if record_value else anew()
            return jnp.concatenate([before, value(see(state.obs_stats, rollout.last_obs))[None]]), ()
        value, starts, memory = sequences.along(
            lambda window: net.unroll(state.params, window),
            watch.recall(state.obs_stats, rollout),
            rollout.mask,
            parts.split_carry(rollout.carry)[0],
            sequences.length_of(network, rollout.reward.shape[0]),
        )
        last = net.step(state.params, see(state.obs_stats, rollout.last_obs), memory)[1]
        return jnp.concatenate([value, last[None]]), starts

    def observe(state, rollout: Rollout):
        obs_stats = watch.observe(state.obs_stats, rollout.obs, rollout.mask)
        return state.replace(obs_stats=obs_stats, env_steps=parts.count_steps(state.env_steps, rollout.mask, axis_name))

    def outputs(state, obs) -> dict[str, Any]:
        memory = net.carry(spaces.batch_shape(spec.observation, obs)[0])
        dist, value, _ = net.step(state.params, see(state.obs_stats, obs), memory)
        return {"distribution": dist, "value": value}

    def algo(update: Callable[..., tuple[Any, UpdateAux]], *, init=init, **options) -> Algo:
        return Algo(
            init=init,
            actor=actor,
            carry=parts.carry_of(net.carry, explorer.carry),
            act=act,
            update=update,
            on_policy=True,
            outputs=outputs,
            running_return_gamma=cfg.gamma if cfg.normalize_reward else None,
            **options,
        )

    begun = functools.partial(observer.begun, watch)
    return Agent(
        net,
        optimizer,
        row_bytes,
        init,
        watch.mask,
        see,
        begun,
        watch.recall,
        map_rows,
        values,
        cut,
        grid,
        observe,
        algo,
    )


def make_rows(
    obs, rollout: Rollout, advantage, target, value, *, normalize_advantage: bool = False, axis_name: str | None
) -> tuple[Rows, Metrics]:
    """Rows [T, B] in which nothing of a masked row is left, and metrics of the value.

    Args:
      obs: the rollout's, as the network reads them.
      rollout: [T, B].
      advantage, target: [T, B] f32; void on masked rows.
      value: [T, B] f32, V(obs_t) that the target corrects.
      normalize_advantage: to mean 0 and deviation 1 over the unmasked rows.
    """
    advantage, target, action = parts.cleared(rollout.mask, (advantage, target, rollout.action))
    weight = parts.weights(rollout.mask, axis_name)
    metrics = parts.value_metrics(target, value, weight, axis_name)
    if normalize_advantage:
        advantage = parts.standardized(advantage, weight, axis_name)
    return Rows(obs, action, advantage, target, weight), metrics


def vtrace(cfg: Corrections, reward, terminated, done, value, log_rho) -> returns.VTrace:
    """`returns.vtrace` with the config's numbers."""
    return returns.vtrace(
        reward,
        terminated,
        done,
        value,
        log_rho,
        gamma=cfg.gamma,
        vtrace_lambda=cfg.vtrace_lambda,
        clip_rho=cfg.clip_rho,
        clip_c=cfg.clip_c,
        clip_pg_rho=cfg.clip_pg_rho,
    )


def policy_gradient(dist, log_prob, value, rows: Rows, *, vf_coef, ent_coef) -> tuple[Array, Metrics]:
    """-log pi(action) A + vf_coef (V - target)^2 / 2 - ent_coef entropy (arXiv:1602.01783, section 4; 1802.01561, 4.2).

    Args:
      dist, log_prob, value: of the network that learns, at the rows; leading axes of `rows`.
      rows: advantages and targets carry no gradient.
    Returns:
      The mean over the rows, and metrics.
    """
    mean = lambda x: jnp.mean(rows.weight * x)
    policy_loss = -mean(log_prob * rows.advantage)
    value_loss = mean(0.5 * (value - rows.target) ** 2)
    entropy = mean(dist.entropy())
    metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "policy/entropy": entropy}
    return policy_loss + vf_coef * value_loss - ent_coef * entropy, metrics
