"""Refused combinations of keys, as rows of a table."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A combination of values that cannot be run.

        Row("rollout.max_policy_lag rollout.mode", lambda c: c.rollout.mode == "sync" and c.rollout.max_policy_lag,
            "rollout.max_policy_lag: without rollout.mode async no policy lags: set that, or leave this out")

    Where a row reads a key that is at fault itself, it is left out.
    """

    keys: str  # that it reads, with spaces between; the first is the one at fault
    refuses: Callable[..., Any]  # config -> whether it is refused; or the message, or a list of them
    message: str = ""  # of a row whose function does not say it


def refused(rows: Iterable[Row], *given: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the keys and the message of each row that refuses a config.

    Args:
      given: the config, and what else the rows are asked about.
    """
    for row in rows:
        if found := row.refuses(*given):
            for message in found if isinstance(found, list) else [row.message or found]:
                yield tuple(row.keys.split()), message
