"""`jrl COMMAND`: which commands there are, what they take, what an installed jrl brings along."""

import ast
import importlib
import importlib.util
import sys
import threading
import urllib.request
import warnings
from pathlib import Path

import pytest

from jrl import __main__, config, docs
from jrl.config import __main__ as config_command
from jrl.errors import InputError
from jrl.fields import shipped
from jrl.host import command

ROOT = Path(__file__).parent.parent


def test_every_command_is_a_module_that_runs_by_itself(capsys, monkeypatch):
    monkeypatch.setattr(command, "_prefix", command.MODULE)
    for name in command.COMMANDS:
        module = command.module_name(name)
        is_room = (ROOT / "jrl" / module).is_dir()
        assert callable(importlib.import_module(f"jrl.{module}.__main__" if is_room else f"jrl.{module}").main)
        assert command.format_command(name) == f"python -m jrl.{module}"
    assert __main__.main(["--help"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")} == {
        *command.COMMANDS
    }


def test_the_usage_line_is_what_was_typed(capsys, monkeypatch):
    monkeypatch.setattr(command, "_prefix", command.MODULE)
    for argv0, own in (("/usr/bin/jrl", "jrl"), ("/x/jrl/__main__.py", "python -m jrl")):
        monkeypatch.setattr(sys, "argv", [argv0])
        with pytest.raises(SystemExit):
            __main__.main(["check_env", "--help"])
        assert capsys.readouterr().out.startswith(f"usage: {own} check-env [-h]")


def test_a_file_whose_name_has_an_equals_sign_is_no_setting(tmp_path, capsys):
    (tmp_path / "lr=1.yaml").write_text("algo: {name: ppo}\nenv: {id: CartPole-v1}\nstop: {env_steps: 9}\n")
    assert __main__.main(["config", "show", "--set", "algo.lr=0.5", str(tmp_path / "lr=1.yaml")]) == 0
    assert "lr: 0.5" in capsys.readouterr().out


def test_the_installed_command_finds_modules_where_it_is_typed(tmp_path, monkeypatch):
    (tmp_path / "only_here_walk.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["jrl", "--version"])
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert __main__.script() == 0
    assert importlib.util.find_spec("only_here_walk") is not None


@pytest.mark.parametrize("folder", ["jrl", "scripts", "examples"])
def test_no_parser_takes_abbreviated_options(folder):
    for file in (ROOT / folder).rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "ArgumentParser" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser"):
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert given.get("allow_abbrev") == "False", f"{file}:{node.lineno}"


# ---------------------------------------------------------------- the documentation


def test_the_documentation_is_served_to_this_machine_alone(tmp_path):
    (tmp_path / "index.html").write_text("welcome")
    with docs.make_server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address
        assert host == "127.0.0.1"
        assert urllib.request.urlopen(f"http://{host}:{port}/", timeout=60).read() == b"welcome"
        with pytest.raises(InputError, match=rf"--port: cannot listen on {port} \(.*in use\): choose another port"):
            docs.make_server(tmp_path, port)
        server.shutdown()
    with pytest.raises(InputError, match="--port: cannot listen on 70000"):
        docs.make_server(tmp_path, 70_000)


def test_a_checkout_without_the_built_documentation_names_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "__file__", str(tmp_path / "jrl" / "docs.py"))
    assert docs.main([]) == 2
    assert capsys.readouterr().err == (
        "error: docs: this installation has no built site: run `make site` in the source checkout\n"
    )
    for place in ("build/site", "jrl/site"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "index.html").touch()
        assert docs.directory() == tmp_path / place


# ---------------------------------------------------------------- configs that come with jrl


def test_a_config_by_name(tmp_path, monkeypatch, capsys):
    assert shipped.names() == tuple(sorted(p.stem for p in (ROOT / "configs").glob("*.yaml")))
    monkeypatch.chdir(tmp_path)
    assert config.load("ppo") == config.load(ROOT / "configs" / "ppo.yaml")
    assert config_command.main(["list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert tuple(lines) == shipped.names() and lines["ppo"] == "CartPole-v1 on any backend"
    with pytest.raises(InputError, match=r"pppo: there is no such file: did you mean ppo"):
        config.load("pppo")
    (tmp_path / "ppo").write_text("algo: {name: a2c}\nenv: {id: CartPole-v1}\nstop: {env_steps: 1}\n")
    assert config.algo_name(config.load("ppo")) == "a2c"  # a file of one's own comes first


def test_an_installed_package_has_its_configs_inside(tmp_path, monkeypatch):
    (tmp_path / "jrl" / "configs").mkdir(parents=True)
    (tmp_path / "configs").mkdir()  # somebody else's
    (tmp_path / "jrl" / "configs" / "mine.yaml").write_text("# A task. More.\n")
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "jrl" / "fields" / "shipped.py"))
    shipped.directory.cache_clear()
    try:
        assert shipped.names() == ("mine",) and [*shipped.lines()] == ["mine  A task"]
        assert shipped.locate("mine") == tmp_path / "jrl" / "configs" / "mine.yaml"
    finally:
        shipped.directory.cache_clear()


def test_a_warning_of_jrls_own_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def main():
        for path in (command.__file__, __file__):
            print(warnings.formatwarning("few episodes", RuntimeWarning, path, 1), end="")
        return 0

    assert command.run(main) == 0
    ours, *others = capsys.readouterr().out.splitlines()
    assert ours == "warning: few episodes" and "RuntimeWarning: few episodes" in others[0]
