"""uvicorn in its own thread, and the checks of each request before its route.

Token, host, origin, rate and size are checked by the head of a request, before the server reads the body.
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
from jrl.serve.wire import CLIENT_HEADER, JSON, RequestError, build_error_response

_MAX_HEAD = 16_384  # bytes of the head of a request
_REQUEST_S = 10.0  # seconds from the first to the last byte of a request
_DRAIN_S, _MAX_DRAINED = 2.0, 128 * 2**20  # limits for reading a refused body, so that the client reads the answer
_MAX_REFUSED = 256  # connections beyond `max_clients` that get an answer; more are closed at once
_ANY = "*"
_ORIGIN = re.compile(r"https?://[^\s/?#@*,]+", re.IGNORECASE)
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d*)?", re.IGNORECASE)

Headers = Mapping[bytes, bytes]  # names in lower case


# ---------------------------------------------------------------- address, token and origins


class Address:
    """Bound address of the `external` section. Connections are refused until a server listens.

    Args:
      cfg: section `external`.
    Attributes:
      is_used: whether a server listens or has listened.
      url: http://HOST:PORT or https://HOST:PORT.
    Raises:
      InputError: the address is in use, not of this machine, or reachable by other machines without a token; invalid
        file of token or certificate; invalid origin, or an origin that needs a token.
    """

    def __init__(self, cfg: ExternalConfig):
        self.cfg, self.token, self.is_used = cfg, _read_token(cfg), False
        _check_certificate(cfg)
        self.origins = _parse_origins(cfg, self.token)
        self.socket = _bind_socket(cfg, self.token)
        host, port = self.socket.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if cfg.certificate else ''}://{name}:{port}"

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a body."""
        return int(self.cfg.max_body_mb * 2**20)

    def close(self) -> None:
        """Free the address."""
        self.socket.close()


def _bind_socket(cfg: ExternalConfig, token: bytes | None) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except OSError as e:
        raise InputError(f"external.host {cfg.host}: {e.strerror}: name an address of this machine") from e
    family, kind, protocol, _, address = addresses[0]
    if token is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise InputError(
            f"external.host {cfg.host} can be reached from other machines without a token: set external.token_file "
            "(--token-file)"
        )
    # asyncio disables Nagle's delay only for sockets that name TCP: an answer would wait 40 ms for its body
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


def _read_token(cfg: ExternalConfig) -> bytes | None:
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


def _parse_origins(cfg: ExternalConfig, token: bytes | None) -> frozenset[bytes]:
    for origin in cfg.origins:
        if origin == _ANY:
            if token is None:
                raise InputError(
                    f"external.origins: {_ANY} lets all pages play that users of this machine open: name the origins, "
                    "or set external.token_file (--token-file)"
                )
        elif not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"external.origins: {origin!r} is not an origin: expected http://HOST or http://HOST:PORT without a "
                "path"
            )
    return frozenset(origin.lower().encode() for origin in cfg.origins)


# ---------------------------------------------------------------- requests


class Gate:
    """ASGI application that checks each request, reads its body, calls the routes, and reports their errors.

    Routes read `headers` and `body` from scope["state"].
    """

    def __init__(self, routes: ASGIApp, address: Address):
        self._routes, self._cfg, self._token, self._origins = routes, address.cfg, address.token, address.origins
        self._max_bytes = address.max_body_bytes
        self.requests = self.refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        scope["state"]["headers"], scope["app"] = headers, self
        connection: Connection = scope["state"]["connection"]
        closes = [] if connection.is_admitted else [(b"connection", b"close")]
        cors_headers: list[tuple[bytes, bytes]] = []
        is_read = False
        self.requests += 1

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.refused += message["status"] >= 400
                message["headers"] += [*cors_headers, *closes]
            await send(message)

        try:
            _check_connection(connection, scope, headers)
            if self._token is None:
                _check_host(headers)
            cors_headers += self._check_origin(headers)
            self._check_rate(connection)
            if _is_preflight(scope, headers):
                await _build_preflight_response(headers)(scope, receive, answer)
                return
            self._check_token(scope, headers)
            scope["state"]["body"] = await self._read_body(headers, receive)
            is_read = True
            await self._routes(scope, receive, answer)
        except (RequestError, HTTPException) as e:
            error = e if isinstance(e, RequestError) else _convert_error(scope, e)
            if not is_read and error.status == 400:  # the start of the next request is unknown
                closes = [(b"connection", b"close")]
            if is_read or not _has_body(headers):
                await build_error_response(error)(scope, receive, answer)
            else:
                await self._refuse_body(error, headers, receive, answer)
        except (ConnectionError, asyncio.CancelledError):  # the client has disconnected, or the server stops
            pass
        except Exception:  # an error in a route must not end the server
            if connection.transport.is_closing():  # uvloop raises RuntimeError for an answer to a disconnected client
                return
            traceback.print_exc()
            failed = b'{"error": "the server failed on this request; its log has the traceback"}'
            await Response(failed, 500, media_type=JSON)(scope, receive, answer)

    def _check_origin(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer to a page. Raises RequestError: an origin that the config does not allow.

        A page of any site can reach the ports of its reader's machine. Clients other than pages send no origin.
        """
        origin = headers.get(b"origin")
        if origin is None:
            return []
        if _ANY.encode() not in self._origins and origin not in self._origins:
            raise RequestError(403, f"pages of {_decode_header(origin)} may not play: add it to external.origins")
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]

    def _check_rate(self, connection: "Connection") -> None:
        if rate := self._cfg.max_rate:
            now, most = time.monotonic(), max(1.0, rate)  # allows the requests of a second at once
            connection.tokens = min(most, connection.tokens + (now - connection.tokens_time) * rate)
            connection.tokens_time = now
            if connection.tokens < 1.0:
                raise RequestError(429, f"more than {rate:g} requests per second: send several steps in one request")
            connection.tokens -= 1.0

    def _check_token(self, scope: Scope, headers: Headers) -> None:
        if self._token is None or scope["path"] == "/v1/health":
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + self._token):
            raise RequestError(401, "a token is needed: send the header Authorization: Bearer TOKEN")

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        size = int(headers.get(b"content-length", 0))
        if size > self._max_bytes:
            raise RequestError(413, f"the body has {size:,} bytes: at most {self._max_bytes:,} are allowed")
        body, more = bytearray(), True  # not a list: it would be large for parts of single bytes
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError
            body += message["body"]
            if len(body) > self._max_bytes:
                raise RequestError(413, f"the body has more than the {self._max_bytes:,} bytes that are allowed")
            more = message["more_body"]
        return bytes(body)

    async def _refuse_body(self, e: RequestError, headers: Headers, receive: Receive, send: Send) -> None:
        """Answer at once, and drop the body: closing the connection before its end would reset it."""
        response = build_error_response(e)
        waits = b"expect" in headers  # the client may send the body or another request: the next bytes are ambiguous
        known = int(headers.get(b"content-length", self._max_bytes + 1))
        if waits or known > self._max_bytes:
            response.headers["Connection"] = "close"
        await send({"type": "http.response.start", "status": e.status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        dropped, more = 0, not waits
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while more and dropped < _MAX_DRAINED:
                    message = await receive()
                    more = message.get("more_body", False)
                    dropped += len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_connection(connection: "Connection", scope: Scope, headers: Headers) -> None:
    if not connection.is_admitted:
        most = connection.owner.address.cfg.max_clients
        raise RequestError(429, f"there are {most} connections, the maximum: try later")
    for name in (b"host", b"content-length"):  # repeated headers of these names would be ambiguous
        if len(headers) < len(scope["headers"]) and sum(name == other for other, _ in scope["headers"]) > 1:
            raise RequestError(400, f"{name.decode().title()} was sent twice")


def _check_host(headers: Headers) -> None:
    """Raise RequestError unless the Host header is localhost or a loopback address.

    Without a token, a page could read from this server by a name that first resolves to its site and then to this
    machine (DNS rebinding). Clients without the header are not browsers.
    """
    host = headers.get(b"host")
    if host is None:
        return
    match = _HOST.fullmatch(host.decode("latin-1"))
    name = (match[1] or match[2]).lower() if match else ""
    try:
        is_local = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise RequestError(
            403,
            f"Host: expected localhost, 127.0.0.1 or [::1], got {_decode_header(host)}, which may be a page's name for "
            "this machine: use an expected name, or set external.token_file (--token-file)",
        )


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """Return whether a request is a CORS preflight, which browsers send without a token."""
    return scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= headers.keys()


def _build_preflight_response(headers: Headers) -> Response:
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": f"authorization, content-type, {CLIENT_HEADER}",
        "Access-Control-Max-Age": "600",
    }
    if b"access-control-request-private-network" in headers:
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(b"{}", headers=allowed, media_type=JSON)


def _convert_error(scope: Scope, e: HTTPException) -> RequestError:
    path = scope["path"][:200]
    if e.status_code == 405:
        return RequestError(405, f"{path} takes {(e.headers or {}).get('Allow')}, not {scope['method'][:20]}")
    return RequestError(e.status_code, f"there is no {path}: /docs lists the routes")


def _has_body(headers: Headers) -> bool:
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def _decode_header(header: bytes) -> str:
    return header.decode("latin-1")[:200]


# ---------------------------------------------------------------- connections


class Connection(HttpToolsProtocol):
    """uvicorn's connection with more limits.

    Connections beyond `max_clients` are refused. The size and time of a request's head are limited. Silent connections
    and connections whose clients do not read their answers are closed.
    """

    def __init__(self, owner: "HttpServer", *, app_state: dict[str, Any], **options: Any):
        super().__init__(app_state={**app_state, "connection": self}, **options)
        self.owner, self.is_admitted = owner, False
        # tokens of the rate limit
        self.tokens_time, self.tokens = time.monotonic(), max(1.0, owner.address.cfg.max_rate)
        self._head_bytes, self._in_body, self._unsent = 0, False, 0
        self._sent_time = self.tokens_time
        self._deadline = self.tokens_time + owner.address.cfg.timeout_s

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        admitted = self.owner.admitted
        self.is_admitted = len(admitted) < self.owner.address.cfg.max_clients
        if self.owner.is_closed or len(self.connections) - len(admitted) > _MAX_REFUSED:
            transport.abort()
        elif self.is_admitted:
            admitted.add(self)
        else:
            self._deadline = self.tokens_time + _REQUEST_S

    def connection_lost(self, exc: Exception | None) -> None:
        self.owner.admitted.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        self._deadline = min(self._deadline, time.monotonic() + _REQUEST_S)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD and not self._in_body and not self.transport.is_closing():
            self._refuse(RequestError(431, f"the headers have more than {_MAX_HEAD:,} bytes"))

    def on_headers_complete(self) -> None:
        self._head_bytes, self._in_body = 0, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes, self._in_body = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._deadline = time.monotonic() + self.owner.address.cfg.timeout_s
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(400, msg))

    def _refuse(self, e: RequestError) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            if not self.cycle.more_body:  # earlier requests get their answers, and the connection ends after them
                self.cycle.keep_alive = False
                self.flow.pause_reading()
                return
            self.cycle.disconnected = True  # the body is invalid
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        body = build_error_response(e).body
        head = (
            f"HTTP/1.1 {e.status} {http.HTTPStatus(e.status).phrase}", f"Content-Type: {JSON}",
            f"Content-Length: {len(body)}", "Connection: close", "\r\n",
        )  # fmt: skip
        self.transport.write("\r\n".join(head).encode() + bytes(body))
        self.transport.close()

    def close_if_late(self, now: float) -> None:
        """Close a silent connection, or a connection whose client reads no answer."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if self._unsent < before or not self._unsent:
            self._sent_time = now
        if now - self._sent_time > self.owner.address.cfg.timeout_s:
            self.transport.abort()
        elif now > self._deadline and (self.cycle is None or self.cycle.response_complete or self.cycle.more_body):
            if self._head_bytes or self._in_body:
                self._refuse(RequestError(408, f"the request was not complete within {_REQUEST_S:g} s"))
            else:
                self.transport.close()


class HttpServer:
    """uvicorn in its own thread, which also calls `tick` every second. `Gate` checks requests before `routes`."""

    def __init__(self, routes: ASGIApp, address: Address, tick: Callable[[], None]):
        self.address, self.gate, self._tick = address, Gate(routes, address), tick
        self.admitted: set[Connection] = set()  # connections within `max_clients`
        self.is_closed = False  # whether `stop` was called
        connection: Any = functools.partial(Connection, self)
        config = uvicorn.Config(
            self.gate, http=connection, ws="none", lifespan="off", interface="asgi3", proxy_headers=False,
            log_config=None, access_log=False, server_header=False, date_header=False, backlog=512,
            callback_notify=self._every_second, timeout_notify=0, timeout_graceful_shutdown=1,
            timeout_keep_alive=int(address.cfg.timeout_s) + 1, ssl_certfile=address.cfg.certificate,
            ssl_keyfile=address.cfg.private_key,
        )  # fmt: skip
        # uvicorn logs invalid requests and disconnected clients; `Gate` prints errors of routes
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._uvicorn = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="jrl-http", daemon=True)

    def open(self) -> None:
        """Start the server."""
        self.address.is_used = True
        self._thread.start()
        while not self._uvicorn.started and self._thread.is_alive():
            time.sleep(0.005)
        if not self._uvicorn.started:
            raise RuntimeError(f"the server at {self.address.url} did not start: its thread has printed the reason")

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        """Call a function in the server's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(fn, *args)

    def stop(self) -> None:
        """Stop accepting connections, and close all connections. Called in the server's thread."""
        self.is_closed = self._uvicorn.should_exit = True
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        for task in list(self._uvicorn.server_state.tasks):
            task.cancel()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.call_soon(self.stop)
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
