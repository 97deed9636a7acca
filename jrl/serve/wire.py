"""Bodies on the wire: JSON, or npz for speed. Nothing is unpickled."""

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.responses import Response

from jrl import errors
from jrl.serve.client import flatten_tree, nest_paths

JSON, NPZ = "application/json", "application/x-npz"
CLIENT_HEADER = "jrl-client"  # names a client, the same in all its requests
MAX_NAME = 128  # characters of an id


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON: all numbers must be finite")


_DECODER, _ENCODER = json.JSONDecoder(parse_constant=_refuse_constant), json.JSONEncoder(default=lambda x: x.tolist())


class RequestError(Exception):
    """A request that the server refuses: HTTP status 4xx and a message."""

    def __init__(self, status: int, message: str):
        self.status, self.message = status, errors.message(message)
        super().__init__(self.message)


def read_client_name(headers: Mapping[bytes, bytes]) -> str:
    """Returns the client's name from its header; "": no header. Raises RequestError: the name is too long."""
    name = headers.get(CLIENT_HEADER.encode(), b"").decode("latin-1")
    if len(name) > MAX_NAME:
        raise RequestError(400, f"{CLIENT_HEADER.title()}: expected at most {MAX_NAME} characters, got {len(name):,}")
    return name


def decode(body: bytes, headers: Mapping[bytes, bytes], max_bytes: int) -> dict[str, Any]:
    """Returns the fields of a body, without null fields. Fields a/b of npz become a mapping a.

    Args:
      body: JSON, or npz by its Content-Type.
      headers: headers of the request, names in lower case.
      max_bytes: maximum size of unpacked npz.
    Raises:
      RequestError: unknown type, invalid body, or too large once unpacked.
    """
    kind = headers.get(b"content-type", JSON.encode()).partition(b";")[0].strip().lower().decode("latin-1")
    if kind == NPZ:
        return _decode_npz(body, max_bytes)
    if kind not in (JSON, ""):
        raise RequestError(415, f"Content-Type: expected {JSON} or {NPZ}, got {kind[:80]}")
    if not body:
        return {}
    try:
        fields = _DECODER.decode(body.decode())
    except (ValueError, RecursionError) as e:
        raise RequestError(400, f"the body is not JSON: {str(e)[:200]}") from None
    if not isinstance(fields, dict):
        raise RequestError(400, f"the body must be a JSON object, not {type(fields).__name__}")
    return {name: x for name, x in fields.items() if x is not None}


def _decode_npz(body: bytes, max_bytes: int) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > max_bytes:
            raise RequestError(413, f"the body unpacks to {size:,} bytes: at most {max_bytes:,} are allowed")
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            values = {name: arrays[name] for name in arrays.files}
            return nest_paths({name: x.item() if x.ndim == 0 else x for name, x in values.items()})
    except RequestError:
        raise
    except Exception as e:  # numpy and zipfile raise many error types for bytes that are not npz
        raise RequestError(400, f"the body is not npz of numpy: {str(e)[:200]}") from None


def encode(fields: Mapping[str, Any], headers: Mapping[bytes, bytes] | None = None, status: int = 200) -> Response:
    """Returns the response with these fields: npz if the request's Accept or Content-Type names npz, else JSON."""
    known = headers or {}
    if NPZ.encode() in known.get(b"accept", known.get(b"content-type", b"")):
        buffer = io.BytesIO()
        arrays: dict[str, Any] = dict(flatten_tree("", fields))
        np.savez(buffer, allow_pickle=False, **arrays)
        return Response(buffer.getvalue(), status, media_type=NPZ)
    return Response(_ENCODER.encode(fields), status, media_type=JSON)


def build_error_response(e: RequestError) -> Response:
    """Returns the response to a refused request: always JSON."""
    headers = {"Retry-After": "1"} if e.status == 429 else None
    return Response(json.dumps({"error": e.message}), e.status, headers, JSON)
