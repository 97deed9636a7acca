"""EnvPool's families of tasks are loaded when something of them is asked for."""

import sys

import pytest

from jrl import envs
from jrl.envs import envpool_env


def family(path, code):
    """A package `envpool.broken` that holds `code`, as `import envpool` would find it."""
    (path / "envpool" / "broken").mkdir(parents=True)
    (path / "envpool" / "broken" / "registration.py").write_text("")
    (path / "envpool" / "broken" / "__init__.py").write_text(code)
    spec = envpool_env._Families().find_spec("envpool.broken", [str(path / "envpool")])
    module = envpool_env.importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_family_that_cannot_be_loaded_says_why_each_time(tmp_path):
    module = family(tmp_path, "import no_such_package")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_package"):
            module.CartPoleEnvSpec  # noqa: B018


def test_a_family_is_loaded_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "loaded", [], raising=False)
    module = family(tmp_path, "import sys\nsys.loaded.append(1)\nSpec = 3")
    assert sys.loaded == [] and module.Spec == 3 and module.Spec == 3 and sys.loaded == [1]
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        module.Other  # noqa: B018


@pytest.mark.parametrize(
    ("backend", "num_envs", "inside"), [("cpu", 65, True), ("gpu", 64, True), ("gpu", 65, False), ("tpu", 1, False)]
)
def test_where_a_pool_is_stepped(monkeypatch, backend, num_envs, inside):
    """An accelerator has few of EnvPool's environments in its programs; others are stepped from the host."""
    monkeypatch.setattr(envpool_env.jax, "default_backend", lambda: backend)
    env = envs.make("CartPole-v1", backend="envpool", num_envs=num_envs)
    assert hasattr(env, "pure") == inside
    env.close()
