"""SPO: a policy that learns what particles find in the environment's own step (arXiv:2402.07963).

    algo = spo.make(spo.Config(), spec)
    act = algo.act_in(env)                                                        # env: jrl.types.JaxEnv
    out = act(algo.actor(state), obs, (), key, True, env_state)                   # searches from `env_state`
    state, aux = jax.jit(algo.update)(state, rollout, key)                        # rollout: jrl.types.Rollout [T, B]

Acting is sequential Monte Carlo. N copies of an environment, the particles, act by the policy for `search_depth` steps.
Each sums its errors d = reward + gamma V(next s) - V(s), and has the weight w = softmax over particles of sum d / eta.
Every `resample_every` steps N particles are drawn by weight, and their sums are 0 again; after the last step none are.
The share q of a first action is the weight of the particles that descend from it. The action is drawn by q.

    E-step    eta minimises eta (sample_kl + mean log mean_n exp(A_n / eta)), A_n: sum d up to the first resampling
    M-step    minimises -sum_n q_n log pi(a_n | s) + alpha KL(pi_old || pi); alpha grows while KL > its bound
    value     vf_coef (V - target)^2 / 2, the target is the lambda-return of the rollout

The M-step is MPO's, with its two KLs of a Gaussian; pi_old is the policy before the update. Stoix's ff_spo differs: it
learns from replay, its pi_old is a moving average, its search does not discount, and it resamples after the last step.
Environments have one agent. Without `env_state` the network acts alone. Gradients and metrics are averaged over
`make(..., axis_name="d")`.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions
from jrl.algos import actor_critic, mpo, parts, search, vmpo
from jrl.algos import agent as agents
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, State
from jrl.algos.exploration import OverDistributions, Stochastic
from jrl.fields.bounds import Count, Few, NonNegative, NonNegativeSchedule, Positive, Unit
from jrl.networks import NetworkConfig
from jrl.ops import minibatch, returns
from jrl.types import (
    ActOut,
    Algo,
    Array,
    EnvSpec,
    InputError,
    JaxEnv,
    Key,
    Metrics,
    PyTree,
    Rollout,
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig()
ACTIONS = "search_actions"  # key of a rollout's extras: the particles' first actions, [T, B, N, *]
SHARE = "search_share"  # key of a rollout's extras: the shares of these actions, [T, B, N] f32
ADVANTAGE = "search_advantage"  # key of a rollout's extras: the advantages of these actions, [T, B, N] f32
TEMPERATURE = "temperature"  # key of an actor's parameters: the logarithm of eta


@hyperparams
class Config(Common):
    """Hyper-parameters of SPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    has_memory: ClassVar[bool] = False
    searches_env: ClassVar[bool] = True
    uncorrected: ClassVar[bool] = True  # treats rollouts of older policies (rollout.mode async) as the present policy's

    num_particles: Few = 16  # copies of an environment in a search
    search_depth: Few = 4  # steps of a search
    resample_every: Few = 4  # steps of a search between draws of new particles; with search_depth or more: none
    search_in_evaluation: bool = True  # whether evaluations act by search; false: by the policy network alone
    gae_lambda: Unit = 0.95  # lambda of the value's target
    vf_coef: NonNegative = 0.5  # weight of the value loss
    num_epochs: Count = 8  # passes over a rollout in an update
    num_minibatches: Count = 4  # gradient steps per pass
    dual_lr: NonNegativeSchedule = 1e-2  # step size of the logarithms of temperature and multipliers
    sample_kl: Positive = 0.3  # bound of the mean KL from equal weights to the particles' weights
    mean_kl: Positive = 0.01  # bound of the mean KL of the policy with a new mean; not a Gaussian: of the policy
    std_kl: Positive = 5e-4  # bound of the mean KL of the policy with a new deviation
    temperature: Positive = 1.0  # initial eta
    mean_alpha: Positive = 5.0  # initial multiplier of the KL of the mean; not a Gaussian: of the policy
    std_alpha: Positive = 5.0  # initial multiplier of the KL of the deviation
    max_grad_norm: Positive | None = 0.5
    adam_eps: Positive = 1e-5
    exploration: OverDistributions = Stochastic()

    def validate(self) -> list[str]:
        return search.reward_faults(self) + super().validate()


# ---------------------------------------------------------------- acting


@struct.dataclass
class Particles:
    """N copies of each of B environments; all leaves are [N, B, ...]."""

    env_state: PyTree
    dist: Any  # the policy's distributions of the next action
    value: Array  # f32, V of the state
    ended: Array  # bool, the episode has ended
    score: Array  # f32, sum of errors since the latest resampling
    root: Array  # i32, index of the particle that began with this one's first action


class Found(NamedTuple):
    """Results of B searches."""

    actions: PyTree  # [N, B, *], first actions of the particles: samples of the policy
    share: Array  # [N, B] f32, the improved policy: weights of these actions
    advantage: Array  # [N, B] f32, sums of errors up to the first resampling


Look = Callable[[PyTree], tuple[Any, Array]]  # obs [..., *] -> the policy's distributions [...], V(obs) [...]


def find(cfg: Config, env: JaxEnv, look: Look, temperature: Array, env_state: PyTree, obs: PyTree, key: Key) -> Found:
    """Searches from B states.

    Args:
      cfg: options.
      env: B environments.
      look: policy and value.
      temperature: [] f32, eta.
      env_state, obs: states and observations [B, *] where the searches begin.
      key: random key.
    """
    count, batch = cfg.num_particles, env.spec.num_envs
    dist, value = look(obs)
    copies = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)
    ended = jnp.zeros((count, batch), bool)
    index = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[:, None], (count, batch))
    states, dists, values = (copies(x) for x in (env_state, distributions.batched(dist), value))
    particles = Particles(states, dists, values, ended, score=jnp.zeros((count, batch)), root=index)

    def step(particles: Particles, now: tuple[Array, Key]):
        due, key = now
        act_key, step_key, draw_key = jax.random.split(key, 3)
        action = particles.dist.sample(act_key)
        env_state, result = jax.vmap(env.step)(particles.env_state, action, jax.random.split(step_key, count))
        dist, value = look(result.obs)
        later = jnp.where(result.terminated, 0.0, cfg.gamma * value)
        # the environment resets after an end: from there on a particle earns nothing
        score = particles.score + jnp.where(particles.ended, 0.0, result.reward + later - particles.value)
        ended = particles.ended | result.terminated | result.truncated
        after = Particles(env_state, distributions.batched(dist), value, ended, score, particles.root)
        chosen = jax.random.categorical(draw_key, score / temperature, 0, (count, batch))
        chosen = jnp.where(due, chosen, index)
        after = jax.tree.map(jax.vmap(lambda x, i: x[i], 1, 1), after, jax.tree.map(lambda _: chosen, after))
        return replace(after, score=jnp.where(due, 0.0, after.score)), (action, score)

    depth = jnp.arange(1, cfg.search_depth + 1)
    due = (depth % cfg.resample_every == 0) & (depth < cfg.search_depth)
    particles, (actions, scores) = jax.lax.scan(step, particles, (due, jax.random.split(key, cfg.search_depth)))
    weight = jax.nn.softmax(particles.score / temperature, 0)
    share = jnp.sum(weight[None] * (particles.root[None] == index[:, None]), 1)
    return Found(jax.tree.map(lambda x: x[0], actions), share, scores[min(cfg.resample_every, cfg.search_depth) - 1])


def best(found: Found) -> Array:
    """Returns the indices [B] of first actions with the largest share, added over equal actions."""
    equal = lambda x: jnp.all(x[:, None] == x[None], tuple(range(3, x.ndim + 1)))  # [N, N, B]
    same = functools.reduce(jnp.logical_and, map(equal, jax.tree.leaves(found.actions)))
    return jnp.argmax(jnp.sum(found.share[None] * same, 1), 0)


def extras_of(found: Found) -> dict[str, PyTree]:
    """Returns the extras of acting, [B, N, *]."""
    actions, share, advantage = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)
    return {ACTIONS: actions, SHARE: share, ADVANTAGE: advantage}


def actor(cfg: Config, agent: Agent, state: State) -> ActorState:
    """Returns the parts of a State that acting needs, with the logarithm of the temperature."""
    plain = agents.actor(cfg, agent, state)
    return replace(plain, params={**plain.params, TEMPERATURE: state.own["dual"]["temperature"]})


def act(
    cfg: Config,
    agent: Agent,
    policy: Callable[..., Any],
    actor: ActorState,
    obs: PyTree,
    carry: PyTree,
    key: Key,
    explore: bool = True,
) -> ActOut:
    """Acts by the network alone; N samples of the policy with equal shares take the place of a search's actions.

    Without exploration the N actions are the policy's best one.
    """
    act_key, key = jax.random.split(key)
    out = agents.act(cfg, agent, policy, actor, obs, carry, act_key, explore)
    dist, _ = agent.net.apply(actor.params, agent.observer.see(actor.obs_stats, obs))
    sample = lambda key: dist.sample(key) if explore else dist.mode()
    actions = jax.vmap(sample)(jax.random.split(key, cfg.num_particles))
    share = jnp.full(jax.tree.leaves(actions)[0].shape[:2], 1.0 / cfg.num_particles)
    return out._replace(extras={**out.extras, **extras_of(Found(actions, share, jnp.zeros_like(share)))})


def act_in(cfg: Config, agent: Agent, env: JaxEnv):
    """Returns the function (actor, obs [B, *], carry, key, explore, env_state) -> ActOut, which searches in `env`.

    Raises:
      InputError: the environment has several agents.
    """
    if env.spec.num_agents > 1:
        raise InputError(
            f"algo.name spo: expected one agent, since particles do not play a game, got {env.spec.num_agents} agents: "
            "use ppo"
        )
    observer = agent.observer

    def chosen(actor: ActorState, obs: PyTree, carry: PyTree, key: Key, explore: bool, env_state: PyTree) -> ActOut:
        if not (explore or cfg.search_in_evaluation):
            return act(cfg, agent, actor_critic.policy, actor, obs, carry, key, explore)
        search.check_states("spo", env_state, env.spec.num_envs)
        look = lambda obs: agent.net.apply(actor.params, observer.see(actor.obs_stats, obs))
        search_key, draw_key = jax.random.split(key)
        temperature = jnp.exp(actor.params[TEMPERATURE])
        found = find(cfg, env, look, temperature, env_state, obs, search_key)
        index = jax.random.categorical(draw_key, jnp.log(found.share), 0) if explore else best(found)
        action = jax.tree.map(lambda x: jax.vmap(lambda x, i: x[i], (1, 0))(x, index), found.actions)
        seen = observer.record(actor.obs_stats, observer.see(actor.obs_stats, obs))
        return ActOut(action, carry, {**extras_of(found), **seen})

    return chosen


# ---------------------------------------------------------------- learning


@struct.dataclass
class Rows:
    """One row per environment step: [T, B, *] or [N, *]; K particles."""

    obs: PyTree  # normalised observations
    action: PyTree  # [N, K, *], first actions of the particles
    share: Array  # [N, K] f32, the search's weights of these actions
    advantage: Array  # [N, K] f32
    target: Array  # f32, target of the value
    weight: Array  # f32, 0 on masked rows, 1 on average
    dist: PyTree  # distribution of the policy before the update


def targets(cfg: Config, agent: Agent, state: State, rollout: Rollout) -> tuple[Rows, Metrics]:
    """Returns Rows [N], and metrics of the value."""
    value, done = actor_critic.values(agent, state, rollout)[0], rollout.terminated | rollout.truncated
    gae = {"gamma": cfg.gamma, "gae_lambda": cfg.gae_lambda}
    _, target = returns.gae(rollout.reward, rollout.terminated, done, value, **gae)
    found = (rollout.extras[name] for name in (ACTIONS, SHARE, ADVANTAGE))
    action, share, advantage, target = parts.zero_masked(rollout.mask, (*found, target))
    weight = parts.weights(rollout.mask, agent.axis_name)
    obs = agent.observer.recall(state.obs_stats, rollout)
    rows = agents.cut(agent, Rows(obs, action, share, advantage, target, weight, dist=()), ())
    before = lambda rows: distributions.batched(agent.net.apply(state.params, rows.obs)[0])
    rows = replace(rows, dist=minibatch.map_rows(before, rows, agents.chunk(cfg, agent, len(rows.weight))))
    return rows, parts.value_metrics(target, value[:-1], weight, agent.axis_name)


def loss(cfg: Config, agent: Agent, params: PyTree, dual: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns the mean over Rows [N] of all losses, see the module, and metrics.

    Args:
      params: parameters of the learned network.
      dual: logarithms of temperature and multipliers.
    """
    dist, value = agent.net.apply(params, rows.obs)
    mean = lambda x: jnp.mean(rows.weight * x)
    equal = jnp.full(rows.share.shape, -jnp.log(rows.share.shape[-1]))
    temperature, _, metrics = mpo.temperature_loss(cfg, dual, equal, rows.advantage, mean)
    learned, before = distributions.batched(dist), rows.dist
    fit, found = mpo.regression_loss(cfg, learned, before, dual, rows.action, rows.share, rows.weight)
    value_loss = mean(0.5 * jnp.square(value - rows.target))
    entropy = mean(-jnp.sum(jax.scipy.special.xlogy(rows.share, rows.share), -1))
    metrics |= found | {"loss/value": value_loss, "search/entropy": entropy}
    return temperature + fit + cfg.vf_coef * value_loss, metrics


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes the epochs of minibatches on a rollout [T, B]."""
    rows, metrics = targets(cfg, agent, agents.with_first_stats(agent, state, rollout), rollout)
    gradient = functools.partial(vmpo.mean_gradient, cfg, agent, loss)
    return vmpo.learn(cfg, agent, state, rollout, rows, gradient, metrics, key)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes SPO, an on-policy Algo. A user's loss gets Rows [N]. Arguments and errors: see `jrl.algos`."""
    records = agents.Records(seen=True)
    agent = agents.make(cfg, spec, network, actor_critic.networks, kind="distribution", records=records, **options)
    algo = actor_critic.make_algo(cfg, agent, update, init=vmpo.init, act=act)
    return algo._replace(actor=functools.partial(actor, cfg, agent), act_in=functools.partial(act_in, cfg, agent))
