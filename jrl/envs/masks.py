"""Action masks in the infos of environments."""

import math
from typing import Any

from jrl.gym.faults import space_kind
from jrl.spaces import ACTION_MASK, num_choices
from jrl.types import InputError, Space

_KEY = "env.action_mask_info"


def may_have_mask(name: str | None, observation: Any, action: Space, id: str) -> bool:
    """Return whether infos may have a mask: the named entry, or `action_mask` by default.

    Args:
      name: `env.action_mask_info`.
      observation: Gymnasium's space.
      action: jrl's space.
      id: environment id, for errors.
    Raises:
      InputError: a mask is named, but there are no choices to mask, or the observation has a mask.
    """
    choices = num_choices(action)
    own = space_kind(observation) == "Dict" and ACTION_MASK in observation.spaces
    if name is not None and not choices:
        raise InputError(f"{_KEY} {name}: the action space {action} of {id} has no choices to mask: leave it out")
    if name is not None and own:
        raise InputError(f"{_KEY} {name}: the observations of {id} have an {ACTION_MASK} already: leave it out")
    return choices > 0 and not own


def find_mask(
    name: str | None, infos: dict[str, tuple[int, ...]] | None, action: Space, id: str
) -> tuple[str, tuple[int, ...]] | None:
    """Return the mask's entry in the infos and its shape; None: not named and not found.

    Args:
      name: `env.action_mask_info`.
      infos: shapes of the entries, by name; None: unknown, because the environment cannot be reset.
      action: jrl's space.
      id: environment id, for errors.
    Raises:
      InputError: the named entry is missing or has the wrong size.
    """
    wanted = name or ACTION_MASK
    if infos is None:
        if name is None:
            return None
        raise InputError(f"{_KEY} {name}: {id} cannot be reset, so that its infos are unknown: fix its reset")
    found, choices = infos.get(wanted), num_choices(action)
    if found is not None and (math.prod(found) == choices or found == getattr(action, "nvec", None)):
        return wanted, found
    if name is None:
        return None
    if found is None:
        names = ", ".join(infos) or "no numbers"
        raise InputError(f"{_KEY} {name}: the infos of {id} have no such entry, only {names}: name one of them")
    raise InputError(
        f"{_KEY} {name}: the mask in the infos of {id} has {math.prod(found)} entries, but the action space {action} "
        f"has {choices} choices: return one entry per choice"
    )
