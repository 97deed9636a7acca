"""jrl.fields.schema: documentation from comments, YAML without traps, sections within sections."""

import dataclasses
from typing import Literal

import pytest
import yaml

from jrl import config
from jrl.config import EnvConfig
from jrl.fields import schema, validation
from jrl.fields.bounds import Schedule


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
        Tree(weights={"a": 1e-3}),
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
    assert validation.docs(PPO) == {"lr": "step size of Adam", "gamma": "discount"}
    assert validation.docs(EnvConfig)["clip_rewards"].startswith("null: sign for Atari only; false: not clipped")


@pytest.mark.parametrize(
    "cls", [getattr(config, n) for n in config.__all__ if n.endswith("Config") or n == "RunSettings"]
)
def test_every_field_is_documented_or_a_section(cls):
    undocumented = {f.name for f in dataclasses.fields(cls)} - set(validation.docs(cls))
    assert undocumented <= {
        "env", "network", "rollout", "evaluation", "checkpoint", "devices", "env_runners", "run", "runtime", "custom",
    }  # fmt: skip


def test_inherited_docs_and_literals_of_a_subclass():
    @dataclasses.dataclass(frozen=True)
    class Child(PPO):
        lr: Schedule = 1.0
        mode: Literal["a", "b"] = "a"  # which "#1" to use

    assert validation.docs(Child) == {"lr": "step size of Adam", "gamma": "discount", "mode": 'which "#1" to use'}


# ---------------------------------------------------------------- sections of several kinds


@dataclasses.dataclass(frozen=True)
class Greedy:
    name: Literal["greedy"] = "greedy"
    epsilon: Schedule = 0.1  # how often
    delay: int = 0


@dataclasses.dataclass(frozen=True)
class Soft:
    name: Literal["soft"] = "soft"
    temperature: float = 1.0  # how much
    delay: int = 0


GREEDY = Greedy(delay=5)


@dataclasses.dataclass(frozen=True)
class Chooser:
    lr: float = 1e-3
    explore: Greedy | Soft = GREEDY
    other: Greedy | Soft | None = None


@dataclasses.dataclass(frozen=True)
class Must:
    explore: Greedy | Soft


def choose(data, cls=Chooser):
    problems = []
    return schema.build(cls, data, problems), [p.message for p in problems]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Greedy(delay=5)),
        ({"epsilon": "1e-1"}, Greedy(delay=5)),  # of the field's default, whose other values stay
        ({"name": "greedy", "epsilon": [[0, 1], [10, 0.5]]}, Greedy(epsilon=((0, 1.0), (10, 0.5)), delay=5)),
        ({"name": "soft"}, Soft()),  # of another class than the default: nothing is left of that
        ({"name": "Soft", "temperature": 2}, Soft(temperature=2.0)),
        (None, Greedy(delay=5)),
    ],
)
def test_the_name_picks_the_class_of_a_section(given, expected):
    assert choose({"explore": given}) == (Chooser(explore=expected), [])


def test_optional_and_required_choices():
    assert choose({"other": None}) == (Chooser(), [])
    assert choose({"other": {"name": "soft"}}) == (Chooser(other=Soft()), [])
    message = "other.name is missing: expected one of greedy, soft"
    assert choose({"other": {"delay": 3}}) == (Chooser(), [message])
    assert choose({"explore": {"name": "soft"}}, Must) == (Must(Soft()), [])
    assert choose({}, Must) == (None, ["explore.name is missing: expected one of greedy, soft"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "sotf", "x": 1}, "explore.name: expected one of greedy, soft, got 'sotf': did you mean soft?"),
        ({"name": 3}, "explore.name: expected one of greedy, soft, got 3"),
        ("soft", "explore: expected a mapping such as {name: greedy}, got 'soft'"),
        ({"name": "soft", "temprature": 1}, "unknown key explore.temprature: did you mean explore.temperature?"),
        ({"temperature": 1}, "unknown key explore.temperature: explore has name, epsilon, delay"),
        ({"name": "soft", "temperature": "hot"}, "explore.temperature: expected a number, got 'hot'"),
    ],
)
def test_a_faulty_choice_is_one_problem(given, message):
    @dataclasses.dataclass(frozen=True)
    class One:
        explore: Greedy | Soft = GREEDY

    assert choose({"explore": given}, One)[1] == [message]


@pytest.mark.parametrize("tree", [Chooser(), Chooser(explore=Soft(temperature=0.5), other=Greedy(epsilon=((0, 1.0),)))])
def test_choices_survive_yaml(tree):
    assert choose(schema.parse(schema.dump(schema.plain(tree)))) == (tree, [])


def test_a_choice_over_another_replaces_it():
    file = {"explore": {"name": "soft", "temperature": 2}}
    assert choose(schema.merge(file, {"explore": {"name": "greedy"}}))[0].explore == Greedy(delay=5)
    assert choose(schema.merge(file, {"explore": {"delay": 7}}))[0].explore == Soft(temperature=2.0, delay=7)
