"""The user's own metrics: collected episode by episode, reported as mean, min and max, or as they are."""

from collections.abc import Mapping
from typing import Any

import numpy as np


class CustomMetrics:
    """Numbers since they were last drained, by name.

    Args:
      keep: report them all, as lists with an entry per episode, instead of mean, min and max.
    """

    def __init__(self, keep: bool = False):
        self._keep = keep
        self._found: dict[str, list[float]] = {}
        self._histograms: dict[str, list[float]] = {}
        self._of_updates: dict[str, list[float]] = {}

    def add_episode(self, metrics: Mapping[str, Any], histograms: Mapping[str, Any]) -> None:
        """Adds what an episode leaves: a number, or several, by name.

        Raises:
          TypeError: a value is neither; names it.
        """
        for name, value in metrics.items():
            self._found.setdefault(name, []).extend(_numbers("custom_metrics", name, value))
        for name, value in histograms.items():
            self._histograms.setdefault(name, []).extend(_numbers("hist_data", name, value))

    def add_update(self, metrics: Mapping[str, Any]) -> None:
        """Adds what an update leaves. Raises TypeError as `add_episode`."""
        for name, value in metrics.items():
            self._of_updates.setdefault(name, []).extend(_numbers("result", name, value))

    def drain(self, prefix: str = "") -> dict[str, Any]:
        """Returns the metrics so far, and forgets them.

        Returns:
          `custom/<name>_mean`, `_min` and `_max`, or `custom/<name>` (a list); `learner/<name>`, the mean over
          updates; `hist/<name>`, a list. Each behind `prefix`. Nothing of a name without a number.
        """
        row: dict[str, Any] = {}
        for name, values in self._found.items():
            if self._keep:
                row[f"{prefix}custom/{name}"] = values
            elif values:
                for kind, over in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                    row[f"{prefix}custom/{name}_{kind}"] = float(over(values))
        row |= {f"{prefix}learner/{name}": float(np.mean(x)) for name, x in self._of_updates.items() if x}
        row |= {f"{prefix}hist/{name}": values for name, values in self._histograms.items()}
        self._found, self._histograms, self._of_updates = {}, {}, {}
        return row


def _numbers(where: str, name: str, value: Any) -> list[float]:
    try:
        return np.asarray(value, np.float64).reshape(-1).tolist()
    except (TypeError, ValueError) as e:
        raise TypeError(f"{where}[{name!r}] is {value!r}: expected a number, or a list of numbers") from e
