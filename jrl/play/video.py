"""Videos of policies: files, frames of episodes, and videos of evaluations during training."""

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
from jrl.play import build_evaluation
from jrl.play.actor import Actor, build_training_actor, load, load_all
from jrl.run.store import checkpoint
from jrl.types import EnvSpec, PyTree

MAX_STEPS = 10_000  # steps of an episode
_GIF_FPS = 50.0  # maximum that viewers show: a GIF counts hundredths of a second, and viewers read 1 as 10
_SECONDS_TO_FINISH = 30.0  # time that the end of a run waits for its last video

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- files


def check_file(out: Path, key: str) -> None:
    """Raises InputError about `key`: the name is not a video, or its encoder is not installed."""
    if out.suffix not in (".mp4", ".gif"):
        raise InputError(f"{key} {out}: expected a name that ends in .mp4 or .gif")
    if out.suffix == ".mp4":
        check_encoder(f"{key} {out}", "choose a name that ends in .gif")
    require("PIL", "video", f"{key} {out}")


def check_fps(fps: float, key: str) -> None:
    """Raises InputError about `key`: files cannot hold this number of frames per second."""
    if not render.MIN_FPS <= fps <= render.MAX_FPS:
        raise InputError(f"{key}: expected a number in [{render.MIN_FPS:g}, {render.MAX_FPS:g}], got {fps:g}")


def check_encoder(key: str, otherwise: str) -> None:
    """Raises InputError about `key`: the encoder of mp4 is not installed. `otherwise` names another fix."""
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except Exception as e:  # not installed, or without a program for this platform
        reason = str(e).strip().splitlines()[:1]
        raise InputError(
            f"{key}: there is no encoder for mp4 ({''.join(reason)}): pip install 'jrl[video]', or {otherwise}"
        ) from e


def write_video(out: Path, frames: Iterable[np.ndarray], fps: float, key: str | None = None) -> int:
    """Writes frames [H, W, 3] u8 as mp4 or GIF, by the file name. An existing file is replaced at the end.

    Args:
      out: path of the file.
      frames: frames; others than the first are scaled to the size of the first.
      fps: frames per second.
      key: option that named the file, for error messages.
    Returns:
      The number of frames in the file.
    Raises:
      OSError: the file could not be written whole; with a key an InputError. A failed write leaves no file, nor does
        an exception of `frames`.
    """
    with paths.written(out, key) as part:  # the temporary file has the same suffix, which selects the encoder
        return (_write_gif if out.suffix == ".gif" else _write_mp4)(part, _unify_size(frames), fps)


def _unify_size(frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields frames of the first frame's size: others are scaled into it, with black at two sides."""
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
      OSError: the encoder failed, as on a full disk. imageio_ffmpeg's own writer does not check the exit status.
    """
    count, encoder, is_cut = 0, None, False
    with tempfile.TemporaryFile() as messages:
        try:
            for frame in frames:
                odd = [(0, side % 2) for side in frame.shape[:2]]  # sides must be even
                frame = np.ascontiguousarray(np.pad(frame, [*odd, (0, 0)], mode="edge"))
                if encoder is None:
                    encoder = _start_encoder(out, frame.shape[1::-1], fps, messages)
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
            status = 0 if encoder is None else _finish_encoder(encoder)
        if status or is_cut:
            messages.seek(0)
            lines = messages.read()[-2000:].decode(errors="replace").strip().splitlines()
            raise OSError(errno.EIO, f"the encoder failed: {lines[-1][:200] if lines else f'status {status}'}")
    return count


def _start_encoder(out: Path, size: tuple[int, ...], fps: float, messages: Any) -> subprocess.Popen:
    """Starts ffmpeg for frames of `size` (width, height); `messages` is the file of its errors."""
    import imageio_ffmpeg

    read = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[0]}x{size[1]}", "-r", f"{fps:.6f}", "-i", "-"]
    coded = ["-an", "-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "10"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *read, *coded, f"file:{out}"]
    # a new session: Ctrl-C is for the run, which ends the encoder
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=messages, start_new_session=True
    )


def _finish_encoder(encoder: subprocess.Popen) -> int:
    with contextlib.suppress(BrokenPipeError):
        assert encoder.stdin is not None
        encoder.stdin.close()
    return encoder.wait()


def _write_gif(out: Path, frames: Iterable[np.ndarray], fps: float) -> int:
    """Writes a GIF that loops forever, with at most 50 frames per second. Returns the number of frames written."""
    from PIL import Image

    every = math.ceil(fps / _GIF_FPS)
    images = [Image.fromarray(frame).quantize(method=Image.Quantize.FASTOCTREE) for frame in _take_every(frames, every)]
    duration = round(100 * every / fps) * 10
    images[0].save(out, save_all=True, append_images=images[1:], duration=duration, loop=0)
    return len(images)


def _take_every(frames: Iterable[np.ndarray], every: int) -> Iterator[np.ndarray]:
    """Yields each frame number `every`, and the last frame."""
    frame = None
    for i, frame in enumerate(frames):
        if i % every == 0:
            yield frame
    if frame is not None and i % every:
        yield frame


# ---------------------------------------------------------------- episodes


class Scene(NamedTuple):
    """Policies and the environment that they are drawn in.

    Attributes:
      actor: actor of a policy, or of all policies of several agents.
      env: one environment, or games of several agents.
    """

    actor: Actor
    env: render.Drawn | render.Games


def build_checkpoint_scene(path: str | os.PathLike[str], *, best: bool | None = None, seed: int | None = None) -> Scene:
    """Returns the scene of a checkpoint's policies.

    Args:
      path, best: as `jrl.load`.
      seed: seed of the environment, which has the options of evaluations; None: the run's seed.
    Raises:
      InputError: the checkpoint is missing, or the environment cannot be drawn.
    """
    directory = checkpoint.locate(Path(path), best=best)
    meta = checkpoint.read_meta(directory)
    cfg = config.override(meta["config"], [] if seed is None else [f"run.seed={seed}"])
    trained = load(directory) if cfg.multi_agent is None else load_all(directory)
    scene = build_training_scene(cfg, trained.spec)
    scene.actor.set_weights(trained.weights)
    return scene


def build_training_scene(cfg: RunConfig, spec: EnvSpec) -> Scene:
    """Returns the scene of a running training, whose actor has no weights yet.

    Args:
      cfg: config of the run's evaluations.
      spec: spec of the training environments.
    Raises:
      InputError: the environment cannot be drawn, or the policies cannot act in it.
    """
    if cfg.multi_agent is None:
        acting = build_training_actor(cfg, spec)
        raw_spec = spec._replace(observation=acting.observation_space)
        return Scene(acting, render.make(cfg.env, raw_spec, seed=cfg.run.seed))
    num = agents.make(cfg).whole_games(1)
    make = lambda section: build_evaluation.build_environments(dataclasses.replace(cfg, env=section), num)
    env = render.make_games(cfg.env, make, seed=cfg.run.seed)
    try:
        build_evaluation.check_spaces(env.spec, spec)
    except BaseException:
        env.close()
        raise
    return Scene(build_training_actor(cfg, env.spec, is_raw=False, seed=cfg.run.seed), env)


def play_frames(
    scene: Scene,
    *,
    episodes: int,
    max_steps: int = MAX_STEPS,
    explore: bool = False,
    on_end: Callable[[int, float, int, bool], Any] = lambda *_: None,
) -> Iterator[np.ndarray]:
    """Plays episodes and yields their frames [H, W, 3] u8.

    An episode of several agents is a whole game; its return is the sum over agents. Self-play has a block of games,
    which differ in the learner's seat or its opponent: the episodes show the games of the block in turn.

    Args:
      scene: policies and environment.
      episodes: number of episodes.
      max_steps: maximum steps of an episode.
      explore: sample as in training.
      on_end: called after each episode with its number (from 1), return, steps, and whether `max_steps` cut it.
    """
    acting, env = scene
    games = env.spec.games
    # `render.make` applies no time limit to an environment with a single agent
    longest = math.inf if isinstance(env, render.Games) else acting.config.env.limit or math.inf
    # nor repeated actions and chunks: each of their steps is a frame
    repeats, is_chunk = acting.config.env.action_repeat, acting.config.env.action_chunk > 1
    for episode in range(episodes):
        game = episode % games
        draw = functools.partial(env.render, game) if isinstance(env, render.Games) else env.render
        acting.reset()
        obs, begins = env.reset(), None
        reward: Any = None
        total, steps, done = 0.0, 0, False
        yield draw()
        while not done and steps < max_steps:
            action, reward = acting.act(obs, explore, reset=begins, reward=reward), 0.0
            for part in np.repeat(action[0] if is_chunk else [None], repeats, 0):
                result = env.step(part[None] if is_chunk else action)
                obs, reward, over = result.obs, reward + result.reward, result.terminated | result.truncated
                if result.several is not None:  # reset the memory of absent agents: it begins before their first row
                    begins, over = result.several.absent, result.several.over
                total, steps = total + float(np.asarray(result.reward).reshape(games, -1).sum(-1)[game]), steps + 1
                done = bool(over[game]) or steps >= longest
                yield draw()
                if done or steps >= max_steps:
                    break
        on_end(episode + 1, total, steps, not done)


# ---------------------------------------------------------------- of a run under way


class Videos:
    """Records videos STEPS.mp4 of a training policy, in a separate thread.

    Training waits only if the previous video is unfinished. A video that fails is left out, with a warning.

    Args:
      cfg: config of the evaluations, with their environment.
      directory: directory of the videos; made with the first video.
      episodes: episodes of each video.
    """

    def __init__(self, cfg: RunConfig, directory: Path, *, episodes: int):
        self._cfg, self._directory, self._episodes = cfg, directory, episodes
        self._stop = threading.Event()
        # one thread for all videos: an OpenGL context belongs to the thread that made it
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jrl-video")
        self._under_way: concurrent.futures.Future | None = None
        self._scene: Scene | None = None

    def prepare(self, spec: EnvSpec) -> None:
        """Makes the environment and draws its first frame; `spec` is the spec of the training environments.

        Raises:
          InputError: the environment cannot be drawn, or the encoder is not installed.
        """
        check_encoder("evaluation.record", "leave it out")
        try:
            self._scene = self._thread.submit(build_training_scene, self._cfg, spec).result()
        except InputError as e:
            raise InputError(*(f"evaluation.record: {line}" for line in e.errors)) from e

    def begin(self, weights: PyTree, steps: int) -> None:
        """Starts the video of a copy of these weights, named after `steps`, once the previous video is written."""
        if self._under_way is not None:
            self._under_way.result()
        copied = jax.tree.map(lambda x: x.copy(), weights)  # the next update donates the learner's weights
        self._under_way = self._thread.submit(self._record, copied, steps)

    def _record(self, weights: PyTree, steps: int) -> None:
        assert self._scene is not None
        out = self._directory / f"{steps}.mp4"
        try:
            self._scene.actor.set_weights(weights)
            self._directory.mkdir(parents=True, exist_ok=True)
            explore = self._cfg.rollout.explore
            frames = play_frames(self._scene, episodes=self._episodes, explore=explore, on_end=_log_episode)
            write_video(out, self._until_stopped(frames), self._scene.env.fps)
        except _Stopped:
            _log.warning("evaluation.record: the run ended before %s was finished: the video is left out", out)
        except Exception as e:  # a failed video must not end the run
            _log.warning("evaluation.record: %s could not be written: %s: %s", out, type(e).__name__, e)

    def _until_stopped(self, frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        for frame in frames:
            if self._stop.is_set():
                raise _Stopped
            yield frame

    def close(self) -> None:
        """Waits up to 30 seconds for the unfinished video, and closes the environment."""
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
    """The run ended before the video."""


def build_videos(evaluation: RunConfig, cfg: RunConfig, directory: Path | None) -> Videos | None:
    """Returns the videos of a run's evaluations; None: `evaluation.record` is 0.

    Args:
      evaluation: config of the evaluations.
      cfg: config of the run.
      directory: run directory; None: `run.out`.
    Raises:
      InputError: the run has no directory.
    """
    if not cfg.evaluation.record:
        return None
    directory = directory or (Path(cfg.run.out) if cfg.run.out else None)
    if directory is None:
        raise InputError("evaluation.record: expected a run directory for the videos, got none: set run.out")
    return Videos(evaluation, directory / "videos", episodes=cfg.evaluation.record)
