"""Packed columns may be anybody's: no pickle is executed, and damaged or hostile ones end at once."""

import base64
import os
import pickle
import struct
import sys
import tracemalloc

import numpy as np
import pytest
from rllib_cases import batch, lines, mutated, packed

from jrl import data
from jrl.data.formats import files, packed_arrays
from jrl.data.formats.packed_arrays import RefusedData, read_pickle
from jrl.errors import InputError

PROTOCOLS = [2, 3, 4, 5]


ARRAYS = {
    "f32": np.arange(12, dtype=np.float32).reshape(3, 4),
    "columns first": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "a view": np.arange(10)[::3],
    "big endian": np.arange(5, dtype=">i4"),
    "bool": np.array([[True, False]]),
    "none": np.zeros((0, 3), np.float32),
    "pictures": np.arange(2 * 300 * 300, dtype=np.uint8).reshape(2, 300, 300),
    "a number": np.float32(2.5),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_read_as_pickle_reads_them(protocol, name):
    expected = ARRAYS[name]
    content = pickle.dumps({"a": expected, "b": (expected + 1,)}, protocol=protocol)
    for text in (content, content.replace(b"numpy._core", b"numpy.core")):  # numpy 1's names; lengths differ below
        if text is not content and protocol >= 4:
            text = renamed(expected, protocol)
            found = {"a": read_pickle(text)}
        else:
            found = read_pickle(text)
            np.testing.assert_array_equal(found["b"][0], expected + 1)
        assert found["a"].shape == expected.shape and found["a"].dtype == expected.dtype
        np.testing.assert_array_equal(found["a"], expected)


def renamed(array, protocol):
    """A pickle with the names of numpy 1: texts of protocol 4 have their lengths in front."""
    content = pickle.dumps(array, protocol=protocol)
    for module in ("multiarray", "numeric"):
        new, old = f"numpy._core.{module}".encode(), f"numpy.core.{module}".encode()
        content = content.replace(bytes([len(new)]) + new, bytes([len(old)]) + old)
    at = content.find(b"\x95", 0, 4)  # a frame that says its length
    if at < 0:
        return content
    size = int.from_bytes(content[at + 1 : at + 9], "little") - 1
    return content[: at + 1] + struct.pack("<Q", size) + content[at + 9 :]


class Planted:
    """Its pickle calls a function."""

    def __init__(self, function, *given):
        self.call = function, given

    def __reduce__(self):
        return self.call


def objects(value):
    found = np.empty(1, object)
    found[0] = value
    return found


def planted(canary):
    """Pickles that would write a file if they were executed, by the name that each is refused for."""
    command = f"echo > {canary}"
    write = Planted(os.system, command)
    return {
        "posix.system|nt.system": write,
        "(builtins|__builtin__).eval": Planted(eval, f"open({str(canary)!r}, 'w')"),
        "EMPTY_LIST|dtype 'O8'": objects(write),
        "EMPTY_LIST|builtins.exec": [Planted(exec, f"open({str(canary)!r}, 'w')")],
        "posix.system|nt.system|EMPTY_DICT": {"obs": np.zeros(2), "more": write},
        "numpy.core.*_reconstruct|posix.system|_reconstruct": Planted(np.ndarray, write),
        "(builtins|__builtin__).getattr": Planted(getattr, os.system, "x"),
        "numpy.load|numpy.*npyio": Planted(np.load, str(canary)),
        "dtype 'V4'": np.zeros(2, [("a", "f4")]),
        "dtype 'U1'": np.array(["a"]),
        "(builtins|__builtin__).object|NEWOBJ": object(),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", range(11))
def test_planted_pickles_never_run_and_are_refused_by_name(tmp_path, protocol, case):
    name, value = list(planted(tmp_path / "canary").items())[case]
    content = pickle.dumps(value, protocol=protocol)
    with pytest.raises(InputError, match=f"x.json, line 2: column obs: the pickle.*({name})"):
        data.read(lines(tmp_path / "x.json", batch(), batch(obs=packed(content))))
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def reduced(function, *given):
    """Opcodes that call a function of numpy's with opcodes of arguments."""
    module = {"_frombuffer": "numpy._core.numeric", "_reconstruct": "numpy._core.multiarray"}.get(function, "numpy")
    return f"c{module}\n{function}\n(".encode() + b"".join(given) + b"tR"


DTYPE = reduced("dtype", b"\x8c\x02f4")
BYTES = b"B" + struct.pack("<I", 4000) + bytes(4000)
OF_1000 = (DTYPE, b"M\xe8\x03\x85\x8c\x01C")  # 1000 numbers, rows first
EMPTY = reduced("_reconstruct", b"cnumpy\nndarray\n", b"K\x00\x85", b"C\x01b")
SHARED_TUPLES = b")q\x01" + b"h\x01h\x01\x86q\x01" * 2000  # 2^2000 leaves, for whatever walks or hashes them
HOSTILE = {  # none of which pickle.dumps writes: content and error
    "a function of a name's own": (b"cposix\nsystem\n\x8c\x02ls\x85R.", "wants posix.system"),
    "an instance": (b"(iposix\nsystem\n.", "instruction INST"),
    "an extension, which a cache may hold": (b"\x82\x01.", "instruction EXT1"),
    "a name is changed": (b"cnumpy\ndtype\nN}\x8c\x0c__defaults__)s\x86b.", "changes an object that is not an array"),
    "a text is called": (b"\x8c\x02ls)R.", "damaged"),
    "a name of a module": (b"\x8c\x05numpy\x8c\x09ctypeslib\x93.", "numpy.ctypeslib"),
    "another encoding": (b"c_codecs\nencode\n\x8c\x01a\x8c\x05rot13\x86R.", "calls encode"),
    "no state": (EMPTY + b".", "only arrays"),
    "a state that has no bytes": (EMPTY + b"(K\x01(\x8a\x06\xff\xff\xff\xff\xff\x0ftN\x89Ntb.", "without bytes"),
    "more than there is": (
        reduced("_frombuffer", b"C\x04abcd", DTYPE, b"\x8a\x06\xff\xff\xff\xff\xff\x0f\x85\x8c\x01C") + b".",
        "4 bytes for an array",
    ),
    "negative sizes": (reduced("_frombuffer", b"C\x04abcd", DTYPE, b"J\xff\xff\xff\xff\x85\x8c\x01C") + b".", "shape"),
    "bytes that are not there": (b"\x8e" + struct.pack("<Q", 2**62) + b"abc.", "damaged"),
    "a frame that is not there": (b"\x80\x04\x95" + struct.pack("<Q", 2**62) + EMPTY + b".", "damaged"),
    "a place far away": (b"K\x01r\xff\xff\xff\x7f.", "skips indices"),
    "a place that is empty": (b"h\x07.", "a missing object"),
    "a dict in itself": (b"}\x94\x8c\x01ah\x00s.", "more than once"),
    "tuples of tuples": (SHARED_TUPLES + b".", "more than once"),
    "tuples of tuples as a key": (b"}" + SHARED_TUPLES + b"K\x01s.", "more than once"),
    "a deep key": (b"})" + b"\x85" * 49_000 + b"K\x01s.", "only arrays|damaged"),
    "many dicts": (b"}" * 10**6 + b".", "over 50,000 instructions"),
    "one array often": (
        b"(" + reduced("_frombuffer", BYTES, *OF_1000) + b"q\x00" + b"h\x00" * 9 + b"t.", "more than once",
    ),
    "its bytes often": (
        b"(" + BYTES + b"q\x00" + reduced("_frombuffer", b"h\x00", *OF_1000) * 9 + b"t.", "more than once|only arrays",
    ),
    "a number": (b"K\x01.", "only arrays"),
    "nothing": (b".", "damaged"),
    "no end": (b"K\x01", "damaged"),
    "a very long number": (b"L" + b"9" * 10**6 + b"L\n.", "damaged|instruction LONG"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused_at_once(case):
    """A pickle may name 2^32 places of memory, share tuples, nest keys until C's stack ends, or repeat an array."""
    content, message = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(RefusedData, match=message):
            read_pickle(content)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_a_dict_of_many_arrays_is_read():
    given = {f"part {i}": np.full(3, i, ">f4") for i in range(500)}
    for protocol in PROTOCOLS:
        found = read_pickle(pickle.dumps(given, protocol=protocol))
        assert all(np.array_equal(found[k], x) and found[k].dtype == x.dtype for k, x in given.items())


def test_damaged_pickles_are_refused_or_arrays():
    rng = np.random.default_rng(0)
    whole = [pickle.dumps(np.arange(6, dtype=np.float32).reshape(2, 3), protocol=p) for p in PROTOCOLS]
    outcomes = [0, 0]
    for content in mutated(whole, rng, 2000):
        try:
            found = read_pickle(content)
            assert isinstance(found, np.ndarray) and found.dtype.kind in "biuf" and found.nbytes <= len(content)
            outcomes[0] += 1
        except RefusedData:
            outcomes[1] += 1
    assert min(outcomes) > 50  # both happen


# ---------------------------------------------------------------- LZ4


def frame(text):
    return base64.b64decode(text)


def test_what_a_frame_unpacks_to_has_a_limit(monkeypatch):
    text = packed_arrays.pack(np.zeros(2**21))
    assert packed_arrays.unpack(text).nbytes == 2**24
    monkeypatch.setattr(packed_arrays, "_SMALL", 2**10)
    monkeypatch.setattr(files, "size_limit", lambda: 2**23)
    with pytest.raises(RefusedData, match="larger than the memory takes"):
        packed_arrays.unpack(text)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x[:-5],
        lambda x: x + b"a",
        lambda x: b"abcdefgh",
        lambda x: b"",
        lambda x: x[:4] + bytes([x[4] ^ 8]) + x[5:],
        lambda x: x[:20] + bytes(8) + x[28:],
    ],
)
def test_damaged_frames_are_refused(tmp_path, spoil):
    whole = frame(packed_arrays.pack(np.arange(12, dtype=np.float32).reshape(3, 4)))
    spoiled = base64.b64encode(spoil(whole)).decode()
    with pytest.raises(InputError, match=r"x\.json, line 2: column obs: (LZ4|the pickle)"):
        data.read(lines(tmp_path / "x.json", batch(), batch(obs=spoiled)))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = lines(tmp_path / "x.json", batch(obs=packed(pickle.dumps(np.zeros((3, 1))))))
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with pytest.raises(InputError, match=r"lz4 is not installed: pip install 'jrl\[data\]'"):
        data.read(path)
