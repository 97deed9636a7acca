"""Spaces from a run or a checkpoint."""

import shutil

import pytest
import serving
from saved import save_games

from jrl import config
from jrl.envs import client_spaces
from jrl.errors import InputError
from jrl.run import build_collect
from jrl.run.store import checkpoint


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    """A run with actions in [-2, 2], which its policy scales to [-1, 1]."""
    out = tmp_path_factory.mktemp("runs") / "pendulum"
    env = {"id": "Pendulum-v1", "backend": "jax", "num_envs": 2}
    save_games(out, algo={"name": "ppo"}, env=env, stop={"env_steps": 16})
    return out


def of(path, **external):
    given = {"observation": None, "action": None, "spaces": str(path), **external}
    return serving.settings(external=given, env={"normalize_actions": True})


def test_spaces_are_those_of_the_runs_environment(pendulum):
    like = config.from_dict({"algo": {"name": "ppo"}, "env": {"id": "Pendulum-v1", "num_envs": 2}, "external": {}})
    expected = build_collect.make_vectors(like, 1, 0)[0].spec._replace(max_episode_steps=None)
    assert expected.env_action is not None
    for path in (pendulum, checkpoint.locate(pendulum)):
        assert build_collect.make_vectors(of(path), 1, 0)[0].spec == expected


def test_a_missing_run_has_one_clear_error(pendulum, tmp_path):
    of_path = lambda path: build_collect.make_vectors(of(path), 1, 0)[0]
    with pytest.raises(InputError, match=r"external\.spaces: .*nowhere does not exist"):
        of_path(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"external\.spaces: .*empty holds no complete checkpoint"):
        of_path(tmp_path / "empty")
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint.locate(pendulum), damaged)
    (damaged / checkpoint.FILE).write_text('{"format": 1}')
    with pytest.raises(InputError, match=r"external\.spaces: .*damaged"):
        of_path(damaged)
    with pytest.raises(InputError, match=r"leave out external\.action, or external\.spaces"):
        of(pendulum, action={"discrete": 2})


def test_agents_and_their_spaces_are_read(pendulum, monkeypatch):
    spec = client_spaces.build_spec({"box": [3]}, {"a": {"discrete": 2}, "b": {"box": [1]}}, 2, agents=("a", "b"))
    monkeypatch.setattr(checkpoint, "read_spec", lambda meta: spec)
    found = build_collect.make_vectors(of(pendulum), 1, 0)[0].spec
    assert (found.agents, found.kinds) == (("a", "b"), ((0,), (1,)))
    assert found.num_envs == 2 * of(pendulum).env.num_envs
