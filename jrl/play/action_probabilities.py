"""Judgement of a policy along recorded episodes: the probabilities that estimators ask for."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.algos import fqe
from jrl.data import EpisodeStore
from jrl.types import Algo, Array, Discrete, EnvSpec, Key, PyTree

_ROWS = 8192  # that are looked at together where no memory goes from one to the next


class Judged(NamedTuple):
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


def along(algo: Algo, spec: EnvSpec, actor: PyTree, store: EpisodeStore, asked: Asked, key: Key) -> Judged:
    """Runs a policy along each row of a store, final observations too.

    Its memory, where it has one, begins anew with each episode and goes on by the observations alone.

    Args:
      algo, actor: the policy.
      spec: of one environment, as it sees it.
      store: in its spaces.
      asked: the outputs to return.
      key: of the actions that are drawn.
    Raises:
      InputError: the policy's actions have no probability, and that was asked for.
    """
    program = _program(algo, spec, asked)
    if jax.tree.leaves(_memory(algo)):
        return _by_episode(program, algo, actor, store, key)
    return _by_row(program, algo, actor, store, key)


def _memory(algo: Algo) -> PyTree:
    one = algo.carry(1)
    return getattr(one, "memory", ())


def _start(algo: Algo, num: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape[1:])), algo.carry(1))


@functools.cache
def _program(algo: Algo, spec: EnvSpec, asked: Asked) -> Any:
    """Makes (actor, obs [T, B, *], actions [T, B, *], carry, key) -> Judged [T, B, ...]; jitted."""

    def step(actor: PyTree, carry: PyTree, row: tuple[PyTree, PyTree, Key]) -> tuple[PyTree, Judged]:
        obs, action, key = row
        dist, after = None, None
        if asked.log_prob or isinstance(spec.action, Discrete):
            assert algo.choice is not None
            dist, after = algo.choice(actor, obs, carry, asked.explore)
        log_prob = dist.log_prob(action) if asked.log_prob and dist is not None else None
        choices = None
        if asked.choices and dist is not None and isinstance(spec.action, Discrete):
            choices = jax.nn.softmax(dist.logits)
        elif asked.choices:
            num = asked.choices if asked.explore else 1
            drawn = jax.vmap(lambda k: algo.act(actor, obs, carry, k, asked.explore))(jax.random.split(key, num))
            choices = jnp.swapaxes(jax.vmap(lambda action: fqe.features(spec.action, action))(drawn.action), 0, 1)
            after = jax.tree.map(lambda x: x[0], drawn.carry) if after is None else after
        return after, Judged(log_prob, choices)

    def judged(actor: PyTree, obs: PyTree, action: PyTree, carry: PyTree, key: Key) -> Judged:
        keys = jax.random.split(key, jax.tree.leaves(obs)[0].shape[0])
        return jax.lax.scan(functools.partial(step, actor), carry, (obs, action, keys))[1]

    return jax.jit(judged)


def _by_row(program: Any, algo: Algo, actor: PyTree, store: EpisodeStore, key: Key) -> Judged:
    rows, size = store.num_rows, min(_ROWS, store.num_rows)
    carry, found = _start(algo, size), []
    for number, first in enumerate(range(0, rows, size)):
        at = np.minimum(np.arange(first, first + size), rows - 1)  # the last rows are repeated: one shape for all
        take = lambda tree, at=at: jax.tree.map(lambda x: x[at][None], tree)
        part = program(actor, take(store.obs), take(store.action), carry, jax.random.fold_in(key, number))
        found.append(jax.tree.map(lambda x: np.asarray(x)[0], part))
    return jax.tree.map(lambda *x: np.concatenate(x)[:rows], *found)


def _by_episode(program: Any, algo: Algo, actor: PyTree, store: EpisodeStore, key: Key) -> Judged:
    """Runs episodes side by side, the longest first, so that those together are about as long."""
    lengths = store.lengths() + 1
    order = np.argsort(-lengths, kind="stable")
    size = max(1, min(store.num_episodes, _ROWS // int(lengths.max())))
    found: list[Any] = [None] * store.num_episodes
    for number, first in enumerate(range(0, store.num_episodes, size)):
        which = order[first : first + size]
        steps = 1 << int(lengths[which].max() - 1).bit_length()  # few shapes: powers of two
        column = np.concatenate([which, np.repeat(which[-1:], size - len(which))])
        step = np.minimum(np.arange(steps)[:, None], lengths[column][None] - 1)
        at = store.offsets[:-1][column][None] + step
        take = lambda tree, at=at: jax.tree.map(lambda x: x[at], tree)
        part = program(actor, take(store.obs), take(store.action), _start(algo, size), jax.random.fold_in(key, number))
        part = jax.tree.map(np.asarray, part)
        for column_number, e in enumerate(which):
            found[e] = jax.tree.map(lambda x, c=column_number, n=lengths[e]: x[:n, c], part)
    return jax.tree.map(lambda *x: np.concatenate(x), *found)
