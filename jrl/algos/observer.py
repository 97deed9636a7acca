"""Preparation of observations for networks: the user's transform, then normalisation.

Rollouts and replay store raw observations; acting and learning read them through `see`. Samples from replay are
normalised with the present statistics. Rollouts are read as the acting network read them (`recall`), however old the
actor was. The statistics at that time are part of the acting policy; with other statistics the importance weights would
be wrong. Observations from before the first statistics use the statistics of the first rollout.
"""

import functools
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
    spec: EnvSpec  # environment's spec with the observation space of the networks
    init: Callable[[], PyTree]  # -> statistics: normalize.RunningStats, or () without normalisation
    see: Callable[[PyTree, PyTree], PyTree]  # (statistics, obs [..., *]) -> obs as networks read it
    # (statistics, obs [T, B, *], mask [T, B]) -> statistics with the unmasked rows
    observe: Callable[[PyTree, PyTree, Array], PyTree]
    mask: Callable[[PyTree], Array | None]  # network input, also a Window -> allowed actions [..., K], or None
    # (statistics, network input [B, *]) -> extras of acting for `recall`; {} without normalisation
    record: Callable[[PyTree, PyTree], dict[str, PyTree]]
    recall: Callable[[PyTree, Rollout], PyTree]  # (statistics, rollout) -> obs [T, B, *] as networks read it


def make(spec: EnvSpec, network: NetworkConfig, *, normalize_obs: bool, axis_name: str | None) -> Observer:
    """Returns the observer of an environment and network.

    Args:
      spec: environment's spaces.
      network: `transform` is applied first, to one observation without its action mask.
      normalize_obs: whether to scale each float array to mean 0 and deviation 1 by running statistics (RLlib's
        MeanStdFilter). Images, integers and action masks are unchanged.
      axis_name: mapped axis over devices, whose rows count together; None: no such axis.
    Raises:
      InputError: the transform cannot be loaded or applied, or an action mask does not fit the action space.
    """
    masks = spaces.masks_actions(spec)
    transform, read = _transform(spec, network)
    space = spec.observation if transform is None else _with_mask(spec.observation, read, masks)
    arrays = tuple(spaces.leaves(spaces.without_mask(space)))
    facts = _Facts(
        given=spec.observation,
        transform=transform,
        read=read,
        space=space,
        masks=masks,
        arrays=arrays,
        floats=tuple(i for i, (_, leaf) in enumerate(arrays) if normalize_obs and _is_normalised(leaf)),
        axis_name=axis_name,
    )
    of_facts = lambda function: functools.partial(function, facts)
    return Observer(
        spec=spec._replace(observation=space),
        init=of_facts(_init),
        see=of_facts(_see),
        observe=of_facts(_observe),
        mask=of_facts(_mask),
        record=of_facts(_record),
        recall=of_facts(_recall),
    )


class _Facts(NamedTuple):
    """Static facts about observations."""

    given: Space  # space of the environment
    transform: Callable[[PyTree], PyTree] | None
    read: Space  # space of the transform's result
    space: Space  # space of the network input
    masks: bool  # whether there is an action mask
    arrays: tuple[tuple[str, Leaf], ...]  # (path, leaf) of `space` without the mask
    floats: tuple[int, ...]  # indices of the normalised arrays
    axis_name: str | None

    @property
    def whole(self) -> bool:
        """Returns whether the statistics are a single array instead of a dict."""
        return len(self.arrays) == 1 and not isinstance(self.space, Dict | Tuple)


def _init(facts: _Facts) -> PyTree:
    if not facts.floats:
        return ()
    shapes = {facts.arrays[i][0]: facts.arrays[i][1].shape for i in facts.floats}
    return normalize.init(facts.arrays[0][1].shape if facts.whole else shapes)


def _see(facts: _Facts, stats: PyTree, obs: PyTree) -> PyTree:
    obs = _transformed(facts, obs)
    return _put(facts, obs, normalize.normalize(stats, _picked(facts, obs))) if facts.floats else obs


def _observe(facts: _Facts, stats: PyTree, obs: PyTree, mask: Array) -> PyTree:
    if not facts.floats:
        return stats
    found = _picked(facts, _transformed(facts, obs))
    return normalize.update(stats, found, mask.astype(jnp.float32), axis_name=facts.axis_name)


def _mask(facts: _Facts, obs: PyTree) -> Array | None:
    return spaces.split_mask(facts.space, obs.obs if isinstance(obs, Window) else obs)[1] if facts.masks else None


def _record(facts: _Facts, stats: PyTree, seen: PyTree) -> dict[str, PyTree]:
    if not facts.floats:
        return {}
    found = _picked(facts, seen)
    x, mean = jax.tree.leaves(found)[0], jax.tree.leaves(stats.mean)[0]
    return {NORMALIZED_OBS: {"obs": found, "valid": jnp.broadcast_to(stats.count > 0, x.shape[: x.ndim - mean.ndim])}}


def _recall(facts: _Facts, stats: PyTree, rollout: Rollout) -> PyTree:
    obs = _see(facts, stats, rollout.obs)
    if not facts.floats or NORMALIZED_OBS not in rollout.extras:
        return obs
    found = rollout.extras[NORMALIZED_OBS]
    valid = found["valid"] & rollout.mask  # a masked row may hold another observation by now: an episode's last
    pick = lambda old, new: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, new.ndim))), old, new)
    return _put(facts, obs, jax.tree.map(pick, found["obs"], _picked(facts, obs)))


def _transformed(facts: _Facts, obs: PyTree) -> PyTree:
    """Applies the user's transform to observations [..., *]."""
    fn = facts.transform
    if fn is None:
        return obs
    x, mask = spaces.split_mask(facts.given, obs)
    for _ in spaces.batch_shape(spaces.without_mask(facts.given), x):
        fn = jax.vmap(fn)
    x = _cast(fn(x), facts.read)
    return x if mask is None else {spaces.ACTION_MASK: obs[spaces.ACTION_MASK], "obs": x}


def _picked(facts: _Facts, obs: PyTree) -> PyTree:
    """Returns the normalised arrays of transformed observations, in the structure of the statistics."""
    if facts.whole:
        return obs
    leaves = jax.tree.leaves(spaces.split_mask(facts.space, obs)[0])
    return {facts.arrays[i][0]: leaves[i] for i in facts.floats}


def _put(facts: _Facts, obs: PyTree, found: PyTree) -> PyTree:
    """Replaces the normalised arrays of `obs` by `found`."""
    if facts.whole:
        return found
    x, mask = spaces.split_mask(facts.space, obs)
    leaves = jax.tree.leaves(x)
    for i in facts.floats:
        leaves[i] = found[facts.arrays[i][0]]
    x = jax.tree.unflatten(jax.tree.structure(x), leaves)
    return x if mask is None else _join(facts.space, x, obs[spaces.ACTION_MASK])


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


def _with_mask(space: Space, read: Space, masks: bool) -> Space:
    if not masks:
        return read
    assert isinstance(space, Dict)
    return Dict(((spaces.ACTION_MASK, space[spaces.ACTION_MASK]), ("obs", read)))


def _join(space: Space, x: PyTree, mask: Array) -> PyTree:
    """Joins observation and mask: the inverse of `spaces.split_mask`."""
    assert isinstance(space, Dict)
    names = [name for name, _ in space.items if name != spaces.ACTION_MASK]
    return {**({names[0]: x} if len(names) == 1 else x), spaces.ACTION_MASK: mask}


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


def _cast(x: PyTree, space: Space) -> PyTree:
    """Converts lists to the tuples of the space."""
    return spaces.from_leaves(space, jax.tree.leaves(x))


__all__ = ["Observer", "make", "values_seen", "with_first_stats"]
