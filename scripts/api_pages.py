"""Pages of the API reference, one per module: scripts/site_hooks.py adds them to the site.

    python scripts/api_pages.py                      # counts: modules, public names
    python scripts/api_pages.py --check build/site   # public names that the built site has no entry for; exit status 1

Reads sources without importing them. A name is public if `__all__` has it; in a module without `__all__`, if the module
defines it and it has no leading underscore.
"""

import argparse
import ast
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "reference"
# sections of the reference -> (what the modules are for, modules and packages; a package has all its modules)
SECTIONS: dict[str, tuple[str, list[str]]] = {
    "Python surface": (
        "trained policies, RLlib's classes, clients of a server",
        ["jrl", "jrl.api", "jrl.rllib.algorithm", "jrl.rllib.builder", "jrl.rllib.multi_agent", "jrl.callbacks",
         "jrl.callbacks.moments", "jrl.play.actor", "jrl.registry", "jrl.serve.client", "jrl.check_env",
         "jrl.gym", "jrl.envs.task", "jrl.rllib", "jrl.rllib.memory_tracking", "jrl.rllib.tune",
         "jrl.run.manual_steps"],
    ),
    "Shared types": (
        "spaces, environments' specs, rollouts, batches, distributions",
        ["jrl.types", "jrl.spaces", "jrl.distributions", "jrl.errors"],
    ),
    "Algorithms": ("each algorithm's Config, losses and updates", ["jrl.algos.*"]),
    "Maths": ("returns, losses, schedules and normalisation as pure functions", ["jrl.ops.*"]),
    "Networks": ("encoders, torsos, memory and heads", ["jrl.networks.*"]),
    "Replay": ("buffers as pure functions", ["jrl.replay.*"]),
    "Environments": ("vectors of environments by name", ["jrl.envs", "jrl.envs.make"]),
    "Rollouts": ("collecting steps", ["jrl.rollout.*"]),
    "Data sets": ("episodes in files", ["jrl.data.*"]),
}  # fmt: skip


def source_file(module: str) -> Path:
    """Returns the file of a module of jrl."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def expand(entries: list[str]) -> list[str]:
    """Returns module names; `jrl.ops.*` stands for the package and its public modules."""
    found = []
    for entry in entries:
        package = entry.removesuffix(".*")
        found.append(package)
        if package != entry:
            files = sorted(ROOT.joinpath(*package.split(".")).glob("*.py"))
            found += [f"{package}.{file.stem}" for file in files if not file.stem.startswith("_")]
    return found


def targets(node: ast.stmt) -> list[str]:
    """Returns the names that a statement at the top of a module defines; imports define none."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.TypeAlias if sys.version_info >= (3, 12) else ()):
        return [node.name.id]
    if isinstance(node, ast.Assign):
        parts = [part for target in node.targets for part in getattr(target, "elts", [target])]
        return [part.id for part in parts if isinstance(part, ast.Name)]
    if isinstance(node, ast.If | ast.Try):  # e.g. TYPE_CHECKING
        return [name for inner in node.body for name in targets(inner)]
    return []


def public_names(module: str) -> list[str]:
    """Returns the public names of a module, in the order of its source."""
    tree = ast.parse(source_file(module).read_text(encoding="utf-8"))
    defined = list(dict.fromkeys(name for node in tree.body for name in targets(node)))
    for node in tree.body:
        if "__all__" in targets(node) and isinstance(node, ast.Assign):
            return list(ast.literal_eval(node.value))
    return [name for name in defined if not name.startswith("_")]


def page(module: str) -> str:
    """Returns the Markdown of a module's page, for mkdocstrings."""
    names = "".join(f"\n        - {name}" for name in public_names(module))
    members = f"members:{names}" if names else "members: false"
    options = f"show_root_heading: true\n      show_root_full_path: true\n      heading_level: 1\n      {members}"
    return f"---\ntitle: {module}\n---\n\n::: {module}\n    options:\n      {options}\n"


def pages() -> dict[str, str]:
    """Returns the pages of the reference by path under docs/: an index, and one page per module."""
    rows = ["# API reference", "", "For programs that import jrl: each public name of each module, with its docstring."]
    rows += ["", "```", 'python -c "from jrl.algos import ppo; help(ppo.make)"', "```", ""]
    found = {}
    for section, (about, entries) in SECTIONS.items():
        rows += [f"## {section}", "", f"{about[0].upper()}{about[1:]}.", ""]
        for module in expand(entries):
            found[f"{FOLDER}/{module}.md"] = page(module)
            rows.append(f"* [`{module}`]({module}.md)")
        rows.append("")
    return {f"{FOLDER}/index.md": "\n".join(rows), **found}


def nav() -> list:
    """Returns the navigation of the reference, for mkdocs."""
    path = lambda module: f"{FOLDER}/{module}.md"
    sections = [{name: [{m: path(m)} for m in expand(entries)]} for name, (_, entries) in SECTIONS.items()]
    return [f"{FOLDER}/index.md", *sections]


def missing(inventory: bytes) -> list[str]:
    """Returns the public names that a Sphinx inventory (objects.inv of a built site) has no entry for."""
    body = inventory.split(b"\n", 4)[4]
    entries = {line.split(" ", 1)[0] for line in zlib.decompress(body).decode().splitlines()}
    modules = [module for _, listed in SECTIONS.values() for module in expand(listed)]
    return [f"{m}.{name}" for m in modules for name in public_names(m) if f"{m}.{name}" not in entries]


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--check", type=Path, metavar="SITE", help="directory of a built site")
    args = parser.parse_args()
    modules = [module for _, entries in SECTIONS.values() for module in expand(entries)]
    print(f"{len(modules)} modules, {sum(len(public_names(m)) for m in modules)} public names")
    if not args.check:
        return 0
    absent = missing((args.check / "objects.inv").read_bytes())
    print(f"{len(absent)} without an entry on the site", *absent, sep="\n  ")
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
