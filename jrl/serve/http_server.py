"""uvicorn in a thread of its own, and the checks that each request passes before a route sees it.

Token, host, origin, rate and size are settled by the head of a request. Its body is read after that, whole.
"""

import asyncio
import contextlib
import functools
import hmac
import http
import ipaddress
import logging
import re
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jrl.config.external import ExternalConfig
from jrl.errors import InputError
from jrl.fields.paths import resolve
from jrl.serve.wire import CLIENT, JSON, Refused, refusal

_MOST_HEAD = 16_384  # bytes of a head that comes in pieces
_REQUEST_S = 10.0  # seconds for a request that has begun, until it is whole
_DRAIN_S, _MOST_DRAINED = 2.0, 128 * 2**20  # for the body of a refused request, so that its client gets to the answer
_MOST_REFUSED = 256  # connections beyond the limit that get an answer at a time; others are closed at once
_ANY = "*"
_ORIGIN = re.compile(r"https?://[^\s/?#@*,]+", re.IGNORECASE)
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d*)?", re.IGNORECASE)

Headers = Mapping[bytes, bytes]  # names in lower case


# ---------------------------------------------------------------- address, token and origins


class Address:
    """The address of the `external` section, taken; connections are refused until a server answers there.

    Attributes:
      is_taken: whether a server answers there, or did.

    Raises:
      InputError: the address is taken, not of this machine, or can be reached by others without a token; the files of
        token or certificate are not valid; an origin is not valid, or needs a token.
    """

    def __init__(self, cfg: ExternalConfig):
        self.cfg, self.token, self.is_taken = cfg, _token(cfg), False
        _check_certificate(cfg)
        self.origins = _origins(cfg, self.token)
        self.socket = _bound(cfg, self.token)
        host, port = self.socket.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if cfg.certificate else ''}://{name}:{port}"

    @property
    def most_bytes(self) -> int:
        """Returns the bytes that a body may have."""
        return int(self.cfg.max_body_mb * 2**20)

    def close(self) -> None:
        """Frees the address."""
        self.socket.close()


def _bound(cfg: ExternalConfig, token: bytes | None) -> socket.socket:
    try:
        found = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except OSError as e:
        raise InputError(f"external.host {cfg.host}: {e.strerror}: name an address of this machine") from e
    family, kind, protocol, _, address = found[0]
    if token is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise InputError(
            f"external.host {cfg.host} can be reached from other machines, and nothing says who may: set "
            "external.token_file (--token-file)"
        )
    # asyncio sends small packets at once only where the socket names TCP: an answer would wait 40 ms for its body
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as e:
        sock.close()
        raise InputError(
            f"external.port {cfg.port}: cannot listen at {cfg.host}:{cfg.port} ({e.strerror}): name another port"
        ) from e
    return sock


def _token(cfg: ExternalConfig) -> bytes | None:
    if cfg.token_file is None:
        return None
    try:
        words = resolve(cfg.token_file, "external.token_file", "file").read_text().split()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"external.token_file: cannot read {cfg.token_file}: {e}") from e
    if not words or len(words[0]) < 16 or not words[0].isascii():
        raise InputError(
            f"external.token_file: {cfg.token_file} must hold a secret of 16 characters or more, such as what "
            "python -c 'import secrets; print(secrets.token_hex())' prints"
        )
    return words[0].encode()


def _check_certificate(cfg: ExternalConfig) -> None:
    if cfg.certificate is None:
        return
    for name in ("certificate", "private_key"):
        if getattr(cfg, name) is not None:
            resolve(getattr(cfg, name), f"external.{name}", "file")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cfg.certificate, cfg.private_key)
    except (OSError, ssl.SSLError) as e:
        raise InputError(f"external.certificate: cannot use {cfg.certificate}: {e}") from e


def _origins(cfg: ExternalConfig, token: bytes | None) -> frozenset[bytes]:
    for origin in cfg.origins:
        if origin == _ANY:
            if token is None:
                raise InputError(
                    f"external.origins: {_ANY} lets every page play that anybody here opens: name the origins, or set "
                    "external.token_file (--token-file)"
                )
        elif not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"external.origins: {origin!r} is not an origin: expected http://HOST or http://HOST:PORT without a "
                "path, as the address of the page begins"
            )
    return frozenset(origin.lower().encode() for origin in cfg.origins)


# ---------------------------------------------------------------- requests


class Gate:
    """An ASGI application: checks each request, reads its body, calls the routes, and answers for all that fails.

    Routes find `headers` and `body` in scope["state"].

    """

    def __init__(self, routes: ASGIApp, address: Address):
        self._routes, self._cfg, self._token, self._origins = routes, address.cfg, address.token, address.origins
        self._most = address.most_bytes
        self.requests = self.refused = 0  # so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        scope["state"]["headers"], scope["app"] = headers, self
        connection: Connection = scope["state"]["connection"]
        closes = [] if connection.is_admitted else [(b"connection", b"close")]
        for_browsers: list[tuple[bytes, bytes]] = []
        is_read = False
        self.requests += 1

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.refused += message["status"] >= 400
                message["headers"] += [*for_browsers, *closes]
            await send(message)

        try:
            _check_connection(connection, scope, headers)
            if self._token is None:
                _check_host(headers)
            for_browsers += self._check_origin(headers)
            self._check_rate(connection)
            if _is_preflight(scope, headers):
                await _preflight(headers)(scope, receive, answer)
                return
            self._check_token(scope, headers)
            scope["state"]["body"] = await self._body(headers, receive)
            is_read = True
            await self._routes(scope, receive, answer)
        except (Refused, HTTPException) as e:
            found = e if isinstance(e, Refused) else _not_routed(scope, e)
            if not is_read and found.status == 400:  # where the next request begins is not certain
                closes = [(b"connection", b"close")]
            if is_read or not _has_body(headers):
                await refusal(found)(scope, receive, answer)
            else:
                await self._refuse_body(found, headers, receive, answer)
        except (ConnectionError, asyncio.CancelledError):  # the client is gone, or the server ends
            pass
        except Exception:  # a fault of ours must not end the server
            if connection.transport.is_closing():  # uvloop raises RuntimeError for an answer to a client that is gone
                return
            traceback.print_exc()
            failed = b'{"error": "the server failed on this request; its log tells more"}'
            await Response(failed, 500, media_type=JSON)(scope, receive, answer)

    def _check_origin(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Returns the headers of an answer to a page. Raises Refused: pages of this origin may not play.

        Pages of any site reach the ports of their reader's machine; clients that are not pages name no origin.
        """
        origin = headers.get(b"origin")
        if origin is None:
            return []
        if _ANY.encode() not in self._origins and origin not in self._origins:
            raise Refused(403, f"pages of {_text(origin)} may not play: name it in external.origins")
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]

    def _check_rate(self, connection: "Connection") -> None:
        if rate := self._cfg.max_rate:
            now, most = time.monotonic(), max(1.0, rate)  # a second's requests at once
            connection.tokens = min(most, connection.tokens + (now - connection.counted) * rate)
            connection.counted = now
            if connection.tokens < 1.0:
                raise Refused(429, f"more than {rate:g} requests per second: send several steps in one request")
            connection.tokens -= 1.0

    def _check_token(self, scope: Scope, headers: Headers) -> None:
        if self._token is None or scope["path"] == "/v1/health":
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + self._token):
            raise Refused(401, "a token is needed: send the header Authorization: Bearer TOKEN")

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        size = int(headers.get(b"content-length", 0))
        if size > self._most:
            raise Refused(413, f"the body has {size:,} bytes: at most {self._most:,} are allowed")
        body, more = bytearray(), True  # parts may be single bytes, so that a list of them would be large
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError
            body += message["body"]
            if len(body) > self._most:
                raise Refused(413, f"the body has more than the {self._most:,} bytes that are allowed")
            more = message["more_body"]
        return bytes(body)

    async def _refuse_body(self, e: Refused, headers: Headers, receive: Receive, send: Send) -> None:
        """Answers at once, and drops the body that follows: closed before, the connection would be reset."""
        response = refusal(e)
        waits = b"expect" in headers  # its client sends the body or another request: nobody could know which
        known = int(headers.get(b"content-length", self._most + 1))
        if waits or known > self._most:
            response.headers["Connection"] = "close"
        await send({"type": "http.response.start", "status": e.status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        dropped, more = 0, not waits
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while more and dropped < _MOST_DRAINED:
                    message = await receive()
                    more = message.get("more_body", False)
                    dropped += len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_connection(connection: "Connection", scope: Scope, headers: Headers) -> None:
    if not connection.is_admitted:
        most = connection.owner.address.cfg.max_clients
        raise Refused(429, f"there are {most} connections, as many as are allowed: try later")
    for name in (b"host", b"content-length"):  # headers that decide if a request is let in, and how it is read
        if len(headers) < len(scope["headers"]) and sum(name == other for other, _ in scope["headers"]) > 1:
            raise Refused(400, f"{name.decode().title()} was sent twice")


def _check_host(headers: Headers) -> None:
    """Raises Refused: the request names a host that is not this machine's own name or loopback address.

    Without a token a page could otherwise read by a name that first led to its site, and then here (DNS rebinding).
    Clients that name no host are not browsers.
    """
    given = headers.get(b"host")
    if given is None:
        return
    found = _HOST.fullmatch(given.decode("latin-1"))
    name = (found[1] or found[2]).lower() if found else ""
    try:
        known = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        known = False
    if not known:
        raise Refused(
            403,
            f"Host: expected localhost, 127.0.0.1 or [::1], got {_text(given)}: a page may have led its own name here. "
            "Ask by one of these, or set external.token_file (--token-file)",
        )


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """Returns whether a browser asks what a page may send, for which it shows no token."""
    return scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= headers.keys()


def _preflight(headers: Headers) -> Response:
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": f"authorization, content-type, {CLIENT}",
        "Access-Control-Max-Age": "600",
    }
    if b"access-control-request-private-network" in headers:
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(b"{}", headers=allowed, media_type=JSON)


def _not_routed(scope: Scope, e: HTTPException) -> Refused:
    path = scope["path"][:200]
    if e.status_code == 405:
        return Refused(405, f"{path} takes {(e.headers or {}).get('Allow')}, not {scope['method'][:20]}")
    return Refused(e.status_code, f"there is no {path}: /docs shows what there is")


def _has_body(headers: Headers) -> bool:
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def _text(header: bytes) -> str:
    return header.decode("latin-1")[:200]


# ---------------------------------------------------------------- connections


class Connection(HttpToolsProtocol):
    """uvicorn's connection with the limits that uvicorn does not have.

    It has a place among `max_clients` or is refused, a head must come whole and soon, a silent connection is closed,
    and so is a client that does not read its answers.
    """

    def __init__(self, owner: "HttpServer", *, app_state: dict[str, Any], **options: Any):
        super().__init__(app_state={**app_state, "connection": self}, **options)
        self.owner, self.is_admitted = owner, False
        self.counted, self.tokens = time.monotonic(), max(1.0, owner.address.cfg.max_rate)
        self._head, self._in_body, self._unsent = 0, False, 0
        self._sent = self.counted
        self._deadline = self.counted + owner.address.cfg.timeout_s

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        admitted = self.owner.admitted
        self.is_admitted = len(admitted) < self.owner.address.cfg.max_clients
        if self.owner.is_closed or len(self.connections) - len(admitted) > _MOST_REFUSED:
            transport.abort()
        elif self.is_admitted:
            admitted.add(self)
        else:
            self._deadline = self.counted + _REQUEST_S

    def connection_lost(self, exc: Exception | None) -> None:
        self.owner.admitted.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        self._deadline = min(self._deadline, time.monotonic() + _REQUEST_S)
        super().data_received(data)
        if self._head > _MOST_HEAD and not self._in_body and not self.transport.is_closing():
            self._refuse(Refused(431, f"the headers have more than {_MOST_HEAD:,} bytes"))

    def on_headers_complete(self) -> None:
        self._head, self._in_body = 0, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head, self._in_body = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._deadline = time.monotonic() + self.owner.address.cfg.timeout_s
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(400, msg))

    def _refuse(self, e: Refused) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            if not self.cycle.more_body:  # requests before this one get their answers, and nothing follows them
                self.cycle.keep_alive = False
                self.flow.pause_reading()
                return
            self.cycle.disconnected = True  # its body is wrong
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        body = refusal(e).body
        head = (
            f"HTTP/1.1 {e.status} {http.HTTPStatus(e.status).phrase}", f"Content-Type: {JSON}",
            f"Content-Length: {len(body)}", "Connection: close", "\r\n",
        )  # fmt: skip
        self.transport.write("\r\n".join(head).encode() + bytes(body))
        self.transport.close()

    def close_if_late(self, now: float) -> None:
        """Closes it where nothing comes any more, or its client reads no answer."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if self._unsent < before or not self._unsent:
            self._sent = now
        if now - self._sent > self.owner.address.cfg.timeout_s:
            self.transport.abort()
        elif now > self._deadline and (self.cycle is None or self.cycle.response_complete or self.cycle.more_body):
            if self._head or self._in_body:
                self._refuse(Refused(408, f"the request was not complete within {_REQUEST_S:g} s"))
            else:
                self.transport.close()


class HttpServer:
    """uvicorn in a thread of its own, which also calls `tick` every second; `routes` are behind `Gate`."""

    def __init__(self, routes: ASGIApp, address: Address, tick: Callable[[], None]):
        self.address, self.gate, self._tick = address, Gate(routes, address), tick
        self.admitted: set[Connection] = set()  # connections that have a place
        self.is_closed = False  # whether `stop` was called
        connection: Any = functools.partial(Connection, self)
        config = uvicorn.Config(
            self.gate, http=connection, ws="none", lifespan="off", interface="asgi3", proxy_headers=False,
            log_config=None, access_log=False, server_header=False, date_header=False, backlog=512,
            callback_notify=self._every_second, timeout_notify=0, timeout_graceful_shutdown=1,
            timeout_keep_alive=int(address.cfg.timeout_s) + 1, ssl_certfile=address.cfg.certificate,
            ssl_keyfile=address.cfg.private_key,
        )  # fmt: skip
        # what it logs are clients that send nonsense or go away; `Gate` prints our own faults
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._uvicorn = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="jrl-http", daemon=True)

    def open(self) -> None:
        """Answers from now on."""
        self.address.is_taken = True
        self._thread.start()
        while not self._uvicorn.started and self._thread.is_alive():
            time.sleep(0.005)
        if not self._uvicorn.started:
            raise RuntimeError(f"the server at {self.address.url} did not start: its thread has printed why")

    def soon(self, fn: Callable[..., None], *args: Any) -> None:
        """Calls a function in the server's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(fn, *args)

    def stop(self) -> None:
        """Accepts no connection any more and closes all; in the server's thread."""
        self.is_closed = self._uvicorn.should_exit = True
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        for task in list(self._uvicorn.server_state.tasks):
            task.cancel()

    def close(self) -> None:
        """Stops, and waits for the thread."""
        self.soon(self.stop)
        if self._thread.is_alive():
            self._thread.join(5.0)
        self.address.close()

    def _run(self) -> None:
        factory = self._uvicorn.config.get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            self._loop = runner.get_loop()
            runner.run(self._uvicorn.serve(sockets=[self.address.socket]))

    async def _every_second(self) -> None:
        now, connections = time.monotonic(), list[Any](self._uvicorn.server_state.connections)
        for connection in connections:
            connection.close_if_late(now)
        self._tick()
