"""A run in a thread, whose episodes the test plays, and single requests without `PolicyClient`."""

import contextlib
import http.client
import json
import threading
import time
import urllib.parse

from jrl import config
from jrl.run import reporter
from jrl.run.session import Session
from jrl.serve.clients import Clients

CARTPOLE = {"observation": {"box": [4]}, "action": {"discrete": 2}}


def settings(algo="ppo", /, *, envs=2, length=8, external=None, **sections):
    """Returns the config of a small run whose episodes clients play."""
    own = {"name": algo, **({"num_epochs": 1, "num_minibatches": 1} if algo == "ppo" else {})}
    tree = {
        "algo": {**own, **sections.pop("algo", {})},
        "env": {"num_envs": envs, **sections.pop("env", {})},
        "network": {"hidden": [8], **sections.pop("network", {})},
        "external": {"port": 0, **CARTPOLE, **(external or {})},
        **sections,
    }
    if algo != "dqn":
        tree["rollout"] = {"length": length, **tree.get("rollout", {})}
    return config.from_dict(tree)


class Run:
    """A session that runs until `close`; `rows` holds its result rows."""

    def __init__(self, cfg, clients, interrupted):
        self.clients, self.rows, self.error = clients, [], None
        self._interrupted = interrupted
        self.session = Session(
            cfg, sinks=[self.rows.append], endless=True, external=clients.source(cfg, 0, interrupted)
        )
        self.thread = threading.Thread(target=self._go, daemon=True)

    def _go(self):
        from jrl.host.interruption import Interrupted

        try:
            self.session.start()
            while info := self.session.advance():
                if reporter.is_not_finite(info):
                    raise FloatingPointError(info.metrics)
                self.session.finish_call(info)
        except Interrupted:
            pass
        except BaseException as e:
            self.error = e
            raise

    @property
    def address(self):
        return self.clients.address

    @property
    def source(self):
        return self.session.run.program.source

    def start(self):
        self.thread.start()

    def end(self):
        self._interrupted.append(True)

    def close(self):
        self.end()
        self.thread.join(30)
        self.session.close()
        assert self.error is None


@contextlib.contextmanager
def running(cfg):
    """Runs a config until the context ends."""
    clients, interrupted = Clients(), []
    with clients.open(cfg.external):
        run = Run(cfg, clients, interrupted)
        run.start()
        listening(run.address)
        try:
            yield run
        finally:
            run.close()


def asked(address, method, path, body=None, **headers):
    """Returns (status, JSON) of a request over its own connection."""
    parts = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    kind = answer.getheader("Content-Type")
    return answer.status, json.loads(found) if kind == "application/json" else found


def listening(address, seconds=60):
    """Waits until a server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return asked(address, "GET", "/v1/health")
        except ConnectionError:
            time.sleep(0.05)
    raise TimeoutError(address)


def until(holds, seconds=30):
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)
