"""Files of a data set that grows: whole episodes, in numbered files that are there whole or not at all.

    with Writer("out/", observation, action_space, max_file_mb=64) as writer:
        writer.add(episode)

A process that is killed leaves the files that it finished; what it held of the next one is lost.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jrl.data import formats
from jrl.data.store import Episode, fault, of_episodes
from jrl.errors import InputError
from jrl.fields.paths import resolve, unwritable
from jrl.types import Space

PREFIX = "output"


class Writer:
    """Writes episodes to `directory/output-00000.npz` and so on; in a directory that has some, behind the last number.

    A file takes episodes until the next one would take the bytes of their arrays beyond `max_file_mb` * 2^20, before
    compression; an episode that is larger has a file of its own. `files` are those written so far.

    Raises:
      InputError: the format is not one of `formats.OF_FILES`, `max_file_mb` is not above 0, or the directory cannot be
        made.
    """

    def __init__(
        self,
        directory: str | Path,
        observation: Space,
        action_space: Space,
        *,
        format: str = "jrl",
        max_file_mb: float = 64,
        compress: bool = True,
        meta: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ):
        self._kind = formats.module(format)
        if format not in formats.OF_FILES:
            mend = f"write one of {', '.join(formats.OF_FILES)}, and convert the files afterwards"
            raise InputError(f"data format {format!r} cannot be written file by file: {mend}")
        if not max_file_mb > 0:
            raise InputError(f"max_file_mb: expected more than 0, got {max_file_mb}")
        self._directory = resolve(directory, "data", "new directory")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise unwritable(self._directory, "data", e) from e
        self._spaces = observation, action_space
        self._most = max_file_mb * 2**20
        self._compress = compress
        self._meta, self._notes = dict(meta or {}), tuple(notes)
        numbers = [re.match(rf"{PREFIX}-(\d+)\.", path.name) for path in self._directory.iterdir()]
        self._next = max((int(match[1]) + 1 for match in numbers if match), default=0)
        self._held: list[Episode] = []
        self._held_bytes = self._added = 0
        self._first: Episode | None = None  # that all others must be like
        self.files: list[Path] = []

    def add(self, episode: Episode) -> None:
        """Takes an episode, whose arrays must not change any more.

        Raises:
          InputError: it does not fit the spaces, or its columns and labels are not those of the first.
        """
        self._first = self._first or episode._replace(obs=None, action=None)
        if found := fault(episode, *self._spaces, self._first):
            raise InputError(f"{self._directory}: episode {self._added}: {found}")
        self._added += 1
        arrays = jax.tree.leaves((episode.obs, episode.action, episode.reward, dict(episode.columns)))
        size = sum(x.nbytes for x in arrays)
        if self._held_bytes + size > self._most:
            self.close()
        self._held.append(episode)
        self._held_bytes += size
        if self._held_bytes >= self._most:
            self.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes the episodes that are held."""
        if not self._held:
            return
        path = self._directory / f"{PREFIX}-{self._next:05d}{self._kind.SUFFIXES[0]}"
        store = of_episodes(*self._spaces, self._held, meta={**self._meta, "path": str(path)}, notes=self._notes)
        self._kind.write_file(store, path, compress=self._compress)
        self.files.append(path)
        self._next += 1
        self._held, self._held_bytes = [], 0
