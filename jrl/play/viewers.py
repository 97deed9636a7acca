"""Players for videos: a policy in one environment, or all policies of several agents in their games."""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jrl import agents, config
from jrl.config import RunConfig
from jrl.envs import render
from jrl.play import build_evaluation, policy
from jrl.rollout.unroll import reset_where
from jrl.run import build
from jrl.run.store import checkpoint, resume
from jrl.types import Algo, Array, EnvSpec, PyTree


class Watched(Protocol):
    """Plays one episode after the other, of which each step can be seen."""

    how: str  # what draws, in words
    fps: float  # steps per second at which it looks natural

    def begin(self) -> None:
        """Begins an episode."""

    def step(self, *, explore: bool) -> tuple[float, bool]:
        """Acts once; returns what that earned, and whether the episode is over."""
        ...

    def render(self) -> np.ndarray:
        """Draws [H, W, 3] u8."""
        ...

    def use(self, actor: PyTree) -> None:
        """Acts with these weights from the next episode on."""

    def close(self) -> None: ...


class Alone:
    """A policy in an environment of one agent."""

    def __init__(self, acting: policy.Policy, env: render.Drawn):
        self._policy, self._env = acting, env
        self.how, self.fps, self.render, self.close = env.how, env.fps, env.render, env.close
        self.use = acting.use
        self._most_steps = acting.config.env.limit or math.inf
        self._obs: PyTree = None
        self._reward: Array | None = None
        self._steps = 0

    def begin(self) -> None:
        self._policy.reset()
        self._obs, self._reward, self._steps = self._env.reset(), None, 0

    def step(self, *, explore: bool) -> tuple[float, bool]:
        result = self._env.step(self._policy.act(self._obs, explore, reward=self._reward))
        self._obs, self._reward, self._steps = result.obs, result.reward, self._steps + 1
        done = bool(result.terminated[0] or result.truncated[0])
        return float(result.reward[0]), done or self._steps >= self._most_steps


class Together:
    """All policies of several agents in their games, as an evaluation plays them.

    A step is one of a game, which an episode is: from its reset until it is over for all, with what its agents earn
    together. Self-play has a block of games, in which the learner sits in another seat or meets another copy; episodes
    show one after the other, with what the learner earns.

    Args:
      algo: acts with all policies.
      env: the games, and what draws them.
      seed: of the random numbers of exploration.
    """

    def __init__(self, algo: Algo, env: render.Games, *, seed: int = 0):
        self._env, self._games, columns = env, env.spec.games, env.spec.num_envs
        self.how, self.fps, self.close = env.how, env.fps, env.close
        self._initial = algo.carry(columns)
        self._act = _acting(algo)
        self._key, self._calls, self._episode = jax.random.key(seed), 0, -1
        self._actor: PyTree = None
        self._obs: PyTree = None
        self._memory: PyTree = None
        self._begins: Array = np.zeros(columns, bool)

    def use(self, actor: PyTree) -> None:
        self._actor = jax.device_put(actor)

    def begin(self) -> None:
        self._episode += 1
        self._obs, self._memory = self._env.reset(), self._initial
        self._begins = np.zeros_like(self._begins)

    @property
    def _game(self) -> int:
        return self._episode % self._games

    def step(self, *, explore: bool) -> tuple[float, bool]:
        key = jax.random.fold_in(self._key, self._calls)
        action, self._memory = self._act(self._actor, self._obs, self._memory, key, explore)
        self._calls += 1
        result = self._env.step(action)
        over = result.terminated | result.truncated  # of a team
        if result.several is not None:
            # what agents remember begins anew with the row on which they come: see `jrl.rollout.unroll`
            self._memory, over = reset_where(result.several.absent, self._initial, self._memory), result.several.over
        self._obs = result.obs
        earned = np.asarray(result.reward).reshape(self._games, -1).sum(-1)
        return float(earned[self._game]), bool(over[self._game])

    def render(self) -> np.ndarray:
        return self._env.render(self._game)


def _acting(algo: Algo) -> Callable[..., tuple[PyTree, PyTree]]:
    def act(actor: PyTree, obs: PyTree, memory: PyTree, key: Any, explore: bool) -> tuple[PyTree, PyTree]:
        out = algo.act(actor, obs, memory, key, explore)
        return out.action, out.carry

    return jax.jit(act, static_argnums=4)


def of_checkpoint(path: str | os.PathLike[str], *, best: bool | None = None, seed: int | None = None) -> Watched:
    """Makes the player of a checkpoint's policies.

    Args:
      path, best: as of `jrl.play.policy.load`.
      seed: of the environment, which is of the run's evaluations, never of training; None: the run's.
    Raises:
      InputError: no checkpoint is there, or nothing can draw its environment.
    """
    found = checkpoint.locate(Path(path), best=best)
    meta = checkpoint.read_meta(found)
    cfg, spec = config.override(meta["config"], []), checkpoint.spec(meta)
    if seed is not None:
        cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, seed=seed))
    if cfg.multi_agent is None:
        return _alone(policy.load(found), cfg.run.seed)
    cfg = config.without_loss(cfg)
    made, algo = _together(cfg, spec), build.algorithm(cfg, spec)
    state = resume.learner(found, jax.eval_shape(algo.init, jax.random.key(0)))
    made.use(algo.actor(state))
    return made


def of_training(cfg: RunConfig, spec: EnvSpec) -> Watched:
    """Makes the player of a run under way, with the weights that `use` gets.

    Args:
      cfg: of the run's evaluations.
      spec: of the environments of training.
    Raises:
      InputError: nothing can draw the environment, or the policies cannot act in it.
    """
    if cfg.multi_agent is None:
        return _alone(policy.of_training(cfg, spec), cfg.run.seed)
    return _together(config.without_loss(cfg), spec)


def _alone(acting: policy.Policy, seed: int) -> Alone:
    # the policy itself remembers the frames of a stack, the previous action and reward
    own = acting.spec._replace(observation=acting.observation_space)
    return Alone(acting, render.make(acting.config.env, own, seed=seed))


def _together(cfg: RunConfig, trained: EnvSpec) -> Together:
    num = agents.make(cfg).whole_games(1)
    make = lambda section: build_evaluation.environments(dataclasses.replace(cfg, env=section), num)
    env = render.make_games(cfg.env, make, seed=cfg.run.seed)
    try:
        build_evaluation.check_spaces(env.spec, trained)
    except BaseException:
        env.close()
        raise
    return Together(build.algorithm(cfg, env.spec), env, seed=cfg.run.seed)
