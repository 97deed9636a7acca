"""docs/serving.md: its commands run, and its routes, keys and rows are complete."""

import dataclasses
import importlib.util
import os
import re
import shlex
import signal
import threading
import types
from pathlib import Path

import pytest
from serving import asked, listening
from test_learning import free_port

from jrl.config.external import ExternalConfig
from jrl.metrics import loggers
from jrl.serve import __main__, client_source, openapi
from jrl.types import Box, Discrete

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()


def example():
    spec = importlib.util.spec_from_file_location("serve_cartpole", ROOT / "examples" / "serve_cartpole.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jrl.serve.client._FIRST_S", 0.02)
    commands = [shlex.split(line) for line in re.findall(r"^python -m jrl\.serve (.+)$", PAGE, re.M)]
    learning = [args for args in commands if "external.observation={box: [4]}" in args]
    [serving] = [args for args in commands if "--no-learn" in args]
    assert len(learning) + 1 == len(commands)
    port, played = free_port(), []
    address = f"http://127.0.0.1:{port}"

    def play():
        try:
            while True:
                played.extend(example().main(address, 1))
        except ConnectionError:
            pass

    for _ in range(2):
        thread = threading.Thread(target=play, daemon=True)
        thread.start()
    for args in learning:
        assert __main__.main([*args, f"--port={port}", "--set=run.compile_cache=false"]) == 0, capsys.readouterr().err
    rows = loggers.read_rows(Path("runs/served/result.jsonl"))
    assert rows[-1]["env_steps"] >= 2048
    assert {client_source.LAG, client_source.DROPPED, client_source.UNDER_WAY, "env/failures", "rollout/void"} <= set(
        rows[-1]
    )
    assert len(played) > 20
    found = []

    def ask():
        listening(address)
        found.append(asked(address, "POST", "/v1/action", {"observation": [0.0, 0.1, 0.0, -0.1]}))
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert __main__.main([*serving, f"--port={port}"]) == 128 + signal.SIGTERM
    asking.join(10)
    assert found[0][0] == 200
    assert found[0][1]["action"] in (0, 1)


def test_routes_keys_and_rows_of_the_page():
    agent = types.SimpleNamespace(observation=Box((4,)), action=Discrete(2))
    document = openapi.build_document([("", agent)], max_episodes=8)
    told = set(re.findall(r"^\| `(GET|POST) (/v1/[^`]+)` \|", PAGE, re.M))
    there = {
        (method.upper(), path.replace("{id}", "ID"))
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith("/v1/") and path != "/v1/health"
    }
    assert told == there
    table = PAGE.partition("The section `external`:")[2].partition("A rollout is complete")[0]
    keys = {key for line in re.findall(r"^\| (`[^|]+) \|", table, re.M) for key in re.findall(r"`(\w+)`", line)}
    assert keys == {field.name for field in dataclasses.fields(ExternalConfig)}
    assert all(f"`{row}`" in PAGE for row in (client_source.LAG, client_source.DROPPED, client_source.UNDER_WAY))


@pytest.mark.parametrize("name", ["max_wait_ms", "timeout_s", "port"])
def test_defaults_of_the_page(name):
    value = getattr(ExternalConfig(), name)
    assert re.search(rf"`{name}`[^|]*\|[^|]*\b{value:g}\b", PAGE)
