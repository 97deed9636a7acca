"""Learner of a run, made of a RunConfig: the replay that fits the memory, and its guard."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from jrl import envs, spaces
from jrl.agents import Policies
from jrl.agents.fixed import Group
from jrl.agents.policies import learned, rollout_like
from jrl.config import RunConfig, checks, datasets, plan
from jrl.errors import InputError
from jrl.fields.data import traits
from jrl.fields.env import ASYNCHRONOUS
from jrl.learn import guard, learner, parallel
from jrl.rollout import unroll
from jrl.types import NEXT_ACTION, Algo, Buffer, EnvSpec, PyTree, element

if TYPE_CHECKING:
    from jrl.replay import ring

# (the run as one policy's agents would have it alone, its algorithm) -> what teaches it
MakeLearner = Callable[[RunConfig, Algo], learner.Learner]
# one device's replay -> that and data sets as one, what puts them there, and what there is, in words
WithData = Callable[[Buffer], tuple[Buffer, learner.Data, str]]


def of_policies(
    policies: Policies,
    groups: Sequence[Group],
    *,
    devices: int,
    length: int,
    with_data: WithData | None = None,
) -> tuple[learner.Learner, str]:
    """Makes the learner of all policies of a run; returns its replay's size in words, too; as `make`.

    Args:
      policies, groups: of the run; the groups with their algorithms.
      with_data: puts data sets beside the replay of the one policy; None: there are none.
    """
    made, sizes = [], []
    for group in groups:
        if not policies.learns(group):
            made.append(group)
            continue
        if policies.several and (found := list(checks.split_faults(group.cfg, devices))):
            raise InputError(*(f"policy {group.names[0]}: {message}" for _, message in found))
        seen = learned(policies.cfg, group.spec)
        how: Any = {"devices": devices, "length": length, "with_data": with_data}
        learner_of, size = _factory(group.cfg, group.algo, seen, **how)
        made.append(_taught(group, learner_of))
        sizes.append(size)
    return policies.learning(made, axis_name=parallel.AXIS), "; ".join(filter(None, dict.fromkeys(sizes)))


def _taught(group: Group, learner_of: MakeLearner) -> Group:
    bound, taught = group.with_values, group._replace(learner=learner_of(group.cfg, group.algo))
    if bound is None:
        return taught

    def with_values(values: PyTree) -> Group:
        one = bound(values)
        return one._replace(learner=learner_of(one.cfg, one.algo))

    return taught._replace(with_values=with_values)


def make(
    cfg: RunConfig, algo: Algo, spec: EnvSpec, *, devices: int, length: int, with_data: WithData | None = None
) -> tuple[learner.Learner, str]:
    """Makes the learner of one of so many devices; returns the size of its replay in words, too ("" without).

    Args:
      cfg: the run.
      algo: its algorithm.
      spec: of the environments.
      devices: that learn.
      length: steps of a rollout.
      with_data: puts data sets beside the replay; None: there are none.
    Raises:
      InputError: rollouts, batches or the replay do not fit the memory, or the replay not the environments.
    """
    learner_of, size = _factory(cfg, algo, spec, devices=devices, length=length, with_data=with_data)
    return learner_of(cfg, algo), size


def _factory(
    cfg: RunConfig, algo: Algo, spec: EnvSpec, *, devices: int, length: int, with_data: WithData | None = None
) -> tuple[MakeLearner, str]:
    """Returns the maker of learners such as `make`'s, of configs that differ in floats of the algorithm alone."""
    from jrl.learn import memory

    row, envs = spaces.num_bytes(spec.observation), plan.columns(cfg)
    if not algo.on_policy:
        assert cfg.replay is not None
        drawn = plan.sequence_length(cfg) if algo.sequences else 2  # a transition is an observation and the next
        batch = cfg.replay.batch_size * drawn
        return _replay_learner(
            cfg, algo, spec, devices, memory.check_rows(row, envs, length, batch=batch, devices=devices), with_data
        )
    memory.check_rows(row, envs, length, kept=plan.passes(cfg.algo).circular_buffer_num_batches, devices=devices)
    like = functools.partial(rollout_like, cfg, spec, algo, length=length)
    of_one = like(num_envs=envs // devices)
    of_all = of_one if devices == 1 else like(num_envs=envs)
    return lambda cfg, algo: guarded(cfg, algo, of_all, functools.partial(learner.on_policy, like=of_one)), ""


def _replay_learner(
    cfg: RunConfig, algo: Algo, spec: EnvSpec, devices: int, beside: int, with_data: WithData | None
) -> tuple[MakeLearner, str]:
    """Returns the maker of learners around a replay buffer that fits the devices' memory, and its size in words.

    Args:
      beside: bytes that it leaves free.
      with_data: see `make`.
    Raises:
      InputError: it does not fit.
    """
    from jrl.learn import memory
    from jrl.replay import frames

    replay = cfg.replay
    assert replay is not None
    stack, columns = frame_stack(cfg, spec), plan.columns(cfg)
    extras = {"carry": _carry_of_one(algo, spec)} if algo.sequences else {}
    make = buffers(cfg, algo, spec, devices, num_envs=columns // devices, stack=stack, extras=extras)

    batch_size = replay.batch_size // devices
    if with_data is not None:
        batch_size = datasets.counts(datasets.shares(cfg), batch_size)[datasets.SAMPLER]

    def buffer(capacity: int, gamma: Any = cfg.algo.gamma) -> Buffer:
        return make(capacity=capacity // devices, gamma=gamma, batch_size=batch_size)

    # a full buffer samples from all rows but the head and those with incomplete frame stacks
    most_held = (replay.capacity // columns - (stack.size if stack else 1)) * columns
    size = memory.check_fits(buffer, replay.capacity, devices=devices, beside=beside)
    held, data = buffer(replay.capacity), None
    if with_data is not None:
        held, data, words = with_data(held)
        size = f"{size}; {words}"
    of_all = lambda x: jax.ShapeDtypeStruct((x.shape[0] * devices, *x.shape[1:]), x.dtype)
    like = jax.tree.map(of_all, jax.eval_shape(lambda: held.sample(held.init(), jax.random.key(0))))
    make_learner = functools.partial(
        learner.off_policy,
        updates=plan.batch_plan(cfg).updates or 1,
        learning_starts=min(replay.learning_starts, most_held),
        axis_name=parallel.AXIS,
        broken=None if stack is None else functools.partial(frames.broken_stacks, stack=stack),
    )

    def learner_of(cfg: RunConfig, algo: Algo) -> learner.Learner:
        own = held if with_data is not None else buffer(replay.capacity, cfg.algo.gamma)
        return guarded(cfg, algo, like, functools.partial(make_learner, buffer=own))._replace(data=data)

    return learner_of, size


def buffers(
    cfg: RunConfig,
    algo: Algo,
    spec: EnvSpec,
    devices: int,
    *,
    num_envs: int,
    stack: "ring.FrameStack | None",
    extras: Mapping[str, PyTree],
    to_end: bool = False,
    by_updates: bool = False,
) -> Callable[..., Buffer]:
    """Returns the maker of one device's buffers of a capacity, a gamma and a batch size, as the `replay` section says.

    Args:
      cfg, algo, spec: of the run.
      devices: that hold a buffer each.
      num_envs: columns of it.
      stack: that observations are stored as frames of; None: whole.
      extras: what is kept beside each row: shapes and dtypes of one environment.
      to_end: see `ring.make`; sequences end where they end.
      by_updates: see `prioritized.sampler`.
    """
    from jrl.config import multi_agent
    from jrl.replay import prioritized, ring

    replay = cfg.replay
    assert replay is not None
    options: dict[str, Any] = {"num_envs": num_envs, "n_step": replay.n_step, "frame_stack": stack}
    options |= {"in_step": plan.in_step(cfg), "extras": extras, "next_action": NEXT_ACTION in traits(cfg.algo).reads}
    if replay.prioritized:
        options |= {"alpha": replay.priority_alpha, "beta": replay.priority_beta, "eps": replay.priority_eps}
        options |= {"num_devices": devices, "by_updates": by_updates}
    make: Callable[..., Buffer] = prioritized.make if replay.prioritized else ring.make
    if multi_agent.in_lockstep(cfg) and not algo.sequences:  # drawn whole, masked steps and all
        options["redraw"] = False
    if algo.sequences:
        from jrl.replay import sequences

        make = sequences.make
        length = plan.sequence_length(cfg)
        options |= {"length": length, "burn_in": replay.burn_in, "n_step": length if to_end else replay.n_step}
    elif to_end:
        options["to_end"] = True
    return functools.partial(make, element(spec.observation), element(spec.action), **options)


def _carry_of_one(algo: Algo, spec: EnvSpec) -> PyTree:
    """Returns shapes and dtypes of one environment's memory, as acting hands it on to replay."""
    like = unroll.rollout_like(spec, algo, length=1, num_envs=1)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), like.extras["carry"])


def guarded(cfg: RunConfig, algo: Algo, like: PyTree, make: Callable[[Algo], learner.Learner]) -> learner.Learner:
    """Makes the learner of `algo`, with a guard over updates that are not finite unless the config ignores them."""
    if cfg.run.on_nonfinite == "ignore":
        return make(algo)
    learn = make(guard.refuse_bad_updates(algo, like, axis_name=parallel.AXIS))
    return learn._replace(keep=lambda state: state.state, resume=lambda kept: guard.init_state(kept, like, np.zeros))


def frame_stack(cfg: RunConfig, spec: EnvSpec) -> "ring.FrameStack | None":
    """Counts the images of an observation that are frames of a stack: what is known of EnvPool's Atari, or as told.

    Raises:
      InputError: replay could not put such stacks together again.
    """
    from jrl.envs import envpool_env
    from jrl.replay import ring

    assert cfg.replay is not None
    size, shapes = cfg.replay.frame_stack, [leaf.shape for _, leaf in spaces.leaves(spec.observation)]
    atari = bool(cfg.env.id) and envs.is_atari(cfg.env.id) and envs.resolve(cfg.env.id, cfg.env.backend) == "envpool"
    known = envpool_env.stacked_frames(cfg.env) if atari else None
    if size is None:
        # rows that a rollout leaves empty hold no frame: stacks around them could not be put together again
        size = 1 if known is None or len(shapes) > 1 or not cfg.env.waits else known.size
    if size == 1:
        return None
    if cfg.env.soft_horizon:
        raise InputError(
            f"replay.frame_stack {size}: at a soft horizon stacks go on across the end of an episode, and could not be "
            "put together again: use 1, or leave env.soft_horizon out"
        )
    if not cfg.env.waits:
        raise InputError(
            f"replay.frame_stack {size}: environments that do not wait for each other leave rows empty, and frames are "
            f"missing there: use 1, or leave {' and '.join(ASYNCHRONOUS)} out"
        )
    if atari and (known is None or known.size != size):
        raise InputError(
            f"replay.frame_stack {size}: with these options {cfg.env.id} observes "
            + (f"stacks of {known.size} frames: use null" if known else "no stack of single images: use 1, or null")
        )
    ends: tuple[Literal[0], Literal[-1]] = (0, -1)
    axes = [axis for axis in ends if any(len(shape) == 3 and shape[axis] == size for shape in shapes)]
    if not axes:
        given = ", ".join(map(str, shapes))
        raise InputError(f"replay.frame_stack {size}: observations {given} are no stacks of {size} images: use 1")
    if known is None:
        return ring.FrameStack(size, axes[0])
    changes = cfg.custom.env_task is not None  # a curriculum may change the options
    return ring.FrameStack(size, restarts=known.restarts and not changes)
