"""A task of several agents written in JAX, for `env.id: late_arrivals:late_arrivals`."""

import jax.numpy as jnp
import numpy as np

from jrl.envs.multi_agent import MultiDefinition
from jrl.types import Array, Box, Dict, Discrete, MultiBinary, PyTree

ID = "late_arrivals:late_arrivals"


def late_arrivals() -> MultiDefinition:
    """Defines agents that come late, leave, come back and wait, by a script of six steps.

                 step  0  1  2  3  4  5
        steady         x  x  x  x  x  E       x acts, E acts and ends, w waits, . is not there
        late           .  .  x  x  x  E
        guest          x  E  .  x  E  .
        waiting        w  x  w  x  w  E

    Step t pays 10 t + action to agents that act, and 10 t to those that wait. Actions: none 0, 1, 2. One that waits
    may do none only, and gets 10 t whatever it does. If all act by action 1: steady earns
    10 * 15 + 6 = 156, late 10 * 14 + 4 = 144, guest 12 in its first life and 72 in its second, waiting 153.

    Observation: obs [2] f32, the steps that are over and the agent's number; action_mask [3]. View of all [1] f32:
    the steps that are over.
    """
    script = ("xxxxxE", "..xxxE", "xE.xE.", "wxwxwE")
    length = len(script[0])
    marks = np.array([list(line) for line in script]).T
    marks = np.concatenate([marks, np.full((1, len(script)), ".")])  # [7, A]: after the last step nobody is there
    is_there, does_end, does_wait = marks != ".", marks == "E", marks == "w"

    def step(t: Array, actions: Array, draws: Array) -> tuple[Array, Array, Array]:
        earned = jnp.where(jnp.asarray(does_wait)[t], 0, actions)
        return t + 1, 10.0 * t[:, None] + earned, jnp.asarray(does_end)[t]

    def observe(t: Array) -> PyTree:
        acts = ~jnp.asarray(does_wait)[t]
        agent = jnp.broadcast_to(jnp.arange(4), acts.shape)
        return {
            "action_mask": jnp.stack([jnp.ones_like(acts), acts, acts], -1).astype(jnp.int8),
            "obs": jnp.stack([jnp.broadcast_to(t[:, None], acts.shape), agent], -1).astype(jnp.float32),
        }

    most = float(length)
    return MultiDefinition(
        agents=("steady", "late", "guest", "waiting"),
        observation=Dict((("action_mask", MultiBinary((3,))), ("obs", Box((2,), "float32", 0.0, (most, 3.0))))),
        action=Discrete(3),
        max_episode_steps=length,
        num_draws=1,
        reset=lambda draws: jnp.zeros(draws.shape[1], jnp.int32),
        step=step,
        observe=observe,
        present=lambda t: jnp.asarray(is_there)[t],
        state=Box((1,), "float32", 0.0, most),
        view=lambda t: t[:, None].astype(jnp.float32),
    )
