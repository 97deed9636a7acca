"""Checkpointer: writes the checkpoints of a run in the background, and deletes old checkpoints.

A save is atomic: it writes to a temporary directory, which is renamed at the end.
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
from jrl.types import PyTree


class Checkpointer:
    """Writes the checkpoints of one run. A context manager, whose exit waits for the unfinished save.

    Args:
      keep: rules for deleting checkpoints.
      pool: writer pool shared by several runs, closed by the caller; None: own thread.
    Attributes:
      last_saved: iteration of the latest save; None: no save, or the save failed.
    """

    def __init__(
        self,
        directory: Path,
        keep: CheckpointConfig | None = None,
        pool: concurrent.futures.ThreadPoolExecutor | None = None,
    ):
        self._directory, self._keep = directory.absolute(), keep or CheckpointConfig()
        self._owns_pool = pool is None
        self._pool = pool or concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self.last_saved: int | None = None

    def __enter__(self) -> "Checkpointer":
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._directory / f"probe{checkpoint.UNFINISHED}"
            probe.touch()
            probe.unlink()
            for unfinished in self._directory.glob(f"*{checkpoint.UNFINISHED}"):  # from a killed process
                shutil.rmtree(unfinished, ignore_errors=True)
        except OSError as e:
            raise files.unwritable_error(self._directory, e) from e
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if self._owns_pool:
                self._pool.shutdown()  # waits, since the end of the process would lose the save

    def save(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        """Copies the parts of the state, such as "learner", to the host, then writes them in the background.

        Args:
          iteration: number of the checkpoint. Checkpoints with later numbers, from before a rollback, are deleted.
          parts: name -> tree of arrays; parts without arrays are left out.
          meta: description, see `checkpoint.build_meta`; with `keep_best_by`, "metrics" has the metric.
        Raises:
          InputError: this save or the previous save could not be written.
        """
        self.wait()
        self._pending = self._pool.submit(self._write, iteration, checkpoint.copy_to_host(parts), dict(meta))
        self.last_saved = iteration

    def wait(self) -> None:
        """Waits for the unfinished save. Raises InputError: it could not be written; earlier checkpoints remain."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except (OSError, ValueError) as e:
                self.last_saved = None
                fix = "free space, then continue" if files.is_disk_full(e) else "continue"
                raise InputError(
                    f"checkpoint: cannot write to {self._directory}: {checkpoint.first_line(e)}: "
                    f"earlier checkpoints are complete: {fix} with --resume"
                ) from e

    def check(self) -> None:
        """Raises InputError if a save has failed; does not wait for an unfinished save."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def rescue(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> bool:
        """Saves the state of a failing run; returns whether the checkpoint is written."""
        with contextlib.suppress(InputError):
            self.wait()  # the previous save may have failed
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
        if name is None or not math.isfinite(checkpoint.to_number(metrics.get(name))):
            return False
        self.wait()
        new = 1 + max(saved := checkpoint.metas(self._directory), default=0)
        return checkpoint.find_best({**saved, new: {"metrics": metrics}}, name, self._keep.keep_best) == new

    def _write(self, iteration: int, parts: Mapping[str, PyTree], meta: dict[str, Any]) -> None:
        earlier = {n: m for n, m in checkpoint.metas(self._directory).items() if n < iteration}
        every = self._keep.keep_every
        previous = max((m["env_steps"] for m in earlier.values()), default=-1)
        meta["keep"] = every is not None and meta["env_steps"] // every > previous // every
        target = self._directory / str(iteration)
        unfinished = self._directory / f"{iteration}{checkpoint.UNFINISHED}"
        try:
            checkpoint.write(unfinished, parts, meta)
            if target.exists():
                checkpoint.delete(target)
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        files.sync(self._directory)
        for n in checkpoint.saved_steps(self._directory):
            if n > iteration:
                checkpoint.delete(self._directory / str(n))
        every_meta = {**earlier, iteration: meta}
        latest = sorted(every_meta)[-self._keep.keep_last :]
        best = checkpoint.find_best(every_meta, self._keep.keep_best_by, self._keep.keep_best)
        for n, m in every_meta.items():
            if n not in latest and n != best and not m.get("keep"):
                checkpoint.delete(self._directory / str(n))
