"""The wheel that is built of this tree, installed away from it: its files, its commands, a run."""

import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def done(command, cwd, **env):
    """What a command prints; its environment is this one's but for `env`."""
    run = subprocess.run(list(map(str, command)), cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built of a copy: setuptools leaves files in a tree, and takes what an earlier build has left there."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("jrl", "configs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tree)
    for page in ("index.html", "assets/style.css"):  # a site as `make site` builds it
        path = tree / "build" / "site" / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the file {page}")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done([*pip, "--wheel-dir", tree / "dist", tree], tree)
    (found,) = (tree / "dist").glob("jrl-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder it is installed to, in front of the one where its dependencies are."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    done([*pip, "--target", target, wheel], target)
    return target


@pytest.mark.slow
def test_it_holds_the_modules_the_configs_the_page_and_the_mark_of_types(wheel):
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jrl").rglob("*.py")}
    configs = {f"jrl/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jrl" / "report" / "assets").iterdir()}
    zoo = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jrl" / "zoo").iterdir()
        if path.suffix in (".zip", ".json")
    }
    others = {
        "jrl/py.typed",
        "jrl/serve/client.js",
        "jrl/auto/rules.yaml",
        "jrl/site/index.html",
        "jrl/site/assets/style.css",
    }
    assert found == modules | configs | page | zoo | others and len(page) == 6 and len(zoo) > 12


@pytest.mark.slow
def test_its_command_trains_a_shipped_config(installed, tmp_path):
    jrl = lambda *words: done([installed / "bin" / "jrl", *words], tmp_path, PYTHONPATH=str(installed))
    python = lambda code: done([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(installed))
    assert Path(python("import jrl; print(jrl.__file__)").strip()) == installed / "jrl" / "__init__.py"
    assert jrl("--help").startswith("usage: jrl COMMAND")
    listed = {line.split()[0] for line in jrl("config", "list").splitlines()}
    assert listed == {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    small = ("--set=network.hidden=[8]", "--set=env.num_envs=2", "--set=rollout.length=16")
    assert f"run: {tmp_path / 'run'}" in jrl("train", "ppo", *small, "--stop=env_steps=300", "--out", tmp_path / "run")
    assert (tmp_path / "run" / "result.jsonl").stat().st_size and any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_its_command_serves_the_documentation(installed, tmp_path):
    command = [sys.executable, installed / "bin" / "jrl", "docs", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(installed)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().split()[1]
            assert urllib.request.urlopen(address, timeout=60).read() == b"the file index.html"
        finally:
            server.terminate()
