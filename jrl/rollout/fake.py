"""The speed of learning alone: a source whose rollouts cost nothing."""

from jrl.rollout.source import Wrapper
from jrl.types import Episodes, Key, PyTree, Rollout


class Fake(Wrapper):
    """Collects once, and then yields that rollout and its report again and again; a Source.

    Its steps are counted as if they had been taken. The arrays are the same ones each time: whoever learns from a
    rollout must not take over (donate) its buffers, which `loop.staged` does not.
    """

    _first: tuple[Rollout, Episodes] | None = None

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        if self._first is None:
            self._first = self._source.next(actor, key)
        return self._first

    def reset(self, key: Key) -> None:
        """The next call collects anew."""
        self._first = None
        self._source.reset(key)
