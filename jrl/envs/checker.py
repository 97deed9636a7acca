"""Check of an environment against its spaces and the contract, by stepping it with random actions.

report = check_env("my_package.my_module:MyEnv", options={"size": 9})
assert report.ok, report.problems
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import registry
from jrl.envs.backends import resolve
from jrl.envs.context import OnFailure
from jrl.envs.jax_env import Definition
from jrl.envs.make import make
from jrl.envs.multi_agent import MultiDefinition
from jrl.errors import counted
from jrl.gym import space_kind
from jrl.gym.exceptions import describe, is_environment_error
from jrl.gym.faults import (
    Breach,
    Fault,
    check_observation,
    check_reset,
    check_reward,
    check_step,
    describe_time,
    fault,
    find_first,
    reset_accepts,
)
from jrl.host import machine
from jrl.spaces import (
    ACTION_MASK,
    by_kind,
    from_leaves,
    leaves,
    masks_actions,
    num_bytes,
    split_by_kind,
    split_mask,
)
from jrl.types import (
    Box,
    Discrete,
    EnvSpec,
    InputError,
    JaxEnv,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    PyTree,
    Several,
    Space,
    StepResult,
)

_SLOW_S = 1e-4  # step time from which worker processes pay off: see docs/environments.md
_UNEVEN, _UNEVEN_S = 10.0, 1e-3  # a slow step takes more than so many medians, and so many seconds
_RANDOMNESS = {
    "gymnasium": "draw from self.np_random, which super().reset(seed=seed) seeds; share nothing between environments",
    "jax": "draw from `draws` only, without Python state",
    "envpool": "its results depend on more than its seed; runs cannot be repeated",
}


class Report(NamedTuple):
    """Findings of `check_env`; each entry is a sentence with the fault and its fix."""

    problems: list[str]  # learning would be wrong, or fail
    notes: list[str]  # further observations

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


class Findings:
    """The first fault of each name, so that a fault in every step is reported once."""

    def __init__(self) -> None:
        self._faults: dict[str, Fault] = {}

    def add(self, *faults: Fault) -> None:
        for new in faults:
            self._faults.setdefault(new.name, new)

    def __len__(self) -> int:
        return len(self._faults)

    def report(self) -> Report:
        found = self._faults.values()
        problems, notes = ([f.message for f in found if f.is_note == is_note] for is_note in (False, True))
        return Report(problems, notes)


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
    """Step an environment three times: twice with one seed, once with another; return the faults.

    Checked are the spaces; shape, dtype, bounds and finiteness of all observation arrays; action masks (only valid
    actions are tried); rewards and end flags; the step after an end; reproducibility by seed; exceptions; step times.
    Results of Gymnasium environments are checked before conversion. With several agents, so are the lists of agents,
    their ends, and the keys of each dict.

    Args:
      env: value of `env.id`, or the class, creator or `jrl.envs.jax_env.Definition` itself.
      backend, options: as in a config.
      steps: steps per environment and seed, resets included.
      num_envs: number of environments.
      seed: seed of the environments and the random actions.
      action_mask_info: as in a config.
    Returns:
      The findings. An environment that cannot be made is a problem, too.
    Raises:
      InputError: `env` is an environment instance, or a number is below 1.
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
            found.add(*_check_seeds(first, runs.stream(seed), runs.stream(seed + 1), runs.backend))
            found.add(*_check_ends(first, runs.limit))
            found.add(*_check_speed(runs.seconds))
    finally:
        runs.close()
    return found.report()


class _Stream(NamedTuple):
    obs: PyTree  # [T + 1, B, *], including the reset
    reward: np.ndarray  # [T, B]
    done: np.ndarray  # [T, B], terminated or truncated
    kinds: tuple[tuple[int, ...], ...] = ()  # agent kinds; observations are by kind


# ---------------------------------------------------------------- stepping


class _Runs:
    """The same environments, stepped with the same actions from several seeds."""

    def __init__(self, id: str, made: dict[str, Any], steps: int, num_envs: int, seed: int, found: Findings):
        self._id, self._steps, self._num_envs, self._seed, self._found = id, steps, num_envs, seed, found
        # as a policy's actions: scaled in float32, and clipped
        settings: dict[str, Any] = {"normalize_actions": True, "clip_actions": True, "host": True}
        settings["on_failure"] = OnFailure(check_steps=0)
        self._make = functools.partial(make, id, num_envs=num_envs, **made, **settings)
        self._backend_option, self.backend = made["backend"], ""
        self.limit: int | None = None
        self.seconds: list[float] = []  # times of each step and reset of the first stream, if measured
        self._jitted: Any = None
        self._open: Any = None

    def stream(self, seed: int) -> _Stream | None:
        """Step the environments; None: they failed, and the reason is in the findings."""
        env = self._jitted or self._make_env(seed)
        if env is None:
            return None
        self.limit = env.spec.max_episode_steps
        if (large := self._too_large(env.spec)) is not None:
            self._found.add(large)
            self.close()
            return None
        watches, checks_itself = list[_Watch](), False
        if env.spec.agents and self.backend == "gymnasium":
            checks_itself = True  # games check their results themselves, agent by agent
            for game in env.games:
                game.on_fault = self._found.add
        elif self.backend == "gymnasium":
            watches = [_Watch(i, raw, self._found) for i, raw in enumerate(env.foreach_env(lambda raw: raw))]
            checks_itself = all(w.is_attached for w in watches)
        before = len(self._found)
        try:
            stream = self._step_all(env, seed, checks_itself)
            if checks_itself and env.spec.agents and seed == self._seed and (turns := env.games[0].turns) is not None:
                _play_turns(self._found, turns, self._steps, seed)  # the AECEnv behind a parallel one
        except Exception as e:  # a user's environment can raise anything
            if len(self._found) == before:  # otherwise a consequence of an earlier finding
                self._found.add(fault("cannot step", id=self._id, error=describe(e)))
            return None
        finally:
            if not isinstance(env, JaxEnv):
                self.close()
        precision = getattr(env, "precision", None)
        lost = precision.messages() if precision is not None else ()
        self._found.add(*(Fault(text, text, is_note=True) for text in lost))
        if checks_itself and not self.seconds:
            self.seconds = [s for w in watches for s in w.seconds]
        return stream

    def _too_large(self, spec: EnvSpec) -> Fault | None:
        """Return the fault of observations that exceed the memory; None: they fit.

        Three streams are kept, and the steps of one stream exist twice while they are stacked.
        """
        one = sum(part.num_envs * num_bytes(part.observation) for part in by_kind(spec)) // spec.num_envs
        free = machine.free_bytes()
        needed = 4 * (self._steps + 1) * spec.num_envs * one
        if free is None or needed <= machine.SHARE * free:
            return None
        most = int(machine.SHARE * free / (4 * spec.num_envs * one)) - 1
        fix = "make it smaller" + (f", or use at most {counted(most, 'step', ',')}" if most > 0 else "")
        sizes = {
            "got": machine.format_bytes(one),
            "needed": machine.format_bytes(needed),
            "free": machine.format_bytes(free),
        }
        steps, envs = counted(self._steps, "step"), counted(self._num_envs, "environment")
        return fault("memory", steps=steps, envs=envs, fix=fix, **sizes)

    def close(self) -> None:
        opened, self._open = self._open, None
        try:
            if opened is not None:
                opened.close()
        except Exception as e:  # a user's environment can raise anything
            self._found.add(fault("close", error=describe(e)))

    def _make_env(self, seed: int) -> Any:
        try:
            self.backend = resolve(self._id, self._backend_option)
            self._open = env = self._make(seed=seed)
        except InputError as e:
            lines = (
                "; ".join(part.strip() for part in text.splitlines()) for text in e.errors
            )  # texts with users' frames have several lines
            self._found.add(*(Fault(line, line) for line in lines))
            return None
        except Exception as e:  # a user's environment can raise anything
            self._found.add(fault("make", id=self._id, error=describe(e)))
            return None
        if isinstance(env, JaxEnv):
            self._jitted = env = env._replace(
                step=jax.jit(env.step), reset=jax.jit(env.reset)
            )  # compile once for all streams
        return env

    def _step_all(self, env: Any, seed: int, checks_itself: bool) -> _Stream:
        spec: EnvSpec = env.spec
        each = by_kind(spec)
        parts = lambda tree: tree if spec.kinds else (tree,)
        rng = np.random.default_rng(self._seed)
        key, in_jax = jax.random.key(seed), isinstance(env, JaxEnv)
        state, first = env.reset(key) if in_jax else (None, env.reset())
        obs, rewards, done, several = [jax.tree.map(np.array, first)], [], [], list[Several]()

        def check(where: str, seen: PyTree, idle: np.ndarray, result: StepResult | None) -> list[np.ndarray | None]:
            """Check a result; return the masks of the next actions, by kind."""
            rows = list(zip(each, parts(seen), split_by_kind(spec.kinds, idle), strict=True))
            if not checks_itself:
                for kind, own_obs, _ in rows:
                    self._found.add(*check_observation("observation", kind.observation, own_obs, where, kind.num_envs))
                if result is not None:
                    self._found.add(*_check_batch(spec.num_envs, where, result))
            masks: list[np.ndarray | None] = []
            for kind, own_obs, own_idle in rows:
                mask = split_mask(kind.observation, own_obs)[1] if masks_actions(kind) else None
                if mask is not None:
                    self._found.add(*_check_mask(kind.action, where, np.asarray(mask), own_idle))
                masks.append(None if mask is None else np.asarray(mask))
            return masks

        mask = check("reset", obs[0], np.zeros(spec.num_envs, bool), None)
        for t in range(self._steps):
            chosen = [_random_action(kind.action, rng, kind.num_envs, t, m) for kind, m in zip(each, mask, strict=True)]
            action = tuple(chosen) if spec.kinds else chosen[0]
            if in_jax:
                state, result = env.step(state, action, jax.random.fold_in(key, t + 1))
            else:
                result = env.step(action)
            result = jax.tree.map(np.array, result)  # copies; `failed` may be None
            obs.append(result.obs)
            rewards.append(np.asarray(result.reward))
            done.append(np.asarray(result.terminated) | np.asarray(result.truncated))
            if result.several is not None:
                several.append(result.several)
            idle = done[-1] if result.several is None else done[-1] | result.several.absent
            mask = check(f"step {t + 1}", result.obs, idle, result)
        if several:
            absent, over = (np.stack(x) for x in zip(*((step.absent, step.over) for step in several)))
            self._found.add(*check_agent_steps(spec.agents, np.stack(rewards), np.stack(done), absent, over))
        return _Stream(jax.tree.map(lambda *x: np.stack(x), *obs), np.stack(rewards), np.stack(done), spec.kinds)


class _Watch:
    """Checks and times the results of one Gymnasium environment."""

    def __init__(self, i: int, env: Any, found: Findings):
        self._i, self._found, self._count = i, found, 0
        self._space, self._reset, self._step = env.observation_space, env.reset, env.step
        self._accepts_seed = reset_accepts(env, "seed")
        self.seconds: list[float] = []
        self.is_attached = True
        try:
            env.reset, env.step = self.reset, self.step
        except AttributeError:  # a class with __slots__
            self.is_attached = False

    def reset(self, **kwargs: Any) -> Any:
        where = describe_time(self._count, reset=True)
        if "seed" in kwargs and not self._accepts_seed:
            self._found.add(wrong := fault("no seed"))
            raise Breach(wrong.message)
        result = self._timed(where, functools.partial(self._reset, **kwargs), "reset")
        self._found.add(*check_reset(self._space, result, where))
        return result

    def step(self, action: Any) -> Any:
        self._count += 1
        where = describe_time(self._count, reset=False)
        result = self._timed(where, functools.partial(self._step, action), "step")
        self._found.add(*check_step(self._space, result, where))
        return result

    def _timed(self, where: str, fn: Callable[[], Any], what: str) -> Any:
        began = time.perf_counter()
        try:
            result = fn()
        except BaseException as e:
            if is_environment_error(e):
                self._found.add(fault("raises", where, what=what, env=self._i, error=describe(e)))
            raise
        if self._count:  # the first reset may include start-up work
            self.seconds.append(time.perf_counter() - began)
        return result


def _play_turns(found: Findings, play: Any, steps: int, seed: int) -> None:
    """Play a `jrl.gym.interfaces.TurnTaking` with random valid actions, and check each result."""
    play.check = lambda list_faults, is_suspicious=None: found.add(*list_faults())
    turn = play.reset(seed)
    for agent in play.agents:
        play.action_space(agent).seed(seed)
    for _ in range(steps):
        if turn.over:
            turn = play.reset(None)
            continue
        agent = turn.movers[0]
        seen, info, space = turn.obs.get(agent), turn.infos.get(agent), play.action_space(agent)
        masks = [part[ACTION_MASK] for part in (seen, info) if isinstance(part, Mapping) and ACTION_MASK in part]
        has_mask = masks and space_kind(space) == "Discrete"
        turn = play.step({agent: space.sample(np.asarray(masks[0], np.int8)) if has_mask else space.sample()})


def _random_action(space: Space, rng: np.random.Generator, num_envs: int, t: int, mask: np.ndarray | None) -> PyTree:
    """Draw actions [B, *] of the policy's space, among the choices that `mask` [B, K] allows.

    Box actions are uniform and reach beyond the bounds, as a policy's do, so that the environment gets its extreme
    actions: the lowest of all elements in step 1, the highest in step 2. They are normal if a bound is infinite.
    """
    parts, first = [], 0
    for _, leaf in leaves(space):
        shape = (num_envs, *leaf.shape)
        if isinstance(leaf, Box):
            low, high = (np.broadcast_to(bound, shape) for bound in leaf.bounds())
            drawn, bounded = rng.normal(size=shape), np.isfinite(low) & np.isfinite(high)
            low, high = np.where(bounded, low, 0.0), np.where(bounded, high, 0.0)
            low, high = low - (high - low) / 8, high + (high - low) / 8
            drawn = np.where(bounded, (low, high)[t] if t < 2 else rng.uniform(low, high), drawn)
        else:
            chosen = []
            for size in _num_values(leaf):
                u = rng.random((num_envs, size))
                if mask is not None and not isinstance(leaf, MultiBinary):
                    u[~mask[:, first : first + size]] = -1
                    first += size
                chosen.append(u.argmax(axis=-1))
            drawn = np.stack(chosen, -1).reshape(shape)
        parts.append(drawn.astype(leaf.dtype))
    return from_leaves(space, parts)


def _num_values(leaf: Leaf) -> list[int]:
    """Return the number of values of each element of a discrete space."""
    sizes = leaf.n if isinstance(leaf, Discrete) else getattr(leaf, "nvec", 2)
    return np.broadcast_to(sizes, leaf.shape).reshape(-1).tolist()


# ---------------------------------------------------------------- single steps


def _check_batch(num_envs: int, where: str, result: StepResult) -> Iterator[Fault]:
    """Yield faults in the rewards and flags of B environments."""
    rewards: Any = result.reward
    if rewards.shape != (num_envs,):
        yield fault("rewards", where, got=rewards.shape, want=num_envs)
    else:
        for reward in rewards:
            yield from check_reward(reward, where)
    for name in ("terminated", "truncated"):
        flags = getattr(result, name)
        if flags.shape != (num_envs,) or flags.dtype != bool:
            yield fault("flags of all", where, what=name, got=f"{flags.dtype} {flags.shape}", want=num_envs)


def _check_mask(action: Space, where: str, mask: np.ndarray, done: np.ndarray) -> Iterator[Fault]:
    """Yield faults of environments that continue although `mask` [B, K] bool allows no action for a choice."""
    first = 0
    for path, leaf in leaves(action):
        for i, size in enumerate(_num_values(leaf) if isinstance(leaf, Discrete | MultiDiscrete) else ()):
            none = ~mask[:, first : first + size].any(axis=-1) & ~done
            first += size
            names = [path] * bool(path) + [str(i)] * isinstance(leaf, MultiDiscrete)
            if none.any():
                yield fault("stuck", where, env=find_first(none)[0], what=f" for {'/'.join(names)}" if names else "")


def check_agent_steps(
    agents: tuple[str, ...], reward: np.ndarray, done: np.ndarray, absent: np.ndarray, over: np.ndarray
) -> Iterator[Fault]:
    """Yield faults in steps of several agents, which must obey `jrl.types.Several`.

    Args:
      agents: A names.
      reward, done, absent: [T, B]; done is terminated or truncated.
      over: [T, B / A].
    """
    size = len(agents)
    games = lambda x: x.reshape(len(x), -1, size)
    of_games = np.repeat(over, size, axis=1)
    after_over, after_end = (np.concatenate([np.zeros_like(done[:1]), x[:-1]]) for x in (of_games, done))
    ended = np.zeros_like(done)  # ended before, in this game
    for t in range(1, len(done)):
        ended[t] = (ended[t - 1] | done[t - 1]) & ~after_over[t] & absent[t]  # an agent that acts has joined again
    unfinished = games(ended | done).all(-1) & ~over & games(done).any(-1)
    for name, wrong in {
        "acts nothing": absent & ((reward != 0) | done),
        "after an end": after_end & ~absent,
        "new game": after_over & ~absent,
        "over": of_games & ~done & ~absent,
        "not over": unfinished.repeat(size, axis=1),
    }.items():
        if wrong.any():
            t, column = find_first(wrong)
            yield fault(name, f"step {t + 1}: agent {agents[column % size]} of environment {column // size}")


# ---------------------------------------------------------------- whole streams


def _check_seeds(first: _Stream, again: _Stream | None, other: _Stream | None, backend: str) -> Iterator[Fault]:
    step = None if again is None else _first_difference(first, again)
    if step is not None:
        yield fault("seed twice", f"step {step}" if step else "the first reset", fix=_RANDOMNESS[backend])
    if other is not None and _first_difference(first, other) is None:
        yield fault("other seed")


def _first_difference(a: _Stream, b: _Stream) -> int | None:
    """Return the first step whose results differ, 0 for the reset; None: none differs."""
    for t in range(len(a.reward) + 1):
        rows = [(x[t], y[t]) for x, y in zip(jax.tree.leaves(a.obs), jax.tree.leaves(b.obs))]
        if t:
            rows += [(a.reward[t - 1], b.reward[t - 1]), (a.done[t - 1], b.done[t - 1])]
        if not all(_equal(x, y) for x, y in rows):
            return t
    return None


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.floating))


def _check_ends(stream: _Stream, limit: int | None) -> Iterator[Fault]:
    """Yield faults of the step after an end (its reward is 0, its observation new), and notes about missing ends."""
    after = np.zeros_like(stream.done)
    after[1:] = stream.done[:-1]
    wrong = after & (stream.done | (stream.reward != 0))
    if wrong.any():
        t, i = find_first(wrong)
        ends = "an" if stream.done[t, i] else "no"
        yield fault("contract", f"step {t + 1}", env=i, got=stream.reward[t, i], ends=ends)
    rows = split_by_kind(stream.kinds, after, 1)
    moved = [np.zeros_like(x) for x in rows]
    for i, seen in enumerate(stream.obs if stream.kinds else (stream.obs,)):
        for x in jax.tree.leaves(seen):
            moved[i] |= (x[1:] != x[:-1]).reshape(*rows[i].shape, -1).any(axis=-1)
    changed, fresh = np.concatenate(moved, 1), np.concatenate(rows, 1)
    if after.any() and not changed[fresh].any() and changed[~fresh].any():
        yield fault("final observation")
    if not stream.done.any() and limit is None:
        yield fault("no end", got=len(stream.done))


def _check_speed(seconds: Iterable[float]) -> Iterator[Fault]:
    seconds = list(seconds)
    if not seconds:
        return
    median = float(np.median(seconds))
    slow = [s for s in seconds if s > max(_UNEVEN * median, _UNEVEN_S)]
    if len(slow) >= 2 and len(slow) >= 0.01 * len(seconds):
        yield fault("uneven", got=len(slow), want=len(seconds), slow=1e3 * float(np.mean(slow)), median=1e3 * median)
    if median > _SLOW_S:
        yield fault("slow", median=1e3 * median)
