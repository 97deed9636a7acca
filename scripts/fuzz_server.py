"""Does a server that learns stand what its own description allows, and what it does not? Schemathesis asks it.

    python -m venv /tmp/fuzz && /tmp/fuzz/bin/pip install schemathesis numpy       # apart from jrl's environment
    /tmp/fuzz/bin/python scripts/fuzz_server.py --jrl .venv/bin/python             # every work, one JSON line each
    /tmp/fuzz/bin/python scripts/fuzz_server.py --jrl .venv/bin/python several --requests 5000 --seed 1

Each work starts `python -m jrl.serve` on a free port: `one` is DQN on dictionaries with a mask of actions, `several`
PPO with two agents. Requests are drawn from /openapi.json, half of them right by it and half of them wrong; most name
an episode that is under way, and some bodies are sent as npz. A line has the count of each status, the requests of each
route that were fulfilled, the episodes that are left once all that began were ended, and the resident memory of the
server after `--warm-up` of the requests and at the end. Exits with 1 on an answer of 5xx, one that is not as described,
an episode that is left, or memory that grows by more than `--max-growth` MB.
"""

import argparse
import collections
import io
import json
import random
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

ROOT = Path(__file__).parent.parent
CLIENT, NPZ = "Jrl-Client", "application/x-npz"
_CHECKS = [
    checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance,
    checks.response_headers_conformance,
]  # fmt: skip
_SMALL = ["network.hidden=[8]", "env.num_envs=64", "external.timeout_s=600", "run.report_every=64"]
_DICT = "{dict: {action_mask: {multi_binary: [2]}, x: {box: [3]}}}"
WORKS = {
    "one": [
        "dqn", f"external.observation={_DICT}", "external.action={discrete: 2}", "replay.learning_starts=64",
        "replay.batch_size=16", "replay.capacity=1000", "replay.train_every=64", *_SMALL,
    ],
    "several": [
        "ppo", "external.agents=[a, b]", "external.observation={a: {box: [3]}, b: {box: [2]}}", "rollout.length=4",
        "external.action={a: {discrete: 3}, b: {box: [2], low: -1, high: 1}}", "algo.num_minibatches=1", *_SMALL,
    ],
}  # fmt: skip
_KEPT = 6  # episodes that stay under way, for requests to name
_UPDATES = 20  # before memory is looked at
_ROUND = 20  # requests of a route, right ones and wrong ones, before the next one's turn


@schemathesis.serializer(NPZ)
def _as_it_is(ctx: Any, value: Any) -> Any:
    """Sends a body of bytes."""
    return value if isinstance(value, bytes) else str(value).encode()


class Server:
    """`python -m jrl.serve` in a process of its own."""

    def __init__(self, python: str, settings: list[str], folder: Path):
        self._log = (folder / "log").open("w+")
        algo, *rest = settings
        more = [f"--set={text}" for text in rest]
        command = [
            python,
            "-m",
            "jrl.serve",
            algo,
            *more,
            "--port=0",
            "--stop=env_steps=100000000",
            f"--out={folder}/run",
        ]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith("clients: ")), None)
        if line is None:
            raise SystemExit(f"the server did not start:\n{self.told()}")
        self.address = line.split()[1]

    def memory_mb(self) -> float:
        """Resident, as ps counts it."""
        found = subprocess.run(["ps", "-o", "rss=", "-p", str(self._process.pid)], capture_output=True, text=True)
        return int(found.stdout) / 1024

    def told(self) -> str:
        """What it wrote to its log."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class Fuzz:
    """Requests to a server, and what came of them.

    Attributes:
      statuses: how many answers of each.
      fulfilled: answers of 2xx of each route.
      faults: what is wrong, with how often.
    """

    def __init__(self, address: str, seed: int):
        self._address, self._seed, self._rng = address, seed, random.Random(seed)
        self.statuses, self.faults = collections.Counter[int](), collections.Counter[str]()
        self.fulfilled = collections.Counter[str]()
        self._operations = [
            found.ok() for found in schemathesis.openapi.from_url(f"{address}/openapi.json").get_all_operations()
        ]
        self._several = "agents" in next(iter(self.asked("GET", "/v1/policies")[1]["policies"].values()))
        self._live: dict[str, str] = {}  # episodes that began and have not ended -> their client
        self._turns = 0

    @property
    def requests(self) -> int:
        """Those of Schemathesis, so far."""
        return sum(self.statuses.values())

    def asked(self, method: str, path: str, body: Any = None, client: str = "") -> tuple[int, Any]:
        """(status, JSON) of a request that is right."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **({CLIENT: client} if client else {})}
        request = urllib.request.Request(self._address + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as e:
            return e.code, json.loads(e.read())

    def go_on(self, count: int) -> None:
        """Sends requests to each route in turn, until there were so many."""
        while self.requests < count:
            operation = self._operations[self._turns % len(self._operations)]
            self._turns += 1
            self._send(operation, GenerationMode.POSITIVE)
            if operation.body or operation.query:  # others have nothing that could be wrong
                self._send(operation, GenerationMode.NEGATIVE)

    def _send(self, operation: Any, mode: GenerationMode) -> None:
        @hypothesis.seed(1000 * self._seed + self._turns)
        @hypothesis.settings(
            max_examples=_ROUND if operation.method.lower() == "post" else 2, phases=[hypothesis.Phase.generate],
            database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            self._ask(case)

        ask()

    def _ask(self, case: Any) -> None:
        if case.media_type == NPZ and self._rng.random() < 0.8:
            return  # bytes at random, which are no npz
        client, named = self._deeper(case)
        answer = case.call(base_url=self._address, headers={CLIENT: client} if client else None)
        self.statuses[answer.status_code] += 1
        self.fulfilled[case.operation.path] += answer.status_code < 300
        where, sent = f"{case.method} {case.operation.path}", f"on {str(case.body)[:300]} of {case.media_type}"
        if answer.status_code >= 500:
            self.faults[f"{where}: {answer.status_code} {sent}"] += 1
        try:
            case.validate_response(answer, checks=_CHECKS)
        except Exception as e:  # of many kinds, one for each check
            self.faults[f"{where}: {answer.status_code} {sent}: {str(e)[:800]}"] += 1
        if answer.status_code < 300 and case.method.lower() == "post":
            self._note(case.operation.path, _fields(answer), named, client)

    def _deeper(self, case: Any) -> tuple[str, list[str]]:
        """(client, episodes that are named): those that are under way, for the most part."""
        while len(self._live) < _KEPT:
            client = self._rng.choice(["a", "b", ""])
            status, found = self.asked("POST", "/v1/episodes", {}, client)
            if status != 201:
                self.faults[f"an episode did not begin: {status} {found}"] += 1
                break
            self._live[found["episode_id"]] = client
        (case.headers or {}).pop(CLIENT, None)
        client = self._rng.choice(list(self._live.values()) or ["a"])
        own = [id for id, its in self._live.items() if its == client]
        if self._rng.random() < 0.1:
            client = "c"
        named, body = [self._rng.choice(own)] if own else [], case.body
        if named and case.path_parameters and self._rng.random() < 0.9:
            case.path_parameters["id"] = named[0]
        if isinstance(body, dict):
            if "episode_ids" in body and self._rng.random() < 0.9:
                named = named if "versions" in body else own
                _fit(body, named)
            if self._rng.random() < 0.8:
                body.pop("step", None)  # or nearly every request would be out of turn
            if self._rng.random() < 0.6:
                body.pop("infos", None)
                case.body = body = _tamed(body)
            if self._rng.random() < 0.2 and (packed := _npz(body)):
                case.body, case.media_type = packed, NPZ
        return client, named

    def _note(self, path: str, found: dict[str, Any], named: list[str], client: str) -> None:
        """Keeps account of which episodes have begun and ended."""
        if path == "/v1/episodes":
            for id in np.atleast_1d(found.get("episode_ids", found.get("episode_id"))):
                self._end(str(id), client)
        elif path.endswith("/end"):
            self._live.pop(named[0], None)
        elif path in ("/v1/steps", "/v1/played"):
            for id in named:
                del self._live[id]
            self._live |= {str(id): client for id in found["episode_ids"]}

    def _end(self, id: str, client: str) -> None:
        path = f"/v1/episodes/{urllib.parse.quote(id, safe='')}/end"
        last: dict[str, Any] = {} if self._several else {"observation": {"action_mask": [1, 1], "x": [0.0, 0.0, 0.0]}}
        status, found = self.asked("POST", path, last, client)
        if status != 200:
            self.faults[f"an episode did not end: {status} {found}"] += 1

    def learned(self) -> None:
        """Plays until there were some updates, whose programs are compiled by then."""
        seen: dict[str, Any] = {"action_mask": [1, 1], "x": [0.1, 0.2, 0.3]}
        body = {"observations": {"a": [0.1] * 3, "b": [0.2] * 2}} if self._several else {"observation": seen}
        while self.asked("GET", "/v1/health")[1]["versions"]["default"] < _UPDATES:
            id = self.asked("POST", "/v1/episodes", {})[1]["episode_id"]
            for _ in range(20):
                self.asked("POST", f"/v1/episodes/{id}/{'turn' if self._several else 'action'}", body)
            self._end(id, "")

    def end(self) -> int:
        """Ends what is under way; how many episodes are left."""
        for id, client in self._live.items():
            self._end(id, client)
        return int(self.asked("GET", "/v1/health")[1]["episodes"])


def _fit(body: dict[str, Any], names: list[str]) -> None:
    """Makes a body of steps of these episodes: as many elements of each field as there are."""
    rows = "versions" in body  # [K, N] instead of [N]

    def many(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: many(part) for name, part in x.items()}
        if not isinstance(x, list) or not x:
            return x
        if rows:
            return [(x[0] * len(names))[: len(names)]] if isinstance(x[0], list) and x[0] else x
        return (x * len(names))[: len(names)]

    body |= {name: many(value) for name, value in body.items() if name != "episode_ids"}
    if rows:
        body |= {"actions": [[0] * len(names)], "versions": [[0] * len(names)]}
    body["episode_ids"] = names


def _tamed(x: Any, name: str = "") -> Any:
    """A body whose numbers are float32's, and whose masks allow something."""
    if isinstance(x, dict):
        return {key: _tamed(part, key) for key, part in x.items()}
    if isinstance(x, list):
        return [_tamed(part, name) for part in x]
    if isinstance(x, int | float) and not isinstance(x, bool):
        return 1 if name == "action_mask" or abs(x) > 1e30 else x
    return x


def _npz(body: dict[str, Any]) -> bytes | None:
    """A body as npz; None where it has what is no array."""
    arrays: dict[str, Any] = {}

    def add(name: str, x: Any) -> None:
        if isinstance(x, dict):
            for key, part in x.items():
                add(f"{name}/{key}", part)
        else:
            arrays[name] = np.asarray(x)

    buffer = io.BytesIO()
    try:
        for name, x in body.items():
            add(name, x)
        np.savez(buffer, allow_pickle=False, **arrays)
    except (ValueError, TypeError, OverflowError):
        return None
    return buffer.getvalue()


def _fields(answer: Any) -> dict[str, Any]:
    """Those of an answer, of either form."""
    if NPZ not in answer.headers["content-type"][0]:
        return answer.json()
    with np.load(io.BytesIO(answer.content)) as arrays:
        return {name: arrays[name] for name in arrays.files}


def run(work: str, args: argparse.Namespace) -> bool:
    """Whether a server stands it; prints what there is to say."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.jrl, WORKS[work], Path(folder))
        try:
            fuzz = Fuzz(server.address, args.seed)
            fuzz.learned()
            fuzz.go_on(int(args.warm_up * args.requests))
            before = server.memory_mb()
            fuzz.go_on(args.requests)
            left, after = fuzz.end(), server.memory_mb()
        except Exception:
            print(server.told()[-4000:], file=sys.stderr)
            raise
        finally:
            log = server.told()
            server.close()
    for fault, count in fuzz.faults.most_common(args.shown):
        print(f"{count} x {fault}", file=sys.stderr)
    failed = sum(count for status, count in fuzz.statuses.items() if status >= 500)
    if failed:
        print(log[-4000:], file=sys.stderr)
    statuses = {str(status): fuzz.statuses[status] for status in sorted(fuzz.statuses)}
    told = {"requests": fuzz.requests, "statuses": statuses, "fulfilled": dict(fuzz.fulfilled)}
    told |= {"5xx": failed, "faults": len(fuzz.faults)}
    print(json.dumps({"work": work, **told, "left": left, "mb": [round(before, 1), round(after, 1)]}), flush=True)
    return not (failed or fuzz.faults or left or after - before > args.max_growth)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(WORKS)}; none: all")
    p.add_argument("--jrl", default=sys.executable, metavar="PYTHON", help="an interpreter that has jrl")
    p.add_argument("--requests", type=int, default=2500)
    p.add_argument("--warm-up", type=float, default=0.3, help="share of the requests before memory is looked at")
    p.add_argument("--max-growth", type=float, default=40.0, help="MB from then on")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--shown", type=int, default=20, help="faults that are shown")
    args = p.parse_args()
    stood = [run(work, args) for work in args.works or WORKS]
    return 0 if all(stood) else 1


if __name__ == "__main__":
    sys.exit(main())
