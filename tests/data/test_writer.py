"""Files of a data set that grows: their sizes, numbers and what is in them."""

import numpy as np
import pytest

from jrl import data
from jrl.data import Episode
from jrl.data.writer import Writer
from jrl.errors import InputError
from jrl.types import Box, Discrete

OBSERVATION, ACTION = Box((3,)), Discrete(2)


def episode(seed, steps=5):
    rng = np.random.default_rng(seed)
    return Episode(
        obs=rng.normal(size=(steps + 1, 3)).astype(np.float32),
        action=rng.integers(0, 2, steps).astype(np.int32),
        reward=rng.normal(size=steps).astype(np.float32),
        terminated=seed % 2 == 0,
        truncated=False,
        columns={"log_prob": rng.normal(size=steps).astype(np.float32)},
        labels={"kind": f"policy {seed}"},
    )


def test_episodes_come_back_in_their_order_from_files_of_the_size(tmp_path):
    """An episode of 5 steps has 6 * 12 + 5 * 12 = 132 bytes, so that 400 bytes hold three of them."""
    given = [episode(seed) for seed in range(8)]
    with Writer(tmp_path / "out", OBSERVATION, ACTION, max_file_mb=400 / 2**20, meta={"env": "Here-v0"}) as writer:
        for e in given[:7]:
            writer.add(e)
        assert [p.name for p in writer.files] == ["output-00000.npz", "output-00001.npz"]
    assert [data.read(p).num_episodes for p in writer.files] == [3, 3, 1]
    with Writer(tmp_path / "out", OBSERVATION, ACTION) as more:
        more.add(given[7])
    assert [p.name for p in more.files] == ["output-00003.npz"]
    store = data.read(tmp_path / "out")
    assert store.checksum() == data.of_episodes(OBSERVATION, ACTION, given).checksum()
    assert store.labels["kind"].tolist() == [f"policy {seed}" for seed in range(8)]
    assert data.read(writer.files[0]).meta["env"] == "Here-v0"


def test_a_larger_episode_has_a_file_of_its_own(tmp_path):
    with Writer(tmp_path, OBSERVATION, ACTION, max_file_mb=400 / 2**20) as writer:
        for seed, steps in enumerate([5, 100, 5]):
            writer.add(episode(seed, steps))
    assert [data.read(p).num_steps for p in writer.files] == [5, 100, 5]


def test_what_is_wrong_is_told_at_once_and_the_rest_is_kept(tmp_path):
    with Writer(tmp_path, OBSERVATION, ACTION) as writer:
        writer.add(episode(0))
        with pytest.raises(InputError, match=r"episode 1: observations: expected the shape .*, got \(5, 3\)"):
            writer.add(episode(1).replace(obs=np.zeros((5, 3), np.float32)))
        with pytest.raises(InputError, match=r"episode 1: its columns are \[\]"):
            writer.add(episode(1).replace(columns={}))
    assert data.read(tmp_path).num_episodes == 1


def test_a_writer_that_never_got_an_episode_writes_no_file(tmp_path):
    with Writer(tmp_path / "deep" / "out", OBSERVATION, ACTION):
        pass
    assert list((tmp_path / "deep" / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "npy"}, "data format 'npy': expected one of jrl"),
        ({"max_file_mb": 0}, "max_file_mb: expected more than 0, got 0"),
    ],
)
def test_a_writer_that_cannot_be(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        Writer(tmp_path, OBSERVATION, ACTION, **options)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a part of its path is a file"):
        Writer(tmp_path / "file" / "out", OBSERVATION, ACTION)
