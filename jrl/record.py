"""python -m jrl.record CHECKPOINT --out video.mp4: films episodes of a trained policy."""

import argparse
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jrl import command
from jrl.errors import InputError

if TYPE_CHECKING:
    from jrl.envs.render import Drawn
    from jrl.policy import Policy

_GIF_FPS = 50.0  # the most that viewers show: a GIF counts in hundredths of a second, and 1 of them is read as 10


def parser() -> argparse.ArgumentParser:
    """The command line. Neither jax nor an environment library is imported for it."""
    p = command.parser("record", "Write a video of episodes of a trained policy.")
    p.add_argument("checkpoint", help="run directory, or a checkpoint inside it")
    p.add_argument("--out", default="video.mp4", help="FILE.mp4, or FILE.gif (default video.mp4)")
    p.add_argument("--best", action="store_true", help="the run's best checkpoint, not its latest")
    p.add_argument("--episodes", type=int, default=1, help="one after the other in one file (default 1)")
    p.add_argument("--seed", type=int, help="of the environment (default: the run's, never those of training)")
    p.add_argument("--fps", type=float, help="steps per second (default: as the environment says)")
    p.add_argument("--max-steps", type=int, default=10_000, help="cut an episode there (default 10000)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the return of each episode and which file was written; exit status 0, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        record(args)
    except InputError as e:
        return command.refused(e)
    return 0


def record(args: argparse.Namespace) -> Path:
    """Plays the episodes and writes the file; returns its path."""
    for name in ("episodes", "max_steps", "fps"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise InputError(f"--{name.replace('_', '-')}: expected more than 0, got {value}")
    out, remark = _output(Path(args.out))
    from jrl import build, policy
    from jrl.envs import render

    build.enable_compile_cache()
    trained = policy.load(args.checkpoint, best=args.best)
    cfg = trained.config
    seed = cfg.run.seed if args.seed is None else args.seed
    # the policy itself remembers the frames of a stack, the previous action and reward
    own = trained.spec._replace(observation=trained.observation_space)
    env = render.make(cfg.env.id, own, backend=cfg.env.backend, seed=seed, options=cfg.env.options)
    fps = args.fps or env.fps
    try:
        frames = _frames(trained, env, args.episodes, args.max_steps)
        try:
            count = (_write_gif if out.suffix == ".gif" else _write_mp4)(out, frames, fps)
        except OSError as e:
            raise InputError(f"--out: cannot write {out}: {e.strerror or e}") from e
    finally:
        env.close()
    print(f"wrote {out}: {count} frames, {fps:g} per second, drawn by {env.how}{remark}")
    return out


def _output(out: Path) -> tuple[Path, str]:
    """The file that will be written, and a remark if it is not the one asked for."""
    if out.suffix not in (".mp4", ".gif"):
        raise InputError(f"--out {out}: expected a name that ends in .mp4 or .gif")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(out.name + ".unfinished")
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise InputError(f"--out {out}: cannot write there: {e.strerror}: choose another file") from e
    if out.suffix == ".gif" or _has_encoder():
        return out, ""
    return out.with_suffix(".gif"), ' (a GIF, as there is no encoder for mp4: pip install "imageio[ffmpeg]")'


def _has_encoder() -> bool:
    # otherwise it starts the encoder by a plain fork, which may deadlock beside jax's threads
    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")
    try:
        import imageio.v2  # noqa: F401
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # RuntimeError: the package has no program for this platform
        return False
    return True


def _frames(policy: "Policy", env: "Drawn", episodes: int, max_steps: int) -> Iterator[np.ndarray]:
    """The pictures [H, W, 3] u8 of episodes that are played meanwhile; each return is printed."""
    for episode in range(1, episodes + 1):
        policy.reset()
        obs, reward, total, steps, done = env.reset(), None, 0.0, 0, False
        yield env.render()
        while not done and steps < max_steps:
            result = env.step(policy.act(obs, reward=reward))
            obs, reward = result.obs, result.reward
            total, steps = total + float(reward[0]), steps + 1
            done = bool(result.terminated[0] or result.truncated[0])
            yield env.render()
        print(f"episode {episode}: return {total:g}, {steps} steps{'' if done else ', cut by --max-steps'}")


def _write_mp4(out: Path, frames: Iterable[np.ndarray], fps: float) -> int:
    """H.264 for every player; returns the number of frames."""
    import imageio.v2

    count = 0
    # macro_block_size: otherwise pictures are scaled to multiples of 16
    writer: Any = imageio.v2.get_writer(out, format="FFMPEG", fps=fps, codec="libx264", quality=8, macro_block_size=1)
    with writer:
        for frame in frames:
            odd = [(0, side % 2) for side in frame.shape[:2]]  # sides must be even
            writer.append_data(np.pad(frame, [*odd, (0, 0)], mode="edge"))
            count += 1
    return count


def _write_gif(out: Path, frames: Iterable[np.ndarray], fps: float) -> int:
    """Loops for ever; above 50 frames per second some are left out. Returns the number of those that are in."""
    from PIL import Image

    every = math.ceil(fps / _GIF_FPS)
    images = [Image.fromarray(frame).quantize(method=Image.Quantize.FASTOCTREE) for frame in _thinned(frames, every)]
    duration = round(100 * every / fps) * 10
    images[0].save(out, save_all=True, append_images=images[1:], duration=duration, loop=0)
    return len(images)


def _thinned(frames: Iterable[np.ndarray], every: int) -> Iterator[np.ndarray]:
    """Each `every`-th, and the last."""
    frame = None
    for i, frame in enumerate(frames):
        if i % every == 0:
            yield frame
    if frame is not None and i % every:
        yield frame


if __name__ == "__main__":
    sys.exit(main())
