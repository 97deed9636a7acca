"""Learner of a run, made of a RunConfig: the replay that fits the memory, and its guard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from jrl import envs, spaces
from jrl.agents.fixed import Group
from jrl.agents.policies import learned, rollout_like
from jrl.config import RunConfig, Sizes, checks, datasets, multi_agent
from jrl.errors import InputError
from jrl.fields.data import traits
from jrl.fields.env import ASYNCHRONOUS
from jrl.learn import guard, learner, memory, parallel
from jrl.rollout import unroll
from jrl.run.plan import Plan
from jrl.types import NEXT_ACTION, Algo, Buffer, EnvSpec, PyTree, element

if TYPE_CHECKING:
    from jrl.replay import ring

# (the algorithm's Config, the algorithm) -> what teaches it
MakeLearner = Callable[[Any, Algo], learner.Learner]
# one device's replay -> that and data sets as one, what puts them there, and what there is, in words
WithData = Callable[[Buffer], tuple[Buffer, learner.Data, str]]


def of_policies(plan: Plan, groups: Sequence[Group], with_data: WithData | None = None) -> tuple[learner.Learner, str]:
    """Makes the learner of all policies of a run; returns its replay's size in words, too.

    Args:
      groups: groups of the policies, with their algorithms.
      with_data: puts data sets beside the replay of the one policy; None: there are none.
    Raises:
      InputError: as `maker`.
    """
    made, texts, policies = [], [], plan.policies
    for group in groups:
        if not policies.learns(group):
            made.append(group)
            continue
        if policies.several and (found := list(checks.split_faults(group.cfg, plan.learners))):
            raise InputError(*(f"policy {group.names[0]}: {message}" for _, message in found))
        seen, shape = learned(plan.cfg.rollout, group.spec), {"devices": plan.learners, "length": plan.learned_length}
        learner_of, size = maker(Sizes(group.cfg), group.algo, seen, **shape, with_data=with_data)
        made.append(_with_learner(group, learner_of))
        texts.append(size)
    return policies.learning(made, axis_name=parallel.AXIS), "; ".join(filter(None, dict.fromkeys(texts)))


def _with_learner(group: Group, learner_of: MakeLearner) -> Group:
    add = lambda one: one._replace(learner=learner_of(one.cfg.algo, one.algo))
    if (of_values := group.with_values) is None:
        return add(group)
    return add(group)._replace(with_values=lambda values: add(of_values(values)))


def maker(
    sizes: Sizes, algo: Algo, spec: EnvSpec, *, devices: int, length: int, with_data: WithData | None = None
) -> tuple[MakeLearner, str]:
    """Returns the maker of one device's learners, of Configs that differ in floats alone, and the size of the replay in
    words, "" without.

    Args:
      sizes, algo, spec: the policy's.
      devices: number of devices that learn.
      length: steps of a rollout.
      with_data: puts data sets beside the replay; None: there are none.
    Raises:
      InputError: rollouts, batches or the replay do not fit the memory, or the replay not the environments.
    """
    cfg, replay, columns, row = sizes.cfg, sizes.cfg.replay, sizes.columns, spaces.num_bytes(spec.observation)
    if algo.on_policy:
        memory.check_rows(row, columns, length, kept=sizes.passes.circular_buffer_num_batches, devices=devices)
        shape_of = functools.partial(rollout_like, sizes, spec, algo, length=length)
        of_all = shape_of(num_envs=columns)  # traces the network: once if one device learns
        of_one = of_all if devices == 1 else shape_of(num_envs=columns // devices)
        on_policy = functools.partial(learner.on_policy, like=of_one)
        return lambda _, algo: guarded(cfg.run.on_nonfinite, algo, of_all, on_policy), ""
    from jrl.replay import frames

    drawn = sizes.sequence_length if algo.sequences else 2  # a transition is an observation and the next
    beside = memory.check_rows(row, columns, length, batch=replay.batch_size * drawn, devices=devices)
    stack, extras = frame_stack(cfg, spec), dict[str, PyTree]()
    recorded = unroll.rollout_like(spec, algo, length=1, num_envs=1).extras if algo.sequences else {}
    if "carry" in recorded:  # one environment's memory, as acting hands it on to replay
        extras["carry"] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), recorded["carry"])
    make = buffers(sizes, algo, spec, devices, num_envs=columns // devices, stack=stack, extras=extras)
    batch_size = replay.batch_size // devices
    if with_data is not None:
        batch_size = datasets.counts(datasets.shares(cfg.data), batch_size)[datasets.SAMPLER]

    def buffer(capacity: int, gamma: Any = cfg.algo.gamma) -> Buffer:
        return make(capacity=capacity // devices, gamma=gamma, batch_size=batch_size)

    # a full buffer samples from all rows but the head and those with incomplete frame stacks
    most_held = (replay.capacity // columns - (stack.size if stack else 1)) * columns
    size = memory.check_fits(buffer, replay.capacity, devices=devices, beside=beside)
    held, data = buffer(replay.capacity), None
    if with_data is not None:
        held, data, words = with_data(held)
        size = f"{size}; {words}"
    like = samples_like(held, devices)
    make_learner = functools.partial(
        learner.off_policy,
        updates=sizes.updates or 1,
        learning_starts=min(replay.learning_starts, most_held),
        axis_name=parallel.AXIS,
        broken=None if stack is None else functools.partial(frames.broken_stacks, stack=stack),
    )

    def learner_of(config: Any, algo: Algo) -> learner.Learner:
        own = held if with_data is not None else buffer(replay.capacity, config.gamma)
        make_own = functools.partial(make_learner, buffer=own)
        return guarded(cfg.run.on_nonfinite, algo, like, make_own)._replace(data=data)

    return learner_of, size


def buffers(
    sizes: Sizes,
    algo: Algo,
    spec: EnvSpec,
    devices: int,
    *,
    num_envs: int,
    stack: ring.FrameStack | None,
    extras: Mapping[str, PyTree],
    to_end: bool = False,
    by_updates: bool = False,
) -> Callable[..., Buffer]:
    """Returns the maker of one device's buffers of a capacity, a gamma and a batch size, as the `replay` section says.

    Args:
      sizes, algo, spec: the policy's.
      devices: number of devices that hold a buffer each.
      num_envs: columns of a buffer.
      stack: frame stacks that are taken apart; None: observations are stored whole.
      extras: shapes and dtypes of one environment of further columns.
      to_end: see `ring.make`; sequences end where they end.
      by_updates: see `prioritized.sampler`.
    """
    cfg, replay = sizes.cfg, sizes.cfg.replay
    options: dict[str, Any] = {"num_envs": num_envs, "n_step": replay.n_step, "frame_stack": stack}
    options |= {"in_step": sizes.in_step, "extras": extras, "next_action": NEXT_ACTION in traits(cfg.algo).reads}
    if replay.prioritized:
        options |= {"alpha": replay.priority_alpha, "beta": replay.priority_beta, "eps": replay.priority_eps}
        options |= {"num_devices": devices, "by_updates": by_updates}
    if replay.hindsight is not None:
        from jrl.run.build_hindsight import relabelling

        options["hindsight"] = relabelling(cfg, spec)
    from jrl.replay import prioritized, ring, sequences

    make: Callable[..., Buffer] = prioritized.make if replay.prioritized else ring.make
    if multi_agent.in_lockstep(cfg.multi_agent) and not algo.sequences:  # drawn whole, masked steps and all
        options["redraw"] = False
    if algo.sequences:
        make = sequences.make
        length = sizes.sequence_length
        options |= {"length": length, "burn_in": replay.burn_in, "n_step": length if to_end else replay.n_step}
    elif to_end:
        options["to_end"] = True
    return functools.partial(make, element(spec.observation), element(spec.action), **options)


def samples_like(buffer: Buffer, devices: int) -> PyTree:
    """Returns shapes and dtypes of what the buffers of all devices sample together."""
    of_all = lambda x: jax.ShapeDtypeStruct((x.shape[0] * devices, *x.shape[1:]), x.dtype)
    return jax.tree.map(of_all, jax.eval_shape(lambda: buffer.sample(buffer.init(), jax.random.key(0))))


def guarded(on_nonfinite: str, algo: Algo, like: PyTree, make: Callable[[Algo], learner.Learner]) -> learner.Learner:
    """Makes the learner of `algo`, with a guard over updates that are not finite unless the config ignores them."""
    if on_nonfinite == "ignore":
        return make(algo)
    learn = make(guard.refuse_bad_updates(algo, like, axis_name=parallel.AXIS))
    return learn._replace(keep=lambda state: state.state, resume=lambda kept: guard.init_state(kept, like, np.zeros))


def frame_stack(cfg: RunConfig, spec: EnvSpec) -> ring.FrameStack | None:
    """Returns the frame stacks of observations, by `replay.frame_stack` or by the options of EnvPool's Atari.

    Raises:
      InputError: replay cannot rebuild such stacks.
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
    # a curriculum may change the options
    return ring.FrameStack(size, restarts=known.restarts and cfg.custom.env_task is None)
