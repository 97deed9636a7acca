"""Acting: an algorithm with its weights, and all that goes on from step to step. `jrl.load(path).act(obs)`."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import agents, config, spaces
from jrl.config import RunConfig
from jrl.envs import history
from jrl.envs.history import PREV_ACTION, PREV_REWARD
from jrl.envs.scaling import policy_actions
from jrl.errors import InputError
from jrl.play.observations import Reader
from jrl.rollout.unroll import reset_where
from jrl.run import build
from jrl.run.store import checkpoint, resume
from jrl.types import NORMALIZED_OBS, Algo, Array, Box, EnvSpec, Key, PyTree, Space, element


class Past(NamedTuple):
    """Part of N environments' memory that enters their next observations, [N, ...] each."""

    frames: PyTree  # of `jrl.envs.history.History`
    action: PyTree  # the previous action as the policy chose it; None: observations do not have it
    begins: Array  # bool: an episode begins with the next observation


class Memory(NamedTuple):
    """State of N environments between two steps, [N, ...] each."""

    carry: PyTree  # of the network and of exploration
    past: Past | None  # None: observations hold nothing of earlier steps


class Acted(NamedTuple):
    """Results of a step of N environments."""

    action: PyTree  # in the environments' units
    memory: Memory
    extras: dict[str, PyTree]  # records of acting beside the action


class Actor:
    """Acts as an algorithm does with the weights of a checkpoint, or of a run under way.

    By default it acts for one agent, with observations and actions of the environment's own. Frame stacks, the previous
    action and reward are made here then, and actions are scaled and clipped as in training. With `own` False its
    environments do both, as those of a run do; it acts with all policies of the run then.

    Observation statistics are those of the weights and stay as they are. Between calls of `act` it keeps the memory of
    its environments, and the number of calls, from which the random numbers of exploration follow. It is for one
    thread.

    Attributes:
      spec: spaces of one environment as the algorithm sees it; `spec.env_action`, where there is one, is the space of
        what `act` returns.
      observation_space: that of `act`: the environment's own, without frame stacks, previous action and reward.
      config: of the run.
      algo: the algorithm's functions.
      state: of the algorithm, where `own` is False; None of a run under way.
      weights: of `algo.act`; set by `use`.
      reader: reads observations of `observation_space`.
      env_steps: of training, up to the checkpoint.
      checkpoint, meta: the checkpoint's directory, and its meta.json.
    """

    def __init__(
        self, algo: Algo, spec: EnvSpec, cfg: RunConfig, state: PyTree = None, *, own: bool = True, seed: int = 0,
        path: Path | None = None, meta: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.algo, self.spec, self.config = algo, spec, cfg
        self.state: PyTree = None if own else state
        self.checkpoint, self.meta = path, meta or {"env_steps": 0}
        self.env_steps = self.meta["env_steps"]
        self.observation_space = (spec.env_observation or spec.observation) if own else spec.observation
        plain = spec._replace(observation=self.observation_space)
        self.history, added = None, dict[str, Space]()
        if own and spec.env_observation is not None:
            asked = history.history_options(cfg)
            self.history = history.build_history(plain, **asked)
            items: dict[str, Space] = {PREV_ACTION: spec.action, PREV_REWARD: Box((), "float32")}
            added = {name: space for name, space in items.items() if asked.get(name)}
        # what a transform makes of the observation may depend on all of it
        unread = cfg.network.value_inputs if cfg.network.transform is None else ()
        names = spaces.part_names(self.observation_space)
        self.reader = Reader(plain, added, tuple(name for name in unread if name in names))
        self._own, self._key, self._calls = own, jax.random.key(seed), 0
        self._num, self._memory = 0, Memory((), None)
        self._begin = jax.jit(self.begin)
        self._program = functools.cache(self._compiled)
        self.weights: PyTree = None
        if state is not None:
            self.use(algo.actor(state))

    # ------------------------------------------------------------ as a pure function

    def start(self, num: int) -> Memory:
        """Returns the memory of `num` environments that begin an episode."""
        past = None
        if self.history is not None:
            zeros = lambda x: np.zeros((num, *x.shape), x.dtype)
            action = jax.tree.map(zeros, element(self.spec.action)) if PREV_ACTION in self.reader.added else None
            past = Past(self.history.empty(num), action, np.ones(num, bool))
        return Memory(self.algo.carry(num), past)

    def begin(self, where: Array, memory: Memory) -> Memory:
        """Returns a memory in which the environments `where` [N] bool begin an episode."""
        past = memory.past and memory.past._replace(begins=memory.past.begins | where)
        return Memory(reset_where(where, self.algo.carry(where.shape[0]), memory.carry), past)

    def observed(
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
        """Returns the map from the policy's actions [N, *] to the environment's; None: they are the same.

        Args:
          normalize, clip: whether actions are scaled and clipped to the environment's bounds; None: as in training.
        """
        if not self._own:
            return None
        space = self.spec.env_action or self.spec.action
        return policy_actions(space, self.config.env, normalize=normalize, clip=clip)[1]

    def step(
        self, weights: PyTree, obs: PyTree, memory: Memory, key: Key, reward: Array | None = None,
        given: Mapping[str, PyTree] = {}, *, explore: bool, normalize: bool | None = None, clip: bool | None = None,
    ) -> Acted:  # fmt: skip
        """Acts once; a pure function.

        Args:
          weights: of `algo.act`.
          obs: [N, *], of `observation_space`.
          memory: of `start`, or of the step before.
          key: of the random numbers.
          reward: [N] f32, came with `obs`; None: zeros.
          given: items of earlier steps [N, *] in place of those that are remembered.
          explore: sample as in training.
          normalize, clip: see `to_env`.
        """
        obs, frames = self.observed(obs, memory, reward, given)
        out = self.algo.act(weights, obs, memory.carry, key, explore)
        past = memory.past
        if past is not None:
            past = Past(frames, None if past.action is None else out.action, jnp.zeros_like(past.begins))
        to_env = self.to_env(normalize, clip)
        return Acted(out.action if to_env is None else to_env(out.action), Memory(out.carry, past), out.extras)

    def _compiled(self, extras: bool, **how: Any) -> Callable[..., Acted]:
        def step(weights, obs, memory, key, calls, reward, given):
            found = self.step(weights, obs, memory, jax.random.fold_in(key, calls), reward, given, **how)
            recorded = found.extras if extras else {}
            # the normalized observation is for learning
            return found._replace(extras={name: x for name, x in recorded.items() if name != NORMALIZED_OBS})

        return jax.jit(step)

    # ------------------------------------------------------------ with the latest weights

    def compute(
        self, obs: PyTree, memory: Memory, *, explore: bool, reward: Any = None, given: Mapping[str, PyTree] = {},
        normalize: bool | None = None, clip: bool | None = None, extras: bool = False,
    ) -> Acted:  # fmt: skip
        """Returns the actions of N environments in numpy; keeps nothing but the number of calls.

        Args:
          reward: [N], or a number; None: needed with `network.use_prev_reward` but where all begin an episode.
          extras: whether to return the records of acting.
          obs, memory, explore, given, normalize, clip: as `step`.
        Raises:
          ValueError: a reward is missing, or does not fit.
        """
        if (past := memory.past) is not None:
            reward = self._rewards(past.begins, reward, is_given=PREV_REWARD in given)
        program = self._program(extras, explore=explore, normalize=normalize, clip=clip)
        calls = np.uint32(self._calls % 2**32)
        found = program(self.weights, obs, memory, self._key, calls, None if past is None else reward, dict(given))
        self._calls += 1
        return found._replace(action=jax.tree.map(np.array, found.action))  # copies: jax's memory is not writable

    def _rewards(self, begins: Array, reward: Any, *, is_given: bool) -> np.ndarray:
        num = len(begins)
        if reward is not None:
            reward = np.asarray(reward, np.float32).reshape(-1)
            if reward.shape != (num,):
                raise ValueError(f"reward: expected {num} numbers, one for each observation, got {reward.shape[0]}")
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
        """Returns the actions for one observation, or for a batch of them.

        Args:
          obs: an element [*] of `observation_space`, or a batch: each of its arrays [N, *]. Numbers of another
            precision are converted, pixels must be uint8. What `network.value_inputs` names may be left out. A call
            with another N than the one before begins new episodes. With `network.use_prev_action` or `use_prev_reward`
            an observation may have items `prev_action` (as the policy chose it) and `prev_reward`, which are then used.
          explore: sample as in training; otherwise the same observation always gets the same action.
          reset: [N] bool, the rows where a new episode begins with this observation; None: all go on.
          reward: [N], or one number, that came with this observation; needed with `network.use_prev_reward` but where
            an episode begins.
          action_mask: [K] or [N, K], the actions that can be taken, where the observation does not hold it.
        Returns:
          numpy, [*] or [N, *], a dict or tuple of such where the action space is one: integers from 0 for Discrete (one
          observation: a numpy integer) and MultiDiscrete, float32 for Box, scaled and clipped to the environment's
          bounds as in training.
        Raises:
          ValueError: observations of another shape or kind, a mask that allows nothing, a reward that is missing, or a
            `reset` that does not fit.
        """
        given: Mapping[str, PyTree] = {}
        single = False
        if self._own:
            obs, given, single = self.reader.batch(obs, action_mask)
            num = len(jax.tree.leaves(obs)[0])
        else:
            num = sum(len(jax.tree.leaves(part)[0]) for part in spaces.parts_by_kind(self.spec, obs))
        if num != self._num:
            self._num, self._memory = num, self.start(num)
        if reset is not None:
            mask = np.asarray(reset, bool).reshape((1,) if single else np.shape(reset))
            if mask.shape != (num,):
                raise ValueError(f"reset: expected {num} of bool, one for each observation, got {mask.shape}")
            self._memory = self._begin(mask, self._memory)
        found = self.compute(obs, self._memory, explore=bool(explore), reward=reward, given=given)
        self._memory = found.memory
        return jax.tree.map(lambda x: x[0], found.action) if single else found.action

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, None]:
        """Returns (actions, None) of one observation or of many, with SB3's arguments; `act` by another signature.

        Args:
          observation: as `act`.
          state: is not looked at: the policy keeps what goes on through an episode itself.
          episode_start: [N] bool, as `reset` of `act`.
          deterministic: the best action; otherwise one that is drawn as in training.
        """
        return self.act(observation, explore=not deterministic, reset=episode_start), None

    def use(self, weights: PyTree) -> None:
        """Acts with other weights of the same algorithm from now on, and begins new episodes."""
        self.weights = jax.device_put(weights)
        self.reset()

    def reset(self) -> None:
        """Begins new episodes with the next call."""
        self._num = 0

    def __getattr__(self, name: str) -> Any:
        fix = "use act(obs), or jrl.api.Algorithm.from_checkpoint(path).get_policy() for its networks"
        raise AttributeError(name if name.startswith("_") else f"Policy has no {name}: {fix}")


# ---------------------------------------------------------------- of a checkpoint, or of a run under way


def load(path: str | os.PathLike[str], *, best: bool | None = None, seed: int = 0, policy: str | None = None) -> Actor:
    """Loads the policy of a checkpoint; no environment is made.

    Args:
      path: a run directory, or a checkpoint.
      best: of a run directory, True: the best checkpoint by the run's `checkpoint.keep_best_by`; False: the latest;
        None: the best, and where no checkpoint has that metric, as in a run without evaluations, the latest.
      seed: of the random numbers of `act(..., explore=True)`.
      policy: its name, of a run with several; it acts for one agent.
    Raises:
      InputError: no checkpoint is there, it is damaged, or of a later version; or the run has several policies, and
        this is not the name of one.
    """
    found, cfg, spec, algo, state, meta = _restored(path, best, (), beside=True)
    policies = agents.make(cfg, spec)
    policy, names = policy or policies.the_one, policies.names
    if names or policy is not None:
        if policy not in names:
            known = f"expected one of {', '.join(names)}" if names else "the run has one agent, leave it out"
            raise InputError(f"policy: {known}, got {policy!r}: {found}")
        state = resume.held(found, policy, policies.states(state)[policy])
        cfg, spec = policies.of(policy)
        algo = build.algorithm(config.without_loss(cfg), spec)
    return Actor(algo, spec, cfg, state, seed=seed, path=found, meta=meta)


def load_all(path: str | os.PathLike[str], *, best: bool | None = None, settings: Sequence[str] = ()) -> Actor:
    """Loads all policies of a checkpoint, which act in environments as the run makes them.

    Args:
      path, best: as `load`.
      settings: overrides of the run's config, `a.b=value`.
    Raises:
      InputError: as `load`; or the checkpoint lacks a policy.
    """
    found, cfg, spec, algo, state, meta = _restored(path, best, settings)
    return Actor(algo, spec, cfg, state, own=False, path=found, meta=meta)


def _restored(path: Any, best: bool | None, settings: Sequence[str], *, beside: bool = False) -> tuple:
    found = checkpoint.locate(Path(path), best=best)
    meta = checkpoint.read_meta(found)
    cfg, spec = config.override(meta["config"], settings), checkpoint.spec(meta)
    algo = build.algorithm(config.without_loss(cfg), spec)
    state = resume.learner(found, jax.eval_shape(algo.init, jax.random.key(0)), beside=beside)
    return found, cfg, spec, algo, state, meta


def of_training(cfg: RunConfig, spec: EnvSpec, *, own: bool = True, seed: int = 0) -> Actor:
    """Makes the actor of a run under way, which acts with the weights that `Actor.use` gets.

    Args:
      cfg: of the run, or of its evaluations.
      spec: of its environments.
      own, seed: see `Actor` and `load`.
    """
    return Actor(build.algorithm(config.without_loss(cfg), spec), spec, cfg, own=own, seed=seed)
