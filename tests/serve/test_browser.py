"""Pages as clients: the JavaScript client and the example in Chromium, if it is installed."""

import functools
import http.server
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from serving import listening, running, settings
from test_learning import free_port

ROOT = Path(__file__).parents[2]


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
    at, errors = f"http://127.0.0.1:{free_port()}", []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tree = [f"external.origins=[{files}]", "external.observation={box: [4]}", "external.action={discrete: 2}"]
    more = [f"--set={text}" for text in (*tree, "env.num_envs=8")]
    command = [sys.executable, "-m", "jrl.serve", "ppo", f"--port={at.rpartition(':')[2]}", f"--out={tmp_path}", *more]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            listening(at)
            tab.goto(f"{files}/examples/serve_cartpole.html?server={at}&poles=8")
            until(lambda: shown(tab, "mean") >= 150, 300)
            assert tab.text_content("#state") == "playing"
            assert errors == []
            print(f"{shown(tab, 'mean')} after {shown(tab, 'steps'):.0f} steps")
        finally:
            server.terminate()
