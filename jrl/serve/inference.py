"""Actions for items of about the same time, chosen in one call, in a thread that never waits for an update."""

import bisect
import collections
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.rollout import complete
from jrl.rollout.complete import Agents
from jrl.serve.episode_table import UNLEARNED, EpisodeTable, Item, Seat
from jrl.serve.row_rings import RowResults, RowRings
from jrl.types import COUNTS_STEP, ActOut, EnvSpec, Key, PyTree, element

STEP = "step"  # key of extras: [N] bool, marks one row per game step
BUCKET_BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)  # seconds


class Weights(NamedTuple):
    """Weights that choose actions."""

    actor: PyTree
    key: Key
    version: int


class ChosenActions(NamedTuple):
    """Actions for N items, and the parts of their rows."""

    obs: PyTree  # [N, *]
    action: PyTree  # [N, *]
    extras: dict[str, PyTree]  # [N, *]
    before: PyTree  # [N, *] memory before the step
    each: Sequence[tuple[PyTree, PyTree]]  # action [*] in the environment's units and memory [*] after, by item


class ActionProgram:
    """Compiled `act` for items: the r-th item of agent k has column r * A + k.

    Policies act column by column, so episodes in neighbouring columns do not affect each other. The columns are padded
    to one of a few sizes, each of which compiles once.

    Args:
      act: `Algo.act`.
      to_env: function from the policy's actions to the environment's; None: the same actions.
      spec: spaces of the agents.
      agents: policies of the agents, and the columns of their extras; None: a single agent.
      explore: passed to `act`.
      max_items: maximum number of items of one agent in a call.
    """

    def __init__(
        self, act: Callable[..., ActOut], to_env: Any, spec: EnvSpec, agents: Agents | None, *, explore: bool,
        max_items: int,
    ):  # fmt: skip
        self.sizes = sorted({min(4**i, max_items) for i in range(12)})
        self._spec, self._agents, self._num_agents = spec, agents, spec.num_agents
        self._padding = [zeros(element(part.observation)) for part in spaces.by_kind(spec)]
        per_row = len(spec.groups[0])  # agents of the first kind

        def run(weights, obs, carry, key, count):
            out = act(weights, obs, carry, jax.random.fold_in(key, count), explore)
            num = len(jax.tree.leaves(obs)[0]) // per_row * self._num_agents
            return out.action, out.action if to_env is None else to_env(out.action), self._expand(out, num), out.carry

        self._run = jax.jit(run)

    def _expand(self, out: ActOut, num: int) -> dict[str, PyTree]:
        """Returns the extras as arrays over all columns, with zeros in columns without them."""
        leaf_columns = complete.find_leaf_columns(self._agents, num, (), out.extras)
        leaves, structure = jax.tree.flatten(dict(out.extras))
        expanded = [
            x if columns is None else jnp.zeros((num, *x.shape[1:]), x.dtype).at[columns].set(x)
            for x, columns in zip(leaves, leaf_columns, strict=True)
        ]
        return jax.tree.unflatten(structure, expanded)

    def __call__(self, weights: Weights, items: Sequence[Item], count: int) -> ChosenActions:
        """Chooses actions for N items. `count`: number of the call, for its random key."""
        agents, num_items, row = [item.seat.agent for item in items], [0] * self._num_agents, list[int]()
        for agent in agents:
            row.append(num_items[agent])
            num_items[agent] += 1
        size = next(size for size in self.sizes if size >= max(num_items))
        column = np.array(row) * self._num_agents + np.array(agents)
        # by kind: its items, and a row for each item; items of other kinds get row 0, which is never used
        kinds, obs = [], []
        for kind, padding in zip(self._spec.groups, self._padding, strict=True):
            own = [i for i, agent in enumerate(agents) if agent in kind]
            rows = np.zeros(len(items), np.int64)
            rows[own] = [row[i] * len(kind) + kind.index(agents[i]) for i in own]
            obs.append(_place_rows([items[i].obs for i in own] or [padding], rows[own], size * len(kind)))
            kinds.append((own, rows))
        before = _place_rows([item.memory for item in items], column, size * self._num_agents)
        action, to_env, extras, after = self._call(weights, spaces.from_parts(self._spec, obs), before, count)
        if self._agents is not None:
            flags = {name: np.zeros(size * self._num_agents, bool) for name in (STEP, COUNTS_STEP)}
            flags[STEP][column] = [item.is_first for item in items]
            flags[COUNTS_STEP][column] = [item.is_policy_first for item in items]
            extras = extras | flags
        env_actions: list[PyTree] = [None] * len(items)
        for (own, rows), tree in zip(kinds, spaces.parts_by_kind(self._spec, to_env), strict=True):
            for i, part in zip(own, _split_rows(tree, rows[own].tolist()), strict=True):
                env_actions[i] = part
        take = lambda tree, index: jax.tree.map(lambda x: x[index], tree)
        take_items = lambda parts: spaces.from_parts(
            self._spec, [take(part, rows) for part, (_, rows) in zip(parts, kinds, strict=True)]
        )
        action = take_items(spaces.parts_by_kind(self._spec, action))
        each = list(zip(env_actions, _split_rows(after, column.tolist()), strict=True))
        return ChosenActions(take_items(obs), action, take(extras, column), take(before, column), each)

    def _call(self, weights: Weights, obs: PyTree, carry: PyTree, count: int) -> tuple[PyTree, ...]:
        """Returns (actions, environment's actions, extras, memory after) as numpy arrays of one of `sizes`."""
        return jax.device_get(self._run(weights.actor, obs, carry, weights.key, np.uint32(count % 2**32)))

    def warm_up(self, weights: Weights, initial: PyTree) -> None:
        """Compiles all sizes. `initial`: memory [*] before an episode."""
        for size in self.sizes:
            num = size * self._num_agents
            obs = zeros(spaces.elements(self._spec.observation, spaces.columns(self._spec, size)))
            self._call(weights, obs, jax.tree.map(lambda x, n=num: np.repeat(x[None], n, 0), initial), 0)


def _split_rows(tree: PyTree, indices: Sequence[int]) -> list[PyTree]:
    leaves, structure = jax.tree.flatten(tree)
    return [jax.tree.unflatten(structure, [x[i] for x in leaves]) for i in indices]


def _place_rows(parts: Sequence[PyTree], rows: np.ndarray, num: int) -> PyTree:
    """Returns arrays of `num` rows: `parts` at the indices `rows`, zeros elsewhere."""

    def put(*leaves: np.ndarray) -> np.ndarray:
        out = np.zeros((num, *leaves[0].shape), leaves[0].dtype)
        out[rows] = leaves
        return out

    return jax.tree.map(put, *parts)


class Histogram:
    """Histogram of seconds. A single thread adds values."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKET_BOUNDS) + 1)  # values up to each bound, then larger ones; not cumulated
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BUCKET_BOUNDS, seconds)] += 1
        self.total += seconds

    def format(self, name: str, labels: str) -> str:
        """Returns the histogram in Prometheus' format. `labels`: such as `policy="main"`."""
        buckets = zip([*BUCKET_BOUNDS, "+Inf"], itertools.accumulate(self.counts), strict=True)
        lines = [f'{name}_bucket{{{labels},le="{bound}"}} {count}\n' for bound, count in buckets]
        lines += [f"{name}_sum{{{labels}}} {self.total:.12g}\n", f"{name}_count{{{labels}}} {sum(self.counts)}\n"]
        return "".join(lines)


class Inference:
    """Thread that chooses actions for all items of a batch in one call.

    Args:
      table: table of the episodes.
      program: program that chooses actions.
      initial: column -> memory before an episode.
      deliver: function that gets items, their actions [*] and the version of the weights, called in this thread.
      max_wait_ms: maximum time from the first item of a batch to the call. A batch with an item of each episode in
        progress does not wait.
    Attributes:
      initial: as the argument.
      weights: weights that choose actions, once `publish` was called.
      count: number of calls.
      waits: seconds from an item's request to the call.
      calls: seconds of a call.
      failure: exception that ended the thread.
    """

    def __init__(
        self, table: EpisodeTable, program: ActionProgram, initial: Callable[[int], PyTree],
        deliver: Callable[[list[tuple[Item, PyTree, int]]], None], *, max_wait_ms: float,
    ):  # fmt: skip
        self._table, self._program, self.initial, self._deliver = table, program, initial, deliver
        self._max_items, self._wait_s = program.sizes[-1], max_wait_ms / 1000
        self.weights: Weights
        self._items: collections.deque[tuple[Item, float]] = collections.deque()  # items and times of their requests
        self._condition = threading.Condition()
        self._is_closed = False
        self._has_memory = bool(jax.tree.leaves(initial(0)))
        self.count = 0
        self.waits, self.calls = Histogram(), Histogram()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="jrl-inference", daemon=True)

    def publish(self, weights: Weights) -> None:
        """Uses these weights from the next call on. Updates must not donate their buffers."""
        self.weights = weights
        if not self._thread.is_alive() and not self._is_closed:
            self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self.weights.version

    def warm_up(self) -> None:
        """Compiles all programs."""
        self._program.warm_up(self.weights, self.initial(0))

    def request(self, items: Sequence[Item]) -> None:
        """Requests actions; `deliver` gets them."""
        now = time.perf_counter()
        with self._condition:
            self._items.extend((item, now) for item in items)
            self._condition.notify()

    def close(self) -> None:
        """Ends the thread. Waiting items get no action."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _serve(self) -> None:
        try:
            while (batch := self._wait_for_batch()) is not None:
                start = time.perf_counter()
                self._choose(batch)
                self.calls.add(time.perf_counter() - start)
        except BaseException as e:  # `ClientSource` raises the exception, which ends the run
            with self._table.lock:
                self.failure = e
                self._table.lock.notify_all()

    def _wait_for_batch(self) -> list[Item] | None:
        with self._condition:
            while not self._items and not self._is_closed:
                self._condition.wait()
            if self._wait_s:
                until = time.monotonic() + self._wait_s
                while len(self._items) < min(len(self._table.episodes), self._max_items) and not self._is_closed:
                    if (left := until - time.monotonic()) <= 0:
                        break
                    self._condition.wait(left)
            return None if self._is_closed else self._take_batch()

    def _take_batch(self) -> list[Item]:
        """Returns the items of the next call. A second item of a seat with memory waits for the following call."""
        batch: list[Item] = []
        seats: set[Seat] = set()
        now = time.perf_counter()
        while self._items and len(batch) < self._max_items:
            item, request_time = self._items[0]
            if self._has_memory and item.carry is None and item.seat in seats:
                break
            seats.add(item.seat)
            self._items.popleft()
            batch.append(item)
            self.waits.add(now - request_time)
        return batch

    def _choose(self, items: list[Item]) -> None:
        weights = self.weights
        chosen = self._program(weights, items, self.count)
        self.count += 1
        for item, (_, after) in zip(items, chosen.each, strict=True):
            item.seat.carry = after
        if self._table.rows is not None:
            action, extras = _replace_client_actions(chosen.action, chosen.extras, items)
            with self._table.lock:
                versions = [weights.version if item.version is None else item.version for item in items]
                row = chosen.obs, action, extras, chosen.before
                _write_rows(self._table.rows, items, row, np.array(versions))
                self._table.lock.notify_all()
        self._deliver([(item, action, weights.version) for item, (action, _) in zip(items, chosen.each, strict=True)])


def _replace_client_actions(action: PyTree, extras: PyTree, items: list[Item]) -> tuple[PyTree, PyTree]:
    """Returns actions and extras with the actions that clients chose instead of the policy's."""
    own = [i for i, item in enumerate(items) if item.action is not None]
    if not own:
        return action, extras
    action = jax.tree.map(np.array, action)

    def put(all_rows: np.ndarray, *rows: np.ndarray) -> None:
        all_rows[own] = rows

    jax.tree.map(put, action, *(items[i].action for i in own))
    if "log_prob" in extras:  # the server refuses clients' actions without log_prob for these policies
        extras = {**extras, "log_prob": np.array(extras["log_prob"])}
        extras["log_prob"][own] = [items[i].log_prob for i in own]
    return action, extras


def _write_rows(rings: RowRings, items: list[Item], row: PyTree, version: np.ndarray) -> None:
    """Writes rows in the order of their requests: a batch may hold the end of an episode and the start of the next."""
    left = [i for i, item in enumerate(items) if item.seat.column != UNLEARNED]
    while left:
        first: dict[int, int] = {}
        for i in left:
            first.setdefault(items[i].seat.column, i)
        now = list(first.values())
        left = [i for i in left if first[items[i].seat.column] != i]
        batch = [items[i] for i in now]
        results = RowResults(
            np.array([item.reward for item in batch], np.float32),
            np.array([item.terminated for item in batch], bool),
            np.array([item.truncated for item in batch], bool),
        )
        part = row if len(now) == len(items) else jax.tree.map(lambda x, now=now: x[now], row)
        final = np.array([item.final for item in batch], bool)
        rings.write(np.fromiter(first, np.int64, len(now)), part, version[now], results, final)


def zeros(element: PyTree) -> PyTree:
    """Returns arrays of zeros with the shapes and dtypes of `element`."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), element)
