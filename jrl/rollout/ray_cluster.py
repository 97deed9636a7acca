"""The processes of environment runners: what each of them holds, where Ray places them, and their end."""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import EnvironmentFailed, InputError, RunnersLost
from jrl.host import runtime
from jrl.metrics import episodes
from jrl.rollout import compression
from jrl.rollout.ray_health import Lifeline, in_words
from jrl.rollout.runner_health import RunnerOptions, check_fits
from jrl.types import Key, PyTree

_LOOK = 5.0  # seconds between two looks at whether Ray lives
_GOODBYE = 1.0  # seconds for idle runners to close their environments


# ---------------------------------------------------------------- in the process of a runner


class Host:
    """Holds the source of a runner. With a `codec`, it sends observations as `compression.pack` makes them."""

    def __init__(
        self,
        make: Callable[[int, int], Any],
        index: int,
        restarts: int,
        columns: episodes.Columns | None,
        codec: str | None = None,
    ):
        self._source, self._codec = make(index, restarts), codec
        if columns is not None:
            self._source.columns = columns

    def started(self) -> None:
        pass

    def next(self, actor: PyTree, key: np.ndarray, impl: str, number: int):
        # uploaded once, not at each of the T steps
        rollout, report = self._source.next(jax.device_put(actor), _key(key, impl, number))
        rollout, report, columns = jax.device_get((rollout, report, self._source.columns))
        if self._codec is not None:
            rollout = compression.pack(rollout, self._codec)
        return rollout, report, columns, dict(self._source.metrics)

    def call(self, fn: Callable, *args: Any) -> Any:
        return fn(self._source, *args)

    def close(self) -> None:
        self._source.close()


def _key(data: np.ndarray, impl: str, number: int) -> Key:
    return jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(data), impl=impl), number)


def reset(source, data: np.ndarray, impl: str, number: int) -> episodes.Columns:
    source.reset(_key(data, impl, number))
    return jax.device_get(source.columns)


def set_columns(source, columns: episodes.Columns) -> None:
    source.columns = columns


def foreach_env(source, fn: Callable[[Any], Any]) -> list[Any]:
    return list(source.foreach_env(fn))


# ---------------------------------------------------------------- Ray


class Failure(Exception):
    """A call to a runner had no result: the cause as text, and what its code raised, if that was it."""

    def __init__(self, cause: str, raised: Exception | None = None, details: str = ""):
        super().__init__(cause)
        self.raised, self.details = raised, details


def answers(
    cluster: Any, calls: Sequence[tuple[Any, Any]], seconds: float, failed: Callable[[Any, str], None]
) -> Iterator[tuple[Any, Any]]:
    """(runner, what its call returned) of each (runner, reference) that answers; failed(runner, cause) of the others.

    What the code of a call raised is raised here.
    """
    for runner, ref in calls:
        try:
            if cluster.wait([ref], seconds) is None:
                raise Failure(f"no answer within {seconds:g} s")
            answer = cluster.get(ref)
        except Failure as e:
            if e.raised is not None:
                raise e.raised from None
            failed(runner, str(e))
        else:
            yield runner, answer


class Cluster:
    """A connection to Ray with a place for every runner, and the end of what was begun here.

    Args:
      ray: the module.
      options: of the runners.
      store: bytes of the object store, if Ray is begun here.
      codec: with which runners compress observations; None: not at all.
    """

    def __init__(self, ray: Any, options: RunnerOptions, store: int, codec: str | None = None):
        self._ray, self._options, self._codec = ray, options, codec
        self._group: Any = None
        self._shared = False  # the group is that of this process, and stays
        self._lost = False  # Ray itself is gone
        self._life: Lifeline | None = None
        self._begun = not ray.is_initialized()
        if self._begun:
            self._connect(store)
        try:
            self._life = Lifeline(ray, begun=self._begun)
            nodes = [node for node in ray.nodes() if node["Alive"]]
            check_fits(options, [node["Resources"] for node in nodes])
            here = len(nodes) == 1 and nodes[0]["NodeManagerAddress"] == ray.util.get_node_ip_address()
            self._place()
            self._host = ray.remote(Host)
            self._settings = {
                "num_cpus": options.num_cpus,
                "num_gpus": options.num_gpus,
                "resources": dict(options.custom_resources),
                "runtime_env": {"env_vars": _environment(options, here)},
            }
        except BaseException:
            self.close([], [])
            raise

    def _connect(self, store: int) -> None:
        options = self._options
        address = options.address or os.environ.get("RAY_ADDRESS") or "local"
        own: dict[str, Any] = {}
        reached: contextlib.AbstractContextManager = contextlib.nullcontext()
        if address == "local":
            reached = on_loopback(self._ray)
            # a GPU is not looked for here: as many as are wanted
            check_fits(options, [{"CPU": os.cpu_count() or 1, "GPU": options.num * options.num_gpus}])
            own = {"include_dashboard": False, "object_store_memory": max(store, 75 * 2**20)}
        elif address != "auto" and "://" not in address:
            _answers(address)  # Ray itself would try for many minutes
        # what an environment of a runner has started ends with it
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_process_group_cleanup_enabled": "1"}
        logging.getLogger("ray").setLevel(logging.ERROR)
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        with _signals_kept(), _deaf_to_hangups(), _environ(settings), reached, warnings.catch_warnings():
            # that jax has threads does not matter to a process that starts a program at once
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
            try:
                self._ray.init(address=address, namespace="jrl", **quiet, **own)
            except (ConnectionError, ValueError, RuntimeError, self._ray.exceptions.RayError) as e:
                if address == "local":
                    raise
                mend = "`ray start --head` starts one, and without the key the run begins its own"
                told = "none is running on this machine" if address == "auto" else " ".join(str(e).split())[:300]
                raise InputError(f"env_runners.address: no Ray cluster at {address}: {told}: {mend}") from e

    def _place(self) -> None:
        """Reserves the resources of all runners."""
        options, need = self._options, self._options.resources()
        if not need:
            return
        self._group = self._reserved(need)
        if self._group is not None:
            self._shared = True
            return
        self._group = self._ray.util.placement_group([need] * options.num, strategy=options.placement)
        if not self._group.wait(options.health_check_timeout_s):
            raise InputError(
                f"env_runners.num: the Ray cluster has had no room for {options.num} runners for "
                f"{options.health_check_timeout_s:g} s: others use it, or its nodes are too small for placement "
                f"{options.placement}; ask for fewer, or wait longer (env_runners.health_check_timeout_s)"
            )

    def _reserved(self, need: Mapping[str, float]) -> Any:
        """The placement group of this process, if what it starts belongs there, as in a trial of Ray Tune; or None."""
        ray, options = self._ray, self._options
        group = ray.util.get_current_placement_group()
        if group is None or not ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
            return None
        own = ray.get_runtime_context().get_assigned_resources()
        for name, amount in need.items():
            left = sum(bundle.get(name, 0.0) for bundle in group.bundle_specs) - own.get(name, 0.0)
            if left < amount * options.num:
                raise InputError(
                    f"env_runners.num: {options.num} runners need {amount * options.num:g} {name}, and of what was "
                    f"reserved for this process {left:g} is left: reserve a bundle for each, such as "
                    f"tune.with_resources(fn, tune.PlacementGroupFactory([{{'CPU': 1}}] + [{dict(need)}] * "
                    f"{options.num}))"
                )
        return group

    def start(self, make: Callable[[int, int], Any], index: int, restarts: int, columns: Any) -> tuple[Any, Any]:
        """The actor that holds make(index, restarts), and the reference that comes when it has started."""
        settings = dict(self._settings)
        if self._group is not None:
            place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            bundle = -1 if self._shared else index  # -1: any that has room
            settings["scheduling_strategy"] = place(self._group, placement_group_bundle_index=bundle)
        actor = self._host.options(**settings).remote(make, index, restarts, columns, self._codec)
        return actor, actor.started.remote()

    def check(self) -> None:
        """Raises RunnersLost: Ray itself is gone."""
        if self._life is None:
            return
        try:
            self._life.check()
        except RunnersLost:
            self._lost = True
            raise

    def put(self, value: Any) -> Any:
        self.check()
        return self._ray.put(value)

    def wait(self, refs: Sequence[Any], seconds: float) -> int | None:
        """Position of the first that is there, in the order given; None if none is in time. Raises RunnersLost."""
        end = time.monotonic() + seconds
        while refs:
            self.check()
            left = end - time.monotonic()
            found, _ = self._ray.wait(list(refs), num_returns=1, timeout=max(0.0, min(left, _LOOK)))
            if found:
                return refs.index(found[0])
            if left <= _LOOK:
                break
        return None

    def get(self, ref: Any) -> Any:
        """What a call returned. Raises Failure, or the InputError that it raised."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayTaskError as e:
            text, cause = re.sub(r"\x1b\[[0-9;]*m", "", str(e)), e.cause
            if isinstance(cause, InputError):  # no other runner would do better
                raise InputError(*cause.errors) from None
            if isinstance(cause, EnvironmentFailed):  # its message has the user's lines
                raise Failure(str(cause), e, details=text) from None
            raise Failure(text, e) from None
        except errors.RayError as e:
            self.check()
            raise Failure(in_words(str(e)), details=str(e)) from None

    def kill(self, actor: Any) -> None:
        self._ray.kill(actor)

    def close(self, actors: Sequence[Any], idle: Sequence[Any]) -> None:
        """Ends the actors, the `idle` among them after they have closed their source, and Ray if it was begun here."""
        ray = self._ray
        try:
            if not ray.is_initialized() or self._lost:
                return
            with contextlib.suppress(Exception):
                if idle:
                    ray.wait([a.close.remote() for a in idle], num_returns=len(idle), timeout=_GOODBYE)
            for actor in actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor)
            if self._group is not None and not self._shared:
                with contextlib.suppress(Exception):
                    ray.util.remove_placement_group(self._group)
        finally:
            if self._life is not None:
                self._life.close()
            if self._begun:
                with _signals_kept():
                    ray.shutdown()


def _answers(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, ValueError) as e:
        raise InputError(
            f"env_runners.address: nobody answers at {address} ({e}); expected host:port of a Ray cluster's head, "
            "or auto for one that was started on this machine"
        ) from e


def _environment(options: RunnerOptions, here: bool) -> dict[str, str]:
    """Environment variables of the runners; `here`: on this machine only."""
    found = runtime.for_runners()
    if not options.num_gpus:
        found["JAX_PLATFORMS"] = "cpu"
    elif options.num_gpus < 1:
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # others share the device
    if here:
        found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if os.path.exists(path or "."))
        for name in ("compilation_cache_dir", "persistent_cache_min_compile_time_secs"):
            value = getattr(jax.config, f"jax_{name}")
            if value is not None:
                found[f"JAX_{name.upper()}"] = str(value)
    return found


@contextlib.contextmanager
def on_loopback(ray: Any) -> Iterator[None]:
    """Makes a Ray that is begun in here listen on the loopback only, so that no other machine reaches its ports.

    `ray.init(_node_ip_address="127.0.0.1")` does not: Ray replaces that address by one that others can reach, except
    where it rules out clusters of several machines. That is its own default on macOS and Windows, by a variable that it
    reads when it is imported, in each of its processes. Where the user has set the variable, it stays.
    """
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    constants = getattr(getattr(ray, "_private", None), "ray_constants", None)
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    if name in os.environ or before is None:
        yield
        return
    with _environ({name: "0"}):
        constants.ENABLE_RAY_CLUSTER = False  # type: ignore[union-attr]
        try:
            yield
        finally:
            constants.ENABLE_RAY_CLUSTER = before  # type: ignore[union-attr]


@contextlib.contextmanager
def _environ(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what is started meanwhile, unless they are set."""
    new = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


@contextlib.contextmanager
def _deaf_to_hangups() -> Iterator[None]:
    """Has what is started meanwhile, and what that starts, not told of a terminal that is closed, as Ray does it with
    Ctrl-C: a run saves a checkpoint first, and ends its Ray then.

    The mask of signals is inherited. A SIGHUP that comes meanwhile is this process's afterwards.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself; a run that is told to end has a checkpoint to save."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
