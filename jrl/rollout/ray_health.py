"""Health of Ray itself, and its failures in plain words.

Ray ends a process that uses it, without an exception and so without a checkpoint, when that stores an object and the
node's raylet is gone, or when the cluster's head has not answered for a minute. A run ends by itself before.
"""

import contextlib
import os
import re
import select
import socket
import time
from typing import Any

import psutil

from jrl.errors import RunnersLost

_EVERY = 2.0  # seconds between two looks at the head
_PATIENCE = 20.0  # seconds that the head of a cluster may take to come back; Ray ends the process after 60


class Lifeline:
    """Looks at the processes of Ray that this one cannot do without.

    Args:
      ray: the module, connected.
      begun: Ray was begun by this process, and ends with it.
    """

    def __init__(self, ray: Any, *, begun: bool):
        self._begun = begun
        self._raylet: int | None = None
        self._head: tuple[str, int] | None = None
        self._looked = self._answered = time.monotonic()
        with contextlib.suppress(Exception):  # it is looked at where that is possible: not through a Ray client
            context = ray.get_runtime_context()
            host, _, port = context.gcs_address.rpartition(":")
            self._head = (host.strip("[]"), int(port))
            here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
            self._raylet = _process(here["RayletSocketName"])

    def check(self) -> None:
        """Raises RunnersLost: Ray is gone."""
        if self._raylet is not None and select.select([self._raylet], [], [], 0.0)[0]:
            raise RunnersLost(
                "Ray's process on this machine (raylet) has ended, perhaps for want of memory; its log is "
                f"/tmp/ray/session_latest/logs/raylet.out: {self._mend()}"
            )
        now = time.monotonic()
        if self._head is None or now - self._looked < _EVERY:
            return
        self._looked = now
        if _listens(*self._head):
            self._answered = now
        elif self._begun or now - self._answered > _PATIENCE:
            host, port = self._head
            raise RunnersLost(f"the head of the Ray cluster (GCS) at {host}:{port} does not answer: {self._mend()}")

    def _mend(self) -> str:
        if self._begun:
            return "continue with --resume, which begins another Ray"
        return "see to the cluster (env_runners.address), then continue with --resume"

    def close(self) -> None:
        if self._raylet is not None:
            os.close(self._raylet)
            self._raylet = None


def _process(path: str) -> int | None:
    """Returns a file descriptor that is readable once the process with a Unix socket has ended; None where there is
    no such.
    """
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and any(word.endswith(path) for word in process.info["cmdline"] or ()):
            return os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
    return None


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def in_words(error: str) -> str:
    """Returns why an actor is gone, from the text that Ray has for it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", error)
    pid, ip = (re.search(rf"^\t?{name}: (\S+)", text, re.MULTILINE) for name in ("pid", "ip"))
    process = f"its process{f' {pid[1]}' if pid else ''}{f' on {ip[1]}' if ip else ''}"
    lower = text.lower()
    if "out of memory" in lower and "oom killer" not in lower:
        mend = "ask for fewer env.num_envs or env_runners.num"
        return f"{process} was ended by Ray, as the memory of its machine was used up: {mend}"
    if re.search(r"node (has|was|is|it) .*(died|dead|terminated|failed)|node has died", lower):
        return f"the machine of {process} has left the cluster: it is down, or cannot be reached"
    if "worker process has died" in lower or "connection error" in lower:
        return f"{process} has ended: it was killed (by the system, for want of memory?), crashed, or called exit"
    return text
