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
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jrl.config.external import ExternalConfig
from jrl.errors import InputError
from jrl.fields.paths import resolve
from jrl.serve.wire import CLIENT_HEADER, JSON, RequestError, build_error_response

_MAX_HEAD = 16_384  # bytes of the head of a request
_REQUEST_S = 10.0  # seconds from the first to the last byte of a request
_DRAIN_S, _MAX_DRAINED = 2.0, 128 * 2**20  # limits for reading a refused body, so that the client reads the answer
_MAX_REFUSED = 256  # connections beyond `max_clients` that get a refusal; more are closed at once
_ANY = "*"
_ORIGIN = re.compile(r"https?://[^\s/?#@*,]+", re.IGNORECASE)

Headers = Mapping[bytes, bytes]  # names in lower case


# ---------------------------------------------------------------- address, token and origins


class Address:
    """Bound address of the `external` section. Connections are refused until a server listens.

    Args:
      cfg: section `external`.
    Attributes:
      is_used: whether a server listens or has listened.
      max_body_bytes: maximum size of a body.
      url: http://HOST:PORT or https://HOST:PORT.
    Raises:
      InputError: the address is in use, not of this machine, or reachable by other machines without a token; invalid
        file of token or certificate; invalid origin, or an origin that needs a token.
    """

    def __init__(self, cfg: ExternalConfig):
        self.cfg, self.token, self.is_used = cfg, _read_token(cfg), False
        self.max_body_bytes = int(cfg.max_body_mb * 2**20)
        _check_certificate(cfg)
        self.origins = _parse_origins(cfg, self.token)
        self.socket = _bind_socket(cfg, self.token)
        host, port = self.socket.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if cfg.certificate else ''}://{name}:{port}"

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
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cfg.certificate, cfg.private_key)
    except (OSError, ssl.SSLError) as e:
        raise InputError(f"external.certificate: cannot use {cfg.certificate}: {e}") from e


def _parse_origins(cfg: ExternalConfig, token: bytes | None) -> frozenset[str]:
    if _ANY in cfg.origins and token is None:
        raise InputError(
            f"external.origins: {_ANY} lets all pages play that users of this machine open: name the origins, or set "
            "external.token_file (--token-file)"
        )
    for origin in cfg.origins:
        if origin != _ANY and not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"external.origins: {origin!r} is not an origin: expected http://HOST or http://HOST:PORT without a "
                "path"
            )
    return frozenset(origin.lower() for origin in cfg.origins)


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
        scope["state"]["headers"], scope["app"] = headers, self  # with `app` the router raises HTTPException
        connection: Connection = scope["state"]["connection"]
        is_read = False
        self.requests += 1
        try:
            self._check_head(connection, scope, headers)
            scope["state"]["body"] = await self._read_body(headers, receive)
            is_read = True
            await self._routes(scope, receive, send)
        except (RequestError, HTTPException) as e:
            self.refused += 1
            error = e if isinstance(e, RequestError) else _convert_error(scope, e)
            if is_read:
                await build_error_response(error)(scope, receive, send)
            else:
                await self._refuse_body(error, connection, headers, receive, send)
        except (ConnectionError, asyncio.CancelledError):  # the client has disconnected, or the server stops
            pass
        except Exception:  # an error in a route must not end the server
            if connection.transport.is_closing():  # uvloop raises RuntimeError for an answer to a disconnected client
                return
            traceback.print_exc()
            failed = b'{"error": "the server failed on this request; its log has the traceback"}'
            await Response(failed, 500, media_type=JSON)(scope, receive, send)

    def _check_head(self, connection: "Connection", scope: Scope, headers: Headers) -> None:
        """Raises RequestError: too many connections or requests, or a host, an origin or a token that is refused."""
        if not connection.is_admitted:
            raise RequestError(429, f"there are {self._cfg.max_clients} connections, the maximum: try later")
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise RequestError(400, "Host was sent twice")
        if self._token is None:
            _check_host(headers)
        origin = headers.get(b"origin", b"").decode("latin-1")
        # a page of any site can reach the ports of its reader's machine; clients other than pages send no origin
        if b"origin" in headers and _ANY not in self._origins and origin not in self._origins:
            raise RequestError(403, f"pages of {origin[:200]} may not play: add it to external.origins")
        if rate := self._cfg.max_rate:
            connection.count_request(rate)
        expected = b"" if self._token is None or scope["path"] == "/v1/health" else b"Bearer " + self._token
        if expected and not hmac.compare_digest(headers.get(b"authorization", b""), expected):
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

    async def _refuse_body(
        self, e: RequestError, connection: "Connection", headers: Headers, receive: Receive, send: Send
    ) -> None:
        """Answers at once, and drop the body: closing the connection before its end would reset it."""
        response = build_error_response(e)
        more = b"expect" not in headers  # the client may send the body or another request: the next bytes are ambiguous
        known = int(headers.get(b"content-length", 0))
        if not (more and connection.is_admitted) or known > self._max_bytes or b"transfer-encoding" in headers:
            response.headers["Connection"] = "close"
        await send({"type": "http.response.start", "status": e.status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        dropped = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while more and dropped < _MAX_DRAINED:
                    message = await receive()
                    more = message.get("more_body", False)
                    dropped += len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_host(headers: Headers) -> None:
    """Raises RequestError unless the Host header is localhost or a loopback address; only browsers must send it."""
    # without a token, a page could read by a name that first resolves to its site and then to this machine
    host = headers.get(b"host", b"localhost").decode("latin-1")
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        is_local = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise RequestError(
            403,
            f"Host: expected localhost, 127.0.0.1 or [::1], got {host[:200]}, which may be a page's name for "
            "this machine: use an expected name, or set external.token_file (--token-file)",
        )


def _convert_error(scope: Scope, e: HTTPException) -> RequestError:
    path = scope["path"][:200]
    if e.status_code == 405:
        return RequestError(405, f"{path} takes {(e.headers or {}).get('Allow')}, not {scope['method'][:20]}")
    return RequestError(e.status_code, f"there is no {path}: /openapi.json lists the routes")


# ---------------------------------------------------------------- connections


class Connection(HttpToolsProtocol):
    """uvicorn's connection with more limits.

    Connections beyond `max_clients` are refused. The size of a request's head and the time of a request are limited.
    Silent connections and connections whose clients do not read their answers are closed.
    """

    def __init__(self, owner: "HttpServer", *, app_state: dict[str, Any], **options: Any):
        super().__init__(app_state={**app_state, "connection": self}, **options)
        self.owner, self.is_admitted = owner, False
        self._tokens_time, self._tokens = time.monotonic(), max(1.0, owner.address.cfg.max_rate)
        self._head_bytes, self._in_body, self._unsent = 0, False, 0
        self._sent_time = self._tokens_time
        self._deadline = self._tokens_time + owner.address.cfg.timeout_s

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        most = self.owner.address.cfg.max_clients
        self.is_admitted = len(self.connections) <= most
        if self.owner.is_closed or len(self.connections) > most + _MAX_REFUSED:
            transport.abort()
        elif not self.is_admitted:
            self._deadline = self._tokens_time + _REQUEST_S

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

    def count_request(self, rate: float) -> None:
        """Raises RequestError: more than `rate` requests per second; those of a second may come at once."""
        now = time.monotonic()
        self._tokens = min(max(1.0, rate), self._tokens + (now - self._tokens_time) * rate)
        self._tokens_time = now
        if self._tokens < 1.0:
            raise RequestError(429, f"more than {rate:g} requests per second: send several steps in one request")
        self._tokens -= 1.0

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(400, msg))

    def _refuse(self, e: RequestError) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
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
        """Closes a silent connection, or a connection whose client reads no answer."""
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
        app: ASGIApp = self.gate
        if address.origins:
            app = CORSMiddleware(
                app, address.origins, ("GET", "POST"), ("Authorization", CLIENT_HEADER), allow_private_network=True
            )
        self.is_closed = False  # whether `stop` was called
        connection: Any = functools.partial(Connection, self)
        config = uvicorn.Config(
            app, http=connection, ws="none", lifespan="off", interface="asgi3", proxy_headers=False,
            log_config=None, access_log=False, server_header=False, date_header=False, backlog=512,
            callback_notify=self._every_second, timeout_notify=0, timeout_graceful_shutdown=1,
            timeout_keep_alive=int(address.cfg.timeout_s) + 1, ssl_certfile=address.cfg.certificate,
            ssl_keyfile=address.cfg.private_key,
        )  # fmt: skip
        # uvicorn logs invalid requests and disconnected clients; `Gate` prints errors of routes
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._uvicorn = uvicorn.Server(config)
        self.connections = self._uvicorn.server_state.connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="jrl-http", daemon=True)

    def open(self) -> None:
        """Starts the server."""
        self.address.is_used = True
        self._thread.start()
        while not self._uvicorn.started and self._thread.is_alive():
            time.sleep(0.005)
        if not self._uvicorn.started:
            raise RuntimeError(f"the server at {self.address.url} did not start: its thread has printed the reason")

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        """Calls a function in the server's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(fn, *args)

    def stop(self) -> None:
        """Stops accepting connections, and closes all connections. Called in the server's thread."""
        self.is_closed = self._uvicorn.should_exit = True
        for connection in list(self.connections):
            connection.transport.abort()
        for task in list(self._uvicorn.server_state.tasks):
            task.cancel()

    def close(self) -> None:
        """Stops, and wait for the thread."""
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
        now = time.monotonic()
        for connection in list[Any](self.connections):
            connection.close_if_late(now)
        self._tick()
