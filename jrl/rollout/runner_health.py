"""What can be said of environment runners without Ray: their settings, where they fit, whose turn it is."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jrl.errors import InputError
from jrl.types import Episodes, Rollout


class RunnerOptions(NamedTuple):
    """K environment runners: what each takes of a cluster, and what happens when one fails."""

    num: int = 1
    num_cpus: float = 1.0  # of each, may be a fraction
    num_gpus: float = 0.0  # of each, may be a fraction; without, it acts on the CPU
    custom_resources: Mapping[str, float] = {}  # of each
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    address: str | None = None  # of a Ray cluster, or "auto"; None: $RAY_ADDRESS, else a cluster for this run alone
    max_requests_in_flight: int = 2  # rollouts that each has on order, if they are not waited for
    ignore_env_runner_failures: bool = False  # go on without
    recreate_failed_env_runners: bool = False  # start another in its place
    max_restarts: int = 1000  # of all runners together
    sample_timeout_s: float = 180.0  # seconds without a rollout after which a runner has failed
    health_check_timeout_s: float = 60.0  # seconds to start; and for its first rollout, which compiles, in addition

    def check(self) -> None:
        """Raises ValueError: a number is out of range, or two ways to go on after a failure are asked for at once."""
        if self.ignore_env_runner_failures and self.recreate_failed_env_runners:
            raise ValueError("ignore_env_runner_failures and recreate_failed_env_runners exclude each other")
        for name in ("num", "max_requests_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def resources(self) -> dict[str, float]:
        """Of one runner, by Ray's names, without zeros."""
        found = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.custom_resources}
        return {name: float(amount) for name, amount in found.items() if amount > 0}


@dataclasses.dataclass
class Runner:
    """What is known of a runner in the process that learns."""

    index: int
    restarts: int
    actor: Any  # ray's handle
    starting: Any  # ray.ObjectRef that comes when it has started, then None
    since: float  # when it began what it works on, or later: when that was seen; by time.monotonic
    warm: bool = False  # an answer has come from it: its programs are compiled

    def deadline(self, options: RunnerOptions) -> float:
        """Until when it has to answer, by time.monotonic."""
        if self.starting is not None:
            return self.since + options.health_check_timeout_s
        return self.since + options.sample_timeout_s + (0.0 if self.warm else options.health_check_timeout_s)


def check_fits(options: RunnerOptions, nodes: Sequence[Mapping[str, float]]) -> None:
    """Whether the runners could be placed if the cluster did nothing else.

    Args:
      nodes: name -> amount of the resources of each node.
    Raises:
      InputError: they can never be.
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


class Part(NamedTuple):
    """One runner's rollout, as it came."""

    runner: int  # its index
    restarts: int  # runners that had the index before
    number: int  # rollouts that were ordered from it before this one
    version: int  # the call of `next` whose weights acted
    rollout: Rollout
    episodes: Episodes
    metrics: Mapping[str, float]


class Slots:
    """Which part stands in which block of columns, and whether it goes on from the one that stood there before."""

    def __init__(self, num: int):
        self._last: list[Any] = [None] * num

    def assign(self, parts: Sequence[Part]) -> list[tuple[Part | None, bool]]:
        """(part or None, goes on) of each block. A part stands where its runner's part before stood in the latest call,
        else in its runner's own block, else where there is room."""
        slots: list[Part | None] = [None] * len(self._last)
        others = []
        for part in parts:
            before = (part.runner, part.restarts, part.number - 1)
            if before in self._last:
                slots[self._last.index(before)] = part
            else:
                others.append(part)
        for part in others:
            slots[part.runner if slots[part.runner] is None else slots.index(None)] = part
        found: list[tuple[Part | None, bool]] = []
        for i, (slot, last) in enumerate(zip(slots, self._last)):
            if slot is None:
                self._last[i] = None
                found.append((None, False))
                continue
            found.append((slot, last == (slot.runner, slot.restarts, slot.number - 1)))
            self._last[i] = (slot.runner, slot.restarts, slot.number)
        return found


def newest_allowed(versions: Sequence[int], *, call: int, left: int, per_call: int, lag: int) -> int:
    """The newest version that may be taken next, if every part is to be taken at most `lag` calls after its own.

    What is of version v or older has to be taken by call v + lag, and there are `left` places in this call and
    `per_call` in each later one. As long as these are more than the parts, anything may be taken first.

    Args:
      versions: of the parts that are under way: at most per_call * lag of them.
      call: the present call.
      left: parts that this call still takes.
    """
    for version in sorted(set(versions)):
        places = left + per_call * (version + lag - call)
        if sum(v <= version for v in versions) >= places:
            return version
    return call
