"""Bad input is answered by one error each, at once: the table of errors.yaml, and what a table cannot hold."""

from pathlib import Path

import pytest

from jrl import migrate, train
from jrl.errors import InputError
from jrl.fields import schema
from jrl.settings import config

CASES = schema.parse((Path(__file__).parent / "errors.yaml").read_text())
BASE = {"algo": {"name": "ppo"}, "env": {"id": "CartPole-v1"}, "stop": {"env_steps": 100_000}}


def errors(source, stop=()):
    names = {} if source else {"algo": "ppo", "env": "CartPole-v1"}
    with pytest.raises(InputError) as e:
        config.load(source, stop=stop, **names)
    return list(e.value.errors)


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c.get("config") or c.get("stop") or c.get("text"))[:60])
def test_bad_input_is_one_error(case, tmp_path):
    if "stop" in case:
        found = errors(None, stop=["env_steps=100000", case["stop"]])
    elif "config" in case:
        with pytest.raises(InputError) as e:
            config.from_dict(schema.merge(BASE, case["config"]))
        found = list(e.value.errors)
    else:
        (tmp_path / "x.yaml").write_text(case["text"])
        found = errors(tmp_path / "x.yaml")[:1]  # keys that are missing, too
    if isinstance(case["error"], str):
        assert found == [case["error"]]
        return
    assert len(found) == 1
    rest = found[0]
    for part in case["error"]:
        assert part in rest, found
        rest = rest.partition(part)[2]


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x01\x02\xff", "not UTF-8 text"),
        ("algo: x".encode("utf-16"), "not UTF-8 text"),
        (b"a: \x07", "not valid YAML"),
        (b"x" * 5_000_000, "larger than 4 MiB"),
        ("a: " + "[" * 3_000, "more than 60 levels of nesting"),
        ("{a: " * 100_000, "more than 60 levels of nesting"),
        ("a: " + "9" * 5_000, "is no int"),
        ("a: &a [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1 or ''}, *a{i - 1 or ''}]\n" for i in range(1, 40)),
         "more than 20,000 values"),
        ("".join(f"key{i}: {i}\n" for i in range(60_000)), "more than 20,000 values"),
    ],
    ids=["binary", "utf-16", "control", "large", "brackets", "braces", "digits", "laughs", "keys"],
)  # fmt: skip
def test_a_file_of_any_kind_is_read_or_refused(data, message, tmp_path):
    (found,) = errors(write(tmp_path / "x.yaml", data))
    assert message in found and len(found) < 400


def test_what_is_no_file(tmp_path):
    assert "Is a directory" in errors(tmp_path)[0]
    assert "larger than" in errors("/dev/zero")[0]
    assert "null" in errors("a\x00b.yaml")[0]
    assert len(errors("x" * 5_000)[0]) < 400
    assert errors(write(tmp_path / "empty.yaml", ""))[0].startswith("algo.name is missing")


@pytest.mark.parametrize("data", ['{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' + "9" * 5_000 + "}", "[1]", '{"a": }'])
def test_json_is_read_by_the_same_rules(data, tmp_path):
    (found,) = errors(write(tmp_path / "params.json", data))
    assert "not valid JSON" in found or "expected a mapping" in found


@pytest.mark.parametrize("data", ["[" * 100_000, '{"lr": ' + "9" * 5_000 + "}", '{"lr": 1, "lr": 2}', "{", "[1]"])
def test_json_of_the_command_line_is_one_error(data, capsys):
    assert train.main(["configs/ppo.yaml", "--config", data]) == 2
    found = capsys.readouterr().err
    assert found.count("\n") == 1 and "--config: expected JSON such as" in found and len(found) < 400


def test_many_errors_are_cut(tmp_path):
    found = errors(write(tmp_path / "x.yaml", "".join(f"learning_rat{i}: 1\n" for i in range(5_000))))
    assert len(found) < 30 and "unknown key learning_rat20, and 4,979 more" in found
    long = {"lr": "x" * 10_000, "y" * 200: 1}
    with pytest.raises(InputError) as e:
        config.from_dict(schema.merge(BASE, {"algo": long, "env": {"id": "z" * 10_000}}))
    assert len(e.value.errors) == 3 and max(map(len, e.value.errors)) < 600
    with pytest.raises(InputError, match="and 50 more errors"):
        config.from_dict(schema.merge(BASE, {"stop": {f"m{i}": "x" for i in range(100)}}))


def test_data_from_python_is_held_to_the_same():
    endless = {"x": 1}
    endless["again"] = endless
    for options, message in ((endless, "more than 60 levels"), ({"x": [0] * 30_000}, "more than 20,000 values")):
        with pytest.raises(InputError, match=message):
            config.from_dict(schema.merge(BASE, {"env": {}}) | {"env": {"id": "x", "options": options}})
    with pytest.raises(InputError, match=r"env\.options: expected keys of at most 200 characters, got 'k"):
        config.from_dict(schema.merge(BASE, {"env": {"options": {"k" * 2_000: 1}}}))
    with pytest.raises(InputError, match=r"expected text for keys, got \(1, 2\)"):
        config.from_dict(schema.merge(BASE, {"env": {"options": {"a": {(1, 2): 3}}}}))


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
