"""The HTTP of the server without its routes: what is settled before a body comes, and clients that do not read."""

import json
import socket
import threading

import numpy as np
import pytest
from serving import until

from jrl.serve.client import PolicyClient, RequestRefused
from jrl.serve.protocol import Response
from jrl.serve.web import Limits, Web

TOKEN = b"0123456789abcdef"


class Served:
    """A server whose answers are `size` bytes; `bodies` are what its handler got."""

    def __init__(self, size=2, **limits):
        self.bodies, self._answer = [], Response(200, b"x" * size, "text/plain")
        self._sock = socket.socket()
        self._sock.bind(("127.0.0.1", 0))
        given = {"body": 2**24, "clients": 8, "rate": 0.0, "idle_s": 30.0, "token": None, **limits}
        self.web = Web(self._handle, Limits(**given))
        self.web.open(self._sock)

    def _handle(self, request, reply):
        self.bodies.append(request.body)
        reply(self._answer)

    def connected(self):
        return socket.create_connection(self._sock.getsockname(), timeout=10)

    def asked(self, text):
        """(status, what is wrong) of what is sent, over a connection of its own."""
        with self.connected() as connection:
            connection.sendall(text)
            return answered(connection)


def answered(connection):
    """(status, what is wrong) of the next answer."""
    with connection.makefile("rb", buffering=0) as file:  # which takes nothing of the answer after it
        status, size = int(file.readline().split()[1]), 0
        while line := file.readline().strip():
            name, _, value = line.partition(b":")
            size = int(value) if name == b"Content-Length" else size
        body = b""
        while len(body) < size:
            body += file.read(size - len(body))
    return status, json.loads(body)["error"] if body.startswith(b"{") else ""


@pytest.fixture
def serve():
    made = []

    def make(*args, **limits):
        made.append(Served(*args, **limits))
        return made[-1]

    yield make
    for served in made:
        served.web.close()


def head(size, token=b"", more=b""):
    return b"POST /v1/x HTTP/1.1\r\nContent-Length: %d\r\nAuthorization: Bearer %s\r\n%s\r\n" % (size, token, more)


def test_who_may_not_ask_is_told_before_a_body_comes(serve):
    served = serve(token=TOKEN, rate=3.0)
    with served.connected() as connection:
        connection.sendall(head(10_000_000, b"wrong"))
        assert answered(connection)[0] == 401
        connection.sendall(bytes(10_000_000) + head(5, TOKEN) + b"right")  # the rest of it is no request
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


def test_a_body_follows_its_head_in_pieces(serve):
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


def test_a_request_that_is_too_large_gets_its_answer_though_all_of_it_was_sent(serve):
    served = serve()
    with served.connected() as connection:
        connection.sendall(head(100_000_000))
        for _ in range(100):
            connection.sendall(bytes(1_000_000))
        status, told = answered(connection)
        assert (status, "100,000,000 bytes" in told) == (413, True)
        assert connection.recv(1) == b""
    assert served.bodies == []


def test_a_client_that_does_not_read_is_not_read_from(serve):
    served, asked = serve(100_000), 2_000
    with served.connected() as rude:
        rude.settimeout(0.5)
        with pytest.raises(TimeoutError):  # the server takes no more of it
            while True:
                rude.sendall(head(0) * asked)
        handled = len(served.bodies)
        assert 0 < handled < asked / 2
        (waiting,) = served.web.connections
        assert served.asked(head(2) + b"ok")[0] == 200
        assert waiting.transport.get_write_buffer_size() < 300_000
        assert len(served.bodies) <= handled + 1
        rude.settimeout(10)
        for _ in range(handled + 10):  # and goes on once it reads
            assert answered(rude)[0] == 200


def test_a_client_that_never_reads_is_closed(serve):
    served = serve(100_000, idle_s=0.5)
    with served.connected() as rude:
        rude.sendall(head(0) * 500)
        until(lambda: served.bodies)
        until(lambda: not served.web.clients)
    assert len(served.bodies) < 250


def test_an_answer_to_a_request_that_was_broken_off_is_read():
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse():
        connection, _ = listener.accept()
        connection.recv(1024)
        told = b'{"error": "much too large"}'
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: %d\r\n\r\n%s" % (len(told), told))
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
