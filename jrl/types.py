"""The nouns of jrl: what environments, rollouts, algorithms and the loop hand to each other.

Axis names: T rollout steps, B environments on this device, N rows of a batch. Observations and actions may be pytrees.
What lives on a device is a `flax.struct.dataclass`, changed with `.replace`; a bundle of functions is a `NamedTuple`.
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
from jrl.fields.data import Fixed as Fixed
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
    batch of configs trains one agent per value. A field whose default is itself of such a class is a subtree. All other
    fields (sizes, flags, names) are static. The constructor raises InputError for values of another type than their
    annotations (`jrl.fields.bounds`), for numbers outside the ranges of these, and for arrays and tracers in a static
    field. Numbers in arrays and tracers are not looked at, and no tree operation is checked.
    """
    cls = validation.section(cls)
    hints = bounds.hints(cls)
    is_data = lambda f: validation.is_traceable(hints[f.name]) or getattr(f.default, "is_hyperparams", False)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    data = tuple(f.name for f in fields if is_data(f))
    static = tuple(f.name for f in fields if f.name not in data)

    def flatten(config: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        # names, too: jax shows both where two trees differ in them
        return tuple(getattr(config, name) for name in data), tuple((name, getattr(config, name)) for name in static)

    def flatten_with_keys(config: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        leaves, aux = flatten(config)
        return tuple(zip(map(jax.tree_util.GetAttrKey, data), leaves, strict=True)), aux

    def unflatten(aux: tuple[Any, ...], leaves: Any) -> Any:
        # without the constructor: what stands in a tree may be a tracer, a gradient, a product
        config: Any = object.__new__(cls)
        for name, value in (*aux, *zip(data, leaves, strict=True)):
            object.__setattr__(config, name, value)
        return config

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    cls.is_hyperparams = True  # type: ignore[attr-defined]  # a mark on the class
    return cls


# ---------------------------------------------------------------- spaces (static and hashable)


@dataclasses.dataclass(frozen=True)
class Box:
    """Arrays of one shape and dtype; `low` and `high` are one number, or one per element in C order."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float | tuple[float, ...] = -math.inf
    high: float | tuple[float, ...] = math.inf

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
    """Arrays of one integer in 0 .. nvec[i] - 1 for each i, shape (len(nvec),)."""

    nvec: tuple[int, ...]
    dtype: str = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)


@dataclasses.dataclass(frozen=True)
class MultiBinary:
    """Arrays of zeros and ones, of one shape."""

    shape: tuple[int, ...]
    dtype: str = "int8"


@dataclasses.dataclass(frozen=True)
class Dict:
    """Dicts of an element of each of the named spaces. Names are in the order of the environment, leaves of an element
    in alphabetical order, as everywhere in jax.
    """

    items: tuple[tuple[str, "Space"], ...]

    def __getitem__(self, name: str) -> "Space":
        return dict(self.items)[name]


@dataclasses.dataclass(frozen=True)
class Tuple:
    """Tuples of an element of each of the spaces."""

    items: tuple["Space", ...]


Leaf = Box | Discrete | MultiDiscrete | MultiBinary  # the spaces of arrays
Space = Leaf | Dict | Tuple


def element(space: Space) -> PyTree:
    """Returns shapes and dtypes of one element of a space: a jax.ShapeDtypeStruct, or a dict or tuple of such."""
    match space:
        case Dict():
            return {name: element(part) for name, part in space.items}
        case Tuple():
            return tuple(element(part) for part in space.items)
    return jax.ShapeDtypeStruct(space.shape, np.dtype(space.dtype))


class EnvSpec(NamedTuple):
    """Facts that can be known of a vector of environments without stepping it. Static and hashable."""

    observation: Space
    action: Space
    num_envs: int  # B, columns: environments, or of several agents environment i's agent k at i * A + k
    max_episode_steps: int | None = None
    env_action: Space | None = None  # the environment's own action space, where the policy acts in another one
    env_observation: Space | None = None  # the environment's own observation space, where the policy sees another
    agents: tuple[str, ...] = ()  # names of the A agents of an environment; () where it has one, which needs no name
    # agents' numbers by kind, where they have different spaces; () where all are alike. With kinds `observation` and
    # `action` are Tuples of the spaces by kind, and of kind k, of A_k agents, observations and actions have G * A_k
    # columns: environment i's j-th agent of the kind has i * A_k + j. All else has the B columns of all agents
    kinds: tuple[tuple[int, ...], ...] = ()
    # ends at which the learner bootstraps: all (true), none (false), or time limits alone (None): see `envs.limits`.
    # Results of steps have the environment's own ends, and rollouts those of the learner
    bootstraps: bool | None = None

    @property
    def is_multi_agent(self) -> bool:
        """Returns whether an environment has named agents with a column each, though it may be only one."""
        return bool(self.agents)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the agents' numbers by kind; one group where all are alike."""
        return self.kinds or (tuple(range(max(1, len(self.agents)))),)

    @property
    def num_agents(self) -> int:
        """Returns the columns of an environment: A, or 1."""
        return sum(map(len, self.groups))

    @property
    def games(self) -> int:
        """Returns the number of environments, B / A."""
        return self.num_envs // self.num_agents


# ---------------------------------------------------------------- environments


class StepResult(NamedTuple):
    """Results of one step of B environments, numpy or jax.

    Environments reset on the step *after* an end: the row with `terminated` or `truncated` carries the true final
    observation; the next step ignores its action and returns the reset observation with reward 0 and both flags False.
    """

    obs: PyTree  # [B, *]
    reward: Array  # [B] f32
    terminated: Array  # [B] bool, a true end: no bootstrap
    truncated: Array  # [B] bool, a time limit: bootstrap from `obs`
    # [B] bool, or None where nothing can fail: the environment broke and was made anew. The step is masked (its
    # action ignored, reward 0, flags False, `obs` the first of a new episode) although no end came before it
    failed: Array | None = None
    several: "Several | None" = None  # of environments with several agents, of whom each has a column


class Several(NamedTuple):
    """Results of a step of several agents, beside those of each.

    An agent has rows of its own: its end is its own, and it may end before the others do. An agent that is not there,
    because it has ended or was not born yet, has masked rows; one that only waits for its turn has rows like any other,
    whose action mask allows the action alone that does nothing.
    """

    # [B] bool: nobody acted in this column, as on a reset: its action was ignored, its reward is 0, its flags are
    # False, and `obs` is the first of a new episode where somebody is there by now
    absent: Array
    over: Array  # [B / A] bool: the game has ended for all agents, and the next step begins another
    # [B] bool: who acts on the next step; nobody after the game is over. None: nobody comes while a game goes on, so
    # that it is those who acted and have not ended, and after the row that begins a game all
    there: Array | None = None


class Env(Protocol):
    """B host environments (numpy in, numpy out)."""

    spec: EnvSpec

    def reset(self) -> PyTree: ...

    def step(self, action: Array) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class AsyncEnv(Protocol):
    """Host environments that do not wait for each other: actions go to some of them, results come from whichever are
    ready. An environment has at most one action under way. Of several agents it has a column for each, side by side.
    """

    spec: EnvSpec
    batch_size: int  # most environments of one `recv`
    least: int  # `recv` returns only while so many environments are under way

    def reset(self) -> None:
        """Begins new episodes in all of them; their first observations come by `recv`, with reward 0."""

    def send(self, action: Array, env_id: Array) -> None:
        """Sends actions [n, *] to the environments `env_id` [n] i32, none of which is under way."""

    def recv(self) -> tuple[Array, StepResult]:
        """Returns `env_id` [n] i32 and their results [n, *], 1 <= n <= batch_size. Waits until there are some."""
        ...

    def close(self) -> None: ...


class JaxEnv(NamedTuple):
    """B environments that can be stepped inside a jitted program.

    `pure` is False when the state lives outside the program (EnvPool's XLA interface): such an environment may be
    traced into one program only, cannot be vmapped or sharded, and stays out of the persistent compile cache.

    Where the environments have a task (a pytree of numbers that the state holds), `set_task` and `get_task` write and
    read it in states with leaves [B, ...] or, on D devices, [D, B, ...]; all B have the same. None where there is none.
    `draw`, where there is one, shows what one environment's latest observation is of.
    """

    spec: EnvSpec
    reset: Callable[[Key], tuple[PyTree, PyTree]]  # key -> (env_state, obs[B, *])
    step: Callable[[PyTree, PyTree, Key], tuple[PyTree, StepResult]]  # (env_state, action[B, *], key)
    close: Callable[[], None] = lambda: None
    pure: bool = True
    set_task: Callable[[PyTree, PyTree], PyTree] | None = None  # (env_state, task) -> env_state
    get_task: Callable[[PyTree], PyTree] | None = None  # env_state -> task
    # (env_state, number of the environment or game) -> picture [H, W, 3] u8; called outside of programs
    draw: Callable[[PyTree, int], np.ndarray] | None = None
    fps: float = 10.0  # steps per second at which pictures look natural


GraphEnv = JaxEnv  # the name that it had before


# ---------------------------------------------------------------- data


@struct.dataclass
class Rollout:
    """T steps of B environments, time-major, on the device. Row t is (obs_t, action_t, reward_t, end_t)."""

    obs: PyTree  # [T, B, *]
    last_obs: PyTree  # [B, *], the observation after row T - 1
    action: PyTree  # [T, B, *], as the policy chose it (before the environment's action transform)
    reward: Array  # [T, B] f32
    terminated: Array  # [T, B] bool, a true end: no bootstrap
    truncated: Array  # [T, B] bool, a time limit: bootstrap from the next observation
    mask: Array  # [T, B] bool, False on the row after an end (its action was ignored, its reward is masked)
    contiguous: Array  # [B] bool, row 0 continues this column's previous rollout
    extras: Mapping[str, PyTree]  # what `act` returned beside the action: [T, B, ...]
    carry: PyTree  # recurrent state before row 0, [B, ...]; () if none
    # [B] i32, rows of each column; those behind them are padding, in whose place the next rollout goes on. None: all T
    count: Array | None = None
    over: Array | None = None  # [T, G] bool, of G games of several agents each: `Several.over`


# in a rollout's extras, where observations are normalised: what acting saw. {"obs": [T, B, *], the normalised arrays,
# "valid": [T, B] bool, False where there were no statistics yet}
SEEN = "seen"
# in a rollout's extras, where the rows of a game's agents do not stand side by side: [T, B] bool, rows that stand for a
# step of their game, one for each step and policy. Steps of games are counted by them
LEADS = "leads"
# in a rollout's extras where it may change from game to game who follows which policy: the number of the one that the
# agent follows in this game, [T, B] i32; no other policy of the run ever has it
PLACE = "place"
# in a sample's extras, where the algorithm `reads` it: what the data did after each transition. {"action": [N, *], that
# at `next_obs`, "valid": [N] bool, False where there is none: behind an episode's end and the newest row}; of sequences
# [N, L, ...]
NEXT_ACTION = "next_action"


def seen_anew(before: Rollout, after: Rollout) -> Rollout:
    """Returns `after`, whose observations learning normalises anew unless they are the very arrays of `before`.

    Statistics that acting took of observations do not hold once these were changed.
    """
    pairs = zip(jax.tree.leaves(before.obs), jax.tree.leaves(after.obs), strict=True)
    if SEEN not in after.extras or all(a is b for a, b in pairs):
        return after
    seen = {**after.extras[SEEN], "valid": after.extras[SEEN]["valid"] & False}
    return dataclasses.replace(after, extras={**after.extras, SEEN: seen})


@struct.dataclass
class Window:
    """Observations of L consecutive steps and the memory before the first: what a network with a core learns from.

    The network reads row t with the memory after row t - 1, which begins anew where `reset[t - 1]`.
    """

    obs: PyTree  # [N, L, *]
    carry: PyTree  # [N, ...]
    reset: Array  # [N, L] bool: rows that are not in a rollout's mask


@struct.dataclass
class Batch:
    """N transitions from replay. A loss is `mean(weight * x)`; nothing else of a transition's kind need be known."""

    obs: PyTree  # [N, *]
    action: PyTree  # [N, *]
    reward: Array  # [N] f32, discounted sum over the k steps of the window
    discount: Array  # [N] f32, gamma ** k, and 0 where the window ends in a true end
    next_obs: PyTree  # [N, *], after the window
    weight: Array  # [N] f32, 0 on masked rows; 1 on average, or the importance weight of prioritised sampling
    index: Array  # [N] i32, for `Buffer.set_priority`
    # name -> [N, ...], what the buffer was made to keep of `Rollout.extras`, of the first step of the window
    extras: Mapping[str, PyTree] = struct.field(default_factory=dict)


@struct.dataclass
class SequenceBatch:
    """N sequences of L transitions from replay, for learners with memory. They run on over the ends of episodes.

    As in a Batch, a loss is `mean(weight * x)`; and what follows upon a transition is the observation `ahead`.
    """

    window: Window  # obs [N, K + L + 1, *]: K rows that warm the memory up, the L rows, and the one after them
    action: PyTree  # [N, L, *]
    reward: Array  # [N, L] f32, discounted sum over the k steps from each row on
    discount: Array  # [N, L] f32, gamma ** k, and 0 where they end in a true end
    ahead: Array  # [N, L] i32, the row after those steps, among the L + 1 rows that are not warming up
    weight: Array  # [N, L] f32, 0 on masked rows; else the sequence's, 1 on average over uniformly drawn rows
    index: Array  # [N] i32, for `Buffer.set_priority`
    # name -> [N, L, ...], what the buffer was made to keep of `Rollout.extras`, but for the memory (`carry`)
    extras: Mapping[str, PyTree] = struct.field(default_factory=dict)


@struct.dataclass
class Episodes:
    """Episodes that ended in one iteration, and a window over the latest ones. Reduced on the device.

    With several devices each leaf has a leading device axis once it reaches the host; `metrics.episodes.summary`
    merges them.
    """

    count: Array  # [] i32, episodes that ended in this iteration
    return_sum: Array  # [] f32, undiscounted returns, before any reward transform
    return_min: Array  # [] f32, +inf when count is 0
    return_max: Array  # [] f32, -inf when count is 0
    length_sum: Array  # [] i32
    steps: Array  # [] i32, environment steps taken (rows whose mask is True)
    window_return: Array  # [W] f32, the last W returns, in no particular order; NaN where there is none yet
    window_length: Array  # [W] f32
    # of several agents, where the above is of games, whose return is the sum over their agents: the same of each agent,
    # with a leading axis [A]; () with one agent
    agents: Any = ()


# ---------------------------------------------------------------- algorithms


class ActOut(NamedTuple):
    action: PyTree  # [B, *]
    carry: PyTree  # [B, ...]
    extras: dict[str, PyTree]  # name -> [B, ...]: log_prob, value, ...


NO_CHOICE = "env/no_valid_action"  # metric: the share of rows whose action mask allows nothing; absent without masks
VALID_SHARE = "replay/valid_share"  # metric: the share of the rows in replay that are transitions
BROKEN_STACKS = "replay/broken_stacks"  # metric: the share of rows whose frame stacks replay cannot rebuild
NOT_FINITE = "train/not_finite"  # metric: the share of updates that were refused; absent where updates are not watched


class UpdateAux(NamedTuple):
    metrics: Metrics  # name -> scalar
    priority: Array | None = None  # [N] f32, for prioritised replay


class Algo(NamedTuple):
    """The contract of every algorithm: pure functions, nothing else."""

    init: Callable[[Key], PyTree]  # -> State
    actor: Callable[[PyTree], PyTree]  # State -> Actor, what acting needs
    # batch_size -> recurrent state [B, ...]; () if none. Those of jrl take `first` and `total`, too: which environments
    # of a run they are, where exploration goes by that
    carry: Callable[..., PyTree]
    act: Callable[..., ActOut]  # (actor, obs[B, *], carry, key, explore=True)
    update: Callable[[PyTree, Any, Key], tuple[PyTree, UpdateAux]]  # (state, Rollout | Batch | SequenceBatch, key)
    data: Fresh | Replay | Fixed  # what it learns from
    # what a State takes from a rollout when it comes, such as the count of environment steps: of algorithms
    # with replay, and of those that may learn from a rollout more than once; the others take it in `update`
    ingest: Callable[[PyTree, Rollout], PyTree] | None = None
    # gamma of the running discounted return that the source records in extras["running_return"]; None: not recorded
    running_return_gamma: Any = None
    # (State, obs[B, *]) -> what the networks say, of `distribution` [B], `value` [B] and `q` [B, A] those that it has;
    # for looking at a policy, neither acting nor learning calls it
    outputs: Callable[[PyTree, PyTree], dict[str, Any]] | None = None
    # (actor, obs[B, *], carry, explore) -> (the distribution [B] that `act` draws actions from, carry [B, ...]); for
    # judging a policy by its probabilities, acting does not call it. InputError where there is none
    choice: Callable[..., tuple[Any, PyTree]] | None = None

    @property
    def on_policy(self) -> bool:
        """Returns whether it learns from rollouts as they come."""
        return isinstance(self.data, Fresh)

    @property
    def sequences(self) -> bool:
        """Returns whether it learns from sequences; in replay's `extras["carry"]` is the memory before each row."""
        return not isinstance(self.data, Fresh) and self.data.sequences


class Buffer(NamedTuple):
    """Experience replay as pure functions; its state lives on the device and is updated in place when donated."""

    init: Callable[[], PyTree]  # -> state, empty
    add: Callable[[PyTree, Rollout], PyTree]  # (state, Rollout [T, B]) -> state
    # (state, key) -> N transitions or sequences; only once `can_sample`
    sample: Callable[[PyTree, Key], Batch | SequenceBatch]
    can_sample: Callable[[PyTree], Array]  # state -> [] bool
    size: Callable[[PyTree], Array]  # state -> [] i32, rows that can be sampled or masked among them
    # (state, index [N], priority [N] f32 >= 0) -> state; None where sampling is uniform
    set_priority: Callable[[PyTree, Array, Array], PyTree] | None = None
    live: Callable[[PyTree], Array] | None = None  # state -> [] i32, those of `size` that are not masked
