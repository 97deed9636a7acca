"""Observations on their way: what arrives is what was sent, in fewer bytes, each frame once."""

import importlib.util
import pickle

import jax
import numpy as np
import pytest

from jrl.rollout import compression
from jrl.types import Rollout

T, B, S, SIDE = 24, 3, 4, 20


def rollout_of(obs):
    """`obs` [T + 1, B, *], a tree."""
    length, columns = jax.tree.leaves(obs)[0].shape[:2]
    flat = np.zeros((length - 1, columns), np.float32)
    no = flat > 0
    first, last = (jax.tree.map(part, obs) for part in (lambda x: x[:-1], lambda x: x[-1]))
    return Rollout(first, last, flat.astype(np.int32), flat, no, no, ~no, no[0], {"log_prob": flat}, ())


def frames(rng, noise=False):
    """[T + 1, B, S, SIDE, SIDE] u8: stacks of a moving square, or of noise; column b begins anew at step 5 + b."""
    obs = np.zeros((T + 1, B, S, SIDE, SIDE), np.uint8)
    for b in range(B):
        stack = None
        for t in range(T + 1):
            image = rng.integers(0, 256, (SIDE, SIDE), np.uint8) if noise else np.full((SIDE, SIDE), 87, np.uint8)
            image[t % SIDE, : 4 + b] = 236
            new = stack is None or t == 5 + b
            stack = np.stack([image] * S) if new else np.concatenate([stack[1:], image[None]])
            obs[t, b] = stack
    return obs


def there_and_back(obs, codec="zlib"):
    """The packed rollout; what arrives is compared."""
    sent = rollout_of(obs)
    packed = pickle.loads(pickle.dumps(compression.pack(sent, codec)))
    found = compression.unpack(packed, sent.obs)
    assert jax.tree.structure(found) == jax.tree.structure(sent)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(sent), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.view(np.uint8) if x.dtype == np.float32 else x, _bits(y))
    return sent, packed


def _bits(x):
    return x.view(np.uint8) if x.dtype == np.float32 else x


@pytest.mark.parametrize("channels_last", [False, True])
def test_each_frame_of_a_stack_is_sent_once(channels_last):
    """Even where no byte of a frame can be told from another: all but a quarter is gone, resets are not lost."""
    obs = frames(np.random.default_rng(0), noise=True)
    sent, packed = there_and_back(np.moveaxis(obs, 2, -1).copy() if channels_last else obs)
    leaf = packed.obs.leaves[0]
    assert leaf.axis == (-1 if channels_last else 0)
    # of each column row 0 and the row of its second episode do not follow from the row before
    expected = np.ones((T + 1, B), bool)
    expected[0] = False
    for b in range(B):
        expected[5 + b, b] = False
    np.testing.assert_array_equal(leaf.follows, expected)
    assert leaf.older.shape == (2 * B, S - 1, SIDE, SIDE)
    assert compression.num_bytes(packed) < 0.4 * compression.num_bytes(sent)


def test_frames_that_resemble_each_other_take_next_to_nothing():
    sent, packed = there_and_back(frames(np.random.default_rng(0)))
    assert compression.num_bytes(packed) < compression.num_bytes(sent) / 50


def test_a_stack_that_is_off_by_one_bit_is_sent_whole():
    obs = frames(np.random.default_rng(0))
    obs[9, 1, 0, 3, 3] ^= 1
    _, packed = there_and_back(obs)
    follows = packed.obs.leaves[0].follows
    # row 9 is not row 8 moved on; row 10 follows from it, for the frame with the bit is no part of it
    assert not follows[9, 1]
    assert follows[10, 1]


@pytest.mark.parametrize(
    "obs",
    [
        np.random.default_rng(1).integers(0, 256, (T + 1, B, 3, SIDE, SIDE), np.uint8),  # no stacks, no pattern
        np.random.default_rng(2).normal(size=(T + 1, B, 17)).astype(np.float32),
        {"a": np.zeros((T + 1, B, 40), np.float32), "b": np.full((T + 1, B), np.nan, np.float32)},
        np.arange(2 * B, dtype=np.int32).reshape(2, B),  # one step, and so few bytes that nothing is tried
        np.zeros((2, B, S, SIDE, SIDE), np.uint8),
        np.zeros((T + 1, B, 0), np.float32),
    ],
    ids=["noise", "floats", "tree", "integers", "one step", "empty"],
)
def test_others_come_back_as_well(obs):
    sent, packed = there_and_back(obs)
    # at most as much as before, but for a flag per row
    assert compression.num_bytes(packed) <= compression.num_bytes(sent) + (T + 1) * B


def test_the_codec_is_one_that_is_there(monkeypatch):
    assert compression.codec() in ("zlib", "lz4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compression.codec() == "zlib"


def test_lz4():
    pytest.importorskip("lz4")
    _, packed = there_and_back(frames(np.random.default_rng(0)), "lz4")
    assert packed.obs.leaves[0].newest.codec == "lz4"
