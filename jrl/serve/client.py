"""Client of a jrl server: plays episodes with the server's policy. Needs only numpy and this file.

The server is `python -m jrl.serve CONFIG`. With inference_mode "local" the client needs `jrl/export/interpreter.py`,
too: copy it beside this file.

    client = PolicyClient("http://127.0.0.1:9900")
    episode = client.start_episode()
    obs, _ = env.reset()
    while True:
        obs, reward, terminated, truncated, _ = env.step(client.get_action(episode, obs))
        client.log_returns(episode, reward)
        if terminated or truncated:
            client.end_episode(episode, obs, truncated=truncated)
            break

While the server is not reachable, calls wait and try again. After a restart of the server without the episode, calls
raise EpisodeLost: begin another episode. A client is for a single thread.
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
_LARGE = 256  # numbers in a request above which arrays are sent as npz instead of JSON
_FIRST_S, _LONGEST_S = 0.1, 5.0  # first and longest pause between tries; doubled each time
_SEND_S = 1.0  # longest time between two requests with steps of local inference
Leaves = dict[str, np.ndarray]  # arrays of a tree by their paths, such as "goal/0"; path "" if the tree is an array


class RequestRefused(ValueError):
    """The server refused a request. `status` is the HTTP status, 4xx."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class EpisodeLost(RuntimeError):
    """The server does not have the episode any more, after a restart or a long silence: begin another."""


class Steps(NamedTuple):
    """Results of a step of N episodes."""

    episodes: list[str]  # ids; a new episode replaces each ended episode
    actions: Any  # [N, *]


@dataclasses.dataclass
class _EpisodeState:
    """Fields of an episode's next request, by agent. A single agent has the name ""."""

    is_multi_agent: bool = False
    step: int = 0
    infos: dict[str, float] = dataclasses.field(default_factory=dict)
    observations: dict[str, Any] = dataclasses.field(default_factory=dict)
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    terminated: dict[str, bool] = dataclasses.field(default_factory=dict)
    truncated: dict[str, bool] = dataclasses.field(default_factory=dict)

    def build_single(self) -> dict[str, Any]:
        """Returns the fields of a single agent's request, without its observation."""
        return {"reward": self.rewards.get("", 0.0), "step": self.step}

    def build_turn(self, observations: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Returns the fields of a turn."""
        return {
            "observations": {**self.observations, **observations}, "rewards": self.rewards, "step": self.step,
            "terminated": self.terminated, "truncated": self.truncated, **fields,
        }  # fmt: skip

    def advance(self) -> None:
        """Goes to the next step."""
        self.step += 1
        self.observations, self.rewards, self.terminated, self.truncated = {}, {}, {}, {}


class PolicyClient:
    """Connection to a server, and its episodes.

    Args:
      address: http://HOST:PORT or https://HOST:PORT.
      token: the server's token; None: the server needs none.
      timeout_s: seconds for a request.
      patience_s: seconds of trying again while the server is not reachable; then calls raise ConnectionError.
      context: TLS context, for example for your own certificate; None: the system's.
      inference_mode: "remote": the server chooses actions; "local": this process chooses actions with numpy and the
        server's weights, and sends several steps in a request. The answers name the latest version of the weights.
      update_interval: local inference: minimum seconds between two weights; 0: fetch new weights as soon as an answer
        names them; None: only `update_policy_weights` fetches weights.
      seed: seed of the actions of local inference; None: random.
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
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        if parts.scheme == "https":
            self._connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout_s, context=context
            )
        self._address, self._patience_s = address, patience_s
        self._headers = {"Jrl-Client": uuid.uuid4().hex}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._episodes: dict[str, _EpisodeState] = {}
        self.version = 0  # version of the weights that chose the latest action
        self._is_local, self._rng = inference_mode == "local", np.random.default_rng(seed)
        self._local: LocalPolicy | None = None
        self._interval = update_interval

    # ------------------------------------------------------------ one episode

    def start_episode(
        self, episode_id: str | None = None, training_enabled: bool = True, policy: str | None = None
    ) -> str:
        """Begins an episode; returns its id.

        Args:
          episode_id: id of the episode; None: a new id.
          training_enabled: whether the server learns from the episode.
          policy: name of the policy; None: the server's first. A client with local inference has a single policy.
        """
        self._load_policy(policy)
        id = episode_id or uuid.uuid4().hex
        fields = {"episode_id": id, "training_enabled": bool(training_enabled), "policy": policy}
        try:
            answer = self._post("/v1/episodes", fields)
        except RequestRefused as e:
            if e.status != 409 or episode_id is not None:
                raise  # a new id is refused only if the answer to the first try was lost
            policies = self.policies()
            answer = policies[policy or next(iter(policies))]
        self._episodes[id] = _EpisodeState(is_multi_agent=bool(answer.get("agents")))
        return id

    def get_action(self, episode_id: str, observation: Any, agent: str | None = None) -> Any:
        """Returns the policy's action at an observation [*], in the environment's units.

        Several agents: {agent: action} of the acting agents, at {agent: [*]}; or the action of `agent`, at its [*].
        """
        state = self._episodes[episode_id]
        if state.is_multi_agent:
            actions = self._turn(episode_id, _map_agent(agent, observation))
            return actions if agent is None else actions[agent]
        if self._local is not None:
            row = {"rewards": np.array([state.rewards.get("", 0.0)], np.float32)}
            state.advance()
            _, action = self._local.step((episode_id,), _add_axis(observation), row)
            self.version = self._local.version
            return _build_tree({name: x[0] for name, x in action.items()})
        answer = self._post_episode(episode_id, "action", {"observation": observation, **state.build_single()})
        self.version = int(answer["version"])
        return _to_arrays(answer["action"])

    def log_action(
        self, episode_id: str, observation: Any, action: Any, agent: str | None = None, log_prob: Any = None
    ) -> None:
        """Reports an action that the caller chose; several agents as in `get_action`.

        Args:
          episode_id, observation, agent: see `get_action`.
          action: the action, in the environment's units.
          log_prob: log-probability of the action; None: unknown.
        Raises:
          RequestRefused: the algorithm learns only from its own actions.
        """
        state = self._episodes[episode_id]
        if state.is_multi_agent:
            log_probs = None if log_prob is None else _map_agent(agent, log_prob)
            actions = _map_agent(agent, action)
            self._turn(episode_id, _map_agent(agent, observation), actions=actions, log_probs=log_probs)
            return
        if self._local is not None:
            self._local.send((episode_id,))
        fields = {"observation": observation, "action": action, "log_prob": log_prob, **state.build_single()}
        self._post_episode(episode_id, "log", fields)
        if self._local is not None and self._local.has_memory:
            self._local.act((episode_id,), _add_axis(observation))

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Mapping[str, Any] | None = None,
        multiagent_done_dict: Mapping[str, bool] | None = None,
        agent: str | None = None,
    ) -> None:
        """Adds to the reward of the latest action. The next request sends the reward.

        Args:
          episode_id: see `start_episode`.
          reward: a number; several agents: {agent: number}, or a number for `agent`.
          info: numbers of the episode by name, at most 32; the server's result rows have their means. The next request
            sends the last value of each name.
          multiagent_done_dict: agents that ended before their episode; see `end_agent`.
          agent: see `reward`.
        Raises:
          ValueError: an info is not a number. The server refuses more than 32 names with the next request.
        """
        state = self._episodes[episode_id]
        state.infos |= {name: float(x) for name, x in (info or {}).items()}
        for name, x in (_map_agent(agent, reward) if state.is_multi_agent else {"": reward}).items():
            state.rewards[name] = state.rewards.get(name, 0.0) + float(x)
        ended = (multiagent_done_dict or {}).items()
        state.terminated |= {name: True for name, over in ended if over and name != "__all__"}

    def end_agent(self, episode_id: str, agent: str, observation: Any, truncated: bool = False) -> None:
        """Ends an agent before its episode, with the observation after its last action; sent with the next request."""
        state = self._episodes[episode_id]
        state.observations[agent] = observation
        (state.truncated if truncated else state.terminated)[agent] = True

    def end_episode(self, episode_id: str, observation: Any = None, truncated: bool = False) -> dict[str, Any]:
        """Ends an episode with the observation after its last action.

        Args:
          episode_id: see `start_episode`.
          observation: last observation [*]; several agents: {agent: [*]}, which a termination may leave out.
          truncated: whether a time limit ended the episode.
        Returns:
          `return` and `length` of the episode. Several agents: the sum of their returns, the number of steps in which
          an agent acted, and `returns`, {agent: return}.
        """
        state = self._episodes[episode_id]
        if state.is_multi_agent:
            if state.terminated or state.truncated:
                self._turn(episode_id, {})
            last = {"observations": dict(observation or {}), "rewards": state.rewards, "step": state.step}
        else:
            if self._local is not None:
                self._local.send((episode_id,))
            last = {"observation": observation, **state.build_single()}
        answer = self._post_episode(episode_id, "end", {**last, "truncated": bool(truncated)})
        del self._episodes[episode_id]
        if self._local is not None:
            self._local.rename_episodes((episode_id,), ())
        summary: dict[str, Any] = {name: float(answer[name]) for name in ("return", "length")}
        if state.is_multi_agent:
            summary["returns"] = {name: float(x) for name, x in answer["returns"].items()}
        return summary

    def _turn(self, id: str, observations: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Sends a turn with more fields; returns actions by agent."""
        answer = self._post_episode(id, "turn", self._episodes[id].build_turn(observations, **fields))
        self.version = int(answer["version"])
        return {name: _to_arrays(x) for name, x in answer.get("actions", {}).items()}

    # ------------------------------------------------------------ many episodes in one request

    def start_episodes(self, count: int, training_enabled: bool = True, policy: str | None = None) -> list[str]:
        """Begins `count` episodes, for `steps`, or for `turns` if they have several agents; returns their ids.

        Other arguments: see `start_episode`.
        """
        self._load_policy(policy)
        fields = {"count": count, "training_enabled": bool(training_enabled), "policy": policy}
        answer = self._post("/v1/episodes", fields)
        ids = [str(id) for id in answer["episode_ids"]]
        if answer.get("agents"):
            self._episodes |= {id: _EpisodeState(is_multi_agent=True) for id in ids}
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
        """Steps N episodes: sends the results of their latest actions, and returns the next actions.

        Args:
          episodes: N ids.
          observations: [N, *] current observations; for an ended episode, the first observation of the next episode.
          rewards: [N] rewards of the latest actions; None before the first action.
          terminated, truncated: [N] bool, episodes that ended with the latest action; None: no episode.
          final_observations: [N, *] last observations of ended episodes; other rows are ignored.
        Raises:
          EpisodeLost: no answer arrived, so it is unknown whether the step counts.
        """
        fields = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
        fields = _drop_none({**fields, "final_observations": final_observations})
        if self._local is not None:
            leaves = dict(flatten_tree("", observations)), dict(flatten_tree("", fields))
            ids, action = self._local.step(tuple(episodes), *leaves)
            self.version = self._local.version
            return Steps(ids, _build_tree(action))
        fields = {"episode_ids": list(episodes), "observations": observations, **fields}
        answer = self._post("/v1/steps", fields, retry=False)
        self.version = int(answer["version"])
        return Steps([str(id) for id in answer["episode_ids"]], _to_arrays(answer["actions"]))

    # ------------------------------------------------------------ local inference

    @property
    def too_old(self) -> int:
        """Number of steps of local inference from which the server does not learn, because of `max_lag`."""
        return 0 if self._local is None else self._local.too_old

    def update_policy_weights(self) -> int:
        """Fetches the server's weights for local inference, if they are new; returns their version."""
        if self._is_local and self._local is None:
            self._load_policy(None)
        return self.version if self._local is None else self._local.update()

    def _load_policy(self, policy: str | None) -> None:
        """Loads the policy of local inference. Raises RequestRefused: numpy cannot act for the policy."""
        query = "" if policy is None else urllib.parse.urlencode({"policy": policy})
        if self._is_local and self._local is None:
            get = lambda path: self._request("GET", path)
            local = LocalPolicy(_load_interpreter(), self._rng, get, self._post_played, self._interval, query)
            local.update()
            self._local = local  # only after `update`, which raises for a refused policy
        elif self._local is not None and query != self._local.query:
            raise ValueError("policy: with inference_mode local a client has a single policy: make another client")

    def _post_played(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._post("/v1/played", fields, retry=False)
        except RequestRefused as e:
            if e.status not in (404, 409, 410):
                raise
            raise EpisodeLost(str(e)) from e

    def turns(self, observations: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Sends a turn of each of many episodes of several agents in one request.

        Args:
          observations: {episode: {agent: [*]}} of the acting agents. Rewards, infos and ends are sent with them, as by
            `get_action`.
        Returns:
          {episode: {agent: action}}.
        Raises:
          EpisodeLost: no answer arrived, so it is unknown whether the turns count.
          RequestRefused: an invalid turn, which the message names; no turn counts.
        """
        states = {id: self._episodes[id] for id in observations}
        turns = {id: states[id].build_turn(obs, infos=states[id].infos) for id, obs in observations.items()}
        answer = self._post("/v1/turns", {"turns": turns}, retry=False)
        for state in states.values():
            state.advance()
            state.infos = {}
        self.version = int(answer["version"])
        actions = {id: answer["turns"][id].get("actions", {}) for id in states}
        return {id: {agent: _to_arrays(x) for agent, x in own.items()} for id, own in actions.items()}

    # ------------------------------------------------------------ over the wire

    def get_once(self, observation: Any, policy: str | None = None) -> Any:
        """Returns the action of a policy without memory at an observation [*], without an episode."""
        answer = self._post("/v1/action", {"observation": observation, "policy": policy})
        self.version = int(answer["version"])
        return _to_arrays(answer["action"])

    def policies(self) -> dict[str, Any]:
        """Returns the server's policies by name: algorithm, spaces, version."""
        return self._request("GET", "/v1/policies")["policies"]

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _post_episode(self, id: str, route: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request of an episode, and advance the episode. Raises EpisodeLost."""
        state = self._episodes[id]
        try:
            path = f"/v1/episodes/{urllib.parse.quote(id, safe='')}/{route}"
            answer = self._post(path, {**fields, "infos": state.infos or None})
        except RequestRefused as e:
            state.infos = {}  # refused infos would make the server refuse the following requests, too
            if e.status not in (404, 410):
                raise
            del self._episodes[id]
            raise EpisodeLost(str(e)) from e
        state.infos = {}
        state.advance()
        return answer

    def _post(self, path: str, fields: Mapping[str, Any], *, retry: bool = True) -> dict[str, Any]:
        fields = _drop_none(fields)
        # npz would make trees of names that contain a /
        needs_json = "turns" in fields or any("/" in name for name in fields.get("infos", ()))
        if not needs_json and ("episode_ids" in fields or _count_numbers(fields) > _LARGE):
            buffer = io.BytesIO()
            np.savez(buffer, allow_pickle=False, **dict(flatten_tree("", fields)))
            return self._request("POST", path, buffer.getvalue(), _NPZ, retry=retry)
        return self._request("POST", path, json.dumps(fields, default=lambda x: x.tolist()).encode(), retry=retry)

    def _request(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json", *, retry: bool = True
    ) -> dict[str, Any]:
        """Returns the fields of the answer. Raises EpisodeLost: no answer without `retry`; the steps may count."""
        until, wait = time.monotonic() + self._patience_s, _FIRST_S
        while True:
            try:
                try:
                    self._connection.request(method, path, body, {**self._headers, "Content-Type": kind})
                except (BrokenPipeError, ConnectionResetError):
                    # the server closed the connection before the end of a refused request; its answer is in the socket
                    if self._connection.sock is None:
                        raise
                response = self._connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException) as e:
                self._connection.close()
                why = f"no answer from {self._address}: {e or type(e).__name__}"
                if not retry:
                    raise EpisodeLost(why) from e
                if time.monotonic() + wait > until:
                    raise ConnectionError(why) from e
            else:
                # 429, too many requests or episodes: try again
                if response.status != 429 or not retry or time.monotonic() + wait >= until:
                    if response.status >= 400:
                        raise RequestRefused(response.status, _read_error(content, response.status))
                    return _read_body(content, response.getheader("Content-Type", ""))
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, _LONGEST_S)


def _add_axis(observation: Any) -> Leaves:
    return {name: x[None] for name, x in flatten_tree("", observation)}


def _drop_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in fields.items() if x is not None}


def _map_agent(agent: str | None, x: Any) -> dict[str, Any]:
    return dict(x) if agent is None else {agent: x}


def _read_error(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {status}"


def _read_body(body: bytes, kind: str) -> dict[str, Any]:
    if not body:  # status 204
        return {}
    if not kind.startswith(_NPZ):
        return json.loads(body)
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return nest_paths({name: arrays[name] for name in arrays.files})


def nest_paths(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns arrays by their paths as nested mappings. Raises ValueError: a path is part of another path."""
    tree: dict[str, Any] = {}
    for name, x in arrays.items():
        *path, last = name.split("/")
        part = tree
        for inner in path:
            part = part.setdefault(inner, {}) if isinstance(part, dict) else part
        if not isinstance(part, dict) or last in part:
            raise ValueError(f"{name}: expected an array or a tree of arrays, got both")
        part[last] = x
    return tree


def _to_arrays(tree: Any) -> Any:
    """Returns a tree with arrays instead of JSON's lists, and numbers of numpy."""
    if isinstance(tree, dict):
        if tree and all(name.isdigit() for name in tree):  # parts of a tuple, from npz
            return tuple(_to_arrays(tree[str(i)]) for i in range(len(tree)))
        return {name: _to_arrays(part) for name, part in tree.items()}
    if isinstance(tree, list) and any(isinstance(part, dict) for part in tree):
        return tuple(_to_arrays(part) for part in tree)
    x = np.asarray(tree)
    x = x.astype(np.float32) if x.dtype == np.float64 else x
    return x[()] if x.ndim == 0 else x


def _build_tree(leaves: Mapping[str, Any]) -> Any:
    """Returns the tree of arrays by path; the inverse of `flatten_tree`."""
    return leaves[""] if "" in leaves else _to_arrays(nest_paths(leaves))


def _count_numbers(tree: Any) -> int:
    if isinstance(tree, Mapping):
        return sum(map(_count_numbers, tree.values()))
    return tree.size if isinstance(tree, np.ndarray) else 1


def flatten_tree(name: str, tree: Any) -> list[tuple[str, np.ndarray]]:
    """Returns (path, array) of each array of a tree. `name`: path of the tree."""
    if isinstance(tree, Mapping):
        parts = [(str(key), part) for key, part in tree.items()]
    elif isinstance(tree, tuple):
        parts = [(str(i), part) for i, part in enumerate(tree)]
    else:
        return [(name, np.asarray(tree))]
    return [leaf for key, part in parts for leaf in flatten_tree(f"{name}/{key}" if name else key, part)]


def _load_interpreter() -> Any:
    """Returns interpreter.py as a module, from the directory of this file or from jrl. Raises FileNotFoundError."""
    module, here = types.ModuleType("jrl_interpreter"), Path(__file__)
    files = here.with_name("interpreter.py"), here.parents[1] / "export" / "interpreter.py"
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise FileNotFoundError(f"{files[0]}: inference_mode local needs jrl/export/interpreter.py: copy it there")
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
    return module


# ---------------------------------------------------------------- acting with numpy


class LocalPolicy:
    """A policy of the server that acts in this process with numpy, from `/v1/program` and `/v1/weights`.

    The program computes the parameters of distributions (`jrl/distributions.py`). This class draws the actions,
    computes their log-probabilities, and keeps the memory of each episode. `get` returns the server's answer to a path,
    `send_fields` sends the fields of /v1/played and returns the answer.
    """

    def __init__(
        self, interpreter: Any, rng: np.random.Generator, get: Callable[[str], dict[str, Any]],
        send_fields: Callable[[Mapping[str, Any]], dict[str, Any]], interval: float | None = 0.0, query: str = "",
    ):  # fmt: skip
        self._interpreter, self._rng = interpreter, rng
        self._get, self._send_fields, self._interval, self.query = get, send_fields, interval, query
        self.version = -1  # version of the weights; -1: no weights yet
        self.too_old = 0  # steps whose weights were too old for the server
        self._start: list[np.ndarray] = []  # memory before an episode
        self._memory: dict[str, list[np.ndarray]] = {}  # episode -> memory after its latest step
        self._rows: dict[tuple[str, ...], list[Leaves]] = {}  # episodes -> steps to send
        self._send_time = time.monotonic()

    def update(self) -> int:
        """Fetches the weights if the server has other weights; returns their version."""
        if self.version < 0:
            self._program = self._get(f"/v1/program?{self.query}")
        if weights := self._get(f"/v1/weights?newer_than={self.version}&{self.query}"):
            build = self._interpreter.build_forward
            self._policy = build(self._program["program"], weights.get("policy", {}))
            to_env = self._program["to_env"]
            self._to_env = to_env and build(to_env, weights.get("to_env", {}))
            start = weights.get("memory", {})
            self._start = [start[str(i)] for i in range(len(start))]
            self.version, self._load_time = int(weights["version"]), time.monotonic()
        return self.version

    def step(self, ids: tuple[str, ...], obs: Leaves, row: Leaves) -> tuple[list[str], Leaves]:
        """Steps N episodes, and sends their steps once there are enough.

        Args:
          ids: ids of the episodes.
          obs: observations [N, *] by path.
          row: results of the latest actions, by the names of /v1/played.
        Returns:
          (ids of the continuing episodes, the environment's actions [N, *] by path).
        Raises:
          RequestRefused: as `act`.
        """
        if self.version < 0:
            self.update()
        begins = np.logical_or(row.get("terminated", False), row.get("truncated", False))
        action, env_action, log_prob, memory = self.act(ids, obs, begins)
        prefix = lambda name, leaves: {f"{name}/{path}" if path else name: x for path, x in leaves.items()}
        chosen = {"log_probs": log_prob, "versions": np.full(len(log_prob), self.version)}
        rows = self._rows.setdefault(ids, [])
        rows.append(row | prefix("observations", obs) | prefix("actions", action) | prefix("memory", memory) | chosen)
        # the server limits the steps of an episode and of a request
        is_full = len(rows) >= self._program["rows"] or (len(rows) + 1) * len(ids) > self._program["most"]
        must_send = is_full or time.monotonic() - self._send_time > _SEND_S
        return self.send(ids) if must_send else list(ids), env_action

    @property
    def has_memory(self) -> bool:
        """Whether actions depend on earlier observations of an episode."""
        return bool(self._start)

    def act(
        self, episodes: Sequence[str], obs: Mapping[str, np.ndarray], begins: Any = False
    ) -> tuple[Leaves, Leaves, np.ndarray, Leaves]:
        """Chooses actions for N episodes.

        Args:
          episodes: ids of the episodes.
          obs: observations [N, *] by path.
          begins: [N] bool, a new episode begins under the same id.
        Returns:
          (the policy's actions [N, *], the environment's, log-probabilities [N] f32, the memory before [N, *]).
        Raises:
          RequestRefused: observations of other shapes.
        """
        leaves = []
        for path, dtype, shape in self._program["observation"]:
            x, name = obs.get(path), f"observation{path and '/'}{path}"
            if x is None or list(x.shape[1:]) != shape:
                got = x if x is None else list(x.shape[1:])
                raise RequestRefused(422, f"{name}: expected {dtype} {shape}, got {got}")
            if len(x) != len(episodes):
                raise RequestRefused(422, f"{name}: expected {len(episodes)} observations, got {len(x)}")
            leaves.append(x.astype(dtype, copy=False))
        before = self._read_memory(episodes, begins)
        numbers, actions, log_prob = iter(self._policy(*leaves, *before)), [], np.zeros(len(episodes))
        for part in self._program["actions"]:
            action, part_log_prob = _SAMPLERS[part["kind"]](part, numbers, self._rng)
            actions.append(action.astype(part["dtype"]))
            log_prob += part_log_prob.reshape(len(part_log_prob), -1).sum(1)
        if self._start:
            self._memory.update(zip(episodes, map(list, zip(*numbers, strict=True)), strict=True))
        env_actions = self._to_env(*actions) if self._to_env else actions
        paths = [part["path"] for part in self._program["actions"]]
        by_path = lambda leaves: dict(zip(paths, leaves, strict=True))
        memory = {str(i): x for i, x in enumerate(before)}
        return by_path(actions), by_path(env_actions), log_prob.astype(np.float32), memory

    def rename_episodes(self, episodes: Sequence[str], ids: Sequence[str]) -> None:
        """Moves the memories of episodes to other ids; `ids` (): delete the memories."""
        memory = [self._memory.pop(id, self._start) for id in episodes]
        self._memory.update(zip(ids, memory) if self._start else ())

    def _read_memory(self, episodes: Sequence[str], begins: Any) -> list[np.ndarray]:
        if not self._start:
            return []
        begins = np.broadcast_to(begins, len(episodes))
        memories = [self._start if new else self._memory.get(id, self._start) for id, new in zip(episodes, begins)]
        return [np.stack(parts) for parts in zip(*memories, strict=True)]

    def send(self, ids: tuple[str, ...]) -> list[str]:
        """Sends the steps of these episodes; returns the ids of the continuing episodes. Raises as `send_fields`."""
        self._send_time = time.monotonic()
        if not (rows := self._rows.pop(ids, [])):
            return list(ids)
        zeros = {name: np.zeros_like(x) for row in rows for name, x in row.items()}
        stacked = {name: np.stack([row.get(name, zero) for row in rows]) for name, zero in zeros.items()}
        try:
            answer = self._send_fields({"episode_ids": list(ids), **stacked})
        except Exception:
            self.rename_episodes(ids, ())
            self.version = -1  # a restarted server has other versions
            raise
        new_ids, too_old = [str(id) for id in answer["episode_ids"]], int(answer.get("too_old", 0))
        if too_old and not self.too_old:
            warnings.warn(
                f"the server does not learn from {too_old} steps, whose weights are older than its external.max_lag: "
                "fetch weights more often (update_interval, update_policy_weights), or raise max_lag; `too_old` counts "
                "the steps",
                stacklevel=4,
            )
        self.too_old += too_old
        is_new = int(answer["version"]) != self.version
        if is_new and self._interval is not None and time.monotonic() - self._load_time >= self._interval:
            self.update()
        self.rename_episodes(ids, new_ids)
        return new_ids


def _draw_categorical(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    logits = next(numbers).astype(float)
    sizes = part.get("sizes", [logits.shape[-1]])
    actions, log_probs = [], []
    for part_logits in np.split(logits, np.cumsum(sizes)[:-1], axis=-1):
        action = np.argmax(part_logits + rng.gumbel(size=part_logits.shape), axis=-1)
        chosen_logits = np.take_along_axis(part_logits, action[:, None], -1)[:, 0]
        log_probs.append(chosen_logits - np.logaddexp.reduce(part_logits, axis=-1))
        actions.append(action)
    return np.stack(actions, -1) if "sizes" in part else actions[0], np.stack(log_probs, -1)


def _draw_bernoulli(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    logits = next(numbers).astype(float)
    action = np.log(rng.uniform(size=logits.shape)) < -np.logaddexp(0.0, -logits)
    return action, -np.logaddexp(0.0, np.where(action, -logits, logits))


def _draw_gaussian(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    mean, log_std = next(numbers).astype(float), next(numbers).astype(float)
    noise = rng.normal(size=mean.shape)
    action, log_prob = mean + np.exp(log_std) * noise, -0.5 * (noise**2 + np.log(2 * np.pi)) - log_std
    if part["kind"] == "TanhGaussian":
        log_prob -= 2.0 * (np.log(2.0) - action - np.logaddexp(0.0, -2.0 * action))
        action = np.tanh(action)
    return np.clip(action, part.get("low"), part.get("high")) if "low" in part else action, log_prob


def _take_best(part: Mapping[str, Any], numbers: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    action = next(numbers)
    return action, np.zeros(len(action))


_SAMPLERS = {  # (description of an array, outputs of the program, generator) -> ([N, *], log-probabilities [N, *])
    "Best": _take_best,
    "Categorical": _draw_categorical,
    "MultiCategorical": _draw_categorical,
    "Bernoulli": _draw_bernoulli,
    "DiagGaussian": _draw_gaussian,
    "TanhGaussian": _draw_gaussian,
}
