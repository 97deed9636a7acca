"""Spaces of hyper-parameters: what is typed, its grid, and points that are drawn."""

import math

import numpy as np
import pytest

from jrl.errors import InputError
from jrl.sweep import __main__, space


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("log(1e-4, 1e-2, 5)", [1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2]),
        ("uniform(-1, 1, 3)", [-1, 0, 1]),
        ("logit(0.9, 0.999, 3)", [0.9, 1 / (1 + math.exp(-(math.log(9) + math.log(999)) / 2)), 0.999]),
        ("int(2, 4)", [2, 3, 4]),
        ("int(0, 10, 3)", [0, 5, 10]),
        ("pow2(16, 128)", [16, 32, 64, 128]),
        ("choice(0, .01)", [0, 0.01]),
    ],
)
def test_a_grid_has_the_values_that_its_kind_says(text, values):
    np.testing.assert_allclose(space.parse("a.b", text).grid("a.b"), values, rtol=1e-5)


def test_choices_are_any_values_and_other_texts_are_no_space():
    assert space.parse("k", "choice(tanh, relu, null, [8, 8])").grid("k") == ["tanh", "relu", None, [8, 8]]
    assert [space.parse("k", text) for text in ("0.1", "[[0, 1e-3], [10, 0]]", "f(1, 2)", "package:log")] == [None] * 4


def test_every_value_of_a_grid_meets_every_other_with_every_seed():
    spaces = {"a": space.parse("a", "choice(1, 2)"), "b": space.parse("b", "choice(x, y)")}
    found = space.with_seeds(space.grid(spaces), [7, 8])
    assert len({tuple(point.items()) for point in found}) == 8
    assert found[:3] == [
        {"a": 1, "b": "x", "run.seed": 7},
        {"a": 1, "b": "x", "run.seed": 8},
        {"a": 1, "b": "y", "run.seed": 7},
    ]


@pytest.mark.parametrize("sobol", [False, True])
def test_points_are_drawn_evenly_in_the_kinds_measure_and_again_by_the_seed(sobol):
    spaces = {
        key: space.parse(key, text)
        for key, text in {"lr": "log(1e-5, 1e-1)", "n": "pow2(1, 8)", "m": "int(1, 3)", "c": "choice(a, b)"}.items()
    }
    found = space.drawn(spaces, 256, sobol=sobol, seed=3)
    assert found == space.drawn(spaces, 256, sobol=sobol, seed=3) != space.drawn(spaces, 256, sobol=sobol, seed=4)
    decades = np.histogram(np.log10([point["lr"] for point in found]), 4, (-5, -1))[0]
    slack = 1 if sobol else 30
    assert (np.abs(decades - 64) <= slack).all()
    for key, values in {"n": [1, 2, 4, 8], "m": [1, 2, 3], "c": ["a", "b"]}.items():
        counts = [sum(point[key] == value for point in found) for value in values]
        assert sum(counts) == 256 and max(counts) - min(counts) <= 2 * slack


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("log(0, 1, 3)", "a logarithm needs numbers above 0"),
        ("log(1, 0.1, 3)", "expected a low end below the high end"),
        ("logit(0.5, 1, 3)", "logit needs numbers between 0 and 1"),
        ("pow2(3, 8)", "expected powers of two"),
        ("int(1.5, 3)", "expected whole numbers"),
        ("uniform(1)", "expected choice(a, b, ...)"),
        ("uniform(a, b)", "expected choice(a, b, ...)"),
        ("choice()", "expected choice(a, b, ...)"),
        ("log(1, 2, 0)", "the third number says how many values"),
        ("uniform(1, .inf, 3)", "expected finite numbers"),
        ("choice(1, 2, 1)", "1 is there twice: leave one out, or give --seeds"),
        ("logg(1, 2, 3)", "did you mean log(...)? Expected choice(a, b, ...)"),
        ("LOG(1, 2, 3)", "did you mean log(...)?"),
        ("chioce(a, b)", "did you mean choice(...)?"),
        ("log(1, 2, 3", "did you mean log(...)?"),
    ],
)
def test_what_is_no_space_is_told(text, told):
    with pytest.raises(InputError) as e:
        space.parse("algo.lr", text)
    assert str(e.value).startswith(f"algo.lr={text}: ") and told in str(e.value)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "none of them is a space"),
        (["--set=algo.lr=log(1e-4,1e-2)"], "algo.lr: a grid needs to know how many values"),
        (["--set=algo.lrr=log(1e-4,1e-2,3)"], "algo.lrr"),
        (["--set=algo.gamma=uniform(0.5,1.5,3)"], "algo.gamma"),
        (["--set=run.seed=int(0,3)"], "--seeds says how many seeds"),
        (["--set=algo.lr=log(1e-4,1e-2,3)", "--seeds=0"], "sweep.seeds: expected a whole number in [1, 1000], got 0"),
    ],
)
def test_a_sweep_that_cannot_be_is_told_before_anything_starts(args, told, tmp_path, capsys):
    common = ["ppo", "--env=CartPole-v1", "--stop=env_steps=64", f"--out={tmp_path / 'x'}"]
    assert __main__.main([*common, *args]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert __main__.main([f"--resume={tmp_path}"]) == 2
    assert "is no sweep" in capsys.readouterr().err
