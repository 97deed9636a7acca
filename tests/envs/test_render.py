"""Environments to be watched: who draws them, what is shown when nobody does, what is said when nothing can be."""

import functools

import gymnasium
import numpy as np
import pytest
from painted import Painted

from jrl import envs
from jrl.envs import render
from jrl.envs.history import add_history
from jrl.envs.transform import transformed
from jrl.types import Box, Dict, Discrete, EnvSpec, InputError, JaxEnv

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium", "ignore:.*fork.*")


class Unpainted(Painted):
    def __init__(self):
        super().__init__()


class Screen(Painted):
    """Observes an image, and does not draw."""

    def __init__(self, render_mode: str | None = None):
        super().__init__(render_mode, draws=False)
        self.observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def reset(self, **kwargs):
        super().reset(**kwargs)
        return np.full((8, 8, 3), 7, np.uint8), {}


ONE = EnvSpec(Box((1,), "float32", 0.0, 10.0), Discrete(2), 1)


def spec_of(id, backend):
    env = envs.make(id, backend=backend, num_envs=1, host=True)
    env.close()
    return env.spec


def error(id, spec, *, options=None, **kwargs):
    with pytest.raises(InputError) as caught:
        render.make(envs.section(id, options=options), spec, **kwargs).close()
    return str(caught.value)


def test_gymnasium_draws():
    env = render.make(envs.section("painted:Painted", options={"shade": 9}), ONE)
    assert env.how == "Gymnasium"
    assert env.fps == 25
    assert env.reset().tolist() == [[0]]
    result = env.step(np.zeros(1, np.int32))
    assert result.obs.tolist() == [[1]]
    assert result.reward.tolist() == [1.5]
    frame = env.render()
    assert frame.shape == (31, 40, 3)
    assert frame[0, 0].tolist() == [50, 9, 0]
    env.close()


@pytest.mark.parametrize("backend", ["envpool", "jax"])
def test_envpool_draws_its_own_and_the_graph_environments(backend):
    spec = spec_of("Pendulum-v1", backend)
    env = render.make(envs.section("Pendulum-v1", backend=backend), spec, seed=3)
    assert env.how == "EnvPool"
    assert env.fps == 30  # as Gymnasium's
    assert env.spec.action == spec.env_action  # the environment's own units
    env.reset()
    before = env.render()
    assert before.shape[2] == 3
    assert before.dtype == np.uint8
    for _ in range(5):
        result = env.step(np.full((1, 1), 2.0, np.float32))
    assert result.reward.shape == (1,)
    assert (env.render() != before).any()
    env.close()


def test_seeds():
    spec = spec_of("CartPole-v1", "envpool")

    def first(seed):
        env = render.make(envs.section("CartPole-v1"), spec, seed=seed)
        obs = env.reset().copy()
        env.close()
        return obs

    np.testing.assert_array_equal(first(1), first(1))
    assert (first(1) != first(2)).any()


def test_options_that_another_backend_does_not_take_are_named():
    options = {"max_episode_steps": 2, "delay": 1}
    spec = spec_of("CartPole-v1", "envpool")
    own = render.make(envs.section("CartPole-v1", backend="envpool", options={"max_episode_steps": 2}), spec)
    assert own.how == "EnvPool"
    other = render.make(envs.section("CartPole-v1", backend="jax", options=options), spec)
    assert other.how == "EnvPool (without the options delay)"
    for env in (own, other):
        env.reset()
        ends = [bool(env.step(np.zeros(1, np.int32)).truncated[0]) for _ in range(2)]
        assert ends == [False, True]
        env.close()


def test_an_image_that_nobody_draws_is_shown_as_it_is():
    env = render.make(envs.section("test_render:Screen"), EnvSpec(Box((8, 8, 3), "uint8", 0.0, 255.0), Discrete(2), 1))
    assert env.how == "its own observations"
    env.reset()
    assert (env.render() == 7).all()
    env.close()


def test_a_graph_environment_shown_by_its_observations():
    spec = spec_of("Catch-v0", "jax")
    assert isinstance(envs.make("Catch-v0", backend="jax", num_envs=1), JaxEnv)
    env = render.make(envs.section("Catch-v0", backend="jax"), spec)  # EnvPool has it, and does not draw it
    assert env.how == "its own observations"
    obs = np.asarray(env.reset())[0]
    frame = env.render()
    assert frame.shape == (260, 130, 3)
    np.testing.assert_array_equal(frame[13::26, 13::26, 0], 255 * obs)
    total = sum(float(env.step(np.ones(1, np.int32)).reward[0]) for _ in range(9))
    assert total in (-1, 1)
    env.close()


def test_errors_say_what_each_library_said():
    neither = error("StatelessCartPole-v1", spec_of("StatelessCartPole-v1", "jax"))
    assert neither == "env StatelessCartPole-v1 cannot be drawn: neither EnvPool nor Gymnasium has it"
    assert "env.options.render_mode: test_render:Unpainted has no such option" in error("test_render:Unpainted", ONE)
    assert "gymnasium: render(): frame 1 is None: return a picture" in error(
        "painted:Painted", ONE, options={"draws": False}
    )
    other = ONE._replace(observation=Box((2,)))
    assert "its observations are ('Box', (1,)" in error("painted:Painted", other)
    other = ONE._replace(env_action=Discrete(3))
    assert "its actions are ('Discrete', (), 'int32', 2" in error("painted:Painted", other)


@pytest.mark.slow
def test_a_renderer_is_tried_in_a_child(monkeypatch):
    assert render._probe("CartPole-v1", {}) == ""
    assert "render not implemented" in render._probe("FrozenLake-v1", {})
    monkeypatch.setattr(render, "_PROBE", "import os; os._exit(3)")
    assert render._probe("HalfCheetah-v4", {}) == "exit status 3"
    spec = spec_of("HalfCheetah-v4", "envpool")
    monkeypatch.setitem(render._RENDERERS, "gymnasium", lambda *args: pytest.fail("EnvPool has no time limit of 9"))
    monkeypatch.setattr(render, "backends_of", lambda id: ("envpool",))
    assert "envpool: its renderer fails here: exit status 3" in error("HalfCheetah-v4", spec)


def test_observations_of_several_parts():
    """Spaces are compared part by part; what the run has around its environments stands around this one, too."""
    seen = Dict((("obs", Box((3, 1), "float32", 0.0, 10.0)), ("prev_action", Discrete(2))))
    around = lambda env: transformed(env, functools.partial(add_history, frame_stack=3, prev_action=True))
    env = render.make(envs.section("painted:Painted"), ONE._replace(observation=seen), around=around)
    assert env.how == "Gymnasium" and env.fps == 25
    env.reset()
    env.step(np.ones(1, np.int32))
    result = env.step(np.ones(1, np.int32))
    assert result.obs["obs"].tolist() == [[[0], [1], [2]]] and result.obs["prev_action"].tolist() == [1]
    assert env.render().shape == (31, 40, 3)
    env.close()
    assert "its observations are ('Dict', {'obs': ('Box', (3, 1)" in error("painted:Painted", ONE, around=around)


def test_the_first_image_of_several_parts_is_shown():
    spec = spec_of("Catch-v0", "jax")
    seen = Dict((("obs", spec.observation), ("prev_reward", Box(()))))
    around = lambda env: transformed(env, functools.partial(add_history, prev_reward=True))
    env = render.make(envs.section("Catch-v0", backend="jax"), spec._replace(observation=seen), around=around)
    obs = env.reset()
    np.testing.assert_array_equal(env.render()[13::26, 13::26, 0], 255 * np.asarray(obs["obs"])[0])
    env.close()
    assert render.picture(Dict((("a", Box((4,))), ("b", Discrete(3))))) is None


def test_pictures():
    stack = render.picture(Box((4, 64, 128), "uint8", 0.0, 255.0))
    obs = np.arange(4, dtype=np.uint8)[:, None, None] * np.ones((4, 64, 128), np.uint8)
    assert stack(obs).shape == (128, 256, 3)
    assert (stack(obs) == 3).all()  # the newest frame
    last = render.picture(Box((300, 200, 4), "uint8", 0.0, 255.0))
    assert last(np.zeros((300, 200, 4), np.uint8)).shape == (300, 200, 3)
    colours = np.zeros((3, 2, 2), np.uint8)
    colours[1] = 200
    for space, obs in ((Box((3, 256, 256), "uint8", 0.0, 255.0), colours.repeat(128, 1).repeat(128, 2)),):
        assert render.picture(space)(obs)[5, 5].tolist() == [0, 200, 0]
    grey = render.picture(Box((2, 4), "float32", -1.0, 1.0))
    frame = grey(np.array([[-1, 0, 1, 5], [1, 1, 1, 1]], np.float32))
    assert frame.shape == (128, 256, 3)
    assert frame[0, ::64, 0].tolist() == [0, 127, 255, 255]
    for space in (Box((4,)), Discrete(3), Box((8, 8)), Box((10, 10, 4), "float32", 0.0, 1.0), Box((0, 2), "uint8")):
        assert render.picture(space) is None
