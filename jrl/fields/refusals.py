"""Refused combinations of config keys, as rows of a table."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A refused combination of values.

    Row("env.soft_horizon env.horizon", lambda cfg: cfg.env.soft_horizon and cfg.env.horizon is None,
        "env.soft_horizon: expected env.horizon, got null: set env.horizon=100, or leave env.soft_horizon out")
    """

    keys: str  # keys that the condition reads, separated by spaces; the error belongs to the first
    refuses: Callable[..., Any]  # condition: (config, ...) -> bool, a message, or a list of messages
    message: str = ""  # message, if the condition returns a bool


def refused(rows: Iterable[Row], *args: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys and the message of each row whose condition holds for `args`, the config and further values."""
    for row in rows:
        if result := row.refuses(*args):
            for message in result if isinstance(result, list) else [row.message or result]:
                yield tuple(row.keys.split()), message
