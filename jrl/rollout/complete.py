"""Whole episodes only: what of an episode has been collected waits until its end has come.

    source = Complete(source, limit=longest_episode(env.spec.max_episode_steps), carry=algo.carry)
    rollout, report = source.next(actor, key)  # [T + limit, B]

For learners that need whole episodes (Monte-Carlo returns, rewards that are known at the end only). Of several agents
an episode is one agent's: from where it comes to where it ends, whatever the others of its game do.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl import spaces
from jrl.errors import InputError
from jrl.metrics import episodes
from jrl.ops import minibatch
from jrl.rollout.source import Wrapper
from jrl.types import COUNTS_STEP, POLICY_ID, Array, Episodes, Key, PyTree, Rollout

PADDING = "rollout/padding"  # metric: the share of masked steps, those of resets included


def longest_episode(max_episode_steps: int | None) -> int:
    """Returns the steps that an episode has at most, as an EnvSpec says. Raises InputError: it does not say."""
    if max_episode_steps is None:
        raise InputError(
            "rollout.batch_mode complete_episodes: these environments do not say how long an episode can be, and "
            "rollouts have to hold the longest: set env.horizon, e.g. env.horizon=1000"
        )
    return max_episode_steps


class Agents(NamedTuple):
    """Agents of a block of columns, after which they repeat: the A of one game, or of several games side by side.

    Agent k of game i has column i * A + k.
    """

    policies: tuple[
        int, ...
    ]  # [N], the number of the policy of each column, unless rollouts say it by row (`POLICY_ID`)
    kinds: tuple[tuple[int, ...], ...] = ()  # see `EnvSpec.kinds`; of blocks of one game
    extras: Mapping[str, tuple[int, ...]] = {}  # name -> the columns that stand there alone, in their order


def led(rollout: Rollout, agents: Agents) -> Rollout:
    """Returns a rollout that counts games with `COUNTS_STEP` instead of `over`: of a policy's agents that are present
    on a row of a game, the first leads.
    """
    if rollout.over is None:
        return rollout
    size: int = rollout.mask.shape[1] // rollout.over.shape[1]
    who: Any = rollout.extras.get(POLICY_ID, np.array(agents.policies)[None])
    policy = who.reshape(len(who), -1, size)  # [T, G, A], or of the games of a block
    # [..., A, A] bool: an agent that another of its policy goes before
    before = jnp.triu(policy[..., :, None] == policy[..., None, :], 1)[:, None]
    there: Any = rollout.mask.reshape(len(rollout.mask), -1, *policy.shape[1:])
    leads = there & ~(there[..., None] & before).any(-2)
    extras = {**rollout.extras, COUNTS_STEP: leads.reshape(rollout.mask.shape)}
    return dataclasses.replace(rollout, over=None, extras=extras)


def led_like(like: Rollout) -> Rollout:
    """Shapes and dtypes of what `led` makes of such a rollout."""
    if like.over is None:
        return like
    return dataclasses.replace(like, over=None, extras={**like.extras, COUNTS_STEP: like.mask})


def columns_of(
    agents: Agents | None, num: int, by_kind: Iterable[PyTree], extras: Mapping[str, PyTree]
) -> list[np.ndarray | None]:
    """Tells of each leaf which of `num` columns it has; None: all.

    Args:
      agents: None: one.
      num: B.
      by_kind: observations and actions, which are tuples by kind where there are kinds.
      extras: of a rollout.
    """
    repeated = lambda tree, own: [own] * len(jax.tree.leaves(tree))
    found: list[np.ndarray | None] = []
    whole = np.arange(num)
    for tree in by_kind:
        parts: Iterable[Any] = [(tree, None)]
        if agents is not None and agents.kinds:
            parts = zip(tree, spaces.split_by_kind(agents.kinds, whole), strict=True)
        found += [own for part, columns in parts for own in repeated(part, columns)]
    by_game = whole.reshape(-1, 1 if agents is None else len(agents.policies))
    recorded = {} if agents is None else agents.extras
    taken = {name: by_game[:, list(own)].reshape(-1) for name, own in recorded.items()}
    return found + [own for name in sorted(extras) for own in repeated(extras[name], taken.get(name))]


@struct.dataclass
class Waiting:
    """The rows of each column's episode that has not ended."""

    rows: tuple[PyTree, PyTree, Array, PyTree]  # obs, action, reward, extras: [H, B, ...]
    count: Array  # [B] i32, how many there are, from row 0 on


def nothing(rollout: Rollout, limit: int) -> Waiting:
    """Returns a Waiting with no row, of the shapes and dtypes of `rollout` [T, B]."""
    rows = (rollout.obs, rollout.action, rollout.reward, rollout.extras)
    empty = lambda x: jnp.zeros((limit, *x.shape[1:]), x.dtype)
    return Waiting(jax.tree.map(empty, rows), jnp.zeros(rollout.contiguous.shape, jnp.int32))


def pack(
    waiting: Waiting, rollout: Rollout, initial: PyTree, columns: Sequence[np.ndarray | None] | None = None
) -> tuple[Waiting, Rollout, Array]:
    """Returns the episodes that have ended by the end of `rollout`, and the rows that wait from now on. Pure.

    Args:
      waiting: what the last call returned, or `nothing`; H rows of each column have room.
      rollout: [T, B], the rows that follow. In columns that are not contiguous the rows that wait are dropped.
      initial: recurrent state [B, ...] at an episode's start.
      columns: of each leaf of obs, action, reward and extras those of the B that it has; None: all.
    Returns:
      (waiting, rollout [T + H, B], live [] i32). In each column of the rollout stand whole episodes in their order: the
      rows of one, then a masked row with its last observation, then the next; behind them padding, which is masked and
      no end, and not in its `count`. Row T + H - 1 is always masked. `live` counts the unmasked rows.
      An episode of more than H steps, which the limit should make impossible, is cut: row H is truncated, and the step
      after it is lost to the masked row that follows, unless the rollout ends there.
    """
    limit, length = waiting.rows[2].shape[0], rollout.reward.shape[0]
    count = jnp.where(rollout.contiguous, waiting.count, 0)
    by_column = functools.partial(jax.vmap, in_axes=1, out_axes=1)
    pick = by_column(lambda tree, index: minibatch.row_taker(tree)(index))
    rows = (rollout.obs, rollout.action, rollout.reward, rollout.extras)
    own = _Own([None] * len(jax.tree.leaves(rows)) if columns is None else list(columns))

    step = jnp.arange(length, dtype=jnp.int32)[:, None]
    masked_at = jax.lax.cummax(jnp.where(rollout.mask, -1, step))  # the latest masked step
    place = jnp.where(masked_at >= 0, step - masked_at - 1, count[None] + step)  # of a step in its episode
    mask = rollout.mask & (place % (limit + 1) != limit)
    done = rollout.terminated | rollout.truncated
    # the observation after the rollout is row T here: it is needed where an episode ends with row T - 1
    after_live = jnp.concatenate([count[None] > 0, mask])
    closed = mask[-1] & (done[-1] | (place[-1] % (limit + 1) == limit - 1))
    closes = jnp.concatenate([~mask, closed[None]]) & after_live
    held = jnp.concatenate([mask, jnp.zeros_like(closed)[None]]) | closes  # other masked rows are dropped

    # stream: the rows that wait, then those that are held; `whole` of its rows belong to whole episodes
    rank = count[None] + jnp.cumsum(held, 0, dtype=jnp.int32) - 1
    whole, total = jnp.where(closes, rank + 1, 0).max(0), rank[-1] + 1
    row = jnp.arange(length + limit, dtype=jnp.int32)
    slot = jnp.where(held, rank, length + limit)
    invert = lambda slot: jnp.zeros(row.shape, jnp.int32).at[slot].set(jnp.arange(length + 1), mode="drop")
    came = by_column(invert)(slot)  # [T + H, B], the row of the rollout that stands there
    waited = row[:, None] < count[None]

    # one gather for all: flags as bits, which are 0 on the rows that wait, none of which is an end
    bits = rollout.terminated + 2 * rollout.truncated.astype(jnp.int32) + 4 * mask
    rows, bits = own.picked(pick, rows, jnp.minimum(came, length - 1), bits)
    last = lambda came, x, last: jnp.where(_wide(came == length, x), last[None], x)
    rows = (own.mapped(last, came, rows[0], rollout.last_obs), *rows[1:])
    before = lambda waited, x, old: jnp.where(_wide(waited, x), _longer(old, length), x)
    rows = own.mapped(before, waited, rows, waiting.rows)
    live = (waited | ((bits >= 4) & (came < length))) & (row[:, None] < whole[None])
    terminated, truncated = (live & ~waited & ((bits & bit) > 0) for bit in (1, 2))
    # every episode here has ended: one that broke off, or was cut, at a time limit
    last_row = live & ~jnp.concatenate([live[1:], jnp.zeros_like(live[:1])])
    truncated |= last_row & ~terminated

    rest = jnp.minimum(whole[None] + jnp.arange(limit, dtype=jnp.int32)[:, None], length + limit - 1)
    left, _ = own.picked(pick, rows, rest)
    obs, action, reward, extras = rows
    packed = Rollout(
        obs=obs,
        last_obs=rollout.last_obs,
        action=action,
        reward=jnp.where(live, reward, 0.0),
        terminated=terminated,
        truncated=truncated,
        mask=live,
        contiguous=jnp.zeros_like(rollout.contiguous),
        extras=extras,
        carry=initial,
        count=whole,
    )
    return Waiting(left, total - whole), packed, live.sum(dtype=jnp.int32)


class _Own(NamedTuple):
    """Does with each leaf of (obs, action, reward, extras) what is said by column, for the columns that it has."""

    columns: list[np.ndarray | None]  # of the first leaves; those of all where a tree has more

    def _of(self, by_column: Array, i: int) -> Array:
        columns = self.columns[i] if i < len(self.columns) else None
        return by_column if columns is None else by_column[:, columns]

    def mapped(self, fn: Callable[..., Array], by_column: Array, tree: PyTree, other: PyTree) -> PyTree:
        """Calls fn(`by_column` [T, *] of its columns, leaf of the tree, that of the other); the first may end early."""
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(leaves, jax.tree.leaves(other), strict=True)
        return jax.tree.unflatten(structure, [fn(self._of(by_column, i), x, y) for i, (x, y) in enumerate(pairs)])

    def picked(self, pick: Callable[..., Any], tree: PyTree, index: Array, more: PyTree = ()) -> tuple[PyTree, PyTree]:
        """Takes rows `index` [N, B] of a tree, and of `more`, which has all columns; one gather for equal columns."""
        leaves, structure = jax.tree.flatten((tree, more))
        alike: dict[int, list[int]] = {}
        for i in range(len(leaves)):
            alike.setdefault(id(self.columns[i] if i < len(self.columns) else None), []).append(i)
        for mine in alike.values():
            for i, x in zip(mine, pick([leaves[i] for i in mine], self._of(index, mine[0])), strict=True):
                leaves[i] = x
        return jax.tree.unflatten(structure, leaves)


def _wide(flag: Array, x: Array) -> Array:
    """Returns `flag` [T, B] as [T, B, 1, ...], for leaves [T, B, *]."""
    return jnp.expand_dims(flag, tuple(range(2, x.ndim)))


def _longer(x: Array, more: int) -> Array:
    return jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)])


class Complete(Wrapper):
    """Rollouts [T + limit, B] of whole episodes, from those [T, B] of `source`; a Source. See `pack`.

    A call collects until at least one episode has ended, so that nothing learns from padding alone. The episodes'
    report is that of the source: it counts steps when they are taken, not when they are learned from. Waits for the
    rollout. Metric `rollout/padding`.

    Args:
      source: whose columns that are not `contiguous` have begun new episodes.
      limit: H, steps that an episode has at most; more is padding.
      carry: batch_size -> recurrent state at an episode's start, `Algo.carry`.
      agents: of several what the columns are; rollouts then have `COUNTS_STEP`, as `led` says. None: one agent.
    """

    def __init__(
        self,
        source: Any,
        *,
        limit: int,
        carry: Callable[[int], PyTree] = lambda batch_size: (),
        agents: Agents | None = None,
    ):
        super().__init__(source)
        if limit < 1:
            raise ValueError(f"limit: expected at least 1 step, got {limit}")
        self._limit, self._carry, self._agents = limit, carry, agents
        self._pack: Callable | None = None
        self._waiting: Waiting
        self._initial: PyTree
        self._padding: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        return self._source.metrics | ({} if self._padding is None else {PADDING: self._padding})

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Returns the episodes that have ended; `key` is that of the first rollout that is collected for them."""
        reports, again = [], 0
        while True:
            rollout, report = self._source.next(actor, jax.random.fold_in(key, again) if again else key)
            reports.append(report)
            if self._pack is None:
                self._begin(rollout)
            assert self._pack is not None
            self._waiting, packed, live = self._pack(self._waiting, rollout, self._initial)
            steps, again = int(live), again + 1
            # more rows than an episode can have without an end are masked: environments that break all the time
            if steps or again * rollout.reward.shape[0] > self._limit + 1:
                break
        self._padding = 1.0 - steps / packed.mask.size
        return packed, reports[0] if len(reports) == 1 else episodes.add_reports(reports)

    def _begin(self, rollout: Rollout) -> None:
        """Begins with columns that may lie on several devices: theirs stay where they are."""
        lies = jax.tree.map(lambda x: x.sharding, jax.tree.map(jnp.asarray, rollout))
        initial, agents = self._carry(rollout.reward.shape[1]), self._agents
        see = (lambda rollout: rollout) if agents is None else functools.partial(led, agents=agents)
        rollout = jax.eval_shape(see, rollout)
        obs, action, whole = rollout.obs, rollout.action, [None]  # all have rewards
        columns = columns_of(agents, rollout.mask.shape[1], (obs, action), {})
        columns += whole + columns_of(agents, rollout.mask.shape[1], (), rollout.extras)
        lies = lies if agents is None else led_like(lies)
        rows = (lies.obs, lies.action, lies.reward, lies.extras)
        # committed there, as the outputs of a call will be: another kind of input is another compilation
        self._waiting = jax.device_put(nothing(rollout, self._limit), Waiting(rows, lies.contiguous))
        self._initial = jax.device_put(initial, jax.tree.map(lambda _: lies.contiguous, initial))
        shardings = (Waiting(rows, lies.contiguous), dataclasses.replace(lies, carry=None, count=lies.contiguous), None)

        def packed(waiting: Waiting, rollout: Rollout, initial: PyTree) -> tuple[Waiting, Rollout, Array]:
            return pack(waiting, see(rollout), initial, columns)

        self._pack = jax.jit(packed, donate_argnums=0, out_shardings=shardings)

    def discontinue(self) -> None:
        """None of its rollouts continues another."""

    def reset(self, key: Key) -> None:
        """Resets all environments; the rows that wait are dropped."""
        self._pack = None
        self._source.reset(key)
