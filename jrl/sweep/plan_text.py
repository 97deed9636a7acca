"""Plan of a population as text: which keys are vmapped, and why others are not."""

from collections.abc import Sequence
from typing import Any

from jrl.errors import counted, format_names
from jrl.sweep.members import MemberSpec

Group = tuple[Sequence[MemberSpec], str]  # members, and why they cannot be one program; "": they can


def format_plan(groups: Sequence[Group], max_members: int | None = None) -> list[str]:
    """Return the lines of a plan: a line for each key that differs between members, and the number of programs.

    Args:
      groups: groups of members.
      max_members: limit of members in one program; None: as many as the memory holds.
    """
    from jrl.run import build_population

    values: dict[str, dict[str, Any]] = {}
    for member in (member for group, _ in groups for member in group):
        for key, value in member.values.items():
            values.setdefault(key, {})[repr(value)] = value
    programs = [group for group, why in groups if not why]
    in_processes = [(group, why) for group, why in groups if why]
    vmapped = {name for group in programs for name in build_population.vmapped(group[0].config)}
    reasons = "; ".join(dict.fromkeys(why for _, why in in_processes))
    lines = [f"plan: {counted(sum(len(group) for group, _ in groups), 'member')}"]
    for key in sorted(key for key, own in values.items() if len(own) > 1):
        how = _describe_key(key, [*values[key].values()], vmapped) if programs else f"not vmapped: {reasons}"
        lines.append(f"  {key}: {how}")
    if programs:
        lines += [f"  {format_members([m.name for m in group])}: not vmapped: {why}" for group, why in in_processes]
    count = sum(-(-len(group) // (max_members or len(group))) for group in programs)
    if count > 1:
        largest = max(min(len(group), max_members or len(group)) for group in programs)
        lines.append(f"  {count} programs, one after the other, of at most {counted(largest, 'member')}")
    return lines


def _describe_key(key: str, values: Sequence[Any], vmapped: set[str]) -> str:
    if any(name == key or name.startswith(f"{key}.") for name in vmapped):
        forms = dict.fromkeys(_name_form(value) for value in values)
        return "vmapped" if len(forms) == 1 else f"vmapped, a program for each form: {', '.join(forms)}"
    return f"a program for each of its {len(values)} values, because {_explain_constant(key, values)}"


def _name_form(value: Any) -> str:
    if value is None:
        return "null"
    return "a number" if isinstance(value, int | float) else "a schedule"


def _explain_constant(key: str, values: Sequence[Any]) -> str:
    """Return why a key cannot be vmapped."""
    types = tuple(type(value) for value in values if value is not None)
    if key.startswith("env."):
        return "environments are part of the program"
    if bool in types:
        return "a flag decides what the program does"
    if str in types:
        return "a name decides what the program does"
    if float in types:
        return "the program has it as a constant"
    return "sizes and counts are those of the program"


def format_members(names: Sequence[str]) -> str:
    """Return `members 00, 01 and 4 more`."""
    return f"member{'s' if len(names) > 1 else ''} {format_names(names)}"
