"""Reads checkpoints for runs: the state to continue with, or the weights of a new run."""

import dataclasses
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import yaml

from jrl import agents, config
from jrl.agents.policies import shapes
from jrl.config import RunConfig, Sizes, datasets, multi_agent, to_dict
from jrl.config.multi_agent import LEAGUE
from jrl.config.policy_mapping import TABLE, by_game
from jrl.errors import InputError
from jrl.fields.schema import flatten, flow
from jrl.learn.learner import Kept
from jrl.learn.program import LoopState
from jrl.metrics import progress
from jrl.metrics.episodes import EpisodeState, clear_running
from jrl.run.store import checkpoint
from jrl.spaces_json import plain
from jrl.types import PyTree

_log = logging.getLogger(__name__)

_VALUE_ARRAYS = re.compile(r"(^|[._])(value|critic|q)([._]|$)|^return_stats")  # names of arrays of value functions


def restore_learner(saved: Path, template: PyTree, *, allow_missing: bool = False) -> PyTree:
    """Returns the algorithm's State of a checkpoint, on the host.

    Args:
      template: State of the wanted shapes and dtypes.
      allow_missing: take policies that the checkpoint lacks from `template`; False: raise.
    Raises:
      InputError: the checkpoint does not have these arrays, or lacks a policy.
    """
    cfg = config.override(checkpoint.read_meta(saved)["config"], [])
    wanted = checkpoint.kept_policies(template, cfg.checkpoint, cfg.multi_agent)
    if wanted is not template and len(wanted) < len(template) and not allow_missing:
        missing = [name for name in multi_agent.followers(cfg.multi_agent) if name not in wanted]
        raise InputError(
            f"{saved}: expected all policies, got only those that learn (checkpoint.policies trainable), without "
            f"{', '.join(missing)}: name another policy"
        )
    found = checkpoint.restore(saved, "learner", wanted, lambda found, _: _name_policies(found, agents.make(cfg)))
    return {**template, **found} if wanted is not template else found


def _name_policies(found: PyTree, policies: agents.Policies) -> PyTree:
    """Returns a State by policy name; an earlier version saved policies by their index in a table of games."""
    if not isinstance(found, dict) or "numbers" not in found.get(TABLE, {}):
        return found
    first, *others = policies.similar
    rest, old = [name for names in others for name in names], found[TABLE]
    indices = [*range(len(first)), *range(len(old["numbers"]) - len(rest), len(old["numbers"]))]
    number_of = {int(old["numbers"][index]): number for number, index in enumerate(indices)}
    recent = jax.tree.map(lambda x: x[indices], old["recent"])
    table = np.vectorize(lambda number: number_of.get(int(number), 0), otypes=[np.int32])(old["table"])
    renewed = {"table": table, "asked": old["asked"], "latest": old["latest"], "recent": recent}
    return {**{name: found[f"place-{i + 1}"] for name, i in zip([*first, *rest], indices)}, TABLE: renewed}


def require_policy(saved: Path, policy: str, state: PyTree) -> PyTree:
    """Returns a policy's State from `restore_learner`. Raises InputError: the checkpoint lacks that policy."""
    if isinstance(jax.tree.leaves(state)[0], jax.ShapeDtypeStruct):
        raise InputError(
            f"policy: expected a policy that learns, as {saved} has no others, got {policy}: save with "
            "checkpoint.policies=all"
        )
    return state


def restore_state(saved: Path, cfg: RunConfig, template: LoopState, devices: int) -> LoopState:
    """Returns the state of a checkpoint, on the host.

    Args:
      cfg: config of the continued run.
      template: initial state of the run, from `Program.keep`; its replay is used if the checkpoint has no replay.
      devices: number of learner devices of the run, which may differ from the checkpoint's.
    Raises:
      InputError: the checkpoint lacks a part that the run needs.
    """
    meta = checkpoint.read_meta(saved, resumable=True)
    wanted = checkpoint.state_parts(template, cfg.checkpoint, cfg.multi_agent)
    before, envs = meta["devices"], _other_num_envs(meta, cfg)
    is_kept = isinstance(template.replay, Kept)  # the latest rollouts, which the run soon replaces
    if envs:
        fault = f"env.num_envs: expected {envs}, got {cfg.env.num_envs}"
        if jax.tree.leaves(wanted["replay"]) and not is_kept:
            raise InputError(
                f"{fault}: the replay of {saved} has one column per environment: keep env.num_envs={envs}, or start "
                "with an empty replay: --set checkpoint.replay=none"
            )
        if by_game(cfg.multi_agent):
            raise InputError(
                f"{fault}: the policy mapping of {saved} has a table of its environments' games: keep "
                f"env.num_envs={envs}"
            )
    if jax.tree.leaves(wanted["replay"]) and not (saved / "replay").is_dir():
        raise InputError(f"checkpoint: {saved} holds no replay: --set checkpoint.replay=none starts with an empty one")
    found = {"learner": restore_learner(saved, jax.device_get(template.learner), allow_missing=True)}
    if (before != devices or envs) and is_kept:
        wanted["replay"] = ()
    found["replay"] = _restore_replay(saved, wanted["replay"], before, devices)
    found["source"] = template.source if envs else _restore_source(saved, wanted["source"])
    if found["replay"] == ():
        found["replay"] = template.replay
    return LoopState(**found)


def _other_num_envs(meta: Mapping[str, Any], cfg: RunConfig) -> int | None:
    """Returns the checkpoint's number of environments, if the run has another number; else None."""
    found = (meta["config"].get("env") or {}).get("num_envs")
    return found if isinstance(found, int) and found != cfg.env.num_envs and not datasets.alone(cfg) else None


def _restore_replay(saved: Path, wanted: PyTree, before: int, devices: int) -> PyTree:
    from jrl.replay.regroup import convert

    renew = lambda replay, like: convert(replay, like, before)
    if before == devices or not jax.tree.leaves(wanted):
        return checkpoint.restore(saved, "replay", wanted, renew)
    like = shapes(wanted)
    dealt = _deal_replay(checkpoint.read(saved, "replay", like, renew), wanted, before, devices)
    return checkpoint.check_fits(saved, "replay", dealt, like)


def _deal_replay(found: PyTree, wanted: PyTree, before: int, devices: int) -> PyTree:
    """Distributes a replay over `devices` devices. The priorities of data sets are reset, except their update count."""
    from jrl.replay import layout, mixed
    from jrl.replay.regroup import regroup

    if isinstance(found, mixed.State):
        parts = zip(found.parts, wanted.parts, strict=True)
        return mixed.State(tuple(_deal_replay(part, fresh, before, devices) for part, fresh in parts))
    is_ring = lambda x: isinstance(x, layout.State)
    if not any(map(is_ring, jax.tree.leaves(found, is_leaf=is_ring))):
        if not hasattr(wanted, "priorities"):
            return wanted
        steps = np.resize(np.max(found.priorities.steps), np.shape(wanted.priorities.steps))
        return wanted.replace(priorities=wanted.priorities.replace(steps=steps))
    return regroup(found, before, devices)


def _restore_source(saved: Path, wanted: PyTree) -> PyTree:
    """Restores the state of JAX environments, or the episode statistics of other environments.

    If the run changes from one to the other, the statistics continue and the environments are reset.
    """
    if not jax.tree.leaves(wanted):
        return wanted
    like, is_reset = shapes(wanted), False

    def renew(found: Any, like: PyTree) -> Any:
        nonlocal is_reset
        if isinstance(like, EpisodeState):
            return found.get("columns", found)
        is_reset = "columns" not in found
        return {**vars(wanted), "columns": found} if is_reset else _name_games(found)

    found = checkpoint.read(saved, "source", like, renew)
    if is_reset:
        dealt = found.replace(columns=clear_running(_regroup(found.columns, wanted.columns)))
    else:
        dealt = _regroup(found, wanted)
    return checkpoint.check_fits(saved, "source", dealt, like)


def _name_games(found: Any) -> Any:
    """Returns the state of a source with named fields; earlier versions saved a tuple (environments, game, over)."""
    inner = found.get("env_state") if isinstance(found, dict) else None
    if not isinstance(inner, list | tuple) or len(inner) != 3:
        return found
    env, game, over = inner
    env = env if isinstance(env, dict) and {"env", "ended"} <= set(env) else {"env": env}
    return {**found, "env_state": {**env, "game": game, "over": over}}


def read_config(path: Path) -> dict[str, Any] | None:
    """Returns the config of a run or checkpoint as plain data, with the run's directory as `run.out`.

    The config of a run comes from config.yaml, or from the latest checkpoint if that file is missing or damaged.

    Returns:
      The config; None: `path` is not a run.
    Raises:
      InputError: neither file can be read.
    """
    data, found = None, checkpoint.locate(path) if checkpoint.exists(path) else None
    directory = checkpoint.find_run_directory(path)
    if found != path.absolute() and (file := path / "config.yaml").exists():
        try:
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or not isinstance(data.get("run", {}), dict):
                raise ValueError("it is not a mapping")
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as e:
            data, why = None, str(e).splitlines()[0]
            if found is None:
                raise InputError(f"{file}: it is damaged ({why}), and there is no checkpoint: begin a new run") from e
            _log.warning("%s: it is damaged (%s): using the config of %s", file, why, found)
    if data is None and found is not None:
        data = checkpoint.read_meta(found)["config"]
    if data is None:
        return None
    return {**data, "run": {**data.get("run", {}), "out": None if directory is None else str(directory)}}


def describe_resume(
    saved: Path, cfg: RunConfig, devices: int, data: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Yields notes on what changes if a checkpoint continues with this config, number of devices and data.

    Args:
      saved: the checkpoint.
      cfg: config of the continued run.
      devices: number of learner devices.
      data: name of a data set -> checksum.
    """
    meta = checkpoint.read_meta(saved)
    old, new = flatten(plain(meta["config"])), flatten(plain(to_dict(cfg)))
    for key in {**old, **new}:
        if key not in ("run.out", "network.init") and old.get(key) != new.get(key):  # without effect later
            yield f"changed: {key} {flow(old.get(key))} -> {flow(new.get(key))}"
    for name, checksum in meta.get("data", {}).items():
        if data.get(name, checksum) != checksum:
            where = ", ".join(name.splitlines())
            yield f"changed: data.input {where} has other content, checksum {checksum} -> {data[name]}"
    if meta["config"].get("checkpoint", {}).get("policies") == "trainable":
        yield "checkpoint.policies was trainable: policies that do not learn begin anew, as the run's seed makes them"
    if envs := _other_num_envs(meta, cfg):
        yield f"env.num_envs {envs} -> {cfg.env.num_envs}: the environments and their statistics start anew"
    if meta["devices"] != devices:
        yield f"from {meta['devices']} devices to {devices}: the environments are dealt out anew"
    if cfg.replay is not None and cfg.checkpoint.replay == "none":
        yield "checkpoint.replay is none: replay starts empty, learning waits until it is filled"


def drop_met_criteria(meta: Mapping[str, Any], cfg: RunConfig, *, is_requested: bool) -> tuple[RunConfig, list[str]]:
    """Returns the config without the stop criteria that the run has already met, which would end it at once.

    Args:
      meta: description of the checkpoint.
      cfg: config of the continued run.
      is_requested: whether the user gave stop criteria. So does a config whose `stop` differs from the checkpoint's.
    Returns:
      The config, unchanged if no criteria were given, and a note for each met criterion.
    """
    saved_stop = meta["config"].get("stop")
    is_requested = is_requested or (saved_stop is not None and saved_stop != to_dict(cfg)["stop"])
    row = {name: value for name, value in (meta.get("metrics") or {}).items() if isinstance(value, int | float)}
    met_before = meta.get("met") or {}
    met, lines = set(), list[str]()
    for name, target in cfg.stop.items():
        now = progress.is_met(name, row, target, cfg.run.smoothing_episodes)
        if name == Sizes(cfg).counts_by or not (now or met_before.get(name, -math.inf) >= target):
            continue
        met.add(name)
        note = f"stop.{name} {target:g} was met before"
        if is_requested:
            lines.append(f"{note}: it does not count from now on, a higher goal would")
        else:
            lines.append(f"{note}, and ends the run again: to train on, --stop {name}=null, or a higher goal")
    if not is_requested:
        return cfg, lines
    return dataclasses.replace(cfg, stop={k: v for k, v in cfg.stop.items() if k not in met}), lines


def _regroup(source: PyTree, wanted: PyTree) -> PyTree:
    """Distributes the state of a source over the devices or pools of `wanted`.

    Each environment keeps its state, [old, B / old, *] or [B, *]. Values that each pool has once, such as the window of
    the latest episodes, are those of `wanted` if their total size differs.
    """
    deal = lambda x, like: np.reshape(x, like.shape) if np.size(x) == np.size(like) else np.asarray(like)
    return jax.tree.map(deal, source, wanted)


def transfer_weights(saved: Path, state: PyTree, *, policy_only: bool = False) -> tuple[PyTree, list[str]]:
    """Copies parameters and statistics of equal name and shape from a checkpoint, for fine-tuning.

    Args:
      state: initial State of the algorithm; its optimizer state and counters are kept.
      policy_only: keep the state's critics and value functions, too.
    Returns:
      The State, and notes on the copied arrays.
    Raises:
      InputError: no array fits.
    """
    found = _leaves(checkpoint.read(saved, "learner"))
    for name, x in list(found.items()):  # missing target networks are copies of the parameters
        if name.startswith("params."):
            found.setdefault(f"target_{name}", x)
    is_wanted = lambda name: _is_weight(name) and not (policy_only and _VALUE_ARRAYS.search(name))
    mine = {name: x for name, x in _leaves(state).items() if is_wanted(name)}
    fits = {n for n, x in mine.items() if n in found and (found[n].shape, found[n].dtype) == (x.shape, x.dtype)}
    if not any(mine[name].ndim > 1 for name in fits):  # an equal bias alone does not make networks similar
        raise InputError(f"--init-from: {saved} holds no weights that fit: expected the same layers: change network")
    lines = [f"{len(fits)} of {len(mine)} arrays from {saved}"]
    for name, x in mine.items():
        if name not in fits:
            shape = f"{list(found[name].shape)} there" if name in found else "not there"
            lines.append(f"not taken: {name} ({list(x.shape)} here, {shape})")
    unused = [n for n in found if n not in mine and is_wanted(n) and not n.startswith("target_params.")]
    lines += [f"not used: {name} ({list(found[name].shape)})" for name in unused]

    def take(path: Any, x):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return found[name] if name in fits else x

    return jax.tree.map_with_path(take, state), lines


def _is_weight(name: str) -> bool:
    """Returns whether an array of a State is a weight: not a rounding error, count of a league or policy table."""
    is_other = name.startswith((*checkpoint.NOT_WEIGHTS, f"{LEAGUE}.", f"{TABLE}."))
    return not is_other and checkpoint.SUM_OF_REST.keys().isdisjoint(name.split("."))


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree.leaves_with_path(tree)}
