"""The config argument of a command: one of jrl's files, or one of RLlib's."""

from collections.abc import Callable, Mapping
from typing import Any

from jrl import config


def given(
    source: str | Mapping[str, Any] | None,
    *,
    algo: str | None,
    env: str | None,
    drop: bool,
    over_it: Mapping[str, Any] | None = None,
    tell: Callable[[str], None],
) -> Mapping[str, Any]:
    """Returns plain data of the config that a command was given; RLlib's is migrated.

    Args:
      source: a file, the name of one that comes with jrl, what one holds, or None.
      algo, env, drop, over_it, tell: see `jrl.migrate.translated`.
    Raises:
      InputError: all that is wrong.
    """
    data = source if isinstance(source, Mapping) else config.mapping(source)
    if config.is_ours(data) and not (drop or over_it):
        return data
    from jrl import migrate

    name = "--config" if source is None or isinstance(source, Mapping) else source
    return migrate.translated(data, name, algo=algo, env=env, drop=drop, over_it=over_it, tell=tell)
