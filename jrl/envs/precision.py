"""Warning about observations that lose information in the conversion to float32 and int32."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrl.errors import format_names
from jrl.gym.block import flatten_space, get_part

_STEPS = 32  # compared observations of each environment, without the first
_MOST_BYTES = 2**26  # memory for recorded observations; beyond it fewer environments are recorded
_LARGE = 1000.0  # below it, relative changes below `_SMALL` count as rounding errors of the environment
_SMALL = 1e-8
_NAMED = 3  # features named in a message
_WIDE = ("float64", "longdouble", "float128", "int64", "uint64", "int32", "uint32")


class Precision:
    """Records the first observations of host environments before their conversion, and reports lost information.

    Args:
      id: environment id, for messages.
      space: Gymnasium's space of one environment.
      num_envs: B.
      agents: agent names, if leaves of an observation have an agent axis.
      kinds: agent indices of each part of the space, a Tuple by kind; (): one kind.
      warns: whether to warn after the last recorded step; False: the caller reads `messages`.
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
        # discrete spaces are one-hot encoded and lose nothing
        boxes = [(path, box) for path, box in flatten_space(space) if hasattr(box, "low") and hasattr(box, "high")]
        self._paths = [path for path, box in boxes if np.dtype(box.dtype).name in _WIDE]
        size = sum(int(np.prod(box.shape)) * 8 for path, box in boxes if path in self._paths)
        self._few = min(num_envs, max(1, _MOST_BYTES // max(1, size * (_STEPS + 1))))
        self._records: list[list[list[np.ndarray]]] = [[[] for _ in range(self._few)] for _ in self._paths]
        self.is_active = bool(self._paths)  # False: nothing to record, or done

    def record(self, obs: Any, rows: np.ndarray | None = None) -> None:
        """Records unconverted observations [n, *] of environments `rows` [n] or of all. Call it while `is_active`."""
        which = range(self._few) if rows is None else rows.tolist()
        for path, records in zip(self._paths, self._records):
            array = get_part(obs, path)
            for row, i in enumerate(which):
                if i < self._few and len(records[i]) <= _STEPS:
                    records[i].append(np.array(array[row]))
        if all(len(records) > _STEPS for records in self._records[0]):
            self.is_active = False
            if self._warns:
                for message in self.messages():
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
                self._records = []

    def messages(self) -> Iterator[str]:
        """Yields one line per way of losing information, with the features that lost it so far."""
        clipped: list[str] = []
        merged: list[str] = []
        for path, records in zip(self._paths, self._records):
            values = [np.stack(steps) for steps in records if len(steps) > 1]
            if not values:
                continue
            shape, kind = values[0].shape[1:], values[0].dtype.kind
            beyond, lost = np.zeros(shape, bool), np.zeros(shape, bool)
            for steps in values:
                clipped_steps = steps
                if kind in "iu":
                    limits = np.iinfo("int32" if kind == "i" else "uint32")
                    clipped_steps = steps.clip(limits.min, limits.max)
                    beyond |= (clipped_steps != steps).any(axis=0)
                lost |= _find_lost(steps, clipped_steps)
            clipped += [self._name(path, index) for index in np.argwhere(beyond)]
            merged += [self._name(path, index) for index in np.argwhere(lost & ~beyond)]
        fix = "let the environment return differences or scaled numbers, such as the time since its reset"
        if clipped:
            what = f"expected integers within int32, got larger integers in {format_names(clipped, _NAMED)}"
            yield f"env.id {self._id}: {what}: {fix}"
        if merged:
            yield (
                f"env.id {self._id}: expected observations whose changes float32 can represent, got changes of too few "
                f"digits in {format_names(merged, _NAMED)}, almost constant for the policy: {fix}"
            )

    def _name(self, path: tuple[Any, ...], index: np.ndarray) -> str:
        place, whose = list(map(int, index)), ""
        if self._agents:
            kind, path = (self._kinds[path[0]], path[1:]) if self._kinds else (range(len(self._agents)), path)
            whose = f" of agent {self._agents[kind[place.pop(0)]]}"
        element = f"[{', '.join(map(str, place))}]" if place else ""
        return "observation" + "".join(f"[{key!r}]" for key in path) + element + whose


def _find_lost(values: np.ndarray, clipped: np.ndarray) -> np.ndarray:
    """Returns the elements [*] of values [T, *] for which float32 has at most half as many different values."""
    raw = np.sort(values.astype(np.float64), axis=0)
    converted = np.sort(clipped.astype(np.float32), axis=0)
    different = lambda x: 1 + (np.diff(x, axis=0) != 0).sum(axis=0)
    with np.errstate(invalid="ignore"):  # inf - inf; check_env reports infinite values
        size, spread = np.abs(raw).max(axis=0), raw[-1] - raw[0]
        real = (size >= _LARGE) | (spread >= _SMALL * size)
    return (different(raw) > 2) & (2 * different(converted) <= different(raw)) & real & np.isfinite(size)
