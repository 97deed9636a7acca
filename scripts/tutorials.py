"""Pages and notebooks of the tutorials, from the scripts examples/tutorials/*.py.

    python scripts/tutorials.py --write [NAME ...]    # runs the scripts; writes docs/tutorials/*.md, *.ipynb, pictures

A script has cells in the percent format, which Jupyter, VS Code and Spyder read: `# %% [markdown]` begins a cell of
prose in comments, `# %%` a cell of code. The page has the prose, the code and its output, the notebook has no output.
tests/test_tutorials.py compares pages and notebooks with the scripts.
"""

import argparse
import base64
import io
import json
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "examples" / "tutorials"
PAGES = ROOT / "docs" / "tutorials"
_OUTPUT = re.compile(r"(```text\n.*?\n```|!\[output\]\([^)]+\))\n\n", re.S)  # these forms are kept for outputs
_WIDTH = 150
_FIRST, _LAST = 14, 10  # lines of a long output that are shown


class Cell(NamedTuple):
    is_code: bool
    text: str


class Output(NamedTuple):
    """Printed text of a cell, or the bytes of a PNG."""

    content: str | bytes


def names() -> list[str]:
    """Returns the names of the tutorials. The navigation of mkdocs.yml has the reading order."""
    return sorted(path.stem for path in SOURCES.glob("*.py"))


def read_cells(name: str) -> list[Cell]:
    """Returns the cells of a script. Raises ValueError: text before the first cell, or prose that is no comment."""
    text = (SOURCES / f"{name}.py").read_text(encoding="utf-8")
    head, *parts = re.split(r"(?m)^# %%(.*)\n", text)
    if head.strip():
        raise ValueError(f"{name}.py: text before the first cell: begin the file with `# %% [markdown]`")
    cells = []
    for marker, body in zip(parts[::2], parts[1::2], strict=True):
        body, is_code = body.strip("\n"), "[markdown]" not in marker
        if not is_code:
            lines = body.splitlines()
            if wrong := [line for line in lines if not line.startswith("#")]:
                raise ValueError(f"{name}.py: prose that is not a comment: {wrong[0]!r}: begin the line with #")
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
        cells.append(Cell(is_code, body))
    return cells


def notebook(cells: list[Cell]) -> dict[str, Any]:
    """Returns a notebook (nbformat 4.5) without outputs."""
    made = []
    for number, cell in enumerate(cells):
        one = {"id": f"cell-{number}", "metadata": {}, "source": cell.text.splitlines(keepends=True)}
        code = {"cell_type": "code", "execution_count": None, "outputs": []}
        made.append(one | (code if cell.is_code else {"cell_type": "markdown"}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def notebook_text(cells: list[Cell]) -> str:
    """Returns the file of a notebook."""
    return json.dumps(notebook(cells), indent=1, ensure_ascii=False) + "\n"


def execute(cells: list[Cell], directory: Path, timeout_s: int = 600) -> list[list[Output]]:
    """Runs a notebook in a kernel of this Python, in a directory; returns the outputs of each cell.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbclient
    import nbformat

    made = nbformat.reads(notebook_text(cells), as_version=4)
    client = nbclient.NotebookClient(made, timeout=timeout_s, resources={"metadata": {"path": str(directory)}})
    client.execute()
    raw = [cell.get("outputs", []) for cell in made.cells]
    return [[output for one in outputs for output in _read_output(one, directory)] for outputs in raw]


def _read_output(raw: Any, directory: Path) -> list[Output]:
    if raw.output_type == "stream" and raw.name == "stderr":  # logs of libraries
        return []
    if raw.output_type == "stream":
        return [Output(raw.text.replace(f"{directory}/", ""))]
    if "image/png" in raw.get("data", {}):
        return [Output(base64.b64decode(raw.data["image/png"]))]
    return [Output(raw.data["text/plain"] + "\n")]


def page(name: str, cells: list[Cell], outputs: list[list[Output]]) -> tuple[str, dict[str, bytes]]:
    """Returns the Markdown of a page, and its pictures by file name."""
    parts, pictures = [], {}
    for number, (cell, found) in enumerate(zip(cells, outputs, strict=True)):
        if not cell.is_code:
            parts.append(cell.text)
            if number == 0:  # below the title
                script = f"../../examples/tutorials/{name}.py"
                parts.append(f"This page as a [notebook]({name}.ipynb) and as a [script]({script}).")
            continue
        parts.append(f"```python\n{cell.text}\n```")
        printed = "".join(output.content for output in found if isinstance(output.content, str)).strip("\n")
        if printed:
            lines = printed.splitlines()
            if len(lines) > _FIRST + _LAST + 1:
                lines = [*lines[:_FIRST], "...", *lines[-_LAST:]]
            wrapped = [part for line in lines for part in (textwrap.wrap(line, _WIDTH) or [""])]
            parts.append("```text\n" + "\n".join(line.rstrip() for line in wrapped) + "\n```")
        for output in found:
            if isinstance(output.content, bytes):
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = _shrink(output.content)
                parts.append(f"![output]({file})")
    return "\n\n".join(parts) + "\n\n", pictures


def _shrink(png: bytes) -> bytes:
    """Returns the picture with a palette of 64 colours, which halves its size."""
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(64).save(out, "png", optimize=True)
    return out.getvalue()


def without_outputs(text: str) -> str:
    """Returns a page without the outputs, for a comparison with its script."""
    return _OUTPUT.sub("", text)


def write(name: str) -> None:
    """Runs a tutorial, and writes its page, its pictures and its notebook."""
    cells = read_cells(name)
    with tempfile.TemporaryDirectory() as directory:
        text, pictures = page(name, cells, execute(cells, Path(directory).resolve()))
    for old in PAGES.glob(f"{name}-*.png"):
        old.unlink()
    for file, content in pictures.items():
        (PAGES / file).write_bytes(content)
    (PAGES / f"{name}.md").write_text(text, encoding="utf-8")
    (PAGES / f"{name}.ipynb").write_text(notebook_text(cells), encoding="utf-8")
    print(f"wrote docs/tutorials/{name}.md and .ipynb")


def main() -> int:
    """Writes the pages; returns the exit status: 0, or 2 for an unknown name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", nargs="*", required=True, metavar="NAME", help="tutorials; without a name all")
    wanted = parser.parse_args().write or names()
    if unknown := sorted(set(wanted) - set(names())):
        print(f"error: {unknown[0]}: unknown tutorial: choose from {', '.join(names())}", file=sys.stderr)
        return 2
    PAGES.mkdir(exist_ok=True)
    for name in wanted:
        write(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
