"""Deep Q-learning (Mnih et al., Nature 518, 2015) and what grew from it, each a flag of Config.

    double       arXiv:1509.06461    the online network picks the next action, the target network values it
    dueling      arXiv:1511.06581    Q = V + A - mean(A)
    noisy        arXiv:1706.10295    noise on the weights of the heads explores
    munchausen   arXiv:2007.14430    a soft policy's log-probability is added to the reward
    head         arXiv:1707.06887    c51: a categorical distribution of the return on fixed atoms
                 arXiv:1710.10044    qr: quantiles of the return
    value_rescaling  arXiv:1805.11593  Q on a scale that takes rewards of any size

n-step returns and prioritised replay (arXiv:1511.05952) are the buffer's; all six together are Rainbow
(arXiv:1710.02298, configs/rainbow.yaml). With memory (`network.core`) it is R2D2 (Kapturowski et al., "Recurrent
experience replay in distributed reinforcement learning", ICLR 2019): sequences from replay start from the memory that
acting had there, `burn_in` rows warm it up without gradient, and the priority of a sequence is that of its TD errors.

    algo = dqn.make(dqn.Config(double=True), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

Where observations have an action mask, only allowed actions are taken, explored and valued: the maximum, the choice of
double and the policy of munchausen are over those of the next observation, and dueling's mean is over them as well. So
no gradient reaches the output of an action that was not allowed.

Gradients and metrics are reduced over `make(..., axis_name="d")`; noise is the same on all devices, if `key` is.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval, Lt
from flax import struct

from jrl import networks, spaces
from jrl.algos import custom_loss, exploration, observer, parameter_noise, parts, q_heads, sequences
from jrl.algos.custom_loss import Loss
from jrl.algos.exploration import EpsilonGreedy, OverQ, SoftQ
from jrl.bounds import Count, NonNegativeSchedule, Positive, Share, Unit
from jrl.networks import Head, NetworkConfig
from jrl.ops import exploration as ops
from jrl.ops import normalize, schedules
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
    SequenceBatch,
    UpdateAux,
    Window,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(init="uniform")


@hyperparams
class Config:
    """Hyper-parameters of DQN; a Schedule is a number or `[[env_steps, value], ...]`.

    After every `target_update_every`-th gradient step the target network moves: target + tau (online - target). So
    tau 1 is a copy (the hard update), and target_update_every 1 with a small tau is Polyak averaging.
    """

    uses_replay: ClassVar[bool] = True

    lr: NonNegativeSchedule = 5e-4  # Adam's step size
    gamma: Unit = 0.99  # discount per step
    double: bool = False  # the online network picks the next action
    dueling: bool = False  # separate streams for the state's value and the actions' advantages
    noisy: bool = False  # noise on the heads' weights; then exploration.epsilon 0 leaves exploring to it
    noisy_sigma: Positive = 0.5  # initial deviation of the noise, times 1 / sqrt(inputs of the layer)
    munchausen: bool = False  # adds alpha * clip(temperature * log pi(action), clip, 0) to the reward; soft backups
    munchausen_alpha: Unit = 0.9
    munchausen_temperature: Positive = 0.03  # of the policy softmax(Q / temperature)
    munchausen_clip: Annotated[float, Lt(0)] = -1.0  # least of the clipped term; the paper has -1
    head: Literal["expected", "c51", "qr"] = "expected"  # what the network estimates: the return's mean or distribution
    num_atoms: Annotated[int, Interval(ge=2, le=65_536)] = 51  # of c51
    v_min: float = -10.0  # lowest atom of c51; returns beyond the atoms are taken for the nearest
    v_max: float = 10.0  # highest atom of c51
    num_quantiles: Annotated[int, Interval(ge=1, le=65_536)] = 200  # of qr
    loss: Literal["huber", "mse"] = "huber"  # of the TD error; for head expected
    value_rescaling: bool = False  # learns h(Q) = sign(Q) (sqrt(|Q| + 1) - 1) + Q / 1000; for head expected
    normalize_obs: bool = False  # observations to mean 0 and deviation 1 by running statistics
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    normalize_reward_clip: Positive | None = 10.0  # bound of rewards that were so divided; null: none
    target_update_every: Count = 500  # gradient steps between moves of the target network
    tau: Share = 1.0  # share of the way to the online network that it moves; 1: a copy
    exploration: OverQ = EpsilonGreedy()  # how it acts while it learns
    max_grad_norm: Positive | None = 10.0  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: Positive | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: Positive | None = None  # clips each element of the gradient
    adam_eps: Positive = 1e-8  # added to Adam's denominator

    def validate(self) -> list[str]:
        """What is wrong with the combination of values, each with its mend."""
        errors: list[str] = []
        if self.v_min >= self.v_max:
            errors.append(f"v_min {self.v_min} must be below v_max {self.v_max}")
        if self.double and self.munchausen:
            errors.append("double picks the greedy action, munchausen averages over a soft policy: leave one out")
        if self.loss != "huber" and self.head != "expected":
            errors.append(f"loss {self.loss} is for head expected; head {self.head} has a loss of its own: use huber")
        if self.value_rescaling and self.head != "expected":
            errors.append(f"value_rescaling is for head expected, not {self.head}: leave one out")
        return errors + exploration.validate(self.exploration)


@struct.dataclass
class State:
    params: PyTree
    target_params: PyTree
    opt_state: PyTree
    obs_stats: PyTree  # normalize.RunningStats, or () without normalize_obs
    return_stats: PyTree  # normalize.RunningStats of the discounted return, or () without normalize_reward
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
      loss: takes the place of the algorithm's own, of TdBatch [N], with memory [N, L] (`jrl.algos`); None: none does.
    Returns:
      A replay-based Algo, with memory one of sequences. The `q` of its `outputs` is that of all actions, also of those
      that a mask does not allow; with memory at an episode's start.
    Raises:
      InputError: a space, torso or core that DQN cannot handle, or parameter noise with memory.
    """
    if not isinstance(spec.action, Discrete):
        raise InputError(f"dqn needs a Discrete action space, not {spec.action}: {parts.who_can(spec.action)}")
    parameter_noise.refuse_memory(cfg.exploration, network)
    network = parts.initialised(network, DEFAULT_NETWORK)
    num_actions, recurrent = spec.action.n, network.recurrent
    watch = observer.make(spec, network, normalize_obs=cfg.normalize_obs, axis_name=axis_name)
    net = _network(cfg, watch.spec, network)
    names = ("value", "advantage") if cfg.dueling else ("q",)
    head = _head(cfg)
    optimizer = parts.adam(cfg)
    explorer = exploration.make(cfg.exploration, spec.action, kinds=("q",))
    of_sequence = sequences.sequence_priority
    one_hot = lambda action: jax.nn.one_hot(action, num_actions)
    custom_loss.check(loss)

    def of_actions(heads, mask):
        """[M, A, K] of what the heads say, whatever their leading axes were."""
        if not cfg.dueling:
            return heads[0].reshape(-1, num_actions, head.size)
        value, advantage = heads[0].reshape(-1, head.size), heads[1].reshape(-1, num_actions, head.size)
        if mask is None:
            return value[:, None] + advantage - jnp.mean(advantage, 1, keepdims=True)
        allowed = ops.allowed(mask.reshape(-1, num_actions))[..., None]
        return value[:, None] + advantage - jnp.mean(advantage, 1, keepdims=True, where=allowed)

    def outputs(params, obs, key):
        """[M, A, K] for observations, or a Window; `key` draws the noise of noisy layers, None: without."""
        return of_actions(net.apply(params, obs, *names, key=key), watch.mask(obs))

    def q_values(params, obs, key=None):
        """[M, A]"""
        return head.mean(outputs(params, obs, key))

    def given_q(params, obs):
        """As a user's loss gets it: of a Window [N, L, A]."""
        q = q_values(params, obs)
        return q.reshape(*obs.reset.shape, num_actions) if isinstance(obs, Window) else q

    noise = parameter_noise.make(cfg.exploration, q_values, spec.action, NoisyState, axis_name=axis_name)

    def init(key: Key) -> State:
        params = net.init(key)
        state = State(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),  # arrays of its own, so that both can be donated
            opt_state=optimizer.init(params),
            obs_stats=watch.init(),
            return_stats=normalize.init(()) if cfg.normalize_reward else (),
            env_steps=jnp.zeros((), jnp.uint32),
            updates=jnp.zeros((), jnp.uint32),
        )
        return noise.init(state, key)

    def actor(state: State) -> parts.Actor:
        return parts.Actor(state.params, state.env_steps, noise.perturbed(state, state.params), state.obs_stats)

    def act(actor: parts.Actor, obs, carry, key: Key, explore: bool = True) -> ActOut:
        noise_key, key = jax.random.split(key) if cfg.noisy and explore else (None, key)
        before, own = parts.split_carry(carry)
        obs = watch.see(actor.obs_stats, obs)
        mask = watch.mask(obs)
        heads, memory = net.step(parts.acting(actor, explore), obs, before, *names, key=noise_key)
        q = head.mean(of_actions(heads, mask))
        if explore:
            action, own = explorer.sample(q, key, actor.env_steps, own, mask)
        else:
            action = ops.masked_argmax(q, mask)
        return ActOut(action, parts.join_carry(memory, own), {"carry": before} if recurrent else {})

    def backup(around: _Around, action, reward, discount):
        """What the outputs for the actions taken should be [M, K]."""
        after, allowed = around.after, around.allowed
        if cfg.munchausen:
            scaled = lambda q, mask: ops.masked_logits(q / cfg.munchausen_temperature, mask)
            log_policy = lambda q, mask: cfg.munchausen_temperature * jax.nn.log_softmax(scaled(q, mask))
            now = log_policy(head.mean(around.before), around.allowed_before)
            bonus = cfg.munchausen_alpha * jnp.clip(jnp.sum(now * one_hot(action), -1), cfg.munchausen_clip, 0.0)
            soft = log_policy(head.mean(after), allowed)
            policy = jnp.exp(soft / cfg.munchausen_temperature)
            return head.backup(after, policy, -soft, reward + bonus, discount)
        policy = one_hot(jnp.argmax(ops.masked_q(head.mean(around.chooser), allowed), -1))
        return head.backup(after, policy, None, reward, discount)

    def of_transitions(state: State, batch: Batch, target_key, choice_key) -> parts.TdBatch:
        """A batch as the networks read it, with targets."""
        obs, next_obs = (watch.see(state.obs_stats, x) for x in (batch.obs, batch.next_obs))
        reward = parts.scaled_reward(cfg, state.return_stats, batch.reward)
        batch = replace(batch, obs=obs, next_obs=next_obs, reward=reward)
        after = outputs(state.target_params, next_obs, target_key)
        before = outputs(state.target_params, obs, target_key) if cfg.munchausen else None
        chooser = outputs(state.params, next_obs, choice_key) if cfg.double else after
        around = _Around(after, chooser, watch.mask(next_obs), before, watch.mask(obs))
        target = backup(around, batch.action, reward, batch.discount)
        return parts.TdBatch(**vars(batch), target=jax.lax.stop_gradient(target))

    def of_sequences(state: State, batch: SequenceBatch, target_key, choice_key) -> parts.TdBatch:
        """The same of sequences: leaves [N, L, *], `obs` a Window that begins after the burn-in."""
        shape = batch.weight.shape
        reward = parts.scaled_reward(cfg, state.return_stats, batch.reward)
        window = replace(batch.window, obs=watch.see(state.obs_stats, batch.window.obs))
        warm = lambda params: sequences.warmed(net.unroll, params, window, sequences.burn_in(batch))
        online, target_window = warm(state.params), warm(state.target_params)
        by_row = lambda x: x.reshape(shape[0], shape[1] + 1, *x.shape[1:])
        ahead = lambda x: sequences.flat(sequences.pick(x, batch.ahead))
        now = lambda x: sequences.flat(x[:, :-1])
        whole = by_row(outputs(state.target_params, target_window, target_key))
        chooser = by_row(outputs(state.params, online, choice_key)) if cfg.double else whole
        mask = watch.mask(target_window)
        allowed, allowed_before = (None, None) if mask is None else (ahead(mask), now(mask))
        around = _Around(ahead(whole), ahead(chooser), allowed, now(whole), allowed_before)
        target = backup(around, *sequences.flat((batch.action, reward, batch.discount)))
        rows = lambda x: x[:, :-1]
        return parts.TdBatch(
            obs=Window(jax.tree.map(rows, online.obs), online.carry, rows(online.reset)),
            action=batch.action,
            reward=reward,
            discount=batch.discount,
            next_obs=(),
            weight=batch.weight,
            index=batch.index,
            target=jax.lax.stop_gradient(target.reshape(*shape, head.size)),
        )

    def own_loss(params, batch: parts.TdBatch, key):
        action, target = batch.action.reshape(-1), batch.target.reshape(-1, head.size)
        by_row = lambda x: x.reshape(batch.weight.shape)
        # a comparison instead of an index: its gradient is a select, that of an index is a scatter
        taken = jnp.sum(one_hot(action)[..., None] * outputs(params, batch.obs, key), 1)
        distance = by_row(head.loss(taken, target))
        mean = lambda x: jnp.mean(batch.weight * x)
        q, target_q = by_row(head.mean(taken)), by_row(head.target_mean(target))
        priority = jnp.abs(distance if head.priority_is_loss else head.scale(target_q) - head.scale(q))
        metrics = {"loss/value": mean(distance), "value/q": mean(q), "value/target": mean(target_q)}
        priority = jnp.where(batch.weight > 0, priority, 0.0)
        return metrics["loss/value"], (metrics, of_sequence(priority, batch.weight) if recurrent else priority)

    def update(state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
        clear: Any = sequences.without_void if recurrent else parts.without_void
        cleared = clear(batch)
        keys = jax.random.split(key, 3) if cfg.noisy else (None, None, None)  # a draw of noise for each network's use
        td_batch = (of_sequences if recurrent else of_transitions)(state, cleared, keys[0], keys[1])
        td_loss = custom_loss.over_replay(
            loss, lambda params, batch: own_loss(params, batch, keys[2]), parts.QNetwork(net.init, given_q)
        )
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
        last_obs = watch.see(state.obs_stats, rollout.last_obs)
        state = noise.adapted(state, state.params, last_obs, watch.mask(last_obs))
        return observer.ingested(watch, state, rollout, axis_name)

    def looked_at(state: State, obs) -> dict[str, Array]:
        memory = net.carry(spaces.batch_shape(spec.observation, obs)[0])
        obs = watch.see(state.obs_stats, obs)
        heads, _ = net.step(state.params, obs, memory, *names)
        return {"q": head.mean(of_actions(heads, watch.mask(obs)))}

    return Algo(
        init=init,
        actor=actor,
        carry=parts.carry_of(net.carry, explorer.carry),
        act=act,
        update=update,
        on_policy=False,
        ingest=ingest,
        outputs=looked_at,
        running_return_gamma=cfg.gamma if cfg.normalize_reward else None,
        sequences=recurrent,
    )


class _Around(NamedTuple):
    """What the networks say of the observations around M transitions, and the actions that can be taken there."""

    after: Array  # [M, A, K], of the target network
    chooser: Array  # [M, A, K], of the network that picks the next action
    allowed: Array | None  # [M, A] bool, after; None: all
    before: Any  # [M, A, K], of the target network; None where munchausen does not ask for it
    allowed_before: Array | None  # [M, A] bool


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
    if cfg.head == "qr":
        return q_heads.quantiles(cfg.num_quantiles)
    return q_heads.expected(cfg.loss, rescaled=cfg.value_rescaling)


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
