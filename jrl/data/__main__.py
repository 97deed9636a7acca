"""python -m jrl.data COMMAND PATH ...: records data sets, looks at them, writes them in other formats, joins them."""

import difflib
import sys
from collections.abc import Sequence

from jrl.data import commands
from jrl.errors import InputError
from jrl.host import command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status: the command's, or 2 for bad input."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    own = command.format_command("data")
    if name in ("-h", "--help"):
        print(f"usage: {own} COMMAND ...\n\nLook at data sets, write them in other formats, divide and join them.\n")
        print("commands:", *(f"  {name:<9} {what}" for name, what in commands.NAMES.items()), sep="\n")
        print(f"\noptions: {own} COMMAND --help")
        return 0
    try:
        if name not in commands.NAMES:
            near = difflib.get_close_matches(name, commands.NAMES, 1)
            fix = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(commands.NAMES)}"
            raise InputError(f"{own} {name}: unknown command: {fix}")
        return commands.run(name, rest)
    except InputError as e:
        return command.report_input_error(e)


if __name__ == "__main__":
    sys.exit(command.run(main))
