"""Decisions of a sweep about its members, of the `population.json` in its directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_LIST = "population.json"


class Decided(NamedTuple):
    """Decisions of schedulers about members, by their names."""

    stopped: Mapping[str, int] = {}  # steps at which one was stopped; never changed
    sources: Mapping[str, str] = {}  # whose copy one is since the last time; never changed


def read(directory: Path) -> tuple[Decided, list[str]]:
    """Returns the decisions of a population, none where it keeps none, and what is wrong with its file, in one line."""
    path = directory / _LIST
    stopped: dict[str, int] = {}
    sources: dict[str, str] = {}
    try:
        if not path.is_file():  # a pipe would never end
            return Decided(), []
        for decision in json.loads(path.read_text(encoding="utf-8")).get("decisions", []):
            stopped |= {str(name): int(decision["at"]) for name in decision.get("stopped", ())}
            sources |= {str(copy["member"]): str(copy["source"]) for copy in decision.get("copies", ())}
    except FileNotFoundError:
        return Decided(), []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return Decided(), [f"{path} cannot be read: what a scheduler did to the members is not known"]
    return Decided(stopped, sources), []
