"""Parts of a run, made of a RunConfig: environments, algorithm, program."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jrl import agents, envs, registry
from jrl.config import CustomConfig, EnvConfig, RunConfig, Sizes, checks, datasets
from jrl.envs.context import EnvContext
from jrl.errors import InputError, counted
from jrl.learn import learner, parallel
from jrl.learn.program import LoopState, Program
from jrl.metrics.timers import Timers
from jrl.rollout import sources, unroll
from jrl.rollout.source import Source
from jrl.run import build_collect, build_learner
from jrl.run.build_collect import MakeSource, algorithm, algorithm_of_one
from jrl.run.build_collect import environment as environment
from jrl.run.plan import Plan
from jrl.run.preflight import check_agents, check_search
from jrl.types import Algo, EnvSpec, JaxEnv, Key, Rollout

if TYPE_CHECKING:  # parts that most runs do not have: imported where they are made
    from jrl import callbacks
    from jrl.envs import task as tasks
    from jrl.learn.fused import Fused
    from jrl.learn.staged import Step
    from jrl.run import data_output
    from jrl.run.data_sets import Inputs
    from jrl.run.estimates import ScheduledEstimates

GUARANTEES = {
    "bitwise": "resume continues exactly: the environments are part of a checkpoint",
    "restarted": "resume continues exactly: at each checkpoint the environments start anew, interrupted or not",
    "learner": "resume continues the learner exactly; the environments start anew, with other seeds",
    "data": "resume continues exactly, as long as the data are the same",
    "refilled": "resume continues the learner exactly; the replay is filled anew",
}


class Run(NamedTuple):
    """The parts of one run; `program.close()` ends its environments."""

    plan: Plan
    algo: Algo
    program: Program
    backend: str  # how the environments are stepped, in words
    in_program: bool  # whether they are stepped inside a compiled program
    replay: str  # size of the replay buffer, in words; "": no replay
    guarantee: str  # key of GUARANTEES: how a resumed run continues
    learn: learner.Learner  # learner of one device
    # (state, curriculum function, result row, a number that differs from call to call) -> state: see `jrl.envs.task`
    apply_task: Callable[[LoopState, tasks.TaskFn, dict[str, Any], int], LoopState]
    programs: str  # whether one program collects and learns or two do, and why, in words
    note: str = ""  # limits of callbacks in this run, in words
    recorder: data_output.Recorder | None = None  # `data.output`
    estimates: ScheduledEstimates | None = None  # `data.estimate`
    inputs: Inputs | None = None  # data sets of `data.input`
    # the program of a config that differs in floats of its algorithm, which may be traced; None: there is none
    rebuild_with: Callable[[RunConfig], Fused] | None = None

    @property
    def spec(self) -> EnvSpec:
        """Returns the environments as one device sees them."""
        return self.plan.spec

    @property
    def policies(self) -> agents.Policies:
        return self.plan.policies

    @property
    def checksums(self) -> dict[str, str]:
        """Returns the checksum of each data set."""
        return self.inputs.checksums if self.inputs else {}

    @property
    def num_params(self) -> int:
        """Returns the number of parameters of the networks that learn."""
        states = self.policies.states(jax.eval_shape(self.algo.init, jax.random.key(0)))
        names = [name for group in self.policies.groups if self.policies.learns(group) for name in group.names]
        return sum(math.prod(x.shape) for name in names for x in jax.tree.leaves(states[name].params))


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
      timers: timers of the stages.
      callback_list: the user's callbacks.
      training_step: function of an iteration; None: by the config.
      restarts: number that differs between a run and its continuations: environments that cannot be restored start
        anew, with other seeds.
      external: maker of the source of episodes that clients play.
    Raises:
      InputError: more devices than there are, an environment or a space that cannot be handled.
    """
    devices = parallel.devices(**dataclasses.asdict(cfg.devices))
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
    vectors = build_collect.make_vectors(cfg, Sizes(cfg).num_pools(learners), restarts)
    try:
        plan = Plan(cfg, vectors[0].spec, devices)
        check_agents(cfg, plan.spec, learners)
        check_search(cfg, vectors[0], plan.policies)
        learning = _learning(plan, vectors, callback_list)
    except InputError:
        build_collect.close_all(vectors)
        raise
    two = _why_two_programs(learning, is_custom=training_step is not None, callback_list=callback_list)
    if not two:
        return _in_one_program(learning)
    make = external or sources.make
    return _in_two_programs(learning, two, timers or Timers(), restarts, callback_list, training_step, make)


class _Learning(NamedTuple):
    """Parts that a run has, in one program or in two."""

    plan: Plan
    vectors: list[Any]  # the environments of each pool
    algo: Algo
    learn: learner.Learner
    replay: str
    inputs: Inputs | None = None  # data sets; None: there are none

    def run(self, **more: Any) -> Run:
        """Returns the run with these parts."""
        return Run(**{name: x for name, x in self._asdict().items() if name != "vectors"}, **more)


def _learning(
    plan: Plan, vectors: list[Any], callback_list: callbacks.CallbackList | None, inputs: Inputs | None = None
) -> _Learning:
    """Makes the parts; `inputs`: data sets of a mix, if they were read before. Raises InputError: parts do not fit."""
    cfg, policies = plan.cfg, plan.policies
    if cfg.custom.env_task:
        from jrl.envs import task as tasks

        tasks.check(vectors[0])
    groups = policies.bind(functools.partial(algorithm_of_one, axis_name=parallel.AXIS, callback_list=callback_list))
    algo = policies.acting(groups)
    if callback_list:
        callback_list.check(on_policy=algo.on_policy)
        whole = cfg.env_runners.num and cfg.rollout.batch_mode != "truncate_episodes"
        if callback_list.needs_episodes and plan.spec.agents and whole:
            raise InputError(
                "custom.callbacks: env runners send whole episodes of each agent, which cannot be joined to games for "
                "callbacks: leave out env_runners, or use rollout.batch_mode truncate_episodes"
            )
        callback_list.games = policies.game_options
        callback_list.by_turns = cfg.external is not None
        callback_list.keep_record = policies.watches_games
    with_data: build_learner.WithData | None = None
    if datasets.is_mixed(cfg.data):
        from jrl.run import build_data, data_sets

        inputs = inputs or data_sets.read(cfg, plan.spec)
        with_data = build_data.beside(plan, algo, inputs)
    learn, replay = build_learner.of_policies(plan, groups, with_data)
    learn = learner.transform_rollouts(learn, transforms(cfg.custom, callback_list))
    learn = learner.report_blocked_actions(
        learn, policies.policy_spec, axis_name=parallel.AXIS, observed=policies.policy_obs
    )
    return _Learning(plan, vectors, algo, learn, replay, inputs)


def _in_one_program(learning: _Learning) -> Run:
    plan, vectors, env = learning.plan, learning.vectors, learning.vectors[0]
    section = plan.cfg.env

    def apply_task(state: LoopState, fn: tasks.TaskFn, result: dict[str, Any], count: int) -> LoopState:
        if not env.pure:
            raise InputError(
                f"set_task: {section.id} is stepped by EnvPool inside the program that learns, and cannot be made "
                "anew there: use rollout.collector host, or name the curriculum in custom.env_task"
            )
        context = EnvContext(section.options)
        from jrl.envs import task as tasks

        return dataclasses.replace(state, source=tasks.apply_in(state.source, env, fn, result, context)[0])

    def rebuild_with(other: RunConfig) -> Fused:
        return _fused(_learning(dataclasses.replace(plan, cfg=other), vectors, None, learning.inputs))

    backend = envs.resolve(section.id, section.backend)
    return learning.run(
        program=_fused(learning),
        backend=f"{backend}, {counted(plan.iterations_per_call, 'iteration')} per call",
        in_program=True,
        guarantee="refilled" if plan.is_refilled else "bitwise" if env.pure else "learner",
        apply_task=apply_task,
        programs="one program collects and learns",
        rebuild_with=rebuild_with if env.pure else None,
    )


def _fused(learning: _Learning) -> Fused:
    from jrl.learn.fused import Fused

    plan, env, algo = learning.plan, learning.vectors[0], learning.algo
    assert isinstance(env, JaxEnv)
    place = plan.columns if plan.is_numbered else None
    return Fused(
        learning.learn,
        unroll.make(env, algo.act, place=place, packs=plan.on_gpu, **build_collect.collecting(plan, algo)),
        plan.mesh,
        iterations=plan.iterations_per_call,
        rows=plan.rows,
        close=lambda: build_collect.close_all(learning.vectors),
    )


def _from_data(cfg: RunConfig, devices: parallel.Devices, callback_list: callbacks.CallbackList | None) -> Run:
    from jrl.learn.offline import Offline
    from jrl.learn.prefetch import Prefetched
    from jrl.run import build_data, estimates

    if callback_list:
        evaluates = bool(cfg.evaluation.every or cfg.evaluation.interval)
        callback_list.check(on_policy=False, collects=False, evaluates=evaluates)
    found = build_data.inputs(cfg)
    plan = Plan(cfg, found.spec, devices)
    algo = algorithm(cfg, found.spec, axis_name=parallel.AXIS, callback_list=callback_list)
    made = build_data.make(plan, algo, found)

    def apply_task(*_: Any) -> LoopState:
        raise InputError("set_task: the run learns from data alone: there are no environments")

    program = (Prefetched if made.on_host else Offline)(
        made.learn,
        devices.learners,
        iterations=plan.iterations_per_call,
        held_out=made.held_out,
        batches=cfg.data.validation_batches,
        epoch=made.epoch,
    )
    return _Learning(plan, [], algo, made.learn, made.size, found).run(
        program=program,
        backend=f"data alone, {counted(plan.iterations_per_call, 'update', ',')} per call",
        in_program=True,
        guarantee="data",
        apply_task=apply_task,
        estimates=estimates.build_estimates(plan, found, algo),
        programs="one program draws from the data, another learns"
        if made.on_host
        else "one program draws from the data and learns",
    )


def _in_two_programs(
    learning: _Learning,
    why: str,
    timers: Timers,
    restarts: int,
    callback_list: callbacks.CallbackList | None,
    training_step: Callable[[Step], Any] | None,
    make: MakeSource,
) -> Run:
    """Makes a run of which one program collects and another learns, for the reason `why`."""
    plan, vectors, algo = learning.plan, learning.vectors, learning.algo
    cfg, env = plan.cfg, vectors[0]
    backend = "clients" if cfg.external is not None else envs.resolve(cfg.env.id, cfg.env.backend)
    recorder = None
    if cfg.data.output:
        from jrl.run.data_output import Recorder

        recorder = Recorder(plan, algo)
    latest = [plan]  # a task of EnvPool is other options of the environment
    given: list[Any] = []  # the task of the others

    def source(key: Key, vectors: list[Any], count: int) -> Source:
        made = build_collect.make_source(latest[0], algo, timers, key, vectors, count, callback_list, make)
        return build_collect.watched(latest[0], made, algo, recorder, callback_list)

    def remake(key: Key, count: int) -> Source:
        made = source(key, build_collect.make_vectors(latest[0].cfg, plan.pools, count), count)
        for task in given:
            made.set_task(task)
        return made

    from jrl.learn.staged import Staged

    staged = Staged(
        learning.learn,
        # the key of `Staged.restart`, which seeds environments written in JAX
        lambda key: source(jax.random.fold_in(key, restarts) if restarts else key, vectors, restarts),
        plan.mesh,
        rows=plan.counted_columns * plan.learned_length,
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
        section, wanted = latest[0].cfg.env, list[Any]()
        options = section.options
        from jrl.envs import task as tasks

        task = fn(result, tasks.Handle(lambda: options, wanted.append), EnvContext(options))
        for changed in [*wanted, *([] if task is None else [task])][-1:]:
            if changed != options:
                latest[0] = dataclasses.replace(plan, cfg=dataclasses.replace(cfg, env=_with_options(section, changed)))
                staged.restart(count)
        return state

    in_program = isinstance(env, JaxEnv) and not cfg.env_runners.num
    stepped = "inside a program" if in_program else "from the host"
    if cfg.external is not None:
        stepped = f"{counted(cfg.env.num_envs, 'episode')} at a time"
    if cfg.env_runners.num:
        stepped = f"in {counted(cfg.env_runners.num, 'env runner')}"
    return learning.run(
        program=staged,
        backend=f"{backend}, {stepped}",
        in_program=in_program,
        guarantee="refilled" if plan.is_refilled else "restarted" if cfg.checkpoint.exact else "learner",
        recorder=recorder,
        note=callback_list.collecting(env, env_runners=cfg.env_runners.num > 0)[1] if callback_list else "",
        apply_task=apply_task,
        programs=f"one program collects, another learns: {why}",
    )


def _why_two_programs(learning: _Learning, *, is_custom: bool, callback_list: callbacks.CallbackList | None) -> str:
    """Returns why collecting and learning cannot be one program, in words; "" if they can."""
    plan, env = learning.plan, learning.vectors[0]
    if plan.why_two_programs:
        return plan.why_two_programs
    if plan.devices and plan.devices.actors != tuple(plan.devices.learners.devices.flat):
        return "some devices act, others learn"
    if is_custom:
        return "custom.training_step decides what to learn from"
    if callback_list and callback_list.needs_rollouts:
        return "callbacks look at rollouts"
    if not isinstance(env, JaxEnv):
        return "the environments are stepped from Python"
    if env.pure:
        return ""
    # EnvPool's too, where one process steps them for one device and an iteration is short: with a rollout of a few rows
    # and a few gradient steps, dispatching two programs takes a quarter of the time. A pool is a constant of its
    # program: if pools are replaced, only a small program is compiled again
    if plan.learners > 1:
        return "each device acts in a pool of its own"
    if learning.algo.on_policy:
        return "rollouts are long enough"
    if plan.cfg.checkpoint.exact or plan.cfg.custom.env_task:
        return "pools are made anew"
    return ""


def transforms(
    custom: CustomConfig, callback_list: callbacks.CallbackList | None
) -> tuple[Callable[[Rollout], Rollout], ...]:
    """Returns the functions of a rollout between collecting and learning: the config's, then those of callbacks."""
    given = [registry.load(path, "custom.transforms") for path in custom.transforms]
    return (*given, *(callback_list.program_transforms() if callback_list else ()))


def _with_options(section: EnvConfig, task: Any) -> EnvConfig:
    """Returns environments with other options, the task's over its own. Raises InputError."""
    if not isinstance(task, Mapping):
        raise InputError(f"a task of {section.id}, which EnvPool steps, is a mapping of its options, not {task!r}")
    env = dataclasses.replace(section, options={**section.options, **task})
    if errors := envs.check(env):
        raise InputError(*errors)
    return env


def enable_compile_cache() -> None:
    """Keeps compiled programs in jax's cache directory, or ~/.cache/jrl. Call it before the first compilation."""
    settings: Any = jax.config
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR") or settings.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", chosen or str(Path.home() / ".cache" / "jrl" / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
