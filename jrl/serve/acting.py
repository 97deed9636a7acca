"""Acts for a policy of a jrl server with numpy alone: for `client.py`, beside which it is copied.

The server tells which arrays the policy's program computes, and of which distributions they are the numbers; actions
are drawn here, with the log-probabilities of these distributions (`jrl/distributions.py`).
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

_SEND_S = 1.0  # seconds after which steps are sent, however few
Leaves = dict[str, np.ndarray]  # arrays of a tree by their paths, such as "goal/0"; "" of one that is an array


class Local:
    """The policy that a server tells of.

    Attributes:
      version: of the weights that act; below 0 before `begin` and `load`.

    Args:
      interpreter: `jrl/export/interpreter.py`.
      rng: draws.
    """

    def __init__(self, interpreter: Any, rng: np.random.Generator):
        self._interpreter, self._rng = interpreter, rng
        self.version = -1
        self._rows: dict[tuple[str, ...], list[Leaves]] = {}  # that were played and not sent, by episodes
        self._sent = time.monotonic()

    def begin(self, told: Mapping[str, Any]) -> None:
        """Acts as the answer of /v1/program says."""
        self._told = told

    def step(self, ids: tuple[str, ...], obs: Leaves, row: Leaves) -> tuple[Leaves, bool]:
        """(actions [N, *] of the environment by path, whether it is time to send) of N episodes.

        Args:
          ids: their names.
          obs: [N, *] by path.
          row: what came before, by the names of /v1/played: rewards belong to the latest actions, so that a row is sent
            with what came before its own.
        Raises:
          ValueError: observations of other shapes.
        """
        drawn, changed, log_prob = self.act(obs)
        under = lambda name, leaves: {f"{name}/{path}" if path else name: x for path, x in leaves.items()}
        versions = np.full(len(log_prob), self.version)
        rows = self._rows.setdefault(ids, [])
        rows.append(
            {
                **row,
                **under("observations", obs),
                **under("actions", drawn),
                "log_probs": log_prob,
                "versions": versions,
            }
        )
        # steps in one request, and of one episode, as the server will have it
        most = len(rows) >= self._told["rows"] or (len(rows) + 1) * len(ids) > self._told["most"]
        return changed, most or time.monotonic() - self._sent > _SEND_S

    def take(self, ids: tuple[str, ...]) -> Leaves:
        """[K, N, *] of the rows of these episodes by name, which are sent now; what a row has not is 0."""
        rows = self._rows.pop(ids, [])
        self._sent = time.monotonic()
        like = {name: x for row in rows for name, x in row.items()}
        return {name: np.stack([row.get(name, np.zeros_like(x)) for row in rows]) for name, x in like.items()}

    def load(self, found: Mapping[str, Any]) -> None:
        """Acts with these weights from now on."""
        self._policy = self._interpreter.made(self._told["program"], found.get("policy", {}))
        change = self._told["to_env"]
        self._to_env = change and self._interpreter.made(change, found.get("to_env", {}))
        self.version = int(found["version"])

    def act(self, obs: Mapping[str, np.ndarray]) -> tuple[Leaves, Leaves, np.ndarray]:
        """(the policy's actions [N, *], the environment's, log-probabilities [N] f32) for observations [N, *], by path.

        Raises:
          ValueError: observations of other shapes.
        """
        seen = []
        for path, dtype, shape in self._told["observation"]:
            x = obs.get(path)
            if x is None or list(x.shape[1:]) != shape:
                got = "nothing" if x is None else list(x.shape[1:])
                raise ValueError(f"observation{path and '/'}{path}: expected {dtype} {shape}, got {got}")
            seen.append(x.astype(dtype, copy=False))
        numbers, drawn, log_prob = iter(self._policy(*seen)), [], np.zeros(len(seen[0]))
        for part in self._told["actions"]:
            action, own = _DRAWN[part["kind"]](part, numbers, self._rng)
            drawn.append(action.astype(part["dtype"]))
            log_prob += own.reshape(len(own), -1).sum(1)
        changed = self._to_env(*drawn) if self._to_env else drawn
        paths = [part["path"] for part in self._told["actions"]]
        by_path = lambda leaves: dict(zip(paths, leaves, strict=True))
        return by_path(drawn), by_path(changed), log_prob.astype(np.float32)


def _categorical(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    logits = next(numbers).astype(float)
    sizes = part.get("sizes", [logits.shape[-1]])
    actions, log_probs = [], []
    for some in np.split(logits, np.cumsum(sizes)[:-1], axis=-1):
        action = np.argmax(some + rng.gumbel(size=some.shape), axis=-1)
        log_probs.append(np.take_along_axis(some, action[:, None], -1)[:, 0] - np.logaddexp.reduce(some, axis=-1))
        actions.append(action)
    return np.stack(actions, -1) if "sizes" in part else actions[0], np.stack(log_probs, -1)


def _bernoulli(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    logits = next(numbers).astype(float)
    action = np.log(rng.uniform(size=logits.shape)) < -np.logaddexp(0.0, -logits)
    return action, -np.logaddexp(0.0, np.where(action, -logits, logits))


def _gaussian(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    mean, log_std = next(numbers).astype(float), next(numbers).astype(float)
    noise = rng.normal(size=mean.shape)
    action, log_prob = mean + np.exp(log_std) * noise, -0.5 * (noise**2 + np.log(2 * np.pi)) - log_std
    if part["kind"] == "TanhGaussian":
        log_prob -= 2.0 * (np.log(2.0) - action - np.logaddexp(0.0, -2.0 * action))
        action = np.tanh(action)
    return np.clip(action, part.get("low"), part.get("high")) if "low" in part else action, log_prob


def _best(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    action = next(numbers)
    return action, np.zeros(len(action))


_DRAWN = {  # (how an array is drawn, what the program computed, ...) -> ([N, *], log-probabilities [N, *])
    "Best": _best,
    "Categorical": _categorical,
    "MultiCategorical": _categorical,
    "Bernoulli": _bernoulli,
    "DiagGaussian": _gaussian,
    "TanhGaussian": _gaussian,
}
