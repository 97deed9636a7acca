"""Check of an environment against its own spaces and the contract, by stepping it with random actions.

report = check_env("my_package.my_module:MyEnv", options={"size": 9})
assert report.ok, report.problems
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import registry
from jrl.envs.backends import resolve
from jrl.envs.check_values import (
    Findings,
    Watch,
    choices,
    described,
    look_at_columns,
    look_at_mask,
    look_at_rest,
    look_at_row,
    look_at_turns,
    place,
)
from jrl.envs.context import OnFailure
from jrl.envs.jax_env import Definition
from jrl.envs.make import make
from jrl.envs.multi_agent import MultiDefinition
from jrl.errors import counted
from jrl.host import room
from jrl.spaces import by_kind, leaves, map_leaves, masks_actions, num_bytes, of_kinds, of_leaves, split_mask
from jrl.types import (
    Box,
    Discrete,
    EnvSpec,
    InputError,
    JaxEnv,
    Leaf,
    MultiDiscrete,
    PyTree,
    Several,
    Space,
    StepResult,
)

_SLOW_S = 1e-4  # of a step, from which on a process of its own pays: see docs/environments.md
_UNEVEN, _UNEVEN_S = 10.0, 1e-3  # a step that holds up the others: so many medians, and so many seconds


class Report(NamedTuple):
    """Findings of `check_env`; each entry is a sentence that names what is wrong and the mend."""

    problems: list[str]  # learning from this environment would be wrong, or fail
    notes: list[str]  # worth knowing

    @property
    def ok(self) -> bool:
        """Returns whether there are no problems."""
        return not self.problems


def check_env(
    env: str | type | Callable[..., Any] | Definition | MultiDefinition,
    *,
    backend: str = "auto",
    options: Mapping[str, Any] | None = None,
    steps: int = 200,
    num_envs: int = 2,
    seed: int = 0,
    action_mask_info: str | None = None,
) -> Report:
    """Steps an environment three times: twice with one seed, and once with another.

    Looked at are the spaces; shape, dtype, bounds and finiteness of observations, each array of them; whether an action
    mask always allows an action, of which only allowed ones are tried; rewards and the flags of ends; what follows an
    end; whether a seed gives one stream and another seed another; exceptions; how long steps take. What a
    Gymnasium environment returns is looked at before it is converted, and so is what one of several agents does: who is
    there, who has ended, and whether each dict has the agents that it should have.

    Args:
      env: what `env.id` names, or the class, creator or `jrl.envs.jax_env.Definition` itself.
      backend, options: as in a config.
      steps: of each environment and stream, resets included.
      num_envs: stepped side by side.
      seed: of the environments and the random actions.
      action_mask_info: as in a config.
    Returns:
      What was found. An environment that cannot be made is a problem, too.
    Raises:
      InputError: an environment in the place of what makes one, or numbers below 1.
    """
    if steps < 1 or num_envs < 1:
        raise InputError(f"check_env: expected at least 1 step and 1 environment, got {steps} and {num_envs}")
    if not isinstance(env, str | type | Definition | MultiDefinition) and (hasattr(env, "step") or not callable(env)):
        raise InputError(f"check_env: expected an id, a class or a function that makes environments, got {env!r}")
    found = Findings()
    made: dict[str, Any] = {"backend": backend, "options": dict(options or {}), "action_mask_info": action_mask_info}
    runs = _Runs(registry.reference(env), made, steps, num_envs, seed, found)
    try:
        first = runs.stream(seed)
        if first is not None:
            _compare(first, runs.stream(seed), runs.stream(seed + 1), runs.backend, found)
            _contract(first, found)
            _ends(first, runs.limit, found)
            _speed(runs.seconds, found)
    finally:
        runs.close()
    return Report(found.problems, found.notes)


class _Stream(NamedTuple):
    obs: PyTree  # [T + 1, B, *], the first from the reset
    reward: np.ndarray  # [T, B]
    done: np.ndarray  # [T, B], terminated or truncated
    kinds: tuple[tuple[int, ...], ...] = ()  # of agents: observations are by kind


# ---------------------------------------------------------------- stepping


class _Runs:
    """The same environments, stepped with the same actions from several seeds."""

    def __init__(self, id: str, made: dict[str, Any], steps: int, num_envs: int, seed: int, found: Findings):
        self._id, self._steps, self._num_envs, self._seed, self._found = id, steps, num_envs, seed, found
        # actions reach the environment as those of a policy do: scaled in float32, and clipped
        own: dict[str, Any] = {"normalize_actions": True, "clip_actions": True, "host": True}
        own["on_failure"] = OnFailure(check_steps=0)
        self._make = functools.partial(make, id, num_envs=num_envs, **made, **own)
        self._asked, self.backend = made["backend"], ""
        self.limit: int | None = None
        self.seconds: list[float] = []  # of each step and reset of the first stream, where they can be told apart
        self._graph: Any = None
        self._open: Any = None

    def stream(self, seed: int) -> _Stream | None:
        """Steps the environments; None where they could not be stepped to the end: the reason is in the findings."""
        env = self._graph or self._made(seed)
        if env is None:
            return None
        self.limit = env.spec.max_episode_steps
        if not self._fits(env.spec):
            self.close()
            return None
        watched, watches = False, list[Watch]()
        if env.spec.agents and self.backend == "gymnasium":
            watched = True  # games look at what they get, agent by agent
            for game in env.games:
                game.found = self._found.add
        elif self.backend == "gymnasium":
            watches = [Watch(i, raw, self._found) for i, raw in enumerate(env.foreach_env(lambda raw: raw))]
            watched = all(w.attached for w in watches)
        before = len(self._found)
        precision = getattr(env, "precision", None)
        try:
            stream = self._stepped(env, seed, looked_at=watched)
            if watched and env.spec.agents and seed == self._seed and (turns := env.games[0].turns) is not None:
                look_at_turns(self._found, turns, self._steps, seed)  # of which a parallel environment was made
        except Exception as e:  # the user's environment: whatever it raises is a finding
            if len(self._found) == before:  # it is not a consequence of what was found
                self._found.problem("step", f"{self._id} cannot be stepped: {described(e)}")
            return None
        finally:
            if not isinstance(env, JaxEnv):
                self.close()
        for message in precision.messages() if precision is not None else ():
            self._found.note(message, message)
        if watched and not self.seconds:
            self.seconds = [s for w in watches for s in w.seconds]
        return stream

    def _fits(self, spec: EnvSpec) -> bool:
        """Returns whether three streams fit the memory, and the steps of one before they are put together."""
        each = by_kind(spec)
        one = sum(kind.num_envs * num_bytes(kind.observation) for kind in each) // spec.num_envs
        free = room.host_available()
        needed = 4 * (self._steps + 1) * spec.num_envs * one
        if free is None or needed <= room.SHARE * free:
            return True
        most = int(room.SHARE * free / (4 * spec.num_envs * one)) - 1
        self._found.problem(
            "memory",
            f"an observation takes {room.words(one)}: {counted(self._steps, 'step')} x "
            f"{counted(self._num_envs, 'environment')} take {room.words(needed)}, but "
            f"{room.words(free)} are free: make it smaller"
            + (f", or look at {counted(most, 'step', ',')} at most" if most > 0 else ""),
        )
        return False

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        try:
            opened.close()
        except Exception as e:  # as above
            self._found.problem("close", f"close() raises {described(e)}: mend it")

    def _made(self, seed: int) -> Any:
        try:
            self.backend = resolve(self._id, self._asked)
            self._open = env = self._make(seed=seed)
        except InputError as e:
            for text in e.errors:  # of a function that jax traced, with the user's frames
                line = "; ".join(part.strip() for part in text.splitlines())
                self._found.problem(line, line)
            return None
        except Exception as e:  # as above
            self._found.problem("make", f"{self._id} cannot be made: {described(e)}: mend it, or give the options")
            return None
        if isinstance(env, JaxEnv):
            self._graph = env._replace(step=jax.jit(env.step), reset=jax.jit(env.reset))  # compiled once
            return self._graph
        return env

    def _stepped(self, env: Any, seed: int, *, looked_at: bool) -> _Stream:
        spec: EnvSpec = env.spec
        each = by_kind(spec)
        parts = lambda tree: tree if spec.kinds else (tree,)
        drawn = [_random_actions(one.action, self._steps, one.num_envs, self._seed) for one in each]
        actions = tuple(drawn) if spec.kinds else drawn[0]
        key, state, in_jax = jax.random.key(seed), None, isinstance(env, JaxEnv)
        if in_jax:
            state, first = env.reset(key)
        else:
            first = env.reset()
        obs, rewards, done, told = [jax.tree.map(np.array, first)], [], [], list[Several]()

        def look(where: str, seen: PyTree, result: StepResult | None = None) -> None:
            for one, own in zip(each, parts(seen), strict=True):
                look_at_row(self._found, one.observation, one.num_envs, where, own)
            if result is not None:
                look_at_rest(self._found, spec.num_envs, where, result)

        def allowed(where: str, seen: PyTree, done: np.ndarray) -> list[np.ndarray | None]:
            rows = zip(each, parts(seen), of_kinds(spec.kinds, done), strict=True)
            return [self._mask(where, *row) if masks_actions(row[0]) else None for row in rows]

        if not looked_at:
            look("reset", obs[0])
        mask = allowed("reset", obs[0], np.zeros(spec.num_envs, bool))
        for t in range(self._steps):
            action = jax.tree.map(lambda x: x[t], actions)  # noqa: B023  called at once
            rows = zip(each, parts(action), mask, strict=True)
            chosen = [own if m is None else _allowed(one.action, own, m) for one, own, m in rows]
            action = tuple(chosen) if spec.kinds else chosen[0]
            if in_jax:
                state, result = env.step(state, action, jax.random.fold_in(key, t + 1))
            else:
                result = env.step(action)
            result = jax.tree.map(np.array, result)  # copies; `failed` may be None
            if not looked_at:
                look(f"step {t + 1}", result.obs, result)
            obs.append(result.obs)
            rewards.append(np.asarray(result.reward))
            done.append(np.asarray(result.terminated) | np.asarray(result.truncated))
            if result.several is not None:
                told.append(result.several)
            idle = done[-1] if result.several is None else done[-1] | result.several.absent
            mask = allowed(f"step {t + 1}", result.obs, idle)
        if told:
            absent, over = (np.stack(x) for x in zip(*((one.absent, one.over) for one in told)))
            look_at_columns(self._found, spec.agents, np.stack(rewards), np.stack(done), absent, over)
        return _Stream(jax.tree.map(lambda *x: np.stack(x), *obs), np.stack(rewards), np.stack(done), spec.kinds)

    def _mask(self, where: str, spec: EnvSpec, obs: PyTree, done: np.ndarray) -> np.ndarray:
        mask = split_mask(spec.observation, obs)[1]
        assert isinstance(mask, np.ndarray)
        look_at_mask(self._found, spec.action, where, mask, done)
        return mask


def _random_actions(space: Space, steps: int, num_envs: int, seed: int) -> PyTree:
    """Draws actions [T, B, *] of the space that a policy acts in.

    A Box's are uniform and reach beyond its bounds, as a policy's do, so that the environment gets its extreme actions:
    the lowest of all elements in step 1, the highest in step 2. They are normal where a bound is infinite.
    """
    rng = np.random.default_rng(seed)
    return map_leaves(lambda leaf: _random(leaf, rng, (steps, num_envs, *leaf.shape)), space)


def _random(space: Leaf, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if isinstance(space, Box):
        low, high = space.bounds()
        bounded = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(bounded, low, 0.0), np.where(bounded, high, 0.0)
        low, high = low - (high - low) / 8, high + (high - low) / 8
        drawn = np.where(bounded, rng.uniform(low, high, shape), rng.normal(size=shape))
        drawn[:1], drawn[1:2] = np.where(bounded, low, drawn[:1]), np.where(bounded, high, drawn[1:2])
        return drawn.astype(space.dtype)
    sizes = space.n if isinstance(space, Discrete) else np.asarray(getattr(space, "nvec", 2))
    return rng.integers(0, sizes, shape).astype(space.dtype)


def _allowed(space: Space, action: PyTree, mask: np.ndarray) -> PyTree:
    """Returns the actions, each choice replaced by the next one that `mask` [B, K] allows, if any."""
    sizes = iter(choices(space))
    at = 0

    def moved(leaf: Leaf, x: np.ndarray) -> np.ndarray:
        nonlocal at
        if not isinstance(leaf, Discrete | MultiDiscrete):
            return x
        columns = []
        for column in x.reshape(len(x), -1).T:
            size = next(sizes)[1]
            order = (column[:, None] + np.arange(size)) % size  # [B, size], what is asked first
            allowed = np.take_along_axis(mask[:, at : at + size], order, axis=-1)
            columns.append(order[np.arange(len(x)), allowed.argmax(axis=-1)])
            at += size
        return np.stack(columns, -1).reshape(x.shape).astype(x.dtype)

    parts = [moved(leaf, x) for (_, leaf), x in zip(leaves(space), jax.tree.leaves(action))]
    return of_leaves(space, parts)


# ---------------------------------------------------------------- looking at whole streams

_RANDOMNESS = {
    "gymnasium": "draw from self.np_random, which super().reset(seed=seed) seeds; share nothing between environments",
    "jax": "draw from `draws` only, with no Python state",
    "envpool": "its results depend on more than its seed; runs cannot be repeated",
}


def _compare(first: _Stream, again: _Stream | None, other: _Stream | None, backend: str, found: Findings) -> None:
    if again is not None:
        step = _first_difference(first, again)
        if step is not None:
            where = "the first reset" if step == 0 else f"step {step}"
            message = f"the same seed and actions gave another stream, from {where} on"
            found.problem("seed twice", f"{message}: {_RANDOMNESS[backend]}")
    if other is not None and _first_difference(first, other) is None:
        found.note(
            "other seed",
            "another seed gives the same stream: nothing is random, or reset does not pass its seed on",
        )


def _first_difference(a: _Stream, b: _Stream) -> int | None:
    """Returns the first step whose results differ, 0 for the reset; None where none does."""
    for t in range(len(a.reward) + 1):
        rows = zip(jax.tree.leaves(a.obs), jax.tree.leaves(b.obs))
        same = all(_equal(x[t], y[t]) for x, y in rows)
        if t and same:
            same = _equal(a.reward[t - 1], b.reward[t - 1]) and _equal(a.done[t - 1], b.done[t - 1])
        if not same:
            return t
    return None


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.floating))


def _contract(stream: _Stream, found: Findings) -> None:
    """Checks the step after an end: it has reward 0 and no end, and another observation than the final one."""
    after = np.zeros_like(stream.done)
    after[1:] = stream.done[:-1]
    wrong = after & (stream.done | (stream.reward != 0))
    if wrong.any():
        t, i = place(wrong)
        found.problem(
            "contract",
            f"step {t + 1} of environment {i} follows an end, but has reward {stream.reward[t, i]:g} and "
            f"{'an' if stream.done[t, i] else 'no'} end: environments reset on the step after an end, with reward 0 "
            "and no end (see jrl.types.StepResult)",
        )
    own = of_kinds(stream.kinds, after, 1)
    moved = [np.zeros_like(x) for x in own]
    for i, seen in enumerate(stream.obs if stream.kinds else (stream.obs,)):
        for x in jax.tree.leaves(seen):
            moved[i] |= (x[1:] != x[:-1]).reshape(*own[i].shape, -1).any(axis=-1)
    changed, fresh = np.concatenate(moved, 1), np.concatenate(own, 1)
    if after.any() and not changed[fresh].any() and changed[~fresh].any():
        found.note(
            "final observation",
            "the last observation of each episode is also the first of the next: if the environment resets itself, "
            "let it return the true final observation, from which the value after a time limit is estimated",
        )


def _ends(stream: _Stream, limit: int | None, found: Findings) -> None:
    if not stream.done.any() and limit is None:
        found.note(
            "no end",
            f"no episode ended within {len(stream.done)} steps, and no time limit is known: if episodes should end, "
            "set env.horizon; an episode without an end is in no statistics of returns",
        )


def _speed(seconds: list[float], found: Findings) -> None:
    if not seconds:
        return
    median = float(np.median(seconds))
    bound = max(_UNEVEN * median, _UNEVEN_S)
    slow = [s for s in seconds if s > bound]
    if len(slow) >= 2 and len(slow) >= 0.01 * len(seconds):
        found.note(
            "uneven",
            f"{len(slow)} of {len(seconds)} steps and resets take {1e3 * float(np.mean(slow)):.2g} ms, most "
            f"{1e3 * median:.2g} ms: all wait for the slowest, unless env.remote_worker_envs and env.batch_wait_ms are "
            "set",
        )
    if median > _SLOW_S:
        found.note(
            "slow",
            f"a step takes {1e3 * median:.2g} ms: with env.remote_worker_envs each environment has a process of its "
            "own, which pays where cores are idle",
        )
