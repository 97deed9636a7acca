"""Randomised tasks, sensor noise and latency, next to plain records of what happened."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import Stepper, make, random_actions

from jrl import envs, registry
from jrl.envs import classic
from jrl.envs.jax_env import Definition
from jrl.rollout import sources
from jrl.types import ActOut, Box, Dict, Discrete, InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*", "ignore::UserWarning:gymnasium")
STEPS = 12
MASS, LENGTH = (0.5, 2.0), (0.8, 1.2)


def steps_of(env, actions, seed=0):
    """The first observation, and the steps stacked [T, B, *]."""
    stepper = Stepper(env, seed)
    first = stepper.reset()
    return first, jax.tree.map(lambda *x: np.stack(x), *[stepper.step(a) for a in actions])


def echo() -> Definition:
    """Observes the latest action and the number of the step; episodes of 5 steps."""
    step = lambda state, action, draws: (
        (action[:, 0], state[1] + 1),
        action[:, 0],
        jnp.zeros(len(action), bool),
    )
    return Definition(
        Box((2,), "float32", -9.0, 9.0), Box((1,), "float32", 0.0, 4.0), 5, 1,
        reset=lambda draws: (jnp.zeros_like(draws[0]), jnp.zeros_like(draws[0])), step=step,
        observe=lambda state: jnp.stack(state, -1),
    )  # fmt: skip


class Echo(gymnasium.Env):
    """As `echo`."""

    observation_space, action_space = gymnasium.spaces.Box(-9, 9, (2,)), gymnasium.spaces.Box(0, 4, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.float32([action[0], self.steps]), float(action[0]), False, self.steps == 5, {}


# ---------------------------------------------------------------- tasks


def pendulum(**settings):
    settings = {"num_envs": 64, "options": {"max_episode_steps": 5}, "observe_task": True} | settings
    return envs.make("Pendulum-v1", backend="jax", randomize={"mass": MASS, "length": LENGTH}, **settings)


def test_each_environment_has_the_dynamics_of_its_own_task():
    """Environments are stepped by hand with the numbers that they observe; each reset draws new ones."""
    env = pendulum()
    actions = random_actions(env.spec.action, STEPS, 64)
    first, rows = steps_of(env, actions)
    assert env.spec.observation["task"] == Box((2,), "float32", -1.0, 1.0)  # length and mass, as in the alphabet
    low, high = np.transpose([LENGTH, MASS])
    tasks = low + (np.concatenate([first["task"][None], rows.obs["task"]]) + 1) / 2 * (high - low)
    obs = np.concatenate([first["obs"][None], rows.obs["obs"]]).astype(np.float64)
    for t in range(STEPS):
        if t == 5 or t == 11:  # a reset
            assert (tasks[t + 1] != tasks[t]).all() and len(np.unique(tasks[t + 1])) == 128
            continue
        np.testing.assert_array_equal(tasks[t + 1], tasks[t])
        (_, sin, speed), (length, mass) = obs[t].T, tasks[t].T
        speed = speed + 0.05 * (1.5 * 10 / length * sin + 3 / (mass * length**2) * 2 * actions[t, :, 0])
        np.testing.assert_allclose(obs[t + 1, :, 2], np.clip(speed, -8, 8), atol=1e-4)
    assert (tasks >= low - 1e-6).all() and (tasks <= high + 1e-6).all() and (tasks.std(1) > 0.2 * (high - low)).all()


def test_a_number_is_also_an_option():
    by_option = envs.make("Pendulum-v1", backend="jax", num_envs=2, options={"mass": 2.0})
    by_hand = classic.pendulum(mass=2.0)
    state = (jnp.float32([0.3, -1.0]), jnp.float32([0.0, 1.0]))
    expected, _, _ = by_hand.step(state, jnp.full((2, 1), 2.0), None)
    inner, _ = by_option.reset(jax.random.key(0))
    inner, _ = by_option.step(inner.replace(inner=state), jnp.ones((2, 1)), jax.random.key(1))
    np.testing.assert_allclose(inner.inner, expected, rtol=1e-6)


def test_a_dict_task_of_a_users_definition_and_other_options():
    """The task's other number is equal for all; stacks, soft horizons and masks go on as without a task."""
    definition = Definition(
        Dict((("at", Box((1,))), ("action_mask", Box((2,), "int8", 0, 1)))), Discrete(2), 4, 1,
        reset=lambda draws, task: task["wind"] + 0 * draws[0],
        step=lambda at, action, draws, task: (at + task["speed"], task["wind"], at < -99),
        observe=lambda at, task: {"at": at[:, None], "action_mask": jnp.ones((len(at), 2), jnp.int8)},
        task={"wind": 3.0, "speed": 1},
    )  # fmt: skip
    registry.register("windy", definition)
    env = envs.make("windy", backend="jax", num_envs=8, randomize={"wind": [1, 2]}, observe_task=True, frame_stack=2)
    assert env.set_task is None  # each environment draws its own task
    first, rows = steps_of(env, np.zeros((10, 8), np.int32))
    wind = 1 + (rows.obs["task"][:, :, -1, 0] + 1) / 2
    np.testing.assert_allclose(rows.reward[:4], wind[:4], rtol=1e-6)
    np.testing.assert_allclose(rows.obs["at"][3, :, -1, 0], first["at"][:, -1, 0] + 4, rtol=1e-6)
    assert (rows.obs["action_mask"] == 1).all() and len(np.unique(wind[0])) == len(np.unique(wind[4:9])) == 8


def test_a_task_and_models_are_refused_with_their_fix():
    for settings, message in (
        ({"id": "Pendulum-v1", "randomize": {"mas": [1, 2]}}, "env.randomize.mas: .* did you mean mass"),
        ({"id": "Catch-v0", "randomize": {"mass": [1, 2]}}, "env.randomize.mass: .* no such number: it has none"),
        ({"id": "Corridor-v0", "randomize": {"length": [3, 5]}}, "env.randomize.length: Corridor-v0 has no such"),
        ({"id": "MultiAgentPendulum-v1", "randomize": {"mass": [1, 2]}}, "several agents, which share one task"),
        ({"id": "MultiAgentPendulum-v1", "observation_noise": 0.1}, "env.observation_noise: .* several agents"),
        ({"id": "Pendulum-v1", "randomize": True}, "only playground has functions that draw models"),
        ({"id": "brax:ant", "randomize": {"mass": [1, 2]}}, "environments of brax have no numbers by name"),
        ({"id": "Catch-v0", "observation_noise": {"x": 1.0}}, "env.observation_noise.x: .* use a number"),
        ({"id": "RepeatAfterMe-v0", "observation_noise": 1.0}, "env.observation_noise: expected floats"),
        ({"id": "ParametricCartPole-v0", "action_delay": 1}, "env.action_delay: an action may no longer be allowed"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            envs.make(settings.pop("id"), backend="jax", num_envs=2, **settings)


@pytest.mark.slow
def test_models_of_playground_are_drawn_once():
    """Each environment keeps its masses over resets, also to the first state; only these arrays are in its state."""
    pytest.importorskip("mujoco_playground")

    def masses(model, keys):
        scale = jax.vmap(lambda key: jax.random.uniform(key, model.body_mass.shape, minval=0.5, maxval=2.0))(keys)
        axes = jax.tree.map(lambda x: None, model).tree_replace({"body_mass": 0})
        return model.tree_replace({"body_mass": model.body_mass[None] * scale}), axes

    registry.register("masses", masses)
    with jax.numpy_rank_promotion("allow"):
        settings = {"randomize": "masses", "num_envs": 3, "options": {"max_episode_steps": 3}, "reset": "first"}
        stepper = Stepper(envs.make("playground:CartpoleBalance", **settings))
        stepper.reset()
        (before,) = stepper._state.task
        rows = [stepper.step(np.ones((3, 1), np.float32)) for _ in range(5)]
        (after,) = stepper._state.task
    assert before.shape == (3, 3) and len(np.unique(before[:, 1:])) == 6
    np.testing.assert_array_equal(before, after)
    assert rows[2].truncated.all()
    gains = rows[4].obs[:, 3] - rows[3].obs[:, 3]  # the lightest cart is the fastest
    assert np.argmax(gains) == np.argmin(before[:, 1:].sum(1))
    with pytest.raises(InputError, match=r"env.randomize: playground draws no models of CartpoleBalance"):
        envs.make("playground:CartpoleBalance", num_envs=2, randomize=True)


def test_parameters_of_gymnax():
    pytest.importorskip("gymnax")
    with jax.numpy_rank_promotion("allow"):
        options = {"max_episode_steps": 2}
        env = envs.make("gymnax:Pendulum-v1", num_envs=16, randomize={"g": [1, 19]}, observe_task=True, options=options)
        first, rows = steps_of(env, np.zeros((4, 16, 1), np.float32))
    gravity = 10 + 9 * first["task"][:, 0]
    expected = np.clip(first["obs"][:, 2] + 0.05 * 1.5 * gravity * first["obs"][:, 1], -8, 8)
    np.testing.assert_allclose(rows.obs["obs"][0, :, 2], expected, atol=1e-5)
    assert len(np.unique(first["task"])) == 16 and (rows.obs["task"][2] != first["task"]).all()
    with pytest.raises(InputError, match=r"env.randomize.gravity: gymnax:Pendulum-v1 has no such number"):
        envs.make("gymnax:Pendulum-v1", num_envs=16, randomize={"gravity": [1, 19]})


# ---------------------------------------------------------------- latency


@pytest.mark.parametrize("delay", [2, (0, 3)])
@pytest.mark.parametrize("kind", ["jax", "gymnasium", pytest.param("ready_workers", marks=pytest.mark.slow)])
def test_actions_take_effect_later(kind, delay):
    """The environment shows the action that it got: that of some steps ago, at first the middle of the bounds."""
    id = "test_robotics:Echo"
    if kind == "jax":
        registry.register(id := "echo", echo())
    env = make(id, kind, num_envs=4, action_delay=delay)
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, 4, 1)).astype(np.float32)
    _, rows = steps_of(env, actions)
    if kind != "jax":
        env.close()
    chosen, got = 2 + 2 * actions[..., 0], rows.obs[..., 0]  # in [0, 4], the environment's own bounds
    low, high = delay if isinstance(delay, tuple) else (delay, delay)
    found = set()
    for i in range(4):
        for begin in (0, 6):  # two episodes of 5 steps, each followed by an ignored step
            episode = slice(begin, begin + 5)
            expected = {
                k: np.concatenate([np.full(k, 2.0), chosen[episode, i]])[:5].astype(np.float32)
                for k in range(low, high + 1)
            }
            (steps,) = [k for k, x in expected.items() if np.allclose(got[episode, i], x, atol=1e-6)]
            found.add(steps)
    assert found == {low, high} if low == high else len(found) > 1
    assert rows.truncated[[4, 10]].all() and rows.truncated.sum() == 8


# ---------------------------------------------------------------- noise


@pytest.mark.parametrize("kind", ["jax", "program", "gymnasium", "ready_host"])
def test_noise_is_drawn_for_each_observation(kind):
    actions = np.zeros((40, 16, 1), np.float32)
    clean, noisy = (make("Pendulum-v1", kind, num_envs=16, observation_noise=x, frame_stack=2) for x in (0.0, 0.5))
    first, rows = steps_of(noisy, actions)
    seen = rows.obs[..., -1, :]
    np.testing.assert_array_equal(rows.obs[1:, :, 0], seen[:-1])  # a stack keeps the noise of its frames
    np.testing.assert_array_equal(rows.obs[0, :, 0], first[:, 1])
    assert noisy.spec.observation == Box((2, 3), "float32") != clean.spec.observation
    cos, sin = seen[..., 0].astype(np.float64), seen[..., 1].astype(np.float64)
    # cos**2 + sin**2 is 1 + 2 * 0.25 on average
    np.testing.assert_allclose((cos**2 + sin**2).mean(), 1.5, atol=0.15)
    if kind != "jax":  # the environments' own random numbers do not depend on the noise
        _, plain = steps_of(clean, actions)
        noise = seen - plain.obs[..., -1, :]
        np.testing.assert_allclose(noise.std((0, 1)), 0.5, rtol=0.1)
        np.testing.assert_allclose(noise.mean((0, 1)), 0, atol=0.08)
        flat = noise.reshape(-1)
        assert len(np.unique(flat.round(5))) > 0.9 * flat.size
        clean.close()
        noisy.close()


def test_noise_of_named_items():
    """Training and evaluation have other numbers, a task has none."""
    env = pendulum(num_envs=3, observation_noise={"obs": 0.5})
    first, rows = steps_of(env, np.zeros((4, 3, 1), np.float32))
    assert (np.abs(first["obs"][:, :2]).max() > 1) or (np.abs(rows.obs["obs"][..., :2]).max() > 1)
    np.testing.assert_array_equal(rows.obs["task"][:4], np.broadcast_to(first["task"], (4, 3, 2)))
    places = [envs.Place("train"), envs.Place("eval"), envs.Place("train", 1), envs.Place("train", 0, 16)]
    one = lambda place: envs.make("CartPole-v1", backend="gymnasium", num_envs=2, place=place, observation_noise=1e3)
    seen = [one(place).reset() for place in places]
    assert len({x.tobytes() for x in seen}) == 4 and len(np.unique(np.stack(seen))) == 4 * 2 * 4


@pytest.mark.parametrize("kind", ["jax", "gymnasium"])
def test_rollouts_have_what_the_policy_saw_and_chose(kind):
    env = make("Pendulum-v1", kind, num_envs=3, observation_noise=0.5, action_delay=1)

    def act(actor, obs, carry, key, explore=True):
        return ActOut(jax.random.uniform(key, (3, 1)), carry, {"saw": obs})

    source = sources.make(env, act, key=jax.random.key(0), length=8)
    rollouts = [source.next(jnp.zeros(()), jax.random.key(i))[0] for i in range(2)]
    source.close()
    for rollout in rollouts:
        np.testing.assert_array_equal(rollout.obs, rollout.extras["saw"])
        assert len(np.unique(rollout.action)) == 24
    np.testing.assert_array_equal(rollouts[0].last_obs, rollouts[1].obs[0])
