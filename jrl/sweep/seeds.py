"""`python -m jrl.train CONFIG --seeds N`: a population of runs that differ only in their seeds."""

import argparse
from pathlib import Path
from typing import Any

from jrl.config import RunConfig
from jrl.errors import InputError
from jrl.host import files, output
from jrl.sweep import members

_MAX_RUNS = 1000  # maximum seeds or processes of a population


def train_seeds(args: argparse.Namespace, cfg: RunConfig, name: str, transcript: output.Transcript) -> int | None:
    """Trains or resume the population that a command line of jrl.train describes.

    Args:
      args: parsed command line.
      cfg: config that members share.
      name: prefix of a new directory below `runs`.
      transcript: transcript of the printed output.
    Returns:
      The exit status; None: the command line describes a single run.
    Raises:
      InputError: invalid --seeds or --processes.
    """
    values = _build_member_values(args, cfg)
    if values is None:
        return None
    if args.until is not None:
        raise InputError("--until is for one run: leave it out; --resume continues a population after Ctrl-C")
    if args.rows is not None:
        raise InputError("--rows is for one run: leave it out; a population adds its own columns")
    from jrl.sweep import train as population

    directory = Path(cfg.run.out) if cfg.run.out else files.make_numbered(Path("runs") / name)
    record = members.Record(directory, values, rounds=[len(values)]) if values else None
    return population.train(cfg, directory, record, transcript, processes=args.processes)


def _build_member_values(args: argparse.Namespace, cfg: RunConfig) -> list[dict[str, Any]] | None:
    """Returns the values of each member; []: a population resumes; None: a single run."""
    resumed = cfg.run.out if args.resume == "auto" else args.resume
    if resumed and members.is_population(Path(resumed)):
        if args.seeds:
            raise InputError(f"--seeds: {resumed} has its members: leave it out")
        return []
    if args.seeds is None:
        if args.processes is not None:
            raise InputError("--processes: expected --seeds, too: add --seeds N")
        return None
    for name, value in (("seeds", args.seeds), ("processes", args.processes)):
        if value is not None and not 1 <= value <= _MAX_RUNS:
            raise InputError(f"--{name}: expected 1 to {_MAX_RUNS:,}, got {value:,}")
    if args.init_from or args.as_test or (args.resume and args.resume != "auto"):
        raise InputError(
            "--seeds starts a population: leave out --init-from, --as-test and --resume PATH, which are for one run"
        )
    return [{"run.seed": cfg.run.seed + i} for i in range(args.seeds)]
