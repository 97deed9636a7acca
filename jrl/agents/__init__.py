"""Policies of several agents: one interface, `Policies`, with the cases Single, Fixed, ByGame and SelfPlay."""

from jrl.agents.policies import Fixed, Policies, Single
from jrl.config import RunConfig, multi_agent, policy_mapping
from jrl.types import EnvSpec

__all__ = ["ByGame", "Fixed", "Policies", "SelfPlay", "Single", "make"]


def make(cfg: RunConfig, spec: EnvSpec | None = None) -> Policies:
    """Returns the policies of a run.

    Args:
      cfg: config of the run, with the names of its agents.
      spec: spec of its environments; None: only methods that need the config alone can be called.
    """
    given = cfg.multi_agent
    if given is not None and given.self_play is not None:
        from jrl.agents.self_play import SelfPlay

        return SelfPlay(cfg, spec)
    if policy_mapping.by_game(given):
        from jrl.agents.by_game import ByGame

        return ByGame(cfg, spec)
    names = multi_agent.followers(given)
    if len(names) > 1 or not all(multi_agent.is_trained(given, name) for name in names):
        return Fixed(cfg, spec)
    return Single(cfg, spec)
