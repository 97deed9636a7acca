"""Workers of a run, `algorithm.workers`, for callbacks and curricula: `algorithm.workers.foreach_worker(fn)`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import InputError
from jrl.learn.program import Role
from jrl.metrics.episodes import EpisodeState
from jrl.run.base_session import BaseSession
from jrl.run.manual_steps import POLICY, LearnerMethods, PolicyIds, find_policy_ids, set_weights_by_id
from jrl.types import Episodes, PyTree, Rollout

# method of RLlib's workers -> replacement
_INSTEAD = {
    **dict.fromkeys(("save", "restore", "get_state", "set_state"), "Algorithm.save(path), .restore(path)"),
    **dict.fromkeys(("add_policy", "remove_policy"), "Algorithm.add_policy(...), .remove_policy(...)"),
    **dict.fromkeys(("foreach_worker_async", "fetch_ready_async_reqs"), "env_runners(sample_mode='async')"),
    "env": "foreach_env(func) calls func(env)",
    "filters": "get_filters()",
    "stop": "Algorithm.stop()",
}


def _missing(owner: Any, name: str) -> AttributeError:
    fix = _INSTEAD.get(name, "docs/api.md lists the methods")
    return AttributeError(name if name.startswith("_") else f"{type(owner).__name__} has no {name}: {fix}")


class Worker(LearnerMethods):
    """A worker that collects rollouts: a part of this process, or an env runner.

    Each request brings its ActorState, so env runners keep no weights. Weights, filters and gradients are set in the
    process that learns.

    Attributes:
      worker_index: 0 in this process; from 1 in env runners.
      source: source of its rollouts; None: environments are stepped in the program that learns.
      policies: policy ids of the run.

    Args:
      weights: ActorState, or a function that returns the ActorState.
      session: session of the run; None: in an env runner.
      whole: whether `source` steps all environments of the run; False: a part of them.
      key: data of the key for sampling; None: keys of the session.
    """

    def __init__(
        self,
        source: Any,
        worker_index: int,
        weights: Any,
        policies: PolicyIds,
        session: BaseSession | None = None,
        *,
        whole: bool = False,
        key: np.ndarray | None = None,
    ):
        self.source, self.worker_index, self._weights, self.policies = source, worker_index, weights, policies
        self._session, self._whole, self._key, self._calls = session, whole, key, 0

    def _actor(self) -> PyTree:
        return self._weights() if callable(self._weights) else self._weights

    def _learner_session(self, method: str) -> BaseSession:
        """Returns the session. Raises InputError: in an env runner."""
        if self._session is None:
            raise InputError(
                f"{method}: expected a call in the process that learns, got one in an env runner: use the Algorithm or "
                "workers.local_worker(), not foreach_worker"
            )
        return self._session

    def __getattr__(self, name: str) -> Any:
        raise _missing(self, name)

    # ------------------------------------------------------------ sampling

    def sample(self) -> Rollout:
        """Collects the next rollout [T, b] of its environments, in numpy. Training does not learn from this rollout.

        Raises:
          InputError: EnvPool steps the environments inside the program that learns.
        """
        if self._session is not None and self._whole:
            return self._session.manual_steps.sample()[0]
        device = self.source.device or jax.local_devices()[0]
        if self._session is not None:
            key = self._session.manual_steps.key(Role.COLLECT)
        else:
            self._calls += 1
            key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(self._key)), self._calls)
        rollout, _ = self.source.next(*jax.device_put((self._actor(), key), device))
        self.source.discontinue()
        return jax.device_get(rollout)

    def sample_with_count(self) -> tuple[Rollout, int]:
        """Returns (`sample()`, its number of environment steps without resets)."""
        rollout = self.sample()
        return rollout, int(rollout.mask.sum())

    def get_metrics(self) -> dict[str, Any]:
        """Returns metrics of the latest episodes of its environments, over the smoothing window.

        Returns:
          episode_return_mean, _min, _max, episode_len_mean (NaN before the first end), num_episodes, and hist_stats
          with episode_return and episode_lengths, one number per episode.
        """
        columns = self._session.state.source.columns if self.source is None and self._session else self.source.columns
        columns = columns.games if isinstance(columns.games, EpisodeState) else columns
        returns, lengths = np.ravel(columns.window_return), np.ravel(columns.window_length)
        returns, lengths = (x[np.isfinite(returns)].tolist() for x in (returns, lengths))
        known = returns or [float("nan")]
        return {
            "episode_return_mean": float(np.mean(known)),
            "episode_return_min": min(known),
            "episode_return_max": max(known),
            "episode_len_mean": float(np.mean(lengths or known)),
            "num_episodes": len(returns),
            "hist_stats": {"episode_return": returns, "episode_lengths": lengths},
        }

    # ------------------------------------------------------------ weights, filters, policies

    def get_weights(self, policies: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns numpy weights by policy (None: all), for `set_weights`; in an env runner, of the ActorState."""
        wanted = self.policies.ids if policies is None else [self.policies.resolve(name) for name in policies]
        if (session := self._session) is not None:
            return {name: session.get_weights(name if session.policies else None) for name in wanted}
        actors = self.policies.split(jax.device_get(self._actor()))
        fields = lambda actor: {name: x for name, x in vars(actor).items() if name != "env_steps"}
        return {name: fields(actors[name]) for name in wanted}

    def get_filters(self, flush_after: bool = False) -> dict[str, Any]:
        """Returns the observation statistics of its ActorState, by policy; () without `normalize_obs`.

        `flush_after` is ignored, for RLlib's callers: there is only one copy of the statistics.
        """
        actors = self.policies.split(jax.device_get(self._actor()))
        return {name: getattr(actor, "obs_stats", ()) for name, actor in actors.items()}

    def sync_filters(self, new_filters: Mapping[str, Any]) -> None:
        """Sets observation statistics from `get_filters`. Raises as `set_weights`."""
        weights = {name: {"obs_stats": stats} for name, stats in new_filters.items()}
        set_weights_by_id(self._learner_session("sync_filters"), "sync_filters", weights)

    def get_policy(self, policy_id: str = POLICY) -> "WorkerPolicy":
        """Returns a policy. Raises KeyError: unknown id."""
        return WorkerPolicy(self, self.policies.resolve(policy_id))

    @property
    def policy_map(self) -> dict[str, "WorkerPolicy"]:
        """Returns the policies by id."""
        return {name: self.get_policy(name) for name in self.policies.ids}

    def for_policy(self, func: Callable[..., Any], policy_id: str = POLICY, **kwargs: Any) -> Any:
        """Returns `func(policy, **kwargs)` of a policy."""
        return func(self.get_policy(policy_id), **kwargs)

    def foreach_policy(self, func: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Returns `func(policy, policy_id, **kwargs)` of each policy."""
        return [func(self.get_policy(name), name, **kwargs) for name in self.policies.ids]

    def foreach_policy_to_train(self, func: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Calls `func` as `foreach_policy` does, with the policies that learn."""
        return [func(self.get_policy(name), name, **kwargs) for name in self.policies.trained]

    foreach_trainable_policy = foreach_policy_to_train

    # ------------------------------------------------------------ environments

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Returns `func(env)` of each environment. Raises InputError: environments are not Python objects."""
        if self.source is None:
            raise InputError(
                "foreach_env: expected Python environments, got environments inside a program: use set_task, "
                "rollout.collector host, or another env.backend"
            )
        return self.source.foreach_env(func)

    def set_task(self, task: Any) -> None:
        """Sets the task of its environments."""
        self.source.set_task(task)


class WorkerPolicy(LearnerMethods):
    """A policy of a worker: its weights and updates."""

    def __init__(self, worker: Worker, policy_id: str = POLICY):
        self.worker, self.policy_id = worker, policy_id

    def _learner_session(self, method: str) -> BaseSession:
        return self.worker._learner_session(method)

    @property
    def weights(self) -> dict[str, Any]:
        return self.get_weights()

    def get_weights(self) -> dict[str, Any]:
        """Returns weights by field of the State, numpy arrays; in an env runner, fields of the ActorState."""
        return self.worker.get_weights([self.policy_id])[self.policy_id]

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Sets weights from `get_weights`. Raises ValueError: shapes differ."""
        self.worker.set_weights({self.policy_id: weights})

    def get_state(self) -> PyTree:
        """Returns the State of the policy with its optimizer state, in numpy, as for `add_policy`."""
        return self._learner_session("get_state").learner_state(self._run_name)

    def set_state(self, state: PyTree) -> None:
        """Sets the State, from `get_state`."""
        self._learner_session("set_state").take_over({self._run_name: state})

    @property
    def _run_name(self) -> str | None:
        return None if self.policy_id == POLICY else self.policy_id

    def apply_gradients(self, gradients: PyTree) -> None:
        """Applies gradients, with RLlib's name of the argument."""
        super().apply_gradients(gradients)


class Workers:
    """All workers of a run."""

    def __init__(self, session: BaseSession):
        self._session = session

    def __getattr__(self, name: str) -> Any:
        raise _missing(self, name)

    def foreach_worker(self, func: Callable[[Worker], Any], *, local_worker: bool = True) -> list[Any]:
        """Returns `func(worker)` of each worker, called in its process or thread; `func` is pickled for env runners.

        `local_worker` is ignored, for RLlib's callers.
        """
        return self.foreach_worker_with_index(lambda worker, index: func(worker))

    foreach_env_runner = foreach_worker

    def foreach_worker_with_index(self, func: Callable[[Worker, int], Any]) -> list[Any]:
        """Calls `func` as `foreach_worker` does, with (worker, worker_index)."""
        session, policies = self._session, find_policy_ids(self._session)
        if (source := session.run.program.source) is None:
            return [func(self.local_worker(), 0)]
        if session.config.env_runners.num > 0:
            key = np.asarray(jax.random.key_data(session.manual_steps.key(Role.COLLECT)))
            weights = jax.device_get(session.actor())
            return source.foreach_worker(functools.partial(_call_in_runner, func, weights, key, policies))
        return source.foreach_worker(lambda part: func(Worker(part, 0, session.actor, policies, session), 0))

    def foreach_worker_with_id(self, func: Callable[[int, Worker], Any]) -> list[Any]:
        """Calls `func` as `foreach_worker` does, with (worker_index, worker)."""
        return self.foreach_worker_with_index(lambda worker, index: func(index, worker))

    def local_worker(self) -> Worker:
        """Returns this process as a worker, which samples from all environments, those of env runners included."""
        session = self._session
        return Worker(session.run.program.source, 0, session.actor, find_policy_ids(session), session, whole=True)

    local_env_runner = property(local_worker)

    def remote_workers(self) -> list[Any]:
        """Returns [] without env runners. Raises InputError: env runners have no handles."""
        if self._session.config.env_runners.num > 0:
            raise InputError(
                "remote_workers: env runners have no handles: foreach_worker(func) calls func(worker) in each of them"
            )
        return []

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Returns `func(env)` of each environment. Raises InputError: environments are not Python objects."""
        return [x for found in self.foreach_worker(lambda worker: worker.foreach_env(func)) for x in found]

    def foreach_policy(self, func: Callable[..., Any]) -> list[Any]:
        """Returns `func(policy, policy_id)` of the policies of each worker."""
        return [x for found in self.foreach_worker(lambda worker: worker.foreach_policy(func)) for x in found]

    def foreach_policy_to_train(self, func: Callable[..., Any]) -> list[Any]:
        """Calls `func` as `foreach_policy` does, with the policies that learn."""
        return [x for found in self.foreach_worker(lambda worker: worker.foreach_policy_to_train(func)) for x in found]

    foreach_trainable_policy = foreach_policy_to_train

    def sample(self) -> tuple[Rollout, Episodes]:
        """Collects the next rollout [T, B] of all environments, in numpy, with statistics of its episodes."""
        return self._session.manual_steps.sample()

    def sync_weights(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: each request brings the present weights."""

    @property
    def num_healthy_workers(self) -> int:
        """Returns the number of healthy env runners; 0 without env runners."""
        source = self._session.run.program.source
        metrics = source.metrics if source else {}
        return int(metrics.get("env_runners/num_healthy_workers", self._session.config.env_runners.num))


def _call_in_runner(
    fn: Callable[[Worker, int], Any], weights: Any, key: np.ndarray, policies: PolicyIds, source: Any
) -> Any:
    index = source.worker_index
    runner_key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), index)
    return fn(Worker(source, index, weights, policies, key=np.asarray(jax.random.key_data(runner_key))), index)
