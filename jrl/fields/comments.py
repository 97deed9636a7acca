"""Documentation of a section's fields, taken from the comments in its source."""

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping
from typing import Any

from jrl.fields import bounds


@functools.cache
def docs(cls: type) -> Mapping[str, str]:
    """Return field -> comment on its line, or on the lines directly above. Empty if the source is not available."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        comments: dict[int, str] = {}
        own_line: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                whole = not token.line[: token.start[1]].strip()
                (own_line if whole else comments)[token.start[0]] = token.string.lstrip("# ")
        body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)).body
        for node in body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if "ClassVar" in ast.unparse(node.annotation):  # not a field
                    continue
                first = node.lineno
                while first - 1 in own_line:
                    first -= 1
                above = " ".join(own_line[n] for n in range(first, node.lineno))
                doc = comments.get(node.end_lineno or node.lineno, above)
                if doc:
                    found[node.target.id] = doc
    return found


def tree_docs(tree: Any, prefix: str = "") -> dict[str, str]:
    """Return dotted key -> comment and range, for a dataclass instance and the sections inside."""
    ranges = {name: bounds.range_words(hint) for name, hint in bounds.hints(type(tree)).items()}
    found = {prefix + name: words for name, words in ranges.items() if words}
    cls: type = type(tree)
    for name, doc in docs(cls).items():
        found[prefix + name] = f"{doc}; {ranges[name]}" if ranges.get(name) else doc
    for field in dataclasses.fields(tree):
        if dataclasses.is_dataclass(getattr(tree, field.name)):
            found |= tree_docs(getattr(tree, field.name), f"{prefix}{field.name}.")
    return found
