"""python -m jrl.data inspect PATH ...: what is in a data set, what is wrong with it and what to do."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.data.commands import paths
from jrl.errors import InputError, counted
from jrl.fields.paths import resolve, written
from jrl.host import command
from jrl.host.installed import require

if TYPE_CHECKING:
    from jrl.data.store import EpisodeStore


def parser() -> argparse.ArgumentParser:
    p = command.parser(
        "data inspect", "Summarise a data set, and list what is wrong with it, or may be, each with a mend."
    )
    paths.take_input(p)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--out", metavar="PNG", help="a picture of returns and lengths")
    p.add_argument("--strict", action="store_true", help="exit status 1 if there are findings")
    return p


def run(args: argparse.Namespace) -> int:
    """Prints what was found. Returns the exit status: 0, or 1 with --strict where something is wrong."""
    if args.out is not None:
        args.out = resolve(args.out, "--out", "new file")
        if args.out.suffix != ".png" or args.out.exists():
            raise InputError(f"--out: {args.out} exists, or is not a name of a PNG file: choose another")
    store = paths.read(args)
    from jrl.data import inspection
    from jrl.data.findings import findings
    from jrl.data.spaces_json import plain

    found: dict[str, Any] = inspection.summary(store) | _files(args)
    faults = findings(store)
    if args.json:
        print(json.dumps(plain(found | {"findings": [fault._asdict() for fault in faults]}), allow_nan=False))
    else:
        print(*inspection.lines(store, found), sep="\n")
        told = counted(len(faults), "finding") if faults else "nothing was found to be wrong"
        print(f"\n{told}" + ":" * bool(faults))
        for fault in faults:
            print(f"- {fault.what}\n  -> {fault.mend}")
    if args.out is not None:
        _draw(store, args.out)
    return int(args.strict and bool(faults))


def _files(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the format of each path, and the files with their bytes."""
    from jrl.data import formats

    located = [path for given in args.paths for path in formats.located(given)]
    kinds = dict.fromkeys(args.source_format or formats.format_of(path) for path in located)
    files = [file for path in located for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    files = [file for file in files if file.is_file()]
    return {"format": ", ".join(kinds), "files": len(files), "bytes_on_disk": sum(f.stat().st_size for f in files)}


def _draw(store: "EpisodeStore", png: Path) -> None:
    """Writes histograms of returns and lengths. Raises InputError: the file cannot be written."""
    require("matplotlib", "plot", "--out")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, name, x in zip(
        figure.subplots(1, 2), ("return", "length"), (store.returns(), store.lengths()), strict=True
    ):
        axes.hist(x, bins=min(50, max(10, store.num_episodes // 5)))
        axes.set(xlabel=f"{name} of an episode", ylabel="episodes")
    figure.suptitle(store.name)
    with written(png, "--out") as part:
        figure.savefig(part, dpi=150)
