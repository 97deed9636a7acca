"""EnvPool (https://github.com/sail-sg/envpool): as host environments, and inside a program by its XLA interface."""

import contextlib
import difflib
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from jrl.envs import spec as spaces
from jrl.envs.infos import Infos, find_mask
from jrl.errors import cannot_import
from jrl.fields.env import EnvConfig
from jrl.spaces import ACTION_MASK
from jrl.types import Array, Discrete, EnvSpec, InputError, JaxEnv, PyTree, Several, Space, StepResult, element

_RESERVED = ("num_envs", "seed", "env_seed", "batch_size", "max_num_players", "base_path", "gym_reset_return_info")
_TINY = ("envpool.classic_control", "envpool.toy_text")
_UNLIMITED = 2**31 - 1
# On an H100 (EnvPool 1.2.7, jax 0.11.2), 1024 steps of 8, 64 and 128 CartPoles in a program equalled the host's; with
# 256 and more, all results or the ends were wrong, see `jrl.learn.parallel._CALLS`.
_MOST_ON_ACCELERATOR = 64


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _quiet_make_spec(envpool: Any, id: str) -> Any:
    return envpool.make_spec(id)  # cached: takes 0.1 s for an Atari game


def _spec(id: str) -> Any:
    """Returns EnvPool's spec of an environment without options."""
    return _quiet_make_spec(load_envpool(), id)


def ids() -> tuple[str, ...]:
    """Returns every id of EnvPool; empty if it is not installed."""
    try:
        envpool = load_envpool()
    except ImportError:
        return ()
    return tuple(envpool.list_all_envs())


def missing() -> str:
    """Returns why EnvPool cannot be imported, with the fix; "" if it can."""
    try:
        load_envpool()
    except ImportError as e:
        return cannot_import("envpool", e)
    return ""


def family(id: str) -> str:
    """Returns the module of an id: `envpool.atari`, `envpool.classic_control`, ..."""
    with _quiet():
        # the class itself is made at run time; its base class is compiled and has the module
        return type(_spec(id)).__mro__[1].__module__


def num_players(id: str) -> int:
    """Returns the number of players of a game; 1 for other environments, and for a family that cannot be imported."""
    try:
        with _quiet():
            return int(_spec(id).config.max_num_players)
    except (ImportError, AttributeError, RuntimeError):  # making the environment reports the reason
        return 1


def has_agents(cfg: EnvConfig) -> bool:
    """Returns whether the games have several players."""
    return num_players(cfg.id) > 1


def make(cfg: EnvConfig, *, seed: int, host: bool, state: bool, **unused: Any) -> Any:
    """Makes a pool; the JaxEnv of a pool that can be stepped in a program, unless `host`."""
    if has_agents(cfg):
        return EnvPoolGames(cfg, seed=seed, state=state)
    if cfg.batch_size is not None and cfg.batch_size < cfg.num_envs:
        return AsyncEnvPoolEnv(cfg, seed=seed)
    pool = EnvPoolEnv(cfg, seed=seed)
    return pool if host else pool.to_jax() or pool


def check(cfg: EnvConfig) -> list[str]:
    """Returns faults in the options, each with its fix."""
    id, options = cfg.id, cfg.options
    with _quiet():
        spec = _spec(id)
    known = [k for k in spec._config_keys if k not in _RESERVED]
    errors = []
    if spec.config.max_num_players > 1 and "max_episode_steps" in options:
        errors.append(f"env.options.max_episode_steps: EnvPool's {id} continues beyond it: leave it out")
    for key in options:
        if key in _RESERVED:
            own = "env.batch_size" if key == "batch_size" else "env.num_envs and run.seed"
            errors.append(f"env.options.{key}: set by jrl, from {own}: leave it out")
        elif key not in known:
            near = difflib.get_close_matches(key, known, 1)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            errors.append(f"env.options.{key}: EnvPool's {id} has no such option: {fix}")
    return errors


class Frames(NamedTuple):
    """Stacks of grey Atari images: [size, H, W], the newest frame last."""

    size: int  # frames per stack
    restarts: bool  # a stack restarts with each episode; EnvPool's with episodic_life continues after a lost life


def goal_reward(cfg: EnvConfig) -> Callable[[Array, Array], tuple[Array, Array]] | None:
    """Returns the rewards of Gymnasium-Robotics' Fetch and HandReach tasks, which never end; None: other tasks."""
    if not cfg.id.startswith(("Fetch", "HandReach")):
        return None
    with _quiet():
        config = _spec(cfg.id).config
    value = lambda name: cfg.options.get(name, getattr(config, name))
    is_sparse, threshold = value("reward_type") == "sparse", value("distance_threshold")

    def reward(achieved: Array, desired: Array) -> tuple[Array, Array]:
        distance = jnp.linalg.norm(achieved - desired, axis=-1)
        return -(distance > threshold).astype(jnp.float32) if is_sparse else -distance, jnp.zeros(len(distance), bool)

    return reward


def stacked_frames(env: EnvConfig) -> Frames | None:
    """Returns the frame stacks of an Atari game, EnvPool's or `env.frame_stack`'s.

    None: colours, no stacks, or both kinds of stack.
    """
    with _quiet():
        config = _spec(env.id).config
    value = lambda name: env.options.get(name, getattr(config, name))
    size = int(value("stack_num"))
    if not value("gray_scale") or (size > 1) == (env.frame_stack > 1):
        return None
    return Frames(env.frame_stack, True) if env.frame_stack > 1 else Frames(size, not value("episodic_life"))


def limit_steps(id: str, options: dict[str, Any], horizon: int | None) -> dict[str, Any]:
    """Returns the options that limit episodes to `horizon` steps.

    A smaller `max_episode_steps` stays, if the task knows its own before an episode begins; some BabyAI tasks report 0.

    Raises:
      InputError: the environment does not end at its limit.
    """
    if horizon is None:
        return options
    with _quiet():
        own = options.get("max_episode_steps", _spec(id).config.max_episode_steps)
    is_game = num_players(id) > 1  # games do not end at their limit
    if own and own <= horizon and not is_game:
        return options
    if is_game or not _ends_at_limit(id):
        raise InputError(
            f"env.horizon: EnvPool's {id} continues beyond max_episode_steps: use another env.backend, or leave it out"
        )
    return {**options, "max_episode_steps": horizon}


@functools.cache
def _ends_at_limit(id: str) -> bool:
    """Returns whether an episode limited to one step ends with it.

    Episodes of Catch-v0, CliffWalking-v1 and Highway last longer, and report their true end as a time limit.
    """
    pool = _pool(EnvConfig(id, "envpool", 1, {"max_episode_steps": 1}), 0, None)
    try:
        action = _action_space(pool)
        pool.reset()
        zeros = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), element(action.space))
        _, _, terminated, truncated, _ = pool.step(action.convert(zeros))
        return bool(terminated[0] | truncated[0])
    finally:
        pool.close()


def _pool(cfg: EnvConfig, seed: int, batch_size: int | None) -> Any:
    id, envpool, options = cfg.id, load_envpool(), limit_steps(cfg.id, cfg.options, cfg.horizon)
    with _quiet():
        # for steps of a microsecond, a second thread costs more than it gains, up to hundreds of environments
        threads = 1 if family(id).startswith(_TINY) else min(cfg.num_envs, os.cpu_count() or 1)
        settings = {"num_threads": threads, **options}
        if batch_size is not None:
            settings["batch_size"] = batch_size
        try:
            return envpool.make(id, env_type="gymnasium", num_envs=cfg.num_envs, seed=seed, **settings)
        except (TypeError, ValueError, ImportError) as e:
            reason = cannot_import("envpool", e) if isinstance(e, ModuleNotFoundError) else e
            raise InputError(f"env.id {id}: EnvPool cannot make it with options {options}: {reason}") from e


def _action_space(pool: Any) -> spaces.Converted:
    """Returns the pool's action space, with the dtype that its step takes: that of its last key."""
    with _quiet():
        space = pool.action_space
    return spaces.convert_action_space(space, list(pool.spec.action_array_spec.values())[-1].dtype)


def info_shapes(pool: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of one environment's infos, by name."""
    found = {name[5:]: tuple(x.shape) for name, x in pool.spec.state_array_spec.items() if name.startswith("info:")}
    return {name: shape for name, shape in found.items() if "env_id" not in name and -1 not in shape}


class Pool:
    """Conversion between jrl's spaces and EnvPool's around a pool. `spec` is the environment's, without options.

    Args:
      cfg: section checked by `jrl.envs.check`.
      seed: environment i gets seed + i.
      batch_size: number of environments that a step waits for; None: all.
    Raises:
      InputError: an unsupported space, a pool that cannot be made, or one that does not end at its limit.
    """

    def __init__(self, cfg: EnvConfig, *, seed: int, batch_size: int | None = None):
        self._pool: Any = _pool(cfg, seed, batch_size)
        self.infos = Infos(cfg.num_envs)
        try:
            with _quiet():
                observed = self._pool.observation_space
            observation, action = spaces.convert_observation_space(observed), _action_space(self._pool)
            name = self._find_mask(cfg.id, cfg.action_mask_info, observed, action.space)
            if name is not None:
                observation = spaces.add_info_mask(observation, info_shapes(self._pool)[name])
            observation, action = spaces.flatten_mask(observation, action)
        except InputError:
            self._pool.close()
            raise
        convert, self._convert_action = observation.convert, action.convert
        # (raw observations, infos) -> observations [B, *]
        self._observe: Callable[[Any, dict[str, Any]], PyTree] = (
            (lambda obs, info: convert(obs)) if name is None else lambda obs, info: convert((obs, info[name]))
        )
        limit = int(self._pool.spec.config.max_episode_steps)
        self.spec = EnvSpec(observation.space, action.space, cfg.num_envs, None if limit == _UNLIMITED else limit)

    def _find_mask(self, id: str, name: str | None, observed: Any, action: Space) -> str | None:
        """Returns the key of the mask in the infos; None: no mask."""
        found = find_mask(name, observed, action, id, lambda: info_shapes(self._pool))
        return None if found is None else found[0]

    def _action(self, action: PyTree, num_envs: int) -> Any:
        """Returns the action in EnvPool's dtype. Raises ValueError: it is not of `spec.action`."""
        action = spaces.to_numpy(action)
        spaces.check_action(self.spec.action, num_envs, action)
        return self._convert_action(action)

    def close(self) -> None:
        """Drops the pool; its threads end when no reference is left."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


class EnvPoolEnv(Pool):
    """Synchronous EnvPool environments, on the host or inside a program."""

    def __init__(self, cfg: EnvConfig, *, seed: int):
        super().__init__(cfg, seed=seed)
        self._in_program = False
        self._xla_step: Any = None  # holds a reference to the pool

    def close(self) -> None:
        """Drops the pool after the programs that step it are done."""
        if self._in_program and self._pool is not None:
            _wait()
            _latest_closed[:] = [self._pool]
        self._xla_step = None
        super().close()

    def reset(self) -> PyTree:
        """Begins new episodes; return observations [B, *]."""
        self._check_on_host()
        obs, info = self._pool.reset()
        self.infos.set_from_pool(info)
        return self._observe(obs, info)

    def step(self, action: PyTree) -> StepResult:
        """Steps all environments. Raises ValueError: the action's shape, dtype or range is not of `spec.action`."""
        self._check_on_host()
        obs, reward, terminated, truncated, info = self._pool.step(self._action(action, self.spec.num_envs))
        self.infos.set_from_pool(info)
        return StepResult(self._observe(obs, info), _reward(reward, info), terminated, truncated)

    def _check_on_host(self) -> None:
        if self._in_program:
            raise RuntimeError("this pool belongs to a program: step it there, or make another pool")

    def to_jax(self) -> JaxEnv | None:
        """Returns the pool inside a program; None: several players, a TPU, or many environments on another accelerator.

        The state is a token that orders the steps. The pool is a constant of the program, so trace one pool into one
        program only. `reset` runs on the host and ignores its key: the pool was seeded when made.
        """
        backend = jax.default_backend()
        if backend == "tpu" or (backend != "cpu" and self.spec.num_envs > _MOST_ON_ACCELERATOR):
            return None
        # x64: EnvPool refuses MuJoCo's float64 actions as float32
        try:
            with jax.enable_x64(True):
                handle, _, _, self._xla_step = self._pool.xla()
        except RuntimeError:
            return None
        self._in_program = True
        token = np.array(handle)
        observe, convert_action = self._observe, self._convert_action

        # jax keeps these functions for the rest of the process: they hold `self`, whose pool `close` drops
        def reset(key: jax.Array) -> tuple[jax.Array, PyTree]:
            obs = observe(*self._pool.reset())
            # copies: EnvPool reuses the memory for its next results
            return jnp.array(token, copy=True), jax.tree.map(lambda x: jnp.array(x, copy=True), obs)

        @_opaque
        def pool_step(state: jax.Array, action: PyTree) -> tuple[jax.Array, StepResult]:
            with jax.enable_x64(True):
                state, (obs, reward, terminated, truncated, info) = self._xla_step(state, convert_action(action))
                obs, reward = observe(obs, info), _reward(reward, info)
            return state, StepResult(obs, reward, terminated, truncated)

        def step(state: jax.Array, action: PyTree, key: jax.Array) -> tuple[jax.Array, StepResult]:
            spaces.check_action(self.spec.action, self.spec.num_envs, action)  # while tracing: shape and dtype
            return pool_step(state, action)

        return JaxEnv(self.spec, reset, step, self.close, pure=False)


class AsyncEnvPoolEnv(Pool):
    """Asynchronous host environments: `batch_size` of them answer at a time; a `jrl.types.AsyncEnv`.

    EnvPool waits for exactly `batch_size` environments, for ever if fewer are under way; such a `recv` raises.
    """

    def __init__(self, cfg: EnvConfig, *, seed: int):
        assert cfg.batch_size is not None
        super().__init__(cfg, seed=seed, batch_size=cfg.batch_size)
        self.batch_size = self.least = cfg.batch_size
        self._under_way = np.zeros(cfg.num_envs, bool)
        self._stale = np.zeros(cfg.num_envs, bool)  # the step under way was sent before the latest reset

    def reset(self) -> None:
        """Begins new episodes in all environments. Steps under way are finished first; their results are dropped."""
        self._stale = self._under_way.copy()
        self._pool._reset(np.flatnonzero(~self._under_way).astype(np.int32))
        self._under_way[:] = True

    def send(self, action: PyTree, env_id: Array) -> None:
        """Sends actions [n, *] to the environments `env_id` [n] i32.

        Raises:
          ValueError: the shape, dtype or range is not that of `spec.action`, or an environment is under way.
        """
        env_id = np.asarray(env_id, np.int32)
        action = self._action(action, len(env_id))
        if self._under_way[env_id].any() or len(np.unique(env_id)) < len(env_id):
            under_way = np.flatnonzero(self._under_way).tolist()
            raise ValueError(f"environments {env_id.tolist()}: {under_way} are under way: send each idle one an action")
        self._under_way[env_id] = True
        self._pool.send(action, env_id)

    def recv(self) -> tuple[np.ndarray, StepResult]:
        """Returns `env_id` [n] i32 and results [n, *]. Raises RuntimeError: fewer than `least` are under way."""
        if self._under_way.sum() < self.least:
            raise RuntimeError(
                f"recv: expected {self.least} environments under way, got {self._under_way.sum()}: send more actions"
            )
        while True:
            obs, reward, terminated, truncated, info = self._pool.recv()
            self.infos.set_from_pool(info)
            env_id = np.array(info["env_id"], np.int32)
            result = StepResult(self._observe(obs, info), _reward(reward, info), terminated, truncated)
            stale = self._stale[env_id]
            if stale.any():
                self._stale[env_id] = False
                self._pool._reset(env_id[stale])
                env_id = env_id[~stale]
                result = jax.tree.map(lambda x: x[~stale], result)  # noqa: B023  called at once
            if len(env_id):
                self._under_way[env_id] = False
                return env_id, result


# The latest closed pool, kept alive: a program knows only its address, and a step whose results are not referenced is
# invisible to `_wait` and must not use freed memory.
_latest_closed: list[Any] = []


def _wait() -> None:
    """Waits until all dispatched computations are done: a running step has its latest state as a live array."""
    for x in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # a deleted array, or a program's error, which is reported elsewhere
            x.block_until_ready()


def _opaque(fn: Callable) -> Callable:
    """Makes `fn` one operation whose side effects are hidden from jax, but not from XLA.

    jax dispatches programs with known effects from Python, at 0.5 ms per call: more than ten steps of eight CartPoles.
    The state's token keeps the steps in order, and every step's results are used.
    """
    primitive = jax.extend.core.Primitive("envpool_step")
    primitive.multiple_results = True
    flat = lambda *args: jax.tree.leaves(fn(*args))

    def abstract(*avals):
        found = jax.eval_shape(flat, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in found]

    def batched(*_, **__):
        raise InputError(
            "jax.vmap: expected environments whose state is in the program, got EnvPool's, whose state is outside: "
            'use envs.make(..., backend="jax"), or one pool with more environments'
        )

    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(flat, multiple_results=True))

    def call(*args):
        out = jax.tree.structure(jax.eval_shape(fn, *args))
        return jax.tree.unflatten(out, primitive.bind(*args))

    return call


def _reward(reward: Any, info: dict[str, Any]) -> Any:
    """Returns rewards f32, 0 on the step that resets: EnvPool's dm_control returns the last reward or garbage there."""
    xp = reward.__array_namespace__()  # numpy or jax.numpy
    return xp.where(info["elapsed_step"] != 0, reward.astype("float32"), xp.float32(0.0))


# ---------------------------------------------------------------- games of several players
#
# EnvPool returns a row per player and a row per game, in the order in which its threads finish; `env_id` is the game of
# each. Here they are sorted: player k of game i has index i * P + k. All players of a game end with it.
#
# Some games take an action of each player. In the others, players take turns, and `current_player` moves. A waiting
# player has an ordinary transition whose action_mask allows only the last action, as in `jrl.envs.multi_host`.

_LEGAL = "legal_action_mask"  # default key of the moving player's mask in the infos


class EnvPoolGames(Pool):
    """A `jrl.types.Env` of games of P players. `cfg.num_envs` counts games.

    Raises:
      InputError: see `Pool`; `state`, because there is no global state; players who take turns with actions that are
        not Discrete.
    """

    def __init__(self, cfg: EnvConfig, *, seed: int, state: bool = False):
        if state:
            raise InputError(f"multi_agent.state: EnvPool's {cfg.id} has no global state: leave it out")
        super().__init__(cfg, seed=seed)
        self._games, self._players = cfg.num_envs, num_players(cfg.id)
        self._key = next(name for name in self._pool.spec.action_array_spec if not name.endswith("env_id"))
        self._choices: int | None = None  # number of moves; None: all players act on each step
        self._legal = _LEGAL
        try:
            observation, action = self._player_spaces(cfg)
        except InputError:
            self.close()
            raise
        agents = tuple(f"player_{k}" for k in range(self._players))
        # no time limit: the games accept max_episode_steps, but continue beyond it
        self.spec = EnvSpec(observation, action, self._games * self._players, agents=agents)
        self._over = np.zeros(self._games, bool)
        self._current = np.zeros(self._games, np.int32)  # moving player

    def _player_spaces(self, cfg: EnvConfig) -> tuple[Space, Space]:
        """Returns the spaces of a player; if players take turns, with the waiting action and the mask."""
        observation, action = self.spec.observation, self.spec.action
        if self._key.startswith("players."):
            if cfg.action_mask_info is not None:
                reason = f"all its players act at once, without a mask in {cfg.action_mask_info}"
                raise InputError(f"env.action_mask_info: {cfg.id} has several agents, {reason}: leave it out")
            return observation, action
        infos = info_shapes(self._pool)
        if "current_player" not in infos or not isinstance(action, Discrete):
            raise InputError(
                f"env.id {cfg.id}: expected Discrete actions and infos with current_player, got {action} and "
                f"{', '.join(infos)}: use a game whose players take turns this way, or all act at once"
            )
        self._legal, self._choices = cfg.action_mask_info or _LEGAL, action.n
        with _quiet():
            find_mask(self._legal, self._pool.observation_space, action, cfg.id, lambda: infos)
        waiting = Discrete(action.n + 1)
        return spaces.add_mask_space(observation, (waiting.n,)), waiting

    def _find_mask(self, id: str, name: str | None, observed: Any, action: Space) -> str | None:
        """Returns None: the infos have one mask per game, the moving player's, and none per player."""
        return None

    def reset(self) -> PyTree:
        """Begins new games; return observations [B, *]."""
        obs, info = self._pool.reset()
        self._over[:] = False
        return self._build_observations(obs, info, np.argsort(info["env_id"]))

    def step(self, action: PyTree) -> StepResult:
        """Steps all games. Raises ValueError: the action is not of `spec.action`, or the moving player waits."""
        pool_action = self._pool_action(self._action(action, self.spec.num_envs))
        obs, reward, terminated, truncated, info = self._pool.step(pool_action)
        order = np.argsort(info["env_id"])
        obs = self._build_observations(obs, info, order)
        to_all = lambda x: np.repeat(x, self._players)
        fresh = info["elapsed_step"][order] == 0  # steps that begin a game
        terminated, truncated = terminated[order], truncated[order]
        self._over = terminated | truncated
        earned = np.where(to_all(fresh), np.float32(0), reward[_by_game(info)].astype(np.float32))
        several = Several(to_all(fresh), self._over, to_all(~self._over))
        return StepResult(obs, earned, to_all(terminated), to_all(truncated), several=several)

    def _pool_action(self, action: Array) -> dict[str, Array]:
        """Returns actions [B] as the pool takes them: of each player, or of the moving players."""
        games = np.arange(self._games, dtype=np.int32)
        if self._choices is None:
            return {self._key: action, "env_id": games, "players.env_id": np.repeat(games, self._players)}
        moves = action.reshape(self._games, self._players)[games, self._current]
        if (waits := (moves == self._choices) & ~self._over).any():
            game = int(waits.argmax())
            raise ValueError(
                f"game {game}: player_{self._current[game]}: expected a move, got the waiting action, which its "
                "action_mask forbids"
            )
        moves = np.where(self._over, 0, moves).astype(action.dtype)  # the next step of an ended game begins a new game
        return {self._key: moves, "env_id": games, "players.env_id": games}

    def _build_observations(self, obs: Any, info: dict[str, Any], order: Array) -> PyTree:
        """Returns the observations of all players; `order` [G] sorts the rows of games."""
        self.infos.set_from_pool(info)
        rows = _by_game(info)
        obs = self._observe(jax.tree.map(lambda x: x[rows], obs), info)
        if self._choices is None:
            return obs
        self._current = info["current_player"][order]
        moves = self._current[:, None, None] == np.arange(self._players)[:, None]  # [G, P, 1]
        legal = (info[self._legal][order] != 0).reshape(self._games, 1, self._choices)
        mask = np.concatenate([legal & moves, ~moves], -1).reshape(self.spec.num_envs, -1)
        return {**(obs if isinstance(obs, dict) else {"obs": obs}), ACTION_MASK: mask}


def _by_game(info: dict[str, Any]) -> Array:
    """Returns the order of the players' rows that groups them by game."""
    return np.argsort(info["players"]["env_id"], kind="stable")


# ---------------------------------------------------------------- import of the library
#
# `import envpool` loads the compiled library of every task family (and matplotlib), because each package
# `envpool.FAMILY` holds the `registration.py` with its ids. That takes a second. Here a family is loaded when its first
# attribute is used.


def load_envpool() -> Any:
    """Imports the module `envpool`. Raises ImportError: it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "envpool" in sys.modules:
            import envpool
        else:
            with _families_deferred():
                import envpool
    return envpool


@contextlib.contextmanager
def _families_deferred() -> Iterator[None]:
    finder = _Families()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Families(importlib.abc.MetaPathFinder):
    """Finds EnvPool's packages that have a registration."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("envpool."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None or spec.origin is None or spec.submodule_search_locations is None:
            return None
        if not (Path(spec.origin).parent / "registration.py").is_file():
            return None
        spec.loader = _Deferred(spec.loader)
        return spec


class _Deferred(importlib.abc.Loader):
    """Executes a module at the first access to a missing attribute."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader, self._lock = loader, threading.RLock()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            # the interpreter looks for dunder names in every module: they must not load the family
            if not (name.startswith("__") and name.endswith("__")):
                with self._lock:
                    if module.__dict__.pop("__getattr__", None) is not None:
                        module.__loader__ = self._loader
                        if module.__spec__ is not None:
                            module.__spec__.loader = self._loader
                        try:
                            self._loader.exec_module(module)
                        except BaseException:  # keep the hook, so that the next access raises the same error
                            module.__dict__["__getattr__"] = __getattr__
                            raise
                if name in module.__dict__:
                    return module.__dict__[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__dict__["__getattr__"] = __getattr__
