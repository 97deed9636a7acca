"""A task whose observations and actions have spaces of every kind, for scripts/matrix.py and tests."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jrl import spaces
from jrl.envs.jax_env import Definition
from jrl.types import Array, Box, Dict, Discrete, InputError, Leaf, MultiBinary, MultiDiscrete, PyTree, Space, Tuple

_PIXELS, _PLACES, _DIGITS = 8, 3, (2, 3)
_ASKED = 7  # uniform numbers that make an observation; those after them make the mask


@struct.dataclass
class _State:
    draws: Array  # [B, 7 + K] f32 in [0, 1): what is asked for, and which actions can be taken
    steps: Array  # [B] i32


def nested(action: str = "discrete", mask: bool = False, length: int = 8) -> Definition:
    """Defines the task: say again what the observation shows; the reward is how many numbers of the action are right.

    Observation: image [8, 8, 1] u8, white in its left half (side 0) or its right one (side 1); place, Discrete(3);
    bits, MultiBinary [2]; pair, a Tuple of a force [1] f32 in [-1, 1] and digits, MultiDiscrete (2, 3). All are drawn
    anew before each step. An episode has `length` steps, and ends.

    Actions, by the option `action`; a number d off the one of a Box gives max(0, 1 - d) instead of 1:
      discrete: Discrete(6), 3 * side + place
      multi_discrete: MultiDiscrete (2, 3, 2, 3), side, place and digits
      multi_binary: MultiBinary [3], side and bits
      box: Box [2] in [-1, 1], force, and -0.5 or 0.5 for side 0 or 1
      dict: a Dict of side, Discrete(2), place, Discrete(3), digits, MultiDiscrete (2, 3), bits, MultiBinary [2], and
        force, Box [1]
      tuple: a Tuple of place, Discrete(3), and a Dict of force, Box [1]

    With `mask`, an action_mask i8 over the choices of the action (`jrl.spaces`) is part of the observation: what is
    right can be taken, anything else with probability 1/2. Nothing comes of taking it nevertheless.

    Raises:
      InputError: an unknown kind of action, a mask over actions without choices, an episode without steps.
    """
    if action not in _ACTIONS:
        raise InputError(f"env.options.action: nested takes {', '.join(_ACTIONS)}, not {action!r}")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise InputError(f"env.options.length: expected a positive integer, got {length!r}")
    space, right = _ACTIONS[action]
    choices = spaces.num_choices(space) if mask else 0
    if mask and not choices:
        able = ", ".join(name for name, (other, _) in _ACTIONS.items() if spaces.num_choices(other))
        raise InputError(f"env.options.mask: nested with action {action} has no choices to mask: use {able}")

    def reset(draws: Array) -> _State:
        return _State(draws.T, jnp.zeros(draws.shape[1], jnp.int32))

    def step(state: _State, taken: PyTree, draws: Array) -> tuple[_State, Array, Array]:
        score = spaces.map_leaves(_score, space, taken, right(_asked(state.draws)))
        steps = state.steps + 1
        return _State(draws.T, steps), jnp.stack(jax.tree.leaves(score)).sum(0), steps >= length

    def observe(state: _State) -> PyTree:
        asked = _asked(state.draws)
        half = jnp.arange(_PIXELS)[None] // (_PIXELS // 2)
        columns = jnp.where(half == asked["side"][:, None], 255, 0).astype(jnp.uint8)
        obs = {
            "image": jnp.broadcast_to(columns[:, None, :, None], (columns.shape[0], _PIXELS, _PIXELS, 1)),
            "place": asked["place"],
            "bits": asked["bits"].astype(jnp.int8),
            "pair": (asked["force"], asked["digits"]),
        }
        if not mask:
            return obs
        can = spaces.map_leaves(_choice, space, right(asked))
        can = jnp.concatenate([x for x in jax.tree.leaves(can) if x.shape[1]], -1) | (state.draws[:, _ASKED:] < 0.5)
        return obs | {"action_mask": can.astype(jnp.int8)}

    parts: tuple[tuple[str, Space], ...] = (
        ("image", Box((_PIXELS, _PIXELS, 1), "uint8", 0.0, 255.0)),
        ("place", Discrete(_PLACES)),
        ("bits", MultiBinary((2,))),
        ("pair", Tuple((Box((1,), "float32", -1.0, 1.0), MultiDiscrete(_DIGITS)))),
    )
    if mask:
        parts += (("action_mask", MultiBinary((choices,))),)
    return Definition(Dict(parts), space, None, _ASKED + choices, reset, step, observe)


def _asked(draws: Array) -> dict[str, Array]:
    """Returns what an observation asks for, [B] or [B, k]."""
    number = lambda column, n: jnp.minimum((draws[:, column] * n).astype(jnp.int32), n - 1)
    return {
        "side": number(0, 2),
        "place": number(1, _PLACES),
        "bits": jnp.stack([number(2, 2), number(3, 2)], -1),
        "force": 2 * draws[:, 4:5] - 1,
        "digits": jnp.stack([number(5, _DIGITS[0]), number(6, _DIGITS[1])], -1),
    }


def _score(leaf: Leaf, taken: Array, right: Array) -> Array:
    """Returns the score of each environment, [B] f32."""
    taken, right = (x.reshape(x.shape[0], -1) for x in (taken, right))
    each = jnp.maximum(1 - jnp.abs(taken - right), 0) if isinstance(leaf, Box) else (taken == right)
    return each.astype(jnp.float32).sum(-1)


def _choice(leaf: Leaf, right: Array) -> Array:
    """Returns the choices that are right, [B, K] bool; K = 0 where there are none."""
    sizes = (leaf.n,) if isinstance(leaf, Discrete) else leaf.nvec if isinstance(leaf, MultiDiscrete) else ()
    right = right.reshape(right.shape[0], -1)
    parts = [right[:, i : i + 1] == jnp.arange(n)[None] for i, n in enumerate(sizes)]
    return jnp.concatenate(parts, -1) if parts else jnp.zeros((right.shape[0], 0), bool)


_FORCE = Box((1,), "float32", -1.0, 1.0)
_PARTS: dict[str, Space] = {
    "side": Discrete(2),
    "place": Discrete(_PLACES),
    "digits": MultiDiscrete(_DIGITS),
    "bits": MultiBinary((2,)),
    "force": _FORCE,
}
_join = lambda *parts: jnp.concatenate([x.reshape(x.shape[0], -1) for x in parts], -1)
# the space of actions, and the element of it that is right
_ACTIONS: dict[str, tuple[Space, Callable[[dict[str, Array]], PyTree]]] = {
    "discrete": (Discrete(2 * _PLACES), lambda a: _PLACES * a["side"] + a["place"]),
    "multi_discrete": (
        MultiDiscrete((2, _PLACES, *_DIGITS)),
        lambda a: _join(a["side"], a["place"], a["digits"]),
    ),
    "multi_binary": (MultiBinary((3,)), lambda a: _join(a["side"], a["bits"])),
    "box": (Box((2,), "float32", -1.0, 1.0), lambda a: _join(a["force"], a["side"] - 0.5)),
    "dict": (Dict(tuple(_PARTS.items())), lambda a: a),
    "tuple": (
        Tuple((_PARTS["place"], Dict((("force", _FORCE),)))),
        lambda a: (a["place"], {"force": a["force"]}),
    ),
}
