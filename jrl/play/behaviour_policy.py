"""Policies that play into a data set, alone or by turns, with the log-probability of the actions really taken."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import config, spaces
from jrl.algos import uniform
from jrl.algos.exploration import Stochastic
from jrl.config import RunConfig, policy_mapping
from jrl.data.store import LOG_PROB, Episode
from jrl.errors import InputError
from jrl.learn.keys import Role, role_key
from jrl.rollout import sources
from jrl.rollout.stitch import Stitch
from jrl.run import build, build_collect, build_policies, data_output
from jrl.run.store import checkpoint, resume
from jrl.types import ActOut, Algo, Array, Box, EnvSpec, Key, PyTree, Rollout

_LENGTH = 256  # most steps of a rollout
_FORBIDDEN = -1e30  # no policy's log-probability is below it


class Acts(NamedTuple):
    """Ways to play a policy."""

    explore: bool | None = None  # draws its actions; None: where it has a distribution of them
    epsilon: float = 0.0  # share of the steps whose action is uniformly random


class Player(NamedTuple):
    """A policy that plays."""

    name: str
    share: float  # of all steps
    cfg: RunConfig  # whose environments it plays in
    algo: Algo | None  # None: uniformly random actions
    state: PyTree  # of the algorithm


def trained(name: str, share: float, *, best: bool | None, settings: Sequence[str]) -> Player:
    """Loads the policy of a run directory or a checkpoint. Raises InputError: there is none, or it cannot be played."""
    found = checkpoint.locate(Path(name), best=best)
    meta = checkpoint.read_meta(found)
    cfg = config.without_loss(config.override(meta["config"], settings))
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        raise InputError(f"{name}: a run in self-play: write its games by data.output while it trains")
    if cfg.multi_agent is not None and policy_mapping.per_episode(cfg):
        raise InputError(f"{name}: its policies change from game to game: name each agent's in multi_agent.mapping")
    algo = build.algorithm(cfg, checkpoint.spec(meta))
    state = resume.learner(found, jax.eval_shape(algo.init, jax.random.key(0)))
    return Player(name, share, cfg, algo, state)


def play(
    player: Player, steps: int, take: Callable[[int, Episode], None], *, acts: Acts, seed: int, index: int,
    num_envs: int, log_prob: bool = True,
) -> EnvSpec:  # fmt: skip
    """Plays `steps` environment steps, rounded up to steps of all environments; returns the environments' spec.

    Args:
      player: the policy that plays.
      steps: of all environments together.
      take: gets (kind of agents, episode) of each; those under way at the end are cut.
      acts: how it acts.
      seed, index: of environments and of actions.
      num_envs: environments at once.
      log_prob: whether episodes have that column; False where it is not known of all of a data set.
    """
    cfg = player.cfg
    env = environment(cfg, seed=seed, index=index, num_envs=num_envs)
    act, known = acting(player, env.spec, acts)
    write = lambda episode: take(episode.kind, data_output.as_data(episode, {"source": player.name}))
    options = data_output.stitch_options(cfg, env.spec, (LOG_PROB,) if known and log_prob else ())
    stitch = Stitch(env.spec.num_envs, take=write, **options)
    key = role_key(seed, Role.DATA, index)
    length = max(1, min(_LENGTH, -(-steps // env.spec.games)))
    carry = player.algo.carry if player.algo is not None else lambda batch_size: ()
    source = sources.make(env, act, key=jax.random.fold_in(key, 0), length=length, carry=carry, record=True)
    given = None
    if player.algo is not None:
        given = jax.device_put((player.algo.actor(player.state), player.state), jax.local_devices()[0])
    try:
        number, left = 0, steps
        while left > 0:
            number += 1
            rollout, _ = source.next(given, jax.random.fold_in(key, number))
            rollout, done = _first(jax.device_get(dataclasses.replace(rollout, carry=())), left, env.spec.games)
            stitch.add(rollout)
            left -= done
    finally:
        source.close()
    stitch.reset()
    return env.spec


def _first(rollout: Rollout, steps: int, games: int) -> tuple[Rollout, int]:
    """Returns a rollout's first rows, in numpy, with so many environment steps, or all; and how many they have."""
    taken = rollout.mask.reshape(len(rollout.mask), games, -1).any(-1).sum(-1)
    rows = int(np.searchsorted(np.cumsum(taken), steps)) + 1
    if rows >= len(taken):
        return rollout, int(taken.sum())
    head = lambda tree: jax.tree.map(lambda x: x[:rows], tree)
    names = ("obs", "action", "reward", "terminated", "truncated", "mask", "extras", "over")
    last = jax.tree.map(lambda x: x[rows], rollout.obs)
    short = {name: head(getattr(rollout, name)) for name in names}
    if rollout.count is not None:  # rows that each column has of them
        short["count"] = np.minimum(rollout.count, rows)
    return dataclasses.replace(rollout, **short, last_obs=last), int(taken[:rows].sum())


def environment(cfg: RunConfig, *, seed: int, index: int, num_envs: int) -> Any:
    """Makes environments as those of the run, with seeds of their own. Raises InputError."""
    alone = dataclasses.replace(cfg.env_runners, num=0)
    run = dataclasses.replace(cfg.run, seed=seed)
    cfg = dataclasses.replace(cfg, run=run, env_runners=alone)
    return build_collect.environment(cfg, num_envs=num_envs, role="data", index=index)


def spec_of(player: Player, num_envs: int) -> EnvSpec:
    """Returns the spec of a player's environments."""
    env = environment(player.cfg, seed=0, index=0, num_envs=num_envs)
    env.close()
    return env.spec


# ---------------------------------------------------------------- acting


def acting(player: Player, spec: EnvSpec, acts: Acts) -> tuple[Callable[..., ActOut], bool]:
    """Makes ((actor, state), obs [B, *], carry, key) -> ActOut with `log_prob` alone in extras; and whether that is
    known.

    It is log((1 - epsilon) p(a) + epsilon u(a)): p of the policy, which for the best of a set of choices is 1 and of
    another 0, u uniform over the actions that can be taken. Of a distribution over a continuum it is a density, and so
    nobody can say what that of its best action is. Random numbers beside the policy's, as of epsilon-greedy or of noise
    that is added to actions, are not known to it.

    Raises:
      InputError: `epsilon` with several policies, or agents of several kinds.
    """
    draw, alike = functools.partial(_uniform, spec), len(spaces.by_kind(spec)) == 1
    if player.algo is None:
        if not alike:
            raise InputError("random actions: agents of different spaces cannot be played with them")

        def at_random(given: Any, obs: PyTree, carry: PyTree, key: Key, explore: bool = True) -> ActOut:
            action, log_prob = draw(obs, key)
            return ActOut(action, carry, {LOG_PROB: log_prob})

        return at_random, True
    algo, epsilon = player.algo, acts.epsilon
    is_one = not _apart(player.cfg, spec)
    if epsilon and not (alike and is_one):
        raise InputError("--epsilon: the run has several policies: leave it out")
    draws = _has_distribution(player, spec) if acts.explore is None else acts.explore
    of_policy = _log_prob_of(player, spec, explore=draws, mixed=epsilon > 0) if is_one else None
    known = of_policy is not None or (not is_one and draws and not epsilon)

    # `explore` is what sources pass: how this one plays is fixed here
    def act(given: Any, obs: PyTree, carry: PyTree, key: Key, explore: bool = True) -> ActOut:
        actor, state = given
        own, anything, choice = jax.random.split(key, 3)
        out = algo.act(actor, obs, carry, own, draws)
        if not is_one:
            return out
        action, best = out.action, out.action
        if epsilon:
            drawn, log_uniform = draw(obs, anything)
            chosen = jax.random.bernoulli(choice, epsilon, log_uniform.shape)
            pick = lambda new, old: jnp.where(jnp.expand_dims(chosen, tuple(range(1, old.ndim))), new, old)
            action = jax.tree.map(pick, drawn, action)
        extras: dict[str, Any] = {}
        if of_policy is not None:
            log_prob = of_policy(state, obs, out, best, action)
            if epsilon:
                log_uniform = jnp.where(uniform.covers(spec.action, action), log_uniform, -jnp.inf)
                log_policy = log_prob + (math.log1p(-epsilon) if epsilon < 1 else -math.inf)
                log_prob = jnp.logaddexp(log_policy, math.log(epsilon) + log_uniform)
            extras[LOG_PROB] = log_prob
        return ActOut(action, out.carry, extras)

    return act, known


def _apart(cfg: RunConfig, spec: EnvSpec) -> bool:
    agents = build_policies.agents_if_any(cfg, spec)
    return agents is not None and bool(agents.extras)


def _uniform(spec: EnvSpec, obs: PyTree, key: Key) -> tuple[PyTree, Array]:
    mask = obs[spaces.ACTION_MASK] != 0 if spaces.masks_actions(spec) else None
    batch = spaces.batch_shape(spec.observation, obs)
    action = uniform.sample(spec.action, key, batch, mask)
    return action, jnp.broadcast_to(jnp.asarray(uniform.log_prob(spec.action, mask), jnp.float32), batch)


def _has_distribution(player: Player, spec: EnvSpec) -> bool:
    assert player.algo is not None
    if _apart(player.cfg, spec) or player.algo.outputs is None:
        return _apart(player.cfg, spec)
    return "distribution" in jax.eval_shape(player.algo.outputs, player.state, spaces.elements(spec.observation, 1))


def _log_prob_of(player: Player, spec: EnvSpec, *, explore: bool, mixed: bool) -> Callable[..., Array] | None:
    """Makes (state, obs, ActOut, the policy's action, the action taken) -> the policy's log-probability [B], or None.

    Args:
      player, spec: see `acting`.
      explore: whether actions are drawn.
      mixed: whether another action may have been taken.
    """
    algo = player.algo
    assert algo is not None
    if not explore:
        if any(isinstance(leaf, Box) for _, leaf in spaces.leaves(spec.action)):
            return None

        def of_best(state: Any, obs: PyTree, out: ActOut, best: PyTree, action: PyTree) -> Array:
            same: Any = True
            for x, y in zip(jax.tree.leaves(best), jax.tree.leaves(action), strict=True):
                same &= jnp.all(x == y, tuple(range(1, x.ndim)))
            return jnp.where(same, 0.0, -jnp.inf)

        return of_best
    if not mixed and LOG_PROB in _extras(player, spec):
        return lambda state, obs, out, best, action: out.extras[LOG_PROB]
    exploration = player.cfg.algo.exploration
    early = getattr(exploration, "random_timesteps", 0) > int(player.state.env_steps)
    plain = isinstance(exploration, Stochastic) and not early and not player.cfg.network.recurrent
    if not plain or not _has_distribution(player, spec):
        return None

    def of_distribution(state: Any, obs: PyTree, out: ActOut, best: PyTree, action: PyTree) -> Array:
        assert algo.outputs is not None
        return jnp.maximum(algo.outputs(state, obs)["distribution"].log_prob(action), _FORBIDDEN)

    return of_distribution


def _extras(player: Player, spec: EnvSpec) -> Mapping[str, Any]:
    algo = player.algo
    assert algo is not None
    act = lambda state, obs: algo.act(algo.actor(state), obs, algo.carry(1), jax.random.key(0)).extras
    return jax.eval_shape(act, player.state, spaces.elements(spec.observation, 1))
