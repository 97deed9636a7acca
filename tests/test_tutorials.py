"""Tutorials: pages and notebooks are those of the scripts, and each notebook runs and shows what its page says."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jrl import algos

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
tutorials = importlib.import_module("tutorials")
sys.path.remove(str(ROOT / "scripts"))


@pytest.mark.parametrize("name", tutorials.names())
def test_page_and_notebook_are_in_step_with_the_script(name):
    """Otherwise: python scripts/tutorials.py --write NAME"""
    cells = tutorials.read_cells(name)
    assert (tutorials.PAGES / f"{name}.ipynb").read_text() == tutorials.notebook_text(cells)
    text = (tutorials.PAGES / f"{name}.md").read_text()
    assert tutorials.without_outputs(text) == tutorials.page(name, cells, [[] for _ in cells])[0]
    pictures = set(re.findall(r"!\[output\]\((.+)\)", text))
    assert pictures == {path.name for path in tutorials.PAGES.glob(f"{name}-*.png")}
    assert all((tutorials.PAGES / picture).stat().st_size < 40_000 for picture in pictures)
    printed = re.findall(r"(?s)```text\n(.*?)```", text)
    assert printed and not any("Traceback" in part or str(ROOT) in part for part in printed)


def test_every_tutorial_is_listed():
    named = set(re.findall(r"\]\((\w+)\.md\)", (tutorials.PAGES / "index.md").read_text()))
    assert named == set(tutorials.names()) == {p.stem for p in tutorials.PAGES.glob("*.md")} - {"index"}
    assert len(named) == 7 and {p.stem for p in tutorials.PAGES.glob("*.ipynb")} == named


def test_a_script_that_has_no_cells_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tutorials, "SOURCES", tmp_path)
    (tmp_path / "one.py").write_text("import jax\n# %%\n")
    with pytest.raises(ValueError, match="text before the first cell"):
        tutorials.read_cells("one")
    (tmp_path / "two.py").write_text("# %% [markdown]\n# prose\nx = 1\n")
    with pytest.raises(ValueError, match="prose that is not a comment: 'x = 1'"):
        tutorials.read_cells("two")


@pytest.mark.slow
@pytest.mark.parametrize("name", tutorials.names())
def test_notebook_runs(name, tmp_path):
    """In a kernel; an exception of a cell fails the test."""
    cells = tutorials.read_cells(name)
    outputs = tutorials.execute(cells, tmp_path)
    assert "".join(part.content for found in outputs for part in found if isinstance(part.content, str))


_TWO_INTERRUPTIONS = """
import os, signal, sys, threading, time, types
sys.modules["ipykernel.kernelapp"] = types.ModuleType("kernel")  # as in a notebook
from jrl.host.interruption import watch_signals

def interrupt():
    for _ in range(2):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    with watch_signals():
        time.sleep(20)
except KeyboardInterrupt:
    print("the cell ended")
print("the kernel lives")
"""


def test_two_interruptions_leave_the_kernel_of_a_notebook_alive():
    found = subprocess.run([sys.executable, "-c", _TWO_INTERRUPTIONS], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.splitlines() == ["the cell ended", "the kernel lives"] and found.returncode == 0


def test_the_algorithm_of_a_notebook_has_a_name():
    assert algos.is_own("__main__") and not algos.is_own("__other__")


def test_a_notebook_shows_a_plot(tmp_path):
    """jrl.plot takes a single path, too, and returns a path that a notebook shows."""
    from jrl import plot

    lines = [json.dumps({"env_steps": 100 * n, "episode/return": float(n)}) for n in range(1, 4)]
    (tmp_path / "result.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.yaml").write_text("algo: {name: ppo}\nenv: {id: CartPole-v1}\n")
    picture = plot.plot(str(tmp_path))
    assert picture == tmp_path / "learning_curve.png" and picture._repr_png_().startswith(b"\x89PNG")
