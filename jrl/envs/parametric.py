"""CartPole whose actions change places: which of them can be taken is part of the observation."""

from typing import Any

import jax.numpy as jnp
from flax import struct

from jrl.envs import classic
from jrl.envs.jax_env import Definition, index
from jrl.types import Array, Box, Dict, Discrete, InputError, MultiBinary, PyTree


@struct.dataclass
class _State:
    cart: PyTree  # of CartPole-v1
    left: Array  # [B] i32, the slot that pushes left
    right: Array  # [B] i32, the slot that pushes right


def parametric_cartpole(num_actions: int = 8, fixed: bool = False) -> Definition:
    """Defines ParametricCartPole-v0: CartPole-v1 with `num_actions` slots for its two actions (after RLlib's example).

    Before each step one slot is drawn that pushes left, and another that pushes right; all others are invalid: choosing
    one ends the episode, with reward 0. What a slot does must be read from the observation anew at each step: with the
    mask that is learned within 200,000 steps, without it hardly. With `fixed`, left is drawn from the first half of the
    slots and right from the rest, so that a slot means the same whenever it is valid: easier, also without the mask.

    Observation: cart [4] f32; avail_actions [num_actions, 2] f32, what each slot does, (1, 0) left, (0, 1) right and
    (0, 0) nothing; action_mask [num_actions] i8, 1 where it does something. Action: a slot. One that is
    drawn from all 8 is invalid three times of four, so that an episode has 1.3 steps; CartPole's random pushes last 22.

    Raises:
      InputError: fewer than two actions.
    """
    if isinstance(num_actions, bool) or not isinstance(num_actions, int) or num_actions < 2:
        raise InputError(f"env.options.num_actions: ParametricCartPole-v0 takes an integer >= 2, got {num_actions!r}")
    task, n = classic.cartpole(), num_actions

    def slots(draws: Array) -> dict[str, Any]:
        if fixed:
            return {"left": index(draws[0], n // 2), "right": n // 2 + index(draws[1], n - n // 2)}
        left = index(draws[0], n)
        return {"left": left, "right": (left + 1 + index(draws[1], n - 1)) % n}

    def reset(draws: Array) -> _State:
        return _State(task.reset(draws[2:]), **slots(draws))

    def step(state: _State, action: Array, draws: Array) -> tuple[_State, Array, Array]:
        right = action == state.right
        valid = right | (action == state.left)
        cart, reward, fallen = task.step(state.cart, right.astype(jnp.int32), draws)
        cart = tuple(jnp.where(valid, new, old) for new, old in zip(cart, state.cart, strict=True))
        return _State(cart, **slots(draws)), jnp.where(valid, reward, 0.0), fallen | ~valid

    def observe(state: _State) -> PyTree:
        pushes = [(slot[:, None] == jnp.arange(n)[None]) for slot in (state.left, state.right)]
        return {
            "cart": task.observe(state.cart),
            "avail_actions": jnp.stack(pushes, -1).astype(jnp.float32),
            "action_mask": (pushes[0] | pushes[1]).astype(jnp.int8),
        }

    space = Dict(
        (
            ("cart", task.observation),
            ("avail_actions", Box((n, 2), "float32", 0.0, 1.0)),
            ("action_mask", MultiBinary((n,))),
        )
    )
    return Definition(space, Discrete(n), task.max_episode_steps, 2 + task.num_draws, reset, step, observe)
