"""Data sets: episodes on disk and in memory, of jrl's and other formats.

    store = data.read("runs/pendulum-mixed")           # any format of data.formats
    store.num_episodes, store.returns().mean()
    data.write(store, "out/", format="minari")

`store` holds whole episodes in numpy arrays. `formats` has a module for each file format. `writer` writes the files of
a growing data set. `inspection` summarises a data set, `findings` checks it. `commands` has the commands of
`python -m jrl.data`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrl.data.episode import Episode
    from jrl.data.formats import NAMES, read, write
    from jrl.data.store import EpisodeStore, concatenated, of_episodes
    from jrl.data.writer import Writer

__all__ = ["NAMES", "Episode", "EpisodeStore", "Writer", "concatenated", "of_episodes", "read", "write"]


def __getattr__(name: str) -> Any:  # imports on first use, so that `--help` of the command needs no jax
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"NAMES": "formats", "read": "formats", "write": "formats", "Writer": "writer"}.get(name, "store")
    return getattr(importlib.import_module(f"jrl.data.{module}"), name)
