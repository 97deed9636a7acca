"""python -m jrl.sweep CONFIG --set KEY=SPACE ...: a run for each point of a space of hyper-parameters and each seed."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jrl import config
from jrl.config.argument import given
from jrl.errors import EnvironmentFailed, InputError
from jrl.fields import schema
from jrl.fields.paths import resolve
from jrl.host import command, files, output, runtime
from jrl.sweep import members, search, settings, space, train

# fields of settings.SweepConfig
_OPTIONS = ("seeds", "samples", "search", "batch", "scheduler", "objective", "max_members")
_MAX_PROCESSES = 1000


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, without importing jax."""
    p = command.parser("sweep", f"Train with many hyper-parameters side by side. A space: {space.KINDS}.")
    p.add_argument("config", nargs="?", help="YAML file, or a name that `jrl config list` prints")
    p.add_argument(
        "--set", action="append", default=[], metavar="a.b=v", dest="overrides",
        help="a space for one key, e.g. algo.lr=log(1e-4,1e-2,8), or a value for all runs",
    )  # fmt: skip
    p.add_argument("--algo", help="short for --set algo.name=...")
    p.add_argument("--env", help="short for --set env.id=...")
    p.add_argument("--stop", action="append", default=[], metavar="metric=v", help="end each run at this value")
    p.add_argument("--budget", type=float, metavar="N", help="steps of a run: short for --stop env_steps=N")
    p.add_argument("--seeds", type=int, metavar="N", help="runs of each point, with seeds from run.seed on (default 1)")
    p.add_argument("--samples", type=int, metavar="N", help="number of drawn points; default: the whole grid")
    p.add_argument(
        "--search", choices=settings.SEARCHES, help="how --samples draws (default sobol); tpe and gp need optuna"
    )
    p.add_argument("--batch", type=int, metavar="N", help="tpe and gp: points that are trained at once (default 8)")
    p.add_argument("--scheduler", metavar="NAME", help="asha or pbt, e.g. asha(eta=4) or pbt(interval=20000)")
    p.add_argument("--objective", metavar="METRIC", help="key of result rows, greater is better (evaluation/return)")
    p.add_argument("--max-members", type=int, metavar="N", help="members that are one program at once")
    p.add_argument("--processes", type=int, metavar="P", help="P runs at once, each in its own process")
    p.add_argument("--out", help="directory of the sweep")
    p.add_argument("--resume", metavar="PATH", help="continue the sweep of that directory")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: that of `jrl.sweep.train.train`, or 2 for bad input."""
    args = parser().parse_args(argv)
    with output.record_output() as transcript:
        try:
            return _sweep(args, transcript)
        except InputError as e:
            return command.report_input_error(e)
        except (EnvironmentFailed, runtime.Recompiled) as e:
            return command.report_failure(e)


def _sweep(args: argparse.Namespace, transcript: output.Transcript) -> int:
    if args.processes is not None and not 1 <= args.processes <= _MAX_PROCESSES:
        raise InputError(f"--processes: expected 1 to {_MAX_PROCESSES:,}, got {args.processes:,}")
    if args.resume:
        return _resume(args, transcript)
    data = {} if args.config is None else config.mapping(args.config)
    options = {name: getattr(args, name) for name in _OPTIONS}
    plan, rest, plain = settings.read_settings(data, options, args.overrides)
    search.check_installed(plan)
    base = given(rest, algo=args.algo, env=args.env, drop=False, tell=print)
    stop = [*args.stop, *([] if args.budget is None else [f"env_steps={args.budget:.0f}"])]
    cfg = config.load(base, plain, algo=args.algo, env=args.env, stop=stop, out=args.out)
    settings.check_spaces(cfg, plan)
    runtime.apply(cfg.runtime)
    name = f"sweep_{config.algo_name(cfg)}"
    directory = Path(cfg.run.out) if cfg.run.out else files.make_numbered(Path("runs") / name)
    record = members.Record(directory, [], dict(schema.plain(plan.settings)))
    return train.train(cfg, directory, record, transcript, processes=args.processes)


def _resume(args: argparse.Namespace, transcript: output.Transcript) -> int:
    directory = resolve(args.resume, "--resume", "directory")
    if not members.is_population(directory):
        raise InputError(f"--resume: {directory} is not a sweep: give the --out of a sweep")
    options = [name for name in _OPTIONS if getattr(args, name) is not None]
    if args.config or args.out or options or args.budget is not None:
        raise InputError("--resume: the sweep has its config and settings: give only --set, --stop and --processes")
    plan = settings.read_stored_plan(members.read_record(directory).sweep)
    search.check_installed(plan)
    if fixed := sorted({text.partition("=")[0].strip() for text in args.overrides} & plan.spaces.keys()):
        raise InputError(*(f"--set {key}: each member of the sweep has its own value: leave it out" for key in fixed))
    cfg = config.load(str(directory / "config.yaml"), args.overrides, stop=args.stop)
    runtime.apply(cfg.runtime)
    return train.train(cfg, directory, None, transcript, processes=args.processes)


if __name__ == "__main__":
    sys.exit(command.run(main))
