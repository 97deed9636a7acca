"""Random keys of a run: every number follows from the seed, what it is for, and a counter.

role_key(seed, role, counter) = fold_in(fold_in(key(seed), role), counter)
"""

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jrl.types import Array, Key


class Role(enum.IntEnum):
    """Purpose of a key; each role has its own stream."""

    INIT = 0
    ENV = 1
    COLLECT = 2
    UPDATE = 3
    EVALUATE = 4
    VALIDATE = 5
    DATA = 6
    ESTIMATE = 7


def role_key(seed: int | Key, role: Role, counter=0) -> Key:
    """Returns the key of one role at one count (of iterations, of evaluations)."""
    root = jax.random.key(seed) if isinstance(seed, int | np.integer) else seed
    return jax.random.fold_in(jax.random.fold_in(root, role), counter)


def role_keys(root: Key, roles: Sequence[Role], counters: Array) -> Key:
    """Returns `role_key` of each role at each count [K], side by side: [R, K]. One by one each is a loop to compile."""
    of_roles = jax.vmap(jax.random.fold_in, (None, 0))(root, jnp.asarray(roles, jnp.uint32))
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(of_roles, counters)


def vector_key(key: Key, vector, vectors: int) -> Key:
    """Returns the key of one of several vectors of environments, wherever it steps; a single one has `key` itself."""
    return key if vectors == 1 else jax.random.fold_in(key, vector)
