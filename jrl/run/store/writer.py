"""The checkpoints of a run under way: written beside training, each whole or not at all, the oldest deleted.

    with Checkpointer(run_dir / "checkpoints", CheckpointConfig(keep_last=3)) as checkpoints:
        checkpoints.save(iteration, {"learner": state}, meta)

A save goes to a temporary directory that is renamed when it is complete.
"""

import concurrent.futures
import contextlib
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.config import CheckpointConfig
from jrl.errors import InputError
from jrl.host import files
from jrl.run.store import checkpoint
from jrl.run.store import meta as checkpoint_file
from jrl.types import PyTree


class Checkpointer:
    """Writes the checkpoints of one run. Use as a context manager: leaving it waits for the save under way.

    Args:
      directory: of the checkpoints.
      keep: which of them stay.
      pool: that writes, which is shut down by whoever gives it; None: a thread of its own.
    """

    def __init__(
        self,
        directory: Path,
        keep: CheckpointConfig | None = None,
        pool: concurrent.futures.ThreadPoolExecutor | None = None,
    ):
        self._directory, self._keep = directory.absolute(), keep or CheckpointConfig()
        self._own_pool = pool is None
        self._pool = pool or concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self.last_saved: int | None = None

    def __enter__(self) -> "Checkpointer":
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._directory / f"probe{checkpoint.UNFINISHED}"
            probe.touch()
            probe.unlink()
            for left in self._directory.glob(f"*{checkpoint.UNFINISHED}"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        except OSError as e:
            raise files.unwritable_error(self._directory, e) from e
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if self._own_pool:
                self._pool.shutdown()  # waits: a process that ended now would lose the save

    def save(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        """Copies the parts of the state, such as "learner", to the host, then writes them in the background.

        Args:
          iteration: names the checkpoint. Later ones in the directory are of a run that was gone back on: they go.
          parts: name -> tree of arrays; one without arrays is left out.
          meta: see `meta`; with `keep_best_by` it has the metric under "metrics".
        Raises:
          InputError: this save or the one before it could not be written.
        """
        self.wait()
        self._pending = self._pool.submit(self._write, iteration, checkpoint.on_host(parts), dict(meta))
        self.last_saved = iteration

    def wait(self) -> None:
        """Returns once every save is complete.

        Raises:
          InputError: the save could not be written. What was there before stays.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except (OSError, ValueError) as e:
                self.last_saved = None
                mend = "free space, then continue" if files.is_disk_full(e) else "continue"
                raise InputError(
                    f"checkpoint: cannot write to {self._directory}: {checkpoint.first_line(e)}: "
                    f"earlier checkpoints are complete: {mend} with --resume"
                ) from e

    def check(self) -> None:
        """Reports a save that has ended; does not wait for one that is under way.

        Raises:
          InputError: it could not be written.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def rescue(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> bool:
        """Saves what a failing run has learned; returns whether it could be written."""
        with contextlib.suppress(InputError):
            self.wait()  # the save before this one may be what failed
        if self.last_saved == iteration:
            return True
        try:
            self.save(iteration, parts, meta)
            self.wait()
        except InputError:
            return False
        return True

    def improves(self, metrics: Mapping[str, Any]) -> bool:
        """Returns whether a checkpoint with these metrics would be the best by `checkpoint.keep_best_by`."""
        name = self._keep.keep_best_by
        if name is None or not math.isfinite(checkpoint_file.number(metrics.get(name))):
            return False
        self.wait()
        mine = 1 + max(known := checkpoint.metas(self._directory), default=0)
        return checkpoint_file.best({**known, mine: {"metrics": metrics}}, name, self._keep.keep_best) == mine

    def _write(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        earlier = {n: m for n, m in checkpoint.metas(self._directory).items() if n < iteration}
        every = self._keep.keep_every
        before = max((m["env_steps"] for m in earlier.values()), default=-1)
        meta["keep"] = every is not None and meta["env_steps"] // every > before // every
        target = self._directory / str(iteration)
        unfinished = self._directory / f"{iteration}{checkpoint.UNFINISHED}"
        try:
            checkpoint.write(unfinished, parts, meta)
            if target.exists():
                checkpoint.discard(target)
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        files.sync(self._directory)
        for n in checkpoint.saved_steps(self._directory):
            if n > iteration:
                checkpoint.discard(self._directory / str(n))
        every_meta = {**earlier, iteration: meta}
        latest = sorted(every_meta)[-self._keep.keep_last :]
        best = checkpoint_file.best(every_meta, self._keep.keep_best_by, self._keep.keep_best)
        for n, m in every_meta.items():
            if n not in latest and n != best and not m.get("keep"):
                checkpoint.discard(self._directory / str(n))
