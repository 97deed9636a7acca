"""Makes the data sets that learning from data is tried on: trains policies, then lets them play.

python scripts/make_data.py cartpole pendulum          # all kinds of each, into runs/data/cartpole-random and so on
python scripts/make_data.py halfcheetah --kinds medium replay

random: uniformly random actions; medium: a policy that was stopped at about half of the expert's return (between that
of random actions and it); expert, of HalfCheetah the policy that ReBRAC learns from the medium set; mixed: a third of
the steps each; replay: all episodes of a training run. The same machine makes the same sets, to the bit; one that there
is already is left, unless it was made otherwise.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jrl import data

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("random", "medium", "expert", "mixed", "replay")
_THIRDS = ("0.3333333", "0.3333333", "0.3333334")


# the return of the policy as it is, which the latest episodes tell too late
_OFTEN = ("--set=evaluation.every=1024", "--set=evaluation.duration=20", "--set=evaluation.explore=true")
MEDIUM = "MEDIUM"  # in arguments: the path of the medium set, which is made before
# what is learned from the medium set returns half as much again, in minutes; SAC takes half a million steps to that
_REBRAC = (
    "--set=env.id=HalfCheetah-v4", f"--set=data.input={MEDIUM}", "--set=network.hidden=[256, 256]",
    "--set=network.activation=relu", "--set=algo.normalize_obs=true", "--set=algo.tau=0.02",
    "--set=evaluation.every=10000", "--stop=updates=30000",
)  # fmt: skip


class Recipe(NamedTuple):
    """How the data sets of an environment are made."""

    env: str
    config: str
    medium: tuple[str, ...]  # further arguments of the training
    expert: tuple[str, ...]
    replay: tuple[str, ...]  # of the training whose episodes are kept
    backend: str = "jax"
    steps: int = 100_000
    expert_config: str | None = None  # None: the other kinds'


RECIPES = {
    "cartpole": Recipe(
        "CartPole-v1",
        "configs/ppo.yaml",
        medium=(*_OFTEN, "--stop=evaluation/return=200"),
        expert=("--stop=env_steps=300000", "--stop=episode/return=1000"),
        replay=("--stop=env_steps=100000", "--stop=episode/return=1000"),
    ),
    "acrobot": Recipe(
        "Acrobot-v1",
        "configs/ppo_acrobot.yaml",
        medium=(*_OFTEN, "--stop=evaluation/return=-290"),
        expert=("--stop=env_steps=500000", "--stop=episode/return=0"),
        replay=("--stop=env_steps=100000", "--stop=episode/return=0"),
    ),
    "pendulum": Recipe(
        "Pendulum-v1",
        "configs/sac.yaml",
        medium=("--set=evaluation.every=100", "--stop=evaluation/return=-700"),
        expert=("--stop=env_steps=10000", "--stop=evaluation/return=0"),
        # a tenth of the updates, so that it learns for most of its steps
        replay=(
            "--set=replay.train_every=10", "--set=replay.updates_per_step=0.1", "--set=evaluation.every=10000",
            "--stop=env_steps=50000", "--stop=evaluation/return=0",
        ),
    ),
    "halfcheetah": Recipe(
        "HalfCheetah-v4",
        "configs/sac_mujoco.yaml",
        medium=("--set=evaluation.every=5000", "--stop=env_steps=100000", "--stop=evaluation/return=3500"),
        expert=_REBRAC,
        replay=("--stop=env_steps=60000",),
        backend="envpool",
        expert_config="configs/rebrac.yaml",
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is asked for; exit status 0, or that of the command that failed."""
    p = argparse.ArgumentParser(
        description="Make the data sets that learning from data is tried on.", allow_abbrev=False
    )
    p.add_argument("names", nargs="+", choices=sorted(RECIPES), metavar="NAME", help=f"of {', '.join(sorted(RECIPES))}")
    p.add_argument("--kinds", nargs="+", choices=KINDS, help="(default: all)")
    p.add_argument("--out", type=Path, default=ROOT / "runs" / "data", help="directory (default: runs/data)")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    try:
        for name in args.names:
            for kind in args.kinds or KINDS:
                make(name, kind, args.out.absolute(), args.seed)
    except subprocess.CalledProcessError as e:
        print(f"failed: {' '.join(map(str, e.cmd))}", file=sys.stderr)
        return e.returncode
    return 0


def make(name: str, kind: str, out: Path, seed: int) -> Path:
    """The data set `out/NAME-KIND`, made where there is none. Raises CalledProcessError."""
    recipe, target = RECIPES[name], out / f"{name}-{kind}"
    run = lambda training: out / "runs" / f"{name}-{training}"
    play = ["jrl.data", "record", f"--steps={recipe.steps}", f"--seed={seed}", f"--out={target}"]
    anywhere = [f"--env={recipe.env}", "--random=1", f"--set=env.backend={recipe.backend}"]
    thirds = [f"{who}={share}" for who, share in zip((run("medium"), run("expert"), "random"), _THIRDS, strict=True)]
    commands = {
        "random": [*play, *anywhere],
        "medium": [*play, str(run("medium")), "--latest"],
        "expert": [*play, str(run("expert"))],
        "mixed": [*play, "--mix", *thirds],
        "replay": [],
    }
    needs = {"mixed": ("medium", "expert"), "random": ()}.get(kind, (kind,))
    trainings = [_training(recipe, training, run(training), target, seed) for training in needs]
    recorded = json.dumps([[str(x).replace(str(out), "OUT") for x in c] for c in [*trainings, commands[kind]]])
    note = target / "recipe.json"
    if target.exists():
        made_so = note.is_file() and note.read_text() == recorded
        print(f"{target} is there already{'' if made_so else ', MADE OTHERWISE: remove it to make it anew'}")
        return target
    if any(str(out / f"{name}-medium") in argument for command in trainings for argument in command):
        make(name, "medium", out, seed)
    for training, command in zip(needs, trainings, strict=True):
        if not (run(training) / "learning_curve.png").exists():  # the last file that a run writes
            _call([*command, "--resume=auto"])
    if commands[kind]:
        _call(commands[kind])
    note.write_text(recorded)
    store = data.read(target)
    ended = store.returns()[store.terminated | store.truncated]
    about = f"{store.num_steps:,} steps, return {ended.mean():.1f} ± {ended.std():.1f} of {len(ended)} episodes"
    print(f"{target}: {about}, checksum {store.checksum()}", flush=True)
    return target


def _training(recipe: Recipe, training: str, out: Path, target: Path, seed: int) -> list[str]:
    """The command that trains, and writes its episodes where those are the data set."""
    medium = target.parent / f"{target.name.partition('-')[0]}-medium"
    own = [argument.replace(MEDIUM, str(medium)) for argument in getattr(recipe, training)]
    written = [f"--set=data.output.path={target}"] if training == "replay" else []
    settings = [f"--set=env.backend={recipe.backend}", f"--set=run.seed={seed}", f"--out={out}"]
    config = recipe.expert_config if training == "expert" and recipe.expert_config else recipe.config
    return ["jrl.train", config, *settings, *written, *own]


def _call(arguments: Sequence[str]) -> None:
    print("$ python -m", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", *arguments], check=True, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
