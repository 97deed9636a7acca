"""What the section `multi_agent` says once the agents are known: who follows which policy, and each policy's config."""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jrl import registry
from jrl.errors import InputError, counted
from jrl.fields.schema import merge
from jrl.settings import config, self_play
from jrl.settings.config import MultiAgentConfig, RunConfig

SHARED = "shared"  # the policy of all agents, where the config names none
BY_AGENT = "by_agent"
_ASKED = 8  # times that a mapping is asked: one that draws its answers gives two
_NAME = re.compile(r"[\w.-]{1,100}")  # it is part of metrics and of paths in checkpoints
_OWN = ("algo", "network", "replay")  # sections of which a policy may have its own values


Kinds = Mapping[tuple[str, ...], str]  # agents of equal spaces -> these in words; {} where all agents are alike


def with_agents(cfg: RunConfig, agents: Sequence[str], kinds: Kinds | None = None) -> RunConfig:
    """Fills in the names of the agents, in the environment's order, and a policy for each kind where none is named.

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
        raise InputError(
            f"multi_agent.agents: expected {_listed(agents)}, as {cfg.env.id} has them, got {_listed(given.agents)}: "
            "leave it out"
        )
    if given.self_play is not None:
        if errors := list(self_play.faults(cfg, agents)):
            raise InputError(*errors)
        return dataclasses.replace(cfg, multi_agent=dataclasses.replace(given, agents=tuple(agents)))
    if given.group is not None:
        if errors := list(_group_faults(given, agents, kinds)):
            raise InputError(*errors)
        return cfg  # whose agents are one: who learns need not know of them
    table = _by_kind(kinds)
    if kinds and given.mapping is None and set(given.policies) in (set(), set(table.values())):
        given = dataclasses.replace(given, mapping=table)
    given = _trained(_mapped(dataclasses.replace(given, agents=tuple(agents))))
    found = dataclasses.replace(cfg, multi_agent=given)
    if errors := list(faults(found)) or list(_kind_faults(found, kinds)):
        raise InputError(*errors)
    return found


def _by_kind(kinds: Kinds) -> dict[str, str]:
    """A mapping with a policy for each kind, named after its agents without their numbers, or else after the first."""
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
    """Says which policy is followed by agents of different spaces."""
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


def _group_faults(given: MultiAgentConfig, agents: Sequence[str], kinds: Kinds) -> Iterator[str]:
    """Says what is wrong with a team, each with its mend."""
    key = "multi_agent.group"
    assert given.group is not None
    if len(given.group) != 1 or sorted(next(iter(given.group.values()))) != sorted(agents):
        yield (
            f"{key}: expected one team of all agents, such as {{team: [{', '.join(agents)}]}}, got "
            f"{{{', '.join(f'{name}: [{_listed(members)}]' for name, members in given.group.items())}}}"
        )
    if kinds:
        first, other = (members[0] for members in list(kinds)[:2])
        yield (
            f"{key}: expected agents of equal spaces, but those of {first} and {other} differ: leave it out, and each "
            "kind of agents follows a policy of its own"
        )
    if own := [name for name in ("policies", "mapping", "policies_to_train") if getattr(given, name)]:
        yield f"multi_agent.{own[0]}: a team has one policy: leave it out, or leave out {key}"


def _mapped(given: MultiAgentConfig) -> MultiAgentConfig:
    """Asks a mapping that is a function for each agent, and puts the table of its answers in its place."""
    if not isinstance(given.mapping, str) or given.mapping in (SHARED, BY_AGENT):
        return given
    if not re.search("[.:]", given.mapping) and registry.registered(given.mapping) is None:
        raise InputError(
            f"multi_agent.mapping: expected shared, by_agent, a table or package.module:name, got {given.mapping!r}"
            + _near(given.mapping, (SHARED, BY_AGENT))
        )
    agents, key = given.agents or (), f"multi_agent.mapping {given.mapping}"
    fn = registry.load(given.mapping, "multi_agent.mapping")
    mend = "the mapping must not depend on the episode: name each agent's policy in a table, such as "
    mend += f'{{"{agents[0]}": {next(iter(given.policies), SHARED)}}}'
    try:
        answers = [[_policy_of(fn, agent) for agent in agents] for _ in range(_ASKED)]
    except Exception as e:
        told = f"{type(e).__name__}: {str(e)[:200]}"
        raise InputError(f"{key}: expected a function of an agent's name, got one that raises {told}: {mend}") from e
    for agent, said in zip(agents, zip(*answers, strict=True), strict=True):
        if odd := [policy for policy in said if not isinstance(policy, str)]:
            kind = type(odd[0]).__name__
            raise InputError(f"{key}: expected the name of a policy, got {kind} for {agent}: return a text")
        if len(set(said)) > 1:
            several = " and ".join(sorted(set(said))[:2])
            raise InputError(f"{key}: expected the same answer each time, got {several} for {agent}: {mend}")
    table = {re.escape(agent): policy for agent, policy in zip(agents, answers[0], strict=True)}
    return dataclasses.replace(given, mapping=table)


def _policy_of(fn: Callable[..., Any], agent: str) -> Any:
    """Asks a mapping as RLlib's are asked, with no episode and no worker, as far as it takes them."""
    parameters = inspect.signature(fn).parameters
    kinds = inspect.Parameter
    plain = [p for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    second = any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values()) or len(plain) > 1
    taken = {p.name for p in plain[:2]} if second else {plain[0].name if plain else ""}
    named = {name: None for name in ("episode", "worker") if name in parameters and name not in taken}
    return fn(agent, *([None] if second else []), **named)


def _trained(given: MultiAgentConfig) -> MultiAgentConfig:
    """Asks a function of `policies_to_train` for each policy, and puts the names that it takes in its place."""
    asked = given.policies_to_train
    if not isinstance(asked, str):
        return given
    known = tuple(given.policies) or tuple(dict.fromkeys(_follows(given).values()))
    if asked in known:
        return dataclasses.replace(given, policies_to_train=(asked,))
    fn = registry.load(asked, "multi_agent.policies_to_train")
    try:
        learn = tuple(name for name in known if fn(name))
    except Exception as e:
        told = f"{type(e).__name__}: {str(e)[:200]}"
        raise InputError(
            f"multi_agent.policies_to_train {asked}: expected a function of a policy's name, got one that raises "
            f"{told}: name the policies instead: {_listed(known)}"
        ) from e
    return dataclasses.replace(given, policies_to_train=learn)


def faults(cfg: RunConfig) -> Iterator[str]:
    """Says what is wrong with policies and mapping, each with its mend, once the agents are known."""
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
    follows = set(_follows(given).values())
    if idle := [name for name in given.policies if name not in follows]:
        mend = "give them one in multi_agent.mapping, or leave them out"
        yield f"multi_agent.policies: no agent follows {_listed(idle)}: {mend}"
    known = tuple(given.policies) or tuple(dict.fromkeys(_follows(given).values()))
    for name in given.policies_to_train or ():
        if name not in known:
            expected = f"expected names among {_listed(known)}, got {name!r}{_near(name, known)}"
            yield f"multi_agent.policies_to_train: {expected}"
    yield from _stop_faults(cfg, {"agent": given.agents, "policy": tuple(follows)})


def _stop_faults(cfg: RunConfig, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Says which stop criteria are of agents or policies that there are not: they would never be met."""
    for metric in cfg.stop:
        kind, _, rest = metric.partition("/")
        name, _, row = rest.partition("/")
        if kind in known and row and name not in known[kind]:
            expected = f"expected one of {kind} {_listed(known[kind])}, got {name!r}"
            yield f"stop.{metric}: {expected}{_near(name, known[kind]) or ': it would never be met'}"


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
            'like the agents, or say who follows which, such as multi_agent.mapping={".*": ' + f"{policies[0]}}}"
        )


def _by_agent(given: MultiAgentConfig) -> bool:
    return given.mapping == BY_AGENT or (given.mapping is None and len(given.policies) > 1)


def _follows(given: MultiAgentConfig) -> dict[str, str]:
    """Agent -> policy."""
    agents = given.agents or ()
    if isinstance(given.mapping, dict):
        fits = lambda agent: next((p for e, p in given.mapping.items() if re.fullmatch(e, agent)), SHARED)
        return {agent: fits(agent) for agent in agents}
    if _by_agent(given):
        return {agent: agent for agent in agents}
    return dict.fromkeys(agents, next(iter(given.policies), SHARED))


def followers(cfg: RunConfig) -> dict[str, tuple[str, ...]]:
    """Policy -> the agents that follow it, in the order of the config; {} for an environment with one agent."""
    if cfg.multi_agent is None or cfg.multi_agent.agents is None:
        return {}
    if cfg.multi_agent.self_play is not None:
        return self_play.followers(cfg.multi_agent)
    follows = _follows(cfg.multi_agent)
    policies = tuple(cfg.multi_agent.policies) or tuple(dict.fromkeys(follows.values()))
    return {p: agents for p in policies if (agents := tuple(a for a, of in follows.items() if of == p))}


def shows_state(cfg: RunConfig) -> bool:
    """Whether observations get the environment's global view, as the leaf `state`."""
    given = cfg.multi_agent
    if given is None or given.state is not None:
        return bool(given and given.state)
    return "state" in getattr(cfg.network, "value_inputs", ())


def is_trained(cfg: RunConfig, policy: str) -> bool:
    """Whether a policy learns."""
    if cfg.multi_agent and cfg.multi_agent.self_play:
        return policy == cfg.multi_agent.self_play.policy
    train = cfg.multi_agent.policies_to_train if cfg.multi_agent else None
    return train is None or policy in train


def the_one(cfg: RunConfig) -> str | None:
    """Returns the policy that is meant where none is named: the only one, or that of self-play; None: none is."""
    policies = followers(cfg)
    if cfg.multi_agent and cfg.multi_agent.self_play:
        return cfg.multi_agent.self_play.policy
    return next(iter(policies)) if len(policies) == 1 else None


def policy_config(cfg: RunConfig, policy: str) -> RunConfig:
    """The run as one policy's agents alone would have it, with what the policy has of its own.

    Raises:
      InputError: a key that there is not, or a value that is wrong; each names its place.
    """
    assert cfg.multi_agent is not None
    agents = followers(cfg)[policy]
    own: Mapping[str, Any] = cfg.multi_agent.policies.get(policy, {})
    alone = MultiAgentConfig(agents=agents, state=cfg.multi_agent.state, agent_id=cfg.multi_agent.agent_id)
    if not own:
        return dataclasses.replace(cfg, multi_agent=alone)
    base = {**config.to_dict(cfg), "multi_agent": None}
    algo = own.get("algo")
    if isinstance(algo, Mapping) and algo.get("name", base["algo"]["name"]) != base["algo"]["name"]:
        base["replay"] = None  # another algorithm, which may keep none
    try:
        made = config.from_dict(merge(base, {k: v for k, v in own.items() if k in _OWN}))
    except InputError as e:
        raise InputError(*(f"multi_agent.policies.{policy}: {message}" for message in e.errors)) from e
    return dataclasses.replace(made, multi_agent=alone)


def lines(cfg: RunConfig) -> Iterator[str]:
    """A line for each policy: which agents follow it, and whether it learns."""
    if cfg.multi_agent and cfg.multi_agent.self_play and cfg.multi_agent.agents:
        yield from self_play.lines(cfg)
        return
    if cfg.multi_agent and cfg.multi_agent.group:
        for name, members in cfg.multi_agent.group.items():
            yield f"team {name}: {_listed(members)} act as one, 1 agent x {counted(cfg.env.num_envs, 'env')}"
        return
    for policy, agents in followers(cfg).items():
        columns = f"{counted(len(agents), 'agent')} x {counted(cfg.env.num_envs, 'env')}"
        frozen = "" if is_trained(cfg, policy) else ", does not learn"
        yield f"policy {policy}: {_listed(agents)}, {columns}{frozen}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f": did you mean {near[0]}?" if near else ""
