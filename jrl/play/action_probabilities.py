"""Probabilities that a policy gives to the actions of recorded episodes, for off-policy estimators."""

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

_ROWS = 8192  # rows of one call, if the policy has no memory


class Probabilities(NamedTuple):
    """Outputs of a policy for each row of a store; numpy."""

    log_prob: Array | None  # [R] f32, of the recorded actions; None: not requested
    choices: Array | None  # [R, A] or [R, K, D] f32, see `fqe`; None: not requested


class ProbabilityRequest(NamedTuple):
    """Requested outputs; static."""

    explore: bool  # the policy as it explores; False: its best actions
    log_prob: bool
    choices: int  # number of actions drawn at each observation, unless actions are Discrete; 0: none


def is_stochastic(algo: Algo, spec: EnvSpec) -> bool:
    """Returns whether a policy samples its actions from a distribution."""
    assert algo.outputs is not None
    obs = spaces.elements(spec.observation, 1)
    outputs = jax.eval_shape(lambda key, obs: algo.outputs(algo.init(key), obs), jax.random.key(0), obs)  # type: ignore[misc]  # not None
    return "distribution" in outputs


def compute_probabilities(
    algo: Algo, spec: EnvSpec, weights: PyTree, store: EpisodeStore, request: ProbabilityRequest, key: Key
) -> Probabilities:
    """Applies a policy to each row of a store, final observations included.

    A recurrent state is reset at each episode's start.

    Args:
      algo, weights: the policy.
      spec: spec of one environment, as the policy sees it.
      store: episodes in the policy's spaces.
      request: the outputs to return.
      key: key of drawn actions.
    Raises:
      InputError: `log_prob` is requested, and the policy's actions have no probability.
    """
    program, outputs = _build_program(algo, spec, request), None
    has_memory = bool(jax.tree.leaves(getattr(algo.carry(1), "memory", ())))
    for number, (index, valid) in enumerate(_iterate_episodes(store) if has_memory else _iterate_rows(store)):
        obs, action = jax.tree.map(lambda x, index=index: x[index], (store.obs, store.action))
        carry = jax.tree.map(lambda x, num=index.shape[1]: jnp.broadcast_to(x, (num, *x.shape[1:])), algo.carry(1))
        part = program(weights, obs, action, carry, jax.random.fold_in(key, number))
        part = jax.tree.map(np.asarray, part)
        if outputs is None:
            outputs = jax.tree.map(lambda x: np.empty((store.num_rows, *x.shape[2:]), x.dtype), part)
        for whole, x in zip(jax.tree.leaves(outputs), jax.tree.leaves(part), strict=True):
            whole[index[valid]] = x[valid]
    assert outputs is not None
    return outputs


def _iterate_rows(store: EpisodeStore) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields blocks of row numbers [1, B] i64, and which entries [1, B] bool are not padding."""
    size = min(_ROWS, store.num_rows)
    for first in range(0, store.num_rows, size):
        index = np.arange(first, first + size)[None]
        yield np.minimum(index, store.num_rows - 1), index < store.num_rows


def _iterate_episodes(store: EpisodeStore) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields blocks of episodes [T, B], as `_iterate_rows`; the longest first, so that a block has similar lengths."""
    lengths = store.lengths() + 1
    order = np.argsort(-lengths, kind="stable")
    size = max(1, min(store.num_episodes, _ROWS // int(lengths.max())))
    for first in range(0, store.num_episodes, size):
        chosen = order[first : first + size]
        steps = 1 << int(lengths[chosen].max() - 1).bit_length()  # few shapes: powers of two
        column = np.concatenate([chosen, np.repeat(chosen[-1:], size - len(chosen))])
        step = np.arange(steps)[:, None]
        valid = (step < lengths[column]) & (np.arange(size) < len(chosen))
        yield store.offsets[:-1][column] + np.minimum(step, lengths[column] - 1), valid


@functools.cache
def _build_program(algo: Algo, spec: EnvSpec, request: ProbabilityRequest) -> Any:
    """Returns jitted (weights, obs [T, B, *], actions [T, B, *], carry, key) -> Probabilities [T, B, ...]."""

    def step(weights: PyTree, carry: PyTree, row: tuple[PyTree, PyTree, Key]) -> tuple[PyTree, Probabilities]:
        obs, action, key = row
        dist, after = None, None
        if request.log_prob or isinstance(spec.action, Discrete):
            assert algo.choice is not None
            dist, after = algo.choice(weights, obs, carry, request.explore)
        log_prob = dist.log_prob(action) if request.log_prob and dist is not None else None
        choices = None
        if request.choices and dist is not None and isinstance(spec.action, Discrete):
            choices = jax.nn.softmax(dist.logits)
        elif request.choices:
            num = request.choices if request.explore else 1
            drawn = jax.vmap(lambda k: algo.act(weights, obs, carry, k, request.explore))(jax.random.split(key, num))
            choices = jnp.swapaxes(jax.vmap(lambda action: fqe.features(spec.action, action))(drawn.action), 0, 1)
            after = jax.tree.map(lambda x: x[0], drawn.carry) if after is None else after
        return after, Probabilities(log_prob, choices)

    def probabilities(weights: PyTree, obs: PyTree, action: PyTree, carry: PyTree, key: Key) -> Probabilities:
        keys = jax.random.split(key, jax.tree.leaves(obs)[0].shape[0])
        return jax.lax.scan(functools.partial(step, weights), carry, (obs, action, keys))[1]

    return jax.jit(probabilities)
