"""Spaces of hyper-parameters: parsing, grids and drawn points."""

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
def test_a_grid_has_the_values_of_its_kind(text, values):
    np.testing.assert_allclose(space.parse_space("a.b", text).grid_values("a.b"), values, rtol=1e-5)


def test_choices_can_be_any_values_and_other_texts_are_not_spaces():
    assert space.parse_space("k", "choice(tanh, relu, null, [8, 8])").grid_values("k") == ["tanh", "relu", None, [8, 8]]
    assert [space.parse_space("k", text) for text in ("0.1", "[[0, 1e-3], [10, 0]]", "f(1, 2)", "package:log")] == [
        None
    ] * 4


def test_a_grid_combines_all_values_with_all_seeds():
    spaces = {"a": space.parse_space("a", "choice(1, 2)"), "b": space.parse_space("b", "choice(x, y)")}
    found = space.add_seeds(space.build_grid(spaces), [7, 8])
    assert len({tuple(point.items()) for point in found}) == 8
    assert found[:3] == [
        {"a": 1, "b": "x", "run.seed": 7},
        {"a": 1, "b": "x", "run.seed": 8},
        {"a": 1, "b": "y", "run.seed": 7},
    ]


@pytest.mark.parametrize("sobol", [False, True])
def test_drawn_points_are_even_on_the_kinds_scale_and_repeat_with_the_seed(sobol):
    spaces = {
        key: space.parse_space(key, text)
        for key, text in {"lr": "log(1e-5, 1e-1)", "n": "pow2(1, 8)", "m": "int(1, 3)", "c": "choice(a, b)"}.items()
    }
    found = space.draw_points(spaces, 256, sobol=sobol, seed=3)
    assert (
        found
        == space.draw_points(spaces, 256, sobol=sobol, seed=3)
        != space.draw_points(spaces, 256, sobol=sobol, seed=4)
    )
    decades = np.histogram(np.log10([point["lr"] for point in found]), 4, (-5, -1))[0]
    slack = 1 if sobol else 30
    assert (np.abs(decades - 64) <= slack).all()
    for key, values in {"n": [1, 2, 4, 8], "m": [1, 2, 3], "c": ["a", "b"]}.items():
        counts = [sum(point[key] == value for point in found) for value in values]
        assert sum(counts) == 256 and max(counts) - min(counts) <= 2 * slack


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("log(0, 1, 3)", "expected numbers above 0 for a logarithm"),
        ("log(1, 0.1, 3)", "expected a low end below the high end"),
        ("logit(0.5, 1, 3)", "expected numbers between 0 and 1 for logit"),
        ("pow2(3, 8)", "expected powers of two"),
        ("int(1.5, 3)", "expected whole numbers"),
        ("uniform(1)", "expected choice(a, b, ...)"),
        ("uniform(a, b)", "expected choice(a, b, ...)"),
        ("choice()", "expected choice(a, b, ...)"),
        ("log(1, 2, 0)", "expected a number of values of at least 1, got 0"),
        ("uniform(1, .inf, 3)", "expected finite numbers"),
        ("choice(1, 2, 1)", "1 is repeated: leave it out, or give --seeds"),
        ("logg(1, 2, 3)", "did you mean log(...)? Expected choice(a, b, ...)"),
        ("LOG(1, 2, 3)", "did you mean log(...)?"),
        ("chioce(a, b)", "did you mean choice(...)?"),
        ("log(1, 2, 3", "did you mean log(...)?"),
    ],
)
def test_an_invalid_space_is_refused(text, message):
    with pytest.raises(InputError) as e:
        space.parse_space("algo.lr", text)
    assert str(e.value).startswith(f"algo.lr={text}: ") and message in str(e.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "expected at least one space"),
        (["--set=algo.lr=log(1e-4,1e-2)"], "algo.lr: a grid needs the number of values"),
        (["--set=algo.lrr=log(1e-4,1e-2,3)"], "algo.lrr"),
        (["--set=algo.gamma=uniform(0.5,1.5,3)"], "algo.gamma"),
        (["--set=run.seed=int(0,3)"], "give the number of seeds by --seeds"),
        (["--set=algo.lr=log(1e-4,1e-2,3)", "--seeds=0"], "sweep.seeds: expected a whole number in [1, 1000], got 0"),
    ],
)
def test_an_invalid_sweep_is_refused_before_it_starts(args, message, tmp_path, capsys):
    common = ["ppo", "--env=CartPole-v1", "--stop=env_steps=64", f"--out={tmp_path / 'x'}"]
    assert __main__.main([*common, *args]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert __main__.main([f"--resume={tmp_path}"]) == 2
    assert "is not a sweep" in capsys.readouterr().err
