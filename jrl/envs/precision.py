"""Observations that lose what they say on their way to float32 and int32: a warning in the first steps of a run."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrl.gym.block import leaves

_STEPS = 32  # observations of each environment that are compared, beside the first
_MOST_BYTES = 2**26  # of observations that are kept; beyond it fewer environments are looked at
_LARGE = 1000.0  # below it, changes of less than `_SMALL` of a value are taken for rounding of the environment
_SMALL = 1e-8
_NAMED = 3  # features that a message names
_WIDE = ("float64", "longdouble", "float128", "int64", "uint64", "int32", "uint32")


class Precision:
    """Looks at the first observations of host environments before these are converted.

    Args:
      id: of the environments, for messages.
      space: Gymnasium's, of one environment.
      num_envs: B.
      agents: names, where leaves of an observation have an axis of agents; of agents of different kinds, see `kinds`.
      kinds: numbers of the agents of each part of the space, a Tuple by kind; () where it is not one.
      warns: a warning is given once the observations were seen; False: whoever checks the environment asks `messages`.
    """

    def __init__(
        self,
        id: str,
        space: Any,
        num_envs: int,
        *,
        agents: tuple[str, ...] = (),
        kinds: tuple[tuple[int, ...], ...] = (),
        warns: bool = True,
    ):
        self._id, self._agents, self._kinds, self._warns = id, agents, kinds, warns
        # choices are read one-hot, each by its number
        numbers = [(path, one) for path, one in leaves(space) if hasattr(one, "low") and hasattr(one, "high")]
        self._paths = [path for path, one in numbers if np.dtype(one.dtype).name in _WIDE]
        size = sum(int(np.prod(one.shape)) * 8 for path, one in numbers if path in self._paths)
        self._few = min(num_envs, max(1, _MOST_BYTES // max(1, size * (_STEPS + 1))))
        self._seen: list[list[list[np.ndarray]]] = [[[] for _ in range(self._few)] for _ in self._paths]
        self.looks = bool(self._paths)  # False: nothing is to be seen, or it was

    def look(self, obs: Any, rows: np.ndarray | None = None) -> None:
        """Takes observations [n, *] as the environments gave them, of `rows` [n] or of all; call it while `looks`."""
        which = range(self._few) if rows is None else rows.tolist()
        for path, seen in zip(self._paths, self._seen):
            array = _at(obs, path)
            for at, i in enumerate(which):
                if i < self._few and len(seen[i]) <= _STEPS:
                    seen[i].append(np.array(array[at]))
        if all(len(one) > _STEPS for one in self._seen[0]):
            self.looks = False
            if self._warns:
                for message in self.messages():
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
                self._seen = []

    def messages(self) -> Iterator[str]:
        """Yields a line for the features that were lost so far in one way."""
        clipped: list[str] = []
        merged: list[str] = []
        for path, seen in zip(self._paths, self._seen):
            values = [np.stack(one) for one in seen if len(one) > 1]
            if not values:
                continue
            shape, kind = values[0].shape[1:], values[0].dtype.kind
            beyond, lost = np.zeros(shape, bool), np.zeros(shape, bool)
            for one in values:
                held = one
                if kind in "iu":
                    limits = np.iinfo("int32" if kind == "i" else "uint32")
                    held = one.clip(limits.min, limits.max)
                    beyond |= (held != one).any(axis=0)
                lost |= _lost(one, held)
            clipped += [self._name(path, index) for index in np.argwhere(beyond)]
            merged += [self._name(path, index) for index in np.argwhere(lost & ~beyond)]
        mend = "let the environment return differences or scaled numbers, such as the time since its reset"
        if clipped:
            what = f"expected integers that int32 holds, got larger ones in {_listed(clipped)}"
            yield f"env.id {self._id}: {what}: {mend}"
        if merged:
            yield (
                f"env.id {self._id}: expected observations that float32 can tell apart, got changes of too few digits "
                f"in {_listed(merged)}: the policy sees next to a constant: {mend}"
            )

    def _name(self, path: tuple[Any, ...], index: np.ndarray) -> str:
        place, whose = list(map(int, index)), ""
        if self._agents:
            kind, path = (self._kinds[path[0]], path[1:]) if self._kinds else (range(len(self._agents)), path)
            whose = f" of agent {self._agents[kind[place.pop(0)]]}"
        element = f"[{', '.join(map(str, place))}]" if place else ""
        return "observation" + "".join(f"[{key!r}]" for key in path) + element + whose


def _lost(values: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Returns the elements [*] of values [T, *] of which float32 has half as many different ones, or fewer."""
    raw = np.sort(values.astype(np.float64), axis=0)
    seen = np.sort(held.astype(np.float32), axis=0)
    different = lambda x: 1 + (np.diff(x, axis=0) != 0).sum(axis=0)
    with np.errstate(invalid="ignore"):  # inf - inf: check_env has the words
        size, spread = np.abs(raw).max(axis=0), raw[-1] - raw[0]
        real = (size >= _LARGE) | (spread >= _SMALL * size)
    return (different(raw) > 2) & (2 * different(seen) <= different(raw)) & real & np.isfinite(size)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
