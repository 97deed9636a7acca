"""The episodes that clients play: by their ids, each with its client and its column of rows, and their infos."""

import asyncio
import collections
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl.serve.columns import Columns
from jrl.serve.wire import Refused
from jrl.types import PyTree

INFO = "external/info/"  # metrics: means of the infos since the row before, by name
NAMES = 64  # names of infos in a run, so that its memory and its rows stay bounded
_REMEMBERED = 10_000  # episodes that are over
UNLEARNED = -1  # the column of an episode that nobody learns from


class Order:
    """Actions that one request asked for, and the version of the weights that chose; in the server's thread."""

    def __init__(self, count: int, version: int):
        self.chosen: asyncio.Future[tuple[list[PyTree], int]] = asyncio.get_running_loop().create_future()
        self._actions: list[PyTree] = [None] * count
        self._left = count
        if not count:
            self.chosen.set_result(([], version))

    async def get(self, form: Callable[[list[PyTree], int], dict[str, Any]]) -> dict[str, Any]:
        """Waits for the actions; returns the fields that `form` makes of them and their version."""
        return form(*await self.chosen)

    def put(self, place: int, action: PyTree, version: int) -> None:
        """Adds an action."""
        self._actions[place] = action
        self._left -= 1
        if not self._left and not self.chosen.done():
            self.chosen.set_result((self._actions, version))


class Answer(NamedTuple):
    """The answer to an episode's latest turn, which a repeated request gets, too."""

    order: Order
    places: Mapping[str, int]  # agent -> place of its action in the order
    step: int

    def fields(self, actions: list[PyTree], version: int) -> dict[str, Any]:
        """Returns the answer with the actions of the order and their version."""
        return {
            "actions": {name: actions[place] for name, place in self.places.items()}, "version": version,
            "step": self.step,
        }  # fmt: skip


@dataclasses.dataclass(eq=False)
class Episode:
    """One episode under way."""

    id: str
    client: str
    policy: str
    seats: list["Seat"] = dataclasses.field(default_factory=list)  # of its agents, by number
    steps: int = 0  # requests so far that count: repeated ones have the number of the first
    length: int = 0  # steps so far in which an agent acted
    total: float = 0.0  # all rewards so far
    answer: Answer | None = None  # to the latest turn
    heard: float = 0.0  # time of its client's last request, by time.monotonic

    @property
    def is_pending(self) -> bool:
        """Returns whether its latest request waits for actions."""
        return self.answer is not None and not self.answer.order.chosen.done()

    @property
    def learns(self) -> bool:
        """Returns whether it is learned from."""
        return self.seats[0].column != UNLEARNED


@dataclasses.dataclass(eq=False)
class Seat:
    """An agent of an episode."""

    episode: Episode
    agent: int
    column: int  # whose rows it fills; UNLEARNED if nobody learns from it
    carry: PyTree  # memory of the policy, [*] without a leading axis
    steps: int = 0  # actions that were asked for so far
    reward: float = 0.0  # since the latest action
    total: float = 0.0
    over: bool = False  # the agent has ended, before its episode

    def item(self, obs: PyTree, reward: float, **how: Any) -> "Item":
        """Makes the item of the next observation, with the rewards since the latest action; `how` is its rest."""
        reward += self.reward
        self.reward, self.total = 0.0, self.total + reward
        self.episode.total += reward
        found = Item(self, obs, reward, **how)
        if not found.final:
            self.steps += 1
        return found

    @property
    def is_under_way(self) -> bool:
        """Returns whether the agent has acted and not ended."""
        return self.steps > 0 and not self.over

    def end(self, obs: PyTree, reward: float, *, truncated: bool) -> "list[Item]":
        """Ends the agent; returns its last item, or none if nothing is learned from it."""
        was_under_way, self.over = self.is_under_way, True
        item = self.item(obs, reward, terminated=not truncated, truncated=truncated, final=True)
        return [item] if was_under_way and self.column != UNLEARNED else []


class Item(NamedTuple):
    """A request for an action: what is seen, and how the step before ended."""

    seat: Seat
    obs: PyTree  # [*]
    reward: float
    terminated: bool = False
    truncated: bool = False
    final: bool = False  # the observation is the last
    action: PyTree = None  # [*] what the client chose, in the policy's units; None: the policy chooses
    # of an action that a client chose: the version of the weights where they are from here, and its log-probability
    version: int | None = None
    log_prob: float = 0.0
    # of the agents that act in a request: whether it is the first, and the first that follows its policy
    first: bool = True
    leads: bool = True
    carry: PyTree = None  # [*] what it remembered before; None: what is known of the episode here
    order: Order | None = None  # gets the action once it is chosen, and its row is where the learner takes it
    place: int = 0  # in the order

    @property
    def memory(self) -> PyTree:
        """Returns the memory before it, [*]."""
        return self.seat.carry if self.carry is None else self.carry


class Table:
    """Episodes by id, and the columns of those that are learned from.

    Args:
      columns: the rows; None where nobody learns.
      num: episodes that are learned from, at a time.
      most: of episodes that are not learned from, at a time.
      agents: A, of an episode: agent k of episode i has column i * A + k.
    Attributes:
      lock: guards all of it; notified when rows have come.
      begun, ended, failed: episodes so far.
      too_old: steps so far that came after more updates than `max_lag` since the weights that chose them.
      finished: return and length of each that has ended and was learned from, which nobody has taken yet.
      infos: numbers that clients send beside rewards.
    """

    def __init__(self, columns: Columns | None, num: int, most: int, agents: int = 1):
        self.lock = threading.Condition()
        self.columns = columns
        self.infos = Infos(kept=columns is not None)
        self._most, self._agents = most, agents
        self._free = list(range(num - 1, -1, -1)) if columns is not None else []  # the last is taken first
        self._num = len(self._free)
        self.episodes: dict[str, Episode] = {}
        self._over: collections.OrderedDict[str, tuple[str, str, Any]] = collections.OrderedDict()
        self.begun = self.ended = self.failed = self.too_old = 0
        self.finished: collections.deque[tuple[float, int]] = collections.deque(maxlen=_REMEMBERED)

    def begin(
        self, client: str, id: str | None, *, learns: bool, policy: str, carry: Callable[[int], PyTree]
    ) -> Episode:
        """Makes an episode; `carry` gives the memory before it in a column. With the lock held.

        Raises:
          Refused: the id is taken, or there is no room.
        """
        if id is not None and (id in self.episodes or id in self._over):
            raise Refused(409, f"episode_id {id!r} is taken: leave it out, and the server gives one")
        if learns and not self._free:
            raise Refused(
                429,
                f"{self._num} episodes are under way, which is as many as are learned from at a time: end one first",
            )
        unlearned = len(self.episodes) - (self._num - len(self._free))
        if not learns and unlearned >= self._most:
            raise Refused(429, f"{unlearned} episodes are under way: end one first")
        episode = Episode(id or secrets.token_hex(8), client, policy, heard=time.monotonic())
        place = self._free.pop() if learns else 0
        for agent in range(self._agents):
            column = place * self._agents + agent
            episode.seats.append(Seat(episode, agent, column if learns else UNLEARNED, carry(column)))
        self.episodes[episode.id] = episode
        self.begun += 1
        return episode

    def find(self, id: str, client: str) -> Episode:
        """Returns the episode of an id. Raises Refused: there is none, it is over, or another client's."""
        episode = self.episodes.get(id)
        if episode is None:
            _, why, _ = self._over.get(id, ("", "", None))
            raise Refused(410, f"episode {id!r} {why}") if why else Refused(404, f"there is no episode {id[:128]!r}")
        if episode.client != client:
            raise Refused(403, f"episode {id!r} is another client's")
        episode.heard = time.monotonic()
        return episode

    def ended_with(self, id: str, client: str) -> Any:
        """Returns the answer to the end of an episode that has ended, for who asks again; None: it has not."""
        owner, _, answer = self._over.get(id, ("", "", None))
        return answer if owner == client else None

    def close(self, episode: Episode, why: str, answer: Any = None) -> None:
        """Takes an episode off the table, and its column is free. With the lock held."""
        del self.episodes[episode.id]
        if episode.learns:
            self._free.append(episode.seats[0].column // self._agents)
            self._free.sort(reverse=True)
        self._over[episode.id] = episode.client, why, answer
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def fail(self, episode: Episode, why: str) -> None:
        """Breaks an episode off; the step under way is no part of what is learned. With the lock held."""
        if episode.learns and self.columns is not None:
            self.columns.break_off([seat.column for seat in episode.seats])
        self.failed += 1
        self.close(episode, why)

    def sweep(self, timeout_s: float) -> None:
        """Fails the episodes whose clients have not spoken for so long."""
        with self.lock:
            limit = time.monotonic() - timeout_s
            for episode in [e for e in self.episodes.values() if e.heard < limit and not e.is_pending]:
                self.fail(episode, f"has failed: nothing was heard of its client for {timeout_s:g} s")


class Infos:
    """Sums of clients' infos by name until a row takes them; without `kept` infos are dropped. With the lock held."""

    def __init__(self, *, kept: bool):
        self._kept = kept
        self._names = set[str]()
        self._sums: dict[str, tuple[float, int]] = {}

    def check(self, given: Mapping[str, float]) -> None:
        """Raises Refused: the run has too many names."""
        if self._kept and len(self._names.union(given)) > NAMES:
            new = next(name for name in given if name not in self._names)
            raise Refused(422, f"infos/{new}: a run has at most {NAMES} names, and has {len(self._names)} already")

    def add(self, given: Mapping[str, float]) -> None:
        """Counts the infos of a request that is fulfilled."""
        if not self._kept:
            return
        self._names.update(given)
        for name, x in given.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + x, count + 1

    def drain(self) -> dict[str, float]:
        """Returns the means so far as metrics, and begins anew."""
        found = {INFO + name: total / count for name, (total, count) in sorted(self._sums.items())}
        self._sums = {}
        return found
