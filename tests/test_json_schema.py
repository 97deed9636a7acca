"""python -m jrl.config schema: what it says of a run's YAML, as an editor reads it."""

import json
from pathlib import Path

import jsonschema
import pytest

from jrl.config import __main__ as command
from jrl.fields import schema

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    path = tmp_path_factory.mktemp("schema") / "jrl.schema.json"
    assert command.main(["schema", "--out", str(path)]) == 0
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def faults(told, data):
    return list(jsonschema.Draft202012Validator(told).iter_errors(data))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_is_valid(told, path):
    assert faults(told, schema.read_yaml(path)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"trainning": {}},
        {"algo": {"gama": 0.9}},
        {"algo": {"gamma": 1.5}},
        {"algo": {"lr": [[0, -1]]}},
        {"algo": {"name": "pppo"}},
        {"algo": {"name": "dqn", "clip_eps": 0.1}},
        {"env": {"num_envs": 0}},
        {"env": {"num_envs": "x"}},
        {"network": {"core": {"name": "lsm"}}},
        {"network": {"core": {"name": "lstm", "layers": 2}}},
        {"network": {"activation": "rel"}},
        {"stop": {"env_steps": "soon"}},
    ],
    ids=str,
)
def test_a_typo_and_a_value_out_of_range_are_not(told, change):
    base = {"algo": {"name": "ppo"}, "env": {"id": "CartPole-v1"}, "stop": {"env_steps": 1000}}
    assert faults(told, base) == [] and faults(told, schema.merge(base, change))


def test_it_says_what_a_key_means_takes_and_has(told):
    ppo = told["$defs"]["ppo_Config"]["properties"]
    assert ppo["gamma"] == {
        "type": "number", "minimum": 0, "maximum": 1, "default": 0.99,
        "description": "discount per step of the environment",
    }  # fmt: skip
    assert told["properties"]["algo"]["oneOf"][0] == {"$ref": "#/$defs/ppo_Config"}
    assert "lin_" in json.dumps(ppo["lr"])
