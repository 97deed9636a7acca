"""The host path: environments step in numpy, everything else stays on the device.

Per step the observation is uploaded once; one jitted program acts on it and writes it, the action and the extras into
a donated [T, B, ...] buffer; only the action comes back. Works with every environment and gives the rollouts of the
path inside a program.

An environment that broke at step t (`StepResult.failed`) goes on with a new episode: step t is masked, as that of
a reset; step t - 1 is truncated for the learner, and the statistics forget the episode.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.vector import Infos
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout.source import Source
from jrl.rollout.unroll import finish, reset_where
from jrl.types import ActOut, Array, AsyncEnv, Env, Episodes, InputError, Key, PyTree, Rollout, Several

FAILURES = "env/failures"  # metric: how often an environment broke so far; absent where none can


class FromHost(Source):
    """Steps environments from the host; the base class of collectors that wait for all of them, and that do not.

    A collector acts on the device where the actor lies. Arguments as `rollout.unroll.make`, and

    Args:
      timers: where the stages act, env and transfer are timed.
      cut: `truncated` also ends episodes that broke off with an environment, for learning. False: only time limits do,
        for those who count episodes.
      record, count_agents: see `unroll.finish`.
      record_infos: after `next`, `infos` [T][B] has what the environments said beside the results of each row, and
        `reset_infos` [B] what they said at the first reset. None where they say nothing.
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
        self._told = told_by(env) if record_infos else None
        self.infos: Any = None
        self.reset_infos: Any = None
        self._metrics: dict[str, float] = {}  # FAILURES, once the environments have said whether they broke
        self._initial_carry = carry(env.spec.num_envs)
        self._carry: PyTree  # [B, ...] after the latest action
        self._done: np.ndarray  # [B] bool: the step that comes is masked
        self._started: np.ndarray  # [B] bool: the next rollout goes on from the latest
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
        """Resets all environments; their seed was given when they were made."""
        num_envs = self._env.spec.num_envs
        self.infos = None
        self._carry = self._initial_carry
        self._done, self._started = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        self.columns = episodes.init(num_envs, self._window, agents=len(self._env.spec.agents))

    def discontinue(self) -> None:
        """Begins anew: what comes next does not continue the latest rollout."""
        self._started = np.zeros_like(self._started)

    def close(self) -> None:
        self._env.close()

    def foreach_env(self, fn: Callable[[Any], Any]) -> list:
        """Returns `fn` of each environment, in their order.

        Raises:
          InputError: the environments are no Python objects of this program.
        """
        call = getattr(self._env, "foreach_env", None)
        if call is None:
            raise InputError(
                f"foreach_env: {type(self._env).__name__} does not let Python call its environments one by one"
            )
        return call(fn)


class HostCollector(FromHost):
    """Rollouts of host environments that wait for each other; a Source. Arguments as `FromHost`."""

    def __init__(self, env: Env, act: Callable[..., ActOut], *, length: int, **options: Any):
        self._obs: PyTree
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
        shape = (self._length, len(self._done))
        reward, mask = np.empty(shape, np.float32), np.empty(shape, bool)
        terminated, truncated = np.empty(shape, bool), np.empty(shape, bool)
        failed: np.ndarray | None = None
        several: list[Several] = []
        infos: list[Any] = []
        device = device_of(actor)
        # all of it committed there, as the outputs of a step will be: another kind of input is another compilation
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
            if self._told is not None:
                infos.append(self._told.latest)
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
                # a copy: the environment may reuse its array while the upload is under way
                obs = jax.device_put(jax.tree.map(np.copy, result.obs), device)
        self._obs, self._carry = obs, carry
        observed, actions, extras = buffer
        rows: Any = (observed, actions, reward, terminated, truncated, mask, extras)
        told = jax.tree.map(lambda *x: np.stack(x), *several) if several else None
        self.columns, rollout, report = self._finish(self.columns, rows, obs, first_carry, self._started, failed, told)
        self._started = np.ones_like(self._started)
        self.infos = infos if self._told is not None else None
        if failed is not None:
            broken = failed.reshape(self._length, self._env.spec.games, -1).any(-1)
            self._metrics = {FAILURES: self.metrics.get(FAILURES, 0.0) + float(broken.sum())}
        return rollout, report

    def reset(self, key: Key | None = None) -> None:
        super().reset(key)
        self._obs = jax.tree.map(np.copy, self._env.reset())
        self.reset_infos = None if self._told is None else self._told.latest


def told_by(env: Env | AsyncEnv) -> Infos | None:
    """Returns the place where the environments put their infos from now on; None where they have none."""
    found: Infos | None = getattr(env, "infos", None)
    if found is not None:
        found.wanted = True
    return found


def device_of(actor: PyTree) -> jax.Device:
    """Returns the device where the actor lies, and so where it acts."""
    found = (next(iter(x.devices())) for x in jax.tree.leaves(actor) if isinstance(x, jax.Array))
    return next(found, jax.local_devices()[0])
