"""Infos of clients: their means in result rows, and refused infos."""

import numpy as np
import pytest
import serving

from jrl.serve import bodies
from jrl.serve.client import PolicyClient, _EpisodeState
from jrl.serve.episode_table import INFO, MAX_INFO_NAMES, ClientInfos
from jrl.serve.wire import RequestError

SEVERAL = {"agents": ["a", "b"], "observation": {"box": [4]}}
KINDS = {  # external section, observation, inference_mode
    "numbers": ({}, np.zeros(4, np.float32), "remote"),
    "npz": ({"observation": {"box": [300]}}, np.zeros(300, np.float32), "remote"),
    "local": ({}, np.zeros(4, np.float32), "local"),
    "several": (SEVERAL, {name: np.zeros(4, np.float32) for name in "ab"}, "remote"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "local" else [pytest.mark.slow]) for kind in KINDS]
)
def test_rows_have_the_means_of_the_infos_since_the_row_before(kind):
    external, obs, mode = KINDS[kind]
    reward, once, sent = 1.0 if kind != "several" else {"a": 1.0}, {"begun": 3.0}, 0
    with serving.running(serving.settings(envs=1, length=4, external=external, run={"report_every": 16})) as run:
        client = PolicyClient(run.address, inference_mode=mode)
        while len(run.rows) < 4:
            id = client.start_episode()
            for step in range(5):
                client.get_action(id, obs)
                client.log_returns(id, reward, {"speed": 100, "even": np.bool_(True), **once})
                client.log_returns(id, reward, {"speed": np.int64(2)} | ({"of/all": np.float32(0.5)} if step else {}))
                once, sent = {}, sent + 1
            client.end_episode(id, obs)
        client.close()
        rows = list(run.rows)
    of = lambda name: [row[INFO + name] for row in rows if INFO + name in row]
    # a row has the infos of several updates
    assert (set(of("speed")), set(of("even")), set(of("of/all"))) == ({2.0}, {1.0}, {0.5})
    assert of("begun") == [3.0]
    assert len(of("speed")) >= 3
    assert sent >= 48


@pytest.mark.parametrize("info", [{"a": "x"}, {"a": [1.0, 2.0]}, {"a": {"b": 1.0}}, {"a": 10**400}])
def test_the_client_refuses_an_info_that_is_not_a_number(info):
    client = PolicyClient("http://127.0.0.1:1")
    state = client._episodes["id"] = _EpisodeState()
    client.log_returns("id", 1.0, {"speed": 2})
    with pytest.raises((ValueError, TypeError, OverflowError)):
        client.log_returns("id", 1.0, info)
    assert (state.rewards, state.infos) == ({"": 1.0}, {"speed": 2.0})


def test_a_run_has_a_limited_number_of_names():
    infos, names = ClientInfos(is_kept=True), [f"a{i}" for i in range(MAX_INFO_NAMES)]
    for i in range(0, MAX_INFO_NAMES, 32):
        infos.check(dict.fromkeys(names[i : i + 32], 1))
        infos.add(dict.fromkeys(names[i : i + 32], 1))
    infos.check({"a0": 4.0})
    with pytest.raises(RequestError, match="infos/more: a run has at most 64 names"):
        infos.check({"a0": 1.0, "more": 1.0})
    infos.add({"a0": 4.0})
    assert infos.drain() == {INFO + name: 2.5 if name == "a0" else 1.0 for name in names}
    assert infos.drain() == {}


def test_without_a_run_infos_are_checked_and_dropped():
    infos = ClientInfos(is_kept=False)
    read = lambda given: bodies.parse_body(bodies.RewardRequest, {"reward": 0, "infos": given}).infos
    for i in range(MAX_INFO_NAMES + 1):
        given = read({f"a{i}": 1})
        infos.check(given)
        infos.add(given)
    assert infos.drain() == {}
    with pytest.raises(RequestError, match="infos/a"):
        read({"a": "x"})
