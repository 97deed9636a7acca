"""Moments of a run at which users' code is called, and the moments of each kind of run."""

from collections.abc import Collection

from jrl.errors import InputError

KEY = "custom.callbacks"
_EPISODE = ("episode", "env_runner", "worker", "env", "base_env", "env_index", "policies")
# moment -> the arguments that it is called with, RLlib's older names included
MOMENTS: dict[str, tuple[str, ...]] = {
    "on_environment_created": ("env_runner", "worker", "env", "env_context"),
    "on_sub_environment_created": ("worker", "env_runner", "sub_environment", "env_context", "env_index"),
    "on_create_policy": ("policy_id", "policy"),
    "on_algorithm_init": ("algorithm",),
    "on_episode_created": _EPISODE,
    "on_episode_start": _EPISODE,
    "on_episode_step": _EPISODE,
    "on_episode_end": _EPISODE,
    "on_postprocess_trajectory": ("postprocessed_batch", "env_runner", "worker", "policy_id", "policies"),
    "on_sample_end": ("samples", "env_runner", "worker"),
    "on_learn_on_batch": ("train_batch", "policy", "result"),
    "on_train_result": ("algorithm", "result"),
    "on_evaluate_start": ("algorithm",),
    "on_evaluate_end": ("algorithm", "evaluation_metrics"),
    "on_checkpoint_loaded": ("algorithm",),
    "on_workers_recreated": ("algorithm", "worker_set", "worker_ids", "is_evaluation"),
}
# method of Stable-Baselines3's callbacks, which nothing would call here -> the moment that does instead
SB3_METHODS = {
    "_on_step": "on_episode_step",
    "_on_rollout_start": "on_train_result",
    "_on_rollout_end": "on_sample_end",
    "_on_training_start": "on_algorithm_init",
    "_on_training_end": "on_train_result",
    "_init_callback": "on_algorithm_init",
}
EPISODE_MOMENTS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")
ROLLOUT_MOMENTS = ("on_postprocess_trajectory", "on_sample_end")  # in the order in which they are called
PURE_MOMENTS = (*ROLLOUT_MOMENTS, "on_learn_on_batch")  # moments that can run inside the program


def check(
    asked: Collection[str], on_host: Collection[str], *, on_policy: bool, collects: bool, evaluates: bool
) -> None:
    """Raises if a run lacks a requested moment.

    Args:
      asked: moments with users' code.
      on_host: those of them that are called on the host, not traced into the program.
      on_policy: whether the algorithm learns from its own rollouts.
      collects: whether the run has environments; False: it learns from data alone.
      evaluates: whether the run has evaluations.
    Raises:
      InputError: names a missing moment and its alternative.
    """
    lacking = [] if collects else [*ROLLOUT_MOMENTS, *(() if evaluates else EPISODE_MOMENTS)]
    if missing := [name for name in lacking if name in asked]:
        raise InputError(
            f"{KEY}: {missing[0]}: the run learns from data.input alone, and collects no rollouts or episodes: leave "
            "it out; on_learn_on_batch, marked with @jrl.callbacks.in_program, sees the batches, and with "
            "evaluation.every on_episode_end the episodes of evaluations"
        )
    if "on_learn_on_batch" in on_host and not on_policy:
        rest = ", or use on_sample_end, which sees each rollout" if collects else ""
        raise InputError(
            f"{KEY}: on_learn_on_batch: this algorithm draws its batches from replay inside the program: mark the "
            f"method with @jrl.callbacks.in_program{rest}"
        )
