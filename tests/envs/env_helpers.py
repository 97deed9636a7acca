"""What the tests of environments share: one way to step every kind, and two tiny Gymnasium environments."""

import functools
from typing import Any, ClassVar, NamedTuple

import gymnasium
import jax
import numpy as np

from jrl import envs, spaces
from jrl.types import Box, Discrete, JaxEnv, MultiBinary, MultiDiscrete, StepResult

KINDS: dict[str, dict[str, Any]] = {
    "jax": {"backend": "jax"},
    "program": {"backend": "envpool"},  # EnvPool inside a jitted program
    "host": {"backend": "envpool", "host": True},
    "gymnasium": {"backend": "gymnasium"},
    "workers": {"backend": "gymnasium", "remote_worker_envs": True},
    # these do not wait for each other; `Stepper` waits for all
    "ready_host": {"backend": "envpool", "batch_size": 2},
    "ready_workers": {"backend": "gymnasium", "remote_worker_envs": True, "batch_wait_ms": 0.0},
}


def make(id: str, kind: str, *, num_envs: int = 4, seed: int = 0, options: dict | None = None, **kwargs: Any) -> Any:
    settings = dict(KINDS[kind])
    if "batch_size" in settings:
        settings["batch_size"] = 2 if num_envs % 2 == 0 else 1  # what `Stepper` waits for comes in whole batches
    return envs.make(id, num_envs=num_envs, seed=seed, options=options, **settings, **kwargs)


def jitted(task):
    """A definition whose functions are one program each."""
    names = [name for name in ("reset", "step", "observe", "view") if getattr(task, name, None) is not None]
    return task._replace(**{name: jax.jit(getattr(task, name)) for name in names})


class Stepper:
    """Steps any environment with numpy in and numpy out; an environment written in JAX as a jitted program."""

    def __init__(self, env: Any, seed: int = 0):
        self.env, self.spec, self._key, self._count = env, env.spec, jax.random.key(seed), 0
        self.graph, self.ready = isinstance(env, JaxEnv), hasattr(env, "recv")
        if self.graph:
            self._step = jax.jit(env.step)
            self._reset = jax.jit(env.reset) if env.pure else env.reset

    def _next_key(self) -> jax.Array:
        self._count += 1
        return jax.random.fold_in(self._key, self._count)

    def reset(self) -> Any:
        if self.ready:
            self.env.reset()
            return self._all().obs
        if not self.graph:
            return self.env.reset()
        self._state, obs = self._reset(self._next_key())
        return jax.tree.map(np.array, obs)

    def step(self, action: Any) -> StepResult:
        if self.ready:
            self.env.send(action, np.arange(self.spec.num_envs, dtype=np.int32))
            return self._all()
        if not self.graph:
            return self.env.step(action)
        self._state, result = self._step(self._state, action, self._next_key())
        return jax.tree.map(np.array, result)

    def _all(self) -> StepResult:
        """The results of all, which are under way, in order."""
        parts: list[Any] = []
        while sum(len(ids) for ids, _ in parts) < self.spec.num_envs:
            ids, result = self.env.recv()
            assert ids.dtype == np.int32 and 1 <= len(ids) <= self.env.batch_size
            assert all(len(x) == len(ids) for x in jax.tree.leaves(result))
            parts.append((ids, result))
        order = np.concatenate([ids for ids, _ in parts])
        assert sorted(order) == list(range(self.spec.num_envs))
        return jax.tree.map(lambda *x: np.concatenate(x)[np.argsort(order)], *[result for _, result in parts])


class Trajectory(NamedTuple):
    first: Any  # [B, *]
    obs: Any  # [T, B, *], after each step
    reward: np.ndarray  # [T, B]
    terminated: np.ndarray  # [T, B]
    truncated: np.ndarray  # [T, B]
    failed: np.ndarray | None = None  # [T, B]

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated

    @property
    def reset_row(self) -> np.ndarray:
        """[T, B], the rows after an end."""
        return np.concatenate([np.zeros_like(self.done[:1]), self.done[:-1]])


@functools.cache
def _jax_stepper(id: str, num_envs: int, options: tuple) -> Stepper:
    """Environments written in JAX hold no state: one compilation serves every test."""
    return Stepper(make(id, "jax", num_envs=num_envs, options=dict(options)))


def run(
    id: str, kind: str, actions: np.ndarray, *, seed: int = 0, options: dict | None = None, **kwargs: Any
) -> Trajectory:
    """Steps `actions` [T, B, *] from a reset."""
    num_envs = actions.shape[1]
    if kind == "jax":
        stepper = _jax_stepper(id, num_envs, tuple(sorted((options or {}).items())))
        stepper._key, stepper._count = jax.random.key(seed), 0
    else:
        stepper = Stepper(make(id, kind, num_envs=num_envs, seed=seed, options=options, **kwargs))
    try:
        first = stepper.reset()
        rows = [stepper.step(a) for a in actions]
    finally:
        stepper.env.close()
    stacked = lambda column: jax.tree.map(lambda *x: np.stack(x), *column)
    return Trajectory(
        first, *(None if column[0] is None else stacked(column) for column in zip(*(row[:5] for row in rows)))
    )


def assert_same(a: Any, b: Any) -> None:
    """Structures, dtypes, shapes and numbers."""
    assert jax.tree.structure(a) == jax.tree.structure(b), (a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_array_equal(x, y, strict=True)


def random_actions(space: Any, steps: int, num_envs: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return spaces.map_leaves(lambda leaf: _random(leaf, steps, num_envs, rng), space)


def _random(space: Any, steps: int, num_envs: int, rng: Any) -> np.ndarray:
    shape = (steps, num_envs, *space.shape)
    if isinstance(space, Discrete):
        return rng.integers(0, space.n, shape).astype(np.int32)
    if isinstance(space, MultiDiscrete | MultiBinary):
        return rng.integers(0, getattr(space, "nvec", 2), shape).astype(space.dtype)
    assert isinstance(space, Box)
    low, high = space.bounds()
    assert np.isfinite(low).all() and np.isfinite(high).all()
    return rng.uniform(low, high, shape).astype(np.float32)


def kolmogorov_smirnov(a: np.ndarray, b: np.ndarray) -> float:
    """The largest distance between two empirical distributions."""
    points = np.sort(np.concatenate([a, b]))
    share = lambda x: np.searchsorted(np.sort(x), points, side="right") / len(x)
    return np.abs(share(a) - share(b)).max()


class Countdown(gymnasium.Env):
    """Shows how many steps are left of `start`, then ends; the reward is what is left. Remembers its options."""

    made: ClassVar[list[dict]] = []

    def __init__(self, start: int = 3, render_mode: str | None = None):
        Countdown.made.append({"start": start})
        self.observation_space = gymnasium.spaces.Box(0, start, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.start, self.left = start, start

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.left = self.start
        return np.full(1, self.left, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.full(1, self.left, np.float32), float(self.left), self.left == 0, False, {}


class Spaces(gymnasium.Env):
    """Any spaces at all; steps for ever, observing samples."""

    def __init__(self, observation: Any = None, action: Any = None):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,)) if observation is None else observation
        self.action_space = gymnasium.spaces.Discrete(2) if action is None else action
        self.last = None

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 0.0, False, False, {}
