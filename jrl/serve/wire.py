"""Bodies on the wire: JSON for people, npz for speed; nothing is unpickled."""

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.responses import Response

from jrl import errors
from jrl.serve.client import flat, nested

JSON, NPZ = "application/json", "application/x-npz"
CLIENT = "jrl-client"  # header that names a client, the same in all its requests
NAME = 128  # characters of an id, at most


def _not_finite(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON: all numbers must be finite")


_DECODER, _ENCODER = json.JSONDecoder(parse_constant=_not_finite), json.JSONEncoder(default=lambda x: x.tolist())


class Refused(Exception):
    """A request that cannot be fulfilled: an HTTP status of 4xx, and what is wrong in words."""

    def __init__(self, status: int, message: str):
        self.status, self.message = status, errors.message(message)
        super().__init__(self.message)


def client_name(headers: Mapping[bytes, bytes]) -> str:
    """Returns the name that a client gives itself; "" without one. Raises Refused: the name is too long."""
    found = headers.get(CLIENT.encode(), b"").decode("latin-1")
    if len(found) > NAME:
        raise Refused(400, f"{CLIENT.title()}: expected at most {NAME} characters, got {len(found):,}")
    return found


def decoded(body: bytes, headers: Mapping[bytes, bytes], most: int) -> dict[str, Any]:
    """Returns the fields of a body, without those that are null; of npz fields a/b become a mapping a.

    Args:
      body: JSON, or npz by its Content-Type.
      headers: of the request, names in lower case.
      most: bytes of npz, unpacked.
    Raises:
      Refused: another type, not valid, or too large once unpacked.
    """
    kind = headers.get(b"content-type", JSON.encode()).partition(b";")[0].strip().lower().decode("latin-1")
    if kind == NPZ:
        return _from_npz(body, most)
    if kind not in (JSON, ""):
        raise Refused(415, f"Content-Type: expected {JSON} or {NPZ}, got {kind[:80]}")
    if not body:
        return {}
    try:
        found = _DECODER.decode(body.decode())
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"the body is not JSON: {str(e)[:200]}") from None
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object, not {type(found).__name__}")
    return {name: x for name, x in found.items() if x is not None}


def _from_npz(body: bytes, most: int) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > most:
            raise Refused(413, f"the body unpacks to {size:,} bytes: at most {most:,} are allowed")
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
            return nested({name: x.item() if x.ndim == 0 else x for name, x in found.items()})
    except Refused:
        raise
    except Exception as e:  # numpy and zipfile raise errors of many kinds for bytes that are not npz
        raise Refused(400, f"the body is not npz of numpy: {str(e)[:200]}") from None


def encoded(fields: Mapping[str, Any], headers: Mapping[bytes, bytes] | None = None, status: int = 200) -> Response:
    """Returns the answer with these fields: npz if the request of these headers was, or asks for it by Accept."""
    known = headers or {}
    if NPZ.encode() in known.get(b"accept", known.get(b"content-type", b"")):
        buffer = io.BytesIO()
        arrays: dict[str, Any] = dict(flat("", fields))
        np.savez(buffer, allow_pickle=False, **arrays)
        return Response(buffer.getvalue(), status, media_type=NPZ)
    return Response(_ENCODER.encode(fields), status, media_type=JSON)


def refusal(e: Refused) -> Response:
    """Returns the answer to a refused request: always JSON."""
    headers = {"Retry-After": "1"} if e.status == 429 else None
    return Response(json.dumps({"error": e.message}), e.status, headers, JSON)
