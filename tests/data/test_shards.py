"""jrl's own files: round trips, several as one, and files that are damaged."""

import dataclasses
import io
import zipfile

import numpy as np
import pytest
import stores

from jrl import data
from jrl.errors import InputError
from jrl.types import Box, Dict


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("spaces", [stores.FLAT, stores.CHOICES, stores.NESTED], ids=["flat", "choices", "nested"])
def test_to_the_bit(tmp_path, spaces, compress):
    given = dataclasses.replace(stores.store(spaces, actions="normalized"), notes=("as it was found",))
    stores.same(given, data.read(data.write(given, tmp_path / "x.npz", compress=compress)))


def test_names_that_are_alike_are_kept_apart(tmp_path):
    two = Dict((("a/b", Box((2,), "float32")), ("a", Dict((("b", Box((3,), "float32")),)))))
    given = stores.store((two, stores.FLAT[1]))
    numbers = given.columns["state"]
    columns = {"x": {"": numbers + 2, "y": numbers + 1}, "x/y": numbers}
    given = dataclasses.replace(given, columns=columns)
    stores.same(given, data.read(data.write(given, tmp_path / "x.npz")))
    nameless = dataclasses.replace(stores.store(), columns={"x": {"": numbers, "y": numbers}})
    for bad, words in ((given, "are one path in HDF5"), (nameless, "HDF5 cannot store the name ''")):
        with pytest.raises(InputError, match=f"{words}.*rename it, or write the format jrl"):
            data.write(bad, tmp_path / "x-v0", format="minari")
        assert not (tmp_path / "x-v0").exists()
    slash = dataclasses.replace(stores.store(), columns={"x/y": numbers})
    with pytest.raises(InputError, match="HDF5 cannot store the name 'x/y'"):
        data.write(slash, tmp_path / "x.hdf5", format="d4rl")


def test_several_files_are_one_data_set(tmp_path):
    given = stores.store(stores.NESTED)
    for i in range(3):
        data.write(given.take(np.arange(i, i + 2 + (i == 2))), tmp_path / "a" / f"{i}.npz")
    stores.same(given.take(np.array([0, 1, 1, 2, 2, 3, 4])), data.read(tmp_path / "a"))


def test_files_of_other_dtypes_and_columns_go_together(tmp_path):
    given = stores.store()
    data.write(given, tmp_path / "a" / "0.npz")
    other = dataclasses.replace(stores.without_columns(given, "state"), reward=given.reward.astype(np.float64))
    data.write(other, tmp_path / "a" / "1.npz")
    found = data.read(tmp_path / "a")
    assert found.num_episodes == 10 and list(found.columns) == ["log_prob"] and found.reward.dtype == np.float64
    assert found.notes == ("the column state was left out: some files lack it",)
    assert np.array_equal(found.obs[found.num_rows // 2 :], given.obs)


def anew(path, **changes):
    """Writes the archive anew with other arrays, or bytes; None leaves out."""
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    for name, x in changes.items():
        buffer = io.BytesIO()
        if isinstance(x, np.ndarray):
            np.save(buffer, x)
            x = buffer.getvalue()
        found[name if "." in name else f"{name}.npy"] = x
    with zipfile.ZipFile(path, "w") as archive:
        for name, x in found.items():
            if x is not None:
                archive.writestr(name, x)


def lie(path):
    """The header of the rewards says a million times as many."""
    with zipfile.ZipFile(path) as archive:
        raw = archive.read("reward.npy")
    anew(path, reward=raw.replace(b"(20,), }      ", b"(20000000,), }"))


def flip(path):
    """One bit of the observations in the file."""
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"obs.npy") + 300] ^= 1
    path.write_bytes(raw)


BAD = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-40]), "x.npz is damaged"),
    "a bit": (flip, "x.npz is damaged .Bad CRC-32 for file 'obs.npy'.: download or write it again"),
    "header": (lie, "reward.npy: expected 80000000 bytes for its shape, got 80"),
    "missing": (lambda p: anew(p, action=None), "x.npz is damaged .action is missing"),
    "objects": (lambda p: anew(p, reward=np.array([{}])), "reward.npy: expected numbers or texts, got objects"),
    "rows": (lambda p: anew(p, reward=np.zeros(3)), r"reward: expected the shape \(20,\), got \(3,\)"),
    "ends": (lambda p: anew(p, terminated=np.zeros(3, bool)), r"terminated: expected the shape \(5,\), got \(3,\)"),
    "offsets": (lambda p: anew(p, offsets=np.arange(6)), "offsets: expected to begin at 0 and to rise by 2 or more"),
    "shape": (lambda p: anew(p, obs=np.zeros((20, 9))), r"obs: expected the shape \(20, 3\), got \(20, 9\)"),
    "no JSON": (lambda p: anew(p, **{"about.json": b"{"}), "x.npz is damaged"),
    "not ours": (lambda p: anew(p, **{"about.json": None}), "is not a data set of jrl: expected about.json"),
    "no zip": (lambda p: p.write_text("x"), "x.npz is damaged .File is not a zip file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_file_is_one_error(tmp_path, case):
    spoil, message = BAD[case]
    path = data.write(stores.store(), tmp_path / "x.npz", compress=False)
    spoil(path)
    with pytest.raises(InputError, match=message) as e:
        data.read(tmp_path)
    assert len(e.value.errors) == 1 and str(path) in str(e.value)


def test_arrays_in_the_other_order_and_of_no_numbers_are_read(tmp_path):
    path = data.write(stores.store(), tmp_path / "x.npz")
    obs = np.asfortranarray(data.read(path).obs * 2)
    anew(path, obs=obs)
    assert np.array_equal(data.read(path).obs, obs)
    empty = dataclasses.replace(stores.store(), observation=Box((0,)), obs=np.zeros((20, 0), np.float32))
    assert data.read(data.write(empty, tmp_path / "y.npz")).obs.shape == (20, 0)
