"""Policies of several agents, made of a RunConfig: who follows which, and the parts of each."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl import envs, spaces
from jrl.agents import by_game, fixed, self_play
from jrl.agents.fixed import Group
from jrl.config import RunConfig, datasets, external, multi_agent, plan, seats
from jrl.config import policy_mapping as episode_settings
from jrl.envs import played, team, views
from jrl.errors import InputError
from jrl.learn import learner
from jrl.learn.learner import Learner
from jrl.rollout import complete, unroll
from jrl.run.store import checkpoint
from jrl.types import Algo, Dict, EnvSpec, Rollout

# (the run as one policy's agents would have it alone, their spec) -> the policy's algorithm
MakeAlgo = Callable[[RunConfig, EnvSpec], Algo]
_Members = dict[str, tuple[tuple[str, ...], RunConfig]]  # policy -> its agents, and the run as they alone would have it


def resolved(cfg: RunConfig) -> RunConfig:
    """Fills in what only the environment can say of its agents; a run with one agent stays as it is.

    Raises:
      InputError: agents, policies or mapping do not go together, or the environment cannot be made.
    """
    if datasets.alone(cfg):
        return cfg
    if cfg.external is not None:
        return _resolved_of_clients(cfg)
    if cfg.multi_agent is None and not envs.is_multi_agent(cfg.env):
        return cfg
    env = envs.make(cfg.env.waiting(1))
    env.close()
    spec, group = env.spec, cfg.multi_agent.group if cfg.multi_agent else None
    if spec.agents and group is not None:
        multi_agent.check_group(cfg, spec.agents, _kinds(spec))
        if multi_agent.is_one_team(group, spec.agents):
            return cfg  # whose agents are one: who learns need not know of them
        spec = team.grouped(spec, groups=group).spec
    return multi_agent.with_agents(cfg, spec.agents, _kinds(spec))


def _resolved_of_clients(cfg: RunConfig) -> RunConfig:
    spec = spec_of_clients(cfg)
    if cfg.multi_agent is None and not spec.agents:
        return cfg
    if not spec.agents:
        raise InputError("multi_agent: episodes of clients have one agent: name several in external.agents")
    found = multi_agent.with_agents(cfg, spec.agents, _kinds(spec))
    errors = [message for _, message in external.several_faults(found)]
    if episode_settings.per_episode(found):
        errors.append(
            "multi_agent.mapping: with external the policy of an agent cannot change from game to game: use a table"
        )
    if errors:
        raise InputError(*errors)
    return found


def spec_of_clients(cfg: RunConfig) -> EnvSpec:
    """Returns the spaces of what clients play: those of the config, of a run, or of an environment.

    Raises:
      InputError: there are none, or they do not go together.
    """
    given = cfg.external
    assert given is not None
    if given.observation is not None and given.action is not None:
        return played.spec(given.observation, given.action, cfg.env.num_envs, given.agents)
    if given.spaces is not None:
        found = _recorded(given.spaces)
    else:
        env = envs.make(cfg.env.waiting(1))
        env.close()
        found = env.spec
    seen, taken = found.env_observation or found.observation, found.env_action or found.action
    num = cfg.env.num_envs * found.num_agents
    return found._replace(observation=seen, action=taken, num_envs=num, env_action=None, env_observation=None)


def _recorded(path: str) -> EnvSpec:
    """Returns the spec of the environments that a run directory or checkpoint was trained in.

    Raises:
      InputError: there is no checkpoint, or it is damaged.
    """
    try:
        found = checkpoint.spec(checkpoint.read_meta(checkpoint.locate(Path(path))))
    except InputError as e:
        raise InputError(f"external.spaces: {e}") from e
    return found._replace(max_episode_steps=None)


def _kinds(spec: EnvSpec) -> dict[tuple[str, ...], str]:
    """Describes the spaces of each kind of agents; {} where all are alike."""
    kinds = spaces.by_kind(spec)
    if len(kinds) == 1:
        return {}
    return {one.agents: f"observations {one.observation}, actions {one.action}" for one in kinds}


def check(cfg: RunConfig, spec: EnvSpec, learners: int) -> None:
    """Raises InputError: the environments turned out to have several agents, or collecting does not go with them, or
    with so many devices that learn; or they have one agent, and metrics of several are named.
    """
    if not spec.agents:
        if errors := list(multi_agent.alone_faults(cfg)):
            raise InputError(*errors)
        return
    if cfg.multi_agent is None:
        raise InputError(
            f"env.id {cfg.env.id} has several agents, {', '.join(spec.agents)}: say so with a section multi_agent: {{}}"
        )
    if cfg.multi_agent.self_play and (errors := list(seats.split_faults(cfg, len(spec.agents), learners))):
        raise InputError(*errors)


def columns_of_games(cfg: RunConfig, spec: EnvSpec) -> dict[str, Any]:
    """Returns what callbacks need to tell the agents of a game apart, options of `Stitch`; {} with one agent."""
    return {"kinds": spec.kinds, "agents": spec.agents, "policies": followed(cfg, spec)} if spec.agents else {}


def check_episodes(cfg: RunConfig, spec: EnvSpec, *, told: bool) -> None:
    """Raises InputError where callbacks ask for episodes, and games cannot be shown to them."""
    if told and spec.agents and cfg.env_runners.num and cfg.rollout.batch_mode != "truncate_episodes":
        raise InputError(
            "custom.callbacks: env runners send whole episodes of each agent, which cannot be joined to games for "
            "callbacks: leave out env_runners, or use rollout.batch_mode truncate_episodes"
        )


def agent_options(cfg: RunConfig) -> envs.AgentOptions:
    """Returns the options of environments with several agents."""
    given = cfg.multi_agent
    if given is None:
        return envs.AgentOptions()
    return envs.AgentOptions(
        given.observation_fn, given.agent_id, given.group, game_numbers=episode_settings.per_episode(cfg)
    )


def are_several(cfg: RunConfig) -> bool:
    """Returns whether a run has more than one policy, or may have, or one that does not learn."""
    if episode_settings.per_episode(cfg):
        return True
    policies = multi_agent.followers(cfg)
    return len(policies) > 1 or not all(multi_agent.is_trained(cfg, name) for name in policies)


def learns(cfg: RunConfig, group: Group) -> bool:
    """Returns whether policies of a group learn, or may be told to later."""
    return episode_settings.per_episode(cfg) or multi_agent.is_trained(cfg, group.names[0])


def of_run(cfg: RunConfig) -> RunConfig:
    """Returns the run as the algorithm of its one policy sees it, with the policy's own settings."""
    policies = multi_agent.followers(cfg)
    return multi_agent.policy_config(cfg, next(iter(policies))) if policies else cfg


def of_policy(cfg: RunConfig, spec: EnvSpec, policy: str) -> tuple[RunConfig, EnvSpec]:
    """Returns the run and its environments as one policy's agents alone would have them."""
    return multi_agent.policy_config(cfg, policy), spec_of(seen(cfg, spec), multi_agent.followers(cfg)[policy])


def seen(cfg: RunConfig, spec: EnvSpec) -> EnvSpec:
    """Returns the environments as policies see them, without the number of the game."""
    if not episode_settings.per_episode(cfg):
        return spec
    assert isinstance(spec.observation, Dict)
    return spec._replace(observation=spec.observation[views.OBS])


def sizes(cfg: RunConfig) -> by_game.Sizes:
    """Returns the shape of the table of who follows which policy in games to come."""
    assert cfg.multi_agent is not None and cfg.multi_agent.agents is not None
    # a game takes two rows at least, one of them its reset; one is under way, and one more may have begun
    rollouts = plan.iterations_per_call(cfg) + plan.rollouts_ahead(cfg)
    waits = cfg.rollout.batch_mode != "truncate_episodes"  # for its end, before it is known to have begun
    ahead = plan.rollout_length(cfg) * rollouts // 2 + 3 + waits
    return by_game.Sizes(ahead, cfg.env.num_envs, len(cfg.multi_agent.agents), len(multi_agent.numbered(cfg)))


def trained(cfg: RunConfig) -> list[bool]:
    """Returns which policies learn, by number, where the policy of an agent may change from game to game."""
    return [multi_agent.is_trained(cfg, name) for name in multi_agent.numbered(cfg)]


def spec_of(spec: EnvSpec, agents: tuple[str, ...]) -> EnvSpec:
    """Returns the environments as some of their agents, of one kind, see them."""
    return _kind_of(spec, agents)._replace(num_envs=spec.games * len(agents), agents=agents)


def _kind_of(spec: EnvSpec, agents: tuple[str, ...]) -> EnvSpec:
    return next(one for one in spaces.by_kind(spec) if agents[0] in one.agents)


def groups(cfg: RunConfig, spec: EnvSpec, make: MakeAlgo) -> list[tuple[Group, RunConfig, EnvSpec]]:
    """Returns the policies of a run, those that are alike together, each group with its config and spec.

    Learners are left out: who only acts needs none.
    """
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        own, of_one = of_policy(cfg, spec, cfg.multi_agent.self_play.policy)
        places = seats.places(cfg.multi_agent.self_play)
        seated = self_play.groups(cfg.multi_agent.self_play.policy, places, make(own, of_one), len(spec.agents))
        return [(group, own, of_one) for group in seated]
    if episode_settings.per_episode(cfg):
        return [_group(seen(cfg, spec), members, make) for members in _alike_by_game(cfg, spec)]
    return [_group(spec, members, make) for members in _alike(cfg, spec)]


def _alike_by_game(cfg: RunConfig, spec: EnvSpec) -> list[_Members]:
    """Returns the policies of each group, each of which any agent may follow."""
    members = lambda name: (spec.agents, multi_agent.policy_config(cfg, name))
    return [{name: members(name) for name in names} for names in multi_agent.alike(cfg)]


def _alike(cfg: RunConfig, spec: EnvSpec) -> list[_Members]:
    """Returns the policies of each group, which differ in weights and floats at most."""
    found: list[tuple[Any, _Members]] = []
    for name, agents in multi_agent.followers(cfg).items():
        own, learns = multi_agent.policy_config(cfg, name), multi_agent.is_trained(cfg, name)
        like = (multi_agent.without_floats(own), learns, len(agents), _kind_of(spec, agents))
        for other, members in found:
            if other == like:
                members[name] = agents, own
                break
        else:
            found.append((like, {name: (agents, own)}))
    return [members for _, members in found]


def _numbers(spec: EnvSpec, members: _Members) -> np.ndarray:
    """Returns the agents of each policy of a group, by number, [P, n]."""
    return np.array([[spec.agents.index(agent) for agent in agents] for agents, _ in members.values()])


def _group(spec: EnvSpec, members: _Members, make: MakeAlgo) -> tuple[Group, RunConfig, EnvSpec]:
    agents, own = next(iter(members.values()))
    of_one, floats = spec_of(spec, agents), differing([each.algo for _, each in members.values()])
    group = Group(tuple(members), _numbers(spec, members), make(own, of_one), kinds=spec.kinds)
    if floats:
        bound = lambda values: group._replace(algo=make(with_floats(own, values), of_one))
        group = group._replace(floats=floats, of_floats=bound)
    return group, own, of_one


def differing(configs: Sequence[Any]) -> dict[int, np.ndarray]:
    """Returns the floats in which Configs of one structure differ: number of the leaf -> [P] f32.

    The others stay the numbers that they are, which XLA can fold.
    """
    leaves = zip(*map(jax.tree.leaves, configs), strict=True)
    return {i: np.asarray(values, np.float32) for i, values in enumerate(leaves) if len(set(values)) > 1}


def with_floats(cfg: RunConfig, values: Mapping[int, Any]) -> RunConfig:
    """Returns a config with other floats of its algorithm, by number of the leaf; they may be traced."""
    leaves, structure = jax.tree.flatten(cfg.algo)
    changed = [values.get(i, x) for i, x in enumerate(leaves)]
    return dataclasses.replace(cfg, algo=jax.tree.unflatten(structure, changed))


def acting(cfg: RunConfig, spec: EnvSpec, make: MakeAlgo) -> Algo:
    """Makes the Algo that acts with all policies of a run."""
    found = [group for group, *_ in groups(cfg, spec, make)]
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        return self_play.acting(found)
    if episode_settings.per_episode(cfg):
        return by_game.acting(found, sizes(cfg))
    return fixed.acting(found, len(spec.agents))


def learning(cfg: RunConfig, spec: EnvSpec, found: Sequence[Group], *, axis_name: str | None = None) -> Learner:
    """Makes the Learner of all policies of a run, whose groups have their learners."""
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        return self_play.learning(found, len(spec.agents), axis_name=axis_name)
    if episode_settings.per_episode(cfg):
        return by_game.learning(found, sizes(cfg), trained(cfg), axis_name=axis_name)
    return fixed.learning(found, len(spec.agents), lockstep=multi_agent.in_lockstep(cfg))


def watches_games(cfg: RunConfig) -> bool:
    """Returns whether learning needs the ends of games: a league counts them, and policies that differ by game."""
    return episode_settings.per_episode(cfg) or bool(cfg.multi_agent and cfg.multi_agent.self_play)


def checked(cfg: RunConfig, learn: Learner, spec: EnvSpec, axis_name: str | None) -> Learner:
    """Makes the learner report rows on which no action can be taken: see `jrl.learn.learner.checked`."""
    observed = (lambda obs: obs[views.OBS]) if episode_settings.per_episode(cfg) else None
    return learner.checked(learn, seen(cfg, spec), axis_name=axis_name, observed=observed)


def learned(cfg: RunConfig, spec: EnvSpec) -> EnvSpec:
    """Returns the environments as learners see them: without agents where `count_steps_by` counts agents' steps."""
    return spec._replace(agents=()) if cfg.rollout.count_steps_by == "agent_steps" else spec


def agents_if_any(cfg: RunConfig, spec: EnvSpec) -> complete.Agents | None:
    """Returns what `agents_of` does; None of environments with one agent."""
    return agents_of(cfg, spec) if spec.agents else None


def agents_of(cfg: RunConfig, spec: EnvSpec) -> complete.Agents:
    """Returns the agents and policies of a rollout's columns, and where policies record their extras."""
    policies = list(multi_agent.followers(cfg))
    follows = tuple(map(policies.index, followed(cfg, spec)))
    found: list[tuple[tuple[str, ...], np.ndarray]] = []
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        mine, theirs = self_play.seats(len(spec.agents), cfg.multi_agent.self_play.pool)
        found = [(tuple(policies[:1]), mine), (tuple(policies[1:]), theirs)]
    elif are_several(cfg) and not episode_settings.per_episode(cfg):
        found = [(tuple(members), _numbers(spec, members)) for members in _alike(cfg, spec)]
    extras = {fixed.label(names): tuple(numbers.reshape(-1).tolist()) for names, numbers in found}
    return complete.Agents(follows, spec.kinds, extras)


def rollout_like(cfg: RunConfig, spec: EnvSpec, algo: Algo, **sizes: Any) -> Rollout:
    """Returns shapes and dtypes of the rollouts that a run or policy learns from; sizes as of `unroll.rollout_like`."""
    like = unroll.rollout_like(learned(cfg, spec), algo, **sizes)
    if spec.agents and unroll.RECORD in like.extras and cfg.rollout.count_steps_by == "agent_steps":
        recorded: Any = like.extras[unroll.RECORD]
        like = dataclasses.replace(like, extras={**like.extras, unroll.RECORD: {**recorded, "over": like.mask}})
    side_by_side = cfg.rollout.batch_mode == "truncate_episodes" and cfg.external is None
    return like if side_by_side else complete.led_like(like)


def followed(cfg: RunConfig, spec: EnvSpec) -> tuple[str, ...]:
    """Names the policy of each agent's slot, after which they repeat: those of a game, or of a block of self-play."""
    policies = multi_agent.followers(cfg)
    if cfg.multi_agent is None or cfg.multi_agent.self_play is None:
        return tuple(next(name for name, own in policies.items() if agent in own) for agent in spec.agents)
    mine, theirs = self_play.seats(len(spec.agents), cfg.multi_agent.self_play.pool)
    seated = zip(policies, (*mine, *theirs), strict=True)
    of_column = {column: name for name, columns in seated for column in columns.tolist()}
    return tuple(of_column[column] for column in sorted(of_column))


def gammas(gamma: Any, spec: EnvSpec) -> Any:
    """Returns the discount of each slot's running return: one policy's number, or an array that repeats."""
    return np.tile(gamma, spec.num_envs // len(gamma)) if isinstance(gamma, np.ndarray) else gamma
