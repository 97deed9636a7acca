"""Exploration of an algorithm, as a section of its Config: `algo.exploration: {name: epsilon_greedy, ...}`.

The *kind* of an exploration is the output of an algorithm that it needs:

    q             Q values [B, A]; for a team with MultiDiscrete actions [B, agents, A], where each agent explores alone
    action        deterministic actions [B, *] in [-1, 1]
    distribution  a distribution object of `jrl.distributions`, batched [B]

    exploration: OverQ = EpsilonGreedy()                                             # a field of its Config
    explorer = make(cfg.exploration, spec.action, kinds=("q",))                      # in its `make`
    action, carry = explorer.sample(q, key, actor.env_steps, carry, mask)            # in its `act`, when exploring

The mask [B, K] marks allowed actions (`jrl.spaces`); None: all. Only a user's own exploration can choose other actions.
A distribution must already be masked (`ActionHead.make(..., mask=mask)`); Q values need not be.

Without exploration an algorithm acts greedily and returns its carry unchanged. `jrl.algos.parameter_noise` has the
other parts of parameter noise.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval

from jrl import registry, spaces
from jrl.fields.bounds import UINT32, DeviceSteps, Few, Name, NonNegative, NonNegativeSchedule, Unit, UnitSchedule
from jrl.fields.hyper import Options
from jrl.ops import exploration as ops
from jrl.ops import schedules
from jrl.types import Array, Box, Discrete, InputError, MultiDiscrete, PyTree, Space, element, hyperparams


@hyperparams
class EpsilonGreedy:
    """A random action with probability epsilon, else the action with the highest Q value."""

    name: Literal["epsilon_greedy"] = "epsilon_greedy"
    epsilon: UnitSchedule = ((0, 1.0), (10_000, 0.05))  # probability of a random action
    # instead of epsilon: environment i of the run's N has ladder_base ** (1 + ladder_alpha i / (N - 1)), as Ape-X
    ladder: bool = False
    ladder_base: UnitSchedule = 0.4  # epsilon of the ladder's first environment
    ladder_alpha: NonNegative = 7.0  # exponent of the ladder
    random_timesteps: DeviceSteps = 0  # environment steps at the start with uniformly random actions


@hyperparams
class SoftQ:
    """Actions with probability proportional to exp(Q / temperature)."""

    name: Literal["soft_q"] = "soft_q"
    temperature: NonNegativeSchedule = 1.0  # 0: greedy
    random_timesteps: DeviceSteps = 0  # environment steps at the start with uniformly random actions


@hyperparams
class Gaussian:
    """Independent normal noise on the action, clipped to [-1, 1]."""

    name: Literal["gaussian"] = "gaussian"
    std: NonNegativeSchedule = 0.1  # standard deviation, of actions in [-1, 1]
    random_timesteps: DeviceSteps = 0  # environment steps at the start with uniformly random actions


@hyperparams
class OrnsteinUhlenbeck:
    """Time-correlated noise on the action, 0 at the start of each episode; clipped to [-1, 1]."""

    name: Literal["ornstein_uhlenbeck"] = "ornstein_uhlenbeck"
    theta: NonNegative = 0.15  # rate of decay of the noise to 0, per unit of time
    sigma: NonNegativeSchedule = 0.2  # standard deviation of the noise added per unit of time
    dt: NonNegative = 1.0  # time of an environment step: 1 as in DDPG's paper, 0.01 in other implementations
    random_timesteps: DeviceSteps = 0  # environment steps at the start with uniformly random actions


@hyperparams
class Stochastic:
    """Actions sampled from the policy's distribution."""

    name: Literal["stochastic"] = "stochastic"
    random_timesteps: DeviceSteps = 0  # environment steps at the start with uniformly random actions


@hyperparams
class HeldNoise:
    """Samples of a Gaussian policy whose standard normal noise stays the same for several steps (arXiv:2604.04539).

    The number of these steps is n with a probability proportional to n ** -exponent, for n from 1 to `longest`.
    """

    name: Literal["held_noise"] = "held_noise"
    exponent: NonNegative = 2.0  # 0: all lengths have the same probability
    longest: Few = 16  # most steps with the same noise
    random_timesteps: DeviceSteps = 0  # environment steps at the start with uniformly random actions


@hyperparams
class Random:
    """Uniformly random actions, independent of the policy."""

    name: Literal["random"] = "random"


@hyperparams
class Members:
    """The best action of each environment's member of a population, see `jrl.algos.evolution`."""

    name: Literal["members"] = "members"


@hyperparams
class ParameterNoiseQ:
    """The greedy action of Q values from parameters with adaptive normal noise (arXiv:1706.01905).

    The noise is scaled so that the perturbed policy is as far from the unperturbed one as epsilon-greedy is from greedy
    (KL of softmax policies, appendix C.1). The same noise has different effects on different layers, so the paper
    normalises
    between layers: use `network.norm: layer`. Parameters of normalisation layers get no noise.
    """

    name: Literal["parameter_noise"] = "parameter_noise"
    std: NonNegative = 0.1  # initial deviation of the noise
    epsilon: UnitSchedule = ((0, 1.0), (10_000, 0.05))  # target distance: that of epsilon-greedy with this epsilon
    factor: Annotated[float, Ge(1)] = 1.01  # factor of the deviation's change per rollout
    # environment steps between draws of the noise, which is constant during a rollout
    redraw_every: Annotated[int, Interval(ge=1, le=UINT32)] = 1_000
    random_share: Unit = 0.01  # share of additional uniformly random actions
    random_timesteps: DeviceSteps = 0  # environment steps at the start with uniformly random actions


@hyperparams
class ParameterNoiseAction:
    """The action of parameters with adaptive normal noise (arXiv:1706.01905).

    The noise is scaled so that perturbed and unperturbed actions differ by `target_std`, root mean square (appendix
    C.1). `network.norm: layer` equalises the effect of the noise on each layer, as in the paper; the parameters of
    normalisation layers get no noise.
    """

    name: Literal["parameter_noise"] = "parameter_noise"
    std: NonNegative = 0.1  # deviation of the noise at the start
    target_std: NonNegativeSchedule = 0.2  # standard deviation of actions in [-1, 1]
    factor: Annotated[float, Ge(1)] = 1.01  # by which the deviation grows or shrinks with each rollout
    # environment steps between two draws of the noise; it is one for a whole rollout
    redraw_every: Annotated[int, Interval(ge=1, le=UINT32)] = 1_000
    random_timesteps: DeviceSteps = 0  # environment steps at the start with uniformly random actions


@hyperparams
class Custom:
    """A user's function `(output, key, env_steps, carry, **options) -> (action, carry)`, or a class.

    A class is called with `options`. Its instance is called as `(output, key, env_steps, carry)`, and may have a method
    `carry(batch_size)`, which returns the state of B environments at an episode's start. If the output is a
    distribution, the result may be `(action, log_prob, carry)` with the log-probability [B] of the action; else the
    policy's is used.

    The output respects an action mask: Q values of masked actions are the least float32, and a distribution gives them
    probability 0.
    """

    name: Literal["custom"] = "custom"
    path: Name = ""  # package.module:name, or a registered name
    options: dict[str, Any] = Options()  # keyword arguments of the function or the class
    random_timesteps: DeviceSteps = 0  # environment steps at the start with uniformly random actions

    def __post_init__(self):
        object.__setattr__(self, "options", Options(self.options))


# explorations for algorithms with Q values, deterministic actions, or a distribution
OverQ = EpsilonGreedy | SoftQ | ParameterNoiseQ | Random | Custom
OverActions = Gaussian | OrnsteinUhlenbeck | ParameterNoiseAction | Random | Custom
OverDistributions = Stochastic | Random | Custom
# for algorithms that do not read the probabilities of their actions, which depend on earlier actions with held noise
OverGaussians = Stochastic | HeldNoise | Random | Custom
ParameterNoise = ParameterNoiseQ | ParameterNoiseAction
Exploration = (
    EpsilonGreedy
    | SoftQ
    | Gaussian
    | OrnsteinUhlenbeck
    | Stochastic
    | HeldNoise
    | Members
    | ParameterNoise
    | Random
    | Custom
)

# exploration -> kind of output that it needs; other explorations accept any kind
_KINDS: dict[type, str] = {
    EpsilonGreedy: "q",
    SoftQ: "q",
    ParameterNoiseQ: "q",
    Gaussian: "action",
    OrnsteinUhlenbeck: "action",
    ParameterNoiseAction: "action",
    Stochastic: "distribution",
    HeldNoise: "distribution",
}


class Explorer(NamedTuple):
    # (batch_size, first=0, total=None) -> state [B, *] at the start of an episode; () without a state. It may depend on
    # the environments' indices first .. first + B - 1 of `total`
    carry: Callable[..., PyTree]
    # (output of `kind`, key, env_steps [] u32, carry, mask=None | [B, K] bool) -> (action [B, *], carry)
    sample: Callable[..., tuple[PyTree, PyTree]]
    kind: str  # kind of the first argument of `sample`
    # for kind distribution, also returns the log-probability [B] f32 of the action under the acting distribution:
    # (distribution, key, env_steps, carry, mask=None) -> (action, log_prob, carry)
    sample_and_log_prob: Callable[..., tuple[PyTree, Array, PyTree]]
    reads_env_steps: bool  # False: `env_steps` is ignored


def make(cfg: Exploration, action_space: Space, kinds: tuple[str, ...]) -> Explorer:
    """Makes exploration as pure functions; floats of `cfg` may be traced.

    Args:
      cfg: exploration, see the classes above.
      action_space: any space for kind distribution, Discrete (MultiDiscrete for a team) for q, a Box for action. Random
        actions of a Box are uniform between its bounds, or in [-1, 1] for elements without two finite bounds.
      kinds: kinds of the algorithm's output: "q", "action", "distribution"; Random and Custom get the first.
    Returns:
      Explorer(carry, sample, kind, ...).
    Raises:
      InputError: the algorithm does not have this kind of output, or a custom exploration cannot be loaded.
    """
    kind = _KINDS.get(type(cfg), kinds[0])
    if kind not in kinds:
        fitting = [c().name for c, k in _KINDS.items() if k in kinds]
        what = " or ".join({"q": "Q values", "action": "an action", "distribution": "a distribution"}[k] for k in kinds)
        raise InputError(
            f"algo.exploration.name: {cfg.name} does not fit an algorithm that gives {what}: "
            f"choose one of {', '.join([*fitting, 'random', 'custom'])}"
        )
    if kind == "q" and not isinstance(action_space, Discrete | MultiDiscrete):
        raise InputError(
            f"algo.exploration: {cfg.name} over Q values needs a Discrete action space, not {action_space}"
        )
    if kind == "action" and not isinstance(action_space, Box):
        raise InputError(f"algo.exploration: {cfg.name} over actions needs a Box action space, not {action_space}")
    if isinstance(cfg, HeldNoise) and not isinstance(action_space, Box):
        raise InputError(f"algo.exploration: held_noise needs a Box action space, not {action_space}: use stochastic")
    carry: Callable[..., PyTree] = lambda batch_size, first=0, total=None: ()
    match cfg:
        case EpsilonGreedy(ladder=True):
            assert isinstance(action_space, Discrete | MultiDiscrete)
            carry = functools.partial(_ladder_positions, action_space.shape)
        case OrnsteinUhlenbeck():
            assert isinstance(action_space, Box)
            shape = action_space.shape
            carry = lambda batch_size, first=0, total=None: jnp.zeros((batch_size, *shape), jnp.float32)
        case HeldNoise():
            assert isinstance(action_space, Box)
            shape = action_space.shape
            # the noise, and the steps that it has left
            carry = lambda batch_size, first=0, total=None: (
                jnp.zeros((batch_size, *shape), jnp.float32),
                jnp.zeros((batch_size,), jnp.int32),
            )
    choose: Callable[..., Any] = functools.partial(_choose, cfg, action_space)
    if isinstance(cfg, Custom):
        own_carry, choose = _custom(cfg, action_space, kind)
        carry = lambda batch_size, first=0, total=None: own_carry(batch_size)
    random_timesteps = 0 if isinstance(cfg, Random | Members) else cfg.random_timesteps

    def draw(with_log_prob, output, key, env_steps, carry, mask=None):
        action, log_prob, carry = choose(output, key, env_steps, carry, mask)
        if with_log_prob and log_prob is None:
            log_prob = output.log_prob(action)
        if random_timesteps:  # the key may be reused, because only one of the two actions is used
            from jrl.algos import uniform

            drawn = uniform.sample(action_space, key, spaces.batch_shape(action_space, action), mask)
            early = env_steps < random_timesteps
            action = jax.tree.map(lambda new, old: jnp.where(early, new.astype(old.dtype), old), drawn, action)
            if with_log_prob and log_prob is not None:
                log_prob = jnp.where(early, uniform.log_prob(action_space, mask), log_prob)
        return (action, log_prob, carry) if with_log_prob else (action, carry)

    reads_env_steps = bool(random_timesteps) or not isinstance(cfg, Stochastic | Random | Members)
    return Explorer(carry, functools.partial(draw, False), kind, functools.partial(draw, True), reads_env_steps)


def validate(cfg: Exploration) -> list[str]:
    """Returns one message per invalid combination of values, with the fix; for the Config that contains `cfg`."""
    if isinstance(cfg, Custom) and not cfg.path:
        return ["exploration.path is missing: expected package.module:name of a function or a class"]
    return []


def by_choice(mask: Array | None, q: Array) -> Array | None:
    """Reshapes a team's mask [B, agents * A] like its Q values [B, agents, A]; unchanged for a single agent."""
    return None if mask is None else mask.reshape(q.shape)


def _choose(
    cfg: Exploration, space: Space, output: Any, key: Any, env_steps: Any, carry: PyTree, mask: Array | None
) -> tuple[PyTree, Array | None, PyTree]:
    """Returns (action, its log-probability or None for that of the policy, carry) as if `random_timesteps` were 0."""
    at = lambda schedule: schedules.value(schedule, env_steps)
    log_prob = None
    match cfg:
        case EpsilonGreedy() | ParameterNoiseQ():  # with parameter noise, the output comes from perturbed parameters
            if isinstance(cfg, ParameterNoiseQ):
                epsilon: Any = cfg.random_share
            elif cfg.ladder:  # the carry is the position on the ladder, because rows may be any environments
                epsilon = ops.epsilon_ladder(at(cfg.ladder_base), cfg.ladder_alpha, carry)
            else:
                epsilon = at(cfg.epsilon)
            action = ops.epsilon_greedy(output, key, epsilon, by_choice(mask, output))
        case SoftQ():
            action = ops.soft_q(output, key, at(cfg.temperature), by_choice(mask, output))
        case Gaussian():
            action = ops.gaussian(output, key, at(cfg.std))
        case OrnsteinUhlenbeck():
            sigma = at(cfg.sigma)
            carry = ops.ornstein_uhlenbeck(carry, key, theta=cfg.theta, sigma=sigma, dt=cfg.dt)
            action = jnp.clip(output + carry, -1.0, 1.0)
        case Stochastic():
            action = output.sample(key)
        case HeldNoise():
            noise, left = carry
            carry = noise, left = ops.held_noise(noise, left, key, exponent=cfg.exponent, longest=cfg.longest)
            action, log_prob = output.from_noise(noise)
        case Members():  # the output comes from each member's parameters
            action = output.mode()
        case Random():
            from jrl.algos import uniform

            batch = jax.tree.leaves(output)[0].shape[0]
            action = uniform.sample(space, key, (batch,), mask)
            log_prob = jnp.full((batch,), uniform.log_prob(space, mask), jnp.float32)
        case _:  # ParameterNoiseAction, whose output comes from perturbed parameters
            action = output
    return action, log_prob, carry


def _ladder_positions(shape: tuple[int, ...], batch_size: int, first: Any = 0, total: int | None = None) -> Array:
    """Returns positions [B] f32; [B, agents] for teams, whose agents are neighbours on the ladder."""
    agents = math.prod(shape)
    total = None if total is None else total * agents
    return ops.ladder_rung(batch_size * agents, first=first * agents, total=total).reshape(batch_size, *shape)


def _custom(cfg: Custom, space: Space, kind: str) -> tuple[Callable, Callable]:
    """Returns (carry, choose) of a user's function or class; see `_choose`."""
    key, inputs = f"algo.exploration.path {cfg.path}", ("output", "key", "env_steps", "carry")
    found: Any = registry.load(cfg.path, "algo.exploration.path")
    registry.check_call(found, key, () if inspect.isclass(found) else inputs, cfg.options)
    function: Any = found(**cfg.options) if inspect.isclass(found) else functools.partial(found, **cfg.options)
    if not callable(function):
        raise InputError(f"{key}: the class needs a method __call__(self, {', '.join(inputs)}) -> (action, carry)")
    registry.check_call(function, key, inputs)
    expected: Any = jax.tree.structure(element(space))

    def choose(output, key_, env_steps, carry, mask):
        output = ops.masked_q(output, by_choice(mask, output)) if kind == "q" else output
        result = function(output, key_, env_steps, carry)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            got = type(result).__name__ + (f" of {len(result)}" if isinstance(result, tuple) else "")
            raise InputError(f"{key}: it must return (action, carry) or (action, log_prob, carry), not {got}")
        action, log_prob, carry = result if len(result) == 3 else (result[0], None, result[1])
        if (found := jax.tree.structure(action)) != expected:
            raise InputError(f"{key}: the action must be an element of {space}, {expected}, not {found}")
        batch = spaces.batch_shape(space, action)
        if log_prob is not None and (shape := jnp.shape(log_prob)) != batch:
            raise InputError(f"{key}: log_prob must have the shape {batch}, one number for each action, not {shape}")
        return action, log_prob, carry

    return getattr(function, "carry", lambda batch_size: ()), choose
