"""Users' custom metrics: collected per episode, reported as mean, min and max, or as lists."""

from collections.abc import Mapping
from typing import Any

import numpy as np


class CustomMetrics:
    """Numbers since the last drain, by name.

    Args:
      keep: whether to report all numbers as lists, one entry per episode, instead of mean, min and max.
    """

    def __init__(self, keep: bool = False):
        self._keep = keep
        self._episodes: dict[str, list[float]] = {}
        self._histograms: dict[str, list[float]] = {}
        self._updates: dict[str, list[float]] = {}

    def add_episode(self, metrics: Mapping[str, Any], histograms: Mapping[str, Any]) -> None:
        """Adds the metrics of an episode: a number or several, by name.

        Raises:
          TypeError: a value is not numeric; names it.
        """
        for name, value in metrics.items():
            self._episodes.setdefault(name, []).extend(_numbers("custom_metrics", name, value))
        for name, value in histograms.items():
            self._histograms.setdefault(name, []).extend(_numbers("hist_data", name, value))

    def add_update(self, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of an update. Raises TypeError as `add_episode`."""
        for name, value in metrics.items():
            self._updates.setdefault(name, []).extend(_numbers("result", name, value))

    def drain(self, prefix: str = "") -> dict[str, Any]:
        """Returns the metrics so far, and resets them.

        Returns:
          `custom/<name>_mean`, `_min` and `_max`, or `custom/<name>` (a list); `learner/<name>`, the mean over updates;
          `hist/<name>`, a list. Each name begins with `prefix`. Names without numbers are left out.
        """
        row: dict[str, Any] = {}
        for name, values in self._episodes.items():
            if self._keep:
                row[f"{prefix}custom/{name}"] = values
            elif values:
                for kind, over in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                    row[f"{prefix}custom/{name}_{kind}"] = float(over(values))
        row |= {f"{prefix}learner/{name}": float(np.mean(x)) for name, x in self._updates.items() if x}
        row |= {f"{prefix}hist/{name}": values for name, values in self._histograms.items()}
        self._episodes, self._histograms, self._updates = {}, {}, {}
        return row


def _numbers(where: str, name: str, value: Any) -> list[float]:
    try:
        return np.asarray(value, np.float64).reshape(-1).tolist()
    except (TypeError, ValueError) as e:
        raise TypeError(f"{where}[{name!r}] is {value!r}: expected a number, or a list of numbers") from e
