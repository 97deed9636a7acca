"""Methods of AlgorithmConfig, built from the table: their arguments with annotation, default and documentation.

An argument of a single key has the annotation, default and documentation of the key, in `jrl.config.sections` or in the
algorithm's Config.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl import algos
from jrl.config.sections import RunConfig
from jrl.fields import validation
from jrl.fields.data import Fresh, learns_from
from jrl.rllib.table import GROUPS

METHODS = {
    "environment": "Environment of the run.",
    "env_runners": "Number of environments and env runners, and the collection of rollouts.",
    "training": "Hyper-parameters, networks, replay, and the user's functions.",
    "exploration": "Exploration while learning; the same arguments as in `env_runners`.",
    "offline_data": "Data sets to learn from, instead of environments or beside them.",
    "multi_agent": "Policies of an environment with several agents, and the policy of each agent.",
    "learners": "Devices of this machine that learn and act, by index.",
    "resources": "Placement of env runners, and settings that apply before jax starts.",
    "fault_tolerance": "Restart of failed environments and env runners.",
    "evaluation": "Episodes of evaluation during training; they never change training.",
    "callbacks": "Classes of jrl.api.Callbacks.",
    "reporting": "Length of an iteration of `train()` and content of its result. Never changes learning.",
    "checkpointing": "Checkpoints that are kept.",
    "debugging": "Seed, logs, and checks for faults.",
}
# methods of RLlib's configs alone; their arguments are translated
ONLY_RLLIB = ("rollouts", "framework", "api_stack", "rl_module", "python_environment", "experimental")
_FIRST = {"environment": "env", "callbacks": "callbacks_class", "framework": "framework"}  # arguments without keyword
_TABLE_ROWS = [row for rows in GROUPS.values() for row in rows]
# arguments that are translated as in a file
RULE_ARGUMENTS = {row.name for row in _TABLE_ROWS if row.ruled}


class _NotSet:
    def __repr__(self) -> str:
        return "not set"


NOT_SET = _NotSet()


class Argument(NamedTuple):
    """Keyword of a method."""

    key: str | None  # key of the config tree; None: several keys follow from this and other arguments
    annotation: Any
    default: Any
    doc: str


@functools.cache
def build_arguments(algo: str) -> dict[str, dict[str, Argument]]:
    """Returns method -> keyword -> Argument of an algorithm; for an empty name of all algorithms."""
    if not algo:
        shared: dict[str, dict[str, Argument]] = {}
        for name in algos.names():
            for method, known in build_arguments(name).items():
                shared[method] = known | shared.get(method, {})
        return shared
    config_class = algos.get_config_class(algo)
    absent = {
        "replay_buffer_config": learns_from(config_class) is Fresh,
        "exploration_config": not hasattr(config_class, "exploration"),
        "minibatch_size": not hasattr(config_class, "num_minibatches"),
    }
    found: dict[str, dict[str, Argument]] = {method: {} for method in METHODS}
    for field in _list_fields(config_class):
        if field.name != "exploration":
            found["training"][field.name] = _build_argument(f"algo.{field.name}", config_class)
    for row in _TABLE_ROWS:
        name = row.argument or (row.name if row.by else "")
        for method in row.by.split() if not absent.get(name) else ():
            key = row.key or ("" if row.doc else row.ours)
            made = _build_argument(key, config_class) if key else Argument(None, int, NOT_SET, "")
            found[method][name] = made._replace(doc=row.doc or made.doc)
    return found


def _list_fields(cls: type) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(cls) if f.init and f.name != "name"]


_hints = functools.cache(typing.get_type_hints)


def _build_argument(key: str, algo_config: type) -> Argument:
    section, _, name = key.partition(".")
    cls = algo_config if section == "algo" else validation.section_class(_hints(RunConfig)[section])
    assert cls is not None
    docs = validation.docs(cls)
    if not name:  # a dict of a whole section
        describe = lambda field: "required" if validation.is_required(field) else repr(validation.default_of(field))
        keys = "; ".join(f"{f.name} ({describe(f)}): {docs.get(f.name, '')}" for f in _list_fields(cls))
        return Argument(key, dict[str, Any], {}, f"{inspect.getdoc(cls)} Keys: {keys}")
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    default = NOT_SET if validation.is_required(field) else validation.default_of(field)
    return Argument(key, _hints(cls)[name], default, docs.get(name, ""))


def build_method(name: str, given: Mapping[str, Argument] | None, setter: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method `name(self, *, ...)` that calls setter(self, name, keywords) and returns self.

    Args:
      name: name of the method.
      given: arguments of its signature; None: any keywords.
      setter: function that takes the keywords.
    """
    first = _FIRST.get(name)

    def call(self, *args: Any, **keywords: Any) -> Any:
        if len(args) > (first is not None):
            raise TypeError(f"{name}() takes keywords")
        if args and first:
            keywords = {first: args[0], **keywords}
        setter(self, "env_runners" if name == "rollouts" else name, keywords)
        return self

    call.__name__ = call.__qualname__ = name
    call.__doc__ = METHODS.get(name, "Takes the arguments of RLlib's method: see `AlgorithmConfig.translations`.")
    if given is not None:
        kinds = inspect.Parameter
        parameters = [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
        for argument, x in sorted(given.items(), key=lambda item: item[0] != first):
            kind = kinds.POSITIONAL_OR_KEYWORD if argument == first else kinds.KEYWORD_ONLY
            parameters.append(kinds(argument, kind, default=x.default, annotation=x.annotation))
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
        lines = [f"  {argument}: {x.doc}".rstrip() for argument, x in given.items()]
        call.__doc__ = "\n".join([METHODS[name], "", "Args:", *lines])
    return call
