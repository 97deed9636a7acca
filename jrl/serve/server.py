"""The routes: what clients may ask, and what becomes of it."""

import ipaddress
import re
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.data.spaces_json import plain, space_to_json
from jrl.errors import InputError
from jrl.serve import openapi, protocol
from jrl.serve.inference import Inference
from jrl.serve.protocol import CLIENT, Refused, Request, Response, encoded
from jrl.serve.table import UNLEARNED, Episode, Item, Table
from jrl.serve.web import Limits, Reply, Web
from jrl.settings.external import ExternalConfig
from jrl.types import PyTree, Space


class Facts(NamedTuple):
    """What a server tells of its policy."""

    algorithm: str
    observation: Space  # what clients send
    action: Space  # what they get
    # from actions of the environment to those of the policy, [*]; None: clients may not choose, for the reason `why`
    own_action: Callable[[PyTree], PyTree] | None
    why: str
    learns: bool


class Answer:
    """Collects the answers to the items of one request, and gives the whole once all are there."""

    def __init__(self, count: int, done: Callable[[list[PyTree], int], None]):
        self._left, self._done = count, done
        self._actions: list[Any] = [None] * count

    def add(self, i: int, action: PyTree, version: int) -> None:
        self._actions[i] = action
        self._left -= 1
        if not self._left:
            self._done(self._actions, version)


class Server:
    """Answers the requests of clients, by an `Inference`.

    Args:
      table, inference: the episodes, and who chooses.
      facts: see there.
      cfg: the `external` section.
      token: what clients have to show; None: nothing.
    """

    def __init__(self, table: Table, facts: Facts, cfg: ExternalConfig, token: bytes | None):
        self._table, self._facts, self._cfg = table, facts, cfg
        self.inference: Inference
        limits = Limits(int(cfg.max_body_mb * 2**20), cfg.max_clients, cfg.max_rate, cfg.timeout_s, token)
        self.web = Web(self._handle, limits, tick=lambda: table.sweep(cfg.timeout_s))
        # by episode: who waits for its action
        self._waiting: dict[str, tuple[Answer, int]] = {}
        self._begun = time.monotonic()
        self._document = openapi.document(facts.observation, facts.action, most=cfg.max_batch)
        self._routes: list[tuple[str, re.Pattern[str], Callable[..., None]]] = [
            ("POST", re.compile(r"/v1/episodes"), self._begin),
            ("POST", re.compile(r"/v1/episodes/([^/]+)/action"), self._action),
            ("POST", re.compile(r"/v1/episodes/([^/]+)/log"), self._log),
            ("POST", re.compile(r"/v1/episodes/([^/]+)/reward"), self._reward),
            ("POST", re.compile(r"/v1/episodes/([^/]+)/end"), self._end),
            ("POST", re.compile(r"/v1/steps"), self._steps),
            ("GET", re.compile(r"/v1/policy"), self._policy),
            ("GET", re.compile(r"/v1/health"), self._health),
            ("GET", re.compile(r"/metrics"), self._metrics),
            ("GET", re.compile(r"/openapi\.json"), self._openapi),
            ("GET", re.compile(r"/(?:docs)?"), self._docs),
        ]

    def close(self) -> None:
        """Closes all connections."""
        self.web.close()

    # ------------------------------------------------------------ from a request to its answer

    def _handle(self, request: Request, reply: Reply) -> None:
        try:
            there = [
                (method, fn, found) for method, path, fn in self._routes if (found := path.fullmatch(request.path))
            ]
            if not there:
                raise Refused(404, f"there is no {request.path[:200]}: /docs tells what there is")
            fits = [(fn, found) for method, fn, found in there if method == request.method]
            if not fits:
                raise Refused(405, f"{request.path[:200]} takes {there[0][0]}, not {request.method[:20]}")
            fn, found = fits[0]
            with self._table.lock:
                fn(request, reply, *found.groups())
        except Refused:
            raise
        except Exception:  # a fault of ours must not end the thread that answers all
            traceback.print_exc()
            reply(protocol.Response(500, b'{"error": "the server failed on this request; its log tells more"}'))

    def deliver(self, chosen: list[tuple[Item, PyTree, int]]) -> None:
        """Gives actions to those who asked; called by the thread that chose them."""
        self.web.soon(self._deliver, chosen)

    def _deliver(self, chosen: list[tuple[Item, PyTree, int]]) -> None:
        for item, action, version in chosen:
            episode = item.episode
            if item.final:
                continue
            episode.waits, episode.seen = False, time.monotonic()
            episode.answer = action, version
            waiting = self._waiting.pop(episode.id, None)
            if waiting is not None:
                waiting[0].add(waiting[1], action, version)

    def _ask(self, items: list[Item], done: Callable[[list[PyTree], int], None]) -> None:
        """Orders the actions of one request; `done` gets those of the items that are not final, in order."""
        answer = Answer(sum(not item.final for item in items), done)
        i = 0
        for item in items:
            if not item.final:
                self._waiting[item.episode.id] = answer, i
                item.episode.waits = True
                i += 1
        self.inference.ask(items)

    # ------------------------------------------------------------ episodes

    def _begin(self, request: Request, reply: Reply) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, ("episode_id", "training_enabled", "count"))
        learns = protocol.flag(given, "training_enabled", True) and self._facts.learns
        client = request.headers.get(CLIENT, "")
        count = protocol.whole(given, "count", self._cfg.max_batch)
        if count is None:
            episode = self._table.begin(client, protocol.text(given, "episode_id"), learns=learns)
            reply(encoded({"episode_id": episode.id, "version": self.inference.version}, request, 201))
            return
        if given.get("episode_id") is not None or count == 0:
            raise Refused(422, "count: expected 1 or more, without an episode_id: the server gives each its own")
        begun: list[Episode] = []
        try:
            for _ in range(count):
                begun.append(self._table.begin(client, None, learns=learns))
        except Refused:
            for episode in begun:
                self._table.close(episode, "was never begun")
            raise
        reply(encoded({"episode_ids": [e.id for e in begun], "version": self.inference.version}, request, 201))

    def _found(self, request: Request, id: str) -> Episode:
        return self._table.find(id, request.headers.get(CLIENT, ""))

    def _action(self, request: Request, reply: Reply, id: str) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, ("observation", "reward", "step"), ("observation",))
        episode = self._found(request, id)
        obs = protocol.read(self._facts.observation, given["observation"], "observation")
        reward = protocol.number(given, "reward")

        def done(actions: list[PyTree], version: int, step: int) -> None:
            reply(encoded({"action": actions[0], "version": version, "step": step}, request))

        step = protocol.whole(given, "step")
        if step is not None and step == episode.steps - 1:  # asked again, since the answer was lost on its way
            if episode.waits:
                self._waiting[id] = Answer(1, lambda actions, version: done(actions, version, step)), 0
            else:
                done([episode.answer[0]], episode.answer[1], step)
            return
        self._in_turn(episode, step)
        at = episode.steps
        item = self._item(episode, obs, reward)
        self._ask([item], lambda actions, version: done(actions, version, at))

    def _in_turn(self, episode: Episode, step: int | None) -> None:
        """Raises Refused: a request of the episode is under way, or this is not its next step."""
        if episode.waits:
            raise Refused(409, f"a request of episode {episode.id!r} is under way: wait for its answer")
        if step is not None and step != episode.steps:
            raise Refused(409, f"step: episode {episode.id!r} is at step {episode.steps}, not at {step}")

    def _item(self, episode: Episode, obs: PyTree, reward: float, **how: Any) -> Item:
        """The next item of an episode, with the rewards since its latest action."""
        reward += episode.reward
        episode.reward, episode.total = 0.0, episode.total + reward
        item = Item(episode, obs, reward, **how)
        if not item.final:
            episode.steps += 1
        return item

    def _log(self, request: Request, reply: Reply, id: str) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, ("observation", "action", "reward", "step"), ("observation", "action"))
        episode = self._found(request, id)
        obs = protocol.read(self._facts.observation, given["observation"], "observation")
        action = protocol.read(self._facts.action, given["action"], "action")
        reward = protocol.number(given, "reward")
        if self._facts.own_action is None:
            raise Refused(422, self._facts.why)
        step = protocol.whole(given, "step")
        if step is not None and step == episode.steps - 1 and not episode.waits:
            reply(encoded({"step": step}, request))
            return
        self._in_turn(episode, step)
        at = episode.steps
        item = self._item(episode, obs, reward, action=self._facts.own_action(action))
        self._ask([item], lambda actions, version: reply(encoded({"step": at}, request)))

    def _reward(self, request: Request, reply: Reply, id: str) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, ("reward",), ("reward",))
        episode = self._found(request, id)
        reward = protocol.number(given, "reward")
        self._in_turn(episode, None)
        if not episode.steps:
            raise Refused(409, f"episode {id!r} has no action yet that a reward could be for")
        episode.reward += reward
        reply(encoded({"reward": episode.reward}, request))

    def _end(self, request: Request, reply: Reply, id: str) -> None:
        given = protocol.decoded(request)
        protocol.fields(given, ("observation", "reward", "truncated", "step"), ("observation",))
        if (answer := self._table.ended_with(id, request.headers.get(CLIENT, ""))) is not None:
            reply(encoded(answer, request))  # asked again
            return
        episode = self._found(request, id)
        obs = protocol.read(self._facts.observation, given["observation"], "observation")
        reward, truncated = protocol.number(given, "reward"), protocol.flag(given, "truncated", False)
        self._in_turn(episode, protocol.whole(given, "step"))
        item = self._ended(episode, obs, reward, truncated=truncated)
        answer = {"return": episode.total, "length": episode.steps}
        self._table.close(episode, "has ended", answer)
        if item is not None:
            self.inference.ask([item])
        reply(encoded(answer, request))

    def _ended(self, episode: Episode, obs: PyTree, reward: float, *, truncated: bool) -> Item | None:
        """The last item of an episode; None where there is nothing to learn from it."""
        self._table.ended += 1
        item = self._item(episode, obs, reward, terminated=not truncated, truncated=truncated, final=True)
        return item if episode.steps and episode.column != UNLEARNED else None

    def _steps(self, request: Request, reply: Reply) -> None:
        given = protocol.decoded(request)
        known = ("episode_ids", "observations", "rewards", "terminated", "truncated", "final_observations")
        protocol.fields(given, known, known[:2])
        ids = protocol.texts(given["episode_ids"], "episode_ids")
        count = len(ids)
        if not 1 <= count <= self._cfg.max_batch or len(set(ids)) < count:
            raise Refused(422, f"episode_ids: expected 1 to {self._cfg.max_batch} different ids, got {count}")
        episodes = [self._found(request, id) for id in ids]
        obs = protocol.read(self._facts.observation, given["observations"], "observations", (count,))
        rewards = protocol.numbers(given.get("rewards"), count, "rewards")
        ends = {name: protocol.flags(given.get(name), count, name) for name in ("terminated", "truncated")}
        over = ends["terminated"] | ends["truncated"]
        last: PyTree = None
        if over.any():
            if given.get("final_observations") is None:
                raise Refused(400, "final_observations is missing: an episode ends with the observation after it")
            last = protocol.read(self._facts.observation, given["final_observations"], "final_observations", (count,))
        for episode in episodes:
            self._in_turn(episode, None)
        items = self._items(episodes, obs, rewards, ends["truncated"] & ~ends["terminated"], over, last)
        names = [item.episode.id for item in items if not item.final]
        kind = self._facts.action
        self._ask(
            items,
            lambda actions, version: reply(
                encoded({"episode_ids": names, "actions": _together(kind, actions), "version": version}, request)
            ),
        )

    def _items(
        self,
        episodes: list[Episode],
        obs: PyTree,
        rewards: np.ndarray,
        truncated: np.ndarray,
        over: np.ndarray,
        last: Any,
    ) -> list[Item]:
        """The items of several episodes; those that are over end, and others begin in their places."""
        at = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
        items: list[Item] = []
        for i, episode in enumerate(episodes):
            reward = float(rewards[i])
            if over[i]:
                item = self._ended(episode, at(last, i), reward, truncated=bool(truncated[i]))
                self._table.close(episode, "has ended", {"return": episode.total, "length": episode.steps})
                episode = self._table.begin(episode.client, None, learns=episode.column != UNLEARNED)
                items += [] if item is None else [item]
                reward = 0.0
            items.append(self._item(episode, at(obs, i), reward))
        return items

    # ------------------------------------------------------------ about the server

    def _policy(self, request: Request, reply: Reply) -> None:
        facts = self._facts
        seen, taken = (plain(space_to_json(space)) for space in (facts.observation, facts.action))
        about = {"algorithm": facts.algorithm, "observation": seen, "action": taken, "learns": facts.learns}
        reply(_json({**about, "version": self.inference.version}))

    def _health(self, request: Request, reply: Reply) -> None:
        reply(_json({"status": "ok", "version": self.inference.version, "episodes": len(self._table.episodes)}))

    def _metrics(self, request: Request, reply: Reply) -> None:
        table, columns = self._table, self._table.columns
        found: dict[str, tuple[str, float]] = {
            "requests_total": ("counter", self.web.requests),
            "refused_total": ("counter", self.web.refused),
            "connections": ("gauge", self.web.clients),
            "episodes": ("gauge", len(table.episodes)),
            "episodes_begun_total": ("counter", table.begun),
            "episodes_ended_total": ("counter", table.ended),
            "episodes_failed_total": ("counter", table.failed),
            "inferences_total": ("counter", self.inference.count),
            "weights_version": ("gauge", self.inference.version),
            "uptime_seconds": ("gauge", time.monotonic() - self._begun),
        }
        if columns is not None:
            found["steps_dropped_total"] = "counter", columns.dropped
        lines = [f"# TYPE jrl_{name} {kind}\njrl_{name} {value:g}\n" for name, (kind, value) in found.items()]
        reply(Response(200, "".join(lines).encode(), "text/plain; version=0.0.4"))

    def _openapi(self, request: Request, reply: Reply) -> None:
        reply(_json(self._document))

    def _docs(self, request: Request, reply: Reply) -> None:
        reply(Response(200, openapi.page(self._document).encode(), "text/html; charset=utf-8"))


def _json(fields: Mapping[str, Any]) -> Response:
    return encoded(fields)


def _together(space: Space, actions: list[PyTree]) -> PyTree:
    """Actions [N, *] of N actions."""
    return spaces.map_leaves(lambda leaf, *parts: np.stack(parts), space, *actions)


# ---------------------------------------------------------------- where it listens


def bound(cfg: ExternalConfig, token: bytes | None) -> socket.socket:
    """A socket at the address of the section; connections are refused until a server answers there.

    Raises:
      InputError: the address is taken or none of this machine's, or it can be reached by others without a token.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise InputError(f"external.host {cfg.host}: {e.strerror}: name an address of this machine") from e
    if token is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise InputError(
            f"external.host {cfg.host} can be reached from other machines, and nothing says who may: set "
            "external.token_file (--token-file)"
        )
    found = socket.socket(family, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as e:
        found.close()
        raise InputError(
            f"external.port {cfg.port}: cannot listen at {cfg.host}:{cfg.port} ({e.strerror}): name another port"
        ) from e
    return found


def token_of(cfg: ExternalConfig) -> bytes | None:
    """The token of the section's file. Raises InputError: it cannot be read, or is too short to be a secret."""
    if cfg.token_file is None:
        return None
    try:
        lines = Path(cfg.token_file).read_text().split()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"external.token_file: cannot read {cfg.token_file}: {e}") from e
    if not lines or len(lines[0]) < 16 or not lines[0].isascii():
        raise InputError(
            f"external.token_file: {cfg.token_file} must hold a secret of 16 characters or more, such as what "
            "python -c 'import secrets; print(secrets.token_hex())' prints"
        )
    return lines[0].encode()


def tls(cfg: ExternalConfig) -> ssl.SSLContext | None:
    """What TLS needs, of the section's certificate; None without. Raises InputError: the files do not do."""
    if cfg.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cfg.certificate, cfg.private_key)
    except (OSError, ssl.SSLError) as e:
        raise InputError(f"external.certificate: cannot use {cfg.certificate}: {e}") from e
    return context
