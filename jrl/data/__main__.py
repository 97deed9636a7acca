"""python -m jrl.data COMMAND ...: data sets."""

import importlib
import sys
from collections.abc import Sequence

from jrl.host import command

# those whose modules stand above this room: it names them, and does not import them
_ABOVE = {"record": "jrl.run.record_data"}


def main(argv: Sequence[str] | None = None) -> int:
    name, *rest = list(sys.argv[1:] if argv is None else argv)
    return int(importlib.import_module(_ABOVE[name]).main(rest))


if __name__ == "__main__":
    sys.exit(command.run(main))
