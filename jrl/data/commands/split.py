"""python -m jrl.data split PATH ... --share 0.1 --out DIR: a data set to train on and one to validate with."""

import argparse

from jrl.data.commands import paths
from jrl.errors import InputError
from jrl.host import command


def parser() -> argparse.ArgumentParser:
    p = command.parser("data split", "Divide a data set, by whole episodes, into DIR/train and DIR/validation.")
    paths.take_input(p)
    p.add_argument("--share", type=float, default=0.1, help="share of the steps in DIR/validation (default 0.1)")
    p.add_argument("--seed", type=int, default=0, help="seed of the choice of episodes (default 0)")
    p.add_argument("--to", default="jrl", metavar="FORMAT", help="format to write (default jrl)")
    paths.take_output(p, "directory that is made")
    return p


def run(args: argparse.Namespace) -> int:
    """Writes both data sets, and returns the exit status."""
    if not 0 < args.share < 1:
        raise InputError(f"--share: expected a number above 0 and below 1, got {args.share:g}")
    if args.seed < 0:
        raise InputError(f"--seed: expected a number of at least 0, got {args.seed}")
    outs = paths.check_output(args, args.to, "train", "validation")
    store = paths.read(args)
    paths.tell_notes(store)
    for out, part in zip(outs, store.split(args.share, args.seed), strict=True):
        paths.write(part, out, args.to, args)
    return 0
