"""Spaces as trees, and masks in them."""

import jax
import numpy as np
import pytest

from jrl import spaces
from jrl.learn import learner
from jrl.types import (
    NO_CHOICE,
    Box,
    Dict,
    Discrete,
    EnvSpec,
    InputError,
    MultiBinary,
    MultiDiscrete,
    Rollout,
    Tuple,
    element,
)

NESTED = Dict((("b", Tuple((Discrete(3), Box((2,), "uint8")))), ("a", MultiBinary((4,)))))


X = (("x", Box((2,))),)


def masked(choices, rest=X):
    return Dict((*rest, (spaces.ACTION_MASK, MultiBinary((choices,)))))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("a/b",), ("a", "b")),
        (("a~1b", "c"), ("a/b", "c")),
        (("a", "b/c"), ("a/b", "c")),
        (("t", 0), ("t/0",)),
    ],
)
def test_no_two_leaves_have_one_path(one, two):
    """Whatever the names are: what is chosen, kept or written by a path is that leaf's."""

    def at(names, leaf):
        for name in reversed(names):
            leaf = Tuple((leaf,)) if isinstance(name, int) else Dict(((name, leaf),))
        return leaf

    def both(a, b):
        named = dict(a.items)
        for name, part in b.items:
            named[name] = both(named[name], part) if name in named else part
        return Dict(tuple(named.items()))

    space = both(at(one, Box((1,))), at(two, Box((2,))))
    paths = [path for path, _ in spaces.leaves(space)]
    assert len(set(paths)) == 2 and set(paths) <= {*spaces.part_names(space), *paths}
    for path, leaf in spaces.leaves(space):
        rest = spaces.leaves(spaces.without(space, [path]))
        assert path not in spaces.part_names(space) or [part for _, part in rest] != [leaf]


def test_leaves_stand_in_the_order_of_jax():
    assert [path for path, _ in spaces.leaves(NESTED)] == ["a", "b/0", "b/1"]
    assert [leaf.dtype for _, leaf in spaces.leaves(NESTED)] == [str(x.dtype) for x in jax.tree.leaves(element(NESTED))]
    assert spaces.leaves(Discrete(2)) == [("", Discrete(2))]
    assert spaces.from_leaves(NESTED, [1, 2, 3]) == {"a": 1, "b": (2, 3)}
    assert spaces.num_bytes(NESTED) == 4 + 4 + 2
    assert spaces.batch_shape(NESTED, {"a": np.zeros((5, 6, 4)), "b": (np.zeros((5, 6)), np.zeros((5, 6, 2)))}) == (
        5,
        6,
    )
    assert hash(NESTED) == hash(Dict(NESTED.items))


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (Dict((("a", MultiBinary((4,))), ("b", Tuple((Discrete(3), Box((2,), "uint8", low=0.0, high=9.0)))))), True),
        (Dict((("a", MultiBinary((4,))), ("b", Tuple((Discrete(4), Box((2,), "uint8")))))), False),
        (Dict((("a", MultiBinary((4,))), ("b", Tuple((Discrete(3), Box((2,), "int32")))))), False),
        (Dict((("a", MultiBinary((4,))), ("b", Tuple((Discrete(3), Box((3,), "uint8")))))), False),
        (Dict((("a", MultiBinary((4,))), ("c", Tuple((Discrete(3), Box((2,), "uint8")))))), False),
        (Dict((("a", MultiBinary((4,))), ("b", Dict((("0", Discrete(3)), ("1", Box((2,), "uint8"))))))), False),
        (MultiBinary((4,)), False),
    ],
)
def test_spaces_are_alike_where_only_bounds_and_the_order_of_names_differ(other, alike):
    assert spaces.are_compatible(NESTED, other) is spaces.are_compatible(other, NESTED) is alike


def test_choices_of_all_discrete_parts():
    action = Dict((("move", Discrete(3)), ("arms", MultiDiscrete((2, 4))), ("force", Box((2,)))))
    assert spaces.num_choices(action) == 2 + 4 + 3
    # arms before move: the order of names
    mask = np.array([[1, 0, 1, 1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0]], bool)
    assert spaces.any_allowed(action, mask).tolist() == [True, False, False]


def test_where_a_mask_is():
    spec = EnvSpec(masked(3), Discrete(3), 1)
    assert spaces.masks_actions(spec) and not spaces.masks_actions(EnvSpec(Box((2,)), Discrete(3), 1))
    assert spaces.without_mask(spec.observation) == Box((2,))
    obs = {"x": np.ones((5, 2)), spaces.ACTION_MASK: np.array([[1, 0, 2]] * 5)}
    x, mask = spaces.split_mask(spec.observation, obs)
    assert x.shape == (5, 2) and mask.tolist() == [[True, False, True]] * 5
    two = masked(3, (("x", Box((2,))), ("y", Discrete(2))))
    assert [path for path, _ in spaces.leaves(spaces.without_mask(two))] == ["x", "y"]


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (masked(3), Discrete(4), "expected 4 entries"),
        (masked(5), MultiDiscrete((2, 4)), "expected 6 entries"),
        (masked(2), Box((2,)), "no choices to mask"),
        (Dict((("x", Box((2,))), ("action_mask", Discrete(3)))), Discrete(3), "expected 3 entries"),
    ],
)
def test_masks_that_do_not_fit(observation, action, message):
    with pytest.raises(InputError, match=message):
        spaces.masks_actions(EnvSpec(observation, action, 1))


def test_a_mask_alone_is_no_observation():
    with pytest.raises(InputError, match="expected parts beside action_mask"):
        spaces.without_mask(masked(3, ()))


@pytest.mark.parametrize(("counted", "expected"), [(True, 0.25), (False, 0.0)])
def test_a_row_on_which_nothing_can_be_done_is_told(counted, expected):
    spec = EnvSpec(masked(2), Discrete(2), 2)
    mask = np.ones((2, 2, 2), np.int8)
    mask[1, 0] = 0
    like = np.zeros((2, 2))
    rows = np.array([[True, True], [counted, True]])
    rollout = Rollout({"x": like, "action_mask": mask}, None, like, like, like, like, rows, None, {}, ())
    quiet = learner.Learner(lambda key: (), lambda: (), lambda s: s, lambda s, r, x, k: (s, r, {}))
    assert float(learner.report_blocked_actions(quiet, spec).step((), (), rollout, None)[2][NO_CHOICE]) == expected
    assert learner.report_blocked_actions(quiet, EnvSpec(Box((2,)), Discrete(2), 2)) is quiet
