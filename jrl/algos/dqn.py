"""Deep Q-learning (Mnih et al., Nature 518, 2015) and what grew from it, each a flag of Config.

    double       arXiv:1509.06461    the online network picks the next action, the target network values it
    dueling      arXiv:1511.06581    Q = V + A - mean(A)
    noisy        arXiv:1706.10295    noise on the weights of the heads explores
    munchausen   arXiv:2007.14430    a soft policy's log-probability is added to the reward
    head         arXiv:1707.06887    c51: a categorical distribution of the return on fixed atoms
                 arXiv:1710.10044    qr: quantiles of the return

n-step returns and prioritised replay (arXiv:1511.05952) are the buffer's; all six together are Rainbow
(arXiv:1710.02298, configs/rainbow.yaml).

    algo = dqn.make(dqn.Config(double=True), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

Gradients and metrics are reduced over `make(..., axis_name="d")`; noise is the same on all devices, if `key` is.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jrl import networks
from jrl.algos import custom_loss, exploration, parameter_noise, parts, q_heads
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import EpsilonGreedy, OverQ, SoftQ
from jrl.hyper import Schedule
from jrl.networks import Head, NetworkConfig
from jrl.ops import schedules
from jrl.types import (
    ActOut,
    Algo,
    Array,
    Batch,
    Discrete,
    EnvSpec,
    InputError,
    Key,
    Metrics,
    PyTree,
    Rollout,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Config:
    """Hyper-parameters of DQN; a Schedule is a number or `[[env_steps, value], ...]`.

    After every `target_update_every`-th gradient step the target network moves: target + tau (online - target). So
    tau 1 is a copy (the hard update), and target_update_every 1 with a small tau is Polyak averaging.
    """

    uses_replay: ClassVar[bool] = True

    lr: Schedule = 5e-4  # Adam's step size
    gamma: float = 0.99  # discount per step
    double: bool = False  # the online network picks the next action
    dueling: bool = False  # separate streams for the state's value and the actions' advantages
    noisy: bool = False  # noise on the heads' weights; then exploration.epsilon 0 leaves exploring to it
    noisy_sigma: float = 0.5  # initial deviation of the noise, times 1 / sqrt(inputs of the layer)
    munchausen: bool = False  # adds alpha * clip(temperature * log pi(action), clip, 0) to the reward; soft backups
    munchausen_alpha: float = 0.9
    munchausen_temperature: float = 0.03  # of the policy softmax(Q / temperature)
    munchausen_clip: float = -1.0  # below 0
    head: Literal["expected", "c51", "qr"] = "expected"  # what the network estimates: the return's mean or distribution
    num_atoms: int = 51  # of c51
    v_min: float = -10.0  # lowest atom of c51; returns beyond the atoms are taken for the nearest
    v_max: float = 10.0  # highest atom of c51
    num_quantiles: int = 200  # of qr
    loss: Literal["huber", "mse"] = "huber"  # of the TD error; for head expected
    target_update_every: int = 500  # gradient steps between moves of the target network
    tau: float = 1.0  # share of the way to the online network that it moves; 1: a copy
    exploration: OverQ = EpsilonGreedy()  # how it acts while it learns
    max_grad_norm: float | None = 10.0  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: float | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: float | None = None  # clips each element of the gradient
    adam_eps: float = 1e-8  # added to Adam's denominator

    def validate(self) -> list[str]:
        """What is wrong with the values, each with its mend."""
        errors = parts.out_of_range(
            self,
            unit=("gamma", "tau", "munchausen_alpha"),
            positive=(
                "noisy_sigma",
                "munchausen_temperature",
                "num_quantiles",
                "target_update_every",
                "tau",
                *parts.CLIPPING,
            ),
        )
        if self.munchausen_clip >= 0:
            errors.append(f"munchausen_clip must be below 0, not {self.munchausen_clip}: the paper has -1")
        if self.num_atoms < 2:
            errors.append(f"num_atoms must be at least 2, not {self.num_atoms}")
        if self.v_min >= self.v_max:
            errors.append(f"v_min {self.v_min} must be below v_max {self.v_max}")
        if self.double and self.munchausen:
            errors.append("double picks the greedy action, munchausen averages over a soft policy: leave one out")
        if self.loss != "huber" and self.head != "expected":
            errors.append(f"loss {self.loss} is for head expected; head {self.head} has a loss of its own: use huber")
        return errors + exploration.validate(self.exploration)


@struct.dataclass
class State:
    params: PyTree
    target_params: PyTree
    opt_state: PyTree
    env_steps: Array  # [] u32, environment steps ingested, over all devices
    updates: Array  # [] u32, gradient steps


@struct.dataclass
class NoisyState(State):
    """With exploration by parameter noise."""

    noise: parameter_noise.Noise


def make(
    cfg: Config,
    spec: EnvSpec,
    network: NetworkConfig = DEFAULT_NETWORK,
    *,
    axis_name: str | None = None,
    loss: Loss | None = None,
) -> Algo:
    """DQN as pure functions.

    Args:
      cfg: hyper-parameters; floats may be traced.
      spec: spaces of the environment.
      network: shape of the Q network; `head_hidden` gives the heads layers of their own, noisy ones if cfg.noisy.
      axis_name: of the mapped axis over devices; None outside of one.
      loss: takes the place of the algorithm's own, of TdBatch [N] (`jrl.algos`); None: none does.
    Returns:
      A replay-based Algo.
    Raises:
      InputError: a space or torso that DQN cannot handle.
    """
    if not isinstance(spec.action, Discrete):
        raise InputError(f"dqn needs a Discrete action space, not {spec.action}: use ppo, sac or td3")
    num_actions = spec.action.n
    net = _network(cfg, spec, network)
    head = _head(cfg)
    optimizer = parts.adam(cfg)
    explorer = exploration.make(cfg.exploration, spec.action, kinds=("q",))
    one_hot = lambda action: jax.nn.one_hot(action, num_actions)
    custom_loss.check(loss)

    def outputs(params, obs, key):
        """[N, A, K]; `key` draws the noise of noisy layers, None: without."""
        if not cfg.dueling:
            return net.apply(params, obs, "q", key=key)[0].reshape(-1, num_actions, head.size)
        value, advantage = net.apply(params, obs, "value", "advantage", key=key)
        advantage = advantage.reshape(-1, num_actions, head.size)
        return value[:, None] + advantage - jnp.mean(advantage, 1, keepdims=True)

    def q_values(params, obs, key=None):
        """[N, A]"""
        return head.mean(outputs(params, obs, key))

    noise = parameter_noise.make(cfg.exploration, q_values, spec.action, NoisyState, axis_name=axis_name)

    def init(key: Key) -> State:
        params = net.init(key)
        state = State(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),  # arrays of its own, so that both can be donated
            opt_state=optimizer.init(params),
            env_steps=jnp.zeros((), jnp.uint32),
            updates=jnp.zeros((), jnp.uint32),
        )
        return noise.init(state, key)

    def actor(state: State) -> parts.Actor:
        return parts.Actor(state.params, state.env_steps, noise.perturbed(state, state.params))

    def act(actor: parts.Actor, obs, carry, key: Key, explore: bool = True) -> ActOut:
        noise_key, key = jax.random.split(key) if cfg.noisy and explore else (None, key)
        q = q_values(parts.acting(actor, explore), obs, noise_key)
        if not explore:
            return ActOut(jnp.argmax(q, -1).astype(jnp.int32), carry, {})
        action, carry = explorer.sample(q, key, actor.env_steps, carry)
        return ActOut(action, carry, {})

    def backup(state: State, batch: Batch, target_key, choice_key):
        """What the outputs for the action taken should be, without gradient."""
        after = outputs(state.target_params, batch.next_obs, target_key)
        if cfg.munchausen:
            log_policy = lambda q: cfg.munchausen_temperature * jax.nn.log_softmax(q / cfg.munchausen_temperature)
            now = log_policy(head.mean(outputs(state.target_params, batch.obs, target_key)))
            bonus = cfg.munchausen_alpha * jnp.clip(jnp.sum(now * one_hot(batch.action), -1), cfg.munchausen_clip, 0.0)
            soft = log_policy(head.mean(after))
            policy = jnp.exp(soft / cfg.munchausen_temperature)
            return head.backup(after, policy, -soft, batch.reward + bonus, batch.discount)
        chooser = outputs(state.params, batch.next_obs, choice_key) if cfg.double else after
        policy = one_hot(jnp.argmax(head.mean(chooser), -1))
        return head.backup(after, policy, None, batch.reward, batch.discount)

    def own_loss(params, batch: parts.TdBatch, key):
        # a comparison instead of an index: its gradient is a select, that of an index is a scatter
        taken = jnp.sum(one_hot(batch.action)[..., None] * outputs(params, batch.obs, key), 1)
        distance = head.loss(taken, batch.target)
        mean = lambda x: jnp.mean(batch.weight * x)
        q, target_q = head.mean(taken), head.target_mean(batch.target)
        priority = jnp.abs(distance if head.priority_is_loss else target_q - q)
        metrics = {"loss/value": mean(distance), "value/q": mean(q), "value/target": mean(target_q)}
        return metrics["loss/value"], (metrics, jnp.where(batch.weight > 0, priority, 0.0))

    def update(state: State, batch: Batch, key: Key) -> tuple[State, UpdateAux]:
        batch = parts.without_void(batch)
        keys = jax.random.split(key, 3) if cfg.noisy else (None, None, None)  # a draw of noise for each network's use
        target = jax.lax.stop_gradient(backup(state, batch, keys[0], keys[1]))
        td_loss = custom_loss.over_replay(
            loss, lambda params, batch: own_loss(params, batch, keys[2]), parts.QNetwork(net.init, q_values)
        )
        td_batch = parts.TdBatch(**vars(batch), target=target)
        gradient, (metrics, priority) = jax.grad(td_loss, has_aux=True)(state.params, td_batch)
        gradient, metrics = parts.pmean((gradient, metrics), axis_name)
        lr = schedules.value(cfg.lr, state.env_steps)
        params, opt_state = parts.descend(optimizer, lr, gradient, state.opt_state, state.params)
        updates = state.updates + 1
        target_params = _move_target(cfg, state.target_params, params, updates)
        state = replace(state, params=params, target_params=target_params, opt_state=opt_state, updates=updates)
        metrics |= {"train/lr": lr} | _exploration_metrics(cfg, state.env_steps) | noise.metrics(state)
        return state, UpdateAux(metrics, priority)

    def ingest(state: State, rollout: Rollout) -> State:
        state = noise.adapted(state, state.params, rollout.last_obs)
        return replace(state, env_steps=parts.count_steps(state.env_steps, rollout.mask, axis_name))

    return Algo(
        init=init,
        actor=actor,
        carry=explorer.carry,
        act=act,
        update=update,
        on_policy=False,
        ingest=ingest,
        outputs=lambda state, obs: {"q": head.mean(outputs(state.params, obs, None))},
    )


def _network(cfg: Config, spec: EnvSpec, network: NetworkConfig) -> networks.Network:
    """Heads `q` [A * K], or `value` [K] and `advantage` [A * K], on one torso."""
    assert isinstance(spec.action, Discrete)
    size, noise = _head(cfg).size, cfg.noisy_sigma if cfg.noisy else None
    heads = {"q": Head(spec.action.n * size, 1.0, noise)}
    if cfg.dueling:
        heads = {"value": Head(size, 1.0, noise), "advantage": Head(spec.action.n * size, 1.0, noise)}
    return networks.build(spec, replace(network, shared=True), heads)


def _head(cfg: Config) -> q_heads.QHead:
    if cfg.head == "c51":
        return q_heads.categorical(cfg.num_atoms, cfg.v_min, cfg.v_max)
    return q_heads.quantiles(cfg.num_quantiles) if cfg.head == "qr" else q_heads.expected(cfg.loss)


def _exploration_metrics(cfg: Config, env_steps: Array) -> Metrics:
    match cfg.exploration:
        case EpsilonGreedy(ladder=False, epsilon=epsilon):
            return {"policy/epsilon": schedules.value(epsilon, env_steps)}
        case SoftQ(temperature=temperature):
            return {"policy/temperature": schedules.value(temperature, env_steps)}
    return {}


def _move_target(cfg: Config, target: PyTree, params: PyTree, updates: Array) -> PyTree:
    hard = isinstance(cfg.tau, float | int) and cfg.tau == 1  # then bit for bit
    moved = params if hard else parts.move_target(target, params, cfg.tau)
    if cfg.target_update_every == 1:
        return moved
    due = updates % cfg.target_update_every == 0
    return jax.tree.map(lambda old, new: jnp.where(due, new, old), target, moved)


__all__ = ["Config", "NoisyState", "State", "make"]
