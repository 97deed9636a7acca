"""The types that environments, rollouts, algorithms and the training loop exchange.

Axis names: T rollout steps, B environments on this device, N rows of a batch. Observations and actions may be pytrees.
Data on a device is a `flax.struct.dataclass`, changed with `.replace`. A bundle of functions is a `NamedTuple`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, dataclass_transform, runtime_checkable

import jax
import numpy as np
from flax import struct

from jrl.errors import InputError as InputError
from jrl.fields import bounds, validation
from jrl.fields.data import DataSets as DataSets
from jrl.fields.data import Fresh as Fresh
from jrl.fields.data import Replay as Replay

Array = jax.Array | np.ndarray
PyTree = Any
Key = jax.Array
Metrics = dict[str, Any]


@dataclass_transform()
def hyperparams(cls: type) -> type:
    """Makes a class a frozen dataclass of hyper-parameters that is also a pytree.

    Fields annotated `float` (optional or a Schedule, too) are leaves, so that they can be traced: `jax.vmap` over a
    batch of configs trains one agent per value. A field whose default is itself a hyper-parameter class is a subtree.
    All other fields (sizes, flags, names) are static.

    The constructor raises InputError for a value of the wrong type, for a number outside its annotated range
    (`jrl.fields.bounds`), and for an array or tracer in a static field. It does not check the values of arrays and
    tracers. Tree operations skip the constructor and its checks.
    """
    cls = validation.section(cls)
    hints = bounds.hints(cls)
    is_data = lambda f: validation.is_traceable(hints[f.name]) or getattr(f.default, "is_hyperparams", False)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    data = tuple(f.name for f in fields if is_data(f))
    static = tuple(f.name for f in fields if f.name not in data)

    def flatten(config: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        # with the names, because jax prints this data when two trees differ
        return tuple(getattr(config, name) for name in data), tuple((name, getattr(config, name)) for name in static)

    def flatten_with_keys(config: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        leaves, aux = flatten(config)
        return tuple(zip(map(jax.tree_util.GetAttrKey, data), leaves, strict=True)), aux

    def unflatten(aux: tuple[Any, ...], leaves: Any) -> Any:
        # skip the constructor: a leaf may be a tracer or a gradient, which its checks would reject
        config: Any = object.__new__(cls)
        for name, value in (*aux, *zip(data, leaves, strict=True)):
            object.__setattr__(config, name, value)
        return config

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    cls.is_hyperparams = True  # type: ignore[attr-defined]  # marks the class
    return cls


# ---------------------------------------------------------------- spaces (static and hashable)


@dataclasses.dataclass(frozen=True)
class Box:
    """Space of arrays of one shape and dtype. `low` and `high` are a number, or one number per element in C order.

    `channels` is the axis of the channels of an image or grid; None: see `spaces.channel_axis`.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float | tuple[float, ...] = -math.inf
    high: float | tuple[float, ...] = math.inf
    channels: int | None = dataclasses.field(default=None, repr=False)

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns `low` and `high` as float64 arrays of `shape`."""
        expand = lambda b: np.broadcast_to(
            np.asarray(b, np.float64).reshape(self.shape if isinstance(b, tuple) else ()), self.shape
        )
        return expand(self.low), expand(self.high)


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Integers 0 .. n - 1, shape ()."""

    n: int
    dtype: str = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """Space of integer arrays of shape (len(nvec),), entry i in 0 .. nvec[i] - 1."""

    nvec: tuple[int, ...]
    dtype: str = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)


@dataclasses.dataclass(frozen=True)
class MultiBinary:
    """Space of arrays of zeros and ones of one shape."""

    shape: tuple[int, ...]
    dtype: str = "int8"


@dataclasses.dataclass(frozen=True)
class Dict:
    """Space of dicts with one element of each named space.

    `items` keeps the environment's order of names. The leaves of an element are in alphabetical order, as in jax.
    """

    items: tuple[tuple[str, "Space"], ...]

    def __getitem__(self, name: str) -> "Space":
        return dict(self.items)[name]


@dataclasses.dataclass(frozen=True)
class Tuple:
    """Space of tuples with one element of each space."""

    items: tuple["Space", ...]


Leaf = Box | Discrete | MultiDiscrete | MultiBinary  # spaces whose elements are arrays
Space = Leaf | Dict | Tuple


def element(space: Space) -> PyTree:
    """Returns the shape and dtype of a space's element: a jax.ShapeDtypeStruct, or a dict or tuple of them."""
    match space:
        case Dict():
            return {name: element(part) for name, part in space.items}
        case Tuple():
            return tuple(element(part) for part in space.items)
    return jax.ShapeDtypeStruct(space.shape, np.dtype(space.dtype))


class EnvSpec(NamedTuple):
    """Static, hashable facts about a vector of environments."""

    observation: Space
    action: Space
    num_envs: int  # B, the number of columns; with A agents per environment, column i * A + k is agent k of game i
    max_episode_steps: int | None = None
    env_action: Space | None = None  # the environment's own action space if it differs from the policy's
    env_observation: Space | None = None  # the environment's own observation space if it differs from the policy's
    agents: tuple[str, ...] = ()  # names of an environment's A agents; () for a single agent
    # agent indices by kind if agents have different spaces; () if all agents have the same spaces. With kinds,
    # `observation` and `action` are Tuples with one space per kind. Observations and actions of a kind with A_k agents
    # have G * A_k columns: column i * A_k + j is the j-th agent of that kind in game i. Other arrays keep all B columns
    kinds: tuple[tuple[int, ...], ...] = ()
    # episode ends at which the learner bootstraps: all (True), none (False), time limits only (None): see
    # `envs.limits`. Step results keep the environment's own flags; rollouts have the learner's flags
    bootstraps: bool | None = None

    @property
    def is_multi_agent(self) -> bool:
        """Returns whether agents have names and a column each; there may be only one agent."""
        return bool(self.agents)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the agent indices by kind; one group if all agents have the same spaces."""
        return self.kinds or (tuple(range(max(1, len(self.agents)))),)

    @property
    def num_agents(self) -> int:
        """Returns A, the number of columns per environment; 1 for a single agent."""
        return sum(map(len, self.groups))

    @property
    def games(self) -> int:
        """Returns B / A, the number of environments."""
        return self.num_envs // self.num_agents


# ---------------------------------------------------------------- environments


class StepResult(NamedTuple):
    """Results of one step of B environments, as numpy or jax arrays.

    An environment resets on the step *after* an episode end. The step with `terminated` or `truncated` returns the true
    final observation. The next step ignores its action and returns the reset observation, reward 0 and both flags
    False.
    """

    obs: PyTree  # [B, *]
    reward: Array  # [B] f32
    terminated: Array  # [B] bool, true end: no bootstrap
    truncated: Array  # [B] bool, time limit: bootstrap from `obs`
    # [B] bool, the environment failed and was replaced; None if no environment can fail. Such a step is masked: its
    # action is ignored, its reward is 0, its flags are False, and `obs` begins a new episode without an end before it
    failed: Array | None = None
    several: "Several | None" = None  # results of multi-agent environments, whose agents have a column each


class Several(NamedTuple):
    """Additional step results of multi-agent environments.

    Each agent has its own column and its own episode end, which may be before the end of the game. An agent that has
    ended or has not joined yet has masked rows. An agent that waits for its turn has ordinary rows; its action mask
    then allows only the action without effect.
    """

    # [B] bool, no agent acted in this column. As on a reset, its action was ignored, its reward is 0, its flags are
    # False. `obs` is the first of a new episode if an agent has joined
    absent: Array
    over: Array  # [B / A] bool, the game has ended for all agents; the next step begins another game
    # [B] bool, agents alive on the next step; none after the game is over. None: no agent joins during a game. The
    # agents alive then are the agents that acted and have not ended, and all agents after the first row of a game
    there: Array | None = None


class Env(Protocol):
    """B environments on the host, with numpy inputs and outputs."""

    spec: EnvSpec

    def reset(self) -> PyTree: ...

    def step(self, action: Array) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class AsyncEnv(Protocol):
    """Host environments that do not wait for each other.

    Actions go to some environments; results arrive from those that are ready. An environment has at most one pending
    action. With A agents per environment, its A columns are side by side.
    """

    spec: EnvSpec
    batch_size: int  # maximum number of environments per `recv`
    least: int  # `recv` returns only while at least this many environments have a pending action

    def reset(self) -> None:
        """Begins new episodes in all environments. `recv` returns their first observations, with reward 0."""

    def send(self, action: Array, env_id: Array) -> None:
        """Sends actions [n, *] to the environments `env_id` [n] i32, none of which may have a pending action."""

    def recv(self) -> tuple[Array, StepResult]:
        """Waits for results; returns `env_id` [n] i32 and the results [n, *], 1 <= n <= batch_size."""
        ...

    def close(self) -> None: ...


class JaxEnv(NamedTuple):
    """B environments that can be stepped inside a jitted program.

    `pure` is False if the state lives outside the program (EnvPool's XLA interface). Such an environment can be traced
    into one program only, cannot be vmapped or sharded, and its program is not written to the persistent compile cache.

    `set_task` and `get_task` write and read the task, a pytree of numbers in the environment state with leaves [B,
    ...], or [D, B, ...] on D devices. All B environments have the same task. None: the environments have no task.
    """

    spec: EnvSpec
    reset: Callable[[Key], tuple[PyTree, PyTree]]  # key -> (env_state, obs[B, *])
    step: Callable[[PyTree, PyTree, Key], tuple[PyTree, StepResult]]  # (env_state, action[B, *], key)
    close: Callable[[], None] = lambda: None
    pure: bool = True
    set_task: Callable[[PyTree, PyTree], PyTree] | None = None  # (env_state, task) -> env_state
    get_task: Callable[[PyTree], PyTree] | None = None  # env_state -> task
    # (env_state, environment or game index) -> image [H, W, 3] u8 of the latest observation; called on the host
    draw: Callable[[PyTree, int], np.ndarray] | None = None
    fps: float = 10.0  # steps per second of a video


GraphEnv = JaxEnv  # former name, still imported by user code


# ---------------------------------------------------------------- data


@struct.dataclass
class Rollout:
    """T steps of B environments, time-major, on the device. Row t is (obs_t, action_t, reward_t, end_t)."""

    obs: PyTree  # [T, B, *]
    last_obs: PyTree  # [B, *], observation after row T - 1
    action: PyTree  # [T, B, *], action of the policy, before the environment's action transform
    reward: Array  # [T, B] f32
    terminated: Array  # [T, B] bool, true end: no bootstrap
    truncated: Array  # [T, B] bool, time limit: bootstrap from the next observation
    mask: Array  # [T, B] bool, False on the row after an end (its action was ignored, its reward is masked)
    contiguous: Array  # [B] bool, row 0 continues this column's previous rollout
    extras: Mapping[str, PyTree]  # further outputs of `act`, [T, B, ...]
    carry: PyTree  # recurrent state before row 0, [B, ...]; () without one
    # [B] i32, number of rows of each column; later rows are padding, and the next rollout continues after row
    # `count` - 1. None: all columns have T rows
    count: Array | None = None
    over: Array | None = None  # [T, G] bool, `Several.over` of G multi-agent games


# Keys of a rollout's extras. The string values are stored in checkpoints and data files: do not change them.
# Observations as the acting network read them, if observations are normalised: {"obs": [T, B, *], normalised arrays,
# "valid": [T, B] bool, False before the first statistics}
NORMALIZED_OBS = "seen"
# [T, B] bool, marks one row per game step and policy, so that game steps are counted once. Present if the columns of a
# game's agents are not side by side
COUNTS_STEP = "leads"
# [T, B] i32, id of the policy that controls the agent in this game, if the mapping can change between games. Ids are
# never reused within a run
POLICY_ID = "place"
# Distribution of the teacher's actions, an object of `jrl.distributions` with arrays [T, B, ...]: see `algos.distill`
TEACHER = "teacher"
# Key of a sample's extras, if the algorithm `reads` it: the data's action after each transition. {"action": [N, *], the
# action at `next_obs`, "valid": [N] bool, False after an episode end and after the newest row}; [N, L, ...] for
# sequences
NEXT_ACTION = "next_action"


def drop_stale_normalized_obs(before: Rollout, after: Rollout) -> Rollout:
    """Returns `after`, with its NORMALIZED_OBS marked invalid unless it has the observation arrays of `before`.

    The learner then normalises the changed observations again.
    """
    pairs = zip(jax.tree.leaves(before.obs), jax.tree.leaves(after.obs), strict=True)
    if NORMALIZED_OBS not in after.extras or all(a is b for a, b in pairs):
        return after
    seen = {**after.extras[NORMALIZED_OBS], "valid": after.extras[NORMALIZED_OBS]["valid"] & False}
    return dataclasses.replace(after, extras={**after.extras, NORMALIZED_OBS: seen})


@struct.dataclass
class Window:
    """Observations of L consecutive steps and the recurrent state before the first: the input of a recurrent network.

    The network reads row t with the state after row t - 1, which is the initial state if `reset[t - 1]`.
    """

    obs: PyTree  # [N, L, *]
    carry: PyTree  # [N, ...]
    reset: Array  # [N, L] bool, masked rows


@struct.dataclass
class Batch:
    """N transitions from replay. A loss is `mean(weight * x)` and needs no other property of a transition."""

    obs: PyTree  # [N, *]
    action: PyTree  # [N, *]
    reward: Array  # [N] f32, discounted sum over the k steps of the n-step window
    discount: Array  # [N] f32, gamma ** k; 0 if the window ends in a true end
    next_obs: PyTree  # [N, *], observation after the window
    weight: Array  # [N] f32, 0 on masked rows; else 1 on average, or the importance weight of prioritised sampling
    index: Array  # [N] i32, for `Buffer.set_priority`
    # name -> [N, ...], the stored part of `Rollout.extras` at the first step of the window
    extras: Mapping[str, PyTree] = struct.field(default_factory=dict)


@struct.dataclass
class SequenceBatch:
    """N sequences of L transitions from replay, for recurrent learners. A sequence continues over episode ends.

    As in a Batch, a loss is `mean(weight * x)`. The observation after row i's n-step window is row `ahead[i]`.
    """

    window: Window  # obs [N, K + L + 1, *]: K burn-in rows, the L rows, and the row after them
    action: PyTree  # [N, L, *]
    reward: Array  # [N, L] f32, discounted sum over the k steps of each row's n-step window
    discount: Array  # [N, L] f32, gamma ** k; 0 if the window ends in a true end
    ahead: Array  # [N, L] i32, index of the row after the window, among the L + 1 rows after the burn-in
    weight: Array  # [N, L] f32, 0 on masked rows; else the sequence's weight, 1 on average under uniform sampling
    index: Array  # [N] i32, for `Buffer.set_priority`
    # name -> [N, L, ...], the stored part of `Rollout.extras`, without the recurrent state (`carry`)
    extras: Mapping[str, PyTree] = struct.field(default_factory=dict)


@struct.dataclass
class Episodes:
    """Statistics of the episodes that ended in one iteration, and of the latest W episodes. Reduced on the device.

    With several devices each leaf has a leading device axis on the host; `metrics.episodes.summary` merges it.
    """

    count: Array  # [] i32, number of episodes that ended in this iteration
    return_sum: Array  # [] f32, sum of undiscounted returns, before any reward transform
    return_min: Array  # [] f32, +inf when count is 0
    return_max: Array  # [] f32, -inf when count is 0
    length_sum: Array  # [] i32
    steps: Array  # [] i32, environment steps (unmasked rows)
    window_return: Array  # [W] f32, the latest W returns in any order; NaN for missing episodes
    window_length: Array  # [W] f32, their lengths
    # statistics of each agent, with a leading axis [A]; () with one agent. With several agents the fields above count
    # games, and the return of a game is the sum over its agents
    agents: Any = ()
    # [] i32, steps that `env.on_nonfinite` replaced by a reset; (): environments are not checked
    nonfinite: Any = ()


# ---------------------------------------------------------------- algorithms


class ActOut(NamedTuple):
    action: PyTree  # [B, *]
    carry: PyTree  # [B, ...]
    extras: dict[str, PyTree]  # name -> [B, ...]: log_prob, value, ...


NO_CHOICE = "env/no_valid_action"  # metric: share of rows whose action mask allows no action; absent without masks
VALID_SHARE = "replay/valid_share"  # metric: share of replay rows that are unmasked transitions
BROKEN_STACKS = "replay/broken_stacks"  # metric: share of rows whose frame stacks replay cannot rebuild
NOT_FINITE = "train/not_finite"  # metric: share of rejected non-finite updates; absent without the guard


class UpdateAux(NamedTuple):
    metrics: Metrics  # name -> scalar
    priority: Array | None = None  # [N] f32, for prioritised replay


class Algo(NamedTuple):
    """An algorithm as pure functions."""

    init: Callable[[Key], PyTree]  # key -> State
    actor: Callable[[PyTree], PyTree]  # State -> ActorState, the part of the State that `act` needs
    # batch_size -> recurrent state [B, ...]; () without one. The algorithms of jrl also take `first` and `total`: the
    # index of the first environment and their number, for exploration that differs between environments
    carry: Callable[..., PyTree]
    act: Callable[..., ActOut]  # (actor, obs[B, *], carry, key, explore=True)
    update: Callable[[PyTree, Any, Key], tuple[PyTree, UpdateAux]]  # (state, Rollout | Batch | SequenceBatch, key)
    data: Fresh | Replay | DataSets  # kind of data: fresh rollouts, replay, or data sets
    # (State, Rollout) -> State with the new rollout's statistics, such as the count of environment steps. Needed with
    # replay and for algorithms that can learn from a rollout more than once; others do this in `update`
    ingest: Callable[[PyTree, Rollout], PyTree] | None = None
    # gamma of the discounted return that the source records in extras["running_return"]; None: not recorded
    running_return_gamma: Any = None
    # (State, obs[B, *]) -> network outputs by name: `distribution` [B], `value` [B], `q` [B, A], if the algorithm has
    # them. For inspection: acting and learning do not call it
    outputs: Callable[[PyTree, PyTree], dict[str, Any]] | None = None
    # (actor, obs[B, *], carry, explore) -> (distribution [B] of the actions of `act`, carry [B, ...]). For off-policy
    # evaluation: acting does not call it. Raises InputError if the policy has no such distribution
    choice: Callable[..., tuple[Any, PyTree]] | None = None
    # env -> (actor, obs[B, *], carry, key, explore, env_state) -> ActOut: acts by a search with the step of a JaxEnv.
    # Programs that step this environment call it in place of `act`. None: acting needs observations alone
    act_in: Callable[["JaxEnv"], Callable[..., ActOut]] | None = None

    @property
    def on_policy(self) -> bool:
        """Returns whether the algorithm learns from fresh rollouts."""
        return isinstance(self.data, Fresh)

    @property
    def sequences(self) -> bool:
        """Returns whether the algorithm learns from sequences.

        Replay's `extras["carry"]` is then the recurrent state before each row.
        """
        return not isinstance(self.data, Fresh) and self.data.sequences


class Buffer(NamedTuple):
    """Replay buffer as pure functions. Its state lives on the device and is updated in place if donated."""

    init: Callable[[], PyTree]  # -> empty state
    add: Callable[[PyTree, Rollout], PyTree]  # (state, Rollout [T, B]) -> state
    # (state, key) -> N transitions or sequences; valid once `can_sample` is True
    sample: Callable[[PyTree, Key], Batch | SequenceBatch]
    can_sample: Callable[[PyTree], Array]  # state -> [] bool
    size: Callable[[PyTree], Array]  # state -> [] i32, number of stored rows, masked rows included
    # (state, index [N], priority [N] f32 >= 0) -> state; None: sampling is uniform
    set_priority: Callable[[PyTree, Array, Array], PyTree] | None = None
    live: Callable[[PyTree], Array] | None = None  # state -> [] i32, number of stored rows that are not masked
