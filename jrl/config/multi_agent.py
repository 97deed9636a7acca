"""The section `multi_agent` once the agents are known: the policy of each agent, and each policy's config."""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jrl import registry
from jrl.config import plan, policy_mapping, reader
from jrl.config.policy_mapping import BY_AGENT, SHARED
from jrl.config.reader import MultiAgentConfig, RunConfig
from jrl.errors import InputError, counted
from jrl.fields.schema import merge

_NAME = re.compile(r"[\w.-]{1,100}")  # it is part of metrics and of paths in checkpoints
_OWN = ("algo", "network", "replay")  # sections of which a policy may have its own values
LEAGUE = "league"  # the item of a State beside the policies of self-play, and so no name of a policy
_KEY = "multi_agent.replay_mode lockstep"  # replays of policies that are filled and sampled alike
_ELSE = "or use multi_agent.replay_mode=independent"


Kinds = Mapping[tuple[str, ...], str]  # agents of equal spaces -> these in words; {} where all agents are alike


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
    if in_lockstep(cfg) and given.self_play is not None:
        raise InputError("multi_agent.replay_mode lockstep: with multi_agent.self_play one policy learns: leave it out")
    if given.self_play is not None:
        found = dataclasses.replace(cfg, multi_agent=dataclasses.replace(given, agents=tuple(agents)))
        known = {"agent": agents, "policy": tuple(followers(found))}
        if errors := [*_self_play_faults(cfg, agents), *_unequal_seats(kinds), *_stop_faults(cfg, known)]:
            raise InputError(*errors)
        return found
    table = _by_kind(kinds)
    if kinds and given.mapping is None and set(given.policies) in (set(), set(table.values())):
        given = dataclasses.replace(given, mapping=table)
    given = _trained(_mapped(dataclasses.replace(given, agents=tuple(agents))))
    found = dataclasses.replace(cfg, multi_agent=given)
    if policy_mapping.by_game(found):
        errors = list(policy_mapping.faults(found, bool(kinds))) or list(faults(found))
    else:
        errors = list(faults(found)) or list(_kind_faults(found, kinds))
    if errors:
        raise InputError(*errors)
    if in_lockstep(found) and (errors := list(_lockstep_faults({p: policy_config(found, p) for p in learning(found)}))):
        raise InputError(*errors)
    return found


def _lockstep_faults(policies: Mapping[str, Any]) -> Iterator[str]:
    """Yields policies that cannot draw the same rows, each with its mend.

    Args:
      policies: those that learn, name -> the run as its agents alone would have it.
    """
    for name, own in policies.items():
        if own.replay is None:
            mend = "give it an algorithm that has one, such as dqn, leave it out of multi_agent.policies_to_train"
            yield f"{_KEY}: policy {name} learns by {reader.algo_name(own)}, which has no replay: {mend}, {_ELSE}"
        elif own.replay.prioritized:
            mend = f"set replay.prioritized=false, {_ELSE}"
            yield f"{_KEY}: policy {name} draws by priorities, which are its own: {mend}"
    pairs = list(policies.items())
    for name, own in pairs[1:]:
        first, of_first = pairs[0]
        if own.replay is None or of_first.replay is None:
            continue
        mine, theirs = (len(one.multi_agent.agents) for one in (own, of_first))
        if mine != theirs:
            yield (
                f"{_KEY}: policy {first} is followed by {counted(theirs, 'agent')} and {name} by {mine}, so that their "
                f"replays do not hold the same games and times: let equally many follow each, {_ELSE}"
            )
        for key, (here, there) in _drawn_by(own, of_first).items():
            if here != there:
                mend = f"give all policies the same {key}, {_ELSE}"
                yield f"{_KEY}: {key} is {there} for policy {first} and {here} for {name}: {mend}"


def _drawn_by(own: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the settings of two policies that decide which rows a sample of a replay has, by key."""
    fields = [field.name for field in dataclasses.fields(own.replay)]
    found = {f"replay.{name}": (getattr(own.replay, name), getattr(other.replay, name)) for name in fields}
    lengths = plan.sequence_length(own), plan.sequence_length(other)
    return found | {"network.core": (own.network.recurrent, other.network.recurrent), "network.max_seq_len": lengths}


def places(own: Any) -> tuple[str, ...]:
    """Returns the names of the K places of a pool, in order."""
    return tuple(f"{own.policy}-{k + 1}" for k in range(own.pool))


def _seated(given: Any) -> dict[str, tuple[str, ...]]:
    """Returns policy -> agents in a game whose first seat is the learner's."""
    own, agents = given.self_play, given.agents
    return {own.policy: agents[:1], **dict.fromkeys(places(own), agents[1:])}


def _self_play_faults(cfg: Any, agents: Sequence[str]) -> Iterator[str]:
    """Yields what does not go with self-play, each with its mend."""
    key, given = "multi_agent.self_play", cfg.multi_agent
    own = given.self_play
    for name in ("policies", "mapping", "policies_to_train"):
        if getattr(given, name):
            yield f"multi_agent.{name}: {key} decides about the policies, too: leave one of them out"
    if len(agents) < 2:
        yield f"{key}: expected an environment of two agents or more, got {cfg.env.id} with one: leave it out"
    if not own.policy or own.policy == LEAGUE:
        yield f"{key}.policy: expected a name, and not {LEAGUE}, which metrics have, got {own.policy!r}: rename it"
    if cfg.checkpoint.policies != "all":
        yield f"checkpoint.policies {cfg.checkpoint.policies}: with {key} copies are the policy's opponents: use all"
    if own.snapshot_win_rate is None and own.snapshot_every is None:
        mend = f"set {key}.snapshot_win_rate=0.6 or {key}.snapshot_every=100000"
        yield f"{key}: expected a rule when copies are taken, got none: {mend}"
    yield from split_faults(cfg, len(agents), plan.num_learners(cfg) or 1)


def split_faults(cfg: Any, num_agents: int, learners: int) -> Iterator[str]:
    """Yields where the games of each of so many devices that learn, and of each device or env runner that collects for
    them, are no whole blocks, with the numbers that are.
    """
    own, parts = cfg.multi_agent.self_play, math.lcm(learners, plan.num_pools(cfg, learners))
    unit, games = num_agents * own.pool * parts, cfg.env.num_envs
    if num_agents > 1 and games % unit:
        near = " or ".join(str(n) for n in (games - games % unit, games - games % unit + unit) if n)
        who = "devices" if parts == learners else "env runners" if parts == cfg.env_runners.num else "parts"
        on = f" x {parts} {who}" if parts > 1 else ""
        yield (
            f"env.num_envs {games}: multi_agent.self_play needs a multiple of {num_agents} seats x {own.pool} places "
            f"of the pool{on} = {unit}, so that each seat meets each place as often: use {near}"
        )


def _unequal_seats(kinds: Kinds) -> Iterator[str]:
    if kinds:
        first, other = list(kinds)[:2]
        yield (
            f"multi_agent.self_play: expected agents of equal spaces, got {first[0]} ({kinds[first]}) and {other[0]} "
            f"({kinds[other]}): leave it out, or make teams of as many agents each by multi_agent.group"
        )


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


def _kind_faults(cfg: RunConfig, kinds: Kinds) -> Iterator[str]:
    kind_of = {agent: agents for agents in kinds for agent in agents}
    for policy, agents in followers(cfg).items() if kinds else ():
        other = next((agent for agent in agents if kind_of[agent] != kind_of[agents[0]]), None)
        if other is not None:
            told = lambda agent: f"{agent} ({kinds[kind_of[agent]]})"
            table = ", ".join(f'"{pattern}": {name}' for pattern, name in _by_kind(kinds).items())
            yield (
                f"multi_agent.mapping: expected agents of equal spaces to follow policy {policy}, got "
                f"{told(agents[0])} and {told(other)}: give each kind a policy of its own, such as "
                f"multi_agent.mapping={{{table}}}, or leave mapping and policies out, which does that"
            )


def is_one_team(groups: Mapping[str, Sequence[str]], agents: Sequence[str]) -> bool:
    """Returns whether there is one team, of all agents: the environment then is one of a single agent."""
    return len(groups) == 1 and sorted(next(iter(groups.values()))) == sorted(agents)


def check_group(cfg: RunConfig, agents: Sequence[str], kinds: Kinds | None = None) -> None:
    """Raises InputError with all that is wrong with `multi_agent.group`.

    Args:
      cfg: with teams.
      agents, kinds: of the environment, before any of them are a team.
    """
    assert cfg.multi_agent is not None and cfg.multi_agent.group is not None
    if errors := list(_group_faults(cfg.multi_agent, agents, kinds or {})):
        raise InputError(*errors)


def _group_faults(given: MultiAgentConfig, agents: Sequence[str], kinds: Kinds) -> Iterator[str]:
    key, group = "multi_agent.group", given.group or {}
    if not group:
        yield f"{key}: expected a team or more, such as {{team: [{', '.join(agents)}]}}, got none: leave it out"
    kind_of = {agent: alike for alike in kinds for agent in alike}
    team_of: dict[str, str] = {}
    for name, members in group.items():
        if not _NAME.fullmatch(name) and not is_one_team(group, agents):  # which has no name anywhere
            yield f"{key}: expected names of letters, digits, _, . and -, got {name!r}: rename it"
        if not members:
            yield f"{key}.{name}: expected agents, got none: name some of {_listed(agents)}, or leave the team out"
        for agent in members:
            if agent not in agents:
                known = f"expected names of {_listed(agents)}"
                yield f"{key}.{name}: {known}, got {agent!r}{_near(agent, agents) or ': leave it out'}"
            elif agent in team_of:
                yield f"{key}: {agent} is in {team_of[agent]} and in {name}: name each agent once"
            team_of.setdefault(agent, name)
        first = members[0] if members else ""
        if other := [agent for agent in members if kind_of.get(agent) != kind_of.get(first)]:
            yield (
                f"{key}.{name}: expected agents of equal spaces, but those of {first} and {other[0]} differ: make a "
                "team of each kind, or leave it out, and each kind of agents follows a policy of its own"
            )
    alone = [agent for agent in agents if agent not in team_of]
    if taken := [name for name in group if name in alone]:
        yield f"{key}.{taken[0]}: an agent in no team has that name: rename the team"
    if is_one_team(group, agents):
        own = ("agents", "policies", "mapping", "policies_to_train", "self_play")
        if found := [name for name in own if getattr(given, name)]:
            yield f"multi_agent.{found[0]}: one team of all agents has one policy: leave it out, or leave out {key}"
        if given.replay_mode == "lockstep":
            yield "multi_agent.replay_mode lockstep: with one team of all agents one policy learns: leave it out"


def _mapped(given: MultiAgentConfig) -> MultiAgentConfig:
    """Asks a mapping that is a function for each agent; where the episode does not matter, a table takes its place."""
    if not isinstance(given.mapping, str) or given.mapping in (SHARED, BY_AGENT):
        return given
    if not re.search("[.:]", given.mapping) and registry.registered(given.mapping) is None:
        raise InputError(
            f"multi_agent.mapping: expected shared, by_agent, a table or package.module:name, got {given.mapping!r}"
            + _near(given.mapping, (SHARED, BY_AGENT))
        )
    found = policy_mapping.answers(
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


def faults(cfg: RunConfig) -> Iterator[str]:
    """Yields faults of policies and mapping, each with its mend, once the agents are known."""
    given = cfg.multi_agent
    assert given is not None and given.agents is not None
    for name, own in given.policies.items():
        key = f"multi_agent.policies.{name}"
        if not _NAME.fullmatch(name):
            yield f"{key}: expected a name of letters, digits, _, . and -, got {name!r}: rename it"
        for section in own:
            if section not in _OWN:
                near = difflib.get_close_matches(section, _OWN, 1)
                mend = f"did you mean {near[0]}?" if near else f"a policy has its own {', '.join(_OWN)}"
                yield f"unknown key {key}.{section}: {mend}"
    if found := list(_mapping_faults(given)):
        yield from found
        return
    followed = set(given.policies) if policy_mapping.by_game(cfg) else set(follows(given).values())
    if idle := [name for name in given.policies if name not in followed]:
        mend = "give them one in multi_agent.mapping, make that a function, or leave them out"
        yield f"multi_agent.policies: no agent follows {_listed(idle)}: {mend}"
    known = tuple(given.policies) or tuple(dict.fromkeys(follows(given).values()))
    for name in given.policies_to_train or ():
        if name not in known:
            expected = f"expected names among {_listed(known)}, got {name!r}{_near(name, known)}"
            yield f"multi_agent.policies_to_train: {expected}"
    yield from _stop_faults(cfg, {"agent": given.agents, "policy": tuple(followed)})


def _stop_faults(cfg: RunConfig, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields metrics of agents or policies that do not exist: a criterion of theirs would never be met."""
    own = cfg.multi_agent.self_play if cfg.multi_agent else None
    for key, metric in _metrics(cfg):
        evaluated = metric.startswith("evaluation/")
        kind, _, rest = metric.removeprefix("evaluation/").partition("/")
        # a policy's name has no slash, an agent's may have one
        name, _, row = rest.partition("/") if kind == "policy" else rest.rpartition("/")
        if evaluated and own and kind in known and metric != (one := f"evaluation/policy/{own.policy}/return"):
            yield f"{key}: with multi_agent.self_play an evaluation reports the policy that learns alone: use {one}"
        elif kind in known and row and name not in known[kind]:
            expected = f"expected one of {kind} {_listed(known[kind])}, got {name!r}"
            yield f"{key}: {expected}{_near(name, known[kind]) or ': it would never be met'}"


def alone_faults(cfg: RunConfig) -> Iterator[str]:
    """Yields metrics of agents, and of policies in evaluations, in a run with one agent, whose rows have neither."""
    for key, metric in _metrics(cfg):
        if metric.startswith(("agent/", "evaluation/agent/", "evaluation/policy/")):
            mend = "use evaluation/return" if metric.startswith("evaluation/") else "use episode/return"
            yield f"{key}: {cfg.env.id or 'the environment'} has one agent, whose rows have no such key: {mend}"


def _metrics(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    yield from ((f"stop.{metric}", metric) for metric in cfg.stop)
    if best := cfg.checkpoint.keep_best_by:
        yield f"checkpoint.keep_best_by {best}", best


def _mapping_faults(given: MultiAgentConfig) -> Iterator[str]:
    agents, policies, mapping = given.agents or (), tuple(given.policies), given.mapping
    if mapping == SHARED and len(policies) > 1:
        yield (
            f"multi_agent.mapping: shared is one policy for all agents, and there are {_listed(policies)}: use "
            'by_agent or a table such as {"agent_0": ' + f'{policies[0]}, ".*": {policies[1]}}}'
        )
    elif isinstance(mapping, dict):
        for pattern, policy in mapping.items():
            try:
                re.compile(pattern)
            except re.error as e:
                yield f"multi_agent.mapping: expected a regular expression, got {pattern!r}: {e}"
                return
            if policies and policy not in policies:
                yield (
                    f"multi_agent.mapping: {pattern!r} names the policy {policy!r}, and there are "
                    f"{_listed(policies)}{_near(policy, policies)}"
                )
        if lost := [a for a in agents if not any(re.fullmatch(pattern, a) for pattern in mapping)]:
            yield (
                f"multi_agent.mapping: no entry fits {_listed(lost)}: the agents are {_listed(agents)}; add one, such "
                f'as ".*": {next(iter(mapping.values()), SHARED)}'
            )
    elif _by_agent(given) and policies and (lost := [a for a in agents if a not in policies]):
        yield (
            f"multi_agent.policies: no policy for {_listed(lost)}: the agents are {_listed(agents)}; name the policies "
            'like the agents, or map agents to policies, such as multi_agent.mapping={".*": ' + f"{policies[0]}}}"
        )


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


def followers(cfg: RunConfig) -> dict[str, tuple[str, ...]]:
    """Returns the agents of each policy, in the order of the config; {} for an environment with one agent."""
    if cfg.multi_agent is None or cfg.multi_agent.agents is None:
        return {}
    if cfg.multi_agent.self_play is not None:
        return _seated(cfg.multi_agent)
    if policy_mapping.by_game(cfg):
        return dict.fromkeys(cfg.multi_agent.policies, cfg.multi_agent.agents)
    following = follows(cfg.multi_agent)
    policies = tuple(cfg.multi_agent.policies) or tuple(dict.fromkeys(following.values()))
    return {p: agents for p in policies if (agents := tuple(a for a, of in following.items() if of == p))}


def shows_state(cfg: RunConfig) -> bool:
    """Returns whether observations get the environment's global view, as the leaf `state`."""
    given = cfg.multi_agent
    if given is None or given.state is not None:
        return bool(given and given.state)
    return "state" in getattr(cfg.network, "value_inputs", ())


def is_trained(cfg: RunConfig, policy: str) -> bool:
    """Returns whether a policy learns."""
    if cfg.multi_agent and cfg.multi_agent.self_play:
        return policy == cfg.multi_agent.self_play.policy
    train = cfg.multi_agent.policies_to_train if cfg.multi_agent else None
    return train is None or policy in train


def learning(cfg: RunConfig) -> tuple[str, ...]:
    """Returns the policies that learn, in the order of the config."""
    return tuple(policy for policy in followers(cfg) if is_trained(cfg, policy))


def in_lockstep(cfg: RunConfig) -> bool:
    """Returns whether all policies draw the same rows from their replays."""
    return cfg.multi_agent is not None and cfg.multi_agent.replay_mode == "lockstep"


def the_one(cfg: RunConfig) -> str | None:
    """Returns the policy that is meant where none is named: the only one, or that of self-play; None: there is none."""
    policies = followers(cfg)
    if cfg.multi_agent and cfg.multi_agent.self_play:
        return cfg.multi_agent.self_play.policy
    return next(iter(policies)) if len(policies) == 1 else None


def policy_config(cfg: RunConfig, policy: str) -> RunConfig:
    """Returns the run as one policy's agents alone would have it, with the policy's own settings.

    Raises:
      InputError: an unknown key or a wrong value; each names its place.
    """
    assert cfg.multi_agent is not None
    agents = followers(cfg)[policy]
    own: Mapping[str, Any] = cfg.multi_agent.policies.get(policy, {})
    alone = MultiAgentConfig(agents=agents, state=cfg.multi_agent.state, agent_id=cfg.multi_agent.agent_id)
    if len(learning(cfg)) > 1:
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
    if cfg.multi_agent and cfg.multi_agent.self_play and cfg.multi_agent.agents:
        yield from _lines_of_self_play(cfg)
        return
    if cfg.multi_agent and cfg.multi_agent.group:
        for name, members in cfg.multi_agent.group.items():
            yield f"team {name}: {_listed(members)} act as one, 1 agent x {counted(cfg.env.num_envs, 'env')}"
    for policy, agents in followers(cfg).items():
        columns = f"{counted(len(agents), 'agent')} x {counted(cfg.env.num_envs, 'env')}"
        columns += ", as each game's mapping says" if policy_mapping.by_game(cfg) else ""
        frozen = "" if is_trained(cfg, policy) else ", does not learn"
        yield f"policy {policy}: {_listed(agents)}, {columns}{frozen}{spaces(policy)}"


def _lines_of_self_play(cfg: Any) -> Iterator[str]:
    """Yields a line for the policy that learns, and one for its copies."""
    given = cfg.multi_agent
    own, games = given.self_play, counted(cfg.env.num_envs, "game")
    yield f"policy {own.policy}: one of {len(given.agents)} seats in each of {games}, every seat equally often"
    drawn = {"uniform": "equally often", "latest": "the newest in all games", "prioritised": "by what it beats less"}
    names = ", ".join(places(own)[:8])
    yield f"policies {names}: {counted(own.pool, 'place')} of frozen copies, {drawn[own.opponents]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f": did you mean {near[0]}?" if near else ""
