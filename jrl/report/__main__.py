"""python -m jrl.report RUN ... --out DIR: compares runs, with intervals: a page, report.md, report.json, curves.png."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jrl.errors import InputError
from jrl.fields.paths import as_typed
from jrl.host import command, files

if TYPE_CHECKING:
    from jrl.report import content, page, runs

PORT = 8500


def parser() -> argparse.ArgumentParser:
    """Returns the command line; nothing heavy is imported for it."""
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
    p.add_argument(
        "--serve", type=int, nargs="?", const=PORT, metavar="PORT",
        help=f"show the page at this port of this machine (default {PORT}); reload it for newer rows",
    )  # fmt: skip
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
    """Reads the runs, and writes the report; with --serve it shows the page until Ctrl-C. Raises InputError."""
    from jrl.report import content, page, page_server, runs

    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: expected 0 or more")
    if args.serve is not None and not 0 <= args.serve < 65536:
        raise InputError(f"--serve {args.serve}: expected a port, 0 to 65535")
    args.runs = [str(as_typed(run, "report", "any")) for run in args.runs]
    args.out = as_typed(args.out, "--out", "new directory")
    if args.against and Path(args.against).suffix == ".csv":
        args.against = str(as_typed(args.against, "--against", "file"))
    bounds = (
        content.normalization(as_typed(args.normalize, "--normalize", "file")) if args.normalize is not None else None
    )
    code = page.library() if args.serve is None else page.required()
    try:
        _write(args, *_read(args, bounds), code)
    except runs.NoRows as e:
        if args.serve is None:
            raise
        print(*e.errors, sep="\n")
    if args.serve is not None and code:
        page_server.serve(lambda link: _page(args, bounds, link, code), args.serve)


def _read(args: argparse.Namespace, bounds: "content.Bounds | None") -> "tuple[runs.Found, content.Options]":
    """Returns the runs, and what is asked of them. Raises InputError."""
    from jrl.report import content, runs

    paths, against = list(args.runs), args.against
    if against and Path(against).suffix == ".csv":
        paths.insert(0, against)  # before the same file of another spelling, which would not be read twice
        against = runs.only_method(Path(against))
    found = runs.read(paths, [key for key in args.by.split(",") if key])
    if against != args.against:
        against = next(run.method for run in found.runs if run.name.startswith(f"{Path(args.against)}: "))
    return found, content.Options(args.objective, args.axis, against, bounds, args.seed)


def _page(args: argparse.Namespace, bounds: "content.Bounds | None", link: "page.Link", code: str) -> str:
    """Returns the page of runs as they are now."""
    from jrl.report import content, page

    try:
        found, options = _read(args, bounds)
        return page.html(found, content.content(found, options), options, link, code)
    except InputError as e:
        return page.waiting("; ".join(e.errors), code)


def _write(args: argparse.Namespace, found: "runs.Found", options: "content.Options", code: str | None) -> None:
    """Writes all files, and prints what is doubtful and their paths."""
    from jrl.report import content, figures, page, tables

    said = content.content(found, options)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        names = [figures.curves(said, args.out / "curves.png").name, "report.md", "report.json"]
        files.replace(args.out / "report.md", tables.markdown(said, names[0]))
        files.replace(args.out / "report.json", tables.to_json(said))
        if code:
            text = page.html(found, said, options, page.relative(args.out), code)
            files.replace(args.out / page.NAME, text)
            names.insert(0, page.NAME)
    except OSError as e:
        raise InputError(f"--out {args.out}: cannot write there: {e.strerror}: choose another directory") from e
    print(*(f"caution: {line}" for line in said["cautions"]), sep="\n", end="\n" * bool(said["cautions"]))
    print(*(args.out / name for name in names), sep="\n")
    if not code:
        print(f"{page.NAME} needs a drawing library: {page.INSTALL}")


if __name__ == "__main__":
    sys.exit(command.run(main))
