"""Environments that number their steps and keep a plain record of what was acted on; and a cluster without Ray."""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np

from jrl.metrics import episodes
from jrl.rollout.ray_cluster import Failure
from jrl.types import Rollout

FRAMES = 2  # of a stack
OBS = {"id": jax.ShapeDtypeStruct((3,), jnp.float32), "image": jax.ShapeDtypeStruct((FRAMES, 1, 1), jnp.int32)}
ACTION = jax.ShapeDtypeStruct((), jnp.int32)
CARRY = jax.ShapeDtypeStruct((), jnp.float32)  # a memory that counts the steps of its episode


def frame(env, episode, step):
    return (env * 1000 + episode) * 100 + step


def observe(env, episode, step):
    """Its environment, its episode and the step of it; and the frames of the latest steps."""
    frames = [frame(env, episode, max(step - j, 0)) for j in range(FRAMES - 1, -1, -1)]
    return {
        "id": np.array([env, episode, step], np.float32),
        "image": np.array(frames, np.int32).reshape(FRAMES, 1, 1),
    }


class Numbered:
    """A source of T steps of B such environments; ends come at random.

    Args:
      record: (env, episode, step) -> (action, reward, terminated, truncated), which it writes.
      first: number of the first environment.
    """

    def __init__(self, record, first, *, length, num_envs=2, seed=0, ends=0.1):
        self.record, self.first, self.T, self.B, self.ends = record, first, length, num_envs, ends
        self.rng = np.random.default_rng(seed)
        self.episode, self.step = np.full((2, num_envs), 0)
        self.done = np.zeros(num_envs, bool)
        self.columns = jax.device_get(episodes.init(num_envs, 4))
        self.metrics, self.begun = {}, False

    def next(self, actor, key):
        rows = [[self._step(b) for b in range(self.B)] for _ in range(self.T)]
        stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)
        last = stack([self._observe(b) for b in range(self.B)])
        rollout = Rollout(
            last_obs=last,
            contiguous=np.full(self.B, self.begun),
            carry=(),
            **stack([stack(row) for row in rows]),
        )
        self.begun = True
        return rollout, jax.device_get(episodes.empty_report(self.columns))

    def _observe(self, b):
        return observe(self.first + b, self.episode[b], self.step[b])

    def _step(self, b):
        obs, carry, reset = self._observe(b), np.float32(self.step[b]), bool(self.done[b])
        action, reward = np.int32(self.rng.integers(1000)), np.float32(0)
        terminated = truncated = False
        if reset:
            self.episode[b], self.step[b], self.done[b] = self.episode[b] + 1, 0, False
        else:
            draw, reward = self.rng.random(), np.float32(action / 7)
            terminated, truncated = draw < self.ends / 2, self.ends / 2 <= draw < self.ends
            place = (self.first + b, int(self.episode[b]), int(self.step[b]))
            assert place not in self.record
            self.record[place] = (action, reward, terminated, truncated)
            self.step[b] += 1
            self.done[b] = terminated or truncated
        flags = {"terminated": np.bool_(terminated), "truncated": np.bool_(truncated), "mask": np.bool_(not reset)}
        return {"obs": obs, "action": action, "reward": reward, "extras": {"carry": carry}, **flags}

    def reset(self, key):
        """New episodes; those under way break off."""
        self.episode, self.step, self.begun = self.episode + 1, np.zeros_like(self.step), False
        self.done[:] = False

    def close(self):
        pass


def like(length, num_envs=2):
    """Shapes of the rollouts."""
    rollout, _ = Numbered({}, 0, length=length, num_envs=num_envs).next(None, None)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rollout)


def checked_transitions(record, batch, gamma, n_step):
    """Holds every transition of weight above 0 against the record; returns how many steps each spans."""
    spans = []
    for i in np.flatnonzero(batch.weight > 0):
        take = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree)
        obs, after = take(batch.obs), take(batch.next_obs)
        (env, episode, step), (env_after, episode_after, step_after) = (o["id"].astype(int) for o in (obs, after))
        assert (env, episode) == (env_after, episode_after)
        steps = step_after - step
        assert 1 <= steps <= n_step
        jax.tree.map(
            np.testing.assert_array_equal,
            (obs, after),
            (observe(env, episode, step), observe(*after["id"].astype(int))),
        )
        rows = [record[env, episode, step + k] for k in range(steps)]
        assert batch.action[i] == rows[0][0]
        np.testing.assert_allclose(batch.reward[i], sum(gamma**k * row[1] for k, row in enumerate(rows)), rtol=1e-5)
        assert not any(row[2] or row[3] for row in rows[:-1])
        np.testing.assert_allclose(batch.discount[i], 0.0 if rows[-1][2] else gamma**steps, rtol=1e-6)
        spans.append(steps)
    return spans


def checked_sequences(record, sample, burn_in):
    """Holds every step of weight above 0 against the record, with the memory that the network would have there."""
    seen, ids = 0, sample.window.obs["id"].astype(int)
    for n in range(len(ids)):
        memory = sample.window.carry[n]
        for t, place in enumerate(map(tuple, ids[n, :-1])):
            if t >= burn_in and sample.weight[n, t - burn_in] > 0:
                seen += 1
                row = record[place]
                assert memory == place[2], "the memory is not that of the episode"
                assert sample.action[n, t - burn_in] == row[0]
                ahead = ids[n, burn_in + sample.ahead[n, t - burn_in]]
                assert tuple(ahead[:2]) == place[:2]
                assert ahead[2] > place[2]
            memory = 0 if sample.window.reset[n, t] else memory + 1
    return seen


class Cluster:
    """Takes the place of `ray_cluster.Cluster`: runners in this process, and a clock that goes as their work takes.

    Args:
      seconds: index -> of one rollout, or a function of its number.
      dies: index -> the number of the rollout in which the runner ends, once.
    """

    def __init__(self, seconds, dies=None):
        self.now, self.seconds, self.dies = 0.0, seconds, dict(dies or {})
        self.busy = collections.Counter()  # until when each runner works
        self.done, self.answers = {}, {}

    def __call__(self, ray, options, host, store):
        self.host = host
        return self

    def start(self, index, make, _, restarts, *given):
        host, ref = self.host(make, index, restarts, *given), object()
        self.done[ref], self.answers[ref] = self.now, None
        self.busy[index] = self.now

        def next(actor, key, impl, number):
            ref = object()
            made = host._source.made = getattr(host._source, "made", -1) + 1
            took = self.seconds[index](made) if callable(self.seconds[index]) else self.seconds[index]
            self.busy[index] = max(self.busy[index], self.now) + took
            self.done[ref] = self.busy[index]
            if restarts == 0 and self.dies.get(index) == made:
                self.answers[ref] = Failure("it was killed")
            else:
                self.answers[ref] = (*host._source.next(None, None), host._source.columns, {})
            return ref

        return types.SimpleNamespace(next=types.SimpleNamespace(remote=next)), ref

    def put(self, value):
        return value

    def wait(self, refs, seconds):
        if not refs or (seconds == 0 and min(self.done[ref] for ref in refs) > self.now):
            return None
        self.now = max(self.now, min(self.done[ref] for ref in refs))
        return next(i for i, ref in enumerate(refs) if self.done[ref] <= self.now)

    def get(self, ref):
        if isinstance(answer := self.answers.pop(ref), Exception):
            raise answer
        return answer

    def kill(self, actor):
        pass

    def close(self, actors, idle):
        pass
