"""Bodies of requests and answers: JSON for people, npz for speed, read by their spaces; nothing is unpickled."""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl import errors
from jrl.serve.client import flat, plain
from jrl.types import Box, Dict, Discrete, Leaf, PyTree, Space, Tuple

JSON, NPZ = "application/json", "application/x-npz"
CLIENT = "jrl-client"  # header: who a client is, the same in all its requests
_NAME = 128  # characters of an id


class Refused(Exception):
    """A request that cannot be answered as it is asked: an HTTP status of 4xx, and what is wrong in words."""

    def __init__(self, status: int, message: str):
        self.status, self.message = status, errors.message(message)
        super().__init__(self.message)


class Request(NamedTuple):
    """A request that was read."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    most: int = 2**24  # bytes that it may have unpacked
    fields: Mapping[str, Any] | None = None  # of its body, where that was read already


class Response(NamedTuple):
    """An answer that is to be written."""

    status: int
    body: bytes
    kind: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


def client_of(request: Request) -> str:
    """Returns the name that a client gives itself in a request; "" without one. Raises Refused: it is too long."""
    found = request.headers.get(CLIENT, "")
    if len(found) > _NAME:
        raise Refused(400, f"{CLIENT.title()}: expected at most {_NAME} characters, got {len(found):,}")
    return found


# ---------------------------------------------------------------- bodies


def decoded(request: Request) -> dict[str, Any]:
    """Returns the fields of a request's body; of npz those named a/b as a mapping a. Raises Refused."""
    if request.fields is not None:
        return dict(request.fields)
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind == NPZ:
        return _from_npz(request.body, request.most)
    if kind not in (JSON, ""):
        raise Refused(415, f"Content-Type: expected {JSON} or {NPZ}, got {kind[:80]}")
    if not request.body:
        return {}
    try:
        found = json.loads(request.body, parse_constant=_not_finite)
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"the body is no JSON: {str(e)[:200]}") from None
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object, not {type(found).__name__}")
    return found


def _not_finite(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON: all numbers must be finite")


def _from_npz(body: bytes, most: int) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > most:
            raise Refused(413, f"the body unpacks to {size:,} bytes: at most {most:,} are allowed")
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            flat = {name: arrays[name] for name in arrays.files}
    except Refused:
        raise
    except Exception as e:  # numpy and zipfile raise errors of many kinds for what is no npz
        raise Refused(400, f"the body is no npz of numpy: {str(e)[:200]}") from None
    found: dict[str, Any] = {}
    for name, x in flat.items():
        at, *rest = name.split("/")
        part = found
        for inner in rest:
            part = part.setdefault(at, {})
            if not isinstance(part, dict):
                raise Refused(400, f"the body has both {at} and {name}")
            at = inner
        if at in part:
            raise Refused(400, f"the body has {name} twice")
        part[at] = x
    return found


def encoded(fields: Mapping[str, Any], request: Request | None = None, status: int = 200) -> Response:
    """Returns the answer with these fields; as npz where the request was, or asks for it by Accept."""
    headers = request.headers if request is not None else {}
    if NPZ in headers.get("accept", headers.get("content-type", "")):
        buffer = io.BytesIO()
        arrays: dict[str, Any] = dict(flat("", fields))
        np.savez(buffer, allow_pickle=False, **arrays)
        return Response(status, buffer.getvalue(), NPZ)
    return Response(status, json.dumps(fields, default=plain).encode())


def refusal(e: Refused) -> Response:
    """Returns the answer to a request that is refused: always JSON."""
    headers = (("Retry-After", "1"),) if e.status == 429 else ()
    return Response(e.status, json.dumps({"error": e.message}).encode(), JSON, headers)


# ---------------------------------------------------------------- fields


def fields(given: Mapping[str, Any], known: Sequence[str], required: Sequence[str] = ()) -> None:
    """Raises Refused where a body has a field that is not known, or lacks one that is required."""
    for name in given:
        if name not in known:
            raise Refused(400, f"{name[:80]}: there is no such field: expected {', '.join(known) or 'none'}")
    for name in required:
        if given.get(name) is None:
            raise Refused(400, f"{name} is missing")


def text(given: Mapping[str, Any], name: str) -> str | None:
    """Returns a field that is a text of 1 to 128 characters; None where it is left out."""
    found = given.get(name)
    if isinstance(found, np.ndarray) and found.ndim == 0:
        found = found.item()
    if found is None or (isinstance(found, str) and 0 < len(found) <= _NAME and found.isprintable()):
        return found
    raise Refused(422, f"{name}: expected a text of 1 to {_NAME} characters, got {str(found)[:80]!r}")


def texts(given: Any, name: str) -> list[str]:
    """Returns a list of ids."""
    found = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
        raise Refused(422, f"{name}: expected a list of texts")
    return found


def flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns a field that is true or false."""
    found = given.get(name, default)
    if isinstance(found, np.ndarray) and found.ndim == 0:
        found = found.item()
    if not isinstance(found, bool):
        raise Refused(422, f"{name}: expected true or false, got {str(found)[:80]}")
    return found


def whole(given: Mapping[str, Any], name: str, most: int = 2**31 - 1) -> int | None:
    """Returns a field that is a whole number from 0 to `most`; None where it is left out."""
    found = given.get(name)
    if isinstance(found, np.ndarray) and found.ndim == 0:
        found = found.item()
    if found is None or (isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= most):
        return found
    raise Refused(422, f"{name}: expected a whole number of 0 to {most:,}, got {str(found)[:80]}")


NUMBER, WHOLE, _FLAG = Box(()), Box((), "int32"), Box((), "bool")
# Largest size of a number that clients send. Losses square it, and gradients multiply it by others of its size: an
# update with a larger number may not be finite in float32, and would end the run of all clients.
LARGEST = 1e9
_MEND = "scale the environment's numbers down"


def number(given: Mapping[str, Any], name: str) -> float:
    """Returns a field that is a number of at most `LARGEST`; 0 where it is left out."""
    found = given.get(name, 0.0)
    if type(found) is float and abs(found) <= LARGEST:
        return found
    return float(array(NUMBER, found, (), name))


def summed(before: float, reward: float, name: str) -> float:
    """Returns the sum of rewards since an action. Raises Refused: it is beyond `LARGEST`."""
    found = before + reward
    if abs(found) > LARGEST:
        most = f"{name}: expected a sum of at most {LARGEST:g} since the latest action"
        raise Refused(422, f"{most}, got {found:g}: {_MEND}")
    return found


def numbers(given: Any, lead: tuple[int, ...], name: str) -> np.ndarray:
    """Returns [*lead] f32, finite; zeros where the field is left out."""
    return np.zeros(lead, np.float32) if given is None else array(NUMBER, given, lead, name)


def flags(given: Any, lead: tuple[int, ...], name: str) -> np.ndarray:
    """Returns [*lead] bool; False where the field is left out."""
    return np.zeros(lead, bool) if given is None else array(_FLAG, given, lead, name)


# ---------------------------------------------------------------- elements of spaces


def read(space: Space, x: Any, name: str, lead: tuple[int, ...] = ()) -> PyTree:
    """Returns an element of a space, or a batch of them with the leading axes `lead`, in the dtypes of the space.

    Raises:
      Refused: another structure, shape or kind of numbers; numbers that are not finite, or no choice of the space.
    """
    match space:
        case Dict():
            names = [key for key, _ in space.items]
            if not isinstance(x, Mapping) or set(x) != set(names):
                got = ", ".join(map(str, x))[:200] if isinstance(x, Mapping) else type(x).__name__
                raise Refused(422, f"{name}: expected a mapping of {', '.join(names)}, got {got}")
            return {key: read(part, x[key], f"{name}/{key}", lead) for key, part in space.items}
        case Tuple():
            if isinstance(x, Mapping):  # of npz, by number
                x = [x.get(str(i)) for i in range(len(x))]
            if not isinstance(x, list) or len(x) != len(space.items):
                raise Refused(422, f"{name}: expected a list of {len(space.items)} parts")
            return tuple(read(part, x[i], f"{name}/{i}", lead) for i, part in enumerate(space.items))
    return array(space, x, lead, name)


def array(leaf: Leaf, x: Any, lead: tuple[int, ...], name: str) -> np.ndarray:
    """Returns [*lead, *shape] of the dtype of a space of arrays. Raises Refused as `read`."""
    dtype, shape = np.dtype(leaf.dtype), (*lead, *leaf.shape)
    expected = f"{name}: expected {dtype} {list(shape)}"
    try:
        found = np.asarray(x)
    except (ValueError, TypeError, OverflowError):  # rows of different lengths
        raise Refused(422, f"{expected}, got lists of different lengths") from None
    if found.dtype.kind not in "biuf":
        raise Refused(422, f"{expected}, got what is no number")
    if found.shape != shape:
        raise Refused(422, f"{expected}, got {list(found.shape)}")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise Refused(422, f"{expected} of finite numbers, got some that are not")
    if dtype.kind == "f":
        if found.dtype.kind != "b" and ((found > LARGEST) | (found < -LARGEST)).any():
            raise Refused(422, f"{expected} of numbers from {-LARGEST:g} to {LARGEST:g}, got some beyond: {_MEND}")
        return found.astype(dtype, copy=False)
    _check_whole(leaf, found, dtype, expected)
    return found.astype(dtype, copy=False)


def _check_whole(leaf: Leaf, x: np.ndarray, dtype: np.dtype, expected: str) -> None:
    """Raises Refused unless these are whole numbers in the range of the space."""
    if x.dtype.kind == "f" and (x != np.floor(x)).any():
        raise Refused(422, f"{expected} of whole numbers, got fractions")
    low: Any = 0
    if isinstance(leaf, Discrete):
        high: Any = leaf.n - 1
    elif isinstance(leaf, Box):
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    else:
        high = np.asarray(getattr(leaf, "nvec", 2)) - 1
    if ((x < low) | (x > high)).any():
        most = high if np.ndim(high) == 0 else list(map(int, high))
        raise Refused(422, f"{expected} of numbers from {low} to {most}, got some beyond")
