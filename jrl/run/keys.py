"""Random keys of a run: every number follows from the seed, what it is for, and a counter.

role_key(seed, role, counter) = fold_in(fold_in(key(seed), role), counter)
"""

import enum

import jax
import numpy as np

from jrl.types import Key


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


def vector_key(key: Key, vector, vectors: int) -> Key:
    """Returns the key of one of several vectors of environments, wherever it steps; a single one has `key` itself."""
    return key if vectors == 1 else jax.random.fold_in(key, vector)
