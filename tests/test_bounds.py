"""Every number of every section and algorithm has a range, in its annotation; YAML and constructors use the same."""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import algos
from jrl.algos import exploration, ppo
from jrl.config import sections
from jrl.errors import InputError
from jrl.fields import bounds, hyper, validation
from jrl.fields.bounds import Clip, Count, Few, NonNegativeSchedule, Positive, Schedule, Seconds, Unit

CLASSES = {
    **{name: algos.get_config_class(name) for name in algos.names()},
    **{f"exploration.{c.__name__}": c for c in typing.get_args(exploration.Exploration)},
    **{f"core.{c.__name__}": c for c in typing.get_args(hyper.Core)},
    **{c.__name__: c for name, c in vars(sections).items() if name.endswith(("Config", "Settings"))},
}
# any finite number has a meaning
ANY = {
    "alive_bonus",
    "reward_scale",
    "randomize",
    "v_min",
    "v_max",
    "target_entropy",
    "cql_target_gap",
    "target_return",
    "stop",
}


def takes_numbers(hint):
    return hint in (int, float) or any(map(takes_numbers, typing.get_args(hint)))


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_every_number_has_a_range(cls):
    without = {
        f.name
        for f in dataclasses.fields(cls)
        if takes_numbers(bounds.hints(cls)[f.name]) and not bounds.range_words(bounds.hints(cls)[f.name])
    }
    assert without <= ANY | {"env"}


def odd(hint):
    """Values of the right type that no field of this annotation takes."""
    if typing.get_origin(hint) is typing.Annotated and typing.get_args(hint)[0] is Schedule:
        return [math.nan, math.inf, -1.0, ((0, 0.5), (10, -1.0))]
    if bounds.is_union(hint):
        return [x for one in typing.get_args(hint) for x in odd(one)]
    if typing.get_origin(hint) is typing.Annotated and typing.get_args(hint)[0] in (int, float):
        within = bounds.parse_range(typing.get_args(hint)[1:])
        low, high = (within.ge if within.gt is None else within.gt), (within.le if within.lt is None else within.lt)
        return [math.nan, *([] if low is None else [low - 1]), *([] if high in (None, math.inf) else [high + 1])]
    return []


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_a_constructor_refuses_what_is_out_of_range(cls):
    required = {"id": "x"} if cls is sections.EnvConfig else {}
    if cls is sections.RunConfig:
        return
    for field in dataclasses.fields(cls):
        for value in odd(bounds.hints(cls)[field.name]):
            with pytest.raises(InputError, match=f"^{field.name}: expected .*, got "):
                cls(**required, **{field.name: value})


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (0.0, Unit, ""),
        (1, Unit, ""),
        (np.float32(1.5), Unit, "k: expected a number in [0, 1], got "),
        (0.1, Unit | None, ""),
        (None, Unit | None, ""),
        (-1.0, Unit | None, "k: expected a number in [0, 1] or null, got -1.0"),
        (math.inf, Clip, ""),
        (math.inf, Positive, "k: expected a finite number above 0, got inf"),
        (1e39, Positive, "k: expected a finite number above 0, got 1e+39, which is inf in float32"),
        (1e-50, Positive, "k: expected a number above 0, got 1e-50, which is 0 in float32"),
        (10**400, Count, "k: expected a whole number of at most 2,147,483,647, got "),
        (0, Count, "k: expected a whole number of at least 1, got 0"),
        (0, Few, "k: expected a whole number in [1, 1000], got 0"),
        (0.0, Seconds, "k: expected a number in (0, 1000000000], got 0.0"),
        ((1, 2, 0), tuple[Count, ...], "k: expected a list, each entry a whole number of at least 1, got (1, 2, 0)"),
        ((1, 0), Count | tuple[Count, Count], "k: expected a whole number of at least 1 or a list ["),
        (0, Count | tuple[Count, Count], "k: expected a whole number of at least 1, got 0"),
        (((0, 1.0), (-5, 1.0)), NonNegativeSchedule, "k: expected a number of at least 0 or a schedule "),
        (True, Positive, "k: expected a number above 0, got True"),
        (math.inf, float, "k: expected a finite number, got inf"),
    ],
)
def test_faults_and_their_words(value, hint, message):
    found = validation.fault(value, hint, "k")
    assert found.startswith(message) and bool(found) == bool(message)


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_defaults_are_right_and_are_offered(cls):
    found = bounds.hints(cls)
    for field in dataclasses.fields(cls):
        if not validation.is_required(field) and validation.section_class(found[field.name]) is None:
            assert validation.fault(validation.default_of(field), found[field.name], field.name) == ""
    assert validation.fault(2.0, Unit, "k", 0.5) == "k: expected a number in [0, 1], got 2.0: its default is 0.5"


def test_arrays_and_tracers_are_not_looked_at():
    """Hyper-parameters are traced, differentiated and multiplied: trees are made without the constructor's check."""
    lrs = jnp.array([-1.0, 2.0])
    batch = dataclasses.replace(ppo.Config(), lr=lrs)
    axes = dataclasses.replace(jax.tree.map(lambda x: None, ppo.Config()), lr=0)
    np.testing.assert_array_equal(jax.vmap(lambda cfg: cfg.lr * 2, in_axes=(axes,))(batch), 2 * lrs)
    gradient = jax.grad(lambda cfg: -5.0 * cfg.gamma)(ppo.Config())
    assert gradient.gamma == -5.0 and isinstance(gradient, ppo.Config)
    assert jax.tree.map(lambda x: -x, ppo.Config()).gamma == -0.99
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(ppo.Config())]
    assert ".lr" in paths and ".num_epochs" not in paths


@pytest.mark.parametrize("name", algos.names())
def test_an_array_in_a_static_field_and_a_value_of_another_type_name_the_field(name):
    cls = algos.get_config_class(name)
    for field in dataclasses.fields(cls):
        hint = bounds.hints(cls)[field.name]
        make = lambda x, field=field: cls(**{field.name: x}) and 0
        if "float" in str(hint):
            assert jax.eval_shape(make, 0.5) is not None
        else:
            words = f"^{field.name}: expected .*, got a traced array: the program depends on it: build one program per"
            with pytest.raises(InputError, match=words):
                jax.vmap(make)(jnp.array([1, 2]))
            with pytest.raises(InputError, match=rf"^{field.name}: expected .*, got an array of shape \(2,\)"):
                make(jnp.array([1, 2]))
        if str not in (hint, *typing.get_args(hint)):
            with pytest.raises(InputError, match=f"^{field.name}: expected .*, got 'what is this'"):
                make("what is this")
    with pytest.raises(InputError, match=r"^hidden: expected .*, got a traced array"):
        jax.vmap(lambda n: hyper.NetworkConfig(hidden=(64, n)) and 0)(jnp.array([1, 2]))


def test_trees_that_differ_in_a_static_field_name_it():
    with pytest.raises(ValueError, match=r"(?s)'num_epochs', 4.*'num_epochs', 8"):
        jax.tree.map(lambda x, y: x, ppo.Config(), ppo.Config(num_epochs=8))
