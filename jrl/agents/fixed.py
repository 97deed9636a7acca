"""Several policies in one run: their columns, the Algo that acts with all policies, and their Learner.

Column i * A + k is agent k of environment i. A policy owns agents, and so columns. Acting and learning of a policy see
only its columns. Policies that differ only in weights and floats of their Config form a group: they are stacked
[P, ...] and vmapped, so that a group compiles to one program.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.learn.learner import Learner, UpdateKeys
from jrl.ops import minibatch
from jrl.types import (
    BROKEN_STACKS,
    COUNTS_STEP,
    NOT_FINITE,
    VALID_SHARE,
    ActOut,
    Algo,
    Key,
    Metrics,
    PyTree,
    Rollout,
    UpdateAux,
)

UPDATES = "train/updates"
# metrics of the whole run: the sum over policies, or the worst policy
_OVER_ALL = {NOT_FINITE: jnp.maximum, BROKEN_STACKS: jnp.maximum, VALID_SHARE: jnp.minimum, UPDATES: jnp.add}
# maximum rows of policies that learn in parallel on CPU, by the size of its cache. Twenty policies with 1024 rows each
# cost 1.35 times as much as one policy with all rows if four learn in parallel, 1.6 times if all do
_ROWS_AT_ONCE = 4096


class Group(NamedTuple):
    """P policies that differ only in weights and floats of their Config."""

    names: tuple[str, ...]  # [P]
    agents: np.ndarray  # [P, n] i32, agent indices of each policy
    algo: Any = None  # Algo of each policy; of the first, if floats differ. None: not built
    learner: Learner | None = None  # Learner, as `algo`; None: the policies do not learn
    kinds: tuple[tuple[int, ...], ...] = ()  # kinds of the environments' agents, see `EnvSpec.kinds`
    cfg: Any = None  # RunConfig of one policy's agents alone; of the first, if floats differ
    spec: Any = None  # EnvSpec of one policy's agents alone
    floats: PyTree = ()  # floats that differ between the Configs, [P] f32 each
    # (floats of one policy, which may be traced) -> group with that policy's algo and learner
    with_values: Callable[[PyTree], "Group"] | None = None

    @property
    def stacked(self) -> bool:
        """Returns whether its trees have a leading axis [P]."""
        return len(self.names) > 1

    @property
    def label(self) -> str:
        """Returns the group's name."""
        return self.names[0] if not self.stacked else f"{self.names[0]}+{len(self.names) - 1}"

    def over(self, pick: Callable[["Group"], Callable[..., Any]]) -> tuple[Callable[..., Any], tuple[PyTree, ...]]:
        """Returns the function `pick(group)` vmapped over policies, and its leading arguments."""
        if self.with_values is None:
            return jax.vmap(pick(self)), ()
        bound = self.with_values
        # jax arrays, since a float that is also a metric is indexed by a traced number
        floats = jax.tree.map(jnp.asarray, self.floats)
        return jax.vmap(lambda floats, *args: pick(bound(floats))(*args)), (floats,)

    def mapped(self, pick: Callable[["Group"], Callable[..., Any]]) -> Callable[..., Any]:
        """Returns the function `pick(group)` of one policy as a function of all policies."""
        if not self.stacked:
            return pick(self)
        fn, before = self.over(pick)
        return functools.partial(fn, *before)

    def keys(self, key: Key) -> Key:
        """Returns a key for each policy."""
        return jax.random.split(key, len(self.names)) if self.stacked else key

    def stack(self, parts: Mapping[str, PyTree]) -> PyTree:
        """Returns the stacked trees of this group, from a dict by policy."""
        if not self.stacked:
            return parts[self.names[0]]
        return jax.tree.map(lambda *x: jnp.stack(x), *(parts[name] for name in self.names))

    def unstack(self, tree: PyTree) -> dict[str, PyTree]:
        """Returns the inverse of `stack`."""
        if not self.stacked:
            return {self.names[0]: tree}
        return {name: jax.tree.map(lambda x, i=i: x[i], tree) for i, name in enumerate(self.names)}

    @property
    def kind(self) -> int:
        """Returns the number of its agents' kind; 0 with one kind."""
        first = int(self.agents.flat[0]) % max(1, sum(map(len, self.kinds)))
        return next((k for k, kind in enumerate(self.kinds) if first in kind), 0)

    def seats(self, num_agents: int) -> tuple[np.ndarray, int]:
        """Returns its agents' indices [P * n] among agents of their kind, and the number of agents of that kind.

        Both are for a block of `num_agents` columns, which has one or several games.
        """
        agents = self.agents.reshape(-1)
        if not self.kinds:
            return agents, num_agents
        size, kind = sum(map(len, self.kinds)), self.kinds[self.kind]
        places = np.array([kind.index(k) for k in (agents % size).tolist()])
        return agents // size * len(kind) + places, num_agents // size * len(kind)

    def own(self, tree: PyTree, num_agents: int, axis: int) -> PyTree:
        """Returns the group's G * P * n of G * A columns along `axis`, 0 or 1."""
        return _taken(tree, self.agents.reshape(-1), num_agents, axis)

    def of_kind(self, tree: PyTree, num_agents: int, axis: int) -> PyTree:
        """Returns the group's columns of observations or actions, which are tuples if there are kinds."""
        return _taken(tree[self.kind] if self.kinds else tree, *self.seats(num_agents), axis)

    def by_policy(self, tree: PyTree, axis: int) -> PyTree:
        """Splits the group's G * P * n columns along `axis` by policy: [P, ...] with G * n columns."""
        if not self.stacked:
            return tree
        policies, agents = self.agents.shape

        def deal(x):
            split = x.reshape(*x.shape[:axis], -1, policies, agents, *x.shape[axis + 1 :])
            split = jnp.moveaxis(split, axis + 1, 0)
            return split.reshape(policies, *x.shape[:axis], -1, *x.shape[axis + 1 :])

        return jax.tree.map(deal, tree)

    def flat(self, tree: PyTree) -> PyTree:
        """Returns the inverse of `by_policy` along axis 0."""
        if not self.stacked:
            return tree
        policies, agents = self.agents.shape

        def join(x):
            split = jnp.moveaxis(x.reshape(policies, -1, agents, *x.shape[2:]), 0, 1)
            return split.reshape(-1, *x.shape[2:])

        return jax.tree.map(join, tree)

    def put(self, whole: PyTree, mine: PyTree, num_agents: int) -> PyTree:
        """Returns all columns [G * A, ...] with the group's columns [G * P * n, ...] replaced."""

        def write(x, new):
            split = x.reshape(-1, num_agents, *x.shape[1:])
            new = new.reshape(split.shape[0], -1, *x.shape[1:])
            return split.at[:, self.agents.reshape(-1)].set(new).reshape(x.shape)

        return jax.tree.map(write, whole, mine)


def _taken(tree: PyTree, agents: np.ndarray, num_agents: int, axis: int) -> PyTree:
    def take(x):
        split = x.reshape(*x.shape[:axis], -1, num_agents, *x.shape[axis + 1 :])
        mine = jnp.take(split, agents, axis=axis + 1)
        return mine.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return jax.tree.map(take, tree)


def _joined(groups: Sequence[Group], num_agents: int, parts: Sequence[PyTree]) -> PyTree:
    """Returns the actions of all groups, [G * P * n, ...] each, as [G * A, ...], or as a tuple by kind."""
    if not (kinds := groups[0].kinds):
        return _of_one_kind(groups, num_agents, parts)
    mine = [[i for i, group in enumerate(groups) if group.kind == k] for k in range(len(kinds))]
    return tuple(_of_one_kind([groups[i] for i in own], num_agents, [parts[i] for i in own]) for own in mine)


def _of_one_kind(groups: Sequence[Group], num_agents: int, parts: Sequence[PyTree]) -> PyTree:
    seats = [group.seats(num_agents) for group in groups]
    order = np.argsort(np.concatenate([places for places, _ in seats]))

    def together(*leaves):
        split = [x.reshape(-1, group.agents.size, *x.shape[1:]) for group, x in zip(groups, leaves, strict=True)]
        whole = jnp.take(jnp.concatenate(split, 1), order, axis=1)
        return whole.reshape(-1, *whole.shape[2:])

    assert len(order) == seats[0][1]
    return jax.tree.map(together, *parts)


def acting(groups: Sequence[Group], num_agents: int) -> Algo:
    """Returns an Algo in which each policy acts in its own columns.

    Its State is a dict by policy, as in checkpoints. ActorState, carry and extras are dicts by group. The carry of a
    group has all columns, so that code that resets it needs no groups.

    Args:
      groups: groups, which own each agent once.
      num_agents: A.
    """

    def init(key: Key) -> dict[str, PyTree]:
        return by_policy_name(
            groups, {group.label: group.mapped(lambda one: one.algo.init)(group.keys(key)) for group in groups}
        )

    def actor(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {group.label: group.mapped(lambda one: one.algo.actor)(group.stack(state)) for group in groups}

    def carry(batch_size: int, **place: Any) -> dict[str, PyTree]:
        return {group.label: group.algo.carry(batch_size, **place) for group in groups}

    def act(
        actor: Mapping[str, PyTree], obs: PyTree, carry: Mapping[str, PyTree], key: Key, explore: bool = True
    ) -> ActOut:
        actions, memories, extras = [], {}, {}
        for i, group in enumerate(groups):
            before = carry[group.label]
            own = group.of_kind(obs, num_agents, 0), group.own(before, num_agents, 0)
            seen, memory = group.by_policy(own, 0)
            of_all = group.mapped(lambda one: lambda *args: one.algo.act(*args, explore))
            out = of_all(actor[group.label], seen, memory, group.keys(jax.random.fold_in(key, i)))
            actions.append(group.flat(out.action))
            memories[group.label] = group.put(before, group.flat(out.carry), num_agents)
            extras[group.label] = group.flat(out.extras)
        return ActOut(_joined(groups, num_agents, actions), memories, extras)

    def update(state: PyTree, batch: PyTree, key: Key) -> tuple[PyTree, UpdateAux]:
        raise ValueError("several policies have an update each: call that of one of them")

    gamma, recorded = np.zeros(num_agents, np.float32), False
    for group in groups:
        if (found := gammas(group)).size:
            gamma[group.agents], recorded = found[:, None], True
    return Algo(init, actor, carry, act, update, groups[0].algo.data, running_return_gamma=gamma if recorded else None)


def gammas(group: Group) -> np.ndarray:
    """Returns each policy's discount of the running return, [P]; an empty array: no running return."""
    if group.algo.running_return_gamma is None:
        return np.zeros(0)
    of_one = lambda one: lambda _: jnp.asarray(one.algo.running_return_gamma, jnp.float32)
    return np.reshape(group.mapped(of_one)(np.zeros(len(group.names))), -1)


def learning(groups: Sequence[Group], num_agents: int, *, lockstep: bool = False) -> Learner:
    """Returns a Learner in which each policy learns from its own columns; other policies do not change.

    State and replay are dicts by group; `keep` returns a dict by policy. Metrics are `policy/NAME/...`, except metrics
    of the whole run, such as the number of gradient steps.

    Args:
      groups: groups, which own each agent once.
      num_agents: A.
      lockstep: all policies draw the same rows from their replays; other random numbers differ by policy.
    """
    learners = [(i, group) for i, group in enumerate(groups) if group.learner is not None]

    def init(key: Key) -> dict[str, PyTree]:
        begin = lambda one: one.algo.init if one.learner is None else one.learner.init
        keys = [group.keys(jax.random.fold_in(key, i)) for i, group in enumerate(groups)]
        return {group.label: group.mapped(begin)(own) for group, own in zip(groups, keys, strict=True)}

    def init_replay() -> dict[str, PyTree]:
        repeat = lambda group, tree: jax.tree.map(
            lambda x: jnp.broadcast_to(x, (len(group.names), *x.shape)) if group.stacked else x, tree
        )
        return {group.label: repeat(group, learner_of(group).init_replay()) for _, group in learners}

    def actor(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        read = lambda one: one.algo.actor if one.learner is None else one.learner.actor
        return {group.label: group.mapped(read)(state[group.label]) for group in groups}

    def step(state: Mapping[str, PyTree], replay: Mapping[str, PyTree], rollout: Rollout, key: Key):
        state, replay, metrics = dict(state), dict(replay), dict[str, Metrics]()
        for i, group in learners:
            own, keys = _rollout_of(group, num_agents, rollout), group.keys(jax.random.fold_in(key, i))
            draw = jnp.broadcast_to(jax.random.fold_in(key, len(groups)), keys.shape) if lockstep else None
            drawn = keys if draw is None else UpdateKeys(draw, keys)
            learned = _learned(group, state[group.label], replay[group.label], own, drawn)
            state[group.label], replay[group.label], found = learned
            metrics |= group.unstack(found)
        return state, replay, join_metrics(metrics)

    def keep(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        kept = lambda group: (lambda x: x) if group.learner is None else group.learner.keep
        return by_policy_name(groups, {group.label: kept(group)(state[group.label]) for group in groups})

    def resume(kept: Mapping[str, PyTree]) -> dict[str, PyTree]:
        again = lambda group: (
            (lambda x: x) if group.learner is None else group.mapped(lambda one: learner_of(one).resume)
        )
        return {group.label: again(group)(group.stack(kept)) for group in groups}

    if any(group.stacked for group in groups):  # one program instead of one for each shape
        keep, resume = jax.jit(keep), jax.jit(resume)
    return Learner(init, init_replay, actor, step, keep=keep, resume=resume)


def learner_of(group: Group) -> Learner:
    """Returns the Learner of a group that learns."""
    assert group.learner is not None
    return group.learner


def by_policy_name(groups: Sequence[Group], by_group: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Returns a dict by group as a dict by policy."""
    return {name: one for group in groups for name, one in group.unstack(by_group[group.label]).items()}


def with_item(
    fn: Callable[[Any], PyTree], name: str, read: Callable[[Any], Any] = lambda x: x
) -> Callable[..., PyTree]:
    """Returns state -> `fn` of its policies, with the further item `name` as `read(item)`."""
    return lambda state: {**fn(without(state, name)), name: read(state[name])}


def without(state: Mapping[str, PyTree], name: str) -> dict[str, PyTree]:
    """Returns a State without the item `name`."""
    return {policy: one for policy, one in state.items() if policy != name}


def _rollout_of(group: Group, num_agents: int, rollout: Rollout) -> Rollout:
    """Returns the rollout of each policy of a group: its columns and extras."""

    def take(tree: PyTree, axis: int, own: Callable[..., PyTree] = group.own) -> PyTree:
        return group.by_policy(own(tree, num_agents, axis), axis)

    rows = ("reward", "terminated", "truncated", "mask")
    extras = dict(group.by_policy(rollout.extras[group.label], 1))
    for name in ("running_return", COUNTS_STEP):
        if name in rollout.extras:
            extras[name] = take(rollout.extras[name], 1)
    over = rollout.over
    if over is not None and group.stacked:
        over = jnp.broadcast_to(over, (len(group.names), *over.shape))
    return dataclasses.replace(
        rollout,
        **{name: take(getattr(rollout, name), 1, group.of_kind) for name in ("obs", "action")},
        **{name: take(getattr(rollout, name), 1) for name in rows},
        last_obs=take(rollout.last_obs, 0, group.of_kind),
        contiguous=take(rollout.contiguous, 0),
        extras=extras,
        carry=take(rollout.carry[group.label], 0),
        count=None if rollout.count is None else take(rollout.count, 0),
        over=over,
    )


def _learned(group: Group, state: PyTree, replay: PyTree, rollout: Rollout, keys: PyTree) -> Any:
    """Calls `learner.step` of each policy of a group: all in parallel, or in parts on CPU.

    Policies with replay learn in parallel, since a loop would copy the replay. So do policies with images, since a
    convolution in another loop is several times slower.
    """
    pick = lambda one: learner_of(one).step
    row_bytes = sum(x.dtype.itemsize * math.prod(x.shape[3:]) for x in jax.tree.leaves(rollout.obs))
    if (
        not group.stacked
        or jax.default_backend() != "cpu"
        or jax.tree.leaves(replay)
        or row_bytes >= minibatch.IMAGE_BYTES
    ):
        return group.mapped(pick)(state, replay, rollout, keys)
    policies, *rows = rollout.reward.shape
    at_once = minibatch.chunk_rows(policies, row_bytes, _ROWS_AT_ONCE, length=math.prod(rows))
    step, before = group.over(pick)
    return minibatch.map_rows(lambda given: step(*given), (*before, state, replay, rollout, keys), at_once)


def join_metrics(metrics: Mapping[str, Metrics]) -> Metrics:
    """Returns the metrics of all policies, by policy name, and the metrics of the whole run."""
    found: Metrics = {}
    for policy, one in metrics.items():
        for name, value in one.items():
            if name not in _OVER_ALL:
                found[f"policy/{policy}/{name}"] = value
            else:
                found[name] = _OVER_ALL[name](found[name], value) if name in found else value
    return found
