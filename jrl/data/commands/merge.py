"""python -m jrl.data merge PATH ... --out PATH: several data sets as one."""

import argparse

from jrl.data.commands import paths
from jrl.errors import InputError
from jrl.host import command


def parser() -> argparse.ArgumentParser:
    p = command.parser("data merge", "Write several data sets as one, their episodes in the order of the paths.")
    paths.take_input(p)
    p.add_argument("--to", default="jrl", metavar="FORMAT", help="format to write (default jrl)")
    paths.take_output(p, "a file, or a directory that is made")
    return p


def run(args: argparse.Namespace) -> int:
    """Writes the data set, and returns the exit status."""
    (out,) = paths.check_output(args, args.to)
    from jrl.data import formats

    if len([path for given in args.paths for path in formats.located(given)]) < 2:
        raise InputError(f"data merge: {args.paths[0]} is one data set: give two or more, or a glob of them")
    store = paths.read(args)
    paths.tell_notes(store)
    paths.write(store, out, args.to, args)
    return 0
