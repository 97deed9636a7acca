"""The pages and docstrings say what is true: links lead somewhere, named keys and configs exist, examples run."""

import dataclasses
import doctest
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import jax
import pytest

from jrl import algos, envs
from jrl.config import sections
from jrl.envs import multi_agent
from jrl.fields.hyper import NetworkConfig
from jrl.rollout import unroll

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"])
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def _anchor(heading: str) -> str:
    """The fragment of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, fragment in _LINK.findall(page.read_text()):
        if target.startswith("http"):
            continue
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page.name}: {target}"
        if fragment and file.suffix == ".md":
            headings = [_anchor(line.lstrip("#")) for line in file.read_text().splitlines() if line.startswith("#")]
            assert fragment[1:] in headings, f"{page.name}: {target}{fragment}"


def _keys() -> dict[str, set[str]]:
    """The keys of each section that a config can have."""
    found = {f.name: f.type for f in dataclasses.fields(sections.RunConfig)}
    keys = {
        name: {f.name for f in dataclasses.fields(kind)}
        for name, kind in vars(sections).items()
        if dataclasses.is_dataclass(kind)
    }
    of_kind = lambda kind: next(found for found in (kind, *get_args(kind)) if dataclasses.is_dataclass(found))
    by_section = {
        section: keys[kind.split(" ")[0]] if isinstance(kind, str) else keys[of_kind(kind).__name__]
        for section, kind in found.items()
        if section not in ("algo", "network", "replay", "stop")
    }
    by_section["replay"] = {f.name for f in dataclasses.fields(sections.ReplayConfig)}
    by_section["network"] = {f.name for f in dataclasses.fields(NetworkConfig)}
    configs = [algos.get_config_class(name) for name in algos.names()]
    by_section["algo"] = {"name"} | {f.name for config in configs for f in dataclasses.fields(config)}
    return by_section


def test_keys_that_pages_name_exist():
    """`section.key` in backquotes or after --set is a key of that section."""
    keys = _keys()
    named = re.compile(rf"(?:`|--set )({'|'.join(keys)})\.([a-z_]+)(?![\w(/])(?!\.(?:py|jsonl|yaml|md))")
    wrong = []
    for page in PAGES:
        for section, key in named.findall(page.read_text()):
            if key not in keys[section] and f"{section}.{key}" not in _NOT_KEYS:
                wrong.append(f"{page.name}: {section}.{key}")
    assert not wrong


# names of the Python surface and of other tools, and mistakes that a page shows
_NOT_KEYS = {
    *("algo.lerning_rate", "algo.workers", "algo.config", "algo.logdir", "rollout.mask", "run.program", "run.lock"),
    *(
        "network.orthogonal",
        "data.__main__",
        "env.json",
        "env.set_task",
        "env.spec",
        "replay.ring",
        "replay.prioritized",
    ),
    *("checkpoint.json", "checkpoint.py", "rollout.extras"),
}


def test_configs_and_modules_that_pages_name_exist():
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(r"\b((?:configs|scripts|examples|tests)/[\w/]+\.(?:yaml|py))", text):
            assert (ROOT / name).exists() or Path(name).stem.isupper(), f"{page.name}: {name}"
        for module in re.findall(r"python -m (jrl\.\w+)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name}: {module}"


def test_what_pages_and_messages_install_is_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = {path: path.read_text() for path in [*PAGES, *(ROOT / "jrl").rglob("*.py")]}
    named = {name for text in texts.values() for name in re.findall(r"\bjrl\[(\w+)\]", text)}
    assert named <= set(extras) and {"tensorboard", "data", "report"} <= named
    # the page that shows a command of another package says how to install it
    for page in PAGES:
        assert "tensorboard --logdir" not in texts[page] or 'pip install "jrl[tensorboard]"' in texts[page], page.name
    required = {extra: {re.split(r"[^\w-]", one)[0] for one in extras[extra]} for extra in extras}
    for extra in ("gymnax", "dev"):
        assert {"gymnax", "six"} <= required[extra]  # gymnax imports six and does not require it
    for extra in ("pettingzoo", "dev"):  # pettingzoo brings pygame-ce, whose files those of pygame would overwrite
        assert "pygame-ce" in required[extra] and "pygame" not in required[extra]


_WITH_EXAMPLES = sorted(path for path in (ROOT / "jrl").rglob("*.py") if ">>> " in path.read_text())


@pytest.mark.parametrize("path", _WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_docstrings(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed


def _snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_training_run_of_functions(compiled):
    """docs/from-cleanrl.md as written; without compilation, only its shapes."""
    names: dict = {}
    snippet = _snippets("from-cleanrl.md")[0]
    exec(snippet if compiled else snippet.replace("jax.jit(grid)(", "jax.eval_shape(grid, "), names)
    assert names["returns"].shape == (2, 2, 20)
    assert not compiled or (names["returns"][1, :, -1] > 20 + names["returns"][0, :, -1]).all()  # the larger rate


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_functions_of_the_readme(compiled):
    """As written; without compilation, only the shapes."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    snippet = next(block for block in blocks if "unroll" in block)
    assert snippet.count("\nreturns = jax.jit(") == 2
    snippet = snippet.replace("\nreturns = ", "\none = ", 1)  # both are looked at
    if not compiled:
        snippet = snippet.replace("= jax.jit(train)(", "= jax.eval_shape(train, ")
        snippet = snippet.replace("= jax.jit(jax.vmap(train))(", "= jax.eval_shape(jax.vmap(train), ")
    names: dict = {}
    exec(snippet, names)
    assert names["one"].shape == (40,) and names["returns"].shape == (8, 40)
    assert not compiled or min(names["one"][-1], *names["returns"][:, -1]) > 60  # 20 at random


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_snippets_of_algorithms_as_functions(compiled):
    """As written; without compilation, only the shapes."""
    names: dict = {}
    shapes = []
    for block in _snippets("functions.md"):
        call = re.search(r"\ncurves? = jax\.jit\((.*)\)\((.*?)\)(  #.*)?\n", block)
        assert call is not None
        if not compiled:
            block = block.replace(call[0], f"\ncurve = jax.eval_shape({call[1]}, {call[2]})\n")
        exec(block, names)
        shapes.append(names["curves" if compiled and "curves" in names else "curve"].shape)
    assert shapes == [(20,), (20,), (20,), (4, 8, 20)]
    assert not compiled or jax.numpy.isfinite(names["curves"][..., -1]).all()


def test_the_loop_of_from_torchrl():
    """docs/from-torchrl.md: an iteration as written, for its shapes."""
    names: dict = {}
    exec(_snippets("from-torchrl.md")[0].partition("\nstate, envs =")[0].replace("@jax.jit\n", ""), names)
    start = lambda key: (names["algo"].init(key), names["collect"].init(key), key)
    state, envs, metrics = jax.eval_shape(lambda key: names["iteration"](*start(key)), jax.random.key(0))
    assert (state, envs) == jax.eval_shape(start, jax.random.key(0))[:2] and metrics["policy/entropy"].shape == ()


def test_the_snippets_of_your_own_algorithm(capsys):
    names: dict = {}
    for block in _snippets("own-algorithm.md"):
        exec(block, names)
    assert capsys.readouterr().out == "('init', 'actor', 'carry', 'act', 'update', 'data', 'ingest')\n"
    loss, metrics = names["with_weight_decay"](lambda p, b: (1.0, {}), None, {"w": jax.numpy.full(3, 2.0)}, None)
    assert abs(float(loss) - (1.0 + 12e-4)) < 1e-6 and float(metrics["loss/decay"]) == 12.0


def test_the_race_of_several_agents():
    """docs/environments.md: who arrives leaves with 1, the other goes on; 9 steps without draws, at least 5 with."""
    names: dict = {}
    exec(next(block for block in _snippets("environments.md") if "MultiDefinition" in block), names)
    env = multi_agent.build(names["race"](), 4)
    state, _ = env.reset(jax.random.key(0))
    step, action = jax.jit(env.step), jax.numpy.tile(jax.numpy.array([1, 0], "int32"), 4)
    rewards, over = jax.numpy.zeros(8), 0
    for t in range(30):
        state, result = step(state, action, jax.random.key(t))
        assert t > 3 or not result.terminated.any()
        first = over == 0
        rewards, over = rewards + first * result.reward, over + result.several.over.repeat(2)
    assert (over > 0).all() and (rewards == 1).all()


@pytest.mark.slow
def test_the_quick_start_as_written(tmp_path):
    """Its environment, its command for it, and the object loop; one process each, as a newcomer would."""
    walk, use, objects = _snippets("quickstart.md")
    (tmp_path / "walk.py").write_text(walk)
    train = [sys.executable, "-m", "jrl.train", "--algo", "ppo", "--env", "walk:Walk", "--set", "env.horizon=100"]
    train += ["--stop", "env_steps=2000", "--out", "runs/walk"]
    env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    run = subprocess.run(train, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    played = use.replace("terminated or truncated", "True")  # a step: so short a training may not reach the end
    run = subprocess.run([sys.executable, "-c", played], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0 and float(run.stdout) == -0.01, run.stderr
    compile(objects, "quickstart.md", "exec")


def test_the_algorithm_of_your_own_is_one():
    """examples/reinforce.py: an iteration of it has the shapes of any other's."""
    reinforce = algos.get("examples.reinforce")
    env = envs.make("CartPole-v1", backend="jax", num_envs=4)
    algo = reinforce.make(reinforce.Config(), env.spec)
    collect = unroll.make(env, algo.act, length=8)

    def iteration(key):
        state = algo.init(key)
        _, rollout, _ = collect.step(collect.init(key), algo.actor(state), key)
        return state, *algo.update(state, rollout, key)

    before, after, aux = jax.eval_shape(iteration, jax.random.key(0))
    assert before == after and {"loss/policy", "loss/value", "value/target"} <= set(aux.metrics)


@pytest.mark.slow
def test_reinforce_learns():
    """Two of three seeds reach 150 on CartPole-v1 within 200k steps: docs/own-algorithm.md."""
    reached = 0
    for seed in range(3):
        command = f"-m jrl.train --algo examples.reinforce --env CartPole-v1 --set run.seed={seed} --as-test"
        command += " --set rollout.length=32 --stop env_steps=200000 --stop episode/return=150"
        reached += subprocess.run([sys.executable, *command.split()], cwd=ROOT).returncode == 0
    assert reached >= 2
