"""A key of RLlib's configurations: its names, and its counterpart in jrl."""

from typing import NamedTuple


class Key(NamedTuple):
    names: tuple[str, ...]  # newest first; a.b is b in the dict a
    ours: str  # dotted keys, separated by ", "; "": none
    note: str  # what is different, or why there is none
    lacking: bool = False  # what it asks for changes what is learned, and jrl has nothing like it

    @property
    def name(self) -> str:
        """Returns the newest name, by which the rules know the key."""
        return self.names[0]


def key(names: str, ours: str, note: str = "") -> Key:
    return Key(tuple(names.split()), ours, note)


def none(reason: str, *names: str) -> list[Key]:
    return [key(n, "", reason) for n in names]


def lacking(reason: str, *names: str) -> list[Key]:
    return [key(n, "", reason)._replace(lacking=True) for n in names]
