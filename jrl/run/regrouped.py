"""Resumes from a checkpoint with other groups of policies: those that differ in floats had groups of their own.

What is kept of learners is by policy; a replay and the memory of acting are by group.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrl.run.several import Group
from jrl.types import PyTree


def replay(found: PyTree, like: PyTree, groups: Sequence[Group], devices: int) -> PyTree:
    """Stacks the replays of the former groups, in dicts, as the present ones have theirs.

    Args:
      found: as it was saved: by group, of `devices` devices one behind the other.
      like: the replay that is wanted.
      groups: the policies; () where there is one.
    """

    def joined(group: Group, parts: Sequence[Group]) -> PyTree:
        shapes = {_name(path): x.shape for path, x in jax.tree.leaves_with_path(like[group.label])}
        order = np.argsort([group.names.index(name) for part in parts for name in part.names])

        def join(path: Any, *leaves: np.ndarray) -> np.ndarray:
            rest = shapes[_name(path)][1:]
            split = [x.reshape(devices, len(p.names), *rest) for p, x in zip(parts, leaves, strict=True)]
            return np.concatenate(split, 1)[:, order].reshape(-1, *rest)

        return jax.tree.map_with_path(join, *(found[part.label] for part in parts))

    return _by_group(found, groups, joined)


def source(found: PyTree, groups: Sequence[Group]) -> PyTree:
    """Gives environments in a program, in dicts, the memory of acting by the present groups; others stay."""
    if not isinstance(found, dict) or not isinstance(found.get("carry"), dict):
        return found
    carry, num_agents = found["carry"], sum(group.agents.size for group in groups)

    def joined(group: Group, parts: Sequence[Group]) -> PyTree:
        def join(*leaves: np.ndarray) -> np.ndarray:  # [D, B, ...] each, of all columns
            whole = np.array(leaves[0])
            for part, x in zip(parts, leaves, strict=True):
                mine = np.isin(np.arange(x.shape[1]) % num_agents, part.agents)
                whole[:, mine] = x[:, mine]
            return whole

        return jax.tree.map(join, *(carry[part.label] for part in parts))

    return {**found, "carry": _by_group(carry, groups, joined)}


def _by_group(found: PyTree, groups: Sequence[Group], joined: Any) -> PyTree:
    """Returns `found` with `joined(group, parts)` for each group that it holds in parts."""
    made = dict(found) if isinstance(found, Mapping) else found
    for group in groups:
        parts = _apart(group)
        if len(parts) > 1 and isinstance(made, dict) and all(part.label in made for part in parts):
            new = joined(group, parts)
            made = {label: x for label, x in made.items() if label not in [part.label for part in parts]}
            made[group.label] = new
    return made


def _apart(group: Group) -> list[Group]:
    """Splits the policies of a group into those of equal floats."""
    members: dict[tuple[float, ...], list[int]] = {}
    for i in range(len(group.names)):
        members.setdefault(tuple(float(x[i]) for x in jax.tree.leaves(group.floats)), []).append(i)
    return [Group(tuple(group.names[i] for i in of), group.agents[of], group.algo) for of in members.values()]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


__all__ = ["replay", "source"]
