"""Action masks that environments put into their infos rather than into their observations."""

import math
from typing import Any

from jrl.gym.faults import kind
from jrl.spaces import ACTION_MASK, num_choices
from jrl.types import InputError, Space

_KEY = "env.action_mask_info"


def looked_for(name: str | None, observation: Any, action: Space, id: str) -> bool:
    """Returns whether infos may have a mask: the one that is named, or `action_mask` without a name.

    Args:
      name: `env.action_mask_info`.
      observation: Gymnasium's space.
      action: ours.
      id: of the environment, for errors.
    Raises:
      InputError: a name, but there are no choices to mask, or the observation has a mask.
    """
    choices = num_choices(action)
    own = kind(observation) == "Dict" and ACTION_MASK in observation.spaces
    if name is not None and not choices:
        raise InputError(f"{_KEY} {name}: the action space {action} of {id} has no choices to mask: leave it out")
    if name is not None and own:
        raise InputError(f"{_KEY} {name}: the observations of {id} have an {ACTION_MASK} already: leave it out")
    return choices > 0 and not own


def shape(
    name: str | None, infos: dict[str, tuple[int, ...]] | None, action: Space, id: str
) -> tuple[str, tuple[int, ...]] | None:
    """Returns (the entry of the infos, its shape); None where there is none and none is named.

    Args:
      name: `env.action_mask_info`.
      infos: shapes of the entries, by name; None: unknown, as the environment cannot be reset.
      action: ours.
      id: of the environment, for errors.
    Raises:
      InputError: what is named is not there, or does not fit.
    """
    wanted = name or ACTION_MASK
    if infos is None:
        if name is None:
            return None
        raise InputError(f"{_KEY} {name}: {id} cannot be reset, so that its infos are unknown: mend its reset")
    found, choices = infos.get(wanted), num_choices(action)
    if found is not None and (math.prod(found) == choices or found == getattr(action, "nvec", None)):
        return wanted, found
    if name is None:
        return None
    if found is None:
        there = ", ".join(infos) or "none that is numbers"
        raise InputError(f"{_KEY} {name}: the infos of {id} have no such entry: they have {there}")
    raise InputError(
        f"{_KEY} {name}: in the infos of {id} it has {math.prod(found)} entries, but the action space {action} has "
        f"{choices} choices: one for each is needed"
    )
