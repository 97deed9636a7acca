"""Gymnasium environments with a fault, for `env.id: faulty_envs:NAME` in a process whose PYTHONPATH has this folder."""

import os
import signal
import time

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class Plain(gymnasium.Env):
    """Episodes of 20 steps of nothing."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    _steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        self.fault()
        return np.zeros(2, np.float32), 1.0, self._steps % 20 == 0, False, {}

    def fault(self):
        pass


class Stalling(Plain):
    """Its step `at` takes `seconds`, and so do others, each with probability `p`."""

    def __init__(self, at=300, seconds=6.0, p=0.0):
        self._at, self._seconds, self._p = at, seconds, p

    def fault(self):
        if self._steps == self._at or self.np_random.random() < self._p:
            time.sleep(self._seconds)


class Crashing(CartPoleEnv):
    """CartPole-v1 that fails in a step with probability `p_step`, in a reset with `p_reset`; the seed decides when.

    It raises, or ends its process (`how` is raise, exit or kill). To make one takes `make_s` seconds, all but the first
    of a process.
    """

    _made = False

    def __init__(self, p_step=0.0, p_reset=0.0, how="raise", make_s=0.0, render_mode=None):
        super().__init__(render_mode=render_mode)
        self._p = {"step": p_step, "reset": p_reset}
        self._how, self._dice, self._steps = how, np.random.default_rng(0), 0
        if Crashing._made:
            time.sleep(make_s)
        Crashing._made = True

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._dice = np.random.default_rng(seed)
        self._steps = 0
        self._roll("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._roll("step")
        obs, reward, terminated, truncated, info = super().step(action)
        self._steps += 1
        return obs, reward, terminated, truncated or self._steps >= 500, info

    def _roll(self, where):
        if self._dice.random() >= self._p[where]:
            return
        if self._how == "exit":
            os._exit(3)
        if self._how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError(f"crashed in {where}")


class Leaking(Plain):
    """Every step keeps so many bytes."""

    def __init__(self, size=20_000):
        self._size, self._kept = size, []

    def fault(self):
        self._kept.append(bytearray(self._size))


class Breaching(Plain):
    """What it does from step `at` on, or at first, is not what Gymnasium's interface says."""

    def __init__(self, what="nothing", at=3):
        self._what, self._at = what, at
        if what in ("Discrete", "dtype"):
            size = gymnasium.spaces.Discrete(3) if what == "Discrete" else gymnasium.spaces.Box(0, 9, (2,), np.uint8)
            self.observation_space = size
        elif what == "empty":
            self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (0,), np.float32)
        elif what == "TypeError":
            len(3)
        elif what in _RAISED and at == "constructor":
            raise _RAISED[what]

    def _obs(self):
        if self._what == "Discrete":
            return 1 if self._steps < self._at else 3
        shape = 3 if self._what == "shape" and self._steps >= self._at else 2
        kind = np.float32 if self._what != "dtype" or self._steps >= self._at else np.uint8
        return np.full(shape, 7.0 if self._what == "bounds" else 0.0, kind)

    def reset(self, *, seed=None, options=None):
        if self._what in _RAISED and self._at == "reset":
            raise _RAISED[self._what]
        return self._obs() if self._what == "no info" else (self._obs(), {})

    def step(self, action):
        self._steps += 1
        if self._what in _RAISED and self._at == self._steps:
            raise _RAISED[self._what]
        result = [self._obs(), 1.0, False, self._steps % 20 == 0, {}]
        if self._steps >= self._at:
            i, value = {
                "reward": (1, None), "text": (1, "1"), "array": (1, np.ones(1)), "flag": (2, 2), "info": (4, None)
            }.get(self._what, (4, {}))  # fmt: skip
            result[i] = value
        return tuple(result[:4] if self._what == "four" and self._steps >= self._at else result)


class Huge(Plain):
    """An observation takes 4 MB."""

    observation_space = gymnasium.spaces.Dict(
        map=gymnasium.spaces.Box(-1.0, 1.0, (1000, 1000), np.float32), small=gymnasium.spaces.Discrete(3)
    )

    def reset(self, *, seed=None, options=None):
        raise MemoryError("was reset")


class Panic(BaseException):
    """As libraries in Rust raise."""


_RAISED = {"SystemExit": SystemExit("bye"), "KeyboardInterrupt": KeyboardInterrupt(), "Panic": Panic("index")}


class Bare:
    """Gymnasium's methods without its class. Each step of an episode gives its flags in another form."""

    observation_space, action_space, steps = Plain.observation_space, Plain.action_space, 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        form = FORMS[self.steps % len(FORMS)]
        self.steps += 1
        return np.zeros(2, np.float32), np.float64(1.0), form(False), form(self.steps % len(FORMS) == 0), {}


FORMS = [bool, int, float, np.bool_, np.int64, np.float32, lambda x: np.asarray(x), lambda x: np.asarray(x, np.int8)]


class InJax(Bare):
    """Its flags are arrays of JAX."""

    def step(self, action):
        import jax.numpy as jnp

        obs, reward, terminated, truncated, info = super().step(action)
        return obs, jnp.float32(reward), jnp.asarray(terminated), jnp.asarray(truncated), info


def two_at_once():
    return gymnasium.make_vec("CartPole-v1", num_envs=2)


class Unseeded(Plain):
    """Its reset takes no seed."""

    def reset(self):
        return np.zeros(2, np.float32), {}


class Interrupted(Plain):
    """The user presses Ctrl-C in its third step."""

    def fault(self):
        if self._steps == 3:
            signal.raise_signal(signal.SIGINT)
