"""Bad input is answered by one error each, at once: the tables of errors/, and what a table cannot hold."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from jrl import __main__, config, migrate, networks, train
from jrl.errors import InputError
from jrl.fields import schema
from jrl.play.evaluation import Evaluations
from jrl.rllib import exploration
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary

ROOM = Path(__file__).parent / "errors"
BASE = {"algo": {"name": "ppo"}, "env": {"id": "CartPole-v1"}, "stop": {"env_steps": 100_000}}
RUN = [
    "--env=CartPole-v1",
    "--set=env.backend=jax",
    "--set=env.num_envs=4",
    "--set=run.compile_cache=false",
    "--stop=env_steps=100",
]
OBSERVATION = Dict((("camera", Box((6, 6, 1), "uint8", 0, 255)), ("bits", MultiBinary((2,)))))


def over_base(given):
    return config.from_dict(schema.merge(BASE, given))


READERS = {
    "config": over_base,
    "set": lambda given: config.load(None, [given], algo="ppo", env="CartPole-v1", stop=["env_steps=100000"]),
    "stop": lambda given: config.load(None, algo="ppo", env="CartPole-v1", stop=["env_steps=100000", given]),
    "evaluation": lambda given: Evaluations(over_base({"evaluation": {"config": given}})),
    "network": lambda given: networks.build(
        EnvSpec(OBSERVATION, Discrete(4), 1), networks.NetworkConfig(**given), {"policy": networks.Head(4)}
    ),
    "rllib": migrate.migrate,
    "exploration": exploration.from_rllib,
}


def rows(name):
    """The rows of a table as test parameters: (kind, what is given, the row)."""
    for row in schema.parse((ROOM / f"{name}.yaml").read_text()):
        kind, given = next(iter(row.items()))
        yield pytest.param(kind, given, row, id=f"{kind} {given}"[:60])


def errors(read, *given, **more):
    with pytest.raises(InputError) as e:
        read(*given, **more)
    return list(e.value.errors)


def in_order(parts, text):
    """Whether a text has all these parts, one behind the other."""
    for part in parts:
        if part not in text:
            return False
        text = text.partition(part)[2]
    return True


@pytest.mark.parametrize(("kind", "given", "row"), [*rows("config"), *rows("migrate")])
def test_bad_input_is_one_error(kind, given, row, tmp_path):
    if kind == "text":
        found = errors(config.load, write(tmp_path / "x.yaml", given))[:1]  # keys that are missing, too
    else:
        found = errors(READERS[kind], given, **{key: row[key] for key in ("algo", "name") if key in row})
    error, mends = row["error"], row.get("mend", [])
    if isinstance(error, str):
        assert found == [error]
    else:
        assert len(found) == 1 and in_order(error, found[0]), found
    for mend in mends if isinstance(mends, list) else [mends]:
        over_base(schema.merge(given, mend))


@pytest.mark.parametrize(("kind", "given", "row"), [*rows("commands")])
def test_a_command_that_cannot_be_exits_with_2(kind, given, row, tmp_path, capsys):
    name, *words = shlex.split(given)
    try:
        status = __main__.main([name, *(name == "train") * [*RUN, f"--out={tmp_path / 'run'}"], *words])
    except SystemExit as e:  # of argparse
        status = e.code
    out, err = capsys.readouterr()
    assert status == 2 and in_order(row["error"], err) and "Traceback" not in err, err
    assert "ok" not in out.splitlines() and not list(tmp_path.iterdir())


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x01\x02\xff", "not UTF-8 text"),
        ("algo: x".encode("utf-16"), "not UTF-8 text"),
        (b"a: \x07", "not valid YAML"),
        ("a: " + "[" * 3_000, "nested too deeply"),
        ("{a: " * 100_000, "nested too deeply"),
        ("a: &a {again: *a}", "a part that contains itself"),
        ("a: " + "9" * 5_000, "a value is not of its type"),
        ("a: !!int x", "a value is not of its type"),
    ],
)
def test_a_file_of_any_kind_is_read_or_refused(data, message, tmp_path):
    (found,) = errors(config.load, write(tmp_path / "x.yaml", data))
    assert message in found and len(found) < 400


LONG, DIGITS = "x" * 30_000, "9" * 400


@pytest.mark.parametrize(
    "command",
    [
        f"train ppo --set {LONG}=1", f"train ppo --set algo.lr={LONG}", f"train ppo --set env.num_envs=-{DIGITS}",
        f"train ppo --env {LONG}", f"train ppo --stop {LONG}=1", f"train ppo --seeds {DIGITS}", f"train --algo {LONG}",
        f"{LONG} ppo", f"sweep ppo --set algo.lr=log(1e-4,1e-2,{DIGITS})", f"sweep ppo --set algo.lr=logg({LONG})",
        "sweep ppo --set algo.lr=log(1e-4,1e-2,9999) --set algo.gamma=uniform(.9,.99,9999)",
        f"serve ppo --no-learn --set external.port={DIGITS}", f"config show ppo {LONG}",
    ],
    ids=lambda command: command[:40],
)  # fmt: skip
def test_what_is_long_is_echoed_in_part(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = __main__.main(command.split(" "))
    except SystemExit as e:  # of argparse
        status = e.code
    found = capsys.readouterr().err
    assert status == 2 and "Traceback" not in found and not list(tmp_path.iterdir())
    assert all(len(line) < 1300 for line in found.splitlines() if not line.startswith("usage:")), found[:2000]


def test_what_is_no_file(tmp_path):
    assert "expected a file, got a directory" in errors(config.load, tmp_path)[0]
    assert "expected a file, got a device" in errors(config.load, "/dev/zero")[0]
    assert len(errors(config.load, "x" * 5_000)[0]) < 400
    assert errors(config.load, write(tmp_path / "empty.yaml", ""))[0].startswith("algo.name is missing")


@pytest.mark.parametrize("data", ['{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' + "9" * 5_000 + "}", "[1]", '{"a": }'])
def test_json_is_one_error(data, tmp_path, capsys):
    (found,) = errors(config.load, write(tmp_path / "params.json", data))
    assert "not valid JSON" in found or "expected a mapping" in found
    assert train.main(["configs/ppo.yaml", "--config", data]) == 2
    found = capsys.readouterr().err
    assert found.count("\n") == 1 and "--config: expected JSON such as" in found and len(found) < 400


def test_many_errors_are_cut():
    long = {"lr": "x" * 10_000, "y" * 200: 1}
    with pytest.raises(InputError) as e:
        config.from_dict(schema.merge(BASE, {"algo": long, "env": {"id": "z" * 10_000}}))
    assert len(e.value.errors) == 2 and max(map(len, e.value.errors)) < 600
    with pytest.raises(InputError, match="and 50 more errors"):
        config.from_dict(schema.merge(BASE, {"stop": {f"m{i}": "x" for i in range(100)}}))


def test_data_from_python_is_held_to_the_same():
    endless = {"x": 1}
    endless["again"] = endless
    for options, message in ((endless, "contains itself"), ({"a": {(1, 2): 3}}, r"env\.options\.a: .*got a tuple")):
        with pytest.raises(InputError, match=message):
            config.from_dict({**BASE, "env": {"id": "x", "options": options}})


def test_numbers_and_arrays_of_numpy_are_plain_in_a_config():
    given = {
        "a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.arange(3), "e": np.str_("x"),
        "f": {"g": [np.ones((1, 2)), (np.array(2.0),)]}, "h": Path("/x"), "i": float("nan"),
    }  # fmt: skip
    data = {"algo": {"name": "ppo", "lr": np.float64(1e-3)}, "env": {"id": "CartPole-v1", "options": given}}
    cfg = config.from_dict(data)
    found = dict(cfg.env.options)
    assert np.isnan(found.pop("i")) and found == {
        "a": 0.5, "b": 3, "c": True, "d": [0, 1, 2], "e": "x", "f": {"g": [[[1.0, 1.0]], (2.0,)]}, "h": "/x",
    }  # fmt: skip
    assert type(found["c"]) is bool and type(found["e"]) is str and type(cfg.algo.lr) is float
    config.to_yaml(cfg)


@pytest.mark.parametrize(
    "value",
    [len, object(), {1, 2}, np.array([None]), np.zeros(1, [("a", int)])],
    ids=lambda value: type(value).__name__,
)
def test_an_option_that_yaml_cannot_hold_is_one_error_with_the_way_to_do_it(value):
    data = {"algo": {"name": "ppo"}, "env": {"id": "CartPole-v1", "options": {"x": {"y": [value]}}}}
    (found,) = errors(config.from_dict, data)
    assert found.startswith("env.options.x.y.0: expected numbers, text, lists or mappings, as in YAML, got a ")
    assert "jrl.api.register_env(NAME, lambda context: ...)" in found and "\n" not in found
    from jrl.api import PPOConfig

    def made():
        return PPOConfig().environment("CartPole-v1", env_config={"x": value})

    (found,) = errors(lambda: made().to_run_config())
    assert found.startswith("env.options.x: expected numbers")
    assert errors(lambda: made().to_yaml())[0] == found


def test_dates_are_text_and_aliases_stay(tmp_path):
    options = "{when: 2020-01-01, a: &a [1], b: *a, c: {<<: {d: 1}}}"
    text = f"algo: {{name: ppo}}\nenv: {{id: x, options: {options}}}\nstop: {{env_steps: 9}}"
    cfg = config.load(write(tmp_path / "x.yaml", text))
    assert cfg.env.options == {"when": "2020-01-01", "a": [1], "b": [1], "c": {"d": 1}}
    assert config.load(write(tmp_path / "y.yaml", config.to_yaml(cfg))) == cfg


def test_keys_of_any_kind_survive_being_written(tmp_path):
    odd = {"a": {1: {"x": 2}, "b.c": {"d.e": [1]}, False: 3, 2.5: {"": None}, "x: y": {}}}
    cfg = config.from_dict(schema.merge(BASE, {"env": {"options": odd}}))
    assert config.load(write(tmp_path / "x.yaml", config.to_yaml(cfg))) == cfg


def test_a_stop_of_rllib_that_is_no_number():
    for value in (float("nan"), float("inf"), 10**400):
        given = {"run": "PPO", "env": "CartPole-v1", "stop": {"timesteps_total": value}, "config": {"lr": 1e-3}}
        with pytest.raises(InputError, match=r"stop\.timesteps_total: expected a number, got"):
            migrate.migrate(given)


def test_a_module_that_fails_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "fails_at_import.py").write_text("x = 1\nraise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"algo.name fails_at_import.x: .*cannot be imported"):
        config.from_dict(schema.merge(BASE, {"algo": {"name": "fails_at_import.x"}}))
