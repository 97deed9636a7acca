"""Flow Q-learning, FQL (arXiv:2502.02538): a one-step policy between a flow of the data's actions and the critics.

    algo = fql.make(fql.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *] in [-1, 1]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

The behaviour flow v(s, x, t) learns to move normal noise x_0 to actions a of the data, by flow matching. `flow_steps`
Euler steps of it make an action flow(s, z) of noise z. The policy mu(s, z) makes an action in one step:

    flow      |v(s, x_t, t) - (a - x_0)|^2, the mean over elements, with x_t = (1 - t) x_0 + t a, t uniform   (eq. 5)
    policy    alpha |mu(s, z) - flow(s, z)|^2, the mean over elements, - Q(s, mu(s, z))                       (eq. 8)
    critics   y = reward + discount Q'(s', mu(s', z')), with target critics Q'                                (eq. 6)

So the data may have several modes of actions, no gradient passes through the steps of the flow, and acting needs the
policy alone. Q is the mean over critics; actions in Q and in the environment are clipped to [-1, 1]. Exploration draws
the noise z; the best action is that of z = 0, as exports act.

It learns from data sets and from replay, so training can continue online. With memory (`network.core`) it learns from a
SequenceBatch: the policy starts from the acting memory, flow and critics from the memory of an episode's start.
Gradients and metrics are averaged over `make(..., axis_name="d")`. With the same `key` on all devices, the result
equals the result of one device with all rows.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import networks as nets
from jrl import spaces
from jrl.algos import agent as agents
from jrl.algos import critic_heads, critics, parts
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.critic_heads import Critic
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.algos.observer import Observer
from jrl.fields.bounds import Count, Few, NonNegative, NonNegativeSchedule, Share
from jrl.fields.data import Replay
from jrl.networks import NetworkConfig
from jrl.networks.critics import Atoms, Critics, build_critics
from jrl.ops import random, schedules
from jrl.types import (
    Algo,
    Array,
    Batch,
    Box,
    EnvSpec,
    Key,
    Metrics,
    PyTree,
    SequenceBatch,
    UpdateAux,
    Window,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(256, 256), activation="relu")


@hyperparams
class Config(Common):
    """Hyper-parameters of FQL; a Schedule is a number or `[[env_steps, value], ...]`."""

    learns_from: ClassVar[type] = Replay
    acts_in: ClassVar[Any] = Box
    has_critic: ClassVar[bool] = True

    actor_lr: NonNegativeSchedule | None = None  # step size of policy and flow; null: lr
    tau: Share = 0.005  # step size of the target critics towards the critics
    critic: Critic = Critic()  # kind of the critics: see the class
    num_critics: Few = 2  # number of Q networks
    target_q: Literal["mean", "min"] = "mean"  # the targets' reduction over critics; the policy takes the mean
    alpha: NonNegative = 10.0  # weight of the distance to the flow's actions in the policy's loss
    normalize_q: bool = False  # divide Q in the policy's loss by the batch's mean |Q|, so that alpha has no unit
    flow_steps: Count = 10  # Euler steps of the flow
    exploration: OverDistributions = Stochastic()

    def validate(self) -> list[str]:
        errors: list[str] = []
        if self.target_q == "mean" and self.critic.kind in ("quantiles", "c51"):
            errors.append(
                f"target_q: expected min, which {self.critic.kind} has its own form of, got mean: set it to min, or "
                "critic.kind to mse or hl_gauss"
            )
        return errors + self.critic.validate() + super().validate()


# ---------------------------------------------------------------- networks


@struct.dataclass
class OneStep:
    """Actions of the policy at observations, as functions of noise; its best action is that of noise 0."""

    zeros: Array  # [N, *] or [N, L, *], like the actions
    unclipped: Callable[[Array], Array] = struct.field(pytree_node=False)  # noise [N, *] -> mu(s, noise)

    def sample(self, key: Key) -> Array:
        return self.at(random.normal(key, self.zeros.shape))

    def mode(self) -> Array:
        return self.at(self.zeros)

    def at(self, noise: Array) -> Array:
        return jnp.clip(self.unclipped(noise), -1.0, 1.0)


class Policy(NamedTuple):
    """The one-step policy with the members of `critics.PolicyHeads`, and the behaviour flow."""

    init: Callable[[Key], PyTree]
    apply: Callable[[PyTree, PyTree], OneStep]
    carry: Callable[[int], PyTree]
    step: Callable[[PyTree, PyTree, PyTree], tuple[OneStep, PyTree]]
    unroll: Callable[[PyTree, Window], tuple[None, PyTree]]
    init_flow: Callable[[Key], PyTree]
    # (params, obs [N, *] or Window, x [N, size], t [N, 1]) -> v(obs, x, t) [N, size], for the action's `size` elements
    flow: Callable[[PyTree, PyTree, Array, Array], Array]
    read_flow: Callable[[PyTree, PyTree, int], PyTree]  # `critics.critics_read` of the flow


def _field(spec: EnvSpec, network: NetworkConfig, inputs: int, size: int) -> Critics:
    """Returns a network of (obs, x [N, inputs]) with `size` outputs: one critic with an output per action element."""
    space, own = nets.unprivileged(spec.observation, network)
    own = replace(own, critic_torso=None, critic_hidden=None, critic_norm=None, critic_dropout=None)
    field = build_critics(spec._replace(observation=space, action=Box((inputs,))), own, 1, Atoms(size, lambda x: x))
    hidden = network.value_inputs

    def read(obs: PyTree) -> PyTree:
        if isinstance(obs, Window):
            return replace(obs, obs=read(obs.obs))
        return spaces.remove_parts(spec.observation, hidden, obs) if hidden else obs

    apply = lambda params, obs, x, **learning: field.apply(params, read(obs), x, **learning)
    return field._replace(apply=apply, unroll=lambda params, window: field.unroll(params, read(window)))


def policy_network(observer: Observer, network: NetworkConfig) -> Any:  # a NamedTuple cannot derive from PolicyHeads
    """Returns the `Policy`; the first dense layer of its two networks reads noise beside the observation."""
    spec = observer.spec
    assert isinstance(spec.action, Box)
    shape, size = spec.action.shape, math.prod(spec.action.shape)
    policy, flow = _field(spec, network, size, size), _field(spec, network, size + 1, size)
    start = nets.start_of_core(network)

    def apply(params: PyTree, obs: PyTree) -> OneStep:
        if isinstance(obs, Window):
            obs = replace(obs, carry=jax.tree.map(lambda x: x[None], obs.carry))  # a critic's states have an axis more
        rows = obs.reset.shape if isinstance(obs, Window) else (jax.tree.leaves(obs)[0].shape[0],)

        def act(noise: Array) -> Array:
            return policy.apply(params, obs, noise.reshape(*rows, size))[0].reshape(*rows, *shape)

        return OneStep(jnp.zeros((*rows, *shape), jnp.float32), act)

    def step(params: PyTree, obs: PyTree, carry: PyTree) -> tuple[OneStep, PyTree]:
        if start is None:
            return apply(params, obs), carry
        no = jnp.zeros((jax.tree.leaves(obs)[0].shape[0], 1), bool)
        window = Window(jax.tree.map(lambda x: x[:, None], obs), carry, no)
        of_window = apply(params, window)
        act = lambda noise: of_window.unclipped(noise[:, None])[:, 0]
        return OneStep(of_window.zeros[:, 0], act), unroll(params, window)[1]

    def unroll(params: PyTree, window: Window) -> tuple[None, PyTree]:
        window = replace(window, carry=jax.tree.map(lambda x: x[None], window.carry))
        return None, jax.tree.map(lambda x: x[0], policy.unroll(params, window)[1])

    return Policy(
        init=policy.init,
        apply=apply,
        carry=lambda batch_size: () if start is None else start(batch_size),
        step=step,
        unroll=unroll,
        init_flow=flow.init,
        flow=lambda params, obs, x, t: flow.apply(params, obs, jnp.concatenate([x, t], -1))[0],
        read_flow=functools.partial(critics.critics_read, flow),
    )


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State, with copies of the critics as targets."""
    params = critics.initial_params(agent, key)
    params["flow"] = agent.net.policy.init_flow(jax.random.fold_in(key, 2))
    return agents.begin(cfg, agent, key, params, target_params={"critic": params["critic"]}, by_part=True)


# ---------------------------------------------------------------- learning


def follow_flow(cfg: Config, agent: Agent, params: PyTree, obs: PyTree, noise: Array) -> Array:
    """Returns the flow's actions [N, size] from noise [N, size], by Euler steps of t from 0 to 1 (alg. 1).

    Args:
      params: parameters of the flow.
      obs: [N, *], or a Window for noise [N, L, size].
    """

    def step(x: Array, t: Array) -> tuple[Array, None]:
        velocity = agent.net.policy.flow(params, obs, x, jnp.broadcast_to(t, (*x.shape[:-1], 1)))
        return x + velocity / cfg.flow_steps, None

    x, _ = jax.lax.scan(step, noise, jnp.arange(cfg.flow_steps, dtype=jnp.float32) / cfg.flow_steps)
    return jnp.clip(x, -1.0, 1.0)


def flow_loss(agent: Agent, params: PyTree, obs: PyTree, action: Array, noise: Array, t: Array, weight: Array) -> Array:
    """Returns the loss of flow matching (eq. 5), the mean over rows [N] and elements.

    Args:
      params: parameters of the flow.
      action, noise: [N, size].
      t: [N, 1], times in [0, 1).
      weight: [N], weight of each row.
    """
    velocity = agent.net.policy.flow(params, obs, (1.0 - t) * noise + t * action, t)
    return jnp.mean(weight * jnp.mean(jnp.square(velocity - (action - noise)), -1))


def policy_loss(
    cfg: Config, agent: Agent, params: PyTree, batch: Batch, noise: Array, target: Array, q: Callable[[Array], Array]
) -> tuple[Array, Metrics]:
    """Returns the policy's loss (eq. 8), the mean over rows, and metrics.

    Args:
      params: parameters of the policy.
      noise: [N, size].
      target: [N, size], the flow's actions from the same noise, without gradient.
      q: actions [N, *] -> the critics' values [C, N] at `batch.obs`.
    """
    mean, policy = lambda x: jnp.mean(batch.weight * x), agent.net.policy
    one_step = policy.apply(params, critics.policy_reads(policy, params, batch.obs, critics.burn_in(batch)))
    action = one_step.unclipped(noise.reshape(one_step.zeros.shape))
    distance = mean(jnp.mean(jnp.square(action.reshape(target.shape) - target), -1))
    value = q(jnp.clip(action, -1.0, 1.0)).mean(0)
    scale: Any = 1.0
    if cfg.normalize_q:
        size = parts.pmean(mean(jnp.abs(jax.lax.stop_gradient(value))), agent.axis_name)
        scale = 1.0 / jnp.maximum(size, 1e-8)
    loss = cfg.alpha * distance - scale * mean(value)
    return loss, {"loss/policy": loss, "policy/flow_distance": distance}


def target_of(cfg: Config, agent: Agent, batch: Batch, outputs: Array) -> Array:
    """Returns reward + discount Q'(next_obs, action) [N]; for critics of distributions [N, M].

    Args:
      outputs: [C, N, ...], outputs of the target critics for the policy's actions.
    """
    if agent.net.has_distribution:
        one = jnp.ones((*outputs.shape[1:-1], 1))  # there is one action, without a bonus
        return critics.distribution_target(agent.net.head, batch, jnp.expand_dims(outputs, -2), one, 0.0 * one)
    q = agent.net.mean(outputs)
    q = q.min(0) if cfg.target_q == "min" else q.mean(0)
    return batch.reward + batch.discount * critics.select_following(batch, q)


def update(cfg: Config, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step of critics, flow and policy, and moves the targets."""
    batch = critics.read(cfg, agent, state, batch)
    params, burn_in, policy, critic = state.params, critics.burn_in(batch), agent.net.policy, agent.net.critic
    rows, length = batch.reward.shape[0], batch.reward.shape[1:]
    action = batch.action.reshape(*batch.reward.shape, -1)
    keys = jax.random.split(key, 4)
    draw = lambda i, shape, **how: critics.noise(keys[i], rows, shape, agent.axis_name, **how)
    size = action.shape[-1]

    one_step = critics.policy_output(agent, params["actor"], batch.next_obs, burn_in)
    next_action = one_step.at(draw(0, one_step.zeros.shape[1:]))
    slow = state.target_params["critic"]
    next_obs = critics.critics_read(critic, slow, batch.next_obs, burn_in)
    target = target_of(cfg, agent, batch, critic.outputs(slow, next_obs, next_action))
    obs = critics.critics_read(critic, params["critic"], batch.obs, burn_in)
    critic_gradient, metrics, priority = critics.td_gradient(
        functools.partial(critics.q_taken, agent),
        params["critic"],
        replace(batch, obs=obs),
        target,
        agent.axis_name,
        loss=agent.loss,
        net=critic,
        head=agent.net.head,
    )

    start, t = draw(1, (*length, size)), draw(2, (*length, 1), draw=random.uniform)

    def loss_of_flow(flow: PyTree) -> Array:
        read = policy.read_flow(flow, batch.obs, burn_in)
        return flow_loss(agent, flow, read, action, start, t, batch.weight)

    noise = draw(3, (*length, size))
    imitated = follow_flow(cfg, agent, params["flow"], policy.read_flow(params["flow"], batch.obs, burn_in), noise)
    q = functools.partial(critic.apply, params["critic"], obs)
    loss_of_policy = lambda actor: policy_loss(cfg, agent, actor, batch, noise, imitated, q)
    found = jax.value_and_grad(loss_of_flow)(params["flow"]), jax.grad(loss_of_policy, has_aux=True)(params["actor"])
    (matching, flow_gradient), (policy_gradient, policy_metrics) = parts.pmean(found, agent.axis_name)

    actor_lr = cfg.lr if cfg.actor_lr is None else cfg.actor_lr
    state = critics.descend(cfg, agent, state, "critic", cfg.lr, critic_gradient)
    state = critics.descend(cfg, agent, state, "flow", actor_lr, flow_gradient)
    state = critics.descend(cfg, agent, state, "actor", actor_lr, policy_gradient)
    moved = parts.moved(slow, state.params["critic"], cfg.tau)
    state = replace(state, target_params={"critic": moved}, updates=state.updates + 1)
    metrics |= policy_metrics | {"loss/flow": matching, "train/lr": schedules.value(cfg.lr, state.env_steps)}
    return state, UpdateAux(metrics, priority)


def outputs(cfg: Config, agent: Agent, state: State, obs: PyTree) -> dict[str, Array]:
    """Returns the value of the policy's best action at an episode's start [B]."""
    policy, critic = agent.net.policy, agent.net.critic
    obs = agent.observer.see(state.obs_stats, obs)
    one_step, _ = policy.step(state.params["actor"], obs, policy.carry(jax.tree.leaves(obs)[0].shape[0]))
    return {"value": critics.at_start(critic, state.params["critic"], obs, one_step.mode()).mean(0)}


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes FQL, a replay-based Algo. Arguments and errors: see `jrl.algos`.

    Actions are a Box of [-1, 1]. With images every network has its own torso. A user's loss replaces the critics' loss
    and gets TdBatch [N].
    """
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    agent = critics.make_agent(
        cfg,
        spec,
        network,
        policy_network,
        kind="distribution",
        num_critics=cfg.num_critics,
        head=critic_heads.make(cfg.critic),
        **options,
    )
    return critics.make_algo(cfg, agent, init=init, update=update, ingest=agents.ingest, outputs=outputs)
