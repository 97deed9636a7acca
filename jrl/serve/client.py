"""Plays episodes with the policy of a jrl server: `python -m jrl.serve CONFIG`. Needs numpy and this file alone.

With inference_mode "local" it needs two more, `jrl/serve/acting.py` and `jrl/export/interpreter.py`: copied beside it,
or held in it, as `python -m jrl.serve --write-client FILE` writes it.

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

import http.client
import importlib.util
import io
import json
import random
import ssl
import time
import types
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_NPZ = "application/x-npz"
_LARGE = 256  # numbers of an observation, from which on arrays are sent as npz rather than as JSON
INFOS, INFO_LENGTH = 32, 64  # of infos: names of an episode in a request, and characters of each
_GREATEST = float(np.finfo(np.float32).max)
_FIRST_S, _LONGEST_S = 0.1, 5.0  # seconds between tries, doubled each time
_HELD: dict[str, str] = {}  # sources of what lies beside this file, by name, where it was written as one


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
        if parts.scheme == "https":
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout_s, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        self._address, self._patience_s = address, patience_s
        self._headers = {"Jrl-Client": uuid.uuid4().hex}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._reward: dict[str, float] = {}  # since the latest action, by episode
        self._step: dict[str, int] = {}
        self._infos: dict[str, dict[str, float]] = {}  # since the latest request, by episode
        self._turns: dict[str, dict[str, dict[str, Any]]] = {}  # what the next request tells of several agents
        self.version = 0  # of the weights that chose the latest action
        self._acts_here, self._rng = inference_mode == "local", np.random.default_rng(seed)
        self._local: Any = None  # `acting.Player`
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
        self._reward[id], self._step[id] = 0.0, 0
        if found.get("agents"):
            self._turns[id] = _nothing_told()
        return id

    def get_action(self, episode_id: str, observation: Any, agent: str | None = None) -> Any:
        """Returns the policy's action at an observation [*], as the environment takes it.

        Of several agents the actions of those that act now, {agent: action}, at their observations {agent: [*]}; or of
        one of them, which `agent` names.
        """
        if episode_id in self._turns:
            actions = self._turn(episode_id, _by_agent(agent, observation))
            return actions if agent is None else actions[agent]
        if self._acts_here:
            row = {"rewards": np.array([self._reward[episode_id]], np.float32)}
            self._went_on(episode_id)
            _, action = self._act((episode_id,), {name: x[None] for name, x in flat("", observation)}, row)
            return _tree({name: x[0] for name, x in action.items()})
        fields = {"observation": observation, "reward": self._reward[episode_id], "step": self._step[episode_id]}
        found = self._of(episode_id, "action", fields)
        self._went_on(episode_id)
        self.version = int(found["version"])
        return _arrays(found["action"])

    def log_action(
        self, episode_id: str, observation: Any, action: Any, agent: str | None = None, log_prob: Any = None
    ) -> None:
        """Tells of an action that was chosen here. Raises RequestRefused where the algorithm does not learn from it.

        Of several agents by agent, as `get_action`. `log_prob` is the action's log-probability where it is known, of
        which those algorithms make no use.
        """
        if episode_id in self._turns:
            known = None if log_prob is None else _by_agent(agent, log_prob)
            self._turn(episode_id, _by_agent(agent, observation), _by_agent(agent, action), known)
            return
        self._send((episode_id,))
        fields = {"observation": observation, "action": action, "reward": self._reward[episode_id]}
        self._of(episode_id, "log", {**fields, "log_prob": log_prob, "step": self._step[episode_id]})
        self._went_on(episode_id)
        if self._acts_here and self._player().remembers:
            self._local.act((episode_id,), {name: x[None] for name, x in flat("", observation)})

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
          ValueError: an info is no finite number, or there are too many.
        """
        infos = _infos(self._infos.get(episode_id, {}), info or {})
        if episode_id not in self._turns:
            self._reward[episode_id] += float(reward)
            self._infos[episode_id] = infos
            return
        told = self._turns[episode_id]
        self._infos[episode_id] = infos
        for name, x in _by_agent(agent, reward).items():
            told["rewards"][name] = told["rewards"].get(name, 0.0) + float(x)
        ended = multiagent_done_dict or {}
        told["terminated"] |= {name: True for name, over in ended.items() if over and name != "__all__"}

    def end_agent(self, episode_id: str, agent: str, observation: Any, truncated: bool = False) -> None:
        """Ends an agent before its episode, with the observation after its last action; with the next request."""
        told = self._turns[episode_id]
        told["observations"][agent] = observation
        told["truncated" if truncated else "terminated"][agent] = True

    def end_episode(self, episode_id: str, observation: Any = None, truncated: bool = False) -> dict[str, Any]:
        """Ends an episode with the observation after its last action; its `return` and `length`.

        Args:
          episode_id: see `start_episode`.
          observation: [*], the last; of several agents {agent: [*]}, of which a true end needs none.
          truncated: it was cut, by a time limit, and might have gone on.
        Returns:
          Of several agents the sum of their returns, the steps in which any acted, and `returns`, {agent: return}.
        """
        if episode_id in self._turns:
            return self._end_turns(episode_id, observation or {}, truncated=truncated)
        self._send((episode_id,))
        fields = {"observation": observation, "reward": self._reward[episode_id], "truncated": bool(truncated)}
        found = self._of(episode_id, "end", {**fields, "step": self._step[episode_id]})
        del self._reward[episode_id], self._step[episode_id]
        if self._local is not None:
            self._local.go_on((episode_id,), ())
        return {name: float(found[name]) for name in ("return", "length")}

    def _turn(
        self,
        id: str,
        observations: Mapping[str, Any],
        actions: Mapping[str, Any] | None = None,
        log_probs: Mapping[str, Any] | None = None,
    ) -> Any:
        told = self._turns[id]
        seen = {"observations": {**told["observations"], **observations}, "step": self._step[id]}
        found = self._of(id, "turn", {**told, **seen, "actions": actions or None, "log_probs": log_probs or None})
        self._turns[id] = _nothing_told()
        self._step[id] += 1
        self.version = int(found["version"])
        return {name: _arrays(x) for name, x in found.get("actions", {}).items()}

    def _end_turns(self, id: str, observations: Mapping[str, Any], *, truncated: bool) -> dict[str, Any]:
        if self._turns[id]["terminated"] or self._turns[id]["truncated"]:
            self._turn(id, {})
        told = self._turns[id]
        fields = {"observations": dict(observations), "rewards": told["rewards"], "truncated": bool(truncated)}
        found = self._of(id, "end", {**fields, "step": self._step[id]})
        del self._turns[id], self._reward[id], self._step[id]
        returns = {name: float(x) for name, x in found["returns"].items()}
        return {"return": float(found["return"]), "length": float(found["length"]), "returns": returns}

    # ------------------------------------------------------------ many episodes in one request

    def start_episodes(self, count: int, training_enabled: bool = True, policy: str | None = None) -> list[str]:
        """Begins so many episodes, for `steps`, or of several agents for `turns`; arguments as `start_episode`."""
        self._follow(policy)
        fields = {"count": count, "training_enabled": bool(training_enabled), "policy": policy}
        found = self._post("/v1/episodes", fields)
        ids = [str(id) for id in found["episode_ids"]]
        for id in ids if found.get("agents") else ():
            self._reward[id], self._step[id], self._turns[id] = 0.0, 0, _nothing_told()
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
        """Returns steps so far, chosen here, from which the server does not learn: their weights were too old
        (max_lag).
        """
        return 0 if self._local is None else int(self._local.too_old)

    def update_policy_weights(self) -> int:
        """Gets the server's weights where they are others than those that act here; their version.

        Does nothing where the server acts.
        """
        return int(self._player().update()) if self._acts_here else self.version

    def _follow(self, policy: str | None) -> None:
        """Acts for this policy from now on, where this process acts, so that what no client can do is refused early."""
        if self._acts_here:
            self._player("" if policy is None else urllib.parse.urlencode({"policy": policy}))

    def _player(self, query: str | None = None) -> Any:
        """Returns the player of a query's policy, or of the one before. Raises RequestRefused: it cannot."""
        if self._local is None:
            acting, interpreter = _beside("acting.py"), _beside("interpreter.py", "export")
            get = lambda path: self._request("GET", path, b"", {})
            found = acting.Player(interpreter, self._rng, get, self._played, self._interval, query or "")
            found.ready()
            self._local = found  # a policy that was refused is not the one for which it acts
        elif query not in (None, self._local.query):
            raise ValueError("policy: with inference_mode local a client acts for one: make another client")
        self._local.ready()
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
        told: dict[str, dict[str, Any]] = {}
        for id, seen in observations.items():
            before = self._turns[id]
            told[id] = {**before, "observations": {**before["observations"], **seen}, "step": self._step[id]}
            told[id] |= {"infos": self._infos[id]} if self._infos.get(id) else {}
        found = self._once("/v1/turns", {"turns": told}, npz=False)
        for id in told:
            self._infos.pop(id, None)
            self._turns[id], self._step[id] = _nothing_told(), self._step[id] + 1
        self.version = int(found["version"])
        of_one = lambda one: {agent: _arrays(x) for agent, x in one.get("actions", {}).items()}
        return {id: of_one(found["turns"][id]) for id in told}

    def _act(self, ids: tuple[str, ...], obs: Any, row: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Returns (episodes from now on, actions [N, *] by path) of N episodes, which are sent once there are
        enough.
        """
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

    def _went_on(self, id: str) -> None:
        self._reward[id], self._step[id] = 0.0, self._step[id] + 1

    def _of(self, id: str, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        infos = self._infos.get(id)
        try:
            path = f"/v1/episodes/{urllib.parse.quote(id, safe='')}/{what}"
            found = self._post(path, {**fields, "infos": infos} if infos else fields)
        except RequestRefused as e:
            self._infos.pop(id, None)  # or all that follows would be refused for them
            if e.status not in (404, 410):
                raise
            for told in (self._reward, self._step, self._turns):
                told.pop(id, None)
            raise EpisodeLost(str(e)) from e
        self._infos.pop(id, None)
        return found

    def _once(self, path: str, fields: Mapping[str, Any], *, npz: bool = True) -> dict[str, Any]:
        """Returns the answer to steps, of which nobody knows whether they count where none comes. Raises
        EpisodeLost.
        """
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
        body = json.dumps(fields, default=plain).encode()
        return self._request("POST", path, body, {"Content-Type": "application/json"}, again=again)

    def _answer(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Sends a request once; its answer and what that holds."""
        try:
            self._connection.request(method, path, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            if self._connection.sock is None:
                raise
            # a server that refuses a request before it is whole hangs up, and why stands in the socket
            answer = self._connection.getresponse()
            found = answer.read()
            self._connection.close()
            return answer, found
        answer = self._connection.getresponse()
        return answer, answer.read()

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


def _nothing_told() -> dict[str, dict[str, Any]]:
    return {name: {} for name in ("observations", "rewards", "terminated", "truncated")}


def _infos(told: Mapping[str, float], info: Mapping[str, Any]) -> dict[str, float]:
    """Adds `info` to the infos so far. Raises ValueError: these are no numbers by name."""
    found = dict(told)
    for name, x in info.items():
        if not (isinstance(name, str) and 0 < len(name) <= INFO_LENGTH and name.isprintable()):
            raise ValueError(f"info: expected names of 1 to {INFO_LENGTH} characters, got {name!r}")
        number = isinstance(x, bool | int | float | np.bool_ | np.integer | np.floating)
        if not number or not abs(x) <= _GREATEST:
            raise ValueError(f"info/{name}: expected a finite number, got {x!r:.80}")
        found[name] = float(x)
    if len(found) > INFOS:
        raise ValueError(f"info: expected at most {INFOS} names until the next request, got {len(found)}")
    return found


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
        return _nested({name: arrays[name] for name in arrays.files})


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Arrays by their paths as mappings of mappings."""
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        *path, last = name.split("/")
        part = found
        for inner in path:
            part = part.setdefault(inner, {})
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
    return leaves[""] if "" in leaves else _arrays(_nested(leaves))


def _size(tree: Any) -> int:
    if isinstance(tree, Mapping):
        return sum(map(_size, tree.values()))
    return tree.size if isinstance(tree, np.ndarray) else 1


def plain(x: Any) -> Any:
    """Returns an array as JSON holds it."""
    return x.tolist()


def flat(name: str, tree: Any) -> list[tuple[str, np.ndarray]]:
    """Returns the arrays of a tree, each with its path."""
    if isinstance(tree, Mapping):
        parts = [(str(key), part) for key, part in tree.items()]
    elif isinstance(tree, tuple):
        parts = [(str(i), part) for i, part in enumerate(tree)]
    else:
        return [(name, np.asarray(tree))]
    return [found for key, part in parts for found in flat(f"{name}/{key}" if name else key, part)]


def _beside(name: str, room: str = "serve") -> Any:
    """Returns the module that is held in this file, lies beside it, or in its room of jrl. Raises FileNotFoundError."""
    if name in _HELD:
        held = types.ModuleType(f"jrl_client_{name[:-3]}")
        exec(compile(_HELD[name], name, "exec"), held.__dict__)
        return held
    here = Path(__file__)
    files = (here.with_name(name), here.parents[1] / room / name)
    file = next((file for file in files if file.exists()), None)
    spec = file and importlib.util.spec_from_file_location(f"jrl_client_{name[:-3]}", file)
    if not spec or spec.loader is None:
        raise FileNotFoundError(
            f"{files[0]}: inference_mode local needs jrl/{room}/{name}: copy it there, or take the file "
            "that `python -m jrl.serve --write-client FILE` writes"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
