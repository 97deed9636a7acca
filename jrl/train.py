"""python -m jrl.train CONFIG: from a YAML file to a run directory with a trained policy."""

import argparse
import contextlib
import datetime
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl import config, plan
from jrl.errors import InputError

if TYPE_CHECKING:
    from jrl.build import Run
    from jrl.hooks import Hook
    from jrl.loop import LoopState
    from jrl.types import StepInfo


_SECONDS_BETWEEN_CHECKPOINTS = 300.0  # unless checkpoint.every says otherwise


def parser() -> argparse.ArgumentParser:
    """The command line. Neither jax nor an environment library is imported for it."""
    p = argparse.ArgumentParser(prog="python -m jrl.train", description="Train a policy as a YAML file says.")
    p.add_argument("config", nargs="?", help="YAML file; without it the defaults, and --algo, --env and --stop")
    p.add_argument(
        "--set", action="append", default=[], metavar="a.b=v", dest="overrides", help="override one key of the config"
    )
    p.add_argument("--algo", help="short for --set algo.name=...")
    p.add_argument("--env", help="short for --set env.id=...")
    p.add_argument(
        "--stop", action="append", default=[], metavar="metric=v", help="end the run there, e.g. env_steps=300000"
    )
    p.add_argument("--out", help="run directory")
    p.add_argument("--resume", metavar="auto|PATH", help="continue a run: its directory, a checkpoint, or the latest")
    p.add_argument("-v", "--verbose", action="count", default=0, help="tell where the time goes; -vv: all of jax's log")
    p.add_argument("--as-test", action="store_true", help="exit with 1 unless a stop criterion beside env_steps is met")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when --as-test was not met, 2 for bad input, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        return _train(args)
    except InputError as e:
        print(*(f"error: {line}" for line in e.errors), sep="\n", file=sys.stderr)
        return 2


def _train(args: argparse.Namespace) -> int:
    cfg = config.load(
        args.config, args.overrides, algo=args.algo, env=args.env, stop=args.stop, out=args.out
    )  # fmt: skip
    criteria = [name for name in cfg.stop if name != "env_steps"]
    if args.as_test and not criteria:
        raise InputError("--as-test needs a criterion beside env_steps: for example --stop episode/return=475")
    directory, saved = _directory(args, cfg)
    from jrl import envs

    errors = envs.check(cfg.env.id, cfg.env.backend, cfg.env.options)
    if errors:
        raise InputError(*errors)
    with _signals() as interrupted:
        reason = _run(cfg, directory, saved, verbose=args.verbose, interrupted=interrupted)
    met = reason is not None and not interrupted
    if interrupted:
        print("interrupted: the checkpoint is saved; continue with --resume", directory)
    else:
        print("stopped:", reason or f"env_steps reached {cfg.stop['env_steps']:,}")
        if args.as_test and not met:
            print(f"not met within the step budget: {', '.join(f'{c} {cfg.stop[c]:g}' for c in criteria)}")
    print(f"run: {directory}    evaluate: python -m jrl.evaluate {directory} --episodes 100")
    if interrupted:
        return 130
    return 1 if args.as_test and not met else 0


def _directory(args: argparse.Namespace, cfg: config.RunConfig) -> tuple[Path, Path | None]:
    """The run directory, and the checkpoint to continue from."""
    from jrl import checkpoint

    name = f"{Path(args.config).stem if args.config else config.algo_name(cfg)}_{cfg.env.id}".replace("/", "-")
    name = name.replace(":", "-")
    fresh = Path(cfg.run.out or f"runs/{name}_{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if args.resume is None:
        if (fresh / "checkpoints").is_dir():
            raise InputError(f"run.out: {fresh} holds a run already: add --resume auto, or choose another --out")
        return fresh, None
    if args.resume == "auto":
        runs = [fresh] if cfg.run.out else sorted(Path("runs").glob(f"{name}_*"), reverse=True)
        for directory in runs:
            with contextlib.suppress(InputError):
                return directory, checkpoint.locate(directory)
        print("resume: no checkpoint found, starting afresh")
        return fresh, None
    found = checkpoint.locate(Path(args.resume))
    own = found.parent.parent if found.parent.name == "checkpoints" else fresh
    return Path(cfg.run.out or own), found


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that SIGINT or SIGTERM fills; the loop ends at the next call. A second Ctrl-C ends the process at once."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _run(
    cfg: config.RunConfig, directory: Path, saved: Path | None, *, verbose: int, interrupted: list[int]
) -> str | None:
    """Trains; returns the criterion that ended the run, None if it was the step budget or a signal."""
    import jax

    from jrl import build, checkpoint, hooks, loop
    from jrl.metrics import loggers, progress, report, timers

    if verbose > 1:
        jax.config.update("jax_log_compiles", True)
    if cfg.run.disable_jit:
        jax.config.update("jax_disable_jit", True)
    if cfg.run.compile_cache:
        build.enable_compile_cache()
    meta = checkpoint.read_meta(saved) if saved else None
    counters = {name: meta[name] if meta else 0 for name in ("iteration", "env_steps")}
    total = int(cfg.stop["env_steps"])
    if counters["env_steps"] >= total:
        raise InputError(
            f"--resume: the run is complete, with {counters['env_steps']:,} of {total:,} steps: "
            "to train on, raise the budget, e.g. --stop env_steps=" + str(2 * total)
        )
    stages = timers.Timers()
    run = build.run(cfg, timers=stages, restarts=counters["iteration"])
    with contextlib.ExitStack() as stack:
        stack.callback(run.program.close)
        checkpoints = stack.enter_context(
            checkpoint.Checkpointer(directory / "checkpoints", keep_last=cfg.checkpoint.keep_last)
        )
        print(*_introduction(cfg, run, directory), sep="\n")
        state = run.program.init(cfg.run.seed)
        if saved and meta:
            for line in checkpoint.differences(meta["config"], cfg):
                print("resume: changed since the checkpoint:", line)
            state = run.program.place(_restored(saved, cfg, run, state))
            print(f"resume: from {saved} at {meta['env_steps']:,} steps")
        # not before the checkpoint was found to fit: nothing in the directory changes until then
        (directory / "config.yaml").write_text(config.to_yaml(cfg))
        report.write_env_json(directory, devices=[str(d) for d in jax.devices()])
        log = loggers.open_loggers(directory, cfg.run.log, counters["env_steps"] if meta else None)
        stack.callback(log.close)
        display = progress.open_progress(total)
        stack.callback(display.close)
        sinks: list[hooks.Sink] = [log.write, display.update, hooks.stop_at(cfg.stop)]
        if verbose:
            sinks.append(_print_stages)
        reporter = hooks.Reporter(
            sinks,
            every=plan.report_every(cfg),
            updates_per_iteration=plan.batch_plan(cfg).updates or 1,
            env_steps=counters["env_steps"],
            time_s=meta["time_s"] if meta else 0.0,
        )

        def save(info: "StepInfo") -> None:
            counts = {"iteration": info.iteration, "env_steps": info.env_steps_after(), "time_s": reporter.seconds()}
            stored = checkpoint.meta(cfg, counters=counts, environment_state=run.resumable)
            checkpoints.save(info.iteration, _parts(info.state, cfg, run), stored)

        after: list[Hook] = [reporter]
        if cfg.checkpoint.every is None:
            after.append(hooks.every_seconds(_SECONDS_BETWEEN_CHECKPOINTS, save))
        else:
            after.append(hooks.every(cfg.checkpoint.every, save, counters["env_steps"]))
        if cfg.evaluation.every:
            evaluate = _evaluation(cfg, run, reporter.extra, stack)
            after.append(hooks.every(cfg.evaluation.every, evaluate, counters["env_steps"]))
        reason = None
        for info in loop.run(run.program, state, seed=cfg.run.seed, total_env_steps=total, timers=stages, **counters):
            reason = next(filter(None, [hook(info) for hook in after]), None)
            if reason or interrupted:
                break
        reason = reporter.flush() or reason
        if checkpoints.last_saved != info.iteration:
            save(info)
        checkpoints.wait()
    report.plot_learning_curve(
        directory / "result.jsonl", directory / "learning_curve.png", title=f"{config.algo_name(cfg)} on {cfg.env.id}"
    )
    return reason


def _parts(state: "LoopState", cfg: config.RunConfig, run: "Run") -> dict[str, Any]:
    """What of the state a checkpoint holds."""
    replay = state.replay if cfg.checkpoint.replay == "full" else ()
    return {"learner": state.learner, "replay": replay, "source": state.source if run.resumable else ()}


def _restored(saved: Path, cfg: config.RunConfig, run: "Run", state: "LoopState") -> "LoopState":
    """The state in a checkpoint; what it does not hold is as in `state`."""
    import jax

    from jrl import checkpoint, loop

    wanted = _parts(state, cfg, run)
    if jax.tree.leaves(wanted["replay"]) and not (saved / "replay").is_dir():
        raise InputError(f"checkpoint: {saved} holds no replay: --set checkpoint.replay=none starts with an empty one")
    parts = {part: checkpoint.restore(saved, part, tree) for part, tree in wanted.items()}
    if parts["replay"] == () and cfg.replay is not None:
        print("resume: checkpoint.replay is none: replay starts empty, learning waits until it is filled")
        parts["replay"] = state.replay
    if not run.resumable:
        parts["source"] = state.source
    return loop.LoopState(**parts)


def _introduction(cfg: config.RunConfig, run: "Run", directory: Path) -> Iterator[str]:
    import jax

    device = jax.devices()[0]
    count = cfg.run.devices or len(jax.devices())
    yield f"{config.algo_name(cfg)} on {cfg.env.id} ({run.backend}), {count} x {device.device_kind}"
    yield from plan.lines(cfg)
    if run.replay:
        yield run.replay
    if run.resumable:
        yield "resume continues exactly: the environments are part of a checkpoint"
    else:
        yield "resume continues the learner exactly; the environments start anew, with other seeds"


def _evaluation(cfg: config.RunConfig, run: "Run", extra: dict[str, Any], stack: contextlib.ExitStack):
    """The action of `evaluation.every`: plays episodes and puts `evaluation/...` into the rows that follow."""
    from jrl import build, loop
    from jrl.rollout.evaluate import evaluator

    num_envs = cfg.evaluation.num_envs or min(cfg.evaluation.episodes, 16)
    env = build.environment(cfg, num_envs=num_envs, role="eval")
    stack.callback(env.close)
    evaluate = evaluator(
        env, run.algo.act, num_episodes=cfg.evaluation.episodes, carry=run.algo.carry, explore=cfg.evaluation.explore
    )
    names = ("return", "return_std", "return_min", "return_max", "length", "episodes")
    extra.update({f"evaluation/{name}": float("nan") for name in names})  # every row has every key

    def action(info: "StepInfo") -> None:
        actor = run.program.actor(info.state)
        found = evaluate(actor, loop.role_key(cfg.run.seed, loop.Role.EVALUATE, info.iteration)).summary()
        extra.update({f"evaluation/{name}": value for name, value in found.items()})

    return action


def _print_stages(row: dict[str, Any]) -> None:
    stages = {k.removeprefix("time/"): v for k, v in row.items() if k.startswith("time/") and v > 0}
    print("  time:", "  ".join(f"{name} {seconds:.3f}s" for name, seconds in stages.items()))


if __name__ == "__main__":
    sys.exit(main())
