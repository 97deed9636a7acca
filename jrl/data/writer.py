"""Numbered files of a growing data set. Each file has whole episodes, and is written completely or not at all.

    with Writer("out/", observation, action_space, max_file_mb=64) as writer:
        writer.add(episode)

A process that is killed leaves its finished files; the episodes of the next file are lost.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jrl.data import formats
from jrl.data.episode import Episode
from jrl.data.store import find_episode_fault, of_episodes
from jrl.errors import InputError
from jrl.fields.paths import resolve, unwritable
from jrl.types import Space

PREFIX = "output"


class Writer:
    """Writer of episodes to `directory/output-00000.npz` and so on, after the last number in the directory.

    Args:
      directory: directory of the files; created if missing.
      observation, action_space: spaces of the episodes.
      format: format of `formats.FILE_FORMATS`.
      max_file_mb: largest size of the arrays in a file before compression, in MiB; a larger episode has its own file.
      compress: whether to compress the arrays.
      meta, notes: fields of the EpisodeStore.
    Attributes:
      files: files written so far.
    Raises:
      InputError: unknown format, `max_file_mb` not above 0, or a directory that cannot be created.
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
        self._kind = formats.load_format(format)
        if format not in formats.FILE_FORMATS:
            known = ", ".join(formats.FILE_FORMATS)
            raise InputError(f"data format: expected {known}, got {format!r}: convert the files afterwards")
        if not max_file_mb > 0:
            raise InputError(f"max_file_mb: expected more than 0, got {max_file_mb}")
        self._directory = resolve(directory, "data", "new directory")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise unwritable(self._directory, "data", e) from e
        self._spaces = observation, action_space
        self._max_bytes = max_file_mb * 2**20
        self._compress = compress
        self._meta, self._notes = dict(meta or {}), tuple(notes)
        numbers = [re.match(rf"{PREFIX}-(\d+)\.", path.name) for path in self._directory.iterdir()]
        self._next = max((int(match[1]) + 1 for match in numbers if match), default=0)
        self._held: list[Episode] = []
        self._held_bytes = self._added = 0
        self._first: Episode | None = None  # has the columns and labels of all episodes
        self.files: list[Path] = []

    def add(self, episode: Episode) -> None:
        """Adds an episode, whose arrays must not change afterwards.

        Raises:
          InputError: the episode does not fit the spaces, or its columns or labels differ from the first episode's.
        """
        self._first = self._first or episode.replace(obs=None, action=None)
        if found := find_episode_fault(episode, *self._spaces, self._first):
            raise InputError(f"{self._directory}: episode {self._added}: {found}")
        self._added += 1
        arrays = jax.tree.leaves((episode.obs, episode.action, episode.reward, dict(episode.columns)))
        size = sum(x.nbytes for x in arrays)
        if self._held_bytes + size > self._max_bytes:
            self.close()
        self._held.append(episode)
        self._held_bytes += size
        if self._held_bytes >= self._max_bytes:
            self.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes the episodes of the last file."""
        if not self._held:
            return
        path = self._directory / f"{PREFIX}-{self._next:05d}{self._kind.SUFFIXES[0]}"
        store = of_episodes(*self._spaces, self._held, meta={**self._meta, "path": str(path)}, notes=self._notes)
        self._kind.write_file(store, path, compress=self._compress)
        self.files.append(path)
        self._next += 1
        self._held, self._held_bytes = [], 0
