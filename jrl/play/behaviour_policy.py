"""Policies that record a data set, with the log-probability of each action taken."""

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
from jrl.data.episode import Episode
from jrl.data.store import LOG_PROB
from jrl.errors import InputError
from jrl.learn.program import Role, role_key
from jrl.play.actor import Actor, load_all
from jrl.play.player import Player
from jrl.play.tally import Goal
from jrl.rollout.stitch import Stitch
from jrl.rollout.unroll import reset_where
from jrl.run import build_collect, data_output
from jrl.types import ActOut, Array, Box, EnvSpec, Key, PyTree

_LENGTH = 256  # maximum steps of a rollout
_MIN_LOG_PROB = -1e30  # log-probability of actions that a mask forbids


class ActionOptions(NamedTuple):
    """Options of choosing actions."""

    explore: bool | None = None  # sample from the policy; None: if it has a distribution, else its best action
    epsilon: float = 0.0  # share of steps with a uniformly random action


class Behaviour(NamedTuple):
    """A policy that records a part of a data set."""

    name: str
    share: float  # share of all steps
    cfg: RunConfig  # config of its environments
    actor: Actor | None  # None: uniformly random actions


def load_behaviour(name: str, share: float, *, best: bool | None, settings: Sequence[str]) -> Behaviour:
    """Loads the policies of a run directory or a checkpoint.

    Raises:
      InputError: the checkpoint is missing, or its policies cannot record a data set.
    """
    actor = load_all(name, best=best, settings=settings)
    cfg = config.without_loss(actor.config)
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        raise InputError(f"{name}: expected a run without self-play: record games with data.output while it trains")
    if policy_mapping.by_game(cfg.multi_agent):
        raise InputError(
            f"{name}: expected one policy per agent in all games, got a mapping by game: use a run whose "
            "multi_agent.mapping is a dict"
        )
    return Behaviour(name, share, cfg, actor)


def play(
    behaviour: Behaviour, steps: int, take: Callable[[int, Episode], None], *, options: ActionOptions, seed: int,
    index: int, num_envs: int, log_prob: bool = True,
) -> None:  # fmt: skip
    """Plays `steps` environment steps, rounded up to whole vector steps.

    Args:
      behaviour: the policy.
      steps: steps summed over environments.
      take: called with (index of the agents' kind, episode) for each episode; unfinished episodes are cut at the end.
      options: options of choosing actions.
      seed, index: seed and index of environments and actions.
      num_envs: number of environments.
      log_prob: whether episodes have the column `log_prob`; False if it is unknown for some policy of the data set.
    """
    cfg, actor = behaviour.cfg, behaviour.actor
    env = build_environment(cfg, seed=seed, index=index, num_envs=num_envs)
    act, has_log_prob = build_act(behaviour, env.spec, options)
    columns = (LOG_PROB,) if has_log_prob and log_prob else ()
    stitch = Stitch(env.spec.num_envs, **data_output.stitch_options(agents.make(cfg, env.spec), columns))

    def write(episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            take(episode.kind, data_output.to_data_episode(episode, {"source": behaviour.name}))

    length = max(1, min(_LENGTH, -(-steps // env.spec.games)))
    carry = actor.algo.carry if actor is not None else lambda batch_size: ()
    player, weights = Player(env, act, carry=carry, length=length, record=True), None
    if actor is not None:
        weights = jax.device_put((actor.weights, actor.state), jax.local_devices()[0])
    key, on_rows = role_key(seed, Role.DATA, index), [lambda rollout, infos: write(stitch.add(rollout))]
    try:
        player.begin(jax.random.fold_in(key, 0))
        goal = Goal(steps, "timesteps", reset=False)
        player.play(weights, key, goal, on_rows=on_rows, max_steps=sys.maxsize, first=1)
    finally:
        player.close()
    write(stitch.reset())


def build_environment(cfg: RunConfig, *, seed: int, index: int, num_envs: int) -> Any:
    """Returns environments of the run in this process, with other seeds. Raises InputError."""
    runners = dataclasses.replace(cfg.env_runners, num=0)
    run = dataclasses.replace(cfg.run, seed=seed)
    cfg = dataclasses.replace(cfg, run=run, env_runners=runners)
    return build_collect.environment(cfg, num_envs=num_envs, role="data", index=index)


def find_spec(behaviour: Behaviour, num_envs: int) -> EnvSpec:
    """Returns the spec of a behaviour's environments, which are made and closed."""
    env = build_environment(behaviour.cfg, seed=0, index=0, num_envs=num_envs)
    env.close()
    return env.spec


# ---------------------------------------------------------------- acting


def build_act(behaviour: Behaviour, spec: EnvSpec, options: ActionOptions) -> tuple[Callable[..., ActOut], bool]:
    """Returns ((weights, state), obs [B, *], carry, key) -> ActOut, and whether the log-probability is known.

    Extras have `log_prob` = log((1 - epsilon) p(a) + epsilon u(a)). p is the policy's probability, u uniform over the
    allowed actions. A greedy policy has p = 1 for its best action, else 0; in a Box, where p is a density, p is
    unknown. Also unknown is p with exploration outside of the policy, such as epsilon-greedy or action noise.

    Raises:
      InputError: `epsilon` with several policies, or agents of several kinds.
    """
    actor, epsilon, is_one_kind = behaviour.actor, options.epsilon, len(spaces.by_kind(spec)) == 1
    if actor is None:
        if not is_one_kind:
            raise InputError("random actions: expected agents of equal spaces, got agents of several kinds: give a run")

        def act_at_random(given: Any, obs: PyTree, carry: PyTree, key: Key, explore: bool = True) -> ActOut:
            action, log_prob = _sample_uniform(spec, obs, key)
            return ActOut(action, carry, {LOG_PROB: log_prob})

        return act_at_random, True
    columns = agents.make(behaviour.cfg, spec).columns
    algo, several = actor.algo, columns is not None and bool(columns.extras)
    if epsilon and not (is_one_kind and not several):
        raise InputError("--epsilon: the run has several policies: leave it out")
    obs = spaces.elements(spec.observation, 1)
    outputs = {} if several or algo.outputs is None else jax.eval_shape(algo.outputs, actor.state, obs)
    has_distribution = "distribution" in outputs
    explores = (several or has_distribution) if options.explore is None else options.explore
    policy_log_prob = None
    if not several:
        policy_log_prob = _build_log_prob(
            actor, spec, explore=explores, is_mixed=epsilon > 0, has_distribution=has_distribution
        )
    has_log_prob = explores if several else policy_log_prob is not None

    # sources pass `explore`, but `options` decide here
    def act(given: Any, obs: PyTree, carry: PyTree, key: Key, explore: bool = True) -> ActOut:
        weights, state = given
        policy_key, uniform_key, choice_key = jax.random.split(key, 3)
        out = algo.act(weights, obs, carry, policy_key, explores)
        if several:
            return out
        action, best = out.action, out.action
        if epsilon:
            drawn, log_uniform = _sample_uniform(spec, obs, uniform_key)
            action = reset_where(jax.random.bernoulli(choice_key, epsilon, log_uniform.shape), drawn, action)
        if policy_log_prob is None:
            return ActOut(action, out.carry, {})
        log_prob = policy_log_prob(state, obs, out, best, action)
        if epsilon:
            log_uniform = jnp.where(uniform.covers(spec.action, action), log_uniform, -jnp.inf)
            log_policy = log_prob + (math.log1p(-epsilon) if epsilon < 1 else -math.inf)
            log_prob = jnp.logaddexp(log_policy, math.log(epsilon) + log_uniform)
        return ActOut(action, out.carry, {LOG_PROB: log_prob})

    return act, has_log_prob


def _sample_uniform(spec: EnvSpec, obs: PyTree, key: Key) -> tuple[PyTree, Array]:
    mask = obs[spaces.ACTION_MASK] != 0 if spaces.masks_actions(spec) else None
    batch = spaces.batch_shape(spec.observation, obs)
    action = uniform.sample(spec.action, key, batch, mask)
    return action, jnp.broadcast_to(jnp.asarray(uniform.log_prob(spec.action, mask), jnp.float32), batch)


def _build_log_prob(
    actor: Actor, spec: EnvSpec, *, explore: bool, is_mixed: bool, has_distribution: bool
) -> Callable[..., Array] | None:
    """Returns (state, obs, ActOut, the policy's action, the action taken) -> log-probability [B]; None: unknown.

    Args:
      explore: whether actions are sampled.
      is_mixed: whether the action taken can differ from the policy's action.
      has_distribution: whether the policy's outputs have the distribution of its actions.
    """
    algo, cfg = actor.algo, actor.config
    if not explore:
        if any(isinstance(leaf, Box) for _, leaf in spaces.leaves(spec.action)):
            return None

        def greedy_log_prob(state: Any, obs: PyTree, out: ActOut, best: PyTree, action: PyTree) -> Array:
            same: Any = True
            for x, y in zip(jax.tree.leaves(best), jax.tree.leaves(action), strict=True):
                same &= jnp.all(x == y, tuple(range(1, x.ndim)))
            return jnp.where(same, 0.0, -jnp.inf)

        return greedy_log_prob
    obs = spaces.elements(spec.observation, 1)
    act = lambda weights, obs: algo.act(weights, obs, algo.carry(1), jax.random.key(0)).extras
    if not is_mixed and LOG_PROB in jax.eval_shape(act, actor.weights, obs):
        return lambda state, obs, out, best, action: out.extras[LOG_PROB]
    exploration = cfg.algo.exploration
    is_random = getattr(exploration, "random_timesteps", 0) > int(actor.state.env_steps)
    is_plain = isinstance(exploration, Stochastic) and not is_random and not cfg.network.recurrent
    if not is_plain or not has_distribution:
        return None

    def sampled_log_prob(state: Any, obs: PyTree, out: ActOut, best: PyTree, action: PyTree) -> Array:
        assert algo.outputs is not None
        return jnp.maximum(algo.outputs(state, obs)["distribution"].log_prob(action), _MIN_LOG_PROB)

    return sampled_log_prob
