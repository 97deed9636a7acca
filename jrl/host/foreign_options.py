"""Options and commands of other libraries' command lines, and their equivalents here."""

_FRAMEWORK = "JAX is the only framework: leave it out"
_RAY = "Ray is started where --set env_runners.num is above 0, and for nothing else: leave it out"
_BUDGET = "--stop env_steps=N"
_EPISODES = "--episodes N --unit timesteps"

_EVERYWHERE = {
    **dict.fromkeys(("--framework", "--torch", "--eager", "--trace"), _FRAMEWORK),
    "--local-mode": _RAY,
    "--ray-address": "--set env_runners.address=ADDRESS",
    **dict.fromkeys(("--num-workers", "--num-env-runners"), "--set env_runners.num=N"),
    "--seed": "--set run.seed=N",
    "--num-envs": "--set env.num_envs=N",
}

# command -> option -> what to type
OPTIONS: dict[str, dict[str, str]] = {
    "train": {
        **_EVERYWHERE,
        "--checkpoint-freq": "it counts iterations in RLlib: --set checkpoint.every=STEPS counts environment steps",
        "--checkpoint-at-end": "the end of a run always has a checkpoint: leave it out",
        "--keep-checkpoints-num": "--set checkpoint.keep_last=N",
        "--local-dir": "--out DIR names the run directory",
        "--restore": "--resume RUN continues a run, --init-from RUN takes its weights",
        "--num-samples": "jrl sweep CONFIG trains with many hyper-parameters and seeds: docs/sweeps.md",
        **dict.fromkeys(("--track", "--wandb-project-name"), "--set run.log=[jsonl,csv,wandb]"),
        **dict.fromkeys(("--timesteps", "--total-timesteps", "--n-timesteps"), _BUDGET),
        "--stop-reward": "--stop episode/return=N",
        **dict.fromkeys(("--lr", "--learning-rate"), "--set algo.lr=VALUE"),
        "--gamma": "--set algo.gamma=VALUE",
        "--num-steps": "--set rollout.length=N",
        "--eval-freq": "--set evaluation.every=STEPS",
        "--capture-video": "--set evaluation.record=1",
    },
    "evaluate": {
        **_EVERYWHERE,
        **dict.fromkeys(("--steps", "--n-timesteps"), _EPISODES),
        **dict.fromkeys(("--render", "--video-dir"), "jrl record CHECKPOINT --out video.mp4"),
        "--out": "jrl data record CHECKPOINT OUT writes the episodes",
        "--config": "--set a.b=v, once for each key",
        "--deterministic": "--greedy",
        "--load-best": "--best",
    },
}

# command of another library -> what to type
COMMANDS = {
    "rollout": "it is evaluate, or record for a video",
    "enjoy": "it is evaluate, or record for a video",
    "example": "config list has the examples, and train NAME trains one",
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
