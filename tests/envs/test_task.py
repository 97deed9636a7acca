"""Tasks: of environments in a program, in this process, in worker processes; what has none says so."""

import sys

import cloudpickle
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counter_env import Taskless
from env_helpers import Stepper
from jax.sharding import NamedSharding, PartitionSpec

from jrl import envs, registry
from jrl.envs import task
from jrl.envs.context import EnvContext
from jrl.envs.jax_env import Definition, build
from jrl.learn import parallel
from jrl.rollout import sources, unroll
from jrl.types import ActOut, Box, Discrete, InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*", "ignore::UserWarning:gymnasium")
LEVEL = "counter_env:Level"


def right(actor, obs, carry, key, explore=True):
    return ActOut(jnp.ones(obs.shape[:1], jnp.int32), carry, {})


def corridor(length=3, num_envs=2, **settings):
    return envs.make("Corridor-v0", num_envs=num_envs, options={"length": length}, **settings)


def graph_source(seed=0, **settings):
    return sources.make(corridor(**settings), right, key=jax.random.key(seed), length=6)


def rows(source, steps=1):
    """[T, B, *] of the next rollout."""
    rollout, _ = source.next(jnp.zeros(()), jax.random.key(steps))
    return np.asarray(rollout.obs), np.asarray(rollout.reward), np.asarray(rollout.terminated)


# ---------------------------------------------------------------- in a program


def test_a_corridor_by_hand():
    stepper = Stepper(corridor(3, num_envs=1))
    assert stepper.reset().tolist() == [[0, 3]]
    found = [stepper.step(np.array([a], np.int32)) for a in (1, 0, 0, 1, 1, 1, 0)]
    assert [r.obs[0, 0] for r in found] == [1, 0, 0, 1, 2, 3, 0]
    np.testing.assert_allclose([r.reward[0] for r in found], [-0.01] * 5 + [1, 0])
    assert [r.terminated[0] for r in found] == [False] * 5 + [True, False]


def test_another_task_counts_at_once_and_compiles_nothing():
    source = graph_source(length=3)
    obs, reward, _ = rows(source)
    assert obs[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1] and obs[:, :, 1].tolist() == [[3, 3]] * 6
    assert task.Handle(source.get_task, source.set_task).get_task() == 3.0
    source.set_task(4)  # at position 2; the observation of the next row was made before
    obs, reward, terminated = rows(source)
    assert obs[:, 1, 0].tolist() == [2, 3, 4, 0, 1, 2] and obs[1:, :, 1].tolist() == [[4, 4]] * 5
    assert terminated[:, 0].tolist() == [False, True, False, False, False, False] and reward[1, 0] == 1
    source.reset(jax.random.key(5))
    obs, _, _ = rows(source)  # keeps it; what the reset itself observed is of the definition
    assert obs[:, 0].tolist() == [[0, 3], [1, 4], [2, 4], [3, 4], [4, 4], [0, 4]]
    assert source._step._cache_size() == 1


def test_a_task_may_be_any_tree_and_a_wrong_one_is_told():
    """Gravity and a wind of two components: what is observed is both, for each environment."""
    observe = lambda state, task: jnp.concatenate([task["gravity"][:, None], task["wind"]], -1)
    definition = Definition(
        Box((3,)), Discrete(2), None, 1, lambda draws, task: draws[0], lambda s, a, d, task: (s, s, s > 2), observe,
        task={"gravity": 9.8, "wind": np.zeros(2, np.float32)},
    )  # fmt: skip
    env = build(definition, 3)
    state, obs = jax.jit(env.reset)(jax.random.key(0))
    np.testing.assert_allclose(obs, [[9.8, 0, 0]] * 3)
    state = env.set_task(state, {"gravity": 1, "wind": np.array([2.0, 3.0])})
    _, result = jax.jit(env.step)(state, np.zeros(3, np.int32), jax.random.key(1))
    np.testing.assert_allclose(result.obs, [[1, 2, 3]] * 3)
    assert env.get_task(state)["wind"].tolist() == [2, 3]
    for wrong in (3, {"gravity": 1}, {"gravity": 1, "wind": 2.0}, {"gravity": "low", "wind": np.zeros(2)}, None):
        with pytest.raises(InputError, match=r"set_task: expected a task such as .*gravity.*9.8"):
            env.set_task(state, wrong)


@pytest.mark.parametrize("soft", [False, True])
def test_states_stacked_over_devices(soft, four_devices):
    """What a fused program holds: [D, B, ...], on the devices where it was."""
    env = corridor(3, horizon=9, soft_horizon=soft)
    functions = unroll.make(env, right, length=4)
    state = jax.jit(jax.vmap(functions.init))(jax.random.split(jax.random.key(0), 4))
    sharding = NamedSharding(four_devices, PartitionSpec(parallel.AXIS))
    state = jax.device_put(state, sharding)
    new = task.set_in(state, env, 7.0)
    assert float(task.get_in(new, env)) == 7 and float(task.get_in(state, env)) == 3
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(new)):
        assert x.shape == y.shape and x.dtype == y.dtype and y.sharding == sharding
    inside = jax.jit(lambda state, given: task.get_in(task.set_in(state, env, given), env))
    assert float(inside(state, 8.0)) == 8
    context = EnvContext({"a": 1})
    harder = lambda result, env, given: env.get_task() + result["up"] if given is context else None
    found, now = task.apply_in(state, env, harder, {"up": 2}, context)
    assert now == 5.0 == float(task.get_in(found, env))
    assert task.apply_in(state, env, lambda *_: None, {}, context)[1] == 3.0


def test_a_definition_without_a_task_has_no_more_state_than_before():
    env = envs.make("CartPole-v1", backend="jax", num_envs=2)
    state, _ = env.reset(jax.random.key(0))
    assert [x.shape for x in jax.tree.leaves(state)] == [(2,)] * 5
    assert env.set_task is None and env.get_task is None


def test_through_threads_and_pools():
    """Async over two pools: a task counts after the rollouts that are under way."""
    devices = jax.devices()[:2]
    parts = [graph_source(i, length=100) for i in range(2)]
    join = lambda found: jax.tree.map(
        lambda *x: jnp.concatenate([np.asarray(a) for a in x], 1), *[r.obs for r in found]
    )
    pools = sources.Pools(parts, devices=devices, join=join, stack=parallel.stack)
    source = sources.Async(pools, lag=1)
    try:
        lengths = lambda: np.asarray(source.next(jnp.zeros(()), jax.random.key(0))[0])[:, :, 1]
        assert (lengths() == 100).all()
        source.set_task(50)
        assert (lengths() == 100).all()  # was under way
        assert (lengths()[1:] == 50).all() and lengths().shape == (6, 4)
        assert source.apply_task(lambda result, env, context: env.get_task() - 1, {}, EnvContext()) == [49.0, 49.0]
        assert source.foreach_env(lambda env: env.unwrapped.get_task()) == [49.0, 49.0]
    finally:
        source.close()


# ---------------------------------------------------------------- Gymnasium's


def harder(result, env, context):
    return None if context.vector_index == 0 else env.get_task() + result["up"] * context.vector_index


@pytest.mark.parametrize(
    "settings",
    [{}, {"remote_worker_envs": True, "horizon": 9}, {"remote_worker_envs": True, "batch_wait_ms": 0.0}],
    ids=["here", "workers", "ready_workers"],
)
def test_of_each_environment(settings):
    """Each has a task of its own; worker processes do not import jax to change it."""
    env = envs.make(
        LEVEL, num_envs=3, place=envs.Place(offset=4 if not settings else 0), options={"task": 2}, **settings
    )
    task.check(env)
    source = sources.make(env, right, key=jax.random.key(0), length=3)
    try:
        first = 0 if settings else 4
        local = lambda result, env, context: (
            None if context.vector_index == 0 else env.get_task() + context.vector_index
        )
        expected = [2 + first, 3 + first, 4 + first]
        assert source.apply_task(local, {"up": 1}, EnvContext()) == expected
        assert source.foreach_env(lambda env: env.get_task()) == expected
        source.set_task(7)
        assert source.foreach_env(lambda env: env.get_task()) == [7, 7, 7]
        if settings:
            loaded = source.foreach_env(lambda env: [m for m in ("jax", "jrl.envs") if m in sys.modules])
            assert loaded == [[]] * 3
        if "batch_wait_ms" not in settings:
            rows(source)
            assert rows(source)[0][-1, :, 0].tolist() == [7, 7, 7]
    finally:
        source.close()


def test_behind_wrappers():
    """`gymnasium.make` puts three around an environment, which do not hand on what they do not know."""

    class Mine(task.TaskSettableEnv, Taskless):
        pass

    gymnasium.register("Mine-v0", entry_point=Mine)
    try:
        env = envs.make("Mine-v0", num_envs=2)
        task.check(env)
        source = sources.make(env, right, key=jax.random.key(0), length=3)
        assert source.apply_task(
            lambda result, env, context: result["n"] + context.vector_index, {"n": 5}, EnvContext()
        ) == [5, 6]
        assert source.foreach_env(lambda env: env.unwrapped.task) == [5, 6]
        source.close()
    finally:
        del gymnasium.registry["Mine-v0"]


def test_a_class_of_ones_own_needs_no_other_base():
    class Mine(task.TaskSettableEnv):
        observation_space, action_space = gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(2)

        def __init__(self, config):
            self.task = config["task"]

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.np_random.integers(3), {}

        def step(self, action):
            return self.np_random.integers(3), float(self.get_task()), False, False, {}

    assert issubclass(Mine, gymnasium.Env) and Mine.__mro__[1] is task.TaskSettableEnv
    assert cloudpickle.loads(cloudpickle.dumps(task.TaskSettableEnv)) is task.TaskSettableEnv
    registry.register("mine", Mine)
    env = envs.make("mine", num_envs=2, options={"task": 3})
    task.check(env)
    env.foreach_env(task.setter(5))
    assert env.foreach_env(lambda env: env.unwrapped.get_task()) == [5, 5]
    env.close()
    with pytest.raises(AttributeError, match="has no attribute TaskSetableEnv"):
        task.TaskSetableEnv  # noqa: B018


def test_what_has_no_task_says_so():
    here = envs.make("counter_env:Taskless", num_envs=2)
    graph = envs.make("CartPole-v1", backend="jax", num_envs=2)
    with pytest.raises(InputError, match=r"Taskless has no task .*get_task.*set_task.*TaskSettableEnv"):
        task.check(here)
    with pytest.raises(InputError, match=r"no task to set.*Definition has a `task`"):
        task.check(graph)
    source, in_program = (sources.make(env, right, key=jax.random.key(0), length=2) for env in (here, graph))
    for call in (lambda one: one.set_task(3), lambda one: one.apply_task(lambda *_: 3, {}, EnvContext())):
        for one in (source, in_program):
            with pytest.raises(InputError, match="no task to set"):
                call(one)
    with pytest.raises(InputError, match="expected environments that are Python objects"):
        in_program.foreach_env(lambda env: env)
    here.close()
    pool = envs.make("CartPole-v1", backend="envpool", num_envs=2)
    task.check(pool)  # is made anew with other options
    pool.close()
    options = {"task": "zoom", "size": 3, "seeds": [1, 2], "none": None}  # of a pool, what it is made with
    assert task.Handle(lambda: options, print).get_task() == options
    with pytest.raises(InputError, match=r"options\.length: Corridor-v0: expected at least 1, got 0"):
        corridor(0)
