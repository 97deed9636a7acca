"""CartPole whose actions change places: the observation contains the valid actions."""

from typing import Any

import jax.numpy as jnp
from flax import struct

from jrl.envs import classic
from jrl.envs.jax_env import Definition, index
from jrl.types import Array, Box, Dict, Discrete, InputError, MultiBinary, PyTree


@struct.dataclass
class _State:
    cart: PyTree  # state of CartPole-v1
    left: Array  # [B] i32, the slot that pushes left
    right: Array  # [B] i32, the slot that pushes right


def parametric_cartpole(num_actions: int = 8, fixed: bool = False) -> Definition:
    """Returns the definition of ParametricCartPole-v0: CartPole-v1 with `num_actions` slots (as RLlib's example).

    Before each step, one slot is drawn to push left and another to push right. All others are invalid: choosing one
    ends the episode with reward 0. The agent must read the slots' meanings from each observation. With the mask this is
    learned within 200,000 steps, without it hardly. With `fixed`, left is drawn from the first half of the slots and
    right from the rest, so that a valid slot always means the same: easier, also without the mask.

    Observation: cart [4] f32; avail_actions [num_actions, 2] f32, each slot's meaning: (1, 0) left, (0, 1) right, (0,
    0) invalid; action_mask [num_actions] i8, 1 for valid slots. Action: a slot. A random one of 8 slots is invalid in
    three of four cases, so that an episode has 1.3 steps; with CartPole's random pushes it has 22.

    Raises:
      InputError: fewer than two actions.
    """
    if isinstance(num_actions, bool) or not isinstance(num_actions, int) or num_actions < 2:
        raise InputError(
            f"env.options.num_actions: ParametricCartPole-v0: expected an integer >= 2, got {num_actions!r}: use 8"
        )
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
