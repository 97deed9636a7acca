"""From a RunConfig to the policies of several agents: who follows which, what each is made of."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrl import envs, spaces
from jrl.envs import team, views
from jrl.errors import InputError
from jrl.rollout import complete, unroll
from jrl.run import self_play, several
from jrl.run.learner import Learner
from jrl.run.several import Group
from jrl.settings import multi_agent
from jrl.settings import self_play as seats
from jrl.settings.config import RunConfig
from jrl.types import Algo, EnvSpec, Rollout

# (the run as one policy's agents would have it alone, their spec) -> the policy's algorithm
MakeAlgo = Callable[[RunConfig, EnvSpec], Algo]


def resolved(cfg: RunConfig) -> RunConfig:
    """Fills in what only the environment can say of its agents; a run with one agent stays as it is.

    Raises:
      InputError: agents, policies or mapping do not go together, or the environment cannot be made.
    """
    if cfg.multi_agent is None and not envs.is_multi_agent(cfg.env):
        return cfg
    alone = dataclasses.replace(cfg.env, num_envs=1, batch_size=None, batch_wait_ms=None)
    env = envs.make(alone)
    env.close()
    return multi_agent.with_agents(cfg, env.spec.agents, _kinds(env.spec))


def _kinds(spec: EnvSpec) -> dict[tuple[str, ...], str]:
    """Agents of a kind -> what they see and do, in words; {} where all are alike."""
    of_kinds = spaces.by_kind(spec) if spec.kinds else ()
    return {one.agents: f"observations {one.observation}, actions {one.action}" for one in of_kinds}


def check(cfg: RunConfig, spec: EnvSpec) -> None:
    """Raises InputError: the environments turned out to have several agents, or collecting does not go with them."""
    if not spec.agents:
        return
    if cfg.multi_agent is None:
        raise InputError(
            f"env.id {cfg.env.id} has several agents, {', '.join(spec.agents)}: say so with a section multi_agent: {{}}"
        )
    if cfg.multi_agent.self_play and cfg.rollout.batch_mode != "truncate_episodes":
        raise InputError(
            "rollout.batch_mode complete_episodes: self-play counts the games that began after the latest copy by "
            "their rows in the rollout, and whole episodes do not stand on the rows on which they were played: use "
            "truncate_episodes"
        )
    if cfg.multi_agent.self_play and (
        errors := list(seats.split_faults(cfg, len(spec.agents), cfg.env.num_envs // spec.games))
    ):
        raise InputError(*errors)


def check_episodes(cfg: RunConfig, spec: EnvSpec, *, told: bool) -> None:
    """Raises InputError where games cannot be told of to callbacks, if they ask for episodes."""
    if told and spec.agents and cfg.env_runners.num and cfg.rollout.batch_mode != "truncate_episodes":
        raise InputError(
            "custom.callbacks: env runners send whole episodes of each agent, of which games cannot be put together "
            "for callbacks: leave out env_runners, or use rollout.batch_mode truncate_episodes"
        )


def viewed(env: Any, cfg: RunConfig) -> Any:
    """The environments as the agents of a run see them."""
    given = cfg.multi_agent
    if given is None:
        return env
    if given.observation_fn is not None:
        env = views.with_function(env, given.observation_fn)
    env = views.with_agent_ids(env) if given.agent_id else env
    return env if given.group is None else team.team(env, agents=next(iter(given.group.values())))


def are_several(cfg: RunConfig) -> bool:
    """Whether a run has more than one policy, or one that does not learn."""
    policies = multi_agent.followers(cfg)
    return len(policies) > 1 or not all(multi_agent.is_trained(cfg, name) for name in policies)


def of_run(cfg: RunConfig) -> RunConfig:
    """The run as the algorithm of its one policy sees it, with what that has of its own."""
    policies = multi_agent.followers(cfg)
    return multi_agent.policy_config(cfg, next(iter(policies))) if policies else cfg


def of_policy(cfg: RunConfig, spec: EnvSpec, policy: str) -> tuple[RunConfig, EnvSpec]:
    """The run and its environments as one policy's agents alone would have them."""
    return multi_agent.policy_config(cfg, policy), spec_of(spec, multi_agent.followers(cfg)[policy])


def spec_of(spec: EnvSpec, agents: tuple[str, ...]) -> EnvSpec:
    """The environments as some of their agents, of one kind, see them."""
    return _kind_of(spec, agents)._replace(num_envs=spec.games * len(agents), agents=agents)


def _kind_of(spec: EnvSpec, agents: tuple[str, ...]) -> EnvSpec:
    """The environments as all agents of their kind see them."""
    return next(one for one in spaces.by_kind(spec) if agents[0] in one.agents)


def groups(cfg: RunConfig, spec: EnvSpec, make: MakeAlgo) -> list[tuple[Group, RunConfig, EnvSpec]]:
    """The policies of a run, those that are alike together, each group with its config and spec.

    Learners are left out: who only acts needs none.
    """
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        own, of_one = of_policy(cfg, spec, cfg.multi_agent.self_play.policy)
        places = seats.places(cfg.multi_agent.self_play)
        seated = self_play.groups(cfg.multi_agent.self_play.policy, places, make(own, of_one), len(spec.agents))
        return [(group, own, of_one) for group in seated]
    made = []
    for members, numbers in _alike(cfg, spec):
        own, of_one = of_policy(cfg, spec, members[0])
        made.append((Group(members, numbers, make(own, of_one), kinds=spec.kinds), own, of_one))
    return made


def _alike(cfg: RunConfig, spec: EnvSpec) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """The policies that are alike in all but their weights, with the numbers of their agents, [P, n]."""
    found: list[tuple[Any, dict[str, tuple[str, ...]]]] = []
    for name, agents in multi_agent.followers(cfg).items():
        own, learns = multi_agent.policy_config(cfg, name), multi_agent.is_trained(cfg, name)
        like = (dataclasses.replace(own, multi_agent=None), learns, len(agents), _kind_of(spec, agents))
        for other, members in found:
            if other == like:
                members[name] = agents
                break
        else:
            found.append((like, {name: agents}))
    numbers = lambda members: np.array([[spec.agents.index(agent) for agent in own] for own in members.values()])
    return [(tuple(members), numbers(members)) for _, members in found]


def acting(cfg: RunConfig, spec: EnvSpec, make: MakeAlgo) -> Algo:
    """Makes what acts with all policies of a run."""
    found = [group for group, *_ in groups(cfg, spec, make)]
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        return self_play.acting(found)
    return several.acting(found, len(spec.agents))


def learning(cfg: RunConfig, spec: EnvSpec, found: Sequence[Group], *, axis_name: str | None = None) -> Learner:
    """Makes what teaches all policies of a run, whose groups have their learners."""
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        return self_play.learning(found, len(spec.agents), axis_name=axis_name)
    return several.learning(found, len(spec.agents))


def learned(cfg: RunConfig, spec: EnvSpec) -> EnvSpec:
    """The environments as rollouts show them to who learns: without agents where steps are counted of each of them."""
    return spec._replace(agents=()) if cfg.rollout.count_steps_by == "agent_steps" else spec


def agents_of(cfg: RunConfig, spec: EnvSpec) -> complete.Agents:
    """Tells whoever packs rollouts by column which agents the columns are, and where policies record their extras."""
    policies = list(multi_agent.followers(cfg).values())
    follows = tuple(next(i for i, own in enumerate(policies) if agent in own) for agent in spec.agents)
    extras: dict[str, tuple[int, ...]] = {}
    if are_several(cfg):
        extras = {several.label(names): tuple(own.reshape(-1).tolist()) for names, own in _alike(cfg, spec)}
    return complete.Agents(follows, spec.kinds, extras)


def rollout_like(cfg: RunConfig, spec: EnvSpec, algo: Algo, **sizes: Any) -> Rollout:
    """Shapes and dtypes of the rollouts that a run learns from, or one of its policies; sizes as of
    `unroll.rollout_like`.
    """
    like = unroll.rollout_like(learned(cfg, spec), algo, **sizes)
    if spec.agents and unroll.RECORD in like.extras and cfg.rollout.count_steps_by == "agent_steps":
        recorded: Any = like.extras[unroll.RECORD]
        like = dataclasses.replace(like, extras={**like.extras, unroll.RECORD: {**recorded, "over": like.mask}})
    return like if cfg.rollout.batch_mode == "truncate_episodes" else complete.led_like(like)


def followed(cfg: RunConfig, spec: EnvSpec) -> tuple[str, ...]:
    """Names the policy of each column, after which they repeat: of the agents of a game, or a block of self-play's."""
    policies = multi_agent.followers(cfg)
    if cfg.multi_agent is None or cfg.multi_agent.self_play is None:
        return tuple(next(name for name, own in policies.items() if agent in own) for agent in spec.agents)
    mine, theirs = self_play.seats(len(spec.agents), cfg.multi_agent.self_play.pool)
    seated = zip(policies, (*mine, *theirs), strict=True)
    of_column = {column: name for name, columns in seated for column in columns.tolist()}
    return tuple(of_column[column] for column in sorted(of_column))


def gammas(gamma: Any, spec: EnvSpec) -> Any:
    """The discount of each column's running return, of one policy's number or of an array over columns that repeats."""
    return np.tile(gamma, spec.num_envs // len(gamma)) if isinstance(gamma, np.ndarray) else gamma
