"""The plan of a population in lines of text: which keys are numbers in a program, and why others are not."""

from collections.abc import Sequence
from typing import Any

from jrl.errors import counted
from jrl.report.runs import format_names
from jrl.sweep.members import Member

Group = tuple[Sequence[Member], str]  # members that are alike, and why they cannot be one program; "" where they may be


def plan(groups: Sequence[Group], most: int | None = None) -> list[str]:
    """Returns lines: one for each key in which members differ, and how many programs there are.

    `most` members are one program at once; None: as many as the memory holds.
    """
    from jrl.run import build_population

    values: dict[str, dict[str, Any]] = {}
    for member in (member for group, _ in groups for member in group):
        for key, value in member.changed.items():
            values.setdefault(key, {})[repr(value)] = value
    together = [group for group, why in groups if not why]
    apart = [(group, why) for group, why in groups if why]
    numbers = {name for group in together for name in build_population.vmapped(group[0].config)}
    whys = "; ".join(dict.fromkeys(why for _, why in apart))
    lines = [f"plan: {counted(sum(len(group) for group, _ in groups), 'member')}"]
    for key in sorted(key for key, found in values.items() if len(found) > 1):
        lines.append(
            f"  {key}: {_of_key(key, [*values[key].values()], numbers) if together else f'not vmapped: {whys}'}"
        )
    if together:
        lines += [f"  {named([m.name for m in group])}: not vmapped: {why}" for group, why in apart]
    programs = sum(-(-len(group) // (most or len(group))) for group in together)
    if programs > 1:
        most = max(min(len(group), most or len(group)) for group in together)
        lines.append(f"  {programs} programs, one after the other, of at most {counted(most, 'member')}")
    return lines


def _of_key(key: str, values: Sequence[Any], numbers: set[str]) -> str:
    """Tells how a key's values are trained where members are programs together."""
    if any(name == key or name.startswith(f"{key}.") for name in numbers):
        forms = dict.fromkeys(_form(value) for value in values)
        return "vmapped" if len(forms) == 1 else f"vmapped, a program for each form: {', '.join(forms)}"
    return f"a program for each of its {len(values)} values, because {_why(key, values)}"


def _form(value: Any) -> str:
    if value is None:
        return "null"
    return "a number" if isinstance(value, int | float) else "a schedule"


def _why(key: str, values: Sequence[Any]) -> str:
    """Says why a key that members of one program share is no number in it."""
    given = [value for value in values if value is not None]
    if key.startswith("env."):
        return "environments are part of the program"
    if any(isinstance(value, bool) for value in given):
        return "a flag decides what the program does"
    if any(isinstance(value, str) for value in given):
        return "a name decides what the program does"
    if any(isinstance(value, float) for value in given):
        return "the program has it as a constant"
    return "sizes and counts are those of the program"


def named(names: Sequence[str]) -> str:
    """Members by name, the first of many."""
    return f"member{'s' if len(names) > 1 else ''} {format_names(names, 8)}"
