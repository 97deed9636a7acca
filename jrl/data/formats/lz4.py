"""LZ4 frames, by the format's documents (lz4_Frame_format.md 1.6.4, lz4_Block_format.md), as RLlib packs columns with.

The package lz4 does both where it is installed. Without it frames are read in Python, and written with blocks that are
not compressed, which every reader of LZ4 reads.
"""

import functools
import importlib
import struct
from typing import Any

_MAGIC = 0x184D2204
_BLOCK = {4: 2**16, 5: 2**18, 6: 2**20, 7: 2**22}  # the code of the largest block -> its bytes
_STORED = 1 << 31  # of a block's size: it is not compressed
MOST = 256  # bytes that a byte can stand for: one more in a length is 255 more of a match
_WHOLE32 = 0xFFFFFFFF


def decompress(data: bytes, most: int = 2**62) -> bytes:
    """Returns a frame's content.

    Raises:
      ValueError: it is damaged, by its checksums too, needs a dictionary, or has more than `most` bytes.
    """
    start, flags, block = _header(data)
    package = _package()
    if package is None:
        return bytes(_content(data, start, flags, block, most))
    reader = package.LZ4FrameDecompressor()
    try:
        content = reader.decompress(data, max_length=min(most, 2**31 - 1) if MOST * len(data) > most else -1)
    except (RuntimeError, EOFError) as e:
        raise ValueError(f"LZ4: {e}") from e
    if not reader.eof:
        raise ValueError("LZ4: the frame is cut off, or its content is larger than the memory takes")
    if reader.unused_data:
        raise ValueError("LZ4: bytes stand behind the end of the frame")
    return bytes(content)


def compress(data: bytes) -> bytes:
    """Returns a frame of `data`."""
    if package := _package():
        return bytes(package.compress(data))
    head = bytes([0b01_1_0_0_0_0_0, 7 << 4])  # version 1, independent blocks, no checksums; blocks of 4 MiB
    parts = [struct.pack("<I", _MAGIC), head, bytes([xxh32(head) >> 8 & 0xFF])]
    for start in range(0, len(data), _BLOCK[7]):
        block = data[start : start + _BLOCK[7]]
        parts += [struct.pack("<I", _STORED | len(block)), block]
    return b"".join([*parts, bytes(4)])


@functools.cache
def _package() -> Any:
    try:
        return importlib.import_module("lz4.frame")
    except ImportError:
        return None


def _header(data: bytes) -> tuple[int, int, int]:
    """Returns where the blocks begin, the flags, and the bytes of the largest block."""
    if len(data) < 7 or _number(data, 0) != _MAGIC:
        raise ValueError("LZ4: this is no frame")
    flags, sizes = data[4], data[5]
    if flags >> 6 != 1 or flags & 2 or sizes & 0x8F or sizes >> 4 not in _BLOCK:
        raise ValueError("LZ4: the header of the frame is damaged")
    if flags & 1:
        raise ValueError("LZ4: the frame needs a dictionary")
    end = 6 + (8 if flags & 8 else 0)
    if len(data) <= end or data[end] != xxh32(data[4:end]) >> 8 & 0xFF:
        raise ValueError("LZ4: the header of the frame is damaged")
    if flags & 8 and int.from_bytes(data[6:14], "little") > MOST * len(data):
        raise ValueError("LZ4: the frame says that it has more content than its bytes can hold")
    return end + 1, flags, _BLOCK[sizes >> 4]


def _content(data: bytes, at: int, flags: int, block_most: int, most: int) -> bytearray:
    out = bytearray()
    while size := _number(data, at):
        stored, size = bool(size & _STORED), size & ~_STORED
        block = data[at + 4 : at + 4 + size]
        if len(block) != size or size > block_most:
            raise ValueError("LZ4: a block is cut off")
        at += 4 + size
        if flags & 16:
            _check(block, data, at)
            at += 4
        if stored:
            out += block
        else:
            _decode(block, out, len(out) if flags & 32 else max(0, len(out) - 2**16), len(out) + block_most)
        if len(out) > most:
            raise ValueError("LZ4: the content is larger than the memory takes")
    at += 4
    if flags & 4:
        _check(out, data, at)
        at += 4
    if at != len(data):
        raise ValueError("LZ4: bytes stand behind the end of the frame")
    if flags & 8 and int.from_bytes(data[6:14], "little") != len(out):
        raise ValueError("LZ4: the frame has not as much content as it says")
    return out


def _decode(block: bytes, out: bytearray, oldest: int, most: int) -> None:
    """Appends the content of a block to `out`, which it may copy from `oldest` on and not make longer than `most`."""
    at, end = 0, len(block)
    while at < end:
        token = block[at]
        literals, at = _length(block, at + 1, token >> 4)
        if at + literals > end:
            raise ValueError("LZ4: a block is cut off")
        out += block[at : at + literals]
        at += literals
        if at == end:  # the last sequence has no match
            break
        if at + 2 > end:
            raise ValueError("LZ4: a block is cut off")
        distance = block[at] | block[at + 1] << 8
        length, at = _length(block, at + 2, token & 15)
        length += 4
        start = len(out) - distance
        if distance == 0 or start < oldest or len(out) + length > most:
            raise ValueError("LZ4: a match lies outside of the content")
        if distance >= length:
            out += out[start : start + length]
        else:  # it goes on into what it writes: what stands there repeats
            out += (out[start:] * (length // distance + 1))[:length]
    if len(out) > most:
        raise ValueError("LZ4: a block is too large")


def _length(block: bytes, at: int, length: int) -> tuple[int, int]:
    """Returns a length whose first four bits are given, and where what follows it begins."""
    if length < 15:
        return length, at
    while at < len(block):
        length += block[at]
        at += 1
        if block[at - 1] != 255:
            return length, at
    raise ValueError("LZ4: a block is cut off")


def _number(data: bytes, at: int) -> int:
    if len(data) < at + 4:
        raise ValueError("LZ4: the frame is cut off")
    return int.from_bytes(data[at : at + 4], "little")


def _check(content: bytes | bytearray, data: bytes, at: int) -> None:
    if _number(data, at) != xxh32(content):
        raise ValueError("LZ4: a checksum does not fit")


_P1, _P2, _P3, _P4, _P5 = 2654435761, 2246822519, 3266489917, 668265263, 374761393  # the primes of xxHash


def xxh32(data: bytes | bytearray) -> int:
    """Returns the 32 bits of xxHash with seed 0, the checksum of frames."""
    at, size = 0, len(data)
    total = _P5
    if size >= 16:
        lanes = [(_P1 + _P2) & _WHOLE32, _P2, 0, -_P1 & _WHOLE32]
        at = size - size % 16
        for words in struct.iter_unpack("<4I", memoryview(data)[:at]):
            lanes = [_rotated(lane + word * _P2, 13) * _P1 & _WHOLE32 for lane, word in zip(lanes, words)]
        total = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18)))
    total += size
    while at + 4 <= size:
        total = _rotated(total + int.from_bytes(data[at : at + 4], "little") * _P3, 17) * _P4
        at += 4
    for byte in data[at:]:
        total = _rotated(total + byte * _P5, 11) * _P1
    total &= _WHOLE32
    total = (total ^ total >> 15) * _P2 & _WHOLE32
    total = (total ^ total >> 13) * _P3 & _WHOLE32
    return total ^ total >> 16


def _rotated(x: int, by: int) -> int:
    x &= _WHOLE32
    return (x << by | x >> 32 - by) & _WHOLE32
