"""A trained policy as an object: `jrl.load(path).act(obs)`."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import build, checkpoint, config
from jrl.config import RunConfig
from jrl.envs import action_transform
from jrl.rollout.unroll import reset_where
from jrl.types import Algo, Array, EnvSpec, PyTree


class Policy:
    """Acts as the policy of a checkpoint does, in the environment's own units.

    Observation statistics are those of the checkpoint and stay as they are. Between calls it keeps what the algorithm
    carries through an episode (recurrent state, noise that drifts) and the number of calls, from which the random
    numbers of exploration follow; it is for one thread.

    Attributes:
      spec: spaces of one environment; `spec.env_action`, where there is one, is the space of what `act` returns.
      config: of the run.
      env_steps: of training, up to the checkpoint.
    """

    def __init__(self, trained: "Trained", *, seed: int = 0):
        algo, transform = trained.algo, trained.to_env
        self.spec, self.config, self.env_steps = trained.spec, trained.config, trained.meta["env_steps"]
        self._algo = algo
        self._dtype = np.dtype(self.spec.observation.dtype)
        self._actor = jax.device_put(trained.actor)
        self._key = jax.random.key(seed)
        self._calls = 0
        self._carry: PyTree = None
        self._batch_size: int | None = None

        def step(actor, obs, carry, key, calls, explore):
            out = algo.act(actor, obs, carry, jax.random.fold_in(key, calls), explore)
            return out.action if transform is None else transform(out.action), out.carry

        # a program for each batch size, with and without exploration
        self._step = {explore: jax.jit(partial(step, explore=explore)) for explore in (False, True)}
        self._restart = jax.jit(lambda mask, carry: reset_where(mask, algo.carry(mask.shape[0]), carry))

    def act(self, obs: Any, explore: bool = False, *, reset: Any = None) -> Any:
        """The actions for one observation, or for a batch of them.

        Args:
          obs: [*] or [N, *], of the shape `spec.observation.shape`; numbers of another precision are converted, pixels
            must be uint8. A call with another N than the one before begins new episodes.
          explore: sample as in training; otherwise the same observation always gets the same action.
          reset: [N] bool, the rows where a new episode begins with this observation; None: all go on.
        Returns:
          numpy, [*] or [N, *]: int32 for Discrete (one observation: a numpy integer) and MultiDiscrete, float32 for
          Box, scaled and clipped to the environment's bounds as in training.
        Raises:
          ValueError: observations of another shape or kind, or a `reset` that does not fit them.
        """
        obs, single = self._batch(obs)
        if len(obs) != self._batch_size:
            self._batch_size, self._carry = len(obs), self._algo.carry(len(obs))
        if reset is not None:
            mask = np.asarray(reset, bool).reshape((1,) if single else np.shape(reset))
            if mask.shape != (len(obs),):
                raise ValueError(f"reset: expected {len(obs)} of bool, one for each observation, got {mask.shape}")
            self._carry = self._restart(mask, self._carry)
        calls = np.uint32(self._calls % 2**32)
        action, self._carry = self._step[bool(explore)](self._actor, obs, self._carry, self._key, calls)
        self._calls += 1
        action = np.array(action)  # a copy: jax's own memory cannot be written to
        return action[0] if single else action

    def reset(self) -> None:
        """The next call begins new episodes."""
        self._batch_size = None

    def _batch(self, obs: Any) -> tuple[np.ndarray, bool]:
        """Observations [N, *] in the space's dtype, and whether it was a single one."""
        shape = self.spec.observation.shape
        try:
            obs = np.asarray(obs)
        except ValueError as e:  # rows of different lengths
            raise ValueError(f"obs: expected {self._expected()}: {e}") from e
        single = obs.ndim == len(shape)
        if obs.shape[not single :] != shape or not np.can_cast(obs.dtype, self._dtype, "same_kind"):
            raise ValueError(f"obs: expected {self._expected()}, got {obs.dtype} {obs.shape}")
        if obs.dtype != self._dtype:
            obs = obs.astype(self._dtype)
        return obs[None] if single else obs, single

    def _expected(self) -> str:
        shape = self.spec.observation.shape
        return f"{self._dtype} {shape}, or a batch ({', '.join(map(str, ('N', *shape)))})"


def load(path: str | os.PathLike[str], *, best: bool = False, seed: int = 0) -> Policy:
    """The policy of a checkpoint; no environment is made.

    Args:
      path: a run directory, whose latest checkpoint is taken, or a checkpoint.
      best: of a run directory, the best checkpoint by the run's `checkpoint.keep_best_by`.
      seed: of the random numbers of `act(..., explore=True)`.
    Raises:
      InputError: no checkpoint is there, it is damaged, or of a later version.
    """
    return Policy(restore(path, best=best), seed=seed)


class Trained(NamedTuple):
    """What a checkpoint says of its policy."""

    algo: Algo
    actor: PyTree  # of `algo.act`
    to_env: Callable[[Array], Array] | None  # from the policy's actions [N, *] to the environment's; None: the same
    spec: EnvSpec  # of one environment
    config: RunConfig
    meta: dict[str, Any]  # of the checkpoint


def restore(path: str | os.PathLike[str], *, best: bool = False) -> Trained:
    """The parts of `load`; arguments and errors as there."""
    found = checkpoint.locate(Path(path), best=best)
    meta = checkpoint.read_meta(found)
    cfg, spec = config.override(meta["config"], []), checkpoint.spec(meta)
    algo = build.algorithm(config.without_loss(cfg), spec)
    state = checkpoint.restore(found, "learner", jax.eval_shape(algo.init, jax.random.key(0)))
    own = spec.env_action or spec.action
    to_env = action_transform(own, normalize=cfg.env.normalize_actions, clip=cfg.env.clip_actions)[1]
    return Trained(algo, algo.actor(state), to_env, spec, cfg, meta)
