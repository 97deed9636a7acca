"""python -m jrl.report RUN ... --out DIR: compares runs, with intervals: a page, report.md, report.json, curves.png."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jrl.errors import InputError
from jrl.fields.paths import resolve_as_typed
from jrl.host import command, files


def parser() -> argparse.ArgumentParser:
    """Returns the command line; imports nothing slow."""
    p = command.parser(
        "report",
        "Compare runs: tables with intervals, learning curves, and what is doubtful about them. Runs whose configs "
        "differ in the seed alone are one method.",
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="run directory, directory of runs, or CSV file of others'")
    p.add_argument("--out", required=True, help="directory of the report; an earlier one in it is replaced")
    p.add_argument(
        "--objective", default="evaluation/return", metavar="METRIC",
        help="of the result rows, greater is better (default evaluation/return, or else episode/return)",
    )  # fmt: skip
    p.add_argument("--axis", choices=("env_steps", "updates", "time_s"), default="env_steps", help="of curves")
    p.add_argument("--against", metavar="NAME", help="method that others are compared with, or a CSV file of its rows")
    p.add_argument("--normalize", metavar="FILE", help='JSON: {"task": [score that becomes 0, score that becomes 1]}')
    p.add_argument(
        "--by", default="", metavar="KEY,...", help="keys that make a method, such as algo.name (default all)"
    )
    p.add_argument("--published", action="store_true", help="compare with published results of the same tasks, too")
    p.add_argument("--seed", type=int, default=0, help="of the intervals (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the cautions and the written paths; returns the exit status: 0, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        report(args)
    except InputError as e:
        return command.report_input_error(e)
    return 0


def report(args: argparse.Namespace) -> None:
    """Reads the runs and writes the report. Raises InputError."""
    from jrl.report import content, figures, page, published, runs, tables

    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: expected 0 or more")
    places = [str(resolve_as_typed(run, "report", "any")) for run in args.runs]
    out, against, bounds = resolve_as_typed(args.out, "--out", "new directory"), args.against, None
    if is_file := bool(against) and Path(against).suffix == ".csv":
        file = resolve_as_typed(against, "--against", "file")
        places.insert(0, str(file))  # first: a file is read once, under the first spelling of its path
        against = runs.only_method(file)
    if args.normalize is not None:
        bounds = content.read_bounds(resolve_as_typed(args.normalize, "--normalize", "file"))
    found = runs.read(places, [key for key in args.by.split(",") if key])
    if is_file:
        against = next(run.method for run in found.runs if run.name.startswith(f"{file}: "))
    options = content.ReportOptions(args.objective, args.axis, against, bounds, args.seed)
    said, library = content.content(found, options), page.library()
    own = [run for run in found.runs if run.path]
    if args.published and not own:
        raise InputError("--published: expected a run directory: a CSV file does not say how its returns were measured")
    said["published"] = content.to_plain(published.content(own)) if args.published else []
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [figures.plot_curves(said, out / "curves.png").name, "report.md", "report.json"]
        text = tables.to_markdown(said, names[0])
        if args.published:
            picture = published.draw(own, said["objective"], out / "published.png")
            names += ["published.png"] * bool(picture)
            text += "\n" + published.to_markdown(said["published"], picture.name if picture else None)
        files.replace(out / "report.md", text)
        files.replace(out / "report.json", tables.to_json(said))
        if library:
            files.replace(out / page.NAME, page.html(found, said, options, out, library))
            names.insert(0, page.NAME)
    except OSError as e:
        raise InputError(f"--out {out}: cannot write there: {e.strerror}: choose another directory") from e
    print(*(f"caution: {line}" for line in said["cautions"]), sep="\n", end="\n" * bool(said["cautions"]))
    print(*(task["note"] + "\n" for task in said["published"] if task["note"]), sep="", end="")
    print(*(out / name for name in names), sep="\n")
    if not library:
        print(f"{page.NAME} needs a drawing library: {page.INSTALL}")


if __name__ == "__main__":
    sys.exit(command.run(main))
