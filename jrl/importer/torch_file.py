"""Trees of tensors that `torch.save` has written (torch 1.6 and later), without torch.

Such a file is a zip archive: `data.pkl` is a pickle of the tree, and `data/N` has the bytes of the N-th storage. This
reader replaces the few functions that rebuild tensors by functions of this file. It refuses all other names, so the
pickle cannot execute anything.
"""

import io
import math
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from jrl.data.formats import files

_STORAGES = {
    "FloatStorage": "f4", "DoubleStorage": "f8", "HalfStorage": "f2", "LongStorage": "i8", "IntStorage": "i4",
    "ShortStorage": "i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "?",
}  # fmt: skip
# faults of a damaged pickle or archive
DAMAGE = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, EOFError, OSError,
    NotImplementedError, RuntimeError, MemoryError, pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip


class RefusedFile(ValueError):
    """The file is damaged, or contains anything but tensors, numbers and texts."""


class Function:
    """Stand-in for a function that a pickle names; the pickle can call it, and cannot change it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise RefusedFile("the pickle changes a function")


class _Mapping(dict):
    """Stand-in for OrderedDict, without the attributes that torch stores with a state_dict."""

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, storage: Callable[[str, str, int], np.ndarray]):
        super().__init__(io.BytesIO(content))
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return Function(_Mapping)
            case "torch._utils", "_rebuild_tensor_v2":
                return Function(_rebuild_tensor)
            case "torch._utils", "_rebuild_parameter":
                return Function(lambda tensor, *rest: tensor)
            case "torch", _ if name in _STORAGES:
                return _STORAGES[name]
        raise RefusedFile(f"the pickle wants {module[:80]}.{name[:80]}: only tensors are read")

    def persistent_load(self, pid: Any) -> np.ndarray:
        match pid:
            case ("storage", str() as dtype, str() as key, str(), int() as size) if key.isalnum():
                return self._storage(key, dtype, size)
        raise RefusedFile("the pickle has an unknown kind of storage: only tensors are read")


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> np.ndarray:
    """Returns a view of a storage. Raises RefusedFile: it would exceed or repeat the storage's numbers."""
    is_size = lambda x: type(x) is int and x >= 0
    if not isinstance(storage, np.ndarray) or not is_size(offset) or not isinstance(shape, tuple):
        raise RefusedFile("a tensor has no storage")
    if not isinstance(stride, tuple) or len(stride) != len(shape) or not all(map(is_size, (*shape, *stride))):
        raise RefusedFile("a tensor has an invalid shape or stride")
    count = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if count else offset
    if count > storage.size or last >= max(storage.size, 1):
        raise RefusedFile(f"a tensor of shape {list(shape)} exceeds its storage of {storage.size} numbers")
    part, step = storage[offset:], storage.itemsize
    return np.lib.stride_tricks.as_strided(part, shape, [n * step for n in stride], writeable=False)


def open_archive(content: Any) -> zipfile.ZipFile:
    """Opens a zip archive, a path or a binary file. Raises RefusedFile: not an archive, or larger than the memory."""
    try:
        archive = zipfile.ZipFile(content)
    except DAMAGE as e:
        raise RefusedFile("it is not a zip archive") from e
    size, limit = sum(item.file_size for item in archive.infolist()), files.size_limit()
    if size > limit:
        raise RefusedFile(f"its content has {size:,} bytes, and half of the free memory is {limit:,}")
    return archive


def read_tensors(content: bytes) -> Any:
    """Returns the tree of a file that torch has saved: dicts, lists, numbers, texts, and arrays as views.

    Tensors that share their storage are views of the same bytes.

    Raises:
      RefusedFile: the content is damaged, or contains anything else.
    """
    try:
        with open_archive(io.BytesIO(content)) as archive:
            names = archive.namelist()
            top = next((name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")), None)
            if top is None:
                raise RefusedFile("it has no data.pkl, as torch writes it since version 1.6")
            order = ">" if f"{top}byteorder" in names and archive.read(f"{top}byteorder") == b"big" else "<"
            storages: dict[str, np.ndarray] = {}

            def storage(key: str, dtype: str, size: int) -> np.ndarray:
                kind = np.dtype(order + dtype)
                if key not in storages:
                    storages[key] = np.frombuffer(archive.read(f"{top}data/{key}"), kind)
                if storages[key].size != size or storages[key].dtype != kind:
                    raise RefusedFile(f"storage {key} has {storages[key].size} numbers, not {size} of {dtype}")
                return storages[key]

            return _Unpickler(archive.read(f"{top}data.pkl"), storage).load()
    except RefusedFile:
        raise
    except DAMAGE as e:
        raise RefusedFile(f"it is damaged ({str(e)[:200] or type(e).__name__})") from e
