"""Stop criteria: whether a result row meets one."""

import math
import re
from collections.abc import Mapping
from typing import Any

_WINDOW_MEAN = re.compile(r"(episode|agent/.+|policy/[^/]+)/(?:return|length)")


def is_reliable(name: str, row: Mapping[str, Any], window: int) -> bool:
    """Return whether a row's metric can meet a criterion: a mean over fewer than `window` episodes is luck.

    Args:
      name: metric.
      row: result row; `episode/window`, `agent/NAME/window` and `policy/NAME/window` count the episodes of its means.
      window: required number of episodes.
    """
    return window_size(name, row) >= window


def window_size(name: str, row: Mapping[str, Any]) -> float:
    """Return the number of episodes in the mean of a row's metric; inf: the metric is not such a mean."""
    found = _WINDOW_MEAN.fullmatch(name)
    if found is None:
        return math.inf
    of_games = row.get("episode/window", math.inf)  # rows of earlier versions have no other window
    return float(row.get(f"{found[1]}/window", of_games))


def is_met(name: str, row: Mapping[str, Any], target: float, window: int) -> bool:
    """Return whether the row has the metric, reliable and at least `target`.

    A mean over 3 episodes is not yet reliable:

    >>> [is_met("episode/return", {"episode/return": 500, "episode/window": n}, 475, window=10) for n in (3, 10)]
    [False, True]
    """
    value = row.get(name)
    return value is not None and is_reliable(name, row, window) and value >= target
