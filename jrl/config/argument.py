"""The config argument of a command: a config of jrl or of RLlib."""

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
    """Returns the plain data of a command's config argument; a config of RLlib is migrated.

    Args:
      source: path of a file, name of a shipped config, the data of a config, or None for defaults.
      algo, env, drop, over_it, tell: see `jrl.migrate.translated`.
    Raises:
      InputError: all faults of the config.
    """
    data = source if isinstance(source, Mapping) else config.mapping(source)
    if config.is_jrl_config(data) and not (drop or over_it):
        return data
    from jrl import migrate

    name = "--config" if source is None or isinstance(source, Mapping) else source
    return migrate.translated(data, name, algo=algo, env=env, drop=drop, over_it=over_it, tell=tell)
