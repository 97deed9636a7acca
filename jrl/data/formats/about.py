"""Description that a file has of a data set beside its arrays: spaces, meta and notes, as JSON."""

from typing import Any, NamedTuple

from jrl.data.spaces_json import plain, space_from_json, space_to_json
from jrl.data.store import EpisodeStore
from jrl.types import Space


class About(NamedTuple):
    """Fields of an EpisodeStore beside its arrays."""

    observation: Space
    action_space: Space
    meta: dict[str, Any]
    notes: tuple[str, ...]


def of_store(store: EpisodeStore) -> dict[str, Any]:
    """Describes a store as JSON can hold it; where it was read from is left out."""
    return plain(
        {
            "observation": space_to_json(store.observation),
            "action": space_to_json(store.action_space),
            "meta": {k: v for k, v in store.meta.items() if k != "path"},
            "notes": list(store.notes),
        }
    )


def read(found: Any) -> About:
    """Reads what `of_store` wrote. Raises KeyError, ValueError, TypeError: it is not of that form."""
    spaces = space_from_json(found["observation"]), space_from_json(found["action"])
    return About(*spaces, dict(found["meta"]), tuple(map(str, found.get("notes", ()))))
