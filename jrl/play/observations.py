"""Reader of observations from users: checks them and converts them to the dtypes of their space."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrl import spaces
from jrl.types import Dict, EnvSpec, Leaf, PyTree, Space, Tuple


class Reader:
    """Reads observations of one space, single or in a batch.

    Args:
      spec: spec with the spaces of an observation and of the policy's actions.
      added: name -> space of optional items, such as the previous action.
      unread: paths of optional parts, which the policy does not read.
    """

    def __init__(self, spec: EnvSpec, added: Mapping[str, Space], unread: Sequence[str]):
        self.space, self.added, self.unread = spec.observation, added, unread
        self.choices = spaces.choices(spec.action) if spaces.masks_actions(spec) else ()

    def batch(self, obs: Any, action_mask: Any = None, name: str = "obs") -> tuple[PyTree, dict[str, PyTree], bool]:
        """Returns (observations [N, *], optional items [N, *], whether `obs` is a single observation).

        Args:
          obs: an element [*] of the space, or a batch [N, *].
          action_mask: mask [K] or [N, K], if `obs` does not contain the mask.
          name: name of the argument, for error messages.
        Raises:
          ValueError: the observations are not elements of the space, or a mask allows no action.
        """
        given: dict[str, Any] = {}
        if isinstance(obs, Mapping) and (items := self.added.keys() & obs.keys()):
            given = {item: obs[item] for item in items}
            obs = {part: x for part, x in obs.items() if part not in items}
            if not isinstance(self.space, Dict) and set(obs) == {"obs"}:
                obs = obs["obs"]
        if action_mask is not None:
            obs = self._add_mask(obs, action_mask)
        mask = f"{name}/{spaces.ACTION_MASK}" if self.choices else None
        absent = self._find_absent(obs)
        leads: list[tuple[int, ...]] = []
        obs = _read(spaces.without(self.space, absent), obs, name, leads, mask)
        if absent:
            lead = leads[0] if leads else ()
            obs = spaces.fill_parts(self.space, absent, obs, lambda leaf: np.zeros((*lead, *leaf.shape), leaf.dtype))
        given = {item: _read(self.added[item], x, f"{name}/{item}", leads) for item, x in given.items()}
        single = leads[:1] == [()]
        if single:
            obs, given = jax.tree.map(lambda x: x[None], (obs, given))
        if mask:
            self._check_mask(obs[spaces.ACTION_MASK], mask)
        return obs, given, single

    def item(self, name: str, x: Any, num: int, *, single: bool) -> PyTree:
        """Returns the optional item `name` as [N, *]. Raises ValueError: it is not an element of its space."""
        x = _read(self.added[name], x, name, [() if single else (num,)])
        return jax.tree.map(lambda x: x[None], x) if single else x

    def _add_mask(self, obs: Any, mask: Any) -> Any:
        if not self.choices:
            raise ValueError("action_mask: expected no mask, since the policy was trained without a mask: leave it out")
        assert isinstance(self.space, Dict)
        rest = {name for name, _ in self.space.items} - {spaces.ACTION_MASK, *self._find_absent(obs)}
        if isinstance(obs, Mapping) and set(obs) - {spaces.ACTION_MASK} == rest:
            return {**obs, spaces.ACTION_MASK: mask}
        return {"obs": obs, spaces.ACTION_MASK: mask} if rest == {"obs"} else obs

    def _find_absent(self, obs: Any) -> list[str]:
        return [part for part in self.unread if _lacks(obs, part.split("/"))]

    def _check_mask(self, mask: np.ndarray, name: str) -> None:
        start = 0
        for size in self.choices:
            blocked = ~(mask[:, start : start + size] != 0).any(-1)
            if blocked.any():
                raise ValueError(
                    f"{name}: entries {start} to {start + size - 1} are all 0 in row {np.flatnonzero(blocked)[0]}: "
                    "expected at least one 1, for an action that is allowed"
                )
            start += size


def _lacks(obs: Any, path: Sequence[str]) -> bool:
    if not path or not isinstance(obs, Mapping):
        return False
    return path[0] not in obs or _lacks(obs[path[0]], path[1:])


def _read(space: Space, x: Any, path: str, leads: list[tuple[int, ...]], mask: str | None = None) -> PyTree:
    """Returns an element of a space, or a batch of elements, in the dtypes of the space.

    Args:
      space: the space.
      x: the element or batch.
      path: path of `x`, for error messages.
      leads: leading axes of the arrays read so far, all () or all (N,); this function appends to it.
      mask: path of the action mask, whose dtype may be any number.
    """
    match space:
        case Dict():
            names = [name for name, _ in space.items]
            if not isinstance(x, Mapping) or set(x) != set(names):
                got = f"one of {', '.join(map(str, x)) or 'nothing'}" if isinstance(x, Mapping) else _kind(x)
                raise ValueError(f"{path}: expected a dict of {', '.join(names)}, got {got}")
            return {name: _read(part, x[name], f"{path}/{name}", leads, mask) for name, part in space.items}
        case Tuple():
            if not isinstance(x, tuple | list) or len(x) != len(space.items):
                got = f"one of {len(x)}" if isinstance(x, tuple | list) else _kind(x)
                raise ValueError(f"{path}: expected a tuple of {len(space.items)}, got {got}")
            return tuple(_read(part, x[i], f"{path}/{i}", leads, mask) for i, part in enumerate(space.items))
    shape, dtype = space.shape, np.dtype(space.dtype)
    try:
        x = np.asarray(x)
    except ValueError as e:  # rows of different lengths
        raise ValueError(f"{path}: expected {_expected(space)}: {e}") from e
    lead = x.shape[: x.ndim - len(shape)]
    is_mask = path == mask and x.dtype.kind in "biuf"
    if len(lead) > 1 or x.shape[len(lead) :] != shape or not (is_mask or np.can_cast(x.dtype, dtype, "same_kind")):
        raise ValueError(f"{path}: expected {_expected(space)}, got {x.dtype} {x.shape}")
    if leads and leads[0] != lead:
        rows = f"a batch of {leads[0][0]}" if leads[0] else "a single observation"
        raise ValueError(f"{path}: expected {dtype} {(*leads[0], *shape)}, as the rest is {rows}, got {x.shape}")
    leads.append(lead)
    x = x != 0 if is_mask else x
    return x if x.dtype == dtype else x.astype(dtype)


def _kind(x: Any) -> str:
    return f"{x.dtype} {x.shape}" if hasattr(x, "dtype") else type(x).__name__


def _expected(leaf: Leaf) -> str:
    return f"{np.dtype(leaf.dtype)} {leaf.shape}, or a batch ({', '.join(map(str, ('N', *leaf.shape)))})"
