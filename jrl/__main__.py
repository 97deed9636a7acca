"""`jrl COMMAND ...`, the same as `python -m jrl COMMAND ...` and `python -m jrl.COMMAND ...`."""

import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jrl.errors import shown
from jrl.host import command, foreign_options, machine


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the module of the command; returns its exit status, or 2 for an unknown command."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    own = "python -m jrl" if Path(sys.argv[0]).name == "__main__.py" else "jrl"
    if name in ("-h", "--help"):
        print(_help(own))
        return 0
    if name == "--version":
        print("jrl", machine.version("jrl") or "unknown")
        return 0
    if (name := name.replace("_", "-")) not in command.COMMANDS:
        near = difflib.get_close_matches(name, command.COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(command.COMMANDS)}"
        hint = foreign_options.COMMANDS.get(name, hint)
        print(f"error: {own} {shown(name)}: unknown command: {hint}", file=sys.stderr)
        return 2
    command.set_prefix(f"{own} ")
    module = f"jrl.{command.module_name(name)}"
    spec = importlib.util.find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return importlib.import_module(f"{module}.__main__" if is_package else module).main(rest)


def script() -> int:
    """Runs the installed `jrl`. Modules in the working directory can be imported, as with `python -m`."""
    if not sys.flags.safe_path:
        with contextlib.suppress(FileNotFoundError):  # a deleted directory: the command reports it
            sys.path.insert(0, os.getcwd())
    return command.run(main)


def _help(own: str) -> str:
    lines = [f"usage: {own} COMMAND ...", "", "Reinforcement learning in JAX.", "", "commands:"]
    lines += [f"  {name:<11} {what}" for name, what in command.COMMANDS.items()]
    return "\n".join([*lines, "", f"options: {own} COMMAND --help; {own} --version"])


if __name__ == "__main__":
    sys.exit(command.run(main))
