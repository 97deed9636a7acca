"""`--serve`: what it answers, and to whom."""

import http.client
import json
import shutil
import threading

import pytest
from run_files import run

from jrl.errors import InputError
from jrl.report import __main__, content, page, page_data, runs, serve

LIBRARY = "var echarts;"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(GET of a path with headers, directory of the run)."""
    monkeypatch.setattr(serve, "_REST", 0.0)
    directory = run(tmp_path / "run", seed=0, values=(1, 2, 3))
    (directory / "videos").mkdir()
    (directory / "videos" / "300.mp4").write_bytes(b"0123456789")

    def read(link):
        found = runs.read([directory])
        return page_data.data(found, content.content(found, content.Options()), content.Options(), link)

    server = serve.server(serve.Following(read, lambda: runs.run_directories(directory)), LIBRARY, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def get(path, **headers):
        connection = http.client.HTTPConnection(*server.server_address, timeout=20)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    yield get, directory
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_numbers_follow_the_files(served):
    get, directory = served
    answer, body = get("/data.json")
    tag, first = answer.headers["ETag"], json.loads(body)
    assert first["runs"][0]["last"] == 3 and first["runs"][0]["link"] is None
    answer, body = get("/data.json", **{"If-None-Match": tag})
    assert (answer.status, body) == (304, b"")
    with (directory / "result.jsonl").open("a") as file:
        file.write(json.dumps({"env_steps": 400, "evaluation/return": 7, "evaluation/weights_version": 9}) + "\n")
    answer, body = get("/data.json", **{"If-None-Match": tag})
    assert answer.status == 200 and json.loads(body)["runs"][0]["last"] == 7
    _, body = get("/")
    assert b'data-live="true"' in body and LIBRARY.encode() in body
    shutil.rmtree(directory)
    _, body = get("/data.json")
    assert "does not exist" in json.loads(body)["waiting"]


def test_videos_in_parts(served):
    get, _ = served
    (video,) = json.loads(get("/data.json")[1])["runs"][0]["videos"]
    answer, body = get(f"/{video['link']}")
    assert (answer.status, answer.headers["Content-Type"], body) == (200, "video/mp4", b"0123456789")
    for asked, part, where in (("bytes=2-4", b"234", "2-4"), ("bytes=7-", b"789", "7-9"), ("bytes=8-99", b"89", "8-9")):
        answer, body = get(f"/{video['link']}", Range=asked)
        assert (answer.status, body, answer.headers["Content-Range"]) == (206, part, f"bytes {where}/10")
    assert get(f"/{video['link']}", Range="bytes=10-")[0].status == 416


@pytest.mark.parametrize(
    "path",
    [
        "/result.jsonl", "/run/result.jsonl", "/../run/result.jsonl", "/%2e%2e/run/result.jsonl", "//etc/passwd",
        "/videos/300.mp4", "/videos/../run/config.yaml", "/report.json",
    ],
)  # fmt: skip
def test_nothing_else_is_served(served, path):
    get, _ = served
    get("/data.json")
    assert get(path)[0].status == 404


def test_pages_of_other_names_get_nothing(served):
    get, _ = served
    assert get("/data.json", Host="elsewhere.example:8500")[0].status == 403
    assert get("/data.json", Host="localhost:8500")[0].status == 200


def test_a_port_that_is_taken(served, tmp_path, monkeypatch, capsys):
    _, directory = served
    monkeypatch.setattr(page, "library", lambda: LIBRARY)
    taken = serve.server(serve.Following(lambda link: {}, list), LIBRARY, 0)
    port = taken.server_address[1]
    with pytest.raises(InputError, match=f"--serve {port}"):
        serve.forever(serve.Following(lambda link: {}, list), LIBRARY, port)
    taken.server_close()
    assert __main__.main([str(directory), "--out", str(tmp_path / "out"), "--serve", "70000"]) == 2
    assert "--serve 70000: expected a port" in capsys.readouterr().err


def test_runs_without_rows_are_waited_for(tmp_path):
    directory = run(tmp_path / "run", seed=0, values=())

    def read(link):
        return {"rows": len(runs.read([directory]).runs)}

    data, text, _ = serve.Following(read, lambda: [directory]).now()
    assert "no result row yet" in data["waiting"] and json.loads(text) == data
