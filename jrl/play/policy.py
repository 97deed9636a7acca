"""A trained policy as an object: `jrl.load(path).act(obs)`."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import agents, config, spaces
from jrl.config import RunConfig
from jrl.envs import history
from jrl.envs.history import PREV_ACTION, PREV_REWARD
from jrl.envs.scaling import policy_actions
from jrl.errors import InputError
from jrl.rollout.unroll import reset_where
from jrl.run import build
from jrl.run.store import checkpoint, resume
from jrl.types import NORMALIZED_OBS, Algo, Array, Box, Dict, EnvSpec, Leaf, PyTree, Space, Tuple, element


class Policy:
    """Acts as the policy of a checkpoint, or of a run under way, does, in the environment's own units.

    Observation statistics are those of its weights and stay as they are. Between calls it keeps what goes on through
    an episode: the network's memory, the frames of a stack, the previous action, noise that drifts; and the number of
    calls, from which the random numbers of exploration follow. It is for one thread.

    Attributes:
      spec: spaces of one environment as the algorithm sees it; `spec.env_action`, where there is one, is the space of
        what `act` returns.
      observation_space: that of `act`: the environment's own, without frame stacks, previous action and reward.
      config: of the run.
      algo: the algorithm's functions.
      inputs: reads what `act` takes.
      env_steps: of training, up to the checkpoint.
    """

    def __init__(self, trained: "Trained", *, seed: int = 0):
        self.spec, self.config, self.env_steps = trained.spec, trained.config, trained.meta["env_steps"]
        self.inputs = Inputs(trained.spec, trained.config, trained.observation)
        self.observation_space = self.inputs.observation
        self.algo, self._actor = trained.algo, jax.device_put(trained.actor)
        self._trained = trained._replace(actor=None)  # it is on the device now
        self._key = jax.random.key(seed)
        self._calls = 0
        self._memory: Memory | None = None
        self._program = functools.cache(self._compiled)
        algo = self.algo
        self._restart = jax.jit(lambda mask, carry: reset_where(mask, algo.carry(mask.shape[0]), carry))

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
        obs, given, single = self.inputs.batch(obs, action_mask)
        num = len(jax.tree.leaves(obs)[0])
        if self._memory is None or num != self._memory.num:
            self._memory = self.start(num)
        memory = self._memory
        if reset is not None:
            mask = np.asarray(reset, bool).reshape((1,) if single else np.shape(reset))
            if mask.shape != (num,):
                raise ValueError(f"reset: expected {num} of bool, one for each observation, got {mask.shape}")
            past = memory.past and memory.past._replace(begins=memory.past.begins | mask)
            memory = self._memory = memory._replace(carry=self._restart(mask, memory.carry), past=past)
        action, self._memory, _ = self.step(obs, given, memory, explore=bool(explore), reward=reward)
        return jax.tree.map(lambda x: x[0], action) if single else action

    def start(self, num: int) -> "Memory":
        """Returns the memory of `num` environments that begin an episode."""
        return Memory(num, self.algo.carry(num), self.inputs.past(num))

    def step(
        self,
        obs: PyTree,
        given: Mapping[str, PyTree],
        memory: "Memory",
        *,
        explore: bool,
        reward: Any = None,
        normalize: bool | None = None,
        clip: bool | None = None,
        extras: bool = False,
    ) -> tuple[PyTree, "Memory", dict[str, PyTree]]:
        """Returns the actions of a batch, and the memory after them; keeps nothing between calls but their number.

        Args:
          obs, given: [N, *], as `inputs.batch` reads them.
          memory: of `start`, or of the call before.
          explore, reward: as `act`.
          normalize, clip: whether actions are scaled and clipped to the environment's bounds; None: as in training.
          extras: whether to return what acting records, too.
        Returns:
          Actions [N, *] in numpy, in the environment's units; the memory; extras, name -> [N, ...].
        """
        frames, past = None, memory.past
        if past is not None:
            frames, obs = self.inputs.told(past, obs, given, reward)
        calls = np.uint32(self._calls % 2**32)
        program = self._program(explore, normalize, clip, extras)
        action, carry, found, own = program(self._actor, obs, memory.carry, self._key, calls)
        self._calls += 1
        if past is not None:
            past = Past(frames, jax.tree.map(np.asarray, own), np.zeros(memory.num, bool))
        # copies: jax's own memory cannot be written to
        return jax.tree.map(np.array, action), Memory(memory.num, carry, past), found

    def _compiled(self, explore: bool, normalize: bool | None, clip: bool | None, extras: bool) -> Callable[..., Any]:
        transform, remembers = self._trained.to_env(normalize, clip), self.inputs.remembers

        def step(actor, obs, carry, key, calls):
            out = self.algo.act(actor, obs, carry, jax.random.fold_in(key, calls), explore)
            action = out.action if transform is None else transform(out.action)
            recorded = out.extras if extras else {}
            found = {name: x for name, x in recorded.items() if name != NORMALIZED_OBS}  # which is for learning
            return action, out.carry, found, out.action if remembers else None

        return jax.jit(step)

    def use(self, actor: PyTree) -> None:
        """Acts with other weights of the same algorithm from now on, and begins new episodes."""
        self._actor = jax.device_put(actor)
        self.reset()

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

    def __getattr__(self, name: str) -> Any:
        fix = "use act(obs), or jrl.api.Algorithm.from_checkpoint(path).get_policy() for its networks"
        raise AttributeError(name if name.startswith("_") else f"{type(self).__name__} has no {name}: {fix}")

    def reset(self) -> None:
        """Begins new episodes with the next call."""
        self._memory = None


class Past(NamedTuple):
    """Traces that N environments' earlier steps leave for the next observation; numpy."""

    frames: PyTree  # of `jrl.envs.history.History`
    action: PyTree  # [N, *], as the policy chose it; None where nothing asks for it
    begins: Array  # [N] bool: an episode begins with the next observation


class Memory(NamedTuple):
    """State that goes on through the episodes of `num` environments."""

    num: int
    carry: PyTree  # of the network
    past: Past | None  # of the observations; None where they tell of nothing earlier


class Inputs:
    """Maps observations as a user gives them to those that an algorithm acts on.

    Attributes:
      observation: the space of one that is given.
      history: what becomes of them with their past; None where they are the algorithm's.
      added: the items that tell of the past, of those that the network reads: name -> space.
      unread: paths of what the policy does not read, which may be left out (`network.value_inputs`).
      remembers: whether the previous action is one of them.

    Args:
      spec: of the algorithm.
      cfg: of the run.
      observation: the environment's own space, where `spec` has another; None: they are the same.
    """

    def __init__(self, spec: EnvSpec, cfg: RunConfig, observation: Space | None = None):
        self.observation = observation or spec.observation
        self._own = own = spec._replace(observation=self.observation)
        self.history, self.added = None, dict[str, Space]()
        if observation is not None:
            asked = history.history_options(cfg)
            self.history = history.build_history(own, **asked)
            items = {PREV_ACTION: spec.action, PREV_REWARD: Box((), "float32")}
            self.added = {name: space for name, space in items.items() if asked.get(name)}
        self.remembers = PREV_ACTION in self.added
        # what a transform makes of the observation may depend on all of it
        unread = cfg.network.value_inputs if cfg.network.transform is None else ()
        self.unread = tuple(name for name in unread if name in spaces.part_names(self.observation))
        self._masked = spaces.masks_actions(own)

    # ------------------------------------------------------------ one observation, or many

    def batch(self, obs: Any, action_mask: Any = None, name: str = "obs") -> tuple[PyTree, dict[str, PyTree], bool]:
        """Returns (observations [N, *] in the space's dtypes, items of the past among them, whether it was one alone).

        Raises:
          ValueError: `name` says that they are no elements of the space, or their mask allows nothing.
        """
        given: dict[str, Any] = {}
        if isinstance(obs, Mapping) and (found := self.added.keys() & obs.keys()):
            given = {name: obs[name] for name in found}
            obs = {name: x for name, x in obs.items() if name not in found}
            if not isinstance(self.observation, Dict) and set(obs) == {"obs"}:
                obs = obs["obs"]
        if action_mask is not None:
            obs = self._with_mask(obs, action_mask)
        reader = _Reader(f"{name}/{spaces.ACTION_MASK}" if self._masked else None)
        absent = self._absent(obs)
        obs = reader.read(spaces.without(self.observation, absent), obs, name)
        if absent:
            zeros = lambda leaf: np.zeros((*(reader.lead or ()), *leaf.shape), leaf.dtype)
            obs = spaces.fill_parts(self.observation, absent, obs, zeros)
        given = {item: reader.read(self.added[item], x, f"{name}/{item}") for item, x in given.items()}
        if reader.lead == ():
            obs, given = jax.tree.map(lambda x: x[None], (obs, given))
        if self._masked:
            self._check_mask(obs[spaces.ACTION_MASK], name)
        return obs, given, reader.lead == ()

    def _absent(self, obs: Any) -> list[str]:
        def lacks(x: Any, path: Sequence[str]) -> bool:
            if not path or not isinstance(x, Mapping):
                return False
            return path[0] not in x or lacks(x[path[0]], path[1:])

        return [name for name in self.unread if lacks(obs, name.split("/"))]

    def item(self, name: str, x: Any, num: int, *, single: bool) -> PyTree:
        """Returns the item `name` of the past [N, *], of one observation or of N. Raises ValueError: it is unfit."""
        reader = _Reader(lead=() if single else (num,))
        x = reader.read(self.added[name], x, name)
        return jax.tree.map(lambda x: x[None], x) if single else x

    def _with_mask(self, obs: Any, mask: Any) -> Any:
        if not self._masked:
            raise ValueError("action_mask: this policy was trained without one: leave it out")
        assert isinstance(self.observation, Dict)
        rest = {name for name, _ in self.observation.items} - {spaces.ACTION_MASK, *self._absent(obs)}
        if isinstance(obs, Mapping) and set(obs) - {spaces.ACTION_MASK} == rest:
            return {**obs, spaces.ACTION_MASK: mask}
        return {"obs": obs, spaces.ACTION_MASK: mask} if rest == {"obs"} else obs

    def _check_mask(self, mask: np.ndarray, name: str) -> None:
        start = 0
        for size in num_choices_each(self._own.action):
            nothing = ~(mask[:, start : start + size] != 0).any(-1)
            if nothing.any():
                raise ValueError(
                    f"{name}/{spaces.ACTION_MASK}: entries {start} to {start + size - 1} are all 0 in row "
                    f"{np.flatnonzero(nothing)[0]}: no action could be taken: at least one of them must be 1"
                )
            start += size

    # ------------------------------------------------------------ with their past

    def past(self, num: int) -> Past | None:
        """Returns the past of `num` environments that begin an episode; None where observations tell of no past."""
        if self.history is None:
            return None
        zeros = lambda x: np.zeros((num, *x.shape), x.dtype)
        action = jax.tree.map(zeros, element(self._own.action)) if self.remembers else None
        return Past(self.history.empty(num), action, np.ones(num, bool))

    def told(self, past: Past, obs: PyTree, given: Mapping[str, PyTree], reward: Any = None) -> tuple[PyTree, PyTree]:
        """Returns (frames of the next `Past`, observations [N, *] as the algorithm acts on them).

        Raises:
          ValueError: a reward is missing, or does not fit.
        """
        assert self.history is not None
        num = len(past.begins)
        if reward is not None:
            reward = np.asarray(reward, np.float32).reshape(-1)
            if reward.shape != (num,):
                raise ValueError(f"reward: expected {num} numbers, one for each observation, got {reward.shape[0]}")
        elif PREV_REWARD in self.added and PREV_REWARD not in given and not past.begins.all():
            raise ValueError(
                "reward: this policy reads the previous reward (network.use_prev_reward): pass act(obs, reward=...), "
                "or call reset() where an episode begins"
            )
        reward = np.zeros(num, np.float32) if reward is None else reward
        frames, obs = self.history.see(past.frames, obs, past.action, reward, np.asarray(past.begins))
        return frames, {**obs, **given} if given else obs


def num_choices_each(action: Space) -> tuple[int, ...]:
    """Returns the lengths of the parts of an action mask; of each part one choice is taken."""
    found: list[int] = []
    for _, leaf in spaces.leaves(action):
        found += [getattr(leaf, "n")] if hasattr(leaf, "n") else getattr(leaf, "nvec", ())  # noqa: B009
    return tuple(found)


class _Reader:
    """Reads elements of spaces that all have the same leading axes, `lead`: () or (N,).

    `mask` is the path of the action mask, whose numbers may be of any kind.
    """

    def __init__(self, mask: str | None = None, lead: tuple[int, ...] | None = None):
        self._mask, self.lead = mask, lead

    def read(self, space: Space, x: Any, path: str) -> PyTree:
        match space:
            case Dict():
                names = [name for name, _ in space.items]
                if not isinstance(x, Mapping) or set(x) != set(names):
                    got = f"one of {', '.join(map(str, x)) or 'nothing'}" if isinstance(x, Mapping) else _kind(x)
                    raise ValueError(f"{path}: expected a dict of {', '.join(names)}, got {got}")
                return {name: self.read(part, x[name], f"{path}/{name}") for name, part in space.items}
            case Tuple():
                if not isinstance(x, tuple | list) or len(x) != len(space.items):
                    got = f"one of {len(x)}" if isinstance(x, tuple | list) else _kind(x)
                    raise ValueError(f"{path}: expected a tuple of {len(space.items)}, got {got}")
                return tuple(self.read(part, x[i], f"{path}/{i}") for i, part in enumerate(space.items))
        return self._array(space, x, path)

    def _array(self, leaf: Leaf, x: Any, path: str) -> np.ndarray:
        shape, dtype = leaf.shape, np.dtype(leaf.dtype)
        try:
            x = np.asarray(x)
        except ValueError as e:  # rows of different lengths
            raise ValueError(f"{path}: expected {_expected(leaf)}: {e}") from e
        lead = x.shape[: x.ndim - len(shape)]
        mask = path == self._mask and x.dtype.kind in "biuf"
        if len(lead) > 1 or x.shape[len(lead) :] != shape or not (mask or np.can_cast(x.dtype, dtype, "same_kind")):
            raise ValueError(f"{path}: expected {_expected(leaf)}, got {x.dtype} {x.shape}")
        if self.lead is None:
            self.lead = lead
        elif self.lead != lead:
            rows = f"a batch of {self.lead[0]}" if self.lead else "a single observation"
            raise ValueError(f"{path}: expected {dtype} {(*self.lead, *shape)}, as the rest is {rows}, got {x.shape}")
        if mask:
            x = x != 0
        return x if x.dtype == dtype else x.astype(dtype)


def _kind(x: Any) -> str:
    return f"{x.dtype} {x.shape}" if hasattr(x, "dtype") else type(x).__name__


def _expected(leaf: Leaf) -> str:
    return f"{np.dtype(leaf.dtype)} {leaf.shape}, or a batch ({', '.join(map(str, ('N', *leaf.shape)))})"


def load(path: str | os.PathLike[str], *, best: bool | None = None, seed: int = 0, policy: str | None = None) -> Policy:
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
    return Policy(restore(path, best=best, policy=policy), seed=seed)


class Trained(NamedTuple):
    """Policy of a checkpoint, with what the checkpoint says of it."""

    algo: Algo
    actor: PyTree  # of `algo.act`
    spec: EnvSpec  # of one environment, as the algorithm sees it
    config: RunConfig
    meta: dict[str, Any]  # of the checkpoint
    observation: Space | None = None  # the environment's own, where `spec` has another

    def to_env(self, normalize: bool | None = None, clip: bool | None = None) -> Callable[[PyTree], PyTree] | None:
        """Returns the map from the policy's actions [N, *] to the environment's, scaled and clipped as it says.

        An argument of None means as in training; the map is None where both are the same.
        """
        own = self.spec.env_action or self.spec.action
        return policy_actions(own, self.config.env, normalize=normalize, clip=clip)[1]


def restore(path: str | os.PathLike[str], *, best: bool | None = None, policy: str | None = None) -> Trained:
    """Restores the parts of `load`; arguments and errors as there."""
    found = checkpoint.locate(Path(path), best=best)
    meta = checkpoint.read_meta(found)
    cfg, spec = config.override(meta["config"], []), checkpoint.spec(meta)
    algo = build.algorithm(config.without_loss(cfg), spec)
    state = resume.learner(found, jax.eval_shape(algo.init, jax.random.key(0)), beside=True)
    policies = agents.make(cfg, spec)
    policy, names = policy or policies.the_one, policies.names
    if names or policy is not None:
        if policy not in names:
            known = f"expected one of {', '.join(names)}" if names else "the run has one agent, leave it out"
            raise InputError(f"policy: {known}, got {policy!r}: {found}")
        state = resume.held(found, policy, policies.states(state)[policy])
        cfg, spec = policies.of(policy)
        algo = build.algorithm(config.without_loss(cfg), spec)
    return Trained(algo, algo.actor(state), spec, cfg, meta, spec.env_observation)


def of_training(cfg: RunConfig, spec: EnvSpec, *, seed: int = 0) -> Policy:
    """Makes the policy of a run under way, which acts with the weights that `Policy.use` gets.

    Args:
      cfg: of the run, or of its evaluations.
      spec: of its environments.
      seed: see `load`.
    """
    algo, meta = build.algorithm(config.without_loss(cfg), spec), {"env_steps": 0}
    return Policy(Trained(algo, None, spec, cfg, meta, spec.env_observation), seed=seed)
