"""MuZero: a search over a learned model of rewards, values and policies (arXiv:1911.08265).

    algo = muzero.make(muzero.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, (), key)             # out.action [B]; out.extras: search, value
    state, aux = jax.jit(algo.update)(state, rollout, key)      # rollout: jrl.types.Rollout [T, B], one of the latest

Three networks: the representation h(obs) -> latent, the dynamics g(latent, action) -> (reward, latent) and the
prediction f(latent) -> (policy, value). Acting searches from h(obs) with g and f. Latents are scaled to [0, 1]
(appendix G). Values and rewards are categorical, on the scale h(x) = sign(x) (sqrt(|x| + 1) - 1) + x / 1000
(appendix F).

Learning begins at each row t of a rollout and follows its actions for `unroll_steps` steps k:

    loss      sum_k w_k (-sum_a share_t+k(a) log pi_k(a) + vf_coef CE(V_k, target_t+k) + CE(r_k, reward_t+k-1))

w_0 is 1 and the other weights are 1 / unroll_steps. `share` is the policy that the search found while acting; the
target is the lambda return of the rewards with the values of those searches. After a true end both targets are 0 for
all further steps, so that the model learns where episodes end; steps after a time limit have no target.

`learner.on_policy` keeps the latest `circular_buffer_num_batches` rollouts: each update learns from one of them. Acting
with `explore` false searches too, unless `search.in_evaluation` is false. Gradients and metrics are averaged over
`make(..., axis_name="d")`; float hyper-parameters are leaves of Config.
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import networks as nets
from jrl import spaces
from jrl.algos import actor_critic, custom_loss, parts, search
from jrl.algos import agent as agents
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, Records, State
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.algos.observer import Observer
from jrl.algos.search import Search
from jrl.distributions import Categorical
from jrl.fields.bounds import Count, Few, NonNegative, NonNegativeSchedule, Positive, Unit, Width, Widths
from jrl.fields.data import Fresh
from jrl.networks import Head, NetworkConfig
from jrl.ops import distributional, exploration, returns, schedules
from jrl.types import ActOut, Algo, Array, Box, Discrete, EnvSpec, Key, Metrics, PyTree, Rollout, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig(activation="relu")
SHARE = "search"  # key of a rollout's extras: the search's policy [T, B, A]
VALUE_SCALE = 0.02  # default of search.value_scale: with 0.1 the search trusts values before they are learned
VALUE = "search_value"  # key of a rollout's extras: the search's value [T, B]


@hyperparams
class Config(Common):
    """Hyper-parameters of MuZero; a Schedule is a number or `[[env_steps, value], ...]`."""

    acts_in: ClassVar[Any] = Discrete
    has_memory: ClassVar[bool] = False
    corrects: ClassVar[bool] = True  # targets are searches of the acting policy, of any age

    lr: NonNegativeSchedule = 1e-3
    gamma: Unit = 0.997
    search: Search = Search()
    unroll_steps: Few = 5  # steps of the model in a loss
    gae_lambda: Unit = 0.95  # lambda of the value's target, over values of the searches
    latent: Width = 64  # size of the model's states
    model_hidden: Widths = (64,)  # widths of the dense layers of dynamics and prediction
    value_support: Few = 30  # greatest absolute value and reward on the scale h; atoms are whole numbers up to it
    vf_coef: NonNegative = 0.25  # weight of the value loss
    num_epochs: Count = 1  # passes over a rollout per update
    num_minibatches: Count = 1  # gradient steps per pass
    circular_buffer_num_batches: Count = 1  # number of latest rollouts that are kept
    circular_buffer_iterations_per_batch: Count = 1  # updates per new rollout, each on one kept rollout
    max_grad_norm: Positive | None = 10.0
    exploration: OverDistributions = Stochastic()

    def validate(self) -> list[str]:
        faults = []
        if self.normalize_reward:
            faults.append(
                "normalize_reward: expected false, because old searches have values of the former scale, got true: "
                "leave it out, values are on a scale that takes rewards of any size"
            )
        return faults + super().validate()


# ---------------------------------------------------------------- networks


class Model(NamedTuple):
    """The three networks on one set of parameters, for rows [N]."""

    init: Any  # key -> params
    begin: Any  # (params, obs [N, *]) -> latent [N, F]
    step: Any  # (params, latent [N, F], action [N]) -> (latent [N, F], reward logits [N, K])
    predict: Any  # (params, latent [N, F]) -> (policy logits [N, A], value logits [N, K])
    num_atoms: int


def networks(cfg: Config, observer: Observer, network: NetworkConfig) -> Model:
    """Returns the networks of an Agent. Reward and value start near 0, and the policy near uniform."""
    spec, size = observer.spec, cfg.latent
    num_actions, num_atoms = spaces.num_choices(spec.action), 2 * cfg.value_support + 1
    plain = NetworkConfig(
        hidden=cfg.model_hidden, activation=network.activation, shared=True, dtype=network.dtype, init=network.init
    )
    build = lambda width, heads: nets.build(EnvSpec(Box((width,)), spec.action, 1), plain, heads)
    parts_of = {
        "representation": nets.build(spec, network, {"latent": Head(size, 1.0)}),
        "dynamics": build(size + num_actions, {"latent": Head(size, 1.0), "reward": Head(num_atoms, 0.01)}),
        "prediction": build(size, {"policy": Head(num_actions, 0.01), "value": Head(num_atoms, 0.01)}),
    }

    def init(key: Key) -> PyTree:
        keys = jax.random.split(key, len(parts_of))
        return {name: net.init(own) for own, (name, net) in zip(keys, parts_of.items(), strict=True)}

    def begin(params: PyTree, obs: PyTree) -> Array:
        return scale_latent(parts_of["representation"].apply(params["representation"], obs)[0])

    def step(params: PyTree, latent: Array, action: Array) -> tuple[Array, Array]:
        both = jnp.concatenate([latent, jax.nn.one_hot(action, num_actions)], -1)
        after, reward = parts_of["dynamics"].apply(params["dynamics"], both)
        return scale_latent(after), reward

    def predict(params: PyTree, latent: Array) -> tuple[Array, Array]:
        logits, value = parts_of["prediction"].apply(params["prediction"], latent)
        return logits, value

    return Model(init, begin, step, predict, num_atoms)


def scale_latent(x: Array) -> Array:
    """Returns states [..., F] scaled to [0, 1], each by its own least and greatest element (appendix G)."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return (x - low) / jnp.maximum(high - low, 1e-5)


def to_scalar(logits: Array) -> Array:
    """Returns the expected value or reward [...] of logits [..., 2 n + 1] over the atoms -n .. n on the scale h."""
    n = logits.shape[-1] // 2
    atoms = jnp.arange(-n, n + 1, dtype=jnp.float32)
    return returns.signed_parabolic(jnp.einsum("...k,k->...", jax.nn.softmax(logits), atoms, precision="highest"))


def cross_entropy(logits: Array, target: Array) -> Array:
    """Returns the cross entropy [N] of logits [N, 2 n + 1] to the two atoms around h(target) [N] (appendix F)."""
    n, scaled = logits.shape[-1] // 2, returns.signed_hyperbolic(target)
    share = distributional.project(
        jnp.ones((*scaled.shape, 1)), scaled[:, None], low=-float(n), high=float(n), num_atoms=2 * n + 1
    )
    return -jnp.sum(share * jax.nn.log_softmax(logits), -1)


# ---------------------------------------------------------------- acting


def predicted(agent: Agent, params: PyTree, obs: PyTree) -> tuple[Array, Categorical, Array]:
    """Returns the latent [N, F], the policy over allowed actions [N] and the value [N] of network inputs [N, *]."""
    latent = agent.net.begin(params, obs)
    logits, value = agent.net.predict(params, latent)
    mask = agent.observer.mask(obs)
    return latent, Categorical(exploration.masked_logits(logits, mask)), to_scalar(value)


def policy(cfg: Config, agent: Agent, actor: ActorState, obs: PyTree, memory: PyTree, explore: bool):
    """Returns the distribution of actions [B] of the network alone, and its outputs in place of a search's."""
    _, dist, value = predicted(agent, actor.params, obs)
    return dist, memory, {SHARE: jax.nn.softmax(dist.logits), VALUE: value}


def act(
    cfg: Config, agent: Agent, actor: ActorState, obs: PyTree, carry: PyTree, key: Key, explore: bool = True
) -> ActOut:
    """Returns actions for observations [B, *], by search, or by the network alone without `search.in_evaluation`."""
    if not (explore or cfg.search.in_evaluation):
        return agents.act(cfg, agent, policy, actor, obs, carry, key, explore)
    seen = agent.observer.see(actor.obs_stats, obs)
    latent, dist, value = predicted(agent, actor.params, seen)
    mask = agent.observer.mask(seen)

    def step(key: Key, action: Array, latent: Array) -> search.Child:
        latent, reward = agent.net.step(actor.params, latent, action)
        logits, value = agent.net.predict(actor.params, latent)
        reward, value = to_scalar(reward), to_scalar(value)
        return search.Child(reward, jnp.full_like(reward, cfg.gamma), logits, value, latent)

    blocked = None if mask is None else ~mask
    root = search.Root(dist.logits, value, latent)
    found = search.run(cfg.search, key, root, step, blocked, explore=explore, value_scale=VALUE_SCALE)
    extras = {SHARE: found.share, VALUE: found.value, **agent.observer.record(actor.obs_stats, seen)}
    return ActOut(found.action, carry, extras)


def outputs(cfg: Config, agent: Agent, state: State, obs: PyTree) -> dict[str, Any]:
    """Returns the distribution and value of observations [B, *] by the network alone."""
    _, dist, value = predicted(agent, state.params, agent.observer.see(state.obs_stats, obs))
    return {"distribution": dist, "value": value}


# ---------------------------------------------------------------- learning


@struct.dataclass
class Rows:
    """Rows where the model begins, [T, B, *] or [N, *], with the targets of its K + 1 states."""

    obs: PyTree  # normalised observations
    action: Array  # [N, K] i32
    reward: Array  # [N, K] f32, reward of each action
    share: Array  # [N, K + 1, A] f32, policy of the search
    target: Array  # [N, K + 1] f32, target of the value
    chooses: Array  # [N, K + 1] f32, 1 where the policy has a target
    valid: Array  # [N, K + 1] f32, 1 where the value has a target, and the reward of the step before
    weight: Array  # [N] f32, 0 on masked rows, 1 on average


def targets(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> tuple[Rows, Metrics]:
    """Returns Rows [T, B], and metrics of the value."""
    done, observer = rollout.terminated | rollout.truncated, agent.observer
    last = predicted(agent, state.params, observer.see(state.obs_stats, rollout.last_obs))[2]
    value = jnp.concatenate([rollout.extras[VALUE], last[None]])
    gae = {"gamma": cfg.gamma, "gae_lambda": cfg.gae_lambda}
    _, target = returns.gae(rollout.reward, rollout.terminated, done, value, **gae)
    obs, weight = observer.recall(state.obs_stats, rollout), parts.weights(rollout.mask, agent.axis_name)
    chooses = actor_critic.choice(agent, obs)
    chooses = rollout.mask if chooses is None else chooses & rollout.mask
    rows = rollout.action, rollout.reward, rollout.extras[SHARE], target
    action, reward, share, target = parts.zero_masked(rollout.mask, rows)
    names = "action", "reward", "share", "target", "chooses", "valid"
    steps: dict[str, list[Array]] = {name: [] for name in names}
    ahead = lambda x, k: jnp.concatenate([x[k:], jnp.zeros_like(x[:k])])
    known = jnp.ones_like(done)  # the row has targets: before a time limit and the rollout's end
    goes_on = jnp.ones_like(done)  # the episode has not ended
    for k in range(cfg.unroll_steps + 1):
        if k:
            before, exists = k - 1, jnp.arange(len(done))[:, None] + k < len(done)
            steps["action"].append(ahead(action, before))
            steps["reward"].append(jnp.where(goes_on, ahead(reward, before), 0.0))
            terminated = goes_on & ahead(rollout.terminated, before)
            truncated = goes_on & ahead(rollout.truncated, before) & ~terminated
            goes_on = goes_on & ~terminated
            known = known & ~truncated & (exists | ~goes_on)
        steps["share"].append(ahead(share, k))
        steps["target"].append(jnp.where(goes_on, ahead(target, k), 0.0))
        steps["chooses"].append((known & goes_on & ahead(chooses, k)).astype(jnp.float32))
        steps["valid"].append(known.astype(jnp.float32))
    metrics = parts.value_metrics(target, value[:-1], weight, agent.axis_name)
    return Rows(obs=obs, weight=weight, **{name: jnp.stack(x, 2) for name, x in steps.items()}), metrics


def loss(cfg: Config, agent: Agent, params: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns the loss of policy, value and reward over the model's steps, the mean over Rows [N] (equation 1)."""
    latent, steps = agent.net.begin(params, rows.obs), cfg.unroll_steps
    mean = lambda x: jnp.mean(rows.weight * x)
    losses = {name: jnp.zeros(()) for name in ("policy", "value", "reward")}
    entropy = jnp.zeros(())
    for k in range(steps + 1):
        scale = 1.0 / steps if k else 1.0
        if k:
            # half of the gradient at each step, so that the dynamics' share does not grow with the steps (appendix G)
            halved = 0.5 * (latent + jax.lax.stop_gradient(latent))
            latent, reward = agent.net.step(params, halved, rows.action[:, k - 1])
            losses["reward"] += scale * mean(rows.valid[:, k] * cross_entropy(reward, rows.reward[:, k - 1]))
        logits, value = agent.net.predict(params, latent)
        if k == 0:
            logits = exploration.masked_logits(logits, agent.observer.mask(rows.obs))
            entropy = mean(Categorical(logits).entropy())
        own = -jnp.sum(rows.share[:, k] * jax.nn.log_softmax(logits), -1)
        losses["policy"] += scale * mean(rows.chooses[:, k] * own)
        losses["value"] += scale * mean(rows.valid[:, k] * cross_entropy(value, rows.target[:, k]))
    total = losses["policy"] + cfg.vf_coef * losses["value"] + losses["reward"]
    share_entropy = mean(-jnp.sum(jax.scipy.special.xlogy(rows.share[:, 0], rows.share[:, 0]), -1))
    metrics = {f"loss/{name}": x for name, x in losses.items()}
    return total, metrics | {"policy/entropy": entropy, "search/entropy": share_entropy}


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes the epochs of minibatches on a rollout [T, B], of any age."""
    rows, value_metrics = targets(cfg, agent, state, rollout)
    grid = agents.grid(agent, *rows.weight.shape)
    chunk = agents.chunk(cfg, agent, rows.weight.size // cfg.num_minibatches)
    take, lr = agents.taker(agents.cut(agent, rows, ())), schedules.value(cfg.lr, state.env_steps)
    rows_loss = custom_loss.over_rows(agent.loss, functools.partial(loss, cfg, agent), agent.net)

    def step(carry, batch: Rows):
        params, opt_state = carry
        gradient, metrics = agents.mean_gradient(agent, rows_loss, params, batch, chunk)
        return agents.descend(cfg, agent, lr, gradient, opt_state, params), metrics

    start = (state.params, state.opt_state)
    (params, opt_state), metrics = agents.epochs(cfg, agent, step, start, take, grid, key)
    state = replace(state, params=params, opt_state=opt_state, updates=state.updates + 1)
    return state, UpdateAux(jax.tree.map(jnp.mean, metrics) | value_metrics | {"train/lr": lr})


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State."""
    return agents.begin(cfg, agent, key, agent.net.init(key))


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes MuZero, an on-policy Algo whose rollouts may be of older policies. Arguments and errors: see `jrl.algos`.

    `ingest` adds the statistics of a new rollout. A user's loss gets Rows [N].
    """
    search.import_mctx()  # only to raise its error now
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    agent = agents.make(cfg, spec, network, networks, kind="distribution", records=Records(seen=True), **options)
    return agents.algo(
        cfg,
        agent,
        init=init,
        act=act,
        update=update,
        outputs=outputs,
        memory=lambda batch_size: (),
        ingest=agents.ingest,
        data=Fresh(cfg.circular_buffer_num_batches, cfg.circular_buffer_iterations_per_batch),
    )
