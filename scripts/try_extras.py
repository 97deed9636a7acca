"""Installs the extras without constraints into a new virtual environment, and tries each package: what a user gets.

    python scripts/try_extras.py                            # all extras but cuda, tpu and dev
    python scripts/try_extras.py suites navix --venv /tmp/extras

Environments are made and stepped, other packages are imported. Prints a table of packages, versions and results; the
exit status is 1 if a package does not work. Needs a package index.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("cuda", "tpu", "dev")  # other machines; packages of other extras
# package -> environment to step, or module to import if its name differs
ENVIRONMENTS = {
    "gymnax": "gymnax:CartPole-v1",
    "craftax": "craftax:Craftax-Classic-Symbolic-v1",
    "playground": "playground:CartpoleBalance",
    "jumanji": "jumanji:Snake-v1",
    "xminigrid": "xminigrid:MiniGrid-Empty-8x8",
    "pgx": "pgx:tic_tac_toe",
    "navix": "navix:Navix-Empty-8x8-v0",
    "jaxmarl": "jaxmarl:MPE_simple_spread_v3",
    "pettingzoo": "pettingzoo:mpe2.simple_spread_v3",
}
MODULES = {"mkdocs-material": "material", "pillow": "PIL", "pygame-ce": "pygame", "ray": "ray.tune"}
STEP = """
import sys
import jax, numpy as np
from jrl import envs, spaces
env = envs.make(sys.argv[1], num_envs=2)
columns = spaces.columns(env.spec)
action = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spaces.elements(env.spec.action, columns))
if hasattr(env, "pure"):
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    jax.block_until_ready(jax.jit(env.step)(state, action, jax.random.key(1)))
else:
    env.reset()
    env.step(action)
"""
VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def run(*command: object) -> tuple[bool, str]:
    """Returns whether a command succeeds, and the last line that it prints."""
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, cwd=tempfile.gettempdir())
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""


def packages(requirements: list[str]) -> list[str]:
    """Returns the names of requirements for this platform.

    >>> packages(["ray[tune]>=2.40", "six"])
    ['ray', 'six']
    """
    return [name[0] for text in requirements if (name := re.match(r"[\w.-]+", text)) and "sys_platform" not in text]


def main(argv: list[str] | None = None) -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("extras", nargs="*", choices=[*extras, []], metavar="EXTRA", help="default: all")
    parser.add_argument("--venv", type=Path, help="directory of the virtual environment; default: a temporary one")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        venv = args.venv or Path(temporary)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        python = venv / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        row = "{:12}  {:20}  {:22}  {}"
        print(row.format("extra", "package", "version", "result"))
        works = True
        for extra in args.extras or [name for name in extras if name not in LEFT_OUT]:
            installed, line = run(
                python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{ROOT}[{extra}]"
            )
            if not installed:
                works = False
                print(row.format(extra, "", "", f"not installed: {line}"), flush=True)
                continue
            for package in packages(extras[extra]):
                if id := ENVIRONMENTS.get(package):
                    fine, line = run(python, "-W", "ignore", "-c", STEP, id)
                else:
                    module = MODULES.get(package, package.replace("-", "_"))
                    fine, line = run(python, "-W", "ignore", "-c", f"import {module}")
                works &= fine
                version = run(python, "-c", VERSION, package)[1]
                print(row.format(extra, package, version, "works" if fine else line), flush=True)
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
