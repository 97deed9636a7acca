"""The one file that knows how a program is mapped over devices.

`pmap` has the meaning of `jax.pmap`, a body per device with a named axis, but is built on `jit(shard_map(...))`,
because `jax.pmap` itself is in maintenance. One device takes the same path as many.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrl.errors import InputError
from jrl.types import PyTree, Rollout

AXIS = "device"

REPLICATED = P()
PER_DEVICE = P(AXIS)  # leaves [D, ...] or [B, ...]
# time-major leaves carry their columns on axis 1
_TIME_MAJOR: Any = P(None, AXIS)
_COLUMNS: Any = P(AXIS)
ROLLOUT = Rollout(
    obs=_TIME_MAJOR,
    last_obs=_COLUMNS,
    action=_TIME_MAJOR,
    reward=_TIME_MAJOR,
    terminated=_TIME_MAJOR,
    truncated=_TIME_MAJOR,
    mask=_TIME_MAJOR,
    contiguous=_COLUMNS,
    extras=_TIME_MAJOR,  # for the whole dict
    carry=_COLUMNS,
)


def make_mesh(num_devices: int = 1) -> Mesh:
    """A mesh over the first `num_devices` local devices; 0 takes all of them.

    Raises:
      InputError: there are fewer.
    """
    devices = jax.local_devices()
    if num_devices > len(devices):
        raise InputError(
            f"run.devices: {num_devices} asked for, but there are {len(devices)} ({devices[0].platform}): "
            f"use run.devices={len(devices)}, or 0 for all"
        )
    # Mesh and not jax.make_mesh, whose axes are of the explicit kind
    return Mesh(np.asarray(devices[: num_devices or None]), (AXIS,))


def pmap(body: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, donate_argnums: tuple[int, ...] = ()) -> Callable:
    """`body` on every device of the mesh, with the axis name AXIS, as one jitted program.

    Args:
      body: sees this device's part of each argument.
      mesh: from `make_mesh`.
      in_specs, out_specs: a PartitionSpec per argument or leaf: REPLICATED, PER_DEVICE, ROLLOUT.
      donate_argnums: arguments whose buffers the outputs take over.
    """
    # check_vma=True would psum gradients of replicated parameters by itself, and the pmean in the body once more
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate_argnums)


def place_outputs(fn: Callable, mesh: Mesh, specs: Any) -> Callable:
    """`fn`, not mapped, as a jitted program whose outputs lie on the mesh as `specs` say (a prefix of their tree)."""
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))
    return jax.jit(fn, out_shardings=shardings)


def compile_ahead(fn: Callable, args: tuple[Any, ...], mesh: Mesh, specs: Any) -> Callable:
    """A jitted `fn` whose compilation begins now, in a thread, while the caller prepares its arguments.

    Args:
      fn: from `pmap`.
      args: shapes and dtypes of the arguments (ShapeDtypeStructs).
      mesh, specs: where each argument will lie, a PartitionSpec per argument or leaf.
    Returns:
      A function of such arguments, which waits for the compilation.
    """

    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # operation by operation, for breakpoints
        return fn

    def placed(spec: P, tree: PyTree) -> PyTree:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    shapes = jax.tree.map(placed, specs, args, is_leaf=lambda x: isinstance(x, P))
    pool = concurrent.futures.ThreadPoolExecutor(1)
    compiled = pool.submit(lambda: fn.lower(*shapes).compile())  # type: ignore[attr-defined]
    pool.shutdown(wait=False)
    return lambda *given: compiled.result()(*given)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Copies every leaf to all devices."""
    # a copy first: device_put would share the buffer that is already on device 0, and donating one deletes the other
    return jax.device_put(jax.tree.map(lambda x: jnp.array(x, copy=True), tree), NamedSharding(mesh, REPLICATED))


def shard(tree: PyTree, mesh: Mesh, specs: Any = PER_DEVICE) -> PyTree:
    """Splits leaves over the devices, by default along their leading axis."""
    if isinstance(specs, P):
        return jax.device_put(tree, NamedSharding(mesh, specs))
    is_spec = lambda x: isinstance(x, P)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)
    return jax.device_put(tree, shardings)


def first(tree: PyTree) -> PyTree:
    """One device's copy of replicated leaves."""
    # not x[0]: slicing a sharded array is a program of its own, a thousand times slower
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)
