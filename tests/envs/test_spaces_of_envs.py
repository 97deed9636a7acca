"""Spaces of Gymnasium's environments: elements pass as they are, in this process and in worker processes."""

import gymnasium
import numpy as np
import pytest
from env_helpers import KINDS, Stepper, assert_same, make, random_actions
from space_envs import Echo, Legal, expected, own_action

from jrl import envs, spaces
from jrl.envs import spec as convert
from jrl.errors import EnvironmentFailed
from jrl.types import Box, Dict, Discrete, EnvSpec, InputError, MultiBinary, MultiDiscrete, Tuple

RESTART = envs.OnFailure(restart=True)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium", "ignore:.*fork.*")
GYM = [kind for kind, settings in KINDS.items() if settings["backend"] == "gymnasium"]
box, discrete, multi = gymnasium.spaces.Box, gymnasium.spaces.Discrete, gymnasium.spaces.MultiDiscrete

_SWITCHES = MultiBinary((2, 2))
OURS = Dict(
    (
        ("camera", Box((4, 4, 1), "uint8", 0.0, 255.0)),
        ("pose", Tuple((Box((2,), "float32", -1.0, 1.0), Dict((("gear", Discrete(5)), ("switches", _SWITCHES)))))),
        ("plan", MultiDiscrete((3, 4))),
        ("small", Box((3,), "int8", -5.0, 5.0)),
        ("large", Box((1,), "int32", -9e18, 9e18)),
        ("ready", Box((2,), "bool", 0.0, 1.0)),
    )
)
TAKEN = Dict(
    (
        ("gear", Discrete(3)),
        ("arm", Tuple((Box((2,), "float32", -2.0, 2.0), MultiBinary((3,))))),
        ("keys", MultiDiscrete((2, 4))),
        ("level", Discrete(4)),
    )
)


@pytest.mark.parametrize("kind", GYM)
def test_elements_pass_as_they_are(kind):
    """Observations are what the environment gave, the row after an end included; actions arrive in its own form."""
    env = make("space_envs:Echo", kind, num_envs=3, normalize_actions=False, clip_actions=False)
    try:
        assert (env.spec.observation, env.spec.action) == (OURS, TAKEN)
        stepper = Stepper(env)
        assert_same(stepper.reset(), expected([0, 0, 0]))
        actions = random_actions(TAKEN, 9, 3)
        for t in range(9):
            action = spaces.map_leaves(lambda leaf, x: x[t], TAKEN, actions)  # noqa: B023
            result = stepper.step(action)
            counts = (t + 1) % (Echo.length + 1)
            assert_same(result.obs, expected([counts] * 3))
            assert result.terminated.tolist() == [counts == Echo.length] * 3
            if counts:  # not a row that resets
                for i, (seen, valid) in enumerate(env.foreach_env(lambda env: env.last)):
                    assert valid
                    assert_same(seen, own_action(spaces.map_leaves(lambda leaf, x: x[i], TAKEN, action)))  # noqa: B023
    finally:
        env.close()


def test_results_are_copies():
    for kind in GYM:
        env = make("space_envs:Echo", kind, num_envs=2)
        stepper = Stepper(env)
        kept = stepper.reset()
        stepper.step(spaces.map_leaves(lambda leaf, x: x[0], TAKEN, random_actions(TAKEN, 1, 2)))
        env.close()
        assert_same(kept, expected([0, 0]))


PLAIN = [  # observation, action, and ours
    (discrete(4, start=2), discrete(3, start=-1), (Discrete(4), Discrete(3))),
    (multi([3, 4]), multi([2, 5], start=[1, -2]), (MultiDiscrete((3, 4)), MultiDiscrete((2, 5)))),
    (multi([[3, 4], [2, 2]], np.int8), multi([[3], [2]]), (MultiDiscrete((3, 4, 2, 2), "int8"), MultiDiscrete((3, 2)))),
    (
        gymnasium.spaces.MultiBinary((2, 3)),
        gymnasium.spaces.MultiBinary((2, 2)),
        (MultiBinary((2, 3)), MultiBinary((2, 2))),
    ),
    (box(0, 255, (2, 3), np.uint8), box(-2, 3, (), np.int16), (Box((2, 3), "uint8", 0.0, 255.0), Discrete(6))),
    (
        box(-1, 1, (1,), np.float16),
        box(np.int8([[0, 5]]), np.int8([[1, 9]]), dtype=np.int8),
        (Box((1,), "float16", -1.0, 1.0), MultiDiscrete((2, 5))),
    ),
    (
        box(0, 9, (2,), np.uint64),
        box(-1, 1, (2, 2), np.float64),
        (Box((2,), "uint32", 0.0, 9.0), Box((2, 2), "float32", -1.0, 1.0)),
    ),
    (box(0, 9, (2,), np.uint16), box(0, 1, (3,), np.bool_), (Box((2,), "uint16", 0.0, 9.0), MultiBinary((3,)))),
    (
        gymnasium.spaces.Tuple([box(0, 1, (2,), np.float64), box(-3, 3, (1, 2))]),
        gymnasium.spaces.Tuple([discrete(2), multi([3, 3])]),
        (
            Tuple((Box((2,), "float32", 0.0, 1.0), Box((1, 2), "float32", -3.0, 3.0))),
            Tuple((Discrete(2), MultiDiscrete((3, 3)))),
        ),
    ),
]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", ["gymnasium", "workers"])
def test_clipped_actions_keep_to_bounds_that_float32_does_not_have(kind, normalize):
    """`Spaces` asserts that its space contains each action. Between 0.1 and 0.1 there is no float32 at all."""
    bounds = [(-0.3, 0.1, np.float64), (0.1, 0.1, np.float64), (-0.7, 0.7, np.float16), (1 / 3, 1e9 + 0.1, np.float64)]
    parts = [box(low, high, (2,), dtype) for low, high, dtype in bounds]
    options = {"action": gymnasium.spaces.Tuple(parts)}
    env = make("env_helpers:Spaces", kind, num_envs=1, options=options, normalize_actions=normalize)
    try:
        env.reset()
        for number in (-2e9, -1.0, 0.999, 1.0, 2e9):
            env.step((np.full((1, 2), number, np.float32),) * len(parts))
    finally:
        env.close()


@pytest.mark.parametrize(("observation", "action", "ours"), PLAIN)
def test_spaces_become_ours(observation, action, ours):
    """What comes out is of the spec; what goes in is of the environment's own space (`Spaces` asserts it)."""
    options = {"observation": observation, "action": action}
    env = envs.make("env_helpers:Spaces", num_envs=2, options=options, normalize_actions=False, clip_actions=False)
    assert (env.spec.observation, env.spec.action) == ours
    rows = [env.reset()]
    actions = random_actions(ours[1], 30, 2)
    for t in range(30):
        rows.append(env.step(spaces.map_leaves(lambda leaf, x: x[t], ours[1], actions)).obs)  # noqa: B023
    env.close()
    for obs in rows:
        for (_, leaf), x in zip(spaces.leaves(ours[0]), obs if isinstance(obs, tuple) else [obs], strict=True):
            assert x.shape == (2, *leaf.shape) and x.dtype == leaf.dtype
            if isinstance(leaf, Box):
                assert (x >= leaf.bounds()[0]).all() and (x <= leaf.bounds()[1]).all()
            else:
                assert (x >= 0).all() and (x < np.asarray(getattr(leaf, "nvec", getattr(leaf, "n", 2)))).all()
    if ours[0] == Discrete(4):
        assert {int(x) for obs in rows for x in obs} == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="actions"):
        env.step(np.full((2, 7), 9, np.int32))


def test_large_integers_stop_at_the_bounds_of_int32():
    """Rather than to become another number."""
    found = convert.convert_observation_space(box(-(2**62), 2**62, (3,), np.int64))
    assert found.convert(np.array([[2**40, -(2**40), 7]])).tolist() == [[2**31 - 1, -(2**31), 7]]
    assert found.space.dtype == "int32"


def test_a_mask_of_all_combinations_makes_them_one_choice():
    """2 x 3 x 2 combinations: number 7 is (1, 0, 1), and the mask has the same order."""
    space = gymnasium.spaces.Dict(x=discrete(2), action_mask=gymnasium.spaces.MultiBinary((2, 3, 2)))
    seen, taken = convert.flatten_mask(
        convert.convert_observation_space(space), convert.convert_action_space(multi([2, 3, 2]))
    )
    assert taken.space == Discrete(12) and dict(seen.space.items)["action_mask"] == MultiBinary((12,))
    mask = np.zeros((1, 2, 3, 2), np.int8)
    mask[0, 1, 0, 1] = 1
    assert seen.convert({"x": np.array([1]), "action_mask": mask})["action_mask"][0].nonzero()[0].tolist() == [7]
    every = taken.convert(np.arange(12, dtype=np.int32))
    assert every.tolist() == [[i, j, k] for i in range(2) for j in range(3) for k in range(2)]
    assert spaces.masks_actions(EnvSpec(seen.space, taken.space, 1))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"gear": np.zeros(2, np.int32)}, r"actions must be a dict of gear, pair, not dict \['gear'\]"),
        (np.zeros(2, np.int32), "actions must be a dict of gear, pair, not ndarray"),
        ({"gear": np.zeros(2, np.int32), "pair": (np.zeros(2),)}, r"actions\['pair'\] must be a tuple of 2"),
        (
            {"gear": np.zeros(2, np.int32), "pair": (np.zeros((2, 3), np.int8), np.zeros((2, 2)))},
            r"actions\['pair'\]\[1\] must be float32 \(2, 2\), not float64",
        ),
        (
            {"gear": np.full(2, 3, np.int32), "pair": (np.zeros((2, 3), np.int8), np.zeros((2, 2), np.float32))},
            r"actions\['gear'\] must lie in 0 .. 2, but range over 3 .. 3",
        ),
        (
            {"gear": np.zeros(2, np.int32), "pair": (np.full((2, 3), 2, np.int8), np.zeros((2, 2), np.float32))},
            r"actions\['pair'\]\[0\] must lie in 0 .. 1",
        ),
    ],
)
def test_wrong_actions_name_the_part(action, message):
    space = Dict((("gear", Discrete(3)), ("pair", Tuple((MultiBinary((3,)), Box((2,)))))))
    with pytest.raises(ValueError, match=message):
        convert.check_action(space, 2, action)


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("kind", GYM)
@pytest.mark.parametrize("how", ["by itself", "named"])
def test_masks_of_infos_are_in_the_row_of_their_observation(kind, how):
    """Also in rows that reset, and at the first reset, which is not made twice."""
    options = {"name": "action_mask" if how == "by itself" else "legal"}
    settings = {} if how == "by itself" else {"action_mask_info": "legal"}
    env = make("space_envs:Legal", kind, num_envs=2, options=options, **settings)
    try:
        assert env.spec.observation == Dict(
            (("obs", Box((1,), "float32", 0.0, 99.0)), ("action_mask", Box((3,), "bool", 0.0, 1.0)))
        )
        assert spaces.masks_actions(env.spec)
        stepper = Stepper(env)
        rows = [stepper.reset(), *(stepper.step(np.zeros(2, np.int32)).obs for _ in range(7))]
        counts = [0, 1, 2, 3, 0, 1, 2, 3]
        assert [row["obs"][:, 0].tolist() for row in rows] == [[c, c] for c in counts]
        for row, count in zip(rows, counts):
            assert row["action_mask"].tolist() == [Legal.mask(count)] * 2
        assert env.foreach_env(lambda env: (type(env).__name__, env.resets)) == [("Legal", 2)] * 2
    finally:
        env.close()


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_changed_before_the_first_reset_shows_in_it(remote):
    env = envs.make("space_envs:Legal", num_envs=2, remote_worker_envs=remote)
    env.foreach_env(lambda env: setattr(env, "start", 2))
    obs = env.reset()
    env.close()
    assert obs["obs"][:, 0].tolist() == [2, 2] and obs["action_mask"].tolist() == [Legal.mask(2)] * 2


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_masks_with_a_horizon(soft, remote):
    """The row after a soft horizon shows the same observation and the same mask once more."""
    env = envs.make("space_envs:Legal", num_envs=1, horizon=2, soft_horizon=soft, remote_worker_envs=remote)
    rows = [env.reset(), *(env.step(np.zeros(1, np.int32)).obs for _ in range(4))]
    assert env.foreach_env(lambda env: type(env).__name__) == ["Legal"]
    env.close()
    counts = [0, 1, 2, 2, 3] if soft else [0, 1, 2, 0, 1]
    assert [row["obs"][0, 0] for row in rows] == counts
    assert [row["action_mask"][0].tolist() for row in rows] == [Legal.mask(c) for c in counts]


@pytest.mark.parametrize("remote", [False, True])
def test_one_that_is_made_anew_still_shows_its_mask(remote):
    options = {"raises_at": 2}
    env = envs.make(
        "space_envs:Legal",
        num_envs=1,
        options=options,
        on_failure=RESTART,
        remote_worker_envs=remote,
    )
    env.reset()
    rows = [env.step(np.zeros(1, np.int32)) for _ in range(3)]
    env.close()
    assert [bool(r.failed[0]) for r in rows] == [False, True, False]
    assert [r.obs["action_mask"][0].tolist() for r in rows] == [Legal.mask(1), Legal.mask(0), Legal.mask(1)]


def test_a_mask_joins_a_dict_and_may_itself_be_one():
    """Of Dict actions: the parts in the order of their names, as `jrl.spaces` has them."""
    env = envs.make("space_envs:Parts", num_envs=1)
    assert [name for name, _ in env.spec.observation.items] == ["speed", "action_mask"]
    assert env.reset()["action_mask"].tolist() == [[True, False, True, True, False]]
    env.close()


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ({}, "legal", "legal: the infos of space_envs:Legal have no such entry, only action_mask, count"),
        ({}, "count", "action_mask_info count: the mask in the infos of space_envs:Legal has 1 entries.* 3 choices"),
        ({"raises_at": 0}, "legal", "action_mask_info legal: space_envs:Legal cannot be reset"),
    ],
)
def test_a_mask_that_is_not_there(options, name, message, remote):
    with pytest.raises(InputError, match=message):
        envs.make(
            "space_envs:Legal", num_envs=2, options=options, remote_worker_envs=remote, action_mask_info=name
        ).close()


@pytest.mark.parametrize("remote", [False, True])
def test_a_step_without_the_mask_is_an_error_that_no_restart_mends(remote):
    settings = {"options": {"forgets_at": 2}, "on_failure": RESTART, "remote_worker_envs": remote}
    env = envs.make("space_envs:Legal", num_envs=1, **settings)
    env.reset()
    env.step(np.zeros(1, np.int32))
    message = r"environment 0 of 1, space_envs:Legal, env.action_mask_info action_mask: .*, only count"
    with pytest.raises(InputError, match=message):
        env.step(np.zeros(1, np.int32))
    env.close()


def test_without_masks_nothing_changes():
    """An action_mask of another size is no mask; Box actions have nothing to mask; an environment whose first reset
    fails says so when it is reset."""
    env = envs.make("space_envs:Legal", num_envs=1, options={"choices": 2})
    assert env.spec.observation == Box((1,), "float32", 0.0, 99.0)
    env.close()
    env = envs.make("space_envs:Legal", num_envs=1, options={"raises_at": 0})
    with pytest.raises(EnvironmentFailed, match="ZeroDivisionError"):
        env.reset()
    env.close()
    with pytest.raises(InputError, match="no choices to mask: leave it out"):
        envs.make("Pendulum-v1", backend="gymnasium", num_envs=1, action_mask_info="mask")
    with pytest.raises(InputError, match="have an action_mask already"):
        envs.make("space_envs:Observed", num_envs=1, action_mask_info="mask")
    for name, message in (("mask", "environments in JAX have no infos"), ("", "expected the name of an entry")):
        (error,) = envs.check("CartPole-v1", backend="jax", action_mask_info=name)
        assert message in error


def test_a_mask_in_the_observation_needs_nothing():
    """As in PettingZoo's turn-based environments."""
    env = envs.make("space_envs:Observed", num_envs=2)
    assert spaces.masks_actions(env.spec)
    assert env.reset()["action_mask"].tolist() == [[1, 0, 1]] * 2
    env.close()


def test_taxi_says_which_moves_are_possible():
    env = envs.make("Taxi-v4", backend="gymnasium", num_envs=3, seed=1)
    obs = env.reset()
    assert dict(env.spec.observation.items)["obs"] == Discrete(500)
    own = env.foreach_env(lambda env: env.unwrapped.action_mask(env.unwrapped.s))
    assert obs["action_mask"].tolist() == [[bool(x) for x in mask] for mask in own]
    env.close()
