"""Parts of a run, made of a RunConfig: environments, algorithm, program."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jrl import agents, callbacks, envs, registry
from jrl.config import RunConfig, checks, datasets, plan
from jrl.envs import task as tasks
from jrl.envs.context import EnvContext
from jrl.errors import InputError, counted
from jrl.learn import learner, parallel
from jrl.learn.fused import Fused
from jrl.learn.offline import Offline
from jrl.learn.prefetch import Prefetched
from jrl.learn.program import LoopState, Program
from jrl.learn.staged import Staged, Step
from jrl.metrics.timers import Timers
from jrl.rollout import sources, unroll
from jrl.rollout.source import Source
from jrl.run import build_data, build_learner, data_output, data_sets, estimates
from jrl.run.build_collect import (
    MakeSource,
    algorithm_of_one,
    close_all,
    collecting,
    make_source,
    make_vectors,
    numbered,
    watched,
    whole_episodes,
)
from jrl.run.build_collect import algorithm as algorithm
from jrl.run.build_collect import collector as collector
from jrl.run.build_collect import environment as environment
from jrl.run.build_collect import runner_source as runner_source
from jrl.run.data_sets import Inputs
from jrl.run.preflight import check_agents
from jrl.types import Algo, EnvSpec, JaxEnv, Key, Rollout

GUARANTEES = {
    "bitwise": "resume continues exactly: the environments are part of a checkpoint",
    "restarted": "resume continues exactly: at each checkpoint the environments start anew, interrupted or not",
    "learner": "resume continues the learner exactly; the environments start anew, with other seeds",
    "data": "resume continues exactly, as long as the data are the same",
    "refilled": "resume continues the learner exactly; the replay is filled anew",
}


class Run(NamedTuple):
    """The parts of one run; `program.close()` ends its environments."""

    spec: EnvSpec  # as one device sees it
    algo: Algo
    program: Program
    backend: str  # how the environments are stepped, in words
    in_program: bool  # whether they are stepped inside a compiled program
    replay: str  # what the replay buffer takes, in words; "" without
    guarantee: str  # what a resumed run has in common with one that was never interrupted: a key of GUARANTEES
    learners: int  # devices that learn
    num_params: int  # of the networks that learn
    learn: learner.Learner  # of one device
    mesh: Mesh  # the devices that learn
    unroll: unroll.Unroll | None  # of one device, where the program that learns collects, too
    note: str  # what callbacks cannot have in this run, in words; "" for nothing
    # (state, curriculum function, result row, a number that differs from call to call) -> state: see `jrl.envs.task`
    apply_task: Callable[[LoopState, tasks.TaskFn, dict[str, Any], int], LoopState]
    programs: str  # whether one program collects and learns or two do, and why, in words
    policies: agents.Policies
    recorder: data_output.Recorder | None = None  # of `data.output`
    judge: estimates.ScheduledEstimates | None = None  # of `data.estimate`
    data: Mapping[str, str] = MappingProxyType({})  # checksums of what `data.input` names
    data_notes: tuple[str, ...] = ()  # on these data sets, of their readers
    # the program of a config that differs in floats of its algorithm, which may be traced; None: there is none
    rebuild_with: Callable[[RunConfig], Fused] | None = None


def run(
    cfg: RunConfig,
    *,
    timers: Timers | None = None,
    restarts: int = 0,
    callback_list: callbacks.CallbackList | None = None,
    training_step: Callable[[Step], Any] | None = None,
    external: MakeSource | None = None,
) -> Run:
    """Makes the environments, the algorithm and the program that trains it.

    Args:
      cfg: the run.
      timers: where stages are timed.
      callback_list: what callbacks have to do with rollouts and batches; None: nothing.
      training_step: what an iteration does; None: as the config says.
      restarts: a number that differs between a run and its continuations, for environments that cannot be restored:
        they start anew, with other seeds.
      external: of runs whose episodes clients play, gives the source of what they play.
    Raises:
      InputError: more devices than there are, an environment or a space that cannot be handled.
    """
    devices = parallel.devices(learners=cfg.devices.learners, actors=cfg.devices.actors, fake=cfg.devices.fake)
    learners = devices.learners.devices.size
    if cfg.external is not None and external is None:
        raise InputError("external: clients play the episodes of this run: start it with python -m jrl.serve")
    if found := list(checks.split_faults(cfg, learners)):
        raise InputError(*(message for _, message in found))
    if datasets.alone(cfg):
        return _from_data(cfg, devices, callback_list)
    if training_step is None and cfg.custom.training_step:
        training_step = registry.load(cfg.custom.training_step, "custom.training_step")
    # pure environments are part of the program, a share on each device; EnvPool's may be of the program of one device
    vectors = make_vectors(cfg, plan.num_pools(cfg, learners), restarts)
    try:
        check_agents(cfg, vectors[0].spec, learners)
        learning = _learning(cfg, devices, vectors, callback_list)
    except InputError:
        close_all(vectors)
        raise
    two = _why_two_programs(
        cfg, devices, vectors[0], learning.algo, told=training_step is not None, callback_list=callback_list
    )
    if not two:
        return _in_one_program(cfg, learning)
    make = external or sources.make
    return _in_two_programs(cfg, learning, two, timers or Timers(), restarts, callback_list, training_step, make)


class _Learning(NamedTuple):
    """Parts that a run has, in one program or in two."""

    devices: parallel.Devices
    spec: EnvSpec  # as one device sees it
    vectors: list[Any]  # the environments of each pool
    algo: Algo
    learn: learner.Learner
    length: int  # steps of a rollout
    replay: str
    policies: agents.Policies
    inputs: Inputs | None = None  # data sets; None: there are none

    def run(self, **more: Any) -> Run:
        """Returns the run, with what else it has."""
        states = self.policies.states(jax.eval_shape(self.algo.init, jax.random.key(0)))
        groups = filter(self.policies.learns, self.policies.groups)
        params = [states[name].params for group in groups for name in group.names]
        return Run(
            spec=self.spec,
            algo=self.algo,
            replay=self.replay,
            learners=self.devices.learners.devices.size,
            num_params=sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
            learn=self.learn,
            mesh=self.devices.learners,
            policies=self.policies,
            data=self.inputs.checksums if self.inputs else {},
            data_notes=self.inputs.notes if self.inputs else (),
            **more,
        )


def _learning(
    cfg: RunConfig,
    devices: parallel.Devices,
    vectors: list[Any],
    callback_list: callbacks.CallbackList | None,
    inputs: Inputs | None = None,
) -> _Learning:
    """Makes the parts; `inputs` are the data sets of a mix, if they were read before.

    Raises:
      InputError: a space, task or callback does not go with algorithm or environments.
    """
    spec = vectors[0].spec
    if cfg.custom.env_task:
        tasks.check(vectors[0])
    policies = agents.make(cfg, spec)
    groups = policies.bound(functools.partial(algorithm_of_one, axis_name=parallel.AXIS, callback_list=callback_list))
    algo = policies.acting(groups)
    if callback_list:
        callback_list.check(on_policy=algo.on_policy)
        whole = cfg.env_runners.num and cfg.rollout.batch_mode != "truncate_episodes"
        if callback_list.needs_episodes and spec.agents and whole:
            raise InputError(
                "custom.callbacks: env runners send whole episodes of each agent, which cannot be joined to games for "
                "callbacks: leave out env_runners, or use rollout.batch_mode truncate_episodes"
            )
        callback_list.games = policies.game_options
        callback_list.by_turns = cfg.external is not None
        callback_list.keep_record = policies.watches_games
    length = plan.rollout_length(cfg) + whole_episodes(cfg, spec)
    with_data: build_learner.WithData | None = None
    if datasets.is_mixed(cfg):
        inputs = inputs or data_sets.read(cfg, spec)
        with_data = build_data.beside(cfg, algo, inputs, spec, devices.learners.devices.size)
    learn, replay = build_learner.of_policies(
        policies, groups, devices=devices.learners.devices.size, length=length, with_data=with_data
    )
    learn = learner.transform_rollouts(learn, transforms(cfg, callback_list))
    learn = learner.report_blocked_actions(learn, policies.seen, axis_name=parallel.AXIS, observed=policies.observed)
    return _Learning(devices, spec, vectors, algo, learn, length, replay, policies, inputs)


def _refilled(cfg: RunConfig) -> bool:
    return cfg.replay is not None and cfg.checkpoint.replay == "none"


def _in_one_program(cfg: RunConfig, learning: _Learning) -> Run:
    devices, vectors = learning.devices, learning.vectors
    env, iterations = vectors[0], plan.iterations_per_call(cfg)

    def apply_task(state: LoopState, fn: tasks.TaskFn, result: dict[str, Any], count: int) -> LoopState:
        if not env.pure:
            raise InputError(
                f"set_task: {cfg.env.id} is stepped by EnvPool inside the program that learns, and cannot be made "
                "anew there: use rollout.collector host, or name the curriculum in custom.env_task"
            )
        context = EnvContext(cfg.env.options)
        return dataclasses.replace(state, source=tasks.apply_in(state.source, env, fn, result, context)[0])

    def rebuild_with(other: RunConfig) -> Fused:
        return _fused(other, _learning(other, devices, vectors, None, learning.inputs))

    program = _fused(cfg, learning)
    return learning.run(
        program=program,
        backend=f"{envs.resolve(cfg.env.id, cfg.env.backend)}, {counted(iterations, 'iteration')} per call",
        in_program=True,
        guarantee="refilled" if _refilled(cfg) else "bitwise" if env.pure else "learner",
        unroll=program.unroll,
        note="",
        apply_task=apply_task,
        programs="one program collects and learns",
        rebuild_with=rebuild_with if env.pure else None,
    )


def _fused(cfg: RunConfig, learning: _Learning) -> Fused:
    env, algo = learning.vectors[0], learning.algo
    assert isinstance(env, JaxEnv)
    pools = plan.num_pools(cfg, learning.devices.learners.devices.size)
    place = plan.columns(cfg) if numbered(cfg) else None
    return Fused(
        learning.learn,
        unroll.make(env, algo.act, place=place, **collecting(cfg, algo, env.spec, pools)),
        learning.devices.learners,
        iterations=plan.iterations_per_call(cfg),
        rows=plan.batch_plan(cfg).rows,
        close=lambda: close_all(learning.vectors),
    )


def _from_data(cfg: RunConfig, devices: parallel.Devices, callback_list: callbacks.CallbackList | None) -> Run:
    if callback_list:
        evaluates = bool(cfg.evaluation.every or cfg.evaluation.interval)
        callback_list.check(on_policy=False, collects=False, evaluates=evaluates)
    found = build_data.inputs(cfg)
    algo = algorithm(cfg, found.spec, axis_name=parallel.AXIS, callback_list=callback_list)
    made = build_data.make(cfg, algo, found, devices.learners.devices.size)

    def apply_task(state: LoopState, fn: tasks.TaskFn, result: dict[str, Any], count: int) -> LoopState:
        raise InputError("set_task: the run learns from data alone: there are no environments")

    iterations = plan.iterations_per_call(cfg)
    program = (Prefetched if made.on_host else Offline)(
        made.learn,
        devices.learners,
        iterations=iterations,
        held_out=made.held_out,
        batches=cfg.data.validation_batches,
        epoch=made.epoch,
    )
    policies = agents.make(cfg, found.spec)
    return _Learning(devices, found.spec, [], algo, made.learn, 1, made.size, policies, found).run(
        program=program,
        backend=f"data alone, {counted(iterations, 'update', ',')} per call",
        in_program=True,
        guarantee="data",
        unroll=None,
        note="",
        apply_task=apply_task,
        judge=estimates.build_estimates(cfg, found, algo),
        programs="one program draws from the data, another learns"
        if made.on_host
        else "one program draws from the data and learns",
    )


def _in_two_programs(
    cfg: RunConfig,
    learning: _Learning,
    why: str,
    timers: Timers,
    restarts: int,
    callback_list: callbacks.CallbackList | None,
    training_step: Callable[[Step], Any] | None,
    make: MakeSource,
) -> Run:
    """Makes a run of which one program collects and another learns, for the reason `why`."""
    devices, vectors, algo = learning.devices, learning.vectors, learning.algo
    env, pools = vectors[0], plan.num_pools(cfg, devices.learners.devices.size)
    backend = "clients" if cfg.external is not None else envs.resolve(cfg.env.id, cfg.env.backend)
    recorder = data_output.Recorder(cfg, env.spec, algo) if cfg.data.output else None
    latest = [cfg]  # a task of EnvPool is other options of the environment
    given: list[Any] = []  # the task of the others

    def source(key: Key, vectors: list[Any], count: int) -> Source:
        made = make_source(latest[0], algo, devices, timers, key, vectors, count, callback_list, make)
        return watched(cfg, made, env.spec, algo, recorder, callback_list)

    def remake(key: Key, count: int) -> Source:
        made = source(key, make_vectors(latest[0], pools, count), count)
        for task in given:
            made.set_task(task)
        return made

    staged = Staged(
        learning.learn,
        # as `Staged.restart` does: environments written in JAX are those of their key
        lambda key: source(jax.random.fold_in(key, restarts) if restarts else key, vectors, restarts),
        devices.learners,
        rows=plan.counted_columns(cfg) * learning.length,
        timers=timers,
        stage="collect" if cfg.rollout.mode == "sync" and not cfg.env_runners.num else "wait",
        remake=remake,
        training_step=training_step,
    )

    def apply_task(state: LoopState, fn: tasks.TaskFn, result: dict[str, Any], count: int) -> LoopState:
        if backend != "envpool":
            assert staged.source is not None
            found = staged.source.apply_task(fn, result, EnvContext(cfg.env.options))
            given[:] = found[:1] if all(repr(x) == repr(found[0]) for x in found) else []
            return state
        options, wanted = latest[0].env.options, list[Any]()
        task = fn(result, tasks.Handle(lambda: options, wanted.append), EnvContext(options))
        for changed in [*wanted, *([] if task is None else [task])][-1:]:
            if changed != options:
                latest[0] = _with_options(latest[0], changed)
                staged.restart(count)
        return state

    in_program = isinstance(env, JaxEnv) and not cfg.env_runners.num
    return learning.run(
        program=staged,
        backend=f"{backend}, {_stepped(cfg, in_program)}",
        in_program=in_program,
        guarantee="refilled" if _refilled(cfg) else "restarted" if cfg.checkpoint.exact else "learner",
        unroll=None,
        recorder=recorder,
        note=callback_list.collecting(env, env_runners=cfg.env_runners.num > 0)[1] if callback_list else "",
        apply_task=apply_task,
        programs=f"one program collects, another learns: {why}",
    )


def _stepped(cfg: RunConfig, in_program: bool) -> str:
    if cfg.external is not None:
        return f"{counted(cfg.env.num_envs, 'episode')} at a time"
    if cfg.env_runners.num:
        return f"in {counted(cfg.env_runners.num, 'env runner')}"
    return "inside a program" if in_program else "from the host"


def two_programs(cfg: RunConfig) -> str:
    """Says why collecting and learning cannot be one program, as far as the config tells, in words; "" where they
    may be.
    """
    if cfg.env_runners.num:
        return "env runners collect"
    if cfg.rollout.mode != "sync":
        return f"rollout.mode {cfg.rollout.mode}"
    if cfg.data.output:
        return "data.output writes what is collected"
    if cfg.rollout.fake:
        return "rollout.fake"
    if cfg.rollout.batch_mode != "truncate_episodes":
        return f"rollout.batch_mode {cfg.rollout.batch_mode}"
    return "clients play" if cfg.external is not None else ""


def _why_two_programs(
    cfg: RunConfig,
    devices: parallel.Devices,
    env: Any,
    algo: Algo,
    *,
    told: bool,
    callback_list: callbacks.CallbackList | None,
) -> str:
    """Returns why collecting and learning cannot be one program, in words; "" where they can.

    Args:
      told: `custom.training_step` decides what an iteration does.
    """
    if why := two_programs(cfg):
        return why
    if devices.actors != tuple(devices.learners.devices.flat):
        return "some devices act, others learn"
    if told:
        return "custom.training_step decides what to learn from"
    if callback_list and callback_list.needs_rollouts:
        return "callbacks look at rollouts"
    if not isinstance(env, JaxEnv):
        return "the environments are stepped from Python"
    if env.pure:
        return ""
    # EnvPool's too, where one process steps them for one device and an iteration is short: with a rollout of a few rows
    # and a few gradient steps, dispatching two programs takes a quarter of the time. A pool is a constant of its
    # program: where pools are made anew, the program that holds one is a small one
    if devices.learners.devices.size > 1:
        return "each device acts in a pool of its own"
    if algo.on_policy:
        return "rollouts are long enough"
    if cfg.checkpoint.exact or cfg.custom.env_task:
        return "pools are made anew"
    return ""


def transforms(
    cfg: RunConfig, callback_list: callbacks.CallbackList | None
) -> tuple[Callable[[Rollout], Rollout], ...]:
    """Returns what becomes of a rollout between collecting and learning: the config's, then those of callbacks."""
    given = [registry.load(path, "custom.transforms") for path in cfg.custom.transforms]
    return (*given, *(callback_list.program_transforms() if callback_list else ()))


def _with_options(cfg: RunConfig, task: Any) -> RunConfig:
    """Returns the run in environments with other options, the task's over its own. Raises InputError."""
    if not isinstance(task, Mapping):
        raise InputError(f"a task of {cfg.env.id}, which EnvPool steps, is a mapping of its options, not {task!r}")
    options = {**cfg.env.options, **task}
    env = dataclasses.replace(cfg.env, options=options)
    if errors := envs.check(env):
        raise InputError(*errors)
    return dataclasses.replace(cfg, env=env)


def enable_compile_cache() -> None:
    """Keeps compiled programs for the next process, where jax was told to, or in ~/.cache/jrl.

    Call before the first compilation.
    """
    settings: Any = jax.config
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR") or settings.jax_compilation_cache_dir
    directory = chosen or str(Path.home() / ".cache" / "jrl" / "programs")
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
