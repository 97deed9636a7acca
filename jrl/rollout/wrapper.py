"""A source around a source."""

from collections.abc import Callable
from typing import Any

from jrl.metrics import episodes
from jrl.types import Episodes, Key, PyTree, Rollout


class Wrapper:
    """Hands every call on to `source`; a wrapper replaces those it is about.

    Args:
      source: a Source; with `foreach_worker`, as Pools has, for ours.
    """

    def __init__(self, source: Any):
        self._source = source

    @property
    def columns(self) -> episodes.Columns:
        return self._source.columns

    @columns.setter
    def columns(self, columns: episodes.Columns) -> None:
        self._source.columns = columns

    @property
    def metrics(self) -> dict[str, float]:
        return self._source.metrics

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        return self._source.next(actor, key)

    def reset(self, key: Key) -> None:
        self._source.reset(key)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return self._source.foreach_env(fn)

    def close(self) -> None:
        self._source.close()

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._source, name)
