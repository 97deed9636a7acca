"""Files of an Algorithm: its run directory, as the command writes it, and the checkpoints of `save`."""

import contextlib
import datetime
import shutil
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jrl import config
from jrl.config import datasets
from jrl.errors import InputError
from jrl.fields.paths import resolve, unwritable
from jrl.host import files
from jrl.run import run_directory
from jrl.run.session import Session
from jrl.run.store import checkpoint
from jrl.run.store.writer import Checkpointer


class Saved(str):
    """The path of a checkpoint, with the attributes of RLlib's results: `algo.save().checkpoint.path`.

    Attributes:
      metrics: the result of the iteration before, if there was one.
    """

    metrics: Mapping[str, Any] = types.MappingProxyType({})

    @property
    def path(self) -> str:
        return str(self)

    @property
    def checkpoint(self) -> "Saved":
        return self

    def to_directory(self, path: str | Path | None = None) -> str:
        """Returns the path; of a copy at `path`, if that is given."""
        return self.path if path is None else str(shutil.copytree(self, path, dirs_exist_ok=True))

    @contextlib.contextmanager
    def as_directory(self) -> Any:
        """Yields the path."""
        yield self.path


def path_of(given: Any) -> Path:
    """Returns the path of a `Saved`, of a Ray checkpoint, or of a path."""
    given = getattr(given, "checkpoint", given)
    return resolve(given if isinstance(given, str) else getattr(given, "path", given), "checkpoint")


def hold(out: str | None, *, continued: bool) -> contextlib.ExitStack:
    """Keeps other runs out of a run directory until the stack is closed.

    Raises:
      InputError: another run writes to it, or it holds a run that is not continued.
    """
    with contextlib.ExitStack() as stack:
        if out:
            stack.enter_context(files.lock_directory(Path(out)))
            if not continued and (Path(out) / "config.yaml").exists():
                raise InputError(f"run.out: {out} holds a run already: name another, or go on from a checkpoint")
        return stack.pop_all()


class Records:
    """The run directory of one Algorithm. Nothing is made before the first result row, or the first `save`.

    Args:
      held: result of `hold`; closed at the end.
      continued: whether the run goes on from a checkpoint.
      directory: run directory before a restore, which goes on with it; None: as `run.out` says.
      runs: parent of run directories without a name; absolute, since environments may change the working directory.
    """

    def __init__(
        self, session: Session, held: contextlib.ExitStack, *, continued: bool, directory: Path | None, runs: Path
    ):
        self._session, self._files, self._continued = session, held, continued
        self.made, self._runs = directory, runs  # the directory, if there is one yet
        self.writes = bool(session.config.run.log or session.config.run.out)  # result rows; checkpoints always are
        self._sinks: list[Any] = []  # loggers of result rows, while their files are open
        self._saved: int | None = session.iteration if continued else None
        every = session.config.checkpoint.every
        self._due = None if every is None else session.env_steps - session.env_steps % every + every
        self._checkpoints: Checkpointer | None = None
        if session.config.run.out:
            self.begin()

    @property
    def directory(self) -> Path:
        """Returns the directory of this run's files; made when it is asked for."""
        if self.made is None:
            cfg = self._session.config
            if cfg.run.out:
                self.made = Path(cfg.run.out)
            else:
                name = f"{config.algo_name(cfg)}_{datasets.title(cfg)}_{datetime.datetime.now():%Y%m%d-%H%M%S}"
                self.made = files.make_numbered(self._runs / name.replace("/", "-").replace(":", "-"))
        return self.made

    def begin(self) -> None:
        """Opens the files for result rows, if they are wanted and not open."""
        if not self.writes or self._sinks:
            return
        session, is_new = self._session, self.made is None and not self._session.config.run.out
        if not session.config.run.out:
            self._files.enter_context(files.lock_directory(self.directory, made=True))
        rows_until = session.env_steps if self._continued else None
        opened = run_directory.opened(session, self.directory, rows_until)
        logged = run_directory.logged(session, self.directory)
        self._sinks = [self._files.enter_context(sink) for sink in (opened, logged)]
        session.sinks += self._sinks
        if is_new:
            print(f"run: {self.directory}")

    def after(self) -> None:
        """Writes the checkpoint that `checkpoint.every` asks for after a call."""
        session, every = self._session, self._session.config.checkpoint.every
        if every is None or self._due is None or not self.writes or (steps := session.counted()) < self._due:
            return
        self._due = steps - steps % every + every
        if self._checkpoints is None:
            keeper = Checkpointer(self.directory / "checkpoints", session.config.checkpoint)
            self._checkpoints = self._files.enter_context(keeper)
        self._checkpoints.save(session.iteration, *session.to_save())
        self._saved = session.iteration
        if session.config.checkpoint.exact:
            session.run.program.restart(session.iteration)

    def save(self, path: str | Path | None) -> Saved:
        """Writes a checkpoint: see `Algorithm.save`."""
        session = self._session
        target = path_of(path) if path is not None else self.directory / "checkpoints" / str(session.iteration)
        again = 1
        while path is None and target.exists():
            target, again = target.with_name(f"{session.iteration}-{again + 1}"), again + 1
        if path is not None:
            resolve(target, "save", "new directory")
        if target.exists() and any(target.iterdir()):
            raise InputError(f"save: {target} exists already: name another, or leave the path out")
        parts, description = session.to_save()
        try:
            checkpoint.write(target, checkpoint.on_host(parts), {**description, "keep": True})
        except OSError as e:
            raise unwritable(target, "save", e) from e
        if path is None:
            self._saved = session.iteration
        made = Saved(target)
        made.metrics = dict(session.result or {})
        return made

    def close(self, *, ended: bool) -> None:
        """Closes the files. A run that has ended leaves a last checkpoint and its learning curve, as the command's."""
        session, opened = self._session, bool(self._sinks)
        try:
            alive = ended and opened and not any(x.is_deleted() for x in jax.tree.leaves(session.state.learner))
            if alive and session.iteration and self._saved != session.iteration:
                self.save(None)
        finally:
            self._files.close()
            session.sinks[:] = [sink for sink in session.sinks if sink not in self._sinks]
            self._sinks = []
        if ended and opened and "jsonl" in session.config.run.log:
            run_directory.plot(session, self.directory)
