"""Plan of a population as text: which keys are vmapped, and the number of programs."""

from collections.abc import Sequence

from jrl.errors import counted, format_names
from jrl.sweep.members import MemberSpec

Group = tuple[Sequence[MemberSpec], str]  # members, and why they cannot be one program; "": they can


def format_plan(groups: Sequence[Group], max_members: int | None = None) -> list[str]:
    """Returns the lines of a plan: a line for each key that differs between members, and the number of programs.

    Args:
      groups: groups of members.
      max_members: limit of members in one program; None: as many as the memory holds.
    """
    from jrl.run import build_population

    values: dict[str, set[str]] = {}
    for member in (member for group, _ in groups for member in group):
        for key, value in member.values.items():
            values.setdefault(key, set()).add(repr(value))
    programs = [group for group, why in groups if not why]
    in_processes = [(group, why) for group, why in groups if why]
    vmapped = {name for group in programs for name in build_population.vmapped(group[0].config)}
    reasons = "; ".join(dict.fromkeys(why for _, why in in_processes))
    lines = [f"plan: {counted(sum(len(group) for group, _ in groups), 'member')}"]
    for key in sorted(key for key, own in values.items() if len(own) > 1):
        is_vmapped = any(name == key or name.startswith(f"{key}.") for name in vmapped)
        how = "vmapped" if is_vmapped else f"a program for each of its {len(values[key])} values"
        how = how if programs else f"not vmapped: {reasons}"
        lines.append(f"  {key}: {how}")
    if programs:
        lines += [f"  {format_members([m.name for m in group])}: not vmapped: {why}" for group, why in in_processes]
    count = sum(-(-len(group) // (max_members or len(group))) for group in programs)
    if count > 1:
        largest = max(min(len(group), max_members or len(group)) for group in programs)
        lines.append(f"  {count} programs, one after the other, of at most {counted(largest, 'member')}")
    return lines


def format_members(names: Sequence[str]) -> str:
    """Returns `members 00, 01 and 4 more`."""
    return f"member{'s' if len(names) > 1 else ''} {format_names(names)}"
