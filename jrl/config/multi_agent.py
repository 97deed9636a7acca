"""The section `multi_agent` once the agents are known: the policy of each agent, and each policy's config."""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jrl import registry
from jrl.config import policy_mapping, reader
from jrl.config.plan import Sizes
from jrl.config.policy_mapping import BY_AGENT, SHARED, TABLE, by_game
from jrl.config.sections import MultiAgentConfig, RunConfig
from jrl.errors import InputError, counted, format_names
from jrl.fields.schema import merge

_NAME = re.compile(r"[\w.-]{1,100}")  # it is part of metrics and of paths in checkpoints
_OWN = ("algo", "network", "replay")  # sections of which a policy may have its own values
LEAGUE = "league"  # the item of a State beside the policies of self-play, and so no name of a policy
_LOCKSTEP = "multi_agent.replay_mode lockstep"  # replays of policies that are filled and sampled alike
_ELSE = "or use multi_agent.replay_mode=independent"

Kinds = Mapping[tuple[str, ...], str]  # agents of equal spaces -> these in words; {} where all agents are alike
Row = tuple[str, object, str]  # key, whether it is refused, why and what to do instead


def with_agents(cfg: RunConfig, agents: Sequence[str], kinds: Kinds | None = None) -> RunConfig:
    """Fills in the names of the agents, in the environment's order, and a policy for each kind where none is named.

    With `multi_agent.group` the agents are those of the view, its teams and who is in none (`jrl.envs.team`).

    Raises:
      InputError: the config names others, or policies that do not go with them.
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
            f"multi_agent.agents: expected {_listed(agents)}, as {has}, got {_listed(given.agents)}: leave it out"
        )
    found = dataclasses.replace(cfg, multi_agent=dataclasses.replace(given, agents=tuple(agents)))
    if given.self_play is not None:
        _refuse(_self_play_rows(found, kinds))
        return found
    table = _by_kind(kinds)
    if kinds and given.mapping is None and set(given.policies) in (set(), set(table.values())):
        given = dataclasses.replace(given, mapping=table)
    given = _trained(_mapped(dataclasses.replace(given, agents=tuple(agents))))
    found = dataclasses.replace(cfg, multi_agent=given)
    if by_game(given):
        _refuse(_by_game_rows(found, kinds))
    _refuse(_policy_rows(found))
    _refuse(_kind_rows(given, kinds))
    if in_lockstep(given):
        _refuse(_lockstep_rows({policy: policy_config(found, policy) for policy in learning(given)}))
    return found


def _refuse(rows: Iterable[Row]) -> None:
    """Raises InputError with all that is refused."""
    if errors := _refused(rows):
        raise InputError(*errors)


def _refused(rows: Iterable[Row]) -> list[str]:
    return [f"{key}: {message}" for key, is_refused, message in rows if is_refused]


# ---------------------------------------------------------------- what does not go together


def _self_play_rows(cfg: RunConfig, kinds: Kinds) -> Iterator[Row]:
    key, given = "multi_agent.self_play", cfg.multi_agent
    assert given is not None and given.self_play is not None and given.agents is not None
    own, num_agents = given.self_play, len(given.agents)
    yield _LOCKSTEP, in_lockstep(given), f"with {key} one policy learns: leave it out"
    for name in ("policies", "mapping", "policies_to_train"):
        fix = "leave one of them out"
        yield f"multi_agent.{name}", getattr(given, name), f"{key} decides about the policies, too: {fix}"
    two = f"expected an environment of two agents or more, got {cfg.env.id} with one: leave it out"
    yield key, num_agents < 2, two
    name = f"expected a name, and not {LEAGUE}, which metrics have, got {own.policy!r}: rename it"
    yield f"{key}.policy", own.policy in ("", LEAGUE), name
    kept = cfg.checkpoint.policies
    yield f"checkpoint.policies {kept}", kept != "all", f"with {key} copies are the policy's opponents: use all"
    fix = f"set {key}.snapshot_win_rate=0.6 or {key}.snapshot_every=100000"
    no_rule = own.snapshot_win_rate is None and own.snapshot_every is None
    yield key, no_rule, f"expected a rule when copies are taken, got none: {fix}"
    sizes = Sizes(cfg)
    yield from _split_rows(sizes, num_agents, sizes.learners)
    yield (
        key, kinds,
        f"expected agents of equal spaces, got {_in_words(kinds)}: leave it out, or make teams of as many agents each "
        "by multi_agent.group",
    )  # fmt: skip
    yield from _stop_rows(cfg, {"agent": given.agents, "policy": tuple(followers(given))})


def _in_words(kinds: Kinds) -> str:
    return " and ".join(f"{agents[0]} ({words})" for agents, words in list(kinds.items())[:2])


def split_faults(cfg: RunConfig, num_agents: int, learners: int) -> list[str]:
    """Returns where the games of each of so many devices that learn, and of each device or env runner that collects for
    them, are no whole blocks of self-play, with the numbers that are.
    """
    return _refused(_split_rows(Sizes(cfg), num_agents, learners))


def _split_rows(sizes: Sizes, num_agents: int, learners: int) -> Iterator[Row]:
    cfg, parts = sizes.cfg, math.lcm(learners, sizes.num_pools(learners))
    pool = cfg.multi_agent.self_play.pool
    unit, games = num_agents * pool * parts, cfg.env.num_envs
    near = " or ".join(str(n) for n in (games - games % unit, games - games % unit + unit) if n)
    who = "devices" if parts == learners else "env runners" if parts == cfg.env_runners.num else "parts"
    on = f" x {parts} {who}" if parts > 1 else ""
    yield (
        f"env.num_envs {games}", num_agents > 1 and games % unit,
        f"multi_agent.self_play needs a multiple of {num_agents} seats x {pool} places of the pool{on} = {unit}, so "
        f"that each seat meets each place as often: use {near}",
    )  # fmt: skip


def _by_game_rows(cfg: RunConfig, kinds: Kinds) -> Iterator[Row]:
    given, key = cfg.multi_agent, "multi_agent.mapping"
    assert given is not None
    yield "multi_agent.policies", not given.policies, f"with {key} policies must be known by name: list them"
    yield (
        f"multi_agent.policies.{TABLE}", TABLE in given.policies,
        f"with {key} that is the name of the table of games: rename it",
    )  # fmt: skip
    yield (
        key, kinds,
        "agents may change policies from game to game, so that all need equal spaces, and theirs differ: leave it out, "
        "and name the policies of the agents in a table",
    )  # fmt: skip
    output = f"with {key} policies change from game to game, which files do not say: leave it out"
    yield "data.output", cfg.data.output is not None, output
    yield _LOCKSTEP, in_lockstep(given), f"with {key} a row is of one policy alone: use independent"


def _policy_rows(cfg: RunConfig) -> Iterator[Row]:
    """Yields faults of policies and mapping."""
    given = cfg.multi_agent
    assert given is not None and given.agents is not None
    for name, own in given.policies.items():
        key = f"multi_agent.policies.{name}"
        yield _name_row(key, name)
        for section in own:
            fix = _near(section, _OWN)[2:] or f"a policy has its own {', '.join(_OWN)}"
            yield f"unknown key {key}.{section}", section not in _OWN, fix
    if _refused(found := list(_mapping_rows(given))):
        yield from found
        return
    followed = set(given.policies) if by_game(given) else set(follows(given).values())
    idle = [name for name in given.policies if name not in followed]
    fix = "give them one in multi_agent.mapping, make that a function, or leave them out"
    yield "multi_agent.policies", idle, f"no agent follows {_listed(idle)}: {fix}"
    known = tuple(given.policies) or tuple(dict.fromkeys(follows(given).values()))
    for name in given.policies_to_train or ():
        expected = f"expected names among {_listed(known)}, got {name!r}{_near(name, known)}"
        yield "multi_agent.policies_to_train", name not in known, expected
    yield from _stop_rows(cfg, {"agent": given.agents, "policy": tuple(followed)})


def _name_row(key: str, name: str) -> Row:
    text = "a name" if key.endswith(name) else "names"
    return key, not _NAME.fullmatch(name), f"expected {text} of letters, digits, _, . and -, got {name!r}: rename it"


def _mapping_rows(given: MultiAgentConfig) -> Iterator[Row]:
    agents, policies, mapping, key = given.agents or (), tuple(given.policies), given.mapping, "multi_agent.mapping"
    if mapping == SHARED and len(policies) > 1:
        fix = f'use by_agent or a table such as {{"agent_0": {policies[0]}, ".*": {policies[1]}}}'
        yield key, True, f"shared is one policy for all agents, and there are {_listed(policies)}: {fix}"
    elif isinstance(mapping, dict):
        for pattern, policy in mapping.items():
            try:
                re.compile(pattern)
            except re.error as e:
                yield key, True, f"expected a regular expression, got {pattern!r}: {e}"
                return
            there = f"and there are {_listed(policies)}{_near(policy, policies)}"
            yield key, policies and policy not in policies, f"{pattern!r} names the policy {policy!r}, {there}"
        lost = [a for a in agents if not any(re.fullmatch(pattern, a) for pattern in mapping)]
        fix = f'add one, such as ".*": {next(iter(mapping.values()), SHARED)}'
        yield key, lost, f"no entry fits {_listed(lost)}: the agents are {_listed(agents)}; {fix}"
    elif _by_agent(given) and policies:
        lost = [a for a in agents if a not in policies]
        fix = f'or map agents to policies, such as multi_agent.mapping={{".*": {policies[0]}}}'
        named = f"the agents are {_listed(agents)}; name the policies like the agents, {fix}"
        yield "multi_agent.policies", lost, f"no policy for {_listed(lost)}: {named}"


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
        fix = _near(name, names) or ": it would never be met"
        yield key, names and row and name not in names, f"expected one of {kind} {_listed(names)}, got {name!r}{fix}"


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
    for policy, agents in followers(given).items() if kinds else ():
        own = {kind_of[agent]: agent for agent in reversed(agents)}  # the first agent of each kind
        found = " and ".join(f"{own[kind]} ({kinds[kind]})" for kind in list(own)[::-1][:2])
        yield (
            "multi_agent.mapping", len(own) > 1,
            f"expected agents of equal spaces to follow policy {policy}, got {found}: give each kind a policy of its "
            f"own, such as multi_agent.mapping={{{table}}}, or leave mapping and policies out, which does that",
        )  # fmt: skip


def check_group(given: MultiAgentConfig, agents: Sequence[str], kinds: Kinds | None = None) -> None:
    """Raises InputError with all that is wrong with `multi_agent.group`.

    Args:
      given: section with teams.
      agents, kinds: of the environment, before any of them are a team.
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
        yield own, not members, f"expected agents, got none: name some of {_listed(agents)}, or leave the team out"
        for agent in members:
            fix, twice = _near(agent, agents) or ": leave it out", agent in team_of and agent in agents
            yield own, agent not in agents, f"expected names of {_listed(agents)}, got {agent!r}{fix}"
            yield key, twice, f"{agent} is in {team_of.get(agent)} and in {name}: name each agent once"
            team_of.setdefault(agent, name)
        other = [agent for agent in members if kind_of.get(agent) != kind_of.get(members[0])]
        yield (
            own, other,
            f"expected agents of equal spaces, but those of {members and members[0]} and {other and other[0]} differ: "
            "make a team of each kind, or leave it out, and each kind of agents follows a policy of its own",
        )  # fmt: skip
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


def _lockstep_rows(policies: Mapping[str, Any]) -> Iterator[Row]:
    """Yields policies that cannot draw the same rows.

    Args:
      policies: those that learn, name -> the run as its agents alone would have it.
    """
    for name, own in policies.items():
        fix = "give it an algorithm that has one, such as dqn, leave it out of multi_agent.policies_to_train"
        none = f"policy {name} learns by {reader.algo_name(own)}, which has no replay: {fix}, {_ELSE}"
        yield _LOCKSTEP, own.replay is None, none
        fix = f"set replay.prioritized=false, {_ELSE}"
        prioritized = own.replay is not None and own.replay.prioritized
        yield _LOCKSTEP, prioritized, f"policy {name} draws by priorities, which are its own: {fix}"
    first, of_first = next(iter(policies.items()), ("", None))
    for name, own in list(policies.items())[1:]:
        if own.replay is None or of_first is None or of_first.replay is None:
            continue
        mine, theirs = (len(one.multi_agent.agents) for one in (own, of_first))
        yield (
            _LOCKSTEP, mine != theirs,
            f"policy {first} is followed by {counted(theirs, 'agent')} and {name} by {mine}, so that their replays do "
            f"not hold the same games and times: let equally many follow each, {_ELSE}",
        )  # fmt: skip
        for key, (here, there) in _drawn_by(own, of_first).items():
            fix = f"give all policies the same {key}, {_ELSE}"
            yield _LOCKSTEP, here != there, f"{key} is {there} for policy {first} and {here} for {name}: {fix}"


def _drawn_by(own: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the settings of two policies that decide which rows a sample of a replay has, by key."""
    fields = [field.name for field in dataclasses.fields(own.replay)]
    found = {f"replay.{name}": (getattr(own.replay, name), getattr(other.replay, name)) for name in fields}
    lengths = Sizes(own).sequence_length, Sizes(other).sequence_length
    return found | {"network.core": (own.network.recurrent, other.network.recurrent), "network.max_seq_len": lengths}


# ---------------------------------------------------------------- agents and policies


def _by_kind(kinds: Kinds) -> dict[str, str]:
    """Returns a mapping with a policy for each kind, named after its agents less their numbers, or after the first."""
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
    """Returns whether there is one team, of all agents: the environment then is one of a single agent."""
    return len(groups) == 1 and sorted(next(iter(groups.values()))) == sorted(agents)


def _mapped(given: MultiAgentConfig) -> MultiAgentConfig:
    """Asks a mapping that is a function for each agent; where the episode does not matter, a table takes its place."""
    if not isinstance(given.mapping, str) or given.mapping in (SHARED, BY_AGENT):
        return given
    if not re.search("[.:]", given.mapping) and registry.registered(given.mapping) is None:
        raise InputError(
            f"multi_agent.mapping: expected shared, by_agent, a table or package.module:name, got {given.mapping!r}"
            + _near(given.mapping, (SHARED, BY_AGENT))
        )
    found = policy_mapping.call_mapping(
        registry.load(given.mapping, "multi_agent.mapping"), given.agents or (), f"multi_agent.mapping {given.mapping}"
    )
    if found is None or set(given.policies) - set(found.values()):
        return given  # asked for each game; so are mappings that leave policies without agents for now, as in a league
    table = {re.escape(agent): policy for agent, policy in found.items()}
    return dataclasses.replace(given, mapping=table)


def _trained(given: MultiAgentConfig) -> MultiAgentConfig:
    """Asks a function of `policies_to_train` for each policy, and puts the names that it takes in its place."""
    asked = given.policies_to_train
    if not isinstance(asked, str):
        return given
    known = tuple(given.policies) or tuple(dict.fromkeys(follows(given).values()))
    if asked in known:
        return dataclasses.replace(given, policies_to_train=(asked,))
    fn = registry.load(asked, "multi_agent.policies_to_train")
    try:
        learn = tuple(name for name in known if fn(name))
    except Exception as e:  # as above
        told = f"{type(e).__name__}: {str(e)[:200]}"
        raise InputError(
            f"multi_agent.policies_to_train {asked}: expected a function of a policy's name, got one that raises "
            f"{told}: name the policies instead: {_listed(known)}"
        ) from e
    return dataclasses.replace(given, policies_to_train=learn)


def _by_agent(given: MultiAgentConfig) -> bool:
    return given.mapping == BY_AGENT or (given.mapping is None and len(given.policies) > 1)


def follows(given: MultiAgentConfig) -> dict[str, str]:
    """Returns the policy of each agent, by a mapping that is no function."""
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
        return {own.policy: agents[:1], **dict.fromkeys(places(own), agents[1:])}  # where its seat is the first
    if by_game(given):
        return dict.fromkeys(given.policies, given.agents)
    following = follows(given)
    policies = tuple(given.policies) or tuple(dict.fromkeys(following.values()))
    return {p: agents for p in policies if (agents := tuple(a for a, of in following.items() if of == p))}


def places(own: Any) -> tuple[str, ...]:
    """Returns the names of the K places of a pool, in order."""
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
    """Returns the policy that is meant where none is named: the only one, or that of self-play; None: there is none."""
    policies = followers(given)
    if given and given.self_play:
        return given.self_play.policy
    return next(iter(policies)) if len(policies) == 1 else None


def policy_config(cfg: RunConfig, policy: str) -> RunConfig:
    """Returns the run as one policy's agents alone would have it, with the policy's own settings.

    Raises:
      InputError: an unknown key or a wrong value; each names its place.
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
        base["replay"] = None  # another algorithm, which may keep none
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
            yield f"team {name}: {_listed(members)} act as one, 1 agent x {counted(envs, 'env')}"
    for policy, agents in followers(given).items():
        columns = f"{counted(len(agents), 'agent')} x {counted(envs, 'env')}"
        columns += ", as each game's mapping says" if by_game(given) else ""
        frozen = "" if is_trained(given, policy) else ", does not learn"
        yield f"policy {policy}: {_listed(agents)}, {columns}{frozen}{spaces(policy)}"


def _lines_of_self_play(own: Any, seats: int, games: str) -> Iterator[str]:
    yield f"policy {own.policy}: one of {seats} seats in each of {games}, every seat equally often"
    drawn = {"uniform": "equally often", "latest": "the newest in all games", "prioritised": "by what it beats less"}
    names = ", ".join(places(own)[:8])
    yield f"policies {names}: {counted(own.pool, 'place')} of frozen copies, {drawn[own.opponents]}"


def _listed(names: Sequence[str]) -> str:
    return format_names(names)


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f": did you mean {near[0]}?" if near else ""
