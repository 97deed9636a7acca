"""What kind of data an algorithm learns from: its Config class says it, and its Algo with what belongs to it."""

from typing import NamedTuple


class Fresh(NamedTuple):
    """Rollouts as they come: of the latest `kept`, one is drawn for each of `updates` updates per new rollout."""

    kept: int = 1
    updates: int = 1


class Replay(NamedTuple):
    """Samples of a replay buffer: transitions, or sequences for networks with memory."""

    sequences: bool = False


def learns_from(config_class: type | None) -> type:
    """Fresh or Replay, as the Config class of an algorithm says in `learns_from`; Fresh where it says nothing."""
    return getattr(config_class, "learns_from", Fresh)
