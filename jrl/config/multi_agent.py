"""The section `multi_agent` with the environment's agents: the policy of each agent, and each policy's config."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jrl import registry
from jrl.config import policy_mapping, reader
from jrl.config.plan import Sizes
from jrl.config.policy_mapping import BY_AGENT, SHARED, TABLE, by_game
from jrl.config.sections import MultiAgentConfig, RunConfig
from jrl.errors import InputError, counted, did_you_mean, format_names
from jrl.fields.schema import merge

_NAME = re.compile(r"[\w.-]{1,100}")  # names are parts of metrics and of paths in checkpoints
_OWN = ("algo", "network", "replay")  # sections of which a policy may have its own values
LEAGUE = "league"  # item of a State beside the policies of self-play; reserved, not a policy name
_LOCKSTEP = "multi_agent.replay_mode lockstep"
_ELSE = "or use multi_agent.replay_mode=independent"

Kinds = Mapping[tuple[str, ...], str]  # agents with equal spaces -> their spaces in words; {} if all agents are alike
Row = tuple[str, object, str]  # key, whether the config is refused, reason and fix


def with_agents(cfg: RunConfig, agents: Sequence[str], kinds: Kinds | None = None) -> RunConfig:
    """Fills in the names of the agents, in the environment's order; without policies, adds one per kind of agents.

    Args:
      agents: agents of the environment; with `multi_agent.group` its teams and the agents without a team.
    Raises:
      InputError: the section does not fit these agents.
    """
    kinds = kinds or {}
    given = cfg.multi_agent or MultiAgentConfig()
    if not agents:
        raise InputError(
            f"multi_agent: {cfg.env.id} has one agent: leave the section out, or name an environment with several"
        )
    if given.agents is not None and given.agents != tuple(agents):
        has = f"{cfg.env.id} has them" if given.group is None else "multi_agent.group makes them"
        raise InputError(
            f"multi_agent.agents: expected {format_names(agents)}, as {has}, got {format_names(given.agents)}: leave "
            "it out"
        )
    given = dataclasses.replace(given, agents=tuple(agents))
    if given.self_play is None:
        table = _by_kind(kinds)
        if kinds and given.mapping is None and set(given.policies) in (set(), set(table.values())):
            given = dataclasses.replace(given, mapping=table)
        given = _with_trained_policies(_with_table(given))
    cfg = dataclasses.replace(cfg, multi_agent=given)
    if given.self_play is not None:
        if errors := _refused(_self_play_rows(cfg, kinds)) + split_faults(cfg, len(agents), Sizes(cfg).learners):
            raise InputError(*errors)
        return cfg
    if by_game(given):
        _refuse(_by_game_rows(cfg, kinds))
    _refuse(_policy_rows(cfg))
    _refuse(_kind_rows(given, kinds))
    if in_lockstep(given):
        _refuse(_lockstep_rows({policy: policy_config(cfg, policy) for policy in learning(given)}))
    return cfg


def _refuse(rows: Iterable[Row]) -> None:
    """Raises InputError with all refused rows."""
    if errors := _refused(rows):
        raise InputError(*errors)


def _refused(rows: Iterable[Row]) -> list[str]:
    return [f"{key}: {message}" for key, is_refused, message in rows if is_refused]


# ---------------------------------------------------------------- refused combinations


def _self_play_rows(cfg: RunConfig, kinds: Kinds) -> Iterator[Row]:
    key, given = "multi_agent.self_play", cfg.multi_agent
    assert given is not None and given.self_play is not None and given.agents is not None
    own, num_agents = given.self_play, len(given.agents)
    yield _LOCKSTEP, in_lockstep(given), f"with {key} one policy learns: leave it out"
    for name in ("policies", "mapping", "policies_to_train"):
        fix = "leave one of them out"
        yield f"multi_agent.{name}", getattr(given, name), f"{key} decides about the policies, too: {fix}"
    yield key, num_agents < 2, f"expected two agents or more, got {cfg.env.id} with one: leave it out"
    name = f"expected a name other than {LEAGUE}, which metrics use, got {own.policy!r}: rename it"
    yield f"{key}.policy", own.policy in ("", LEAGUE), name
    kept = cfg.checkpoint.policies
    yield f"checkpoint.policies {kept}", kept != "all", f"with {key} copies are the policy's opponents: use all"
    fix = f"set {key}.snapshot_win_rate=0.6 or {key}.snapshot_every=100000"
    no_rule = own.snapshot_win_rate is None and own.snapshot_every is None
    yield key, no_rule, f"expected a rule when copies are taken, got none: {fix}"
    found = " and ".join(f"{agents[0]} ({words})" for agents, words in list(kinds.items())[:2])
    fix = "leave it out, or make teams of as many agents each by multi_agent.group"
    yield key, kinds, f"expected agents of equal spaces, got {found}: {fix}"
    yield from _stop_rows(cfg, {"agent": given.agents, "policy": tuple(followers(given))})


def split_faults(cfg: RunConfig, num_agents: int, learners: int) -> list[str]:
    """Returns a message if the games of self-play cannot be divided evenly among seats, copies, devices and runners."""
    assert cfg.multi_agent is not None and cfg.multi_agent.self_play is not None
    parts, pool = math.lcm(learners, Sizes(cfg).num_pools(learners)), cfg.multi_agent.self_play.pool
    unit, games = num_agents * pool * parts, cfg.env.num_envs
    if num_agents < 2 or games % unit == 0:
        return []
    near = " or ".join(str(n) for n in (games - games % unit, games - games % unit + unit) if n)
    what = "devices" if parts == learners else "env runners" if parts == cfg.env_runners.num else "parts"
    on = f" x {parts} {what}" if parts > 1 else ""
    return [
        f"env.num_envs {games}: multi_agent.self_play needs a multiple of {num_agents} seats x {pool} places of the "
        f"pool{on} = {unit}, so that each seat meets each place as often: use {near}"
    ]


def _by_game_rows(cfg: RunConfig, kinds: Kinds) -> Iterator[Row]:
    given, key = cfg.multi_agent, "multi_agent.mapping"
    assert given is not None
    yield "multi_agent.policies", not given.policies, f"with {key} policies must be known by name: list them"
    yield f"multi_agent.policies.{TABLE}", TABLE in given.policies, f"with {key} this name is reserved: rename it"
    fix = "leave it out, and name the policies of the agents in a table"
    yield key, kinds, f"agents that change policies from game to game need equal spaces, and theirs differ: {fix}"
    output = f"with {key} policies change from game to game, which files do not record: leave it out"
    yield "data.output", cfg.data.output is not None, output
    yield _LOCKSTEP, in_lockstep(given), f"with {key} each row belongs to one policy: use independent"


def _policy_rows(cfg: RunConfig) -> Iterator[Row]:
    """Yields faults of policies and mapping."""
    given = cfg.multi_agent
    assert given is not None and given.agents is not None
    for name, own in given.policies.items():
        key = f"multi_agent.policies.{name}"
        yield _name_row(key, name)
        for section in own:
            fix = did_you_mean(section, _OWN)[2:] or f"a policy has its own {', '.join(_OWN)}"
            yield f"unknown key {key}.{section}", section not in _OWN, fix
    if _refused(found := list(_mapping_rows(given))):
        yield from found
        return
    followed = set(given.policies) if by_game(given) else set(follows(given).values())
    idle = [name for name in given.policies if name not in followed]
    fix = "give each an agent in multi_agent.mapping, make that a function, or leave them out"
    yield "multi_agent.policies", idle, f"no agent follows {format_names(idle)}: {fix}"
    known = tuple(given.policies) or tuple(dict.fromkeys(follows(given).values()))
    for name in given.policies_to_train or ():
        expected = f"expected names among {format_names(known)}, got {name!r}{did_you_mean(name, known)}"
        yield "multi_agent.policies_to_train", name not in known, expected
    yield from _stop_rows(cfg, {"agent": given.agents, "policy": tuple(followed)})


def _name_row(key: str, name: str) -> Row:
    return key, not _NAME.fullmatch(name), f"expected names of letters, digits, _, . and -, got {name!r}: rename it"


def _mapping_rows(given: MultiAgentConfig) -> Iterator[Row]:
    agents, policies, mapping, key = given.agents or (), tuple(given.policies), given.mapping, "multi_agent.mapping"
    if mapping == SHARED and len(policies) > 1:
        fix = f'use by_agent or a table such as {{"agent_0": {policies[0]}, ".*": {policies[1]}}}'
        yield key, True, f"shared is one policy for all agents, and there are {format_names(policies)}: {fix}"
    elif isinstance(mapping, dict):
        for pattern, policy in mapping.items():
            try:
                re.compile(pattern)
            except re.error as e:
                yield key, True, f"expected a regular expression, got {pattern!r}: {e}"
                return
            there = f"and there are {format_names(policies)}{did_you_mean(policy, policies)}"
            yield key, policies and policy not in policies, f"{pattern!r} names the policy {policy!r}, {there}"
        lost = [a for a in agents if not any(re.fullmatch(pattern, a) for pattern in mapping)]
        fix = f'add one, such as ".*": {next(iter(mapping.values()), SHARED)}'
        yield key, lost, f"no entry fits {format_names(lost)}: the agents are {format_names(agents)}; {fix}"
    elif _by_agent(given) and policies:
        lost = [a for a in agents if a not in policies]
        fix = f'or map agents to policies, such as multi_agent.mapping={{".*": {policies[0]}}}'
        named = f"the agents are {format_names(agents)}; name the policies like the agents, {fix}"
        yield "multi_agent.policies", lost, f"no policy for {format_names(lost)}: {named}"


def _stop_rows(cfg: RunConfig, known: Mapping[str, Sequence[str]]) -> Iterator[Row]:
    """Yields metrics of agents or policies that do not exist: a criterion of theirs would never be met."""
    own = cfg.multi_agent.self_play if cfg.multi_agent else None
    for key, metric in _metrics(cfg):
        evaluated = metric.startswith("evaluation/")
        kind, _, rest = metric.removeprefix("evaluation/").partition("/")
        # a policy's name has no slash, an agent's may have one
        name, _, row = rest.partition("/") if kind == "policy" else rest.rpartition("/")
        names = known.get(kind, ())
        if evaluated and own and names and metric != (one := f"evaluation/policy/{own.policy}/return"):
            yield key, True, f"with multi_agent.self_play an evaluation reports the policy that learns alone: use {one}"
            continue
        fix = did_you_mean(name, names) or ": it would never be met"
        is_unknown = names and row and name not in names
        yield key, is_unknown, f"expected one of {kind} {format_names(names)}, got {name!r}{fix}"


def alone_faults(cfg: RunConfig) -> list[str]:
    """Returns metrics of agents, and of policies in evaluations, in a run with one agent, whose rows have neither."""
    has = f"{cfg.env.id or 'the environment'} has one agent, whose rows have no such key"
    use = lambda metric: "evaluation/return" if metric.startswith("evaluation/") else "episode/return"
    of_several = ("agent/", "evaluation/agent/", "evaluation/policy/")
    return _refused((key, x.startswith(of_several), f"{has}: use {use(x)}") for key, x in _metrics(cfg))


def _metrics(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    yield from ((f"stop.{metric}", metric) for metric in cfg.stop)
    if best := cfg.checkpoint.keep_best_by:
        yield f"checkpoint.keep_best_by {best}", best


def _kind_rows(given: MultiAgentConfig, kinds: Kinds) -> Iterator[Row]:
    kind_of = {agent: agents for agents in kinds for agent in agents}
    table = ", ".join(f'"{pattern}": {name}' for pattern, name in _by_kind(kinds).items())
    fix = f"give each kind its own policy, such as multi_agent.mapping={{{table}}}, or leave mapping and policies out"
    for policy, agents in followers(given).items() if kinds else ():
        first = {kind_of[agent]: agent for agent in reversed(agents)}  # the first agent of each kind
        found = " and ".join(f"{first[kind]} ({kinds[kind]})" for kind in list(first)[::-1][:2])
        expected = f"expected agents of equal spaces to follow policy {policy}, got {found}"
        yield "multi_agent.mapping", len(first) > 1, f"{expected}: {fix}"


def check_group(given: MultiAgentConfig, agents: Sequence[str], kinds: Kinds | None = None) -> None:
    """Raises InputError with all faults of `multi_agent.group`.

    Args:
      given: section with teams.
      agents, kinds: the environment's agents, not teams.
    """
    _refuse(_group_rows(given, agents, kinds or {}))


def _group_rows(given: MultiAgentConfig, agents: Sequence[str], kinds: Kinds) -> Iterator[Row]:
    key, group, one_team = "multi_agent.group", given.group or {}, is_one_team(given.group or {}, agents)
    none = f"expected a team or more, such as {{team: [{', '.join(agents)}]}}, got none: leave it out"
    yield key, not group, none
    kind_of = {agent: alike for alike in kinds for agent in alike}
    team_of: dict[str, str] = {}
    for name, members in group.items():
        if not one_team:  # the name of a single team is not used
            yield _name_row(key, name)
        own = f"{key}.{name}"
        yield own, not members, f"expected agents, got none: name some of {format_names(agents)}, or leave the team out"
        for agent in members:
            fix, twice = did_you_mean(agent, agents) or ": leave it out", agent in team_of and agent in agents
            yield own, agent not in agents, f"expected names of {format_names(agents)}, got {agent!r}{fix}"
            yield key, twice, f"{agent} is in {team_of.get(agent)} and in {name}: name each agent once"
            team_of.setdefault(agent, name)
        for other in [agent for agent in members if kind_of.get(agent) != kind_of.get(members[0])][:1]:
            fix = "make a team of each kind, or leave it out: then each kind of agents follows its own policy"
            yield own, True, f"expected agents of equal spaces, but those of {members[0]} and {other} differ: {fix}"
        taken = "an agent in no team has that name: rename the team"
        yield own, name in agents and not any(name in each for each in group.values()), taken
    if one_team:
        found = [
            name for name in ("agents", "policies", "mapping", "policies_to_train", "self_play") if getattr(given, name)
        ]
        has = f"one team of all agents has one policy: leave it out, or leave out {key}"
        yield from ((f"multi_agent.{name}", True, has) for name in found[:1])
        one = "with one team of all agents one policy learns: leave it out"
        yield _LOCKSTEP, given.replay_mode == "lockstep", one


def _lockstep_rows(policies: Mapping[str, RunConfig]) -> Iterator[Row]:
    """Yields policies that cannot draw the same rows; `policies`: learning policy -> its `policy_config`."""
    for name, own in policies.items():
        fix = "give it an algorithm with replay, such as dqn, leave it out of multi_agent.policies_to_train"
        none = f"policy {name} learns by {reader.algo_name(own)}, which has no replay: {fix}, {_ELSE}"
        yield _LOCKSTEP, own.replay is None, none
        is_prioritized = own.replay is not None and own.replay.prioritized
        fix = f"set replay.prioritized=false, {_ELSE}"
        yield _LOCKSTEP, is_prioritized, f"policy {name} draws by priorities, which are its own: {fix}"
    if any(own.replay is None for own in policies.values()):
        return
    drawn = {name: _sampling_settings(own) for name, own in policies.items()}
    first = next(iter(policies), "")
    for name, settings in drawn.items():
        for key, here in settings.items():
            there = drawn[first][key]
            fix = f"give all policies the same {key}, {_ELSE}"
            yield _LOCKSTEP, here != there, f"{key} is {there} for policy {first} and {here} for {name}: {fix}"


def _sampling_settings(own: RunConfig) -> dict[str, Any]:
    """Returns the settings of a policy that decide which rows its replay samples, by key."""
    assert own.multi_agent is not None and own.replay is not None
    return {
        "number of agents": len(own.multi_agent.agents or ()),
        **{f"replay.{field.name}": getattr(own.replay, field.name) for field in dataclasses.fields(own.replay)},
        "network.core": own.network.recurrent,
        "network.max_seq_len": Sizes(own).sequence_length,
    }


# ---------------------------------------------------------------- agents and policies


def _by_kind(kinds: Kinds) -> dict[str, str]:
    """Returns a mapping with a policy for each kind, named after its agents without numbers, or its first agent."""
    plain = [{re.sub(r"[\d_.-]+$", "", agent) for agent in agents} for agents in kinds]
    whole = [name for names in plain for name in names]
    table: dict[str, str] = {}
    for agents, names in zip(kinds, plain, strict=True):
        name = next(iter(names))
        if len(names) > 1 or not name or whole.count(name) > 1:
            table |= dict.fromkeys(map(re.escape, agents), agents[0])
            continue
        begins = re.escape(name)
        fits = lambda pattern: {a for kind in kinds for a in kind if re.fullmatch(pattern, a)} == set(agents)  # noqa: B023
        table[next(filter(fits, (begins, f"{begins}_.*", rf"{begins}[\d_.-]*")))] = name
    return table


def is_one_team(groups: Mapping[str, Sequence[str]], agents: Sequence[str]) -> bool:
    """Returns whether one team has all agents, so that the environment has a single agent."""
    return len(groups) == 1 and sorted(next(iter(groups.values()))) == sorted(agents)


def _with_table(given: MultiAgentConfig) -> MultiAgentConfig:
    """Replaces a mapping that is a function by its table, unless it depends on the episode."""
    if not isinstance(given.mapping, str) or given.mapping in (SHARED, BY_AGENT):
        return given
    if not re.search("[.:]", given.mapping) and registry.registered(given.mapping) is None:
        raise InputError(
            f"multi_agent.mapping: expected shared, by_agent, a table or package.module:name, got {given.mapping!r}"
            + did_you_mean(given.mapping, (SHARED, BY_AGENT))
        )
    found = policy_mapping.call_mapping(
        registry.load(given.mapping, "multi_agent.mapping"), given.agents or (), f"multi_agent.mapping {given.mapping}"
    )
    if found is None or set(given.policies) - set(found.values()):
        return given  # called per game, also if some policies have no agents yet, as in a league
    table = {re.escape(agent): policy for agent, policy in found.items()}
    return dataclasses.replace(given, mapping=table)


def _with_trained_policies(given: MultiAgentConfig) -> MultiAgentConfig:
    """Replaces a function `policies_to_train` by the names that it selects."""
    value = given.policies_to_train
    if not isinstance(value, str):
        return given
    known = tuple(given.policies) or tuple(dict.fromkeys(follows(given).values()))
    if value in known:
        return dataclasses.replace(given, policies_to_train=(value,))
    is_trained = registry.load(value, "multi_agent.policies_to_train")
    try:
        return dataclasses.replace(given, policies_to_train=tuple(name for name in known if is_trained(name)))
    except Exception as e:  # any exception of the user's function
        raise InputError(
            f"multi_agent.policies_to_train {value}: expected a function of a policy's name, got one that raises "
            f"{type(e).__name__}: {str(e)[:200]}: name the policies instead: {format_names(known)}"
        ) from e


def _by_agent(given: MultiAgentConfig) -> bool:
    return given.mapping == BY_AGENT or (given.mapping is None and len(given.policies) > 1)


def follows(given: MultiAgentConfig) -> dict[str, str]:
    """Returns the policy of each agent; the mapping is not a function."""
    agents = given.agents or ()
    if isinstance(given.mapping, dict):
        fits = lambda agent: next((p for e, p in given.mapping.items() if re.fullmatch(e, agent)), SHARED)
        return {agent: fits(agent) for agent in agents}
    if _by_agent(given):
        return {agent: agent for agent in agents}
    return dict.fromkeys(agents, next(iter(given.policies), SHARED))


def followers(given: MultiAgentConfig | None) -> dict[str, tuple[str, ...]]:
    """Returns the agents of each policy, in the order of the config; {} for an environment with one agent."""
    if given is None or given.agents is None:
        return {}
    if given.self_play is not None:
        own, agents = given.self_play, given.agents
        return {own.policy: agents[:1], **dict.fromkeys(places(own), agents[1:])}  # if the learner has the first seat
    if by_game(given):
        return dict.fromkeys(given.policies, given.agents)
    following = follows(given)
    policies = tuple(given.policies) or tuple(dict.fromkeys(following.values()))
    return {p: agents for p in policies if (agents := tuple(a for a, of in following.items() if of == p))}


def places(own: Any) -> tuple[str, ...]:
    """Returns the names of a pool's K copies, in order."""
    return tuple(f"{own.policy}-{k + 1}" for k in range(own.pool))


def is_trained(given: MultiAgentConfig | None, policy: str) -> bool:
    """Returns whether a policy learns."""
    if given and given.self_play:
        return policy == given.self_play.policy
    train = given.policies_to_train if given else None
    return train is None or policy in train


def learning(given: MultiAgentConfig | None) -> tuple[str, ...]:
    """Returns the policies that learn, in the order of the config."""
    return tuple(policy for policy in followers(given) if is_trained(given, policy))


def in_lockstep(given: MultiAgentConfig | None) -> bool:
    """Returns whether all policies draw the same rows from their replays."""
    return given is not None and given.replay_mode == "lockstep"


def the_one(given: MultiAgentConfig | None) -> str | None:
    """Returns the default policy: the only policy, or the learner of self-play; None: several policies."""
    policies = followers(given)
    if given and given.self_play:
        return given.self_play.policy
    return next(iter(policies)) if len(policies) == 1 else None


def policy_config(cfg: RunConfig, policy: str) -> RunConfig:
    """Returns the config of a run with the agents of one policy only, with the policy's own settings.

    Raises:
      InputError: unknown keys or wrong values; each message names the policy.
    """
    assert cfg.multi_agent is not None
    agents = followers(cfg.multi_agent)[policy]
    own: Mapping[str, Any] = cfg.multi_agent.policies.get(policy, {})
    alone = MultiAgentConfig(agents=agents, state=cfg.multi_agent.state, agent_id=cfg.multi_agent.agent_id)
    if len(learning(cfg.multi_agent)) > 1:
        alone = dataclasses.replace(alone, replay_mode=cfg.multi_agent.replay_mode)
    if not own:
        return dataclasses.replace(cfg, multi_agent=alone)
    base = {**reader.to_dict(cfg), "multi_agent": None}
    algo = own.get("algo")
    if isinstance(algo, Mapping) and algo.get("name", base["algo"]["name"]) != base["algo"]["name"]:
        base["replay"] = None  # another algorithm may have no replay
    try:
        made = reader.from_dict(merge(base, {k: v for k, v in own.items() if k in _OWN}))
    except InputError as e:
        raise InputError(*(f"multi_agent.policies.{policy}: {message}" for message in e.errors)) from e
    return dataclasses.replace(made, multi_agent=alone)


def lines(cfg: RunConfig, spaces: Callable[[str], str] = lambda policy: "") -> Iterator[str]:
    """Yields a line for each policy: its agents, and whether it learns; `spaces` describes their spaces."""
    given, envs = cfg.multi_agent, cfg.env.num_envs
    if given and given.self_play and given.agents:
        yield from _lines_of_self_play(given.self_play, len(given.agents), counted(envs, "game"))
        return
    if given and given.group:
        for name, members in given.group.items():
            yield f"team {name}: {format_names(members)} act as one, 1 agent x {counted(envs, 'env')}"
    for policy, agents in followers(given).items():
        columns = f"{counted(len(agents), 'agent')} x {counted(envs, 'env')}"
        columns += ", as the mapping selects for each game" if by_game(given) else ""
        frozen = "" if is_trained(given, policy) else ", does not learn"
        yield f"policy {policy}: {format_names(agents)}, {columns}{frozen}{spaces(policy)}"


def _lines_of_self_play(own: Any, seats: int, games: str) -> Iterator[str]:
    yield f"policy {own.policy}: one of {seats} seats in each of {games}, every seat equally often"
    drawn = {"uniform": "equally often", "latest": "the newest in all games", "prioritised": "stronger ones more often"}
    names = ", ".join(places(own)[:8])
    yield f"policies {names}: {counted(own.pool, 'place')} of frozen copies, {drawn[own.opponents]}"
