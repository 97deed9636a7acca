"""A task with random ends of both kinds, a recurrent policy, and the same environments as host environments."""

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.graph import Definition, build
from jrl.types import ActOut, Box, Discrete, StepResult

INITIAL = 0.5  # of the recurrent state: not 0, so that a forgotten reset shows


def drift() -> Definition:
    """A number that grows with the action and by chance; ends beyond 1.5 or after 7 steps."""

    def step(x, action, draws):
        x = x + 0.2 * action + 0.4 * draws[0] - 0.1
        return x, x * (1.0 + action), x > 1.5

    return Definition(Box((2,)), Discrete(2), 7, 2, lambda d: d[1], step, lambda x: jnp.stack([x, -x], -1))


def carry(batch_size):
    return {"memory": jnp.full((batch_size, 3), INITIAL)}


def act(actor, obs, carry, key, explore=True):
    """The memory decides, so that a wrong one changes the actions."""
    memory = 0.7 * carry["memory"] + jnp.expand_dims(obs[:, 0], 1) * actor["w"][None]
    logits = jnp.stack([jnp.zeros_like(memory[:, 0]), 3.0 * (memory.sum(-1) - 1.5)], -1)
    action = jax.random.categorical(key, logits) if explore else logits.argmax(-1)
    action = action.astype(jnp.int32)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
    return ActOut(action, {"memory": memory}, {"log_prob": log_prob, "memory": memory})


ACTOR = {"w": jnp.array([0.1, 0.5, -0.2])}


class Hosted:
    """A graph environment from the host. Returns the same arrays again and again, as EnvPool may.

    Its random numbers are those of `unroll`: `follow(key, length)` says which rollout comes next.
    """

    def __init__(self, task, num_envs, key):
        env = build(task, num_envs)
        self.spec = env.spec
        self._reset, self._step = env.reset, jax.jit(env.step)
        self._key, self._keys, self._results = key, [], None

    def follow(self, key, length):
        self._keys += list(jax.random.split(key, (length, 2))[:, 1])

    def reset(self):
        self._state, obs = self._reset(self._key)
        self._results = None
        return np.array(obs)

    def step(self, action):
        self._state, result = self._step(self._state, jnp.asarray(action), self._keys.pop(0))
        if self._results is None:
            self._results = jax.tree.map(_aligned, result)
        for mine, new in zip(jax.tree.leaves(self._results), jax.tree.leaves(result)):
            mine[...] = new
        return StepResult(*self._results)

    def close(self):
        self.closed = True


def _aligned(x):
    """A copy at a multiple of 64 bytes: where jax on CPU takes an array over without copying it."""
    x = np.asarray(x)
    raw = np.empty(x.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out
