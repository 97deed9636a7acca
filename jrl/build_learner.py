"""From a RunConfig to the learner of a run: the replay that fits the memory, the watch over updates."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from jrl import envs, learner, parallel, plan, spaces, watch
from jrl.config import RunConfig
from jrl.errors import InputError
from jrl.replay import memory, prioritized, ring, sequences
from jrl.rollout import unroll
from jrl.types import Algo, Buffer, EnvSpec, PyTree, element


def make(cfg: RunConfig, algo: Algo, spec: EnvSpec, *, devices: int, length: int) -> tuple[learner.Learner, str]:
    """The learner of one of so many devices, and the size of its replay in words ("" without).

    Args:
      cfg: the run.
      algo: its algorithm.
      spec: of the environments.
      devices: that learn.
      length: steps of a rollout.
    Raises:
      InputError: the replay does not fit the memory, or the environments.
    """
    if not algo.on_policy:
        return _replay_learner(cfg, algo, spec, devices)
    like = functools.partial(unroll.rollout_like, spec, algo, length=length)
    of_one = like(num_envs=cfg.env.num_envs // devices)
    make_learner = functools.partial(learner.on_policy, like=of_one)
    of_all = of_one if devices == 1 else like(num_envs=cfg.env.num_envs)
    return _watched(cfg, algo, of_all, make_learner), ""


def _replay_learner(cfg: RunConfig, algo: Algo, spec: EnvSpec, devices: int) -> tuple[learner.Learner, str]:
    """The learner around a replay buffer that fits the devices' memory, and its size in words.

    Raises:
      InputError: it does not fit.
    """
    replay = cfg.replay
    assert replay is not None
    options: dict[str, Any] = {
        "num_envs": cfg.env.num_envs // devices,
        "batch_size": replay.batch_size // devices,
        "gamma": cfg.algo.gamma,
        "n_step": replay.n_step,
        "frame_stack": _frame_stack(cfg, spec),
        "in_step": plan.in_step(cfg),
    }
    if replay.prioritized:
        options |= {"alpha": replay.priority_alpha, "beta": replay.priority_beta, "eps": replay.priority_eps}
        options["num_devices"] = devices
    make: Callable[..., Buffer] = prioritized.make if replay.prioritized else ring.make
    if algo.sequences:
        make = sequences.make
        options |= {"length": plan.sequence_length(cfg), "burn_in": replay.burn_in}
        options["extras"] = {"carry": _carry_of_one(algo, spec)}

    def buffer(capacity: int) -> Buffer:
        return make(element(spec.observation), element(spec.action), capacity=capacity // devices, **options)

    size = memory.check_fits(buffer, replay.capacity, devices=devices)
    held = buffer(replay.capacity)
    of_all = lambda x: jax.ShapeDtypeStruct((x.shape[0] * devices, *x.shape[1:]), x.dtype)
    like = jax.tree.map(of_all, jax.eval_shape(lambda: held.sample(held.init(), jax.random.key(0))))
    make_learner = functools.partial(
        learner.off_policy,
        buffer=held,
        updates=plan.batch_plan(cfg).updates or 1,
        learning_starts=min(replay.learning_starts, _most_held(cfg, spec)),
        axis_name=parallel.AXIS,
    )
    return _watched(cfg, algo, like, make_learner), size


def _carry_of_one(algo: Algo, spec: EnvSpec) -> PyTree:
    """Shapes and dtypes of one environment's memory, as acting hands it on to replay."""
    like = unroll.rollout_like(spec, algo, length=1, num_envs=1)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), like.extras["carry"])


def _watched(cfg: RunConfig, algo: Algo, like: PyTree, make: Callable[[Algo], learner.Learner]) -> learner.Learner:
    """The learner of `algo`, with a watch over updates that are not finite unless the config says to ignore them."""
    if cfg.run.on_nonfinite == "ignore":
        return make(algo)
    learn = make(watch.watched(algo, like, axis_name=parallel.AXIS))
    return learn._replace(keep=lambda state: state.state, resume=lambda kept: watch.fresh(kept, like))


def _most_held(cfg: RunConfig, spec: EnvSpec) -> int:
    """Rows that a full buffer can be sampled from: all but the head and those whose frame stacks are incomplete."""
    assert cfg.replay is not None
    stack = _frame_stack(cfg, spec)
    return (cfg.replay.capacity // cfg.env.num_envs - (stack.size if stack else 1)) * cfg.env.num_envs


def _frame_stack(cfg: RunConfig, spec: EnvSpec) -> ring.FrameStack | None:
    """How many images of an observation are frames of a stack: as told, or what EnvPool makes of Atari."""
    assert cfg.replay is not None
    size, shapes = cfg.replay.frame_stack, [leaf.shape for _, leaf in spaces.leaves(spec.observation)]
    if size is None:
        atari = envs.is_atari(cfg.env.id) and envs.resolve(cfg.env.id, cfg.env.backend) == "envpool"
        size = shapes[0][0] if atari and len(shapes) == 1 and len(shapes[0]) == 3 else 1
    if cfg.env.batch_size is not None and cfg.replay.frame_stack is None:
        size = 1  # rows that a rollout leaves empty hold no frame: stacks around them could not be put together again
    if size == 1:
        return None
    if cfg.env.soft_horizon:
        raise InputError(
            f"replay.frame_stack {size}: at a soft horizon stacks go on across the end of an episode, and could not be "
            "put together again: use 1, or leave env.soft_horizon out"
        )
    if cfg.env.batch_size is not None or cfg.env.batch_wait_ms is not None:
        raise InputError(
            f"replay.frame_stack {size}: environments that do not wait for each other leave rows empty, and frames are "
            "missing there: use 1, or leave env.batch_size and env.batch_wait_ms out"
        )
    ends: tuple[Literal[0], Literal[-1]] = (0, -1)
    axes = [axis for axis in ends if any(len(shape) == 3 and shape[axis] == size for shape in shapes)]
    if not axes:
        given = ", ".join(map(str, shapes))
        raise InputError(f"replay.frame_stack {size}: observations {given} are no stacks of {size} images: use 1")
    return ring.FrameStack(size, axes[0])
