"""Deep Q-learning (Mnih et al., Nature 518, 2015) and what grew from it, each a flag of Config.

    double       arXiv:1509.06461    the online network picks the next action, the target network values it
    dueling      arXiv:1511.06581    Q = V + A - mean(A)
    noisy        arXiv:1706.10295    noise on the weights of the heads explores
    munchausen   arXiv:2007.14430    a soft policy's log-probability is added to the reward
    head         arXiv:1707.06887    c51: a categorical distribution of the return on fixed atoms
                 arXiv:1710.10044    qr: quantiles of the return
    value_rescaling  arXiv:1805.11593  Q on a scale that takes rewards of any size
    conservative arXiv:2006.04779    CQL: values of actions that the data do not have come down

n-step returns and prioritised replay (arXiv:1511.05952) are the buffer's; all six together are Rainbow
(arXiv:1710.02298, configs/rainbow.yaml). With memory (`network.core`) it is R2D2 (Kapturowski et al., "Recurrent
experience replay in distributed reinforcement learning", ICLR 2019): sequences from replay start from the memory that
acting had there, `burn_in` rows warm it up without gradient, and the priority of a sequence is that of its TD errors.

    algo = dqn.make(dqn.Config(double=True), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

Where observations have an action mask, only allowed actions are taken, explored and valued: the maximum, the choice of
double, the policy of munchausen and dueling's mean are over those. No gradient reaches the output of another action.

Gradients and metrics are reduced over `make(..., axis_name="d")`; noise is the same on all devices, if `key` is.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from annotated_types import Interval, Lt

from jrl import networks as nets
from jrl import spaces
from jrl.algos import agent as agents
from jrl.algos import conservative, custom_loss, parameter_noise, parts, q_heads, sequences
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, Records, State
from jrl.algos.exploration import EpsilonGreedy, OverQ, SoftQ
from jrl.algos.observer import Observer
from jrl.fields.bounds import Count, NonNegative, NonNegativeSchedule, Positive, Share, Unit
from jrl.fields.data import Replay
from jrl.networks import Head, Network, NetworkConfig
from jrl.ops import exploration as ops
from jrl.ops import schedules
from jrl.types import (
    ActOut,
    Algo,
    Array,
    Batch,
    Discrete,
    EnvSpec,
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
class QLearning(Common):
    """Hyper-parameters of Q-learning from replay with a target network, for any kind of Q head.

    After every `target_update_every`-th gradient step the target network moves: (1 - tau) target + tau online. tau 1 is
    a copy (hard update); target_update_every 1 with a small tau is Polyak averaging.
    """

    learns_from: ClassVar[type] = Replay
    acts_in: ClassVar[Any] = Discrete
    has_learning_pass: ClassVar[bool] = True

    lr: NonNegativeSchedule = 5e-4
    double: bool = False  # the online network picks the next action
    munchausen: bool = False  # adds alpha * clip(temperature * log pi(action), clip, 0) to the reward; soft backups
    munchausen_alpha: Unit = 0.9
    munchausen_temperature: Positive = 0.03  # temperature of the policy softmax(Q / temperature)
    munchausen_clip: Annotated[float, Lt(0)] = -1.0  # least of the clipped term; the paper has -1
    target_update_every: Count = 500  # gradient steps between moves of the target network
    tau: Share = 1.0  # weight of the online network in the target network's move; 1: a copy
    conservative: bool = False  # CQL: adds cql_weight (log sum exp Q over the actions - Q of the data's) to the loss
    cql_weight: NonNegative = 1.0
    exploration: OverQ = EpsilonGreedy()
    max_grad_norm: Positive | None = 10.0

    def q_head(self) -> q_heads.QHead:
        """Returns the head that interprets the K outputs per action."""
        return q_heads.expected("huber")

    def reading(self) -> "Reading":
        """Returns the Reading of one agent's outputs."""
        return Reading(combine_heads, lambda agent, outputs: self.q_head().mean(outputs), taken, backup)

    @property
    def draws(self) -> bool:
        """Returns whether the network's outputs depend on a key."""
        return False

    def validate(self) -> list[str]:
        errors: list[str] = []
        if self.double and self.munchausen:
            errors.append("double picks the greedy action, munchausen averages over a soft policy: leave one out")
        return errors + super().validate()


@hyperparams
class Config(QLearning):
    """Hyper-parameters of DQN; a Schedule is a number or `[[env_steps, value], ...]`."""

    dueling: bool = False  # separate streams for the state's value and the actions' advantages
    noisy: bool = False  # noise on the heads' weights; then exploration.epsilon 0 leaves exploring to it
    noisy_sigma: Positive = 0.5  # initial deviation of the noise, times 1 / sqrt(inputs of the layer)
    head: Literal["expected", "c51", "qr"] = "expected"  # what the network estimates: the return's mean or distribution
    num_atoms: Annotated[int, Interval(ge=2, le=65_536)] = 51  # atoms of c51
    v_min: float = -10.0  # lowest atom of c51; returns beyond the atoms are taken for the nearest
    v_max: float = 10.0  # highest atom of c51
    num_quantiles: Annotated[int, Interval(ge=1, le=65_536)] = 200  # quantiles of qr
    loss: Literal["huber", "mse"] = "huber"  # loss of the TD error; for head expected
    value_rescaling: bool = False  # learns h(Q) = sign(Q) (sqrt(|Q| + 1) - 1) + Q / 1000; for head expected

    def q_head(self) -> q_heads.QHead:
        """Returns the head that interprets the K outputs per action."""
        if self.head == "c51":
            return q_heads.categorical(self.num_atoms, self.v_min, self.v_max)
        if self.head == "qr":
            return q_heads.quantiles(self.num_quantiles)
        return q_heads.expected(self.loss, rescaled=self.value_rescaling)

    @property
    def draws(self) -> bool:
        return self.noisy

    def validate(self) -> list[str]:
        errors: list[str] = []
        if self.v_min >= self.v_max:
            errors.append(f"v_min {self.v_min} must be below v_max {self.v_max}")
        if self.loss != "huber" and self.head != "expected":
            errors.append(f"loss {self.loss} is for head expected; head {self.head} has a loss of its own: use huber")
        if self.value_rescaling and self.head != "expected":
            errors.append(f"value_rescaling is for head expected, not {self.head}: leave one out")
        return errors + super().validate()


class Around(NamedTuple):
    """Network outputs before and after M transitions, with action masks."""

    after: Array  # [M, A, K], target network after the transition; for a team see its Reading
    chooser: Array  # [M, A, K], network that picks the next action
    allowed: Array | None  # [M, A] bool, allowed actions after the transition; None: all
    before: Any  # [M, A, K], target network before the transition; None without munchausen
    allowed_before: Array | None  # [M, A] bool, allowed actions before the transition


class Reading(NamedTuple):
    """Functions that interpret a network's outputs for M observations: actions of one agent, or of a team."""

    outputs: Callable[..., Array]  # (cfg, agent, heads, mask) -> outputs [M, ...], input of the other functions
    q: Callable[[Agent, Array], Array]  # (agent, outputs) -> Q values for acting [M, A]
    taken: Callable[..., Array]  # (cfg, agent, outputs, actions [M, *]) -> outputs of the actions [M, K]
    backup: Callable[..., Array]  # (cfg, agent, Around, actions, reward, discount) -> targets of these outputs [M, K]


class Keys(NamedTuple):
    """Keys of each use of a network, for noisy layers and dropout; None without both."""

    target: Key | None = None
    chooser: Key | None = None
    online: Key | None = None


# ---------------------------------------------------------------- the network


def networks(cfg: Config, observer: Observer, network: NetworkConfig) -> Network:
    """Returns a network with heads `q` [A * K], or `value` [K] and `advantage` [A * K], on one torso."""
    assert isinstance(observer.spec.action, Discrete)
    size, noise = cfg.q_head().size, cfg.noisy_sigma if cfg.noisy else None
    heads = {"q": Head(observer.spec.action.n * size, 1.0, noise)}
    if cfg.dueling:
        heads = {"value": Head(size, 1.0, noise), "advantage": Head(observer.spec.action.n * size, 1.0, noise)}
    return nets.build(observer.spec, replace(network, shared=True), heads)


def _num_actions(agent: Agent) -> int:
    assert isinstance(agent.spec.action, Discrete)
    return agent.spec.action.n


def combine_heads(cfg: QLearning, agent: Agent, heads: Any, mask: Array | None) -> Array:
    """Returns the outputs [M, A, K] of the heads with flattened leading axes (arXiv:1511.06581, eq. 9)."""
    num_actions, size = _num_actions(agent), cfg.q_head().size
    if len(heads) == 1:
        return heads[0].reshape(-1, num_actions, size)
    value, advantage = heads[0].reshape(-1, size), heads[1].reshape(-1, num_actions, size)
    if mask is None:
        return value[:, None] + advantage - jnp.mean(advantage, 1, keepdims=True)
    allowed = ops.allowed(mask.reshape(-1, num_actions))[..., None]
    return value[:, None] + advantage - jnp.mean(advantage, 1, keepdims=True, where=allowed)


def network_outputs(
    cfg: QLearning, agent: Agent, params: PyTree, obs: PyTree, key: Key | None = None, **rows: Array
) -> Array:
    """Returns outputs [M, ...] for observations or a Window.

    Args:
      key: key of noise and dropout; None: neither.
      rows: result of `agent.batch_rows` in a learning pass.
    """
    return cfg.reading().outputs(cfg, agent, agent.net.apply(params, obs, key=key, **rows), agent.observer.mask(obs))


def q_values(cfg: QLearning, agent: Agent, params: PyTree, obs: PyTree) -> Array:
    """Returns Q values [M, A]; [N, L, A] for a Window; [..., agents, A] for a team."""
    q = cfg.reading().q(agent, network_outputs(cfg, agent, params, obs))
    return q.reshape(*obs.reset.shape, *q.shape[1:]) if isinstance(obs, Window) else q


# ---------------------------------------------------------------- acting


def init(cfg: QLearning, agent: Agent, key: Key, networks: Callable[..., Network]) -> State:
    """Returns the initial State, with a target network."""
    params = networks(cfg, agent.observer, agent.network).init(key)  # not agent.net: noisy_sigma may be traced
    return agents.begin(cfg, agent, key, params, target_params=params)


def policy(
    cfg: QLearning, agent: Agent, actor: ActorState, obs: PyTree, memory: PyTree, explore: bool, key: Any = None
):
    """Returns Q values for observations [B, *], [B, agents, A] for a team; `key` draws the noise, None: no noise."""
    params = actor.params if not explore or actor.noisy == () else actor.noisy
    heads, memory = agent.net.step(params, obs, memory, key=key)
    reading = cfg.reading()
    return reading.q(agent, reading.outputs(cfg, agent, heads, agent.observer.mask(obs))), memory, {}


def act(
    cfg: QLearning, agent: Agent, actor: ActorState, obs: PyTree, carry: PyTree, key: Key, explore: bool = True
) -> ActOut:
    """Returns actions [B] by Q values, [B, agents] for a team; noisy layers draw their noise."""
    noise_key, key = jax.random.split(key) if cfg.draws and explore else (None, key)
    return agents.act(cfg, agent, functools.partial(policy, key=noise_key), actor, obs, carry, key, explore)


def outputs(cfg: QLearning, agent: Agent, state: State, obs: PyTree) -> dict[str, Any]:
    """Returns Q values of observations [B, *] at an episode's start."""
    memory = agent.net.carry(spaces.batch_shape(agent.spec.observation, obs)[0])
    obs = agent.observer.see(state.obs_stats, obs)
    return {"q": policy(cfg, agent, ActorState(state.params, state.obs_stats), obs, memory, False)[0]}


# ---------------------------------------------------------------- learning


def taken(cfg: QLearning, agent: Agent, outputs: Array, action: Array) -> Array:
    """Returns the outputs [M, K] of actions [M] among outputs [M, A, K]."""
    # a comparison instead of an index: its gradient is a select, the gradient of an index is a slower scatter
    chosen = jax.nn.one_hot(action, _num_actions(agent))[..., None]
    return jnp.sum(chosen * outputs, 1)


def backup(cfg: QLearning, agent: Agent, around: Around, action: Array, reward: Array, discount: Array) -> Array:
    """Returns the targets [M, K] of the outputs for the actions taken [M].

    The policy is greedy (Nature 2015; double: arXiv:1509.06461, eq. 4), or munchausen's (arXiv:2007.14430, eq. 2).
    """
    head, after, allowed = cfg.q_head(), around.after, around.allowed
    one_hot = lambda action: jax.nn.one_hot(action, after.shape[1])
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


def batch_from_transitions(cfg: QLearning, agent: Agent, state: State, batch: Batch, keys: Keys) -> parts.TdBatch:
    """Returns a batch as the networks read it, with targets."""
    observer, of = agent.observer, functools.partial(network_outputs, cfg, agent)
    obs, next_obs = (observer.see(state.obs_stats, x) for x in (batch.obs, batch.next_obs))
    reward = parts.scale_reward(cfg, state.return_stats, batch.reward)
    batch = replace(batch, obs=obs, next_obs=next_obs, reward=reward)
    after = of(state.target_params, next_obs, keys.target)
    before = of(state.target_params, obs, keys.target) if cfg.munchausen else None
    chooser = of(state.params, next_obs, keys.chooser) if cfg.double else after
    around = Around(after, chooser, observer.mask(next_obs), before, observer.mask(obs))
    target = cfg.reading().backup(cfg, agent, around, batch.action, reward, batch.discount)
    return parts.TdBatch(**vars(batch), target=jax.lax.stop_gradient(target))


def batch_from_sequences(cfg: QLearning, agent: Agent, state: State, batch: SequenceBatch, keys: Keys) -> parts.TdBatch:
    """Returns sequences with targets: leaves [N, L, *], `obs` a Window that begins after the burn-in."""
    shape, observer, of = batch.weight.shape, agent.observer, functools.partial(network_outputs, cfg, agent)
    reward = parts.scale_reward(cfg, state.return_stats, batch.reward)
    window = replace(batch.window, obs=observer.see(state.obs_stats, batch.window.obs))
    warm = lambda params: sequences.warm_up(agent.net.unroll, params, window, sequences.burn_in(batch))
    online, target_window = warm(state.params), warm(state.target_params)
    by_row = lambda x: x.reshape(shape[0], shape[1] + 1, *x.shape[1:])
    ahead = lambda x: sequences.flat(sequences.pick(x, batch.ahead))
    now = lambda x: sequences.flat(x[:, :-1])
    whole = by_row(of(state.target_params, target_window, keys.target))
    chooser = by_row(of(state.params, online, keys.chooser)) if cfg.double else whole
    mask = observer.mask(target_window)
    allowed, allowed_before = (None, None) if mask is None else (ahead(mask), now(mask))
    around = Around(ahead(whole), ahead(chooser), allowed, now(whole), allowed_before)
    target = cfg.reading().backup(cfg, agent, around, *sequences.flat((batch.action, reward, batch.discount)))
    rows = lambda x: x[:, :-1]
    return parts.TdBatch(
        obs=Window(jax.tree.map(rows, online.obs), online.carry, rows(online.reset)),
        action=batch.action,
        reward=reward,
        discount=batch.discount,
        next_obs=(),
        weight=batch.weight,
        index=batch.index,
        extras=batch.extras,
        target=jax.lax.stop_gradient(target.reshape(*shape, -1)),
    )


def loss(
    cfg: QLearning, agent: Agent, params: PyTree, batch: parts.TdBatch, *, key: Key | None = None
) -> tuple[Array, tuple[Metrics, Array]]:
    """Returns the mean distance of the taken actions' outputs from their targets, and (metrics, priority [N])."""
    head, weight = cfg.q_head(), batch.weight
    action = batch.action.reshape(weight.size, *batch.action.shape[weight.ndim :])
    target = batch.target.reshape(weight.size, -1)
    by_row = lambda x: x.reshape(weight.shape)
    every = network_outputs(cfg, agent, params, batch.obs, key, **agents.batch_rows(agent, weight))
    outputs = cfg.reading().taken(cfg, agent, every, action)
    distance = by_row(head.loss(outputs, target))
    mean = lambda x: jnp.mean(weight * x)
    q, target_q = by_row(head.mean(outputs)), by_row(head.target_mean(target))
    priority: Array = jnp.abs(distance if head.priority_is_loss else head.scale(target_q) - head.scale(q))
    metrics = {"loss/value": mean(distance), "value/q": mean(q), "value/target": mean(target_q)}
    priority = jnp.where(weight > 0, priority, 0.0)
    if agent.network.recurrent:
        priority = sequences.sequence_priority(priority, weight)
    if not cfg.conservative:
        return metrics["loss/value"], (metrics, priority)
    mask = agent.observer.mask(batch.obs)
    soft = conservative.soft_maximum_over_actions(
        head.mean(every), None if mask is None else mask.reshape(-1, every.shape[1])
    )
    penalty, own = conservative.penalty(cfg.cql_weight, mean(by_row(soft)), q[None], weight)
    return metrics["loss/value"] + penalty, (metrics | own, priority)


def update(
    cfg: QLearning, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key
) -> tuple[State, UpdateAux]:
    """Makes one gradient step, then moves the target network if it is due."""
    keys = Keys(*jax.random.split(key, 3)) if cfg.draws or agent.network.drops else Keys()
    if isinstance(batch, SequenceBatch):
        td_batch = batch_from_sequences(cfg, agent, state, sequences.without_masked(batch), keys)
    else:
        td_batch = batch_from_transitions(cfg, agent, state, parts.without_masked(batch), keys)
    given = parts.QNetwork(agent.net.init, functools.partial(q_values, cfg, agent))
    td_loss = custom_loss.over_replay(agent.loss, functools.partial(loss, cfg, agent, key=keys.online), given)
    gradient, (metrics, priority) = jax.grad(td_loss, has_aux=True)(state.params, td_batch)
    gradient, metrics = parts.pmean((gradient, metrics), agent.axis_name)
    lr, updates = schedules.value(cfg.lr, state.env_steps), state.updates + 1
    params, opt_state = agents.descend(cfg, agent, lr, gradient, state.opt_state, state.params)
    due: Any = cfg.target_update_every == 1 or updates % cfg.target_update_every == 0
    target_params = parts.moved(state.target_params, params, cfg.tau, due)
    state = replace(state, params=params, target_params=target_params, opt_state=opt_state, updates=updates)
    metrics |= {"train/lr": lr} | _exploration_metrics(cfg, state.env_steps)
    return state, UpdateAux(metrics | parameter_noise.metrics(cfg.exploration, state.own), priority)


def ingest(cfg: QLearning, agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns the State with a new rollout's statistics and adapted parameter noise."""
    state = agents.adapted(cfg, agent, functools.partial(q_values, cfg, agent), state, rollout)
    return agents.ingest(cfg, agent, state, rollout)


def _exploration_metrics(cfg: QLearning, env_steps: Array) -> Metrics:
    match cfg.exploration:
        case EpsilonGreedy(ladder=False, epsilon=epsilon):
            return {"policy/epsilon": schedules.value(epsilon, env_steps)}
        case SoftQ(temperature=temperature):
            return {"policy/temperature": schedules.value(temperature, env_steps)}
    return {}


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes DQN, a replay-based Algo. Arguments and errors: see `jrl.algos`.

    `network.head_hidden` adds layers to the heads, noisy ones if cfg.noisy. A user's loss gets TdBatch [N], with a core
    [N, L]. Parameter noise with a core raises InputError.
    """
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    return assemble(cfg, spec, network, networks, **options)


def assemble(
    cfg: QLearning,
    spec: EnvSpec,
    network: NetworkConfig,
    networks: Callable[..., Network],
    **options: Unpack[MakeOptions],
) -> Algo:
    """Returns the Algo of Q-learning with `networks(cfg, observer, network)`; other arguments as for `make`."""
    agent = agents.make(cfg, spec, network, networks, kind="q", records=Records(memory=True), **options)
    return agents.algo(
        cfg,
        agent,
        init=functools.partial(init, networks=networks),
        act=act,
        update=update,
        ingest=ingest,
        outputs=outputs,
        memory=agent.net.carry,
    )._replace(choice=functools.partial(agents.choice, cfg, agent, policy))
