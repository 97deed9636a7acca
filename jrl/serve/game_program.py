"""Acting for agents of any games: some of one game, others of another, in the columns that the policies expect."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.rollout import complete
from jrl.rollout.complete import Agents
from jrl.serve.inference import Chosen, Program, Weights, zeros
from jrl.serve.table import Item
from jrl.types import LEADS, ActOut, EnvSpec, PyTree, element

STEP = "step"  # in what acting records: [N] bool, rows that stand for a step of their game, one for each


class GameProgram(Program):
    """Program of several agents: the r-th item of agent k is acted for in column r * A + k.

    Policies act column by column, so that it does not matter whose games stand beside each other.

    Args:
      spec, agents: what the agents see, whom they follow, and where policies record what goes with their actions.
      act, to_env, explore, most: as `Program`; `most` items of one agent.
    """

    def __init__(
        self, act: Callable[..., ActOut], to_env: Any, spec: EnvSpec, agents: Agents, *, explore: bool, most: int
    ):
        self._agents, self._size = agents, len(agents.policies)
        self._kinds = agents.kinds or (tuple(range(self._size)),)
        # by agent: the number of its kind, and its own in it
        seats = {k: (q, j) for q, kind in enumerate(self._kinds) for j, k in enumerate(kind)}
        self._kind, self._place = np.array([seats[k] for k in range(self._size)]).T
        self._nothing = [element(one.observation) for one in spaces.by_kind(spec)]

        def everywhere(actor: PyTree, obs: PyTree, carry: PyTree, key: Any, explore: bool) -> ActOut:
            out = act(actor, obs, carry, key, explore)
            num = len(jax.tree.leaves(obs)[0]) // len(self._kinds[0]) * self._size
            return out._replace(extras=self._everywhere(out.extras, num))

        super().__init__(everywhere, to_env, explore=explore, most=most)

    def _everywhere(self, extras: Mapping[str, PyTree], num: int) -> dict[str, PyTree]:
        """Returns what acting recorded as arrays of all columns, zeros where there is nothing."""
        own = complete.columns_of(self._agents, num, (), extras)
        leaves, structure = jax.tree.flatten(dict(extras))
        whole = [
            x if columns is None else jnp.zeros((num, *x.shape[1:]), x.dtype).at[columns].set(x)
            for x, columns in zip(leaves, own, strict=True)
        ]
        return jax.tree.unflatten(structure, whole)

    def __call__(self, weights: Weights, items: Sequence[Item], count: int) -> Chosen:
        agent = np.array([item.seat.agent for item in items])
        row, taken = np.zeros(len(items), np.int64), np.zeros(self._size, np.int64)
        for i, k in enumerate(agent):
            row[i] = taken[k]
            taken[k] += 1
        size = self.size(int(taken.max()))
        column, kind = row * self._size + agent, self._kind[agent]
        # of each kind the rows of its items; others', which nobody reads, get the first
        rows = [np.where(kind == q, row * len(own) + self._place[agent], 0) for q, own in enumerate(self._kinds)]
        empty = lambda tree, n: jax.tree.map(lambda x: np.zeros((n, *x.shape), x.dtype), tree)
        seen = [empty(part, size * len(own)) for own, part in zip(self._kinds, self._nothing, strict=True)]
        for i, item in enumerate(items):
            jax.tree.map(lambda whole, x, at=rows[kind[i]][i]: whole.__setitem__(at, x), seen[kind[i]], item.obs)
        initial = empty(items[0].memory, size * self._size)
        for i, item in enumerate(items):
            jax.tree.map(lambda whole, x, at=column[i]: whole.__setitem__(at, x), initial, item.memory)
        several = bool(self._agents.kinds)
        action, to_env, extras, after = self.run(weights, tuple(seen) if several else seen[0], initial, count)
        of_kinds = lambda tree: tree if several else (tree,)
        at = lambda tree, index: jax.tree.map(lambda x: x[index], tree)
        joined = lambda parts: tuple(parts) if several else parts[0]
        flags = {STEP: np.array([item.first for item in items]), LEADS: np.array([item.leads for item in items])}
        return Chosen(
            joined([at(part, own) for part, own in zip(seen, rows, strict=True)]),
            joined([at(part, own) for part, own in zip(of_kinds(action), rows, strict=True)]),
            at(extras, column) | flags,
            at(initial, column),
            [(at(of_kinds(to_env)[q], rows[q][i]), at(after, column[i])) for i, q in enumerate(kind)],
        )


def of_agents(spec: EnvSpec) -> list[tuple[int, Any, Any, Any]]:
    """Returns (number of its kind, observation space, action space of the policy, of the environment) of each agent."""
    found: dict[str, tuple[int, Any, Any, Any]] = {}
    for q, one in enumerate(spaces.by_kind(spec)):
        found |= dict.fromkeys(one.agents, (q, one.observation, one.action, one.env_action or one.action))
    return [found[name] for name in spec.agents]


def embedded(spec: EnvSpec, kind: int, action: PyTree) -> PyTree:
    """Returns an agent's action as what acting gives has it: a tuple by kind where there are kinds."""
    if not spec.kinds:
        return action
    parts = spaces.by_kind(spec)
    return tuple(action if q == kind else zeros(element(one.action)) for q, one in enumerate(parts))
