"""Does the suite notice a mistake? Makes known mistakes, one at a time, in a copy of the tree.

    python scripts/break_things.py                    # all
    python scripts/break_things.py --only sign pmean  # of these names
    python scripts/break_things.py --list

Each break replaces one text in one file and runs the test files that ought to fail, without a word of them changed.
First the same files must pass in an unbroken copy. Prints which test caught each break; exits with 1 if none did.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("jrl", "tests", "configs", "docs", "examples", "scripts", "pyproject.toml", "README.md")


class Break(NamedTuple):
    """One mistake, and the tests that should catch it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest: files, or single tests


BREAKS = {
    "sign": Break(
        "jrl/algos/ppo.py",
        "cfg.vf_coef * value_loss - ent_coef * entropy",
        "cfg.vf_coef * value_loss + ent_coef * entropy",
        ("tests/algos/test_ppo.py::test_update_is_the_reference",),
    ),
    "termination": Break(  # the value after a true end is bootstrapped from
        "jrl/ops/returns.py",
        "reward + gamma * jnp.where(terminated, 0.0, value[1:]) - value[:-1]",
        "reward + gamma * value[1:] - value[:-1]",
        ("tests/ops/test_returns.py",),
    ),
    "time-limit": Break(  # and that after a time limit is not
        "jrl/replay/reading.py",
        "terminated = (used & ((flags[:, :-1] & TERMINATED) != 0)).any(1)",
        "terminated = (used & ((flags[:, :-1] & (TERMINATED | TRUNCATED)) != 0)).any(1)",
        ("tests/replay/test_ring.py",),
    ),
    "mask": Break(  # the row of a reset counts in losses
        "jrl/algos/parts.py",
        "weight = mask.astype(jnp.float32)\n",
        "weight = jnp.ones(mask.shape, jnp.float32)\n",
        ("tests/algos/test_ppo.py::test_update_is_the_reference",),
    ),
    "masked-reward": Break(  # and its reward in the returns of episodes
        "jrl/metrics/episodes.py",
        "total + jnp.where(mask, reward, 0.0), length + mask",
        "total + reward, length + mask",
        ("tests/metrics/test_episodes.py",),
    ),
    "key": Break(  # every iteration of a call acts and learns with the same keys
        "jrl/learn/fused.py",
        "keys = role_keys(root, (Role.COLLECT, Role.UPDATE), numbers)",
        "keys = role_keys(root, (Role.COLLECT, Role.UPDATE), jnp.zeros_like(numbers))",
        ("tests/test_loop.py::test_fused_and_staged_learn_the_same",),
    ),
    "one-key": Break(  # the policy and the environment draw the same numbers
        "jrl/rollout/unroll.py",
        "env.step(env_state, out.action, keys[1])",
        "env.step(env_state, out.action, keys[0])",
        ("tests/rollout/test_unroll.py",),
    ),
    "window": Break(  # an n-step window reads one row too many
        "jrl/replay/reading.py",
        "< jnp.minimum(steps, ahead)[:, None])",
        "<= jnp.minimum(steps, ahead)[:, None])",
        ("tests/replay/test_ring.py",),
    ),
    "pmean": Break(  # each device takes the gradient of its own rows
        "jrl/ops/collectives.py",
        "return unflatten(lax.pmean(flat, axis_name))",
        "return unflatten(flat)",
        ("tests/algos/test_contract.py::test_any_number_of_devices_learns_the_same", "tests/ops/test_collectives.py"),
    ),
    "stop-gradient": Break(  # the learned value is held fixed, too
        "jrl/ops/losses.py",
        "old_value, target = lax.stop_gradient((old_value, target))",
        "value, old_value, target = lax.stop_gradient((value, old_value, target))",
        ("tests/ops/test_losses.py",),
    ),
    "ratio": Break(  # the importance weights are those of the policy that acted, to itself
        "jrl/algos/impala.py",
        "log_rho = jax.lax.stop_gradient(log_prob - columns.log_prob)",
        "log_rho = jax.lax.stop_gradient(columns.log_prob - columns.log_prob)",
        ("tests/algos/test_impala.py",),
    ),
    "target-network": Break(  # double Q-learning's choice is the target network's own
        "jrl/algos/dqn.py",
        "chooser = of(state.params, next_obs, keys.chooser) if cfg.double else after",
        "chooser = of(state.target_params, next_obs, keys.chooser) if cfg.double else after",
        ("tests/algos/test_dqn.py",),
    ),
    "memory": Break(  # what was remembered of an episode is carried into the next
        "jrl/rollout/unroll.py",
        "memory = reset_where(begins, initial_carry, out.carry)",
        "memory = out.carry",
        ("tests/rollout/test_unroll.py",),
    ),
    "checkpoint": Break(  # Adam's two moments come back in each other's place
        "jrl/run/store/checkpoint.py",
        "saved[_path_names(path)]",
        'saved[tuple({"mu": "nu", "nu": "mu"}.get(name, name) for name in _path_names(path))]',
        ("tests/test_resume.py::test_a_run_that_lost_its_latter_half_becomes_the_same_again",),
    ),
}  # fmt: skip


def main() -> int:
    """Runs the chosen breaks; 1 where one was not caught, 2 where the tests fail without it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", choices=BREAKS, default=list(BREAKS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="names and files of the breaks, without running any")
    args = parser.parse_args()
    chosen = {name: BREAKS[name] for name in args.only}
    if args.list:
        print("\n".join(f"{name:15} {found.file:30} {' '.join(found.tests)}" for name, found in chosen.items()))
        return 0
    with tempfile.TemporaryDirectory(prefix="jrl-broken-") as place:
        tree = Path(place)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, tree / name)
        tests = sorted({test for found in chosen.values() for test in found.tests})
        failed, said, seconds = run(tree, tests)
        if failed is not None:
            print(f"unbroken: expected tests that pass, got a failure of {failed}: mend it first\n{said[-3000:]}")
            return 2
        print(f"unbroken: {len(tests)} files or tests pass, {seconds:.0f} s", flush=True)
        return max([look(tree, name, found) for name, found in chosen.items()])


def look(tree: Path, name: str, found: Break) -> int:
    """Runs the tests of one break and tells what caught it; 1 if nothing did."""
    file = tree / found.file
    whole = file.read_text()
    if whole.count(found.old) != 1:
        print(f"{name:15} MISSED  {found.file} holds the old text {whole.count(found.old)} times: expected 1")
        return 1
    try:
        file.write_text(whole.replace(found.old, found.new))
        caught, _, seconds = run(tree, found.tests)
    finally:
        file.write_text(whole)
    print(
        f"{name:15} {'MISSED ' if caught is None else 'caught '} {seconds:4.0f} s  {caught or found.file}", flush=True
    )
    return int(caught is None)


def run(tree: Path, tests) -> tuple[str | None, str, float]:
    """Returns (the first test that failed or None, what pytest said, seconds).

    Raises:
      RuntimeError: pytest could not run the tests.
    """
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    began = time.monotonic()
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    said, seconds = done.stdout + done.stderr, time.monotonic() - began
    if done.returncode == 0:
        return None, said, seconds
    failed = re.search(r"^FAILED (.+?)(?: - |$)", said, re.MULTILINE)
    if failed is None:  # a test that was not found, or an error in a fixture
        raise RuntimeError(f"pytest: expected tests that run, got exit status {done.returncode}:\n{said[-3000:]}")
    return failed[1], said, seconds


if __name__ == "__main__":
    sys.exit(main())
