"""python -m jrl.sweep CONFIG --set KEY=SPACE ...: a run for each point of a space of hyper-parameters and each seed."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jrl import config
from jrl.config.argument import given
from jrl.errors import EnvironmentFailed, InputError
from jrl.fields.paths import resolve
from jrl.host import command, files, output, runtime
from jrl.sweep import members, search, settings, space, train

_OPTIONS = ("seeds", "samples", "search", "batch", "scheduler", "objective", "max_members")  # of settings.SweepConfig

_PROCESSES = 1000


def parser() -> argparse.ArgumentParser:
    """Returns the command line; nothing heavy is imported for it."""
    p = command.parser("sweep", f"Train with many hyper-parameters side by side. A space: {space.KINDS}.")
    p.add_argument("config", nargs="?", help="YAML file, or a name that `jrl config list` tells")
    p.add_argument(
        "--set", action="append", default=[], metavar="a.b=v", dest="overrides",
        help="a space for one key, e.g. algo.lr=log(1e-4,1e-2,8), or a value for all runs",
    )  # fmt: skip
    p.add_argument("--algo", help="short for --set algo.name=...")
    p.add_argument("--env", help="short for --set env.id=...")
    p.add_argument("--stop", action="append", default=[], metavar="metric=v", help="end each run there")
    p.add_argument("--budget", type=float, metavar="N", help="steps of a run: short for --stop env_steps=N")
    p.add_argument("--seeds", type=int, metavar="N", help="runs of each point, with seeds from run.seed on (default 1)")
    p.add_argument("--samples", type=int, metavar="N", help="points that are drawn; without it the whole grid")
    p.add_argument(
        "--search", choices=settings.SEARCHES, help="how --samples draws (default sobol); tpe and gp need optuna"
    )
    p.add_argument("--batch", type=int, metavar="N", help="of tpe and gp: points that are trained together (default 8)")
    p.add_argument("--scheduler", metavar="NAME", help="asha or pbt, e.g. asha(eta=4) or pbt(interval=20000)")
    p.add_argument("--objective", metavar="METRIC", help="key of result rows, greater is better (evaluation/return)")
    p.add_argument("--max-members", type=int, metavar="N", help="members that are one program at once")
    p.add_argument("--processes", type=int, metavar="P", help="P runs at once, each in a process of its own")
    p.add_argument("--out", help="directory of the sweep")
    p.add_argument("--resume", metavar="PATH", help="go on with the sweep of that directory")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: as `jrl.sweep.train.train`, and 2 for bad input."""
    args = parser().parse_args(argv)
    with output.record_output() as transcript:
        try:
            return sweep(args, transcript)
        except InputError as e:
            return command.report_input_error(e)
        except (EnvironmentFailed, runtime.Recompiled) as e:
            return command.report_failure(e)


def sweep(args: argparse.Namespace, transcript: output.Transcript) -> int:
    """Trains what the command line names; the exit status. Raises InputError."""
    if args.processes is not None and not 1 <= args.processes <= _PROCESSES:
        raise InputError(f"--processes: expected 1 to {_PROCESSES:,}, got {args.processes:,}")
    if args.resume:
        return _goes_on(args, transcript)
    data = {} if args.config is None else config.mapping(args.config)
    given_options = {name: getattr(args, name) for name in _OPTIONS}
    plan, rest, plain = settings.read(data, given_options, args.overrides)
    search.check(plan)
    base = given(rest, algo=args.algo, env=args.env, drop=False, tell=print)
    stop = [*args.stop, *([] if args.budget is None else [f"env_steps={args.budget:.0f}"])]
    cfg = config.load(base, plain, algo=args.algo, env=args.env, stop=stop, out=args.out)
    settings.checked(cfg, plan)
    runtime.apply(cfg.runtime)
    directory = (
        Path(cfg.run.out) if cfg.run.out else files.make_numbered(Path("runs") / f"sweep_{config.algo_name(cfg)}")
    )
    record = members.Record([], settings.plain(plan.settings), [], [])
    return train.train(cfg, directory, record, transcript, processes=args.processes)


def _goes_on(args: argparse.Namespace, transcript: output.Transcript) -> int:
    directory = resolve(args.resume, "--resume", "directory")
    if not members.is_population(directory):
        raise InputError(f"--resume: {directory} is no sweep: give the --out of one")
    given_options = [name for name in _OPTIONS if getattr(args, name) is not None]
    if args.config or args.out or given_options or args.budget is not None:
        raise InputError("--resume: the sweep has its config and its settings: give --set, --stop, --processes alone")
    plan = settings.stored(members.read(directory).sweep)
    search.check(plan)
    if own := sorted({text.partition("=")[0].strip() for text in args.overrides} & plan.spaces.keys()):
        raise InputError(*(f"--set {key}: members of the sweep have values of their own: leave it out" for key in own))
    cfg = config.load(str(directory / "config.yaml"), args.overrides, stop=args.stop)
    runtime.apply(cfg.runtime)
    return train.train(cfg, directory, None, transcript, processes=args.processes)


if __name__ == "__main__":
    sys.exit(command.run(main))
