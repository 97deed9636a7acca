"""User-defined torsos: `network.torso: package.module:name`, with `network.torso_options` as keyword arguments.

There are three kinds:

    class Net(flax.linen.Module)    Net(**options), called with an observation
    class Net(flax.nnx.Module)      Net(space, **options, rngs=nnx.Rngs(key)), called with an observation
    def net(space, **options)       -> (init, apply): init(key) -> params, apply(params, observation)

Each maps N observations to features [N, F], for any F. Observations are trees of [N, *] in the dtypes of the space,
after normalisation and without action mask. The core, heads and critics read the features.
"""

import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from jrl import registry, spaces
from jrl.errors import did_you_mean
from jrl.fields.hyper import NetworkConfig, Options
from jrl.types import Array, InputError, Key, PyTree, Space, element

_KEY = "network.torso"
_RESERVED = ("self", "space", "rngs", "name", "parent")  # arguments that options cannot set


class Torso(NamedTuple):
    """A torso of any kind as two pure functions."""

    init: Callable[[Key], PyTree]  # key -> params, a tree of float arrays
    apply: Callable[[PyTree, PyTree], Array]  # (params, obs [N, *]) -> [N, F]
    learns: bool = True  # whether the torso has parameters


def check(cfg: NetworkConfig, space: Space | None = None) -> None:
    """Loads the torso; with `space`, also traces it for observations of that space.

    Raises:
      InputError: no object of that name, none of the three kinds, wrong options, a failure for such observations, or an
        output that is not a float array [N, F].
    """
    errors = [
        f"network.{name}: {cfg.torso} reads the whole observation unchanged: leave network.{name} out"
        for name in ("encoders", "flatten")
        if getattr(cfg, name)
    ]
    if errors:
        raise InputError(*errors)
    factory = registry.load(cfg.torso, _KEY)
    _check_options(factory, cfg)
    if space is not None:
        _make_torso(factory, cfg.torso, Options(cfg.torso_options), space)


def features(module: nn.Module, cfg: NetworkConfig, space: Space, obs: PyTree, name: str) -> Array:
    """Returns features [N, F] f32 of observations [..., *]. Raises InputError as `check` does.

    Call it within the compact call of `module`, whose parameter `name` holds the torso's parameters.
    """
    torso = _make_torso(registry.load(cfg.torso, _KEY), cfg.torso, Options(cfg.torso_options), space)
    obs = spaces.map_leaves(lambda leaf, x: x.reshape(-1, *leaf.shape), space, obs)
    params: Any = module.param(name, torso.init) if torso.learns else {}
    return torso.apply(params, obs).astype(jnp.float32)


# ---------------------------------------------------------------- the three kinds


def _check_options(found: Any, cfg: NetworkConfig) -> None:
    function, arguments, more = _signature(found, cfg.torso)
    parameters = inspect.signature(function).parameters
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes = [n for n, p in parameters.items() if n not in _RESERVED and p.kind in kinds]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    errors = []
    for name in cfg.torso_options:
        if name in _RESERVED or not (name in takes or takes_all):
            fix = did_you_mean(str(name), takes) or f": it takes {', '.join(takes) or 'none'}"
            errors.append(f"network.torso_options: {cfg.torso} has no option {name}{fix}")
    if errors:
        raise InputError(*errors)
    registry.check_call(function, f"network.torso_options: {cfg.torso}", arguments, {**more, **cfg.torso_options})


def _is_linen(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, nn.Module)


def _is_nnx(found: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")  # not imported here: this takes 0.2 s, and a user's class exists only after it
    return nnx is not None and isinstance(found, type) and issubclass(found, nnx.Module)


def _signature(found: Any, path: str) -> tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]]:
    """Returns the function that receives the options, its positional arguments and its other keyword arguments."""
    if _is_linen(found):
        return found.__init__, ("self",), {}
    if _is_nnx(found):
        return found.__init__, ("self", "space"), {"rngs": None}
    if isinstance(found, (type, nn.Module)) or _is_nnx(type(found)):
        what = "class" if isinstance(found, type) else f"{type(found).__name__} instance"
        raise InputError(
            f"{_KEY} {path}: expected a class of flax.linen.Module or flax.nnx.Module, or a function "
            f"(space, **options) -> (init, apply), got a {what}"
        )
    return found, ("space",), {}


@functools.lru_cache(maxsize=64)
def _make_torso(found: Any, path: str, options: Mapping[str, Any], space: Space) -> Torso:
    """Returns the torso for observations of `space`; checks its shapes by tracing. Raises InputError."""
    rows = 3
    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), element(space))
    make = _linen if _is_linen(found) else _nnx if _is_nnx(found) else _pair
    try:
        with jax.ensure_compile_time_eval():  # the torso is cached, so it must not hold tracers of a current trace
            torso = make(found, path, options, space)
        params = jax.eval_shape(torso.init, jax.random.key(0))
        out = jax.eval_shape(torso.apply, params, obs)
    except InputError:
        raise
    except Exception as e:  # user code may raise any exception
        reason = (str(e).strip().splitlines() or [""])[0]
        last = traceback.extract_tb(e.__traceback__)[-1]
        here = [f for f in traceback.extract_tb(e.__traceback__) if f.filename == _file(found)]
        where = f" in line {here[-1].lineno} of {here[-1].filename}" if here else f" in {last.name}"
        raise InputError(
            f"{_KEY} {path}: it cannot be traced for observations {space}: {type(e).__name__}{where}: {reason}"
        ) from e
    wrong_dtypes = [
        f"{jax.tree_util.keystr(where, simple=True, separator='.')} {x.dtype}{list(x.shape)}"
        for where, x in jax.tree.leaves_with_path(params)
        if not jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if wrong_dtypes:
        raise InputError(f"{_KEY} {path}: expected parameters that are arrays of floats, got {', '.join(wrong_dtypes)}")
    is_array = isinstance(out, jax.ShapeDtypeStruct)
    if not is_array or out.shape[:-1] != (rows,) or not jnp.issubdtype(out.dtype, jnp.floating):
        got = f"{out.dtype}{list(out.shape)}" if is_array else f"a {type(out).__name__}"
        expected = f"{'one array ' * (not is_array)}[{rows}, F] of floats for {rows} observations {space}"
        raise InputError(f"{_KEY} {path}: expected {expected}, got {got}")
    return torso._replace(learns=bool(jax.tree.leaves(params)))


def _file(found: Any) -> str | None:
    try:
        return inspect.getsourcefile(found)
    except TypeError:  # a callable object
        return None


def _linen(cls: Any, path: str, options: Mapping[str, Any], space: Space) -> Torso:
    module = cls(**options, parent=None)  # no parent, although another module's call is active
    example = lambda: jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), element(space))
    made = jax.eval_shape(lambda key: module.init(key, example()), jax.random.key(0))
    if more := sorted(set(made) - {"params"}):
        raise InputError(
            f"{_KEY} {path}: it has {', '.join(more)} beside its parameters, which training would not update: use "
            "layers without statistics, such as LayerNorm instead of BatchNorm"
        )

    def apply(params: PyTree, obs: PyTree) -> Array:
        try:
            return module.apply({"params": params}, obs)
        except InvalidRngError as e:
            raise InputError(
                f"{_KEY} {path}: it draws random numbers, but a torso gets no key: use layers without dropout"
            ) from e

    return Torso(lambda key: module.init(key, example()).get("params", {}), apply)


def _nnx(cls: Any, path: str, options: Mapping[str, Any], space: Space) -> Torso:
    from flax import nnx

    make = lambda key: cls(space, **options, rngs=nnx.Rngs(key))
    structure, state = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))
    parts = list(nnx.to_flat_state(state))
    other = [f"{'.'.join(map(str, where))} ({type(x).__name__})" for where, x in parts if not isinstance(x, nnx.Param)]
    if other:
        found = ", ".join(other[:3]) + (" and others" if len(other) > 3 else "")
        raise InputError(
            f"{_KEY} {path}: it has {found} beside its parameters, which training would not update: use layers "
            "without statistics and random numbers, and nnx.Param for learned arrays"
        )

    def init(key: Key) -> PyTree:
        tree: dict[str, Any] = {}
        for where, x in nnx.to_flat_state(nnx.state(make(key), nnx.Param)):
            *parents, last = map(str, where)
            place = tree
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = x[...]
        return tree

    def apply(params: PyTree, obs: PyTree) -> Array:
        value = lambda where: functools.reduce(lambda tree, name: tree[str(name)], where, params)
        return nnx.merge(structure, nnx.from_flat_state([(where, x.replace(value(where))) for where, x in parts]))(obs)

    return Torso(init, apply)


def _pair(fn: Any, path: str, options: Mapping[str, Any], space: Space) -> Torso:
    made = fn(space, **options)
    if not (isinstance(made, tuple) and len(made) == 2 and all(map(callable, made))):
        raise InputError(f"{_KEY} {path}: expected two functions (init, apply), got {type(made).__name__}: {made!r}")
    init, apply = made
    return Torso(lambda key: jax.tree.map(jnp.asarray, init(key)), apply)
