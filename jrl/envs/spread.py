"""SimpleSpread-v0: agents that cover landmarks without running into each other."""

import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.envs import pictures
from jrl.envs.multi_agent import MultiDefinition, check_num_agents, join_spaces
from jrl.types import Array, Box, Discrete

_DT, _DAMPING, _FORCE, _RADIUS = 0.1, 0.25, 5.0, 0.15
_CONTACT_FORCE, _CONTACT_MARGIN = 100.0, 1e-3


@struct.dataclass
class _Plane:
    position: Array  # [G, 2, A] f32, x and y
    velocity: Array  # [G, 2, A] f32
    landmark: Array  # [G, 2, A] f32


def simple_spread(num_agents: int = 3) -> MultiDefinition:
    """Returns the definition of SimpleSpread-v0: n agents should cover n landmarks (MPE, arXiv:1706.02275).

    Agents are discs of radius 0.15 and mass 1 in a plane, landmarks are points; all start uniformly in [-1, 1] x [-1,
    1]. Actions: none, or a force of 5 to the left, to the right, down, up. A step is 0.1 s: positions move by the
    velocities, which lose a quarter and gain force x 0.1; overlapping discs push each other apart. A game is truncated
    after 25 steps (option max_episode_steps), and never ends otherwise.

    Reward of each agent: minus half the sum, over landmarks, of the distance to the nearest agent, and -0.5 for each
    other agent that it overlaps. Returns per agent, and summed over 3 agents: without action -23.9 and -71.8, random
    -26.3 and
    -79.0, straight to the best assignment -8.0 and -24.1.

    Observation [4 + 2 n + 4 (n - 1)] f32: own velocity and position, relative positions of landmarks and other agents,
    and two zeros per other agent (unused messages). Global state: all observations concatenated.

    Raises:
      InputError: `num_agents` below 2.
    """
    n = check_num_agents(num_agents, "SimpleSpread-v0", 2)
    others = np.array([[k for k in range(n) if k != i] for i in range(n)])  # [A, A - 1]

    def reset(draws: Array) -> _Plane:
        places = (2.0 * draws - 1.0).T.reshape(-1, 2, 2, n)
        return _Plane(places[:, 0], jnp.zeros_like(places[:, 0]), places[:, 1])

    def distances(position: Array) -> tuple[Array, Array]:
        """Returns vectors between agents [G, 2, A, A], and their lengths [G, A, A], 1 on the diagonal."""
        way = position[:, :, :, None] - position[:, :, None, :]
        square = (way**2).sum(1) + jnp.eye(n)[None]
        return way, jnp.sqrt(jnp.maximum(square, 1e-12))

    def pushes(position: Array) -> Array:
        """Returns the soft contact force on each agent [G, 2, A]."""
        way, distance = distances(position)
        depth = jnp.logaddexp(0.0, (2 * _RADIUS - distance) / _CONTACT_MARGIN) * _CONTACT_MARGIN
        return (way * (_CONTACT_FORCE * depth / distance)[:, None]).sum(-1)

    def step(state: _Plane, actions: Array, draws: Array) -> tuple[_Plane, Array, Array]:
        toward = lambda plus, minus: (actions == plus).astype(jnp.float32) - (actions == minus).astype(jnp.float32)
        force = _FORCE * jnp.stack([toward(2, 1), toward(4, 3)], 1) + pushes(state.position)
        position = state.position + _DT * state.velocity
        velocity = (1.0 - _DAMPING) * state.velocity + _DT * force
        _, distance = distances(position)
        overlaps = (distance < 2 * _RADIUS).sum(-1).astype(jnp.float32)
        uncovered = position[:, :, :, None] - state.landmark[:, :, None, :]
        nearest = jnp.sqrt((uncovered**2).sum(1)).min(1)  # [G, A], of each landmark
        reward = -0.5 * nearest.sum(-1)[:, None] - 0.5 * overlaps
        return _Plane(position, velocity, state.landmark), reward, jnp.zeros(reward.shape, bool)

    def observe(state: _Plane) -> Array:
        last = lambda x: jnp.swapaxes(x, 1, 2)  # [G, A, 2]
        position = last(state.position)
        flat = lambda x: x.reshape(*position.shape[:2], -1)
        landmarks = last(state.landmark)[:, None] - position[:, :, None]
        neighbours = position[:, others] - position[:, :, None]
        said = jnp.zeros((*position.shape[:2], 2 * (n - 1)))
        parts = [last(state.velocity), position, flat(landmarks), flat(neighbours), said]
        return jnp.concatenate(parts, -1)

    space = Box((4 + 2 * n + 4 * (n - 1),))
    return MultiDefinition(
        agents=tuple(f"agent_{i}" for i in range(n)),
        observation=space,
        action=Discrete(5),
        max_episode_steps=25,
        num_draws=4 * n,
        reset=reset,
        step=step,
        observe=observe,
        state=join_spaces(space, n),
        view=lambda state: observe(state).reshape(state.position.shape[0], -1),
        draw=lambda state: pictures.discs(state.position, state.landmark, _RADIUS),
        fps=1 / _DT,
    )
