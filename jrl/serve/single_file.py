"""Writes `client.py` as one file that acts by itself, too: what lies beside it is a text in it."""

import pprint
from pathlib import Path

from jrl.errors import InputError
from jrl.fields.paths import resolve, written

_HERE = Path(__file__).parent
_PARTS = (_HERE / "acting.py", _HERE.parent / "export" / "interpreter.py")


def text() -> str:
    """Returns the source of a module that needs numpy alone, with whichever inference_mode."""
    held = "".join(
        f"_HELD[{path.name!r}] = {pprint.pformat(path.read_text(encoding='utf-8'), width=118)}\n" for path in _PARTS
    )
    return f"{(_HERE / 'client.py').read_text(encoding='utf-8')}\n\n{held}"


def write(path: str | Path) -> None:
    """Writes that file. Raises InputError where one is there already, or where none can be written."""
    out = resolve(path, "--write-client", "new file")
    if out.exists():
        raise InputError(f"--write-client: {path} is there already: name another, or move it away")
    with written(out, "--write-client") as part:
        part.write_text(text(), encoding="utf-8")
