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
        band = found["band"]
        around = tuple(np.array(band[name], float) for name in ("x", "value", "low", "high")) if band else None
        panels[found["task"]][found["method"]] = (lines, around)
    return report.plot_groups(panels, png, x=said["axis"], y=said["objective"])
