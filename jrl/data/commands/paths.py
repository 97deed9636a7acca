"""Data sets that a command reads, and where and how it writes one."""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jrl.errors import InputError, counted
from jrl.fields.paths import resolve, unwritable

if TYPE_CHECKING:
    from jrl.data.store import EpisodeStore


def take_input(parser: argparse.ArgumentParser) -> None:
    """Adds the paths that are read, and `--from`."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, a directory of files, or a glob of either")
    parser.add_argument("--from", dest="source_format", metavar="FORMAT", help="format to read (default: by each path)")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="LABEL=VALUE",
        help="only episodes with that label, such as policy=main; may be given more than once",
    )


def where(args: argparse.Namespace) -> dict[str, str]:
    """Returns the labels of `--where` and their values. Raises InputError: one is no LABEL=VALUE."""
    if wrong := [given for given in args.where if not all(given.partition("="))]:
        raise InputError(f"--where: expected LABEL=VALUE, such as policy=main, got {wrong[0]!r}")
    return dict(given.split("=", 1) for given in args.where)


def take_output(parser: argparse.ArgumentParser, out: str) -> None:
    """Adds `--out`, which `out` describes, and how files are written."""
    parser.add_argument("--out", required=True, help=f"{out}; existing files are not overwritten")
    parser.add_argument(
        "--compress", action=argparse.BooleanOptionalAction, default=True, help="smaller, slower (default: yes)"
    )
    parser.add_argument(
        "--max-file-mb",
        type=float,
        help="of formats of files: another file begins before the arrays in one are larger (default 64 MiB; a file "
        "that --out names is one file)",
    )


def read(args: argparse.Namespace) -> "EpisodeStore":
    """Reads the paths as one data set. Raises InputError: they cannot be."""
    from jrl.data import formats

    return formats.read(args.paths, args.source_format, where(args))


def check_output(args: argparse.Namespace, format: str, *names: str) -> tuple[Path, ...]:
    """Returns the path that `--out` names, or those of these names in it.

    Raises:
      InputError: an option of the output is wrong, or one of the paths exists or cannot be written.
    """
    from jrl.data import formats

    formats.module(format)
    out = resolve(args.out, "--out")
    outs = tuple(out / name for name in names) or (out,)
    for path in outs:
        resolve(path, "--out", "new file" if _is_file(path, format) else "new directory")
    if args.max_file_mb is not None:
        if not (args.max_file_mb > 0 and math.isfinite(args.max_file_mb)):
            raise InputError(f"--max-file-mb: expected more than 0, got {args.max_file_mb:g}")
        if format not in formats.OF_FILES:
            raise InputError(f"--max-file-mb: {format} is one directory: leave it out")
        if any(_is_file(out, format) for out in outs):
            raise InputError(f"--max-file-mb: --out {args.out} is one file: give a directory, or leave it out")
    for out in outs:
        if out.exists() and not (out.is_dir() and not any(out.iterdir()) and format in formats.OF_FILES):
            raise InputError(f"--out: {out} exists: choose another path, or remove it")
    return outs


def _is_file(out: Path, format: str) -> bool:
    from jrl.data import formats

    return format in formats.OF_FILES and out.name.endswith(tuple(formats.module(format).SUFFIXES))


def write(store: "EpisodeStore", out: Path, format: str, args: argparse.Namespace) -> None:
    """Writes a data set and prints what was written. Raises InputError: it cannot be written."""
    from jrl.data import formats
    from jrl.data.writer import Writer

    try:
        if format not in formats.OF_FILES or _is_file(out, format):
            formats.write(store, out, format, compress=args.compress)
            files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
        else:
            about = {"meta": store.meta, "notes": store.notes, "compress": args.compress, "format": format}
            with Writer(out, store.observation, store.action_space, max_file_mb=args.max_file_mb or 64, **about) as w:
                for episode in store.episodes():
                    w.add(episode)
            files = w.files
    except OSError as e:
        raise unwritable(out, "--out", e) from e
    size = sum(path.stat().st_size for path in files)
    what = f"{counted(store.num_episodes, 'episode', ',')}, {counted(store.num_steps, 'step', ',')}"
    print(f"wrote {out}: {format}, {what}, {counted(len(files), 'file')}, {size / 2**20:.1f} MiB")


def tell_notes(store: "EpisodeStore") -> None:
    """Prints on stderr what a reader left out or could not know."""
    for note in store.notes:
        print(f"note: {store.name}: {note}", file=sys.stderr)
