"""Who may import whom: every import statement of every module, and what a command or a module really loads."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jrl

PACKAGE = Path(jrl.__file__).parent if jrl.__file__ else Path(next(iter(jrl.__path__)))

# room -> rooms of jrl it may import, by first name below jrl; its own room always. A room stands on those above it
ARROWS = {
    "errors": set(),
    "ops": set(),
    "fields": {"errors"},
    "registry": {"errors"},
    "types": {"errors", "fields"},
    "spaces": {"errors", "types"},
    "spaces_json": {"errors", "types"},
    "host": {"errors", "fields"},
    "data": {"errors", "fields", "host", "spaces", "spaces_json", "types"},
    "distributions": {"ops", "spaces", "types"},
    "networks": {"errors", "fields", "ops", "registry", "spaces", "types"},
    "algos": {"distributions", "errors", "fields", "networks", "ops", "registry", "spaces", "types"},
    "replay": {"errors", "ops", "types"},
    "gym": {"errors"},
    "envs": {"errors", "fields", "gym", "host", "ops", "registry", "spaces", "types"},
    "metrics": {"errors", "fields", "host", "ops", "registry", "spaces", "types"},
    "report": {"errors", "fields", "metrics"},
    "rollout": {"data", "envs", "errors", "host", "metrics", "ops", "spaces", "types"},
    "callbacks": {"errors", "registry", "rollout"},
    "config": {"errors", "fields", "host", "registry"},
    "learn": {"errors", "fields", "host", "metrics", "ops", "rollout", "spaces", "types"},
    "agents": {
        "algos", "config", "envs", "errors", "host", "learn", "metrics", "ops", "registry", "rollout", "spaces",
        "types",
    },
    "play": {
        "agents", "algos", "config", "data", "envs", "errors", "fields", "host", "learn", "metrics",
        "registry", "rollout", "run", "run.store", "spaces", "types",
    },
    "run.store": {"agents", "config", "errors", "fields", "host", "learn", "metrics", "replay", "spaces_json", "types"},
    "run": {
        "agents", "algos", "callbacks", "config", "data", "envs", "errors", "fields", "host", "learn", "metrics",
        "ops", "play", "registry", "replay", "rollout", "run.store", "spaces", "spaces_json", "types",
    },
    "sweep": {"config", "errors", "fields", "host", "metrics", "report", "run", "run.store"},
    "serve": {
        "agents", "algos", "config", "distributions", "envs", "errors", "export", "fields", "host", "metrics", "play",
        "rollout", "run", "run.store", "spaces", "spaces_json", "types",
    },
    "serve.__main__": {"config", "errors", "fields", "host", "serve", "train"},
    "sweep.__main__": {"config", "config.__main__", "errors", "fields", "host", "sweep"},
    "export": {"config", "errors", "fields", "host", "play", "rollout", "spaces", "spaces_json", "types"},
    "importer": {"config", "data", "errors", "fields", "host", "learn", "ops", "run", "run.store", "types"},
    "auto": {"config", "errors", "fields", "host"},
    "zoo": {"errors", "fields", "host"},
    # the commands that a user types; what is slow to import inside functions
    "": {"envs", "play"},
    "__main__": {"errors", "host"},  # and the module of the command that was typed
    "config.__main__": {"config", "errors", "fields", "host"},
    "train": {"config", "config.__main__", "errors", "fields", "host", "run", "run.store"},
    "evaluate": {"errors", "host"},
    "record": {"errors", "fields", "host"},
    "plot": {"errors", "fields", "host", "metrics", "report"},
    "report.__main__": {"errors", "fields", "host", "report"},
    "reproduce": {"errors", "fields", "host"},
    "check_env": {"errors", "host"},
    "data.__main__": {"data", "errors", "fields", "host", "spaces_json"},
    "debug": {"errors", "fields", "host", "run", "run.store", "types"},
    "docs": {"errors", "host"},
    # what RLlib's users know, with its names jrl.api and jrl.migrate
    "rllib": {
        "algos", "callbacks", "config", "data", "envs", "errors", "fields", "host", "metrics", "play", "registry",
        "rollout", "run", "run.store", "types",
    },
}  # fmt: skip
# allowed inside a function only
LAZY_ARROWS = {
    "": {"host", "rllib"},
    "auto": {"envs", "metrics", "networks", "run", "spaces", "types"},
    "callbacks": {"metrics"},
    "config": {"algos"},
    "config.__main__": {"rllib", "run", "sweep"},
    "train": {"auto", "metrics", "sweep"},
    "evaluate": {"config", "play", "rllib", "run", "run.store"},
    "record": {"play", "run"},
    "reproduce": {"config", "metrics", "report", "report.__main__", "train"},
    "check_env": {"envs", "fields"},
    "debug": {"agents", "config"},
    "rllib": {"export"},
    "zoo": {"evaluate", "record"},
    "data.__main__": {"run"},
}

# libraries of a room, beside the standard library; the rooms that are not listed may import any of `REQUIRED`
STDLIB_ONLY = {"errors", "__main__"}
THIRD_PARTY = {
    "fields": {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "yaml"},
    "ops": {"jax", "flax"},  # flax.struct makes a pytree of a dataclass
    "types": {"jax", "flax", "numpy"},
    "gym": {"numpy", "gymnasium", "pettingzoo"},  # what worker processes import
}
# modules that are copied without the others
ALONE = ("serve/client.py", "export/interpreter.py")
# library -> where it may be imported, and then inside a function
CONFINED = {
    "ray": ("rollout/runner_group.py", "rllib/"),
    "envpool": ("envs/",),
    "gymnasium": ("envs/", "gym/", "data/formats/minari.py"),
    "orbax": ("run/store/checkpoint.py",),
    "starlette": ("serve/",),
    "uvicorn": ("serve/",),
}
EAGER = {"starlette", "uvicorn"}  # of these: libraries that may be imported at module level there
# of a room that is a command, too: the modules of the command
COMMANDS_IN_ROOMS = {
    "config.__main__": ("config/__main__/", "config/argument/"),
    "data.__main__": ("data/__main__/", "data/commands/"),
    "report.__main__": ("report/__main__/",),
    "sweep.__main__": ("sweep/__main__/",),
    "serve.__main__": ("serve/__main__/",),
}
# packages that only give another room's names to users
OTHER_NAMES = {"api": "rllib", "migrate": "rllib"}
MAPPERS = {"pmap", "shard_map"}


def is_module(name):
    """Whether a text is the dotted name of a module or room of jrl."""
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return bool(re.fullmatch(r"jrl(\.\w+)+", name)) and (path.with_suffix(".py").is_file() or path.is_dir())


def imports(tree):
    """(dotted name, line, inside a function) of every import statement; `if TYPE_CHECKING` counts as any other.

    So does a text that names a module of jrl or a part of it, which is imported when it is needed; what follows "-m" is
    run by a process of its own.
    """
    lists = [node.elts for node in ast.walk(tree) if isinstance(node, ast.List)]
    run = {id(x) for elts in lists for m, x in itertools.pairwise(elts) if getattr(m, "value", None) == "-m"}
    found = []

    def visit(node, lazy):
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, lazy) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found.extend((f"{node.module}.{alias.name}", node.lineno, lazy) for alias in node.names)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in run:
            module = node.value.partition(":")[0]  # "jrl.envs.classic:cartpole"
            if is_module(module):
                found.append((module, node.lineno, True))
        for child in ast.iter_child_nodes(node):
            visit(child, lazy)

    visit(tree, False)
    return found


def room_of(path: str) -> str:
    """The room of a module, given as its path below jrl without `.py`."""
    own = [room for room, modules in COMMANDS_IN_ROOMS.items() if f"{path}/".startswith(modules)]
    first = path.split("/")[0].removeprefix("__init__")
    if path.startswith("run/store"):
        return "run.store"
    return own[0] if own else OTHER_NAMES.get(first, first)


def broken_arrows(package: Path, used: set[tuple[str, str]] | None = None) -> list[str]:
    """Every import that the rules forbid, as `file:line: room -> what`; `used` gets the arrows between rooms."""
    broken = []
    used = set() if used is None else used
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        room = room_of(path.removesuffix(".py"))
        tree = ast.parse(file.read_text())
        if room not in ARROWS:
            broken.append(f"{path}: {room} is a new room: say in ARROWS what it may import")
            continue
        allowed = ARROWS[room]
        for name, line, lazy in imports(tree):
            where = f"{path}:{line}: {room} -> "
            top, *rest = name.split(".")
            if path in ALONE and top not in {"numpy", *sys.stdlib_module_names}:
                broken.append(f"{where}{top}: {path} needs numpy alone")
            if top == "jrl":
                target = room_of("/".join(rest))
                ok = target == room or target in allowed or (lazy and target in LAZY_ARROWS.get(room, ()))
                used.add((room, target))
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
                elif not lazy and top not in EAGER:
                    broken.append(f"{where}{top}: only inside a function")
        if path != "learn/parallel.py":
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
    """Every import follows the table, and every arrow of the table is followed."""
    used = set()
    assert broken_arrows(PACKAGE, used) == []
    allowed = {(room, target) for table in (ARROWS, LAZY_ARROWS) for room, found in table.items() for target in found}
    assert allowed - used == set()


def test_no_circle():
    """No file imports itself through others; imports inside functions and for type checkers count."""
    name_of = lambda file: ".".join(("jrl", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    files = {name_of(file): ast.walk(ast.parse(file.read_text())) for file in PACKAGE.rglob("*.py")}
    nearest = lambda module, name: f"{module}.{name}" if f"{module}.{name}" in files else module
    left = {
        own: {
            target
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if (target := nearest(node.module, alias.name)) in files and target not in (own, "jrl")
        }
        for own, nodes in files.items()
    }
    ends = True
    while ends:  # files that import nothing that is left, and those that nothing left imports
        imported = set().union(*left.values())
        ends = {own for own, below in left.items() if not below & left.keys() or own not in imported}
        left = {own: below for own, below in left.items() if own not in ends}
    assert not left.keys()


def test_few_modules_lie_flat():
    """The nouns that all share, and the commands that a user types."""
    assert len(list(PACKAGE.glob("*.py"))) <= 15
    assert all(
        (folder / "__init__.py").read_text().startswith('"""')
        for folder in PACKAGE.iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    )


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("ops/x.py", "from jrl import types", "ops -> jrl.types"),
        ("ops/x.py", "import optax", "ops -> optax"),
        ("errors.py", "import numpy", "errors -> numpy"),
        ("types.py", "import flax.linen", "types -> flax.linen"),
        ("algos/x.py", "from jrl.envs import make", "algos -> jrl.envs"),
        ("algos/x.py", "def f():\n    from jrl import run", "algos -> jrl.run"),
        ("rollout/x.py", "from jrl import algos", "rollout -> jrl.algos"),
        ("config/x.py", "from jrl import algos", "config -> jrl.algos (at module level)"),
        ("envs/x.py", "import envpool", "envs -> envpool: only inside a function"),
        ("metrics/x.py", "def f():\n    import orbax.checkpoint", "metrics -> orbax"),
        ("learn/program.py", "import jax\nf = jax.pmap(abs)", "jax.pmap: only parallel.py"),
        ("learn/program.py", "from jax import shard_map\nf = shard_map(abs)", "shard_map: only parallel.py"),
        ("train.py", "from jrl.api import x", "train -> jrl.rllib"),
        ("run/build.py", "from jrl import train", "run -> jrl.train"),
        ("data/x.py", "from jrl.data import commands", "data -> jrl.data.__main__"),
        ("data/commands.py", "from jrl import networks", "data.__main__ -> jrl.networks"),
        ("serve/client.py", "from jrl import types", "serve/client.py needs numpy alone"),
        ("report/x.py", "import starlette", "report -> starlette: only in serve/"),
        ("ops/x.py", 'import importlib\nf = importlib.import_module("jrl.envs.make")', "ops -> jrl.envs"),
        ("shed/x.py", "", "shed is a new room"),
    ],
)
def test_a_forbidden_import_is_named(tmp_path, path, line, message):
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text(line)
    broken = broken_arrows(tmp_path)
    assert len(broken) >= 1
    assert broken[0].startswith(path)
    assert message in broken[0]


def test_an_allowed_lazy_import_is_not_named(tmp_path):
    (tmp_path / "config").mkdir()
    text = "import yaml\nfrom jrl import fields\ndef f():\n    from jrl import algos\n"
    (tmp_path / "config" / "x.py").write_text(text)
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


HEAVY = {"jax", "jaxlib", "flax", "optax", "envpool", "gymnasium", "orbax", "ray", "matplotlib", "tensorboardX", "rich",
         "starlette", "uvicorn"}  # fmt: skip


@pytest.mark.parametrize(
    "command",
    ["train", "evaluate", "debug", "export", "record", "check_env", "data", "docs", "report", "sweep", "serve"],
)
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
from jrl import __main__
from jrl.data import commands
from jrl.host import command
sys.argv[0] = "jrl"
for argv in [["--help"], ["config", "list"], *([name, "--help"] for name in command.COMMANDS),
             *(["data", name, "--help"] for name in commands.COMMANDS)]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        __main__.main(argv)
    assert "usage: jrl " in out.getvalue() or "ppo" in out.getvalue()
"""
    assert loaded(code) & HEAVY == set()


def test_a_run_loads_few_modules_of_jrl(tmp_path):
    """A newcomer meets few files between the command and PPO's gradient: the optional parts are imported on demand."""
    argv = ["jrl.train", "ppo", "--stop", "env_steps=2000", "--out", str(tmp_path / "run")]
    code = f"""
import contextlib, runpy, sys
sys.argv = {argv!r}
with contextlib.suppress(SystemExit):
    runpy.run_module("jrl.train", run_name="__main__")
print(*(name for name in sys.modules if name.partition(".")[0] == "jrl"), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "jrl.algos.ppo" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()[-1].split()) <= 108


def test_an_algorithm_loads_no_environment_library():
    found = loaded("import jrl.algos.ppo")
    assert "jax" in found
    assert found & {"envpool", "gymnasium", "orbax", "ray", "matplotlib", "tensorboardX"} == set()


def test_environments_load_no_environment_library_and_of_envpool_one_family():
    code = """
import sys
import jrl.envs, jrl.run.build, jrl.run.reporter
assert not {name.partition(".")[0] for name in sys.modules} & {"envpool", "gymnasium", "orbax", "ray"}
from jrl.envs import envpool_env
compiled = lambda: {n for n in sys.modules if n.endswith("_envpool") and not n.startswith("envpool.python")}
assert len(envpool_env.ids()) > 1000 and compiled() == set()
assert jrl.envs.check("CartPole-v1", backend="envpool") == []
assert compiled() == {"envpool.classic_control.classic_control_envpool"}
import envpool
assert not hasattr(envpool.toy_text, "NoSuchEnvSpec") and envpool.toy_text.CatchEnvSpec
assert len(compiled()) == 2 and envpool.toy_text.__loader__ is envpool.toy_text.__spec__.loader
"""
    assert loaded(code) & {"matplotlib", "ray", "orbax"} == set()
