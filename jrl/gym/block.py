"""Memory that holds one step of several Gymnasium environments, and the spaces' arrays that lie in it."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jrl.gym import faults
from jrl.gym.faults import FLAGS, NUMBERS, kind

# ---------------------------------------------------------------- spaces of Gymnasium's and their elements


def leaves(space: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the spaces of arrays in `space`, each with the names and places that lead to it."""
    name = kind(space)
    if name not in ("Dict", "Tuple"):
        return [(path, space)]
    parts = space.spaces.items() if name == "Dict" else enumerate(space.spaces)
    return [leaf for key, part in parts for leaf in leaves(part, (*path, key))]


def sizes(space: Any) -> list[tuple[str, tuple[int, ...], int]]:
    """Returns name, shape and item size of an observation's arrays, for `jrl.host.room.check_observations`."""
    name = lambda path: "observation" + "".join(f"[{key!r}]" for key in path)
    arrays = [leaf for leaf in leaves(space) if leaf[1].shape is not None and leaf[1].dtype is not None]
    return [(name(path), tuple(part.shape), np.dtype(part.dtype).itemsize) for path, part in arrays]


def element(space: Any, parts: Iterator[Any]) -> Any:
    """Returns `parts`, one for each of `leaves(space)`, as an element of `space`."""
    name = kind(space)
    if name == "Dict":
        return {key: element(part, parts) for key, part in space.spaces.items()}
    return tuple(element(part, parts) for part in space.spaces) if name == "Tuple" else next(parts)


def row(batch: Any, i: Any) -> Any:
    """Returns element i of a batch, dicts and tuples included."""
    if isinstance(batch, dict):
        return {key: row(part, i) for key, part in batch.items()}
    return tuple(row(part, i) for part in batch) if isinstance(batch, tuple) else batch[i]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


class Block:
    """The latest step of B environments, in one piece of memory that processes can share.

    Observations and actions are arrays [B, *] in the environment's own dtype, one for each leaf of its space, `reward`
    [B] f64, `terminated` and `truncated` [B] bool.

    Args:
      observation, action: spaces of Gymnasium's.
      num_envs: B.
      buffer: gives so many bytes of memory; None: memory of its own.
      check_steps: how many of the first steps of each environment are looked at closely before they are taken; 0: none
        is looked at. Later ones are refused where a conversion would hide what is no number, flag or info.
    """

    def __init__(self, observation: Any, action: Any, num_envs: int, buffer: Any = None, *, check_steps: int = 0):
        seen, taken = leaves(observation), leaves(action)
        fields = [(space.shape, space.dtype) for _, space in (*seen, *taken)]
        fields += [((), np.dtype(dtype)) for dtype in (np.float64, bool, bool)]
        offsets, size = [], 0
        for shape, dtype in fields:
            offsets.append(size)
            size += -(-num_envs * int(np.prod(shape)) * dtype.itemsize // 64) * 64  # each at a cache line of its own
        self.size = max(size, 1)
        buffer = bytearray(self.size) if buffer is None else buffer(self.size)
        make = lambda where, field: np.ndarray((num_envs, *field[0]), field[1], buffer, where)
        *arrays, self.reward, self.terminated, self.truncated = map(make, offsets, fields)
        self._observation, self._shape, self._dtype = observation, *fields[0]
        self._seen = list(zip([path for path, _ in seen], arrays))
        self._taken = list(zip([path for path, _ in taken], arrays[len(seen) :]))
        self._plain = arrays[0] if len(seen) == 1 and not seen[0][0] else None
        self._actions = element(action, iter(arrays[len(seen) :]))
        self._unseen = [check_steps] * num_envs  # steps of each that are still to be looked at
        self._check_steps, self._checks = check_steps, check_steps > 0

    def take(self, i: int, result: Any, *, reset: bool = False) -> Any:
        """Keeps what a step or a reset of environment i returned, and returns its info.

        Raises:
          Breach: it is not what Gymnasium's interface says, in one of the first steps.
          ValueError: it cannot be kept; in the same words.
        """
        if self._unseen[i] > 0:
            self._look(i, result, reset)
        try:
            if reset:
                (obs, info), reward, terminated, truncated = result, 0.0, False, False
            else:
                obs, reward, terminated, truncated, info = result
                # numpy would make a number of None and of a text, and a flag of anything
                if not (
                    type(reward) in NUMBERS
                    and type(terminated) in FLAGS
                    and type(truncated) in FLAGS
                    and type(info) is dict
                ):
                    self._look_at_rest(reward, terminated, truncated, info)
            if self._plain is not None:
                value = np.asarray(obs)
                if value.shape != self._shape:  # numpy would repeat a smaller one
                    raise ValueError(f"observation of shape {value.shape}, but the space has {self._shape}")
                if value.dtype is not self._dtype:
                    self._look_at_dtype(value, self._dtype)
                self._plain[i] = value
            else:
                for path, array in self._seen:
                    value = np.asarray(_at(obs, path))
                    if value.shape != array.shape[1:]:
                        raise ValueError(f"observation of shape {value.shape}, but its space has {array.shape[1:]}")
                    if value.dtype is not array.dtype:
                        self._look_at_dtype(value, array.dtype)
                    array[i] = value
            self.reward[i], self.terminated[i], self.truncated[i] = reward, terminated, truncated
        except Exception:  # what the space does not allow may fail in any way
            if not (lines := self._refused(result, reset, "a reset" if reset else "a step")):
                raise
            raise ValueError("; ".join(lines)) from None
        return info

    def _look(self, i: int, result: Any, reset: bool) -> None:
        self._unseen[i] -= not reset
        where = faults.place_in_time(self._check_steps - self._unseen[i], reset=reset)
        if lines := self._refused(result, reset, where):
            raise faults.Breach(*lines)

    def _refused(self, result: Any, reset: bool, where: str) -> list[str]:
        return faults.refused((faults.of_reset if reset else faults.of_step)(self._observation, result, where))

    def _look_at_rest(self, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        if self._checks and not faults.is_plain(reward, terminated, truncated, info):
            raise ValueError("no step")

    def _look_at_dtype(self, value: np.ndarray, dtype: np.dtype) -> None:
        if self._checks and value.dtype.kind not in ("biuf" if dtype.kind == "f" else "biu"):
            raise ValueError(f"observation of {value.dtype}, but the space has {dtype}")

    def observations(self, rows: Any = None) -> Any:
        """Returns a copy of the observations [n, *], of all environments or of `rows` [n]."""
        if self._plain is not None:
            return self._plain.copy() if rows is None else self._plain[rows]
        taken = (array.copy() if rows is None else array[rows] for _, array in self._seen)
        return element(self._observation, taken)

    def put_actions(self, index: list[int], action: Any) -> None:
        """Writes actions [n, *] of the environments `index` [n]."""
        for path, array in self._taken:
            array[index] = _at(action, path)

    def action(self, i: int) -> Any:
        """Returns a copy of an action: the environment may keep it, and the next one is written to the same place."""
        return _copied(row(self._actions, i))


def _copied(action: Any) -> Any:
    if isinstance(action, dict):
        return {key: _copied(part) for key, part in action.items()}
    return tuple(map(_copied, action)) if isinstance(action, tuple) else action.copy()
