"""Preparation of observations for networks: the user's transform, then normalisation.

Rollouts and replay store raw observations; acting and learning read them through `see`. Samples from replay are
normalised with the present statistics. Rollouts are read as the acting network read them (`recall`), however old the
actor was. The statistics at that time are part of the acting policy; with other statistics the importance weights would
be wrong. Observations from before the first statistics use the statistics of the first rollout.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import registry, spaces
from jrl.networks import NetworkConfig, is_image
from jrl.ops import normalize
from jrl.types import (
    NORMALIZED_OBS,
    Array,
    Box,
    Dict,
    EnvSpec,
    InputError,
    Leaf,
    PyTree,
    Rollout,
    Space,
    Tuple,
    Window,
    element,
)


class Observer(NamedTuple):
    """Reads observations as the networks do; statistics are a normalize.RunningStats, or () without normalisation."""

    spec: EnvSpec  # environment's spec with the observation space of the networks
    given: Space  # observation space of the environment
    transform: Callable[[PyTree], PyTree] | None  # user's function
    read: Space  # space of the transform's result
    masks: bool  # whether there is an action mask
    arrays: tuple[tuple[str, Leaf], ...]  # (path, leaf) of the networks' space without the mask
    floats: tuple[int, ...]  # indices of the normalised arrays
    axis_name: str | None  # mapped axis over devices

    @property
    def _is_single(self) -> bool:
        """Returns whether the statistics are a single array instead of a dict."""
        return len(self.arrays) == 1 and not isinstance(self.spec.observation, Dict | Tuple)

    def init(self) -> PyTree:
        """Returns the initial statistics."""
        if not self.floats:
            return ()
        shapes = {self.arrays[i][0]: self.arrays[i][1].shape for i in self.floats}
        return normalize.init(self.arrays[0][1].shape if self._is_single else shapes)

    def see(self, stats: PyTree, obs: PyTree) -> PyTree:
        """Returns observations [..., *] as networks read them."""
        obs = self._transformed(obs)
        return self._put(obs, normalize.normalize(stats, self._picked(obs))) if self.floats else obs

    def observe(self, stats: PyTree, obs: PyTree, mask: Array) -> PyTree:
        """Returns statistics with the unmasked rows of observations [T, B, *]."""
        if not self.floats:
            return stats
        found = self._picked(self._transformed(obs))
        return normalize.update(stats, found, mask.astype(jnp.float32), axis_name=self.axis_name)

    def mask(self, obs: PyTree) -> Array | None:
        """Returns the allowed actions [..., K] in a network input or a Window; None without masks."""
        if not self.masks:
            return None
        return spaces.split_mask(self.spec.observation, obs.obs if isinstance(obs, Window) else obs)[1]

    def record(self, stats: PyTree, seen: PyTree) -> dict[str, PyTree]:
        """Returns extras of acting on a network input [B, *] for `recall`; {} without normalisation."""
        if not self.floats:
            return {}
        found = self._picked(seen)
        x, mean = jax.tree.leaves(found)[0], jax.tree.leaves(stats.mean)[0]
        valid = jnp.broadcast_to(stats.count > 0, x.shape[: x.ndim - mean.ndim])
        return {NORMALIZED_OBS: {"obs": found, "valid": valid}}

    def recall(self, stats: PyTree, rollout: Rollout) -> PyTree:
        """Returns a rollout's observations [T, B, *] as the acting network read them."""
        obs = self.see(stats, rollout.obs)
        if not self.floats or NORMALIZED_OBS not in rollout.extras:
            return obs
        found = rollout.extras[NORMALIZED_OBS]
        valid = found["valid"] & rollout.mask  # a masked row may hold another observation by now: an episode's last
        pick = lambda old, new: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, new.ndim))), old, new)
        return self._put(obs, jax.tree.map(pick, found["obs"], self._picked(obs)))

    def _transformed(self, obs: PyTree) -> PyTree:
        """Applies the user's transform to observations [..., *]."""
        fn = self.transform
        if fn is None:
            return obs
        x, mask = spaces.split_mask(self.given, obs)
        for _ in spaces.batch_shape(spaces.without_mask(self.given), x):
            fn = jax.vmap(fn)
        x = spaces.from_leaves(self.read, jax.tree.leaves(fn(x)))  # lists become the tuples of the space
        return x if mask is None else {spaces.ACTION_MASK: obs[spaces.ACTION_MASK], "obs": x}

    def _picked(self, obs: PyTree) -> PyTree:
        """Returns the normalised arrays of transformed observations, in the structure of the statistics."""
        if self._is_single:
            return obs
        leaves = jax.tree.leaves(spaces.split_mask(self.spec.observation, obs)[0])
        return {self.arrays[i][0]: leaves[i] for i in self.floats}

    def _put(self, obs: PyTree, found: PyTree) -> PyTree:
        """Replaces the normalised arrays of `obs` by `found`."""
        if self._is_single:
            return found
        x, mask = spaces.split_mask(self.spec.observation, obs)
        leaves = jax.tree.leaves(x)
        for i in self.floats:
            leaves[i] = found[self.arrays[i][0]]
        x = jax.tree.unflatten(jax.tree.structure(x), leaves)
        if mask is None:
            return x
        assert isinstance(self.spec.observation, Dict)
        names = [name for name, _ in self.spec.observation.items if name != spaces.ACTION_MASK]
        return {**({names[0]: x} if len(names) == 1 else x), spaces.ACTION_MASK: obs[spaces.ACTION_MASK]}


def make(
    spec: EnvSpec,
    network: NetworkConfig,
    *,
    normalize_obs: bool,
    normalize_images: bool = False,
    axis_name: str | None,
) -> Observer:
    """Returns the observer of an environment and network.

    Args:
      spec: environment's spaces.
      network: `transform` is applied first, to one observation without its action mask.
      normalize_obs: whether to scale each float array to mean 0 and deviation 1 by running statistics (RLlib's
        MeanStdFilter). Images, integers and action masks are unchanged.
      normalize_images: whether to scale each pixel of images as well; they become float32.
      axis_name: mapped axis over devices, whose rows count together; None: no such axis.
    Raises:
      InputError: the transform cannot be loaded or applied, or an action mask does not fit the action space.
    """
    masks, space = spaces.masks_actions(spec), spec.observation
    transform, read = _transform(spec, network)
    if transform is not None:
        space = Dict(((spaces.ACTION_MASK, space[spaces.ACTION_MASK]), ("obs", read))) if masks else read  # type: ignore[index]  # masks are parts of a Dict
    if normalize_images:
        as_float = lambda leaf: Box(leaf.shape) if is_image(leaf) else leaf
        space = spaces.replace_leaves(space, (as_float(leaf) for _, leaf in spaces.leaves(space)))
    arrays = tuple(spaces.leaves(spaces.without_mask(space)))
    is_normalised = lambda leaf: _is_normalised(leaf) or (normalize_images and is_image(leaf))
    floats = tuple(i for i, (_, leaf) in enumerate(arrays) if normalize_obs and is_normalised(leaf))
    own_spec = spec._replace(observation=space)
    return Observer(own_spec, spec.observation, transform, read, masks, arrays, floats, axis_name)


def with_first_stats(observer: Observer, state: Any, rollout: Rollout) -> Any:
    """Returns the State with `obs_stats` to read a rollout; the first rollout uses its own statistics."""
    if not isinstance(state.obs_stats, normalize.RunningStats):
        return state
    own, known = observer.observe(state.obs_stats, rollout.obs, rollout.mask), state.obs_stats.count > 0
    # no branch: `observe` has collectives, and on several CPU devices a program with collectives in a branch crashed
    # when it was loaded from the compile cache (jaxlib 0.10.2)
    return replace(state, obs_stats=jax.tree.map(lambda then, now: jnp.where(known, then, now), state.obs_stats, own))


def values_seen(rollout: Rollout, recorded: Array, compute: Callable[[], Array]) -> Array:
    """Returns the recorded values, or `compute()` if some of their observations were not normalised."""
    if NORMALIZED_OBS not in rollout.extras:
        return recorded
    unseen = rollout.mask & ~rollout.extras[NORMALIZED_OBS]["valid"]
    return jax.lax.cond(unseen.any(), compute, lambda: recorded)


def _is_normalised(leaf: Leaf) -> bool:
    """Returns whether to normalise an array: the network itself encodes integers and scales images."""
    return isinstance(leaf, Box) and leaf.dtype != "uint8" and not is_image(leaf)


def _transform(spec: EnvSpec, network: NetworkConfig) -> tuple[Callable[[PyTree], PyTree] | None, Space]:
    """Returns the user's function of one observation, and the space of what it returns."""
    given = spaces.without_mask(spec.observation)
    if network.transform is None:
        return None, given
    function: Any = registry.load(network.transform, "network.transform")
    try:
        out = jax.eval_shape(function, element(given))
    except Exception as e:  # user code, or any error of jax for code that cannot be traced
        raise InputError(
            f"network.transform {network.transform}: it cannot be traced for an observation {given}: "
            f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        ) from e
    return function, _space_of(out, network.transform)


def _space_of(tree: PyTree, path: str) -> Space:
    if isinstance(tree, dict) and all(isinstance(name, str) for name in tree):
        return Dict(tuple((name, _space_of(x, path)) for name, x in tree.items()))
    if isinstance(tree, tuple | list):
        return Tuple(tuple(_space_of(x, path) for x in tree))
    if not isinstance(tree, jax.ShapeDtypeStruct):
        raise InputError(f"network.transform {path}: expected an array, or a dict or tuple of arrays, got {tree!r}")
    return Box(tuple(tree.shape), str(np.dtype(tree.dtype)))
