"""Commands of `python -m jrl.data`: their arguments and what they do. Nothing slow is imported before one runs."""

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

# name -> what it does, in the order of the help
NAMES = {
    "record": "play trained policies, random actions or a mix of them into a data set",
    "inspect": "summarise a data set, and list its faults, each with a fix",
    "convert": "write data sets in another format",
    "split": "divide a data set into one to train on and one to validate with",
    "merge": "write several data sets as one",
    "estimate": "estimate what a trained policy would earn, by episodes that others played",
}
_OUT = "a file, or a directory that is made"
_RUNS = {"record": "jrl.run.record_cli", "estimate": "jrl.run.estimate_data"}  # commands that need a trained policy


def run(name: str, argv: list[str]) -> int:
    """Runs a command of `NAMES`. Returns its exit status. Raises InputError: its arguments or data are wrong."""
    if name in _RUNS:
        module = importlib.import_module(_RUNS[name])
        return module.run(module.parser().parse_args(argv))
    parser, function = _inspect() if name == "inspect" else _rewrites(name)
    return function(parser.parse_args(argv))


def _parser(name: str, description: str, *, out: str = "", to: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser with the paths that are read, and with `out` of what is written in the format `to`."""
    p = command.parser(f"data {name}", description)
    p.add_argument("paths", nargs="+", metavar="PATH", help="a file, a directory of files, or a glob of either")
    p.add_argument("--from", dest="source_format", metavar="FORMAT", help="format to read (default: by each path)")
    where = "only episodes with that label, such as policy=main; may be given more than once"
    p.add_argument("--where", action="append", default=[], metavar="LABEL=VALUE", help=where)
    if out:
        default = f"(default {to})" if to else "such as jrl, minari, d4rl: docs/data.md has them all"
        p.add_argument("--to", default=to, required=to is None, metavar="FORMAT", help=f"format to write: {default}")
        p.add_argument("--out", required=True, help=f"{out}; existing files are not overwritten")
        compress = "smaller, slower (default: yes)"
        p.add_argument("--compress", action=argparse.BooleanOptionalAction, default=True, help=compress)
        most = "another file begins before the arrays in one are larger (default 64 MiB; --out x.npz is one file)"
        p.add_argument("--max-file-mb", type=float, help=f"of formats of files: {most}")
    return p


# ---------------------------------------------------------------- the commands


def _inspect() -> Any:
    p = _parser("inspect", "Summarise a data set, and list what is wrong with it, or may be, each with a fix.")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--out", metavar="PNG", help="a picture of returns and lengths")
    p.add_argument("--strict", action="store_true", help="exit status 1 if there are findings")

    def run(args: argparse.Namespace) -> int:
        if args.out is not None:
            args.out = resolve(args.out, "--out", "new file")
            if args.out.suffix != ".png" or args.out.exists():
                raise InputError(f"--out: {args.out} exists, or is not a name of a PNG file: choose another")
        store = _read(args)
        from jrl.data import inspection
        from jrl.data.findings import findings
        from jrl.spaces_json import plain

        found = inspection.summary(store) | _files(args)
        faults = findings(store)
        if args.json:
            print(json.dumps(plain(found | {"findings": [fault._asdict() for fault in faults]}), allow_nan=False))
        else:
            print(*inspection.lines(store, found), sep="\n")
            print(f"\n{counted(len(faults), 'finding')}:" if faults else "\nnothing was found to be wrong")
            for fault in faults:
                print(f"- {fault.what}\n  -> {fault.mend}")
        if args.out is not None:
            _draw(store, args.out)
        return int(args.strict and bool(faults))

    return p, run


def _files(args: argparse.Namespace) -> dict[str, Any]:
    from jrl.data import formats

    located = [path for given in args.paths for path in formats.located(given)]
    kinds = dict.fromkeys(args.source_format or formats.format_of(path) for path in located)
    files = [file for path in located for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    files = [file for file in files if file.is_file()]
    return {"format": ", ".join(kinds), "files": len(files), "bytes_on_disk": sum(f.stat().st_size for f in files)}


def _draw(store: "EpisodeStore", png: Path) -> None:
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


def _rewrites(name: str) -> Any:
    """Returns the parser and the function of convert, merge or split."""
    about, out, to, parts = {
        "convert": ("Write a data set, or several as one, in another format.", _OUT, None, ()),
        "merge": ("Write several data sets as one, their episodes in the order of the paths.", _OUT, "jrl", ()),
        "split": (
            "Divide a data set, by whole episodes, into DIR/train and DIR/validation.",
            "directory that is made",
            "jrl",
            ("train", "validation"),
        ),
    }[name]
    p = _parser(name, about, out=out, to=to)
    if name == "split":
        p.add_argument("--share", type=float, default=0.1, help="share of the steps in DIR/validation (default 0.1)")
        p.add_argument("--seed", type=int, default=0, help="seed of the choice of episodes (default 0)")

    def run(args: argparse.Namespace) -> int:
        if name == "split" and not 0 < args.share < 1:
            raise InputError(f"--share: expected a number above 0 and below 1, got {args.share:g}")
        if name == "split" and args.seed < 0:
            raise InputError(f"--seed: expected a number of at least 0, got {args.seed}")
        outs = _outputs(args, *parts)
        from jrl.data import formats

        if name == "merge" and len([path for given in args.paths for path in formats.located(given)]) < 2:
            raise InputError(f"data merge: {args.paths[0]} is one data set: give two or more, or a glob of them")
        store = _read(args)
        for note in store.notes:  # parts of the file that the reader left out
            print(f"note: {store.name}: {note}", file=sys.stderr)
        for out, part in zip(outs, store.split(args.share, args.seed) if parts else [store], strict=True):
            _write(part, out, args)
        return 0

    return p, run


# ---------------------------------------------------------------- reading and writing


def _read(args: argparse.Namespace) -> "EpisodeStore":
    from jrl.data import formats

    if wrong := [given for given in args.where if not all(given.partition("="))]:
        raise InputError(f"--where: expected LABEL=VALUE, such as policy=main, got {wrong[0]!r}")
    return formats.read(args.paths, args.source_format, dict(given.split("=", 1) for given in args.where))


def _outputs(args: argparse.Namespace, *names: str) -> list[Path]:
    """Returns the path that `--out` names, or those of these names in it.

    Raises:
      InputError: an option of the output is wrong, or one of the paths exists or cannot be written.
    """
    from jrl.data import formats

    formats.module(args.to)
    out = resolve(args.out, "--out")
    outs = [out / name for name in names] or [out]
    is_file = any(_is_file(path, args.to) for path in outs)
    for path in outs:
        resolve(path, "--out", "new file" if is_file else "new directory")
    if args.max_file_mb is not None:
        if not (args.max_file_mb > 0 and math.isfinite(args.max_file_mb)):
            raise InputError(f"--max-file-mb: expected more than 0, got {args.max_file_mb:g}")
        if args.to not in formats.OF_FILES:
            raise InputError(f"--max-file-mb: {args.to} is one directory: leave it out")
        if is_file:
            raise InputError(f"--max-file-mb: --out {args.out} is one file: give a directory, or leave it out")
    for path in outs:
        if path.exists() and not (path.is_dir() and not any(path.iterdir()) and args.to in formats.OF_FILES):
            raise InputError(f"--out: {path} exists: choose another path, or remove it")
    return outs


def _is_file(out: Path, format: str) -> bool:
    from jrl.data import formats

    return format in formats.OF_FILES and out.name.endswith(tuple(formats.module(format).SUFFIXES))


def _write(store: "EpisodeStore", out: Path, args: argparse.Namespace) -> None:
    from jrl.data import formats
    from jrl.data.writer import Writer

    try:
        if args.to not in formats.OF_FILES or _is_file(out, args.to):
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
