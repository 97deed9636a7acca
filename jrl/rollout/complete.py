"""Whole episodes only: what of an episode has been collected waits until its end has come.

    source = Complete(source, limit=longest_episode(env.spec.max_episode_steps), carry=algo.carry)
    rollout, report = source.next(actor, key)  # [T + limit, B]

For learners that need whole episodes (Monte-Carlo returns, rewards that are known at the end only). Of several agents
an episode is one agent's: from where it comes to where it ends, whatever the others of its game do.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.errors import InputError
from jrl.metrics import episodes
from jrl.rollout.source import Wrapper
from jrl.rollout.stitch import find_pieces
from jrl.types import COUNTS_STEP, POLICY_ID, Episodes, Key, PyTree, Rollout

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

    policies: tuple[int, ...]  # [N], number of the policy of each column, unless rollouts have it by row (`POLICY_ID`)
    kinds: tuple[tuple[int, ...], ...] = ()  # see `EnvSpec.kinds`; of blocks of one game
    extras: Mapping[str, tuple[int, ...]] = {}  # name -> the columns that stand there alone, in their order


def led(rollout: Rollout, agents: Agents) -> Rollout:
    """Returns a rollout on the host that counts games with `COUNTS_STEP` in the place of `over`.

    Of the agents of a policy that are there on a row of a game, the first leads.
    """
    if rollout.over is None:
        return rollout
    size: int = rollout.mask.shape[1] // rollout.over.shape[1]
    who: Any = rollout.extras.get(POLICY_ID, np.array(agents.policies)[None])
    policy = who.reshape(len(who), -1, size)  # [T, G, A], or of the games of a block
    # [..., A, A] bool: an agent that another of its policy goes before
    before = np.triu(policy[..., :, None] == policy[..., None, :], 1)[:, None]
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


class Complete(Wrapper):
    """Rollouts [T + limit, B] of whole episodes, from those [T, B] of `source`; a Source.

    In each column of a rollout stand whole episodes in their order: the rows of one, then a masked row with its last
    observation, then the next; behind them padding, which is masked and no end, and not in its `count`. The last row is
    always masked. An episode that broke off ends at a time limit. So does one of more than `limit` steps, which the
    limit should make impossible; the step after it is lost to the masked row that follows, unless the rollout ends
    there.

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
        self._waiting: PyTree = None  # obs, action, reward, extras [H, B, *]: rows of episodes that have not ended
        self._count: np.ndarray  # [B], how many there are, from row 0 on
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
            lies = jax.tree.map(lambda x: x.sharding, jax.tree.map(jnp.asarray, rollout))
            rollout = jax.device_get(dataclasses.replace(rollout, carry=()))
            if self._agents is not None:
                rollout, lies = led(rollout, self._agents), led_like(lies)
            packed = self._packed(rollout)
            steps, again = int(packed.mask.sum()), again + 1
            # more rows than an episode can have without an end are masked: environments that break all the time
            if steps or again * rollout.reward.shape[0] > self._limit + 1:
                break
        self._padding = 1.0 - steps / packed.mask.size
        carry = jax.device_get(self._carry(packed.mask.shape[1]))
        lies = dataclasses.replace(lies, carry=jax.tree.map(lambda _: lies.contiguous, carry), count=lies.contiguous)
        packed = jax.device_put(dataclasses.replace(packed, carry=carry), lies)  # columns stay on their devices
        return packed, reports[0] if len(reports) == 1 else episodes.add_reports(reports)

    def _packed(self, rollout: Rollout) -> Rollout:
        """Returns the episodes that have ended by the end of a rollout [T, B]; the rows of the others wait."""
        (length, num), limit = rollout.mask.shape, self._limit
        rows = (rollout.obs, rollout.action, rollout.reward, rollout.extras)
        if self._waiting is None:
            self._waiting = jax.tree.map(lambda x: np.zeros((limit, *x.shape[1:]), x.dtype), rows)
            self._count = np.zeros(num, np.int32)
        count = np.where(rollout.contiguous, self._count, 0).tolist()
        # rows by their numbers: those that wait, those of the rollout from `limit` on, and the one after it
        whole: list[list[int]] = [[] for _ in range(num)]  # of each column, behind each episode the row of its last obs
        waiting: list[list[int]] = [list(range(n)) for n in count]
        mask, done = np.asarray(rollout.mask), np.asarray(rollout.terminated | rollout.truncated)
        last = np.zeros((length + limit, num), bool)

        def close(b: int, after: int) -> None:
            whole[b] += [*waiting[b], after]
            last[len(whole[b]) - 2, b] = True
            waiting[b] = []

        for b in np.flatnonzero(np.array(count, bool) & ~mask[0]).tolist():
            close(b, limit)  # its environment broke
        for b, start, stop, ends, _ in find_pieces(mask, done, np.full(num, length)):
            for t in range(start, stop):
                if len(waiting[b]) == limit:
                    close(b, limit + t)  # and this step is lost
                else:
                    waiting[b].append(limit + t)
            if waiting[b] and (ends or stop < length or len(waiting[b]) == limit):
                close(b, limit + stop)
        taken = _index(whole, length + limit)
        live = (np.arange(length + limit)[:, None] < [len(x) for x in whole]) & ~_after(last)
        terminated = np.concatenate([np.zeros((limit, num), bool), rollout.terminated, np.zeros((1, num), bool)])
        ends_truly = last & np.take_along_axis(terminated, taken, 0)
        obs, action, reward, extras = self._picked(rows, rollout.last_obs, taken)
        self._waiting = self._picked(rows, rollout.last_obs, _index(waiting, limit))
        self._count = np.array([len(x) for x in waiting], np.int32)
        return Rollout(
            obs=obs,
            last_obs=rollout.last_obs,
            action=action,
            reward=np.where(live, reward, np.float32(0)),
            terminated=ends_truly,
            truncated=last & ~ends_truly,  # an episode that broke off, or was cut, has a time limit there
            mask=live,
            contiguous=np.zeros(num, bool),
            extras=extras,
            carry=(),
            count=np.array([len(x) for x in whole], np.int32),
        )

    def _picked(self, rows: PyTree, last_obs: PyTree, index: np.ndarray) -> PyTree:
        """Takes rows [N, B] of those that wait, of a rollout, and the observation after it."""
        num = index.shape[1]
        obs, action, _, extras = rows
        columns = [*columns_of(self._agents, num, (obs, action), {}), None, *columns_of(self._agents, num, (), extras)]
        after = (last_obs, *jax.tree.map(lambda x: x[-1], rows[1:]))
        leaves, structure = jax.tree.flatten(rows)
        parts = zip(jax.tree.leaves(self._waiting), leaves, jax.tree.leaves(after), columns, strict=True)
        every = np.arange(num)
        found = [
            np.concatenate([old, new, final[None]])[index if own is None else index[:, own], every[: new.shape[1]]]
            for old, new, final, own in parts
        ]
        return jax.tree.unflatten(structure, found)

    def discontinue(self) -> None:
        """None of its rollouts continues another."""

    def reset(self, key: Key) -> None:
        """Resets all environments; the rows that wait are dropped."""
        self._waiting = None
        self._source.reset(key)


def _index(rows: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """Returns the numbers of each column's rows, [size, B]; 0 behind them."""
    found = np.zeros((size, len(rows)), np.int32)
    for b, own in enumerate(rows):
        found[: len(own), b] = own
    return found


def _after(flags: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(flags[:1]), flags[:-1]])
