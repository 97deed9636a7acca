"""Elo rating of one policy that plays both sides of a game, from games of each evaluation against the previous one.

    elo = Elo(cfg, seed=0)                          # cfg: config of the evaluations, with `evaluation.elo_games`
    elo.begin(actor)                                # rating 0
    metrics = elo.play(later_actor, count=1)        # {"elo": 31.2, "elo_se": 43.4}

A game begins with `OPENING` random moves. The two policies play each opening twice, with exchanged seats.
"""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl import config, spaces
from jrl.config import RunConfig
from jrl.errors import InputError
from jrl.learn.program import Role, role_key
from jrl.metrics import payoff
from jrl.play import build_evaluation
from jrl.play.player import Deadline
from jrl.run import build
from jrl.types import Algo, Array, JaxEnv, Key, PyTree

OPENING = 2  # random moves at the beginning of a game: without them greedy policies repeat one game
_PRIOR = 1.0  # draws added to each match, so that a match without a loss has a finite rating


@struct.dataclass
class Rated:
    """Latest rated policy; numpy arrays."""

    actor: PyTree
    rating: Any  # [] f64, Elo points above the first policy
    variance: Any  # [] f64, squared standard error of `rating`


class Elo:
    """Rates the policies of a run one after the other. Each match adds the difference of two policies to the rating.

    Attributes:
      names: keys of the result of `play`.
      latest: Rated, part of checkpoints.

    Args:
      cfg: config of the evaluations; `evaluation.elo_games` is G, the games of a match.
      seed: seed of the openings.
    Raises:
      InputError: the environment is not a game of two players, or the algorithm cannot search in it.
    """

    names = ("elo", "elo_se")
    latest: Rated

    def __init__(self, cfg: RunConfig, *, seed: int):
        self._games, self._seed = cfg.evaluation.elo_games or 0, seed
        self._timeout_s = cfg.evaluation.timeout_s
        env = build_evaluation.build_environments(cfg, self._games)
        if env.spec.num_agents != 2:
            raise InputError(
                f"evaluation.elo_games: expected a game of two players, got env.id {cfg.env.id}, which "
                f"has {env.spec.num_agents}: leave it out"
            )
        algo = build.algorithm(config.without_loss(cfg), env.spec)
        self._choose = choose_in(env, algo, explore=cfg.rollout.explore)
        self._open, self._step, self._reset = jax.jit(random_moves), jax.jit(env.step), jax.jit(env.reset)

    def begin(self, actor: PyTree) -> None:
        """Gives a policy the rating 0."""
        self.latest = Rated(jax.device_get(actor), np.zeros(()), np.zeros(()))

    def play(self, actor: PyTree, *, count: int) -> dict[str, float]:
        """Plays a match against the latest policy, which `actor` replaces.

        Args:
          actor: ActorState.
          count: number of the evaluation; decides the openings.
        Returns:
          `elo`, the rating, and `elo_se`, its standard error.
        """
        before, actor = self.latest, jax.device_get(actor)
        wins, draws, losses = self.match(actor, before.actor, role_key(self._seed, Role.ELO, count))
        results = np.zeros((2, 2, 3))
        results[1, 0] = wins, draws, losses
        change, error = payoff.compute_elo(payoff.compute_scores(results), prior=_PRIOR)
        if wins + draws + losses:
            self.latest = Rated(actor, before.rating + change[1], before.variance + error[1] ** 2)
        return {"elo": float(self.latest.rating), "elo_se": float(self.latest.variance**0.5)}

    def match(self, first: PyTree, second: PyTree, key: Key) -> tuple[int, int, int]:
        """Returns the wins, draws and losses of policy `first` against `second`, in G games.

        Games that `evaluation.timeout_s` breaks off do not count.
        """
        actors = jax.tree.map(lambda *x: jnp.stack(x), first, second)
        seat, deadline = np.arange(self._games) % 2, Deadline(self._timeout_s)  # seat that `first` has
        state, obs = self._reset(jax.random.fold_in(key, 0))
        returns, running = np.zeros((self._games, 2)), np.ones(self._games, bool)
        for turn in itertools.count():
            step_key = jax.random.fold_in(key, turn + 1)
            action = self._open(obs, step_key) if turn < OPENING else self._choose(actors, state, obs, step_key)
            state, result = self._step(state, action, step_key)
            obs = result.obs
            returns += running[:, None] * np.asarray(result.reward).reshape(-1, 2)
            running &= ~np.asarray(result.several.over)
            if not running.any() or deadline.is_over():
                break
        if running.any():
            warnings.warn(
                f"evaluation.elo_games: {running.sum()} of {self._games} games did not end within "
                f"evaluation.timeout_s = {self._timeout_s:g} s and do not count: allow more time, or fewer games",
                RuntimeWarning,
                stacklevel=2,
            )
        ahead = (returns[np.arange(self._games), seat] - returns[np.arange(self._games), 1 - seat])[~running]
        return int((ahead > 0).sum()), int((ahead == 0).sum()), int((ahead < 0).sum())


def random_moves(obs: PyTree, key: Key) -> Array:
    """Returns allowed actions [2 G] i32, uniform, and equal in games 2 i and 2 i + 1."""
    mask = obs[spaces.ACTION_MASK]
    noise = jax.random.gumbel(key, (len(mask) // 4, 1, 2, mask.shape[-1]))
    noise = jnp.repeat(noise, 2, 1).reshape(mask.shape)
    return jnp.argmax(jnp.where(mask != 0, noise, -jnp.inf), -1).astype(jnp.int32)


def choose_in(env: JaxEnv, algo: Algo, *, explore: bool) -> Callable[..., Array]:
    """Returns the function (two actors, stacked; env_state; obs [2 G, *]; key) -> actions [2 G] of a match in `env`.

    The first policy has seat 0 in even games and seat 1 in odd games.
    """
    assert algo.act_in is not None
    act, batch = algo.act_in(env), env.spec.num_envs
    is_first = jnp.arange(batch) % 2 == jnp.arange(batch) // 2 % 2

    @jax.jit
    def choose(actors: PyTree, env_state: PyTree, obs: PyTree, key: Key) -> Array:
        play = lambda actor: act(actor, obs, algo.carry(batch), key, explore, env_state).action
        # one after the other: policies with equal weights then choose equal moves, to the last bit
        action = jax.lax.map(play, actors)
        return jnp.where(is_first, action[0], action[1])

    return choose
