"""Settings of the whole session, made before jax is imported: four devices, strict ranks, a compile cache.

Many un-blocked multi-device programs with collectives deadlock on two cores: block on the result of every such call.
"""

import gc
import math
import os
import shutil
import threading
from importlib.metadata import version
from pathlib import Path

_DEVICES = "xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_DEVICES}=4".strip()
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # most of the suite's time goes into compiling small programs that run once: a third of it
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10."):  # flags come and go, and an unknown one ends the process
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] += " --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the forced devices are the host's

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# A key is the program, its flags and the versions: an entry can only be the program that would have been compiled.
_CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path(__file__).parent.parent / ".cache" / "tests")
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones, too: thousands, of every module
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _share_contexts():
    """Lets what a thread lowers share an MLIR context: one of its own took 2 ms, of a suite of 17,000 programs."""
    from jax._src.interpreters import mlir

    make, mine = mlir.make_ir_context, threading.local()

    def context():
        if mlir.ir.Context.current is not None:  # a lowering rule runs a program of its own
            return make()
        mine.uses = getattr(mine, "uses", -1) + 1
        if mine.uses % 200 == 0:  # it never forgets a constant
            mine.context = make()
        return mine.context

    mlir.make_ir_context = context


if version("jax").startswith("0.10."):  # no public name
    _share_contexts()


# files of few tests that take a minute together: handed out first, or a worker is left alone with them at the end
_LONG = (
    "test_ray_hosts", "test_schedulers", "test_seeds", "test_population", "test_pairs", "test_train_replay",
    "test_several_agents", "test_by_episode", "test_resume", "test_loop", "test_games_collected",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Puts the long files first (with --no-loadscope-reorder of xdist, which would begin with those of most tests)."""
    items.sort(key=lambda item: item.path.stem not in _LONG)


def pytest_collection_finish(session):
    """Ends the garbage collector's walks, a tenth of the time: what a module leaves is collected behind it."""
    gc.collect()
    gc.freeze()
    gc.disable()


@pytest.fixture(scope="session")
def browser():
    """Chromium by Playwright; who asks for it is skipped where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason="no browser's driver: pip install playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
    with driver.sync_playwright() as found:
        opened = found.chromium.launch(executable_path=path, args=flags)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def four_devices():
    """A mesh of four devices."""
    from jrl.learn import parallel

    assert len(jax.devices()) >= 4, f"XLA_FLAGS must give four devices: {os.environ['XLA_FLAGS']}"
    return parallel.make_mesh(4)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Programs and traces of a module are of no use to the next: kept, they are gigabytes to look through."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def programs_not_kept():
    """Nothing is written to the compile cache: with `xla_cpu_use_fusion_emitters=false`, which no run sets, XLA of jax
    0.10.2 crashes in a fused program of several devices that it reads from there."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    yield
    jax.config.update(name, before)


@pytest.fixture(scope="module")
def built_once():
    """Runs of the module that ask for it by `pytestmark` share what is compiled: see tests/built_once.py."""
    import built_once

    from jrl.learn.population import Population
    from jrl.run import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "run", built_once.kept(build.run))
        patch.setattr(Population, "_deal", built_once.dealt(Population._deal))
        yield


@pytest.fixture(scope="session", autouse=True)
def _runs_without_pictures():
    """A run plans its pictures and leaves empty files: to draw one takes a tenth of a second."""
    from jrl.metrics import plots

    own = plots.save

    def save(figure, png):
        if Path(png).name not in ("learning_curve.png", "league.png"):
            return own(figure, png)
        Path(png).write_bytes(b"")
        return Path(png)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save", save)
        yield own


@pytest.fixture
def own_pictures(_runs_without_pictures, monkeypatch):
    """Runs draw their pictures: for tests of that."""
    from jrl.metrics import plots

    monkeypatch.setattr(plots, "save", _runs_without_pictures)


@pytest.fixture(autouse=True)
def _typed_by_module(monkeypatch):
    """Commands are told as `python -m jrl.X` in each test, whatever was typed in the one before."""
    from jrl.host import command

    monkeypatch.setattr(command, "_prefix", command.MODULE)
