"""python -m jrl.data COMMAND PATH ...: records data sets, looks at them, writes them in other formats, joins them."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from jrl.data import commands
from jrl.errors import InputError
from jrl.host import command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the module of the command. Returns the exit status: the command's, or 2 for bad input."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    own = command.typed("data")
    if name in ("-h", "--help"):
        print(_help(own))
        return 0
    if name not in commands.NAMES:
        near = difflib.get_close_matches(name, commands.NAMES, 1)
        mend = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(commands.NAMES)}"
        return command.refused(InputError(f"{own} {name}: unknown command: {mend}"))
    module = importlib.import_module(commands.ABOVE.get(name, f"jrl.data.commands.{name}"))
    args = module.parser().parse_args(rest)
    try:
        return module.run(args)
    except InputError as e:
        return command.refused(e)


def _help(own: str) -> str:
    lines = [f"usage: {own} COMMAND ...", "", "Look at data sets, write them in other formats, divide and join them."]
    lines += ["", "commands:", *(f"  {name:<9} {what}" for name, what in commands.NAMES.items())]
    return "\n".join([*lines, "", f"options: {own} COMMAND --help"])


if __name__ == "__main__":
    sys.exit(command.run(main))
