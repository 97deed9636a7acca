"""Preparation of observations, before networks read them: the user's transform, then statistics.

Rollouts and replay hold observations as they came, and what acts and what learns looks at them through `see`. Of a
sample from replay learning sees what the statistics of today make of it. Of a rollout it sees what acting saw
(`recall`), however old the actor was: the statistics of then are part of the policy that acted, and with others the
importance weights would tell of their change. Only what was acted on before there were any statistics is seen by those
of the first rollout.
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
    spec: EnvSpec  # the environment's, but for the observation, which is what networks read
    init: Callable[[], PyTree]  # -> statistics: normalize.RunningStats, or () where nothing is normalised
    see: Callable[[PyTree, PyTree], PyTree]  # (statistics, obs [..., *]) -> obs as networks read it
    # (statistics, obs [T, B, *], mask [T, B]) -> statistics with the unmasked rows
    observe: Callable[[PyTree, PyTree, Array], PyTree]
    mask: Callable[[PyTree], Array | None]  # of what networks read, also a Window: actions that can be taken [..., K]
    # (statistics, what networks read [B, *]) -> extras of acting, for `recall`; {} where nothing is normalised
    record: Callable[[PyTree, PyTree], dict[str, PyTree]]
    recall: Callable[[PyTree, Rollout], PyTree]  # (statistics, rollout) -> obs [T, B, *] as networks read it


def make(spec: EnvSpec, network: NetworkConfig, *, normalize_obs: bool, axis_name: str | None) -> Observer:
    """Returns the observer: what becomes of observations.

    Args:
      spec: spaces of the environment.
      network: `transform` is applied first, to one observation without its action mask.
      normalize_obs: arrays of floats to mean 0 and deviation 1 by running statistics (RLlib's MeanStdFilter), each on
        its own; images and integers stay as they are, and so does an action mask.
      axis_name: of the mapped axis over devices, whose rows are counted together; None outside of one.
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
    """Facts known of observations before there are any."""

    given: Space  # of the environment
    transform: Callable[[PyTree], PyTree] | None
    read: Space  # of what the transform returns
    space: Space  # of what networks read
    masks: bool  # there is an action mask
    arrays: tuple[tuple[str, Leaf], ...]  # of `space`, but for the mask, each with its path
    floats: tuple[int, ...]  # numbers of those that are normalised
    axis_name: str | None

    @property
    def whole(self) -> bool:
        """Returns whether there is one array, which stands for itself in the statistics."""
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
    valid = found["valid"] & rollout.mask  # on a masked row another observation may stand by now: an episode's last
    pick = lambda old, new: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, new.ndim))), old, new)
    return _put(facts, obs, jax.tree.map(pick, found["obs"], _picked(facts, obs)))


def _transformed(facts: _Facts, obs: PyTree) -> PyTree:
    """Puts observations [..., *] of the environment through the user's transform."""
    fn = facts.transform
    if fn is None:
        return obs
    x, mask = spaces.split_mask(facts.given, obs)
    for _ in spaces.batch_shape(spaces.without_mask(facts.given), x):
        fn = jax.vmap(fn)
    x = _cast(fn(x), facts.read)
    return x if mask is None else {spaces.ACTION_MASK: obs[spaces.ACTION_MASK], "obs": x}


def _picked(facts: _Facts, obs: PyTree) -> PyTree:
    """Takes the arrays that are normalised, in the structure of the statistics, out of what `_transformed` gives."""
    if facts.whole:
        return obs
    leaves = jax.tree.leaves(spaces.split_mask(facts.space, obs)[0])
    return {facts.arrays[i][0]: leaves[i] for i in facts.floats}


def _put(facts: _Facts, obs: PyTree, found: PyTree) -> PyTree:
    """Puts those arrays in the places of those of `obs`."""
    if facts.whole:
        return found
    x, mask = spaces.split_mask(facts.space, obs)
    leaves = jax.tree.leaves(x)
    for i in facts.floats:
        leaves[i] = found[facts.arrays[i][0]]
    x = jax.tree.unflatten(jax.tree.structure(x), leaves)
    return x if mask is None else _join(facts.space, x, obs[spaces.ACTION_MASK])


def with_first_stats(observer: Observer, state: Any, rollout: Rollout) -> Any:
    """Returns a State with `obs_stats` to read a rollout by: before the first one there are none, and its own are
    taken.
    """
    if not isinstance(state.obs_stats, normalize.RunningStats):
        return state
    own, known = observer.observe(state.obs_stats, rollout.obs, rollout.mask), state.obs_stats.count > 0
    # not a branch: the devices meet in `observe`, and a program of several CPU devices that meet in a branch crashed
    # when it came from the compile cache (jaxlib 0.10.2)
    return replace(state, obs_stats=jax.tree.map(lambda then, now: jnp.where(known, then, now), state.obs_stats, own))


def values_seen(rollout: Rollout, recorded: Array, anew: Callable[[], Array]) -> Array:
    """Returns values that acting has `recorded`, unless some are of observations that were not normalised: then all
    `anew`.
    """
    if NORMALIZED_OBS not in rollout.extras:
        return recorded
    unseen = rollout.mask & ~rollout.extras[NORMALIZED_OBS]["valid"]
    return jax.lax.cond(unseen.any(), anew, lambda: recorded)


def _is_normalised(leaf: Leaf) -> bool:
    """Integers are one-hot and images are scaled by the network, which reads them as they are."""
    return isinstance(leaf, Box) and leaf.dtype != "uint8" and not is_image(leaf)


def _with_mask(space: Space, read: Space, masks: bool) -> Space:
    if not masks:
        return read
    assert isinstance(space, Dict)
    return Dict(((spaces.ACTION_MASK, space[spaces.ACTION_MASK]), ("obs", read)))


def _join(space: Space, x: PyTree, mask: Array) -> PyTree:
    """Returns the inverse of `spaces.split_mask`."""
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
    except Exception as e:  # the user's function, and all that jax says of one that cannot be traced
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
        raise InputError(f"network.transform {path}: expected an array, or a dict or tuple of such, not {tree!r}")
    return Box(tuple(tree.shape), str(np.dtype(tree.dtype)))


def _cast(x: PyTree, space: Space) -> PyTree:
    """Lists as the tuples that the space says."""
    return spaces.from_leaves(space, jax.tree.leaves(x))


__all__ = ["Observer", "make", "values_seen", "with_first_stats"]
