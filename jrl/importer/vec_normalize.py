"""Running statistics of Stable-Baselines3's VecNormalize, from the pickle that `VecNormalize.save` writes.

A pickle is a program that calls functions by name. This reader replaces the objects of Stable-Baselines3 and Gymnasium
by stand-ins that only keep their attributes, and reads arrays as `jrl.data.formats.packed_arrays` does. It refuses all
other names, so the pickle cannot execute anything.
"""

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.data.formats.packed_arrays import Numbers, NumbersUnpickler
from jrl.errors import InputError, shown
from jrl.importer.torch_file import DAMAGE, Function

_KEPT = ("stable_baselines3.", "gymnasium.", "gym.", "numpy.random.")  # prefixes of objects that are not needed
_MOST_BYTES = 2**26
_FIX = "give the file that VecNormalize.save wrote, or leave --vec-normalize out"


class Moments(NamedTuple):
    """Mean and variance of samples [*], with their number."""

    mean: np.ndarray  # [*] f64
    var: np.ndarray  # [*] f64
    num: float  # samples


class Statistics(NamedTuple):
    """Statistics that VecNormalize applies to observations and rewards."""

    obs: Moments | None  # None: observations are not normalised
    returns: Moments | None  # discounted returns; None: rewards are not normalised
    clip_reward: float


class _Object:
    """Stand-in for an object of Stable-Baselines3 or Gymnasium: keeps its attributes, which are never called."""

    def __init__(self, *args: Any):
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.attributes = state


class _VecNormalize(_Object):
    pass


class _RunningMeanStd(_Object):
    pass


class _Unpickler(NumbersUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "stable_baselines3.common.vec_env.vec_normalize", "VecNormalize":
                return _VecNormalize
            case "stable_baselines3.common.running_mean_std", "RunningMeanStd":
                return _RunningMeanStd
            case "numpy.random._pickle", _:
                return Function(_Object)
        return type("_Other", (_Object,), {}) if module.startswith(_KEPT) else super().find_class(module, name)


def read(path: Path) -> Statistics:
    """Returns the statistics of a file of VecNormalize.

    Raises:
      InputError: the file is damaged, contains anything else, or has options that jrl does not have.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has over {_MOST_BYTES:,} bytes")
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(found, _VecNormalize):
            raise ValueError("it is another object")
        return _statistics(found.attributes)
    except InputError:
        raise
    except DAMAGE as e:
        why = shown(str(e).splitlines()[0] if str(e) else type(e).__name__, 200)
        raise InputError(f"--vec-normalize: {path} is not a file of VecNormalize ({why}): {_FIX}") from e


def _statistics(attributes: dict[str, Any]) -> Statistics:
    obs, returns = (
        _moments(attributes[f"{key}_rms"]) if attributes[f"norm_{name}"] else None
        for key, name in (("obs", "obs"), ("ret", "reward"))
    )
    for name, expected in (("clip_obs", 10.0), ("epsilon", 1e-8)):
        if (obs or returns) and (name == "epsilon" or obs) and float(attributes[name]) != expected:
            raise InputError(
                f"--vec-normalize: expected {name}={expected:g}, which jrl has, got {float(attributes[name]):g}: train "
                f"with VecNormalize(..., {name}={expected:g})"
            )
    return Statistics(obs, returns, float(attributes["clip_reward"]))


def _moments(found: Any) -> Moments:
    if not isinstance(found, _RunningMeanStd):
        raise InputError(
            "--vec-normalize: expected statistics of one array, got several of a Dict observation: normalise a single "
            "array, such as after gymnasium's FlattenObservation"
        )
    number = lambda x: np.asarray(x.value if isinstance(x, Numbers) else x, np.float64)
    mean, var, count = (number(found.attributes[name]) for name in ("mean", "var", "count"))
    if mean.shape != var.shape or count.shape != () or not (np.isfinite(mean).all() and (var >= 0).all()):
        raise ValueError("its mean and variance do not fit each other")
    return Moments(mean, var, float(count))
