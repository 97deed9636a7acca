"""Observations on their way: what arrives is what was sent, in fewer bytes, each frame once."""

import importlib.util
import pickle

import jax
import numpy as np
import pytest

from jrl.rollout import compression
from jrl.types import Rollout

T, B, S, SIDE = 24, 3, 4, 60


def frames():
    """[T + 1, B, S, SIDE, SIDE] u8: stacks of frames of noise, in which each frame is new."""
    new = np.random.default_rng(0).integers(0, 256, (T + S, B, SIDE, SIDE), np.uint8)
    return np.stack([new[i : i + T + 1] for i in range(S)], 2)


TREES = {
    "floats": np.random.default_rng(2).normal(size=(T + 1, B, 17)).astype(np.float32),
    "tree": {"a": np.zeros((T + 1, B, 40), np.float32), "b": np.full((T + 1, B), np.nan, np.float32)},
    "one step": np.arange(2 * B, dtype=np.int32).reshape(2, B),
    "empty": np.zeros((T + 1, B, 0), np.float32),
    "stacks": frames(),
    "stacks, channels last": np.moveaxis(frames(), 2, -1),
}


@pytest.mark.parametrize("codec", ["zlib", "lz4"])
def test_what_arrives_is_what_was_sent(codec):
    pytest.importorskip("lz4" if codec == "lz4" else "zlib")
    for name, obs in TREES.items():
        flat = np.zeros(jax.tree.leaves(obs)[0][:-1].shape[:2], np.float32)
        rows, last = jax.tree.map(lambda x: x[:-1], obs), jax.tree.map(lambda x: x[-1], obs)
        sent = Rollout(rows, last, flat, flat, flat > 0, flat > 0, flat == 0, flat[0] > 0, {"log_prob": flat}, ())
        packed = pickle.loads(pickle.dumps(compression.pack(sent, codec)))
        found = compression.unpack(packed, sent.obs, codec)
        assert jax.tree.structure(found) == jax.tree.structure(sent)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(sent), strict=True):
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        if name == "stacks":  # no byte of a frame can be told from another, and each frame is sent once
            assert compression.num_bytes(packed) < 0.4 * compression.num_bytes(sent)


def test_the_codec_is_one_that_is_there(monkeypatch):
    assert compression.codec() in ("zlib", "lz4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compression.codec() == "zlib"
