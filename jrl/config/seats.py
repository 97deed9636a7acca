"""The seats of `multi_agent.self_play` once the agents are known: which policy plays which seat of which game.

Of the games of a device, game g has the learner in seat g % A, and in its other seats the place (g // A) % K of the
pool: A x K games are a block, in which the learner has every seat against every place once.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jrl.config import plan
from jrl.errors import counted

LEAGUE = "league"  # what is known of the league beside the policies, and so no name of one


def places(own: Any) -> tuple[str, ...]:
    """Returns the names of the K places of a pool, in order."""
    return tuple(f"{own.policy}-{k + 1}" for k in range(own.pool))


def whole_blocks(cfg: Any, games: int) -> int:
    """Returns the number of games rounded up to whole blocks of A x K; unchanged without self-play."""
    if not (cfg.multi_agent and cfg.multi_agent.self_play and cfg.multi_agent.agents):
        return games
    unit = len(cfg.multi_agent.agents) * cfg.multi_agent.self_play.pool
    return -(-games // unit) * unit


def followers(given: Any) -> dict[str, tuple[str, ...]]:
    """Returns policy -> agents in a game whose first seat is the learner's."""
    own, agents = given.self_play, given.agents
    return {own.policy: agents[:1], **dict.fromkeys(places(own), agents[1:])}


def faults(cfg: Any, agents: Sequence[str]) -> Iterator[str]:
    """Yields what does not go with self-play, each with its mend."""
    key, given = "multi_agent.self_play", cfg.multi_agent
    own = given.self_play
    for name in ("policies", "mapping", "policies_to_train"):
        if getattr(given, name):
            yield f"multi_agent.{name}: {key} decides about the policies, too: leave one of them out"
    if len(agents) < 2:
        yield f"{key}: expected an environment of two agents or more, got {cfg.env.id} with one: leave it out"
    if not own.policy or own.policy == LEAGUE:
        yield f"{key}.policy: expected a name, and not {LEAGUE}, which metrics have, got {own.policy!r}: rename it"
    if cfg.checkpoint.policies != "all":
        yield f"checkpoint.policies {cfg.checkpoint.policies}: with {key} copies are the policy's opponents: use all"
    if own.snapshot_win_rate is None and own.snapshot_every is None:
        mend = f"set {key}.snapshot_win_rate=0.6 or {key}.snapshot_every=100000"
        yield f"{key}: expected a rule when copies are taken, got none: {mend}"
    yield from split_faults(cfg, len(agents), plan.num_learners(cfg) or 1)


def split_faults(cfg: Any, num_agents: int, learners: int) -> Iterator[str]:
    """Yields where the games of each of so many devices that learn, and of each device or env runner that collects for
    them, are no whole blocks, with the numbers that are.
    """
    own, parts = cfg.multi_agent.self_play, math.lcm(learners, plan.num_pools(cfg, learners))
    unit, games = num_agents * own.pool * parts, cfg.env.num_envs
    if num_agents > 1 and games % unit:
        near = " or ".join(str(n) for n in (games - games % unit, games - games % unit + unit) if n)
        who = "devices" if parts == learners else "env runners" if parts == cfg.env_runners.num else "parts"
        on = f" x {parts} {who}" if parts > 1 else ""
        yield (
            f"env.num_envs {games}: multi_agent.self_play needs a multiple of {num_agents} seats x {own.pool} places "
            f"of the pool{on} = {unit}, so that each seat meets each place as often: use {near}"
        )


def lines(cfg: Any) -> Iterator[str]:
    """Yields a line for the policy that learns, and one for its copies."""
    given = cfg.multi_agent
    own, games = given.self_play, counted(cfg.env.num_envs, "game")
    yield f"policy {own.policy}: one of {len(given.agents)} seats in each of {games}, every seat equally often"
    drawn = {"uniform": "equally often", "latest": "the newest in all games", "prioritised": "by what it beats less"}
    names = ", ".join(places(own)[:8])
    yield f"policies {names}: {counted(own.pool, 'place')} of frozen copies, {drawn[own.opponents]}"
