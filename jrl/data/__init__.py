"""Data sets: episodes on disk and in memory, of jrl's and other formats.

    store = data.read("runs/pendulum-mixed")           # whatever format: data.formats
    store.num_episodes, store.returns().mean()
    data.write(store, "out/", format="minari")

An EpisodeStore (`store`) holds whole episodes in numpy arrays; `formats` has a module for each kind of file, `writer`
writes files of a data set that grows, `inspection` says what is in a data set and what is wrong with it.
`python -m jrl.data` is a command: `commands` has a module for each of its own.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrl.data.formats import NAMES, read, write
    from jrl.data.store import Episode, EpisodeStore, concatenated, of_episodes
    from jrl.data.writer import Writer

__all__ = ["NAMES", "Episode", "EpisodeStore", "Writer", "concatenated", "of_episodes", "read", "write"]


def __getattr__(name: str) -> Any:  # not before it is asked for: the command answers `--help` without jax
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = {"NAMES": "formats", "read": "formats", "write": "formats", "Writer": "writer"}.get(name, "store")
    return getattr(importlib.import_module(f"jrl.data.{where}"), name)
