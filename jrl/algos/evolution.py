"""Parts of the evolution strategies ARS, OpenAI-ES and CMA-ES: a population of policies, one per environment.

    strategy = Strategy(init, sample, learn)                            # in the module of an algorithm
    algo = evolution.make(strategy, cfg, spec, network, **options)      # in its `make`

A generation is a rollout. It begins new episodes in all environments (`Config.has_members`), and each environment acts
with the parameters of its member: `params + deviation`, both as vectors [P]. The best action is taken, without noise on
it. A member's score is its mean return over the episodes that ended, not discounted; without such an episode it is the
return of the rollout. So a rollout of T steps limits episodes to T steps. Steps of a later episode that T cuts off do
not count, because their returns would be too small.

The mean of the population, `State.params`, is the policy that evaluations and exports use. Observation statistics are
shared by all members. Deviations follow from a seed in the State, so all devices know the whole population, and the
result does not depend on the number of devices.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import struct
from jax.flatten_util import ravel_pytree

from jrl import networks as nets
from jrl import spaces
from jrl.algos import agent as agents
from jrl.algos.agent import ActorState, Agent, Common, MakeOptions, Records, State
from jrl.algos.exploration import Members
from jrl.algos.observer import Observer
from jrl.distributions import action_distribution
from jrl.errors import InputError
from jrl.fields.bounds import Count, Positive
from jrl.networks import Head, Network, NetworkConfig
from jrl.ops import collectives, schedules
from jrl.types import Algo, Array, EnvSpec, Key, Metrics, PyTree, Rollout, UpdateAux, hyperparams

DEFAULT_NETWORK = NetworkConfig()


@hyperparams
class Evolution(Common):
    """Hyper-parameters of evolution strategies; a Schedule is a number or `[[env_steps, value], ...]`."""

    has_members: ClassVar[bool] = True
    in_pairs: ClassVar[bool] = False  # whether members are mirrored pairs, so that their number is even

    # members, each played by equally many of the env.num_envs environments; null: one for each environment
    population: Count | None = None
    noise_std: Positive = 0.05  # standard deviation of the members' parameters around the mean
    alive_bonus: float = 0.0  # reward of each step for being alive, which scores leave out
    exploration: Members = Members()

    def validate(self) -> list[str]:
        faults = super().validate()
        if self.normalize_reward:
            faults.append(
                "normalize_reward: members are compared by their returns, whose scale is unused: leave it out"
            )
        return faults


class Strategy(NamedTuple):
    """An evolution strategy as pure functions of N members with P parameters; cfg is its Config."""

    init: Callable[..., dict[str, Any]]  # (cfg, P) -> its own arrays by name
    sample: Callable[..., Array]  # (cfg, own arrays, key, P) -> deviations [N, P] of the members from the mean
    # (cfg, own arrays, deviations, scores [N], generation [] u32) -> (step [P] of the mean uphill, own arrays)
    learn: Callable[..., tuple[Array, dict[str, Any]]]


def mirrored(cfg: Any, own: dict[str, Any], key: Key, size: int) -> Array:
    """Returns deviations [N, P] in antithetic pairs: member i + N / 2 is the mirror image of member i."""
    half = cfg.noise_std * jax.random.normal(key, (cfg.population // 2, size))
    return jnp.concatenate([half, -half])


def rank_weights(scores: Array, by_rank: Array) -> Array:
    """Returns each member's weight by its rank; members of equal score share their weights equally.

    Args:
      scores:  [N] f32.
      by_rank: [N] f32, weights of the best to the worst.

    >>> rank_weights(jnp.array([1.0, 5.0, 1.0]), jnp.array([6.0, 2.0, 0.0]))
    Array([1., 6., 1.], dtype=float32)
    """
    better = jnp.sum(scores[None] > scores[:, None], 1)
    last = jnp.sum(scores[None] >= scores[:, None], 1)
    total = jnp.concatenate([jnp.zeros(1), jnp.cumsum(by_rank)])
    return (total[last] - total[better]) / (last - better)


# ---------------------------------------------------------------- acting


class Policy(NamedTuple):
    """Network of a policy without parameters of its distribution, whose mode acts."""

    network: Network
    distribution: Callable[[Array, PyTree], Any]  # (outputs [B, size], obs [B, *]) -> distribution [B]


@struct.dataclass
class Memory:
    """Recurrent state of acting."""

    network: PyTree  # recurrent state of the network [B, ...]
    member: Array  # [B] i32, number of each environment's member


def make_policy(cfg: Evolution, observer: Observer, network: NetworkConfig) -> Policy:
    """Returns the policy network, whose output layer is 0 at the start."""
    head = action_distribution(observer.spec.action)
    net = nets.build(observer.spec, network, {"policy": Head(head.size, 0.0)})
    log_std = jnp.full((head.num_gaussian,), network.log_std_init) if head.num_gaussian else None
    return Policy(net, lambda outputs, obs: head.make(outputs, log_std, observer.mask(obs)))


def policy(cfg: Evolution, agent: Agent, actor: ActorState, obs: PyTree, memory: Memory, explore: bool):
    """Returns the distribution of actions [B], of each environment's member or without `explore` of the mean."""
    net, before = agent.net.network, memory.network
    if explore:
        params = jax.tree.map(lambda x: x[memory.member], actor.noisy)
        rows = jax.tree.map(lambda x: x[:, None], (obs, before))
        (outputs,), after = jax.vmap(lambda params, row: net.step(params, *row))(params, rows)
        outputs, after = jax.tree.map(lambda x: x[:, 0], (outputs, after))
    else:
        (outputs,), after = net.step(actor.params, obs, before)
    return agent.net.distribution(outputs, obs), Memory(after, memory.member), {}


def deviations(cfg: Evolution, state: State, strategy: Strategy) -> Array:
    """Returns the deviations [N, P] of the present generation."""
    size = sum(x.size for x in jax.tree.leaves(state.params))
    return strategy.sample(cfg, state.own, jax.random.key(state.own["seed"]), size)


def actor(cfg: Evolution, agent: Agent, state: State, strategy: Strategy) -> ActorState:
    """Returns the mean and the parameters of all members, leaves [N, *]."""
    mean, unravel = ravel_pytree(state.params)
    members = jax.vmap(unravel)(mean[None] + deviations(cfg, state, strategy))
    return ActorState(state.params, state.obs_stats, noisy=members)


def carry(cfg: Any, agent: Agent, batch_size: int, first: Any = 0, total: int | None = None) -> agents.Carry:
    """Returns the recurrent state of environments first .. first + B - 1 of `total`; neighbours have one member."""
    each = 1 if total is None else total // cfg.population
    member = (first + jnp.arange(batch_size, dtype=jnp.int32)) // each % cfg.population
    return agents.Carry(Memory(agent.net.network.carry(batch_size), member), ())


def outputs(cfg: Evolution, agent: Agent, state: State, obs: PyTree) -> dict[str, Any]:
    """Returns the mean's distribution for observations [B, *] at an episode's start."""
    start = carry(cfg, agent, spaces.batch_shape(agent.spec.observation, obs)[0]).memory
    seen = agent.observer.see(state.obs_stats, obs)
    return {"distribution": policy(cfg, agent, agents.actor(cfg, agent, state), seen, start, False)[0]}


# ---------------------------------------------------------------- learning


def member_scores(cfg: Any, agent: Agent, rollout: Rollout) -> tuple[Array, Metrics]:
    """Returns the scores [N] of the members: see the top of this file. A member that failed has the lowest score."""
    reward = jnp.where(rollout.mask, rollout.reward - cfg.alive_bonus, 0.0)
    ends = jnp.asarray((rollout.terminated | rollout.truncated) & rollout.mask)
    in_ended = jnp.flip(jnp.cumsum(jnp.flip(ends, 0), 0), 0) > 0
    totals = jnp.where(in_ended | ~ends.any(0)[None], reward, 0.0).sum(0)
    episodes = jnp.maximum(ends.sum(0), rollout.mask.any(0)).astype(jnp.float32)
    member = agents.split_carry(rollout.carry)[0].member
    by_member = jnp.zeros((cfg.population, 2)).at[member].add(jnp.stack([totals, episodes], 1))
    total, count = collectives.psum(by_member, agent.axis_name).T
    score = total / count
    valid = jnp.isfinite(score)
    score = jnp.where(valid, score, jnp.min(score, initial=jnp.finfo(score.dtype).max, where=valid))
    score = jnp.where(valid.any(), score, 0.0)
    metrics = {"mean": score.mean(), "std": score.std(), "max": score.max(), "min": score.min()}
    return score, {f"members/score_{name}": x for name, x in metrics.items()}


def init(cfg: Evolution, agent: Agent, key: Key, strategy: Strategy) -> State:
    """Returns the initial State; `own` has the generation's seed and the strategy's arrays."""
    params = agent.net.network.init(key)
    own = strategy.init(cfg, sum(x.size for x in jax.tree.leaves(params)))
    seed = jax.random.bits(jax.random.fold_in(key, 0x65766F6C))  # another stream than the parameters
    return agents.begin(cfg, agent, key, params, seed=seed, **own)


def update(
    cfg: Evolution, agent: Agent, state: State, rollout: Rollout, key: Key, strategy: Strategy
) -> tuple[State, UpdateAux]:
    """Moves the mean by the scores of a generation, and draws the next generation's seed."""
    scores, metrics = member_scores(cfg, agent, rollout)
    own = {name: x for name, x in state.own.items() if name != "seed"}
    step, own = strategy.learn(cfg, own, deviations(cfg, state, strategy), scores, state.updates)
    lr = schedules.value(cfg.lr, state.env_steps)
    gradient = ravel_pytree(state.params)[1](-jnp.asarray(step))
    params, opt_state = agents.descend(cfg, agent, lr, gradient, state.opt_state, state.params)
    own["seed"] = jax.random.bits(key)
    state = replace(state, params=params, opt_state=opt_state, own=own, updates=state.updates + 1)
    return agents.observed(agent, state, rollout), UpdateAux(metrics | {"train/lr": lr})


def make(strategy: Strategy, cfg: Any, spec: EnvSpec, network: NetworkConfig, **options: Unpack[MakeOptions]) -> Algo:
    """Makes the on-policy Algo of an evolution strategy; arguments and errors: see `jrl.algos`.

    Without `cfg.population` each of the `spec.num_envs` environments has a member, and an odd number is raised by one.

    Raises:
      InputError: a user's loss; see also `jrl.algos`.
    """
    if options.get("loss") is not None:
        raise InputError("custom.loss: expected an algorithm with a loss, got an evolution strategy: leave it out")
    cfg = replace(cfg, population=cfg.population or spec.num_envs + spec.num_envs % 2)
    agent = agents.make(cfg, spec, network, make_policy, kind="distribution", records=Records(), **options)
    bind: Any = lambda function: functools.partial(function, strategy=strategy)
    algo = agents.algo(
        cfg, agent, init=bind(init), policy=policy, update=bind(update), outputs=outputs, memory=agent.net.network.carry
    )
    return algo._replace(actor=functools.partial(bind(actor), cfg, agent), carry=functools.partial(carry, cfg, agent))
