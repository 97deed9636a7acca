"""python -m jrl.data COMMAND PATH ...: records, inspects, converts, splits and merges data sets."""

import difflib
import sys
from collections.abc import Sequence

from jrl.data import commands
from jrl.errors import InputError
from jrl.host import command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status, or 2 for bad input."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    program = command.format_command("data")
    if name in ("-h", "--help"):
        print(f"usage: {program} COMMAND ...\n\nRecord, inspect, convert, split and merge data sets.\n")
        print("commands:", *(f"  {name:<9} {text}" for name, text in commands.COMMANDS.items()), sep="\n")
        print(f"\noptions: {program} COMMAND --help")
        return 0
    try:
        if name not in commands.COMMANDS:
            near = difflib.get_close_matches(name, commands.COMMANDS, 1)
            fix = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(commands.COMMANDS)}"
            raise InputError(f"{program} {name}: unknown command: {fix}")
        return commands.run(name, rest)
    except InputError as e:
        return command.report_input_error(e)


if __name__ == "__main__":
    sys.exit(command.run(main))
