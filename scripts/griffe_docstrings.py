"""Docstrings of jrl as mkdocstrings expects them.

Sections begin after an empty line, doctests are in code blocks, and brackets of shapes are not links.
"""

import re
import textwrap

import griffe

_SECTION = re.compile(r"(?<=[^\n]\n)((?:Args|Returns|Raises|Yields):\n)")
_DOCTEST = re.compile(r"(?m)^( *)>>> .*(?:\n(?! *$).+)*")


def escape(text: str) -> str:
    """Returns a text whose adjacent brackets, outside of backquotes, are no Markdown link."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("][", r"]\[") for part in parts)


def to_markdown(text: str) -> str:
    """Returns a docstring whose doctests are fenced, and whose `[T][B]` or `[[0, 1]]` are text."""
    text = _SECTION.sub(r"\n\1", text)
    parts, end = [], 0
    for match in _DOCTEST.finditer(text):
        parts.append(escape(text[end : match.start()]))
        lines = textwrap.dedent(match[0])
        parts.append(textwrap.indent(f"```pycon\n{lines}\n```", match[1]))
        end = match.end()
    return "".join([*parts, escape(text[end:])])


class Docstrings(griffe.Extension):
    """Changes the docstring of each object."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
