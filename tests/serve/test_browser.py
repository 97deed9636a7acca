"""Pages as clients: allowed origins; the JavaScript client and the example in Chromium, if it is installed."""

import functools
import http.client
import http.server
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
from serving import listening, running, settings
from test_learning import free_port

from jrl.config.external import ExternalConfig
from jrl.errors import InputError
from jrl.serve.__main__ import main
from jrl.serve.http_server import Address

ROOT = Path(__file__).parents[2]
PAGE = "http://localhost:8000"
TOKEN = "0123456789abcdef"

# ---------------------------------------------------------------- origins


def answered(run, method, path, **headers):
    """Return (status, headers by lower-case name) of a request without a body."""
    parts = urllib.parse.urlsplit(run.address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A run with a token and one allowed origin."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    with running(settings(external={"origins": [PAGE], "token_file": str(file)})) as run:
        yield run


def test_an_allowed_origin_is_answered(guarded):
    shown = {"Authorization": f"Bearer {TOKEN}"}
    status, headers = answered(guarded, "GET", "/v1/policies", Origin=PAGE, **shown)
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, PAGE, "Origin")
    status, headers = answered(guarded, "GET", "/v1/policies", Origin=PAGE)
    assert (status, headers["access-control-allow-origin"]) == (401, PAGE)  # the page can read the reason
    status, headers = answered(guarded, "GET", "/v1/policies", **shown)
    assert status == 200
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("origin", ["http://localhost:8001", "https://localhost:8000", "http://localhost", "null", "*"])
def test_any_other_origin_is_refused(guarded, origin):
    for method, more in (("GET", {}), ("OPTIONS", {"Access_Control_Request_Method": "POST"})):
        status, headers = answered(
            guarded, method, "/v1/policies", Origin=origin, Authorization=f"Bearer {TOKEN}", **more
        )
        assert status == 403
        assert "access-control-allow-origin" not in headers


def test_a_preflight_needs_no_token(guarded):
    asks = {"Origin": PAGE, "Access_Control_Request_Method": "POST"}
    status, headers = answered(guarded, "OPTIONS", "/v1/steps", **asks)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert headers["access-control-allow-headers"] == "authorization, content-type, jrl-client"
    assert "access-control-allow-private-network" not in headers
    _, headers = answered(guarded, "OPTIONS", "/v1/steps", Access_Control_Request_Private_Network="true", **asks)
    assert headers["access-control-allow-private-network"] == "true"
    assert answered(guarded, "OPTIONS", "/v1/steps", Origin=PAGE)[0] == 401  # not a preflight


def test_all_origins_need_a_token(tmp_path):
    with pytest.raises(InputError, match=r"external\.origins: \* lets all pages .* external\.token_file"):
        Address(ExternalConfig(port=0, origins=("*",)))
    (tmp_path / "token").write_text(TOKEN)
    with running(settings(external={"origins": ["*"], "token_file": str(tmp_path / "token")})) as run:
        status, headers = answered(run, "GET", "/v1/policies", Origin=PAGE, Authorization=f"Bearer {TOKEN}")
        assert (status, headers["access-control-allow-origin"]) == (200, PAGE)


@pytest.mark.parametrize(
    "origin", ["localhost:8000", "http://localhost/", "http://", "file:///page.html", "http://a b", "", "null"]
)
def test_an_invalid_origin_is_refused_before_the_server_listens(origin, capsys, tmp_path):
    with pytest.raises(InputError, match=r"external\.origins: .* is not an origin: expected http://HOST"):
        Address(ExternalConfig(port=0, origins=(origin,)))
    tree = [f'external.origins=["{origin}"]', "external.observation={box: [4]}", "external.action={discrete: 2}"]
    assert main(["ppo", f"--out={tmp_path}/run", "--port=0", *(f"--set={text}" for text in tree)]) == 2
    assert "is not an origin" in capsys.readouterr().err


def test_origins_are_compared_in_lower_case():
    address = Address(ExternalConfig(port=0, origins=("http://Page.Test:80",)))
    assert address.origins == {b"http://page.test:80"}
    address.close()


# ---------------------------------------------------------------- in Chromium


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def files():
    """Origin of a server of this repository's files."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(ROOT)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def tab(browser):
    opened = browser.new_page()
    opened.set_default_timeout(30_000)
    yield opened
    opened.close()


def shown(tab, name):
    text = tab.text_content(f"#{name}")
    return float("nan") if text == "-" else float(text)


def until(holds, seconds):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def open_to_files(files):
    with running(settings(envs=8, external={"origins": [files]})) as run:
        yield run


@pytest.mark.slow
def test_the_page_plays_and_the_server_counts_its_episodes(tab, files, open_to_files):
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(f"{files}/examples/serve_cartpole.html?server={open_to_files.address}&poles=2")
    rows = len(open_to_files.rows)
    until(lambda: shown(tab, "episodes") >= 5 and len(open_to_files.rows) >= rows + 3, 60)
    until(lambda: shown(tab, "version") > 1, 60)
    assert 8 <= shown(tab, "mean") <= 500
    assert tab.text_content("#state") == "playing"
    assert errors == []
    returns = [row["episode/return"] for row in open_to_files.rows if np.isfinite(row.get("episode/return", np.nan))]
    assert returns
    assert min(returns) >= 8  # CartPole cannot fall sooner


PLAYS = """async ([module, address]) => {
  const { PolicyClient } = await import(module);
  const client = new PolicyClient(address), actions = [];
  const episode = await client.startEpisode({trainingEnabled: false});
  for (let i = 0; i < 3; i++) {
    actions.push(await client.getAction(episode, new Float32Array([0, 0.1, 0, i])));
    client.logReturns(episode, 0.5, {speed: 7});
    client.logReturns(episode, 1, {speed: 3, fell: false});
  }
  return {actions, ...await client.endEpisode(episode, [0, 0, 0, 0], true)};
}"""


@pytest.mark.slow
def test_a_request_whose_answer_was_lost_counts_once(tab, files, open_to_files):
    tab.goto(f"{files}/examples/README.md")
    lost = []

    def lose(route):
        if route.request.method == "POST" and route.request.url not in lost:
            lost.append(route.request.url)
            assert route.fetch().ok  # the server has done the request, and the page gets no answer
            route.abort()
        else:
            route.continue_()

    tab.route("**/v1/episodes**", lose)
    found = tab.evaluate(PLAYS, [f"{files}/jrl/serve/client.js", open_to_files.address])
    assert [url.rpartition("/")[2] for url in lost] == ["episodes", "action", "end"]
    assert (found["return"], found["length"]) == (4.5, 3)
    assert set(found["actions"]) <= {0, 1}


@pytest.mark.slow
def test_errors_have_the_names_of_the_python_client(tab, files, open_to_files):
    tab.goto(f"{files}/examples/README.md")
    script = """async ([module, address, what]) => {
      const { PolicyClient } = await import(module);
      const client = new PolicyClient(address, {patienceMs: 300});
      try {
        if (what === "values") await client.getAction(await client.startEpisode(), [1, 2]);
        if (what === "chosen") await client.logAction(await client.startEpisode(), [0, 0, 0, 0], 1);
        if (what === "probable") await client.logAction(await client.startEpisode(), [0, 0, 0, 0], 1, [-0.7]);
        if (what === "unknown") await client.getAction("nobody", [0, 0, 0, 0]);
        if (what === "gone") await client.steps(["nobody"], [[0, 0, 0, 0]]);
        if (what === "away") await new PolicyClient("http://127.0.0.1:9", {patienceMs: 300}).policies();
        if (what === "lost") await new PolicyClient("http://127.0.0.1:9").steps(["a"], [[0, 0, 0, 0]]);
      } catch (error) { return `${error.name} ${error.status ?? ""}: ${error.message}`; }
      return "no error";
    }"""
    module = f"{files}/jrl/serve/client.js"
    for what, message in {
        "values": "RequestRefused 422: observation",
        "chosen": "RequestRefused 422: ppo learns from actions that its own policy chose",
        "probable": "RequestRefused 422: log_prob: expected float32 [], got [1]",
        "unknown": "EpisodeLost : nobody",
        "gone": "EpisodeLost : ",
        "away": "ServerAway : http://127.0.0.1:9",
        "lost": "EpisodeLost : http://127.0.0.1:9",
    }.items():
        assert tab.evaluate(script, [module, open_to_files.address, what]).startswith(message), what


@pytest.mark.slow
def test_a_server_learns_from_the_page(tab, files, tmp_path):
    """Mean return of 150 over the page's last 20 episodes."""
    at = f"http://127.0.0.1:{free_port()}"
    tree = [f"external.origins=[{files}]", "external.observation={box: [4]}", "external.action={discrete: 2}"]
    more = [f"--set={text}" for text in (*tree, "env.num_envs=8")]
    command = [sys.executable, "-m", "jrl.serve", "ppo", f"--port={at.rpartition(':')[2]}", f"--out={tmp_path}", *more]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            listening(at)
            tab.goto(f"{files}/examples/serve_cartpole.html?server={at}&poles=8")
            until(lambda: shown(tab, "mean") >= 150, 300)
            print(f"{shown(tab, 'mean')} after {shown(tab, 'steps'):.0f} steps")
        finally:
            server.terminate()
