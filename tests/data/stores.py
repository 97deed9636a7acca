"""Data sets of a few episodes for the tests of files, with every kind of end, column, label and space."""

import dataclasses

import jax
import numpy as np

from jrl import data
from jrl.data import Episode
from jrl.types import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

FLAT = Box((3,), "float32"), Box((2,), "float32", -1.0, 1.0)
CHOICES = Box((4,), "float64", -5.0, (1.0, 2.0, 3.0, 4.0)), Discrete(3, "int64")
NESTED = (
    Dict((("goal", Tuple((Discrete(4), MultiBinary((2,))))), ("camera", Box((32, 32, 3), "uint8", 0.0, 255.0)))),
    Dict((("move", MultiDiscrete((2, 3), "int64")), ("aim", Box((1,), "float32", -1.0, 1.0)))),
)
# (terminated, truncated) and steps of each episode
ENDS = [(True, False), (False, True), (False, False), (True, True), (False, False)]
LENGTHS = [3, 1, 4, 2, 5]


def draw(rng, space, rows):
    """Rows [rows, *] of a space."""
    match space:
        case Dict():
            return {name: draw(rng, part, rows) for name, part in space.items}
        case Tuple():
            return tuple(draw(rng, part, rows) for part in space.items)
        case Discrete():
            return rng.integers(0, space.n, rows).astype(space.dtype)
        case MultiDiscrete():
            return rng.integers(0, space.nvec, (rows, len(space.nvec))).astype(space.dtype)
        case MultiBinary():
            return rng.integers(0, 2, (rows, *space.shape)).astype(space.dtype)
    if space.dtype == "uint8":
        return rng.integers(0, 256, (rows, *space.shape)).astype(space.dtype)
    return rng.uniform(-1, 1, (rows, *space.shape)).astype(space.dtype)


def episodes(spaces, seed=0, **more):
    """An episode of random numbers for each of ENDS."""
    rng = np.random.default_rng(seed)
    return [
        Episode(
            obs=draw(rng, spaces[0], steps + 1),
            action=draw(rng, spaces[1], steps),
            reward=rng.normal(size=steps).astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            columns={"log_prob": -rng.random(steps).astype(np.float32), "state": rng.normal(size=(steps, 2))},
            labels={"policy": f"no. {i}", "seed": 10 + i},
            **more,
        )
        for i, ((terminated, truncated), steps) in enumerate(zip(ENDS, LENGTHS, strict=True))
    ]


def store(spaces=FLAT, seed=0, **meta):
    """The data set of `episodes`."""
    return data.of_episodes(*spaces, episodes(spaces, seed), meta={"env": "CartPole-v1", **meta})


def same(a, b):
    """Asserts that two stores hold the same, to the bit and the dtype, wherever they were read from."""
    assert (a.observation, a.action_space) == (b.observation, b.action_space)
    kind = lambda s: jax.tree.map(lambda x: (x.dtype, x.shape), (s.obs, s.action, s.reward, s.columns))
    assert kind(a) == kind(b)
    assert a.checksum() == b.checksum() and list(a.columns) == sorted(b.columns)
    for name in ("offsets", "terminated", "truncated"):
        assert np.array_equal(getattr(a, name), getattr(b, name))
    assert {k: v.tolist() for k, v in a.labels.items()} == {k: v.tolist() for k, v in b.labels.items()}
    meta = lambda s: {k: v for k, v in s.meta.items() if k != "path"}
    assert meta(a) == meta(b) and a.notes == b.notes


def without_columns(store, *names):
    """The store without some of its columns."""
    return dataclasses.replace(store, columns={k: v for k, v in store.columns.items() if k not in names})
