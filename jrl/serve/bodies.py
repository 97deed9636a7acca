"""Bodies of requests, read before a lock is taken: large ones in a thread of their own, so that others do not wait."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jrl.serve import protocol
from jrl.serve.protocol import Request

_LARGE = 2**18  # bytes


class Bodies:
    """Reads bodies.

    Args:
      soon: calls a function in the thread of all connections.
    """

    def __init__(self, soon: Callable[..., None]):
        self._soon = soon
        self._pool = ThreadPoolExecutor(1, "jrl-bodies")

    def read(self, request: Request, then: Callable[[Request | Exception], None]) -> None:
        """Goes on, in the thread of all connections, with a request whose fields were read, or why they were not."""
        if request.method != "POST":
            then(request)
        elif len(request.body) > _LARGE:
            self._pool.submit(lambda: self._soon(then, _with_fields(request)))
        else:
            then(_with_fields(request))

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(cancel_futures=True)


def _with_fields(request: Request) -> Any:
    try:
        return request._replace(fields=protocol.decoded(request))
    except Exception as e:  # who answers tells the client
        return e
