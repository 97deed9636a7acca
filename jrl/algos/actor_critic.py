"""Parts that A2C, PPO, IMPALA and APPO share: policy and value networks, values of a rollout, rows of a loss."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
from flax import struct

from jrl import distributions, spaces
from jrl import networks as nets
from jrl.algos import agent as agents
from jrl.algos import curiosity as curiosities
from jrl.algos import observer as observers
from jrl.algos import parts, sequences
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, Records, State
from jrl.algos.observer import Observer
from jrl.networks import Head, NetworkConfig
from jrl.ops import returns, schedules
from jrl.types import Algo, Array, EnvSpec, Key, Metrics, PyTree, Rollout, Space, UpdateAux, Window


class ActorCritic(NamedTuple):
    """Policy and value on one set of parameters. With a core they read a Window [N, L], with results [N, L].

    With curiosity a value [...] is [..., 2]: of the rewards, and of the intrinsic rewards.
    """

    init: Callable[[Key], PyTree]  # key -> params
    # (params, obs[..., *], key=None, valid=None) -> (distribution [...], value [...]); keywords: see `networks.Network`
    apply: Callable[..., tuple[Any, Array]]
    value: Callable[[PyTree, PyTree], Array]  # (params, obs[..., *]) -> [...]
    carry: Callable[[int], PyTree]  # batch_size -> recurrent state [B, ...] at an episode's start; () without a core
    step: Callable[[PyTree, PyTree, PyTree], tuple[Any, Array, PyTree]]  # (params, obs [B, *], carry) -> ..., carry
    # (params, Window) -> (value [N, L], recurrent state after the window)
    unroll: Callable[[PyTree, Window], tuple[Array, PyTree]]
    curiosity: curiosities.Model | None = None  # networks of intrinsic rewards, with parameters of their own


class PolicyHead(NamedTuple):
    """Output size of a policy network, and its distribution."""

    outputs: int  # number of outputs
    with_std: Callable[[PyTree], PyTree]  # params -> params with the distribution's own parameters
    # (params, outputs [..., size], obs [..., *]) -> distribution [...]
    distribution: Callable[[PyTree, Array, PyTree], Any]


def policy_head(space: Space, cfg: NetworkConfig, mask: Callable[[PyTree], Array | None]) -> PolicyHead:
    """Returns the policy head for the actions of `space`.

    A Gaussian policy's log standard deviation is a parameter per action element, or a network output with
    `cfg.state_dependent_std`.

    Args:
      space: action space.
      cfg: config of the policy network.
      mask: observation -> action mask, or None if all actions are allowed.
    Raises:
      InputError: an action space without a distribution.
    """
    action = distributions.action_distribution(space)
    free_std = action.num_gaussian > 0 and not cfg.state_dependent_std
    predicted_std = action.num_gaussian > 0 and cfg.state_dependent_std

    def with_std(params):
        if free_std:
            params = {**params, "log_std": jnp.full((action.num_gaussian,), cfg.log_std_init, jnp.float32)}
        return params

    def distribution(params, outputs, obs):
        log_std = params["log_std"] if free_std else None
        if predicted_std:
            outputs, log_std = jnp.split(outputs, [action.size], -1)
            log_std = log_std + cfg.log_std_init
        return action.make(outputs, log_std, mask(obs))

    return PolicyHead(action.size + (action.num_gaussian if predicted_std else 0), with_std, distribution)


def make(
    spec: EnvSpec,
    cfg: NetworkConfig,
    mask: Callable[[PyTree], Array | None] = lambda obs: None,
    curiosity: curiosities.Model | None = None,
) -> ActorCritic:
    """Returns a policy head (gain 0.01, so that the first policy is nearly uniform) and a value head (gain 1).

    Args:
      spec, cfg: see `networks.build`.
      mask: observation -> action mask, or None if all actions are allowed.
      curiosity: networks of intrinsic rewards, which have a value head, too; None: none.
    Raises:
      InputError: an action space without a distribution, or a torso that does not fit the observations.
    """
    head = policy_head(spec.action, cfg, mask)
    names = ("value",) if curiosity is None else ("value", "intrinsic_value")
    heads = {"policy": Head(head.outputs, 0.01), **{name: Head(1, 1.0, privileged=True) for name in names}}
    network = nets.build(spec, cfg, heads)
    distribution = head.distribution

    def join(values):  # [..., 1] each
        return values[0][..., 0] if len(values) == 1 else jnp.concatenate(values, -1)

    def init(key):
        return head.with_std(dict(network.init(key)))

    def apply(params, obs, **learning):
        outputs, *values = network.apply(params, obs, "policy", *names, **learning)
        return distribution(params, outputs, obs), join(values)

    def value(params, obs):
        return join(network.apply(params, obs, *names))

    def step(params, obs, carry):
        (outputs, *values), carry = network.step(params, obs, carry, "policy", *names)
        return distribution(params, outputs, obs), join(values), carry

    def unroll(params, window: Window):
        # all heads, because each head's recurrent state must be updated
        (_, *values), carry = network.unroll(params, window, "policy", *names)
        return join(values), carry

    return ActorCritic(init, apply, value, network.carry, step, unroll, curiosity)


@struct.dataclass
class Rows:
    """One row per environment step for the loss: [T, B, *] or [N, *]; with a core sequences [N, L, *]."""

    obs: PyTree  # normalised observations; a Window for sequences
    action: PyTree
    advantage: Array  # f32
    target: Array  # f32, target of the value; with curiosity [..., 2]
    weight: Array  # f32, 0 on masked rows, 1 on average


def networks(cfg: Any, observer: Observer, network: NetworkConfig) -> ActorCritic:
    """Returns the networks of an actor-critic algorithm's Agent."""
    spec = observer.spec._replace(observation=observer.given)  # before the transform
    curiosity = curiosities.make(getattr(cfg, "curiosity", None), spec, network, observer.axis_name)
    return make(observer.spec, network, observer.mask, curiosity)


def make_agent(cfg: Common, spec: EnvSpec, network: NetworkConfig, **options: Unpack[MakeOptions]) -> Agent:
    """Makes an Agent whose policy is a distribution; arguments and errors as for `agent.make`."""
    records = Records(log_prob=True, seen=True)
    return agents.make(cfg, spec, network, networks, kind="distribution", records=records, **options)


def init(cfg: Common, agent: Agent, key: Key) -> State:
    """Returns the initial State."""
    return agents.begin(cfg, agent, key, agent.net.init(key), **curiosities.init(cfg, agent, key))


def policy(
    cfg: Common, agent: Agent, actor: ActorState, obs: PyTree, memory: PyTree, explore: bool, record_value: bool = False
):
    """Returns the distribution of actions [B], the memory, and extras: V(obs) with `record_value`."""
    dist, value, memory = agent.net.step(actor.params, obs, memory)
    return dist, memory, {"value": value} if record_value else {}


def outputs(cfg: Common, agent: Agent, state: State, obs: PyTree) -> dict[str, Any]:
    """Returns the distribution and value of observations [B, *] at an episode's start."""
    memory = agent.net.carry(spaces.batch_shape(agent.spec.observation, obs)[0])
    dist, value, _ = agent.net.step(state.params, agent.observer.see(state.obs_stats, obs), memory)
    return {"distribution": dist, "value": of_rewards(agent, value)}


def make_algo(
    cfg: Common,
    agent: Agent,
    update: Callable[..., tuple[State, UpdateAux]],
    *,
    init: Callable[..., State] = init,
    record_value: bool = False,
    **options: Any,
) -> Algo:
    """Returns the on-policy Algo of a policy and value network and an `update`; keywords as for `agent.algo`.

    Args:
      record_value: whether acting records extras["value"], which `values` then reads.
    """
    return agents.algo(
        cfg,
        agent,
        init=init,
        policy=functools.partial(policy, record_value=record_value),
        update=update,
        outputs=outputs,
        memory=agent.net.carry,
        **options,
    )


def of_rewards(agent: Agent, value: Array) -> Array:
    """Returns the value of the rewards among the values of a network."""
    return value if agent.net.curiosity is None else value[..., 0]


def values(agent: Agent, state: State, rollout: Rollout) -> tuple[Array, PyTree]:
    """Returns V(obs_0) .. V(obs_T) [T + 1, B] and the recurrent state before each sequence [K, B, ...].

    With curiosity the values are [T + 1, B, 2]. Without a core the states are (). Values recorded while acting are
    reused.
    """
    net, observer = agent.net, agent.observer
    last_obs = observer.see(state.obs_stats, rollout.last_obs)
    if not agent.network.recurrent:
        value = lambda obs: net.value(state.params, obs)
        # not recorded: one pass in large batches is faster than a second tower in each of T small steps
        compute = lambda: agents.map_rows(agent, value, observer.recall(state.obs_stats, rollout))
        recorded = rollout.extras.get("value")
        before = compute() if recorded is None else observers.values_seen(rollout, recorded, compute)
        return jnp.concatenate([before, value(last_obs)[None]]), ()
    value, starts, memory = sequences.along(
        lambda window: net.unroll(state.params, window),
        observer.recall(state.obs_stats, rollout),
        rollout.mask,
        agents.split_carry(rollout.carry)[0],
        sequences.length_of(agent.network, rollout.reward.shape[0]),
    )
    last = net.step(state.params, last_obs, memory)[1]
    return jnp.concatenate([value, last[None]]), starts


def make_rows(
    obs,
    rollout: Rollout,
    advantage,
    target,
    value,
    *,
    normalize_advantage: bool = False,
    choice: Array | None = None,
    axis_name: str | None,
) -> tuple[Rows, Metrics]:
    """Returns Rows [T, B] with zeros on masked rows, and metrics of the value.

    Args:
      obs: rollout's observations as the network reads them.
      rollout: [T, B].
      advantage, target: [T, B] f32; ignored on masked rows.
      value: [T, B] f32, V(obs_t), for the metrics.
      normalize_advantage: whether to scale advantages to mean 0 and deviation 1 over the unmasked rows.
      choice: [T, B] bool, rows that count for this mean and deviation; None: all.
    """
    advantage, target, action = parts.zero_masked(rollout.mask, (advantage, target, rollout.action))
    weight = parts.weights(rollout.mask, axis_name)
    metrics = parts.value_metrics(target, value, weight, axis_name)
    if normalize_advantage:
        among = weight if choice is None else parts.weights(rollout.mask & choice, axis_name)
        advantage = parts.standardize(advantage, among, axis_name)
    return Rows(obs, action, advantage, target, weight), metrics


def gae_rows(
    cfg: Any, agent: Agent, state: State, rollout: Rollout, intrinsic: Array | None = None, *, use_critic: bool = True
) -> tuple[Rows, Array, PyTree, Metrics]:
    """Returns Rows [T, B] with generalised advantage estimates, V(obs_t) [T, B], recurrent states and metrics.

    With intrinsic rewards [T, B] their advantages are added, and targets and values are [T, B, 2]. Without
    `use_critic` V is 0.
    """
    (value, memory), done = values(agent, state, rollout), rollout.terminated | rollout.truncated
    value = value if use_critic else jnp.zeros_like(value)
    reward, extrinsic = parts.scale_reward(cfg, state.return_stats, rollout.reward), of_rewards(agent, value)
    advantage, target = returns.gae(
        reward, rollout.terminated, done, extrinsic, gamma=cfg.gamma, gae_lambda=cfg.gae_lambda
    )
    intrinsic_target = None
    if intrinsic is not None:
        bonus, intrinsic_target = returns.continuing_gae(
            intrinsic, rollout.mask, value[..., 1], gamma=cfg.curiosity.gamma, gae_lambda=cfg.gae_lambda
        )
        advantage = advantage + schedules.value(cfg.curiosity.coef, state.env_steps) * bonus
    obs, normalize = agent.observer.recall(state.obs_stats, rollout), bool(cfg.normalize_advantage)
    rows, metrics = make_rows(
        obs,
        rollout,
        advantage,
        target,
        extrinsic[:-1],
        normalize_advantage=normalize,
        choice=choice(agent, obs),
        axis_name=agent.axis_name,
    )
    if intrinsic_target is not None:
        both = jnp.stack([rows.target, parts.zero_masked(rollout.mask, intrinsic_target)], -1)
        rows = replace(rows, target=both)
    return rows, value[:-1], memory, metrics


def sum_heads(rows: Rows, error: Array) -> Array:
    """Returns the errors of values summed over the value heads, one number per row."""
    return error if error.ndim == rows.weight.ndim else error.sum(-1)


def choice(agent: Agent, obs: PyTree) -> Array | None:
    """Returns the rows [T, B] on which an agent has a choice; None if all rows count.

    An agent that waits for its turn has no choice, so its rows contain no information about its policy.
    """
    mask = agent.observer.mask(obs) if agent.spec.is_multi_agent else None
    return None if mask is None else spaces.any_choice(agent.spec.action, mask)


def vtrace(cfg: Any, reward, terminated, done, value, log_rho) -> returns.VTrace:
    """Calls `returns.vtrace` with the config's hyper-parameters."""
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
    """Returns -log pi(action) A + vf_coef (V - target)^2 / 2 - ent_coef entropy (arXiv:1602.01783, section 4).

    Args:
      dist, log_prob, value: outputs of the learned network for the rows; leading axes of `rows`.
      rows: advantages and targets without gradient.
    Returns:
      The mean over the rows, and metrics.
    """
    mean = lambda x: jnp.mean(rows.weight * x)
    policy_loss = -mean(log_prob * rows.advantage)
    value_loss = mean(sum_heads(rows, 0.5 * (value - rows.target) ** 2))
    entropy = mean(dist.entropy())
    metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "policy/entropy": entropy}
    return policy_loss + vf_coef * value_loss - ent_coef * entropy, metrics
