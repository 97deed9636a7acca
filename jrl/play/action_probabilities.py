"""Probabilities of a policy along recorded episodes, for estimators."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.algos import fqe
from jrl.data import EpisodeStore
from jrl.types import Algo, Array, Discrete, EnvSpec, Key, PyTree

_ROWS = 8192  # that are looked at together where no memory goes from one to the next


class Probabilities(NamedTuple):
    """Outputs of a policy for each row of a store; numpy."""

    log_prob: Array | None  # [R] f32 of the actions that were taken; None: not asked for
    choices: Array | None  # [R, A] or [R, K, D] f32, see `fqe`; None: not asked for


class Asked(NamedTuple):
    """Outputs that are asked for; static."""

    explore: bool  # of the policy as it acts when exploring; False: of its best actions
    log_prob: bool
    choices: int  # actions drawn at each observation where they are not Discrete; 0: none


def draws(algo: Algo, spec: EnvSpec) -> bool:
    """Returns whether a policy draws its actions, and does not take the best."""
    assert algo.outputs is not None
    obs = spaces.elements(spec.observation, 1)
    found = jax.eval_shape(lambda key, obs: algo.outputs(algo.init(key), obs), jax.random.key(0), obs)  # type: ignore[misc]  # not None
    return "distribution" in found


def along(algo: Algo, spec: EnvSpec, weights: PyTree, store: EpisodeStore, asked: Asked, key: Key) -> Probabilities:
    """Runs a policy along each row of a store, final observations too.

    Its memory, where it has one, begins anew with each episode and goes on by the observations alone.

    Args:
      algo, weights: the policy.
      spec: of one environment, as it sees it.
      store: in its spaces.
      asked: the outputs to return.
      key: of the actions that are drawn.
    Raises:
      InputError: the policy's actions have no probability, and that was asked for.
    """
    program, found = _program(algo, spec, asked), None
    remembers = bool(jax.tree.leaves(getattr(algo.carry(1), "memory", ())))
    for number, (at, valid) in enumerate(_episodes(store) if remembers else _rows(store)):
        obs, action = jax.tree.map(lambda x, at=at: x[at], (store.obs, store.action))
        carry = jax.tree.map(lambda x, num=at.shape[1]: jnp.broadcast_to(x, (num, *x.shape[1:])), algo.carry(1))
        part = program(weights, obs, action, carry, jax.random.fold_in(key, number))
        part = jax.tree.map(np.asarray, part)
        if found is None:
            found = jax.tree.map(lambda x: np.empty((store.num_rows, *x.shape[2:]), x.dtype), part)
        for whole, x in zip(jax.tree.leaves(found), jax.tree.leaves(part), strict=True):
            whole[at[valid]] = x[valid]
    assert found is not None
    return found


def _rows(store: EpisodeStore) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields rows side by side: their numbers [1, B], and whether each is not a repetition that fills a block."""
    size = min(_ROWS, store.num_rows)
    for first in range(0, store.num_rows, size):
        at = np.arange(first, first + size)[None]
        yield np.minimum(at, store.num_rows - 1), at < store.num_rows


def _episodes(store: EpisodeStore) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields episodes side by side [T, B], as `_rows` yields rows; the longest first, so that lengths are alike."""
    lengths = store.lengths() + 1
    order = np.argsort(-lengths, kind="stable")
    size = max(1, min(store.num_episodes, _ROWS // int(lengths.max())))
    for first in range(0, store.num_episodes, size):
        which = order[first : first + size]
        steps = 1 << int(lengths[which].max() - 1).bit_length()  # few shapes: powers of two
        column = np.concatenate([which, np.repeat(which[-1:], size - len(which))])
        step = np.arange(steps)[:, None]
        valid = (step < lengths[column]) & (np.arange(size) < len(which))
        yield store.offsets[:-1][column] + np.minimum(step, lengths[column] - 1), valid


@functools.cache
def _program(algo: Algo, spec: EnvSpec, asked: Asked) -> Any:
    """Makes (weights, obs [T, B, *], actions [T, B, *], carry, key) -> Probabilities [T, B, ...]; jitted."""

    def step(weights: PyTree, carry: PyTree, row: tuple[PyTree, PyTree, Key]) -> tuple[PyTree, Probabilities]:
        obs, action, key = row
        dist, after = None, None
        if asked.log_prob or isinstance(spec.action, Discrete):
            assert algo.choice is not None
            dist, after = algo.choice(weights, obs, carry, asked.explore)
        log_prob = dist.log_prob(action) if asked.log_prob and dist is not None else None
        choices = None
        if asked.choices and dist is not None and isinstance(spec.action, Discrete):
            choices = jax.nn.softmax(dist.logits)
        elif asked.choices:
            num = asked.choices if asked.explore else 1
            drawn = jax.vmap(lambda k: algo.act(weights, obs, carry, k, asked.explore))(jax.random.split(key, num))
            choices = jnp.swapaxes(jax.vmap(lambda action: fqe.features(spec.action, action))(drawn.action), 0, 1)
            after = jax.tree.map(lambda x: x[0], drawn.carry) if after is None else after
        return after, Probabilities(log_prob, choices)

    def probabilities(weights: PyTree, obs: PyTree, action: PyTree, carry: PyTree, key: Key) -> Probabilities:
        keys = jax.random.split(key, jax.tree.leaves(obs)[0].shape[0])
        return jax.lax.scan(functools.partial(step, weights), carry, (obs, action, keys))[1]

    return jax.jit(probabilities)
