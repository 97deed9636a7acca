"""Algorithms by name. Each is one module with `Config`, a dataclass of hyper-parameters, and `make`, which returns the
algorithm as pure functions:

    make(cfg, spec, network, *, axis_name=None, loss=None) -> Algo

    cfg        hyper-parameters; floats may be traced
    spec       environment's spaces; on-policy algorithms take the batch size from the rollout, not from `num_envs`
    network    shape of the networks; with several networks each has its own torso and core unless `shared`
    axis_name  mapped axis over devices; None: no such axis
    loss       user's loss, see below; None: the algorithm's own

The `q` of an Algo's `outputs` also has the masked actions. With a core, `outputs` assumes an episode's start. `make`
raises InputError for a space, network, core or exploration that the algorithm does not support.

`loss` is a user's pure function that replaces the algorithm's own loss (`custom.loss` of a run):

    def loss(default, net, params, batch):
        value, metrics = default(params, batch)             # the algorithm's own, at the present schedule values
        return value + penalty, metrics | {"loss/penalty": penalty}

It returns a float scalar, the mean over the batch's rows weighted by `batch.weight` (0 on masked rows), and a dict of
scalars by name. Both are averaged over the chunks of a batch and over devices. Its arguments:

    ppo, appo     net: actor_critic.ActorCritic, `apply(params, obs) -> (distribution, value)`    batch: ppo.Rows [N]
    a2c           the same                                                               batch: actor_critic.Rows [N]
    impala        the same                                         batch: impala.Columns [T, b], whole sequences;
                  with a core the network reads `impala.window(batch)`, [b, T + 1]
    vmpo          the same                                                               batch: vmpo.Rows [N]
    marwil, awr   the same                                                               batch: marwil.Rows [N]
    bc            net: critics.Policy, `apply(params, obs) -> distribution`              batch: bc.Rows [N]
    distill       the same                                                               batch: distill.Rows [N]
    dqn, iqn      net: parts.QNetwork, `q(params, obs) -> [N, A]`                        batch: parts.TdBatch [N]
    vdn           net: parts.QNetwork, `q(params, obs) -> [N, agents, A]`                batch: parts.TdBatch [N]
    pqn           net: parts.QNetwork, `q(params, obs) -> [N, A]`                        batch: pqn.Rows [N]
    alphazero     net: actor_critic.ActorCritic                                          batch: alphazero.Rows [N]
    muzero        net: muzero.Model                                                      batch: muzero.Rows [N]
    spo           net: actor_critic.ActorCritic                                          batch: spo.Rows [N]
    sac, td3,     net: networks.critics.Critics, `apply(params, obs, action) -> [C, N]`, with Discrete actions
    iql, mpo, fql `apply(params, obs) -> [C, N, A]`; it is the critics' loss, `params` are theirs
                                                                                         batch: parts.TdBatch [N]
    reppo         the same, with one critic                                              batch: reppo.Rows [N]

With a core, rows are sequences: leaves are [N, L, *], and `obs` is a Window, which `net` reads like an observation.
The Window of a TdBatch begins after the burn-in, with the learned network's recurrent state; its `next_obs` is ().

Targets and advantages in a batch are the algorithm's and carry no gradient. With replay, priorities come from the
algorithm's own loss. An invalid result raises InputError when an update is first traced.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from jrl import registry
from jrl.errors import InputError, short
from jrl.fields.data import DataSets, Fresh, Replay, learns_from, traits
from jrl.fields.hyper import NetworkConfig

_MODULES = {
    name: f"jrl.algos.{name}"
    for name in (
        "ppo", "a2c", "impala", "appo", "trpo", "vmpo", "reppo", "dqn", "iqn", "vdn", "pqn", "sac", "td3", "iql", "mpo",
        "fql", "awr", "bc", "marwil", "dt", "distill", "ars", "es", "cma_es", "alphazero", "muzero", "spo",
    )
}  # fmt: skip


def names() -> tuple[str, ...]:
    """Returns the names of the registered algorithms."""
    return tuple(_MODULES)


def of_module(module: str) -> tuple[str, ...]:
    """Returns the names of the algorithms that a module defines, without importing it."""
    return tuple(name for name, home in _MODULES.items() if home == module)


def is_own(name: object) -> bool:
    """Returns whether a name is a user's module: with dots, importable, or `__main__` (a script or notebook)."""
    if not isinstance(name, str) or name in _MODULES:
        return False
    if name == "__main__":
        return True
    if "." in name or not name.isidentifier():
        return "." in name
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def spelled(name: object) -> str:
    """Returns the canonical spelling of a name: registered names in lower case, module names unchanged."""
    return str(name).lower() if str(name).lower() in _MODULES else str(name)


def title(name: str) -> str:
    """Returns the name of an algorithm's classes in `jrl.api`: "PPO" for ppo, "Reinforce" for examples.reinforce."""
    return name.upper() if name in _MODULES else name.rpartition(".")[2].title().replace("_", "")


def get(name: str) -> ModuleType:
    """Returns the module of an algorithm: registered, or the user's own, for example `my_project.my_ppo`.

    Raises:
      InputError: no algorithm has that name, or the module is not an algorithm.
    """
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if not is_own(name):
        raise InputError(f"algo.name: unknown algorithm {short(name)}: choose one of {', '.join(_MODULES)}")
    module = registry.import_module(name, f"algo.name {short(name)[1:-1]}")
    if not (dataclasses.is_dataclass(getattr(module, "Config", None)) and callable(getattr(module, "make", None))):
        raise InputError(
            f"algo.name {name}: an algorithm is a module with a dataclass Config and a function "
            "make(cfg, spec, network, *, axis_name=None, loss=None) -> Algo, as jrl.algos.ppo"
        )
    if module.Config.__module__ != name:  # a run finds its algorithm by the module of its Config
        raise InputError(
            f"algo.name {name}: its Config is that of {module.Config.__module__}: derive one of its own, "
            "@hyperparams class Config(...)"
        )
    return module


def check(name: str, cfg: Any, algo: Any) -> None:
    """Raises InputError if the Algo of a user's module cannot be run; see docs/own-algorithm.md.

    Args:
      name: name of the algorithm.
      cfg: its Config.
      algo: result of its `make`.
    """
    if not is_own(name):
        return
    kind = learns_from(cfg)
    if not {"init", "update", "data", "ingest"} <= set(getattr(algo, "_fields", ())):
        raise InputError(f"algo.name {name}: make: expected a jrl.types.Algo, got {type(algo).__name__}: return one")
    if not isinstance(algo.data, kind):
        raise InputError(
            f"algo.name {name}: make: expected an Algo whose data is {kind.__name__}, as Config.learns_from says, got "
            f"{short(algo.data)}: change Config.learns_from, or what make returns"
        )
    if kind is not Replay:
        return
    if algo.ingest is None:
        raise InputError(
            f"algo.name {name}: ingest: expected a function (state, rollout) -> state, which an algorithm with replay "
            "needs for each new rollout, got None: give jrl.algos.agent.algo the argument ingest=agent.ingest"
        )
    import jax  # not at the top: names and Configs are used before jax is loaded

    if not hasattr(jax.eval_shape(algo.init, jax.random.key(0)), "updates"):
        raise InputError(
            f"algo.name {name}: init: expected a State with the field updates, the count of updates [] u32: make it by "
            "jrl.algos.agent.begin, or add the field"
        )


def critic_faults(cfg: Any, network: NetworkConfig) -> list[str]:
    """Returns one message per critic option of the network (such as `value_inputs`) that an algorithm cannot use."""
    used = ["value_inputs"] if network.value_inputs else []
    own = "critic_torso", "critic_norm", "critic_dropout", "critic_hidden"
    used += [name for name in own if getattr(network, name) is not None]
    used = [name for name in used if not (name == "value_inputs" and traits(cfg).has_teacher)]
    if not used or traits(cfg).has_critic:
        return network.sharing_faults()
    name = type(cfg).__module__.rpartition(".")[2]
    others = [other for other in names() if traits(get_config_class(other)).has_critic]
    instead = either(alike(cfg, others))
    return [f"network.{key}: {name} has no critic beside its policy: use {instead}, or leave this out" for key in used]


def regularization_faults(cfg: Any, network: NetworkConfig) -> list[str]:
    """Returns one message per key of dropout or batch_renorm that an algorithm cannot use."""
    name = type(cfg).__module__.rpartition(".")[2]
    if network.norm_after_activation and not network.has_statistics:
        fix = "set network.norm to batch_renorm, or leave it out"
        return [f"network.norm_after_activation: expected batch_renorm, which it places, got {network.norm}: {fix}"]
    values = {key: getattr(network, key) for key in ("norm", "torso", "critic_norm", "critic_torso")}
    keys = [key for key, value in values.items() if value in ("batch_renorm", "flash")]
    dropout = [key for key in ("dropout", "critic_dropout") if getattr(network, key)]
    if not traits(cfg).has_learning_pass:
        others = [other for other in names() if traits(get_config_class(other)).has_learning_pass]
        fix = f"use {either(others)}, or leave it out"
        return [f"network.{key}: {name} supports neither dropout nor batch_renorm: {fix}" for key in keys + dropout]
    faults = []
    if keys and network.recurrent:
        expected = "another torso" if "torso" in keys[0] else "none or layer"
        faults.append(
            f"expected {expected} for a network with memory, got {values[keys[0]]}: set network.core.name to none"
        )
    if keys and getattr(cfg, "conservative", False):
        other = "simba" if "torso" in keys[0] else "layer"
        faults.append(
            f"CQL compares actions outside of the batch, whose statistics batch_renorm lacks: set it to {other}"
        )
    if keys and keys[0] in ("norm", "torso") and learns_from(cfg) is Fresh:
        faults.append(
            f"{name} divides probabilities of learning by those of acting, which batch_renorm makes different: set "
            f"network.critic_{keys[0]} instead"
        )
    return [f"network.{keys[0]}: {fault}" for fault in faults]


def memory_faults(cfg: Any, network: NetworkConfig) -> list[str]:
    """Returns a message if a network has memory that an algorithm cannot use."""
    if not network.recurrent or traits(cfg).has_memory:
        return []
    name = type(cfg).__module__.rpartition(".")[2]
    fix = "set network.core.name to none, and env.frame_stack for observations of several steps"
    return [f"network.core.name: expected none for {name}, whose search has no memory, got {network.core.name}: {fix}"]


def alike(cfg: Any, others: Iterable[str]) -> list[str]:
    """Returns the names in `others` that learn from the same kind of data as `cfg`."""
    needs_data = learns_from(type(cfg)) is DataSets
    return [name for name in others if (learns_from(get_config_class(name)) is DataSets) == needs_data]


def either(names: Sequence[str]) -> str:
    """Joins names: "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def get_config_class(name: str) -> type:
    """Returns the dataclass of an algorithm's hyper-parameters."""
    return get(name).Config
