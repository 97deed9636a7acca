"""Soft actor-critic (arXiv:1812.05905): the policy maximises reward plus entropy; learns from replay.

    algo = sac.make(sac.Config(), spec)
    state = algo.init(key)
    out = algo.act(algo.actor(state), obs, algo.carry(batch_size), key)    # out.action [B, *]
    state, aux = jax.jit(algo.update)(state, batch, key)                   # batch: jrl.types.Batch; one gradient step

For a Box of [-1, 1] the policy is a squashed Gaussian. For Discrete actions the policy is a categorical distribution
over the allowed actions, with exact expectations instead of samples (arXiv:1910.07207). Many critics, with random
subsets in targets (`target_critics`), their mean for the policy (`actor_q`) and many updates per step make REDQ
(arXiv:2101.05982). `conservative` makes CQL (arXiv:2006.04779), for data of other policies; see
`jrl.algos.conservative`. `critic` has other kinds of critics, such as those of TQC (arXiv:2005.04269). Without
`target_networks`, and with `network.norm: batch_renorm`, it is CrossQ (arXiv:1902.05605).

With a core it learns from a SequenceBatch. The policy starts with the acting policy's recurrent state, the critics with
the initial state; the K burn-in rows update both before the loss.

Gradients and metrics are averaged over `make(..., axis_name="d")`. With the same `key` on all devices, the result
equals the result of one device with all rows.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp

from jrl import distributions
from jrl import networks as nets
from jrl.algos import agent as agents
from jrl.algos import conservative, critic_heads, critics, parts
from jrl.algos.agent import Agent, Common, MakeOptions, State
from jrl.algos.critic_heads import Critic
from jrl.algos.critics import Resets, q_taken, select_taken
from jrl.algos.exploration import OverGaussians, Stochastic
from jrl.algos.observer import Observer
from jrl.fields.bounds import Amount, Count, Few, NonNegative, NonNegativeSchedule, Positive, Share
from jrl.fields.data import Replay
from jrl.networks import Head, NetworkConfig
from jrl.ops import random, schedules
from jrl.ops.exploration import allowed
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
    UpdateAux,
    hyperparams,
)

DEFAULT_NETWORK = NetworkConfig(hidden=(256, 256), activation="relu")
_LOG_STD_RANGE = (-20.0, 2.0)  # outside, exp and its gradient lose precision in float32


@hyperparams
class Config(Common):
    """Hyper-parameters of SAC; a Schedule is a number or `[[env_steps, value], ...]`."""

    learns_from: ClassVar[type] = Replay
    acts_in: ClassVar[Any] = Discrete | Box
    has_critic: ClassVar[bool] = True
    has_learning_pass: ClassVar[bool] = True

    actor_lr: NonNegativeSchedule | None = None  # step size of the policy; null: lr
    ent_coef_lr: NonNegativeSchedule | None = None  # step size of the temperature; null: lr
    tau: Share = 0.005  # step size of the target critics towards the critics
    target_networks: bool = True  # targets of slow copies of the critics; false: of the critics themselves
    critic: Critic = Critic()  # kind of the critics: see the class
    num_critics: Few = 2  # number of Q networks
    target_critics: Few | None = None  # size of the random subset of critics in each target; null: all
    actor_q: Literal["min", "mean"] = "min"  # the policy's reduction over critics; targets always take the least value
    policy_every: Count = 1  # critic steps per step of the policy and the temperature
    resets: Resets = Resets()  # new initial weights after every n updates: see the class
    learn_ent_coef: bool = True  # adapt ent_coef so that the entropy approaches target_entropy
    ent_coef: NonNegativeSchedule = 1.0  # temperature, the weight of the entropy; the initial value if it is learned
    # null: minus the number of action elements; Discrete: 0.98 of the greatest entropy of the allowed actions
    target_entropy: float | None = None
    # instead: the entropy of independent normal numbers of this deviation, one per action element (arXiv:2604.04539)
    target_sigma: Positive | None = None
    deterministic_backup: bool = False  # targets without the entropy of the next action
    # first updates in which only the critics learn, so that a pre-trained policy does not follow untrained critics
    policy_after: Amount = 0
    bc_updates: Amount = 0  # first updates in which the policy learns the data's actions, by their log-likelihood
    conservative: bool = False  # CQL: lower the values of actions outside of the data
    cql_weight: NonNegative = 5.0  # weight of CQL's term in the critics' loss; its initial value with cql_target_gap
    cql_actions: Few = 10  # samples from each of the Box, the policy at obs, and the policy at next_obs
    cql_temperature: Positive = 1.0  # temperature of the soft maximum over actions
    cql_target_gap: float | None = None  # target of soft maximum minus value for a learned cql_weight; null: fixed
    cql_max_q_backup: bool = False  # targets take the best of cql_actions next actions
    exploration: OverGaussians = Stochastic()

    def validate(self) -> list[str]:
        errors: list[str] = []
        if self.target_critics is not None and self.target_critics > self.num_critics:
            errors.append(f"target_critics {self.target_critics} must be at most num_critics {self.num_critics}")
        if self.target_entropy is not None and self.target_sigma is not None:
            errors.append("target_entropy: expected it or target_sigma, got both: leave one of them out")
        if self.learn_ent_coef and (isinstance(self.ent_coef, tuple) or self.ent_coef <= 0):
            errors.append("learn_ent_coef starts from ent_coef, one number above 0: or set learn_ent_coef=false")
        if 0 < self.bc_updates <= self.policy_after:
            errors.append(
                f"bc_updates {self.bc_updates} must be more than policy_after {self.policy_after}, in which the policy "
                "does not learn: raise it, or set one of them to 0"
            )
        if self.cql_max_q_backup and self.critic.kind in ("quantiles", "c51"):
            errors.append(
                f"cql_max_q_backup: its targets are values, those of {self.critic.kind} are distributions: set it to "
                "false, or critic.kind to mse or hl_gauss"
            )
        return errors + self.critic.validate() + conservative.faults(self) + super().validate()


def policy_network(observer: Observer, network: NetworkConfig) -> critics.PolicyHeads:
    """Returns a squashed Gaussian or a Categorical; initially nearly the same for all observations."""
    spec = observer.spec
    action = distributions.action_distribution(spec.action, squash=True)
    gaussian = isinstance(spec.action, Box)
    net = nets.build(spec, network, {"policy": Head(action.size * (2 if gaussian else 1), 0.01)})

    def output(params, outputs, obs):
        if not gaussian:
            return action.make(outputs, None, observer.mask(obs))
        mean, log_std = jnp.split(outputs, 2, -1)
        return action.make(mean, jnp.clip(log_std + network.log_std_init, *_LOG_STD_RANGE))

    return critics.policy_of(net, output)


def init(cfg: Config, agent: Agent, key: Key) -> State:
    """Returns the initial State: copies of the critics as targets; `own` has metrics of the policy's latest step."""
    params = critics.initial_params(agent, key)
    if cfg.learn_ent_coef:
        params["log_ent_coef"] = jnp.log(schedules.value(cfg.ent_coef, 0))
    if cfg.conservative:
        params |= conservative.initial_params(cfg)
    metrics = {"loss/policy": jnp.zeros(()), "policy/entropy": jnp.zeros(())}
    target = {"critic": params["critic"]} if cfg.target_networks else ()
    return agents.begin(cfg, agent, key, params, target_params=target, by_part=True, policy_metrics=metrics)


def ent_coef_at(cfg: Config, state: State) -> Array:
    """Returns the present temperature."""
    if cfg.learn_ent_coef:
        return jnp.exp(state.params["log_ent_coef"])
    return schedules.value(cfg.ent_coef, state.env_steps)


def under_policy(dist: Any, noise: Any, over: Callable, values: Callable[..., Array]) -> tuple[Any, Any]:
    """Returns Q and log pi [N] of a sampled action, or exact expectations for Discrete actions; [N, L] of Windows.

    Args:
      dist: the policy's distributions at `obs`, see `critics.policy_output`.
      noise: standard normal numbers for the sample; None for Discrete actions.
      over: reduction of the critics' values [C, ...] along axis 0, such as jnp.min.
      values: (action) -> the critics' values [C, N, ...]; () -> those of all Discrete actions.
    """
    if isinstance(dist, distributions.Categorical):
        # actions that are not allowed have probability exactly 0; all other numbers are finite
        log_prob = jax.nn.log_softmax(dist.logits)
        prob = jnp.exp(log_prob)
        q = over(values(), 0)
        return jnp.sum(prob * q, -1), jnp.sum(prob * log_prob, -1)
    action, log_prob = dist.from_noise(noise)
    return over(values(action), 0), log_prob


def value_target(cfg: Config, state: State, batch: Batch, q: Array, log_prob: Array) -> Array:
    """Returns reward + discount (q - ent_coef log_prob) [N], for `under_policy` at `next_obs`."""
    soft = q if cfg.deterministic_backup else q - ent_coef_at(cfg, state) * log_prob
    return batch.reward + batch.discount * critics.select_following(batch, soft)


def distribution_target(
    cfg: Config, agent: Agent, state: State, batch: Batch, dist: Any, noise: Any, outputs: Callable[..., Array]
) -> Array:
    """Returns targets [N, M] of the return's distribution, see `critics.distribution_target`.

    Args:
      dist, noise: as for `under_policy`.
      outputs: (action) -> the critics' outputs [C, N, ..., K]; () -> those for all Discrete actions.
    """
    if isinstance(dist, distributions.Categorical):
        log_prob = jax.nn.log_softmax(dist.logits)
        policy, after = jnp.exp(log_prob), outputs()
    else:
        action, log_prob = dist.from_noise(noise)
        log_prob, after = log_prob[..., None], jnp.expand_dims(outputs(action), -2)
        policy = jnp.ones_like(log_prob)
    bonus = jnp.zeros_like(log_prob) if cfg.deterministic_backup else -ent_coef_at(cfg, state) * log_prob
    return critics.distribution_target(agent.net.head, batch, after, policy, bonus)


def q_taken_and_gap(
    cfg: Config, agent: Agent, state: State, critic_params: PyTree, batch: Batch, *, key: Key | None = None
):
    """Returns `q_taken`, and CQL's term with its metrics: (outputs, penalty [], metrics)."""
    weight, space, mean = conservative.weight_of(cfg, state.params), agent.spec.action, agent.net.mean
    if isinstance(space, Discrete):
        q = agent.net.critic.outputs(critic_params, batch.obs, key=key)
        taken, q = select_taken(space, q, batch), mean(q)
        mask = agent.observer.mask(batch.obs)
        each = conservative.soft_maximum_over_actions(q, mask, cfg.cql_temperature)
        soft: Array = jnp.mean(batch.weight * each.sum(0))
    else:
        taken = q_taken(agent, critic_params, batch, key=key)
        soft = conservative.soft_maximum(agent, critic_params, batch, cfg.cql_temperature)
    return taken, *conservative.penalty(weight, soft, mean(taken), batch.weight)


def target_entropy(cfg: Config, agent: Agent, batch: Batch) -> Any:
    """Returns the target entropy of the policy, a scalar or one per row."""
    if cfg.target_entropy is not None:
        return cfg.target_entropy
    space = agent.spec.action
    if isinstance(space, Box):
        size = math.prod(space.shape)
        if cfg.target_sigma is None:
            return -float(size)
        return size * (0.5 * math.log(2.0 * math.pi * math.e) + jnp.log(cfg.target_sigma))
    assert isinstance(space, Discrete)
    mask = agent.observer.mask(batch.obs)
    if mask is None:
        return 0.98 * math.log(space.n)
    mask = mask[:, critics.burn_in(batch) :] if agent.network.recurrent else mask
    return 0.98 * jnp.log(allowed(mask).sum(-1).astype(jnp.float32))


def critic_step(
    cfg: Config, agent: Agent, state: State, batch: Batch, noise: Any, key: Key, drops: Any
) -> tuple[State, Metrics, Array]:
    """Makes a step of the critics towards reward + discount (min Q(next_obs, action) - ent_coef log pi).

    Source: arXiv:1812.05905, eq. 5 and 6.

    Args:
      noise: noise of the next actions, see `under_policy`.
      key: PRNG key of the target's subset of critics and of CQL's samples.
      drops: keys of dropout in the target and in the loss.
    Returns:
      State, metrics, and priority [N].
    """
    space, there = agent.spec.action, None
    taken: Callable[..., Any] = functools.partial(q_taken, agent, key=drops[1])
    params, burn_in, some = state.params["critic"], critics.burn_in(batch), lambda x: x
    if cfg.target_critics is not None:
        index = random.permutation(key, cfg.num_critics)[: cfg.target_critics]
        some = lambda x: x[index]
    target_critic = jax.tree.map(some, state.target_params["critic"] if cfg.target_networks else params)
    actor = functools.partial(critics.policy_output, agent, state.params["actor"])
    dist = actor(batch.next_obs, burn_in)
    if cfg.conservative:
        taken = functools.partial(q_taken_and_gap, cfg, agent, state, key=drops[1])
        if isinstance(space, Box):
            there_key, here_key = jax.random.split(key)
            there = conservative.sampled(dist, cfg.cql_actions, there_key, agent.axis_name)
            here = conservative.before(batch, dist) or actor(batch.obs, burn_in)
            batch = conservative.with_samples(cfg, agent, batch, here, there, here_key)
    if critics.is_joint(cfg, agent):
        batch = critics.with_next_action(batch, None if noise is None else dist.from_noise(noise)[0])
        taken = lambda params, batch: critics.joint_outputs(agent, params, batch, key=drops[1])[0]
        after = lambda *action: some(critics.joint_outputs(agent, params, batch, key=drops[1])[1])
    else:
        critic = agent.net.critic
        read = lambda: critics.critics_read(critic, target_critic, batch.next_obs, burn_in)
        after = lambda *action: critic.outputs(target_critic, read(), *action, key=drops[0])
    if cfg.cql_max_q_backup and there is not None:
        best = conservative.best(agent, target_critic, batch.next_obs, there, burn_in)
        target = value_target(cfg, state, batch, *best)
    elif agent.net.has_distribution:
        target = distribution_target(cfg, agent, state, batch, dist, noise, after)
    else:
        values = lambda *action: agent.net.mean(after(*action))
        target = value_target(cfg, state, batch, *under_policy(dist, noise, jnp.min, values))
    batch = replace(batch, obs=critics.critics_read(agent.net.critic, params, batch.obs, burn_in))
    gradient, metrics, priority = critics.td_gradient(
        taken, params, batch, target, agent.axis_name, loss=agent.loss, net=agent.net.critic, head=agent.net.head
    )
    state = critics.descend(cfg, agent, state, "critic", cfg.lr, gradient)
    if cfg.conservative:
        state, metrics = conservative.weight_step(cfg, agent, state, metrics)
    return state, metrics, priority


def policy_step(cfg: Config, agent: Agent, state: State, batch: Batch, noise: Any, key: Key | None) -> State:
    """Makes a step of the policy (eq. 9; first `bc_updates` of cloning) and of the temperature (eq. 18).

    Args:
      noise: noise of the actions, see `under_policy`.
      key: key of dropout in policy and critics; None: no dropout.
    """
    ent_coef, burn_in = ent_coef_at(cfg, state), critics.burn_in(batch)
    over = jnp.mean if cfg.actor_q == "mean" else jnp.min
    mean = lambda x: jnp.mean(batch.weight * x)
    critic, params = agent.net.critic, state.params["critic"]

    def policy_loss(actor_params):
        learning = {"key": key, **agents.batch_rows(agent, batch.weight)}
        dist = critics.policy_output(agent, actor_params, batch.obs, burn_in, **learning)
        obs = critics.critics_read(critic, params, batch.obs, burn_in)
        q, log_prob = under_policy(dist, noise, over, functools.partial(critic.apply, params, obs, key=key))
        if cfg.bc_updates:
            q = jnp.where(state.updates <= cfg.bc_updates, dist.log_prob(batch.action), q)
        return mean(ent_coef * log_prob - q), (mean(log_prob), mean(log_prob + target_entropy(cfg, agent, batch)))

    (value, (log_prob, excess)), gradient = jax.value_and_grad(policy_loss, has_aux=True)(state.params["actor"])
    value, log_prob, excess, gradient = parts.pmean((value, log_prob, excess, gradient), agent.axis_name)
    lr = lambda own: cfg.lr if own is None else own
    state = critics.descend(cfg, agent, state, "actor", lr(cfg.actor_lr), gradient)
    if cfg.learn_ent_coef:  # gradient of -exp(log_ent_coef) * excess
        state = critics.descend(cfg, agent, state, "log_ent_coef", lr(cfg.ent_coef_lr), -ent_coef * excess)
    metrics = {"loss/policy": value, "policy/entropy": -log_prob}
    return replace(state, own={**state.own, "policy_metrics": metrics})


def update(cfg: Config, agent: Agent, state: State, batch: Batch | SequenceBatch, key: Key) -> tuple[State, UpdateAux]:
    """Makes one gradient step of the critics and, if it is due, of the policy; moves the target networks."""
    batch = critics.read(cfg, agent, state, batch)
    noise_key, choice_key = jax.random.split(key) if cfg.target_critics is not None else (key, key)
    noise: Any = (None, None)
    if isinstance(agent.spec.action, Box):
        noise = critics.two_noises(noise_key, batch, agent.spec.action.shape, agent.axis_name)
    *critic_drops, policy_drop = agents.dropout_keys(agent, key, 3)
    state, metrics, priority = critic_step(cfg, agent, state, batch, noise[0], choice_key, critic_drops)
    state = replace(state, updates=state.updates + 1)
    improve = lambda state: policy_step(cfg, agent, state, batch, noise[1], policy_drop)
    state = parts.every(cfg.policy_every, state, lambda state: parts.after(cfg.policy_after, state, improve))
    if cfg.target_networks:
        target = parts.moved(state.target_params["critic"], state.params["critic"], cfg.tau)
        state = replace(state, target_params={"critic": target})
    state = critics.reset(cfg, agent, state, key, init)
    metrics |= state.own["policy_metrics"]
    metrics |= {"policy/ent_coef": ent_coef_at(cfg, state), "train/lr": schedules.value(cfg.lr, state.env_steps)}
    return state, UpdateAux(metrics, priority)


def make(cfg: Config, spec: EnvSpec, network: NetworkConfig = DEFAULT_NETWORK, **options: Unpack[MakeOptions]) -> Algo:
    """Makes SAC, a replay-based Algo. Arguments and errors: see `jrl.algos`.

    Actions are Discrete or a Box of [-1, 1]. With images every network has its own torso. `log_std_init` is added to
    the policy's output for its log_std. A user's loss replaces the critics' loss and gets TdBatch [N].
    """
    network = parts.with_default_init(network, DEFAULT_NETWORK)
    conservative.check(cfg, spec.action)
    if cfg.target_sigma is not None and not isinstance(spec.action, Box):
        raise InputError(f"algo.target_sigma: expected a Box of actions, got {spec.action}: set algo.target_entropy")
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
    return critics.make_algo(cfg, agent, init=init, update=update, ingest=agents.ingest, outputs=critics.outputs)
