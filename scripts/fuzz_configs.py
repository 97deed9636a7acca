"""Mutates the shipped configs and the command line: whatever comes out is refused with an InputError, or is valid.

    python scripts/fuzz_configs.py --count 10000
    python scripts/fuzz_configs.py --only 123          # what mutant 123 is, and what became of it

A mutant is a config (now and then one of RLlib's) with values replaced, keys renamed, moved, dropped or nested, or with
its text damaged, and may have --set and --stop beside it. Prints JSON; exit status 1 where a mutant raises something
else, takes more than --seconds of the processor, is answered with a wall of text, or does not survive being written.
"""

import argparse
import collections
import contextlib
import copy
import json
import math
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jrl import config
from jrl.config import Sizes
from jrl.errors import InputError

ROOT = Path(__file__).parent.parent
SOURCES = [*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "tests" / "fixtures" / "rllib").glob("*.yaml"))]
LONGEST = 1200  # characters of one error
MOST = 60  # errors of one config

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 13, 255, 1023, 0.5, -0.5, 1.5, 1e-30, 1e-320, 1e308, -1e308, 10**7, 10**10,
    -(10**10), 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 10**400, math.inf,
    -math.inf, math.nan, "", " ", "x", "yes", "null", "1e5", "1e400", "0x10", "-", "~", "..", "../../x", "/dev/zero",
    "os:path", "jrl.errors", "a.b.c", "a:b:c", ".:.", "jrl.algos.ppo", "x" * 10_000, "\u00e9\u4e2d\U0001f600", "\x00",
    "a\nb", "${HOME}", "{}", "[", "2020-13-45", "2020-01-01", "12:30:45", [], [[]], [1, 2], [0, 0], [-1], ["x"],
    [1.5, "a"], [0] * 1000, list(range(200)), [[0, 1]], [[0, 1], [10, 0]], [[5, 1]], [[0, math.nan]], [[0, 1, 2]],
    [[0, -1], [1e9, 1e9]], [[0, 0.1], [0, 0.2]], {}, {"name": "x"}, {"name": None}, {"a": {"b": 1}}, {"x": math.inf},
    {1: 2}, {"": 1}, {"a.b": 1}, {"grid_search": [1, 2]},
]  # fmt: skip
TEXTS = [
    "{", "}", "[", "]", ":", ",", "'", '"', "*", "&a ", "*a", "<<: *a", "!!python/object/apply:os.system [x]",
    "!!int x", "!!binary x", "!!set {a}", "!!float [1]", "!!timestamp 2020-13-45", "!x", "%YAML 1.1", "---\n",
    "...\n", "\t", "\x00", "\x07", "\ufeff", "\u2028", "|\n", ">\n", "? ", "- ", "#", "@", "`", "\\", "9" * 5000,
    "0x" + "f" * 5000, "1:" * 500 + "1", ".inf", ".nan", "2020-13-45", "[" * 3000, "{a: " * 3000, "- " * 3000,
    "&a [*a]", "&a {x: *a}", "\ud800",
]  # fmt: skip
BOMBS = [
    "run: &x\n  again: *x\n", "x" * 1_000_000, "a: " + "[" * 100_000,
    "env: {options: {" + ", ".join(f"k{i}: {i}" for i in range(3000)) + "}}\n",
]  # fmt: skip
VALUES = [
    "1", "-1", "0", ".inf", "-.inf", ".nan", "1e308", "1e400", "10000000000", "true", "null", "", "x", "[1",
    "{a: 1}", "[]", "2020-13-45", "9" * 5000, "[" * 3000, "*a", "&a [*a]", "!!int x", "x" * 10_000, "=", "a=b",
    "../../x", "'", "3.5", "[[0, -1]]",
]  # fmt: skip


class Mutant(NamedTuple):
    """What somebody might type."""

    text: str | bytes  # of the file
    suffix: str
    overrides: list[str]
    stop: list[str]
    what: str  # was done


class TooSlow(BaseException):
    """More of the processor than a config may take; no part of jrl catches it."""


# ---------------------------------------------------------------- mutations


def places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all values in a tree but its root."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in children:
        yield (*path, name)
        yield from places(value, (*path, name))


def at(tree: Any, path: tuple) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def replaced(tree: Any, path: tuple, value: Any) -> None:
    at(tree, path[:-1])[path[-1]] = value


def misspelt(name: str, rng: random.Random) -> str:
    i = rng.randrange(len(name) + 1)
    return rng.choice(
        [name[:i] + name[i + 1 :], name[:i] + rng.choice("_.ae1 ") + name[i:], name.upper(), name * 50, ""]
    )


def change(tree: dict, rng: random.Random) -> str:
    """Changes a tree in one place; says how."""
    path = rng.choice(list(places(tree)))
    value, parent = at(tree, path), at(tree, path[:-1])
    key = ".".join(map(str, path))
    kind = rng.choice(["value"] * 8 + ["scale"] * 3 + ["type", "rename", "move", "drop", "add", "nest", "copy"])
    if kind == "scale" and isinstance(value, int | float) and not isinstance(value, bool):
        value = min(max(value, -(10**100)), 10**100)
        new = value * rng.choice([-1, 0, 0.5, 3, 10, 1e3, 1e6, 1e9, 1e300]) + rng.choice([0, 0, 1, 0.5])
        replaced(tree, path, int(new) if isinstance(value, int) and abs(new) < 1e300 else new)
    elif kind == "type":
        replaced(tree, path, rng.choice([[value], {"value": value}, str(value), [value, value], {key: value}]))
    elif kind == "rename" and isinstance(parent, dict):
        parent[misspelt(str(path[-1]), rng)] = parent.pop(path[-1])
    elif kind == "move" and isinstance(parent, dict):
        target = at(tree, rng.choice([(), *(p for p in places(tree) if isinstance(at(tree, p), dict))]))
        target[path[-1]] = copy.deepcopy(parent.pop(path[-1]))
    elif kind == "drop" and isinstance(parent, dict):
        del parent[path[-1]]
    elif kind == "add":
        name = rng.choice(["learning_rate", "x", "lr", "name", "num_envs", "n" * 10_000, 3, None, True, 1.5])
        (value if isinstance(value, dict) else tree)[name] = rng.choice(NASTY)
    elif kind == "nest":
        for _ in range(rng.choice([1, 5, 55, 70, 120])):
            value = {rng.choice(["a", "env", "name"]): value}
        replaced(tree, path, value)
    elif kind == "copy":
        replaced(tree, path, copy.deepcopy(at(tree, rng.choice(list(places(tree))))))
    else:
        kind = "value"
        replaced(tree, path, copy.deepcopy(rng.choice(NASTY)))
    return f"{kind} {key[:80]}"


def damage(text: str, rng: random.Random) -> str:
    """Damages a text in one place."""
    lines, i, j = text.split("\n"), rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)
    n = rng.randrange(len(lines))
    match rng.randrange(9):
        case 0:
            return text[:i] + rng.choice(TEXTS) + text[i:]
        case 1:
            return text[:i] + text[i + 1 + rng.randrange(5) :]
        case 2:
            return "\n".join([*lines[: n + 1], *lines[n:]])
        case 3:
            lines[n] = " " * rng.randrange(5) + lines[n].lstrip(" ") if rng.random() < 0.5 else "  " + lines[n]
            return "\n".join(lines)
        case 4:
            return text[:i]
        case 5:
            name, _, _ = lines[n].partition(":")
            lines[n] = f"{name}: {rng.choice(TEXTS)}"
            return "\n".join(lines)
        case 6:
            return text[:j] + text[i : i + 40] + text[j:]
        case 7:
            return text + "\n" + rng.choice(BOMBS)
    return rng.choice([*BOMBS, "", "\n", "null", "3", "- a", "{}", "a", "%"])


def options(tree: Any, rng: random.Random) -> tuple[list[str], list[str]]:
    """--set and --stop."""
    keys = [".".join(map(str, p)) for p in places(tree)] or ["algo.lr"]
    key = lambda: rng.choice(
        [rng.choice(keys), misspelt(rng.choice(keys), rng), "a." * 2000 + "b", "algo.name", "env.id"]
    )
    overrides = [f"{key()}={rng.choice(VALUES)}" for _ in range(rng.randrange(3))]
    overrides += rng.choices(
        ["x", "=", "=1", "a..b=1", "algo=1", "run=x", "x" * 10_000, "algo.lr"], k=rng.random() < 0.1
    )
    names = ["env_steps", "episode/return", "training_iteration", "episode_reward_mean", "x", "", "a.b"]
    stop = [f"{rng.choice(names)}={rng.choice(VALUES)}" for _ in range(rng.randrange(2))]
    stop += rng.choices(['{"env_steps": 1e400}', '{"time_s": {"a": 1}}', "{", "{}", '{"a": [1]}'], k=rng.random() < 0.1)
    return overrides, stop


def mutant(seed: int, number: int) -> Mutant:
    """Mutant `number` of a seed."""
    rng = random.Random(f"{seed}-{number}")
    path = rng.choice(SOURCES)
    text, done = path.read_text(), [path.name]
    tree = yaml.safe_load(text)
    if rng.random() < 0.75:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if tree:
                done.append(change(tree, rng))
        text = yaml.dump(tree, Dumper=_Plain, sort_keys=False, allow_unicode=True)
    given: str | bytes = text
    if rng.random() < 0.3:
        given = damage(text, rng)
        done.append("damaged")
    if rng.random() < 0.02:
        given = rng.choice(
            [rng.randbytes(300), b"\xff\xfe" + text.encode("utf-16-le"), text.encode("utf-16"), b"\x00" * 99]
        )
        done.append("bytes")
    suffix = ".yaml"
    if rng.random() < 0.03:
        with contextlib.suppress(TypeError, ValueError):
            given, suffix = json.dumps(tree), ".json"
            given = damage(given, rng) if rng.random() < 0.5 else given
    overrides, stop = options(tree, rng) if rng.random() < 0.3 else ([], [])
    return Mutant(given, suffix, overrides, stop, ", ".join(done))


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# ---------------------------------------------------------------- what becomes of them


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TooSlow once this process has computed for so long, however busy the machine is."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"{seconds:g} s of the processor are over")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def look(found: Mutant, file: Path) -> str:
    """Reads a mutant as a command does: "refused" or "valid". Raises what it should not."""
    data = found.text if isinstance(found.text, bytes) else found.text.encode("utf-8", "surrogatepass")
    file.write_bytes(data)
    try:
        cfg = config.load(file, found.overrides, stop=found.stop)
    except InputError as e:
        assert e.errors and len(e.errors) <= MOST, f"{len(e.errors)} errors"
        long = [error for error in e.errors if not error or len(error) > LONGEST]
        assert not long, f"an error of {len(long[0])} characters: {long[0][:2000]}"
        return "refused"
    sizes = Sizes(cfg)
    assert all(list(sizes.lines())) and sizes.iterations_per_call >= 1 and sizes.report_every >= 1
    json.dumps(config.to_dict(cfg))
    text = config.to_yaml(cfg)
    written = file.with_suffix(".written.yaml")
    written.write_text(text, encoding="utf-8")
    again = config.load(written)
    same = config.to_dict(again) == config.to_dict(cfg) or config.to_yaml(again) == text  # 0 is 0.0, and nan is nan
    assert same, "it is another config once it was written"
    return "valid"


def run(
    count: int, seed: int = 0, *, seconds: float = 1.0, first: int = 0, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Looks at so many mutants.

    Returns:
      `refused` and `valid`, how many were; `faults`, a text for each other one; `slowest`,
    its seconds of the processor.
    """
    outcomes: collections.Counter[str] = collections.Counter()
    faults, slowest = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:  # imports, and what is read once for each algorithm
            with contextlib.suppress(InputError):
                config.load(source)
        for number in range(first, first + count):
            found = mutant(seed, number)
            begin = time.process_time()
            try:
                with at_most(seconds):
                    outcomes[look(found, Path(folder) / f"mutant{found.suffix}")] += 1
            except (Exception, TooSlow) as e:
                where = traceback.extract_tb(e.__traceback__)[-1]
                name = f"{type(e).__name__}: {str(e)[:300]} ({Path(where.filename).name}:{where.lineno})"
                faults.append(f"{number} ({found.what}): {name}")
                tell(faults[-1])
            slowest = max(slowest, time.process_time() - begin)
    return {"count": count, "seed": seed, **outcomes, "faults": faults, "slowest": round(slowest, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1.0, help="of the processor, for each")
    parser.add_argument("--only", type=int, help="one mutant, shown")
    args = parser.parse_args()
    if args.only is not None:
        found = mutant(args.seed, args.only)
        print(found.text, *found.overrides, *found.stop, found.what, sep="\n")
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(look(found, Path(folder) / f"mutant{found.suffix}"))
                config.load(Path(folder) / f"mutant{found.suffix}", found.overrides, stop=found.stop)
            except InputError as e:
                print(*e.errors, sep="\n")
        return 0
    tell = lambda line: print(line, file=sys.stderr, flush=True)
    result = run(args.count, args.seed, seconds=args.seconds, first=args.first, tell=tell)
    print(json.dumps(result, indent=2))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
