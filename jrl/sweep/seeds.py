"""`python -m jrl.train CONFIG --seeds N`: runs that differ in their seed alone, as a population."""

import argparse
from pathlib import Path
from typing import Any

from jrl.config import RunConfig
from jrl.errors import InputError
from jrl.host import files, output
from jrl.sweep import members

_MOST = 1000  # seeds or processes of one population


def train(args: argparse.Namespace, cfg: RunConfig, name: str, transcript: output.Transcript) -> int | None:
    """Trains the population that a command line of jrl.train names, or goes on with it.

    Returns:
      The exit status; None: the command line asks for one run.
    Raises:
      InputError: --seeds or --processes cannot be had.
    """
    changes = _changes(args, cfg)
    if changes is None:
        return None
    if args.until is not None:
        raise InputError("--until is for one run: leave it out, a population goes on after Ctrl-C, too")
    if args.rows is not None:
        raise InputError("--rows is for one run: leave it out, members have rows of their own")
    from jrl.sweep import train as population

    directory = Path(cfg.run.out) if cfg.run.out else files.make_numbered(Path("runs") / name)
    record = members.Record(changes, {}, [len(changes)], []) if changes else None
    return population.train(cfg, directory, record, transcript, processes=args.processes)


def _changes(args: argparse.Namespace, cfg: RunConfig) -> list[dict[str, Any]] | None:
    """Returns what differs between the members, [] of a population that goes on; None: one run. Raises InputError."""
    goes_on = cfg.run.out if args.resume == "auto" else args.resume
    if goes_on and members.is_population(Path(goes_on)):
        if args.seeds:
            raise InputError(f"--seeds: {goes_on} has its members: leave it out")
        return []
    if args.seeds is None:
        if args.processes is not None:
            raise InputError("--processes says how --seeds are trained: give that, too")
        return None
    for name, value in (("seeds", args.seeds), ("processes", args.processes)):
        if value is not None and not 1 <= value <= _MOST:
            raise InputError(f"--{name}: expected 1 to {_MOST:,}, got {value:,}")
    if args.init_from or args.as_test or (args.resume and args.resume != "auto"):
        raise InputError("--seeds begins a population: it goes with none of --init-from, --as-test, --resume PATH")
    return [{"run.seed": cfg.run.seed + i} for i in range(args.seeds)]
