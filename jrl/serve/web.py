"""HTTP/1.1 with connections that stay open, on asyncio: requests are read whole or refused, answers may come later.

One thread has all connections. What is not asked for is not there: no chunked bodies, no upgrades, no files.
Who may ask is settled by the head of a request, before any of its body is stored.
"""

import asyncio
import hmac
import re
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from jrl.serve import origins
from jrl.serve.protocol import Refused, Request, Response, refusal

_MOST_HEAD = 16_384  # bytes of the request line and headers
_HALF_S = 10.0  # seconds for the rest of a request that has begun
# what other readers of the same bytes might take for the end of a line; the LF of a CR at the very end may be to come
_STRAY = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?!\n|\Z)")
_ONCE = ("content-length", "host")  # headers that decide how a request is read, or whether it is let in
_LINGER_S = 2.0  # seconds in which the rest of a refused request is thrown away, so that its client gets to the answer
_MOST_REFUSED = 256  # connections beyond the limit at a time that get an answer; the others are closed at once
_MOST_THROWN = 128 * 2**20  # bytes, likewise: the kernel resets a connection that is closed with bytes unread

Reply = Callable[[Response], None]
Handler = Callable[[Request, Reply], None]  # answers a request, now or later, in any thread; Refused is an answer


class Limits(NamedTuple):
    """Limits of clients."""

    body: int  # bytes of a request
    clients: int  # connections at a time
    rate: float  # requests per second of a connection; 0: any number
    idle_s: float  # without a request until a connection is closed
    token: bytes | None  # what `Authorization: Bearer` has to say; None: nothing
    origins: frozenset[str] = frozenset()  # of pages in browsers that may ask


class Web:
    """A server in a thread of its own.

    Args:
      handler: answers.
      limits: see there.
      tick: called every second, in the server's thread.
    Attributes:
      requests, refused: so far.
      clients: connections now.
    """

    def __init__(self, handler: Handler, limits: Limits, *, tick: Callable[[], None] = lambda: None):
        self.handler, self.limits, self._tick = handler, limits, tick
        self.requests = self.refused = 0
        self.connections: set[_Connection] = set()
        self._refused: set[_Connection] = set()  # that are read until their clients have the answer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="jrl-http", daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def clients(self) -> int:
        return len(self.connections)

    def open(self, sock: Any, context: ssl.SSLContext | None = None) -> None:
        """Answers at a socket that is bound, from now on; over TLS with a context."""
        self._thread.start()

        async def begin() -> None:
            self._server = await self._loop.create_server(
                lambda: _Connection(self), sock=sock, ssl=context, backlog=512
            )
            self._loop.call_later(1.0, self._every_second)

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10.0)

    def lingers(self, connection: "_Connection") -> bool:
        """Returns whether one connection more may wait until its client has read that there are too many."""
        if len(self._refused) >= _MOST_REFUSED:
            return False
        self._refused.add(connection)
        return True

    def forget(self, connection: "_Connection") -> None:
        """Drops a connection that was lost."""
        self.connections.discard(connection)
        self._refused.discard(connection)

    def soon(self, fn: Callable[..., None], *args: Any) -> None:
        """Calls it in the server's thread: one call for many answers."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(fn, *args)

    def close(self) -> None:
        """Closes all connections."""
        if not self._thread.is_alive():
            return

        def end() -> None:
            self.stop()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        self._thread.join(5.0)

    def stop(self) -> None:
        """Accepts no connection any more and closes those that there are; in the server's thread."""
        if self._server is not None:
            self._server.close()
        for connection in [*self.connections, *self._refused]:
            connection.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _every_second(self) -> None:
        now = time.monotonic()
        for connection in list(self.connections):
            connection.look(now)
        self._tick()
        self._loop.call_later(1.0, self._every_second)


class _Connection(asyncio.Protocol):
    """One client's connection: a request at a time."""

    def __init__(self, web: Web):
        self._web = web
        self.transport: Any = None
        self._buffer = bytearray()
        self._request: Request | None = None  # whose head was read and let in, and its body not yet
        self._size = 0  # of its body
        self._skip = 0  # bytes to come of a body that nobody wants
        self._thrown, self._linger = 0, False  # bytes after the last answer; whether more of a request may come then
        self._busy = self._full = False  # an answer is under way; the client does not read those that it got
        self._unsent = 0
        self._heard = self._begun = time.monotonic()  # the last byte, the first byte of the request
        self._tokens, self._counted = max(1.0, web.limits.rate), self._heard
        self._keep = True
        self._told: tuple[tuple[str, str], ...] = ()  # of the present request: what a browser wants to know

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if self._web.clients >= self._web.limits.clients:
            if not self._web.lingers(self):
                transport.abort()
                return
            most = f"there are {self._web.clients} connections, as many as are allowed: try later"
            # the request is on its way: closed before it is read, the connection would be reset without the answer
            self._refuse(Refused(429, most))
            return
        self._web.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._web.forget(self)
        self._keep = False

    def data_received(self, data: bytes) -> None:
        if not self._keep:
            self._thrown += len(data)
            if self._thrown > _MOST_THROWN:
                self.transport.close()
            return
        self._heard = time.monotonic()
        if not self._buffer and self._request is None and not self._skip:
            self._begun = self._heard
        self._buffer += data
        self._throw_away()
        if not self._busy and not self._full:
            self._next()
        elif len(self._buffer) > self._web.limits.body + _MOST_HEAD:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self._full = True
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._full = False
        self.transport.resume_reading()
        if self._buffer:
            self._begun = time.monotonic()
            self._web.soon(self._again)

    def look(self, now: float) -> None:
        """Closes it where nothing comes, or nothing is read, any more."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if self._unsent < before:
            self._heard = now
        if self._full or self.transport.is_closing():
            if now - self._heard > self._web.limits.idle_s:
                self.transport.abort()
        elif not self._busy:
            late = now - self._begun > _HALF_S
            if late and (self._buffer or self._request is not None):
                self._refuse(Refused(408, f"the request was not complete within {_HALF_S:g} s"))
            elif (late and self._skip) or now - self._heard > self._web.limits.idle_s:
                self.transport.close()

    def _next(self) -> None:
        """Answers the first request of the buffer, once it is whole."""
        try:
            if self._request is None:
                self._let_in()
            if self._request is None or len(self._buffer) < self._size:
                return
            request = self._request._replace(body=bytes(self._buffer[: self._size]))
            del self._buffer[: self._size]
            self._request, self._busy, self._linger = None, True, False
            self._keep = request.headers.get("connection", "").lower() != "close"
            self._begun = time.monotonic()
            if origins.is_question(request):
                self._reply(origins.answer(request))
            else:
                self._web.handler(request, self._reply)
        except Refused as e:
            self._busy = True
            self._throw_away()
            self._reply(refusal(e))

    def _let_in(self) -> None:
        """Reads the head of a request, and settles by it whether there is an answer. Raises Refused."""
        self._told, self._linger = (), True
        end = self._buffer.find(b"\r\n\r\n")
        if _STRAY.search(self._buffer, 0, end + 4 if end >= 0 else len(self._buffer)):
            self._keep = False
            raise Refused(400, "the headers have a CR or LF alone, or another control character")
        if end < 0 or end > _MOST_HEAD:
            if len(self._buffer) > _MOST_HEAD:
                self._keep = False
                raise Refused(431, f"the headers have more than {_MOST_HEAD:,} bytes")
            return
        try:
            method, target, headers = _head(bytes(self._buffer[:end]))
            size = _size(headers)
        except Refused:
            self._keep = False
            raise
        del self._buffer[: end + 4]
        self._skip = size  # where it is refused below
        # who waits for 100 Continue may send the body or another request after a refusal: nobody could tell which
        waits = headers.get("expect", "").lower() == "100-continue" and len(self._buffer) < size
        keep = headers.get("connection", "").lower() != "close"
        self._keep = keep and not waits and size <= self._web.limits.body
        path, _, query = target.partition("?")
        request = Request(method, unquote(path), dict(parse_qsl(query)), headers, b"", self._web.limits.body)
        self._web.requests += 1
        if self._web.limits.token is None:
            origins.of_this_machine(request)
        self._told = origins.headers(request, self._web.limits.origins)
        self._admit(request)
        if size > self._web.limits.body:
            raise Refused(413, f"the body has {size:,} bytes: at most {self._web.limits.body:,} are allowed")
        self._request, self._size, self._skip, self._keep = request, size, 0, True
        if waits and not self._buffer:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _throw_away(self) -> None:
        """Forgets what came of a body that nobody wants."""
        if self._skip:
            count = min(self._skip, len(self._buffer))
            del self._buffer[:count]
            self._skip -= count

    def _admit(self, request: Request) -> None:
        """Raises Refused: the token is missing, or requests come too fast."""
        limits = self._web.limits
        if limits.rate:
            now = time.monotonic()
            most = max(1.0, limits.rate)  # of a second's requests at once
            self._tokens = min(most, self._tokens + (now - self._counted) * limits.rate)
            self._counted = now
            if self._tokens < 1.0:
                raise Refused(429, f"more than {limits.rate:g} requests per second: send several steps in one request")
            self._tokens -= 1.0
        if limits.token is not None and request.path != "/v1/health" and not origins.is_question(request):
            given = request.headers.get("authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, b"Bearer " + limits.token):
                raise Refused(401, "a token is needed: send the header Authorization: Bearer TOKEN")

    def _refuse(self, e: Refused) -> None:
        self._keep, self._busy, self._linger = False, True, True
        self._reply(refusal(e))

    def _reply(self, response: Response) -> None:
        """Writes an answer; in the server's thread."""
        if self.transport.is_closing():
            return
        if response.status >= 400:
            self._web.refused += 1
        lines = [
            f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}",
            f"Content-Type: {response.kind}",
            f"Content-Length: {len(response.body)}",
            *(f"{name}: {value}" for name, value in (*response.headers, *self._told)),
            *(() if self._keep else ("Connection: close",)),
        ]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + response.body)
        if not self._keep:
            self._end()
            return
        self._busy = False
        self._heard = time.monotonic()
        if self._full:
            return
        self.transport.resume_reading()
        if self._buffer:
            self._begun = self._heard
            self._web.soon(self._again)

    def _end(self) -> None:
        """Closes it: at once, or as the client has read the answer where more of its request is to come."""
        if not self._linger:
            self.transport.close()
            return
        self._buffer.clear()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_S, self.transport.close)

    def _again(self) -> None:
        if not self._busy and not self._full and self._keep:
            self._next()


def _head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Returns (method, target, headers by their names in lower case). Raises Refused where that is no HTTP/1.1."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0") or not parts[1].startswith("/"):
        raise Refused(400, "the first line is no request of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip():
            raise Refused(400, "a header line is no name: value")
        if name in _ONCE and name in headers:
            raise Refused(400, f"{name.title()} stands there twice")
        headers[name] = value.strip()
    if parts[2] == "HTTP/1.0":
        headers["connection"] = "close"
    return parts[0], parts[1], headers


def _size(headers: dict[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise Refused(411, "send the body with Content-Length, not in chunks")
    given = headers.get("content-length", "0")
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise Refused(400, "Content-Length is no number of bytes")
    return int(given)
