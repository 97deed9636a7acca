"""Pictures of a report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jrl.metrics import report


def curves(said: Mapping[str, Any], png: Path) -> Path:
    """Draws the learning curves of every task, with the intervals of their interquartile means.

    Args:
      said: of `content.content`.
      png: is written.
    """
    panels: dict[str, dict[str, Any]] = {task: {} for task in said["tasks"]}
    for found in said["curves"]:
        lines = [(np.array(run["x"]), np.array(run["y"])) for run in found["runs"]]
        panels[found["task"]][found["method"]] = (lines, _around(found["band"]))
    if said["curves_over_tasks"]:
        panels["all tasks, normalised"] = {
            found["method"]: ([], _around(found["band"])) for found in said["curves_over_tasks"] if found["band"]
        }
    return report.plot_groups(panels, png, x=said["axis"], y=said["objective"])


def _around(band: Mapping[str, Any] | None) -> report.Band | None:
    """Grid, middle, low and high; what is None becomes NaN, which is not drawn."""
    if band is None:
        return None
    x, value, low, high = (np.array(band[name], np.float64) for name in ("x", "value", "low", "high"))
    return x, value, low, high
