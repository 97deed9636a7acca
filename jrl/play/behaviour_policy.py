"""Policies that play into a data set, alone or by turns, with the log-probability of the actions really taken."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl import agents, config, spaces
from jrl.algos import uniform
from jrl.algos.exploration import Stochastic
from jrl.config import RunConfig, policy_mapping
from jrl.data.store import LOG_PROB, Episode
from jrl.errors import InputError
from jrl.learn.program import Role, role_key
from jrl.play.actor import Actor, load_all
from jrl.play.evaluate import Player
from jrl.play.tally import Goal
from jrl.rollout.stitch import Stitch
from jrl.rollout.unroll import reset_where
from jrl.run import build_collect, data_output
from jrl.types import ActOut, Array, Box, EnvSpec, Key, PyTree

_LENGTH = 256  # most steps of a rollout
_FORBIDDEN = -1e30  # no policy's log-probability is below it


class Acts(NamedTuple):
    """Ways to play a policy."""

    explore: bool | None = None  # draws its actions; None: where it has a distribution of them
    epsilon: float = 0.0  # share of the steps whose action is uniformly random


class Behaviour(NamedTuple):
    """A policy that plays."""

    name: str
    share: float  # of all steps
    cfg: RunConfig  # whose environments it plays in
    actor: Actor | None  # None: uniformly random actions


def trained(name: str, share: float, *, best: bool | None, settings: Sequence[str]) -> Behaviour:
    """Loads the policy of a run directory or a checkpoint. Raises InputError: there is none, or it cannot be played."""
    actor = load_all(name, best=best, settings=settings)
    cfg = config.without_loss(actor.config)
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        raise InputError(f"{name}: a run in self-play: write its games by data.output while it trains")
    if policy_mapping.by_game(cfg.multi_agent):
        raise InputError(f"{name}: its policies change from game to game: name each agent's in multi_agent.mapping")
    return Behaviour(name, share, cfg, actor)


def play(
    behaviour: Behaviour, steps: int, take: Callable[[int, Episode], None], *, acts: Acts, seed: int, index: int,
    num_envs: int, log_prob: bool = True,
) -> None:  # fmt: skip
    """Plays `steps` environment steps, rounded up to steps of all environments.

    Args:
      behaviour: the policy that plays.
      steps: of all environments together.
      take: gets (kind of agents, episode) of each; those under way at the end are cut.
      acts: how it acts.
      seed, index: of environments and of actions.
      num_envs: environments at once.
      log_prob: whether episodes have that column; False where it is not known of all of a data set.
    """
    cfg, actor = behaviour.cfg, behaviour.actor
    env = environment(cfg, seed=seed, index=index, num_envs=num_envs)
    act, known = acting(behaviour, env.spec, acts)
    write = lambda episode: take(episode.kind, data_output.as_data(episode, {"source": behaviour.name}))
    options = data_output.stitch_options(agents.make(cfg, env.spec), (LOG_PROB,) if known and log_prob else ())
    stitch = Stitch(env.spec.num_envs, take=write, **options)
    length = max(1, min(_LENGTH, -(-steps // env.spec.games)))
    carry = actor.algo.carry if actor is not None else lambda batch_size: ()
    player, weights = Player(env, act, carry=carry, length=length, record=True), None
    if actor is not None:
        weights = jax.device_put((actor.weights, actor.state), jax.local_devices()[0])
    key, watches = role_key(seed, Role.DATA, index), [lambda rollout, infos: stitch.add(rollout)]
    try:
        player.begin(jax.random.fold_in(key, 0))
        goal = Goal(steps, "timesteps", reset=False)
        player.play(weights, key, goal, watches=watches, max_steps=sys.maxsize, first=1)
    finally:
        player.close()
    stitch.reset()


def environment(cfg: RunConfig, *, seed: int, index: int, num_envs: int) -> Any:
    """Makes environments as those of the run, with seeds of their own. Raises InputError."""
    alone = dataclasses.replace(cfg.env_runners, num=0)
    run = dataclasses.replace(cfg.run, seed=seed)
    cfg = dataclasses.replace(cfg, run=run, env_runners=alone)
    return build_collect.environment(cfg, num_envs=num_envs, role="data", index=index)


def spec_of(behaviour: Behaviour, num_envs: int) -> EnvSpec:
    """Returns the spec of a behaviour's environments."""
    env = environment(behaviour.cfg, seed=0, index=0, num_envs=num_envs)
    env.close()
    return env.spec


# ---------------------------------------------------------------- acting


def acting(behaviour: Behaviour, spec: EnvSpec, acts: Acts) -> tuple[Callable[..., ActOut], bool]:
    """Makes ((weights, state), obs [B, *], carry, key) -> ActOut with `log_prob` alone in extras; and whether that is
    known.

    It is log((1 - epsilon) p(a) + epsilon u(a)): p of the policy, which for the best of a set of choices is 1 and of
    another 0, u uniform over the actions that can be taken. Of a distribution over a continuum it is a density, and so
    nobody can say what that of its best action is. Random numbers beside the policy's, as of epsilon-greedy or of noise
    that is added to actions, are not known to it.

    Raises:
      InputError: `epsilon` with several policies, or agents of several kinds.
    """
    actor, epsilon, alike = behaviour.actor, acts.epsilon, len(spaces.by_kind(spec)) == 1
    if actor is None:
        if not alike:
            raise InputError("random actions: agents of different spaces cannot be played with them")

        def at_random(given: Any, obs: PyTree, carry: PyTree, key: Key, explore: bool = True) -> ActOut:
            action, log_prob = _uniform(spec, obs, key)
            return ActOut(action, carry, {LOG_PROB: log_prob})

        return at_random, True
    columns = agents.make(behaviour.cfg, spec).columns
    algo, several = actor.algo, columns is not None and bool(columns.extras)
    if epsilon and not (alike and not several):
        raise InputError("--epsilon: the run has several policies: leave it out")
    obs = spaces.elements(spec.observation, 1)
    found = {} if several or algo.outputs is None else jax.eval_shape(algo.outputs, actor.state, obs)
    draws = (several or "distribution" in found) if acts.explore is None else acts.explore
    of_policy = None
    if not several:
        of_policy = _log_prob(actor, spec, explore=draws, mixed=epsilon > 0, has_distribution="distribution" in found)
    known = draws if several else of_policy is not None

    # `explore` is what sources pass: how this behaviour plays is fixed here
    def act(given: Any, obs: PyTree, carry: PyTree, key: Key, explore: bool = True) -> ActOut:
        weights, state = given
        own, anything, choice = jax.random.split(key, 3)
        out = algo.act(weights, obs, carry, own, draws)
        if several:
            return out
        action, best = out.action, out.action
        if epsilon:
            drawn, log_uniform = _uniform(spec, obs, anything)
            action = reset_where(jax.random.bernoulli(choice, epsilon, log_uniform.shape), drawn, action)
        if of_policy is None:
            return ActOut(action, out.carry, {})
        log_prob = of_policy(state, obs, out, best, action)
        if epsilon:
            log_uniform = jnp.where(uniform.covers(spec.action, action), log_uniform, -jnp.inf)
            log_policy = log_prob + (math.log1p(-epsilon) if epsilon < 1 else -math.inf)
            log_prob = jnp.logaddexp(log_policy, math.log(epsilon) + log_uniform)
        return ActOut(action, out.carry, {LOG_PROB: log_prob})

    return act, known


def _uniform(spec: EnvSpec, obs: PyTree, key: Key) -> tuple[PyTree, Array]:
    mask = obs[spaces.ACTION_MASK] != 0 if spaces.masks_actions(spec) else None
    batch = spaces.batch_shape(spec.observation, obs)
    action = uniform.sample(spec.action, key, batch, mask)
    return action, jnp.broadcast_to(jnp.asarray(uniform.log_prob(spec.action, mask), jnp.float32), batch)


def _log_prob(
    actor: Actor, spec: EnvSpec, *, explore: bool, mixed: bool, has_distribution: bool
) -> Callable[..., Array] | None:
    """Makes (state, obs, ActOut, the policy's action, the action taken) -> the policy's log-probability [B], or None.

    Args:
      explore: whether actions are drawn.
      mixed: whether another action may have been taken.
      has_distribution: whether the policy's outputs have the distribution of its actions.
    """
    algo, cfg = actor.algo, actor.config
    if not explore:
        if any(isinstance(leaf, Box) for _, leaf in spaces.leaves(spec.action)):
            return None

        def of_best(state: Any, obs: PyTree, out: ActOut, best: PyTree, action: PyTree) -> Array:
            same: Any = True
            for x, y in zip(jax.tree.leaves(best), jax.tree.leaves(action), strict=True):
                same &= jnp.all(x == y, tuple(range(1, x.ndim)))
            return jnp.where(same, 0.0, -jnp.inf)

        return of_best
    obs = spaces.elements(spec.observation, 1)
    act = lambda weights, obs: algo.act(weights, obs, algo.carry(1), jax.random.key(0)).extras
    if not mixed and LOG_PROB in jax.eval_shape(act, actor.weights, obs):
        return lambda state, obs, out, best, action: out.extras[LOG_PROB]
    exploration = cfg.algo.exploration
    early = getattr(exploration, "random_timesteps", 0) > int(actor.state.env_steps)
    plain = isinstance(exploration, Stochastic) and not early and not cfg.network.recurrent
    if not plain or not has_distribution:
        return None

    def of_distribution(state: Any, obs: PyTree, out: ActOut, best: PyTree, action: PyTree) -> Array:
        assert algo.outputs is not None
        return jnp.maximum(algo.outputs(state, obs)["distribution"].log_prob(action), _FORBIDDEN)

    return of_distribution
