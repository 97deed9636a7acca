"""Between an observation as the environment gives it and what networks read: the user's transform, then statistics.

Rollouts and replay hold observations as they came, and what acts and what learns looks at them through `see`. Of a
sample from replay learning sees what the statistics of today make of it. Of a rollout it sees what acting saw
(`recall`), however old the actor was: the statistics of then are part of the policy that acted, and with others the
importance weights would tell of their change. Only what was acted on before there were any statistics is seen by those
of the first rollout.
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
    SEEN,
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
    """What becomes of observations.

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
    arrays = spaces.leaves(spaces.seen(space))
    floats = [i for i, (_, leaf) in enumerate(arrays) if normalize_obs and _is_normalised(leaf)]
    whole = len(arrays) == 1 and not isinstance(space, Dict | Tuple)  # one array stands for itself in the statistics

    def init() -> PyTree:
        if not floats:
            return ()
        shapes = {arrays[i][0]: arrays[i][1].shape for i in floats}
        return normalize.init(arrays[0][1].shape if whole else shapes)

    def transformed(obs: PyTree) -> PyTree:
        if transform is None:
            return obs
        x, mask = spaces.split_mask(spec.observation, obs)
        lead = spaces.batch_shape(spaces.seen(spec.observation), x)
        fn = transform
        for _ in lead:
            fn = jax.vmap(fn)
        x = _cast(fn(x), read)
        return x if mask is None else {spaces.ACTION_MASK: obs[spaces.ACTION_MASK], "obs": x}

    def picked(obs: PyTree) -> PyTree:
        """The arrays that are normalised, in the structure of the statistics, of what `transformed` gives."""
        if whole:
            return obs
        leaves = jax.tree.leaves(spaces.split_mask(space, obs)[0])
        return {arrays[i][0]: leaves[i] for i in floats}

    def put(obs: PyTree, found: PyTree) -> PyTree:
        """`obs` with those arrays in the places of its own."""
        if whole:
            return found
        x, mask = spaces.split_mask(space, obs)
        leaves = jax.tree.leaves(x)
        for i in floats:
            leaves[i] = found[arrays[i][0]]
        x = jax.tree.unflatten(jax.tree.structure(x), leaves)
        return x if mask is None else _join(space, x, obs[spaces.ACTION_MASK])

    def see(stats: PyTree, obs: PyTree) -> PyTree:
        obs = transformed(obs)
        return put(obs, normalize.normalize(stats, picked(obs))) if floats else obs

    def observe(stats: PyTree, obs: PyTree, mask: Array) -> PyTree:
        if not floats:
            return stats
        return normalize.update(stats, picked(transformed(obs)), mask.astype(jnp.float32), axis_name=axis_name)

    def record(stats: PyTree, seen: PyTree) -> dict[str, PyTree]:
        if not floats:
            return {}
        found = picked(seen)
        x, mean = jax.tree.leaves(found)[0], jax.tree.leaves(stats.mean)[0]
        return {SEEN: {"obs": found, "valid": jnp.broadcast_to(stats.count > 0, x.shape[: x.ndim - mean.ndim])}}

    def recall(stats: PyTree, rollout: Rollout) -> PyTree:
        obs = see(stats, rollout.obs)
        if not floats or SEEN not in rollout.extras:
            return obs
        found = rollout.extras[SEEN]
        valid = found["valid"] & rollout.mask  # on a masked row another observation may stand by now: an episode's last
        pick = lambda old, new: jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, new.ndim))), old, new)
        return put(obs, jax.tree.map(pick, found["obs"], picked(obs)))

    def mask_of(obs: PyTree) -> Array | None:
        return spaces.split_mask(space, obs.obs if isinstance(obs, Window) else obs)[1] if masks else None

    return Observer(spec._replace(observation=space), init, see, observe, mask_of, record, recall)


def begun(observer: Observer, state: Any, rollout: Rollout) -> Any:
    """A State with `obs_stats` to read a rollout by: before the first one there are none, and its own are taken."""
    if not isinstance(state.obs_stats, normalize.RunningStats):
        return state
    own, known = observer.observe(state.obs_stats, rollout.obs, rollout.mask), state.obs_stats.count > 0
    # not a branch: the devices meet in `observe`, and a program of several CPU devices that meet in a branch crashed
    # when it came from the compile cache (jaxlib 0.10.2)
    return replace(state, obs_stats=jax.tree.map(lambda then, now: jnp.where(known, then, now), state.obs_stats, own))


def values_seen(rollout: Rollout, recorded: Array, anew: Callable[[], Array]) -> Array:
    """Values that acting has `recorded`, unless some are of observations that were not normalised: then all `anew`."""
    if SEEN not in rollout.extras:
        return recorded
    unseen = rollout.mask & ~rollout.extras[SEEN]["valid"]
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
    """The inverse of `spaces.split_mask`."""
    assert isinstance(space, Dict)
    names = [name for name, _ in space.items if name != spaces.ACTION_MASK]
    return {**({names[0]: x} if len(names) == 1 else x), spaces.ACTION_MASK: mask}


def _transform(spec: EnvSpec, network: NetworkConfig) -> tuple[Callable[[PyTree], PyTree] | None, Space]:
    """The user's function of one observation, and the space of what it returns."""
    given = spaces.seen(spec.observation)
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
    return spaces.of_leaves(space, jax.tree.leaves(x))


__all__ = ["Observer", "begun", "make", "values_seen"]
