"""python -m jrl.train CONFIG: trains a policy by a config and writes a run directory."""

import argparse
import contextlib
import dataclasses
import datetime
import glob
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl import config
from jrl.config import Sizes, datasets
from jrl.config.argument import given
from jrl.errors import EnvironmentFailed, InputError, RunnersLost
from jrl.fields import paths, schema, shipped
from jrl.host import command, files, interruption, output, runtime

if TYPE_CHECKING:
    from jrl.run.runner import Member


def parser(name: str = "train", what: str = "Train a policy as a config says.") -> argparse.ArgumentParser:
    """Returns the parser of a command that trains. Neither jax nor an environment library is imported for it."""
    p = command.parser(name, what)
    p.add_argument(
        "config",
        nargs="?",
        help="YAML file, a name of `jrl config list`, or an environment's id, whose settings are then chosen; "
        "without it the defaults, and --algo, --env and --stop",
    )
    p.add_argument(
        "--set", action="append", default=[], metavar="a.b=v", dest="overrides", help="override one key of the config"
    )
    p.add_argument("--algo", "--run", help="short for --set algo.name=...")
    p.add_argument("--env", help="short for --set env.id=...")
    p.add_argument(
        "--stop", action="append", default=[], metavar="metric=v", help="end the run there, e.g. env_steps=300000"
    )
    p.add_argument("--config", metavar="JSON", dest="rllib", help="keys of RLlib's, e.g. '{\"num_env_runners\": 8}'")
    p.add_argument("--drop", action="store_true", help=config.DROP)
    p.add_argument("--out", help="run directory")
    p.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="continue a run: its directory, a checkpoint, or the latest; without a config with its own",
    )
    p.add_argument(
        "--init-from",
        metavar="PATH",
        help="begin a new run with the weights and observation statistics that fit, of a run's latest checkpoint or of "
        "one checkpoint",
    )
    p.add_argument("--policy-only", action="store_true", help="of --init-from: the policy's, not those of values")
    p.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="say how the run works and where the time goes; -vv: all of jax's log",
    )
    p.add_argument("--as-test", action="store_true", help="exit with 1 unless a criterion other than env_steps is met")
    p.set_defaults(seeds=None, processes=None, until=None, rows=None, minutes=None)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Trains. Returns the exit status.

    Returns:
      0; 1 if --as-test failed, no update was made or an update was not finite; 2 for bad input; 128 + n after signal n.
    """
    p = parser()
    p.add_argument(
        "--seeds", type=int, metavar="N", help="number of runs side by side, with seeds run.seed, run.seed + 1, ..."
    )
    p.add_argument("--processes", type=int, metavar="P", help="of --seeds: P at once, each in a process of its own")
    p.add_argument("--until", type=float, metavar="STEPS", help="save there and exit; --resume goes on")
    p.add_argument("--minutes", type=float, metavar="M", help="of an environment's id: length of the run (default 10)")
    p.add_argument("--rows", metavar="JSON", help="further keys of each result row, e.g. '{\"pbt/copies\": 0}'")
    return run(p.parse_args(without_file(sys.argv[1:] if argv is None else argv)))


def without_file(argv: Sequence[str]) -> Sequence[str]:
    """Returns the words of a command without RLlib's `file` in front of a config: `train file x.yaml`."""
    is_word = len(argv) > 1 and argv[0] == "file" and not argv[1].startswith("-") and not Path("file").exists()
    return argv[1:] if is_word else argv


def run(args: argparse.Namespace, clients: Callable[[], Any] | None = None) -> int:
    """Trains as a command line of `parser` says.

    Args:
      args: of the command line.
      clients: makes a `jrl.serve.clients.Clients`, who play the episodes; None: there are none.
    Returns:
      The exit status.
    """
    verbose = args.verbose > 0
    with output.record_output() as transcript:
        try:
            return _train(args, transcript, clients)
        except InputError as e:
            return command.report_input_error(e, verbose=verbose)
        except (RunnersLost, EnvironmentFailed, runtime.Recompiled) as e:
            return command.report_failure(e, verbose=verbose)
        except OSError as e:
            if not files.is_disk_full(e):
                raise
            where = f"cannot write to {e.filename or 'the run directory'}: {e.strerror}"
            return command.report_input_error(InputError(f"{where}: free space, then go on with --resume"))


def _train(args: argparse.Namespace, transcript: output.Transcript, make_clients: Callable[[], Any] | None) -> int:
    _resolve_paths(args)
    rllib_keys = _read_mapping("--config", args.rllib, '{"num_env_runners": 8}')
    row_keys = _read_mapping("--rows", args.rows, '{"x/y": 1}') or {}
    if wrong := [name for name, value in row_keys.items() if not isinstance(value, str | int | float | None)]:
        raise InputError(f"--rows: {wrong[0]}: expected a number or text, got {row_keys[wrong[0]]!r:.60}: leave it out")
    source, chosen = _base(args), None
    if make_clients is None and isinstance(source, str) and not shipped.is_config(source):
        from jrl.auto import chooser

        chosen = chooser.choose_config(source, args)
        source = chosen.data(chosen.seconds)
    elif args.minutes is not None:
        fix = "with a config use --stop time_s=600"
        raise InputError(f"--minutes: expected an environment's id, such as `jrl train CartPole-v1`: {fix}")
    base = given(source, algo=args.algo, env=args.env, drop=args.drop, over_it=rllib_keys, tell=print)
    cfg = config.load(base, args.overrides, algo=args.algo, env=args.env, stop=args.stop, out=args.out)
    if cfg.external is not None and make_clients is None:
        raise InputError(
            f"external: clients play the episodes of this run: start it with {command.format_command('serve')}"
        )
    criteria = [name for name in cfg.stop if name != Sizes(cfg).counts_by]
    if args.as_test and not criteria:
        raise InputError(
            "--as-test: expected a stop criterion beside env_steps: add one, such as --stop episode/return=475"
        )
    if args.policy_only and not args.init_from:
        raise InputError("--policy-only: expected --init-from, too: add it, or leave out --policy-only")
    if args.resume and args.init_from:
        raise InputError("--resume: expected no --init-from, which begins a new run: give one of them")
    settings = runtime.apply(cfg.runtime)
    if args.verbose and settings:
        print("runtime:", *settings)
    named = Path(args.config).stem if args.config and not chosen else ""
    title = f"{named or config.algo_name(cfg)}_{datasets.title(cfg)}"
    title = title.replace("/", "-").replace(":", "-")
    if chosen and chosen.candidates:
        chosen, source = chooser.run_trials(chosen, args, _dated(title))
        cfg = config.load(source, args.overrides, out=args.out)
    if args.seeds is not None or args.processes is not None or args.resume:  # a population, or perhaps one
        from jrl.sweep import seeds

        if (status := seeds.train_seeds(args, cfg, _dated(title), transcript)) is not None:
            return status
    with contextlib.ExitStack() as stack:
        if clients := make_clients and make_clients():
            stack.enter_context(clients.open(cfg.external))
        directory, saved = _directory(args, cfg.run.out, title, stack)
        if chosen:
            files.replace(directory / "auto.yaml", chosen.yaml(source))
        if saved and not args.as_test:  # --as-test needs the criterion
            from jrl.run.store import checkpoint, resume

            meta = checkpoint.read_meta(saved, resumable=True)
            is_requested = bool(args.stop) or any(text.lstrip().startswith("stop") for text in args.overrides)
            cfg, lines = resume.drop_met_criteria(meta, cfg, is_requested=is_requested)
            print(*(f"resume: {line}\n" for line in lines), sep="", end="")
        interrupted = stack.enter_context(interruption.watch_signals())
        stack.enter_context(interruption.enable_stack_dumps())
        for count in range(cfg.run.max_rollbacks + 1):
            if count:
                cfg, saved = _roll_back(cfg, directory, saved, count)
            # discard the rows of an attempt that ended before its first checkpoint
            starts_over = saved is None and bool(args.resume or count)
            member = _run(args, cfg, directory, saved, starts_over, row_keys, transcript, interrupted, clients)
            if member.fault is None or cfg.run.on_nonfinite != "rollback":
                break
        return _report_end(args, member, interrupted)


def _resolve_paths(args: argparse.Namespace) -> None:
    paths.resolve(".", "run.out")  # the working directory may be deleted
    for name in ("out", "resume", "init_from"):
        given = getattr(args, name)
        if given is not None and not (name == "resume" and given == "auto"):
            expected: paths.Expected = "directory" if name == "out" else "any"
            setattr(args, name, str(paths.resolve(given, f"--{name.replace('_', '-')}", expected)))


def _dated(title: str) -> str:
    return f"{title}_{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _report_end(args: argparse.Namespace, member: "Member", interrupted: interruption.Signals) -> int:
    """Prints why the run ended and the next commands; returns the exit status."""
    from jrl.run import reporter
    from jrl.run.store import checkpoint

    cfg, directory, reason = member.session.config, member.directory, member.reason
    assert directory is not None
    key = Sizes(cfg).counts_by
    has_checkpoint = checkpoint.exists(directory)
    typed = shlex.quote(str(directory))
    # a callback is not a criterion
    missed = args.as_test and (not reason or reason == member.session.end_reason)
    without_update = ""
    if member.fault:
        print(
            f"ended by an update that was not finite; {command.format_command('debug')} {member.fault} explains it",
            file=sys.stderr,
        )
    elif interrupted and has_checkpoint:
        print("interrupted: continue with --resume", typed)
    elif interrupted:
        print("interrupted before the first checkpoint: there is nothing to continue")
    elif member.ended is None:
        print(f"paused as --until says: continue with --resume {typed}")
    else:
        print("stopped:", reason or f"{key} reached {cfg.stop[key]:,}")
        if missed:
            criteria = (f"{name} {value:g}" for name, value in cfg.stop.items() if name != key)
            print(f"not met within the step budget: {', '.join(criteria)}")
        if not reason or reason != member.session.end_reason:
            without_update = reporter.explain_no_update(member.session.reporter.row or {}, cfg.replay)
    where = "" if cfg.env.id else " --set env.id=NAME"
    if has_checkpoint and (best := _describe_best(directory)):
        print(best)
    print("run:", directory)
    if has_checkpoint:
        print(f"evaluate: {command.format_command('evaluate')} {typed} --episodes 100{where}")
        print(f"page: {command.format_command('report')} {typed} --out {shlex.quote(str(directory / 'report'))}")
    if interrupted:
        return interrupted.exit_status or 1
    if without_update:
        print(without_update, file=sys.stderr)
    return 1 if member.fault or without_update or missed else 0


def _describe_best(directory: Path) -> str:
    """Returns a line on the best checkpoint; "": it is the latest."""
    from jrl.run.store import checkpoint

    found = checkpoint.locate(directory, best=None)
    if found == checkpoint.locate(directory):
        return ""
    meta = checkpoint.read_meta(found)
    by = meta["config"]["checkpoint"]["keep_best_by"]
    return (
        f"best: {by} {meta['metrics'][by]:.4g} after {meta['env_steps']:,} steps, which other commands use; "
        "--latest selects the latest checkpoint"
    )


def _read_mapping(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    """Returns the mapping of an option, from JSON; None: the option is not given. Raises InputError."""
    parsed = None
    with contextlib.suppress(ValueError):
        parsed = None if text is None else schema.parse_json(text)
    if text is None or isinstance(parsed, dict):
        return parsed
    is_file = option == "--config" and bool(Path(text).suffix)
    fix = f"a file goes without --config: {command.format_command('train')} {text}" if is_file else "mind the quotes"
    raise InputError(f"{option}: expected JSON such as '{example}', got {text[:60]!r}: {fix}")


def _roll_back(
    cfg: config.RunConfig, directory: Path, saved: Path | None, count: int
) -> tuple[config.RunConfig, Path | None]:
    """Returns the config with smaller step sizes, and the checkpoint of a rollback; None: the beginning."""
    from jrl.run.store import checkpoint

    with contextlib.suppress(InputError):
        saved = checkpoint.locate(directory)
    factor = cfg.run.rollback_lr
    smaller = lambda lr: tuple((n, v * factor) for n, v in lr) if isinstance(lr, tuple) else lr * factor
    names = [f.name for f in dataclasses.fields(cfg.algo) if f.name == "lr" or f.name.endswith("_lr")]
    rates = {name: smaller(rate) for name in names if (rate := getattr(cfg.algo, name)) is not None}
    where = saved or "the beginning"
    print(f"rollback {count} of {cfg.run.max_rollbacks}: from {where}, with", *(f"{n}={r}" for n, r in rates.items()))
    return dataclasses.replace(cfg, algo=dataclasses.replace(cfg.algo, **rates)), saved


def _base(args: argparse.Namespace) -> str | dict[str, Any] | None:
    """Returns the config that the command line changes: the given file, or the config of the continued run."""
    run = args.out if args.resume == "auto" else args.resume
    if args.config is not None or not run:
        return args.config
    if not Path(run).exists() and args.resume != "auto":
        raise InputError(f"--resume: {run} does not exist: give a run directory or a checkpoint inside it")
    from jrl.run.store import resume

    data = resume.read_config(Path(run)) if Path(run).exists() else None
    if data is None and args.resume != "auto":
        raise InputError(f"--resume: {run} holds no run to continue: begin one with a config and --out {run}")
    if data is not None:
        print(f"resume: with the config of {run}")
    return data


def _directory(
    args: argparse.Namespace, out: str | None, title: str, stack: contextlib.ExitStack
) -> tuple[Path, Path | None]:
    """Returns the run directory, locked until the stack ends, and the checkpoint to continue from or None."""
    from jrl.run.store import checkpoint

    given = Path(out) if out else None
    own, saved = given, None
    if args.resume == "auto":
        named = Path("runs").absolute().glob(f"{glob.escape(title)}_*")
        latest = next(filter(checkpoint.exists, [given] if given else sorted(named, reverse=True)), None)
        if latest is None:
            print("resume: no checkpoint found, starting afresh")
        else:
            own, saved = latest, checkpoint.locate(latest)
    elif args.resume:
        saved = checkpoint.locate(Path(args.resume))
        own = given or checkpoint.find_run_directory(Path(args.resume))
    directory = own or files.make_numbered(Path(f"runs/{_dated(title)}"))
    stack.enter_context(files.lock_directory(directory, made=own is None))
    if args.resume is None and (directory / "config.yaml").exists():
        raise InputError(f"run.out: {directory} holds a run already: add --resume auto, or choose another --out")
    return directory, saved


def _run(
    args: argparse.Namespace,
    cfg: config.RunConfig,
    directory: Path,
    saved: Path | None,
    starts_over: bool,
    row_keys: dict[str, Any],
    transcript: output.Transcript,
    interrupted: interruption.Signals,
    clients: Any,
) -> "Member":
    """Trains until a criterion, the step budget, a pause, a signal or an update that is not finite."""
    import jax

    from jrl.run import build, run_directory, runner
    from jrl.run.session import Session
    from jrl.run.store import checkpoint

    if args.verbose > 1:
        jax.config.update("jax_log_compiles", True)
    if cfg.run.disable_jit:
        jax.config.update("jax_disable_jit", True)
    if cfg.run.compile_cache:
        build.enable_compile_cache()
    meta = checkpoint.read_meta(saved, resumable=True) if saved else None
    if meta and cfg.devices.platform == "auto":
        from jrl.run import platform_choice

        cfg = platform_choice.recorded(cfg, meta["config"])
    weights = checkpoint.locate(Path(args.init_from)) if args.init_from else None
    key = Sizes(cfg).counts_by
    total, done = int(cfg.stop[key]), meta["env_steps"] if meta else 0
    until = math.inf if args.until is None else args.until
    if done >= total:
        raise InputError(
            f"--resume: the run is complete, with {done:,} of {total:,} steps: "
            f"to train on, raise the budget, e.g. --stop {key}={2 * max(total, done)}"
        )
    if done >= until:
        raise InputError(f"--until {until:.0f}: the run is at {done:,} steps already: give more")
    restarts = meta["iteration"] if meta else 0
    external = clients.source(cfg, restarts, interrupted) if clients else None
    session = Session(cfg, restarts=restarts, directory=directory, external=external)
    with contextlib.ExitStack() as stack:
        pulse = lambda: session.timers.latest
        watchdog = stack.enter_context(interruption.Watchdog(cfg.run.stall_seconds, pulse=pulse))
        stack.enter_context(session)
        member = runner.Member(session, directory, watchdog)
        member.open_checkpoints(stack)
        print(*run_directory.describe(session, verbose=args.verbose > 0), sep="\n")
        for note in session.start(saved, weights, policy_only=args.policy_only, starts_over=starts_over):
            print(note)
        # after the checkpoint is known to fit: nothing in the directory changes before
        window = cfg.run.smoothing_episodes
        sinks = run_directory.open_displays(stack, directory, transcript, cfg.stop, window=window)
        sinks += [_print_stages] if args.verbose else []
        rows_until = session.reporter.row_steps if meta or starts_over else None
        member.open(stack, rows_until, *sinks, extra=row_keys)
        runner.Runner([member], watchdog, interrupted).run(until)
    if member.info is None or member.fault:
        return member
    try:
        run_directory.plot(session, directory)
    except (OSError, InputError) as e:  # the run itself is complete
        print(f"learning_curve.png was not drawn: {getattr(e, 'strerror', None) or e}", file=sys.stderr)
    return member


def _print_stages(row: dict[str, Any]) -> None:
    from jrl.metrics.timers import RECOMPILES

    stages = {k.removeprefix("time/"): v for k, v in row.items() if k.startswith("time/") and k != RECOMPILES and v > 0}
    print("  time:", "  ".join(f"{name} {seconds:.3f}s" for name, seconds in stages.items()))


if __name__ == "__main__":
    sys.exit(command.run(main))
