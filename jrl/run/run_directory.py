"""Files of a run directory except checkpoints, and the progress display of commands."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jrl import config
from jrl.config import datasets, multi_agent
from jrl.errors import counted
from jrl.host import files, machine, output
from jrl.metrics import loggers, plots, progress
from jrl.run import build

if TYPE_CHECKING:
    from jrl.run.reporter import Sink
    from jrl.run.session import Session

# PPO of 11,000 parameters on one HalfCheetah made 4,918 steps/s on an H200, and 10,587 on the 16 cores beside it
_SMALL, _FEW = 50_000, 256


@contextlib.contextmanager
def open_files(session: "Session", directory: Path, rows_until: int | None) -> Iterator["Sink"]:
    """Writes config.yaml, params.json and env.json of a run, and opens its files of result rows; yields their sink.

    `rows_until`: env_steps of the last valid row of a continued run; None: a new run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config.write(session.config, directory)
    machine.write_env_json(directory, devices=[str(d) for d in jax.devices()])
    log = loggers.open_loggers(directory, session.config.run.log, rows_until)
    try:
        yield log.write
    finally:
        log.close()


def open_displays(
    stack: contextlib.ExitStack,
    directory: Path,
    transcript: output.Transcript,
    stop: Mapping[str, float],
    window: int = 0,
) -> "list[Sink]":
    """Opens log.txt and the progress displays until `stack` ends; returns sinks of result rows."""
    with files.report_unwritable(directory):
        transcript.open(directory / "log.txt")
    shown = [progress.open_progress(stop, stream, window=window) for stream in (transcript.screen, transcript.file)]
    for display in shown:
        stack.callback(display.close)
    transcript.listen()
    return [display.update for display in shown]


def describe(session: "Session", *, verbose: bool = False) -> Iterator[str]:
    """Yields lines that describe a run; with `verbose`, also its programs and the state that a resume keeps."""
    cfg, run, kind = session.config, session.run, jax.devices()[0].device_kind
    backend = run.backend if verbose else run.backend.partition(",")[0]
    yield f"{config.algo_name(cfg)} on {datasets.title(cfg)} ({backend}), {run.plan.learners} x {kind}"
    if session.platform_note:
        yield session.platform_note
    yield from run.plan.lines()
    spec_of = lambda policy: run.policies.of(policy)[1]
    yield from multi_agent.lines(cfg, lambda name: f": {spec_of(name).observation} -> {spec_of(name).action}")
    if verbose:
        yield run.programs
    yield f"{run.num_params:,} parameters"
    if not session.platform_note and run.plan.on_gpu and run.num_params < _SMALL and run.plan.columns < _FEW:
        yield "so few environments and parameters may be faster on the CPU: devices=auto measures both"
    if run.replay:
        yield run.replay
    if session.callback_list and run.note:
        yield run.note
    if verbose:
        yield build.GUARANTEES[run.guarantee]


@contextlib.contextmanager
def open_log(session: "Session", directory: Path) -> Iterator["Sink"]:
    """Writes log.txt of a run without a command: plan, rows, lines of jrl's loggers, end; yields a sink of rows."""
    with output.open_log(directory / "log.txt") as file:
        print(*describe(session, verbose=True), sep="\n", file=file)
        if session.env_steps:
            print(f"goes on at {counted(session.env_steps, 'step', ',')}", file=file)
        display = progress.open_progress({}, file)
        try:
            yield display.update
        finally:
            display.close()
            print(f"closed after {counted(session.counted(), 'step', ',')}", file=file)


def plot(session: "Session", directory: Path) -> None:
    """Draws the result rows of a run as learning_curve.png, and the league of self-play as league.png."""
    cfg = session.config
    title = f"{config.algo_name(cfg)} on {datasets.title(cfg)}"
    session.run.policies.draw(session.state, directory, title)
    plots.plot_learning_curve(directory, directory / "learning_curve.png", stop=cfg.stop, title=title)
