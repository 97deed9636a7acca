"""Numbers that clients tell beside rewards, and their means in the rows of a run."""

from collections.abc import Mapping
from typing import Any

from jrl.serve import protocol
from jrl.serve.client import INFO_LENGTH, INFOS
from jrl.serve.protocol import Refused

INFO = "external/info/"  # metrics: means of what was told since the row before, by name
NAMES = 64  # in a run, so that its memory and its rows stay bounded


class Infos:
    """Sums what clients tell, by name, until a row takes it. With the table's lock held.

    Args:
      kept: whether a run has rows for it; otherwise it is read and dropped.
    """

    def __init__(self, *, kept: bool):
        self._kept = kept
        self._names = set[str]()
        self._sums: dict[str, tuple[float, int]] = {}

    def read(self, given: Mapping[str, Any]) -> dict[str, float]:
        """Returns the field `infos` of a body. Raises Refused: it is no mapping of names to numbers, or there are
        too many.
        """
        told = given.get("infos")
        if told is None:
            return {}
        if not isinstance(told, Mapping) or len(told) > INFOS:
            raise Refused(422, f"infos: expected a mapping of at most {INFOS} names to numbers, got {str(told)[:80]}")
        for name in told:
            if not (0 < len(name) <= INFO_LENGTH and name.isprintable()):
                raise Refused(422, f"infos: expected names of 1 to {INFO_LENGTH} characters, got {name[:80]!r}")
        for name, x in told.items():
            protocol.array(protocol.NUMBER, x, (), f"infos/{name}")
        if self._kept and len(self._names.union(told)) > NAMES:
            new = next(name for name in told if name not in self._names)
            raise Refused(422, f"infos/{new}: a run has at most {NAMES} names, and has {len(self._names)} already")
        return {name: float(x) for name, x in told.items()}

    def add(self, told: Mapping[str, float]) -> None:
        """Counts what `read` gave, once its request is fulfilled."""
        if not self._kept:
            return
        self._names.update(told)
        for name, x in told.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + x, count + 1

    def drain(self) -> dict[str, float]:
        """Returns the means so far, as metrics, and forgets them."""
        found = {INFO + name: total / count for name, (total, count) in sorted(self._sums.items())}
        self._sums = {}
        return found
