"""Processes of environment runners: their resources, their placement by Ray, and their end."""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jrl.errors import EnvironmentFailed, InputError
from jrl.host import runtime

_GOODBYE = 1.0  # seconds for idle runners to close their environments


class RunnerOptions(NamedTuple):
    """K environment runners: resources, placement and the reaction to failures."""

    num: int = 1
    num_cpus: float = 1.0  # per runner, may be a fraction
    num_gpus: float = 0.0  # per runner, may be a fraction; 0: the runner acts on the CPU
    custom_resources: Mapping[str, float] = {}  # per runner
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    address: str | None = None  # Ray cluster, or "auto"; None: $RAY_ADDRESS, else a cluster for this run only
    max_requests_in_flight: int = 2  # pending rollouts per runner in asynchronous mode
    ignore_env_runner_failures: bool = False  # continue without a failed runner
    recreate_failed_env_runners: bool = False  # replace a failed runner
    max_restarts: int = 1000  # over all runners
    sample_timeout_s: float = 180.0  # maximum seconds for a rollout
    health_check_timeout_s: float = 60.0  # maximum seconds to start; also added for the first rollout, which compiles

    def resources(self) -> dict[str, float]:
        """Returns the resources of one runner, by Ray's names, without zeros."""
        found = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.custom_resources}
        return {name: float(amount) for name, amount in found.items() if amount > 0}


def check_fits(options: RunnerOptions, nodes: Sequence[Mapping[str, float]]) -> None:
    """Checks that the runners fit into the otherwise empty cluster.

    Args:
      nodes: resource name -> amount, of each node.
    Raises:
      InputError: they do not fit.
    """
    need = options.resources()
    total = {name: sum(node.get(name, 0.0) for node in nodes) for node in nodes for name in node}
    for name in need:
        if not total.get(name):
            key = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(name, "custom_resources")
            known = ", ".join(sorted(n for n in total if not n.startswith("node:")))
            raise InputError(f"env_runners.{key}: no node of the Ray cluster has {name!r}; they have {known}")
    if not need:
        return
    room = [int(min((node.get(name, 0.0) + 1e-9) // amount for name, amount in need.items())) for node in nodes]
    most = {"STRICT_PACK": max(room), "STRICT_SPREAD": sum(r > 0 for r in room)}.get(options.placement, sum(room))
    if most < options.num:
        each = ", ".join(f"{amount:g} {name}" for name, amount in need.items())
        has = ", ".join(f"{total[name]:g} {name}" for name in need)
        raise InputError(
            f"env_runners.num: {options.num} runners with {each} each, placement {options.placement}, need more than "
            f"the Ray cluster has ({has} on {len(nodes)} node{'s' * (len(nodes) > 1)}: at most {most} runners); "
            "ask for fewer, or for less of each (env_runners.num_cpus may be a fraction)"
        )


class Failure(Exception):
    """A call to a runner without a result: the cause as text, and the exception of its code, if any."""

    def __init__(self, cause: str, raised: Exception | None = None, details: str = ""):
        super().__init__(cause)
        self.raised, self.details = raised, details


class Cluster:
    """A connection to Ray with a place for every runner; ends everything that was started here.

    Args:
      ray: ray module.
      options: options of the runners.
      host: actor class; its method `started` returns once the actor is made, and it has `close`.
      store: bytes of the object store, if Ray is started here.
    """

    def __init__(self, ray: Any, options: RunnerOptions, host: type, store: int):
        self._ray, self._options = ray, options
        self._group: Any = None
        self._shared = False  # whether the group belongs to this process's caller, and must not be removed
        self._begun = not ray.is_initialized()
        if self._begun:
            self._connect(store)
        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            check_fits(options, [node["Resources"] for node in nodes])
            here = len(nodes) == 1 and nodes[0]["NodeManagerAddress"] == ray.util.get_node_ip_address()
            self._place()
            self._host = ray.remote(host)
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
            # GPUs are not checked here: assume that there are enough
            check_fits(options, [{"CPU": os.cpu_count() or 1, "GPU": options.num * options.num_gpus}])
            own = {"include_dashboard": False, "object_store_memory": max(store, 75 * 2**20)}
        elif address != "auto" and "://" not in address:
            _check_address(address)  # Ray itself would retry for many minutes
        # process groups, so that processes of an environment end with its runner
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_process_group_cleanup_enabled": "1"}
        logging.getLogger("ray").setLevel(logging.ERROR)
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        with _signals_kept(), _environ(settings), reached, warnings.catch_warnings():
            # threads of jax are harmless here: the forked process starts another program at once
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
            try:
                self._ray.init(address=address, namespace="jrl", **quiet, **own)
            except (ConnectionError, ValueError, RuntimeError, self._ray.exceptions.RayError) as e:
                if address == "local":
                    raise
                fix = "`ray start --head` starts one, and without the key the run begins its own"
                cause = "none is running on this machine" if address == "auto" else " ".join(str(e).split())[:300]
                raise InputError(f"env_runners.address: no Ray cluster at {address}: {cause}: {fix}") from e

    def _place(self) -> None:
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
        """Returns this process's placement group if its children belong there, as in a trial of Ray Tune; else None."""
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

    def start(self, index: int, *args: Any) -> tuple[Any, Any]:
        """Starts the actor host(*args) as runner `index`; returns the actor and the reference of its start."""
        settings = dict(self._settings)
        if self._group is not None:
            place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            bundle = -1 if self._shared else index  # -1: any bundle with room
            settings["scheduling_strategy"] = place(self._group, placement_group_bundle_index=bundle)
        actor = self._host.options(**settings).remote(*args)
        return actor, actor.started.remote()

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def wait(self, refs: Sequence[Any], seconds: float) -> int | None:
        """Waits for the first result; returns its position in `refs`, or None after `seconds`."""
        if not refs:
            return None
        found, _ = self._ray.wait(list(refs), num_returns=1, timeout=max(0.0, seconds))
        return refs.index(found[0]) if found else None

    def get(self, ref: Any) -> Any:
        """Returns the result of a call. Raises Failure, or the InputError of the call."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayTaskError as e:
            text, cause = re.sub(r"\x1b\[[0-9;]*m", "", str(e)), e.cause
            if isinstance(cause, InputError):  # every other runner would fail, too
                raise InputError(*cause.errors) from None
            if isinstance(cause, EnvironmentFailed):  # its message has the user's own lines
                raise Failure(str(cause), e, details=text) from None
            raise Failure(text, e) from None
        except errors.RayError as e:
            raise Failure(in_words(str(e)), details=str(e)) from None

    def kill(self, actor: Any) -> None:
        self._ray.kill(actor)

    def close(self, actors: Sequence[Any], idle: Sequence[Any]) -> None:
        """Ends the actors, the `idle` ones after closing their sources, and Ray if it was started here."""
        ray = self._ray
        try:
            if not ray.is_initialized():
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
            if self._begun:
                with _signals_kept():
                    ray.shutdown()


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, ValueError) as e:
        raise InputError(
            f"env_runners.address: no answer from {address} ({e}); expected host:port of a Ray cluster's head, "
            "or auto for one that was started on this machine"
        ) from e


def _environment(options: RunnerOptions, here: bool) -> dict[str, str]:
    """Returns the environment variables of the runners; `here`: all runners are on this machine."""
    found = runtime.runner_environment()
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
    """Makes a Ray that is started within listen on the loopback only, so that no other machine can reach its ports.

    `ray.init(_node_ip_address="127.0.0.1")` does not suffice: Ray replaces that address by a reachable one, except
    where it excludes clusters of several machines. This is its default on macOS and Windows, by a variable that each of
    its processes reads on import. A value set by the user is kept.
    """
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    constants: Any = getattr(getattr(ray, "_private", None), "ray_constants", None)
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    if name in os.environ or before is None:
        yield
        return
    with _environ({name: "0"}):
        constants.ENABLE_RAY_CLUSTER = False
        try:
            yield
        finally:
            constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _environ(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for processes started within, unless the user has set them."""
    new = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restores the SIGTERM handler, which Ray replaces; a terminated run must save a checkpoint."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def in_words(error: str) -> str:
    """Returns why an actor is gone, from Ray's error text."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", error)
    pid, ip = (re.search(rf"^\t?{name}: (\S+)", text, re.MULTILINE) for name in ("pid", "ip"))
    process = f"its process{f' {pid[1]}' if pid else ''}{f' on {ip[1]}' if ip else ''}"
    lower = text.lower()
    if "out of memory" in lower and "oom killer" not in lower:
        fix = "ask for fewer env.num_envs or env_runners.num"
        return f"{process} was ended by Ray, as the memory of its machine was used up: {fix}"
    if re.search(r"node (has|was|is|it) .*(died|dead|terminated|failed)|node has died", lower):
        return f"the machine of {process} has left the cluster: it is down, or cannot be reached"
    if "worker process has died" in lower or "connection error" in lower:
        return f"{process} has ended: it was killed (by the system, for want of memory?), crashed, or called exit"
    return text
