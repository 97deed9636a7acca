"""State that a run continues with from a checkpoint, or the weights that a new one begins with."""

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

_OF_VALUES = re.compile(r"(^|[._])(value|critic|q)([._]|$)|^return_stats")  # names of their arrays
NOT_WEIGHTS = ("opt_state", "env_steps", "updates")  # of an algorithm's State


def learner(saved: Path, template: PyTree, *, beside: bool = False) -> PyTree:
    """Returns the algorithm's State of a checkpoint, on the host.

    Args:
      saved: from `checkpoint.locate`.
      template: its shapes and dtypes.
      beside: policies that the checkpoint does not hold are those of `template`. False: there may be none.
    Raises:
      InputError: the checkpoint does not hold what is wanted.
    """
    cfg = config.override(checkpoint.read_meta(saved)["config"], [])
    wanted = checkpoint.kept_policies(template, cfg.checkpoint, cfg.multi_agent)
    if wanted is not template and len(wanted) < len(template) and not beside:
        lost = [name for name in multi_agent.followers(cfg.multi_agent) if name not in wanted]
        raise InputError(
            f"{saved}: it holds the policies that learn (checkpoint.policies trainable), and not {', '.join(lost)}: "
            "name one of those that it has"
        )
    found = checkpoint.restore(saved, "learner", wanted, lambda found, _: _named(found, agents.make(cfg)))
    return {**template, **found} if wanted is not template else found


def _named(found: PyTree, policies: agents.Policies) -> PyTree:
    """Names the policies of a State that an earlier version saved by their places in a table of games."""
    if not isinstance(found, dict) or "numbers" not in found.get(TABLE, {}):
        return found
    first, *others = policies.alike
    rest, old = [name for names in others for name in names], found[TABLE]
    places = [*range(len(first)), *range(len(old["numbers"]) - len(rest), len(old["numbers"]))]
    number_of = {int(old["numbers"][place]): number for number, place in enumerate(places)}
    recent = jax.tree.map(lambda x: x[places], old["recent"])
    table = np.vectorize(lambda number: number_of.get(int(number), 0), otypes=[np.int32])(old["table"])
    roster = {"table": table, "asked": old["asked"], "latest": old["latest"], "recent": recent}
    return {**{name: found[f"place-{place + 1}"] for name, place in zip([*first, *rest], places)}, TABLE: roster}


def held(saved: Path, policy: str, state: PyTree) -> PyTree:
    """Returns a policy's State as `learner` found it. Raises InputError: the checkpoint does not hold that policy."""
    if isinstance(jax.tree.leaves(state)[0], jax.ShapeDtypeStruct):
        raise InputError(f"policy {policy}: it does not learn, and {saved} holds those that do alone")
    return state


def restore(saved: Path, cfg: RunConfig, template: LoopState, devices: int) -> LoopState:
    """Restores the state of a checkpoint, on the host.

    Args:
      saved: from `checkpoint.locate`.
      cfg: of the run that continues.
      template: what `Program.keep` gives of its fresh state; where the checkpoint keeps no replay, its replay is taken.
      devices: that the run has; the checkpoint may come from another number of them.
    Raises:
      InputError: the checkpoint does not hold what the run needs.
    """
    meta = checkpoint.read_meta(saved, resumable=True)
    wanted = checkpoint.state_parts(template, cfg.checkpoint, cfg.multi_agent)
    before, envs = meta["devices"], _other_num_envs(meta, cfg)
    latest = isinstance(template.replay, Kept)  # rollouts: soon there are others
    if envs:
        filled = bool(jax.tree.leaves(wanted["replay"])) and not latest
        _check_num_envs(saved, cfg.env.num_envs, envs, replay=filled, is_by_game=by_game(cfg.multi_agent))
    if jax.tree.leaves(wanted["replay"]) and not (saved / "replay").is_dir():
        raise InputError(f"checkpoint: {saved} holds no replay: --set checkpoint.replay=none starts with an empty one")
    found = {"learner": learner(saved, jax.device_get(template.learner), beside=True)}
    if (before != devices or envs) and latest:
        wanted["replay"] = ()
    found["replay"] = _replay(saved, wanted["replay"], before, devices)
    found["source"] = template.source if envs else _source(saved, wanted["source"])
    if found["replay"] == ():
        found["replay"] = template.replay
    return LoopState(**found)


def _other_num_envs(meta: Mapping[str, Any], cfg: RunConfig) -> int | None:
    """Returns a checkpoint's number of environments where a run continues with another one, or else None."""
    found = (meta["config"].get("env") or {}).get("num_envs")
    return found if isinstance(found, int) and found != cfg.env.num_envs and not datasets.alone(cfg) else None


def _check_num_envs(saved: Path, now: int, envs: int, *, replay: bool, is_by_game: bool) -> None:
    fault = f"env.num_envs: expected {envs}, got {now}"
    if replay:
        raise InputError(
            f"{fault}: the replay of {saved} has a column for each environment: keep env.num_envs={envs}, or start "
            "with an empty replay: --set checkpoint.replay=none"
        )
    if is_by_game:
        raise InputError(
            f"{fault}: the policy mapping of {saved} has a table of its environments' games: keep env.num_envs={envs}"
        )


def _replay(saved: Path, wanted: PyTree, before: int, devices: int) -> PyTree:
    from jrl.replay.regroup import convert

    renew = lambda replay, like: convert(replay, like, before)
    if before == devices or not jax.tree.leaves(wanted):
        return checkpoint.restore(saved, "replay", wanted, renew)
    like = shapes(wanted)
    dealt = _dealt(checkpoint.read(saved, "replay", like, renew), wanted, before, devices)
    return checkpoint.fitting(saved, "replay", dealt, like)


def _dealt(found: PyTree, wanted: PyTree, before: int, devices: int) -> PyTree:
    """Deals a replay to so many devices. Of data sets, whose episodes are dealt anew, priorities begin anew, but for
    the updates that they count.
    """
    from jrl.replay import layout, mixed
    from jrl.replay.regroup import regroup

    if isinstance(found, mixed.State):
        parts = zip(found.parts, wanted.parts, strict=True)
        return mixed.State(tuple(_dealt(part, fresh, before, devices) for part, fresh in parts))
    is_ring = lambda x: isinstance(x, layout.State)
    if not any(map(is_ring, jax.tree.leaves(found, is_leaf=is_ring))):
        if not hasattr(wanted, "priorities"):
            return wanted
        steps = np.resize(np.max(found.priorities.steps), np.shape(wanted.priorities.steps))
        return wanted.replace(priorities=wanted.priorities.replace(steps=steps))
    return regroup(found, before, devices)


def _source(saved: Path, wanted: PyTree) -> PyTree:
    """Reads environments that are part of a program whole, of others the episode statistics. Where a run changes from
    one to the other, the statistics go on, and the environments begin anew."""
    if not jax.tree.leaves(wanted):
        return wanted
    like, anew = shapes(wanted), False

    def renew(found: Any, like: PyTree) -> Any:
        nonlocal anew
        if isinstance(like, EpisodeState):
            return found.get("columns", found)
        anew = "columns" not in found
        return {**_fields(wanted), "columns": found} if anew else _named_games(found)

    found = checkpoint.read(saved, "source", like, renew)
    if anew:
        dealt = found.replace(columns=clear_running(_regroup_source(found.columns, like.columns)))
    else:
        dealt = _regroup_source(found, like)
    return checkpoint.fitting(saved, "source", dealt, like)


def _named_games(found: Any) -> Any:
    """Names the numbers of games in a source, which earlier versions saved as a tuple (environments, game, over)."""
    inner = found.get("env_state") if isinstance(found, dict) else None
    if not isinstance(inner, list | tuple) or len(inner) != 3:
        return found
    env, game, over = inner
    env = env if isinstance(env, dict) and {"env", "ended"} <= set(env) else {"env": env}
    return {**found, "env_state": {**env, "game": game, "over": over}}


def _fields(source: PyTree) -> dict[str, PyTree]:
    return {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}


def stored_config(path: Path) -> dict[str, Any] | None:
    """Returns the config of a run or checkpoint as plain data, its `run.out` the run's directory; None: no run.

    Of a run it is what config.yaml says, or where that is missing or damaged, its latest checkpoint.

    Raises:
      InputError: neither can be read.
    """
    data, found = None, checkpoint.locate(path) if checkpoint.exists(path) else None
    directory = checkpoint.run_of(path)
    if found != path.absolute() and (file := path / "config.yaml").exists():
        try:
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or not isinstance(data.get("run", {}), dict):
                raise ValueError("it is not a mapping")
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as e:
            data, why = None, str(e).splitlines()[0]
            if found is None:
                raise InputError(f"{file}: it is damaged ({why}), and there is no checkpoint: begin a new run") from e
            _log.warning("%s: it is damaged (%s): the config of %s is taken", file, why, found)
    if data is None and found is not None:
        data = checkpoint.read_meta(found)["config"]
    if data is None:
        return None
    return {**data, "run": {**data.get("run", {}), "out": None if directory is None else str(directory)}}


def notes(saved: Path, cfg: RunConfig, devices: int, data: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Describes the effects of continuing with this config, on so many devices, from data with these checksums."""
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


def without_met_criteria(meta: Mapping[str, Any], cfg: RunConfig, *, asked: bool) -> tuple[RunConfig, list[str]]:
    """Returns the config without the stop criteria that a run has met before: with them it would end at once.

    Args:
      meta: description of the checkpoint that the run continues from.
      cfg: config of the run from now on.
      asked: whether the user said anew where the run is to end. So does a config whose `stop` is not the checkpoint's.
    Returns:
      The config, and a note for each criterion; where nothing was asked for, the config as it is.
    """
    before = meta["config"].get("stop")
    asked = asked or (before is not None and before != to_dict(cfg)["stop"])
    row = {name: value for name, value in (meta.get("metrics") or {}).items() if isinstance(value, int | float)}
    told = meta.get("met") or {}
    met, lines = set(), list[str]()
    for name, target in cfg.stop.items():
        now = progress.is_met(name, row, target, cfg.run.smoothing_episodes)
        if name == Sizes(cfg).counts_by or not (now or told.get(name, -math.inf) >= target):
            continue
        met.add(name)
        was = f"stop.{name} {target:g} was met before"
        if asked:
            lines.append(f"{was}: it does not count from now on, a higher goal would")
        else:
            lines.append(f"{was}, and ends the run again: to train on, --stop {name}=null, or a higher goal")
    if not asked:
        return cfg, lines
    return dataclasses.replace(cfg, stop={k: v for k, v in cfg.stop.items() if k not in met}), lines


def _regroup_source(source: PyTree, like: PyTree) -> PyTree:
    """Deals out what a source keeps to as many devices or pools as `like` has: environments written in JAX
    [old, B / old, *], or episode statistics [old, B / old] (without the first axis where there is one pool).

    Each environment stays itself; of what else each pool has once, every old / new-th is taken.
    """
    columns, wanted = (x if isinstance(x, EpisodeState) else x.columns for x in (source, like))
    if isinstance(columns.games, EpisodeState):
        return _regroup_several(source, like)
    if columns.length.shape == wanted.length.shape and columns.window_return.shape == wanted.window_return.shape:
        return source
    axes, pools = columns.length.ndim, columns.window_next.size
    by_env = lambda x: np.reshape(x, (*wanted.length.shape, *x.shape[axes:]))

    def once(x):
        taken = np.arange(wanted.window_next.size) * pools // wanted.window_next.size
        rest = x.shape[columns.window_next.ndim :]
        return np.reshape(np.reshape(x, (pools, *rest))[taken], (*wanted.window_next.shape, *rest))

    of_envs = ("episode_return", "return_rest", "length", "running_return")
    dealt = EpisodeState(
        **{name: by_env(getattr(columns, name)) for name in of_envs}, **_merge_windows(columns, wanted)
    )
    if columns is source:
        return dealt
    of_env = lambda x: x.shape[:axes] == columns.length.shape
    rest = jax.tree.map(lambda x: by_env(x) if of_env(x) else once(x), source.replace(columns=()))
    return rest.replace(columns=dealt)


def _regroup_several(source: PyTree, like: PyTree) -> PyTree:
    """Deals out, as `_regroup_source`, a source of several agents: what is of environments or of their columns; the
    windows of the latest episodes begin anew, empty."""
    fits = lambda x, wanted: np.size(x) == math.prod(wanted.shape)
    deal = lambda x, wanted: np.reshape(x, wanted.shape) if fits(x, wanted) else _empty(wanted)
    return jax.tree.map(deal, source, like)


def _empty(like: Any) -> np.ndarray:
    return np.full(like.shape, np.nan if np.issubdtype(like.dtype, np.floating) else 0, like.dtype)


def _merge_windows(columns: EpisodeState, wanted: EpisodeState) -> dict[str, np.ndarray]:
    """Puts the latest episodes into the first of the wanted windows, as many as it holds; the others are empty."""
    found = np.stack([np.ravel(columns.window_return), np.ravel(columns.window_length)])
    size = wanted.window_return.shape[-1]
    found = found[:, np.isfinite(found[0])][:, :size]
    windows = np.full((2, wanted.window_next.size, size), np.nan, np.float32)
    windows[:, 0, : found.shape[1]] = found
    starts = np.zeros(wanted.window_next.shape, np.int32)
    starts.flat[0] = found.shape[1] % size
    returns, lengths = (window.reshape(wanted.window_return.shape) for window in windows)
    return {"window_return": returns, "window_length": lengths, "window_next": starts}


def weights(saved: Path, state: PyTree, *, policy_only: bool = False) -> tuple[PyTree, list[str]]:
    """Takes over parameters and statistics, for fine-tuning: what has the same name and shape in a checkpoint.

    Args:
      saved: from `checkpoint.locate`.
      state: of the algorithm, fresh; optimizer and counters stay as they are.
      policy_only: critics and values stay as they are, too.
    Returns:
      The state, and what was done in words.
    Raises:
      InputError: nothing in it fits.
    """
    found = _leaves(checkpoint.read(saved, "learner"))
    for name, x in list(found.items()):  # slow copies that the checkpoint does not have are those of its parameters
        if name.startswith("params."):
            found.setdefault(f"target_{name}", x)
    taken = lambda name: _is_weight(name) and not (policy_only and _OF_VALUES.search(name))
    mine = {name: x for name, x in _leaves(state).items() if taken(name)}
    fits = {n for n, x in mine.items() if n in found and (found[n].shape, found[n].dtype) == (x.shape, x.dtype)}
    if not any(mine[name].ndim > 1 for name in fits):  # a bias of an output is no likeness
        raise InputError(f"--init-from: {saved} holds no weights that fit: the network must have the same layers")
    lines = [f"{len(fits)} of {len(mine)} arrays from {saved}"]
    for name, x in mine.items():
        if name not in fits:
            there = f"{list(found[name].shape)} there" if name in found else "not there"
            lines.append(f"not taken: {name} ({list(x.shape)} here, {there})")
    unused = [n for n in found if n not in mine and taken(n) and not n.startswith("target_params.")]
    lines += [f"not used: {name} ({list(found[name].shape)})" for name in unused]

    def take(path: Any, x):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return found[name] if name in fits else x

    return jax.tree.map_with_path(take, state), lines


def _is_weight(name: str) -> bool:
    """Returns whether an array of a State is a weight.

    None is what rounding has lost of a sum, which statistics begin without, what a league counts, or who follows
    which policy.
    """
    return not name.startswith((*NOT_WEIGHTS, f"{LEAGUE}.", f"{TABLE}.")) and checkpoint.BESIDE.keys().isdisjoint(
        name.split(".")
    )


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree.leaves_with_path(tree)}
