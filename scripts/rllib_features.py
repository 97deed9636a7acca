"""What RLlib's documentation describes, feature by feature: works here, differs, or is not here; each is tried.

    python scripts/rllib_features.py                                  # tries all, also by training; prints what failed
    python scripts/rllib_features.py --cheap                          # without training: seconds
    python scripts/rllib_features.py --only evaluation                # those with the word in heading or name
    python scripts/rllib_features.py --write docs/rllib-features.md   # the page; tries nothing

The table is scripts/rllib_feature_list.py. A check that raises is a failure, and the exit status 1.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
WORKS, DIFFERS, NOT_HERE = "works", "differs", "not here"
PAGE = "docs/rllib-features.md"


class Feature(NamedTuple):
    """One documented feature of RLlib's."""

    name: str
    status: str  # WORKS, DIFFERS or NOT_HERE
    note: str  # what it is called here, how it differs, or why it is not here
    check: Callable[[], Any]  # raises unless the status is true
    slow: bool = False  # it trains, or starts processes


# ---------------------------------------------------------------- ways to try


def config_of(algo: str = "PPO") -> Any:
    from jrl import api

    env = "Pendulum-v1" if algo in ("SAC", "TD3", "CQL", "IQL") else "CartPole-v1"
    return getattr(api, f"{algo}Config")().environment(env)


def value_at(cfg: Any, key: str) -> Any:
    """The value of a dotted key of what an AlgorithmConfig becomes."""
    from jrl import config

    found: Any = config.to_dict(cfg.to_run_config())
    for name in key.split("."):
        found = found[name]
    return found


def equal(found: Any, expected: Any) -> None:
    if isinstance(found, tuple):
        found = list(found)
    if found != expected:
        raise AssertionError(f"expected {expected!r}, got {found!r}")


def puts(group: str, name: str, value: Any, key: str, expected: Any = None, algo: str = "PPO") -> Callable[[], None]:
    """The builder's argument becomes a key with the value, or with `expected`."""

    def check() -> None:
        made = getattr(config_of(algo), group)(**{name: value})
        equal(value_at(made, key), value if expected is None else expected)

    return check


def takes(group: str, algo: str = "PPO", **arguments: Any) -> Callable[[], None]:
    """The builder takes the arguments, and what comes of it is a config."""
    return lambda: getattr(config_of(algo), group)(**arguments).to_run_config()


def refuses(group: str, algo: str = "PPO", **arguments: Any) -> Callable[[], None]:
    """The builder says that there is no such thing."""
    from jrl.errors import InputError

    def check() -> None:
        try:
            getattr(config_of(algo), group)(**arguments).to_run_config()
        except (InputError, TypeError, ValueError, AttributeError) as e:
            if len(str(e)) < 10:
                raise AssertionError(f"it says no more than {e}") from e
            return
        raise AssertionError(f"{group}({arguments}) was taken")

    return check


def migrates(given: dict[str, Any], key: str, expected: Any, algo: str = "PPO") -> Callable[[], None]:
    """A config of RLlib's becomes a key with this value."""

    def check() -> None:
        from jrl import config, migrate

        found: Any = config.to_dict(
            config.from_dict(migrate.migrate({"env": "CartPole-v1", **given}, algo=algo).config)
        )
        for name in key.split("."):
            found = found[name]
        equal(found, expected)

    return check


def unmigrated(given: dict[str, Any], algo: str = "PPO") -> Callable[[], None]:
    """A config of RLlib's with such keys is an error, unless they are to be dropped."""

    def check() -> None:
        from jrl import migrate
        from jrl.errors import InputError

        whole = {"env": "CartPole-v1", **given}
        try:
            migrate.migrate(whole, algo=algo)
        except InputError:
            migrate.migrate(whole, algo=algo, drop=True)
            return
        raise AssertionError(f"{given} was taken")

    return check


def _owner(kind: str) -> Any:
    from jrl import api
    from jrl.rllib.policy import ActionPolicy
    from jrl.run import workers

    kinds = {"algorithm": lambda: api.PPO, "policy": lambda: ActionPolicy, "config": lambda: api.PPOConfig}
    kinds |= {"workers": lambda: workers.Workers, "worker": lambda: workers.Worker}
    kinds |= {"callbacks": lambda: api.Callbacks, "api": lambda: api}
    return kinds[kind]()


def has(kind: str, *names: str) -> Callable[[], None]:
    """Objects of this kind have these attributes."""

    def check() -> None:
        missing = [name for name in names if not hasattr(_owner(kind), name)]
        if missing:
            raise AssertionError(f"{kind} lacks {', '.join(missing)}")

    return check


def tells(kind: str, *names: str) -> Callable[[], None]:
    """Objects of this kind have no such attributes, and an error that says what does it instead."""

    def check() -> None:
        owner = _owner(kind)
        for name in names:
            if hasattr(owner, name):
                raise AssertionError(f"{kind} has {name}")
            try:
                getattr(owner.__new__(owner), name)
            except AttributeError as e:
                if f"has no {name}: " not in str(e) or "docs/api.md" in str(e):
                    raise AssertionError(f"it says no more than {e}") from e

    return check


def command(*arguments: str, stdout: str = "") -> Callable[[], None]:
    """`python -m ...` ends with exit status 0 and says so much."""

    def check() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            filled = [a.replace("SCRATCH", scratch).replace("ROOT", str(ROOT)) for a in arguments]
            done = subprocess.run(
                [sys.executable, "-m", *filled], cwd=scratch, env=env, capture_output=True, text=True, timeout=600
            )
        said = done.stdout + done.stderr
        if done.returncode or stdout not in said:
            raise AssertionError(f"exit status {done.returncode}: {said[-600:]}")

    return check


def example(name: str) -> Callable[[], None]:
    """A program of examples/ ends with exit status 0."""

    def check() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            path = ROOT / "examples" / name
            done = subprocess.run(
                [sys.executable, str(path)], cwd=scratch, env=env, capture_output=True, text=True, timeout=900
            )
        if done.returncode:
            raise AssertionError(f"exit status {done.returncode}: {(done.stdout + done.stderr)[-600:]}")

    return check


def there(path: str) -> Callable[[], None]:
    """A file of the repository exists."""

    def check() -> None:
        if not (ROOT / path).exists():
            raise AssertionError(f"{path} is not there")

    return check


# ---------------------------------------------------------------- the table and its page


def table() -> dict[str, list[Feature]]:
    """heading -> features, in the order of the page."""
    from rllib_feature_list import FEATURES

    return FEATURES


def page(features: dict[str, list[Feature]]) -> str:
    """docs/rllib-features.md"""
    counts = Counter(feature.status for several in features.values() for feature in several)
    said = ", ".join(f"{counts[status]} {status}" for status in (WORKS, DIFFERS, NOT_HERE))
    lines = [
        "# RLlib's features, one by one",
        "",
        "What RLlib's documentation describes, by its headings, and what became of it here. Each row is tried by",
        "`python scripts/rllib_features.py`, which this page is written by; `--cheap` leaves out what trains.",
        "",
        f"In all {sum(counts.values())}: {said}. *differs*: what it is for is done in another way, which the row says. "
        "*not here*: asking",
        "for it is an error with a word about it. Every key of a configuration, by all names that it has had, is in",
        "[for those who know RLlib](rllib-users.md#keys); what there is not, in one place, in [limits](limits.md).",
    ]
    for heading, several in features.items():
        lines += ["", f"## {heading}", "", "| RLlib | | here |", "| --- | --- | --- |"]
        lines += [f"| {f.name} | {f.status} | {f.note} |" for f in several]
    return "\n".join(lines) + "\n"


def attempt(feature: Feature) -> str:
    """What is wrong, or nothing."""
    try:
        feature.check()
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception_only(e)).strip()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cheap", action="store_true", help="leave out what trains")
    parser.add_argument("--only", default="", help="features with this in heading or name")
    parser.add_argument("--write", metavar="FILE", help="write the page")
    args = parser.parse_args()
    features = table()
    if args.write:
        Path(args.write).write_text(page(features))
        return 0
    tried, failed = 0, []
    for heading, several in features.items():
        for feature in several:
            if (args.cheap and feature.slow) or args.only.lower() not in f"{heading} {feature.name}".lower():
                continue
            start, tried = time.monotonic(), tried + 1
            if wrong := attempt(feature):
                failed.append(f"{heading}: {feature.name} ({feature.status}): {wrong}")
                print(f"FAILED {failed[-1]}", flush=True)
            elif feature.slow:
                print(f"ok {heading}: {feature.name} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{tried} features tried, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
