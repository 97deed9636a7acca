"""Videos of policies: the frames of episodes, the files, and the videos of a run under way."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import agents, config
from jrl.config import RunConfig
from jrl.envs import render
from jrl.errors import InputError
from jrl.fields import paths
from jrl.host.machine import require
from jrl.play import actor, build_evaluation
from jrl.play.actor import Actor, load, load_all
from jrl.run.store import checkpoint
from jrl.types import EnvSpec, PyTree

MAX_STEPS = 10_000  # of an episode
_GIF_FPS = 50.0  # the most that viewers show: a GIF counts in hundredths of a second, and 1 of them is read as 10
_SECONDS_TO_FINISH = 30.0  # that the end of a run waits for its last video

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- files


def check_file(out: Path, key: str) -> None:
    """Raises InputError, about `key`, unless there is an encoder for the name of a video."""
    if out.suffix not in (".mp4", ".gif"):
        raise InputError(f"{key} {out}: expected a name that ends in .mp4 or .gif")
    if out.suffix == ".mp4":
        check_encoder(f"{key} {out}", "choose a name that ends in .gif")
    require("PIL", "video", f"{key} {out}")


def check_fps(fps: float, key: str) -> None:
    """Raises InputError, about `key`, unless files can hold so many frames per second."""
    if not render.MIN_FPS <= fps <= render.MAX_FPS:
        raise InputError(f"{key}: expected a number in [{render.MIN_FPS:g}, {render.MAX_FPS:g}], got {fps:g}")


def check_encoder(key: str, otherwise: str) -> None:
    """Raises InputError, about `key`, where there is no encoder of mp4."""
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except Exception as e:  # not installed, or without a program for this platform
        reason = str(e).strip().splitlines()[:1]
        raise InputError(
            f"{key}: there is no encoder for mp4 ({''.join(reason)}): pip install 'jrl[video]', or {otherwise}"
        ) from e


def write(out: Path, frames: Iterable[np.ndarray], fps: float, key: str | None = None) -> int:
    """Writes pictures [H, W, 3] u8 as a video, mp4 or GIF by the name; a file that is there is replaced at the end.

    Args:
      out: the file.
      frames: pictures; those of another size than the first are fitted into it.
      fps: frames per second.
      key: of the option that named the file, for errors.
    Returns:
      The number of frames in the file.
    Raises:
      OSError: the file could not be written whole; with a key an InputError. Nothing is left of it then, nor of one
        whose frames raise.
    """
    with paths.written(out, key) as part:  # encoders go by the ending, which is the same
        return (_write_gif if out.suffix == ".gif" else _write_mp4)(part, _of_one_size(frames), fps)


def _of_one_size(frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields pictures of the first one's size: others are scaled into it, with black at two sides."""
    shape = None
    for frame in frames:
        shape = shape or frame.shape
        if frame.shape != shape:
            from PIL import Image, ImageOps

            frame = np.asarray(ImageOps.pad(Image.fromarray(frame), shape[1::-1]))
        yield frame


def _write_mp4(out: Path, frames: Iterable[np.ndarray], fps: float) -> int:
    """Writes H.264, which every player reads; returns the number of frames.

    Raises:
      OSError: the encoder failed, as on a full disk. imageio_ffmpeg's own writer does not ask for its exit status.
    """
    count, encoder, is_cut = 0, None, False
    with tempfile.TemporaryFile() as said:
        try:
            for frame in frames:
                odd = [(0, side % 2) for side in frame.shape[:2]]  # sides must be even
                frame = np.ascontiguousarray(np.pad(frame, [*odd, (0, 0)], mode="edge"))
                if encoder is None:
                    encoder = _encoder(out, frame.shape[1::-1], fps, said)
                assert encoder.stdin is not None
                try:
                    encoder.stdin.write(frame.data)
                except BrokenPipeError:
                    is_cut = True
                    break
                count += 1
        except BaseException:
            if encoder is not None:
                encoder.kill()
            raise
        finally:
            status = 0 if encoder is None else _ended(encoder)
        if status or is_cut:
            said.seek(0)
            lines = said.read()[-2000:].decode(errors="replace").strip().splitlines()
            raise OSError(errno.EIO, f"the encoder failed: {lines[-1][:200] if lines else f'status {status}'}")
    return count


def _encoder(out: Path, size: tuple[int, ...], fps: float, said: Any) -> subprocess.Popen:
    """Starts ffmpeg, which reads frames of that size (width, height) and says in the file `said` what fails."""
    import imageio_ffmpeg

    read = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[0]}x{size[1]}", "-r", f"{fps:.6f}", "-i", "-"]
    coded = ["-an", "-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "10"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *read, *coded, f"file:{out}"]
    # a session of its own: Ctrl-C is for the run, which ends the encoder
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
    )


def _ended(encoder: subprocess.Popen) -> int:
    with contextlib.suppress(BrokenPipeError):
        assert encoder.stdin is not None
        encoder.stdin.close()
    return encoder.wait()


def _write_gif(out: Path, frames: Iterable[np.ndarray], fps: float) -> int:
    """Writes a GIF that loops for ever; above 50 frames per second some are left out. Returns how many are in it."""
    from PIL import Image

    every = math.ceil(fps / _GIF_FPS)
    images = [Image.fromarray(frame).quantize(method=Image.Quantize.FASTOCTREE) for frame in _thinned(frames, every)]
    duration = round(100 * every / fps) * 10
    images[0].save(out, save_all=True, append_images=images[1:], duration=duration, loop=0)
    return len(images)


def _thinned(frames: Iterable[np.ndarray], every: int) -> Iterator[np.ndarray]:
    frame = None
    for i, frame in enumerate(frames):
        if i % every == 0:
            yield frame
    if frame is not None and i % every:
        yield frame


# ---------------------------------------------------------------- episodes


class Scene(NamedTuple):
    """A policy in one environment that can be drawn, or all policies of several agents in their games."""

    actor: Actor
    env: render.Drawn | render.Games


def of_checkpoint(path: str | os.PathLike[str], *, best: bool | None = None, seed: int | None = None) -> Scene:
    """Makes the scene of a checkpoint's policies.

    Args:
      path, best: as `jrl.load`.
      seed: of the environment, which is of the run's evaluations, never of training; None: the run's.
    Raises:
      InputError: no checkpoint is there, or nothing can draw its environment.
    """
    found = checkpoint.locate(Path(path), best=best)
    meta = checkpoint.read_meta(found)
    cfg = config.override(meta["config"], [] if seed is None else [f"run.seed={seed}"])
    trained = load(found) if cfg.multi_agent is None else load_all(found)
    made = of_training(cfg, trained.spec)
    made.actor.use(trained.weights)
    return made


def of_training(cfg: RunConfig, spec: EnvSpec) -> Scene:
    """Makes the scene of a run under way, with the weights that `Actor.use` gets.

    Args:
      cfg: of the run's evaluations.
      spec: of the environments of training.
    Raises:
      InputError: nothing can draw the environment, or the policies cannot act in it.
    """
    if cfg.multi_agent is None:
        made = actor.of_training(cfg, spec)  # which makes stacks of frames itself
        plain = spec._replace(observation=made.observation_space)
        return Scene(made, render.make(cfg.env, plain, seed=cfg.run.seed))
    num = agents.make(cfg).whole_games(1)
    make = lambda section: build_evaluation.environments(dataclasses.replace(cfg, env=section), num)
    env = render.make_games(cfg.env, make, seed=cfg.run.seed)
    try:
        build_evaluation.check_spaces(env.spec, spec)
    except BaseException:
        env.close()
        raise
    return Scene(actor.of_training(cfg, env.spec, own=False, seed=cfg.run.seed), env)


def frames(
    scene: Scene,
    *,
    episodes: int,
    max_steps: int = MAX_STEPS,
    explore: bool = False,
    on_end: Callable[[int, float, int, bool], Any] = lambda *_: None,
) -> Iterator[np.ndarray]:
    """Yields the pictures [H, W, 3] u8 of episodes that are played meanwhile.

    An episode of several agents is a game, until it is over for all, and its return is what its agents earn together.
    Self-play has a block of games, which differ in the learner's seat or its opponent: episodes show them in turn.

    Args:
      scene: who acts, and where.
      episodes: so many, one after the other.
      max_steps: an episode is cut there.
      explore: sample as in training.
      on_end: called after each episode with its number (from 1), return, steps, and whether it was cut by `max_steps`.
    """
    acting, env = scene
    games = env.spec.games
    # an environment of one agent is drawn without the options of the run
    longest = math.inf if isinstance(env, render.Games) else acting.config.env.limit or math.inf
    for episode in range(episodes):
        game = episode % games
        draw = functools.partial(env.render, game) if isinstance(env, render.Games) else env.render
        acting.reset()
        obs, reward, begins = env.reset(), None, None
        total, steps, done = 0.0, 0, False
        yield draw()
        while not done and steps < max_steps:
            result = env.step(acting.act(obs, explore, reset=begins, reward=reward))
            obs, reward, over = result.obs, result.reward, result.terminated | result.truncated
            if result.several is not None:  # an agent's memory begins with the row before its first
                begins, over = result.several.absent, result.several.over
            total, steps = total + float(np.asarray(reward).reshape(games, -1).sum(-1)[game]), steps + 1
            done = bool(over[game]) or steps >= longest
            yield draw()
        on_end(episode + 1, total, steps, not done)


# ---------------------------------------------------------------- of a run under way


class Videos:
    """Videos of the policy that a run trains: STEPS.mp4 of a directory, played and written in a thread of their own.

    Training does not wait for a video, but for the one before it. A video that fails is a warning, and left out.

    Args:
      cfg: of the evaluations: with their environment.
      directory: where to; made with the first video.
      episodes: of each video.
    """

    def __init__(self, cfg: RunConfig, directory: Path, *, episodes: int):
        self._cfg, self._directory, self._episodes = cfg, directory, episodes
        self._stop = threading.Event()
        # one thread for all: what draws by OpenGL belongs to the thread that began it
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jrl-video")
        self._under_way: concurrent.futures.Future | None = None
        self._scene: Scene | None = None

    def prepare(self, spec: EnvSpec) -> None:
        """Makes the environment and draws a first picture of it; `spec` is of the environments of training.

        Raises:
          InputError: the environment cannot be drawn, or there is no encoder.
        """
        check_encoder("evaluation.record", "leave it out")
        try:
            self._scene = self._thread.submit(of_training, self._cfg, spec).result()
        except InputError as e:
            raise InputError(*(f"evaluation.record: {line}" for line in e.errors)) from e

    def begin(self, weights: PyTree, steps: int) -> None:
        """Begins the video of a copy of these weights, after so many steps, once the one before is written."""
        if self._under_way is not None:
            self._under_way.result()
        copied = jax.tree.map(lambda x: x.copy(), weights)  # the learner's own are donated to its next update
        self._under_way = self._thread.submit(self._record, copied, steps)

    def _record(self, weights: PyTree, steps: int) -> None:
        assert self._scene is not None
        out = self._directory / f"{steps}.mp4"
        try:
            self._scene.actor.use(weights)
            self._directory.mkdir(parents=True, exist_ok=True)
            explore = self._cfg.rollout.explore
            found = frames(self._scene, episodes=self._episodes, explore=explore, on_end=_log_episode)
            write(out, self._until_stopped(found), self._scene.env.fps)
        except _Stopped:
            _log.warning("evaluation.record: the run ended before %s was finished: it was left out", out)
        except Exception as e:  # a video is not worth a run
            _log.warning("evaluation.record: %s could not be written: %s: %s", out, type(e).__name__, e)

    def _until_stopped(self, found: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        for frame in found:
            if self._stop.is_set():
                raise _Stopped
            yield frame

    def close(self) -> None:
        """Waits a little for the video that is under way, and ends the environment."""
        if self._under_way is not None:
            concurrent.futures.wait([self._under_way], timeout=_SECONDS_TO_FINISH)
        self._stop.set()
        if self._scene is not None:
            self._thread.submit(self._scene.env.close)
            self._scene = None
        self._thread.shutdown(wait=True)


def _log_episode(episode: int, total: float, steps: int, cut: bool) -> None:
    _log.info("evaluation.record: episode %d: return %g, %d steps", episode, total, steps)


class _Stopped(Exception):
    """The run is over."""


def of_run(evaluated: RunConfig, cfg: RunConfig, directory: Path | None) -> Videos | None:
    """Makes the videos of the evaluations, where the run asks for them."""
    if not cfg.evaluation.record:
        return None
    found = directory or (Path(cfg.run.out) if cfg.run.out else None)
    if found is None:
        raise InputError("evaluation.record: videos go into the directory of the run: set run.out")
    return Videos(evaluated, found / "videos", episodes=cfg.evaluation.record)
