"""Evaluation beside training: its own environments and config, after the training step or parallel to it.

    evaluations = Evaluations(cfg)
    row = evaluations.play(actor, count=3, version=3)                        # blocks
    evaluations.begin(actor, count=4, version=3); ...; row = evaluations.finish()   # parallel

See docs/evaluation.md.
"""

import concurrent.futures
import dataclasses
import functools
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrl import registry, spaces
from jrl.errors import InputError
from jrl.fields import schema
from jrl.rollout.evaluate import LENGTH, EvaluationRunners, Player, Until, Watch
from jrl.rollout.tally import SUMMARY, Evaluation, Goal
from jrl.run import build, build_collect
from jrl.run.keys import Role, role_key
from jrl.run.workers import EvaluationWorkers, numbers
from jrl.settings import config
from jrl.settings.config import RunConfig
from jrl.types import EnvSpec, Key, PyTree

_MOST = 16  # environments, unless evaluation.num_envs says otherwise
_SECTIONS = ("algo", "env", "rollout", "env_runners", "run", "custom")  # that evaluation.config may change


# ---------------------------------------------------------------- the config of an evaluation


def config_of(cfg: RunConfig) -> RunConfig:
    """The run's config with `evaluation.config` over it, and `evaluation.explore` as `rollout.explore`.

    Raises:
      InputError: `evaluation.config` names a key that there is not, one that has no meaning in an evaluation, or
        another algorithm or network than the one that is trained.
    """
    given = cfg.evaluation.config
    errors = []
    for section in given:
        if section == "network":
            errors.append("evaluation.config.network: the network is the trained one: leave it out")
        elif section not in _SECTIONS and section in {f.name for f in dataclasses.fields(RunConfig)}:
            takes = ", ".join(_SECTIONS)
            errors.append(f"evaluation.config.{section}: has no meaning in an evaluation, which takes {takes}")
    algo, env = given.get("algo") or {}, given.get("env") or {}
    name = algo.get("name") if isinstance(algo, Mapping) else None
    if name is not None and str(name).lower() != config.algo_name(cfg):
        errors.append(
            f"evaluation.config.algo.name {name}: it is {config.algo_name(cfg)} that is trained: leave it out"
        )
    num = env.get("num_envs") if isinstance(env, Mapping) else None
    if num is not None and (not isinstance(num, int) or isinstance(num, bool) or num < 1):
        errors.append(f"evaluation.config.env.num_envs: expected a whole number of at least 1, got {num!r}")
    if errors:
        raise InputError(*errors)
    if isinstance(env, Mapping) and "num_envs" in env:  # not that of training, which has to suit batches and devices
        given = {**given, "env": {k: v for k, v in env.items() if k != "num_envs"}}
    explore = {"rollout": {"explore": cfg.evaluation.explore}}
    try:
        merged = schema.merge(schema.merge(config.to_dict(cfg), explore), given)
        return config.from_dict({**merged, "evaluation": {**merged["evaluation"], "config": {}}})
    except InputError as e:
        raise InputError(*(f"evaluation.config: {message}" for message in e.errors)) from e


def num_envs(cfg: RunConfig) -> list[int]:
    """Environments of each process that plays: one number, or one for each of `evaluation.num_env_runners`.

    Raises:
      InputError: fewer than there are processes.
    """
    found, env = cfg.evaluation, cfg.evaluation.config.get("env") or {}
    processes = found.num_env_runners or 1
    total, key = (found.num_envs, "evaluation.num_envs")
    if total is None and env.get("num_envs") is not None:
        total, key = env["num_envs"], "evaluation.config.env.num_envs"
    if total is None:
        each = _MOST if found.duration == "auto" else min(-(-found.duration // processes), _MOST)
        return [each] * processes
    if total < processes:
        raise InputError(f"{key} {total}: each of {processes} runners needs one: use at least {processes}")
    return [total // processes + (i < total % processes) for i in range(processes)]


def _player(
    cfg: RunConfig,
    registered: Mapping[str, Any],
    count: int,
    *,
    sizes: Sequence[int],
    infos: bool,
    length: int,
    index: int = 0,
    restarts: int = 0,
) -> Player:
    """The environments of one process, and the policy's way to act in them.

    Args:
      cfg: of the evaluation, from `config_of`.
      registered: `registry.needed` of the process that learns.
      count: differs between environments that are made one after the other.
      sizes: environments of each process.
      infos, length: see `Player`.
      index: of the process.
      restarts: processes that had the index before.
    """
    registry.install(registered)
    number, offset = build_collect.restarted(count, restarts), sum(sizes[:index])
    env = build.environment(cfg, num_envs=sizes[index], role="eval", index=number, offset=offset)
    algo = build.algorithm(cfg, env.spec)
    return Player(env, algo.act, carry=algo.carry, explore=cfg.rollout.explore, length=length, infos=infos)


def check_spaces(found: EnvSpec, trained: EnvSpec) -> None:
    """Raises InputError if a policy that was trained in the one cannot act in the other."""
    for name in ("observation", "action"):
        a, b = getattr(found, name), getattr(trained, name)
        if not spaces.alike(a, b):
            raise InputError(
                f"evaluation: the {name} space of its environments is {a}, that of training {b}: the policy can act in "
                "environments of the same spaces only"
            )


# ---------------------------------------------------------------- evaluations


@dataclasses.dataclass
class _Running:
    """An evaluation that has begun."""

    actor: PyTree
    key: Key
    goal: Goal
    version: int
    until: Until
    found: concurrent.futures.Future
    start: float = dataclasses.field(default_factory=time.perf_counter)


class Evaluations:
    """The evaluations of a run, one at a time. Cheap to make: environments come with the first, or with `prepare`.

    An evaluation is reproducible: the seed of the run, `count` and the weights decide its numbers, unless runners fail
    or its time is over. It never changes training.

    Attributes:
      config: of the evaluation, the run's with `evaluation.config` over it.
      workers: the environments, for callbacks and custom evaluation functions.
      names: keys of every result; of a custom function's none is known.
      latest: the episodes of the latest evaluation; of a custom function's none are known.

    Args:
      cfg: the run.
      callbacks: an object whose `episode_watch(num_envs, evaluation=True)` gives None, or a function of (rollout as
        numpy arrays, infos or None) which sees the rows that count, block by block, in the thread of the evaluation.
        With runners each has one. None: nothing is computed for it.
      algorithm: what a custom evaluation function gets first.
      spec: of the training environments; None: found out, if the evaluation has others.
    Raises:
      InputError: what is wrong with `evaluation` and `custom.evaluation`.
    """

    def __init__(self, cfg: RunConfig, *, callbacks: Any = None, algorithm: Any = None, spec: EnvSpec | None = None):
        self.config = config_of(cfg)
        self.algorithm = algorithm
        self._cfg, self._settings, self._callbacks, self._spec = cfg, cfg.evaluation, callbacks, spec
        self._sizes = num_envs(cfg)
        limit = cfg.evaluation.timeout_s
        self.workers = EvaluationWorkers(self.group, num_envs=sum(self._sizes), timeout_s=limit)
        self._custom = registry.load(cfg.custom.evaluation, "custom.evaluation") if cfg.custom.evaluation else None
        self._copy = jax.jit(lambda actor: jax.tree.map(jnp.copy, actor))
        self._group: Player | EvaluationRunners | None = None
        self._watches: list[Watch | None] | None = None  # of each process: they follow episodes over evaluations
        self._index = 0  # of the environments
        self._running: _Running | None = None
        self.latest: Evaluation | None = None
        runners = ("num_healthy_workers",) if self._settings.num_env_runners else ()
        played = (*SUMMARY, "timesteps", *runners)
        self.names: tuple[str, ...] = (*(() if self._custom else played), "weights_version", "timed_out", "time_s")

    @property
    def busy(self) -> bool:
        """Whether one has begun and is not finished."""
        return self._running is not None

    @property
    def _may_hang(self) -> bool:
        """Whether environments in Python are played in this process; programs, and whoever waits for runners, look at
        the clock themselves.
        """
        return isinstance(self._group, Player) and not self._group.in_program and not self._custom

    @property
    def recreated(self) -> Sequence[int]:
        """Indices of the runners that another has started in place of, since the list was emptied."""
        return self._group.recreated if self._group else ()

    def nothing(self) -> dict[str, float]:
        """The keys `evaluation/...` of a result row before the first evaluation: every row has every key."""
        return {f"evaluation/{name}": math.nan for name in self.names}

    def prepare(self) -> None:
        """Makes the environments, if there are none.

        Raises:
          InputError: they cannot be made, or have other spaces than those of training.
        """
        if self._group is not None:
            return
        given = self._settings.config
        spec = self._spec or (self._spec_of(self._cfg) if given.get("env") or given.get("algo") else None)
        if spec and given.get("algo"):
            self._check_weights(spec)
        # one row at a time where episodes go on: those that end later than the last that counts are the next to count
        exact = not self._settings.force_reset and self._settings.duration != "auto"
        length = 1 if exact else LENGTH
        options: dict[str, Any] = {"sizes": self._sizes, "length": length, "infos": self._callbacks is not None}
        if not self._settings.num_env_runners:
            here = _player(self.config, {}, self._index, **options)
            try:
                check_spaces(here.spec, spec or here.spec)
            except InputError:
                here.close()
                raise
            self._group = here
            return
        if spec:
            check_spaces(self._spec_of(self.config), spec)
        make = functools.partial(_player, self.config, registry.needed(config.to_dict(self.config)), **options)
        runners = build_collect.runner_options(self.config)._replace(num=self._settings.num_env_runners)
        try:
            self._group = EvaluationRunners(make, runners, num_envs=self._sizes, length=length, count=self._index)
        except InputError as e:
            raise InputError(*(f"evaluation.num_env_runners: {message}" for message in e.errors)) from e

    def _check_weights(self, spec: EnvSpec) -> None:
        """Whether the algorithm as this config says acts with the weights that are trained."""
        shapes = []
        for cfg in (self._cfg, self.config):
            algo = build.algorithm(cfg, spec)
            tree = jax.eval_shape(lambda key, algo=algo: algo.actor(algo.init(key)), jax.random.key(0))
            shapes.append([(path, x.shape, x.dtype) for path, x in jax.tree_util.tree_leaves_with_path(tree)])
        if shapes[0] != shapes[1]:
            raise InputError(
                f"evaluation.config.algo: {', '.join(schema.flatten(self._settings.config['algo']))} would need other "
                "weights than those that are trained: leave it out"
            )

    def _spec_of(self, cfg: RunConfig) -> EnvSpec:
        env = build.environment(cfg, num_envs=1, role="eval")
        env.close()
        return env.spec

    # ------------------------------------------------------------ one evaluation

    def play(self, actor: PyTree, *, count: int, version: int, duration: int | None = None) -> dict[str, float]:
        """Plays now.

        Args:
          actor: of the algorithm; the caller's, not copied.
          count: of evaluations or iterations; decides the random numbers.
          version: of the weights, reported as `weights_version`.
          duration: in the place of `evaluation.duration`. Without it `auto` means an episode of each environment.
        Returns:
          `return`, `return_std`, `return_min`, `return_max`, `length` (NaN if no episode ended), `episodes`,
          `timesteps`, `weights_version`, `timed_out` (0 or 1), `time_s`, and `num_healthy_workers` with runners; or
          what the custom function returned, with the last three.
        Raises:
          InputError: see `prepare`.
          RuntimeError: another is under way.
        """
        self.prepare()
        # where one hangs, only another thread can go on
        threaded = self._may_hang and self._settings.timeout_s is not None
        amount = self._settings.duration if duration is None else duration
        goal = Goal(sum(self._sizes), "episodes", self._settings.force_reset)
        if amount != "auto":
            goal = Goal(amount, self._settings.unit, self._settings.force_reset)
        self._begin(actor, goal, count, version, threaded=threaded)
        return self._result()

    def begin(self, actor: PyTree, *, count: int, version: int) -> None:
        """Begins to play, in a thread of its own and with a copy of the actor; `finish` has the result.

        Arguments and errors as `play`; with `evaluation.duration` auto until `finish` is called, at least one block of
        rows, whose episodes that end count.
        """
        self.prepare()
        amount = self._settings.duration
        goal = Goal(None if amount == "auto" else amount, self._settings.unit, self._settings.force_reset)
        # the learner's own arrays are donated to its next update
        self._begin(self._copy(actor), goal, count, version, threaded=True)

    def finish(self) -> dict[str, float] | None:
        """Waits for what `begin` has begun, and tells it to end if it is to last as long as training. None: nothing
        is under way. Keys as `play`; what the evaluation raised is raised here.
        """
        if self._running is None:
            return None
        if self._running.goal.amount is None and not self._custom:
            self._running.until.stop(self._settings.timeout_s)
        return self._result()

    def _begin(self, actor: PyTree, goal: Goal, count: int, version: int, *, threaded: bool) -> None:
        if self._running is not None:
            raise RuntimeError("an evaluation is under way: finish it first")
        limit = None if goal.amount is None or self._custom else self._settings.timeout_s
        key = role_key(self._cfg.run.seed, Role.EVALUATE, count)
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._running = running = _Running(actor, key, goal, version, Until(limit), future)
        if self._custom:
            self.workers.begin(actor, key)
        if threaded:
            fill = functools.partial(_fill, future, functools.partial(self._measure, running))
            # a daemon: an environment that hangs must not keep the process
            threading.Thread(target=fill, name="jrl-evaluate", daemon=True).start()
            return
        try:
            future.set_result(self._measure(running))
        except BaseException:
            self._running = None
            self.workers.end()
            raise

    def _measure(self, running: _Running) -> dict[str, float]:
        if self._custom:
            return numbers(self._custom(self.algorithm, self.workers))
        group = self._group
        assert group is not None
        if self._callbacks is not None and self._watches is None:
            self._watches = [self._callbacks.episode_watch(n, evaluation=True) for n in self._sizes]
        self.latest = group.play(running.actor, running.key, running.goal, running.until, self._watches)
        return _row(self.latest)

    def _result(self) -> dict[str, float]:
        running, group = self._running, self._group
        assert running is not None and group is not None
        left = running.until.left() if self._may_hang else math.inf
        concurrent.futures.wait([running.found], timeout=None if left == math.inf else max(0.0, left))
        self._running = None
        self.workers.end()
        timed_out = False
        if running.found.done():
            row = running.found.result()
        else:
            row, timed_out = _row(group.found()), True
            self._abandon(running)
        if not self._custom and running.goal.amount is not None and group.missing:
            timed_out = True
        if timed_out:
            self._warn(row, group.missing, running)
        healthy = {} if group.healthy is None or self._custom else {"num_healthy_workers": group.healthy}
        own = {"weights_version": running.version, "timed_out": int(timed_out)}
        return {**row, **healthy, **own, "time_s": round(time.perf_counter() - running.start, 3)}

    def _abandon(self, running: _Running) -> None:
        """Leaves alone a thread that hangs in an environment: it closes them if it ever comes back."""
        running.until.stop(0.0)
        group, self._group, self._watches = self._group, None, None
        self._index += 1
        if group is not None:
            running.found.add_done_callback(lambda _: group.close())

    def _warn(self, row: Mapping[str, float], missing: int, running: _Running) -> None:
        what = "it did not end" if running.goal.amount is None else f"{missing} {running.goal.unit} are missing"
        warnings.warn(
            f"evaluation.timeout_s: {what} after {self._settings.timeout_s:g} s; the {row['episodes']} episodes that "
            "ended are the result, among which short ones are more frequent than they should be: allow more time, play "
            "fewer episodes, or use evaluation.num_env_runners",
            RuntimeWarning,
            stacklevel=4,
        )

    # ------------------------------------------------------------ for the workers

    def group(self) -> Player | EvaluationRunners:
        """The environments, made if there are none."""
        self.prepare()
        assert self._group is not None
        return self._group

    # ------------------------------------------------------------ the end

    def restart(self, count: int) -> None:
        """Environments made anew with other seeds, those of `count`, as after a resume."""
        self._index = count
        if isinstance(self._group, EvaluationRunners):
            self._group.restart(count)
        elif self._group is not None:
            self._group.close()
            self._group = None

    def close(self) -> None:
        """Ends what is under way, and the environments."""
        running, self._running = self._running, None
        if running is not None:
            running.until.stop(0.0)
            concurrent.futures.wait([running.found], timeout=max(0.0, running.until.left()))
            if not running.found.done() and isinstance(self._group, Player):
                self._abandon(running)
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _fill(future: concurrent.futures.Future, fn: Callable[[], Any]) -> None:
    try:
        future.set_result(fn())
    except BaseException as e:  # whoever waits for it decides
        future.set_exception(e)


def _row(found: Evaluation) -> dict[str, float]:
    return {**found.summary(), "timesteps": found.timesteps}
