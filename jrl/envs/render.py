"""One environment with pictures, drawn by EnvPool or Gymnasium, or from the observations.

Multi-agent games draw themselves, or their agents' observations are drawn.
"""

import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jrl import spaces
from jrl.envs import pictures
from jrl.envs.backends import backends_of, resolve
from jrl.envs.context import ENDS_RUN, TRAINING, Place, seed_range
from jrl.envs.envpool_env import EnvPoolEnv, family
from jrl.envs.gym_env import GymnasiumEnv
from jrl.envs.gym_ids import make_factory
from jrl.envs.make import check, section
from jrl.envs.make import make as make_env
from jrl.errors import short
from jrl.fields.env import EnvConfig
from jrl.types import Array, Box, Dict, Env, EnvSpec, InputError, JaxEnv, Leaf, PyTree, Space, StepResult, Tuple

# families that draw without OpenGL; others are tried in a child process, which MuJoCo's renderer kills without OpenGL
_SOFTWARE = ("envpool.atari", "envpool.box2d", "envpool.classic_control", "envpool.minigrid", "envpool.toy_text")
_LONGER_SIDE = 256  # minimum pixels of an enlarged observation's longer side
_FPS = 30.0  # default
MIN_FPS, MAX_FPS = 0.01, 1000.0  # a GIF holds at most 655 s per frame; encoders take no more than a few thousand
_FPS_OBSERVED = 10.0  # speed of observations as pictures
_log = logging.getLogger(__name__)
_PROBE = "import json, sys; from jrl.envs import render; render.probe(*json.loads(sys.argv[1]))"


class Drawn(Env, Protocol):
    """One environment (B = 1) in its own action space, with pictures."""

    how: str  # name of the renderer
    fps: float  # natural speed, in steps per second

    def render(self) -> np.ndarray:
        """Draws the state of the latest observation, [H, W, 3] u8."""
        ...


def make(env: EnvConfig, spec: EnvSpec, *, seed: int = 0, around: Callable[[Any], Any] = lambda env: env) -> Drawn:
    """Makes an environment for watching a policy: the first of the following that can be made and drawn.

    The backend of the run; EnvPool or Gymnasium, if one has the same id; the backend of the run with its observations
    as pictures, if they are images (the newest of a stack).

    Args:
      env: section of a run; one environment is made, whose actions are unconverted. Another backend than the run's gets
        no options but `max_episode_steps`.
      seed: seed as in `envs.make`, with role eval.
      around: function that adds the run's options, such as `history.add_history` with its frame stack.
      spec: spec of the policy; the environment's observations and actions must match.
    Raises:
      InputError: nothing can draw it, with each reason.
    """
    own, id, options = resolve(env.id, env.backend), env.id, env.options
    if env.action_chunk > 1:  # each action of a chunk is drawn
        single = spaces.unstack_space(spec.env_action or spec.action, env.action_chunk)
        spec = spec._replace(action=single or spec.action, env_action=None)
    first = seed_range(seed, "eval")
    plain: dict[str, Any] = {"num_envs": 1, "normalize_actions": False, "clip_actions": False}
    plain["action_mask_info"] = env.action_mask_info
    errors = []
    for name in sorted(backends_of(id), key=lambda b: b != own):
        if name not in _RENDERERS:
            continue
        kept = options if name == own else {k: v for k, v in options.items() if k == "max_episode_steps"}
        try:
            one = section(id, backend=name, options={**kept, **_OPTIONS[name]}, **plain)
            drawn = _start(lambda *how, name=name: around(_RENDERERS[name](*how)), one, first, spec)
        except _CannotDraw as e:
            errors.append(f"{name}: {e}")
            continue
        if kept.keys() != options.keys():
            drawn.how += f" (without the options {', '.join(k for k in options if k not in kept)})"
        return drawn
    draw = picture(spec.observation)
    if draw is not None:
        shown: Any = make_env(id, backend=own, options=options, **plain, seed=seed, place=Place("eval"), host=True)
        return _Observed(around(shown), draw, first)
    raise InputError(f"env {id} cannot be drawn: {'; '.join(errors) or 'neither EnvPool nor Gymnasium has it'}")


class _CannotDraw(Exception):
    """The reason why an environment cannot be drawn, and the fix if the library names one."""


def _start(renderer: Callable[..., Any], cfg: EnvConfig, seed: int, spec: EnvSpec) -> Drawn:
    """Returns an environment that has drawn its first picture. Raises _CannotDraw."""
    if errors := check(cfg):
        raise _CannotDraw("; ".join(errors))
    try:
        env = renderer(cfg, seed)
    except InputError as e:
        raise _CannotDraw("; ".join(e.errors)) from e
    try:
        for what, space, wanted in (
            ("observations", env.spec.observation, spec.observation),
            ("actions", env.spec.env_action or env.spec.action, spec.env_action or spec.action),
        ):
            if _space_key(space) != _space_key(wanted):
                raise _CannotDraw(f"its {what} are {_space_key(space)}, the policy's {_space_key(wanted)}")
        env.reset()
        env.render()
    except Exception as e:  # a library can raise anything
        env.close()
        if isinstance(e, _CannotDraw):
            raise
        raise _CannotDraw(_last_line(str(e)) or type(e).__name__) from e
    return env


class Frames:
    """Conversion of a `render()` result to pictures: grey, RGBA, floats and other integers are converted.

    Floats are in [0, 1] until a value exceeds 1; from then on in [0, 255].
    """

    def __init__(self) -> None:
        self._count, self._white = 0, 1.0

    def picture(self, frame: Any) -> np.ndarray:
        """Returns a picture [H, W, 3] u8. Raises InputError: not a picture; names frame number, shape and dtype."""
        self._count += 1
        try:
            found = np.asarray(frame)
        except Exception:  # ragged rows, or a user's class
            found = np.asarray(None)
        what = "None" if frame is None else f"{type(frame).__name__} {list(found.shape)} of {found.dtype}"
        if found.ndim == 2:
            found = found[:, :, None]
        if found.ndim != 3 or found.shape[2] not in (1, 3, 4) or not found.size or found.dtype.kind not in "buif":
            raise self._error(what)
        found = np.repeat(found, 3, 2) if found.shape[2] == 1 else found[:, :, :3]
        if found.dtype.kind == "b":
            found = found * 255
        elif found.dtype.kind == "f":
            found = np.nan_to_num(found.astype(np.float64))
            self._white = 255.0 if found.max() > 1 else self._white
            found = np.rint(np.clip(found / self._white, 0, 1) * 255)
        elif found.dtype != np.uint8 and not 0 <= found.min() <= found.max() <= 255:
            raise self._error(f"{what} from {found.min()} to {found.max()}")
        return np.ascontiguousarray(found, np.uint8)

    def _error(self, what: str) -> InputError:
        return InputError(
            f"render(): frame {self._count} is {what}: return a picture [H, W], [H, W, 3] or [H, W, 4], uint8 in "
            "[0, 255] or floats in [0, 1]"
        )


def metadata_fps(metadata: Any) -> float:
    """Returns the frames per second in an environment's metadata, which can be any object; 30 by default."""
    value = metadata.get("render_fps") if isinstance(metadata, Mapping) else None
    if value is None:
        return _FPS
    try:
        fps = float(value)
    except (TypeError, ValueError, OverflowError):
        fps = math.nan
    if MIN_FPS <= fps <= MAX_FPS:
        return fps
    _log.warning("metadata render_fps: expected a number above 0, got %s: using %g", short(value), _FPS)
    return _FPS


def _space_key(space: Space) -> tuple:
    """Returns the parts of a space that must match: all but the bounds."""
    if isinstance(space, Dict):
        return (type(space).__name__, {name: _space_key(part) for name, part in space.items})
    if isinstance(space, Tuple):
        return (type(space).__name__, *map(_space_key, space.items))
    return (type(space).__name__, space.shape, space.dtype, getattr(space, "n", None), getattr(space, "nvec", None))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


# ---------------------------------------------------------------- EnvPool


class _EnvPool(EnvPoolEnv):
    how = "EnvPool"

    def __init__(self, cfg: EnvConfig, seed: int):
        super().__init__(cfg, seed=seed)
        self._pool._render_mode = "rgb_array"  # the only effect of `envpool.make(render_mode=...)`
        self.fps = 60.0 / self._pool.config.get("frame_skip", 4) if _is_atari(cfg.id) else _native_fps(cfg.id)

    def render(self) -> np.ndarray:
        return self._pool.render()[0]


def _envpool(cfg: EnvConfig, seed: int) -> _EnvPool:
    if not family(cfg.id).startswith(_SOFTWARE):
        reason = _probe(cfg.id, cfg.options)
        if reason:
            raise InputError(f"its renderer fails here: {reason}")
    return _EnvPool(cfg, seed)


def _probe(id: str, options: dict[str, Any]) -> str:
    """Returns why EnvPool cannot draw an environment, "" if it can; tried in a child process, which may crash."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # on the CPU: the child must not take the accelerator's memory
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", _PROBE, json.dumps([id, options])]
    with tempfile.TemporaryDirectory() as scratch:  # MuJoCo writes a log to the current directory
        child = subprocess.run(
            command, cwd=scratch, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    return (_last_line(child.stdout) or f"exit status {child.returncode}") if child.returncode else ""


def probe(id: str, options: dict[str, Any]) -> None:
    """Draws one picture by EnvPool. Call it in a child process: it may crash."""
    env = _EnvPool(EnvConfig(id, "envpool", 1, options), 0)
    env.reset()
    env.render()


def _is_atari(id: str) -> bool:
    return family(id).startswith("envpool.atari")


def _native_fps(id: str) -> float:
    """Returns the frames per second of Gymnasium's environment of the same id, if any."""
    import gymnasium

    try:
        entry: Any = gymnasium.spec(id).entry_point
        creator: Any = gymnasium.envs.registration.load_env_creator(entry)
        return metadata_fps(creator.metadata)
    except Exception:  # unknown id, a missing package, or no metadata
        return _FPS


# ---------------------------------------------------------------- Gymnasium


class _Gymnasium(GymnasiumEnv):
    how = "Gymnasium"

    def __init__(self, cfg: EnvConfig, seed: int):
        _without_devices()
        super().__init__(cfg, make_factory(cfg, seed=seed, place=TRAINING), seed=seed, on_failure=ENDS_RUN)
        self.fps = metadata_fps(self._vector.metadata)
        self._frames = Frames()

    def render(self) -> np.ndarray:
        frames: Any = self._vector.render()
        return self._frames.picture(frames[0])


def _without_devices() -> None:
    """Lets libraries draw without a screen and a loudspeaker."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo would look for a screen
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # pygame would look for a loudspeaker


_RENDERERS: dict[str, Callable[..., Any]] = {"envpool": _envpool, "gymnasium": _Gymnasium}
_OPTIONS: dict[str, dict[str, Any]] = {"envpool": {}, "gymnasium": {"render_mode": "rgb_array"}}


# ---------------------------------------------------------------- observations as pictures


def picture(space: Space) -> Callable[[PyTree], np.ndarray] | None:
    """Returns the function from an observation to a picture [H, W, 3] u8 of at least 256 pixels; None: no image.

    Of several arrays, the first image is drawn.

    Images have two axes, or a third for channels, the smaller of first and last. Three channels are colours; of other
    counts the last channel is drawn, the newest of a frame stack. Floats are images if both bounds are finite numbers,
    with 1 or 3 channels only: more channels may be layers of different meaning.
    """
    if isinstance(space, Dict | Tuple):
        drawn = [_picture(leaf) for _, leaf in spaces.leaves(space)]
        found = [(i, draw) for i, draw in enumerate(drawn) if draw is not None]
        return (lambda obs: found[0][1](jax.tree.leaves(obs)[found[0][0]])) if found else None
    return _picture(space)


def _picture(space: Leaf) -> Callable[[np.ndarray], np.ndarray] | None:
    if not isinstance(space, Box) or len(space.shape) not in (2, 3) or min(space.shape) < 1:
        return None
    low, high = (float(b.min()) for b in space.bounds())
    pixels = space.dtype == "uint8"
    if not pixels and not (math.isfinite(low) and math.isfinite(high) and low < high):
        return None
    first = len(space.shape) == 3 and spaces.channel_axis(space) == 0
    channels = 1 if len(space.shape) == 2 else space.shape[0 if first else -1]
    if not pixels and channels not in (1, 3):
        return None

    def draw(obs: np.ndarray) -> np.ndarray:
        image = obs if pixels else np.clip((obs - low) / (high - low), 0, 1) * 255
        if image.ndim == 2:
            image = image[:, :, None]
        elif first:
            image = np.moveaxis(image, 0, -1)
        if channels != 3:
            image = np.repeat(image[:, :, -1:], 3, -1)
        factor = max(1, math.ceil(_LONGER_SIDE / max(image.shape[:2])))
        return image.astype(np.uint8).repeat(factor, 0).repeat(factor, 1)

    return draw


class _Stepped:
    """Environments of any backend, and their latest observations."""

    def __init__(self, env: JaxEnv | Env, seed: int):
        self.spec, self._env = env.spec, env
        self._key, self._count = jax.random.key(seed), 0
        self._obs: PyTree = None
        if isinstance(env, JaxEnv):
            self._state: PyTree = None
            self._jax_reset, self._jax_step = jax.jit(env.reset), jax.jit(env.step)

    def reset(self) -> PyTree:
        if isinstance(self._env, JaxEnv):
            self._state, self._obs = self._jax_reset(self._next_key())
        else:
            self._obs = self._env.reset()
        return self._obs

    def step(self, action: Array) -> StepResult:
        if isinstance(self._env, JaxEnv):
            self._state, result = self._jax_step(self._state, action, self._next_key())
        else:
            result = self._env.step(action)
        self._obs = result.obs
        return result

    def close(self) -> None:
        self._env.close()

    def _next_key(self) -> jax.Array:
        self._count += 1
        return jax.random.fold_in(self._key, self._count)


class _Observed(_Stepped):
    """An environment of any backend, drawn from its observations."""

    how, fps = "its own observations", _FPS_OBSERVED

    def __init__(self, env: JaxEnv | Env, draw: Callable[[np.ndarray], np.ndarray], seed: int):
        super().__init__(env, seed)
        self._draw = draw

    def render(self) -> np.ndarray:
        return self._draw(jax.tree.map(lambda x: np.asarray(x)[0], self._obs))


# ---------------------------------------------------------------- multi-agent games


class Games(_Stepped):
    """Multi-agent games of a run for watching; `make_games` selects the renderer.

    Attributes:
      how, fps: as in `Drawn`.
    """

    def __init__(self, env: JaxEnv | Env, id: str, seed: int):
        super().__init__(env, seed)
        self.reset()
        errors = []
        for how, fps, draw in self._list_renderers():
            self.how, self.fps, self._draw, self._frames = how, fps, draw, Frames()
            try:
                self.render(0)
                return
            except Exception as e:  # a library can raise anything
                errors.append(f"{self.how}: {_last_line(str(e)) or type(e).__name__}")
        if isinstance(env, JaxEnv) and env.draw is None:
            errors.append("it has no picture of its own (a MultiDefinition's draw)")
        raise InputError(f"env {id} cannot be drawn: {'; '.join(errors)}; its agents do not observe images either")

    def _list_renderers(self) -> Iterator[tuple[str, float, Callable[[int], np.ndarray]]]:
        """Yields the renderers: name, frames per second, function from a game's index to its picture."""
        env: Any = self._env
        if not isinstance(env, JaxEnv):
            fps = metadata_fps(getattr(env.games[0].env, "metadata", None))
            yield "its own render()", fps, lambda i: env.games[i].render()
        elif (draw := env.draw) is not None:
            yield "its own picture", env.fps, lambda i: draw(self._state, i)
        own = [(picture(one.observation), max(1, len(one.agents))) for one in spaces.by_kind(self.spec)]
        if any(draw is not None for draw, _ in own):
            yield "its agents' observations", _FPS_OBSERVED, lambda i: self._draw_observations(own, i)

    def _draw_observations(
        self, own: list[tuple[Callable[[PyTree], np.ndarray] | None, int]], number: int
    ) -> np.ndarray:
        """Draws the observations of a game's agents that observe images, side by side."""
        found = []
        for (draw, count), obs in zip(own, spaces.parts_by_kind(self.spec, self._obs), strict=True):
            if draw is not None:
                own_rows = jax.tree.map(lambda x, n=count: np.asarray(x)[number * n : (number + 1) * n], obs)
                found += [draw(jax.tree.map(lambda x, j=j: x[j], own_rows)) for j in range(count)]
        return pictures.side_by_side(found)

    def render(self, number: int) -> np.ndarray:
        """Draws the state of a game, [H, W, 3] u8."""
        return self._frames.picture(self._draw(number))


def make_games(env: EnvConfig, make: Callable[[EnvConfig], JaxEnv | Env], *, seed: int = 0) -> Games:
    """Makes multi-agent games for watching.

    Args:
      env: section of a run.
      make: function from a section to the environments, with all options of the run. Libraries' environments get the
        option `render_mode`, if they accept it.
      seed: seed of the keys of environments written in JAX.
    Raises:
      InputError: they cannot be made, or nothing can draw them.
    """
    _without_devices()
    try:
        made = make(dataclasses.replace(env, options={**env.options, **_OPTIONS["gymnasium"]}))
    except InputError:  # perhaps the option is unknown
        made = make(env)
    try:
        return Games(made, env.id, seed_range(seed, "eval"))
    except BaseException:
        made.close()
        raise
