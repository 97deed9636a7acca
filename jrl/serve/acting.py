"""Acts for a policy of a jrl server with numpy alone: for `client.py`, beside which it is copied.

The server tells which arrays the policy's program computes, and of which distributions they are the numbers; actions
are drawn here, with the log-probabilities of these distributions (`jrl/distributions.py`). What the policy remembers of
an episode is kept here, too.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
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
        self._start: list[np.ndarray] = []  # what is remembered before an episode
        self._memory: dict[str, list[np.ndarray]] = {}  # and after its latest step, by episode
        self._rows: dict[tuple[str, ...], list[Leaves]] = {}  # that were played and not sent, by episodes
        self._sent = time.monotonic()

    def begin(self, told: Mapping[str, Any]) -> None:
        """Acts as the answer of /v1/program says."""
        self._told = told

    def step(self, ids: tuple[str, ...], obs: Leaves, row: Leaves) -> tuple[Leaves, bool]:
        """Returns (actions [N, *] of the environment by path, whether it is time to send) of N episodes.

        Args:
          ids: their names.
          obs: [N, *] by path.
          row: what came before, by the names of /v1/played: rewards belong to the latest actions, so that a row is sent
            with what came before its own.
        Raises:
          ValueError: observations of other shapes.
        """
        begins = np.logical_or(row.get("terminated", False), row.get("truncated", False))
        drawn, changed, log_prob, memory = self.act(ids, obs, begins)
        under = lambda name, leaves: {f"{name}/{path}" if path else name: x for path, x in leaves.items()}
        versions = np.full(len(log_prob), self.version)
        rows = self._rows.setdefault(ids, [])
        rows.append(
            {
                **row,
                **under("observations", obs),
                **under("actions", drawn),
                **under("memory", memory),
                "log_probs": log_prob,
                "versions": versions,
            }
        )
        # steps in one request, and of one episode, as the server will have it
        most = len(rows) >= self._told["rows"] or (len(rows) + 1) * len(ids) > self._told["most"]
        return changed, most or time.monotonic() - self._sent > _SEND_S

    def take(self, ids: tuple[str, ...]) -> Leaves:
        """Returns [K, N, *] of the rows of these episodes by name, which are sent now; what a row has not is 0."""
        rows = self._rows.pop(ids, [])
        self._sent = time.monotonic()
        like = {name: x for row in rows for name, x in row.items()}
        return {name: np.stack([row.get(name, np.zeros_like(x)) for row in rows]) for name, x in like.items()}

    def load(self, found: Mapping[str, Any]) -> None:
        """Acts with these weights from now on."""
        self._policy = self._interpreter.made(self._told["program"], found.get("policy", {}))
        change = self._told["to_env"]
        self._to_env = change and self._interpreter.made(change, found.get("to_env", {}))
        start = found.get("memory", {})
        self._start = [start[str(i)] for i in range(len(start))]
        self.version, self._loaded = int(found["version"]), time.monotonic()

    def outdated(self, version: int, interval: float | None) -> bool:
        """Returns whether to fetch these weights of the server: those here are others, and so many seconds old."""
        return interval is not None and version != self.version and time.monotonic() - self._loaded >= interval

    @property
    def remembers(self) -> bool:
        """Returns whether actions depend on earlier observations of an episode."""
        return bool(self._start)

    def act(
        self, episodes: Sequence[str], obs: Mapping[str, np.ndarray], begins: Any = False
    ) -> tuple[Leaves, Leaves, np.ndarray, Leaves]:
        """Acts at observations [N, *], by path; the policy remembers them.

        Args:
          episodes: N ids.
          obs: see above.
          begins: [N] bool, or one, where another episode begins under the same id.
        Returns:
          (the policy's actions [N, *], the environment's, log-probabilities [N] f32, the memory before [N, *]).
        Raises:
          ValueError: observations of other shapes.
        """
        seen = []
        for path, dtype, shape in self._told["observation"]:
            x = obs.get(path)
            if x is None or list(x.shape[1:]) != shape:
                got = "nothing" if x is None else list(x.shape[1:])
                raise ValueError(f"observation{path and '/'}{path}: expected {dtype} {shape}, got {got}")
            if len(x) != len(episodes):
                raise ValueError(f"observation{path and '/'}{path}: expected {len(episodes)} of them, got {len(x)}")
            seen.append(x.astype(dtype, copy=False))
        before = self._before(episodes, begins)
        numbers, drawn, log_prob = iter(self._policy(*seen, *before)), [], np.zeros(len(episodes))
        for part in self._told["actions"]:
            action, own = _DRAWN[part["kind"]](part, numbers, self._rng)
            drawn.append(action.astype(part["dtype"]))
            log_prob += own.reshape(len(own), -1).sum(1)
        if self._start:
            self._memory.update(zip(episodes, map(list, zip(*numbers, strict=True)), strict=True))
        changed = self._to_env(*drawn) if self._to_env else drawn
        paths = [part["path"] for part in self._told["actions"]]
        by_path = lambda leaves: dict(zip(paths, leaves, strict=True))
        memory = {str(i): x for i, x in enumerate(before)}
        return by_path(drawn), by_path(changed), log_prob.astype(np.float32), memory

    def go_on(self, episodes: Sequence[str], ids: Sequence[str]) -> None:
        """Remembers these episodes under other ids; nothing more of them where there are none."""
        memory = [self._memory.pop(id, self._start) for id in episodes]
        self._memory.update(zip(ids, memory) if self._start else ())

    def _before(self, episodes: Sequence[str], begins: Any) -> list[np.ndarray]:
        if not self._start:
            return []
        begins = np.broadcast_to(begins, len(episodes))
        kept = [self._start if new else self._memory.get(id, self._start) for id, new in zip(episodes, begins)]
        return [np.stack(parts) for parts in zip(*kept, strict=True)]


class Player(Local):
    """Acts for the episodes of a client, tells the server of their steps, and gets the weights from it.

    Attributes:
      too_old: steps so far from which the server does not learn, since their weights were too old.

    Args:
      interpreter, rng: as `Local`.
      get: gives the server's answer at a path.
      tell: sends the fields of /v1/played; the answer.
      interval: see `PolicyClient`.
      query: names the policy for which it acts.
    """

    def __init__(
        self,
        interpreter: Any,
        rng: np.random.Generator,
        get: Callable[[str], dict[str, Any]],
        tell: Callable[[Mapping[str, Any]], dict[str, Any]],
        interval: float | None,
        query: str,
    ):
        super().__init__(interpreter, rng)
        self._get, self._tell, self._interval, self.query = get, tell, interval, query
        self.too_old = 0

    def ready(self) -> None:
        """Gets the policy where there is none."""
        if self.version < 0:
            self.update()

    def update(self) -> int:
        """Gets the weights where they are others than those here; their version."""
        if self.version < 0:
            self.begin(self._get(f"/v1/program?{self.query}"))
        if found := self._get(f"/v1/weights?newer_than={self.version}&{self.query}"):
            self.load(found)
        return self.version

    def send(self, ids: tuple[str, ...]) -> list[str]:
        """Sends the steps of these episodes; the episodes that go on. Raises what `tell` does: they do not go on."""
        if not (rows := self.take(ids)):
            return list(ids)
        try:
            found = self._tell({"episode_ids": list(ids), **rows})
        except Exception:
            self.go_on(ids, ())
            self.version = -1  # a server that has begun anew knows other versions
            raise
        new, late = [str(id) for id in found["episode_ids"]], int(found.get("too_old", 0))
        if late and not self.too_old:
            warnings.warn(
                f"the server does not learn from {late} steps, whose weights are older than its external.max_lag: get "
                "others more often (update_interval, update_policy_weights), or raise that; `too_old` counts the steps",
                stacklevel=4,
            )
        self.too_old += late
        if self.outdated(int(found["version"]), self._interval):
            self.update()
        self.go_on(ids, new)
        return new


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
