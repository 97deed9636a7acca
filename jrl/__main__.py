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
    """Runs the module of the command. Returns the exit status: the command's; 2 for an unknown command."""
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
        mend = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(command.COMMANDS)}"
        mend = foreign_options.COMMANDS.get(name, mend)
        print(f"error: {own} {shown(name)}: unknown command: {mend}", file=sys.stderr)
        return 2
    command.set_prefix(f"{own} ")
    package = f"jrl.{name.replace('-', '_')}"
    found = importlib.util.find_spec(package)
    is_room = found is not None and found.submodule_search_locations is not None
    return importlib.import_module(f"{package}.__main__" if is_room else package).main(rest)


def script() -> int:
    """Runs the installed `jrl`. The user's own modules are found where it is typed, as by `python -m`."""
    if not sys.flags.safe_path:
        with contextlib.suppress(FileNotFoundError):  # a directory that was deleted: the command tells
            sys.path.insert(0, os.getcwd())
    return command.run(main)


def _help(own: str) -> str:
    lines = [f"usage: {own} COMMAND ...", "", "Reinforcement learning in JAX.", "", "commands:"]
    lines += [f"  {name:<11} {what}" for name, what in command.COMMANDS.items()]
    return "\n".join([*lines, "", f"options: {own} COMMAND --help; {own} --version"])


if __name__ == "__main__":
    sys.exit(command.run(main))
