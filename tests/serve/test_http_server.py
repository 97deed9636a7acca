"""The HTTP server without its routes: checks before a body is read, and clients that do not read answers."""

import importlib.util
import json
import socket
import threading
import time

import numpy as np
import psutil
import pytest
from serving import until
from starlette.responses import Response

from jrl.config.external import ExternalConfig
from jrl.serve import http_server
from jrl.serve.__main__ import main
from jrl.serve.client import PolicyClient, RequestRefused
from jrl.serve.http_server import Address, HttpServer

TOKEN = b"0123456789abcdef"


class Served:
    """A server with answers of `size` bytes; `bodies` holds the received bodies."""

    def __init__(self, size=2, **external):
        self.bodies, self._answer = [], Response(b"x" * size, media_type="text/plain")
        self.http = HttpServer(self._route, Address(ExternalConfig(port=0, **external)), lambda: None)
        self._name = self.http.address.socket.getsockname()
        self.http.open()

    async def _route(self, scope, receive, send):
        self.bodies.append(scope["state"]["body"])
        await self._answer(scope, receive, send)

    def connected(self):
        return socket.create_connection(self._name, timeout=10)

    def asked(self, text):
        """Return (status, error) of a request over its own connection."""
        with self.connected() as connection:
            connection.sendall(text)
            return answered(connection)


def answered(connection):
    """Return (status, error) of the next answer."""
    with connection.makefile("rb", buffering=0) as file:  # reads nothing of the following answer
        status, size = int(file.readline().split()[1]), 0
        while line := file.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        body = b""
        while len(body) < size:
            body += file.read(size - len(body))
    return status, json.loads(body)["error"] if body.startswith(b"{") else ""


def settled(count, seconds=1.0):
    """Return a counter after some seconds without a change: socket buffers take answers for a while."""
    value, since, end = count(), time.monotonic(), time.monotonic() + 30
    while time.monotonic() - since < seconds:
        assert time.monotonic() < end
        time.sleep(0.02)
        if (now := count()) != value:
            value, since = now, time.monotonic()
    return value


@pytest.fixture
def serve(tmp_path):
    """Return a function that starts a server with a token."""
    made = []

    def make(*args, token=None, **external):
        if token is not None:
            (tmp_path / "token").write_bytes(token)
            external["token_file"] = str(tmp_path / "token")
        made.append(Served(*args, **external))
        return made[-1]

    yield make
    for served in made:
        served.http.close()


def head(size, token=b"", more=b""):
    return b"POST /v1/x HTTP/1.1\r\nContent-Length: %d\r\nAuthorization: Bearer %s\r\n%s\r\n" % (size, token, more)


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "httptools"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    assert main(["ppo", f"--out={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert package in error and "pip install 'jrl[serve]'" in error
    assert main([f"--write-client={tmp_path}/client.py"]) == 0


def test_a_request_without_permission_is_refused_before_its_body(serve):
    served = serve(token=TOKEN, max_rate=3.0)
    with served.connected() as connection:
        connection.sendall(head(10_000_000, b"wrong"))
        assert answered(connection)[0] == 401
        connection.sendall(bytes(10_000_000) + head(5, TOKEN) + b"right")  # the rest of the body is not a request
        assert answered(connection)[0] == 200
        assert served.bodies == [b"right"]
        connection.sendall(head(3, b"wrong") + b"abc")
        assert answered(connection)[0] == 401
        connection.sendall(head(10_000_000, b"wrong"))  # requests without the token count
        assert answered(connection)[0] == 429
    assert served.asked(head(10, b"", b"Origin: http://elsewhere\r\n"))[0] == 403
    assert served.asked(head(10, b"wrong", b"Expect: 100-continue\r\n"))[0] == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200),
        (b"LOCALHOST:9900", 200),
        (b"127.0.0.1:1", 200),
        (b"[::1]", 200),
        (b"[::1]:9900", 200),
        (b"elsewhere.example:9900", 403),
        (b"127.0.0.1.elsewhere.example", 403),
        (b"localhost:9900@elsewhere", 403),
        (b"192.0.2.1", 403),
        (b"[2001:db8::1]:9900", 403),
        (b"", 403),
    ],
)
def test_without_a_token_the_host_is_this_machine(serve, host, status):
    text = b"GET /v1/weights HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n" % (host, TOKEN)
    found = serve().asked(text)
    assert (found[0], "external.token_file" in found[1]) == (status, status == 403)
    assert serve(token=TOKEN).asked(text)[0] == 200


def test_a_body_may_arrive_in_pieces(serve):
    served = serve()
    with served.connected() as connection:
        connection.sendall(head(4, more=b"Expect: 100-continue\r\n"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        for part in (b"ab", b"cd" + head(1)[:20], head(1)[20:]):
            connection.sendall(part)
        assert answered(connection)[0] == 200
        connection.sendall(b"e")
        assert answered(connection)[0] == 200
    assert served.bodies == [b"abcd", b"e"]


def test_a_request_that_is_too_large_gets_its_answer_after_it_was_sent(serve):
    served = serve()
    with served.connected() as connection:
        connection.sendall(head(100_000_000))
        for _ in range(100):
            connection.sendall(bytes(1_000_000))
        status, message = answered(connection)
        assert (status, "100,000,000 bytes" in message) == (413, True)
        assert connection.recv(1) == b""
    assert served.bodies == []


def chunks(count, size=1_000_000):
    yield b"POST /v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(count):
        yield b"%x\r\n%s\r\n" % (size, bytes(size))
    yield b"0\r\n\r\n"


def test_a_body_in_chunks_has_the_same_limit(serve):
    served = serve(max_body_mb=4)
    with served.connected() as connection:
        for part in chunks(4):
            connection.sendall(part)
        assert answered(connection)[0] == 200
        assert len(served.bodies[0]) == 4_000_000
        for part in chunks(50):
            connection.sendall(part)
        status, message = answered(connection)
        assert (status, "more than the 4,194,304 bytes" in message) == (413, True)
        assert connection.recv(1) == b""
    assert len(served.bodies) == 1


def test_refused_bodies_are_not_kept(serve, monkeypatch):
    """Ten clients without a token send 100 MB each; uvicorn itself holds 64 KiB of an unread body."""
    monkeypatch.setattr(http_server, "_DRAIN_S", 20.0)
    served, process = serve(token=TOKEN), psutil.Process()
    before, most = process.memory_info().rss, 0
    for _ in range(10):
        with served.connected() as connection:
            connection.sendall(head(100_000_000))
            for _ in range(100):
                connection.sendall(bytes(1_000_000))
                most = max(most, process.memory_info().rss)
            assert answered(connection)[0] == 401
    assert most - before < 30e6


def test_an_incomplete_request_and_silence_end_a_connection(serve, monkeypatch):
    monkeypatch.setattr(http_server, "_REQUEST_S", 0.5)
    served, start = serve(timeout_s=3.0), time.monotonic()
    texts = (b"GET /v1/x HT", b"GET /v1/x HTTP/1.1\r\nX: a", b"\r\n", head(10) + b"{")
    silent, slow, *half = [served.connected() for _ in range(2 + len(texts))]
    for connection, text in zip(half, texts, strict=True):
        connection.sendall(text)
    with pytest.raises(OSError):  # a head that never ends, byte by byte
        slow.sendall(b"GET /v1/x HTTP/1.1\r\nX: ")
        while time.monotonic() < start + 2.9:
            slow.sendall(b"a")
            time.sleep(0.05)
    for connection in half:
        assert connection.recv(12) == b"HTTP/1.1 408"
    assert time.monotonic() - start < 2.9
    assert silent.recv(1) == b""
    for connection in (*half, slow, silent):
        connection.close()
    assert served.bodies == []


@pytest.mark.slow
def test_the_server_stops_reading_from_a_client_that_does_not_read(serve):
    served, asked = serve(100_000), 2_000
    with served.connected() as rude:
        rude.settimeout(0.5)
        with pytest.raises(TimeoutError):  # the server reads no more
            while True:
                rude.sendall(head(0) * asked)
        handled = settled(lambda: len(served.bodies))
        assert 0 < handled < asked / 2
        (waiting,) = served.http.admitted
        assert served.asked(head(2) + b"ok")[0] == 200
        assert waiting.transport.get_write_buffer_size() < 300_000
        assert settled(lambda: len(served.bodies)) < asked / 2
        rude.settimeout(10)
        for _ in range(handled + 10):  # continues after the client reads
            assert answered(rude)[0] == 200


def test_a_client_that_never_reads_is_closed(serve):
    served = serve(100_000, timeout_s=0.5)
    with served.connected() as rude:
        rude.sendall(head(0) * 500)
        until(lambda: served.bodies)
        until(lambda: not served.http.admitted)
    assert len(served.bodies) < 250


def test_the_client_reads_the_answer_to_an_interrupted_request():
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse():
        connection, _ = listener.accept()
        connection.recv(1024)
        body = b'{"error": "much too large"}'
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        connection.close()  # with most of the request unread

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    client = PolicyClient(f"http://127.0.0.1:{listener.getsockname()[1]}", patience_s=0.0, timeout_s=10.0)
    with pytest.raises(RequestRefused, match="much too large") as e:
        client.steps(["a"], np.zeros((1, 8_000_000), np.float32))
    assert e.value.status == 413
    client.close()
    thread.join(10)
    listener.close()
