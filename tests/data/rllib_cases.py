"""Stores and files that the tests of RLlib's formats share."""

import base64
import json
from pathlib import Path

import lz4.frame
import numpy as np

from jrl.data import Episode, EpisodeStore, of_episodes
from jrl.types import Box, Dict, Discrete

FILES = Path(__file__).parent / "files"
LENGTHS = (3, 4, 1, 2)


def store(seed=0, labels=lambda e: {}, **dtypes) -> EpisodeStore:
    """Four episodes of random numbers, of which 0 and 2 end, 1 is truncated and 3 is cut."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(dtypes.get("obs", np.float32))
    episodes = [
        Episode(
            obs={"image": rng.integers(0, 256, (t + 1, 2, 2)).astype(np.uint8), "state": normal(t + 1, 3)},
            action=rng.integers(0, 3, t).astype(dtypes.get("action", np.int32)),
            reward=rng.normal(size=t).astype(dtypes.get("reward", np.float32)),
            terminated=e % 2 == 0,
            truncated=e == 1,
            columns={"log_prob": -rng.random(t).astype(np.float32), "vf_preds": rng.normal(size=(t, 2))},
            labels=labels(e),
        )
        for e, t in enumerate(LENGTHS)
    ]
    image = Box((2, 2), "uint8", 0.0, 255.0)
    space = Dict((("image", image), ("state", Box((3,), dtypes.get("obs", np.float32).__name__))))
    return of_episodes(space, Discrete(3, dtypes.get("action", np.int32).__name__), episodes)


def batch(**columns):
    """A SampleBatch of three steps of an episode that ends, with other columns as given; None: without it."""
    given = {
        "type": "SampleBatch",
        "obs": [[0.0], [1.0], [2.0]],
        "new_obs": [[1.0], [2.0], [3.0]],
        "actions": [0, 1, 0],
        "rewards": [1.0, 2.0, 3.0],
        "terminateds": [False, False, True],
        "truncateds": [False, False, False],
        "eps_id": [7, 7, 7],
        "t": [0, 1, 2],
    }
    return {k: v for k, v in {**given, **columns}.items() if v is not None}


def lines(path, *batches):
    """A file of lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in batches))
    return path


def packed(pickle: bytes) -> str:
    """A pickle of any kind as RLlib packs columns."""
    return base64.b64encode(lz4.frame.compress(pickle)).decode()


def same(a: EpisodeStore, b: EpisodeStore):
    """Rows and ends are the same to the bit, names and dtypes as well."""
    assert a.checksum() == b.checksum()
    assert a.columns.keys() == b.columns.keys()
    assert a.reward.dtype == b.reward.dtype


def mutated(whole, rng, count):
    """Contents with a few bytes changed, cut out or doubled."""
    for _ in range(count):
        content = bytearray(whole[rng.integers(len(whole))])
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(content)))
            match rng.integers(3):
                case 0:
                    content[at] = int(rng.integers(256))
                case 1:
                    del content[at : at + int(rng.integers(1, 9))]
                case 2:
                    content[at:at] = content[at : at + int(rng.integers(1, 9))]
            if not content:
                break
        yield bytes(content)
