"""Checks of a run before it begins: its environments, and the agents that environments or clients name."""

import dataclasses
from pathlib import Path

from jrl import envs, spaces
from jrl.agents import Policies
from jrl.config import (
    EnvConfig,
    EnvRunnersConfig,
    RunConfig,
    Sizes,
    algo_name,
    checks,
    datasets,
    multi_agent,
    policy_mapping,
)
from jrl.config.external import ExternalConfig
from jrl.envs.context import OnFailure
from jrl.errors import InputError
from jrl.fields.data import traits
from jrl.fields.validation import refused
from jrl.metrics import loggers
from jrl.run.store import checkpoint
from jrl.types import AsyncEnv, Discrete, Env, EnvSpec, JaxEnv


def check(cfg: RunConfig) -> RunConfig:
    """Checks environments and loggers of a run without making one; returns the config with its agents, see `resolved`.

    Raises:
      InputError: the environments or loggers cannot be used.
      ImportError: the environments' library is missing.
    """
    errors = loggers.check(cfg.run.log)
    try:
        sizes = Sizes(cfg)
        check_environments(cfg.env, cfg.env_runners, sizes.num_pools(sizes.learners))
    except InputError as e:
        errors += e.errors
    if errors:
        raise InputError(*errors)
    return resolved(cfg)


def on_failure(runners: EnvRunnersConfig) -> OnFailure:
    """Returns how a failed environment is handled."""
    return OnFailure(runners.restart_failed_sub_environments, runners.env_step_timeout_s)


def check_environments(env: EnvConfig, runners: EnvRunnersConfig, vectors: int) -> None:
    """Raises InputError: the environments of a run, divided into `vectors` vectors, cannot be made."""
    section = dataclasses.replace(env, num_envs=env.num_envs // vectors)
    if errors := envs.check(section, on_failure=on_failure(runners)):
        raise InputError(*errors)


def resolved(cfg: RunConfig) -> RunConfig:
    """Returns the config with the agents of its environment, and the teacher's checkpoint instead of its run directory.

    So a resumed run has the same teacher, even if the teacher's run went on. Other runs with one agent are unchanged.

    Raises:
      InputError: agents, policies or mapping do not fit, the environment cannot be made, or there is no teacher.
    """
    if traits(cfg.algo).has_teacher and cfg.algo.teacher is not None:
        try:
            teacher = str(checkpoint.locate(Path(cfg.algo.teacher), best=None))
        except InputError as e:
            raise InputError(f"algo.teacher: {e}") from e
        cfg = dataclasses.replace(cfg, algo=dataclasses.replace(cfg.algo, teacher=teacher))
    if datasets.alone(cfg) or (cfg.external is None and cfg.multi_agent is None and not envs.is_multi_agent(cfg.env)):
        return cfg
    if cfg.external is not None:
        return _with_clients_agents(cfg)
    spec, group = _spec_of_env(cfg.env), cfg.multi_agent.group if cfg.multi_agent else None
    if spec.agents and cfg.multi_agent and group is not None:
        multi_agent.check_group(cfg.multi_agent, spec.agents, _kinds(spec))
        if multi_agent.is_one_team(group, spec.agents):
            return cfg  # a single agent: the learner need not know of the team's members
        from jrl.envs import team

        spec = team.join_groups(spec, groups=group).spec
    return multi_agent.with_agents(cfg, spec.agents, _kinds(spec))


def _with_clients_agents(cfg: RunConfig) -> RunConfig:
    spec = spec_of_clients(cfg.external, cfg.env)
    if cfg.multi_agent is None and not spec.agents:
        return cfg
    if not spec.agents:
        raise InputError("multi_agent: episodes of clients have one agent: name several in external.agents")
    found = multi_agent.with_agents(cfg, spec.agents, _kinds(spec))
    errors = [message for _, message in refused(checks.SEVERAL_CLIENTS, found)]
    if policy_mapping.by_game(found.multi_agent):
        errors.append(
            "multi_agent.mapping: with external the policy of an agent cannot change from game to game: use a table"
        )
    if errors:
        raise InputError(*errors)
    return found


def spec_of_clients(given: ExternalConfig | None, env: EnvConfig) -> EnvSpec:
    """Returns the spaces of clients' episodes: those of the config, of a run, or of an environment.

    Raises:
      InputError: there are none, or they do not fit.
    """
    assert given is not None
    if given.observation is not None and given.action is not None:
        from jrl.envs import client_spaces

        return client_spaces.build_spec(given.observation, given.action, env.num_envs, given.agents)
    found = _spec_of_env(env) if given.spaces is None else _recorded(given.spaces)
    seen, taken = found.env_observation or found.observation, found.env_action or found.action
    num = env.num_envs * found.num_agents
    return found._replace(observation=seen, action=taken, num_envs=num, env_action=None, env_observation=None)


def _spec_of_env(section: EnvConfig) -> EnvSpec:
    env = envs.make(section.waiting(1))
    env.close()
    return env.spec


def _recorded(path: str) -> EnvSpec:
    try:
        found = checkpoint.read_spec(checkpoint.read_meta(checkpoint.locate(Path(path))))
    except InputError as e:
        raise InputError(f"external.spaces: {e}") from e
    return found._replace(max_episode_steps=None)


def _kinds(spec: EnvSpec) -> dict[tuple[str, ...], str]:
    """Describes the spaces of each kind of agents; {} where all are alike."""
    kinds = spaces.by_kind(spec)
    if len(kinds) == 1:
        return {}
    return {one.agents: f"observations {one.observation}, actions {one.action}" for one in kinds}


def check_agents(cfg: RunConfig, spec: EnvSpec, learners: int) -> None:
    """Raises InputError: the config does not fit environments with several agents, or with one."""
    if not spec.agents:
        if errors := multi_agent.alone_faults(cfg):
            raise InputError(*errors)
        return
    if cfg.multi_agent is None:
        raise InputError(
            f"env.id {cfg.env.id} has several agents, {', '.join(spec.agents)}: say so with a section multi_agent: {{}}"
        )
    if cfg.multi_agent.self_play and (errors := multi_agent.split_faults(cfg, len(spec.agents), learners)):
        raise InputError(*errors)


def check_search(cfg: RunConfig, env: JaxEnv | Env | AsyncEnv, policies: Policies) -> None:
    """Raises InputError: an algorithm searches with the step of environments that a program cannot step."""
    if not traits(cfg.algo).searches_env:
        return
    name = algo_name(cfg)
    if not isinstance(env, JaxEnv) or not env.pure:
        backend = envs.resolve(cfg.env.id, cfg.env.backend)
        other = "muzero, which learns a model" if isinstance(env.spec.action, Discrete) else "ppo"
        fix = "env.backend=jax" if "jax" in envs.backends_of(cfg.env.id) else f"algo.name={other}"
        raise InputError(
            f"algo.name {name}: expected environments written in JAX, which its search steps, got {cfg.env.id} of "
            f"{backend}: set {fix}"
        )
    if policies.several:
        raise InputError(
            f"algo.name {name}: expected one policy for all agents, whose actions its search chooses together, got "
            f"{len(policies.names)} policies: leave multi_agent out, or use ppo"
        )
