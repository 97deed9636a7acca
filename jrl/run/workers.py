"""Workers that collect for a run, as callbacks, curricula and examples address them:
`algorithm.workers.foreach_worker(fn)`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import InputError
from jrl.learn.program import Role
from jrl.metrics.episodes import EpisodeState
from jrl.run.manual_steps import POLICY, Known, Learns, known, set_by_policy
from jrl.run.policies import BaseSession
from jrl.types import Episodes, PyTree, Rollout

# methods of RLlib's workers -> what to use
_INSTEAD = {
    **dict.fromkeys(("save", "restore", "get_state", "set_state"), "Algorithm.save(path), .restore(path)"),
    **dict.fromkeys(("add_policy", "remove_policy"), "Algorithm.add_policy(...), .remove_policy(...)"),
    **dict.fromkeys(("foreach_worker_async", "fetch_ready_async_reqs"), "env_runners(sample_mode='async')"),
    "env": "foreach_env(func) calls func(env)",
    "filters": "get_filters()",
    "stop": "Algorithm.stop()",
}


def _missing(owner: Any, name: str) -> AttributeError:
    fix = _INSTEAD.get(name, "docs/api.md lists what there is")
    return AttributeError(name if name.startswith("_") else f"{type(owner).__name__} has no {name}: {fix}")


class Worker(Learns):
    """A worker that collects: a part of this process, or an environment runner in its own.

    What it acts with comes with each request, so that an environment runner has nothing to keep: weights and filters
    are set, and gradients applied, in the process that learns.

    Args:
      source: see below.
      worker_index: see below.
      weights: the Actor that it acts with, or a function that gives it.
      session: of the run; None in an environment runner.
      whole: `source` is that of all environments, whatever they are stepped by; else it is one part's.
      key: data of the key of what it samples; None where the run has it.
      policies: those of the run; None where the run has them.
    Attributes:
      worker_index: 0 in this process; environment runners count from 1.
      source: its rollouts come from there; None where environments are part of the program that learns.
    """

    def __init__(
        self,
        source: Any,
        worker_index: int,
        weights: Any,
        session: BaseSession | None = None,
        *,
        whole: bool = False,
        key: np.ndarray | None = None,
        policies: Known | None = None,
    ):
        self._policies = policies
        self.source, self.worker_index, self._weights = source, worker_index, weights
        self._session, self._whole, self._key, self._calls = session, whole, key, 0

    @property
    def policies(self) -> Known:
        """Returns the policies of the run."""
        if self._policies is None:
            assert self._session is not None
            self._policies = known(self._session)
        return self._policies

    def _actor(self) -> PyTree:
        return self._weights() if callable(self._weights) else self._weights

    def _learns(self, what: str) -> BaseSession:
        """Returns the run. Raises InputError in an environment runner."""
        if self._session is None:
            raise InputError(
                f"{what}: an environment runner acts with what comes with each request: call it of the Algorithm, or "
                "of workers.local_worker(), not in foreach_worker"
            )
        return self._session

    def __getattr__(self, name: str) -> Any:
        raise _missing(self, name)

    # ------------------------------------------------------------ sampling

    def sample(self) -> Rollout:
        """Collects the next rollout [T, b] of its environments, in numpy; training, which does not see it, goes on.

        Raises:
          InputError: EnvPool steps the environments inside the program that learns.
        """
        if self._session is not None and self._whole:
            return self._session.by_hand.sample()[0]
        device = self.source.device or jax.local_devices()[0]
        if self._session is not None:
            key = self._session.by_hand.key(Role.COLLECT)
        else:
            self._calls += 1
            key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(self._key)), self._calls)
        rollout, _ = self.source.next(*jax.device_put((self._actor(), key), device))
        self.source.discontinue()
        return jax.device_get(rollout)

    def sample_with_count(self) -> tuple[Rollout, int]:
        """Returns `sample()`, and the environment steps in it: steps that only reset are none."""
        rollout = self.sample()
        return rollout, int(rollout.mask.sum())

    def get_metrics(self) -> dict[str, Any]:
        """Returns metrics of the latest episodes that ended in its environments, as many as metrics are smoothed over.

        Returns:
          episode_return_mean, _min, _max, episode_len_mean (NaN until one has ended), num_episodes, and one number per
          episode: hist_stats with episode_return and episode_lengths.
        """
        columns = self._session.state.source.columns if self.source is None and self._session else self.source.columns
        columns = columns.games if isinstance(columns.games, EpisodeState) else columns
        returns, lengths = np.ravel(columns.window_return), np.ravel(columns.window_length)
        returns, lengths = (x[np.isfinite(returns)].tolist() for x in (returns, lengths))
        of = lambda fn, x: float(fn(x)) if x else float("nan")
        return {
            "episode_return_mean": of(np.mean, returns),
            "episode_return_min": of(np.min, returns),
            "episode_return_max": of(np.max, returns),
            "episode_len_mean": of(np.mean, lengths),
            "num_episodes": len(returns),
            "hist_stats": {"episode_return": returns, "episode_lengths": lengths},
        }

    # ------------------------------------------------------------ weights, filters, policies

    def get_weights(self, policies: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns the Algorithm's weights, as `set_weights` takes them, numpy arrays, by policy; None: of all policies.

        In an environment runner what it acts with, by the fields of the algorithm's Actor.
        """
        there = self.policies
        wanted = there.ids if policies is None else [there.named(policy_id) for policy_id in policies]
        if (session := self._session) is not None:
            return {name: session.get_weights(name if session.policies else None) for name in wanted}
        actors = there.split(jax.device_get(self._actor()))
        fields = lambda actor: {name: x for name, x in vars(actor).items() if name != "env_steps"}
        return {name: fields(actors[name]) for name in wanted}

    def get_filters(self, flush_after: bool = False) -> dict[str, Any]:
        """Returns the running statistics of observations that it acts with, by policy; () without `normalize_obs`.

        Args:
          flush_after: for the sake of RLlib's callers: there is one copy, and nothing to hand over.
        """
        actors = self.policies.split(jax.device_get(self._actor()))
        return {name: getattr(actor, "obs_stats", ()) for name, actor in actors.items()}

    def sync_filters(self, new_filters: Mapping[str, Any]) -> None:
        """Takes over what `get_filters` returned. Raises as `set_weights`."""
        weights = {name: {"obs_stats": stats} for name, stats in new_filters.items()}
        set_by_policy(self._learns("sync_filters"), "sync_filters", weights)

    def get_policy(self, policy_id: str = POLICY) -> "WorkerPolicy":
        """Returns the policy that it acts with. Raises KeyError: there is none of that id."""
        return WorkerPolicy(self, self.policies.named(policy_id))

    @property
    def policy_map(self) -> dict[str, "WorkerPolicy"]:
        """Returns the policies that it acts with, by name."""
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
        """Calls `func` with each of its environments, in order. Raises InputError where Python cannot call them."""
        if self.source is None:
            raise InputError(
                "foreach_env: these environments are part of a program, Python cannot call them: set_task changes "
                "their parameters; rollout.collector host or another env.backend makes objects of them"
            )
        return self.source.foreach_env(func)

    def set_task(self, task: Any) -> None:
        """Gives its environments a task."""
        self.source.set_task(task)


class WorkerPolicy(Learns):
    """The weights that a worker acts with, and updates of them.

    Args:
      worker: see above.
      policy_id: id of the policy.
    """

    def __init__(self, worker: Worker, policy_id: str = POLICY):
        self.worker, self.policy_id = worker, policy_id

    def _learns(self, what: str) -> BaseSession:
        return self.worker._learns(what)

    @property
    def weights(self) -> dict[str, Any]:
        return self.get_weights()

    def get_weights(self) -> dict[str, Any]:
        """Returns the weights of the algorithm's State by field, numpy arrays; in an environment runner its Actor's."""
        return self.worker.get_weights([self.policy_id])[self.policy_id]

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Takes over what `get_weights` returned. Raises ValueError where shapes differ."""
        self.worker.set_weights({self.policy_id: weights})

    def get_state(self) -> PyTree:
        """Returns the State of the policy, its optimizer's included, in numpy: `add_policy` may begin with it."""
        return self._learns("get_state").learner_state(self._run_name)

    def set_state(self, state: PyTree) -> None:
        """Goes on with a State as `get_state` returned it."""
        self._learns("set_state").take_over({self._run_name: state})

    @property
    def _run_name(self) -> str | None:
        return None if self.policy_id == POLICY else self.policy_id

    def apply_gradients(self, gradients: PyTree) -> None:
        """Applies gradients as a worker does, with RLlib's name of the argument."""
        super().apply_gradients(gradients)


class Workers:
    """All workers that collect for a run."""

    def __init__(self, session: BaseSession):
        self._session = session

    def __getattr__(self, name: str) -> Any:
        raise _missing(self, name)

    def foreach_worker(self, func: Callable[[Worker], Any], *, local_worker: bool = True) -> list[Any]:
        """Returns `func(worker)` of each, called in its own process or thread, in order.

        Args:
          func: of a Worker; for environment runners it travels there.
          local_worker: for the sake of RLlib's callers; there is either this process or environment runners.
        """
        return self.foreach_worker_with_index(lambda worker, index: func(worker))

    foreach_env_runner = foreach_worker

    def foreach_worker_with_index(self, func: Callable[[Worker, int], Any]) -> list[Any]:
        """Calls `func` as `foreach_worker` does, with (worker, worker_index)."""
        session = self._session
        program, state = session.run.program, session.state
        if (source := program.source) is None:
            return [func(self.local_worker(), 0)]
        if session.config.env_runners.num > 0:
            key = np.asarray(jax.random.key_data(session.by_hand.key(Role.COLLECT)))
            weights = jax.device_get(program.actor(state))
            return source.foreach_worker(functools.partial(_in_runner, func, weights, key, known(session)))
        return source.foreach_worker(lambda part: func(Worker(part, 0, session.actor, session), 0))

    def foreach_worker_with_id(self, func: Callable[[int, Worker], Any]) -> list[Any]:
        """Calls `func` as `foreach_worker` does, with (worker_index, worker)."""
        return self.foreach_worker_with_index(lambda worker, index: func(index, worker))

    def local_worker(self) -> Worker:
        """Returns this process as a worker: its weights; its environments, where it has any. It samples from
        all environments of the run, those of environment runners too.
        """
        session = self._session
        return Worker(session.run.program.source, 0, session.actor, session, whole=True)

    local_env_runner = property(local_worker)

    def remote_workers(self) -> list[Any]:
        """Returns [] where this process collects. Raises InputError with env runners, which have no handles."""
        if self._session.config.env_runners.num > 0:
            raise InputError(
                "remote_workers: env runners have no handles: foreach_worker(func) calls func(worker) in each of them"
            )
        return []

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Returns `func(env)` of every environment, in order. Raises InputError where Python cannot call them."""
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
        return self._session.by_hand.sample()

    def sync_weights(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: weights go with each request, and there is no older copy of them."""

    @property
    def num_healthy_workers(self) -> int:
        """Returns the number of environment runners that answer; 0 where this process collects."""
        source = self._session.run.program.source
        found = source.metrics if source else {}
        return int(found.get("env_runners/num_healthy_workers", self._session.config.env_runners.num))


def _in_runner(fn: Callable[[Worker, int], Any], weights: Any, key: np.ndarray, policies: Known, source: Any) -> Any:
    index = source.worker_index
    own = np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), index)))
    return fn(Worker(source, index, weights, key=own, policies=policies), index)
