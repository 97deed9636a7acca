"""RLlib's Parquet files: the types that columns may have, and what is wrong with them."""

import subprocess
import sys

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rllib_cases import FILES, batch, packed, store

from jrl import data
from jrl.data.formats import packed_arrays
from jrl.errors import InputError

OBS = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
NEXT_OBS = [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


def table(**columns):
    given = {**batch(obs=OBS, new_obs=NEXT_OBS), **columns}
    return pa.table({k: v for k, v in given.items() if k != "type" and v is not None})


def written(path, **columns):
    pq.write_table(table(**columns), path)
    return path


def tensors(rows):
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.array(rows, np.float32))


def structs(rows):
    return pa.array([{"a": row[0], "b": row[1:]} for row in rows])


TYPES = {
    "lists": pa.array,
    "large lists": lambda x: pa.array(x, pa.large_list(pa.float32())),
    "lists of fixed sizes": lambda x: pa.array(x, pa.list_(pa.float64(), 2)),
    "pyarrow's tensors": tensors,
    "packed by row": lambda x: pa.array([packed_arrays.pack(np.array(row)) for row in x]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_columns(tmp_path, kind):
    make = TYPES[kind]
    found = data.read(written(tmp_path / "x.parquet", obs=make(OBS), new_obs=make(NEXT_OBS)))
    assert found.obs.tolist() == [*OBS, NEXT_OBS[-1]] and found.lengths().tolist() == [3]


def test_lists_in_lists_and_structs(tmp_path):
    make = lambda x: pa.array([[row, row] for row in x])
    found = data.read(written(tmp_path / "x.parquet", obs=make(OBS), new_obs=make(NEXT_OBS)))
    assert found.obs.shape == (4, 2, 2) and found.obs[3].tolist() == [NEXT_OBS[-1]] * 2
    found = data.read(written(tmp_path / "y.parquet", obs=structs(OBS), new_obs=structs(NEXT_OBS)))
    assert found.obs["a"].tolist() == [0, 2, 4, 6] and found.obs["b"].tolist() == [[1], [3], [5], [7]]


def test_pieces_of_a_column_are_read_as_one(tmp_path):
    pq.write_table(table(), tmp_path / "x.parquet", row_group_size=1)
    assert data.read(tmp_path / "x.parquet").obs.tolist() == [*OBS, NEXT_OBS[-1]]


def test_rows_that_are_sorted_otherwise_are_put_in_order(tmp_path):
    rows = {"obs": [OBS[1], [9.0, 9.0], OBS[0]], "new_obs": [NEXT_OBS[1], [8.0, 8.0], NEXT_OBS[0]]}
    path = written(tmp_path / "x.parquet", **rows, eps_id=["b", "a", "b"], t=[1, 0, 0], terminateds=[True, True, False])
    found = data.read(path)
    assert found.lengths().tolist() == [2, 1] and list(found.labels["eps_id"]) == ["b", "a"]
    assert found.obs.tolist() == [*OBS, [9, 9], [8, 8]]


CLOUDPICKLED = {
    b"ARROW:extension:name": b"ray.data.arrow_tensor_v2",
    b"ARROW:extension:metadata": b"\x80\x05K\x02\x85.",
}
VARIABLE = {b"ARROW:extension:name": b"ray.data.arrow_variable_shaped_tensor", b"ARROW:extension:metadata": b"1"}
WRONG_SHAPE = {**CLOUDPICKLED, b"ARROW:extension:metadata": b"[3]"}
BAD = {
    "no actions": ({"actions": None}, "the columns actions are missing"),
    "ragged": ({"obs": [[0.0], [1.0, 2.0], [3.0]]}, "column obs: expected rows of one length"),
    "ragged by chance": ({"obs": [[0.0], [1.0, 2.0, 3.0], [4.0, 5.0]]}, "column obs: expected rows of one length"),
    "empty rows": ({"obs": [[0.0, 0.0], None, [0.0, 0.0]]}, "column obs: some rows are empty"),
    "empty numbers": ({"obs": [[0.0, None]] * 3}, "column obs: some rows are empty"),
    "dates": ({"obs": pa.array([1, 2, 3], pa.date32())}, "column obs: expected numbers, got the type date32"),
    "texts": ({"obs": ["a", "b", "c"]}, "column obs: expected base64, as RLlib packs"),
    "a pickle": ({"obs": [packed(b"cposix\nsystem\n.")] * 3}, "column obs: the pickle wants posix.system"),
    "unlike": ({"new_obs": [[0.0]] * 3}, "next observations: expected the shape"),
    "nothing": ({"actions": pa.nulls(3)}, "column actions"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_column_that_is_wrong_is_named(tmp_path, case):
    columns, message = BAD[case]
    path = written(tmp_path / "x.parquet", **columns)
    with pytest.raises(InputError, match=message) as e:
        data.read(path)
    assert str(path) in str(e.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [(CLOUDPICKLED, "written as a pickle"), (VARIABLE, "expected arrays of one shape"), (WRONG_SHAPE, "column obs: ")],
)
def test_shapes_that_cannot_be_read_are_refused(tmp_path, metadata, message):
    given = table()
    field = given.schema.field("obs").with_metadata(metadata)
    pq.write_table(given.cast(given.schema.set(given.schema.get_field_index("obs"), field)), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=message):
        data.read(tmp_path / "x.parquet")


def test_nobody_who_registered_an_extension_type_is_asked(tmp_path):
    """Ray 2.49 to 2.54 unpickle what they are asked to read."""
    asked = []

    class Tensor(pa.ExtensionType):
        def __init__(self):
            super().__init__(pa.large_list(pa.float32()), "ray.data.arrow_tensor")

        def __arrow_ext_serialize__(self):
            return b"[2]"

        @classmethod
        def __arrow_ext_deserialize__(cls, storage, serialized):
            asked.append(serialized)
            return cls()

    column = lambda rows: pa.ExtensionArray.from_storage(Tensor(), pa.array(rows, pa.large_list(pa.float32())))
    before = getattr(sys.modules.get("ray.data._internal.tensor_extensions.arrow"), "ArrowTensorType", None)
    if before is not None:
        pa.unregister_extension_type("ray.data.arrow_tensor")
    pa.register_extension_type(Tensor())
    try:
        path = written(tmp_path / "x.parquet", obs=column(OBS), new_obs=column(NEXT_OBS))
        pq.read_schema(path)
        assert asked  # pyarrow would
        asked.clear()
        assert data.read(path).obs.tolist() == [*OBS, NEXT_OBS[-1]] and asked == []
    finally:
        pa.unregister_extension_type("ray.data.arrow_tensor")
        if before is not None:
            pa.register_extension_type(before((0,), pa.int64()))


def test_a_schema_that_would_be_read_otherwise_is_refused(tmp_path):
    path = written(tmp_path / "x.parquet")
    path.write_bytes(path.read_bytes().replace(b"ARROW:schema\x18", b"ARROW:schema\x08"))
    with pytest.raises(InputError, match=r"x\.parquet is damaged"):
        data.read(path)
    path = written(path)
    again = pq.read_table(path).replace_schema_metadata({"more": "ARROW:schema"})
    pq.write_table(again, path)
    with pytest.raises(InputError, match="expected one Arrow schema in the footer"):
        data.read(path)


def test_further_columns_that_are_no_arrays_are_left_out(tmp_path):
    found = data.read(written(tmp_path / "x.parquet", words=["a", "b", "c"], vf_preds=[1.0, 2.0, 3.0]))
    assert list(found.columns) == ["vf_preds"] and "the column words was left out" in found.notes[0]


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    written(tmp_path / "a.parquet")
    written(tmp_path / "b.parquet", vf_preds=[1.0, 2.0, 3.0])
    with pytest.raises(InputError, match=r"b\.parquet: expected the columns .* got .*vf_preds.*: read them separately"):
        data.read(tmp_path)
    written(tmp_path / "b.parquet", obs=[[0.0]] * 3, new_obs=[[0.0]] * 3)
    with pytest.raises(InputError, match="column obs: expected rows of one shape"):
        data.read(tmp_path)


def episode(path):
    """The first of the whole episodes that RLlib wrote."""
    return msgpack.unpackb(pq.read_table(path).column("item")[0].as_py(), strict_map_key=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("rewards"), "rewards is missing"),
        (
            lambda e: e["observations"]["data"][1].update({b"type": "O"}),
            "expected an array of numbers, got the dtype O",
        ),
        (lambda e: e["observations"]["data"][1].update({b"shape": [10**12]}), "got 8 bytes"),
        (lambda e: e["observations"]["data"].__setitem__(1, "text"), "got a str"),
        (lambda e: e["observations"]["data"].pop(), "observations: expected the shape"),
    ],
)
def test_whole_episodes_that_are_damaged_are_refused(tmp_path, change, message):
    found = episode(FILES / "rllib-episodes" / "0.parquet")
    change(found)
    pq.write_table(pa.table({"item": [msgpack.packb(found)]}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=message):
        data.read(tmp_path / "x.parquet")


def test_what_a_file_says_of_itself_must_fit(tmp_path):
    path = data.write(store(), tmp_path / "x.parquet", "rllib-parquet")
    whole = pq.read_table(path)
    about = whole.schema.metadata[b"jrl"]
    for other, message in ((about.replace(b"[3]", b"[4]"), "expected rows of"), (about[:-9], "damaged")):
        pq.write_table(whole.replace_schema_metadata({b"jrl": other}), path)
        with pytest.raises(InputError, match=message):
            data.read(path)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"pyarrow is not installed: pip install 'jrl\[data\]'"):
        data.read(FILES / "rllib-tabular")


def test_finding_the_format_imports_no_pyarrow():
    code = f"""
import sys; from pathlib import Path
from jrl.data import formats
assert formats.find_format(Path({str(FILES / "rllib-tabular")!r})) == "rllib-parquet"
assert formats.find_format(Path({str(FILES)!r})) == "rllib-json"
assert not [name for name in sys.modules if name.startswith("pyarrow")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
