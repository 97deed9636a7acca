"""Hyper-parameter dataclasses are pytrees of their floats; spaces are static values."""

import dataclasses
import math

import jax
import numpy as np

from jrl.fields.bounds import Schedule
from jrl.learn.program import Clock, StepInfo
from jrl.types import Box, Discrete, EnvSpec, Episodes, MultiDiscrete, hyperparams


@hyperparams
class Config:
    lr: Schedule = 3e-4
    gamma: float = 0.99
    clip: float | None = None
    epochs: int = 4
    normalize: bool = True
    kind: str = "a"
    size: int | None = 7


def test_floats_are_leaves_and_the_rest_is_static():
    assert jax.tree.leaves(Config()) == [3e-4, 0.99]
    assert jax.tree.leaves(Config(lr=((0, 1.0), (10, 0.0)), clip=0.5)) == [0, 1.0, 10, 0.0, 0.99, 0.5]
    doubled = jax.tree.map(lambda x: 2 * x, Config())
    assert doubled == Config(lr=6e-4, gamma=1.98)
    same, other = (jax.tree.structure(Config(epochs=n)) for n in (4, 5))
    assert same == jax.tree.structure(Config(lr=1.0))
    assert same != other  # a static field recompiles


def test_configs_vmap():
    seen = []

    def fn(cfg):
        seen.append((cfg.epochs, cfg.kind, cfg.size))
        return cfg.lr * cfg.gamma

    batch = dataclasses.replace(Config(), lr=np.array([1.0, 2.0], np.float32), gamma=np.array([3.0, 4.0], np.float32))
    np.testing.assert_array_equal(jax.vmap(fn)(batch), [3.0, 8.0])
    assert seen == [(4, "a", 7)]


def test_spaces_are_hashable_and_know_their_shape():
    spaces = [
        Box((2, 2)),
        Box((2, 2), low=-1.0),
        Discrete(3),
        Discrete(4),
        MultiDiscrete((2, 3)),
        Box((3, 9, 9), "uint8"),
    ]
    specs = {EnvSpec(space, space, 4) for space in spaces}
    assert len(specs) == len(spaces)
    assert EnvSpec(Box((2, 2)), Discrete(3), 4) == EnvSpec(Box((2, 2)), Discrete(3), 4)
    assert [space.shape for space in spaces[2:5]] == [(), (), (2,)]


def test_bounds_of_a_box():
    low, high = Box((2, 2), low=(0.0, 1.0, 2.0, 3.0), high=5.0).bounds()
    np.testing.assert_array_equal(low, [[0, 1], [2, 3]])
    np.testing.assert_array_equal(high, np.full((2, 2), 5.0))
    low, high = Box((3,)).bounds()
    assert (low == -math.inf).all()
    assert (high == math.inf).all()


def test_env_steps_after_counts_all_devices_without_wrapping():
    zero = np.zeros(())
    episodes = Episodes(zero, zero, zero, zero, zero, np.full((4,), 2**30, np.int32), zero, zero)
    info = StepInfo(None, {}, episodes, iteration=3, clock=Clock(10), timers=None)
    assert info.env_steps_after() == 10 + 4 * 2**30
