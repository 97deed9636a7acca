"""python -m jrl.record CHECKPOINT --out video.mp4: write a video of episodes of a trained policy."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jrl.errors import EnvironmentFailed, InputError, counted
from jrl.fields.paths import resolve
from jrl.host import command


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Neither jax nor an environment library is imported for it."""
    p = command.parser("record", "Write a video of episodes of a trained policy.")
    command.add_checkpoint_arguments(p)
    p.add_argument("--out", default="video.mp4", help="FILE.mp4, or FILE.gif (default video.mp4)")
    p.add_argument("--episodes", type=int, default=1, help="episodes, one after the other in one file (default 1)")
    p.add_argument("--seed", type=int, help="seed of the environment (default: the run's, never those of training)")
    p.add_argument("--fps", type=float, help="steps per second (default: the environment's)")
    p.add_argument("--max-steps", type=int, default=10_000, help="most steps of an episode (default 10000)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status 0, 1 if an environment fails, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        record(args)
    except InputError as e:
        return command.report_input_error(e)
    except EnvironmentFailed as e:
        return command.report_failure(e)
    return 0


def record(args: argparse.Namespace) -> Path:
    """Plays the episodes, prints their returns, and writes the video; returns its path."""
    for name in ("episodes", "max_steps", "fps"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise InputError(f"--{name.replace('_', '-')}: expected more than 0, got {value}")
    from jrl.play import video

    video.check_file(resolve(args.out, "--out"), "--out")
    out = resolve(args.out, "--out", "new file")
    if args.fps is not None:
        video.check_fps(args.fps, "--fps")
    from jrl.run import build

    build.enable_compile_cache()
    scene = video.build_checkpoint_scene(args.checkpoint, best=args.best, seed=args.seed)
    fps = args.fps or scene.env.fps
    try:
        frames = video.play_frames(scene, episodes=args.episodes, max_steps=args.max_steps, on_end=_print_episode)
        count = video.write_video(out, frames, fps, key="--out")
    finally:
        scene.env.close()
    print(f"wrote {out}: {counted(count, 'frame')}, {fps:g} per second, drawn by {scene.env.how}")
    return out


def _print_episode(episode: int, total: float, steps: int, cut: bool) -> None:
    print(f"episode {episode}: return {total:g}, {counted(steps, 'step')}{', cut by --max-steps' if cut else ''}")


if __name__ == "__main__":
    sys.exit(command.run(main))
