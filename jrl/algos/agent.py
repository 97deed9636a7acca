"""Parts that all algorithms share: common hyper-parameters, the State, acting, gradient steps, minibatches, statistics.

An algorithm is a module of functions. Each takes its Config, whose floats may be traced, and an Agent, which is all
that is static beside it; `make` names them, and `algo` binds the two:

    def policy(cfg, agent, actor, obs, memory, explore): ...     # what acting feeds to the exploration
    def update(cfg, agent, state, data, key): ...                # (State, UpdateAux)

    def make(cfg, spec, network=DEFAULT_NETWORK, *, axis_name=None, loss=None) -> Algo:
        agent = agents.make(cfg, spec, network, networks, kind="distribution", axis_name=axis_name, loss=loss)
        return agents.algo(cfg, agent, init=init, policy=policy, update=update, outputs=outputs, on_policy=True)

So `functools.partial(ppo.update, cfg, agent)` is `ppo.make(...).update`, and `vmap` over a Config runs over all floats.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jrl import spaces
from jrl.algos import choices, custom_loss, exploration, gradients, parameter_noise, parts, sequences
from jrl.algos import observer as observers
from jrl.algos.exploration import Exploration, Explorer, Stochastic
from jrl.algos.observer import Observer
from jrl.fields.bounds import NonNegativeSchedule, Positive, Unit
from jrl.fields.data import Fixed, Fresh, Replay
from jrl.networks import NetworkConfig
from jrl.ops import exploration as ops
from jrl.ops import minibatch, normalize
from jrl.types import ActOut, Algo, Array, EnvSpec, Key, PyTree, Rollout, Space, UpdateAux, hyperparams

Kind = Literal["distribution", "q", "action"]


@hyperparams
class Common:
    """Hyper-parameters that all algorithms have; a Schedule is a number or `[[env_steps, value], ...]`."""

    learns_from: ClassVar[type] = Fresh
    acts_in: ClassVar[Any] = Space
    has_critic: ClassVar[bool] = False  # beside the policy: what reads `network.value_inputs`
    in_teams: ClassVar[bool] = False  # it acts for teams alone, see jrl.envs.team

    lr: NonNegativeSchedule = 3e-4  # Adam's step size
    gamma: Unit = 0.99  # discount per step
    normalize_obs: bool = False  # observations to mean 0 and deviation 1 by running statistics; images stay as they are
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    normalize_reward_clip: Positive | None = 10.0  # bound of rewards that were so divided; null: none
    max_grad_norm: Positive | None = None  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: Positive | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: Positive | None = None  # clips each element of the gradient
    adam_eps: Positive = 1e-8  # added to Adam's denominator
    exploration: Exploration = Stochastic()  # how it acts while it learns

    def validate(self) -> list[str]:
        """Lists the faults in the combination of values, each with its mend."""
        return exploration.validate(self.exploration)


@struct.dataclass
class State:
    """Everything that learning changes, of any algorithm: arrays only."""

    params: PyTree  # of all networks; of several with an optimizer each, a dict by part
    target_params: PyTree  # slow copies of parameters, in the structure of `params` or of parts of it; () without
    opt_state: PyTree  # of the optimizer, or of each part's
    obs_stats: PyTree  # normalize.RunningStats, or () without normalize_obs
    return_stats: PyTree  # normalize.RunningStats of the discounted return, or () without normalize_reward
    env_steps: Array  # [] u32, environment steps learned from, over all devices
    updates: Array  # [] u32, calls of `update`
    own: dict[str, PyTree]  # what one algorithm or exploration has alone, by name


@struct.dataclass
class Actor:
    """Parts of a State that acting needs."""

    params: PyTree
    obs_stats: PyTree
    env_steps: PyTree = ()  # [] u32 where the exploration reads them
    noisy: PyTree = ()  # parameters that act when exploring, where those are others


@struct.dataclass
class Carry:
    """State that an algorithm with memory hands on from step to step: [B, ...] each."""

    memory: PyTree  # of the network
    exploration: PyTree


class Records(NamedTuple):
    """Records that acting leaves in a rollout's extras, beside what the algorithm's `policy` gives."""

    log_prob: bool = False  # "log_prob" [B] f32 of the action, under what chose it
    memory: bool = False  # "carry" [B, ...], the network's memory before the step
    seen: bool = False  # `types.NORMALIZED_OBS`, the observations as they were normalised


class Agent(NamedTuple):
    """Static parts of an algorithm beside its Config, made once by `make`."""

    spec: EnvSpec  # the environment's spaces
    network: NetworkConfig
    observer: Observer  # from observations to what networks read
    net: Any  # what the algorithm's `networks` gave
    kind: Kind  # what `policy` feeds to the exploration
    records: Records
    optimizer: Callable[[Any], optax.GradientTransformation]  # of a Config, without the step size
    axis_name: str | None  # of the mapped axis over devices; None outside of one
    loss: custom_loss.Loss | None  # a user's, in the place of the algorithm's own

    @property
    def row_bytes(self) -> int:
        """Bytes of an observation."""
        return spaces.num_bytes(self.spec.observation)


def make(
    cfg: Common,
    spec: EnvSpec,
    network: NetworkConfig,
    networks: Callable[[Any, Observer, NetworkConfig], Any],
    *,
    kind: Kind,
    records: Records,
    flat: bool = True,
    axis_name: str | None,
    loss: custom_loss.Loss | None = None,
) -> Agent:
    """Returns an algorithm's Agent.

    Args:
      cfg, spec, network, axis_name, loss: as of the algorithm's `make`.
      networks: (cfg, observer, network) -> the algorithm's networks, for observations as `observer.spec` says.
      kind: what the algorithm feeds to the exploration.
      records: what acting leaves in a rollout's extras.
      flat: the optimizer sees one vector; see `gradients.adam`.
    Raises:
      InputError: a space, torso, exploration or loss that cannot be handled.
    """
    parts.check_action(cfg, spec.action)
    parts.check_critic(cfg, network)
    custom_loss.check(loss)
    parameter_noise.refuse_memory(cfg.exploration, network)
    exploration.make(cfg.exploration, spec.action, kinds=(kind,))  # whose faults are told now
    observer = observers.make(spec, network, normalize_obs=cfg.normalize_obs, axis_name=axis_name)
    optimizer = gradients.optimizer(functools.partial(gradients.adam, flat=flat))
    net = networks(cfg, observer, network)
    return Agent(spec, network, observer, net, kind, records, optimizer, axis_name, loss)


# ---------------------------------------------------------------- the State and acting


def begin(
    cfg: Common,
    agent: Agent,
    key: Key,
    params: PyTree,
    *,
    target_params: PyTree = (),
    by_part: bool = False,
    **own: Any,
) -> State:
    """Returns the State at the start.

    Args:
      key: that of the parameters; what else is drawn is of another stream.
      params: initial parameters.
      target_params: those that have a slow copy; it is made here.
      by_part: `params` is a dict whose parts have an optimizer each.
      own: what the algorithm has alone, by name.
    """
    optimizer = agent.optimizer(cfg)
    opt_state = {name: optimizer.init(part) for name, part in params.items()} if by_part else optimizer.init(params)
    return State(
        params=params,
        target_params=jax.tree.map(jnp.copy, target_params),  # arrays of their own, so that both can be donated
        opt_state=opt_state,
        obs_stats=agent.observer.init(),
        return_stats=normalize.init(()) if cfg.normalize_reward else (),
        env_steps=jnp.zeros((), jnp.uint32),
        updates=jnp.zeros((), jnp.uint32),
        own={**own, **parameter_noise.begin(cfg.exploration, key)},
    )


def explorer(cfg: Common, agent: Agent) -> Explorer:
    """Returns the exploration of a Config, whose floats may be traced."""
    return exploration.make(cfg.exploration, agent.spec.action, kinds=(agent.kind,))


def acting_params(state: State) -> PyTree:
    """Returns the parameters of a State that act: the part `actor`, where there are parts."""
    return state.params["actor"] if isinstance(state.params, dict) and "actor" in state.params else state.params


def actor(cfg: Common, agent: Agent, state: State) -> Actor:
    """Returns the parts of a State that acting needs."""
    params = acting_params(state)
    return Actor(
        params,
        state.obs_stats,
        state.env_steps if explorer(cfg, agent).reads_env_steps else (),
        parameter_noise.perturbed(cfg.exploration, state.own, params, state.env_steps),
    )


def act(
    cfg: Common,
    agent: Agent,
    policy: Callable[..., tuple[Any, PyTree, dict[str, PyTree]]],
    actor: Actor,
    obs: PyTree,
    carry: PyTree,
    key: Key,
    explore: bool = True,
) -> ActOut:
    """Returns actions for observations [B, *], by the exploration or else the greedy ones; see `algo` for `policy`."""
    before, own = split_carry(carry)
    obs = agent.observer.see(actor.obs_stats, obs)
    mask = agent.observer.mask(obs)
    output, memory, extras = policy(cfg, agent, actor, obs, before, explore)
    chosen, log_prob = explorer(cfg, agent), None
    if not explore:
        action = greedy(agent.kind, output, mask)
    elif agent.records.log_prob:
        action, log_prob, own = chosen.sample_and_log_prob(output, key, actor.env_steps, own, mask)
    else:
        action, own = chosen.sample(output, key, actor.env_steps, own, mask)
    if agent.records.log_prob:
        extras = {**extras, "log_prob": output.log_prob(action) if log_prob is None else log_prob}
    if agent.records.memory and agent.network.recurrent:
        extras = {**extras, "carry": before}
    if agent.records.seen:
        extras = {**extras, **agent.observer.record(actor.obs_stats, obs)}
    return ActOut(action, _join(memory, own), extras)


def greedy(kind: Kind, output: Any, mask: Array | None) -> PyTree:
    """Returns the best action [B, *] by a policy's output: a distribution's mode, the highest allowed Q, or itself."""
    match kind:
        case "distribution":
            return output.mode()
        case "q":
            return ops.masked_argmax(output, exploration.by_choice(mask, output))
    return output


def choice(
    cfg: Common, agent: Agent, policy: Callable[..., Any], actor: Actor, obs: PyTree, carry: PyTree, explore: bool
) -> tuple[Any, PyTree]:
    """Returns the distribution [B] that `act` draws actions from, and the carry after it; see `choices.of`."""
    before, own = split_carry(carry)
    obs = agent.observer.see(actor.obs_stats, obs)
    output, memory, _ = policy(cfg, agent, actor, obs, before, explore)
    mask = agent.observer.mask(obs)
    return choices.of(cfg.exploration, agent.kind, output, actor.env_steps, own, mask, explore), _join(memory, own)


def split_carry(carry: PyTree) -> tuple[PyTree, PyTree]:
    """Returns (the network's memory, the exploration's state) of what acting hands on from step to step."""
    return (carry.memory, carry.exploration) if isinstance(carry, Carry) else ((), carry)


def _join(memory: PyTree, exploration: PyTree) -> PyTree:
    """Returns what acting carries: memory and the exploration's state, without memory the latter alone."""
    return Carry(memory, exploration) if jax.tree.leaves(memory) else exploration


# ---------------------------------------------------------------- learning


def descend(
    cfg: Common, agent: Agent, lr: Any, gradient: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """Makes one step of size `lr` against the gradient: (params, opt_state)."""
    updates, opt_state = agent.optimizer(cfg).update(gradient, opt_state, params)
    return optax.apply_updates(params, jax.tree.map(lambda u: -lr * u, updates)), opt_state


def epochs(
    cfg: Any,
    agent: Agent,
    step: Callable[[PyTree, Any], tuple[PyTree, Any]],
    start: PyTree,
    take: Callable[[Array], Any],
    grid: tuple[int, int],
    key: Key,
) -> tuple[PyTree, Any]:
    """Makes `cfg.num_epochs` passes over a rollout in `cfg.num_minibatches` minibatches each, dealt anew for every
    pass.

    Args:
      step: (carry, minibatch) -> (carry, metrics).
      start: the first carry.
      take: of indices [M, N / M] i32 into the rows, the minibatches with a leading axis [M].
      grid: (T, B), of which the N rows are flattened; T is 1 where only environments are dealt.
      key: the same on all devices.
    Returns:
      The last carry, and metrics [E, M].
    """

    def epoch(carry, key):
        index = minibatch.shuffle(key, *grid, cfg.num_minibatches, axis_name=agent.axis_name)
        return jax.lax.scan(step, carry, take(index))

    return jax.lax.scan(epoch, start, jax.random.split(key, cfg.num_epochs))


def taker(rows: PyTree) -> Callable[[Array], PyTree]:
    """Returns `take` of `epochs` for rows [N, *]: one gather for an epoch, 3% less than one for each minibatch."""
    take = minibatch.row_taker(rows)

    def minibatches(index: Array) -> PyTree:
        shuffled = take(index.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(*index.shape, *x.shape[1:]), shuffled)

    return minibatches


def mean_gradient(agent: Agent, loss: Callable[..., Any], params: PyTree, batch: Any, chunk: int) -> tuple[PyTree, Any]:
    """Returns the mean gradient and metrics of `loss` over the rows of a batch and over devices, `chunk` rows at a
    time.
    """
    return parts.pmean(minibatch.mean_gradient(loss, params, batch, chunk), agent.axis_name)


def chunk(cfg: Any, agent: Agent, num_rows: int, length: int = 1) -> int:
    """Returns rows, of `length` steps each, whose gradient is computed at once: by the Config, or as many as fit the
    cache.
    """
    limit = getattr(cfg, "microbatch_size", None)
    return minibatch.chunk_rows(num_rows, agent.row_bytes, limit, length=length)


def grid(agent: Agent, num_steps: int, num_envs: int) -> tuple[int, int]:
    """Returns (K, B): minibatches of a rollout [T, B] are made of [K, B] steps, or with a core sequences."""
    return num_steps // sequences.length_of(agent.network, num_steps), num_envs


def cut(agent: Agent, rows: Any, memory: PyTree) -> Any:
    """Returns Rows [T, B, *] as minibatches are made of them [N, *]: with a core sequences, from the memory before
    each.
    """
    if not agent.network.recurrent:
        return sequences.flat(rows)
    return sequences.cut(rows, memory, sequences.length_of(agent.network, rows.weight.shape[0]))


def map_rows(agent: Agent, function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Returns `function` of rows [N, ...] over a tree [T, B, ...], in chunks that fit the cache."""
    num_steps, num_envs = jax.tree.leaves(tree)[0].shape[:2]
    chunk = minibatch.chunk_rows(num_steps * num_envs, agent.row_bytes)
    out = minibatch.map_rows(function, sequences.flat(tree), chunk)
    return jax.tree.map(lambda x: x.reshape(num_steps, num_envs, *x.shape[1:]), out)


def begun(agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns the State to read a rollout by: see `observer.begun`."""
    return observers.begun(agent.observer, state, rollout)


def rewarded(agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns a State with the statistics of a rollout's discounted returns."""
    return replace(state, return_stats=parts.observe_returns(state.return_stats, rollout, agent.axis_name))


def observed(agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns a State with the statistics of a rollout's observations, and its steps counted."""
    return replace(
        state,
        obs_stats=agent.observer.observe(state.obs_stats, rollout.obs, rollout.mask),
        env_steps=parts.count_steps(state.env_steps, rollout, agent.axis_name),
    )


def ingest(cfg: Common, agent: Agent, state: State, rollout: Rollout) -> State:
    """Takes a rollout's statistics and count of steps into a State, before the rollout is learned from."""
    return observed(agent, rewarded(agent, state, rollout), rollout)


def adapted(cfg: Common, agent: Agent, policy: Callable[..., Array], state: State, rollout: Rollout) -> State:
    """Returns a State whose parameter noise, if it has any, has followed a rollout; see `parameter_noise.adapted`."""
    last_obs = agent.observer.see(state.obs_stats, rollout.last_obs)
    return parameter_noise.adapted(
        cfg.exploration,
        policy,
        state,
        acting_params(state),
        last_obs,
        agent.observer.mask(last_obs),
        axis_name=agent.axis_name,
    )


# ---------------------------------------------------------------- the Algo


def algo(
    cfg: Common,
    agent: Agent,
    *,
    init: Callable[..., State],
    update: Callable[..., tuple[State, UpdateAux]],
    outputs: Callable[..., dict[str, Any]],
    memory: Callable[[int], PyTree],
    policy: Callable[..., tuple[Any, PyTree, dict[str, PyTree]]] | None = None,
    act: Callable[..., ActOut] = act,
    ingest: Callable[[Any, Agent, State, Rollout], State] | None = None,
    data: Fresh | Replay | Fixed | None = None,
) -> Algo:
    """Makes the Algo of an algorithm's functions, each of which takes (cfg, agent, ...).

    Args:
      cfg, agent: what the functions are bound to.
      init: (key) -> State.
      update: (State, Rollout | Batch | SequenceBatch, key) -> (State, UpdateAux).
      outputs: (State, obs [B, *]) -> what the networks say, see `Algo.outputs`.
      memory: batch size -> the network's memory at an episode's start; () without one.
      policy: (Actor, obs [B, *] as networks read it, memory, explore) -> (what the exploration gets, memory, extras).
      act: (policy, Actor, obs, carry, key, explore) -> ActOut; without a policy its first argument is the Actor.
      ingest: see `Algo.ingest`.
      data: what it learns from; None: as the Config says, from sequences where replay meets memory.
    """
    bind = lambda function: functools.partial(function, cfg, agent)
    chosen = exploration.make(cfg.exploration, agent.spec.action, kinds=(agent.kind,))

    def carry(batch_size: int, first: Any = 0, total: int | None = None) -> PyTree:
        return _join(memory(batch_size), chosen.carry(batch_size, first, total))

    return Algo(
        init=bind(init),
        actor=bind(actor),
        carry=carry,
        act=bind(act) if policy is None else functools.partial(act, cfg, agent, policy),
        update=bind(update),
        data=data or (Fresh() if cfg.learns_from is Fresh else cfg.learns_from(agent.network.recurrent)),
        ingest=None if ingest is None else bind(ingest),
        running_return_gamma=cfg.gamma if cfg.normalize_reward else None,
        outputs=bind(outputs),
        choice=None if policy is None else functools.partial(choice, cfg, agent, policy),
    )
