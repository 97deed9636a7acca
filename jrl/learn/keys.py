"""Random keys of a run, derived from the seed, a role and a counter.

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
    """Returns the key of a role at a counter, for example the number of the iteration or evaluation."""
    root = jax.random.key(seed) if isinstance(seed, int | np.integer) else seed
    return jax.random.fold_in(jax.random.fold_in(root, role), counter)


def role_keys(root: Key, roles: Sequence[Role], counters: Array) -> Key:
    """Returns `role_key` of each role and counter [K]: [R, K]. Separate calls would compile a loop each."""
    of_roles = jax.vmap(jax.random.fold_in, (None, 0))(root, jnp.asarray(roles, jnp.uint32))
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(of_roles, counters)


def vector_key(key: Key, vector, vectors: int) -> Key:
    """Returns the key of vector `vector` of environments, on any device; with a single vector `key` itself."""
    return key if vectors == 1 else jax.random.fold_in(key, vector)
