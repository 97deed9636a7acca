"""Collection from host environments: environments step in numpy, everything else stays on the device.

Per step the observation is uploaded once. One jitted program acts on it and writes observation, action and extras into
a donated [T, B, ...] buffer; only the action is downloaded. Works with every environment, and gives the same rollouts
as collection inside a program.

An environment that failed at step t (`StepResult.failed`) continues with a new episode. Step t is masked, like a reset;
step t - 1 is truncated for the learner, and the statistics ignore the episode.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.infos import Infos
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout.source import FAILURES, Source
from jrl.rollout.unroll import finish, reset_where
from jrl.types import ActOut, Array, AsyncEnv, Env, Episodes, InputError, Key, PyTree, Rollout, Several


class FromHost(Source):
    """Base class of collectors that step host environments, synchronously or not.

    A collector acts on the actor's device. Arguments as for `rollout.unroll.make`, and

    Args:
      timers: timers of the stages act, env and transfer.
      cut: whether `truncated` also ends episodes that a failure cut off, for learning. False: only time limits are
        truncations, for consumers that count episodes.
      record, count_agents: see `unroll.finish`.
      record_infos: whether `next` sets `infos` [T][B], the environments' infos of each row, and `reset_infos` [B], the
        infos of the first reset. None if the environments have no infos.
    """

    def __init__(
        self,
        env: Any,
        act: Callable[..., ActOut],
        *,
        length: int,
        carry: Callable[[int], PyTree] = lambda batch_size: (),
        reward_transform: Callable[[Array], Array] | None = None,
        running_return_gamma=None,
        explore: bool = True,
        timers: Timers | None = None,
        cut: bool = True,
        window: int = episodes.WINDOW,
        record: bool = False,
        record_infos: bool = False,
        count_agents: bool = False,
    ):
        self._env, self._act, self._length, self._explore = env, act, length, explore
        self._timers, self._window = timers or Timers(), window
        self._env_infos = request_infos(env) if record_infos else None
        self.infos: Any = None
        self.reset_infos: Any = None
        self._metrics: dict[str, float] = {}  # FAILURES, if the environments report failures
        self._initial_carry = carry(env.spec.num_envs)
        self._carry: PyTree  # [B, ...] after the latest action
        self._done: np.ndarray  # [B] bool, the next step is masked
        self._started: np.ndarray  # [B] bool, the next rollout continues the latest
        self.columns: episodes.EpisodeState
        self._finish = jax.jit(
            partial(
                finish,
                reward_transform=reward_transform,
                gamma=running_return_gamma,
                cut=cut,
                record=record,
                count_agents=count_agents,
                bootstraps=env.spec.bootstraps,
            ),
            donate_argnums=0,
        )
        self.reset()

    def reset(self, key: Key | None = None) -> None:
        """Resets all environments; their seed was set at their creation."""
        num_envs = self._env.spec.num_envs
        self.infos = None
        self._carry = self._initial_carry
        self._done, self._started = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        self.columns = episodes.init(num_envs, self._window, agents=len(self._env.spec.agents))

    def discontinue(self) -> None:
        self._started = np.zeros_like(self._started)

    def close(self) -> None:
        self._env.close()

    def foreach_env(self, fn: Callable[[Any], Any]) -> list:
        """Returns `fn(env)` for each environment, in order.

        Raises:
          InputError: the environments are not Python objects of this process.
        """
        call = getattr(self._env, "foreach_env", None)
        if call is None:
            raise InputError(
                f"foreach_env: expected environments that are Python objects, got {type(self._env).__name__}"
            )
        return call(fn)


class HostCollector(FromHost):
    """Rollouts of synchronous host environments; a Source. Arguments as for `FromHost`.

    `restart`: whether each rollout begins new episodes in all environments.
    """

    def __init__(self, env: Env, act: Callable[..., ActOut], *, length: int, restart: bool = False, **options: Any):
        self._obs: PyTree
        self._restart = restart
        super().__init__(env, act, length=length, **options)
        self._record = jax.jit(self._record_step, donate_argnums=0)
        self._allocate = jax.jit(self._empty_buffer)
        self._keys = jax.jit(lambda key: jax.random.split(key, (length, 2))[:, 0])
        self._forget = jax.jit(lambda failed, carry: reset_where(failed, self._initial_carry, carry))

    def _empty_buffer(self, actor, obs, key):
        out = jax.eval_shape(partial(self._act, explore=self._explore), actor, obs, self._initial_carry, key)
        row = (obs, out.action, out.extras)
        return jax.tree.map(lambda x: jnp.zeros((self._length, *x.shape), x.dtype), row)

    def _record_step(self, buffer, t, actor, obs, reset, carry, keys):
        out = self._act(actor, obs, carry, keys[t], self._explore)
        row = (obs, out.action, out.extras)
        buffer = jax.tree.map(lambda b, x: b.at[t].set(x), buffer, row)
        return buffer, out.action, reset_where(reset, self._initial_carry, out.carry)

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Returns the next T steps of every environment."""
        if self._restart and self._started.any():
            columns = episodes.clear_running(self.columns)
            self.reset()
            self.columns = columns
        shape = (self._length, len(self._done))
        reward, mask = np.empty(shape, np.float32), np.empty(shape, bool)
        terminated, truncated = np.empty(shape, bool), np.empty(shape, bool)
        failed: np.ndarray | None = None
        several: list[Several] = []
        infos: list[Any] = []
        device = device_of(actor)
        # committed to the device like the outputs of a step, because other inputs would compile again
        state = (self._obs, self._carry, self.columns, self._keys(key))
        obs, first_carry, self.columns, keys = jax.device_put(state, device)
        carry = first_carry
        buffer = jax.device_put(self._allocate(actor, obs, key), device)
        for t in range(self._length):
            with self._timers("act"):
                buffer, action, carry = self._record(buffer, np.int32(t), actor, obs, self._done, carry, keys)
                action = jax.tree.map(np.asarray, action)
            with self._timers("env"):
                result = self._env.step(action)
            if self._env_infos is not None:
                infos.append(self._env_infos.latest)
            mask[t], reward[t] = ~self._done, result.reward
            terminated[t], truncated[t] = result.terminated, result.truncated
            self._done = np.asarray(result.terminated | result.truncated)
            if result.failed is not None:
                failed = np.zeros(shape, bool) if failed is None else failed
                failed[t] = result.failed
                if failed[t].any():
                    carry = self._forget(failed[t], carry)
            if result.several is not None:
                several.append(Several(np.array(result.several.absent), np.array(result.several.over)))
                if (result.several.absent & mask[t]).any():
                    carry = self._forget(several[-1].absent, carry)
            with self._timers("transfer"):
                # a copy, because the environment may reuse its array during the upload
                obs = jax.device_put(jax.tree.map(np.copy, result.obs), device)
        self._obs, self._carry = obs, carry
        observed, actions, extras = buffer
        rows: Any = (observed, actions, reward, terminated, truncated, mask, extras)
        agents = jax.tree.map(lambda *x: np.stack(x), *several) if several else None
        self.columns, rollout, report = self._finish(
            self.columns, rows, obs, first_carry, self._started, failed, agents
        )
        self._started = np.ones_like(self._started)
        self.infos = infos if self._env_infos is not None else None
        if failed is not None:
            broken = failed.reshape(self._length, self._env.spec.games, -1).any(-1)
            self._metrics = {FAILURES: self.metrics.get(FAILURES, 0.0) + float(broken.sum())}
        return rollout, report

    def reset(self, key: Key | None = None) -> None:
        super().reset(key)
        self._obs = jax.tree.map(np.copy, self._env.reset())
        self.reset_infos = None if self._env_infos is None else self._env_infos.latest


def request_infos(env: Env | AsyncEnv) -> Infos | None:
    """Asks the environments to record their infos; returns the record, or None if they have no infos."""
    found: Infos | None = getattr(env, "infos", None)
    if found is not None:
        found.wanted = True
    return found


def device_of(actor: PyTree) -> jax.Device:
    """Returns the device of the actor's arrays."""
    found = (next(iter(x.devices())) for x in jax.tree.leaves(actor) if isinstance(x, jax.Array))
    return next(found, jax.local_devices()[0])
