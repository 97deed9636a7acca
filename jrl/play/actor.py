"""Actor: an algorithm with weights and the memory of its environments. `jrl.load(path).act(obs)`."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import config, spaces
from jrl.config import RunConfig
from jrl.envs import history
from jrl.envs.history import PREV_ACTION, PREV_REWARD
from jrl.envs.scaling import policy_actions
from jrl.play.observations import Reader
from jrl.rollout.unroll import reset_where
from jrl.run import build, build_collect
from jrl.types import NORMALIZED_OBS, Algo, Array, Box, EnvSpec, Key, PyTree, Space, element


class Past(NamedTuple):
    """Part of N environments' memory that the next observations contain, [N, ...] each."""

    frames: PyTree  # state of `jrl.envs.history.History`
    action: PyTree  # previous action as the policy chose it; None: observations have no previous action
    begins: Array  # bool: an episode begins with the next observation


class Memory(NamedTuple):
    """State of N environments between two steps, [N, ...] each."""

    carry: PyTree  # recurrent state of the network and of exploration
    past: Past | None  # None: observations do not depend on earlier steps


class ActResult(NamedTuple):
    """Result of one act of N environments."""

    action: PyTree  # in the environments' units
    memory: Memory
    extras: dict[str, PyTree]  # other outputs of `Algo.act`


class Actor:
    """Acts with the weights of a checkpoint or of a running training.

    By default the actor acts for one agent, with raw observations and actions: those of the environment itself. The
    actor then adds frame stacks, previous action and reward, and scales and clips actions as in training. With
    `is_raw` False the environments do both, as in a run, and the actor acts with all policies of the run.

    Observation statistics belong to the weights and do not change. Between calls of `act` the actor keeps the memory
    of its environments and the number of calls, which decides the random numbers of exploration. Use it in one thread.

    Attributes:
      spec: spaces of one environment as the algorithm sees it; `act` returns actions of `spec.env_action`, if set.
      observation_space: space of the observations that `act` takes; raw, if `is_raw`.
      config: config of the run.
      algo: the algorithm's functions.
      state: the algorithm's State, if `is_raw` is False; None: no State was given.
      weights: Actor of `algo.act`; set by `set_weights`.
      reader: reads observations of `observation_space`.
      env_steps: environment steps of training, up to the checkpoint.
      checkpoint, meta: the checkpoint's directory, and its description.
    """

    def __init__(
        self, algo: Algo, spec: EnvSpec, cfg: RunConfig, state: PyTree = None, *, is_raw: bool = True, seed: int = 0,
        path: Path | None = None, meta: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.algo, self.spec, self.config = algo, spec, cfg
        self.state: PyTree = None if is_raw else state
        self.checkpoint, self.meta = path, meta or {"env_steps": 0}
        self.env_steps = self.meta["env_steps"]
        self.observation_space = (spec.env_observation or spec.observation) if is_raw else spec.observation
        raw_spec = spec._replace(observation=self.observation_space)
        self.history, added = None, dict[str, Space]()
        if is_raw and spec.env_observation is not None:
            options = history.history_options(cfg)
            self.history = history.build_history(raw_spec, **options)
            items: dict[str, Space] = {PREV_ACTION: spec.action, PREV_REWARD: Box((), "float32")}
            added = {name: space for name, space in items.items() if options.get(name)}
        # a transform may read all parts of the observation
        unread = cfg.network.value_inputs if cfg.network.transform is None else ()
        names = spaces.part_names(self.observation_space)
        self.reader = Reader(raw_spec, added, tuple(name for name in unread if name in names))
        self._is_raw, self._key, self._calls = is_raw, jax.random.key(seed), 0
        self._num, self._memory = 0, Memory((), None)
        self._begin_episodes = jax.jit(self.begin_episodes)
        self._program = functools.cache(self._compile_step)
        self.weights: PyTree = None
        if state is not None:
            self.set_weights(algo.actor(state))

    # ------------------------------------------------------------ pure functions

    def init_memory(self, num: int) -> Memory:
        """Returns the memory of `num` environments that begin an episode."""
        past = None
        if self.history is not None:
            zeros = lambda x: np.zeros((num, *x.shape), x.dtype)
            action = jax.tree.map(zeros, element(self.spec.action)) if PREV_ACTION in self.reader.added else None
            past = Past(self.history.empty(num), action, np.ones(num, bool))
        return Memory(self.algo.carry(num), past)

    def begin_episodes(self, where: Array, memory: Memory) -> Memory:
        """Returns the memory with new episodes of the environments `where` [N] bool."""
        past = memory.past and memory.past._replace(begins=memory.past.begins | where)
        return Memory(reset_where(where, self.algo.carry(where.shape[0]), memory.carry), past)

    def build_observation(
        self, obs: PyTree, memory: Memory, reward: Array | None = None, given: Mapping[str, PyTree] = {}
    ) -> tuple[PyTree, PyTree]:
        """Returns (observations [N, *] of `spec`, frames of the next memory); arguments as `step`."""
        past = memory.past
        if past is None or self.history is None:
            return obs, ()
        reward = jnp.zeros(len(past.begins), jnp.float32) if reward is None else reward
        frames, obs = self.history.see(past.frames, obs, past.action, reward, past.begins)
        return {**obs, **given} if given else obs, frames

    def to_env(self, normalize: bool | None = None, clip: bool | None = None) -> Callable[[PyTree], PyTree] | None:
        """Returns the function from the policy's actions [N, *] to the environment's; None: no change.

        Args:
          normalize, clip: whether to scale actions, and clip them to the environment's bounds; None: as in training.
        """
        if not self._is_raw:
            return None
        space = self.spec.env_action or self.spec.action
        return policy_actions(space, self.config.env, normalize=normalize, clip=clip)[1]

    def step(
        self, weights: PyTree, obs: PyTree, memory: Memory, key: Key, reward: Array | None = None,
        given: Mapping[str, PyTree] = {}, *, explore: bool, normalize: bool | None = None, clip: bool | None = None,
    ) -> ActResult:  # fmt: skip
        """Acts once; a pure function.

        Args:
          weights: Actor of `algo.act`.
          obs: [N, *], observations of `observation_space`.
          memory: memory from `init_memory` or from the previous step.
          key: random key.
          reward: [N] f32, reward of the step that led to `obs`; None: zeros.
          given: previous action or reward [N, *], instead of the remembered one; by name of the observation's item.
          explore: sample as in training.
          normalize, clip: see `to_env`.
        """
        obs, frames = self.build_observation(obs, memory, reward, given)
        out = self.algo.act(weights, obs, memory.carry, key, explore)
        past = memory.past
        if past is not None:
            past = Past(frames, None if past.action is None else out.action, jnp.zeros_like(past.begins))
        to_env = self.to_env(normalize, clip)
        return ActResult(out.action if to_env is None else to_env(out.action), Memory(out.carry, past), out.extras)

    def _compile_step(self, extras: bool, **options: Any) -> Callable[..., ActResult]:
        def step(weights, obs, memory, key, calls, reward, given):
            result = self.step(weights, obs, memory, jax.random.fold_in(key, calls), reward, given, **options)
            kept = result.extras if extras else {}
            # the normalized observation is for learning
            return result._replace(extras={name: x for name, x in kept.items() if name != NORMALIZED_OBS})

        return jax.jit(step)

    # ------------------------------------------------------------ acting with the latest weights

    def compute(
        self, obs: PyTree, memory: Memory, *, explore: bool, reward: Any = None, given: Mapping[str, PyTree] = {},
        normalize: bool | None = None, clip: bool | None = None, extras: bool = False,
    ) -> ActResult:  # fmt: skip
        """Returns the actions of N environments in numpy, from the given memory; counts the call.

        Args:
          reward: [N], or a number. None is refused with `network.use_prev_reward`, unless all episodes begin.
          extras: whether to return the other outputs of `Algo.act`.
          obs, memory, explore, given, normalize, clip: as `step`.
        Raises:
          ValueError: the reward is missing or has another length.
        """
        if (past := memory.past) is not None:
            reward = self._read_reward(past.begins, reward, is_given=PREV_REWARD in given)
        program = self._program(extras, explore=explore, normalize=normalize, clip=clip)
        calls = np.uint32(self._calls % 2**32)
        result = program(self.weights, obs, memory, self._key, calls, None if past is None else reward, dict(given))
        self._calls += 1
        return result._replace(action=jax.tree.map(np.array, result.action))  # copies: jax's memory is not writable

    def _read_reward(self, begins: Array, reward: Any, *, is_given: bool) -> np.ndarray:
        num = len(begins)
        if reward is not None:
            reward = np.asarray(reward, np.float32).reshape(-1)
            if reward.shape != (num,):
                raise ValueError(f"reward: expected {num} numbers, one per observation, got {reward.shape[0]}")
            return reward
        if PREV_REWARD in self.reader.added and not is_given and not np.asarray(begins).all():
            raise ValueError(
                "reward: this policy reads the previous reward (network.use_prev_reward): pass act(obs, reward=...), "
                "or call reset() where an episode begins"
            )
        return np.zeros(num, np.float32)

    def act(
        self, obs: Any, explore: bool = False, *, reset: Any = None, reward: Any = None, action_mask: Any = None
    ) -> Any:
        """Returns the actions for one observation, or for a batch of observations.

        Args:
          obs: an element [*] of `observation_space`, or a batch: each of its arrays [N, *]. Numbers of another
            precision are converted, pixels must be uint8. Parts named by `network.value_inputs` may be left out. A
            call with another N than the previous call begins new episodes. With `network.use_prev_action` or
            `use_prev_reward` an observation may have items `prev_action` (as the policy chose it) and `prev_reward`,
            which then replace the remembered values.
          explore: sample as in training; False: the same observation always gets the same action.
          reset: [N] bool, where a new episode begins with this observation; None: all episodes continue.
          reward: [N] or one number, reward of the step that led to this observation. `network.use_prev_reward` needs
            a reward, unless an episode begins.
          action_mask: [K] or [N, K], 1 for allowed actions, if the observation does not contain the mask.
        Returns:
          numpy [*] or [N, *], in a dict or tuple if the action space is a Dict or Tuple: integers from 0 for Discrete
          (one observation: a numpy integer) and MultiDiscrete; float32 for Box, scaled and clipped to the
          environment's bounds as in training.
        Raises:
          ValueError: observations have another shape or kind, a mask allows no action, a reward is missing, or `reset`
            has another length.
        """
        given: Mapping[str, PyTree] = {}
        single = False
        if self._is_raw:
            obs, given, single = self.reader.batch(obs, action_mask)
            num = len(jax.tree.leaves(obs)[0])
        else:
            num = sum(len(jax.tree.leaves(part)[0]) for part in spaces.parts_by_kind(self.spec, obs))
        if num != self._num:
            self._num, self._memory = num, self.init_memory(num)
        if reset is not None:
            mask = np.asarray(reset, bool).reshape((1,) if single else np.shape(reset))
            if mask.shape != (num,):
                raise ValueError(f"reset: expected bool [{num}], one per observation, got {mask.shape}")
            self._memory = self._begin_episodes(mask, self._memory)
        result = self.compute(obs, self._memory, explore=bool(explore), reward=reward, given=given)
        self._memory = result.memory
        return jax.tree.map(lambda x: x[0], result.action) if single else result.action

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, None]:
        """Returns (actions, None) for one observation or a batch: `act` with SB3's arguments.

        Args:
          observation: as `act`.
          state: ignored: the policy keeps its memory itself.
          episode_start: [N] bool, as `reset` of `act`.
          deterministic: the best action; False: sample as in training.
        """
        return self.act(observation, explore=not deterministic, reset=episode_start), None

    def set_weights(self, weights: PyTree) -> None:
        """Replaces the weights by others of the same algorithm, and begins new episodes."""
        self.weights = jax.device_put(weights)
        self.reset()

    def reset(self) -> None:
        """Begins new episodes with the next call."""
        self._num = 0

    def __getattr__(self, name: str) -> Any:
        fix = "use act(obs), or jrl.api.Algorithm.from_checkpoint(path).get_policy() for its networks"
        raise AttributeError(name if name.startswith("_") else f"Policy has no {name}: {fix}")


# ---------------------------------------------------------------- from a checkpoint or a running training


def load(
    path: str | os.PathLike[str],
    *,
    best: bool | None = None,
    seed: int = 0,
    policy: str | None = None,
    search: bool = True,
) -> Actor:
    """Loads a policy from a checkpoint, without making an environment.

    Args:
      path: a run directory or a checkpoint.
      best: selects the checkpoint of a run directory. True: the best by the run's `checkpoint.keep_best_by`; False: the
        latest; None: the best, or the latest if no checkpoint has that metric.
      seed: seed of `act(..., explore=True)`.
      policy: name of a policy, if the run has several; the actor acts for one agent.
      search: whether a policy of MuZero searches, as in evaluations; False: it acts by its network alone.
    Raises:
      InputError: the checkpoint is missing, damaged, or of a later version; or the run has several policies, and
        `policy` does not name one of them.
    """
    found = build_collect.restore_policy(path, best=best, policy=policy, search=search)
    return Actor(found.algo, found.spec, found.config, found.state, seed=seed, path=found.directory, meta=found.meta)


def load_all(path: str | os.PathLike[str], *, best: bool | None = None, settings: Sequence[str] = ()) -> Actor:
    """Loads all policies of a checkpoint, for environments as the run makes them.

    Args:
      path, best: as `load`.
      settings: overrides of the run's config, `a.b=value`.
    Raises:
      InputError: as `load`; or the checkpoint lacks a policy.
    """
    found = build_collect.restore(path, best=best, settings=settings)
    return Actor(found.algo, found.spec, found.config, found.state, is_raw=False, path=found.directory, meta=found.meta)


def build_training_actor(cfg: RunConfig, spec: EnvSpec, *, is_raw: bool = True, seed: int = 0) -> Actor:
    """Returns the actor of a running training; `Actor.set_weights` gives it weights.

    Args:
      cfg: config of the run or of its evaluations.
      spec: spec of the environments.
      is_raw, seed: see `Actor` and `load`.
    """
    return Actor(build.algorithm(config.without_loss(cfg), spec), spec, cfg, is_raw=is_raw, seed=seed)
