"""A task with random ends of both kinds, a recurrent policy, the same environments as host environments; and
environments that follow a script and may break, in step or one by one, with a Python loop that says what a collector
should make of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.jax_env import Definition, build
from jrl.types import ActOut, Box, Discrete, EnvSpec, Rollout, StepResult

INITIAL = 0.5  # of the recurrent state: not 0, so that a forgotten reset shows


def drift() -> Definition:
    """A number that grows with the action and by chance; ends beyond 1.5 or after 7 steps."""

    def step(x, action, draws):
        x = x + 0.2 * action + 0.4 * draws[0] - 0.1
        return x, x * (1.0 + action), x > 1.5

    return Definition(Box((2,)), Discrete(2), 7, 2, lambda d: d[1], step, lambda x: jnp.stack([x, -x], -1))


def carry(batch_size):
    return {"memory": jnp.full((batch_size, 3), INITIAL, jnp.float32)}


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
    """A environment written in JAX from the host. Returns the same arrays again and again, as EnvPool may.

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


class Stream:
    """One environment that says what happened: its step n does script[n % len(script)].

    `.` nothing, `e` a true end, `l` a time limit, `f` it breaks; on a reset row only `f` counts. An observation is
    (a number that the actions change, the index, steps so far).
    """

    def __init__(self, index, script):
        self.index, self.script = index, script
        self.steps, self.done = 0, False

    def begin(self):
        self.x, self.done = np.float32((self.steps % 5) / 4 + 0.1 * self.index), False
        return self._obs()

    def step(self, action):
        """(obs, reward, terminated, truncated, failed)"""
        event = self.script[self.steps % len(self.script)]
        self.steps += 1
        if self.done or event == "f":
            return self.begin(), np.float32(0), False, False, event == "f"
        self.x = np.float32(0.6) * self.x + np.float32(0.5 * action + 0.05 * (self.steps % 3))
        self.done = event in "el"
        return self._obs(), self.x * np.float32(1 + action), event == "e", event == "l", False

    def _obs(self):
        return np.array([self.x, self.index, self.steps], np.float32)


class Streams:
    """Host environments made of one Stream per script."""

    def __init__(self, scripts):
        self.scripts = scripts
        self.spec = EnvSpec(Box((3,)), Discrete(2), len(scripts))
        self.can_fail = "f" in "".join(scripts)

    def reset(self):
        self.streams = [Stream(b, script) for b, script in enumerate(self.scripts)]
        return np.stack([stream.begin() for stream in self.streams])

    def step(self, action):
        return self._result([stream.step(a) for stream, a in zip(self.streams, action.tolist(), strict=True)])

    def _result(self, rows):
        obs, reward, *flags = (np.stack(x) for x in zip(*rows))
        return StepResult(obs, reward, *flags) if self.can_fail else StepResult(obs, reward, *flags[:2])

    def foreach_env(self, fn):
        return [fn(stream) for stream in self.streams]

    def close(self):
        self.closed = True


class AsyncStreams(Streams):
    """The same environments, each of which answers `delay(b)` after it was asked, by a clock of its own.

    Returns the same arrays again and again, as EnvPool may.
    """

    def __init__(self, scripts, *, batch_size, least, delay):
        super().__init__(scripts)
        self.batch_size, self.least, self._delay = batch_size, least, delay
        self._sizes = np.random.default_rng(0)
        self._memory = None

    def reset(self):
        first = super().reset()
        num_envs = len(first)
        self._now, self._queue, self._asked = 0.0, [], 0
        self.given = np.full(num_envs, -1)  # results of actions, for each; -1 before the first observation
        for b in range(num_envs):
            self._ask(b, (first[b], np.float32(0), False, False, False))

    def _ask(self, b, row):
        assert all(b != other for _, _, other, _ in self._queue), f"{b} is under way"
        self._queue.append((self._now + self._delay(b), self._asked, b, row))
        self._asked += 1

    def send(self, action, env_id):
        assert 1 <= len(env_id) <= self.batch_size
        for a, b in zip(action.tolist(), env_id.tolist(), strict=True):
            self._ask(b, self.streams[b].step(a))

    def recv(self):
        assert len(self._queue) >= self.least, "would wait for ever"
        self._queue.sort()
        most = min(self.batch_size, len(self._queue))
        n = most if self.least == self.batch_size else int(self._sizes.integers(1, most + 1))
        ready, self._queue = self._queue[:n], self._queue[n:]
        self._now = ready[-1][0]
        ids = np.array([b for _, _, b, _ in ready], np.int32)
        self.given[ids] += 1
        result = (ids, self._result([row for *_, row in ready]))
        if self._memory is None:
            full = jax.tree.map(lambda x: np.zeros((self.batch_size, *x.shape[1:]), x.dtype), result)
            self._memory = jax.tree.map(_aligned, full)
        for mine, new in zip(jax.tree.leaves(self._memory), jax.tree.leaves(result)):
            mine[...] = 0
            mine[:n] = new
        return jax.tree.map(lambda x: x[:n], self._memory)


def scripts(num_envs, seed, events="....elf"):
    """Random scripts of different lengths."""
    draws = np.random.default_rng(seed)
    return ["".join(draws.choice(list(events), 17 + b)) for b in range(num_envs)]


class Expected(NamedTuple):
    """What a rollout should hold, by a Python loop over each environment's own stream; and its episodes."""

    rollout: Rollout
    ended: list[tuple[float, int]]  # return and length
    rows: np.ndarray  # [B] rows that are not padding


def expected(env_scripts, rollouts, given, actors, gamma):
    """One Expected per rollout: every stream is stepped again, with the actions of the rollouts.

    Args:
      rollouts: as collected, of which only the actions are read.
      given: [1 + len(rollouts)] of [B]: results that each environment had given before each rollout and after the last;
        -1 before its first observation.
      actors: that each rollout was ordered with.
    """
    B = len(env_scripts)
    streams = [Stream(b, script) for b, script in enumerate(env_scripts)]
    obs = [stream.begin() for stream in streams]
    memory = np.full((B, 3), INITIAL, np.float32)
    total, running, length = np.zeros(B), np.zeros(B), np.zeros(B, int)
    chosen_by = [None] * B  # the actor of the row that is under way
    for i, rollout in enumerate(rollouts):
        T = len(rollout.reward)
        action = np.asarray(rollout.action)
        zeros = lambda dtype, *more, T=T: np.zeros((T, B, *more), dtype)
        out = Rollout(
            zeros(np.float32, 3), np.zeros((B, 3), np.float32), action, zeros(np.float32), zeros(bool), zeros(bool),
            zeros(bool), given[i] >= 0,
            {"memory": zeros(np.float32, 3), "running_return": zeros(np.float32)}, {"memory": memory.copy()},
        )  # fmt: skip
        rows = np.maximum(given[i + 1], 0) - np.maximum(given[i], 0)
        ended = []
        for b in range(B):
            for t in range(rows[b]):
                actor = chosen_by[b] if t == 0 and chosen_by[b] is not None else actors[i]
                after = 0.7 * memory[b] + obs[b][0] * np.asarray(actor["w"])
                reset = streams[b].done
                out.obs[t, b], out.extras["memory"][t, b] = obs[b], after
                obs[b], out.reward[t, b], out.terminated[t, b], out.truncated[t, b], failed = streams[b].step(
                    int(action[t, b])
                )
                real = not reset and not failed
                out.mask[t, b] = real
                memory[b] = after if real else INITIAL
                if failed and not reset and t == 0:
                    out.contiguous[b] = False
                if failed and t > 0 and out.mask[t - 1, b] and not reset:
                    out.truncated[t - 1, b] = True
                if real:
                    total[b], length[b] = total[b] + out.reward[t, b], length[b] + 1
                    running[b] = out.reward[t, b] + gamma * running[b]
                    out.extras["running_return"][t, b] = running[b]
                if failed or streams[b].done:
                    if real:
                        ended.append((total[b], length[b]))
                    total[b], running[b], length[b] = 0, 0, 0
            if given[i + 1][b] >= 0:
                out.obs[rows[b] :, b] = out.last_obs[b] = obs[b]
            if rows[b] == T:
                chosen_by[b] = None
            elif rows[b] > 0 or chosen_by[b] is None:
                chosen_by[b] = actors[i] if given[i + 1][b] >= 0 else None
            if 0 < rows[b] < T and out.mask[rows[b] - 1, b] and not streams[b].done:
                out.truncated[rows[b] - 1, b] = True
        yield Expected(out.replace(count=rows.astype(np.int32)), ended, rows)
