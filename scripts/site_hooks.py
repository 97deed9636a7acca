"""Pages that mkdocs.yml adds to docs/: API reference, error messages, and each file that a page links to.

A link such as `../examples/functions.py` works on a code forge. The site has the file as a page,
repository/examples/functions.py.
"""

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import api_pages
import error_pages

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "repository"
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".html": "html"}


def on_config(config):
    """Adds the API reference and the algorithms' pages to the navigation."""
    pages = sorted((ROOT / "docs" / "algorithms").glob("*.md"))
    for entry in config.nav:
        if "Algorithms" in entry:
            each = [f"algorithms/{page.name}" for page in pages if page.stem != "index"]
            entry["Algorithms"].insert(1, {"Each algorithm": each})
        if "Reference" in entry:
            entry["Reference"] += [error_pages.PATH, {"API": api_pages.nav()}]
    return config


def on_files(files, config):
    """Adds the generated pages."""
    for path, text in {**api_pages.pages(), error_pages.PATH: error_pages.page()}.items():
        files.append(File.generated(config, path, content=text))
    texts = {f.src_uri: f.content_string for f in files.documentation_pages()}
    todo = {target for uri, text in texts.items() for target in outside(f"docs/{uri}", text)}
    done: set[str] = set()
    while todo:
        target = todo.pop()
        done.add(target)
        text = (ROOT / target).read_text(encoding="utf-8")
        if target.endswith(".md"):
            todo |= outside(target, text) - done
            text = rewrite(target, text, f"{FOLDER}/{target}")
        else:
            text = f"# {target}\n\n````{_LANGUAGES.get(Path(target).suffix, '')}\n{text}\n````\n"
        text = f"---\nsearch: {{boost: 0.5}}\n---\n\n{text}"
        file = File.generated(config, page_path(target), content=text)
        file.inclusion = file.inclusion.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links to files outside docs/."""
    uri = page.file.src_uri
    return markdown if uri.startswith(f"{FOLDER}/") else rewrite(f"docs/{uri}", markdown, uri)


def page_path(target: str) -> str:
    """Returns the page, under docs/, of a file of the repository."""
    return f"{FOLDER}/{target}" if target.endswith(".md") else f"{FOLDER}/{target}.md"


def resolve(source: str, link: str) -> str | None:
    """Returns the file of the repository, outside docs/, that a relative link of the file `source` names; or None."""
    if re.match(r"[a-z]+:", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return target if not target.startswith(("docs/", "..")) and (ROOT / target).is_file() else None


def outside(source: str, text: str) -> set[str]:
    """Returns the files outside docs/ that a text links to."""
    return {target for _, link, _ in _LINK.findall(text) if (target := resolve(source, link))}


def rewrite(source: str, text: str, uri: str) -> str:
    """Returns the text of the file `source` with links that hold on the page `uri`."""

    def replace(match: re.Match) -> str:
        before, link, after = match.groups()
        target = resolve(source, link)
        if target:
            link = posixpath.relpath(page_path(target), posixpath.dirname(uri) or ".")
        elif source.endswith(".md") and not source.startswith("docs/") and not re.match(r"[a-z]+:", link):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
            link = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(uri) or ".")
        return before + link + after

    return _LINK.sub(replace, text)
