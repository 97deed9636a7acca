"""Policies of several agents: one interface, `Policies`, with the cases Single, Fixed, ByGame and SelfPlay."""

from jrl.agents.by_game import ByGame
from jrl.agents.policies import Fixed, Policies, Single
from jrl.agents.self_play import SelfPlay
from jrl.config import RunConfig, multi_agent, policy_mapping
from jrl.types import EnvSpec

__all__ = ["ByGame", "Fixed", "Policies", "SelfPlay", "Single", "make"]


def make(cfg: RunConfig, spec: EnvSpec | None = None) -> Policies:
    """Returns the policies of a run.

    Args:
      cfg: config of the run, with the names of its agents.
      spec: spec of its environments; None: only methods that need the config alone can be called.
    """
    if cfg.multi_agent is not None and cfg.multi_agent.self_play is not None:
        return SelfPlay(cfg, spec)
    if policy_mapping.by_game(cfg):
        return ByGame(cfg, spec)
    names = multi_agent.followers(cfg)
    if len(names) > 1 or not all(multi_agent.is_trained(cfg, name) for name in names):
        return Fixed(cfg, spec)
    return Single(cfg, spec)
