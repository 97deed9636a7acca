"""Work of an Algorithm beside its iterations: weights in and out, samples, updates and gradients by hand."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.api.config import AlgorithmConfig
from jrl.api.weights_file import read_weights
from jrl.fields.paths import resolve
from jrl.run import checkpoint
from jrl.run.by_hand import POLICY, Learns, known
from jrl.run.session import Session
from jrl.run.workers import Workers
from jrl.types import Batch, SequenceBatch


class ByHand(Learns):
    """Methods of an Algorithm that use its `session` and `config`."""

    session: Session
    workers: Workers
    config: AlgorithmConfig
    restore: Callable[[Any], None]

    # ------------------------------------------------------------ weights

    def get_weights(self, policies: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns the weights by policy (of one agent `default_policy`), numpy arrays by field of the State.

        Args:
          policies: their ids; None: all. Raises KeyError: there is none of that id.
        """
        return self.workers.local_worker().get_weights(policies)

    def import_weights(
        self, path: str | Path, mapping: Mapping[str, str] | None = None, *, policy_id: str = POLICY
    ) -> list[str]:
        """Takes over arrays of an npz or safetensors file as parameters; target networks get the same.

        Args:
          path: `*.npz` or `*.safetensors`; nothing in it is executed.
          mapping: a parameter's name, as `get_policy().parameters()` has it, to the array's name in the file; with
            `.T` behind it the array is transposed, as the matrices of torch have to be. None: the names are the same.
          policy_id: id of the policy, where there are several.
        Returns:
          The names of the parameters that were replaced; the others stay.
        Raises:
          InputError: the file cannot be read, unknown names, or other shapes.
        """
        name = known(self.session).named(policy_id) if self.session.policies else None
        weights, names = read_weights(resolve(path, "import_weights", "file"), mapping, self.session.get_weights(name))
        self.session.set_weights(weights, name)
        return names

    # ------------------------------------------------------------ samples, updates, gradients

    def sample_replay(self) -> Batch | SequenceBatch:
        """Returns a batch as the next gradient step would draw one of replay or data sets, in numpy. Raises InputError:
        there is neither, or nothing in it yet.
        """
        return self.session.by_hand.sample_replay()

    def _learns(self, what: str) -> Session:
        return self.session

    # ------------------------------------------------------------ as RLlib's Trainable

    def get_config(self) -> AlgorithmConfig:
        """Returns `config`, by RLlib's name."""
        return self.config

    def log_result(self, result: dict[str, Any]) -> None:
        """Does nothing, for subclasses to note, send or change each result: `train` calls it before it returns."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the whole run as a checkpoint has it: `config`, the arrays, and counters and spaces in `meta`."""
        session = self.session
        arrays = checkpoint.on_host(session.parts())
        return {"config": self.config.to_dict(), "arrays": arrays, "meta": session.description()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Goes on from what `__getstate__` returned. Raises InputError: it does not fit this Algorithm's config."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "checkpoint"
            checkpoint.write(path, state["arrays"], state["meta"])
            if "session" in vars(self):
                self.restore(path)
            else:  # a copy that is being made
                made: Any = self
                made.__init__(AlgorithmConfig.from_dict(state["config"]), checkpoint=path)


__all__ = ["ByHand"]
