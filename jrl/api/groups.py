"""Groups of `AlgorithmConfig`: methods whose arguments are keys of the config tree.

Names are RLlib's newest where it has the option, the tree's own where it has not. Annotation, default and documentation
of an argument are those of its key, in `jrl.settings.sections` and in the algorithm's Config.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl.fields import schema
from jrl.fields.data import Fresh, learns_from
from jrl.settings.sections import RunConfig

GROUPS: dict[str, dict[str, str]] = {
    "environment": {
        "env": "env.id",
        "env_config": "env.options",
        "backend": "env.backend",
        "normalize_actions": "env.normalize_actions",
        "clip_actions": "env.clip_actions",
        "clip_rewards": "env.clip_rewards",
        "reward_scale": "env.reward_scale",
        "frame_stack": "env.frame_stack",
        "action_mask_info": "env.action_mask_info",
        "horizon": "env.horizon",
        "soft_horizon": "env.soft_horizon",
        "no_done_at_end": "env.no_done_at_end",
        "remote_worker_envs": "env.remote_worker_envs",
        "remote_env_batch_wait_ms": "env.batch_wait_ms",
        "env_batch_size": "env.batch_size",
        "env_task_fn": "custom.env_task",
    },
    "env_runners": {
        "num_env_runners": "env_runners.num",
        "num_envs": "env.num_envs",
        "rollout_fragment_length": "rollout.length",
        "batch_mode": "rollout.batch_mode",
        "explore": "rollout.explore",
        "exploration_config": "algo.exploration",
        "sample_mode": "rollout.mode",
        "max_policy_lag": "rollout.max_policy_lag",
        "collector": "rollout.collector",
        "iterations_per_call": "rollout.iterations_per_call",
        "fake_sampler": "rollout.fake",
        "count_steps_by": "rollout.count_steps_by",
        "compress_observations": "env_runners.compress_observations",
        "sample_timeout_s": "env_runners.sample_timeout_s",
        "max_requests_in_flight_per_env_runner": "env_runners.max_requests_in_flight",
        "num_cpus_per_env_runner": "env_runners.num_cpus",
        "num_gpus_per_env_runner": "env_runners.num_gpus",
        "custom_resources_per_env_runner": "env_runners.custom_resources",
    },
    "training": {
        "model": "network",
        "replay_buffer_config": "replay",
        "learner_connector": "custom.transforms",
        "reward_fn": "custom.reward",
        "batch_transforms": "custom.batch",
        "loss_fn": "custom.loss",
        "training_step": "custom.training_step",
    },
    "exploration": {"explore": "rollout.explore", "exploration_config": "algo.exploration"},
    "offline_data": {
        "input_": "data.input",
        "input_format": "data.format",
        "where": "data.where",
        "actions_in_input_normalized": "data.actions_in_input_normalized",
        "updates_per_iteration": "data.updates_per_iteration",
        "validation": "data.validation",
        "validation_batches": "data.validation_batches",
        "data_reward": "data.reward",
        "placement": "data.placement",
        "estimate": "data.estimate",
        "output": "data.output",
    },
    "multi_agent": {
        "policies": "multi_agent.policies",
        "policy_mapping_fn": "multi_agent.mapping",
        "policies_to_train": "multi_agent.policies_to_train",
        "observation_fn": "multi_agent.observation_fn",
        "agents": "multi_agent.agents",
        "group": "multi_agent.group",
        "state": "multi_agent.state",
        "agent_id": "multi_agent.agent_id",
        "self_play": "multi_agent.self_play",
    },
    "learners": {"learners": "devices.learners", "actors": "devices.actors", "fake_devices": "devices.fake"},
    "resources": {
        "placement_strategy": "env_runners.placement",
        "ray_address": "env_runners.address",
        "xla_flags": "runtime.xla_flags",
        "preallocate": "runtime.preallocate",
        "mem_fraction": "runtime.mem_fraction",
        "cpu_threads": "runtime.cpu_threads",
        "environment": "runtime.env",
    },
    "fault_tolerance": {
        "ignore_env_runner_failures": "env_runners.ignore_env_runner_failures",
        "recreate_failed_env_runners": "env_runners.recreate_failed_env_runners",
        "restart_failed_sub_environments": "env_runners.restart_failed_sub_environments",
        "max_num_env_runner_restarts": "env_runners.max_restarts",
        "env_runner_health_probe_timeout_s": "env_runners.health_check_timeout_s",
        "env_step_timeout_s": "env_runners.env_step_timeout_s",
    },
    "evaluation": {
        "evaluation_interval": "evaluation.interval",
        "evaluation_every": "evaluation.every",
        "evaluation_duration": "evaluation.duration",
        "evaluation_duration_unit": "evaluation.unit",
        "evaluation_num_envs": "evaluation.num_envs",
        "evaluation_num_env_runners": "evaluation.num_env_runners",
        "evaluation_parallel_to_training": "evaluation.parallel",
        "evaluation_explore": "evaluation.explore",
        "evaluation_record": "evaluation.record",
        "evaluation_config": "evaluation.config",
        "evaluation_force_reset_envs_before_iteration": "evaluation.force_reset",
        "evaluation_sample_timeout_s": "evaluation.timeout_s",
        "always_attach_evaluation_results": "evaluation.always_attach",
        "custom_evaluation_function": "custom.evaluation",
    },
    "callbacks": {"callbacks_class": "custom.callbacks"},
    "reporting": {
        "min_sample_timesteps_per_iteration": "run.report_every",
        "min_time_s_per_iteration": "run.report_every_s",
        "min_train_timesteps_per_iteration": "run.report_every_trained",
        "metrics_num_episodes_for_smoothing": "run.smoothing_episodes",
        "keep_per_episode_custom_metrics": "run.keep_per_episode_metrics",
        "log_sys_usage": "run.log_sys_usage",
    },
    "checkpointing": {
        "checkpoint_every": "checkpoint.every",
        "keep_last": "checkpoint.keep_last",
        "keep_every": "checkpoint.keep_every",
        "keep_best_by": "checkpoint.keep_best_by",
        "keep_best": "checkpoint.keep_best",
        "replay_in_checkpoints": "checkpoint.replay",
        "policies_in_checkpoints": "checkpoint.policies",
        "exact": "checkpoint.exact",
    },
    "debugging": {
        "seed": "run.seed",
        "log_level": "run.log_level",
        "log": "run.log",
        "out": "run.out",
        "compile_cache": "run.compile_cache",
        "disable_jit": "run.disable_jit",
        "max_recompiles": "run.max_recompiles",
        "on_nonfinite": "run.on_nonfinite",
        "max_rollbacks": "run.max_rollbacks",
        "rollback_lr": "run.rollback_lr",
        "stall_seconds": "run.stall_seconds",
    },
}

# arguments that jrl.migrate works out, once the others are known
DERIVED: dict[str, dict[str, tuple[Any, str]]] = {
    "env_runners": {
        "num_envs_per_env_runner": (int, "environments of each runner, or of this process without any: sets num_envs"),
    },
    "offline_data": {
        "dataset_num_iters_per_learner": (int, "updates of an iteration from data: sets updates_per_iteration"),
    },
    "learners": {"num_learners": (int, "devices that learn, the first so many: sets learners")},
    "training": {
        "train_batch_size": (
            int,
            "rows of an iteration, which sets rollout_fragment_length; of algorithms with replay the rows of an update",
        ),
        "minibatch_size": (int, "rows of a gradient step, of algorithms with minibatches: sets num_minibatches"),
    },
}
# what an argument says of algorithms with replay, where it stands for more than its key
OF_REPLAY = {
    "rollout_fragment_length": "steps of each environment before an update: sets train_every and updates_per_step of "
    "replay_buffer_config; an updates_per_step that is given counts",
}
# methods that only RLlib's configs have; their arguments are translated. What they have been renamed to, if anything
THEIRS = {
    "rollouts": "env_runners",
    "framework": "framework",
    "api_stack": "api_stack",
    "rl_module": "rl_module",
    "python_environment": "python_environment",
    "experimental": "experimental",
}
ABOUT = {
    "environment": "What the policy acts in.",
    "env_runners": "How experience is collected, by how many.",
    "training": "Hyper-parameters, networks, replay, and the user's own steps.",
    "exploration": "How actions are chosen while learning; the same arguments as in `env_runners`.",
    "offline_data": "Data sets to learn from, in the place of environments or beside them.",
    "multi_agent": "Which policies there are where an environment has several agents, and who follows which.",
    "learners": "Which of this machine's devices learn and act, by index.",
    "resources": "Where the processes of environment runners are placed, and what is set before jax starts.",
    "fault_tolerance": "What to do when environments or their runners fail.",
    "evaluation": "Episodes played beside training, which never change it.",
    "callbacks": "Classes of jrl.api.Callbacks whose methods are called at certain moments.",
    "reporting": "How long an iteration of `train()` is, and what its result holds. Never changes learning.",
    "checkpointing": "What is kept to resume from.",
    "debugging": "Seed, logs, and what happens when something goes wrong.",
}


class Argument(NamedTuple):
    """One keyword of one method."""

    group: str
    key: str | None  # of the tree; None: derived
    annotation: Any
    default: Any
    doc: str


class _NotSet:
    def __repr__(self) -> str:
        return "not set"


NOT_SET = _NotSet()


def arguments(algo_config: type) -> dict[str, dict[str, Argument]]:
    """Returns group -> keyword -> Argument, for an algorithm."""
    replay = learns_from(algo_config) is not Fresh
    found: dict[str, dict[str, Argument]] = {}
    for group, mapping in GROUPS.items():
        own = {f.name: f"algo.{f.name}" for f in _fields(algo_config)} if group == "training" else {}
        own.pop("exploration", None)
        mapping = {**own, **mapping}
        if not replay:
            mapping.pop("replay_buffer_config", None)
        if not hasattr(algo_config, "exploration"):
            mapping.pop("exploration_config", None)
        derived = dict(DERIVED.get(group, {}))
        if not hasattr(algo_config, "num_minibatches"):
            derived.pop("minibatch_size", None)
        found[group] = {name: _argument(group, key, algo_config) for name, key in mapping.items()}
        found[group] |= {n: Argument(group, None, hint, NOT_SET, doc) for n, (hint, doc) in derived.items()}
        found[group] |= {
            n: found[group][n]._replace(doc=doc) for n, doc in OF_REPLAY.items() if replay and n in mapping
        }
    return found


class Shared:
    """The arguments of all algorithms, group by group; those of one stand in its own class."""

    def __get__(self, instance: Any, owner: type) -> dict[str, dict[str, Argument]]:
        return _shared_arguments()


@functools.cache
def _shared_arguments() -> dict[str, dict[str, Argument]]:
    from jrl import algos

    found: dict[str, dict[str, Argument]] = {}
    for name in algos.names():
        for group, known in arguments(algos.get_config_class(name)).items():
            found[group] = known | found.get(group, {})
    return found


def _fields(cls: type) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(cls) if f.init and f.name != "name"]


_hints = functools.cache(typing.get_type_hints)


def _argument(group: str, key: str, algo_config: type) -> Argument:
    section, _, name = key.partition(".")
    hints = _hints(RunConfig)
    cls = algo_config if section == "algo" else schema.section_class(hints[section])
    assert cls is not None
    if not name:  # a whole section, as a dict
        docs = schema.docs(cls)
        keys = "; ".join(f"{f.name} ({_shown(f)}): {docs.get(f.name, '')}" for f in _fields(cls))
        return Argument(group, key, dict[str, Any], {}, f"{inspect.getdoc(cls)} Keys: {keys}")
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    default = NOT_SET if schema.is_required(field) else schema.default_of(field)
    doc = schema.docs(cls).get(name, "")
    return Argument(group, key, _hints(cls)[name], default, doc)


def _shown(field: dataclasses.Field) -> str:
    return "required" if schema.is_required(field) else repr(schema.default_of(field))


def method(group: str, given: Mapping[str, Argument] | None, setter: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method `group(self, *, ...)` that hands its keywords to setter(self, group, keywords) and returns self.

    Args:
      given: the arguments that are its signature; None: it has none.
    """
    positional = {"environment": "env", "callbacks": "callbacks_class", "framework": "framework"}.get(group)

    def call(self, *args: Any, **keywords: Any) -> Any:
        if len(args) > (positional is not None):
            raise TypeError(f"{group}() takes keywords")
        if args and positional:
            keywords = {positional: args[0], **keywords}
        setter(self, THEIRS.get(group, group), keywords)
        return self

    call.__name__ = call.__qualname__ = group
    call.__doc__ = ABOUT.get(group, "Takes the arguments that RLlib's method has: see `AlgorithmConfig.translations`.")
    if given is None:
        return call
    kinds = inspect.Parameter
    parameters = [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
    for name, argument in sorted(given.items(), key=lambda item: item[0] != positional):
        kind = kinds.POSITIONAL_OR_KEYWORD if name == positional else kinds.KEYWORD_ONLY
        parameters.append(kinds(name, kind, default=argument.default, annotation=argument.annotation))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # where inspect looks
    lines = [f"  {name}: {argument.doc}".rstrip() for name, argument in given.items()]
    call.__doc__ = "\n".join([ABOUT[group], "", "Args:", *lines])
    return call
