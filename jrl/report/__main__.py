"""python -m jrl.report RUN ... --out DIR: compares runs, with intervals: a page, report.md, report.json, curves.png."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jrl.errors import InputError
from jrl.fields.paths import resolve_as_typed
from jrl.host import command, files

if TYPE_CHECKING:
    from jrl.report import content, page, runs

PORT = 8500


def parser() -> argparse.ArgumentParser:
    """Return the command line; imports nothing slow."""
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
    """Print the cautions and the written paths; return the exit status: 0, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        report(args)
    except InputError as e:
        return command.report_input_error(e)
    return 0


def report(args: argparse.Namespace) -> None:
    """Read the runs and write the report; with --serve, show the page until Ctrl-C. Raises InputError."""
    from jrl.report import content, page, page_server, runs

    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: expected 0 or more")
    if args.serve is not None and not 0 <= args.serve < 65536:
        raise InputError(f"--serve {args.serve}: expected a port, 0 to 65535")
    args.runs = [str(resolve_as_typed(run, "report", "any")) for run in args.runs]
    args.out = resolve_as_typed(args.out, "--out", "new directory")
    is_file = bool(args.against) and Path(args.against).suffix == ".csv"
    if is_file:
        args.against = str(resolve_as_typed(args.against, "--against", "file"))
    bounds = None
    if args.normalize is not None:
        bounds = content.read_bounds(resolve_as_typed(args.normalize, "--normalize", "file"))
    code = page.library()
    if args.serve is not None and code is None:
        raise InputError(f"--serve: the drawing library of the page is not installed: {page.INSTALL}")

    def read() -> "tuple[runs.Found, content.ReportOptions]":
        paths, against = list(args.runs), args.against
        if is_file:
            paths.insert(0, against)  # first: a file is read once, under the first spelling of its path
            against = runs.only_method(Path(against))
        found = runs.read(paths, [key for key in args.by.split(",") if key])
        if is_file:
            against = next(run.method for run in found.runs if run.name.startswith(f"{Path(args.against)}: "))
        return found, content.ReportOptions(args.objective, args.axis, against, bounds, args.seed)

    def page_of_now(link: "page.Link") -> str:
        assert code is not None
        try:
            found, options = read()
            return page.html(found, content.content(found, options), options, link, code)
        except InputError as e:
            return page.render(code, waiting="; ".join(e.errors))

    try:
        _write(args.out, *read(), code)
    except runs.NoRows as e:
        if args.serve is None:
            raise
        print(*e.errors, sep="\n")
    if args.serve is not None:
        page_server.serve(page_of_now, args.serve)


def _write(out: Path, found: "runs.Found", options: "content.ReportOptions", code: str | None) -> None:
    from jrl.report import content, figures, page, tables

    said = content.content(found, options)
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [figures.plot_curves(said, out / "curves.png").name, "report.md", "report.json"]
        files.replace(out / "report.md", tables.to_markdown(said, names[0]))
        files.replace(out / "report.json", tables.to_json(said))
        if code:
            files.replace(out / page.NAME, page.html(found, said, options, page.relative_link(out), code))
            names.insert(0, page.NAME)
    except OSError as e:
        raise InputError(f"--out {out}: cannot write there: {e.strerror}: choose another directory") from e
    print(*(f"caution: {line}" for line in said["cautions"]), sep="\n", end="\n" * bool(said["cautions"]))
    print(*(out / name for name in names), sep="\n")
    if not code:
        print(f"{page.NAME} needs a drawing library: {page.INSTALL}")


if __name__ == "__main__":
    sys.exit(command.run(main))
