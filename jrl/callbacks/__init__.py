"""Users' callbacks: `Callbacks` to subclass, and their use in a run. See docs/callbacks.md.

    class PoleAngle(Callbacks):
        def on_episode_step(self, *, episode, **kwargs):
            episode.user_data.setdefault("angles", []).append(abs(episode.last_obs[2]))

        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_metrics["pole_angle"] = np.mean(episode.user_data["angles"])

Imports neither jax nor numpy: the names in a config are checked before anything slow starts.
"""

import contextlib
import difflib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jrl import registry
from jrl.callbacks.moments import EPISODE_MOMENTS as EPISODE_MOMENTS
from jrl.callbacks.moments import KEY, SB3_METHODS, check
from jrl.callbacks.moments import MOMENTS as MOMENTS
from jrl.callbacks.moments import PURE_MOMENTS as PURE_MOMENTS
from jrl.callbacks.moments import ROLLOUT_MOMENTS as ROLLOUT_MOMENTS
from jrl.errors import InputError

if TYPE_CHECKING:
    from jrl.rollout.watch import Watch

Fn = TypeVar("Fn", bound=Callable)
_ELSEWHERE = ("on_sub_environment_created",)  # moments that are called in other processes, too
_BOOLS = ("bool", "bool_")  # numpy's, too, which is not imported here
DEFAULT_POLICY = "default_policy"


def in_program(fn: Fn) -> Fn:
    """Marks a method as a pure function of its batch, traced into the learning program.

    `on_sample_end(self, samples)` and `on_postprocess_trajectory(self, postprocessed_batch)` return the Rollout to
    learn from, of the same shapes; `on_learn_on_batch(self, train_batch)` returns the batch of a gradient step, or
    (batch, {name: scalar}), whose numbers are reported as `learner/<name>`.
    """
    fn.in_program = True  # type: ignore[attr-defined]  # a mark on the function
    return fn


class Callbacks:
    """Methods called at the moments of a run: subclass it, override some, and name the class in `custom.callbacks`.

    All arguments are keywords; end yours with `**kwargs`. An exception in a method ends the run. A method that returns
    False, or sets `result["done"] = True` in `on_train_result`, ends the run without an error. Methods are not called
    for training and for a parallel evaluation at the same time. With env runners, all methods but
    `on_sub_environment_created` are called in the learner process.

    Attributes:
      infos: whether episodes have the environments' infos. None: if the backend has them; True: the run is refused if
        the backend has none; False: never, which saves recording them.
      history: number of latest steps in an episode's `obs`, `actions`, `rewards` and `infos`. None: all; 0: none, and
        observations are not fetched from the device.
    """

    infos: bool | None = None
    history: int | None = None

    def on_environment_created(self, *, env_runner, env, env_context, **kwargs) -> None:
        """Called after a vector of environments was made; `env` steps it."""

    def on_sub_environment_created(self, *, worker, sub_environment, env_context, env_index, **kwargs) -> None:
        """Called after one Gymnasium environment was made, in its worker process or env runner if it has one."""

    def on_create_policy(self, *, policy_id, policy, **kwargs) -> None:
        """Called once per policy, before `on_algorithm_init`; a single policy has the id "default_policy"."""

    def on_algorithm_init(self, *, algorithm, **kwargs) -> None:
        """Called after the run was built, before it begins."""

    def on_episode_created(self, *, episode, env_runner, env, env_index, **kwargs) -> None:
        """Called before an episode (with several agents, a game) begins: it has no observation yet."""

    def on_episode_start(self, *, episode, env_runner, env, env_index, **kwargs) -> None:
        """Called after an episode has begun: it has its first observation."""

    def on_episode_step(self, *, episode, env_runner, env, env_index, **kwargs) -> None:
        """Called after each step, including the last of an episode."""

    def on_episode_end(self, *, episode, env_runner, env, env_index, **kwargs) -> None:
        """Called after an episode has ended; its custom metrics are read afterwards."""

    def on_postprocess_trajectory(self, *, postprocessed_batch, env_runner, **kwargs) -> Any:
        """Called after a rollout was collected. Return a rollout of the same shapes, or None for no change."""

    def on_sample_end(self, *, samples, env_runner, **kwargs) -> Any:
        """Called after `on_postprocess_trajectory`. Return a rollout of the same shapes, or None for no change."""

    def on_learn_on_batch(self, *, policy, train_batch, result, **kwargs) -> Any:
        """Called before a rollout is learned from. Return as `on_sample_end`; numbers in `result` are reported."""

    def on_train_result(self, *, algorithm, result, **kwargs) -> None:
        """Called after a result row is complete; changes of the dict `result` are reported."""

    def on_evaluate_start(self, *, algorithm, **kwargs) -> None:
        """Called before an evaluation."""

    def on_evaluate_end(self, *, algorithm, evaluation_metrics, **kwargs) -> None:
        """Called after an evaluation; changes of the dict `evaluation_metrics` are reported."""

    def on_checkpoint_loaded(self, *, algorithm, **kwargs) -> None:
        """Called after the run was resumed from a checkpoint."""

    def on_workers_recreated(self, *, algorithm, worker_set, worker_ids, is_evaluation, **kwargs) -> None:
        """Called after failed env runners were replaced: `worker_ids` is [1 + index of each]."""


def load(paths: Sequence[str]) -> Callbacks | None:
    """Loads the callbacks in `custom.callbacks` as one; None: none.

    Raises:
      InputError: an unknown name, not a subclass of Callbacks, an unknown moment, an unknown argument, or a wrong mark.
    """
    classes = [registry.load(path, KEY) for path in paths]
    errors = [e for path, found in zip(paths, classes) for e in _faults(path, found)]
    if errors:
        raise InputError(*errors)
    if not classes:
        return None
    return (classes[0] if len(classes) == 1 else make_multi_callbacks(classes))()


def _faults(path: str, found: Any) -> list[str]:
    if not (isinstance(found, type) and issubclass(found, Callbacks)):
        return [f"{KEY} {path}: expected a subclass of jrl.callbacks.Callbacks, got {found!r}"]
    errors = []
    own = {n for c in found.__mro__ if not issubclass(Callbacks, c) for n in vars(c)}
    if not any(name.startswith("on_") for name in own):
        errors += [
            f"{KEY} {path}: {name}: nothing calls it here: name it {SB3_METHODS[name]}" for name in own & {*SB3_METHODS}
        ]
    for name in {n for n in own if n.startswith("on_")}:
        fn = getattr(found, name)
        if name not in MOMENTS:
            near = difflib.get_close_matches(name, MOMENTS, 1)
            fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(MOMENTS)}"
            errors.append(f"{KEY} {path}: there is no moment {name}: {fix}")
        elif getattr(fn, "in_program", False):
            if name not in PURE_MOMENTS:
                errors.append(f"{KEY} {path}: {name} cannot be in_program: only {', '.join(PURE_MOMENTS)} can")
        else:
            parameters = list(inspect.signature(fn).parameters.values())[1:]
            fixed = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.default is p.empty]
            errors += [
                f"{KEY} {path}: {name} takes {p.name!r}, which it is not given: it gets {', '.join(MOMENTS[name])}"
                for p in fixed
                if p.name not in MOMENTS[name]
            ]
    return sorted(errors)


# ---------------------------------------------------------------- several as one


class _Multi(Callbacks):
    classes: Sequence[type[Callbacks]] = ()

    def __init__(self) -> None:
        self.parts = [part for cls in self.classes for part in _parts(cls())]
        wanted = {part.infos for part in self.parts}
        self.infos = True if True in wanted else None if None in wanted else False
        lengths = [part.history for part in self.parts]
        self.history = None if None in lengths else max((n for n in lengths if n is not None), default=0)


def _parts(callbacks: Callbacks) -> list[Callbacks]:
    return callbacks.parts if isinstance(callbacks, _Multi) else [callbacks]


def make_multi_callbacks(classes: Sequence[type[Callbacks]]) -> type[Callbacks]:
    """Returns a class for all `classes`: a run calls each, in order; a changed batch goes to the next."""
    return type("MultiCallbacks", (_Multi,), {"classes": tuple(classes)})


def _overrides(callbacks: Callbacks, name: str) -> bool:
    return getattr(type(callbacks), name) is not getattr(Callbacks, name)


def _adapted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fn`, which gets those of the keywords that it takes."""
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return fn
    names = [p.name for p in parameters]
    return lambda **kwargs: fn(**{name: kwargs[name] for name in names if name in kwargs})


def _of_batch(fn: Callable[..., Any], name: str) -> Callable[[Any], Any]:
    """Returns a pure function of one argument: the batch."""
    keyword = any(p.name == name and p.kind is p.KEYWORD_ONLY for p in inspect.signature(fn).parameters.values())
    return functools.wraps(fn)(lambda batch: fn(**{name: batch}) if keyword else fn(batch))


# ---------------------------------------------------------------- what a run asks


class CallbackList:
    """Callbacks of a run: which data they need, and the calls.

    Args:
      callbacks: result of `load`.
      keep_per_episode: whether custom metrics are lists instead of mean, min and max.
    """

    def __init__(self, callbacks: Callbacks, *, keep_per_episode: bool = False):
        from jrl.metrics.custom import CustomMetrics

        self.callbacks, self.keep_record = callbacks, False  # whether who learns asks for what is recorded, too
        self.games: dict[str, Any] = {}  # options of `Stitch` for several agents; {} with one agent
        self.ended: str | None = None  # why a callback wants the run to end; None: it goes on
        self.by_turns = False  # agents play by turns of their own, so that each has episodes apart from its game
        self._host: dict[str, list[Callable[..., Any]]] = {name: [] for name in MOMENTS}
        self._pure: dict[str, list[Callable[..., Any]]] = {name: [] for name in MOMENTS}
        for part in _parts(callbacks):
            for name in MOMENTS:
                fn = getattr(part, name)
                if getattr(fn, "in_program", False):
                    self._pure[name].append(_of_batch(fn, MOMENTS[name][0]))
                elif name in _ELSEWHERE and _overrides(part, name):
                    self._host[name].append(_adapted(fn))
                elif _overrides(part, name):
                    self._host[name].append(self._heard(_adapted(fn), f"{type(part).__name__}.{name}"))
        self._metrics = {False: CustomMetrics(keep_per_episode), True: CustomMetrics(keep_per_episode)}
        self._ids = {False: itertools.count(), True: itertools.count()}
        self._lock = threading.RLock()
        self._policies: dict[str, Any] = {}

    def _heard(self, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wraps a method: False from it ends the run, and of True nothing is left."""

        @functools.wraps(fn)
        def called(**kwargs: Any) -> Any:
            found = fn(**kwargs)
            if type(found).__name__ not in _BOOLS:
                return found
            if not found:
                self.ended = self.ended or f"{name} returned False"
            return None

        return called

    # ------------------------------------------------------------ before the run

    @property
    def needs_episodes(self) -> bool:
        """Whether a callback uses episodes."""
        return any(self._host[name] for name in EPISODE_MOMENTS)

    @property
    def needs_infos(self) -> bool:  # where there are any
        return self.needs_episodes and self.callbacks.infos is not False

    @property
    def needs_rollouts(self) -> bool:
        """Whether rollouts must pass through the host, between two programs."""
        return self.needs_episodes or any(self._host[name] for name in PURE_MOMENTS)

    def check(self, *, on_policy: bool, collects: bool = True, evaluates: bool = False) -> None:
        """Raises InputError if this kind of run lacks a moment; see `moments.check`."""
        asked = {name for name in MOMENTS if self._host[name] or self._pure[name]}
        on_host = {name for name in MOMENTS if self._host[name]}
        check(asked, on_host, on_policy=on_policy, collects=collects, evaluates=evaluates)

    def collecting(self, env: Any, *, env_runners: bool = False) -> tuple[dict[str, bool], str]:
        """Returns options for the collector of `env`, and a note for the user ("": none).

        Raises:
          InputError: infos are needed, but missing.
        """
        options = {"record": True} if self.needs_episodes else {}
        if not self.needs_infos:
            return options, ""
        if hasattr(env, "infos") and not env_runners:
            return {**options, "record_infos": True}, ""
        why = "env runners do not send them" if env_runners else "environments inside a program have none"
        if self.callbacks.infos:
            raise InputError(
                f"{KEY}: infos is True, but {why}: use Gymnasium's environments, or EnvPool with rollout.collector "
                "host, without env_runners"
            )
        return options, f"callbacks: episodes have no infos: {why}"

    def program_transforms(self) -> tuple[Callable[[Any], Any], ...]:
        """Returns pure functions Rollout -> Rollout, between collecting and learning."""
        return tuple(fn for name in ROLLOUT_MOMENTS for fn in self._pure[name])

    def batch_transforms(self) -> tuple[Callable[[Any], Any], ...]:
        """Returns pure functions batch -> (batch, metrics), before each gradient step."""

        def one(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def transform(batch: Any) -> tuple[Any, dict[str, Any]]:
                found = fn(batch)
                batch, metrics = found if type(found) is tuple else (found, {})
                return batch, {f"learner/{name}": x for name, x in metrics.items()}

            return functools.wraps(fn)(transform)

        return tuple(one(fn) for fn in self._pure["on_learn_on_batch"])

    # ------------------------------------------------------------ moments of the run

    def call(self, name: str, **kwargs: Any) -> None:
        """Calls a moment that returns nothing."""
        for fn in self._host[name]:
            fn(**kwargs)

    def created(self, source: Any, context: Callable[[int], Mapping[str, Any]], *, offset: int = 0) -> None:
        """Reports new environments: the vector, then each Gymnasium environment in it.

        Args:
          source: collector of the environments.
          context: function from i to the context of environment i of the run.
          offset: number of environments before the first of these.
        """
        self.call("on_environment_created", env_runner=source, worker=source, env=source, env_context=context(offset))
        if self._host["on_sub_environment_created"]:
            with contextlib.suppress(InputError):  # none of them is a Python object
                source.foreach_env(_Each(self._host["on_sub_environment_created"], context, offset, source))

    def train_result(self, algorithm: Any, result: dict[str, Any]) -> None:
        """Reports a result row; `result["done"]`, if set by a callback, ends the run and is removed."""
        self.call("on_train_result", algorithm=algorithm, result=result)
        if result.pop("done", False):
            self.ended = self.ended or "a callback set result['done']"

    def begin(self, algorithm: Any, policies: Mapping[str, Any] | None = None) -> None:
        """Reports each policy by its id, then the algorithm."""
        self._policies = dict(policies or {DEFAULT_POLICY: algorithm})
        for name in self._policies:
            self.call("on_create_policy", policy_id=name, policy=self._policies[name])
        self.call("on_algorithm_init", algorithm=algorithm)

    def recreated(self, algorithm: Any, workers: Any, source: Any, *, is_evaluation: bool = False) -> None:
        """Reports env runners that `source` has replaced since the last call."""
        if source is not None and (found := source.recreated):
            given = {"worker_set": workers, "worker_ids": [1 + i for i in found], "is_evaluation": is_evaluation}
            found.clear()
            self.call("on_workers_recreated", algorithm=algorithm, **given)

    # ------------------------------------------------------------ rollouts and episodes

    def watch(self, source: Any, num_envs: int, *, episodes: bool = True, batches: bool = True) -> "Watch":
        """Wraps `source`, so that callbacks get its rollouts, as episodes and as batches."""
        from jrl.rollout.watch import Watch

        called: list[Any] = []
        if batches:
            called += [functools.partial(self._rollout, name) for name in ROLLOUT_MOMENTS if self._host[name]]
            called += [self._learn] * bool(self._host["on_learn_on_batch"])
        stitch = self._stitch if episodes and self.needs_episodes else None
        return Watch(source, stitch, called, num_envs, keep_record=self.keep_record)

    def episode_watch(
        self, num_envs: int, evaluation: bool = True, source: Any = None
    ) -> Callable[[Any, Any], None] | None:
        """Returns what is called with (rollout, infos) of each rollout of an evaluation; None if nobody looks.

        Rows that do not count have mask False: an episode that has such a row is none.
        """
        return self._stitch(source, num_envs, 0, 0, evaluation).add if self.needs_episodes else None

    def _stitch(self, source: Any, num_envs: int, worker_index: int, first: int, evaluation: bool = False) -> Any:
        from jrl.rollout.stitch import Moments, Stitch

        runner = {"env_runner": source, "worker": source, "env": source, "base_env": source}

        def one(name: str) -> Callable[[Any], None] | None:
            fns = self._host[name]

            def call(episode: Any) -> None:
                for fn in fns:
                    fn(episode=episode, env_index=episode.env_index, policies=self._policies, **runner)

            return call if fns else None

        finished = lambda e: self._metrics[evaluation].add_episode(e.custom_metrics, e.hist_data)
        created, start, step, end = map(one, EPISODE_MOMENTS)
        moments = Moments(created, start, step, end, finished, self._ids[evaluation], self._lock)
        place: dict[str, Any] = {"first": first, "worker_index": worker_index, "in_evaluation": evaluation}
        games = bool(self.games) and (evaluation or not self.by_turns)
        return Stitch(num_envs, moments=moments, history=self.callbacks.history, games=games, **place, **self.games)

    def _rollout(self, name: str, source: Any, rollout: Any) -> Any:
        only = next(iter(self._policies)) if len(self._policies) == 1 else None
        more = {"policy_id": only, "policies": self._policies} if name == "on_postprocess_trajectory" else {}
        return self._changed(name, rollout, {"env_runner": source, "worker": source, **more})

    def _learn(self, source: Any, rollout: Any) -> Any:
        result: dict[str, Any] = {}
        only = next(iter(self._policies.values())) if len(self._policies) == 1 else None
        found = self._changed("on_learn_on_batch", rollout, {"policy": only, "result": result})
        self._metrics[False].add_update(result)
        return found

    def _changed(self, name: str, rollout: Any, given: dict[str, Any]) -> Any:
        from jrl.rollout.watch import check_changed_rollout

        changed = None
        for fn in self._host[name]:
            found = fn(**{**given, MOMENTS[name][0]: rollout})
            if found is not None:
                changed = rollout = check_changed_rollout(found, rollout, name)
        return changed

    def drain(self) -> dict[str, Any]:
        """Returns custom metrics since the last call, of training and, with the prefix `evaluation/`, of evaluations.

        See `jrl.metrics.custom.CustomMetrics.drain`.
        """
        with self._lock:
            return {**self._metrics[False].drain(), **self._metrics[True].drain("evaluation/")}

    def drain_evaluation(self) -> dict[str, Any]:
        """Returns the metrics of evaluations, without the prefix."""
        with self._lock:
            return self._metrics[True].drain()


class _Each:
    """Tells of one environment after the other; of those in processes of their own, in each of them."""

    def __init__(self, fns: Sequence[Callable[..., Any]], context: Callable[[int], Any], offset: int, source: Any):
        self._fns, self._context, self._next, self._source = fns, context, offset, source

    def __call__(self, env: Any) -> None:
        if not hasattr(env, "step"):  # a handle on environments inside a program
            return
        # what it was made with, see `jrl.envs.context`: importing that would load jax into each worker process
        context = getattr(env, "_jrl_context", None)
        index, self._next = getattr(context, "vector_index", self._next), self._next + 1
        given = {"env_context": self._context(index) if context is None else context, "env_index": index}
        for fn in self._fns:
            fn(worker=self._source, env_runner=self._source, sub_environment=env, **given)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}
