"""Definitions of Gymnasium's classic control tasks; equations and constants as in Gymnasium 1.x, in float32.

State is a tuple of [B] arrays, one per variable.
"""

import math

import jax.numpy as jnp

from jrl.envs.jax_env import Definition
from jrl.types import Box, Discrete


def _uniform(draws, low, high):
    return tuple(low + (high - low) * draw for draw in draws)


def _columns(state):
    return jnp.stack(state, -1)


def cartpole(
    gravity: float = 9.8, masscart: float = 1.0, masspole: float = 0.1, length: float = 0.5, force_mag: float = 10.0
) -> Definition:
    """Returns the definition of CartPole-v1: keep a pole upright (Barto, Sutton and Anderson, 1983).

    State x, x', theta, theta'.

    Args:
      gravity: m/s**2.
      masscart, masspole: kg.
      length: half of the pole's length, m.
      force_mag: push to the left or right, N.
    """
    dt, total_mass, pole_moment = 0.02, masscart + masspole, masspole * length
    x_limit, theta_limit = 2.4, 12 * 2 * math.pi / 360

    def step(state, action, draws):
        x, x_dot, theta, theta_dot = state
        push = jnp.where(action == 1, force_mag, -force_mag)
        cos, sin = jnp.cos(theta), jnp.sin(theta)
        temp = (push + pole_moment * theta_dot**2 * sin) / total_mass
        theta_acc = (gravity * sin - cos * temp) / (length * (4.0 / 3.0 - masspole * cos**2 / total_mass))
        x_acc = temp - pole_moment * theta_acc * cos / total_mass
        x, theta = x + dt * x_dot, theta + dt * theta_dot
        state = (x, x_dot + dt * x_acc, theta, theta_dot + dt * theta_acc)
        fallen = (jnp.abs(x) > x_limit) | (jnp.abs(theta) > theta_limit)
        return state, jnp.ones_like(x), fallen

    high = (2 * x_limit, math.inf, 2 * theta_limit, math.inf)
    return Definition(
        observation=Box((4,), "float32", tuple(-h for h in high), high),
        action=Discrete(2),
        max_episode_steps=500,
        num_draws=4,
        reset=lambda draws: _uniform(draws, -0.05, 0.05),
        step=step,
        observe=_columns,
    )


def pendulum(mass: float = 1.0, length: float = 1.0, gravity: float = 10.0) -> Definition:
    """Returns the definition of Pendulum-v1: swing up and hold. State theta (0 is up), theta'.

    Args:
      mass: kg.
      length: m.
      gravity: m/s**2.
    """
    max_speed, max_torque, dt = 8.0, 2.0, 0.05
    pull, inverse_inertia = 3 * gravity / (2 * length), 3.0 / (mass * length**2)  # inertia of a rod around its end

    def step(state, action, draws):
        theta, speed = state
        torque = jnp.clip(action[:, 0], -max_torque, max_torque)
        angle = (theta + math.pi) % (2 * math.pi) - math.pi
        reward = -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2)
        speed = jnp.clip(speed + (pull * jnp.sin(theta) + inverse_inertia * torque) * dt, -max_speed, max_speed)
        return (theta + speed * dt, speed), reward, jnp.zeros(reward.shape, bool)

    return Definition(
        observation=Box((3,), "float32", (-1.0, -1.0, -max_speed), (1.0, 1.0, max_speed)),
        action=Box((1,), "float32", -max_torque, max_torque),
        max_episode_steps=200,
        num_draws=2,
        reset=lambda draws: (*_uniform(draws[:1], -math.pi, math.pi), *_uniform(draws[1:], -1.0, 1.0)),
        step=step,
        observe=lambda state: _columns((jnp.cos(state[0]), jnp.sin(state[0]), state[1])),
    )


def _mountain_car(action, push, reward, goal: float, max_episode_steps: int, gravity: float) -> Definition:
    """Returns a mountain car. State position, velocity; `push(action)` is the car's acceleration."""
    low, high, max_speed = -1.2, 0.6, 0.07

    def step(state, action, draws):
        position, velocity = state
        velocity = jnp.clip(velocity + push(action) - gravity * jnp.cos(3 * position), -max_speed, max_speed)
        position = jnp.clip(position + velocity, low, high)
        velocity = jnp.where((position <= low) & (velocity < 0), 0.0, velocity)
        at_goal = (position >= goal) & (velocity >= 0)
        return (position, velocity), reward(action, at_goal), at_goal

    return Definition(
        observation=Box((2,), "float32", (low, -max_speed), (high, max_speed)),
        action=action,
        max_episode_steps=max_episode_steps,
        num_draws=1,
        reset=lambda draws: (*_uniform(draws, -0.6, -0.4), jnp.zeros_like(draws[0])),
        step=step,
        observe=_columns,
    )


def mountain_car(force: float = 0.001, gravity: float = 0.0025) -> Definition:
    """Returns the definition of MountainCar-v0: rock out of a valley; -1 per step (Moore, 1990).

    Args:
      force, gravity: changes of the velocity per step.
    """
    push = lambda action: (action - 1) * force
    reward = lambda action, at_goal: jnp.full(at_goal.shape, -1.0)
    return _mountain_car(Discrete(3), push, reward, goal=0.5, max_episode_steps=200, gravity=gravity)


def mountain_car_continuous(power: float = 0.0015, gravity: float = 0.0025) -> Definition:
    """Returns the definition of MountainCarContinuous-v0: a force; 100 at the goal, less 0.1 force**2 per step.

    Args:
      power: change of the velocity per step by a force of 1.
      gravity: change of the velocity per step.
    """
    push = lambda action: jnp.clip(action[:, 0], -1.0, 1.0) * power
    reward = lambda action, at_goal: 100.0 * at_goal - 0.1 * action[:, 0] ** 2
    box = Box((1,), "float32", -1.0, 1.0)
    return _mountain_car(box, push, reward, goal=0.45, max_episode_steps=999, gravity=gravity)


def acrobot(gravity: float = 9.8) -> Definition:
    """Returns the definition of Acrobot-v1: swing a two-link arm above the bar; -1 per step.

    Sutton and Barto's "book" dynamics, RK4. State theta1, theta2, theta1', theta2'; masses and lengths 1, centres of
    mass at 0.5, moments of inertia 1.

    Args:
      gravity: m/s**2.
    """
    dt, max_speeds = 0.2, (4 * math.pi, 9 * math.pi)

    def derivative(state, torque):
        theta1, theta2, speed1, speed2 = state
        cos2, sin2 = jnp.cos(theta2), jnp.sin(theta2)
        d1 = 0.25 + (1.25 + cos2) + 2.0
        d2 = 0.25 + 0.5 * cos2 + 1.0
        phi2 = 0.5 * gravity * jnp.cos(theta1 + theta2 - math.pi / 2)
        phi1 = -0.5 * speed2**2 * sin2 - speed2 * speed1 * sin2 + 1.5 * gravity * jnp.cos(theta1 - math.pi / 2) + phi2
        acc2 = (torque + d2 / d1 * phi1 - 0.5 * speed1**2 * sin2 - phi2) / (1.25 - d2**2 / d1)
        acc1 = -(d2 * acc2 + phi1) / d1
        return speed1, speed2, acc1, acc2

    def step(state, action, draws):
        torque = action.astype(jnp.float32) - 1.0
        along = lambda k, h: tuple(a + h * b for a, b in zip(state, k))
        k1 = derivative(state, torque)
        k2 = derivative(along(k1, dt / 2), torque)
        k3 = derivative(along(k2, dt / 2), torque)
        k4 = derivative(along(k3, dt), torque)
        slope = tuple(a + 2 * b + 2 * c + d for a, b, c, d in zip(k1, k2, k3, k4))
        theta1, theta2, speed1, speed2 = along(slope, dt / 6)
        wrap = lambda x: x - 2 * math.pi * jnp.round(x / (2 * math.pi))  # to [-pi, pi]
        theta1, theta2 = wrap(theta1), wrap(theta2)
        speed1 = jnp.clip(speed1, -max_speeds[0], max_speeds[0])
        speed2 = jnp.clip(speed2, -max_speeds[1], max_speeds[1])
        above = -jnp.cos(theta1) - jnp.cos(theta2 + theta1) > 1.0
        return (theta1, theta2, speed1, speed2), jnp.where(above, 0.0, -1.0), above

    def observe(state):
        theta1, theta2, speed1, speed2 = state
        return _columns((jnp.cos(theta1), jnp.sin(theta1), jnp.cos(theta2), jnp.sin(theta2), speed1, speed2))

    high = (1.0, 1.0, 1.0, 1.0, *max_speeds)
    return Definition(
        observation=Box((6,), "float32", tuple(-h for h in high), high),
        action=Discrete(3),
        max_episode_steps=500,
        num_draws=4,
        reset=lambda draws: _uniform(draws, -0.1, 0.1),
        step=step,
        observe=observe,
    )
