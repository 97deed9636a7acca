"""How an algorithm explores, as a section of its Config: `algo.exploration: {name: epsilon_greedy, ...}`.

An algorithm says what it can feed to an exploration, its *kind*:

    q             Q values [B, A]
    action        deterministic actions [B, *] in [-1, 1]
    distribution  a distribution object of `jrl.distributions`, batched [B]

    exploration: OverQ = EpsilonGreedy()                                             # a field of its Config
    explorer = make(cfg.exploration, spec.action, kinds=("q",))                      # in its `make`
    action, carry = explorer.sample(q, key, actor.env_steps, carry)                  # in its `act`, when exploring

Without exploration an algorithm acts greedily and hands its carry on unchanged.
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jrl.hyper import Schedule
from jrl.ops import exploration as ops
from jrl.ops import schedules
from jrl.types import Array, Box, Discrete, InputError, Key, MultiDiscrete, PyTree, Space, hyperparams


@hyperparams
class EpsilonGreedy:
    """A random action with probability epsilon, else the one of the highest Q value."""

    name: Literal["epsilon_greedy"] = "epsilon_greedy"
    epsilon: Schedule = ((0, 1.0), (10_000, 0.05))  # probability of a random action
    # instead of epsilon: environment i of N (on its device) has ladder_base ** (1 + ladder_alpha i / (N - 1)), as Ape-X
    ladder: bool = False
    ladder_base: Schedule = 0.4  # epsilon of the ladder's first environment
    ladder_alpha: float = 7.0  # how far the ladder reaches down
    random_timesteps: int = 0  # environment steps at the start with uniformly random actions


@hyperparams
class SoftQ:
    """Actions with probability proportional to exp(Q / temperature)."""

    name: Literal["soft_q"] = "soft_q"
    temperature: Schedule = 1.0  # 0: greedy
    random_timesteps: int = 0  # environment steps at the start with uniformly random actions


@hyperparams
class Gaussian:
    """Independent normal noise on the action, clipped to [-1, 1]."""

    name: Literal["gaussian"] = "gaussian"
    std: Schedule = 0.1  # standard deviation, of actions in [-1, 1]
    random_timesteps: int = 0  # environment steps at the start with uniformly random actions


@hyperparams
class OrnsteinUhlenbeck:
    """Noise on the action that is correlated in time and starts at 0 with each episode; clipped to [-1, 1]."""

    name: Literal["ornstein_uhlenbeck"] = "ornstein_uhlenbeck"
    theta: float = 0.15  # pull of the noise to 0, per unit of time
    sigma: Schedule = 0.2  # standard deviation of what is added to the noise in a unit of time
    dt: float = 1.0  # time of an environment step: 1 as in DDPG's paper, 0.01 in other implementations
    random_timesteps: int = 0  # environment steps at the start with uniformly random actions


@hyperparams
class Stochastic:
    """Actions sampled from the policy's distribution."""

    name: Literal["stochastic"] = "stochastic"
    random_timesteps: int = 0  # environment steps at the start with uniformly random actions


class _Options(dict):
    """A dict that can be part of a static argument."""

    def __hash__(self):  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=repr)))


@hyperparams
class Custom:
    """A user's function `(output, key, env_steps, carry, **options) -> (action, carry)`, or a class.

    A class is called with `options`; its instance is called as `(output, key, env_steps, carry)`, and may have a method
    `carry(batch_size)` that gives the state of B environments at the start of an episode.
    """

    name: Literal["custom"] = "custom"
    path: str = ""  # where it is: package.module:name
    options: dict[str, Any] = _Options()  # keyword arguments of the function or the class
    random_timesteps: int = 0  # environment steps at the start with uniformly random actions

    def __post_init__(self):
        object.__setattr__(self, "options", _Options(self.options))


# What a Config offers to an algorithm that feeds Q values, deterministic actions, or a distribution.
OverQ = EpsilonGreedy | SoftQ | Custom
OverActions = Gaussian | OrnsteinUhlenbeck | Custom
OverDistributions = Stochastic | Custom
Exploration = EpsilonGreedy | SoftQ | Gaussian | OrnsteinUhlenbeck | Stochastic | Custom

# exploration -> the kind it needs; a custom one takes whatever comes
_KINDS: dict[type, str] = {
    EpsilonGreedy: "q",
    SoftQ: "q",
    Gaussian: "action",
    OrnsteinUhlenbeck: "action",
    Stochastic: "distribution",
}


class Explorer(NamedTuple):
    carry: Callable[[int], PyTree]  # batch_size -> its state [B, *] at the start of an episode; () if none
    # (output of `kind`, key, env_steps [] u32, carry) -> (action [B, *], carry)
    sample: Callable[[Any, Key, Array, PyTree], tuple[Array, PyTree]]
    kind: str  # what `sample` is to be fed


def make(cfg: Exploration, action_space: Space, kinds: tuple[str, ...]) -> Explorer:
    """Exploration as pure functions; floats of `cfg` may be traced.

    Args:
      cfg: one of the classes above.
      action_space: Discrete, MultiDiscrete or Box; actions of a Box lie in [-1, 1].
      kinds: what the algorithm can feed: "q", "action", "distribution"; a custom exploration gets the first.
    Returns:
      Explorer(carry, sample, kind).
    Raises:
      InputError: the algorithm cannot feed this exploration, or a custom one cannot be loaded.
    """
    kind = _KINDS.get(type(cfg), kinds[0])
    if kind not in kinds:
        fitting = [c().name for c, k in _KINDS.items() if k in kinds]
        what = " or ".join({"q": "Q values", "action": "an action", "distribution": "a distribution"}[k] for k in kinds)
        raise InputError(
            f"algo.exploration.name: {cfg.name} does not fit an algorithm that gives {what}: "
            f"choose one of {', '.join([*fitting, 'custom'])}"
        )
    if kind == "q" and not isinstance(action_space, Discrete):
        raise InputError(
            f"algo.exploration: {cfg.name} over Q values needs a Discrete action space, not {action_space}"
        )
    carry, sample = _explorer(cfg, action_space)

    def sample_after_random_actions(output, key, env_steps, carry):
        action, carry = sample(output, key, env_steps, carry)
        # the same key will do: of the two actions only one is taken
        anything = _random_action(action_space, key, action.shape).astype(action.dtype)
        return jnp.where(env_steps < cfg.random_timesteps, anything, action), carry

    return Explorer(carry, sample_after_random_actions if cfg.random_timesteps else sample, kind)


def validate(cfg: Exploration) -> list[str]:
    """What is wrong with the values, each with its mend; for the Config that holds `cfg`."""
    bounds: dict[str, tuple[float, float]] = {
        "epsilon": (0, 1), "ladder_base": (0, 1), "ladder_alpha": (0, float("inf")), "std": (0, float("inf")),
        "temperature": (0, float("inf")), "theta": (0, float("inf")), "sigma": (0, float("inf")),
        "dt": (0, float("inf")), "random_timesteps": (0, 2**32 - 1),
    }  # fmt: skip
    errors = []
    for name, (low, high) in bounds.items():
        given = getattr(cfg, name, low)
        for value in [v for _, v in given] if isinstance(given, tuple) else [given]:
            if not low <= value <= high:
                expected = f"in {low}..{high}" if high == 1 else f"at least {low}"
                errors.append(f"exploration.{name} must be {expected}, not {value}")
    if isinstance(cfg, Custom) and not cfg.path:
        errors.append("exploration.path is missing: expected package.module:name of a function or a class")
    return errors


def _explorer(cfg: Exploration, space: Space) -> tuple[Callable, Callable]:
    """(carry, sample), as if `random_timesteps` were 0."""
    stateless = lambda batch_size: ()
    match cfg:
        case EpsilonGreedy():

            def epsilon_greedy(q, key, env_steps, carry):
                if cfg.ladder:
                    base = schedules.value(cfg.ladder_base, env_steps)
                    return ops.epsilon_greedy(q, key, ops.epsilon_ladder(base, cfg.ladder_alpha, q.shape[0])), carry
                return ops.epsilon_greedy(q, key, schedules.value(cfg.epsilon, env_steps)), carry

            return stateless, epsilon_greedy
        case SoftQ():

            def soft_q(q, key, env_steps, carry):
                return ops.soft_q(q, key, schedules.value(cfg.temperature, env_steps)), carry

            return stateless, soft_q
        case Gaussian():

            def gaussian(action, key, env_steps, carry):
                return ops.gaussian(action, key, schedules.value(cfg.std, env_steps)), carry

            return stateless, gaussian
        case OrnsteinUhlenbeck():

            def ornstein_uhlenbeck(action, key, env_steps, carry):
                sigma = schedules.value(cfg.sigma, env_steps)
                noise = ops.ornstein_uhlenbeck(carry, key, theta=cfg.theta, sigma=sigma, dt=cfg.dt)
                return jnp.clip(action + noise, -1.0, 1.0), noise

            return lambda batch_size: jnp.zeros((batch_size, *space.shape), jnp.float32), ornstein_uhlenbeck
        case Stochastic():
            return stateless, lambda dist, key, env_steps, carry: (dist.sample(key), carry)
    return _custom(cfg)


def _custom(cfg: Custom) -> tuple[Callable, Callable]:
    found = _load(cfg.path)
    if not inspect.isclass(found):
        _check_call(cfg, found, 4, cfg.options)
        return lambda batch_size: (), functools.partial(found, **cfg.options)
    _check_call(cfg, found, 0, cfg.options)
    instance = found(**cfg.options)
    if not callable(instance):
        raise InputError(
            f"algo.exploration.path {cfg.path}: the class needs a method "
            "__call__(self, output, key, env_steps, carry) -> (action, carry)"
        )
    _check_call(cfg, instance, 4, {})
    return getattr(instance, "carry", lambda batch_size: ()), instance


def _check_call(cfg: Custom, function: Callable, num_inputs: int, options: Mapping[str, Any]) -> None:
    """Raises InputError unless `function` takes that many inputs and the options."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some of those written in C have none
        return
    try:
        signature.bind(*range(num_inputs), **options)
    except TypeError as e:
        inputs = ", ".join((*("output", "key", "env_steps", "carry")[:num_inputs], *options))
        raise InputError(
            f"algo.exploration.path {cfg.path}: it takes {signature} and cannot be called as ({inputs}): {e}"
        ) from e


def _load(path: str) -> Callable:
    """The function or class at "package.module:name". Raises InputError."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise InputError(
            f"algo.exploration.path: expected package.module:name, such as my_project.noise:explore, got {path!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        raise InputError(
            f"algo.exploration.path {path}: {module_name} cannot be imported ({e}): "
            "start the command where the module lies, or install it"
        ) from e
    found = getattr(module, name, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(name, names, 1)
        mend = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
        raise InputError(f"algo.exploration.path {path}: {module_name} has no function or class {name}: {mend}")
    return found


def _random_action(space: Space, key: Key, shape: tuple[int, ...]) -> Array:
    match space:
        case Discrete():
            return ops.uniform_action(key, shape, space.n)
        case MultiDiscrete():
            return ops.uniform_action(key, shape, space.nvec)
        case Box():
            return ops.uniform_action(key, shape, None)


__all__ = [
    "Custom",
    "EpsilonGreedy",
    "Explorer",
    "Gaussian",
    "OrnsteinUhlenbeck",
    "OverActions",
    "OverDistributions",
    "OverQ",
    "SoftQ",
    "Stochastic",
    "make",
    "validate",
]
