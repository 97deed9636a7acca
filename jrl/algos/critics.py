"""Parts that algorithms with critics of (obs, action) share: SAC, TD3 and DDPG, IQL.

Their parameters are a dict by part: `actor`, `critic` [C, ...] and others, each with an optimizer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl import distributions
from jrl import networks as nets
from jrl.algos import agent as agents
from jrl.algos import custom_loss, gradients, parts, sequences
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, Records, State
from jrl.algos.critic_heads import CriticHead
from jrl.algos.custom_loss import Loss
from jrl.algos.observer import Observer
from jrl.fields.bounds import Count
from jrl.networks import Head, Network, NetworkConfig
from jrl.networks.critics import Atoms, Critics, build_critics
from jrl.ops import random, schedules
from jrl.types import (
    Algo,
    Array,
    Batch,
    Box,
    Discrete,
    EnvSpec,
    InputError,
    Key,
    Metrics,
    PyTree,
    SequenceBatch,
    Space,
    Window,
    hyperparams,
)

_SEQUENCES = Records(memory=True)  # replay stores the recurrent states of sequences
_POLICY_ACTION = "policy_action"  # key of a batch's extras: see `with_next_action`


class PolicyHeads(NamedTuple):
    """A network whose output is a distribution, actions [N, *] or values [N]; for a Window [N, L, *]."""

    init: Callable[[Key], PyTree]  # key -> params
    # (params, obs [N, *] or Window, key=None, valid=None) -> output; keywords as for `networks.Network`
    apply: Callable[..., Any]
    carry: Callable[[int], PyTree]  # batch size -> memory at an episode's start [B, ...]; () without a core
    step: Callable[[PyTree, PyTree, PyTree], tuple[Any, PyTree]]  # (params, obs [B, *], carry) -> (output, carry)
    unroll: Callable[[PyTree, Window], tuple[Any, PyTree]]  # (params, Window) -> (anything, the memory after it)


def policy_of(
    network: Network,
    output: Callable[[PyTree, Array, PyTree], Any],
    *,
    head: str = "policy",
    own_params: Callable[[PyTree], PyTree] = lambda params: params,
) -> PolicyHeads:
    """Returns PolicyHeads of `network` with one `head`.

    Args:
      output: (params, outputs [..., size], observations [..., *]) -> output.
      own_params: initial parameters of the network -> these with parameters that only `output` reads.
    """

    def apply(params, obs, **learning):
        return output(params, network.apply(params, obs, head, **learning)[0], obs)

    def step(params, obs, carry):
        (outputs,), carry = network.step(params, obs, carry, head)
        return output(params, outputs, obs), carry

    unroll = lambda params, window: network.unroll(params, window, head)
    return PolicyHeads(lambda key: own_params(network.init(key)), apply, network.carry, step, unroll)


def check(cfg: Common, space: Space, network: NetworkConfig) -> None:
    """Raises InputError if a Box has other bounds than -1 and 1, or policy and critics would share a torso."""
    name = parts.name_of(cfg)
    if network.shared:
        raise InputError(f"network.shared: {name} needs separate torsos for policy and critics: set it to false")
    if not isinstance(space, Box) or np.dtype(space.dtype).kind != "f":
        return  # `parts.check_action` refuses a Box of integers
    low, high = space.bounds()
    if not ((low == -1) & (high == 1)).all():
        fix = "set env.normalize_actions=true"
        if not (np.isfinite(low) & np.isfinite(high)).all():
            fix = "give the environment finite bounds and env.normalize_actions=true, or use ppo"
        raise InputError(f"{name} acts in [-1, 1], not in the action space {space}: {fix}")


class Networks(NamedTuple):
    """Networks of an Agent with critics."""

    policy: PolicyHeads
    critic: Critics
    value: PolicyHeads | None = None  # V(obs) [N], for algorithms with a state value
    head: CriticHead | None = None  # for critics with atoms; None: critics have one output, the value

    @property
    def has_distribution(self) -> bool:
        """Returns whether targets are distributions, not values."""
        return self.head is not None and self.head.pool is not None

    def mean(self, outputs: Array) -> Array:
        """Returns the critics' values of their outputs."""
        return outputs if self.head is None else self.head.mean(outputs)


def state_value(observer: Observer, network: NetworkConfig) -> PolicyHeads:
    """Returns a network of V(obs); like critics it reads `network.value_inputs`."""
    net = nets.build(observer.spec, network, {"value": Head(1, privileged=True)})
    return policy_of(net, lambda params, outputs, obs: outputs[..., 0], head="value")


def make_agent(
    cfg: Common,
    spec: EnvSpec,
    network: NetworkConfig,
    policy: Callable[[Observer, NetworkConfig], PolicyHeads],
    *,
    kind: agents.Kind,
    num_critics: int,
    head: CriticHead | None = None,
    value: Callable[[Observer, NetworkConfig], PolicyHeads] | None = None,
    records: Records = _SEQUENCES,
    **options: Unpack[MakeOptions],
) -> Agent:
    """Makes an Agent with a policy, critics and optionally a `value` network; arguments as for `agent.make`."""

    def networks(cfg: Common, observer: Observer, network: NetworkConfig) -> Networks:
        atoms = None if head is None else Atoms(head.size, head.mean)
        of_actions = build_critics(observer.spec, network, num_critics, atoms)
        state_value = None if value is None else value(observer, network)
        return Networks(policy(observer, network), of_actions, state_value, head)

    check(cfg, spec.action, network)
    return agents.make(cfg, spec, network, networks, kind=kind, records=records, flat=False, **options)


def make_algo(cfg: Common, agent: Agent, **functions: Any) -> Algo:
    """Makes the Algo of an Agent with critics; keywords as for `agent.algo`."""
    return agents.algo(cfg, agent, policy=step_policy, memory=agent.net.policy.carry, **functions)


def initial_params(agent: Agent, key: Key) -> dict[str, PyTree]:
    """Returns initial parameters of the policy, the critics and the value network, if there is one."""
    actor_key, critic_key = jax.random.split(key)
    params = {"actor": agent.net.policy.init(actor_key), "critic": agent.net.critic.init(critic_key)}
    if agent.net.value is not None:
        params["value"] = agent.net.value.init(jax.random.fold_in(key, 2))
    return params


def step_policy(cfg: Common, agent: Agent, actor: ActorState, obs: PyTree, memory: PyTree, explore: bool):
    """Returns the policy's output for observations [B, *]."""
    params = actor.params if not explore or actor.noisy == () else actor.noisy
    output, memory = agent.net.policy.step(params, obs, memory)
    return output, memory, {}


def descend(cfg: Common, agent: Agent, state: State, name: str, lr: Any, gradient: PyTree) -> State:
    """Makes one gradient step of the part `name` of the parameters; `lr` may be a schedule."""
    lr = schedules.value(lr, state.env_steps)
    params, opt_state = agents.descend(cfg, agent, lr, gradient, state.opt_state[name], state.params[name])
    return replace(state, params={**state.params, name: params}, opt_state={**state.opt_state, name: opt_state})


def noise(
    key: Key, num_rows: int, shape: tuple[int, ...], axis_name: str | None, draw: Callable[..., Array] = random.normal
) -> Array:
    """Returns this device's rows [num_rows, *shape] of standard normal numbers, or numbers of another `draw`.

    The numbers are those that one device would draw for all rows.
    """
    if axis_name is None:
        return draw(key, (num_rows, *shape))
    rows = draw(key, (jax.lax.axis_size(axis_name) * num_rows, *shape))
    return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(axis_name) * num_rows, num_rows)


# ---------------------------------------------------------------- inputs of a loss


@struct.dataclass(kw_only=True)
class Sequences(Batch):
    """A SequenceBatch as a Batch with leaves [N, L, *]; `next_obs` is the Window `obs` and the row after it.

    Both Windows begin with the K burn-in rows.
    """

    ahead: Array  # [N, L] i32, row after each transition, among the L + 1 rows of `next_obs` after the burn-in


def read(cfg: Common, agent: Agent, state: State, batch: Batch | SequenceBatch) -> Batch:
    """Returns a sample from replay as networks and losses read it, with zeros on masked rows.

    A SequenceBatch becomes Sequences.
    """
    see, return_stats = functools.partial(agent.observer.see, state.obs_stats), state.return_stats
    if isinstance(batch, SequenceBatch):
        batch = sequences.without_masked(batch)
        window = replace(batch.window, obs=see(batch.window.obs))
        obs, reset = jax.tree.map(lambda x: x[:, :-1], (window.obs, window.reset))
        return Sequences(
            obs=Window(obs, window.carry, reset),
            action=batch.action,
            reward=parts.scale_reward(cfg, return_stats, batch.reward),
            discount=batch.discount,
            next_obs=window,
            weight=batch.weight,
            index=batch.index,
            extras=batch.extras,
            ahead=batch.ahead,
        )
    batch = parts.without_masked(batch)
    reward = parts.scale_reward(cfg, return_stats, batch.reward)
    return replace(batch, obs=see(batch.obs), reward=reward, next_obs=see(batch.next_obs))


def burn_in(batch: Batch) -> int:
    """Returns K, the number of burn-in rows of the Windows; 0 without Windows."""
    return batch.obs.reset.shape[1] - batch.reward.shape[1] if isinstance(batch, Sequences) else 0


def select_following(batch: Batch, x: Array) -> Array:
    """Returns the entry of `x` [N] or [N, L + 1], one per `batch.next_obs`, after each transition: [N] or [N, L]."""
    return sequences.pick(x, batch.ahead) if isinstance(batch, Sequences) else x


def policy_reads(policy: PolicyHeads, params: PyTree, obs: PyTree, steps: int) -> PyTree:
    """Returns observations unchanged; for a Window the rows after the first `steps`, with the state after these."""
    if not isinstance(obs, Window):
        return obs
    return sequences.warm_up(policy.unroll, jax.lax.stop_gradient(params), obs, steps)


def policy_output(agent: Agent, params: PyTree, obs: PyTree, steps: int, **learning: Any) -> Any:
    """Returns the policy's output for observations [N, *]; for a Window [N, L, *] after its first `steps` rows.

    Args:
      learning: keywords `key` and `valid` of `networks.Network`, in the policy's loss.
    """
    return agent.net.policy.apply(params, policy_reads(agent.net.policy, params, obs, steps), **learning)


def critics_read(critic: Critics, params: PyTree, obs: PyTree, steps: int) -> PyTree:
    """As `policy_reads`, for critics: their state before the Window is the initial state."""
    if not isinstance(obs, Window):
        return obs
    params = jax.lax.stop_gradient(params)
    window = replace(obs, carry=critic.carry(params, obs.reset.shape[0]))
    return sequences.warm_up(critic.unroll, params, window, steps)


def values_read(value: PolicyHeads, params: PyTree, obs: PyTree, steps: int) -> PyTree:
    """As `critics_read`, for a network of V(obs), or a policy whose acting state is unknown."""
    if not isinstance(obs, Window):
        return obs
    return policy_reads(value, params, replace(obs, carry=value.carry(obs.reset.shape[0])), steps)


def q_taken(agent: Agent, critic_params: PyTree, batch: Any, *, key: Key | None = None) -> Array:
    """Returns the critics' outputs for the recorded actions [C, N] or [C, N, L], in a learning pass.

    With a head there is a last axis of atoms.

    Args:
      key: key of dropout; None: no dropout.
    """
    apply = functools.partial(agent.net.critic.outputs, key=key, **agents.batch_rows(agent, batch.weight))
    if isinstance(agent.spec.action, Discrete):
        return select_taken(agent.spec.action, apply(critic_params, batch.obs), batch)
    return apply(critic_params, batch.obs, batch.action)


def select_taken(space: Discrete, q: Array, batch: Any) -> Array:
    """Returns the outputs for the recorded actions, [C, N] of [C, N, A]; [C, N, L] for Windows; atoms stay last."""
    # a comparison instead of an index: its gradient is a select, the gradient of an index is a slower scatter
    taken: Any = jax.nn.one_hot(batch.action, space.n)
    if q.ndim > taken.ndim + 1:
        return jnp.sum(taken[None, ..., None] * q, -2)
    return jnp.sum(taken[None] * q, -1)


def is_joint(cfg: Any, agent: Agent) -> bool:
    """Returns whether critics read transitions and the next actions in one pass: see `joint_outputs`."""
    return not cfg.target_networks and agent.network.of_critics().has_statistics


def with_next_action(batch: Batch, action: Any) -> Batch:
    """Returns the batch with the policy's actions [N, *] at `next_obs`, for `joint_outputs`."""
    return replace(batch, extras={**batch.extras, _POLICY_ACTION: action})


def joint_outputs(agent: Agent, params: PyTree, batch: Batch, *, key: Key | None = None) -> tuple[Array, Array]:
    """Returns the critics' outputs for the recorded actions, and at `next_obs`, of one learning pass over both.

    So batch renormalisation has the statistics of both, and critics need no target networks (CrossQ, ICLR 2024,
    arXiv:1902.05605). The second result is for the actions of `with_next_action`, or for all Discrete actions.

    Args:
      key: key of dropout; None: no dropout.
    """
    both = lambda a, b: jax.tree.map(lambda *x: jnp.concatenate(x), a, b)
    rows = agents.batch_rows(agent, both(batch.weight, batch.weight))
    apply = functools.partial(agent.net.critic.outputs, params, both(batch.obs, batch.next_obs), key=key, **rows)
    if isinstance(agent.spec.action, Discrete):
        now, after = jnp.split(apply(), 2, 1)
        return select_taken(agent.spec.action, now, batch), after
    now, after = jnp.split(apply(both(batch.action, batch.extras[_POLICY_ACTION])), 2, 1)
    return now, after


def distribution_target(head: CriticHead, batch: Batch, outputs: Array, policy: Array, bonus: Array) -> Array:
    """Returns the atoms of targets reward + discount (Z(next_obs, a) + bonus), with a from the policy: [N, M].

    For Sequences it returns [N, L, M], and the arguments have the L + 1 rows of `next_obs`.

    Args:
      outputs: [C, N, A, K], outputs of the target critics at `next_obs`; A is 1 for sampled actions.
      policy: [N, A], probabilities of the actions.
      bonus: [N, A], bonus of the actions.
    """
    assert head.pool is not None and head.backup is not None
    rows = lambda x: x.reshape(batch.reward.size, *x.shape[batch.reward.ndim :])
    ahead = (rows(select_following(batch, x)) for x in (head.pool(outputs), policy, bonus))
    target = head.backup(*ahead, rows(batch.reward), rows(batch.discount))
    return target.reshape(*batch.reward.shape, -1)


def at_start(critic: Critics, params: PyTree, obs: PyTree, action: Array | None = None) -> Array:
    """Returns `Critics.apply` for observations [B, *] at an episode's start; `action` None: all Discrete actions."""
    batch_size = jax.tree.leaves(obs)[0].shape[0]
    memory = critic.carry(params, batch_size)
    if memory == ():
        return critic.apply(params, *((obs,) if action is None else (obs, action)))
    one_step = lambda x: jax.tree.map(lambda x: x[:, None], x)
    window = Window(one_step(obs), memory, jnp.zeros((batch_size, 1), bool))
    return critic.apply(params, *((window,) if action is None else (window, one_step(action))))[:, :, 0]


def outputs(cfg: Common, agent: Agent, state: State, obs: PyTree) -> dict[str, Any]:
    """Returns the outputs of policy and critics at an episode's start; `q` also has masked actions."""
    policy, critic = agent.net.policy, agent.net.critic
    obs, params = agent.observer.see(state.obs_stats, obs), state.params["critic"]
    dist, _ = policy.step(state.params["actor"], obs, policy.carry(jax.tree.leaves(obs)[0].shape[0]))
    if isinstance(dist, distributions.Categorical):
        return {"distribution": dist, "q": jnp.min(at_start(critic, params, obs), 0)}
    return {"distribution": dist, "value": jnp.min(at_start(critic, params, obs, dist.mode()), 0)}


def two_noises(key: Key, batch: Batch, shape: tuple[int, ...], axis_name: str | None) -> tuple[Array, Array]:
    """Returns standard normal numbers of `shape`, for each of `batch.next_obs` and for each transition; see `noise`."""
    num_rows = batch.reward.shape[0]
    if not isinstance(batch, Sequences):
        both = noise(key, num_rows, (2, *shape), axis_name)
        return both[:, 0], both[:, 1]
    length = batch.reward.shape[1]
    both = noise(key, num_rows, (2 * length + 1, *shape), axis_name)
    return both[:, : length + 1], both[:, length + 1 :]


def td_gradient(
    q: Callable[[PyTree, parts.TdBatch], Any],
    params: PyTree,
    batch: Batch,
    target: Array,
    axis_name: str | None,
    *,
    loss: Loss | None = None,
    net: Any = None,
    head: CriticHead | None = None,
) -> tuple[PyTree, Metrics, Array]:
    """Returns the gradient of half the squared TD error, or the loss of `head`, summed over critics.

    Args:
      q: (params, batch) -> [C, N] f32, each critic's value of the recorded action; [C, N, L] for Sequences. Or these
        with a penalty, (values, scalar, metrics). With `head` outputs, with a last axis of atoms, instead of values.
      params: parameters of the critics.
      batch: batch with weight 0 on masked rows; for Sequences, `obs` is the result of `critics_read`.
      target: [N] or [N, L] f32, common to the critics; with `head` as its loss reads it. No gradient.
      axis_name: mapped axis over devices; None: no such axis.
      loss: user's loss, which gets the critics as `net`; None: the TD error.
      head: head of critics with atoms; None: critics have one output, the value.
    Returns:
      gradient like `params`, metrics, and priority [N] f32: the absolute TD error averaged over critics, for a sequence
      its `sequences.sequence_priority`.
    """

    def own_loss(params, batch: parts.TdBatch):
        weight, target = batch.weight, batch.target
        mean = lambda x: jnp.mean(weight * x)
        values = q(params, batch)
        values, penalty, own = values if isinstance(values, tuple) else (values, None, {})
        if head is None:
            error = values - target[None]
            losses = 0.5 * jnp.mean(weight[None] * jnp.square(error), tuple(range(1, error.ndim)))
        else:
            distance = distances(head, values, target)
            losses = jnp.mean(weight[None] * distance, tuple(range(1, distance.ndim)))
            values, target = head.mean(values), head.target_mean(target)
            error = distance if head.priority_is_loss else values - target[None]
        metrics = {"loss/value": losses.mean(), "value/q": mean(values.mean(0)), "value/target": mean(target)}
        total = losses.sum() if penalty is None else losses.sum() + penalty
        priority: Array = jnp.where(weight > 0, jnp.abs(error).mean(0), 0.0)
        if isinstance(batch.obs, Window):
            priority = sequences.sequence_priority(priority, weight)
        return total, (metrics | own, priority)

    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(Batch)}
    if isinstance(batch, Sequences):
        fields["next_obs"] = ()
    td_batch = parts.TdBatch(**fields, target=jax.lax.stop_gradient(target))
    td_loss = custom_loss.over_replay(loss, own_loss, net)
    gradient, (metrics, priority) = jax.grad(td_loss, has_aux=True)(params, td_batch)
    gradient, metrics = parts.pmean((gradient, metrics), axis_name)
    return gradient, metrics, priority


def distances(head: CriticHead, outputs: Array, target: Array) -> Array:
    """Returns the losses [C, N] or [C, N, L] of outputs [C, ..., K] for a common target."""
    rows = target.reshape(math.prod(outputs.shape[1:-1]), *target.shape[outputs.ndim - 2 :])
    flat = outputs.reshape(outputs.shape[0], -1, outputs.shape[-1])
    return jax.vmap(head.loss, (0, None))(flat, rows).reshape(outputs.shape[:-1])


# ---------------------------------------------------------------- resets


@hyperparams
class Resets:
    """Periodic new initial weights, against the loss of plasticity by many updates (arXiv:2205.07802)."""

    every: Count | None = None  # updates between resets; null: none
    what: Literal["all", "critics"] = "all"  # all: policy, critics and temperature; with optimizer and target networks


def reset(cfg: Any, agent: Agent, state: State, key: Key, init: Callable[[Any, Agent, Key], State]) -> State:
    """Returns the State with initial weights, targets and optimizer states if `cfg.resets` are due at this update.

    Args:
      key: key of the update, the same on all devices; the weights use another stream.
      init: the algorithm's function of (cfg, agent, key).
    """
    if cfg.resets.every is None or isinstance(state.opt_state["critic"], gradients.Taken):  # there it is the gradient
        return state

    def anew(state: State) -> State:
        new = init(cfg, agent, jax.random.fold_in(key, 0x72736574))
        if cfg.resets.what == "all":
            return replace(state, params=new.params, target_params=new.target_params, opt_state=new.opt_state)
        part = lambda old, new: {**old, "critic": new["critic"]} if "critic" in old else old
        return replace(
            state,
            params=part(state.params, new.params),
            target_params=part(state.target_params, new.target_params),
            opt_state=part(state.opt_state, new.opt_state),
        )

    return parts.every(cfg.resets.every, state, anew)
