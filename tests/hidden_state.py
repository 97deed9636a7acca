"""An environment whose rewards depend on what the policy need not see: for `network.value_inputs`."""

import jax.numpy as jnp

from jrl.envs.jax_env import Definition
from jrl.types import Box, Dict, Discrete

LENGTH = 16


def hidden_sign(continuous: bool = False) -> Definition:
    """+1 or -1 for each step of an episode, by the sign `state`; and up to 1 for the action that `cue` names.

    The sign is drawn with the episode, the cue before each step. So the value is that of the sign, mostly, and the best
    action is that of the cue.
    """
    sign_of = lambda draw: jnp.where(draw < 0.5, -1.0, 1.0)

    def step(state, action, draws):
        sign, cue, steps = state
        taken = action[:, 0] if continuous else 2.0 * action - 1.0
        reward = sign + jnp.maximum(0.0, 1.0 - jnp.abs(taken - cue))
        return (sign, sign_of(draws[1]), steps + 1), reward, steps + 1 >= LENGTH

    return Definition(
        observation=Dict((("cue", Box((1,), low=-1.0, high=1.0)), ("state", Box((2,), low=-1.0, high=1.0)))),
        action=Box((1,), low=-1.0, high=1.0) if continuous else Discrete(2),
        max_episode_steps=None,
        num_draws=2,
        reset=lambda draws: (sign_of(draws[0]), sign_of(draws[1]), jnp.zeros(draws.shape[1], jnp.int32)),
        step=step,
        observe=lambda state: {
            "cue": state[1][:, None],
            "state": jnp.stack([state[0], 1.0 - 2.0 * state[2] / LENGTH], -1),
        },
    )
