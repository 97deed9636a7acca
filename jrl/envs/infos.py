"""Infos of environments, and the action masks in them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.gym import space_kind
from jrl.spaces import ACTION_MASK, num_choices
from jrl.types import InputError, Space

_KEY = "env.action_mask_info"


class Infos:
    """Infos of the latest step or reset.

    `latest` is kept only while `wanted`: a dict per environment, or None before its first answer.
    """

    def __init__(self, num_envs: int):
        self.wanted = False
        self.latest: Sequence[Any] | Mapping[int, Any] = [None] * num_envs

    def set_from_pool(self, info: Mapping[str, Any]) -> None:
        """Sets `latest` to EnvPool's infos of the environments `info["env_id"]`."""
        if self.wanted:
            self.latest = PoolInfos(info, info["env_id"])


class PoolInfos(Mapping[int, dict[str, Any]]):
    """Infos of a pool, arrays [n, ...], by environment; each dict is built on access.

    Args:
      arrays: name -> array, or a dict of arrays; copied. Arrays without a row per environment are left out.
      env_id: environments of the rows [n].
    """

    def __init__(self, arrays: Mapping[str, Any], env_id: np.ndarray):
        self._rows = {int(i): row for row, i in enumerate(env_id)}
        self._arrays = self._copy(arrays)

    def _copy(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, x in arrays.items():
            if isinstance(x, Mapping):
                found[name] = self._copy(x)
            elif np.shape(x)[:1] == (len(self._rows),):
                found[name] = np.array(x)
        return found

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self._pick(self._arrays, self._rows[i])

    def _pick(self, arrays: Mapping[str, Any], row: int) -> dict[str, Any]:
        return {name: self._pick(x, row) if isinstance(x, dict) else x[row] for name, x in arrays.items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


# ---------------------------------------------------------------- action masks


def find_mask(
    name: str | None,
    observation: Any,
    action: Space,
    id: str,
    peek: Callable[[], dict[str, tuple[int, ...]] | None],
) -> tuple[str, tuple[int, ...]] | None:
    """Returns the entry of the infos that is the action mask, and its shape; None: not named and not found.

    Args:
      name: `env.action_mask_info`; None: an entry `action_mask`, if it has the right size.
      observation: Gymnasium's space.
      action: jrl's space.
      id: environment id, for errors.
      peek: function that returns the shapes of the entries, by name; None: the environment cannot be reset.
    Raises:
      InputError: a mask is named, but there are no choices to mask, the observation has a mask, or the entry is missing
        or has the wrong size.
    """
    choices = num_choices(action)
    has_own = space_kind(observation) == "Dict" and ACTION_MASK in observation.spaces
    if name is not None and not choices:
        raise InputError(f"{_KEY} {name}: the action space {action} of {id} has no choices to mask: leave it out")
    if name is not None and has_own:
        raise InputError(f"{_KEY} {name}: the observations of {id} have an {ACTION_MASK} already: leave it out")
    if not choices or has_own:
        return None
    infos = peek()
    found = None if infos is None else infos.get(name or ACTION_MASK)
    if found is not None and (math.prod(found) == choices or found == getattr(action, "nvec", None)):
        return name or ACTION_MASK, found
    if name is None:
        return None
    if infos is None:
        raise InputError(f"{_KEY} {name}: {id} cannot be reset, so that its infos are unknown: fix its reset")
    if found is None:
        names = ", ".join(infos) or "no numbers"
        raise InputError(f"{_KEY} {name}: the infos of {id} have no such entry, only {names}: name one of them")
    raise InputError(
        f"{_KEY} {name}: the mask in the infos of {id} has {math.prod(found)} entries, but the action space {action} "
        f"has {choices} choices: return one entry per choice"
    )
