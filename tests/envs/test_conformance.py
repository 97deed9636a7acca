"""One contract for every adapter: what `jrl.types.StepResult` says, over (id, kind)."""

import itertools

import jax
import numpy as np
import pytest
from env_helpers import Stepper, make, random_actions, run

from jrl import envs
from jrl.envs import envpool_env
from jrl.envs.envpool_env import EnvPoolEnv
from jrl.types import Box, Discrete, JaxEnv

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium", "ignore:.*fork.*")
ALL = ["jax", "program", "host", "gymnasium"]
CASES = [
    *[("CartPole-v1", kind) for kind in (*ALL, "workers", "ready_host", "ready_workers")],
    *[(id, kind) for id in ("Pendulum-v1", "MountainCar-v0") for kind in ALL],
    *[("Pendulum-v1", kind) for kind in ("ready_host", "ready_workers")],
    *[("Catch-v0", kind) for kind in ALL[:3]],
    *[("FrozenLake-v1", kind) for kind in ALL[1:]],
    ("Acrobot-v1", "jax"),
    ("MountainCarContinuous-v0", "jax"),
    ("RepeatAfterMe-v0", "jax"),
    ("StatelessCartPole-v1", "jax"),
]
LIMIT = 5
# per id: whether each of [B, *] observations can be a start
STARTS = {
    "CartPole-v1": lambda obs: (np.abs(obs) <= 0.05).all(-1),
    "StatelessCartPole-v1": lambda obs: (np.abs(obs) <= 0.05).all(-1),
    "Pendulum-v1": lambda obs: np.abs(obs[:, 2]) <= 1,
    "MountainCar-v0": lambda obs: (obs[:, 1] == 0) & (obs[:, 0] >= -0.6) & (obs[:, 0] <= -0.4),
    "MountainCarContinuous-v0": lambda obs: STARTS["MountainCar-v0"](obs),
    "Acrobot-v1": lambda obs: (np.abs(obs[:, [1, 3, 4, 5]]) <= 0.1).all(-1) & (obs[:, 0] > 0) & (obs[:, 2] > 0),
    "Catch-v0": lambda obs: (obs[:, 0].sum(-1) == 1) & (obs[:, 9, 2] == 1) & (obs.sum((1, 2)) == 2),
    "FrozenLake-v1": lambda obs: obs == 0,
    "RepeatAfterMe-v0": lambda obs: obs >= 0,  # any token
}
# ids that reach their own ends soon under random actions
ENDS_BY_ITSELF = {"CartPole-v1", "StatelessCartPole-v1", "Catch-v0", "FrozenLake-v1", "RepeatAfterMe-v0"}
NEVER_ENDS = {
    "Pendulum-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Acrobot-v1",
}  # within a hundred random steps


def spec_of(id, kind):
    env = make(id, kind, num_envs=1)
    env.close()
    return env.spec


def actions_for(id, kind, steps, num_envs=4, seed=0):
    return random_actions(spec_of(id, kind).action, steps, num_envs, seed)


def assert_equal(a, b, upto=None):
    for x, y in zip(a, b):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x[:upto], y[:upto])


@pytest.mark.parametrize(("id", "kind"), CASES)
def test_the_reset_contract(id, kind):
    """Shapes, dtypes and bounds are the spec's; an end is followed by one row that resets and ignores its action."""
    steps, num_envs = 110, 4
    env = make(id, kind, num_envs=num_envs)
    spec = env.spec
    assert spec.num_envs == num_envs and hash(spec) is not None
    assert isinstance(env, JaxEnv) == (kind in ("jax", "program"))
    assert not isinstance(env, JaxEnv) or env.pure == (kind == "jax")
    assert callable(env.close)
    env.close()

    actions = random_actions(spec.action, steps, num_envs)
    one = run(id, kind, actions, seed=3)
    assert one.first.shape == (num_envs, *spec.observation.shape)
    assert one.obs.shape == (steps, num_envs, *spec.observation.shape)
    assert one.first.dtype == one.obs.dtype == np.dtype(spec.observation.dtype)
    for column, dtype in ((one.reward, np.float32), (one.terminated, bool), (one.truncated, bool)):
        assert column.shape == (steps, num_envs) and column.dtype == dtype
    assert np.isfinite(one.reward).all()
    seen = np.concatenate([one.first[None], one.obs])
    if isinstance(spec.observation, Discrete):
        assert seen.min() >= 0 and seen.max() < spec.observation.n
    else:
        low, high = (b.astype(np.float32) for b in spec.observation.bounds())
        assert (seen >= low - 1e-6).all() and (seen <= high + 1e-6).all()

    is_start = STARTS[id]
    assert is_start(one.first).all()
    assert not (one.terminated & one.truncated).any()
    assert (id in NEVER_ENDS) == (not one.done.any())
    assert not one.truncated.any() or id == "FrozenLake-v1"
    rows = one.reset_row
    if id in ENDS_BY_ITSELF:
        assert rows.sum() >= 2
    assert (one.reward[rows] == 0).all() and not one.done[rows].any()
    assert is_start(one.obs[rows]).all()
    if id != "RepeatAfterMe-v0":  # nothing but its start looks like a start
        assert not is_start(one.obs[one.done]).any()

    space = spec.action
    other = (actions + 1) % space.n if isinstance(space, Discrete) else -actions
    flipped = np.where(rows.reshape(rows.shape + (1,) * len(space.shape)), other, actions).astype(actions.dtype)
    assert_equal(one, run(id, kind, flipped, seed=3))  # repeatable by the seed, too
    if id not in ("FrozenLake-v1", "RepeatAfterMe-v0"):  # on other rows an action counts; these may not show it
        flipped = np.where(rows.reshape(rows.shape + (1,) * len(space.shape)), actions, other).astype(actions.dtype)
        assert not np.array_equal(one.obs, run(id, kind, flipped, seed=3).obs)
    other = run(id, kind, actions, seed=1)
    assert not np.array_equal(one.obs, other.obs)
    if id not in ("FrozenLake-v1", "Catch-v0", "RepeatAfterMe-v0"):  # whose environments can begin alike
        assert len({row.tobytes() for row in (*one.first, *other.first)}) == 2 * num_envs


# EnvPool's Catch has no limit (with the option it says truncated at its own end); FrozenLake's holes come before any
LIMITED = [c for c in CASES if c[0] != "FrozenLake-v1" and c not in (("Catch-v0", "program"), ("Catch-v0", "host"))]


@pytest.mark.parametrize(("id", "kind"), LIMITED)
def test_a_time_limit_truncates(id, kind):
    """Every LIMIT steps an episode is truncated, not terminated, on the observation that an unlimited one has there."""
    actions = actions_for(id, kind, 3 * (LIMIT + 1))
    limited, free = (run(id, kind, actions, options=o, seed=1) for o in ({"max_episode_steps": LIMIT}, {}))
    at_limit = np.arange(len(actions)) % (LIMIT + 1) == LIMIT - 1
    np.testing.assert_array_equal(limited.truncated, np.repeat(at_limit[:, None], 4, 1))
    assert not limited.terminated.any()
    assert_equal(limited[:3], free[:3], LIMIT)  # the true final observation and reward
    assert not free.done[:LIMIT].any()
    assert STARTS[id](limited.obs[LIMIT]).all()
    env = make(id, kind, num_envs=1, options={"max_episode_steps": LIMIT})
    env.close()
    assert env.spec.max_episode_steps == LIMIT


@pytest.mark.parametrize("kind", [*ALL, "workers"])
def test_a_fall_terminates_beyond_the_threshold(kind):
    """Pushed one way CartPole falls within eight to eleven steps, and the last observation shows it fallen."""
    trajectory = run("CartPole-v1", kind, np.ones((24, 4), np.int32))
    final = trajectory.obs[trajectory.terminated]
    assert len(final) >= 8 and (np.abs(final[:, 2]) > 12 * np.pi / 180).all()
    assert (np.abs(trajectory.obs[~trajectory.terminated][:, 2]) <= 12 * np.pi / 180).all()
    assert (trajectory.reward[trajectory.terminated] == 1).all() and not trajectory.truncated.any()
    lengths = trajectory.terminated.argmax(0) + 1
    assert lengths.min() >= 8 and lengths.max() <= 11
    if kind == "jax":  # a termination on the last allowed step is one (EnvPool says truncated: known)
        step = int(lengths[0])
        limited = run("CartPole-v1", kind, np.ones((24, 4), np.int32), options={"max_episode_steps": step})
        assert limited.terminated[step - 1, 0] and not limited.truncated[step - 1, 0]


@pytest.mark.parametrize(("id", "kind"), [c for c in CASES if c[0] in ("CartPole-v1", "Pendulum-v1", "Catch-v0")])
def test_wrong_actions_are_refused(id, kind):
    """ValueError for shape, dtype and, on the host, range: EnvPool itself would take most of these."""
    num_envs = 3
    env = make(id, kind, num_envs=num_envs)
    stepper = Stepper(env)
    stepper.reset()
    space = env.spec.action
    good = np.zeros((num_envs, *space.shape), space.dtype)
    stepper.step(good)  # EnvPool looks at the first call only
    bad = [
        good[:2],
        np.concatenate([good, good]),
        good[0],
        np.zeros((num_envs, *space.shape, 2), space.dtype),
        np.zeros((num_envs, 1) if space.shape == () else (num_envs,), space.dtype),
        np.zeros((num_envs, 2), space.dtype),
        good.astype(np.float16 if isinstance(space, Box) else np.int8),
        good.astype(np.int32 if isinstance(space, Box) else np.float32),
    ]
    if not stepper.graph:
        bad += [good.astype(np.float64 if isinstance(space, Box) else np.int64)]  # jit makes these 32 bits wide
        if isinstance(space, Discrete):
            for value in (-1, space.n):
                bad += [good + np.int32([0, value, 0]), jax.numpy.asarray(good + np.int32([0, value, 0]))]
    for action in bad:
        with pytest.raises(ValueError, match="actions must"):
            stepper.step(action)
    stepper.step(good)
    env.close()


def test_envpool_in_a_scanned_program_equals_the_host():
    """As the rollout uses it: many steps in one program, whose results must not share EnvPool's memory."""
    actions = random_actions(Discrete(2), 40, 4)
    env = make("CartPole-v1", "program")
    state, first = env.reset(jax.random.key(0))
    body = lambda state, action: env.step(state, action, jax.random.key(0))
    state, one = jax.jit(lambda s, a: jax.lax.scan(body, s, a))(state, actions[:20])
    one = jax.tree.map(np.array, one)
    _, two = jax.jit(lambda s, a: jax.lax.scan(body, s, a))(state, actions[20:])
    both = [np.concatenate(pair) for pair in zip(one[:4], jax.tree.map(np.array, two[:4]))]
    assert_equal(run("CartPole-v1", "host", actions), (np.array(first), *both))
    env.close()


def test_a_pool_belongs_to_one_side():
    pool = EnvPoolEnv(envs.section("CartPole-v1", backend="envpool", num_envs=2), seed=0)
    assert pool.to_jax() is not None
    with pytest.raises(RuntimeError, match="belongs to a program"):
        pool.step(np.zeros(2, np.int32))
    with pytest.raises(RuntimeError, match="belongs to a program"):
        pool.reset()
    pool.close()


def test_a_pool_that_is_closed_may_have_steps_under_way():
    """Closing waits for them: the program knows the pool by its address alone, and the next pool may get the same."""
    expected = None
    for _ in range(4):
        env = EnvPoolEnv(envs.section("CartPole-v1", backend="envpool", num_envs=4), seed=3).to_jax()
        state, first = env.reset(jax.random.key(0))
        step, action = jax.jit(env.step), np.ones(4, np.int32)
        for _ in range(50):
            state, result = step(state, action, jax.random.key(0))
        env.close()
        found = np.concatenate([np.array(first), np.array(result.obs)])
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["host", "program", "gymnasium"])
def test_pools_of_other_roles_and_indices_share_no_environment(kind):
    """And the trap that this avoids: EnvPool's seed s + 1 has all but one of the environments of seed s."""
    first = lambda **where: make_first("CartPole-v1", kind, num_envs=64, **where)
    pools = [
        first(seed=seed, place=envs.Place(role, index))
        for seed in (0, 1)
        for role in ("train", "eval")
        for index in (0, 1)
    ]
    rows = {row.tobytes() for pool in pools for row in pool}
    assert len(rows) == 64 * len(pools)
    np.testing.assert_array_equal(pools[0], first(seed=0))  # train, 0
    if kind == "host":
        raw = [EnvPoolEnv(envs.section("CartPole-v1", backend="envpool", num_envs=4), seed=s) for s in (7, 8)]
        a, b = (pool.reset() for pool in raw)
        np.testing.assert_array_equal(a[1:], b[:3])
        for pool in raw:
            pool.close()


@pytest.mark.parametrize("kind", ["host", "program", "gymnasium"])
def test_a_vector_that_is_split_keeps_its_environments(kind):
    whole = make_first("CartPole-v1", kind, num_envs=5, seed=3, place=envs.Place(index=2))
    places = {2: envs.Place(index=2), 3: envs.Place(index=2, offset=2)}
    parts = [make_first("CartPole-v1", kind, num_envs=n, seed=3, place=place) for n, place in places.items()]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def make_first(id, kind, **kwargs):
    stepper = Stepper(make(id, kind, **kwargs))
    first = stepper.reset()
    stepper.env.close()
    return first


def test_seed_ranges_are_disjoint():
    """65,536 seeds each, within EnvPool's int32; 20 seeds, 8 indices, both roles."""
    starts = sorted(envs.seed_range(s, role, i) for s in range(20) for role in ("train", "eval") for i in range(8))
    assert all(b - a >= 65_536 for a, b in itertools.pairwise(starts))
    assert starts[0] >= 0
    with pytest.raises(ValueError, match=r"train, eval.*test"):
        envs.seed_range(0, "test")
    largest = max(envs.seed_range(s, "eval", i) for s in (0, 1, 2**31 - 1) for i in (0, 8191))
    assert largest + 65_536 <= 2**30  # beyond are those of environments that are made anew


def test_tiny_tasks_get_one_thread():
    """Measured: 144k steps/s with one thread against 91k with two, CartPole x 8. Others get one per core."""
    for id, threads in (("CartPole-v1", 1), ("Catch-v0", 1), ("HalfCheetah-v4", min(4, envpool_env.os.cpu_count()))):
        pool = EnvPoolEnv(envs.section(id, backend="envpool", num_envs=4), seed=0)
        assert pool._pool.spec.config.num_threads == threads, id
        pool.close()
    pool = EnvPoolEnv(envs.section("CartPole-v1", num_envs=4, options={"num_threads": 2}), seed=0)
    assert pool._pool.spec.config.num_threads == 2
    pool.close()
