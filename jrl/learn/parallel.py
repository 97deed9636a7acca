"""Mapping of programs over devices; no other file knows how.

`pmap` has the meaning of `jax.pmap`, a body per device with a named axis, but uses `jit(shard_map(...))`, because
`jax.pmap` is in maintenance. One device takes the same path as many.
"""

import concurrent.futures
import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrl.errors import InputError
from jrl.host import runtime
from jrl.rollout import sources
from jrl.types import PyTree, Rollout

AXIS = "device"
_FORCED = "xla_force_host_platform_device_count"

REPLICATED = P()
PER_DEVICE = P(AXIS)  # leaves [D, ...] or [B, ...]
# time-major leaves have their columns on axis 1
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
    count=_COLUMNS,
    over=_TIME_MAJOR,
)


class Devices(NamedTuple):
    actors: tuple[jax.Device, ...]  # devices that act, each in its share of the columns
    learners: Mesh  # devices that learn, each from its share of the batch


def devices(
    *,
    learners: Sequence[int] | None = None,
    actors: Sequence[int] | None = None,
    fake: int | None = None,
    platform: str | None = None,
    of_cpu: int = 1,
) -> Devices:
    """Returns the devices of this machine that learn, and the devices that act.

    Args:
      learners: indices of the learning devices; None: all accelerators, else the fake devices, else the CPU.
      actors: indices of the acting devices; None: the learning devices.
      fake: number of devices to split the CPU into. Must be set before jax is first used.
      platform: "cpu" hides all accelerators. Must be set before jax is first used.
      of_cpu: number of devices to split the CPU into without an accelerator, `fake` or `learners`; fewer if jax was
        used before.
    Raises:
      InputError: there are too few devices.
    """
    if platform == "cpu":
        _hide_accelerators()
    if fake is not None:
        _fake(fake)
    elif of_cpu > 1 and learners is None and not (_FORCED in os.environ.get("XLA_FLAGS", "") or runtime.has_started()):
        jax.config.update("jax_num_cpu_devices", of_cpu)
    found = jax.local_devices()
    if fake is None and learners is None and found[0].platform == "cpu":
        learners = range(min(of_cpu, len(found)))  # forced host devices are not accelerators
    if fake is not None:
        found = found[:fake]

    def choose(key: str, indices: Sequence[int]) -> tuple[jax.Device, ...]:
        if max(indices) >= len(found):
            raise InputError(
                f"devices.{key}: expected indices of devices, got {list(indices)}, but there are {len(found)} "
                f"({found[0].platform}): use 0 .. {len(found) - 1}, or devices.fake={max(indices) + 1} to try it on "
                "the CPU"
            )
        return tuple(found[i] for i in indices)

    mesh = make_mesh(choose("learners", range(len(found)) if learners is None else learners))
    return Devices(tuple(mesh.devices.flat) if actors is None else choose("actors", actors), mesh)


def _hide_accelerators() -> None:
    if not runtime.has_started():
        jax.config.update("jax_platforms", "cpu")
    elif (found := jax.local_devices())[0].platform != "cpu":
        raise InputError(
            f"devices.platform: jax was used before with {len(found)} x {found[0].platform}: start a new process for "
            "devices.platform=cpu"
        )


def _fake(count: int) -> None:
    """Splits the CPU into `count` devices and hides all other devices."""
    with contextlib.suppress(RuntimeError):  # jax is running already, perhaps with enough devices
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    found = jax.local_devices()
    if found[0].platform != "cpu" or len(found) < count:
        raise InputError(
            f"devices.fake: jax was used before with {len(found)} x {found[0].platform}: start a new process for "
            f"devices.fake={count}"
        )


def make_mesh(devices: int | Sequence[jax.Device] = 1) -> Mesh:
    """Makes a mesh of these devices, or of the first n local devices; 0: all. Raises InputError: there are fewer."""
    if isinstance(devices, int):
        found = jax.local_devices()
        if devices > len(found):
            raise InputError(f"{devices} devices asked for, but there are {len(found)} ({found[0].platform})")
        devices = found[: devices or None]
    # not jax.make_mesh: its axes are of the explicit kind
    return Mesh(np.asarray(devices), (AXIS,))


def must_wait(mesh: Mesh) -> bool:
    """Returns whether the caller must wait for each program on this mesh before it starts the next.

    Programs with collectives on several host devices share one thread pool. With several programs running, each may
    hold a thread that another needs.
    """
    return mesh.devices.size > 1 and mesh.devices.flat[0].platform == "cpu"


def pmap(
    body: Callable,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    donate_argnums: tuple[int, ...] = (),
    *,
    loops: bool = False,
    pure: bool = True,
) -> jax.stages.Wrapped:
    """Maps `body` over the devices of the mesh, with the axis name AXIS, as one jitted program.

    Args:
      body: function of this device's part of each argument.
      in_specs, out_specs: a PartitionSpec per argument or leaf: REPLICATED, PER_DEVICE, ROLLOUT.
      donate_argnums: arguments whose buffers the outputs reuse.
      loops: whether a call repeats many updates from replay or data: a single GPU runs them without the host.
      pure: whether the program consists of XLA operations only, without calls of host environments.
    """
    # check_vma=True would psum gradients of replicated parameters, in addition to the pmean in the body
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    options = _compiler_options(mesh, loops=loops, pure=pure)
    return jax.jit(mapped, donate_argnums=donate_argnums, compiler_options=options)


# Complete loops as CUDA graphs. By default XLA makes graphs only of the operations between loops; the host starts each
# graph, and waits for loop conditions and for `lax.cond`. On an H100 DQN and SAC made 1.4 and 1.6 times as many updates
# per second. Not for PPO: a graph with new buffers is rebuilt, and on an H200 it made 0.94 times as many steps.
_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
}
# The same between the steps of EnvPool: on an H200 SAC on one HalfCheetah made 1.15 times as many updates per second.
_GRAPHS_BETWEEN_CALLS = {name: flags.replace("CUSTOM_CALL,", "") for name, flags in _GRAPHS.items()}
# XLA lets a custom call write directly into a stacked array if each step's slice is a multiple of 256 bytes
# (openxla/xla#43831). With 256 or more CartPoles of EnvPool, results were wrong on an H100.
_CALLS = {"xla_gpu_enable_dynamic_slice_fusion": False}


def _compiler_options(mesh: Mesh, *, loops: bool, pure: bool) -> dict[str, Any] | None:
    """Returns XLA's options for a program; None: no options. Flags in XLA_FLAGS have precedence."""
    if "cuda" not in mesh.devices.flat[0].client.platform_version.lower():
        return None
    is_single = mesh.devices.size == 1  # collectives in such graphs are untested
    graphs = _GRAPHS if pure else _GRAPHS_BETWEEN_CALLS
    options = (graphs if loops and is_single else {}) | ({} if pure else _CALLS)
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags and _known(name, value)} or None


@functools.cache
def _known(name: str, value: str | bool) -> bool:
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def place_outputs(fn: Callable, mesh: Mesh, specs: Any) -> jax.stages.Wrapped:
    """Jits `fn`, unmapped, with outputs placed on the mesh by `specs`, a prefix of their tree."""
    return jax.jit(fn, out_shardings=_shardings(mesh, specs))


def _shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))


def with_shardings(shapes: PyTree, mesh: Mesh, specs: Any) -> Any:
    """Returns shapes and dtypes with shardings; `specs` has a PartitionSpec per tree or leaf."""

    def on_mesh(spec: P, tree: PyTree) -> PyTree:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    return jax.tree.map(on_mesh, specs, shapes, is_leaf=lambda x: isinstance(x, P))


def compile_ahead(fn: jax.stages.Wrapped, args: tuple[Any, ...], mesh: Mesh, specs: Any) -> Callable:
    """Compiles a function of `pmap` in a thread; returns a function that waits for the compilation.

    Args:
      args: shapes and dtypes of the arguments (ShapeDtypeStructs).
      mesh, specs: placement of the arguments, a PartitionSpec per argument or leaf.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # defined at run time
        return fn  # runs operation by operation, for breakpoints

    shapes = with_shardings(args, mesh, specs)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    compiled = pool.submit(lambda: fn.lower(*shapes).compile())
    pool.shutdown(wait=False)
    return lambda *arrays: compiled.result()(*arrays)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Copies every leaf to all devices.

    Copies first, because device_put would share an existing buffer, and donating one array would delete the other.
    """
    leaves, structure = jax.tree.flatten(tree)
    copies = iter(_copies([x for x in leaves if isinstance(x, jax.Array)]))
    copied = [next(copies) if isinstance(x, jax.Array) else np.array(x) for x in leaves]
    return jax.device_put(jax.tree.unflatten(structure, copied), NamedSharding(mesh, REPLICATED))


_copies = jax.jit(lambda leaves: [jnp.copy(x) for x in leaves])


def shard(tree: PyTree, mesh: Mesh, specs: Any = PER_DEVICE) -> PyTree:
    """Splits leaves over the devices, by default along their leading axis."""
    return jax.device_put(tree, _shardings(mesh, specs))


def deal(parts: Sequence[Rollout], mesh: Mesh) -> Rollout:
    """Joins rollouts of neighbouring environments into one that is split over the devices of the mesh.

    Args:
      parts: K rollouts [T, B / K], each on one device or in numpy; K and the number D of devices divide B.
      mesh: devices.
    Returns:
      A rollout [T, B]. Data on the right device are not copied.
    """
    devices = list(mesh.devices.flat)
    if len(parts) == 1 and len(devices) == 1:
        return jax.tree.map(_without_mesh, sources.put(parts[0], devices[0]))
    common = math.gcd(len(parts), len(devices))
    split, joined = len(devices) // common, len(parts) // common  # pieces per part, and per device
    pieces = [piece for part in parts for piece in (_split(part, split) if split > 1 else [part])]
    placed = []
    for d, device in enumerate(devices):
        mine = [jax.device_put(piece, device) for piece in pieces[d * joined : (d + 1) * joined]]
        placed.append(_join(mine) if joined > 1 else mine[0])

    def whole(axis: int, *shards: jax.Array) -> jax.Array:
        shape = list(shards[0].shape)
        shape[axis] *= len(shards)
        spec = _TIME_MAJOR if axis else _COLUMNS
        return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, spec), list(shards))

    return _by_columns(whole, *placed)


def _without_mesh(x: jax.Array) -> jax.Array:
    """Returns an array of one device whose type does not name the mesh of the parameters that it was computed with.

    A program for such an array can be lowered ahead, by `jax.ShapeDtypeStruct`.
    """
    if jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])


def join_columns(parts: Sequence[Rollout]) -> Rollout:
    """Joins rollouts [T, b] of neighbouring environments into one, [T, B], in numpy."""
    return _by_columns(lambda axis, *x: np.concatenate(x, axis), *parts)


def _by_columns(fn: Callable, *rollouts: Rollout) -> Any:
    """Applies `fn(axis, *leaves)` to the leaves of rollouts, with the axis of their columns."""
    inner = lambda spec, *trees: jax.tree.map(functools.partial(fn, 1 if spec == _TIME_MAJOR else 0), *trees)
    return jax.tree.map(inner, ROLLOUT, *rollouts, is_leaf=lambda x: isinstance(x, P))


def _split(part: Rollout, pieces: int) -> list[Rollout]:
    on_device = any(isinstance(x, jax.Array) for x in jax.tree.leaves(part))
    return _split_arrays(part, pieces) if on_device else _split_views(part, pieces)


def _split_views(part: Rollout, pieces: int) -> list[Rollout]:
    def piece(i: int, axis: int, x: Any) -> Any:
        size = x.shape[axis] // pieces
        return x[i * size : (i + 1) * size] if axis == 0 else x[:, i * size : (i + 1) * size]

    return [_by_columns(functools.partial(piece, i), part) for i in range(pieces)]


_split_arrays = jax.jit(_split_views, static_argnums=1)


@jax.jit
def _join(pieces: list[Rollout]) -> Rollout:
    return _by_columns(lambda axis, *x: jnp.concatenate(x, axis), *pieces)


def stack(trees: Sequence[PyTree]) -> PyTree:
    """Stacks trees of K devices, or of numpy arrays, to leaves [K, ...]; arrays stay on their devices."""
    homes = [next(iter(x.devices())) for tree in trees for x in jax.tree.leaves(tree)[:1] if isinstance(x, jax.Array)]
    if len(set(homes)) < len(trees):
        return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *trees)
    sharding = NamedSharding(make_mesh(homes), PER_DEVICE)
    whole = lambda *x: jax.make_array_from_single_device_arrays((len(x), *x[0].shape[1:]), sharding, list(x))
    return jax.tree.map(whole, *map(_with_axis, trees))


@jax.jit
def _with_axis(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)


def first_copy(tree: PyTree) -> PyTree:
    """Returns one device's copy of replicated leaves."""
    # not x[0]: slicing a sharded array runs a program, a thousand times slower
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def find_diverged(tree: PyTree) -> list[str]:
    """Returns the names of replicated leaves whose copies differ; NaN equals NaN."""
    names = []
    for path, x in jax.tree.leaves_with_path(tree):
        copies = [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]
        if any(copy != copies[0] for copy in copies[1:]):
            names.append(jax.tree_util.keystr(path, simple=True, separator="."))
    return names
