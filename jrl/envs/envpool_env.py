"""EnvPool (https://github.com/sail-sg/envpool): as host environments, and inside a program by its XLA interface."""

import contextlib
import difflib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from jrl.envs import envpool_import, masks
from jrl.envs import spec as spaces
from jrl.envs.vector import Infos
from jrl.errors import cannot_import
from jrl.fields.env import EnvConfig
from jrl.types import Array, EnvSpec, InputError, JaxEnv, PyTree, Space, StepResult, element

_RESERVED = ("num_envs", "seed", "env_seed", "batch_size", "max_num_players", "base_path", "gym_reset_return_info")
_TINY = ("envpool.classic_control", "envpool.toy_text")
_UNLIMITED = 2**31 - 1
# On an H100 (EnvPool 1.2.7, jax 0.11.2) 1024 steps of 8, 64 and 128 CartPoles in a program were those of the host; of
# 256 and more all was wrong, or the ends alone: see `jrl.learn.parallel._CALLS`, which has not been measured.
_MOST_ON_ACCELERATOR = 64


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _said(envpool: Any, id: str) -> Any:
    return envpool.make_spec(id)  # of an Atari game it takes a tenth of a second


def _spec(id: str) -> Any:
    """Returns what EnvPool says of an environment without options."""
    return _said(envpool_import.load(), id)


def ids() -> tuple[str, ...]:
    """Returns every id that EnvPool has; none where it is not installed."""
    try:
        envpool = envpool_import.load()
    except ImportError:
        return ()
    return tuple(envpool.list_all_envs())


def family(id: str) -> str:
    """Returns the module that an id comes from: `envpool.atari`, `envpool.classic_control`, ..."""
    with _quiet():
        # the class itself is made at run time, in no module of EnvPool's; the one it extends is compiled
        return type(_spec(id)).__mro__[1].__module__


def num_players(id: str) -> int:
    """Returns the number of players of a game; 1 of other environments, and where something is not installed."""
    try:
        with _quiet():
            return int(_spec(id).config.max_num_players)
    except (ImportError, AttributeError, RuntimeError):  # of a family that cannot be imported: who makes it tells why
        return 1


def check(id: str, options: dict[str, Any]) -> list[str]:
    """Returns faults in the options, each with its mend."""
    with _quiet():
        spec = _spec(id)
    known = [k for k in spec._config_keys if k not in _RESERVED]
    errors = []
    if spec.config.max_num_players > 1 and "max_episode_steps" in options:
        errors.append(f"env.options.max_episode_steps: EnvPool's {id} goes on beyond it: leave it out")
    for key in options:
        if key in _RESERVED:
            own = "env.batch_size" if key == "batch_size" else "env.num_envs and run.seed"
            errors.append(f"env.options.{key}: set by jrl, from {own}: leave it out")
        elif key not in known:
            near = difflib.get_close_matches(key, known, 1)
            mend = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            errors.append(f"env.options.{key}: EnvPool's {id} has no such option: {mend}")
    return errors


class Frames(NamedTuple):
    """Stacks of gray Atari images: [size, H, W], the newest frame last."""

    size: int  # frames of a stack
    restarts: bool  # a stack begins anew with each episode; with episodic_life EnvPool's goes on behind a lost life


def frames(env: EnvConfig) -> Frames | None:
    """Returns the stacks that an Atari game shows the policy, EnvPool's or those of `env.frame_stack`.

    None: of colours, no stacks, or stacks of stacks.
    """
    with _quiet():
        config = _spec(env.id).config
    value = lambda name: env.options.get(name, getattr(config, name))
    size = int(value("stack_num"))
    if not value("gray_scale") or (size > 1) == (env.frame_stack > 1):
        return None
    return Frames(env.frame_stack, True) if env.frame_stack > 1 else Frames(size, not value("episodic_life"))


def limited(id: str, options: dict[str, Any], horizon: int | None) -> dict[str, Any]:
    """Returns the options with which episodes have at most `horizon` steps.

    A smaller `max_episode_steps` stays, where the task knows its own before an episode begins; some of BabyAI do not,
    and say 0.

    Raises:
      InputError: this one does not end at its limit.
    """
    if horizon is None:
        return options
    with _quiet():
        own = options.get("max_episode_steps", _spec(id).config.max_episode_steps)
    game = num_players(id) > 1  # none of these ends at its limit
    if own and own <= horizon and not game:
        return options
    if game or not _ends_at_limit(id):
        raise InputError(
            f"env.horizon: EnvPool's {id} takes max_episode_steps but goes on beyond it: use another env.backend, or "
            "leave it out"
        )
    return {**options, "max_episode_steps": horizon}


@functools.cache
def _ends_at_limit(id: str) -> bool:
    """Returns whether an episode of at most one step ends with it. Those of Catch-v0, CliffWalking-v1 and Highway's
    last longer, and report their true end as a time limit.
    """
    pool = _pool(EnvConfig(id, "envpool", 1, {"max_episode_steps": 1}), 0, None)
    try:
        taken = _actions(pool)
        pool.reset()
        zeros = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), element(taken.space))
        _, _, terminated, truncated, _ = pool.step(taken.convert(zeros))
        return bool(terminated[0] | truncated[0])
    finally:
        pool.close()


def _pool(cfg: EnvConfig, seed: int, batch_size: int | None) -> Any:
    id, envpool, options = cfg.id, envpool_import.load(), limited(cfg.id, cfg.options, cfg.horizon)
    with _quiet():
        # tasks of a microsecond a step lose more to a second thread than they gain, up to hundreds of environments
        threads = 1 if family(id).startswith(_TINY) else min(cfg.num_envs, os.cpu_count() or 1)
        settings = {"num_threads": threads, **options}
        if batch_size is not None:
            settings["batch_size"] = batch_size
        try:
            return envpool.make(id, env_type="gymnasium", num_envs=cfg.num_envs, seed=seed, **settings)
        except (TypeError, ValueError, ImportError) as e:
            said = cannot_import("envpool", e) if isinstance(e, ModuleNotFoundError) else e
            raise InputError(f"env.id {id}: EnvPool cannot make it with options {options}: {said}") from e


def _actions(pool: Any) -> spaces.Actions:
    """Returns the pool's action space, with the dtype that its step takes: that of the last of its keys."""
    with _quiet():
        space = pool.action_space
    return spaces.actions(space, list(pool.spec.action_array_spec.values())[-1].dtype)


def info_shapes(pool: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of one environment's infos, by name."""
    found = {name[5:]: tuple(x.shape) for name, x in pool.spec.state_array_spec.items() if name.startswith("info:")}
    return {name: shape for name, shape in found.items() if "env_id" not in name and -1 not in shape}


class Pool:
    """A pool between our spaces and EnvPool's. `spec` is the environment's own, before any action transform.

    Args:
      cfg: the section, checked by `jrl.envs.check`.
      seed: environment i gets seed + i.
      batch_size: environments of a step that wait for each other; None: all.
    Raises:
      InputError: a space that cannot be handled, a pool that cannot be made, or one that does not end at its limit.
    """

    def __init__(self, cfg: EnvConfig, *, seed: int, batch_size: int | None = None):
        self._pool: Any = _pool(cfg, seed, batch_size)
        self.infos = Infos(cfg.num_envs)
        try:
            with _quiet():
                observed = self._pool.observation_space
            seen, taken = spaces.observations(observed), _actions(self._pool)
            name = self._mask(cfg.id, cfg.action_mask_info, observed, taken.space)
            if name is not None:
                seen = spaces.with_mask_of_infos(seen, info_shapes(self._pool)[name])
            seen, taken = spaces.with_flat_mask(seen, taken)
        except InputError:
            self._pool.close()
            raise
        convert, self._taken = seen.convert, taken.convert
        # (observations, infos) as the pool gives them -> observations [B, *]
        self._observe: Callable[[Any, dict[str, Any]], PyTree] = (
            (lambda obs, info: convert(obs)) if name is None else lambda obs, info: convert((obs, info[name]))
        )
        limit = int(self._pool.spec.config.max_episode_steps)
        self.spec = EnvSpec(seen.space, taken.space, cfg.num_envs, None if limit == _UNLIMITED else limit)

    def _mask(self, id: str, name: str | None, observed: Any, action: Space) -> str | None:
        """Returns the name of the infos' entry that is the mask."""
        if not masks.looked_for(name, observed, action, id):
            return None
        found = masks.shape(name, info_shapes(self._pool), action, id)
        return None if found is None else found[0]

    def _action(self, action: PyTree, num_envs: int) -> Any:
        """Returns the action in EnvPool's dtype. Raises ValueError unless it is of `spec.action`."""
        action = spaces.on_host(action)
        spaces.check_action(self.spec.action, num_envs, action)
        return self._taken(action)

    def close(self) -> None:
        """Ends the pool's threads, which live as long as anybody has the pool."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


class EnvPoolEnv(Pool):
    """Host environments that wait for each other, and the same inside a program."""

    def __init__(self, cfg: EnvConfig, *, seed: int):
        super().__init__(cfg, seed=seed)
        self._in_program = False
        self._xla_step: Any = None  # of the pool, which it has

    def close(self) -> None:
        """Ends the pool's threads, once programs that step it are done."""
        if self._in_program and self._pool is not None:
            _wait()
            _latest_closed[:] = [self._pool]
        self._xla_step = None
        super().close()

    def reset(self) -> PyTree:
        """Begins new episodes and returns their observations [B, *]."""
        self._host_only()
        obs, info = self._pool.reset()
        self.infos.of_pool(info)
        return self._observe(obs, info)

    def step(self, action: PyTree) -> StepResult:
        """Steps all. Raises ValueError for actions of another shape, dtype or range than `spec.action`."""
        self._host_only()
        obs, reward, terminated, truncated, info = self._pool.step(self._action(action, self.spec.num_envs))
        self.infos.of_pool(info)
        return StepResult(self._observe(obs, info), _reward(reward, info), terminated, truncated)

    def _host_only(self) -> None:
        if self._in_program:
            raise RuntimeError("this pool belongs to a program: step it there, or make another one")

    def to_jax(self) -> JaxEnv | None:
        """Returns the same pool inside a program; None without an XLA interface: several players, on a TPU, or of many
        environments on another accelerator.

        The state is a token that orders the steps; the pool itself is a constant of the program, so that one pool must
        be traced into one program only. `reset` runs on the host and ignores its key: the pool was seeded when made.
        """
        backend = jax.default_backend()
        if backend == "tpu" or (backend != "cpu" and self.spec.num_envs > _MOST_ON_ACCELERATOR):
            return None
        # float64 actions (MuJoCo) are refused where jax would make them float32
        try:
            with jax.enable_x64(True):
                handle, _, _, self._xla_step = self._pool.xla()
        except RuntimeError:
            return None
        self._in_program = True
        token = np.array(handle)
        observe, taken = self._observe, self._taken

        # jax keeps these functions for the rest of the process: they reach the pool through what `close` empties
        def reset(key: jax.Array) -> tuple[jax.Array, PyTree]:
            obs = observe(*self._pool.reset())
            # copies: EnvPool writes its next results into the same memory
            return jnp.array(token, copy=True), jax.tree.map(lambda x: jnp.array(x, copy=True), obs)

        @_opaque
        def pool_step(state: jax.Array, action: PyTree) -> tuple[jax.Array, StepResult]:
            with jax.enable_x64(True):
                state, (obs, reward, terminated, truncated, info) = self._xla_step(state, taken(action))
                obs, reward = observe(obs, info), _reward(reward, info)
            return state, StepResult(obs, reward, terminated, truncated)

        def step(state: jax.Array, action: PyTree, key: jax.Array) -> tuple[jax.Array, StepResult]:
            spaces.check_action(self.spec.action, self.spec.num_envs, action)  # while tracing: shape and dtype
            return pool_step(state, action)

        return JaxEnv(self.spec, reset, step, self.close, pure=False)


class AsyncEnvPoolEnv(Pool):
    """Host environments of which `batch_size` at a time come when they are ready; a `jrl.types.AsyncEnv`.

    EnvPool waits for exactly `batch_size` of them, and for ever if fewer are under way: such a `recv` is refused.
    """

    def __init__(self, cfg: EnvConfig, *, seed: int):
        assert cfg.batch_size is not None
        super().__init__(cfg, seed=seed, batch_size=cfg.batch_size)
        self.batch_size = self.least = cfg.batch_size
        self._under_way = np.zeros(cfg.num_envs, bool)
        self._stale = np.zeros(cfg.num_envs, bool)  # what is under way was sent before the latest reset

    def reset(self) -> None:
        """Begins new episodes in all. Steps under way are finished first, and their results are lost."""
        self._stale = self._under_way.copy()
        self._pool._reset(np.flatnonzero(~self._under_way).astype(np.int32))
        self._under_way[:] = True

    def send(self, action: PyTree, env_id: Array) -> None:
        """Sends actions [n, *] to the environments `env_id` [n] i32.

        Raises:
          ValueError: another shape, dtype or range than `spec.action`, or an environment that is under way.
        """
        env_id = np.asarray(env_id, np.int32)
        action = self._action(action, len(env_id))
        if self._under_way[env_id].any() or len(np.unique(env_id)) < len(env_id):
            under_way = np.flatnonzero(self._under_way).tolist()
            raise ValueError(f"environments {env_id.tolist()}: {under_way} are under way, and no two actions go to one")
        self._under_way[env_id] = True
        self._pool.send(action, env_id)

    def recv(self) -> tuple[np.ndarray, StepResult]:
        """Returns `env_id` [n] i32 and results [n, *]. Raises RuntimeError where fewer than `least` are under way."""
        if self._under_way.sum() < self.least:
            raise RuntimeError(
                f"recv waits for {self.least} environments, of which {self._under_way.sum()} are under way"
            )
        while True:
            obs, reward, terminated, truncated, info = self._pool.recv()
            self.infos.of_pool(info)
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


# The latest pool closed. A program knows the address of a pool alone: a step whose results nobody holds, which `_wait`
# does not see, must not find the memory freed.
_latest_closed: list[Any] = []


def _wait() -> None:
    """Returns once all that was dispatched is computed: whoever steps environments holds the latest state of theirs."""
    for x in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # deleted meanwhile, or what a program raised, which others report
            x.block_until_ready()


def _opaque(fn: Callable) -> Callable:
    """Makes `fn` one operation of whose side effects jax does not know; XLA still does.

    A program with effects that jax knows of is dispatched by Python, at half a millisecond a call: more than ten steps
    of eight CartPoles. The token of the state keeps the steps in order, and every step's results are used.
    """
    primitive = jax.extend.core.Primitive("envpool_step")
    primitive.multiple_results = True
    flat = lambda *args: jax.tree.leaves(fn(*args))

    def abstract(*avals):
        found = jax.eval_shape(flat, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in found]

    def batched(*_, **__):
        raise InputError(
            "jax.vmap: expected environments whose state is in the program, got EnvPool's, which live outside of it: "
            'use those written in JAX, envs.make(..., backend="jax"), or one pool of more environments'
        )

    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(flat, multiple_results=True))

    def call(*args):
        out = jax.tree.structure(jax.eval_shape(fn, *args))
        return jax.tree.unflatten(out, primitive.bind(*args))

    return call


def _reward(reward: Any, info: dict[str, Any]) -> Any:
    """Returns rewards f32, 0 on the step that resets, where EnvPool's dm_control has the last one or garbage."""
    xp = reward.__array_namespace__()  # numpy or jax.numpy
    return xp.where(info["elapsed_step"] != 0, reward.astype("float32"), xp.float32(0.0))
