"""Clients' episodes by id, each with its client and its column of rows, and the infos that clients send."""

import asyncio
import collections
import dataclasses
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from jrl.serve.row_rings import RowRings
from jrl.serve.wire import RequestError
from jrl.types import PyTree

INFO = "external/info/"  # prefix of metrics: mean of each info since the row before
MAX_INFO_NAMES = 64  # names of infos in a run, so that memory and rows stay bounded
_MAX_ENDED = 10_000  # ended episodes that the table remembers
SINGLE = ""  # name of the agent of an episode with a single agent
UNLEARNED = -1  # column of an episode from which no policy learns


class PendingActions:
    """Actions that a request waits for, and the version of their weights. Used in the server's thread."""

    def __init__(self, count: int, version: int):
        self.future: asyncio.Future[tuple[list[PyTree], int]] = asyncio.get_running_loop().create_future()
        self._actions: list[PyTree] = [None] * count
        self._left = count
        if not count:
            self.future.set_result(([], version))

    async def wait(self, build_fields: Callable[[list[PyTree], int], dict[str, Any]]) -> dict[str, Any]:
        """Waits for the actions; returns `build_fields(actions, version)`."""
        return build_fields(*await self.future)

    def put(self, index: int, action: PyTree, version: int) -> None:
        """Adds an action."""
        self._actions[index] = action
        self._left -= 1
        if not self._left and not self.future.done():
            self.future.set_result((self._actions, version))


class Answer(NamedTuple):
    """Answer to an episode's latest turn, which a repeated request gets again."""

    pending: PendingActions
    indices: Mapping[str, int]  # agent -> index of its action
    step: int

    def build_fields(self, actions: list[PyTree], version: int) -> dict[str, Any]:
        """Returns the fields of the answer from the chosen actions and their version."""
        own = {name: actions[index] for name, index in self.indices.items()}
        chosen = {"action": own[SINGLE]} if SINGLE in own else {"actions": own}
        return {**chosen, "version": version, "step": self.step}

    def wait(self) -> Awaitable[dict[str, Any]]:
        """Waits for the actions; returns the fields of the answer."""
        return self.pending.wait(self.build_fields)


@dataclasses.dataclass(eq=False)
class ClientEpisode:
    """An episode in progress."""

    id: str
    client: str
    policy: str
    seats: list["Seat"] = dataclasses.field(default_factory=list)  # agents of the episode, by index
    steps: int = 0  # number of requests, without repeated ones
    length: int = 0  # number of steps in which an agent acted
    total: float = 0.0  # sum of all rewards
    answer: Answer | None = None  # answer to the latest turn
    last_request: float = 0.0  # time of the client's last request, by time.monotonic

    @property
    def is_pending(self) -> bool:
        """Whether the latest request waits for actions."""
        return self.answer is not None and not self.answer.pending.future.done()

    @property
    def is_learned(self) -> bool:
        """Whether the run learns from the episode."""
        return self.seats[0].column != UNLEARNED


@dataclasses.dataclass(eq=False)
class Seat:
    """An agent of an episode."""

    episode: ClientEpisode
    agent: int
    column: int  # column of its rows, or UNLEARNED
    carry: PyTree  # memory of the policy, [*] without a leading axis
    steps: int = 0  # number of requested actions
    reward: float = 0.0  # reward since the latest action
    total: float = 0.0
    has_ended: bool = False  # the agent ended before its episode

    def build_item(self, obs: PyTree, reward: float, **fields: Any) -> "Item":
        """Returns the item of the next observation, with the rewards since the latest action and more fields."""
        reward += self.reward
        self.reward, self.total = 0.0, self.total + reward
        self.episode.total += reward
        item = Item(self, obs, reward, **fields)
        if not item.final:
            self.steps += 1
        return item

    @property
    def is_active(self) -> bool:
        """Whether the agent has acted and has not ended."""
        return self.steps > 0 and not self.has_ended

    def end(self, obs: PyTree, reward: float, *, truncated: bool) -> "list[Item]":
        """Ends the agent; returns its last item, or no item if the run does not learn from the agent."""
        was_active, self.has_ended = self.is_active, True
        item = self.build_item(obs, reward, terminated=not truncated, truncated=truncated, final=True)
        return [item] if was_active and self.column != UNLEARNED else []


class Item(NamedTuple):
    """Request for an action at an observation, with the results of the previous step."""

    seat: Seat
    obs: PyTree  # [*]
    reward: float
    terminated: bool = False
    truncated: bool = False
    final: bool = False  # the observation is the last of its episode
    action: PyTree = None  # [*] action chosen by the client, in the policy's units; None: the policy chooses
    version: int | None = None  # version of the server's weights by which the client chose the action
    log_prob: float = 0.0  # log-probability of the client's action
    is_first: bool = True  # first acting agent of the request
    is_policy_first: bool = True  # first acting agent of the request with its policy
    carry: PyTree = None  # [*] memory before the step, from the client; None: `seat.carry`
    pending: PendingActions | None = None  # gets the action after its row is written
    action_index: int = 0  # index of its action in `pending`

    @property
    def memory(self) -> PyTree:
        """Memory before the step, [*]."""
        return self.seat.carry if self.carry is None else self.carry


class EpisodeTable:
    """Episodes by id, and the rows of learned episodes.

    Args:
      rows: rings of rows; None: the run learns from no episode.
      max_learned: maximum number of learned episodes at a time.
      max_unlearned: maximum number of other episodes at a time.
      agents: A, number of agents of an episode: agent k of episode i has column i * A + k.
    Attributes:
      lock: guards all fields; notified when rows arrive.
      num_started, num_ended, num_failed: numbers of episodes.
      num_too_old: number of steps that arrived more than `max_lag` updates after their weights.
      finished: returns and lengths of learned episodes that have ended, until the source takes them.
      infos: infos that clients send.
    """

    def __init__(self, rows: RowRings | None, max_learned: int, max_unlearned: int, agents: int = 1):
        self.lock = threading.Condition()
        self.rows = rows
        self.infos = ClientInfos(is_kept=rows is not None)
        self._max_unlearned, self._agents = max_unlearned, agents
        self._free = list(range(max_learned - 1, -1, -1)) if rows is not None else []  # the last is used first
        self._max_learned = len(self._free)
        self.episodes: dict[str, ClientEpisode] = {}
        self._ended: collections.OrderedDict[str, tuple[str, str, Any]] = collections.OrderedDict()
        self.num_started = self.num_ended = self.num_failed = self.num_too_old = 0
        self.finished: collections.deque[tuple[float, int]] = collections.deque(maxlen=_MAX_ENDED)

    def add(
        self, client: str, id: str | None, *, is_learned: bool, policy: str, carry: Callable[[int], PyTree],
        count: int = 1,
    ) -> ClientEpisode:  # fmt: skip
        """Adds an episode. The caller holds the lock.

        Args:
          client: name of the client.
          id: id of the episode; None: a random id.
          is_learned: whether the run learns from the episode.
          policy: name of the policy.
          carry: column -> memory before an episode.
          count: number of episodes for which there must be room.
        Raises:
          RequestError: the id exists, or there are too many episodes.
        """
        if id is not None and (id in self.episodes or id in self._ended):
            raise RequestError(409, f"episode_id {id!r} is taken: leave it out, and the server gives an id")
        if is_learned and len(self._free) < count:
            raise RequestError(
                429,
                f"{self._max_learned} episodes are in progress, the maximum that the run learns from: end one first",
            )
        unlearned = len(self.episodes) - (self._max_learned - len(self._free))
        if not is_learned and unlearned + count > self._max_unlearned:
            raise RequestError(429, f"{unlearned} episodes are in progress, the maximum: end one first")
        episode = ClientEpisode(id or secrets.token_hex(8), client, policy, last_request=time.monotonic())
        place = self._free.pop() if is_learned else 0
        for agent in range(self._agents):
            column = place * self._agents + agent
            episode.seats.append(Seat(episode, agent, column if is_learned else UNLEARNED, carry(column)))
        self.episodes[episode.id] = episode
        self.num_started += 1
        return episode

    def find(self, id: str, client: str) -> ClientEpisode:
        """Returns an episode by its id. Raises RequestError: unknown id, ended episode, or another client's episode."""
        episode = self.episodes.get(id)
        if episode is None:
            _, why, _ = self._ended.get(id, ("", "", None))
            if why:
                raise RequestError(410, f"episode {id!r} {why}")
            raise RequestError(404, f"there is no episode {id[:128]!r}")
        if episode.client != client:
            raise RequestError(403, f"episode {id!r} is another client's")
        episode.last_request = time.monotonic()
        return episode

    def find_end_answer(self, id: str, client: str) -> Any:
        """Returns the answer to the end of an episode, for a repeated request; None: the episode has not ended."""
        owner, _, answer = self._ended.get(id, ("", "", None))
        return answer if owner == client else None

    def end(self, episode: ClientEpisode, answer: Any) -> None:
        """Ends an episode; its client gets `answer` again if it repeats the request. The caller holds the lock."""
        self.num_ended += 1
        if episode.is_learned and episode.length:
            self.finished.append((episode.total, episode.length))
        self._remove(episode, "has ended", answer)

    def _remove(self, episode: ClientEpisode, why: str, answer: Any = None) -> None:
        del self.episodes[episode.id]
        if episode.is_learned:
            self._free.append(episode.seats[0].column // self._agents)
            self._free.sort(reverse=True)
        self._ended[episode.id] = episode.client, why, answer
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def fail_silent(self, timeout_s: float) -> None:
        """Break off episodes whose clients have sent nothing for `timeout_s` s; their latest steps are not learned."""
        with self.lock:
            limit = time.monotonic() - timeout_s
            for episode in [e for e in self.episodes.values() if e.last_request < limit and not e.is_pending]:
                if episode.is_learned and self.rows is not None:
                    self.rows.break_off([seat.column for seat in episode.seats])
                self.num_failed += 1
                self._remove(episode, f"has failed: its client sent nothing for {timeout_s:g} s")


class ClientInfos:
    """Sums of clients' infos by name until the next row. The caller holds the lock.

    `is_kept`: False drops all infos.
    """

    def __init__(self, *, is_kept: bool):
        self._is_kept = is_kept
        self._sums: dict[str, tuple[float, int]] = {}  # by each name of the run: sum and number since the last row

    def check(self, infos: Mapping[str, float]) -> None:
        """Raises RequestError if the run would have too many names."""
        new = [name for name in infos if name not in self._sums]
        if self._is_kept and len(self._sums) + len(new) > MAX_INFO_NAMES:
            raise RequestError(
                422, f"infos/{new[0]}: a run has at most {MAX_INFO_NAMES} names, and has {len(self._sums)} already"
            )

    def add(self, infos: Mapping[str, float]) -> None:
        """Adds the infos of an accepted request."""
        for name, x in infos.items() if self._is_kept else ():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + x, count + 1

    def drain(self) -> dict[str, float]:
        """Returns the means as metrics, and clear the sums."""
        means = {INFO + name: total / count for name, (total, count) in sorted(self._sums.items()) if count}
        self._sums = dict.fromkeys(self._sums, (0.0, 0))
        return means
