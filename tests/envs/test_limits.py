"""Horizons and what an end means: rows, targets and statistics of counters that were worked out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import Stepper

from jrl import envs
from jrl.envs.jax_env import Definition
from jrl.envs.limits import flags
from jrl.ops import returns
from jrl.rollout import sources
from jrl.types import ActOut, Box, Discrete, InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*", "ignore::UserWarning:gymnasium")
ENDS = (5, 2)  # steps after which the two environments end by themselves


def counter() -> Definition:
    """`counter_env.Counter` in a program."""

    def step(count, action, draws):
        count = count + 1.0
        return count, count, count == jnp.array(ENDS, jnp.float32)

    reset = lambda draws: jnp.zeros_like(draws[0])
    return Definition(Box((1,)), Discrete(2), None, 1, reset, step, lambda count: count[:, None])


KINDS = {
    "jax": {"env": "test_limits:counter", "backend": "jax"},
    "gymnasium": {"env": "counter_env:Counter"},
    "workers": {"env": "counter_env:Counter", "remote_worker_envs": True},
    "ready_workers": {"env": "counter_env:Counter", "remote_worker_envs": True, "batch_wait_ms": 0.0},
}


def make(kind, **settings):
    return envs.make(num_envs=2, **KINDS[kind], **settings)


def act(actor, obs, carry, key, explore=True):
    return ActOut(jnp.zeros(obs.shape[:1], jnp.int32), carry, {})


def collect(env, length=8, **options):
    source = sources.make(env, act, key=jax.random.key(0), length=length, **options)
    try:
        rollout, report = source.next(jnp.zeros(()), jax.random.key(1))
    finally:
        source.close()
    return jax.tree.map(np.asarray, rollout), report


gae = jax.jit(partial(returns.gae, gamma=0.5), static_argnames="gae_lambda")


def targets(rollout, gae_lambda):
    """With gamma 1/2 and V(obs) = 8 obs: each bootstrap adds 4 obs. NaN on masked rows."""
    value = 8 * np.concatenate([rollout.obs, rollout.last_obs[None]])[..., 0]
    done = rollout.terminated | rollout.truncated
    found = gae(rollout.reward, rollout.terminated, done, value, gae_lambda=gae_lambda)[1]
    return np.where(rollout.mask, found, np.nan).T.tolist()


_ = float("nan")
HARD, SOFT = False, True
# at a horizon of 3, r_t + V(obs_{t+1}) / 2 of the two counters; where an end has no bootstrap, the reward alone
ONE_STEP = {
    (HARD, None): ([5, 10, 15, _, 5, 10, 15, _], [5, 2, _, 5, 2, _, 5, 2]),
    (HARD, False): ([5, 10, 3, _, 5, 10, 3, _], [5, 2, _, 5, 2, _, 5, 2]),
    (HARD, True): ([5, 10, 15, _, 5, 10, 15, _], [5, 10, _, 5, 10, _, 5, 10]),
    (SOFT, None): ([5, 10, 15, _, 20, 5, _, 5], [5, 2, _, 5, 2, _, 5, 2]),
    (SOFT, False): ([5, 10, 3, _, 20, 5, _, 5], [5, 2, _, 5, 2, _, 5, 2]),
    (SOFT, True): ([5, 10, 15, _, 20, 25, _, 5], [5, 10, _, 5, 10, _, 5, 10]),
}
# with lambda 1 the first counter's are discounted sums, cut at the ends: t = 2 as above, t = 1 is 2 + 15/2, ...
WHOLE = {
    (HARD, None): [5.75, 9.5, 15, _, 5.75, 9.5, 15, _],
    (HARD, False): [2.75, 3.5, 3, _, 2.75, 3.5, 3, _],
    (SOFT, None): [5.75, 9.5, 15, _, 6.5, 5, _, 5],
    (SOFT, False): [2.75, 3.5, 3, _, 6.5, 5, _, 5],
    (SOFT, True): [5.75, 9.5, 15, _, 16.5, 25, _, 5],
}
OBS = {HARD: [0, 1, 2, 3, 0, 1, 2, 3], SOFT: [0, 1, 2, 3, 3, 4, 5, 0]}
REWARD = {HARD: [1, 2, 3, 0, 1, 2, 3, 0], SOFT: [1, 2, 3, 0, 4, 5, 0, 1]}


CASES = [("gymnasium", *case) for case in ONE_STEP] + [("workers", SOFT, None), ("ready_workers", SOFT, True)]
# a program of its own for each of these: one of each horizon in make test
QUICK = ((HARD, None), (SOFT, True))
CASES += [pytest.param("jax", *case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in ONE_STEP]


@pytest.mark.parametrize(("kind", "soft", "no_done"), CASES)
def test_the_table(kind, soft, no_done):
    env = make(kind, horizon=3, soft_horizon=soft, no_done_at_end=no_done)
    assert env.spec.max_episode_steps == 3
    rollout, report = collect(env)
    np.testing.assert_array_equal(rollout.obs[:, 0, 0], OBS[soft])
    np.testing.assert_array_equal(rollout.obs[:, 1, 0], [0, 1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(rollout.reward[:, 0], REWARD[soft])
    np.testing.assert_array_equal(targets(rollout, 0.0), ONE_STEP[soft, no_done])
    if (soft, no_done) in WHOLE:
        np.testing.assert_array_equal(targets(rollout, 1.0)[0], WHOLE[soft, no_done])
    # episodes of the first: 1 + 2 + 3 twice, or 1 + 2 + 3 and 4 + 5; of the second 1 + 2, three times
    assert (int(report.count), int(report.length_sum)) == (5, (5 if soft else 6) + 6)
    assert float(report.return_sum) == (15 if soft else 12) + 9


def test_no_done_at_end_alone():
    """Without a horizon: true ends only, of which none is told as one."""
    for kind in ("gymnasium", "jax"):
        rollout, _ = collect(make(kind, no_done_at_end=True))
        assert not rollout.terminated.any() and rollout.truncated[:, 1].tolist() == [False, True, False] * 2 + [
            False,
            True,
        ]
        assert rollout.truncated[:, 0].tolist() == [False] * 4 + [True] + [False] * 3
        assert rollout.mask[:, 0].tolist() == [True] * 5 + [False] + [True] * 2
    assert flags(None) is None


@pytest.mark.parametrize(
    "no_done", [pytest.param(x, marks=[] if x else [pytest.mark.slow]) for x in (None, False, True)]
)
@pytest.mark.parametrize("kind", ["gymnasium", "ready_workers", "jax"])
def test_a_record_has_the_ends_of_the_environment_whatever_the_learner_is_told(kind, no_done):
    rollout, _ = collect(make(kind, horizon=3, no_done_at_end=no_done), record=True)
    own = rollout.extras["record"]
    assert own["terminated"][:, 0].any() < own["truncated"][:, 0].any()  # the horizon ends episodes of the first,
    assert own["truncated"][:, 1].any() < own["terminated"][:, 1].any()  # and the second ends by itself
    ended = own["terminated"] | own["truncated"]
    learner = {None: own["truncated"], False: np.zeros_like(ended), True: ended}[no_done]
    np.testing.assert_array_equal(np.asarray(rollout.truncated) & rollout.mask, learner & rollout.mask)
    np.testing.assert_array_equal(rollout.terminated | rollout.truncated, ended)


@pytest.mark.parametrize("kind", ["gymnasium", "workers", "jax"])
def test_a_reset_of_all_is_one_also_at_a_soft_horizon(kind):
    stepper = Stepper(make(kind, horizon=3, soft_horizon=True))
    try:
        for _ in range(2):
            assert stepper.reset()[0] == 0
            rows = [stepper.step(np.zeros(2, np.int32)) for _ in range(3)]
            assert rows[-1].truncated[0] and rows[-1].obs[0] == 3
        if kind != "jax":  # its own object, whatever stands around it
            assert stepper.env.foreach_env(lambda env: (type(env).__name__, env.resets))[0] == ("Counter", 2)
    finally:
        stepper.env.close()


def test_a_true_end_on_the_step_of_the_horizon_resets():
    """Horizon 5 where the first counter ends by itself: terminated, and after the reset row it begins from 0."""
    for kind in ("gymnasium", "jax"):
        rollout, _ = collect(make(kind, horizon=5, soft_horizon=True))
        assert rollout.terminated[4, 0] and not rollout.truncated[:, 0].any()
        assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


# ---------------------------------------------------------------- other limits


@pytest.mark.parametrize(
    ("backend", "host"), [("jax", False), ("envpool", False), ("envpool", True), ("gymnasium", False)]
)
def test_the_smaller_of_two_limits_ends_episodes(backend, host):
    """Pendulum never ends by itself: rows 3 and 7 of a limit of 3, with the reset row between."""
    for own, horizon in ((None, 3), (3, 9), (9, 3)):
        options = {} if own is None else {"max_episode_steps": own}
        env = envs.make("Pendulum-v1", backend=backend, num_envs=2, host=host, options=options, horizon=horizon)
        assert env.spec.max_episode_steps == 3
        if backend == "jax" and own is None:
            env.close()  # one program is enough
            continue
        stepper = Stepper(env)
        stepper.reset()
        rows = [stepper.step(np.zeros((2, 1), np.float32)) for _ in range(7)]
        env.close()
        assert np.stack([r.truncated for r in rows]).T.tolist() == [[i in (2, 6) for i in range(7)]] * 2


def test_an_envpool_task_that_does_not_end_at_its_limit_is_refused():
    """Left alone, Catch-v0 with a limit of 4 goes on to its true end at 9 and calls that one a time limit."""
    with pytest.raises(InputError, match=r"env\.horizon: EnvPool's Catch-v0 .* another env.backend"):
        envs.make("Catch-v0", backend="envpool", num_envs=2, horizon=4)
    envs.make("CartPole-v1", backend="envpool", num_envs=2, horizon=4).close()


def test_a_limit_of_its_own_resets_under_a_soft_horizon():
    """An own limit of 4 and a soft horizon of 3: rows 0-2, held row 3, one more step, and the reset."""
    env = envs.make(
        "Pendulum-v1", backend="gymnasium", num_envs=1, options={"max_episode_steps": 4}, horizon=3, soft_horizon=True
    )
    stepper = Stepper(env)
    first = stepper.reset()
    rows = [stepper.step(np.full((1, 1), 0.5, np.float32)) for _ in range(6)]
    env.close()
    assert [bool(r.truncated[0]) for r in rows] == [False, False, True, False, True, False]
    np.testing.assert_array_equal(rows[3].obs, rows[2].obs)
    assert rows[3].reward[0] == rows[5].reward[0] == 0 and rows[4].reward[0] != 0
    assert not np.array_equal(rows[5].obs, first)  # a new episode


@pytest.mark.parametrize(
    ("id", "settings", "expected"),
    [
        ("Pendulum-v1", {"horizon": 0}, ["env.horizon", "whole number of at least 1 or null", "0"]),
        ("Pendulum-v1", {"horizon": True}, ["env.horizon", "whole number", "True"]),
        ("Catch-v0", {"backend": "jax", "soft_horizon": True}, ["env.soft_horizon", "env.horizon=100"]),
        (
            "Pendulum-v1",
            {"horizon": 9, "soft_horizon": True},
            ["env.soft_horizon", "envpool", "env.backend gymnasium or jax"],
        ),
        ("Pong-v5", {"horizon": 9, "soft_horizon": True}, ["env.soft_horizon", "envpool", "leave it out"]),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(id, settings, expected):
    (error,) = envs.check(id, **settings)
    assert all(part in error for part in expected), error
    with pytest.raises(InputError) as caught:
        envs.make(id, num_envs=2, **settings)
    assert list(caught.value.errors) == [error]
