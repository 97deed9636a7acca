"""Commands of `python -m jrl.data`. Slow modules are imported only when a command runs."""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.errors import InputError, counted
from jrl.fields.paths import resolve, unwritable, written
from jrl.host import command
from jrl.host.machine import require

if TYPE_CHECKING:
    from jrl.data.store import EpisodeStore

# name -> help text, in the order of the help
COMMANDS = {
    "record": "record a data set of trained policies, random actions or a mix of them",
    "inspect": "summarise a data set, and list its faults, each with a fix",
    "convert": "write data sets in another format",
    "split": "split a data set into a training set and a validation set",
    "merge": "write several data sets as one",
    "estimate": "estimate the return of a trained policy from recorded episodes",
}
_OUT = "new file or directory"
_POLICY_COMMANDS = {
    "record": "jrl.run.record_cli",
    "estimate": "jrl.run.estimate_data",
}  # commands that need a trained policy


def run(name: str, argv: list[str]) -> int:
    """Runs a command of `COMMANDS` and returns its exit status. Raises InputError: wrong arguments or data."""
    if name in _POLICY_COMMANDS:
        module = importlib.import_module(_POLICY_COMMANDS[name])
        return module.run(module.parser().parse_args(argv))
    parser, function = _build_inspect() if name == "inspect" else _build_rewrite(name)
    return function(parser.parse_args(argv))


def _build_parser(name: str, description: str, *, out: str = "", to: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser of input paths; with `out`, help of --out, also of the output and its default format `to`."""
    p = command.parser(f"data {name}", description)
    p.add_argument("paths", nargs="+", metavar="PATH", help="file, directory of files, or glob")
    p.add_argument("--from", dest="source_format", metavar="FORMAT", help="format to read (default: found by path)")
    where = "read only episodes with this label, such as policy=main; may be repeated"
    p.add_argument("--where", action="append", default=[], metavar="LABEL=VALUE", help=where)
    if out:
        default = f"(default {to})" if to else "such as jrl, minari, d4rl: docs/data.md lists all"
        p.add_argument("--to", default=to, required=to is None, metavar="FORMAT", help=f"format to write: {default}")
        p.add_argument("--out", required=True, help=f"{out}; existing files are not overwritten")
        compress = "compress the arrays: smaller files, slower (default: yes)"
        p.add_argument("--compress", action=argparse.BooleanOptionalAction, default=True, help=compress)
        limit = "largest size of the arrays in one file, in MiB (default 64; --out x.npz is always one file)"
        p.add_argument("--max-file-mb", type=float, help=limit)
    return p


def _build_inspect() -> Any:
    p = _build_parser("inspect", "Summarise a data set, and list its faults and possible faults, each with a fix.")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--out", metavar="PNG", help="new file for a plot of returns and lengths")
    p.add_argument("--strict", action="store_true", help="exit status 1 if there are findings")

    def run(args: argparse.Namespace) -> int:
        if args.out is not None:
            args.out = resolve(args.out, "--out", "new file")
            if args.out.suffix != ".png" or args.out.exists():
                raise InputError(f"--out: expected a new file NAME.png, got {args.out}: choose another name")
        store = _read(args)
        from jrl.data import inspection
        from jrl.data.findings import check_data
        from jrl.spaces_json import plain

        summary = inspection.summarise(store) | _summarise_files(args)
        findings = check_data(store)
        if args.json:
            print(json.dumps(plain(summary | {"findings": [x._asdict() for x in findings]}), allow_nan=False))
        else:
            print(*inspection.format_summary(store, summary), sep="\n")
            print(f"\n{counted(len(findings), 'finding')}:" if findings else "\nnothing was found to be wrong")
            for finding in findings:
                print(f"- {finding.what}\n  -> {finding.fix}")
        if args.out is not None:
            _draw_histograms(store, args.out)
        return int(args.strict and bool(findings))

    return p, run


def _summarise_files(args: argparse.Namespace) -> dict[str, Any]:
    from jrl.data import formats

    paths = [path for given in args.paths for path in formats.find_paths(given)]
    names = dict.fromkeys(args.source_format or formats.find_format(path) for path in paths)
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    files = [file for file in files if file.is_file()]
    return {"format": ", ".join(names), "files": len(files), "bytes_on_disk": sum(f.stat().st_size for f in files)}


def _draw_histograms(store: "EpisodeStore", png: Path) -> None:
    require("matplotlib", "plot", "--out")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    columns = {"return": store.returns(), "length": store.lengths()}
    for axes, (name, x) in zip(figure.subplots(1, 2), columns.items(), strict=True):
        axes.hist(x, bins=min(50, max(10, store.num_episodes // 5)))
        axes.set(xlabel=f"{name} of an episode", ylabel="episodes")
    figure.suptitle(store.name)
    with written(png, "--out") as part:
        figure.savefig(part, dpi=150)


def _build_rewrite(name: str) -> Any:
    """Returns the parser and the function of the command convert, merge or split."""
    about, out, to, parts = {
        "convert": ("Write a data set, or several as one, in another format.", _OUT, None, ()),
        "merge": ("Write several data sets as one, with episodes in the order of the paths.", _OUT, "jrl", ()),
        "split": (
            "Split a data set, by whole episodes, into DIR/train and DIR/validation.",
            "new directory",
            "jrl",
            ("train", "validation"),
        ),
    }[name]
    p = _build_parser(name, about, out=out, to=to)
    if name == "split":
        p.add_argument("--share", type=float, default=0.1, help="share of the steps in DIR/validation (default 0.1)")
        p.add_argument("--seed", type=int, default=0, help="seed of the choice of episodes (default 0)")

    def run(args: argparse.Namespace) -> int:
        if name == "split" and not 0 < args.share < 1:
            raise InputError(f"--share: expected a number above 0 and below 1, got {args.share:g}")
        if name == "split" and args.seed < 0:
            raise InputError(f"--seed: expected a number of at least 0, got {args.seed}")
        outs = _check_outputs(args, *parts)
        from jrl.data import formats

        if name == "merge" and len([path for given in args.paths for path in formats.find_paths(given)]) < 2:
            raise InputError(f"data merge: expected two or more data sets, got {args.paths[0]}: give more, or a glob")
        store = _read(args)
        for note in store.notes:
            print(f"note: {store.name}: {note}", file=sys.stderr)
        for out, part in zip(outs, store.split(args.share, args.seed) if parts else [store], strict=True):
            _write(part, out, args)
        return 0

    return p, run


def _read(args: argparse.Namespace) -> "EpisodeStore":
    from jrl.data import formats

    if wrong := [given for given in args.where if not all(given.partition("="))]:
        raise InputError(f"--where: expected LABEL=VALUE, such as policy=main, got {wrong[0]!r}")
    return formats.read(args.paths, args.source_format, dict(given.split("=", 1) for given in args.where))


def _check_outputs(args: argparse.Namespace, *names: str) -> list[Path]:
    """Returns the path of `--out`, or the paths of `names` in it. Raises InputError: path exists, or wrong options."""
    from jrl.data import formats

    formats.load_format(args.to)
    out = resolve(args.out, "--out")
    outs = [out / name for name in names] or [out]
    is_file = any(_is_file(path, args.to) for path in outs)
    for path in outs:
        resolve(path, "--out", "new file" if is_file else "new directory")
    if args.max_file_mb is not None:
        if not (args.max_file_mb > 0 and math.isfinite(args.max_file_mb)):
            raise InputError(f"--max-file-mb: expected more than 0, got {args.max_file_mb:g}")
        if args.to not in formats.FILE_FORMATS:
            raise InputError(f"--max-file-mb: the format {args.to} does not split files: leave it out")
        if is_file:
            raise InputError(f"--max-file-mb: --out {args.out} is one file: give a directory, or leave it out")
    for path in outs:
        if path.exists() and not (path.is_dir() and not any(path.iterdir()) and args.to in formats.FILE_FORMATS):
            raise InputError(f"--out: {path} exists: choose another path, or remove it")
    return outs


def _is_file(out: Path, format: str) -> bool:
    from jrl.data import formats

    return format in formats.FILE_FORMATS and out.name.endswith(tuple(formats.load_format(format).SUFFIXES))


def _write(store: "EpisodeStore", out: Path, args: argparse.Namespace) -> None:
    from jrl.data import formats
    from jrl.data.writer import Writer

    try:
        if args.to not in formats.FILE_FORMATS or _is_file(out, args.to):
            formats.write(store, out, args.to, compress=args.compress)
            files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
        else:
            about = {"meta": store.meta, "notes": store.notes, "compress": args.compress, "format": args.to}
            with Writer(out, store.observation, store.action_space, max_file_mb=args.max_file_mb or 64, **about) as w:
                for episode in store.episodes():
                    w.add(episode)
            files = w.files
    except OSError as e:
        raise unwritable(out, "--out", e) from e
    size = sum(path.stat().st_size for path in files)
    what = f"{counted(store.num_episodes, 'episode', ',')}, {counted(store.num_steps, 'step', ',')}"
    print(f"wrote {out}: {args.to}, {what}, {counted(len(files), 'file')}, {size / 2**20:.1f} MiB")
