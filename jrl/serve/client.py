"""Plays episodes with the policy of a jrl server: `python -m jrl.serve CONFIG`. Needs numpy and this file alone.

With inference_mode "local" it needs `jrl/export/interpreter.py`, too: copied beside it, or held in it, as
`python -m jrl.serve --write-client FILE` writes it.

    client = PolicyClient("http://127.0.0.1:9900")
    episode = client.start_episode()
    obs, _ = env.reset()
    while True:
        obs, reward, terminated, truncated, _ = env.step(client.get_action(episode, obs))
        client.log_returns(episode, reward)
        if terminated or truncated:
            client.end_episode(episode, obs, truncated=truncated)
            break

Where the server is away, calls wait and try again. One that came back without its episodes makes calls raise
EpisodeLost: begin another. A client is for one thread.
"""

import dataclasses
import http.client
import io
import json
import random
import ssl
import time
import types
import urllib.parse
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_NPZ = "application/x-npz"
_LARGE = 256  # numbers of an observation, from which on arrays are sent as npz rather than as JSON
_FIRST_S, _LONGEST_S = 0.1, 5.0  # seconds between tries, doubled each time
_SEND_S = 1.0  # seconds after which a client that acts by itself sends its steps, however few
_INTERPRETER = ""  # source of interpreter.py where this file holds it
Leaves = dict[str, np.ndarray]  # arrays of a tree by their paths, such as "goal/0"; "" of one that is an array


class RequestRefused(ValueError):
    """The server's answer to a request that it cannot fulfil: `status` is that of HTTP, 4xx."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class EpisodeLost(RuntimeError):
    """The episode is over for the server, which was away or has not heard of it for too long: begin another."""


class Steps(NamedTuple):
    """Results of a step of N episodes."""

    episodes: list[str]  # in the places of those that have ended others have begun
    actions: Any  # [N, *]


@dataclasses.dataclass
class _Episode:
    """An episode under way, and what its next request tells by agent; one agent alone has the name ""."""

    several: bool = False
    step: int = 0
    infos: dict[str, float] = dataclasses.field(default_factory=dict)
    observations: dict[str, Any] = dataclasses.field(default_factory=dict)
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    terminated: dict[str, bool] = dataclasses.field(default_factory=dict)
    truncated: dict[str, bool] = dataclasses.field(default_factory=dict)

    def one(self) -> dict[str, Any]:
        """Returns what a request of one agent has besides its observation."""
        return {"reward": self.rewards.get("", 0.0), "step": self.step}

    def turn(self, observations: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Returns the fields of a turn."""
        found = {"observations": {**self.observations, **observations}, "rewards": self.rewards, "step": self.step}
        return {**found, "terminated": self.terminated, "truncated": self.truncated, **more}

    def went_on(self) -> None:
        self.step += 1
        self.observations, self.rewards, self.terminated, self.truncated = {}, {}, {}, {}


class PolicyClient:
    """A connection to a server, and the episodes that are played over it.

    Args:
      address: http://HOST:PORT, or https.
      token: what the server wants to be shown; None: nothing.
      timeout_s: of one request.
      patience_s: how long to try again where the server is away, before ConnectionError is raised.
      context: of TLS, such as one that knows a certificate of your own; None: that of the system.
      inference_mode: who chooses actions: "remote", the server; or "local", this process with numpy, by the server's
        latest weights, of which it is told as it sends what was played. Several steps go in one request.
      update_interval: seconds, at least, between weights of a client that acts by itself; 0: others as soon as it is
        told of them; None: those with which it began, until `update_policy_weights` is called.
      seed: of the actions that are drawn here; None: any.
    """

    def __init__(
        self,
        address: str = "http://127.0.0.1:9900",
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 300.0,
        context: ssl.SSLContext | None = None,
        inference_mode: str = "remote",
        update_interval: float | None = 0.0,
        seed: int | None = None,
    ):
        if inference_mode not in ("remote", "local"):
            raise ValueError(f"inference_mode: expected remote or local, got {inference_mode!r}")
        if update_interval is not None and not update_interval >= 0:
            raise ValueError(f"update_interval: expected seconds of 0 or more, or None, got {update_interval!r}")
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"address: expected http://HOST:PORT, got {address!r}")
        tls = {"context": context} if parts.scheme == "https" else {}
        kind: Any = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection: http.client.HTTPConnection = kind(parts.hostname, parts.port, timeout=timeout_s, **tls)
        self._address, self._patience_s = address, patience_s
        self._headers = {"Jrl-Client": uuid.uuid4().hex}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._episodes: dict[str, _Episode] = {}
        self.version = 0  # of the weights that chose the latest action
        self._acts_here, self._rng = inference_mode == "local", np.random.default_rng(seed)
        self._local: LocalPolicy | None = None
        self._interval = update_interval

    # ------------------------------------------------------------ one episode

    def start_episode(
        self, episode_id: str | None = None, training_enabled: bool = True, policy: str | None = None
    ) -> str:
        """Begins an episode; its id.

        Args:
          episode_id: its name; None: a new one.
          training_enabled: whether the server learns from it.
          policy: the name of that which acts; None: the server's first. A client that acts by itself has one.
        """
        self._follow(policy)
        id = episode_id or uuid.uuid4().hex
        fields = {"episode_id": id, "training_enabled": bool(training_enabled), "policy": policy}
        try:
            found = self._post("/v1/episodes", fields)
        except RequestRefused as e:
            if e.status != 409 or episode_id is not None:
                raise  # of a name of our own: the answer to the first try was lost
            known = self.policies()
            found = known[policy or next(iter(known))]
        self._episodes[id] = _Episode(several=bool(found.get("agents")))
        return id

    def get_action(self, episode_id: str, observation: Any, agent: str | None = None) -> Any:
        """Returns the policy's action at an observation [*], as the environment takes it.

        Several agents: {agent: action} of those that act now, at {agent: [*]}; or the action of one, `agent`.
        """
        told = self._episodes[episode_id]
        if told.several:
            actions = self._turn(episode_id, _by_agent(agent, observation))
            return actions if agent is None else actions[agent]
        if self._acts_here:
            row = {"rewards": np.array([told.one()["reward"]], np.float32)}
            told.went_on()
            _, action = self._act((episode_id,), {name: x[None] for name, x in flat("", observation)}, row)
            return _tree({name: x[0] for name, x in action.items()})
        found = self._of(episode_id, "action", {"observation": observation, **told.one()})
        self.version = int(found["version"])
        return _arrays(found["action"])

    def log_action(
        self, episode_id: str, observation: Any, action: Any, agent: str | None = None, log_prob: Any = None
    ) -> None:
        """Reports an action that was chosen here; several agents as in `get_action`.

        `log_prob` is the action's log-probability if it is known. Raises RequestRefused: the algorithm learns from
        its own actions alone.
        """
        told = self._episodes[episode_id]
        if told.several:
            known = None if log_prob is None else _by_agent(agent, log_prob)
            self._turn(episode_id, _by_agent(agent, observation), actions=_by_agent(agent, action), log_probs=known)
            return
        self._send((episode_id,))
        self._of(episode_id, "log", {"observation": observation, "action": action, "log_prob": log_prob, **told.one()})
        if self._acts_here and self._player().remembers:
            self._player().act((episode_id,), {name: x[None] for name, x in flat("", observation)})

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Mapping[str, Any] | None = None,
        multiagent_done_dict: Mapping[str, bool] | None = None,
        agent: str | None = None,
    ) -> None:
        """Adds to the reward of the latest action; it goes with the next request.

        Args:
          episode_id: see `start_episode`.
          reward: a number; of several agents {agent: number}, or of the one that `agent` names.
          info: numbers by name, at most 32, of which the server's rows have the means; the last of each name counts
            until the next request. Of several agents they are those of the episode.
          multiagent_done_dict: agents that have ended before the others do; `end_agent` says more.
          agent: see `reward`.
        Raises:
          ValueError: an info is not a number; the server refuses more names than 32 with the next request.
        """
        told = self._episodes[episode_id]
        told.infos |= {name: float(x) for name, x in (info or {}).items()}
        for name, x in (_by_agent(agent, reward) if told.several else {"": reward}).items():
            told.rewards[name] = told.rewards.get(name, 0.0) + float(x)
        ended = (multiagent_done_dict or {}).items()
        told.terminated |= {name: True for name, over in ended if over and name != "__all__"}

    def end_agent(self, episode_id: str, agent: str, observation: Any, truncated: bool = False) -> None:
        """Ends an agent before its episode, with the observation after its last action; with the next request."""
        told = self._episodes[episode_id]
        told.observations[agent] = observation
        (told.truncated if truncated else told.terminated)[agent] = True

    def end_episode(self, episode_id: str, observation: Any = None, truncated: bool = False) -> dict[str, Any]:
        """Ends an episode with the observation after its last action; its `return` and `length`.

        Args:
          episode_id: see `start_episode`.
          observation: [*], the last; of several agents {agent: [*]}, of which a true end needs none.
          truncated: it was cut, by a time limit, and might have gone on.
        Returns:
          Of several agents the sum of their returns, the steps in which any acted, and `returns`, {agent: return}.
        """
        told = self._episodes[episode_id]
        if told.several:
            if told.terminated or told.truncated:
                self._turn(episode_id, {})
            last = {"observations": dict(observation or {}), "rewards": told.rewards, "step": told.step}
        else:
            self._send((episode_id,))
            last = {"observation": observation, **told.one()}
        found = self._of(episode_id, "end", {**last, "truncated": bool(truncated)})
        del self._episodes[episode_id]
        if self._local is not None:
            self._local.go_on((episode_id,), ())
        ended: dict[str, Any] = {name: float(found[name]) for name in ("return", "length")}
        if told.several:
            return {**ended, "returns": {name: float(x) for name, x in found["returns"].items()}}
        return ended

    def _turn(self, id: str, observations: Mapping[str, Any], **own: Any) -> dict[str, Any]:
        """Sends a turn; `own` has the actions that the client chose. Returns actions by agent."""
        found = self._of(id, "turn", self._episodes[id].turn(observations, **own))
        self.version = int(found["version"])
        return {name: _arrays(x) for name, x in found.get("actions", {}).items()}

    # ------------------------------------------------------------ many episodes in one request

    def start_episodes(self, count: int, training_enabled: bool = True, policy: str | None = None) -> list[str]:
        """Begins so many episodes, for `steps`, or of several agents for `turns`; arguments as `start_episode`."""
        self._follow(policy)
        fields = {"count": count, "training_enabled": bool(training_enabled), "policy": policy}
        found = self._post("/v1/episodes", fields)
        ids = [str(id) for id in found["episode_ids"]]
        if found.get("agents"):
            self._episodes |= {id: _Episode(several=True) for id in ids}
        return ids

    def steps(
        self,
        episodes: Sequence[str],
        observations: Any,
        rewards: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        final_observations: Any = None,
    ) -> Steps:
        """Returns a step of N episodes: what came of the latest actions, and the actions that follow.

        Args:
          episodes: N ids.
          observations: [N, *] to act on; where an episode has ended, the first of the next.
          rewards: [N] of the latest actions; None where episodes have begun.
          terminated, truncated: [N] bool, which episodes have ended with the latest action; None: none.
          final_observations: [N, *], where any has: its last observation; the other rows do not count.
        Raises:
          EpisodeLost: no answer came; nobody knows whether the step counts.
        """
        fields = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
        fields = _given({**fields, "final_observations": final_observations})
        if self._acts_here:
            ids, action = self._act(tuple(episodes), observations, fields)
            return Steps(ids, _tree(action))
        found = self._once("/v1/steps", {"episode_ids": list(episodes), "observations": observations, **fields})
        self.version = int(found["version"])
        return Steps([str(id) for id in found["episode_ids"]], _arrays(found["actions"]))

    # ------------------------------------------------------------ acting here

    @property
    def too_old(self) -> int:
        """Returns steps chosen here from which the server does not learn: their weights were too old (max_lag)."""
        return 0 if self._local is None else self._local.too_old

    def update_policy_weights(self) -> int:
        """Gets the server's weights if this process acts by others; returns their version."""
        return self._player().update() if self._acts_here else self.version

    def _follow(self, policy: str | None) -> None:
        """Acts for this policy from now on if this process acts: what no client can do is refused early."""
        if self._acts_here:
            self._player("" if policy is None else urllib.parse.urlencode({"policy": policy}))

    def _player(self, query: str | None = None) -> "LocalPolicy":
        """Returns the policy of a query, or the one before. Raises RequestRefused: it cannot act here."""
        if self._local is None:
            get = lambda path: self._request("GET", path, b"", {})
            found = LocalPolicy(_interpreter(), self._rng, get, self._played, self._interval, query or "")
            found.update()
            self._local = found  # a policy that was refused is not the one for which it acts
        elif query not in (None, self._local.query):
            raise ValueError("policy: with inference_mode local a client acts for one: make another client")
        elif self._local.version < 0:
            self._local.update()
        return self._local

    def _played(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Tells of steps that were chosen here."""
        try:
            return self._once("/v1/played", fields)
        except RequestRefused as e:
            if e.status not in (404, 409, 410):
                raise
            raise EpisodeLost(str(e)) from e

    def turns(self, observations: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns the actions of a turn in many episodes of several agents, {episode: {agent: action}}, in one request.

        Args:
          observations: {episode: {agent: [*]}} of those that act now. What was told of rewards, infos and ends before
            goes with them, as with `get_action`.
        Raises:
          EpisodeLost: no answer came; nobody knows whether the turns count.
          RequestRefused: one of them is wrong, which the message names; none of them counts.
        """
        told = {id: self._episodes[id] for id in observations}
        turns = {id: told[id].turn(seen, infos=told[id].infos) for id, seen in observations.items()}
        found = self._once("/v1/turns", {"turns": turns}, npz=False)
        for one in told.values():
            one.went_on()
            one.infos = {}
        self.version = int(found["version"])
        of_one = lambda one: {agent: _arrays(x) for agent, x in one.get("actions", {}).items()}
        return {id: of_one(found["turns"][id]) for id in told}

    def _act(self, ids: tuple[str, ...], obs: Any, row: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Returns (episodes from now on, actions [N, *] by path); steps are sent once there are enough."""
        player = self._player()
        try:
            action, enough = player.step(ids, dict(flat("", obs)), dict(flat("", row)))
        except ValueError as e:
            raise RequestRefused(422, str(e)) from None
        self.version = player.version
        return self._send(ids) if enough else list(ids), action

    def _send(self, ids: tuple[str, ...]) -> list[str]:
        """Sends the steps of these episodes that were chosen here; the episodes that go on."""
        return list(ids) if self._local is None else self._local.send(ids)

    # ------------------------------------------------------------ over the wire

    def get_once(self, observation: Any, policy: str | None = None) -> Any:
        """Returns the action at an observation [*] without an episode, of a policy that remembers nothing."""
        found = self._post("/v1/action", {"observation": observation, "policy": policy})
        self.version = int(found["version"])
        return _arrays(found["action"])

    def policies(self) -> dict[str, Any]:
        """Returns the server's policies by name: algorithm, spaces, version."""
        return self._request("GET", "/v1/policies", b"", {})["policies"]

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _of(self, id: str, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request of an episode, which goes on by it. Raises EpisodeLost."""
        told = self._episodes[id]
        try:
            path = f"/v1/episodes/{urllib.parse.quote(id, safe='')}/{what}"
            found = self._post(path, {**fields, "infos": told.infos or None})
        except RequestRefused as e:
            told.infos = {}  # or all that follows would be refused for them
            if e.status not in (404, 410):
                raise
            del self._episodes[id]
            raise EpisodeLost(str(e)) from e
        told.infos = {}
        told.went_on()
        return found

    def _once(self, path: str, fields: Mapping[str, Any], *, npz: bool = True) -> dict[str, Any]:
        """Sends steps once. Raises EpisodeLost: no answer came, and nobody knows if they count."""
        try:
            return self._post(path, fields, again=False, npz=npz)
        except ConnectionError as e:
            raise EpisodeLost(f"no answer from {self._address}: {e}") from e

    def _post(self, path: str, fields: Mapping[str, Any], *, again: bool = True, npz: bool = False) -> dict[str, Any]:
        fields = _given(fields)
        # of names with a / npz would make trees
        named = "turns" in fields or any("/" in name for name in fields.get("infos", ()))
        if npz or (_size(fields) > _LARGE and not named):
            buffer = io.BytesIO()
            np.savez(buffer, allow_pickle=False, **dict(flat("", fields)))
            return self._request("POST", path, buffer.getvalue(), {"Content-Type": _NPZ}, again=again)
        body = json.dumps(fields, default=lambda x: x.tolist()).encode()
        return self._request("POST", path, body, {"Content-Type": "application/json"}, again=again)

    def _answer(self, *request: Any) -> tuple[http.client.HTTPResponse, bytes]:
        """Sends a request once; returns its answer and what that holds."""
        is_broken = False
        try:
            self._connection.request(*request)
        except (BrokenPipeError, ConnectionResetError):
            # a server that refuses a request before it is whole hangs up, and why stands in the socket
            if self._connection.sock is None:
                raise
            is_broken = True
        answer = self._connection.getresponse()
        found = answer.read()
        if is_broken:
            self._connection.close()
        return answer, found

    def _request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], *, again: bool = True
    ) -> dict[str, Any]:
        until, wait = time.monotonic() + self._patience_s, _FIRST_S
        while True:
            try:
                answer, found = self._answer(method, path, body, {**self._headers, **headers})
            except (OSError, http.client.HTTPException) as e:
                self._connection.close()
                if not again or time.monotonic() + wait > until:
                    raise ConnectionError(f"{self._address}: {e or type(e).__name__}") from e
            else:
                if answer.status == 429 and again and time.monotonic() + wait < until:
                    pass  # as one that is away
                elif answer.status >= 400:
                    raise RequestRefused(answer.status, _told(found, answer.status))
                else:
                    return _read(found, answer.getheader("Content-Type", ""))
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, _LONGEST_S)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in fields.items() if x is not None}


def _by_agent(agent: str | None, x: Any) -> dict[str, Any]:
    return dict(x) if agent is None else {agent: x}


def _told(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {status}"


def _read(body: bytes, kind: str) -> dict[str, Any]:
    if not body:  # status 204
        return {}
    if not kind.startswith(_NPZ):
        return json.loads(body)
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return nested({name: arrays[name] for name in arrays.files})


def nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns arrays by their paths as mappings of mappings. Raises ValueError: a path is part of another."""
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        *path, last = name.split("/")
        part = found
        for inner in path:
            part = part.setdefault(inner, {}) if isinstance(part, dict) else part
        if not isinstance(part, dict) or last in part:
            raise ValueError(f"{name} and a part or a whole of it are both there")
        part[last] = x
    return found


def _arrays(tree: Any) -> Any:
    """Lists of JSON as arrays; one number as a number of numpy."""
    if isinstance(tree, dict):
        if tree and all(name.isdigit() for name in tree):  # the parts of a tuple, from npz
            return tuple(_arrays(tree[str(i)]) for i in range(len(tree)))
        return {name: _arrays(part) for name, part in tree.items()}
    if isinstance(tree, list) and any(isinstance(part, dict) for part in tree):
        return tuple(_arrays(part) for part in tree)
    found = np.asarray(tree)
    found = found.astype(np.float32) if found.dtype == np.float64 else found
    return found[()] if found.ndim == 0 else found


def _tree(leaves: Mapping[str, Any]) -> Any:
    """Arrays by their paths as the tree that `flat` made them of."""
    return leaves[""] if "" in leaves else _arrays(nested(leaves))


def _size(tree: Any) -> int:
    if isinstance(tree, Mapping):
        return sum(map(_size, tree.values()))
    return tree.size if isinstance(tree, np.ndarray) else 1


def flat(name: str, tree: Any) -> list[tuple[str, np.ndarray]]:
    """Returns the arrays of a tree, each with its path."""
    if isinstance(tree, Mapping):
        parts = [(str(key), part) for key, part in tree.items()]
    elif isinstance(tree, tuple):
        parts = [(str(i), part) for i, part in enumerate(tree)]
    else:
        return [(name, np.asarray(tree))]
    return [found for key, part in parts for found in flat(f"{name}/{key}" if name else key, part)]


def _interpreter() -> Any:
    """Returns the module that is held in this file, lies beside it, or in jrl. Raises FileNotFoundError."""
    module, here = types.ModuleType("jrl_interpreter"), Path(__file__)
    text, files = _INTERPRETER, (here.with_name("interpreter.py"), here.parents[1] / "export" / "interpreter.py")
    if not text:
        file = next((file for file in files if file.exists()), None)
        if file is None:
            raise FileNotFoundError(
                f"{files[0]}: inference_mode local needs jrl/export/interpreter.py: copy it there, or take the file "
                "that `python -m jrl.serve --write-client FILE` writes"
            )
        text = file.read_text(encoding="utf-8")
    exec(compile(text, "interpreter.py", "exec"), module.__dict__)
    return module


# ---------------------------------------------------------------- acting with numpy


class LocalPolicy:
    """A policy of the server that acts here with numpy: `/v1/program` and `/v1/weights` have it.

    The program computes the parameters of distributions (`jrl/distributions.py`); actions and their log-probabilities
    are drawn here. The memory of an episode is kept here, too.

    Args:
      interpreter: `jrl/export/interpreter.py`.
      rng: draws.
      get: gives the server's answer at a path.
      tell: sends the fields of /v1/played; the answer.
      interval: see `PolicyClient`.
      query: names the policy for which it acts.
    """

    def __init__(
        self, interpreter: Any, rng: np.random.Generator, get: Callable[[str], dict[str, Any]],
        tell: Callable[[Mapping[str, Any]], dict[str, Any]], interval: float | None = 0.0, query: str = "",
    ):  # fmt: skip
        self._interpreter, self._rng = interpreter, rng
        self._get, self._tell, self._interval, self.query = get, tell, interval, query
        self.version = -1  # version of the weights that act; -1: there are none yet
        self.too_old = 0  # steps so far from which the server does not learn, since their weights were too old
        self._start: list[np.ndarray] = []  # memory before an episode
        self._memory: dict[str, list[np.ndarray]] = {}  # memory after the latest step, by episode
        self._rows: dict[tuple[str, ...], list[Leaves]] = {}  # steps that were not sent, by episodes
        self._sent = time.monotonic()

    def update(self) -> int:
        """Gets the weights if the server has others; returns their version."""
        if self.version < 0:
            self._told = self._get(f"/v1/program?{self.query}")
        if found := self._get(f"/v1/weights?newer_than={self.version}&{self.query}"):
            self._policy = self._interpreter.made(self._told["program"], found.get("policy", {}))
            change = self._told["to_env"]
            self._to_env = change and self._interpreter.made(change, found.get("to_env", {}))
            start = found.get("memory", {})
            self._start = [start[str(i)] for i in range(len(start))]
            self.version, self._loaded = int(found["version"]), time.monotonic()
        return self.version

    def step(self, ids: tuple[str, ...], obs: Leaves, row: Leaves) -> tuple[Leaves, bool]:
        """Returns (actions [N, *] of the environment by path, whether it is time to send) of N episodes.

        `row` has the results of their latest actions, by the names of /v1/played. Raises ValueError as `act`.
        """
        begins = np.logical_or(row.get("terminated", False), row.get("truncated", False))
        drawn, changed, log_prob, memory = self.act(ids, obs, begins)
        under = lambda name, leaves: {f"{name}/{path}" if path else name: x for path, x in leaves.items()}
        chosen = {"log_probs": log_prob, "versions": np.full(len(log_prob), self.version)}
        rows = self._rows.setdefault(ids, [])
        rows.append(row | under("observations", obs) | under("actions", drawn) | under("memory", memory) | chosen)
        # steps in one request, and of one episode, as the server will have it
        most = len(rows) >= self._told["rows"] or (len(rows) + 1) * len(ids) > self._told["most"]
        return changed, most or time.monotonic() - self._sent > _SEND_S

    @property
    def remembers(self) -> bool:
        """Returns whether actions depend on earlier observations of an episode."""
        return bool(self._start)

    def act(
        self, episodes: Sequence[str], obs: Mapping[str, np.ndarray], begins: Any = False
    ) -> tuple[Leaves, Leaves, np.ndarray, Leaves]:
        """Acts for N episodes at observations [N, *] by path; `begins` [N]: another episode begins under the same id.

        Returns:
          (the policy's actions [N, *], the environment's, log-probabilities [N] f32, the memory before [N, *]).
        Raises:
          ValueError: observations of other shapes.
        """
        seen = []
        for path, dtype, shape in self._told["observation"]:
            x, name = obs.get(path), f"observation{path and '/'}{path}"
            if x is None or list(x.shape[1:]) != shape:
                raise ValueError(f"{name}: expected {dtype} {shape}, got {x if x is None else list(x.shape[1:])}")
            if len(x) != len(episodes):
                raise ValueError(f"{name}: expected {len(episodes)} of them, got {len(x)}")
            seen.append(x.astype(dtype, copy=False))
        before = self._before(episodes, begins)
        numbers, drawn, log_prob = iter(self._policy(*seen, *before)), [], np.zeros(len(episodes))
        for part in self._told["actions"]:
            action, own = _DRAWN[part["kind"]](part, numbers, self._rng)
            drawn.append(action.astype(part["dtype"]))
            log_prob += own.reshape(len(own), -1).sum(1)
        if self._start:
            self._memory.update(zip(episodes, map(list, zip(*numbers, strict=True)), strict=True))
        changed = self._to_env(*drawn) if self._to_env else drawn
        paths = [part["path"] for part in self._told["actions"]]
        by_path = lambda leaves: dict(zip(paths, leaves, strict=True))
        memory = {str(i): x for i, x in enumerate(before)}
        return by_path(drawn), by_path(changed), log_prob.astype(np.float32), memory

    def go_on(self, episodes: Sequence[str], ids: Sequence[str]) -> None:
        """Remembers these episodes under other ids; nothing more of them where there are none."""
        memory = [self._memory.pop(id, self._start) for id in episodes]
        self._memory.update(zip(ids, memory) if self._start else ())

    def _before(self, episodes: Sequence[str], begins: Any) -> list[np.ndarray]:
        if not self._start:
            return []
        begins = np.broadcast_to(begins, len(episodes))
        kept = [self._start if new else self._memory.get(id, self._start) for id, new in zip(episodes, begins)]
        return [np.stack(parts) for parts in zip(*kept, strict=True)]

    def send(self, ids: tuple[str, ...]) -> list[str]:
        """Sends the steps of these episodes; the episodes that go on. Raises what `tell` does: they do not go on."""
        rows, self._sent = self._rows.pop(ids, []), time.monotonic()
        if not rows:
            return list(ids)
        # zeros for the arrays that a row lacks
        like = {name: np.zeros_like(x) for row in rows for name, x in row.items()}
        stacked = {name: np.stack([row.get(name, zero) for row in rows]) for name, zero in like.items()}
        try:
            found = self._tell({"episode_ids": list(ids), **stacked})
        except Exception:
            self.go_on(ids, ())
            self.version = -1  # a server that has begun anew knows other versions
            raise
        new, late = [str(id) for id in found["episode_ids"]], int(found.get("too_old", 0))
        if late and not self.too_old:
            warnings.warn(
                f"the server does not learn from {late} steps, whose weights are older than its external.max_lag: get "
                "others more often (update_interval, update_policy_weights), or raise that; `too_old` counts the steps",
                stacklevel=4,
            )
        self.too_old += late
        is_other = int(found["version"]) != self.version
        if is_other and self._interval is not None and time.monotonic() - self._loaded >= self._interval:
            self.update()
        self.go_on(ids, new)
        return new


def _categorical(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    logits = next(numbers).astype(float)
    sizes = part.get("sizes", [logits.shape[-1]])
    actions, log_probs = [], []
    for some in np.split(logits, np.cumsum(sizes)[:-1], axis=-1):
        action = np.argmax(some + rng.gumbel(size=some.shape), axis=-1)
        log_probs.append(np.take_along_axis(some, action[:, None], -1)[:, 0] - np.logaddexp.reduce(some, axis=-1))
        actions.append(action)
    return np.stack(actions, -1) if "sizes" in part else actions[0], np.stack(log_probs, -1)


def _bernoulli(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    logits = next(numbers).astype(float)
    action = np.log(rng.uniform(size=logits.shape)) < -np.logaddexp(0.0, -logits)
    return action, -np.logaddexp(0.0, np.where(action, -logits, logits))


def _gaussian(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    mean, log_std = next(numbers).astype(float), next(numbers).astype(float)
    noise = rng.normal(size=mean.shape)
    action, log_prob = mean + np.exp(log_std) * noise, -0.5 * (noise**2 + np.log(2 * np.pi)) - log_std
    if part["kind"] == "TanhGaussian":
        log_prob -= 2.0 * (np.log(2.0) - action - np.logaddexp(0.0, -2.0 * action))
        action = np.tanh(action)
    return np.clip(action, part.get("low"), part.get("high")) if "low" in part else action, log_prob


def _best(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    action = next(numbers)
    return action, np.zeros(len(action))


_DRAWN = {  # (how an array is drawn, what the program computed, ...) -> ([N, *], log-probabilities [N, *])
    "Best": _best,
    "Categorical": _categorical,
    "MultiCategorical": _categorical,
    "Bernoulli": _bernoulli,
    "DiagGaussian": _gaussian,
    "TanhGaussian": _gaussian,
}
