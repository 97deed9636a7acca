"""A run as an object: `train()` runs one iteration and returns its result.

Algorithm and `python -m jrl.train` share the loop, `jrl.run.session.Session`.
"""

import argparse
import contextlib
import copy
import dataclasses
import datetime
import functools
import inspect
import itertools
import os
import socket
import tempfile
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax

from jrl import registry
from jrl.config import Sizes, algo_name, datasets
from jrl.errors import InputError
from jrl.fields.paths import resolve, unwritable
from jrl.host import files, runtime
from jrl.metrics import results
from jrl.play import actor
from jrl.rllib import algorithm_class, config_class, hints
from jrl.rllib.builder import AlgorithmConfig
from jrl.rllib.policy import ActionPolicy
from jrl.rllib.weights_file import read_weights
from jrl.run import base_session, build, reporter, run_directory, runner
from jrl.run.manual_steps import POLICY, LearnerMethods, find_policy_ids
from jrl.run.session import Session
from jrl.run.store import checkpoint
from jrl.types import Batch, PyTree, SequenceBatch

# arguments of RLlib's add_policy and remove_policy that are ignored: jrl has one stack, and the run has the spaces
_IGNORED = {
    "add_to_env_runners", "add_to_eval_env_runners", "add_to_learners", "remove_from_env_runners",
    "remove_from_eval_env_runners", "remove_from_learners", "evaluation_workers", "observation_space", "action_space",
}  # fmt: skip
# arguments of RLlib's add_module -> arguments of add_policy
_MODULE_ARGUMENTS = {
    "config_overrides": "config",
    "new_agent_to_module_mapping_fn": "policy_mapping_fn",
    "new_should_module_be_updated": "policies_to_train",
}
_MappingArg = Callable[..., str] | Mapping[str, str] | None  # (agent, episode) -> policy, or {agent: policy}
_Trained = Collection[str] | Callable[..., bool] | None  # policies that learn, or a function name -> whether it learns


class Saved(str):
    """Path of a checkpoint, with the attributes of RLlib's results: `algo.save().checkpoint.path`.

    Attributes:
      metrics: result of the last iteration; empty before the first.
    """

    metrics: Mapping[str, Any] = types.MappingProxyType({})

    @property
    def path(self) -> str:
        return str(self)

    @property
    def checkpoint(self) -> "Saved":
        return self


def to_path(given: Any) -> Path:
    """Returns the path of a `Saved`, of a Ray checkpoint, or of a path."""
    given = getattr(given, "checkpoint", given)
    return resolve(given if isinstance(given, str) else getattr(given, "path", given), "checkpoint")


class Algorithm(LearnerMethods):
    """Run that the user steps call by call.

    Subclasses may replace steps of the loop by methods: `training_step(self, step)`, with a jrl.learn.staged.Step, and
    `loss(default, net, params, batch)`, a static method (see jrl.algos).

    Args:
      config: AlgorithmConfig, or dict of its arguments, sections or RLlib's keys. The config is copied and frozen.
      env: environment; None: the environment of the config.
      checkpoint: checkpoint to continue from.
    Attributes:
      workers, evaluation_workers: collectors and evaluators, with `foreach_worker(fn)` and `foreach_env(fn)`.
    """

    algo_name: ClassVar[str] = ""
    variant: ClassVar[str] = ""  # see AlgorithmConfig

    def __init__(
        self, config: AlgorithmConfig | Mapping[str, Any] | None = None, env: Any = None, *,
        checkpoint: str | Path | None = None,
    ):  # fmt: skip
        made = self.read_config(config)
        if env is not None:
            made.environment(env)
        made.freeze()
        for line in made.translations():
            print(f"translated: {line}")
        self.config = made
        self._has_started = False
        self._policies: dict[str, ActionPolicy] = {}
        self._directory: Path | None = None  # run directory; a restored run keeps it
        self._open(None if checkpoint is None else to_path(checkpoint))

    @classmethod
    def read_config(cls, given: AlgorithmConfig | Mapping[str, Any] | None) -> AlgorithmConfig:
        """Returns a copy of a config, or the config of a dict of arguments, of sections, or of RLlib's keys."""
        if isinstance(given, AlgorithmConfig):
            return given.copy(copy_frozen=False)
        if not cls.algo_name:
            raise InputError("Algorithm: use the class of an algorithm, such as jrl.api.PPO, or AlgorithmConfig.build")
        return config_class(cls.variant or cls.algo_name)().update_from_dict(given or {})

    @classmethod
    def get_default_config(cls) -> AlgorithmConfig:
        """Returns a new config of this algorithm."""
        return cls.read_config(None)

    def get_config(self) -> AlgorithmConfig:
        """Returns the attribute `config`, as RLlib does."""
        return self.config

    def _open(self, saved: Path | None) -> None:
        cfg, own_step = self.config.to_run_config(), None
        runs = Path("runs").absolute()  # before environments are created, which may change the working directory
        runtime.apply(cfg.runtime)
        if type(self).training_step is not Algorithm.training_step:
            own_step = self.training_step
        if type(self).loss is not Algorithm.loss:
            own_loss = registry.reference(type(self).loss)
            cfg = dataclasses.replace(cfg, custom=dataclasses.replace(cfg.custom, loss=own_loss))
        if cfg.run.on_nonfinite == "rollback":
            raise InputError("run.on_nonfinite: rollback needs the checkpoints of jrl.train: use stop or ignore here")
        cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, report_every=Sizes(cfg).asked_iteration))
        if cfg.run.compile_cache:
            build.enable_compile_cache()
        found = checkpoint.locate(saved) if saved else None
        meta: Mapping[str, Any] = checkpoint.read_meta(found) if found else {"iteration": 0}
        if found and cfg.devices.platform == "auto":
            from jrl.run import platform_choice

            cfg = platform_choice.recorded(cfg, meta["config"])
        if found and cfg.run.out and files.is_locked_here(Path(cfg.run.out)):  # by the Algorithm of the checkpoint
            print(f"run.out: another Algorithm of this process writes to {cfg.run.out}: this one gets a new directory")
            cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, out=None))
        with contextlib.ExitStack() as failed:
            self._files = failed.enter_context(contextlib.ExitStack())
            if out := cfg.run.out:
                self._files.enter_context(files.lock_directory(Path(out)))
                if not found and (Path(out) / "config.yaml").exists():
                    raise InputError(f"run.out: {out} already has a run: name another, or restore its checkpoint")
            restarts = meta["iteration"]
            self.session = Session(cfg, restarts=restarts, callback_target=self, endless=True, training_step=own_step)
            self.session.rows_wait = True
            failed.callback(self.session.close)
            self._stopped = False
            self.workers = self.env_runner_group = self.session.workers
            self.session.start(found, begin=not self._has_started)
            self._has_started = True
            count, time_s = self.session.reporter.count, self.session.reporter.seconds()
            sampled = 0 if datasets.alone(cfg) else self.session.env_steps
            counts = {"training_iteration": count, "timesteps_total": sampled, "time_total_s": time_s}
            self._restored: dict[str, float] = counts if found else dict.fromkeys(counts, 0)
            self._runs = runs
            self._member: runner.Member | None = None  # while files are open
            self._continues, self._saved = found is not None, self.session.iteration if found else 0
            if cfg.run.out:
                self._open_files()
            failed.pop_all()  # success: keep everything open

    def _open_files(self) -> None:
        """Opens the files of result rows, if the config has them and they are not open."""
        session, cfg = self.session, self.session.config
        if self._member or not (cfg.run.log or cfg.run.out):
            return
        is_new = not self._directory and not cfg.run.out
        member = self._member = runner.Member(session, self.logdir)
        if not cfg.run.out:
            self._files.enter_context(files.lock_directory(member.directory, made=True))
        if cfg.checkpoint.every is not None:
            member.open_checkpoints(self._files)
        member.open(self._files, session.reporter.row_steps if self._continues else None)
        session.sinks.append(self._files.enter_context(run_directory.open_log(session, member.directory)))
        if is_new:
            print(f"run: {member.directory}")

    def training_step(self, step: Any) -> None:
        """Runs one iteration: collect and learn. Subclasses may replace it."""
        step.learn(step.sample())

    @staticmethod
    def loss(default: Callable, net: Any, params: PyTree, batch: Any) -> Any:
        """Returns (scalar, metrics) of a batch; subclasses may replace it. `default(params, batch)` is jrl's loss."""
        return default(params, batch)

    def _learner_session(self, what: str) -> Session:
        return self.session

    # ------------------------------------------------------------ training

    def train(self) -> dict[str, Any]:
        """Runs one iteration and returns its result.

        An iteration has at least one rollout and its updates, or the length set by `reporting`; in a run from data
        alone `updates_per_iteration` updates. The first call creates `logdir`, unless the run writes no files.

        Returns:
          Result by RLlib's old and new names: docs/rllib-users.md lists them. `done` is whether a criterion of `stop`
          is met or a callback has ended the run.
        Raises:
          FloatingPointError: an update was not finite; names the bundle for `python -m jrl.debug`.
        """
        if self._stopped:
            raise RuntimeError("this Algorithm is stopped: build another, or restore a checkpoint")
        session = self.session
        self._open_files()
        if session.callback_list:
            session.callback_list.ended = None  # another call continues the run
        rows = session.reporter.count
        while session.reporter.count == rows:
            info = session.advance()
            assert info is not None  # a session without an end
            if reporter.is_not_finite(info):
                path = session.write_fault(self.logdir, info)
                self._close_files(ended=False)
                raise FloatingPointError(f"an update was not finite; python -m jrl.debug {path} finds the cause")
            session.finish_call(info)
            if self._member and session.reporter.count > rows:
                self._member.save_if_due(info)
        assert session.result is not None
        met = reporter.end_by_criteria(session.config.stop, session.config.run.smoothing_episodes)(
            session.reporter.row or {}
        )
        total = Sizes(session.config).total_steps
        done = bool(met or session.end_reason) or (total is not None and session.counted() >= total)
        result = {**copy.deepcopy(session.result), "done": done, **self._build_about()}
        self.log_result(result)
        return result

    def log_result(self, result: dict[str, Any]) -> None:
        """Hook of subclasses: `train` calls it with each result before it returns; the hook may change the result."""

    def _build_about(self) -> dict[str, Any]:
        """Returns the keys of a result about this process and the run."""
        result, since = self.session.result or {}, self._restored
        named = {"iterations": "training_iteration", "timesteps": "timesteps_total", "time": "time_total_s"}
        return {
            "config": self.config.to_dict(), "hostname": socket.gethostname(), "node_ip": _node_ip(),
            "pid": os.getpid(), "date": f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}", "trial_id": "default",
            **{f"{name}_since_restore": result[key] - since[key] for name, key in named.items()},
        }  # fmt: skip

    @property
    def iteration(self) -> int:
        """Number of calls of `train`, also before a restore."""
        return self.session.reporter.count

    training_iteration = iteration

    @property
    def env_steps(self) -> int:
        """Environment steps so far, or updates in a run from data alone. Waits for unfinished steps."""
        return self.session.counted()

    def evaluate(self, duration: int | None = None) -> dict[str, Any]:
        """Evaluates now, for `duration` episodes or timesteps (None: the config's duration). Return the metrics."""
        return results.build_evaluation(self.session.evaluate(duration))

    @property
    def evaluation_workers(self) -> Any:
        return self.session.evaluation_workers

    eval_env_runner_group = evaluation_workers

    def set_task(self, task: Any) -> None:
        """Sets the task of all environments."""
        self.session.set_task(task)

    def foreach_worker(self, func: Callable[[Any], Any]) -> list[Any]:
        """Returns `func(worker)` of all collectors, as `workers.foreach_worker`."""
        return self.workers.foreach_worker(func)

    def sample_replay(self) -> Batch | SequenceBatch:
        """Returns a batch of the replay or data sets, in numpy. Raises InputError: no replay, or an empty one."""
        return self.session.manual_steps.sample_replay()

    # ------------------------------------------------------------ policies

    def get_policy(self, policy_id: str = POLICY) -> ActionPolicy:
        """Returns a policy, which acts for one agent and has the outputs of its networks.

        Raises:
          KeyError: unknown policy, or no name with several policies.
        """
        session = self.session
        name = find_policy_ids(session).resolve(policy_id)
        if name not in self._policies:
            cfg, spec = session.config, session.run.spec
            if session.policies:
                cfg, spec = session.run.policies.of(name)
            acting = actor.build_training_actor(cfg, spec._replace(num_envs=spec.num_agents), seed=cfg.run.seed)
            self._policies[name] = ActionPolicy(session, acting, name)
        return self._policies[name]

    @property
    def policy_map(self) -> dict[str, ActionPolicy]:
        """Policy id -> policy, for all policies of the run."""
        return {name: self.get_policy(name) for name in find_policy_ids(self.session).ids}

    def compute_single_action(self, observation: Any, state: Any = None, *, policy_id: str = POLICY, **how: Any):
        """Returns the action for one observation of one agent: see `ActionPolicy.compute_single_action`."""
        return self.get_policy(policy_id).compute_single_action(observation, state, **how)

    def compute_actions(self, observations: Any, state: Any = None, *, policy_id: str = POLICY, **how: Any):
        """Returns the actions for many observations: see `ActionPolicy.compute_actions`."""
        return self.get_policy(policy_id).compute_actions(observations, state, **how)

    def add_policy(
        self, policy_id: str, policy_cls: Any = None, policy: Any = None, *, config: Mapping[str, Any] | None = None,
        policy_state: PyTree | None = None, policy_mapping_fn: _MappingArg = None, policies_to_train: _Trained = None,
        **where: Any,
    ) -> ActionPolicy:  # fmt: skip
        """Adds a policy, by default with the first policy's settings, and returns it. Rebuilds the run, for seconds.

        Args:
          policy_id: id of the new policy.
          policy_cls, policy, where: ignored arguments of RLlib: jrl has one stack, and the run has the spaces.
          config: settings that differ from the first policy's, such as `lr`, by RLlib's or jrl's names.
          policy_state: initial state, as `get_policy("main").get_state()` returns it; None: new weights.
          policy_mapping_fn: (agent, episode) -> policy, or {agent: policy} with all policies; None: unchanged.
          policies_to_train: policies that learn, or a function name -> whether it learns; None: unchanged.
        Raises:
          InputError: the id exists, or mapping or training name an unknown policy.
        """
        _check_ignored("add_policy", where)
        own = None
        if config:
            own = config_class(algo_name(self.session.config)).build_sections(config)
        train = _to_name_function(policies_to_train)
        self.session.add_policy(policy_id, state=policy_state, own=own, mapping=policy_mapping_fn, train=train)
        made = self.get_policy(policy_id)
        if self.session.callback_list:
            self.session.callback_list.call("on_create_policy", policy_id=policy_id, policy=made)
        return made

    def remove_policy(
        self,
        policy_id: str,
        *,
        policy_mapping_fn: _MappingArg = None,
        policies_to_train: _Trained = None,
        **where: Any,
    ) -> None:
        """Removes a policy; arguments as in `add_policy`. Raises InputError: unknown, or used by the mapping."""
        _check_ignored("remove_policy", where)
        self.session.remove_policy(policy_id, mapping=policy_mapping_fn, train=_to_name_function(policies_to_train))
        self._policies.pop(policy_id, None)

    def add_module(self, module_id: str, module_spec: Any = None, **options: Any) -> ActionPolicy:
        """Calls `add_policy`, with the names of RLlib's newer stack."""
        return self.add_policy(module_id, **{_MODULE_ARGUMENTS.get(name, name): x for name, x in options.items()})

    def remove_module(self, module_id: str, **options: Any) -> None:
        """Calls `remove_policy`, with the names of RLlib's newer stack."""
        self.remove_policy(module_id, **{_MODULE_ARGUMENTS.get(name, name): x for name, x in options.items()})

    def _own_name(self, policy_id: str) -> str | None:
        """Returns the id of a policy; None for the only policy of a run."""
        return find_policy_ids(self.session).resolve(policy_id) if self.session.policies else None

    # ------------------------------------------------------------ weights

    def get_weights(self, policies: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns policy -> field of the State -> numpy arrays. Raises KeyError: unknown policy."""
        return self.workers.local_worker().get_weights(policies)

    def import_weights(
        self, path: str | Path, mapping: Mapping[str, str] | None = None, *, policy_id: str = POLICY
    ) -> list[str]:
        """Sets parameters to arrays of a file, also in target networks, and returns the names of the parameters.

        Args:
          path: `*.npz` or `*.safetensors`; no content is executed.
          mapping: name of a parameter, as in `get_policy().parameters()` -> name of an array in the file. A suffix
            `.T` transposes the array, as matrices of torch need. None: equal names.
          policy_id: policy.
        Raises:
          InputError: the file cannot be read, unknown names, or other shapes.
        """
        name = self._own_name(policy_id)
        weights, names = read_weights(resolve(path, "import_weights", "file"), mapping, self.session.get_weights(name))
        self.session.set_weights(weights, name)
        return names

    # ------------------------------------------------------------ checkpoints and stop

    @property
    def logdir(self) -> Path:
        """Run directory, created on first use: `run.out`, or runs/<algorithm>_<env>_<time>."""
        cfg = self.session.config
        if cfg.run.out:
            self._directory = Path(cfg.run.out)
        if self._directory is None:
            name = f"{algo_name(cfg)}_{datasets.title(cfg)}_{datetime.datetime.now():%Y%m%d-%H%M%S}"
            self._directory = files.make_numbered(self._runs / name.replace("/", "-").replace(":", "-"))
        return self._directory

    def save(self, path: str | Path | None = None) -> Saved:
        """Writes a checkpoint for `restore`, `from_checkpoint` and `jrl.load`, and return its path.

        Args:
          path: new or empty directory; None: a new directory under `logdir`.
        """
        session = self.session
        if path is None:
            if self._member:
                self._member.check(wait=True)  # waits for an unfinished checkpoint of the same iteration
            target = self.logdir / "checkpoints" / str(session.iteration)
            again = itertools.count(2)
            while target.exists():
                target = target.with_name(f"{session.iteration}-{next(again)}")
        else:
            target = resolve(to_path(path), "save", "new directory")
            if target.exists() and any(target.iterdir()):
                raise InputError(f"save: {target} exists: name another, or leave the path out")
        parts, description = session.to_save()
        try:
            checkpoint.write(target, checkpoint.copy_to_host(parts), {**description, "keep": True})
        except OSError as e:
            raise unwritable(target, "save", e) from e
        if path is None:
            self._saved = session.iteration
        made = Saved(target)
        made.metrics = dict(session.result or {})
        return made

    save_to_path = save_checkpoint = save

    def export_policy_model(
        self, export_dir: str | Path, policy_id: str = POLICY, onnx: int | None = None, *, format: str = "npz"
    ) -> dict[str, Any]:
        """Writes the policy as files that run without jrl, and returns a description of them: see `jrl.export`.

        Args:
          export_dir: directory; an earlier export in it is replaced.
          policy_id: policy.
          onnx: argument of RLlib; a number selects the format onnx.
          format: npz, stablehlo, onnx or c.
        Raises:
          InputError: the format cannot express the policy, or a library is not installed.
        """
        from jrl.export.__main__ import export

        self.get_policy(policy_id)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "checkpoint"
            checkpoint.write(path, checkpoint.copy_to_host(self.session.parts()), self.session.description())
            given = {"best": False, "out": str(export_dir), "policy": self._own_name(policy_id)}
            return export(argparse.Namespace(checkpoint=str(path), format="onnx" if onnx else format, **given))

    export_model = export_policy_model

    def export_policy_checkpoint(self, export_dir: str | Path, policy_id: str = POLICY) -> Saved:
        """Calls `save(export_dir)`, which saves all policies; `jrl.load(path, policy=...)` loads one."""
        self.get_policy(policy_id)
        return self.save(export_dir)

    def restore(self, path: str | Path) -> None:
        """Continues from a checkpoint of a run with this config. Raises InputError: missing, or of another config."""
        found = checkpoint.locate(to_path(path))
        self._close(ended=False)
        self._open(found)

    load_checkpoint = restore_from_path = restore

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, policy_ids: Collection[str] | None = None, policy_mapping_fn: _MappingArg = None,
        policies_to_train: _Trained = None,
    ) -> "Algorithm":  # fmt: skip
        """Returns the Algorithm of a checkpoint, with its config.

        Args:
          path: checkpoint.
          policy_ids: policies for a new run with only these policies; None: continue the run with all policies.
          policy_mapping_fn, policies_to_train: settings of the new run; None: unchanged.
        Raises:
          InputError: no checkpoint, unknown policies, or a mapping with other policies.
        """
        found = checkpoint.locate(to_path(path))
        made = AlgorithmConfig.from_dict(checkpoint.read_meta(found)["config"])
        own = cls if cls.algo_name else algorithm_class(made.algo_name)
        if policy_ids is None:
            return own(made, checkpoint=found)
        states = base_session.load_states(found, policy_ids)
        given = made.to_run_config().multi_agent
        assert given is not None  # `states` would have raised
        changes = {"policy_mapping_fn": policy_mapping_fn, "policies_to_train": policies_to_train}
        kept = {name: given.policies.get(name, {}) for name in states}
        made.multi_agent(policies=kept, **{name: x for name, x in changes.items() if x is not None})
        new = own(made)
        new.session.take_over(states)
        return new

    def stop(self) -> None:
        """Ends the run's environments, processes and threads. Later calls do nothing.

        A run directory, if any, gets a last checkpoint and the learning curve.
        """
        self._close(ended=True)

    cleanup = stop

    def _close(self, *, ended: bool) -> None:
        self._policies, self._stopped = {}, True
        try:
            self._close_files(ended=ended)
        finally:
            self.session.close()

    def _close_files(self, *, ended: bool) -> None:
        """Closes the files. If the run has ended, write a last checkpoint and the learning curve first."""
        session, member = self.session, self._member
        written = member and member.checkpoints
        saved = (0, self._saved, written and written.last_saved)
        try:
            alive = ended and member and not any(x.is_deleted() for x in jax.tree.leaves(session.state.learner))
            if alive and session.iteration not in saved:
                self.save()
        finally:
            self._member = None
            self._files.close()
            session.sinks.clear()
        if ended and member and "jsonl" in session.config.run.log:
            run_directory.plot(session, member.directory)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the content of a checkpoint: `config`, `arrays`, and `meta` with counters and spaces."""
        session = self.session
        arrays = checkpoint.copy_to_host(session.parts())
        return {"config": self.config.to_dict(), "arrays": arrays, "meta": session.description()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continues from the result of `__getstate__`. Raises InputError: another config."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "checkpoint"
            checkpoint.write(path, state["arrays"], state["meta"])
            if "session" in vars(self):
                self.restore(path)
            else:  # called by copy or pickle
                made: Any = self
                made.__init__(AlgorithmConfig.from_dict(state["config"]), checkpoint=path)

    def __getattr__(self, name: str) -> Any:
        raise hints.build_error(self, name, "algorithm")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


@functools.cache
def _node_ip() -> str:
    """Returns the address of this machine, or the loopback address if the machine's name has no address."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _to_name_function(train: _Trained) -> Any:
    """Returns policies to train with a function (policy, batch) of RLlib as a function of the name."""
    if not callable(train):
        return train
    try:
        inspect.signature(train).bind("policy", None)
    except TypeError:
        return lambda name: bool(train(name))
    return lambda name: bool(train(name, None))


def _check_ignored(what: str, where: Mapping[str, Any]) -> None:
    if unknown := [name for name in where if name not in _IGNORED]:
        raise TypeError(f"{what}() got an unexpected keyword argument {unknown[0]!r}")
