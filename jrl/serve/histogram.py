"""Counts of seconds by size, as Prometheus reads them."""

import bisect
import itertools

BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)  # seconds


class Histogram:
    """Histogram of seconds. One thread adds to it.

    Attributes:
      counts: of values up to each of BOUNDS, and of those beyond, not cumulated.
      total: of all values.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Counts a value."""
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def text(self, name: str, labels: str = "") -> str:
        """Returns its lines in Prometheus' format; `labels` as `policy="main"`."""
        among = f"{labels}," if labels else ""
        cumulated = list(itertools.accumulate(self.counts))
        buckets = zip([*BOUNDS, "+Inf"], cumulated, strict=True)
        lines = [f'{name}_bucket{{{among}le="{bound}"}} {count}\n' for bound, count in buckets]
        of = f"{{{labels}}}" if labels else ""
        return "".join([*lines, f"{name}_sum{of} {self.total:.12g}\n", f"{name}_count{of} {cumulated[-1]}\n"])
