"""A source whose rollouts cost nothing, to measure the speed of learning alone."""

from jrl.rollout.source import Wrapper
from jrl.types import Episodes, Key, PyTree, Rollout


class Fake(Wrapper):
    """Collects one rollout, and then returns this rollout and its report repeatedly; a Source.

    Its steps are counted as usual. The arrays are the same each time, so the learner must not donate a rollout's
    buffers; `learn.staged` does not.
    """

    _first: tuple[Rollout, Episodes] | None = None

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        if self._first is None:
            self._first = self._source.next(actor, key)
        return self._first

    def reset(self, key: Key) -> None:
        """Resets the source; the next call collects a new rollout."""
        self._first = None
        self._source.reset(key)
