"""Conversion of RLlib's `exploration_config` to `algo.exploration`. Imports no jax: configs are read before jax."""

import difflib
from collections.abc import Mapping
from typing import Any

from jrl import registry
from jrl.errors import InputError, short

_KEY = "exploration_config"
_EPSILON = {
    "initial_epsilon": 1.0, "final_epsilon": 0.02, "epsilon_timesteps": 10_000, "warmup_timesteps": 0,
    "epsilon_schedule": None,
}  # fmt: skip
_SCALE = {"initial_scale": 1.0, "final_scale": 0.02, "scale_timesteps": 10_000, "scale_schedule": None}
# type -> its options and their defaults
_OPTIONS: dict[str, dict[str, Any]] = {
    "EpsilonGreedy": _EPSILON,
    "PerWorkerEpsilonGreedy": _EPSILON,
    "SoftQ": {"temperature": 1.0},
    "StochasticSampling": {"random_timesteps": 0},
    "GaussianNoise": {"random_timesteps": 1_000, "stddev": 0.1, **_SCALE},
    "OrnsteinUhlenbeckNoise": {
        "random_timesteps": 1_000, "ou_theta": 0.15, "ou_sigma": 0.2, "ou_base_scale": 0.1, **_SCALE,
    },
    "ParameterNoise": {"initial_stddev": 1.0, "random_timesteps": 10_000, "sub_exploration": None},
    "Random": {},
}  # fmt: skip
# type -> name of the section `algo.curiosity`, and its options by name in this section, with RLlib's defaults
_CURIOSITY: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "Curiosity": (
        "icm",
        {
            "eta": ("coef", 1.0), "lr": ("lr", 1e-3), "feature_dim": ("features", 288), "beta": ("forward_share", 0.2),
            "forward_net_hiddens": ("hidden", [256]),
        },
    ),
    "RND": (
        "rnd", {"intrinsic_reward_coeff": ("coef", 5e-3), "lr": ("lr", 1e-3), "embed_dim": ("features", 128)}
    ),
}  # fmt: skip
# algorithm -> defaults that differ, with the type of options without a type
_ALGORITHM_DEFAULTS: dict[str, dict[str, Any]] = {
    **{name: {"type": "EpsilonGreedy"} for name in ("dqn", "simpleq", "r2d2")},
    "apex": {"type": "PerWorkerEpsilonGreedy"},
    "ddpg": {"type": "OrnsteinUhlenbeckNoise"},
    "td3": {"type": "GaussianNoise", "random_timesteps": 10_000, "final_scale": 1.0, "scale_timesteps": 1},
}
_FROM_RLLIB = ("ray.rllib.", "rllib.")


def from_rllib(config: Mapping[str, Any], algo: str | None = None) -> dict[str, Any]:
    """Returns the section `algo.exploration` of RLlib's `exploration_config`.

    Missing options have RLlib's defaults. A user's class becomes `custom`, with all options; `jrl.algos.exploration`
    documents its call. `PerWorkerEpsilonGreedy` keeps only its ladder: with workers, RLlib ignores its schedule, too.

    Args:
      config: `type` (a name, a path, or a class) and its options.
      algo: algorithm of the defaults and of the default type; None: RLlib's general defaults.
    Raises:
      InputError: unknown type or option, or a value of another kind.
    """
    if not isinstance(config, Mapping):
        raise InputError(f"{_KEY}: expected a mapping such as {{type: EpsilonGreedy}}, got {short(config)}")
    own = _ALGORITHM_DEFAULTS.get((algo or "").lower(), {"type": "StochasticSampling"})
    given = dict(config)
    kind, path = _find_type(given.pop("type", own["type"]))
    if kind is None:
        return {"name": "custom", "path": path, "options": given}
    for name in given:
        if name not in _OPTIONS[kind]:
            near = difflib.get_close_matches(name, _OPTIONS[kind], 1)
            fix = f"did you mean {near[0]}?" if near else f"{kind} has {', '.join(_OPTIONS[kind]) or 'no options'}"
            raise InputError(f"{_KEY}: {kind} has no option {name}: {fix}")
    defaults = {k: v for k, v in own.items() if k != "type"} if own["type"] == kind else {}
    options = {**_OPTIONS[kind], **defaults, **given}
    for name, value in options.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in ("epsilon_schedule", "scale_schedule", "sub_exploration") and not is_number:
            raise InputError(f"{_KEY}: {name} of {kind}: expected a number, got {short(value)}")
    steps = options.get("random_timesteps")
    return _convert(kind, options) | ({"random_timesteps": int(steps)} if steps else {})


def curiosity_from_rllib(config: Any) -> dict[str, Any] | None:
    """Returns the section `algo.curiosity` of RLlib's `exploration_config`, with RLlib's defaults; None: another type.

    Options without an equal here are left out: activations, and networks of their own for each part.
    """
    kind = _rllib_name(config.get("type")) if isinstance(config, Mapping) else None
    if kind not in _CURIOSITY:
        return None
    name, options = _CURIOSITY[kind]
    return {"name": name} | {own: config.get(theirs, default) for theirs, (own, default) in options.items()}


def is_curiosity_option(config: Mapping[str, Any], name: str) -> bool:
    """Returns whether an option of a `curiosity_from_rllib` config is a key of `algo.curiosity`."""
    return name in _CURIOSITY[_rllib_name(config["type"])][1]


def _rllib_name(given: Any) -> str:
    """Returns the class name of a type of RLlib, given by name, by full path or as a class; "" for a user's type."""
    path = f"{given.__module__}.{given.__name__}" if isinstance(given, type) else str(given)
    last = path.replace(":", ".").rpartition(".")[2]
    return last if path == last or path.startswith(_FROM_RLLIB) else ""


def _convert(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    match kind:
        case "EpsilonGreedy":
            return {"name": "epsilon_greedy", "epsilon": _build_schedule(options, "epsilon")}
        case "PerWorkerEpsilonGreedy":
            return {"name": "epsilon_greedy", "ladder": True}
        case "SoftQ":
            return {"name": "soft_q", "temperature": options["temperature"]}
        case "GaussianNoise":
            return {"name": "gaussian", "std": _build_schedule(options, "scale", options["stddev"])}
        case "OrnsteinUhlenbeckNoise":
            # RLlib multiplies the noise by a base scale and by the width of the action space, 2 for [-1, 1]; sigma
            # includes both factors, because the noise is linear in sigma
            sigma = _build_schedule(options, "scale", 2.0 * options["ou_base_scale"] * options["ou_sigma"])
            return {"name": "ornstein_uhlenbeck", "theta": options["ou_theta"], "sigma": sigma}
        case "ParameterNoise":
            target = _convert_target(options["sub_exploration"])
            return {"name": "parameter_noise", "std": options["initial_stddev"], **target}
        case _:
            return {"name": {"StochasticSampling": "stochastic", "Random": "random"}[kind]}


def _convert_target(exploration: Any) -> dict[str, Any]:
    """Returns the target of parameter noise, which RLlib derives from another exploration, `sub_exploration`."""
    if exploration is None:
        return {}
    converted = from_rllib(exploration)
    match converted["name"]:
        case "epsilon_greedy" if "epsilon" in converted:
            return {"epsilon": converted["epsilon"]}
        case "ornstein_uhlenbeck":
            return {"target_std": exploration.get("ou_sigma", _OPTIONS["OrnsteinUhlenbeckNoise"]["ou_sigma"])}
        case "gaussian":
            return {"target_std": exploration.get("stddev", _OPTIONS["GaussianNoise"]["stddev"])}
    raise InputError(
        f"{_KEY}: sub_exploration: expected EpsilonGreedy, OrnsteinUhlenbeckNoise or GaussianNoise, which limit the "
        f"parameter noise, got {short(exploration.get('type'))}"
    )


def _find_type(given: Any) -> tuple[str | None, str]:
    """Returns (type of _OPTIONS, "") or (None, name of the user's class or function)."""
    path = given
    if callable(given):
        module = getattr(given, "__module__", "")
        path = f"{module}.{given.__name__}" if f"{module}.".startswith(_FROM_RLLIB) else registry.reference(given)
    if not isinstance(path, str) or not path:
        raise InputError(
            f"{_KEY}.type: expected a name such as EpsilonGreedy, or the path of a class, got {short(given)}"
        )
    last = path.replace(":", ".").rpartition(".")[2]
    is_rllib = path == last or path.startswith(_FROM_RLLIB)
    if is_rllib and last in _OPTIONS:
        return last, ""
    if not is_rllib or registry.registered(path) is not None:
        return None, path
    if last in _CURIOSITY:
        raise InputError(
            f"{_KEY}.type: {last} is algo.curiosity of ppo and a2c: set curiosity={{'name': '{_CURIOSITY[last][0]}'}} "
            "in training(), or algo.curiosity.name in a file"
        )
    near = difflib.get_close_matches(last, _OPTIONS, 1)
    fix = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(_OPTIONS)}, or the path of a class"
    raise InputError(f"{_KEY}.type: unknown exploration {last}: {fix}")


def _build_schedule(options: Mapping[str, Any], name: str, times: float = 1.0) -> Any:
    """Returns the schedule of an option times a factor: its points, or a line from the first value to the last."""
    points = options[f"{name}_schedule"]
    if points is None:
        first, last = (times * options[f"{which}_{name}"] for which in ("initial", "final"))
        steps, warmup = options[f"{name}_timesteps"], options.get("warmup_timesteps", 0)
        if first == last or (steps <= 0 and warmup <= 0):
            return last
        constant = [[int(warmup), first]] if warmup > 0 else []
        return [[0, first], *constant, [int(warmup + max(steps, 1)), last]]
    pairs = isinstance(points, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in points)
    if not pairs or not all(isinstance(x, int | float) for p in points for x in p):
        raise InputError(f"{_KEY}: {name}_schedule: expected [[timestep, value], ...], got {short(points)}")
    return [[int(step), times * value] for step, value in points]
