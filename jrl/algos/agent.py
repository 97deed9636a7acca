"""Parts that all algorithms share: hyper-parameters, State, acting, gradient steps, minibatches, statistics.

An algorithm is a module of functions. Each takes its Config, whose floats may be traced, and an Agent with all other
static parts. `make` names the functions, and `algo` binds them to both:

    def policy(cfg, agent, actor, obs, memory, explore): ...     # the input of the exploration
    def update(cfg, agent, state, data, key): ...                # (State, UpdateAux)

    def make(cfg, spec, network=DEFAULT_NETWORK, **options) -> Algo:                # options: MakeOptions
        agent = agents.make(cfg, spec, network, networks, kind="distribution", records=Records(), **options)
        return agents.algo(cfg, agent, init=init, policy=policy, update=update, outputs=outputs, on_policy=True)

So `functools.partial(ppo.update, cfg, agent)` is `ppo.make(...).update`, and `vmap` over a Config covers all floats.
"""

import contextvars
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jrl import registry, spaces
from jrl.algos import custom_loss, exploration, optimizers, parameter_noise, parts, sequences
from jrl.algos import observer as observers
from jrl.algos.exploration import Exploration, Explorer, ParameterNoise, Stochastic
from jrl.algos.observer import Observer
from jrl.algos.optimizers import Adam, Optimizer, is_statistic
from jrl.fields.bounds import NonNegativeSchedule, Positive, Unit
from jrl.fields.data import DataSets, Fresh, Replay
from jrl.networks import NetworkConfig
from jrl.networks.dense import with_unit_weights
from jrl.networks.encoders import convolves, is_image
from jrl.ops import exploration as ops
from jrl.ops import minibatch
from jrl.types import ActOut, Algo, Array, EnvSpec, Key, PyTree, Rollout, Space, UpdateAux, hyperparams

Kind = Literal["distribution", "q", "action"]


@hyperparams
class Common:
    """Hyper-parameters of all algorithms; a Schedule is a number or `[[env_steps, value], ...]`."""

    learns_from: ClassVar[type] = Fresh
    acts_in: ClassVar[Any] = Space
    has_critic: ClassVar[bool] = False  # whether a critic beside the policy reads `network.value_inputs`
    has_learning_pass: ClassVar[bool] = False  # whether its losses support `network.dropout` and batch_renorm
    has_memory: ClassVar[bool] = True  # whether it supports networks with memory, `network.core`
    has_teacher: ClassVar[bool] = False  # whether a trained policy, `teacher`, reads `network.value_inputs`
    has_members: ClassVar[bool] = False  # whether each environment acts with a member of a population, see `evolution`
    in_teams: ClassVar[bool] = False  # whether it acts only for teams, see jrl.envs.team

    lr: NonNegativeSchedule = 3e-4  # step size
    gamma: Unit = 0.99  # discount per step of the environment
    normalize_obs: bool = False  # observations to mean 0 and deviation 1 by running statistics; images stay as they are
    normalize_reward: bool = False  # divides rewards by the running deviation of the discounted return
    normalize_reward_clip: Positive | None = 10.0  # bound of rewards that were so divided; null: none
    # with normalize_reward: divides by more if needed, so that no discounted return seen exceeds this; null: no bound
    normalize_reward_bound: Positive | None = None
    max_grad_norm: Positive | None = None  # clips the global norm of the gradient; null: no clipping
    max_leaf_norm: Positive | None = None  # clips the norm of each parameter array's gradient
    max_grad_value: Positive | None = None  # clips each element of the gradient
    adam_eps: Positive = 1e-8  # added to Adam's denominator
    optimizer: Optimizer = Adam()  # direction of the steps
    exploration: Exploration = Stochastic()  # how it acts while it learns

    def validate(self) -> list[str]:
        """Returns one message per invalid combination of values, with the fix."""
        errors = exploration.validate(self.exploration)
        if self.normalize_reward_bound is not None and not self.normalize_reward:
            errors.append(
                "normalize_reward_bound: expected normalize_reward true, got false: set normalize_reward=true, or "
                "leave normalize_reward_bound out"
            )
        return errors


@struct.dataclass
class State:
    """All arrays that learning changes, for any algorithm."""

    params: PyTree  # parameters of all networks; a dict by part if each part has its own optimizer
    target_params: PyTree  # slow copies of `params` or of some parts; () without target networks
    opt_state: PyTree  # optimizer state; a dict by part if `params` is
    obs_stats: PyTree  # normalize.RunningStats, or () without normalize_obs
    # normalize.RunningStats of the discounted return; parts.BoundedReturns with a bound; () without normalize_reward
    return_stats: PyTree
    env_steps: Array  # [] u32, environment steps learned from, over all devices
    updates: Array  # [] u32, calls of `update`
    own: dict[str, PyTree]  # state of this algorithm or exploration only, by name


@struct.dataclass
class ActorState:
    """Parts of a State that acting needs."""

    params: PyTree
    obs_stats: PyTree
    env_steps: PyTree = ()  # [] u32 if the exploration reads it
    noisy: PyTree = ()  # perturbed parameters for exploration; () without parameter noise


@struct.dataclass
class Carry:
    """Recurrent state of acting, [B, ...] each."""

    memory: PyTree  # recurrent state of the network
    exploration: PyTree


class MakeOptions(TypedDict, total=False):
    """Optional arguments of each algorithm's `make`."""

    axis_name: str | None  # mapped axis over devices; None: no such axis
    loss: custom_loss.Loss | None  # user's loss; None: the algorithm's own


class Records(NamedTuple):
    """Values that acting records in a rollout's extras, in addition to the extras of `policy`."""

    log_prob: bool = False  # "log_prob" [B] f32 of the action under the acting distribution
    memory: bool = False  # "carry" [B, ...], the network's recurrent state before the step
    seen: bool = False  # `types.NORMALIZED_OBS`, the normalised observations


class Agent(NamedTuple):
    """Static parts of an algorithm beside its Config, made once by `make`."""

    spec: EnvSpec  # the environment's spaces
    network: NetworkConfig
    observer: Observer  # converts observations to network inputs
    net: Any  # result of the algorithm's `networks`
    kind: Kind  # kind of the output of `policy`
    records: Records
    optimizer: Callable[[Any], optax.GradientTransformation]  # Config -> optimizer without the step size
    axis_name: str | None  # mapped axis over devices; None: no such axis
    loss: custom_loss.Loss | None  # user's loss; None: the algorithm's own

    @property
    def image_bytes(self) -> int:
        """Returns the bytes of the images of an observation."""
        return sum(spaces.num_bytes(leaf) for _, leaf in spaces.leaves(self.spec.observation) if is_image(leaf))

    @property
    def convolves(self) -> bool:
        """Returns whether steps pass through convolutions."""
        return convolves(self.spec.observation, self.network)


def make(
    cfg: Common,
    spec: EnvSpec,
    network: NetworkConfig,
    networks: Callable[[Any, Observer, NetworkConfig], Any],
    *,
    kind: Kind,
    records: Records,
    flat: bool = True,
    axis_name: str | None = None,
    loss: custom_loss.Loss | None = None,
) -> Agent:
    """Returns an algorithm's Agent.

    Args:
      cfg, spec, network, axis_name, loss: arguments of the algorithm's `make`.
      networks: (cfg, observer, network) -> the algorithm's networks for observations of `observer.spec`.
      kind: kind of the output of `policy`.
      records: values that acting records in a rollout's extras.
      flat: whether the optimizer sees one vector; see `optimizers.make`.
    Raises:
      InputError: unsupported space, torso, exploration or loss.
    """
    parts.check_action(cfg, spec.action)
    parts.check_network(cfg, network)
    if loss is not None:
        registry.check_call(loss, "custom.loss", ("default", "net", "params", "batch"))
    if isinstance(cfg.exploration, ParameterNoise):
        parameter_noise.refuse_memory(cfg.exploration, network)
    exploration.make(cfg.exploration, spec.action, kinds=(kind,))  # only to raise its errors now
    observer = observers.make(spec, network, normalize_obs=cfg.normalize_obs, axis_name=axis_name)
    optimizer = _optimizer(functools.partial(optimizers.make, flat=flat, statistics=network.has_statistics))
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
    """Returns the initial State.

    Args:
      key: key of the parameters; other random numbers use another stream.
      params: initial parameters.
      target_params: parameters with a slow copy, which is made here.
      by_part: whether `params` is a dict whose parts have an optimizer each.
      own: state of this algorithm only, by name.
    """
    if isinstance(cfg.exploration, ParameterNoise):
        own |= parameter_noise.init_noise(cfg.exploration, key)
    optimizer = agent.optimizer(cfg)
    opt_state = {name: optimizer.init(part) for name, part in params.items()} if by_part else optimizer.init(params)
    return State(
        params=params,
        target_params=jax.tree.map(jnp.copy, target_params),  # copies, so that both can be donated
        opt_state=opt_state,
        obs_stats=agent.observer.init(),
        return_stats=parts.init_returns(cfg),
        env_steps=jnp.zeros((), jnp.uint32),
        updates=jnp.zeros((), jnp.uint32),
        own=own,
    )


def explorer(cfg: Common, agent: Agent) -> Explorer:
    """Returns the exploration of a Config, whose floats may be traced."""
    return exploration.make(cfg.exploration, agent.spec.action, kinds=(agent.kind,))


def acting_params(state: State) -> PyTree:
    """Returns the parameters that act: the part `actor` if there are parts, else all."""
    return state.params["actor"] if isinstance(state.params, dict) and "actor" in state.params else state.params


def actor(cfg: Common, agent: Agent, state: State) -> ActorState:
    """Returns the parts of a State that acting needs."""
    params, noisy = acting_params(state), ()
    if isinstance(cfg.exploration, ParameterNoise):
        noisy = parameter_noise.perturb(cfg.exploration, state.own, params, state.env_steps)
    return ActorState(params, state.obs_stats, state.env_steps if explorer(cfg, agent).reads_env_steps else (), noisy)


def act(
    cfg: Common,
    agent: Agent,
    policy: Callable[..., tuple[Any, PyTree, dict[str, PyTree]]],
    actor: ActorState,
    obs: PyTree,
    carry: PyTree,
    key: Key,
    explore: bool = True,
) -> ActOut:
    """Returns actions for observations [B, *], from the exploration or greedy; see `algo` for `policy`."""
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
    """Returns the best action [B, *] of a policy's output: the mode, the allowed argmax of Q, or the action."""
    match kind:
        case "distribution":
            return output.mode()
        case "q":
            return ops.masked_argmax(output, exploration.by_choice(mask, output))
    return output


def choice(
    cfg: Common, agent: Agent, policy: Callable[..., Any], actor: ActorState, obs: PyTree, carry: PyTree, explore: bool
) -> tuple[Any, PyTree]:
    """Returns the distribution [B] of the actions of `act`, and the carry after it; see `choices.make_distribution`."""
    from jrl.algos import choices

    before, own = split_carry(carry)
    obs = agent.observer.see(actor.obs_stats, obs)
    output, memory, _ = policy(cfg, agent, actor, obs, before, explore)
    inputs = agent.kind, output, actor.env_steps, own, agent.observer.mask(obs)
    return choices.make_distribution(cfg.exploration, *inputs, explore), _join(memory, own)


def split_carry(carry: PyTree) -> tuple[PyTree, PyTree]:
    """Splits the carry into the network's recurrent state and the exploration's state."""
    return (carry.memory, carry.exploration) if isinstance(carry, Carry) else ((), carry)


def _join(memory: PyTree, exploration: PyTree) -> PyTree:
    """Joins recurrent state and exploration state; without recurrent state returns the exploration state."""
    return Carry(memory, exploration) if jax.tree.leaves(memory) else exploration


# ---------------------------------------------------------------- learning

Replace = Callable[[optax.GradientTransformation], optax.GradientTransformation]
# replaces the optimizers of algorithms that are made in this context: see `jrl.algos.gradients`
replacement: contextvars.ContextVar[Replace | None] = contextvars.ContextVar("gradients", default=None)


def _optimizer(own: Callable[[Any], optax.GradientTransformation]) -> Callable[[Any], optax.GradientTransformation]:
    """Returns the function from Config to optimizer, or its replacement by `jrl.algos.gradients`."""
    wrap = replacement.get()
    return own if wrap is None else lambda cfg: wrap(own(cfg))


def descend(
    cfg: Common, agent: Agent, lr: Any, gradient: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """Makes one gradient step of size `lr`: (params, opt_state).

    It adds the changes of running statistics, and scales weights of norm 1 back to this norm.
    """
    updates, opt_state = agent.optimizer(cfg).update(gradient, opt_state, params)
    steps = jax.tree.map(lambda u: -lr * u, updates)
    if agent.network.has_statistics:
        steps = jax.tree.map_with_path(lambda path, u, s: u if is_statistic(path) else s, updates, steps)
    params = optax.apply_updates(params, steps)
    return with_unit_weights(params) if agent.network.has_unit_weights else params, opt_state


def dropout_keys(agent: Agent, key: Key, count: int) -> Any:
    """Returns keys [count] for the dropout of passes, the same on all devices if `key` is; without dropout Nones."""
    return _minibatch_keys(key, count) if agent.network.drops else [None] * count


def _minibatch_keys(key: Key, count: int) -> Key:
    return jax.random.split(jax.random.fold_in(key, 0x64726F70), count)  # another stream than `key`


def batch_rows(agent: Agent, weight: Array) -> dict[str, Array]:
    """Returns the keyword `valid` of a network's learning pass over rows of `weight`; {} without running statistics."""
    return {"valid": weight > 0} if agent.network.has_statistics else {}


def epochs(
    cfg: Any,
    agent: Agent,
    step: Callable[..., tuple[PyTree, Any]],
    start: PyTree,
    take: Callable[[Array], Any],
    grid: tuple[int, int],
    key: Key,
    *,
    draws: bool = False,
) -> tuple[PyTree, Any]:
    """Makes `cfg.num_epochs` passes over a rollout, each in `cfg.num_minibatches` newly shuffled minibatches.

    Args:
      step: (carry, minibatch) -> (carry, metrics); with dropout or `draws` (carry, minibatch, key).
      start: initial carry.
      take: row indices [M, N / M] i32 -> minibatches with a leading axis [M].
      grid: (T, B) of the flattened N rows; T is 1 if only environments are shuffled.
      key: the same on all devices.
      draws: whether `step` draws random numbers beside dropout.
    Returns:
      The last carry, and metrics [E, M].
    """

    def epoch(carry, key):
        index = minibatch.shuffle(key, *grid, cfg.num_minibatches, axis_name=agent.axis_name)
        if not (agent.network.drops or draws):
            return jax.lax.scan(step, carry, take(index))
        keys = _minibatch_keys(key, cfg.num_minibatches)
        return jax.lax.scan(lambda carry, x: step(carry, *x), carry, (take(index), keys))

    return jax.lax.scan(epoch, start, jax.random.split(key, cfg.num_epochs))


def taker(rows: PyTree) -> Callable[[Array], PyTree]:
    """Returns `take` of `epochs` for rows [N, *]: one gather per epoch takes 3% less time than one per minibatch."""
    take = minibatch.row_taker(rows)

    def minibatches(index: Array) -> PyTree:
        shuffled = take(index.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(*index.shape, *x.shape[1:]), shuffled)

    return minibatches


def mean_gradient(agent: Agent, loss: Callable[..., Any], params: PyTree, batch: Any, chunk: int) -> tuple[PyTree, Any]:
    """Returns the mean gradient and metrics of `loss` over a batch and devices, `chunk` rows at a time."""
    return parts.pmean(minibatch.mean_gradient(loss, params, batch, chunk), agent.axis_name)


def chunk(cfg: Any, agent: Agent, num_rows: int, length: int = 1) -> int:
    """Returns the number of rows (of `length` steps) per gradient computation, by the Config or the cache size."""
    limit = getattr(cfg, "microbatch_size", None)
    return minibatch.chunk_rows(num_rows, agent.image_bytes, limit, agent.convolves, length=length)


def grid(agent: Agent, num_steps: int, num_envs: int) -> tuple[int, int]:
    """Returns (K, B): minibatches of a rollout [T, B] consist of [K, B] steps, or sequences with a core."""
    return num_steps // sequences.length_of(agent.network, num_steps), num_envs


def cut(agent: Agent, rows: Any, memory: PyTree) -> Any:
    """Returns Rows [T, B, *] as rows [N, *] for minibatches; with a core as sequences with their recurrent states."""
    if not agent.network.recurrent:
        return sequences.flat(rows)
    return sequences.cut(rows, memory, sequences.length_of(agent.network, rows.weight.shape[0]))


def map_rows(agent: Agent, function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Maps `function` of rows [N, ...] over a tree [T, B, ...], in chunks that fit the cache."""
    num_steps, num_envs = jax.tree.leaves(tree)[0].shape[:2]
    chunk = minibatch.chunk_rows(num_steps * num_envs, agent.image_bytes, None, agent.convolves)
    out = minibatch.map_rows(function, sequences.flat(tree), chunk)
    return jax.tree.map(lambda x: x.reshape(num_steps, num_envs, *x.shape[1:]), out)


def with_first_stats(agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns the State whose statistics normalise a rollout: see `observer.with_first_stats`."""
    return observers.with_first_stats(agent.observer, state, rollout)


def with_return_stats(agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns the State with the statistics of a rollout's discounted returns added."""
    return replace(state, return_stats=parts.observe_returns(state.return_stats, rollout, agent.axis_name))


def observed(agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns the State with the statistics of a rollout's observations added, and its steps counted."""
    return replace(
        state,
        obs_stats=agent.observer.observe(state.obs_stats, rollout.obs, rollout.mask),
        env_steps=parts.count_steps(state.env_steps, rollout, agent.axis_name),
    )


def ingest(cfg: Common, agent: Agent, state: State, rollout: Rollout) -> State:
    """Returns the State with a rollout's statistics and steps added, before the rollout is learned from."""
    return observed(agent, with_return_stats(agent, state, rollout), rollout)


def adapted(cfg: Common, agent: Agent, policy: Callable[..., Array], state: State, rollout: Rollout) -> State:
    """Returns the State with parameter noise adapted to a rollout; see `parameter_noise.adapt`."""
    if not isinstance(cfg.exploration, ParameterNoise):
        return state
    last_obs = agent.observer.see(state.obs_stats, rollout.last_obs)
    return parameter_noise.adapt(
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
    data: Fresh | Replay | DataSets | None = None,
) -> Algo:
    """Makes the Algo of an algorithm's functions, each of which takes (cfg, agent, ...).

    Args:
      cfg, agent: bound to the functions.
      init: (key) -> State.
      update: (State, Rollout | Batch | SequenceBatch, key) -> (State, UpdateAux).
      outputs: (State, obs [B, *]) -> network outputs, see `Algo.outputs`.
      memory: batch size -> the network's recurrent state at an episode's start; () without a core.
      policy: (ActorState, normalised obs [B, *], memory, explore) -> (input of the exploration, memory, extras).
      act: (policy, ActorState, obs, carry, key, explore) -> ActOut; without a policy: (ActorState, obs, ...).
      ingest: see `Algo.ingest`.
      data: kind of data; None: by the Config, with sequences if replay and a core are combined.
    """
    bind = lambda function: functools.partial(function, cfg, agent)
    chosen = explorer(cfg, agent)

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
