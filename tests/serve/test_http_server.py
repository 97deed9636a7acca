"""The HTTP server without its routes: checks before a body is read, and clients that do not read answers."""

import http.client
import importlib.util
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time

import numpy as np
import psutil
import pytest
from serving import until
from starlette.responses import Response

from jrl.config.external import ExternalConfig
from jrl.errors import InputError
from jrl.serve import http_server
from jrl.serve.__main__ import main
from jrl.serve.client import PolicyClient, RequestRefused
from jrl.serve.http_server import Address, HttpServer

TOKEN = b"0123456789abcdef"


class Served:
    """A server with one answer; `bodies` holds the received bodies."""

    def __init__(self, body=b"xx", **external):
        self.bodies, self._answer = [], Response(body, media_type="text/plain")
        self.http = HttpServer(self._route, Address(ExternalConfig(port=0, **external)), lambda: None)
        self._name = self.http.address.socket.getsockname()
        self.http.open()

    async def _route(self, scope, receive, send):
        self.bodies.append(scope["state"]["body"])
        await self._answer(scope, receive, send)

    def connected(self):
        return socket.create_connection(self._name, timeout=10)

    def asked(self, text):
        """Returns (status, error) of a request over its own connection."""
        with self.connected() as connection:
            connection.sendall(text)
            return answered(connection)


def answered(connection):
    """Returns (status, error) of the next answer."""
    with connection.makefile("rb", buffering=0) as file:  # reads nothing of the following answer
        status, size = int(file.readline().split()[1]), 0
        while line := file.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        body = b""
        while len(body) < size:
            body += file.read(size - len(body))
    return status, json.loads(body)["error"] if body.startswith(b"{") else ""


@pytest.fixture
def serve(tmp_path):
    """Returns a function that starts a server with a token."""
    made = []

    def make(token=None, **external):
        if token is not None:
            (tmp_path / "token").write_bytes(token)
            external["token_file"] = str(tmp_path / "token")
        made.append(Served(**external))
        return made[-1]

    yield make
    for served in made:
        served.http.close()


def head(size, token=b"", more=b""):
    return b"POST /v1/x HTTP/1.1\r\nContent-Length: %d\r\nAuthorization: Bearer %s\r\n%s\r\n" % (size, token, more)


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert main(["ppo", f"--out={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert "uvicorn" in error and "pip install 'jrl[serve]'" in error


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


def test_without_a_token_the_host_is_this_machine(serve):
    local, guarded = serve(), serve(token=TOKEN)
    here = ["localhost", "LOCALHOST:9900", "127.0.0.1:1", "[::1]", "[::1]:9900"]
    elsewhere = [
        "page.example:9900",
        "127.0.0.1.page.example",
        "localhost:9900@page",
        "192.0.2.1",
        "[2001:db8::1]:9",
        "",
    ]
    for host in (*here, *elsewhere):
        text = f"GET /v1/weights HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN.decode()}\r\n\r\n".encode()
        status, message = local.asked(text)
        assert (status, "external.token_file" in message) == ((200, False) if host in here else (403, True)), host
        assert guarded.asked(text)[0] == 200
    twice = b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\nhost: %s\r\n\r\n"
    assert local.asked(twice % b"page.example")[0] == local.asked(twice % b"localhost")[0] == 400


# ---------------------------------------------------------------- pages

PAGE = "http://localhost:8000"


def page_asked(served, method, **headers):
    """Returns (status, headers by lower-case name) of a request without a body."""
    connection = http.client.HTTPConnection(*served.http.address.socket.getsockname()[:2], timeout=30)
    connection.request(method, "/v1/policies", headers={name.replace("_", "-"): x for name, x in headers.items()})
    answer = connection.getresponse()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}


def test_pages_of_allowed_origins_are_answered(serve):
    served, secret = serve(token=TOKEN, origins=(PAGE.upper(),)), {"Authorization": f"Bearer {TOKEN.decode()}"}
    status, headers = page_asked(served, "GET", Origin=PAGE, **secret)
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, PAGE, "Origin")
    status, headers = page_asked(served, "GET", Origin=PAGE)
    assert (status, headers["access-control-allow-origin"]) == (401, PAGE)  # the page can read the reason
    status, headers = page_asked(served, "GET", **secret)
    assert (status, "access-control-allow-origin" in headers) == (200, False)
    preflight = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,jrl-client"}
    more = {"Access_Control_Request_Private_Network": "true"}
    status, headers = page_asked(served, "OPTIONS", Origin=PAGE, **preflight, **more)  # needs no token
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    allowed = headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("authorization", "content-type", "jrl-client"))
    assert headers["access-control-allow-private-network"] == "true"
    assert page_asked(served, "OPTIONS", Origin=PAGE)[0] == 401  # not a preflight
    for origin in ("http://localhost:8001", "https://localhost:8000", "http://localhost", "null", "*"):
        refused = (
            page_asked(served, "GET", Origin=origin, **secret),
            page_asked(served, "OPTIONS", Origin=origin, **preflight),
        )
        assert [status for status, _ in refused] == [403, 400]
        assert not any("access-control-allow-origin" in headers for _, headers in refused)
    assert page_asked(serve(), "GET", Origin=PAGE)[0] == 403  # without external.origins
    _, headers = page_asked(serve(token=TOKEN, origins=("*",)), "GET", Origin=PAGE, **secret)
    assert headers["access-control-allow-origin"] == "*"


def test_invalid_origins_are_refused_before_the_server_listens(capsys, tmp_path):
    with pytest.raises(InputError, match=r"external\.origins: \* lets all pages .* external\.token_file"):
        Address(ExternalConfig(port=0, origins=("*",)))
    for origin in ("localhost:8000", "http://localhost/", "http://", "file:///page.html", "http://a b", "", "null"):
        with pytest.raises(InputError, match=r"external\.origins: .* is not an origin: expected http://HOST"):
            Address(ExternalConfig(port=0, origins=(origin,)))
    tree = ['external.origins=["http://a/"]', "external.observation={box: [4]}", "external.action={discrete: 2}"]
    assert main(["ppo", f"--out={tmp_path}/run", "--port=0", *(f"--set={text}" for text in tree)]) == 2
    assert "is not an origin" in capsys.readouterr().err


# ---------------------------------------------------------------- addresses and certificates


def test_a_port_in_use_and_a_short_token_are_refused(serve, tmp_path):
    port = serve().http.address.socket.getsockname()[1]
    with pytest.raises(InputError, match="name another port"):
        Address(ExternalConfig(port=port))
    (tmp_path / "short").write_text("short")
    with pytest.raises(InputError, match="16 characters"):
        Address(ExternalConfig(port=0, token_file=str(tmp_path / "short")))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(serve, tmp_path):
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem",
            "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    files = {"certificate": str(tmp_path / "cert.pem"), "private_key": str(tmp_path / "key.pem")}
    served = serve(body=b'{"policies": {"a": 1}}', **files)
    assert served.http.address.url.startswith("https://")
    client = PolicyClient(served.http.address.url, context=ssl.create_default_context(cafile=files["certificate"]))
    assert client.policies() == {"a": 1}
    client.close()
    with pytest.raises(ConnectionError, match="certificate"):
        PolicyClient(served.http.address.url, patience_s=0.0).policies()


# ---------------------------------------------------------------- bodies


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


def test_refused_bodies_are_not_kept(serve):
    """Clients without a token send 50 MB each; uvicorn itself holds 64 KiB of an unread body."""
    served, process = serve(token=TOKEN), psutil.Process()
    before, most = process.memory_info().rss, 0
    for _ in range(3):
        with served.connected() as connection:
            connection.sendall(head(50_000_000))
            for _ in range(50):
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


def test_a_client_that_never_reads_is_closed(serve):
    served = serve(body=bytes(100_000), timeout_s=0.5)
    with served.connected() as rude:
        rude.sendall(head(0) * 500)
        until(lambda: served.bodies)
        until(lambda: not served.http.connections)
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
