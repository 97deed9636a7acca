"""Conditions of `multi_agent.replay_mode: lockstep`: replays of policies that are filled and sampled alike.

A row of a replay has the same place in all of them where they have equally many columns and rows, so that the same
random number means the same game and time.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jrl.errors import counted
from jrl.settings import plan
from jrl.settings.config import algo_name

_KEY = "multi_agent.replay_mode lockstep"
_ELSE = "or use multi_agent.replay_mode=independent"


def faults(policies: Mapping[str, Any]) -> Iterator[str]:
    """Yields policies that cannot draw the same rows, each with its mend.

    Args:
      policies: those that learn, name -> the run as its agents alone would have it.
    """
    for name, own in policies.items():
        if own.replay is None:
            mend = "give it an algorithm that has one, such as dqn, leave it out of multi_agent.policies_to_train"
            yield f"{_KEY}: policy {name} learns by {algo_name(own)}, which has no replay: {mend}, {_ELSE}"
        elif own.replay.prioritized:
            mend = f"set replay.prioritized=false, {_ELSE}"
            yield f"{_KEY}: policy {name} draws by priorities, which are its own: {mend}"
    pairs = list(policies.items())
    for name, own in pairs[1:]:
        first, of_first = pairs[0]
        if own.replay is None or of_first.replay is None:
            continue
        mine, theirs = (len(one.multi_agent.agents) for one in (own, of_first))
        if mine != theirs:
            yield (
                f"{_KEY}: policy {first} is followed by {counted(theirs, 'agent')} and {name} by {mine}, so that their "
                f"replays do not hold the same games and times: let equally many follow each, {_ELSE}"
            )
        for key, (here, there) in _settings(own, of_first).items():
            if here != there:
                mend = f"give all policies the same {key}, {_ELSE}"
                yield f"{_KEY}: {key} is {there} for policy {first} and {here} for {name}: {mend}"


def _settings(own: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the settings of two policies that decide which rows a sample of a replay has, by key."""
    fields = [field.name for field in dataclasses.fields(own.replay)]
    found = {f"replay.{name}": (getattr(own.replay, name), getattr(other.replay, name)) for name in fields}
    lengths = plan.sequence_length(own), plan.sequence_length(other)
    return found | {"network.core": (own.network.recurrent, other.network.recurrent), "network.max_seq_len": lengths}
