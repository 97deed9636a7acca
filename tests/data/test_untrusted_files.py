"""Files may be anybody's: nothing outside of a data set is read, whatever is in a file gives a data set or one
InputError, and what it unpacks to has a limit."""

import dataclasses
import gzip
import io
import json
import struct
import zipfile

import h5py
import numpy as np
import pytest
import stores

from jrl import data
from jrl.data.formats import files
from jrl.errors import InputError

ROWS = 20
MEBIBYTE = 2**20


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(files.machine, "free_bytes", lambda: 2 * MEBIBYTE)


def refused(path, message, **options):
    with pytest.raises(InputError, match=message) as e:
        data.read(path, **options)
    assert len(e.value.errors) == 1 and len(str(e.value)) < 1200


# ---------------------------------------------------------------- other files


def flat_file(path):
    step = np.arange(ROWS)
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = np.ones((ROWS, 3)), np.zeros((ROWS, 1), np.float32)
        file["rewards"], file["terminals"] = np.ones(ROWS), step % 10 == 9
        file["timeouts"], file["infos/qpos"] = np.zeros(ROWS, bool), np.ones(ROWS)
    return path


def minari_file(path):
    return data.write(stores.store(), path.parent / "mine-v0", format="minari") / "data" / "main_data.hdf5"


def external(group, name, secret):
    group.create_dataset(name, (ROWS,), "f8", external=[(str(secret), 0, ROWS * 8)])


def virtual(group, name, secret):
    layout = h5py.VirtualLayout((ROWS,), "f8")
    layout[:] = h5py.VirtualSource(str(secret), "x", (ROWS,))
    group.create_virtual_dataset(name, layout)


def linked(group, name, secret):
    group[name] = h5py.ExternalLink(str(secret), "x")


def softly(group, name, secret):
    group[name] = h5py.SoftLink("/")


def whole_group(group, name, secret):
    group[name] = h5py.ExternalLink(str(secret), "/")


OUTSIDE = {
    "an array in another file": external,
    "parts of other files": virtual,
    "a link": linked,
    "got a link": softly,
    "link, which": whole_group,
}


@pytest.mark.parametrize("place", ["rewards", "infos/qpos", "infos"])
@pytest.mark.parametrize("made", [flat_file, minari_file])
@pytest.mark.parametrize("message", OUTSIDE)
def test_nothing_of_other_files_is_read(tmp_path, made, message, place):
    secret = tmp_path / "secret"
    with h5py.File(secret, "w") as file:
        file["x"] = np.arange(ROWS) / 8
    path = made(tmp_path / "x.hdf5")
    with h5py.File(path, "r+") as file:
        group = file["episode_2"] if made is minari_file else file
        if place in group:
            del group[place]
        OUTSIDE[message](group, place, secret)
    refused(tmp_path / "mine-v0" if made is minari_file else path, f"{place}: expected numbers in this file.*{message}")


def test_a_group_in_itself_is_refused(tmp_path):
    path = flat_file(tmp_path / "x.hdf5")
    with h5py.File(path, "r+") as file:
        file["infos/more"], file["infos/again"] = file["infos"], file["infos"]
    refused(path, "the file contains this group twice")


# ---------------------------------------------------------------- sizes


def test_what_unpacks_to_more_than_the_memory_is_refused_before_it_is_unpacked(tmp_path):
    store = stores.store()
    big = dataclasses.replace(store, columns={"x": np.zeros((store.num_rows, 20_000))})
    too_much = "expected at most 1.0 MB of arrays, half of the free memory, got 3.2 MB"
    refused(data.write(big, tmp_path / "x.npz"), too_much)
    refused(data.write(big, tmp_path / "x.hdf5", "d4rl"), "expected at most 1.0 MB of arrays.* got 2.4 MB")
    refused(data.write(big, tmp_path / "x-v0", "minari"), "expected at most 1.0 MB of arrays.* got 3.2 MB")
    refused(data.write(big, tmp_path / "x.parquet", "rllib-parquet"), "expected at most 1.0 MB of arrays.* got 2.4 MB")
    assert max(p.stat().st_size for p in tmp_path.rglob("*.*") if p.is_file()) < 0.2 * MEBIBYTE
    with h5py.File(tmp_path / "huge.h5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
            file.create_dataset(name, (10**12,), "f4", chunks=(1024,))
    refused(tmp_path / "huge.h5", "got 20000.00 GB unpacked: split the data set, or read it on a larger")


def test_what_announces_no_size_ends_where_the_memory_does(tmp_path):
    line = json.dumps(
        {"type": "SampleBatch", "obs": [[0.0] * 3] * 2000, "actions": [0] * 2000, "rewards": [0.0] * 2000}
    )
    with gzip.open(tmp_path / "x.json.gz", "wt") as file:
        file.writelines([line + "\n"] * 60)
    refused(tmp_path / "x.json.gz", "expected at most 1.0 MB of arrays")


# ---------------------------------------------------------------- structure


def npy(array):
    np.save(buffer := io.BytesIO(), array)
    return buffer.getvalue()


def header(shape, rest=b""):
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + rest


def about(**changes):
    return lambda old: json.dumps(json.loads(old) | changes).encode()


DEEP = b"[" * 100_000
NPZ = {  # member, its content or a function of the content, and the error
    "texts": ("reward.npy", npy(np.array(["a"] * ROWS)), "reward: expected numbers, got the dtype <U1"),
    "records": ("reward.npy", npy(np.zeros(ROWS, [("a", "f4")])), "reward: expected numbers"),
    "complex": ("reward.npy", npy(np.zeros(ROWS, complex)), "reward: expected numbers"),
    "wide": ("reward.npy", npy(np.zeros((ROWS, 1))), r"reward: expected the shape \(20,\), got \(20, 1\)"),
    "offsets NaN": ("offsets.npy", npy(np.array([0, np.nan, ROWS])), "offsets: expected .E . 1. integers"),
    "offsets down": ("offsets.npy", npy(np.array([0, 12, 3, ROWS])), "to rise by 2 or more"),
    "offsets beyond": ("offsets.npy", npy(np.array([0, 2**64 - 1], np.uint64)), "to rise by 2 or more"),
    "ends": ("terminated.npy", npy(np.zeros(5)), "terminated: expected numbers, got the dtype float64"),
    "log_prob": ("column/log_prob.npy", npy(np.zeros((ROWS, 0))), r"log_prob: expected the shape \(20,\), got"),
    "label": ("label/seed.npy", npy(np.zeros((5, 2))), r"label seed: expected the shape \(5,\)"),
    "negative": ("reward.npy", header("(-20, -1)", bytes(80)), "shape"),
    "huge": ("reward.npy", header("(" + "9" * 400 + ",)"), "damaged"),
    "deep header": ("reward.npy", header("(" * 90), "damaged"),
    "deep JSON": ("about.json", DEEP, "damaged.*recursion"),
    "columns": ("about.json", about(columns=[]), "damaged"),
    "space": ("about.json", about(action={"kind": "Discrete", "n": 10**400, "dtype": "int64"}), "expected a size of"),
    "dtype": (
        "about.json", about(action={"kind": "Discrete", "n": 3, "dtype": "complex64"}),
        "expected a dtype of numbers",
    ),
    "env_action": ("about.json", about(meta={"env_action": {"kind": "x"}}), "meta env_action: expected a space"),
}  # fmt: skip


@pytest.mark.parametrize("case", NPZ)
def test_an_odd_npz_is_one_error(tmp_path, case):
    name, content, message = NPZ[case]
    path = data.write(stores.store(), tmp_path / "x.npz", compress=False)
    with zipfile.ZipFile(path) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    members[name] = content(members[name]) if callable(content) else content
    with zipfile.ZipFile(path, "w") as archive:
        for n, x in members.items():
            archive.writestr(n, x)
    refused(path, message)


def test_an_unknown_compression_and_paths_that_are_no_files(tmp_path):
    path = data.write(stores.store(), tmp_path / "x.npz", compress=False)
    found = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = found.find(mark)
        found[at + offset : at + offset + 2] = struct.pack("<H", 99)
    path.write_bytes(found)
    refused(path, "compression method is not supported")
    for odd in ("x" * 5000, "a\x00b", "/dev/zero", tmp_path):
        for format in (None, "jrl", "minari", "rllib-json"):
            if odd != tmp_path or format not in (None, "jrl"):
                refused(odd, "data: ", format=format)


HDF5 = {
    "texts": ("rewards", np.array([b"a"] * ROWS), "rewards: expected numbers"),
    "records": ("observations", np.zeros(ROWS, [("a", "f4"), ("b", "f4")]), "observations: expected numbers"),
    "a number": ("terminals", np.array(1), "terminated: expected an array"),
    "a group": ("rewards/x", np.zeros(ROWS), "rewards: expected an array, got a group"),
    "nothing": ("actions", h5py.Empty("f4"), "damaged|expected numbers"),
    "complex": ("actions", np.zeros((ROWS, 2), complex), "actions: expected numbers"),
    "too many choices": ("actions", np.full(ROWS, 2**40), "integer actions: expected 0 to"),
}


@pytest.mark.parametrize("case", HDF5)
def test_an_odd_hdf5_file_is_one_error(tmp_path, case):
    name, content, message = HDF5[case]
    path = flat_file(tmp_path / "x.hdf5")
    with h5py.File(path, "r+") as file:
        del file[name.partition("/")[0]]
        file[name] = content
    refused(path, message)


def test_an_odd_column_of_a_table_is_one_error(tmp_path):
    import pyarrow
    from pyarrow import parquet

    columns = {
        "obs": pyarrow.array([[0.0] * 4] * 5), "actions": pyarrow.array([0, 1, 0, 1, 0]),
        "rewards": pyarrow.array([1.0] * 5), "terminateds": pyarrow.array([False] * 4 + [True]),
        "eps_id": pyarrow.array(["a"] * 5),
    }  # fmt: skip
    shape = {b"ARROW:extension:name": b"ray.data.arrow_tensor_v2", b"ARROW:extension:metadata": b"{}"}
    for name, column, message in (
        ("rewards", pyarrow.array([[1.0, 2.0]] * 5), "rewards: expected one number for each of 5 steps"),
        ("rewards", pyarrow.array([{"a": 1.0}] * 5), "rewards: expected one number for each of 5 steps"),
        ("rewards", pyarrow.array(["x"] * 5), "column rewards: expected base64"),
        ("eps_id", pyarrow.array(["a" * 2000] * 5), "its ids: expected texts of at most 1000 characters"),
        ("eps_id", pyarrow.array([None, *["a"] * 4]), "column eps_id: some rows are empty"),
        ("terminateds", pyarrow.array([[True, False]] * 5), "terminateds: expected one number for each of 5"),
        ("actions", pyarrow.array([2**62] * 5), "integer actions: expected 0 to"),
        ("obs", None, "column obs: expected the shape of the rows in the schema"),
    ):
        table = pyarrow.table(columns | ({} if column is None else {name: column}))
        if column is None:
            table = table.set_column(0, table.schema.field(0).with_metadata(shape), table.column(0))
        parquet.write_table(table, tmp_path / "x.parquet")
        refused(tmp_path / "x.parquet", message)


@pytest.mark.parametrize(
    "changes",
    [
        {"action_space": "[" * 100_000},
        {"action_space": '{"type": "Discrete", "n": 2, "start": 1' + "0" * 400 + "}"},
        {"action_space": '{"type": "MultiDiscrete", "nvec": ["x"]}'},
        {"total_episodes": -1},
        {"total_episodes": 10**400},
        {"observation_space": '{"type": "Box", "dtype": "float32", "shape": [3], "low": 1e999, "high": ["x"]}'},
    ],
)
def test_odd_metadata_of_minari_are_one_error(tmp_path, changes):
    path = data.write(stores.store(), tmp_path / "x-v0", format="minari")
    file = path / "data" / "metadata.json"
    found = json.loads(file.read_text()) | {"jrl": None} | changes
    file.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))
    refused(path, "data: .*x-v0")
