"""python -m jrl.importer MODEL --env ID: makes a run of a policy that Stable-Baselines3 or rsl_rl has trained."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jrl import config
from jrl.errors import EnvironmentFailed, InputError
from jrl.fields.paths import resolve
from jrl.host import command, files


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Neither jax nor an environment library is imported for it."""
    p = command.parser(
        "import",
        "Make a run of a policy that Stable-Baselines3 has trained with PPO, A2C, DQN, SAC, TD3 or DDPG, or rsl_rl "
        "with PPO. The run can be evaluated, recorded, exported and trained further. Nothing of the file is executed.",
    )
    p.add_argument("model", help="model.zip of Stable-Baselines3, or model_N.pt of rsl_rl")
    p.add_argument("--env", required=True, help="environment of the training; its options: --set env....")
    p.add_argument("--vec-normalize", metavar="FILE", help="statistics of a model.zip that VecNormalize.save wrote")
    p.add_argument("--out", help="run directory (default: runs/NAME_ENV)")
    p.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides", help="override the config")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was taken; returns the exit status: 0, 1 if an environment fails, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        for line in import_model(args):
            print(line)
    except InputError as e:
        return command.report_input_error(e)
    except EnvironmentFailed as e:
        return command.report_failure(e)
    return 0


def import_model(args: argparse.Namespace) -> Iterator[str]:
    """Writes a run directory with a checkpoint; yields lines for the user.

    Raises:
      InputError: bad input; nothing is written.
    """
    path = resolve(args.model, "model", "file")
    if not path.is_file():
        raise InputError(
            f"model: expected a file model.zip or model_N.pt, got {args.model}, which does not exist: check the path"
        )
    normalize = args.vec_normalize and resolve(args.vec_normalize, "--vec-normalize", "file")
    if normalize and not normalize.is_file():
        raise InputError(f"--vec-normalize: {args.vec_normalize} does not exist: check the path")
    directory = resolve(args.out, "--out", "new directory") if args.out else None
    if directory is not None and (directory / "config.yaml").exists():
        raise InputError(f"--out: {directory} holds a run already: choose another --out")
    from jrl.importer import rsl_rl, sb3, vec_normalize

    is_rsl_rl = path.suffix == ".pt"
    if is_rsl_rl and normalize:
        raise InputError("--vec-normalize: a .pt of rsl_rl has its statistics inside: leave --vec-normalize out")
    source = rsl_rl if is_rsl_rl else sb3
    if is_rsl_rl:
        model, statistics = rsl_rl.read(path)
    else:
        model, statistics = sb3.read(path), vec_normalize.read(normalize) if normalize else None
    with sb3.report_values(path, source.KNOWN):
        found = rsl_rl.settings(model, statistics, args.overrides) if is_rsl_rl else sb3.settings(model, statistics)
    cfg = config.load(found.config, args.overrides, env=args.env)
    if is_rsl_rl:
        model, cfg = rsl_rl.count_steps(model, cfg)
    title = f"{path.stem}_{args.env}".replace("/", "-").replace(":", "-")
    from jrl.host import runtime
    from jrl.learn.program import Clock
    from jrl.run.session import Session
    from jrl.run.store.writer import Checkpointer

    runtime.apply(cfg.runtime)
    # the run's replay is empty, and is not part of the checkpoint: a small one saves memory
    small = cfg.replay and dataclasses.replace(
        cfg.replay, capacity=min(cfg.replay.capacity, 2 * (cfg.replay.learning_starts + cfg.replay.batch_size))
    )
    with Session(dataclasses.replace(cfg, replay=small)) as session:
        source.check_spaces(model, session.run.spec)
        session.start()
        initial = session.learner_state()
        with sb3.report_values(path, source.KNOWN):
            state, notes = source.fill(model, initial, session.run.spec, statistics)
        session.take_over({None: state})
        steps = int(state.env_steps)
        session.clock = Clock(steps, steps)
        directory = directory or files.make_numbered(Path("runs") / title)
        with files.lock_directory(directory, made=not args.out):
            with Checkpointer(directory / "checkpoints", cfg.checkpoint) as checkpoints:
                checkpoints.save(0, session.parts(), session.description(cfg))
            config.write(cfg, directory)
    name = config.algo_name(cfg)
    yield f"{name} on {cfg.env.id} after {steps:,} steps, {session.run.num_params:,} parameters"
    yield from (f"note: {note}" for note in [*found.notes, *notes])
    typed = shlex.quote(args.out or str(directory))
    yield f"run: {typed}"
    yield f"evaluate: {command.format_command('evaluate')} {typed} --episodes 100"
    more = 2 * max(steps, int(cfg.stop["env_steps"]))
    yield f"train on: {command.format_command('train')} --resume {typed} --stop env_steps={more}"


if __name__ == "__main__":
    sys.exit(command.run(main))
