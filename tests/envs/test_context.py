"""The user's own environments: registered creators, classes that take a context, functions that give a Definition."""

import sys
from collections.abc import Callable

import numpy as np
import pytest
from counter_env import Level, Taskless

from jrl import envs, registry
from jrl.envs import context, toys
from jrl.envs.jax_env import Definition
from jrl.types import InputError, JaxEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*")
HERE = "test_context"


@pytest.fixture(autouse=True)
def _nothing_stays_registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def describe(env):
    found = env.context
    names = ("worker_index", "num_workers", "vector_index", "num_envs", "remote", "in_evaluation", "seed")
    return dict(found), *(getattr(found, name) for name in names)


@pytest.mark.parametrize("remote", [False, True])
def test_a_creator_is_called_with_the_place_of_each_environment(remote):
    """The second of two vectors of 2, in runner 2 of 3: environments 2 and 3 of the run, with options of their own."""
    made = []

    def creator(ctx):
        made.append(ctx)
        env = Level(ctx)
        ctx["mine"] = ctx.vector_index
        return env

    registry.register("my-level", creator)
    place = envs.Place(index=5, offset=2, worker_index=2, num_workers=3)
    env = envs.make("my-level", num_envs=2, options={"task": 4}, remote_worker_envs=remote, place=place)
    first = envs.seed_range(0, "train", 5) + 2
    found = env.foreach_env(describe)
    obs = env.reset()
    env.close()
    assert found == [({"task": 4, "mine": 2 + i}, 2, 3, 2 + i, 2, remote, False, first + i) for i in range(2)]
    assert len(made) == (0 if remote else 2)
    np.testing.assert_array_equal(obs, [[4, 2], [4, 3]])
    assert context.EnvContext(num_workers=3).num_env_runners == 3


def test_of_an_evaluation_and_as_foreach_env_hands_it_out():
    env = envs.make("counter_env:Taskless", num_envs=1, place=envs.Place("eval"), options={"size": 5}, horizon=3)
    (found,) = env.foreach_env(context.of)
    env.close()
    assert found.in_evaluation and found == {"size": 5} and context.of(object()) is None


def with_context(context):
    return Level(context)


class Renamed(Taskless):
    def __init__(self, config=None, size=1):
        self.config, self.size = config, size


CALLS: list[tuple[str, dict, Callable, object]] = [
    ("counter_env:Level", {"task": 6}, lambda env: env.get_task(), 6),  # its first parameter is env_config
    (f"{HERE}:with_context", {"task": 6}, lambda env: env.get_task(), 6),
    ("counter_env:Taskless", {"size": 6}, lambda env: env.size, 6),  # others get arguments
    (f"{HERE}:Renamed", {"size": 6}, lambda env: dict(env.config), {"size": 6}),
    (f"{HERE}:Renamed", {"config": 5, "size": 6}, lambda env: (env.config, env.size), (5, 6)),  # an argument by name
]


@pytest.mark.parametrize(("id", "options", "look", "expected"), CALLS)
def test_who_is_called_with_a_context(id, options, look, expected):
    env = envs.make(id, num_envs=1, options=options)
    assert env.foreach_env(look) == [expected]
    env.close()


@pytest.mark.parametrize("remote", [False, True])
def test_a_class_that_no_process_could_import(remote):
    """`reference` registers it; by that name it is an id, also for worker processes, which do not import it."""

    class Local(Taskless):
        pass

    id = registry.reference(Local)
    assert id.startswith("local:") and envs.resolve(id) == "gymnasium"
    env = envs.make(id, num_envs=2, options={"size": 8}, remote_worker_envs=remote)
    assert env.foreach_env(lambda env: (type(env).__name__, env.size)) == [("Local", 8)] * 2
    if remote:
        assert env.foreach_env(lambda env: "jrl.envs" in sys.modules) == [False] * 2
    env.close()


def small() -> Definition:
    return toys.catch()


def unannotated(length=2.0):
    return toys.corridor(length)


def test_functions_that_give_a_definition():
    registry.register("registered", small)
    registry.register("as-it-is", toys.catch())
    registry.register("CartPole-v1", small)  # goes before the libraries'
    for id, backend in (
        (f"{HERE}:small", "auto"),
        (f"{HERE}:unannotated", "jax"),
        ("registered", "auto"),
        ("as-it-is", "auto"),
        ("CartPole-v1", "auto"),
    ):
        assert envs.resolve(id, backend) == "jax" and envs.check(id, backend=backend) == []
        assert isinstance(envs.make(id, backend=backend, num_envs=2), JaxEnv)
    env = envs.make(f"{HERE}:unannotated", backend="jax", num_envs=2, options={"length": 4, "max_episode_steps": 9})
    assert env.spec.max_episode_steps == 9


def fails(config):
    raise TypeError("a wrong word")


ERRORS = [
    (f"{HERE}:small", "gymnasium", {}, ["not in the gymnasium backend", "env.backend jax"]),
    (f"{HERE}:unannotated", "auto", {}, ["unannotated returned a Definition", "set env.backend jax"]),
    (f"{HERE}:fails", "auto", {"a": 1}, ["cannot be made with options {'a': 1}", "a wrong word"]),
    (f"{HERE}:with_context", "jax", {}, ["env.options.context: ", "with_context needs a value"]),
    (f"{HERE}:small", "auto", {"x": 1}, ["env.options.x", "no such option", "max_episode_steps"]),
    ("my-levl", "auto", {}, ["not in any backend", "did you mean my-level"]),
    ("local:gone", "auto", {}, ["env.id", "another process", "package.module:name"]),
]


@pytest.mark.parametrize(("id", "backend", "options", "expected"), ERRORS)
def test_an_error_names_the_thing_and_the_mend(id, backend, options, expected):
    registry.register("my-level", Level)
    with pytest.raises(InputError) as caught:
        envs.make(id, backend=backend, num_envs=1, options=options)
    assert all(part in str(caught.value) for part in expected), str(caught.value)
