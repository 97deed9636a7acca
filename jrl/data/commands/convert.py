"""python -m jrl.data convert PATH ... --to FORMAT --out PATH: data sets in another format."""

import argparse

from jrl.data.commands import paths
from jrl.host import command


def parser() -> argparse.ArgumentParser:
    p = command.parser("data convert", "Write a data set, or several as one, in another format.")
    paths.take_input(p)
    p.add_argument("--to", required=True, metavar="FORMAT", help="such as jrl, minari, d4rl: docs/data.md has them all")
    paths.take_output(p, "a file, or a directory that is made")
    return p


def run(args: argparse.Namespace) -> int:
    """Writes the data set, and returns the exit status."""
    (out,) = paths.check_output(args, args.to)
    store = paths.read(args)
    paths.tell_notes(store)
    paths.write(store, out, args.to, args)
    return 0
