"""Rules for several agents: which policies there are, who follows which, what each has of its own."""

from collections.abc import Mapping
from typing import Any

from jrl import registry
from jrl.errors import InputError
from jrl.fields import schema
from jrl.migrate import policies
from jrl.migrate.job import Job, asks, canonical, rule, translate
from jrl.migrate.tables import KEYS

_OWN = ("algo", "network", "replay")  # sections of which a policy may have its own values
_ONE = "there is one policy"


def _is_alone(job: Job) -> bool:
    """Returns whether policies are named as RLlib names the only one of a run."""
    given = job.given.get("policies")
    return given is not None and not isinstance(given, str) and set(given) <= {policies.DEFAULT}


@rule("policies")
def _policies(job: Job, key: str, value: Any) -> None:
    try:
        specs = policies.read(value, f"{job.prefix}{key}")
    except InputError as e:
        job.faults += e.errors
        return None
    for name, spec in specs.items():
        if spec.own_class is not None:
            job.lack(f"{key}.{name}", policies.no_class(spec.own_class))
    by_class = {name: policies.of_class(spec, job.source) for name, spec in specs.items()}
    if set(specs) <= {policies.DEFAULT} and not any(spec.config or by_class[name] for name, spec in specs.items()):
        return job.drop(key, _ONE)
    own = {name: _own(job, f"{key}.{name}", name, spec.config, by_class[name]) for name, spec in specs.items()}
    return _put(job, key, own)


@rule("algorithm_config_overrides_per_module")
def _overrides(job: Job, key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        return job.wrong(key, "a mapping of policies to settings", value)
    if not value:
        return job.drop(key, "it is empty")
    if set(value) == {policies.DEFAULT} and "policies" not in job.given:
        return job.lack(key, f"{_ONE}: set its keys for the run")
    return _put(job, key, {name: _own(job, f"{key}.{name}", name, given) for name, given in value.items()})


def _put(job: Job, key: str, found: Mapping[str, Any]) -> None:
    """Adds policies to those that are there."""
    job.put(key, "multi_agent.policies", schema.merge(job.tree.get("multi_agent", {}).get("policies", {}), found))


def _own(job: Job, key: str, name: str, value: Any, by_class: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Translates the settings of one policy, which override those of its class."""
    from jrl.algos import get_config_class

    if not isinstance(value, Mapping):
        if value is not None:
            job.wrong(key, "a mapping of settings", value)
        return {}
    ours = {section: dict(found) for section, found in value.items() if section in _OWN and isinstance(found, Mapping)}
    value = {theirs: given for theirs, given in value.items() if theirs not in ours}
    ours = schema.merge(by_class or {}, ours)
    algo = (ours.get("algo") or {}).get("name", job.algo)
    if algo == job.algo:
        ours.get("algo", {}).pop("name", None)
    try:
        known_as, config_class = (job.source, job.config_class) if algo == job.algo else (algo, get_config_class(algo))
    except InputError as e:
        job.faults += [f"{job.prefix}{key}: {message}" for message in e.errors]
        return {}
    inner = Job(
        algo, known_as, config_class, dict(canonical(value)), base=schema.merge(job.base, ours),
        prefix=f"{job.prefix}{key}.", inside=f"multi_agent.policies.{name}.",
    )  # fmt: skip
    for theirs in inner.raw:
        known = KEYS.get(theirs)
        sections = {ours.partition(".")[0] for ours in known.ours.split(", ")} if known and known.ours else set(_OWN)
        if sections & set(_OWN):
            translate(inner, [theirs])
        else:
            inner.drop(theirs, f"it is of the run, and a policy has its own {', '.join(_OWN)}")
    job.lines += inner.lines
    job.faults += inner.faults
    job.lacking += inner.lacking
    return schema.merge(ours, {section: values for section, values in inner.tree.items() if section in _OWN})


@rule("policy_mapping_fn")
def _mapping(job: Job, key: str, value: Any) -> None:
    if _is_alone(job) or "AlgorithmConfig." in str(value):
        return job.drop(key, _ONE if _is_alone(job) else "RLlib's own: all agents follow one policy")
    if isinstance(value, Mapping) or value in ("shared", "by_agent"):
        return job.put(key, "multi_agent.mapping", value)
    path = registry.importable(value)
    if path is None:
        return job.lack(
            key,
            f"{str(value)[:60]!r} is not the path of a function, package.module:name: write multi_agent.mapping, a "
            "table {agent: policy}",
        )
    return job.put(key, "multi_agent.mapping", path, "asked once for each agent, or each game that it depends on")


@rule("policies_to_train")
def _trained(job: Job, key: str, value: Any) -> None:
    if _is_alone(job):
        return job.drop(key, _ONE)
    if isinstance(value, list | tuple | set | frozenset):
        return job.put(key, "multi_agent.policies_to_train", sorted(map(str, value)))
    path = registry.importable(value)
    if path is None:
        return job.lack(key, f"{str(value)[:60]!r} is not the path of a function: list the names of the policies")
    return job.put(key, "multi_agent.policies_to_train", path, "asked once for each policy")


@rule("checkpoint_trainable_policies_only")
def _checkpointed(job: Job, key: str, value: Any) -> None:
    if not value or _is_alone(job):
        return job.drop(key, "checkpoints hold all policies" if not value else _ONE)
    return job.put(key, "checkpoint.policies", "trainable")


@rule("observation_fn")
def _observation(job: Job, key: str, value: Any) -> None:
    return job.lack(key, KEYS[key].note) if asks(value) else job.drop(key, "not set")


@rule("replay_mode")
def _replay_mode(job: Job, key: str, value: Any) -> None:
    if value == "independent":
        return job.drop(key, "independent: so it is unless the config says otherwise")
    if value != "lockstep":
        return job.wrong(key, "independent or lockstep", value)
    if _is_alone(job):
        return job.drop(key, _ONE)
    return job.put(key, "multi_agent.replay_mode", value)


@rule("rl_module_spec")
def _modules(job: Job, key: str, value: Any) -> None:
    found = policies.modules(value)
    if found is None:
        return job.lack(key, KEYS["model.custom_model"].note) if asks(value) else job.drop(key, "RLlib's own")
    if any(spec.own_class is not None for spec in found.values()):
        return job.lack(key, KEYS["model.custom_model"].note)
    configs = {name: spec.config for name, spec in found.items()}
    given = {name: {"model": dict(config)} if isinstance(config, Mapping) else {} for name, config in configs.items()}
    if not given or set(given) == {policies.DEFAULT}:
        return job.drop(key, f"{_ONE}: its network is that of the run")
    return _put(job, key, {name: _own(job, f"{key}.{name}", name, config) for name, config in given.items()})
