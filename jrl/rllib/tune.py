"""Ray Tune with Algorithms as trainables, and all names of `ray.tune`.

`Tuner`, `run`, `with_resources` and `with_parameters` also take the name of an algorithm or an Algorithm class.
docs/tune.md has examples.
"""

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jrl import algos, registry
from jrl.config import RunConfig as _RunConfig
from jrl.errors import InputError, cannot_import
from jrl.rllib import algorithm_class
from jrl.rllib.algorithm import Algorithm
from jrl.rllib.builder import AlgorithmConfig, register_ray_environment
from jrl.rollout import ray_cluster
from jrl.rollout.ray_cluster import RunnerOptions

# keys that Tune adds to each result
_TUNE_KEYS = {
    "config", "hostname", "node_ip", "pid", "date", "trial_id", "iterations_since_restore", "timesteps_since_restore",
    "time_since_restore",
}  # fmt: skip
_MAX_CHECKED = 100  # variants of a search space that are checked before the first trial


def _import_tune() -> Any:
    try:
        from ray import tune
    except ImportError as e:
        raise InputError("jrl.api.tune: " + cannot_import("ray.tune", e, '"ray[tune]"')) from e
    return tune


class _Trial:
    """Methods of ray.tune.Trainable for an Algorithm. See `trainable`."""

    algorithm_class: ClassVar[type[Algorithm]]
    registered: ClassVar[dict[str, Any]]

    def setup(self, config: dict[str, Any]) -> None:
        registry.install(self.registered)
        _use_reserved_devices()
        self._algorithm: Algorithm | None = None
        self._configure(config)

    def _configure(self, config: Mapping[str, Any]) -> None:
        made = self.algorithm_class.read_config(config)
        out = made.to_run_config().run.out
        if out is not None and os.path.isabs(out):
            raise InputError(
                f"run.out: expected a path relative to the trial's directory, got {out}, which all trials would write: "
                "leave it out"
            )
        self._settings = made if out else made.debugging(log=[])  # Tune writes rows itself

    @property
    def algorithm(self) -> Algorithm:
        """Algorithm of the trial, built on first use, so that a trial from a checkpoint builds only one."""
        if self._algorithm is None:
            self._algorithm = self.algorithm_class(self._settings)
        return self._algorithm

    def step(self) -> dict[str, Any]:
        found = self.algorithm.train()
        found = {name: value for name, value in found.items() if name not in _TUNE_KEYS}
        # Tune's tables show columns with known names, and the first four other columns
        first = ("episode_return_mean", "episode_return_min", "episode_return_max", "episode_len_mean")
        return {**{name: found[name] for name in first}, **found}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self.algorithm.save(checkpoint_dir)

    def load_checkpoint(self, checkpoint: str) -> None:
        """Loads weights, optimizer and counters of a checkpoint, but not hyper-parameters."""
        if self._algorithm is not None:
            self._algorithm.restore(checkpoint)
        else:
            self._algorithm = self.algorithm_class(self._settings, checkpoint=checkpoint)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._configure(new_config)
        return True

    def cleanup(self) -> None:
        found, self._algorithm = self._algorithm, None
        if found is not None:
            found.stop()

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        try:
            return resources(cls.algorithm_class.read_config(config).to_run_config())
        except InputError:  # the trial reports it
            return None


def trainable(algorithm: "str | type[Algorithm]", space: Any = None) -> Any:
    """Returns a subclass of `ray.tune.Trainable` that trains an algorithm.

    A step is one `Algorithm.train`; Tune gets its result. `jrl.load` opens the checkpoints. `resources` are the
    resources of a trial.

    Args:
      algorithm: name, such as "PPO", or Algorithm class.
      space: config with searches; the trial gets the registered objects that it names. None: all registered objects.
    Raises:
      InputError: unknown algorithm.
    """
    cls = algorithm_class(algorithm) if isinstance(algorithm, str) else algorithm
    members = {"algorithm_class": cls, "registered": _find_registered(space), "__doc__": cls.__doc__}
    return type(cls.__name__, (_Trial, _import_tune().Trainable), members)


def _find_registered(space: Any) -> dict[str, Any]:
    if isinstance(space, Mapping):
        register_ray_environment(space.get("env"))
    return registry.all_registered() if space is None else registry.find_registered(space)


def resources(cfg: _RunConfig) -> Any:
    """Returns the resources of a trial, a `ray.tune.PlacementGroupFactory`.

    The first bundle is for the learner's process: a CPU, and in a cluster with GPUs a GPU for each device of
    `devices.learners` and `devices.actors`, by default one. Each env runner, for training and for evaluation, has a
    bundle with its CPUs, GPUs and custom resources.
    """
    import ray

    given = {f: getattr(cfg.env_runners, f) for f in ("num_cpus", "num_gpus", "custom_resources")}
    runner = RunnerOptions(**given).resources()
    main = {"CPU": 1.0}
    on_cpu = cfg.devices.fake or cfg.devices.platform == "cpu"
    if not on_cpu and ray.is_initialized() and ray.cluster_resources().get("GPU"):
        main["GPU"] = float(len({*(cfg.devices.learners or (0,)), *(cfg.devices.actors or ())}))
    count = cfg.env_runners.num + cfg.evaluation.num_env_runners
    bundles = [main] + [runner] * (count if runner else 0)
    return _import_tune().PlacementGroupFactory(bundles, strategy=cfg.env_runners.placement)


def _use_reserved_devices() -> None:
    """Limit jax to the devices reserved for this trial, and to its share of a GPU. Call before jax finds devices."""
    import jax
    import ray

    if not ray.is_initialized() or not ray.get_runtime_context().get_actor_id():
        return
    share = ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0)
    if 0.0 < share < 1.0:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    elif not share and ray.cluster_resources().get("GPU"):
        jax.config.update("jax_platforms", "cpu")


def _check_space(algorithm: type[Algorithm], space: Mapping[str, Any]) -> None:
    """Checks the first variants of a search space. Raises InputError."""
    import numpy as np
    from ray.tune.search.variant_generator import generate_variants

    variants = generate_variants({"config": dict(space)}, random_state=np.random.RandomState(0))
    for chosen, variant in itertools.islice(variants, _MAX_CHECKED):
        try:
            algorithm.read_config(variant["config"]).to_run_config()
        except InputError as e:
            where = ", ".join(f"{'/'.join(map(str, path[1:]))}={value}" for path, value in chosen.items())
            raise InputError(*(f"{line} (with {where})" if where else line for line in e.errors)) from None


def _with_registered(fn: Callable) -> Callable:
    """Returns a function trainable that first registers the user's objects in its process."""
    registered = registry.all_registered()

    @functools.wraps(fn)
    def run(*args: Any, **keywords: Any) -> Any:
        registry.install(registered)
        return fn(*args, **keywords)

    return run


def _build_trainable(given: Any, space: Any = None) -> Any:
    """Returns the trainable of a name, an Algorithm class or a trainable."""
    if isinstance(given, type) and issubclass(given, Algorithm):
        return trainable(given, space)
    if isinstance(given, type) and issubclass(given, _Trial):  # with the objects that are registered now
        return type(given.__name__, (given,), {"registered": _find_registered(space), "__doc__": given.__doc__})
    if isinstance(given, str):
        from ray.tune.registry import TRAINABLE_CLASS, _global_registry

        # Tune registers trainables by their class name, so a name of an algorithm always means the algorithm
        is_tunes = algos.spelled(given) not in algos.names() and _global_registry.contains(TRAINABLE_CLASS, given)
        return given if is_tunes else trainable(given, space)
    return _with_registered(given) if inspect.isroutine(given) else given


def _prepare(given: Any, space: Any, *, check: bool = True) -> tuple[Any, Any]:
    """Returns the trainable and the search space for Tune. Raises InputError."""
    _import_tune()
    if isinstance(space, AlgorithmConfig):
        if isinstance(given, str) and algos.spelled(given) == space.algo_name and space.algo_class:
            given = space.algo_class
        named = algos.spelled(given) if isinstance(given, str) else getattr(given, "algo_name", space.algo_name)
        if named != space.algo_name:
            raise InputError(f"param_space: expected a config of {named}, got one of {space.algo_name}")
        space = space.arguments()
    made = _build_trainable(given, space)
    if check and isinstance(made, type) and issubclass(made, _Trial):
        _check_space(made.algorithm_class, space or {})
    return made, space


def with_resources(trainable: Any, resources: Any) -> Any:
    """Calls `ray.tune.with_resources`, also with the name of an algorithm or an Algorithm class."""
    return _import_tune().with_resources(_build_trainable(trainable), resources)


def with_parameters(trainable: Any, **parameters: Any) -> Any:
    """Calls `ray.tune.with_parameters`; a function trainable also gets the objects that are registered now."""
    return _import_tune().with_parameters(_build_trainable(trainable), **parameters)


def run(run_or_experiment: Any, *, config: Any = None, **keywords: Any) -> Any:
    """Calls `ray.tune.run`, also with the name of an algorithm or an Algorithm class. `Tuner` is newer."""
    made, space = _prepare(run_or_experiment, config)
    _start_ray()
    return _import_tune().run(made, config=space, **keywords)


def _start_ray() -> None:
    """Starts Ray on the loopback, unless this process or $RAY_ADDRESS already has a cluster."""
    import ray

    is_elsewhere = os.environ.get("RAY_ADDRESS") or os.environ.get("TUNE_DISABLE_AUTO_INIT") == "1"
    if not ray.is_initialized() and not is_elsewhere:
        with ray_cluster.on_loopback(ray):
            ray.init()


@functools.cache
def _build_tuner() -> type:
    base: Any = _import_tune().Tuner

    class Tuner(base):
        """`ray.tune.Tuner` that also takes algorithms.

        Args:
          trainable: name of an algorithm, Algorithm class, function, or Trainable.
          param_space: for an algorithm an AlgorithmConfig with searches, or a dict: of arguments of its methods, of
            sections of the config tree, or of RLlib's older keys.
          tune_config, run_config: as in Tune. `TuneConfig(reuse_actors=True)` saves starts of processes.
        Raises:
          InputError: all faults of the first 100 variants of the space, before a trial starts.
        """

        def __init__(self, trainable: Any = None, *, param_space: Any = None, **keywords: Any):
            if trainable is not None:
                trainable, param_space = _prepare(trainable, param_space)
            super().__init__(trainable, param_space=param_space, **keywords)

        def fit(self) -> Any:
            _start_ray()
            return super().fit()

        @classmethod
        def restore(cls, path: str, trainable: Any, *args: Any, param_space: Any = None, **keywords: Any) -> Any:
            """Restores a Tuner, with its trainable and param_space."""
            trainable, param_space = _prepare(trainable, param_space, check=False)
            return super().restore(path, trainable, *args, param_space=param_space, **keywords)

    Tuner.__module__, Tuner.__qualname__ = __name__, "Tuner"
    return Tuner


def __getattr__(name: str) -> Any:
    if name == "Tuner":
        return _build_tuner()
    if name.startswith("__"):
        raise AttributeError(name)
    found = getattr(_import_tune(), name, None)
    if found is None:
        raise AttributeError(f"jrl.api.tune and ray.tune have no {name}")
    return found
