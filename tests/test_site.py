"""The generated pages of the documentation site: each public name and each algorithm has its page."""

import ast
import importlib
import inspect
import re
import sys
import zlib
from pathlib import Path

import pytest

from jrl import algos, api, envs
from jrl.errors import InputError

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script():
    """Function from the name of a script to its module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "scripts"))


def _public(name: str) -> set[str]:
    """The public names of an imported module: `__all__`, or the names that its source does not import."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return set(module.__all__)
    source = ast.parse(inspect.getsource(module))
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(source)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    submodules = (
        {path.stem for path in Path(module.__file__).parent.iterdir()} if hasattr(module, "__path__") else set()
    )
    names = {attribute for attribute in vars(module) if not attribute.startswith("_")}
    return names - imported - submodules


def test_public_names_without_a_page(script):
    """Zero: the modules are imported here, the pages are made from sources."""
    pages = script("api_pages").pages()
    packages = ["algos", "ops", "replay", "rollout", "networks", "data"]
    modules = [f"jrl.{p}" for p in packages] + ["jrl.distributions", "jrl.envs.make", "jrl.serve.client", "jrl.types"]
    for package in packages:
        modules += [f"jrl.{package}.{file.stem}" for file in (ROOT / "jrl" / package).glob("[a-z]*.py")]
    missing, count = [], 0
    for module in modules:
        text = pages.get(f"reference/{module}.md", "")
        listed = set(re.findall(r"^ +- (\w+)$", text, re.M))
        public = _public(module)
        count += len(public)
        missing += [f"{module}.{name}" for name in sorted(public - listed)]
    assert missing == [] and count > 700


def test_names_of_the_api_have_pages(script):
    """Names of `jrl.api` are defined elsewhere. Each is on the page of its home; a made class (PPO), its base."""
    pages, lacking = script("api_pages").pages(), []
    for name in dir(api):
        bases = getattr(getattr(api, name), "__mro__", (getattr(api, name),))
        homes = [
            (base.__module__, base.__name__) for base in bases if getattr(base, "__module__", "").startswith("jrl.")
        ]
        listed = [f"- {found}\n" in pages.get(f"reference/{module}.md", "") for module, found in homes]
        lacking += [] if any(listed) or not homes else [name]
    # this class is made on first use; the text of its module describes it
    assert lacking == ["TaskSettableEnv"] and "reference/jrl.envs.task.md" in pages
    assert {"PPO", "PPOConfig", "Episode"} <= set(dir(api))


def test_names_that_a_site_lacks_are_found(script):
    """An inventory with one name of two: the other is reported."""
    api_pages = script("api_pages")
    lines = "jrl.ops.schedules.value py:function 1 reference/jrl.ops.schedules.html#$ -\n"
    inventory = b"# 1\n# 2\n# 3\n# 4\n" + zlib.compress(lines.encode())
    missing = api_pages.missing(inventory)
    assert "jrl.ops.schedules.value" not in missing and "jrl.ops.returns.gae" in missing


def test_pages_of_algorithms_are_what_the_script_writes(script):
    """Otherwise: python scripts/algorithm_pages.py --write docs/algorithms"""
    pages = script("algorithm_pages").pages()
    folder = ROOT / "docs" / "algorithms"
    assert {path.name for path in folder.iterdir()} == set(pages) == {"index.md"} | {f"{n}.md" for n in algos.names()}
    assert [name for name, text in pages.items() if (folder / name).read_text() != text] == []


@pytest.mark.parametrize("name", algos.names())
def test_a_page_of_an_algorithm_has_its_parts(name):
    text = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    parts = ["When to use it", "Differences from the paper", "Differences from common implementations", "How it works"]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")][:4] == parts
    assert "python -m jrl.train" in text and all(f"`{key}`" in text for key in ("lr", "gamma", "optimizer.name"))


def test_error_messages_have_pages(script):
    """Each message of the tables is on the page, once, with a link to a page of docs/."""
    error_pages = script("error_pages")
    found = re.findall(r"^\* `(.+)` \(\[more\]\((.+)\)\)$", error_pages.page(), re.M)
    pages = {*error_pages.PAGES.values(), *error_pages.HEADINGS.values()}
    assert len(found) > 300 and {page for _, page in found} <= pages | {"config.md", "quickstart.md", "rllib-users.md"}
    assert all((ROOT / "docs" / page).exists() for _, page in found)
    assert ("unknown key algo.gama: did you mean algo.gamma?", "algorithms/index.md") in found
    assert ("arguments are required: --out", "data.md") in found  # names no key: by the heading of its table
    text = "".join(path.read_text() for path in (ROOT / "tests" / "errors").glob("*.yaml"))
    assert [heading for heading in error_pages.HEADINGS if f" {heading}\n" not in text] == []


def test_the_navigation_has_each_page():
    """`mkdocs build --strict` says so, too; this test needs no mkdocs."""
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"^ +- ([\w/-]+\.md)$", text, re.M))
    tutorials = {f"tutorials/{path.name}" for path in (ROOT / "docs" / "tutorials").glob("*.md")}
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")} | {"algorithms/index.md"} | tutorials


def test_the_gallery_is_what_the_script_writes(script):
    """Otherwise: python scripts/gallery.py --write"""
    gallery = script("gallery")
    assert gallery.PAGE.read_text() == gallery.page()
    drawn = {gallery.file_name(row) for row in gallery.rows() if not row.picture.endswith(".svg")}
    files = list(gallery.PICTURES.iterdir())
    assert {path.name for path in files} == drawn and sum(path.stat().st_size for path in files) < 400_000


@pytest.mark.slow
def test_spaces_of_the_gallery(script):
    """The table has the spaces of each environment whose package is installed."""
    gallery, wrong = script("gallery"), []
    for row in gallery.rows():
        try:
            spec = envs.make(row.id, num_envs=1, normalize_actions=False, clip_actions=False).spec
        except InputError:
            assert ":" in row.id  # a suite
            continue
        found = gallery.describe(spec.observation), gallery.describe(spec.action, is_action=True)
        wrong += [(row.id, found)] if found != (row.observation, row.action) else []
    assert wrong == []
