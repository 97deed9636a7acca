"""python -m jrl.sweep CONFIG --set KEY=SPACE ...: a run for each point of a space of hyper-parameters and each seed."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jrl.config import given
from jrl.errors import EnvironmentFailed, InputError
from jrl.host import command, files, output, runtime
from jrl.settings import config
from jrl.sweep import members, space, train


def parser() -> argparse.ArgumentParser:
    """The command line; nothing heavy is imported for it."""
    p = command.parser("sweep", f"Train with many hyper-parameters side by side. A space: {space.KINDS}.")
    p.add_argument("config", nargs="?", help="YAML file, or a name that `jrl config list` tells")
    p.add_argument(
        "--set", action="append", default=[], metavar="a.b=v", dest="overrides",
        help="a space for one key, e.g. algo.lr=log(1e-4,1e-2,8), or a value for all runs",
    )  # fmt: skip
    p.add_argument("--algo", help="short for --set algo.name=...")
    p.add_argument("--env", help="short for --set env.id=...")
    p.add_argument("--stop", action="append", default=[], metavar="metric=v", help="end each run there")
    p.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each point, with seeds from run.seed on")
    p.add_argument("--samples", type=int, metavar="N", help="points that are drawn; without it the whole grid")
    p.add_argument("--search", choices=("random", "sobol"), default="sobol", help="how --samples draws (default sobol)")
    p.add_argument(
        "--objective", metavar="METRIC", help="key of result rows, greater is better (default evaluation/return)"
    )
    p.add_argument("--processes", type=int, metavar="P", help="P runs at once, each in a process of its own")
    p.add_argument("--out", help="directory of the sweep")
    p.add_argument("--resume", metavar="PATH", help="go on with the sweep of that directory")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: as `jrl.sweep.train.train`, and 2 for bad input."""
    args = parser().parse_args(argv)
    with output.recorded() as transcript:
        try:
            return sweep(args, transcript)
        except InputError as e:
            return command.refused(e)
        except (EnvironmentFailed, runtime.Recompiled) as e:
            return command.failed(e)


def sweep(args: argparse.Namespace, transcript: output.Transcript) -> int:
    """Trains what the command line names; the exit status. Raises InputError."""
    for name in ("seeds", "samples", "processes"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise InputError(f"--{name}: expected at least 1, got {value}")
    if args.resume:
        return _goes_on(args, transcript)
    spaces, plain = _split(args.overrides)
    if not spaces:
        raise InputError(f"--set: none of them is a space, such as algo.lr=log(1e-4,1e-2,8): {space.KINDS}")
    base = given(args.config, algo=args.algo, env=args.env, drop=False, tell=print)
    cfg = config.load(base, plain, algo=args.algo, env=args.env, stop=args.stop, out=args.out)
    if "run.seed" in spaces:
        raise InputError("--set run.seed: --seeds says how many seeds each point has")
    if args.samples:
        points = space.drawn(spaces, args.samples, sobol=args.search == "sobol", seed=cfg.run.seed)
    else:
        points = space.grid(spaces)
    changes = space.with_seeds(points, [cfg.run.seed + i for i in range(args.seeds)])
    runtime.apply(cfg.runtime)
    directory = Path(cfg.run.out) if cfg.run.out else files.new(Path("runs") / f"sweep_{config.algo_name(cfg)}")
    return train.train(cfg, directory, changes, transcript, processes=args.processes, objective=args.objective)


def _goes_on(args: argparse.Namespace, transcript: output.Transcript) -> int:
    """Goes on with a sweep that was begun before."""
    directory = Path(args.resume)
    if not members.is_population(directory):
        raise InputError(f"--resume: {directory} is no sweep: give the --out of one")
    if args.config or args.out or _split(args.overrides)[0]:
        raise InputError("--resume: the sweep has its config and its members: leave out config, --out and spaces")
    cfg = config.load(str(directory / "config.yaml"), args.overrides, stop=args.stop)
    runtime.apply(cfg.runtime)
    return train.train(cfg, directory, None, transcript, processes=args.processes, objective=args.objective)


def _split(overrides: Sequence[str]) -> tuple[dict[str, space.Space], list[str]]:
    """The spaces by key, and what is a value for all. Raises InputError."""
    spaces: dict[str, space.Space] = {}
    plain: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        found: Any = space.parse(key, value)
        if found is None:
            plain.append(text)
        else:
            spaces[key] = found
    return spaces, plain


if __name__ == "__main__":
    sys.exit(command.run(main))
