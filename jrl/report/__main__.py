"""python -m jrl.report RUN ... --out DIR: compares runs, with intervals, as report.md, report.json and curves.png."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jrl.errors import InputError
from jrl.host import command, files


def parser() -> argparse.ArgumentParser:
    """The command line; nothing heavy is imported for it."""
    p = command.parser(
        "report",
        "Compare runs: tables with intervals, learning curves, and what is doubtful about them. Runs whose configs "
        "differ in the seed alone are one method.",
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="run directory, directory of runs, or CSV file of others'")
    p.add_argument("--out", type=Path, required=True, help="directory of the report; an earlier one in it is replaced")
    p.add_argument(
        "--objective", default="evaluation/return", metavar="METRIC",
        help="of the result rows, greater is better (default evaluation/return, or else episode/return)",
    )  # fmt: skip
    p.add_argument("--axis", choices=("env_steps", "updates", "time_s"), default="env_steps", help="of curves")
    p.add_argument("--against", metavar="NAME", help="method that others are compared with, or a CSV file of its rows")
    p.add_argument(
        "--normalize", type=Path, metavar="FILE", help='JSON: {"task": [score that becomes 0, score that becomes 1]}'
    )
    p.add_argument(
        "--by", default="", metavar="KEY,...", help="keys that make a method, such as algo.name (default all)"
    )
    p.add_argument("--seed", type=int, default=0, help="of the intervals (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is doubtful and the paths that were written; exit status 0, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        report(args)
    except InputError as e:
        return command.refused(e)
    return 0


def report(args: argparse.Namespace) -> None:
    """Reads the runs, and writes the report. Raises InputError: bad input."""
    from jrl.report import content, figures, runs, tables

    paths, against = list(args.runs), args.against
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: expected 0 or more")
    bounds = content.normalization(args.normalize) if args.normalize else None
    if against and Path(against).suffix == ".csv":
        paths.insert(0, against)  # before the same file of another spelling, which would not be read twice
        against = runs.only_method(Path(against))
    found = runs.read(paths, [key for key in args.by.split(",") if key])
    if against != args.against:
        against = next(run.method for run in found.runs if run.name.startswith(f"{Path(args.against)}: "))
    options = content.Options(args.objective, args.axis, against, bounds, args.seed)
    said = content.content(found, options)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        picture = figures.curves(said, args.out / "curves.png")
        files.replace(args.out / "report.md", tables.markdown(said, picture.name))
        files.replace(args.out / "report.json", tables.to_json(said))
    except OSError as e:
        raise InputError(f"--out {args.out}: cannot write there: {e.strerror}: choose another directory") from e
    print(*(f"caution: {line}" for line in said["cautions"]), sep="\n", end="\n" * bool(said["cautions"]))
    print(*(args.out / name for name in ("report.md", "report.json", picture.name)), sep="\n")


if __name__ == "__main__":
    sys.exit(command.run(main))
