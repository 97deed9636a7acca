"""Learner of a run with data sets, made of a RunConfig."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.config import RunConfig, Sizes, datasets
from jrl.data import EpisodeStore
from jrl.data.rollouts import fold_rollouts
from jrl.errors import InputError, counted
from jrl.fields.data import RETURN_TO_GO, TIMESTEP, traits
from jrl.host import machine
from jrl.learn import learner, memory, parallel
from jrl.replay import layout, mixed
from jrl.run import build_learner, data_sets
from jrl.run.build_collect import algorithm, spec_of
from jrl.run.data_sets import Inputs
from jrl.run.plan import Plan
from jrl.types import Algo, Buffer, EnvSpec, Key, PyTree, SequenceBatch

_SPARE = 2  # slots of a ring beside those of rows and samples, for each frame of a stack: its head, and one more


class Made(NamedTuple):
    """Parts of a run from data alone."""

    learn: learner.Learner
    held_out: learner.Learner | None  # learner on validation data
    on_host: bool  # the data lie in the host's memory
    epoch: float  # updates that draw as many rows as there are steps
    size: str  # size of the data, and their memory, in words


def inputs(cfg: RunConfig) -> Inputs:
    """Reads the data sets of a run without environments to collect from; where `env.id` names one, in its spaces.

    Raises:
      InputError: files cannot be read, or do not fit the environment.
    """
    return data_sets.read(cfg, spec_of(cfg) if cfg.env.id else None)


def make(plan: Plan, algo: Algo, found: Inputs) -> Made:
    """Makes the learner of one device from data alone.

    Raises:
      InputError: the data do not fit the memory, or lack what the algorithm needs.
    """
    cfg, devices, replay = plan.cfg, plan.learners, plan.cfg.replay
    batch = replay.batch_size // devices
    policy = Sizes(plan.policies.groups[0].cfg)
    buffer, data = of_stores(policy, algo, found.train, found.spec, devices, batch, online=None)
    algo = learner.count_updates(algo, _statistics(plan, found))
    like = build_learner.samples_like(buffer, devices)

    def learn_from(buffer: Buffer, data: learner.Data) -> learner.Learner:
        fixed = functools.partial(learner.from_data_sets, buffer=buffer, axis_name=parallel.AXIS)
        return build_learner.guarded(cfg.run.on_nonfinite, algo, like, fixed)._replace(data=data)

    held_out = None
    if found.validation:
        held_out = learn_from(*of_stores(policy, algo, found.validation, found.spec, devices, batch, online=None))
    on_host, where = _placed(buffer, cfg.data.placement, devices, prioritized=replay.prioritized)
    steps = sum(store.num_steps for store in found.train.values())
    return Made(learn_from(buffer, data), held_out, on_host, steps / replay.batch_size, f"{_size(found)}, {where}")


def beside(plan: Plan, algo: Algo, found: Inputs) -> build_learner.WithData:
    """Returns the function that puts data sets beside a run's replay; arguments as `make`."""
    devices = plan.learners
    batch = plan.cfg.replay.batch_size // devices

    def with_data(online: Buffer) -> tuple[Buffer, learner.Data, str]:
        policy = Sizes(plan.policies.groups[0].cfg)
        buffer, data = of_stores(policy, algo, found.train, plan.spec, devices, batch, online=online)
        return buffer, data, f"{_size(found)}, {_placed_beside(buffer, online, devices)}"

    return with_data


def of_stores(
    sizes: Sizes,
    algo: Algo,
    stores: Mapping[str, EpisodeStore],
    spec: EnvSpec,
    devices: int,
    batch: int,
    *,
    online: Buffer | None,
) -> tuple[Buffer, learner.Data]:
    """Makes one device's buffer of data sets, and the functions that fill it.

    Args:
      sizes, algo, spec: the policy's.
      stores: data sets by the names of `datasets.shares`.
      devices: number of devices that learn.
      batch: rows of a sample on one device.
      online: one device's replay of the run's own experience, the first part of the buffer; None: there is none.
    """
    cfg, replay = sizes.cfg, sizes.cfg.replay
    rows_of = datasets.counts(datasets.shares(cfg.data), batch)
    to_end, names = traits(cfg.algo).to_end, _read_columns(cfg.algo)
    names += [layout.TO_END] if to_end and not algo.sequences else []
    stack = build_learner.frame_stack(cfg, spec)
    parts: list[Buffer] = [] if online is None else [online]
    fills: list[Callable[[], PyTree]] = []
    for name, store in stores.items():
        if stack is not None:
            data_sets.check_stacks(store, stack)
        dealt = data_sets.deal(store, devices)
        extras = [data_sets.extras_of(part, names, cfg.algo.gamma) for part in dealt]
        rows = max(part.num_rows for part in dealt)
        make = build_learner.buffers(
            sizes, algo, spec, devices, num_envs=1, stack=stack,
            extras={n: data_sets.element_of(column) for n, column in extras[0].items()}, to_end=to_end,
            by_updates=True,
        )  # fmt: skip
        frames = stack.size if stack else 1
        capacity = rows + sizes.sequence_length + replay.burn_in + (_SPARE + 1) * frames
        part = make(capacity=capacity, gamma=cfg.algo.gamma, batch_size=rows_of[name])
        part = _from_start(part, algo) if algo.sequences else part
        parts.append(part)
        fills.append(functools.partial(_fill, part, dealt, extras, rows))
    if len(parts) == 1:
        return parts[0], learner.Data(parts[0], fills[0], _without_rows, _with_rows)
    begin = 0 if online is None else 1
    order = [*[datasets.SAMPLER][:begin], *(name for name in rows_of if name != datasets.SAMPLER)]
    joined = mixed.make(parts, [rows_of[name] for name in order], online=online is not None)

    def fill() -> PyTree:
        states = [fill() for fill in fills]
        own = [] if online is None else [_of_devices([jax.jit(online.init)()] * devices)]
        return mixed.State((*own, *states))

    def without_rows(replay: PyTree) -> PyTree:
        return mixed.State((*replay.parts[:begin], *map(_without_rows, replay.parts[begin:])))

    def with_rows(kept: PyTree, full: PyTree) -> PyTree:
        rest = map(_with_rows, kept.parts[begin:], full.parts[begin:])
        return mixed.State((*kept.parts[:begin], *rest))

    return joined, learner.Data(joined, fill, without_rows, with_rows)


def _read_columns(config: Any) -> list[str]:
    """Returns the columns of a data set that an algorithm reads beside observations, actions and rewards."""
    return [name for name in traits(config).reads if name in (RETURN_TO_GO, TIMESTEP)]


def _fill(buffer: Buffer, dealt: list[EpisodeStore], extras: list[dict[str, PyTree]], rows: int) -> PyTree:
    fill = lambda part, own: fold_rollouts(buffer.add, jax.jit(buffer.init)(), part, extras=own, rows=rows)
    return _of_devices([fill(part, own) for part, own in zip(dealt, extras, strict=True)])


def _of_devices(states: list[PyTree]) -> PyTree:
    """Returns the replays of all devices, one array behind the other; of scalars one for each."""
    return jax.tree.map(lambda *x: jnp.stack(x) if x[0].ndim == 0 else jnp.concatenate(x), *states)


def _without_rows(replay: PyTree) -> PyTree:
    """Returns the priorities of a replay, or nothing."""
    return () if isinstance(replay, layout.State) else replay.replace(rows=())


def _with_rows(kept: PyTree, full: PyTree) -> PyTree:
    return full if isinstance(full, layout.State) else full.replace(priorities=kept.priorities)


def _from_start(buffer: Buffer, algo: Algo) -> Buffer:
    """Makes a buffer's sequences begin with the memory of an episode's start: data have no other."""

    def sample(state: PyTree, key: Key) -> SequenceBatch:
        batch = buffer.sample(state, key)
        assert isinstance(batch, SequenceBatch)
        memory = getattr(algo.carry(batch.weight.shape[0]), "memory", ())
        return dataclasses.replace(batch, window=dataclasses.replace(batch.window, carry=memory))

    return buffer._replace(sample=sample)


def _statistics(plan: Plan, found: Inputs) -> PyTree:
    if not getattr(plan.cfg.algo, "normalize_obs", False):
        return ()
    alone = algorithm(plan.cfg, plan.spec)
    if alone.ingest is None:
        raise InputError("algo.normalize_obs: the algorithm takes no statistics of data sets: set it to false")
    state = jax.jit(alone.init)(jax.random.key(0))
    own = _read_columns(plan.cfg.algo)
    for store in found.train.values():
        state = fold_rollouts(alone.ingest, state, store, extras={name: store.columns[name] for name in own})
    return state.obs_stats


def _placed(buffer: Buffer, given: str, devices: int, *, prioritized: bool) -> tuple[bool, str]:
    """Returns whether the data lie in the host's memory, and their place and size in words.

    Raises:
      InputError: the data do not fit.
    """
    needed, host, (free, where) = memory.nbytes(buffer), machine.free_bytes(), _free(devices)
    size = machine.format_bytes
    fits = free is None or needed <= machine.SHARE * free
    on_cpu = jax.local_devices()[0].platform == "cpu"
    if given == "host" or (given == "auto" and not fits and not on_cpu and not prioritized):
        if host is not None and needed * devices > machine.SHARE * host:
            raise InputError(f"data.input: the data take {size(needed * devices)}, {size(host)} are free")
        return True, f"in {size(needed * devices)} of the host's memory, batches are fetched ahead"
    if not fits:
        raise InputError(
            f"data.placement: the data take {size(needed)} on {where}, and {size(free or 0)} are free: use "
            "data.placement host, or fewer files"
        )
    return False, f"in {size(needed)} on {where}"


def _placed_beside(buffer: Buffer, online: Buffer, devices: int) -> str:
    """Describes where the data of a mix lie, and their size; `online`: the part of `buffer` for the run's experience.

    Raises:
      InputError: both together do not fit.
    """
    own, (free, where), size = memory.nbytes(online), _free(devices), machine.format_bytes
    data = memory.nbytes(buffer) - own
    if free is not None and own + data > machine.SHARE * free:
        raise InputError(
            f"data.input: the data take {size(data)} on {where} beside the {size(own)} of replay, and {size(free)} are "
            "free: use fewer files, or a smaller replay.capacity"
        )
    return f"in {size(data)} on {where}"


def _free(devices: int) -> tuple[int | None, str]:
    """Returns the free bytes for each device (None: unknown), and the name of the place."""
    device = jax.local_devices()[0]
    free, shared = memory.available(device), devices if device.platform == "cpu" else 1
    where = "the device" if devices == 1 else f"each of {devices} devices"
    return None if free is None else free // shared, where


def _size(found: Inputs) -> str:
    episodes = sum(store.num_episodes for store in found.train.values())
    steps = sum(store.num_steps for store in found.train.values())
    held = sum(store.num_steps for store in found.validation.values())
    words = f"data: {counted(episodes, 'episode', ',')} of {counted(steps, 'step', ',')}"
    return words + (f", {counted(held, 'more step', ',')} held out" if held else "")
