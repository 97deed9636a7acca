"""Environments played by clients: known by their spaces alone, from a config or an environment."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from jrl.envs.make import list_options
from jrl.envs.transform import build_transforms, environment_action
from jrl.errors import InputError
from jrl.fields.env import EnvConfig
from jrl.spaces import combine_agents, from_leaves, leaves, masks_actions
from jrl.types import Box, Dict, Discrete, EnvSpec, Leaf, MultiBinary, MultiDiscrete, PyTree, Space, Tuple

_KINDS = ("box", "discrete", "multi_discrete", "multi_binary", "dict", "tuple")
_MOST = 2**31 - 1


class ClientEnv:
    """B environments that clients step; an Env without its own `reset` and `step`.

    Args:
      spec: spec of the environments' own spaces.
      env: section with the options to apply.
    Attributes:
      spec: the policy's spec.
      to_env: function from the policy's actions [N, *] to the environment's; None: the same.
    """

    def __init__(self, spec: EnvSpec, env: EnvConfig):
        chain = build_transforms(spec, *list_options(env))
        self.spec = chain[-1].spec if chain else spec
        self.to_env = None if self.spec.env_action is None else functools.partial(environment_action, chain)

    def reset(self) -> NoReturn:
        raise TypeError("reset: clients step these environments")

    def step(self, action: PyTree) -> NoReturn:
        raise TypeError("step: clients step these environments")

    def close(self) -> None:
        """Does nothing."""


def to_policy_action(policy: Space, env: Space, action: PyTree) -> PyTree:
    """Returns the policy's action [*] for an environment's action: the inverse of `to_env`, clipped to its range.

    Args:
      policy, env: action spaces of the policy and of the environment.
      action: environment's action.
    """

    def inverse(own: Leaf, theirs: Leaf, x: np.ndarray) -> np.ndarray:
        if not isinstance(own, Box) or not isinstance(theirs, Box):
            return x
        (low, high), (first, last) = own.bounds(), theirs.bounds()
        bounded = np.isfinite(first) & np.isfinite(last) & np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore"):  # inf - inf of unbounded elements, which are not scaled
            scaled = low + (x - first) / (last - first) * (high - low)
        return np.clip(np.where(bounded, scaled, x), low, high).astype(own.dtype)

    parts = [leaf for _, leaf in leaves(env)]
    flat = [inverse(own, theirs, x) for (_, own), theirs, x in zip(leaves(policy), parts, jax.tree.leaves(action))]
    return from_leaves(policy, flat)


def build_spec(
    observation: Mapping[str, Any], action: Mapping[str, Any], num_envs: int, agents: Sequence[str] | None = None
) -> EnvSpec:
    """Returns the spec of spaces in a config.

    Args:
      observation, action: a space; with `agents`, optionally a dict of spaces by agent.
      num_envs: number of simultaneous episodes.
      agents: agent names; None: one agent.
    Raises:
      InputError: an invalid space, or spaces that conflict.
    """
    if agents is None:
        found = EnvSpec(
            build_space(observation, "external.observation"),
            build_space(action, "external.action", acts=True),
            num_envs,
        )
        masks_actions(found)
        return found
    seen = _build_spaces(observation, "external.observation", agents, acts=False)
    taken = _build_spaces(action, "external.action", agents, acts=True)
    both = list(zip(seen, taken, strict=True))
    for one in dict.fromkeys(both):
        masks_actions(EnvSpec(*one, num_envs))
    of_all, acts, kinds = combine_agents(both)
    return EnvSpec(of_all, acts, num_envs * len(agents), agents=tuple(agents), kinds=kinds)


def _build_spaces(given: Mapping[str, Any], key: str, agents: Sequence[str], *, acts: bool) -> list[Space]:
    if isinstance(given, Mapping) and not set(given) & set(_KINDS):
        if lost := [name for name in agents if name not in given]:
            raise InputError(f"{key}: the space of {lost[0]} is missing: add one for each of {', '.join(agents)}")
        if more := [name for name in given if name not in agents]:
            raise InputError(f"{key}.{more[0]}: not an agent of external.agents: name one of {', '.join(agents)}")
        return [build_space(given[name], f"{key}.{name}", acts=acts) for name in agents]
    return [build_space(given, key, acts=acts)] * len(agents)


def build_space(given: Any, key: str, *, acts: bool = False) -> Space:
    """Returns the space that a config writes as {kind: size}.

    >>> build_space({"box": [4]}, "external.observation")
    Box(shape=(4,), dtype='float32', low=-inf, high=inf)
    >>> build_space({"dict": {"a": {"discrete": 3}, "b": {"box": [], "low": 0}}}, "external.observation")
    Dict(items=(('a', Discrete(n=3, dtype='int32')), ('b', Box(shape=(), dtype='float32', low=0.0, high=inf))))

    Args:
      given: plain data.
      key: config key, for errors.
      acts: whether the space is for actions, whose Boxes are float32.
    Raises:
      InputError: not a space.
    """
    kinds = [name for name in _KINDS if isinstance(given, Mapping) and name in given]
    if len(kinds) != 1:
        raise InputError(f"{key}: expected one of {', '.join(_KINDS)} with its size, such as {{box: [4]}}, got {given}")
    kind, size = kinds[0], given[kinds[0]]
    options = {name: value for name, value in given.items() if name != kind}
    known = {"box": ("low", "high") if acts else ("low", "high", "dtype")}.get(kind, ())
    if unknown := [name for name in options if name not in known]:
        fix = f"use {', '.join(known)}" if known else "write its size only"
        raise InputError(f"{key}.{unknown[0]}: {kind} has no such entry: {fix}")
    if kind == "dict":
        if not isinstance(size, Mapping) or not size:
            raise InputError(f"{key}.dict: expected names with a space each, such as {{position: {{box: [2]}}}}")
        return Dict(
            tuple((str(name), build_space(part, f"{key}.dict.{name}", acts=acts)) for name, part in size.items())
        )
    if kind == "tuple":
        if not isinstance(size, list | tuple) or not size:
            raise InputError(f"{key}.tuple: expected a list of spaces, such as [{{box: [2]}}, {{discrete: 3}}]")
        return Tuple(tuple(build_space(part, f"{key}.tuple.{i}", acts=acts) for i, part in enumerate(size)))
    if kind == "discrete":
        return Discrete(_check_integer(size, f"{key}.discrete"))
    sizes = _check_sizes(size, f"{key}.{kind}")
    if kind == "multi_discrete":
        return MultiDiscrete(sizes)
    return MultiBinary(sizes) if kind == "multi_binary" else _build_box(sizes, options, key)


def _build_box(shape: tuple[int, ...], options: Mapping[str, Any], key: str) -> Box:
    name = options.get("dtype", "float32")
    if name not in ("float32", "uint8", "int8", "int16", "int32", "bool"):
        raise InputError(f"{key}.dtype: expected float32, uint8, int8, int16, int32 or bool, got {name}")
    kind = np.dtype(name).kind
    least, most = {"f": (-math.inf, math.inf), "b": (0.0, 1.0)}.get(kind) or _dtype_range(name)
    low = _check_bound(options.get("low", least), shape, f"{key}.low")
    high = _check_bound(options.get("high", most), shape, f"{key}.high")
    box = Box(shape, name, low, high)
    below, above = box.bounds()
    if not (below < above).all():
        raise InputError(f"{key}: expected low < high, got low {low} and high {high}")
    return box


def _dtype_range(dtype: str) -> tuple[float, float]:
    found = np.iinfo(dtype)
    return float(found.min), float(found.max)


def _check_bound(given: Any, shape: tuple[int, ...], key: str) -> float | tuple[float, ...]:
    try:
        found = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        found = np.full((), math.nan)
    if np.isnan(found).any() or found.shape not in ((), shape):
        raise InputError(f"{key}: expected a number, or a list of numbers of shape {list(shape)}, got {given}")
    return float(found) if found.ndim == 0 else tuple(found.reshape(-1).tolist())


def _check_integer(given: Any, key: str) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= _MOST:
        raise InputError(f"{key}: expected a whole number of 1 or more, got {given}")
    return given


def _check_sizes(given: Any, key: str) -> tuple[int, ...]:
    if not isinstance(given, list | tuple):
        raise InputError(f"{key}: expected a list of sizes, such as [4], got {given}")
    found = tuple(_check_integer(n, f"{key}.{i}") for i, n in enumerate(given))
    if math.prod(found) > _MOST:
        raise InputError(f"{key}: {math.prod(found):,} elements are more than any machine holds: lower one of {given}")
    return found
