"""The configs shipped with jrl, by name: `ppo` is configs/ppo.yaml, in a checkout and in an installed package."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from jrl.fields import paths


@functools.cache
def directory() -> Path:
    """Returns the folder of the configs: `jrl/configs` if installed, `configs` beside `jrl/` in a checkout."""
    package = Path(__file__).parents[1]
    return next((d for d in (package / "configs", package.parent / "configs") if d.is_dir()), package / "configs")


def names() -> tuple[str, ...]:
    """Returns the names of all shipped configs, sorted."""
    return tuple(sorted(p.stem for p in directory().glob("*.yaml")))


def is_config(given: str) -> bool:
    """Returns whether a text is the name of a shipped config, an existing path, or the name of a YAML or JSON file."""
    return given in names() or given.endswith((".yaml", ".yml", ".json")) or os.path.exists(given)


def locate(given: str | Path) -> Path:
    """Returns the path of a config: `given` if there is such a file, or else the shipped config of this name.

    Raises:
      InputError: `given` cannot be the path of a file.
    """
    if str(given) in names() and not Path(given).is_file():
        return directory() / f"{given}.yaml"
    return paths.resolve_as_typed(given, "config", "file")


def lines() -> Iterator[str]:
    """Yields a line for each config: its name, and the first sentence of its first comment."""
    width = max(map(len, names()), default=0)
    for name in names():
        comment = (directory() / f"{name}.yaml").read_text(encoding="utf-8").split("\n", 1)[0]
        yield f"{name:<{width}}  {comment.removeprefix('#').strip().partition('. ')[0].removesuffix('.')}"
