"""Packed columns may be anybody's: no pickle is executed, and damaged frames and pickles end at once."""

import base64
import os
import pickle
import struct
import zlib

import numpy as np
import pytest
from rllib_cases import batch, lines, mutated, packed

from jrl import data
from jrl.data.formats import lz4, numpy_pickles
from jrl.data.formats.numpy_pickles import Refused
from jrl.errors import InputError

PROTOCOLS = [2, 3, 4, 5]


@pytest.fixture(autouse=True)
def without_the_package(monkeypatch):
    """What is tested is the decoder in Python."""
    monkeypatch.setattr(lz4, "_package", lambda: None)


# ---------------------------------------------------------------- pickles

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
            found = {"a": numpy_pickles.loads(text)}
        else:
            found = numpy_pickles.loads(text)
            np.testing.assert_array_equal(found["b"][0], expected + 1)
        assert found["a"].shape == expected.shape and found["a"].dtype == expected.dtype.newbyteorder("=")
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
        "dtype 'O8'": objects(write),
        "EMPTY_LIST|builtins.exec": [Planted(exec, f"open({str(canary)!r}, 'w')")],
        "posix.system|nt.system|EMPTY_DICT": {"obs": np.zeros(2), "more": write},
        "numpy.core.*_reconstruct|posix.system|_reconstruct": Planted(np.ndarray, write),
        "(builtins|__builtin__).getattr": Planted(getattr, os.system, "x"),
        "numpy.load|numpy.*npyio": Planted(np.load, str(canary)),
        "dtype 'V4'": np.zeros(2, [("a", "f4")]),
        "dtype 'U1'": np.array(["a"]),
        "(builtins|__builtin__).object": object(),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", range(11))
def test_planted_pickles_never_run_and_are_refused_by_name(tmp_path, protocol, case):
    name, value = list(planted(tmp_path / "canary").items())[case]
    content = pickle.dumps(value, protocol=protocol)
    with pytest.raises(InputError, match=f"x.json, line 2: column obs: the pickle.*({name})"):
        data.read(lines(tmp_path / "x.json", batch(), batch(obs=packed(content))))
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


ARRAY = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
DTYPE = b"cnumpy\ndtype\n\x8c\x02f4\x85R"
RAW = {  # instructions that pickle.dumps does not write for these
    "it runs a name of its own": (b"cposix\nsystem\n\x8c\x02ls\x85R.", "posix.system"),
    "an instance": (b"(iposix\nsystem\n.", "INST"),
    "an object": (b"(cnumpy\ndtype\nofoo.", "OBJ"),
    "a new object": (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ"),
    "an extension": (b"\x82\x01.", "EXT1"),
    "something persistent": (b"Pabc\n.", "PERSID"),
    "a name is changed": (b"cnumpy\ndtype\n}\x8c\x01a\x8c\x01bsb.", "changes something that is no array"),
    "a name is called that is none to call": (b"cnumpy\nndarray\n)R.", "calls numpy.ndarray"),
    "a text is called": (b"\x8c\x02ls)R.", "calls ls"),
    "a name of a module's": (b"\x8c\x05numpy\x8c\x09ctypeslib\x93.", "numpy.ctypeslib"),
    "another encoding": (b"c_codecs\nencode\n\x8c\x01a\x8c\x05rot13\x86R.", "rot13"),
    "a subclass": (b"cnumpy._core.multiarray\n_reconstruct\nNK\x00\x85C\x01b\x87R.", "holds a None"),
    "no state": (ARRAY + b".", "only arrays"),
    "more than there is": (
        b"cnumpy._core.numeric\n_frombuffer\n(C\x04abcd" + DTYPE + b"\x8a\x06\xff\xff\xff\xff\xff\x0f\x85\x8c\x01CtR.",
        "4 bytes for an array",
    ),
    "bytes that are not there": (b"\x8e" + struct.pack("<Q", 2**62) + b"abc.", "damaged"),
    "a place far away": (b"K\x01r\xff\xff\xff\xff0.", "POP"),
    "a place that is empty": (b"h\x07.", "damaged"),
    "a dict in itself": (b"}\x94\x8c\x01ah\x00s.", "more than once"),
    "a number": (b"K\x01.", "only arrays"),
    "nothing": (b".", "too early"),
    "no end": (b"K\x01", "damaged"),
    "too few": (b"R.", "takes more than it has"),
    "no mark": (b"t.", "damaged"),
    "a very long number": (b"L" + b"9" * 10**6 + b"L\n.", "damaged|instruction LONG"),
}


@pytest.mark.parametrize("case", RAW)
def test_instructions_that_arrays_do_not_need_are_refused(case):
    content, message = RAW[case]
    with pytest.raises(Refused, match=message):
        numpy_pickles.loads(content)


def test_a_small_pickle_cannot_name_an_array_often():
    """A tuple of tuples of tuples would be 10^12 arrays of 1 MB."""
    array = pickle.dumps(np.zeros(2**17), protocol=2)[:-1]
    level = b"(" + b"h\xfa" * 10**4 + b"tq\xfa"
    with pytest.raises(Refused, match="an array or a dict more than once"):
        numpy_pickles.loads(b"(" + array + b"q\xfa" + level * 3 + b"t.")
    call = b"cnumpy._core.numeric\n_frombuffer\n("
    first = call + b"B" + struct.pack("<I", 4000) + bytes(4000) + b"q\x00" + DTYPE + b"q\x01M\xe8\x03\x85\x8c\x01CtR"
    again = call + b"h\x00h\x01M\xe8\x03\x85\x8c\x01CtR"
    assert numpy_pickles.loads(b"(" + first + b"t.")[0].shape == (1000,)
    with pytest.raises(Refused, match="the bytes of an array more than once"):
        numpy_pickles.loads(b"(" + first + again * 9 + b"t.")


def test_damaged_pickles_are_refused_or_arrays():
    rng = np.random.default_rng(0)
    whole = [pickle.dumps(np.arange(6, dtype=np.float32).reshape(2, 3), protocol=p) for p in PROTOCOLS]
    outcomes = [0, 0]
    for content in mutated(whole, rng, 2000):
        try:
            found = numpy_pickles.loads(content)
            assert isinstance(found, np.ndarray) and found.dtype.kind in "biuf" and found.nbytes <= len(content)
            outcomes[0] += 1
        except Refused:
            outcomes[1] += 1
    assert min(outcomes) > 50  # both happen


# ---------------------------------------------------------------- LZ4

CONTENT = (b"jrl reads LZ4. " * 7 + bytes(range(256))) * 700
# frames of CONTENT by the package lz4 4.4.5, behind zlib
FRAMES = {
    "linked blocks, checksum of the content": (
        "eNpjUfKV8HGQuc3MAAKVckwMDP8ZsopyFIpSE1OKFXyiTPQU+Bnc/39kYGRiZmFlY+fg5OLm4eXjFxAUEhYRFROXkJSSlpGVk1dQ"
        "VFJWUVVT19DU0tbR1dM3MDQyNjE1M7ewtLK2sbWzd3B0cnZxdXP38PTy9vH18w8IDAoOCQ0Lj4iMio6JjYtPSExKTklNS8/IzMrO"
        "yc3LLygsKi4pLSuvqKyqrqmtq29obGpuaW1r7+js6u7p7eufMHHS5ClTp02fMXPW7Dlz581fsHDR4iVLly1fsXLV6jVr163fsHHT"
        "5i1bt23fsXPX7j179+0/cPDQ4SNHjx0/cfLU6TNnz52/cPHS5StXr12/cfPW7Tt3791/8PDR4ydPnz1/8fLV6zdv373/8PHT5y9f"
        "v33/8fPX7z9///3PZPw/skFdADi2uBgZGPht/4908CIAnDfEgPmFn5/BcjR/eDNa8E9j5OYf8fnEKAAcMU8Zhns+uR8AjnhQvfF6"
        "U+VbALFt99k="
    ),
    "independent blocks, a checksum each": (
        "eNpjUfKVKHBYK8fEwPCfIasoR6EoNTGlWMEnykRPgZ/B/f9HBkYmZhZWNnYOTi5uHl4+fgFBIWERUTFxCUkpaRlZOXkFRSVlFVU1"
        "dQ1NLW0dXT19A0MjYxNTM3MLSytrG1s7ewdHJ2cXVzd3D08vbx9fP/+AwKDgkNCw8IjIqOiY2Lj4hMSk5JTUtPSMzKzsnNy8/ILC"
        "ouKS0rLyisqq6prauvqGxqbmlta29o7Oru6e3r7+CRMnTZ4yddr0GTNnzZ4zd978BQsXLV6ydNnyFStXrV6zdt36DRs3bd6yddv2"
        "HTt37d6zd9/+AwcPHT5y9NjxEydPnT5z9tz5CxcvXb5y9dr1Gzdv3b5z9979Bw8fPX7y9NnzFy9fvX7z9t37Dx8/ff7y9dv3Hz9/"
        "/f7z99//TMb/IxvUBYBjq27hfFlwKlk2NOINS1r2pl1aHk0lAeBw9n/3JlINXJYooEYAP4PWaFnizWjBP42Rm3/EpxajAHDETBSP"
        "4+IApZYZg7XYQOPKMVj8zxigVDycE01pADjwf//8eJQBCADL9hGV"
    ),
    "high compression, no size": (
        "eNpjUfKVSAj4/YeFgeE/Q1ZRjkJRamJKsYJPlImeAj+D+/+PDIxMzCysbOwcnFzcPLx8/AKCQsIiomLiEpJS0jKycvIKikrKKqpq"
        "6hqaWto6unr6BoZGxiamZuYWllbWNrZ29g6OTs4urm7uHp5e3j6+fv4BgUHBIaFh4RGRUdExsXHxCYlJySmpaekZmVnZObl5+QWF"
        "RcUlpWXlFZVV1TW1dfUNjU3NLa1t7R2dXd09vX39EyZOmjxl6rTpM2bOmj1n7rz5CxYuWrxk6bLlK1auWr1m7br1GzZu2rxl67bt"
        "O3bu2r1n7779Bw4eOnzk6LHjJ06eOn3m7LnzFy5eunzl6rXrN27eun3n7r37Dx4+evzk6bPnL16+ev3m7bv3Hz5++vzl67fvP37+"
        "+v3n77//mYz/R8EoGAXDE1QEgHM5AxAAACkSaj0="
    ),
}


def frame(name):
    return zlib.decompress(base64.b64decode(FRAMES[name]))


@pytest.mark.parametrize("name", FRAMES)
def test_frames_of_the_package_lz4_are_read(name):
    assert lz4.decompress(frame(name)) == CONTENT


@pytest.mark.parametrize("name", FRAMES)
def test_frames_of_more_content_than_there_is_room_are_refused(name):
    with pytest.raises(ValueError, match=r"LZ4: .*larger than the memory takes"):
        lz4.decompress(frame(name), len(CONTENT) // 2)


@pytest.mark.parametrize("size", [0, 1, 15, 1000, 2**22, 2**22 + 1])
def test_frames_come_back(size):
    content = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8).tobytes()
    assert lz4.decompress(lz4.compress(content)) == content


def test_checksums_are_those_of_xxhash():
    """The values that xxhash's own tests have for these texts and seed 0."""
    assert lz4.xxh32(b"") == 0x02CC5D05
    assert lz4.xxh32(b"abc") == 0x32D153FF
    assert lz4.xxh32(b"Nobody inspects the spammish repetition") == 0xE2293B2F


@pytest.mark.parametrize("name", FRAMES)
def test_damaged_frames_are_refused_or_bounded(name):
    """Where a frame has checksums of what is in it, no damage goes by."""
    whole = frame(name)
    checked = "checksum" in name
    refused = 0
    for content in mutated([whole], np.random.default_rng(0), 100):
        try:
            found = lz4.decompress(content)
            assert len(found) <= 256 * len(content)
            assert not checked or found == CONTENT
        except ValueError as e:
            assert "LZ4" in str(e)
            refused += 1
    assert refused > 20
    for size in range(0, len(whole), 97):
        with pytest.raises(ValueError, match="LZ4"):
            lz4.decompress(whole[:size])


def header(flags, sizes, size=b""):
    head = bytes([flags, sizes]) + size
    return struct.pack("<I", 0x184D2204) + head + bytes([lz4.xxh32(head) >> 8 & 0xFF])


def block(content):
    return struct.pack("<I", len(content)) + content


HEAD = header(0b0110_0000, 4 << 4)
FRAMES_REFUSED = {
    "no end": (HEAD, "cut off"),
    "another magic": (b"abcdefgh", "no frame"),
    "a dictionary": (header(0b0110_0001, 4 << 4, bytes(4)), "dictionary"),
    "a version to come": (header(0b1010_0000, 4 << 4), "header"),
    "a size that cannot be": (header(0b0110_1000, 4 << 4, struct.pack("<Q", 2**50)), "more content than"),
    "a match before the content": (HEAD + block(b"\x10a\x02\x00") + bytes(4), "outside"),
    "a match at nothing": (HEAD + block(b"\x10a\x00\x00") + bytes(4), "outside"),
    "a match beyond the block": (HEAD + block(b"\x1fa\x01\x00" + b"\xff" * 300 + b"\x00") + bytes(4), "outside"),
    "a match before its block": (
        HEAD + block(b"\x40abcd") + block(b"\x10a\x03\x00") + bytes(4), "outside",
    ),
    "a length without end": (HEAD + block(b"\xf0" + b"\xff" * 300) + bytes(4), "cut off"),
    "literals that are not there": (HEAD + block(b"\xf0\xffabc") + bytes(4), "cut off"),
    "a block that is not there": (HEAD + struct.pack("<I", 1000) + b"abc", "cut off"),
    "bytes behind": (HEAD + bytes(4) + b"a", "behind the end"),
}  # fmt: skip


@pytest.mark.parametrize("case", FRAMES_REFUSED)
def test_what_no_frame_may_hold_is_refused(case):
    content, message = FRAMES_REFUSED[case]
    with pytest.raises(ValueError, match=message):
        lz4.decompress(content)


def test_a_match_may_go_on_into_what_it_writes():
    content = HEAD + block(b"\x2fab\x02\x00\x05" + b"\x10c") + bytes(4)
    assert lz4.decompress(content) == b"ab" + b"ab" * 12 + b"c"
