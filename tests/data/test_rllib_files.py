"""RLlib's files: those that RLlib wrote, round trips, tables in any order, and what is wrong with a file."""

import gzip
import json
import shutil
import zipfile

import jax
import numpy as np
import pytest
from rllib_cases import FILES, batch, lines, mutated, packed, same, store

from jrl import data
from jrl.data.formats import transitions
from jrl.errors import InputError
from jrl.types import Box, Discrete

SUFFIXES = ["x.json", "x.json.gz", "x.zip", "x.parquet"]
ENDS = [True, False, True], [False, True, False]


def format_of(name):
    return "rllib-parquet" if name.endswith(".parquet") else "rllib-json"


# ---------------------------------------------------------------- what RLlib wrote (files/make_rllib_files.py)


@pytest.mark.parametrize("name", ["rllib-json.json", "rllib-tabular", "rllib-packed", "rllib-episodes"])
def test_files_that_rllib_wrote_are_read(name):
    found = data.read(FILES / name)
    assert found.lengths().tolist() == [3, 4, 3]
    assert (found.terminated.tolist(), found.truncated.tolist()) == ENDS
    assert found.obs.dtype == np.float32
    for e, episode in enumerate(found.episodes()):
        steps = np.arange(len(episode.reward) + 1)
        np.testing.assert_array_equal(episode.obs, np.stack([np.full(len(steps), e), steps], 1))
        np.testing.assert_array_equal(episode.reward, 10 * e + steps[:-1])
        if name == "rllib-json.json":
            np.testing.assert_array_equal(episode.action, steps[:-1] % 2)
            np.testing.assert_allclose(episode.columns["log_prob"], np.log(0.5))
    assert len(np.unique(found.labels["eps_id"])) == 3


def test_several_agents_that_rllib_wrote_have_labels():
    found = data.read(FILES / "rllib-json-multi.json")
    assert found.lengths().tolist() == [3, 3, 3] and found.terminated.all()
    assert list(found.labels["policy"]) == ["a", "a", "b"] and list(found.labels["agent"]) == [0, 1, 2]
    assert len({*found.labels["eps_id"]}) == 1


@pytest.mark.parametrize("compress", [True, False])
def test_rllib_reads_what_is_written(tmp_path, compress):
    reader = pytest.importorskip("ray.rllib.offline.json_reader", reason="RLlib cannot be imported")
    expected = plain_store()
    data.write(expected, tmp_path / "x.json", "rllib-json", compress=compress)
    steps = expected.is_step()
    found = list(reader.JsonReader(str(tmp_path)).read_all_files())
    for name, column in (("obs", expected.obs), ("actions", expected.action), ("rewards", expected.reward)):
        np.testing.assert_array_equal(np.concatenate([b[name] for b in found]), column[steps])
    following = expected.obs[np.flatnonzero(steps) + 1]
    np.testing.assert_array_equal(np.concatenate([b["new_obs"] for b in found]), following)
    assert [b.count for b in found] == expected.lengths().tolist()


def plain_store():
    found = store()
    return data.of_episodes(
        Box((3,)), Discrete(3), [e.replace(obs=e.obs["state"], columns={}) for e in found.episodes()]
    )


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("name", SUFFIXES)
def test_round_trips_are_equal_to_the_bit(tmp_path, name, compress):
    dtypes = [{}]
    if compress or name == "x.parquet":  # lists have no dtypes
        dtypes += [{"obs": np.float64, "action": np.int64, "reward": np.float64}, {"obs": np.float16}]
    for i, given in enumerate(dtypes):
        expected = store(**given)
        path = data.write(expected, tmp_path / f"{i}{name}", format_of(name), compress=compress)
        found = data.read(path)
        if compress or name == "x.parquet":
            same(expected, found)
        else:
            jax.tree.map(np.testing.assert_array_equal, expected.obs, found.obs)
        assert found.action_space == expected.action_space and found.notes == ()


@pytest.mark.parametrize("name", SUFFIXES)
def test_numbers_that_are_not_finite_come_back(tmp_path, name):
    expected = plain_store()
    expected.obs[1] = [np.nan, np.inf, -np.inf]
    same(expected, data.read(data.write(expected, tmp_path / name, format_of(name), compress=False)))


@pytest.mark.parametrize("name", ["x.json", "x.parquet"])
def test_agents_and_policies_come_back(tmp_path, name):
    labels = lambda e: {"policy": "ab"[e // 2], "agent": f"agent_{e % 2}", "eps_id": 5}
    expected = store(labels=labels)
    found = data.read(data.write(expected, tmp_path / name, format_of(name)))
    same(expected, found)
    assert {k: list(v) for k, v in found.labels.items()} == {k: list(v) for k, v in expected.labels.items()}
    if name == "x.json":
        (line,) = (tmp_path / name).read_text().splitlines()
        game = json.loads(line)
        assert game["type"] == "MultiAgentBatch" and game["count"] == 4 and [*game["policy_batches"]] == ["a", "b"]


def test_parquet_keeps_spaces_labels_and_meta(tmp_path):
    expected = store(labels=lambda e: {"seed": e / 2, "task": "xy"[e % 2]})
    expected.meta["env"] = "Somewhere-v0"
    found = data.read(data.write(expected, tmp_path / "x.parquet", "rllib-parquet"))
    assert found.observation == expected.observation and found.meta["env"] == "Somewhere-v0"
    assert found.labels["seed"].tolist() == [0, 0.5, 1, 1.5] and list(found.labels["task"]) == [*"xyxy"]


def test_files_of_one_data_set_are_read_together(tmp_path):
    for i in range(3):
        data.write(store(seed=i), tmp_path / f"{i}.json", "rllib-json")
        data.write(store(seed=i), tmp_path / "nested" / f"{i}" / f"{i}.parquet", "rllib-parquet")
    expected = data.concatenated([store(seed=i) for i in range(3)])
    same(expected, data.read(str(tmp_path / "*.json")))
    same(expected, data.read(tmp_path / "nested"))
    shutil.copy(FILES / "rllib-json.json", tmp_path / "nested" / "a.json")  # beside: JSON is what lies there itself
    assert data.read(tmp_path / "nested").num_episodes == 3


def test_a_column_with_the_name_of_another_is_refused(tmp_path):
    expected = store()
    expected.columns["t"] = expected.columns.pop("vf_preds")
    with pytest.raises(InputError, match="the columns t have another meaning in RLlib"):
        data.write(expected, tmp_path / "x.json", "rllib-json")
    assert not (tmp_path / "x.json").exists()


# ---------------------------------------------------------------- tables in any order


def test_fragments_of_episodes_are_joined_in_the_order_of_their_steps(tmp_path):
    whole = [[0.0], [1.0], [2.0], [3.0]]
    row = lambda i, **more: batch(
        obs=[whole[i]], new_obs=[whole[i + 1]], actions=[i % 2], rewards=[i], terminateds=[i == 2], truncateds=[False],
        eps_id=[4], t=[i], unroll_id=[i], **more,
    )  # fmt: skip
    found = data.read(lines(tmp_path / "x.json", row(2), batch(), row(0), row(1)))
    assert found.obs[:4].tolist() == whole and found.lengths().tolist() == [3, 3]
    assert found.reward[:3].tolist() == [0, 1, 2] and list(found.labels["eps_id"]) == [4, 7]


def test_no_transition_becomes_another_one(tmp_path):
    found = data.read(lines(tmp_path / "x.json", batch(new_obs=[[1.0], [9.0], [3.0]])))
    assert found.lengths().tolist() == [2, 1] and found.obs.reshape(-1).tolist() == [0, 1, 9, 2, 3]
    assert found.terminated.tolist() == [False, True] and "1 place the next observation" in found.notes[0]
    found = data.read(lines(tmp_path / "gap.json", batch(t=[0, 1, 5])))
    assert found.lengths().tolist() == [2, 1] and "a step is missing" in found.notes[0]


def test_episode_ids_that_repeat_do_not_join(tmp_path):
    other = batch(obs=[[5.0], [6.0], [7.0]], new_obs=[[6.0], [7.0], [8.0]], terminateds=[False] * 3)
    found = data.read(lines(tmp_path / "x.json", other, batch()))
    assert found.lengths().tolist() == [3, 3] and found.obs.reshape(-1).tolist() == [5, 6, 7, 8, 0, 1, 2, 3]


def test_without_next_observations_only_known_transitions_are_kept(tmp_path):
    cut = batch(new_obs=None, eps_id=[8] * 3, terminateds=[False] * 3)
    lone = {k: v if k == "type" else v[:1] for k, v in batch(new_obs=None, eps_id=[9] * 3).items()}
    found = data.read(lines(tmp_path / "x.json", batch(new_obs=None), cut, lone))
    assert found.lengths().tolist() == [3, 2] and found.obs.reshape(-1).tolist() == [0, 1, 2, 2, 0, 1, 2]
    assert found.reward.tolist() == [1, 2, 3, 0, 1, 2, 0] and found.terminated.tolist() == [True, False]
    assert "the last transition of 2 episodes without a true end was left out" in found.notes[0]


def test_older_columns_are_understood(tmp_path):
    older = batch(terminateds=None, truncateds=None, dones=[False, False, True], action_prob=[0.5, 0.25, 1.0])
    found = data.read(lines(tmp_path / "x.json", older))
    assert found.terminated.tolist() == [True] and list(found.columns) == ["log_prob"]
    np.testing.assert_allclose(found.columns["log_prob"][:3], np.log([0.5, 0.25, 1.0]), rtol=1e-6)


def test_numbers_are_given_in_the_order_of_appearance():
    assert transitions.number_groups(np.array([5, 5, 2, 9, 2]), np.array([*"aabaa"])).tolist() == [0, 0, 1, 2, 3]


# ---------------------------------------------------------------- bad files

BAD = {
    "no object": ("[1, 2]", "line 2: this is not a line of RLlib"),
    "no JSON": ("checkpoint", "line 2: this is not a line of RLlib"),
    "cut off": (json.dumps(batch())[:60], "line 2: the line is damaged or cut off"),
    "nested": ("[" * 10**6, "line 2: this is not a line of RLlib"),
    "no rewards": (batch(rewards=None), "line 2: the column rewards is missing, but other lines have it"),
    "short": (batch(actions=[0, 1]), "line 2: column actions: expected 3 rows"),
    "ragged": (batch(obs=[[0.0], [1.0, 2.0], [2.0]]), "line 2: column obs: expected rows of one shape"),
    "objects": (batch(obs=[[0.0], None, [2.0]]), "line 2: column obs: expected rows of one shape|expected numbers"),
    "other shape": (
        batch(obs=[[0.0, 0]] * 3, new_obs=[[0.0, 0]] * 3),
        r"line 2: column obs: .* got \[2\]",
    ),
    "unlike": (batch(new_obs=[[0.0, 0]] * 3), "line 2: column new_obs: expected rows of the shape"),
    "text": (batch(obs="no base64!"), "line 2: column obs: expected base64, as RLlib packs"),
    "no LZ4": (batch(obs="AAAA"), "line 2: column obs: LZ4: the frame is cut off"),
    "no pickle": (batch(obs=packed(b"abc")), "line 2: column obs: the pickle"),
    "one without": (batch(new_obs=None), "line 2: the column new_obs is missing, but other lines have it"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_line_that_is_wrong_is_named(tmp_path, case):
    line, message = BAD[case]
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "x.json").write_text(json.dumps(batch()) + "\n" + text + "\n")
    with pytest.raises(InputError, match=message) as e:
        data.read(tmp_path / "x.json")
    assert str(tmp_path / "x.json") in str(e.value)


@pytest.mark.parametrize("name", SUFFIXES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_truncated_file_is_named(tmp_path, name, share):
    path = data.write(store(), tmp_path / name, format_of(name))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InputError, match=f"{name}.*(damaged|expected transitions)"):
        data.read(path)


def test_archives_need_members_of_json(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("model.bin", b"abc")
    with pytest.raises(InputError, match=r"a member NAME\.json"):
        data.read(tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "y.zip", "w") as archive:
        archive.writestr("../../y.json", json.dumps(batch()))
    assert data.read(tmp_path / "y.zip").num_steps == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.zip", "y.zip"]  # nothing was unpacked
    with gzip.open(tmp_path / "z.json.gz", "wt") as file:
        file.write(json.dumps(batch()))
    assert data.read(tmp_path / "z.json.gz").num_steps == 3


@pytest.mark.parametrize("name", [*SUFFIXES, "rllib-packed/0.parquet", "rllib-episodes/0.parquet"])
def test_damaged_files_are_refused_or_read(tmp_path, name):
    if "/" in name:
        path = tmp_path / "x.parquet"
        shutil.copy(FILES / name, path)
    else:
        path = data.write(store(), tmp_path / name, format_of(name))
    refused = 0
    for content in mutated([path.read_bytes()], np.random.default_rng(0), 60):
        path.write_bytes(content)
        try:
            data.read(path)
        except InputError as e:
            assert str(path) in str(e)
            refused += 1
    assert refused > 30
