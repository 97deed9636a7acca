"""`--serve`: what it answers, and to whom."""

import http.client
import json
import re
import shutil
import threading

import pytest
from run_files import run

from jrl.errors import InputError
from jrl.report import __main__, page, page_server

LIBRARY = "var echarts;"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(GET of a path with headers, directory of the run), of the server that the command starts."""
    monkeypatch.setattr(page, "library", lambda: LIBRARY)
    directory = run(tmp_path / "run", seed=0, values=(1, 2, 3))
    (directory / "videos").mkdir()
    (directory / "videos" / "300.mp4").write_bytes(b"0123456789")
    made = []
    monkeypatch.setattr(page_server, "serve", lambda make, port: made.append(page_server.make_server(make, port)))
    assert __main__.main([str(directory), "--out", str(tmp_path / "out"), "--serve", "0"]) == 0
    (server,) = made
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def get(path, method="GET", **headers):
        connection = http.client.HTTPConnection(*server.server_address, timeout=20)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    yield get, directory
    server.shutdown()
    thread.join()
    server.server_close()


def table(body):
    """Text of the cells of the table of runs."""
    (inside,) = re.findall(r'<table id="run-table".*?<tbody>(.*?)</tbody>', body.decode(), re.S)
    return re.findall(r">([^<>]+)</td>", inside)


def test_each_request_makes_the_page_anew(served):
    get, directory = served
    answer, body = get("/")
    assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store") and LIBRARY.encode() in body
    assert table(body).count("3") == 2  # last and best
    assert b"<a href=" not in body.split(b'id="run-table"')[1].split(b"</table>")[0]  # directories are not served
    with (directory / "result.jsonl").open("a") as file:
        file.write(json.dumps({"env_steps": 400, "evaluation/return": 7, "evaluation/weights_version": 9}) + "\n")
    assert table(get("/index.html")[1]).count("7") == 2
    (directory / "result.jsonl").write_text("")
    assert b"Waiting for the first result row" in get("/")[1] and b"no result row yet" in get("/")[1]
    shutil.rmtree(directory)
    assert b"does not exist" in get("/")[1]


def test_videos_that_the_page_links(served):
    get, _ = served
    (link,) = re.findall(r'<video src="([^"]+)"', get("/")[1].decode())
    answer, body = get(f"/{link}")
    assert (answer.status, answer.headers["Content-Type"], body) == (200, "video/mp4", b"0123456789")


@pytest.mark.parametrize(
    "path",
    [
        "/result.jsonl", "/run/result.jsonl", "/../run/result.jsonl", "/%2e%2e/run/result.jsonl", "//etc/passwd",
        "/videos/300.mp4", "/videos/../run/config.yaml", "/report.json", "/videos/", "/videos",
    ],
)  # fmt: skip
def test_nothing_else_is_served(served, path):
    get, _ = served
    get("/")
    assert get(path)[0].status == get(path, "HEAD")[0].status == 404


def test_pages_of_other_names_get_nothing(served):
    get, _ = served
    (link,) = re.findall(r'<video src="([^"]+)"', get("/", Host="localhost:8500")[1].decode())
    for path in ("/", f"/{link}"):
        assert get(path, Host="elsewhere.example:8500")[0].status == 403
        assert get(path, "HEAD", Host="elsewhere.example:8500")[0].status == 403


def test_a_port_that_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "library", lambda: LIBRARY)
    directory = run(tmp_path / "run", seed=0, values=(1, 2, 3))
    taken = page_server.make_server(lambda link: "", 0)
    port = taken.server_address[1]
    with pytest.raises(InputError, match=f"--serve {port}"):
        page_server.serve(lambda link: "", port)
    taken.server_close()
    assert __main__.main([str(directory), "--out", str(tmp_path / "out"), "--serve", "70000"]) == 2
    assert "--serve 70000: expected a port" in capsys.readouterr().err
