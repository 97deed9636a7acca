"""Memory for one step of several Gymnasium environments, and conversion between spaces and flat lists of arrays."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jrl.gym import faults, space_kind
from jrl.gym.faults import FLAGS, NUMBERS

# ---------------------------------------------------------------- Gymnasium spaces and their elements


def flatten_space(space: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the array spaces in `space`, each with its path of keys and indices."""
    name = space_kind(space)
    if name not in ("Dict", "Tuple"):
        return [(path, space)]
    parts = space.spaces.items() if name == "Dict" else enumerate(space.spaces)
    return [leaf for key, part in parts for leaf in flatten_space(part, (*path, key))]


def build_element(space: Any, parts: Iterator[Any]) -> Any:
    """Returns the element of `space` made of `parts`, one array per entry of `flatten_space(space)`."""
    name = space_kind(space)
    if name == "Dict":
        return {key: build_element(part, parts) for key, part in space.spaces.items()}
    return tuple(build_element(part, parts) for part in space.spaces) if name == "Tuple" else next(parts)


def get_row(batch: Any, i: Any) -> Any:
    """Returns element i of a batch; dicts and tuples are indexed part by part."""
    if isinstance(batch, dict):
        return {key: get_row(part, i) for key, part in batch.items()}
    return tuple(get_row(part, i) for part in batch) if isinstance(batch, tuple) else batch[i]


def get_part(value: Any, path: tuple[Any, ...]) -> Any:
    """Returns the part of an element at a path of keys and indices."""
    for key in path:
        value = value[key]
    return value


class StepMemory:
    """Latest step of B environments, in one piece of memory that processes can share.

    Observations and actions are arrays [B, *] in the environment's dtype, one per array of the space. `reward` is
    [B] f64, `terminated` and `truncated` are [B] bool.

    Args:
      observation, action: Gymnasium spaces.
      num_envs: B.
      buffer: function from a number of bytes to memory; None: a new bytearray.
      check_steps: number of first steps of each environment that get all checks. Later steps are checked only for
        values that numpy would silently convert. 0: no step is checked.
      report: callback for the faults of all steps, which then do not raise; None: the first steps raise.
    """

    def __init__(
        self,
        observation: Any,
        action: Any,
        num_envs: int,
        buffer: Any = None,
        *,
        check_steps: int = 0,
        report: Callable[[faults.Fault], None] | None = None,
    ):
        observed, acted = flatten_space(observation), flatten_space(action)
        fields = [(space.shape, space.dtype) for _, space in (*observed, *acted)]
        fields += [((), np.dtype(dtype)) for dtype in (np.float64, bool, bool)]
        offsets, size = [], 0
        for shape, dtype in fields:
            offsets.append(size)
            size += -(-num_envs * int(np.prod(shape)) * dtype.itemsize // 64) * 64  # each array starts a cache line
        self.size = max(size, 1)
        buffer = bytearray(self.size) if buffer is None else buffer(self.size)
        make = lambda offset, field: np.ndarray((num_envs, *field[0]), field[1], buffer, offset)
        *arrays, self.reward, self.terminated, self.truncated = map(make, offsets, fields)
        self._observation, self._shape, self._dtype = observation, *fields[0]
        self._observation_arrays = list(zip([path for path, _ in observed], arrays))
        self._action_arrays = list(zip([path for path, _ in acted], arrays[len(observed) :]))
        self._plain = arrays[0] if len(observed) == 1 and not observed[0][0] else None
        self._actions = build_element(action, iter(arrays[len(observed) :]))
        self._steps = [0] * num_envs  # steps of each environment
        self._check_steps = np.inf if report is not None else check_steps
        self._report, self._checks = report, check_steps > 0

    def take(self, i: int, result: Any, *, reset: bool = False) -> Any:
        """Stores the result of a step or reset of environment i; return its info.

        Raises:
          Breach: the result violates Gymnasium's interface, in one of the first steps.
          ValueError: the result cannot be stored; same messages.
        """
        if self._steps[i] < self._check_steps:
            self._steps[i] += not reset
            found = self._list_faults(result, reset, faults.describe_time(self._steps[i], reset=reset))
            faults.report_or_raise(found, self._report)
        try:
            if reset:
                (obs, info), reward, terminated, truncated = result, 0.0, False, False
            else:
                obs, reward, terminated, truncated, info = result
                # numpy converts None and text to numbers, and any object to a flag
                if not (
                    type(reward) in NUMBERS
                    and type(terminated) in FLAGS
                    and type(truncated) in FLAGS
                    and type(info) is dict
                ):
                    self._check_values(reward, terminated, truncated, info)
            if self._plain is not None:
                value = np.asarray(obs)
                if value.shape != self._shape:  # numpy would broadcast a smaller array
                    raise ValueError(f"observation of shape {value.shape}, but the space has {self._shape}")
                if value.dtype is not self._dtype:
                    self._check_dtype(value, self._dtype)
                self._plain[i] = value
            else:
                for path, array in self._observation_arrays:
                    value = np.asarray(get_part(obs, path))
                    if value.shape != array.shape[1:]:
                        raise ValueError(f"observation of shape {value.shape}, but its space has {array.shape[1:]}")
                    if value.dtype is not array.dtype:
                        self._check_dtype(value, array.dtype)
                    array[i] = value
            self.reward[i], self.terminated[i], self.truncated[i] = reward, terminated, truncated
        except Exception:  # a value outside the space can fail in any way
            found = self._list_faults(result, reset, "a reset" if reset else "a step")
            if not (lines := faults.list_fatal(found)):
                raise
            raise ValueError("; ".join(lines)) from None
        return info

    def _list_faults(self, result: Any, reset: bool, where: str) -> Iterator[faults.Fault]:
        return (faults.check_reset if reset else faults.check_step)(self._observation, result, where)

    def _check_values(self, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        if self._checks and not faults.has_no_fatal_fault(reward, terminated, truncated, info):
            raise ValueError("not a step")

    def _check_dtype(self, value: np.ndarray, dtype: np.dtype) -> None:
        if self._checks and value.dtype.kind not in ("biuf" if dtype.kind == "f" else "biu"):
            raise ValueError(f"observation of {value.dtype}, but the space has {dtype}")

    def observations(self, rows: Any = None) -> Any:
        """Returns a copy of the observations [n, *] of all environments, or of the environments `rows` [n]."""
        if self._plain is not None:
            return self._plain.copy() if rows is None else self._plain[rows]
        parts = (array.copy() if rows is None else array[rows] for _, array in self._observation_arrays)
        return build_element(self._observation, parts)

    def put_actions(self, index: list[int], action: Any) -> None:
        """Writes actions [n, *] of the environments `index` [n]."""
        for path, array in self._action_arrays:
            array[index] = get_part(action, path)

    def action(self, i: int) -> Any:
        """Returns a copy of action i: the environment may keep it, and the next action overwrites the memory."""
        return _copy_action(get_row(self._actions, i))


def _copy_action(action: Any) -> Any:
    if isinstance(action, dict):
        return {key: _copy_action(part) for key, part in action.items()}
    return tuple(map(_copy_action, action)) if isinstance(action, tuple) else action.copy()
