"""python -m jrl.reproduce NAME: trains the seeds of a published result, and compares our returns with it."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.errors import InputError, counted, did_you_mean
from jrl.fields.paths import resolve_as_typed
from jrl.host import command, files

RESULT = "result.json"  # in the directory of a row; scripts/reproduced_page.py reads it


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line; imports nothing slow."""
    p = command.parser(
        "reproduce",
        "Train a published result again: a config, its seeds one after another, and a comparison with the published "
        "numbers. The same command continues what was interrupted.",
    )
    p.add_argument("name", nargs="?", metavar="NAME", help="row of --list")
    p.add_argument("--list", action="store_true", help="print the rows: task, steps, seeds, published mean and source")
    p.add_argument("--seeds", type=int, metavar="N", help="number of seeds instead of the row's")
    p.add_argument("--steps", type=int, metavar="N", help="steps of each run instead of the row's")
    p.add_argument("--out", metavar="DIR", help="directory of the runs (default runs/reproduce/NAME)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the verdict and the written paths.

    Returns:
      The exit status: 0 whatever the verdict; 2 for bad input; else that of the first run that failed.
    """
    args = parser().parse_args(argv)
    try:
        if args.list:
            return _print_rows()
        return _reproduce(args)
    except InputError as e:
        return command.report_input_error(e)


def _print_rows() -> int:
    from jrl.report import published

    for name, row in published.reproducible().items():
        curve = published.of_row(row)
        mean, deviation = curve.at(row["steps"])
        print(
            f"{name:<31} {row['env']:<27} {row['steps']:>10,} steps  {row['seeds']} seeds  "
            f"published {mean:,.5g} ± {deviation:,.3g}, {curve.name}"
        )
    return 0


def _reproduce(args: argparse.Namespace) -> int:
    from jrl.report import published

    rows = published.reproducible()
    if args.name is None:
        raise InputError(f"NAME: expected a row: {command.format_command('reproduce')} --list prints them")
    if args.name not in rows:
        known = did_you_mean(args.name, rows) or f": {command.format_command('reproduce')} --list prints the names"
        raise InputError(f"{args.name}: not a row of the published results{known}")
    row = dict(rows[args.name])
    for key in ("seeds", "steps"):
        if (value := getattr(args, key)) is not None:
            if value < 1:
                raise InputError(f"--{key} {value}: expected 1 or more")
            row[key] = value
    curve = published.of_row(row)
    if row["steps"] < 0.99 * curve.steps[0]:
        raise InputError(
            f"--steps {row['steps']:,}: expected at least {curve.steps[0]:,.0f}, the first published step of this row"
        )
    reduced = f"-{args.steps}" if args.steps not in (None, rows[args.name]["steps"]) else ""
    out = resolve_as_typed(args.out or f"runs/reproduce/{args.name}{reduced}", "--out", "directory")
    for seed in range(1, row["seeds"] + 1):
        if status := _train(row, seed, curve.source.metric, out / f"seed-{seed}"):
            given = {key: value for key in ("seeds", "steps", "out") if (value := getattr(args, key)) is not None}
            typed = shlex.join([args.name, *(f"--{key}={value}" for key, value in given.items())])
            print(f"not complete: continue with {command.format_command('reproduce')} {typed}")
            return status
    return _compare(args.name, row, out)


def _train(row: Mapping[str, Any], seed: int, metric: str, directory: Path) -> int:
    """Trains or continues a seed; returns the exit status, 0 if it is complete already."""
    from jrl import config, train
    from jrl.metrics import loggers

    if (directory / "result.jsonl").is_file():
        reached = max((line.get("env_steps") or 0 for line in loggers.read_rows(directory / "result.jsonl")), default=0)
        if reached >= row["steps"]:
            print(f"seed {seed}: complete, {reached:,} steps in {directory}")
            return 0
    print(f"seed {seed} of {row['seeds']}: {row['env']}, {row['steps']:,} steps", flush=True)
    settings = [f"env.id={row['env']}", *row.get("set", ()), f"run.seed={seed}", f"stop.env_steps={row['steps']}"]
    cfg = config.load(row["config"], settings)
    settings += [f"stop.{name}=null" for name in cfg.stop if name != "env_steps"]  # the whole curve is compared
    if metric == "evaluation/return" and (cfg.evaluation.every or math.inf) > row["steps"]:
        settings.append(f"evaluation.every={row['steps']}")
    overrides = [f"--set={setting}" for setting in settings]
    resume = ["--resume", "auto"] if directory.exists() else []
    return train.main([row["config"], *overrides, *resume, "--out", str(directory)])


def _compare(name: str, row: Mapping[str, Any], out: Path) -> int:
    """Compares the seeds with the published result, writes result.json and the report, and prints the verdict."""
    from jrl.report import __main__ as report
    from jrl.report import published, runs

    own = [run for run in runs.read([out]).runs if run.seed is not None and run.seed <= row["seeds"]]
    curve = published.of_row(row)
    metric = curve.source.metric
    lines = [run.curve("env_steps", metric) for run in own]
    if lost := [run.name for run, line in zip(own, lines) if not len(line[0])]:
        raise InputError(f"{lost[0]}: no row has {metric}: delete the directory, or choose another --out")
    steps = min(float(row["steps"]), float(curve.steps[-1]), *(float(x[-1]) for x, _ in lines))
    mean, deviation = curve.at(steps)
    values = published.values_at(lines, steps)
    found = published.compare(values, mean, deviation, curve.seeds)
    origins = {str((run.provenance.get("git") or {}).get("commit"))[:12] for run in own}
    source = curve.source
    result = {
        "name": name, "task": row["env"], "config": row["config"], "set": list(row.get("set", ())),
        "algorithm": own[0].config.get("algo.name"), "settings": row["settings"],
        "seeds": [run.seed for run in own], "steps": round(steps), "returns": [float(f"{x:.6g}") for x in values],
        "published": {
            "algorithm": curve.algorithm, **source._asdict(), "file": curve.file, "seeds": curve.seeds,
            "mean": mean, "sd": deviation,
        },
        "commits": sorted(origins),
        "curve": _shorten(lines),
    }  # fmt: skip
    files.replace(out / RESULT, json.dumps(result, indent=1) + "\n")
    paths = [str(run.path) for run in own]
    status = report.main([*paths, "--out", str(out / "report"), "--published", "--objective", metric])
    spread = f" ± {found.deviation:,.4g}" if found.seeds > 1 else ""
    band = "" if math.isnan(found.half_width) else f", 95 % band ± {found.half_width:,.4g}"
    print(
        f"{name}: {row['env']} after {steps:,.0f} steps, {metric}\n"
        f"  ours       {found.ours:,.6g}{spread}, {counted(found.seeds, 'seed')}\n"
        f"  published  {mean:,.6g} ± {deviation:,.4g} over {source.deviation}, {counted(curve.seeds, 'seed')}: "
        f"{curve.name}, {curve.file} ({source.licence})\n"
        f"  difference {found.difference:,.4g}{band}: {found.verdict}"
    )
    return status


def _shorten(lines: Sequence[Any]) -> dict[str, list[float]]:
    """Returns steps, mean and deviation of the seeds' curves at 30 common points."""
    from jrl.metrics import plots

    x, values = plots.interpolate(lines, 30)
    deviation = values.std(0, ddof=1) if len(values) > 1 else 0 * x
    short = lambda numbers: [float(f"{number:.5g}") for number in numbers]
    return {"steps": [round(number) for number in x], "mean": short(values.mean(0)), "deviation": short(deviation)}


if __name__ == "__main__":
    sys.exit(command.run(main))
