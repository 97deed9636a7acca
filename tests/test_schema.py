"""jrl.schema: documentation from comments, YAML without traps, sections within sections."""

import dataclasses
from typing import Literal

import pytest
import yaml

from jrl import config, schema
from jrl.config import EnvConfig
from jrl.hyper import Schedule


@dataclasses.dataclass(frozen=True)
class PPO:
    lr: Schedule = 3e-4  # step size of Adam
    gamma: float = 0.99  # discount
    num_epochs: int = 4


@dataclasses.dataclass(frozen=True)
class Core:
    size: int
    kind: str = "lstm"


@dataclasses.dataclass(frozen=True)
class Tree:
    core: Core | None = None
    weights: dict[str, float] = dataclasses.field(default_factory=dict)


def build(data):
    problems = []
    return schema.build(Tree, data, problems), [p.message for p in problems]


def test_optional_section():
    assert build({}) == (Tree(), [])
    assert build({"core": None}) == (Tree(), [])
    assert build({"core": {"size": 3}}) == (Tree(core=Core(3)), [])
    assert build({"core": {}})[1] == ["core.size is missing: expected a whole number"]
    assert build({"core": {"size": 1, "kin": "gru"}})[1] == ["unknown key core.kin: did you mean core.kind?"]


def test_each_key_of_a_mapping_is_a_problem_of_its_own():
    assert build({"weights": {"a": "1e-3", "b": "x", "c": True}}) == (
        Tree(),
        ["weights.b: expected a number, got 'x'", "weights.c: expected a number, got True"],
    )
    assert build({"weights": {"a": "1e-3"}})[0].weights == {"a": 1e-3}


@pytest.mark.parametrize("text", ["1e-3", "-2E5", ".5e1", "1.e+3"])
def test_exponents_are_numbers_and_their_texts_are_quoted(text):
    assert schema.parse(text) == float(text)
    data = {"number": float(text), "text": text}
    assert schema.parse(schema.dump(data)) == data


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: {b: 1, b: 1}"])
def test_a_key_given_twice_is_an_error(text):
    with pytest.raises(yaml.YAMLError, match="duplicate key"):
        schema.parse(text)


def test_dump_aligns_comments_behind_the_leaves():
    data = {"a": {"b": 1, "c": {}, "d": {"e": [1, None]}}, "f": True}
    text = schema.dump(data, {"a.b": "one", "a.d.e": "two", "a": "never: not a leaf"})
    assert text == (f"a:\n{'  b: 1':<38}  # one\n  c: {{}}\n  d:\n{'    e: [1, null]':<38}  # two\nf: true\n")


def test_docs_are_the_comments_of_the_fields():
    assert schema.docs(PPO) == {"lr": "step size of Adam", "gamma": "discount"}
    assert schema.docs(EnvConfig)["clip_rewards"].startswith("null or false: as they are; true: the sign")


@pytest.mark.parametrize(
    "cls", [getattr(config, n) for n in config.__all__ if n.endswith("Config") or n == "RunSettings"]
)
def test_every_field_is_documented_or_a_section(cls):
    undocumented = {f.name for f in dataclasses.fields(cls)} - set(schema.docs(cls))
    assert undocumented <= {"env", "network", "rollout", "evaluation", "checkpoint", "run"}


def test_inherited_docs_and_literals_of_a_subclass():
    @dataclasses.dataclass(frozen=True)
    class Child(PPO):
        lr: Schedule = 1.0
        mode: Literal["a", "b"] = "a"  # which "#1" to use

    assert schema.docs(Child) == {"lr": "step size of Adam", "gamma": "discount", "mode": 'which "#1" to use'}
