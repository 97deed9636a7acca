"""Settings of the whole session, made before jax is imported: four devices, strict ranks, a compile cache.

They are settings that a user can make too. Nothing of jrl or jax is replaced here: the suite runs what ships.
Many un-blocked multi-device programs with collectives deadlock on two cores: block on the result of every such call.
"""

import os
import shutil
from pathlib import Path

_DEVICES = "xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_DEVICES}=4".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the forced devices are the host's

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# A key is the program, its flags and the versions: an entry can only be the program that would have been compiled.
_CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path(__file__).parent.parent / ".cache" / "tests")
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones, too: thousands, of every module
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# files of few tests that take a minute together: handed out first, or a worker is left alone with them at the end
_LONG = (
    "test_contract", "test_train", "test_schedulers", "test_seeds", "test_population", "test_train_replay",
    "test_several_agents", "test_by_episode", "test_self_play", "test_resume", "test_loop", "test_games_collected",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Puts the long files first (with --no-loadscope-reorder of xdist, which would begin with those of most tests)."""
    items.sort(key=lambda item: item.path.stem not in _LONG)


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


@pytest.fixture(autouse=True)
def _typed_by_module(monkeypatch):
    """Commands are told as `python -m jrl.X` in each test, whatever was typed in the one before."""
    from jrl.host import command

    monkeypatch.setattr(command, "_prefix", command.MODULE)
