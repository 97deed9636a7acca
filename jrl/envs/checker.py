"""Check of an environment against its spaces and the contract, by stepping it with random actions.

report = check_env("my_package.my_module:MyEnv", options={"size": 9})
assert report.ok, report.problems
"""

import contextlib
import hashlib
import io
import time
import warnings
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
from jrl.errors import EnvironmentFailed
from jrl.gym.exceptions import describe
from jrl.gym.faults import Fault, check_observation, fault, find_first
from jrl.spaces import ACTION_MASK, by_kind, from_leaves, leaves, masks_actions, parts_by_kind, split_by_kind
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
    """Steps an environment three times, twice with one seed, once with another; returns the faults.

    Checked are the spaces; shape, dtype, bounds and finiteness of all observation arrays; action masks (only valid
    actions are tried); rewards and end flags; the step after an end; reproducibility by seed; exceptions; step times.
    Results of Gymnasium environments are checked before conversion. With several agents, so are the lists of agents,
    their ends, and the keys of each dict; PettingZoo's own test checks environments of its classes.

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
    made = {"num_envs": num_envs, "options": dict(options or {}), "action_mask_info": action_mask_info}
    check = _Check(registry.reference(env), backend, made, steps, seed)
    check.run()
    found = check.found.values()
    problems, notes = ([f.message for f in found if f.is_note == is_note] for is_note in (False, True))
    return Report(problems, notes)


class _Check:
    """One environment, stepped with the same actions from several seeds.

    Attributes:
      found: first fault of each name, so that a fault in every step is reported once.
    """

    def __init__(self, id: str, backend: str, made: dict[str, Any], steps: int, seed: int):
        self._id, self._made, self._steps, self._seed = id, {"backend": backend, **made}, steps, seed
        self.found: dict[str, Fault] = {}
        self._where, self._has_ended = "", False
        self._seconds: list[float] = []  # time of each step
        self._jitted: JaxEnv | None = None  # compiled once for all seeds

    def run(self) -> None:
        first = self._record(self._seed)
        if first is None:
            return
        backend = resolve(self._id, self._made["backend"])
        for t, (a, b) in enumerate(zip(first, self._record(self._seed) or first)):
            if a != b:
                self._add(fault("seed twice", f"step {t}" if t else "the first reset", fix=_RANDOMNESS[backend]))
                break
        # without checks, so that steps can be timed
        if self._record(self._seed + 1, checks=False) == first:
            self._add(fault("other seed"))
        if backend == "gymnasium":
            self._add(*check_speed(self._seconds))

    def _add(self, *faults: Fault) -> None:
        for new in faults:
            self.found.setdefault(new.name, new)

    def _record(self, seed: int, *, checks: bool = True) -> list[bytes] | None:
        """Steps the environments; returns a hash of each result, None if they failed, with the fault in `found`."""
        opened, self._where = None, "the first reset"
        try:
            env: Any = self._jitted
            if env is None:
                env = opened = self._open(seed, checks)
            hashes = self._step_all(env, seed)
            if checks and hasattr(env, "games") and all(one.is_note for one in self.found.values()):
                self._add(*_run_pettingzoo_test(env.games[0].env, self._steps))
            if checks and hasattr(env, "precision"):
                self._add(*(Fault(text, text, is_note=True) for text in env.precision.messages()))
            return hashes
        except InputError as e:  # the text of a user's frames has several lines
            lines = ("; ".join(part.strip() for part in text.splitlines()) for text in e.errors)
            self._add(*(Fault(line, line) for line in lines))
        except Exception as e:  # a user's environment can raise anything
            if not any(one.ends_run for one in self.found.values()):  # otherwise its consequence
                name = "raises" if isinstance(e, EnvironmentFailed) else "cannot step"
                self._add(fault(name, self._where, id=self._id, error=describe(e.__cause__ or e)))
        finally:
            if opened is not None and self._jitted is None:
                opened.close()
        return None

    def _open(self, seed: int, checks: bool) -> Any:
        # actions as a policy's: scaled in float32, and clipped
        settings: dict[str, Any] = {"normalize_actions": True, "clip_actions": True, "host": True}
        settings["on_failure"] = OnFailure(check_steps=0, report=self._add if checks else None)
        env = make(self._id, seed=seed, **self._made, **settings)
        if isinstance(env, JaxEnv):
            self._jitted = env = env._replace(step=jax.jit(env.step), reset=jax.jit(env.reset))
        return env

    def _step_all(self, env: Any, seed: int) -> list[bytes]:
        spec: EnvSpec = env.spec
        rng, key, in_jax = np.random.default_rng(self._seed), jax.random.key(seed), isinstance(env, JaxEnv)
        is_raw_checked = hasattr(env, "precision")  # Gymnasium's, before conversion
        state, first = env.reset(key) if in_jax else (None, env.reset())
        obs, done = jax.tree.map(np.array, first), np.zeros(spec.num_envs, bool)
        self._seconds, changes = [], set[tuple[bool, bool]]()  # (step after an end, whether the observation changed)
        masks, hashes = self._check_observations(spec, obs, done, is_raw_checked), [_hash(obs)]
        for t in range(self._steps):
            self._where = f"step {t + 1}"
            action = random_action(spec, rng, t, masks)
            began = time.perf_counter()
            if in_jax:
                state, result = env.step(state, action, jax.random.fold_in(key, t + 1))
            else:
                result = env.step(action)
            self._seconds.append((time.perf_counter() - began) / spec.games)
            result = jax.tree.map(np.array, result)  # copies; `failed` may be None
            if not spec.agents:
                changes |= set(zip(done.tolist(), _find_changes(obs, result.obs).tolist(), strict=True))
            if not is_raw_checked:
                wrong = result.reward[~np.isfinite(result.reward)]
                self._add(*(fault("reward finite", self._where, got=reward) for reward in wrong[:1]))
            self._add(*_check_reset_step(self._where, done, result))
            obs, done = result.obs, result.terminated | result.truncated
            idle = done if result.several is None else done | result.several.absent
            masks = self._check_observations(spec, obs, idle, is_raw_checked)
            hashes.append(_hash(obs, result.reward, done))
            self._has_ended |= bool(done.any())
        if (True, True) not in changes and changes >= {(True, False), (False, True)}:
            self._add(fault("final observation"))
        if not self._has_ended and spec.max_episode_steps is None:
            self._add(fault("no end", got=self._steps))
        return hashes

    def _check_observations(
        self, spec: EnvSpec, obs: PyTree, idle: np.ndarray, is_raw_checked: bool
    ) -> list[np.ndarray | None]:
        """Checks observations; returns the masks of the next actions, by kind."""
        masks: list[np.ndarray | None] = []
        kinds = zip(by_kind(spec), parts_by_kind(spec, obs), split_by_kind(spec.kinds, idle), strict=True)
        for kind, own, own_idle in kinds:
            if not is_raw_checked:
                self._add(*check_observation("observation", kind.observation, own, self._where, kind.num_envs))
            mask = own[ACTION_MASK] != 0 if masks_actions(kind) else None
            if mask is not None:
                self._add(*_check_mask(kind.action, self._where, mask, own_idle))
            masks.append(mask)
        return masks


def _hash(*trees: PyTree) -> bytes:
    return hashlib.sha1(b"".join(x.tobytes() for x in jax.tree.leaves(trees))).digest()


def _run_pettingzoo_test(env: Any, steps: int) -> Iterator[Fault]:
    """Yields the fault that PettingZoo's own test finds in an environment of PettingZoo's classes."""
    try:
        import pettingzoo
        from pettingzoo.test import api_test, parallel_api_test
    except ImportError:
        return
    env = getattr(env, "aec_env", env)  # the environment behind a conversion
    if not isinstance(env, pettingzoo.AECEnv | pettingzoo.ParallelEnv):
        return
    test = api_test if isinstance(env, pettingzoo.AECEnv) else parallel_api_test
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            test(env, num_cycles=steps)
    except Exception as e:  # an assertion, or anything that a user's environment raises
        yield fault("pettingzoo", what=test.__name__, error=describe(e))


def random_action(spec: EnvSpec, rng: np.random.Generator, t: int, masks: list[np.ndarray | None]) -> PyTree:
    """Draws actions of the policy's space, among the choices that `masks` allow."""
    kinds = zip(by_kind(spec), masks, strict=True)
    chosen = [_draw(kind.action, rng, kind.num_envs, t, mask) for kind, mask in kinds]
    return tuple(chosen) if spec.kinds else chosen[0]


def _draw(space: Space, rng: np.random.Generator, num_envs: int, t: int, mask: np.ndarray | None) -> PyTree:
    """Draws actions [B, *] of one kind.

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
    """Returns the number of values of each element of a discrete space."""
    sizes = leaf.n if isinstance(leaf, Discrete) else getattr(leaf, "nvec", 2)
    return np.broadcast_to(sizes, leaf.shape).reshape(-1).tolist()


# ---------------------------------------------------------------- faults


def _check_mask(action: Space, where: str, mask: np.ndarray, done: np.ndarray) -> Iterator[Fault]:
    """Yields faults of environments that continue although `mask` [B, K] bool allows no action for a choice."""
    first = 0
    for path, leaf in leaves(action):
        for i, size in enumerate(_num_values(leaf) if isinstance(leaf, Discrete | MultiDiscrete) else ()):
            none = ~mask[:, first : first + size].any(axis=-1) & ~done
            first += size
            names = [path] * bool(path) + [str(i)] * isinstance(leaf, MultiDiscrete)
            if none.any():
                yield fault("stuck", where, env=find_first(none)[0], what=f" for {'/'.join(names)}" if names else "")


def _check_reset_step(where: str, fresh: np.ndarray, result: StepResult) -> Iterator[Fault]:
    """Yields the fault of a step after an end, `fresh` [B]: it must have reward 0 and no end."""
    done = result.terminated | result.truncated
    if (wrong := fresh & (done | (result.reward != 0))).any():
        (i,) = find_first(wrong)
        yield fault("contract", where, env=i, got=result.reward[i], ends="an" if done[i] else "no")


def _find_changes(before: PyTree, after: PyTree) -> np.ndarray:
    """Returns which environments' observations differ [B] bool."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return np.any([(x != y).reshape(len(x), -1).any(-1) for x, y in pairs], axis=0)


def check_speed(seconds: Iterable[float]) -> Iterator[Fault]:
    """Yields notes about steps that take long, or much longer than others."""
    seconds = list(seconds)
    median = float(np.median(seconds))
    slow = [s for s in seconds if s > max(_UNEVEN * median, _UNEVEN_S)]
    if len(slow) >= 2 and len(slow) >= 0.01 * len(seconds):
        yield fault("uneven", got=len(slow), want=len(seconds), slow=1e3 * float(np.mean(slow)), median=1e3 * median)
    if median > _SLOW_S:
        yield fault("slow", median=1e3 * median)
