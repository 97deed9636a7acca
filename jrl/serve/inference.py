"""Actions for requests that come at about the same time, chosen together, in a thread that waits for no update."""

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
from jrl.serve.columns import Columns, Ends
from jrl.serve.table import UNLEARNED, Item, Seat, Table
from jrl.types import COUNTS_STEP, ActOut, EnvSpec, Key, PyTree, element

STEP = "step"  # in what acting records: [N] bool, rows that stand for a step of their game, one for each
BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)  # seconds

Deliver = Callable[[list[tuple[Item, PyTree, int]]], None]  # items with their actions [*] and the version that chose


class Weights(NamedTuple):
    """Weights that act now."""

    actor: PyTree
    key: Key
    version: int


class Chosen(NamedTuple):
    """Results of acting for N items."""

    obs: PyTree  # [N, *], as is this and all that follows
    action: PyTree
    extras: dict[str, PyTree]
    before: PyTree  # memories
    each: Sequence[tuple[PyTree, PyTree]]  # of each item its action in the environment's units [*], and memory after


class Program:
    """`act` for the seats that ask: the r-th item of agent k is acted for in column r * A + k.

    Policies act column by column, so that it does not matter whose episodes stand beside each other. Columns are padded
    to the next of a few sizes, each of which compiles once.

    Args:
      act: `Algo.act`.
      to_env: from its actions to the environment's; None: they are the same.
      spec: spaces of the agents.
      agents: policies of the agents, and where policies record what goes with their actions; None: one agent.
      explore: passed to `act`.
      most: items of one agent in a call.
    """

    def __init__(
        self, act: Callable[..., ActOut], to_env: Any, spec: EnvSpec, agents: Agents | None, *, explore: bool, most: int
    ):
        self.sizes = sorted({min(4**i, most) for i in range(12)})
        self._spec, self._agents, self._size = spec, agents, spec.num_agents
        self._unseen = [zeros(element(one.observation)) for one in spaces.by_kind(spec)]
        per_row = len(spec.groups[0])  # agents of the first kind

        def run(weights, obs, carry, key, count):
            out = act(weights, obs, carry, jax.random.fold_in(key, count), explore)
            num = len(jax.tree.leaves(obs)[0]) // per_row * self._size
            return out.action, out.action if to_env is None else to_env(out.action), self._whole(out, num), out.carry

        self._run = jax.jit(run)

    def _whole(self, out: ActOut, num: int) -> dict[str, PyTree]:
        """Returns what acting recorded as arrays of all columns, zeros where there is nothing."""
        own = complete.find_leaf_columns(self._agents, num, (), out.extras)
        leaves, structure = jax.tree.flatten(dict(out.extras))
        whole = [
            x if columns is None else jnp.zeros((num, *x.shape[1:]), x.dtype).at[columns].set(x)
            for x, columns in zip(leaves, own, strict=True)
        ]
        return jax.tree.unflatten(structure, whole)

    def __call__(self, weights: Weights, items: Sequence[Item], count: int) -> Chosen:
        """Acts for N items."""
        agents, taken, row = [item.seat.agent for item in items], [0] * self._size, list[int]()
        for agent in agents:
            row.append(taken[agent])
            taken[agent] += 1
        size = next(size for size in self.sizes if size >= max(taken))
        column = np.array(row) * self._size + np.array(agents)
        # of each kind: its items, and the rows of all items; row 0, which nobody reads, stands for other kinds' items
        kinds, obs = [], []
        for kind, unseen in zip(self._spec.groups, self._unseen, strict=True):
            own = [i for i, agent in enumerate(agents) if agent in kind]
            rows = np.zeros(len(items), np.int64)
            rows[own] = [row[i] * len(kind) + kind.index(agents[i]) for i in own]
            obs.append(_placed([items[i].obs for i in own] or [unseen], rows[own], size * len(kind)))
            kinds.append((own, rows))
        before = _placed([item.memory for item in items], column, size * self._size)
        found = self.run(weights, spaces.from_parts(self._spec, obs), before, count)
        action, to_env, extras, after = found
        if self._agents is not None:
            extras = extras | {STEP: np.zeros(size * self._size, bool), COUNTS_STEP: np.zeros(size * self._size, bool)}
            extras[STEP][column] = [item.first for item in items]
            extras[COUNTS_STEP][column] = [item.leads for item in items]
        acted: list[PyTree] = [None] * len(items)
        for (own, rows), tree in zip(kinds, spaces.parts_by_kind(self._spec, to_env), strict=True):
            for i, part in zip(own, _each(tree, rows[own].tolist()), strict=True):
                acted[i] = part
        at = lambda tree, index: jax.tree.map(lambda x: x[index], tree)
        of_items = lambda parts: spaces.from_parts(
            self._spec, [at(part, rows) for part, (_, rows) in zip(parts, kinds, strict=True)]
        )
        return Chosen(
            of_items(obs), of_items(spaces.parts_by_kind(self._spec, action)), at(extras, column), at(before, column),
            list(zip(acted, _each(after, column.tolist()), strict=True)),
        )  # fmt: skip

    def run(self, weights: Weights, obs: PyTree, carry: PyTree, count: int) -> tuple[PyTree, ...]:
        """Returns (actions, actions of the environment, extras, carry after) of rows of one of `sizes`, numpy."""
        return jax.device_get(self._run(weights.actor, obs, carry, weights.key, np.uint32(count % 2**32)))

    def warm_up(self, weights: Weights, initial: PyTree) -> None:
        """Compiles for all sizes, of observations of zeros and memories [*] as before an episode."""
        for size in self.sizes:
            num = size * self._size
            obs = zeros(spaces.elements(self._spec.observation, spaces.columns(self._spec, size)))
            self.run(weights, obs, jax.tree.map(lambda x, n=num: np.repeat(x[None], n, 0), initial), 0)


def _each(tree: PyTree, index: Sequence[int]) -> list[PyTree]:
    """Returns the rows of arrays, each as a tree."""
    leaves, structure = jax.tree.flatten(tree)
    return [jax.tree.unflatten(structure, [x[i] for x in leaves]) for i in index]


def _placed(parts: Sequence[PyTree], at: np.ndarray, num: int) -> PyTree:
    """Returns arrays of `num` rows, which have the parts in the rows `at`, and zeros elsewhere."""

    def put(*leaves: np.ndarray) -> np.ndarray:
        out = np.zeros((num, *leaves[0].shape), leaves[0].dtype)
        out[at] = leaves
        return out

    return jax.tree.map(put, *parts)


class Histogram:
    """Histogram of seconds. One thread adds to it."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)  # values up to each of BOUNDS, and those beyond, not cumulated
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def text(self, name: str, labels: str) -> str:
        """Returns its lines in Prometheus' format; `labels` as `policy="main"`."""
        buckets = zip([*BOUNDS, "+Inf"], itertools.accumulate(self.counts), strict=True)
        lines = [f'{name}_bucket{{{labels},le="{bound}"}} {count}\n' for bound, count in buckets]
        lines += [f"{name}_sum{{{labels}}} {self.total:.12g}\n", f"{name}_count{{{labels}}} {sum(self.counts)}\n"]
        return "".join(lines)


class Inference:
    """A thread that answers items, as many at once as ask within `max_wait_ms` of the first.

    Attributes:
      initial: a column's number -> what the policy remembers before an episode.
      count: calls so far.
      waits: seconds from the request of an item to the call that answers it.
      calls: seconds of a call.
      failure: what ended the thread.

    Args:
      table: of the episodes.
      program: chooses.
      initial: see above.
      deliver: gets what was chosen, in this thread.
      max_wait_ms: see above; it waits for no more than the episodes that are under way.
    """

    def __init__(
        self, table: Table, program: Program, initial: Callable[[int], PyTree], deliver: Deliver, *, max_wait_ms: float
    ):
        self._table, self._program, self.initial, self._deliver = table, program, initial, deliver
        self._most, self._wait_s = program.sizes[-1], max_wait_ms / 1000
        self.weights: Weights  # that act, once `publish` was called
        self._items: collections.deque[tuple[Item, float]] = collections.deque()  # and when they asked
        self._asked = threading.Condition()
        self._closed = False
        self._remembers = bool(jax.tree.leaves(initial(0)))
        self.count = 0
        self.waits, self.calls = Histogram(), Histogram()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="jrl-inference", daemon=True)

    def publish(self, weights: Weights) -> None:
        """Acts with these from the next call on; they must not be taken over by an update."""
        self.weights = weights
        if not self._thread.is_alive() and not self._closed:
            self._thread.start()

    @property
    def version(self) -> int:
        """Returns the version of the acting weights; 0 before there are any."""
        return self.weights.version if hasattr(self, "weights") else 0

    def warm_up(self) -> None:
        """Compiles all programs."""
        self._program.warm_up(self.weights, self.initial(0))

    def ask(self, items: Sequence[Item]) -> None:
        """Orders actions; `deliver` gets them."""
        now = time.perf_counter()
        with self._asked:
            self._items.extend((item, now) for item in items)
            self._asked.notify()

    def close(self) -> None:
        """Ends the thread; what is ordered is not answered any more."""
        with self._asked:
            self._closed = True
            self._asked.notify()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _serve(self) -> None:
        try:
            while (batch := self._batch()) is not None:
                began = time.perf_counter()
                self._answer(batch)
                self.calls.add(time.perf_counter() - began)
        except BaseException as e:  # the run ends with it: `source` raises it
            with self._table.lock:
                self.failure = e
                self._table.lock.notify_all()

    def _batch(self) -> list[Item] | None:
        with self._asked:
            while not self._items and not self._closed:
                self._asked.wait()
            if self._wait_s:
                until = time.monotonic() + self._wait_s
                while len(self._items) < min(len(self._table.episodes), self._most) and not self._closed:
                    if (left := until - time.monotonic()) <= 0:
                        break
                    self._asked.wait(left)
            if self._closed:
                return None
            return self._first()

    def _first(self) -> list[Item]:
        """Returns the items of the next call; a second item of a seat with memory waits for the call after it."""
        found: list[Item] = []
        answered: set[Seat] = set()
        now = time.perf_counter()
        while self._items and len(found) < self._most:
            item, asked = self._items[0]
            if self._remembers and item.carry is None and item.seat in answered:
                break
            answered.add(item.seat)
            self._items.popleft()
            found.append(item)
            self.waits.add(now - asked)
        return found

    def _answer(self, items: list[Item]) -> None:
        weights = self.weights
        found = self._program(weights, items, self.count)
        self.count += 1
        for item, (_, after) in zip(items, found.each, strict=True):
            item.seat.carry = after
        if self._table.columns is not None:
            action, extras = _with_own(found.action, found.extras, items)
            with self._table.lock:
                versions = [weights.version if item.version is None else item.version for item in items]
                _write(self._table.columns, items, (found.obs, action, extras, found.before), np.array(versions))
                self._table.lock.notify_all()
        self._deliver([(item, to_env, weights.version) for item, (to_env, _) in zip(items, found.each, strict=True)])


def _with_own(action: PyTree, extras: PyTree, items: list[Item]) -> tuple[PyTree, PyTree]:
    """Returns actions and extras in which the actions that clients chose replace the policy's."""
    own = [i for i, item in enumerate(items) if item.action is not None]
    if not own:
        return action, extras
    action = jax.tree.map(np.array, action)

    def put(whole: np.ndarray, *parts: np.ndarray) -> None:
        whole[own] = parts

    jax.tree.map(put, action, *(items[i].action for i in own))
    if "log_prob" in extras:  # of policies that learn from it, which take no actions without
        extras = {**extras, "log_prob": np.array(extras["log_prob"])}
        extras["log_prob"][own] = [items[i].log_prob for i in own]
    return action, extras


def _write(columns: Columns, items: list[Item], row: PyTree, version: np.ndarray) -> None:
    """Writes rows in the order in which they were asked for: an episode may end and the next begin in one batch."""
    left = [i for i, item in enumerate(items) if item.seat.column != UNLEARNED]
    while left:
        first: dict[int, int] = {}
        for i in left:
            first.setdefault(items[i].seat.column, i)
        now = list(first.values())
        left = [i for i in left if first[items[i].seat.column] != i]
        those = [items[i] for i in now]
        ends = Ends(
            np.array([item.reward for item in those], np.float32),
            np.array([item.terminated for item in those], bool),
            np.array([item.truncated for item in those], bool),
        )
        whole = len(now) == len(items)
        part = row if whole else jax.tree.map(lambda x, now=now: x[now], row)
        final = np.array([item.final for item in those], bool)
        columns.write(np.fromiter(first, np.int64, len(now)), part, version[now], ends, final)


def zeros(element: PyTree) -> PyTree:
    """Arrays of shapes and dtypes."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), element)
