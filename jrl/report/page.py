"""The report as a page: one HTML file that needs no network: numbers, drawing library and code are in it."""

import importlib.resources
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.errors import InputError
from jrl.report import page_data

NAME = "index.html"
LIMIT = 2_000_000  # bytes
INSTALL = "pip install 'jrl[report]'"
_LIBRARY = "dist/bundled/echarts/echarts@*/dist/echarts.min.js"  # Apache ECharts, as the package `panel` carries it
_ASSETS = ("page.css", "base.js", "charts.js", "parts.js", "runs.js", "beside.js", "page.js")


def library() -> str | None:
    """Returns the code of Apache ECharts that is installed; None: there is none. Imports nothing of the package it
    lies in.
    """
    found = importlib.util.find_spec("panel")
    places = found.submodule_search_locations if found else None
    files = sorted(path for place in places or () for path in Path(place).glob(_LIBRARY))
    return files[-1].read_text(encoding="utf-8") if files else None


def required() -> str:
    """Returns the same, for what cannot do without. Raises InputError."""
    code = library()
    if code is None:
        raise InputError(f"--serve: the page needs a drawing library, which is not installed: {INSTALL}")
    return code


def html(data: Mapping[str, Any], code: str, *, live: bool = False) -> str:
    """Returns the page of `page_data.data`, thinned until it fits into LIMIT.

    Args:
      data: of `page_data.data`, or {"waiting": why} while there is none.
      code: of the drawing library.
      live: it asks the server that it came from for newer numbers.
    """
    assets = importlib.resources.files("jrl.report") / "assets"
    parts = {name: (assets / name).read_text(encoding="utf-8") for name in _ASSETS}
    frame = (assets / "page.html").read_text(encoding="utf-8")
    room = LIMIT - len(frame.encode()) - sum(len(text.encode()) for text in (code, *parts.values())) - 4096
    own = {
        "style": parts["page.css"],
        "data": in_html(fitted(data, room)),
        "library": in_script(code),
        "code": in_script("\n".join(parts[name] for name in _ASSETS if name.endswith(".js"))),
        "live": "true" if live else "false",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: own[found[1]], frame)


def fitted(data: Mapping[str, Any], room: float) -> str:
    """Returns the data as JSON with as many points of its curves as fit into so many bytes; with the fewest and the
    best of the runs alone, where all of them do not fit.
    """
    text = page_data.text(data) if "curves" not in data else ""
    for points in page_data.POINTS if not text else ():
        text = page_data.text(page_data.thinned(data, points))
        if len(in_html(text).encode()) <= room:
            return text
    most = len(data.get("runs", ())) // 2
    while most and len(in_html(text).encode()) > room:
        text = page_data.text(page_data.thinned(page_data.best_runs(data, most), page_data.POINTS[-2]))
        most //= 2
    return text


def in_html(text: str) -> str:
    """Returns JSON that may stand in a script element, whatever names are in it: `</script>` and `<!--` are no tags
    there.
    """
    found = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return found.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def in_script(code: str) -> str:
    """Returns code that may stand in a script element: what would end it is written otherwise in its strings."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", code, flags=re.IGNORECASE)
