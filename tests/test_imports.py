"""Who may import whom: every import statement of every module, and what a command or a module really loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jrl

PACKAGE = Path(jrl.__file__).parent if jrl.__file__ else Path(next(iter(jrl.__path__)))

ANY = {"*"}
# room -> rooms of jrl it may import, by first name below jrl; its own room always
ARROWS = {
    "": {"elsewhere", "policy", "envs"},
    "ops": set(),
    "errors": set(),
    "elsewhere": set(),
    "command": {"errors"},
    "__main__": {"command"},  # and the module of the command that was typed
    "shipped": set(),
    "bounds": {"errors"},
    "plain_yaml": {"bounds", "errors", "shipped"},
    "hyper": {"bounds"},
    "registry": {"bounds", "errors"},
    "exploration_names": {"bounds", "errors", "registry"},
    "sections": {"bounds", "hyper"},
    "types": {"bounds", "errors"},
    "spaces": {"types", "errors"},
    "distributions": {"types", "spaces", "ops", "hyper", "errors"},
    "networks": {"types", "spaces", "registry", "ops", "hyper", "errors"},
    "algos": {"bounds", "types", "spaces", "ops", "networks", "distributions", "hyper", "errors", "registry"},
    "room": {"errors"},
    "replay": {"room", "types", "spaces", "ops", "errors"},
    "envs": {"room", "types", "spaces", "ops", "errors", "registry"},
    "rollout": {"types", "spaces", "ops", "envs", "metrics", "errors", "runtime"},
    "metrics": {"types", "ops", "errors", "files", "registry"},
    "learner": {"types", "spaces", "ops"},
    "parallel": {"types", "errors"},
    "watch": {"types"},
    "faults": set(),
    "files": {"errors"},
    "output": {"files"},
    "loop": {"types", "parallel", "metrics", "learner", "rollout"},
    "provenance": set(),
    "debug": {"types", "errors", "command", "provenance", "checkpoint", "config", "build", "runtime"},
    "resume": {
        "types",
        "checkpoint",
        "checkpoint_file",
        "config",
        "errors",
        "files",
        "learner",
        "loop",
        "metrics",
        "replay",
        "schema",
    },
    "policy": {"elsewhere", "build", "checkpoint", "config", "envs", "rollout", "spaces", "types"},
    "hooks": {"types", "metrics", "checkpoint", "rollout"},
    "schema": {"bounds", "errors", "plain_yaml"},
    "plan": {"errors"},
    "plan_faults": {"bounds", "errors", "plan"},
    "network_table": {"*", "-api", "-train"},
    "config": {
        "bounds",
        "schema",
        "errors",
        "files",
        "hyper",
        "plain_yaml",
        "plan",
        "plan_faults",
        "sections",
        "shipped",
        "command",
    },
    "migrate": {
        "plan",
        "bounds",
        "schema",
        "errors",
        "plain_yaml",
        "hyper",
        "registry",
        "sections",
        "exploration_names",
        "command",
    },
    "callbacks": {"errors", "registry", "rollout", "metrics"},
    "checkpoint": {"types", "config", "checkpoint_file", "errors", "files"},
    "checkpoint_file": {"types", "config", "errors"},
    "build": {"*", "-api", "-train"},
    "build_collect": {"*", "-api", "-train"},
    "build_learner": {"*", "-api", "-train"},
    "evaluation": {"*", "-api", "-train"},
    "runtime": {"errors", "sections"},
    "check_env": {"envs", "errors", "schema", "command"},
    "memory_tracking": {"callbacks"},
    "session": {"*", "-api", "-train"},
    "run_directory": {"session", "config", "hooks", "metrics"},
    "workers": {"rollout", "errors", "session", "loop", "types"},
    "by_hand": {"*", "-api", "-train"},
    "train": {"*", "-api"},
    "export": {"*", "-api", "-train"},
    "record": {"*", "-api", "-train"},
    "plot": {"errors", "metrics", "schema", "command"},
    "video": {"envs", "errors", "policy", "config", "types"},
    "evaluate": {"*", "-api"},
    "api": ANY,
}
# allowed inside a function only
LAZY_ARROWS = {
    "config": {"algos", "envs", "metrics", "migrate", "network_table"},
    "migrate": {"algos", "config"},
}

# libraries of a room, beside the standard library; the rooms that are not listed may import any of `REQUIRED`
STDLIB_ONLY = {"errors", "room", "faults", "output", "command", "shipped", "__main__"}
THIRD_PARTY = {
    "bounds": {"annotated_types"},
    "hyper": {"annotated_types"},
    "ops": {"jax", "flax"},  # flax.struct makes a pytree of a dataclass
    "types": {"jax", "flax", "numpy"},
}
# library -> where it may be imported, and then inside a function
CONFINED = {
    "ray": ("rollout/ray_hosts.py", "rollout/ray_evaluate.py", "api/"),
    "envpool": ("envs/",),
    "gymnasium": ("envs/",),
    "orbax": ("checkpoint.py",),
}
MAPPERS = {"pmap", "shard_map"}


def imports(tree):
    """(dotted name, line, inside a function) of every import statement; `if TYPE_CHECKING` counts as any other."""
    found = []

    def visit(node, lazy):
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, lazy) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found.extend((f"{node.module}.{alias.name}", node.lineno, lazy) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, lazy)

    visit(tree, False)
    return found


def broken_arrows(package: Path) -> list[str]:
    """Every import that the rules forbid, as `file:line: room -> what`."""
    broken = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        room = path.split("/")[0].removesuffix(".py").removeprefix("__init__")
        tree = ast.parse(file.read_text())
        if room not in ARROWS:
            broken.append(f"{path}: {room} is a new room: say in ARROWS what it may import")
            continue
        allowed = ARROWS[room]
        for name, line, lazy in imports(tree):
            where = f"{path}:{line}: {room} -> "
            top, *rest = name.split(".")
            if top == "jrl":
                target = rest[0] if rest else ""
                ok = target == room or target in allowed or (lazy and target in LAZY_ARROWS.get(room, ()))
                ok = ok or ("*" in allowed and f"-{target}" not in allowed)
                ok = ok and (target != "api" or room == "api")  # nothing imports api
                if not ok:
                    broken.append(f"{where}jrl.{target}" + ("" if lazy else " (at module level)"))
                continue
            if top in sys.stdlib_module_names:
                continue
            if room in STDLIB_ONLY or top not in THIRD_PARTY.get(room, {top}):
                broken.append(f"{where}{top}: outside what {room} stands on")
            if room in THIRD_PARTY and top == "flax" and not name.startswith("flax.struct"):
                broken.append(f"{where}{name}: only flax.struct")
            if top in CONFINED:
                if not path.startswith(CONFINED[top]):
                    broken.append(f"{where}{top}: only in {' and '.join(CONFINED[top])}")
                elif not lazy:
                    broken.append(f"{where}{top}: only inside a function")
        if path != "parallel.py":
            # as a call: `jax.pmap(...)`, `shard_map(...)`; our own `parallel.pmap` is what others shall use
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr in MAPPERS:
                    owner = ast.unparse(node.value)
                    if owner != "parallel":
                        broken.append(f"{path}:{node.lineno}: {owner}.{node.attr}: only parallel.py maps over devices")
                if isinstance(node, ast.Name) and node.id in MAPPERS:
                    broken.append(f"{path}:{node.lineno}: {node.id}: only parallel.py maps over devices")
    return broken


def test_arrows():
    assert broken_arrows(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("ops/x.py", "from jrl import types", "ops -> jrl.types"),
        ("ops/x.py", "import optax", "ops -> optax"),
        ("errors.py", "import numpy", "errors -> numpy"),
        ("types.py", "import flax.linen", "types -> flax.linen"),
        ("algos/x.py", "from jrl.envs import make", "algos -> jrl.envs"),
        ("algos/x.py", "def f():\n    from jrl import loop", "algos -> jrl.loop"),
        ("rollout/x.py", "from jrl import algos", "rollout -> jrl.algos"),
        ("config.py", "from jrl import envs", "config -> jrl.envs (at module level)"),
        ("envs/x.py", "import envpool", "envs -> envpool: only inside a function"),
        ("metrics/x.py", "def f():\n    import orbax.checkpoint", "metrics -> orbax"),
        ("loop.py", "import jax\nf = jax.pmap(abs)", "jax.pmap: only parallel.py"),
        ("loop.py", "from jax import shard_map\nf = shard_map(abs)", "shard_map: only parallel.py"),
        ("train.py", "from jrl.api import x", "train -> jrl.api"),
        ("build.py", "from jrl import train", "build -> jrl.train"),
        ("shed/x.py", "", "shed is a new room"),
    ],
)
def test_a_forbidden_import_is_named(tmp_path, path, line, message):
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(line)
    broken = broken_arrows(tmp_path)
    assert len(broken) >= 1
    assert broken[0].startswith(path)
    assert message in broken[0]


def test_an_allowed_lazy_import_is_not_named(tmp_path):
    (tmp_path / "config.py").write_text("import jax\nfrom jrl import schema\ndef f():\n    from jrl import envs\n")
    assert broken_arrows(tmp_path) == []


def loaded(code: str) -> set[str]:
    """Top-level modules in sys.modules of a fresh process after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.splitlines()}


HEAVY = {"jax", "jaxlib", "flax", "optax", "envpool", "gymnasium", "orbax", "ray", "matplotlib", "tensorboardX", "rich"}


@pytest.mark.parametrize("command", ["train", "evaluate", "debug", "export", "record", "check_env"])
def test_help_loads_neither_jax_nor_an_environment_library(command):
    code = f"""
import contextlib, io, runpy, sys
sys.argv = ["jrl.{command}", "--help"]
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    runpy.run_module("jrl.{command}", run_name="__main__")
assert "usage: python -m jrl.{command}" in out.getvalue()
"""
    assert loaded(code) & HEAVY == set()


def test_the_help_of_every_command_as_one_command_loads_neither():
    code = """
import contextlib, io, sys
from jrl import __main__, command
sys.argv[0] = "jrl"
for argv in [["--help"], ["config", "list"], *([name, "--help"] for name in command.COMMANDS)]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        __main__.main(argv)
    assert "usage: jrl " in out.getvalue() or "ppo" in out.getvalue()
"""
    assert loaded(code) & HEAVY == set()


def test_an_algorithm_loads_no_environment_library():
    found = loaded("import jrl.algos.ppo")
    assert "jax" in found
    assert found & {"envpool", "gymnasium", "orbax", "ray", "matplotlib", "tensorboardX"} == set()


def test_environments_load_no_environment_library_and_of_envpool_one_family():
    code = """
import sys
import jrl.envs, jrl.build, jrl.hooks
assert not {name.partition(".")[0] for name in sys.modules} & {"envpool", "gymnasium", "orbax", "ray"}
from jrl.envs import envpool_env
compiled = lambda: {n for n in sys.modules if n.endswith("_envpool") and not n.startswith("envpool.python")}
assert len(envpool_env.ids()) > 1000 and compiled() == set()
assert envpool_env.check("CartPole-v1", {}) == []
assert compiled() == {"envpool.classic_control.classic_control_envpool"}
import envpool
assert not hasattr(envpool.toy_text, "NoSuchEnvSpec") and envpool.toy_text.CatchEnvSpec
assert len(compiled()) == 2 and envpool.toy_text.__loader__ is envpool.toy_text.__spec__.loader
"""
    assert loaded(code) & {"matplotlib", "ray", "orbax"} == set()
