"""Tests whether a result row meets a stop criterion, for ends of runs and displays of their progress."""

import math
import re
from collections.abc import Mapping
from typing import Any

_OF_THE_WINDOW = re.compile(r"(episode|agent/.+|policy/[^/]+)/(?:return|length)")


def counts(name: str, row: Mapping[str, Any], window: int) -> bool:
    """Returns whether a row's value of the metric can meet a criterion: a mean over the first few episodes is luck.

    Args:
      name: of the metric.
      row: a result row; `episode/window` says over how many episodes its means are, `agent/NAME/window` and
        `policy/NAME/window` over how many those of an agent and of a policy are.
      window: over so many they have to be.
    """
    return episodes(name, row) >= window


def episodes(name: str, row: Mapping[str, Any]) -> float:
    """Returns over how many episodes a row's value of the metric is a mean; inf: it is not such a mean."""
    found = _OF_THE_WINDOW.fullmatch(name)
    if found is None:
        return math.inf
    of_games = row.get("episode/window", math.inf)  # which is all that rows of earlier versions have
    return float(row.get(f"{found[1]}/window", of_games))


def met(name: str, row: Mapping[str, Any], target: float, window: int) -> bool:
    """Returns whether the row has the metric, it counts, and is at least `target`.

    A mean over 3 episodes is not yet one over 10:

    >>> [met("episode/return", {"episode/return": 500, "episode/window": n}, 475, window=10) for n in (3, 10)]
    [False, True]
    """
    value = row.get(name)
    return value is not None and counts(name, row, window) and value >= target
