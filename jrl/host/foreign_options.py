"""Options and commands of RLlib's, Stable-Baselines3's and CleanRL's command lines, and their equivalents here."""

_FRAMEWORK = "JAX is the only framework: leave it out"
_RAY = "Ray is started where --set env_runners.num is above 0, and for nothing else: leave it out"
_OUT = "--out DIR names the run directory"
_SWEEP = "jrl sweep CONFIG trains with many hyper-parameters and seeds: docs/sweeps.md"
_BUDGET = "--stop env_steps=N"
_VIDEO = "jrl record CHECKPOINT --out video.mp4"
_DATA = "jrl data record CHECKPOINT OUT writes the episodes"
_WANDB = "--set run.log=[jsonl,csv,wandb]"

_EVERYWHERE = {
    **dict.fromkeys(("--framework", "-f", "--torch", "--eager", "--trace", "--tf", "--cuda"), _FRAMEWORK),
    **dict.fromkeys(("--local-mode", "--ray-num-cpus", "--ray-num-gpus", "--ray-num-nodes", "--ray-ui", "--no-ray-ui",
                     "--ray-object-store-memory"), _RAY),
    "--ray-address": "--set env_runners.address=ADDRESS",
    **dict.fromkeys(("--num-workers", "--num-env-runners"), "--set env_runners.num=N"),
    **dict.fromkeys(("--num-gpus", "--num-learners"), "--set devices.learners=[0,1] names the devices that learn"),
    "--device": "JAX_PLATFORMS=cpu in front of the command takes the CPU: leave it out",
    **dict.fromkeys(("--seed", "-s"), "--set run.seed=N"),
    **dict.fromkeys(("--env-config", "--env-kwargs"), "--set env.options.NAME=VALUE"),
    "--num-envs": "--set env.num_envs=N",
}  # fmt: skip

# command -> option -> what to type
OPTIONS: dict[str, dict[str, str]] = {
    "train": {
        **_EVERYWHERE,
        "--checkpoint-freq": "it counts iterations in RLlib: --set checkpoint.every=STEPS counts environment steps",
        "--save-freq": "--set checkpoint.every=STEPS",
        "--checkpoint-at-end": "the end of a run always has a checkpoint: leave it out",
        "--keep-checkpoints-num": "--set checkpoint.keep_last=N",
        "--checkpoint-score-attr": "--set checkpoint.keep_best_by=evaluation/return",
        **dict.fromkeys(("--local-dir", "--storage-path", "--experiment-name", "--name", "--log-folder",
                         "--tensorboard-log", "--exp-name"), _OUT),
        **dict.fromkeys(("--restore", "--trained-agent", "-i"), "--resume RUN continues a run, --init-from RUN takes "
                        "its weights"),
        **dict.fromkeys(("--num-samples", "--scheduler", "--scheduler-config", "--resources-per-trial",
                         "--trial-resources", "--optimize-hyperparameters"), _SWEEP),
        **dict.fromkeys(("--upload-dir", "--sync-on-checkpoint"), "the run directory is a local one: leave it out"),
        "--export-formats": "jrl export RUN writes a trained policy",
        **dict.fromkeys(("--wandb-key", "--wandb-project", "--wandb-project-name", "--track"), _WANDB),
        **dict.fromkeys(("--timesteps", "--timesteps-total", "--total-timesteps", "--n-timesteps", "-n",
                         "--stop-timesteps"), _BUDGET),
        "--stop-reward": "--stop episode/return=N",
        "--stop-iters": "--stop training_iteration=N",
        **dict.fromkeys(("--lr", "--learning-rate"), "--set algo.lr=VALUE"),
        "--gamma": "--set algo.gamma=VALUE",
        "--num-steps": "--set rollout.length=N",
        **dict.fromkeys(("--hyperparams", "-params"), "--set algo.NAME=VALUE, once for each"),
        **dict.fromkeys(("--eval-freq", "--evaluation-interval"), "--set evaluation.every=STEPS"),
        **dict.fromkeys(("--eval-episodes", "--evaluation-duration"), "--set evaluation.duration=N"),
        "--capture-video": "--set evaluation.record=1",
        "--log-interval": "--set run.report_every=STEPS",
        "--progress": "lines of progress are printed, always: leave it out",
    },
    "evaluate": {
        **_EVERYWHERE,
        "--steps": "--episodes N --unit timesteps",
        **dict.fromkeys(("--n-timesteps", "-n"), "--episodes N --unit timesteps"),
        **dict.fromkeys(("--render", "--no-render", "--video-dir", "--monitor"), _VIDEO),
        **dict.fromkeys(("--out", "--save-info", "--use-shelve"), _DATA),
        "--track-progress": "leave it out",
        "--config": "--set a.b=v, once for each key",
        "--deterministic": "actions are the policy's best ones unless --explore is given: leave it out",
        "--stochastic": "--explore",
        "--folder": "the run directory is the first argument: jrl evaluate RUN",
        "--load-best": "--best",
    },
}  # fmt: skip

# command of another library -> what to type
COMMANDS = {
    "rollout": "it is evaluate, or record for a video",
    "enjoy": "it is evaluate, or record for a video",
    "example": "config list has the examples, and train NAME trains one",
    "examples": "config list has the examples, and train NAME trains one",
    "tune": "it is sweep",
    "test": "it is evaluate",
    "eval": "it is evaluate",
    "migrate": "it is config migrate",
}

OPTIONS["sweep"] = OPTIONS["serve"] = OPTIONS["train"]
OPTIONS["record"] = {
    **OPTIONS["evaluate"],
    **dict.fromkeys(("--algo", "--run"), "the checkpoint says which it is: leave it out"),
    "--env": "--set env.id=NAME",
}

__all__ = ["COMMANDS", "OPTIONS"]
