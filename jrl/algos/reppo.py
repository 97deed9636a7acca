"""Relative entropy pathwise policy optimisation (arXiv:2507.11019): SAC's policy gradient, learned from rollouts.

    algo = reppo.make(reppo.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *]
    state, aux = jax.jit(algo.update)(state, rollout, key)                 # rollout: jrl.types.Rollout [T, B]

There is no replay and no target network. With an action a'_t of the policy at each obs_t, alpha the temperature
`ent_coef`, beta the multiplier `kl_coef`, and pi_old the policy before the update, an update makes

    targets   G_t = r_t + gamma ((1 - lambda) Q(s_{t+1}, a'_{t+1}) + lambda G_{t+1} - alpha log pi(a'_{t+1}))
    critic    the loss of `critic` towards G, hl_gauss by default (arXiv:2403.03950)
    policy    alpha log pi(a) - Q(s, a) where KL(pi_old || pi) is below `kl_bound`, beta KL elsewhere, a ~ pi(s)

in epochs of minibatches. alpha moves the entropy to `target_entropy`; beta grows while the mean KL exceeds its bound.

Policy and spaces are those of SAC: exact expectations take the place of samples for Discrete actions. With memory
(`network.core`) minibatches consist of sequences of `network.max_seq_len` steps. The policy starts them from the acting
memory, the critic from the initial state. The paper's prediction of the next state's features is left out. Gradients
and metrics are averaged over `make(..., axis_name="d")`.
"""

import functools
import math
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import struct

from jrl import distributions
from jrl.algos import agent as agents
from jrl.algos import critic_heads, critics, custom_loss, parts, sac, sequences
from jrl.algos.agent import Agent, Common, MakeOptions, Records, State
from jrl.algos.critic_heads import Critic
from jrl.algos.exploration import OverGaussians, Stochastic
from jrl.fields.bounds import Count, Positive, Unit
from jrl.networks import NetworkConfig
from jrl.ops import minibatch, returns, schedules
from jrl.ops.exploration import allowed
from jrl.types import (
    Algo,
    Array,
    Box,
    Discrete,
    EnvSpec,
    Key,
    Metrics,
    PyTree,
    Rollout,
    UpdateAux,
    Window,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(256, 256), activation="silu", norm="layer")
_TARGET_ENTROPY = 0.5  # share of minus the number of action elements, or of the greatest entropy of Discrete actions


@hyperparams
class Config(Common):
    """Hyper-parameters of REPPO; a Schedule is a number or `[[env_steps, value], ...]`."""

    acts_in: ClassVar[Any] = Discrete | Box
    has_critic: ClassVar[bool] = True
    uncorrected: ClassVar[bool] = True  # treats rollouts of older policies (rollout.mode async) as the present policy's

    q_lambda: Unit = 0.95  # decay of the lambda-returns
    num_epochs: Count = 8  # passes over a rollout in an update
    num_minibatches: Count = 16  # gradient steps per pass
    # kind of the critic; mse reads no other key
    critic: Critic = Critic(kind="hl_gauss", atoms=151, value_range=(-100.0, 100.0))
    ent_coef: Positive = 0.01  # initial temperature, the weight of the entropy
    # null: minus half the number of action elements; Discrete: half the greatest entropy of the allowed actions
    target_entropy: float | None = None
    kl_bound: Positive = 0.1  # bound of the KL from the policy before the update
    kl_coef: Positive = 0.01  # initial multiplier of the KL
    max_grad_norm: Positive | None = 0.5
    exploration: OverGaussians = Stochastic()

    def validate(self) -> list[str]:
        faults = []
        if self.critic.kind in ("quantiles", "c51"):
            faults.append(
                f"critic.kind: expected mse or hl_gauss, whose targets are lambda-returns, got {self.critic.kind}: set "
                "it to hl_gauss"
            )
        # with mse the other keys are defaults, which are not read
        return faults + (self.critic.validate() if self.critic.kind == "hl_gauss" else []) + super().validate()


@struct.dataclass
class Rows:
    """One row per environment step for the loss: N rows, or with a core sequences [N, L]."""

    obs: PyTree  # normalised; a Window for sequences
    action: Array
    target: Array  # [N] f32, target of Q(obs, action)
    weight: Array  # [N] f32, 0 on masked rows, 1 on average
    noise: PyTree  # [N, E, *] f32, standard normal numbers of each epoch; [N, *] in a loss; None for Discrete actions
    dist: PyTree  # the policy's distributions before the update [N]


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State."""
    params = critics.initial_params(agent, key)
    for name in ("ent_coef", "kl_coef"):
        params[f"log_{name}"] = jnp.log(jnp.asarray(getattr(cfg, name), jnp.float32))
    return agents.begin(cfg, agent, key, params, by_part=True)


def draw(agent: Agent, key: Key, num_steps: int, num_envs: int, *more: int) -> Array | None:
    """Returns standard normal numbers [T, B, *more, *action], the same for any number of devices; Discrete: None."""
    if not isinstance(agent.spec.action, Box):
        return None
    shape = num_steps, *more, *agent.spec.action.shape
    return jnp.swapaxes(critics.noise(key, num_envs, shape, agent.axis_name), 0, 1)


def evaluate(agent: Agent, actor: PyTree, critic: PyTree, obs: PyTree, noise: Any) -> tuple[Array, Array, Any]:
    """Returns Q and log pi of an action of the policy [N], and the policy's distributions; of Windows [N, L]."""
    dist = critics.policy_output(agent, actor, obs, 0)
    obs = critics.critics_read(agent.net.critic, critic, obs, 0)
    return *sac.under_policy(dist, noise, jnp.min, functools.partial(agent.net.critic.apply, critic, obs)), dist


def soft_values(agent: Agent, state: State, obs: PyTree, rollout: Rollout, noise: Any) -> tuple[Array, Array]:
    """Returns Q and log pi [T + 1, B] of an action of the policy at obs_0 .. obs_T.

    Args:
      obs: rollout's observations [T, B, *] as the networks read them.
      noise: result of `draw`, [T + 1, B, *].
    """
    last = agent.observer.see(state.obs_stats, rollout.last_obs)
    obs = jax.tree.map(lambda x, last: jnp.concatenate([x, last[None]]), obs, last)
    found = lambda x: evaluate(agent, state.params["actor"], state.params["critic"], *x)[:2]
    if not agent.network.recurrent:
        return agents.map_rows(agent, found, (obs, noise))
    by_env = lambda tree: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
    reset = jnp.pad(~rollout.mask, ((0, 1), (0, 0)))
    window = Window(by_env(obs), agents.split_carry(rollout.carry)[0], by_env(reset))
    return by_env(found((window, by_env(noise))))


def targets(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[Rows, Metrics]:
    """Returns Rows [N] with soft lambda-returns, and metrics."""
    num_steps, num_envs = rollout.reward.shape
    target_key, epoch_key = jax.random.split(key)
    obs = agent.observer.recall(state.obs_stats, rollout)
    q, log_prob = soft_values(agent, state, obs, rollout, draw(agent, target_key, num_steps + 1, num_envs))
    bonus = -jnp.exp(state.params["log_ent_coef"]) * log_prob
    # returns that include the bonus of obs_t; G_t begins after it
    soft = returns.lambda_returns(
        parts.scale_reward(cfg, state.return_stats, rollout.reward) + bonus[:-1],
        rollout.terminated,
        rollout.terminated | rollout.truncated,
        q + bonus,
        gamma=cfg.gamma,
        lambda_=cfg.q_lambda,
    )
    action, target = parts.zero_masked(rollout.mask, (rollout.action, soft - bonus[:-1]))
    weight = parts.weights(rollout.mask, agent.axis_name)
    metrics = parts.value_metrics(target, q[:-1], weight, agent.axis_name)
    if agent.net.head is not None and cfg.critic.value_range is not None:
        outside = (target < cfg.critic.value_range[0]) | (target > cfg.critic.value_range[1])
        metrics["value/outside_range"] = parts.pmean(jnp.mean(weight * outside), agent.axis_name)
    noise, memory = draw(agent, epoch_key, num_steps, num_envs, cfg.num_epochs), ()
    if agent.network.recurrent:
        unroll = lambda window: ((), agent.net.policy.unroll(state.params["actor"], window)[1])
        length, first = sequences.length_of(agent.network, num_steps), agents.split_carry(rollout.carry)[0]
        _, memory, _ = sequences.along(unroll, obs, rollout.mask, first, length)
    rows = agents.cut(agent, Rows(obs, action, target, weight, noise, ()), memory)
    before = lambda rows: distributions.batched(critics.policy_output(agent, state.params["actor"], rows.obs, 0))
    chunk = agents.chunk(cfg, agent, len(rows.weight), length=rows.weight[0].size)
    return replace(rows, dist=minibatch.map_rows(before, rows, chunk)), metrics


def critic_loss(agent: Agent, params: PyTree, rows: Rows) -> tuple[Array, Metrics]:
    """Returns the mean loss of Q(obs, action) from its target over Rows [N]."""
    obs = critics.critics_read(agent.net.critic, params, rows.obs, 0)
    outputs = critics.q_taken(agent, params, replace(rows, obs=obs))
    value, mean = agent.net.mean(outputs)[0], lambda x: jnp.mean(rows.weight * x)
    if agent.net.head is None:
        loss = mean(0.5 * jnp.square(value - rows.target))
    else:
        loss = mean(critics.distances(agent.net.head, outputs, rows.target)[0])
    return loss, {"loss/value": loss, "value/q": mean(value)}


def policy_loss(
    cfg: Config, agent: Agent, actor: PyTree, rows: Rows, critic: PyTree, ent_coef: Array, kl_coef: Array
) -> tuple[Array, Metrics]:
    """Returns the mean over Rows [N] of the policy's loss, and metrics, among them the constraints of both multipliers.

    Args:
      actor, critic: parameters; those of the critic get no gradient.
      ent_coef, kl_coef: present temperature and multiplier.
    """
    q, log_prob, dist = evaluate(agent, actor, critic, rows.obs, rows.noise)
    kl, mean = rows.dist.kl(dist), lambda x: jnp.mean(rows.weight * x)
    inside = kl < cfg.kl_bound
    loss = mean(jnp.where(inside, ent_coef * log_prob - q, kl_coef * kl))
    return loss, {
        "loss/policy": loss,
        "policy/entropy": -mean(log_prob),
        "policy/target_entropy": mean(target_entropy(cfg, agent, rows)),
        "policy/kl": mean(kl),
        "policy/kl_exceeded": mean(~inside),
    }


def target_entropy(cfg: Config, agent: Agent, rows: Rows) -> Any:
    """Returns the target entropy of the policy, a scalar or one per row."""
    space = agent.spec.action
    if cfg.target_entropy is not None:
        return cfg.target_entropy
    if isinstance(space, Box):
        return -_TARGET_ENTROPY * math.prod(space.shape)
    assert isinstance(space, Discrete)
    mask = agent.observer.mask(rows.obs)
    return _TARGET_ENTROPY * (math.log(space.n) if mask is None else jnp.log(allowed(mask).sum(-1).astype(jnp.float32)))


def step(cfg: Config, agent: Agent, state: State, rows: Rows, chunk: int) -> tuple[State, Metrics]:
    """Makes a gradient step of the critic, then of the policy, then of both multipliers, on Rows [N]."""
    loss = custom_loss.over_rows(agent.loss, functools.partial(critic_loss, agent), agent.net.critic)
    gradient, metrics = agents.mean_gradient(agent, loss, state.params["critic"], rows, chunk)
    state = critics.descend(cfg, agent, state, "critic", cfg.lr, gradient)
    ent_coef, kl_coef = jnp.exp(state.params["log_ent_coef"]), jnp.exp(state.params["log_kl_coef"])
    fixed = {"critic": state.params["critic"], "ent_coef": ent_coef, "kl_coef": kl_coef}
    own = functools.partial(policy_loss, cfg, agent, **fixed)
    gradient, found = agents.mean_gradient(agent, own, state.params["actor"], rows, chunk)
    state = critics.descend(cfg, agent, state, "actor", cfg.lr, gradient)
    excess = found["policy/entropy"] - found["policy/target_entropy"]
    state = critics.descend(cfg, agent, state, "log_ent_coef", cfg.lr, ent_coef * excess)
    state = critics.descend(cfg, agent, state, "log_kl_coef", cfg.lr, kl_coef * (cfg.kl_bound - found["policy/kl"]))
    return state, {**metrics, **found, "policy/ent_coef": ent_coef, "policy/kl_coef": kl_coef}


def update(cfg: Config, agent: Agent, state: State, rollout: Rollout, key: Key) -> tuple[State, UpdateAux]:
    """Makes the epochs of minibatches on a rollout [T, B]."""
    state = agents.with_return_stats(agent, state, rollout)
    draw_key, shuffle_key = jax.random.split(key)
    rows, value_metrics = targets(cfg, agent, agents.with_first_stats(agent, state, rollout), rollout, draw_key)
    grid = agents.grid(agent, *rollout.reward.shape)  # with a core the rows are sequences
    chunk = agents.chunk(cfg, agent, len(rows.weight) // cfg.num_minibatches, length=rows.weight[0].size)
    axis = rows.weight.ndim  # index of the epoch axis in `noise`

    def one(carry, batch: Rows):
        state, count = carry
        pick = lambda x: jax.lax.dynamic_index_in_dim(x, count // cfg.num_minibatches, axis, keepdims=False)
        state, metrics = step(cfg, agent, state, replace(batch, noise=jax.tree.map(pick, batch.noise)), chunk)
        return (state, count + 1), metrics

    start = state, jnp.zeros((), jnp.int32)
    (state, _), metrics = agents.epochs(cfg, agent, one, start, agents.taker(rows), grid, shuffle_key)
    last = jax.tree.map(lambda x: x[-1].mean(), metrics)  # the KL is reported after the last pass
    metrics = jax.tree.map(jnp.mean, metrics) | {name: last[name] for name in last if "kl" in name}
    metrics |= value_metrics | {"train/lr": schedules.value(cfg.lr, state.env_steps)}
    state = replace(state, updates=state.updates + 1)
    return agents.observed(agent, state, rollout), UpdateAux(metrics)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes REPPO, an on-policy Algo. Arguments and errors: see `jrl.algos`.

    Actions are Discrete or a Box of [-1, 1]. `log_std_init` is added to the policy's output for its log_std. A user's
    loss replaces the critic's loss and gets Rows [N].
    """
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    agent = critics.make_agent(
        cfg,
        spec,
        network,
        sac.policy_network,
        kind="distribution",
        num_critics=1,
        head=critic_heads.make(cfg.critic),
        records=Records(seen=True),
        **options,
    )
    return critics.make_algo(cfg, agent, init=init, update=update, outputs=critics.outputs)
