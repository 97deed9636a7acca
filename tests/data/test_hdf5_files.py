"""Minari's directories and D4RL's files: round trips to the bit, what others wrote, and files that are wrong."""

import dataclasses
import io
import json
import re
import shutil

import numpy as np
import pytest
import stores
from PIL import Image

from jrl import config, data
from jrl.data.__main__ import main as command
from jrl.data.findings import check_data
from jrl.errors import InputError
from jrl.run.session import Session
from jrl.spaces_json import space_from_gymnasium, space_to_gymnasium
from jrl.types import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

h5py = pytest.importorskip("h5py")


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("spaces", [stores.FLAT, stores.CHOICES, stores.NESTED], ids=["flat", "choices", "nested"])
def test_minari_to_the_bit(tmp_path, spaces, compress):
    given = dataclasses.replace(stores.store(spaces), notes=("as it was found",))
    path = data.write(given, tmp_path / "mine-v3", format="minari", compress=compress)
    stores.same(given, data.read(path))
    stores.same(given, data.read(path / "data", format="minari"))
    assert [p.name for p in tmp_path.iterdir()] == ["mine-v3"]


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("spaces", [stores.FLAT, stores.CHOICES], ids=["flat", "choices"])
def test_d4rl_to_the_bit(tmp_path, spaces, compress):
    given = stores.store(spaces)
    path = data.write(given, tmp_path / "a" / "x.hdf5", format="d4rl", compress=compress)
    stores.same(given, data.read(path))
    stores.same(given, data.read(path.parent))


def test_d4rl_holds_no_trees(tmp_path):
    with pytest.raises(InputError, match="observations, actions of the data set are trees: write jrl or minari"):
        data.write(stores.store(stores.NESTED), tmp_path / "x.hdf5", format="d4rl")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- Minari, of Minari


def test_minari_loads_what_we_write(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    given = stores.store(stores.NESTED)
    data.write(given, tmp_path / "mine-v3", format="minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    found = minari.load_dataset("mine-v3")
    assert (found.total_episodes, found.total_steps, found.env_spec.id) == (5, 15, "CartPole-v1")
    assert list(minari.list_local_datasets()) == ["mine-v3"]
    for ours, theirs in zip(given.episodes(), found.iterate_episodes(), strict=True):
        assert np.array_equal(ours.obs["camera"], theirs.observations["camera"])
        assert np.array_equal(ours.obs["goal"][1], theirs.observations["goal"][1])
        assert np.array_equal(ours.action["move"], theirs.actions["move"])
        assert np.array_equal(ours.reward, theirs.rewards)
        assert np.array_equal(ours.columns["log_prob"], theirs.infos["log_prob"][1:])
        assert (ours.terminated, ours.truncated) == (theirs.terminations[-1], theirs.truncations[-1])
        assert not theirs.terminations[:-1].any()


def test_what_minari_wrote_is_read(tmp_path):
    """Spaces with a start, Dict and Tuple, nested infos, an image as JPEG, seeds, an episode that was cut."""
    pytest.importorskip("minari")
    gymnasium = pytest.importorskip("gymnasium")
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    gym = gymnasium.spaces
    observation = gym.Dict(
        {
            "image": gym.Box(0, 255, (40, 32, 3), np.uint8),
            "at": gym.Tuple((gym.Box(-1.0, np.array([1, 2], np.float32)), gym.MultiBinary(3))),
        }
    )
    rng = np.random.default_rng(0)
    smooth = np.broadcast_to(np.linspace(0, 250, 32)[None, None, :, None], (6, 40, 32, 3)).astype(np.uint8)
    at = (rng.uniform(-1, 1, (6, 2)).astype(np.float32), rng.integers(0, 2, (6, 3)).astype(np.int8))
    buffers = [
        EpisodeBuffer(
            id=i,
            seed=7 + i,
            observations={"image": smooth[: n + 1], "at": tuple(x[: n + 1] for x in at)},
            actions=np.arange(n) % 3 + 5,
            rewards=np.arange(n, dtype=np.float64),
            terminations=[False] * (n - 1) + [i == 0],
            truncations=[False] * n,
            infos={"speed": np.arange(n + 1.0), "body": {"q": np.ones((n + 1, 2, 2))}},
        )
        for i, n in enumerate([5, 3])
    ]
    (tmp_path / "one-v0").mkdir()
    storage = MinariStorage.new(
        tmp_path / "one-v0" / "data",
        observation,
        gym.Discrete(3, start=5),
        gymnasium.spec("CartPole-v1"),
        "hdf5",
    )
    storage.update_episodes(buffers)
    storage.update_metadata({"dataset_id": "one-v0", "minari_version": "0.5.4"})
    store = data.read(tmp_path / "one-v0")
    assert store.observation["at"] == Tuple((Box((2,), "float32", -1.0, (1.0, 2.0)), MultiBinary((3,))))
    assert store.action_space == Discrete(3, "int64")
    assert store.meta["env"] == "CartPole-v1" and store.meta["source"] == "Minari 0.5.4: one-v0"
    assert store.lengths().tolist() == [5, 3] and store.returns().tolist() == [10, 3]
    assert store.terminated.tolist() == [True, False] and not store.truncated.any()
    assert store.action.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2, 0]  # those of final rows are 0
    first = store.episode(0)
    assert np.array_equal(first.obs["at"][0], at[0]) and np.array_equal(first.obs["at"][1], at[1])
    assert np.abs(first.obs["image"].astype(int) - smooth.astype(int)).mean() < 3
    assert first.columns["speed"].tolist() == [1, 2, 3, 4, 5]
    assert first.columns["body"]["q"].shape == (5, 2, 2)
    assert store.labels["seed"].tolist() == [7, 8]
    assert "lossy" in store.notes[0] and store.notes[1:] == ("the info body of resets was left out",)


SPACES = [
    Box((2, 2), "float64", -1.5, (1.0, 2.0, float("inf"), 4.0)),
    Box((3,), "uint8", 0.0, 255.0),
    Box((2,), "int64", -3.0, 3.0),
    Discrete(4, "int64"),
    MultiDiscrete((2, 5), "int64"),
    MultiBinary((2, 3)),
    Dict((("b", Discrete(2, "int64")), ("a", Tuple((Box((), "float32", 0.0, 1.0), MultiBinary((4,))))))),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_of_gymnasium_come_back(space):
    written = json.loads(json.dumps(space_to_gymnasium(space)))
    assert space_from_gymnasium(written, "x") == space


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"type": "Text", "max_length": 3}, "x: expected Box, .* got a space of the type Text"),
        ({"type": "Dict", "subspaces": {"a/b": {"type": "MultiBinary", "n": 2}}}, "not empty and without /"),
        ({"type": "Tuple", "subspaces": [{"type": "Discrete"}]}, r"x\[0\]: expected a Gymnasium space, .* \('n'\)"),
        ({"type": "Discrete", "n": -2}, "expected a size of 1"),
        ([], "expected a Gymnasium space"),
        ({"type": "Box", "dtype": "O", "shape": [1], "low": [0], "high": [1]}, "expected a dtype of numbers"),
        (
            {"type": "Box", "dtype": "float32", "shape": [3], "low": [0, 1], "high": [1, 1, 1]},
            "a bound with one element",
        ),
    ],
)
def test_spaces_that_are_none(found, message):
    with pytest.raises(InputError, match=message):
        space_from_gymnasium(found, "x")


# ---------------------------------------------------------------- Minari that is wrong


@pytest.fixture
def written(tmp_path):
    return data.write(stores.store(), tmp_path / "mine-v0", format="minari")


def edit(path, **changes):
    """Changes entries of metadata.json; those that are None go."""
    found = json.loads((path / "data" / "metadata.json").read_text()) | changes
    (path / "data" / "metadata.json").write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def main(path):
    return h5py.File(path / "data" / "main_data.hdf5", "r+")


def put(group, name, x):
    del group[name]
    group[name] = x


def truncate(path):
    file = path / "data" / "main_data.hdf5"
    file.write_bytes(file.read_bytes()[:3000])


BAD_MINARI = {
    "truncated": (truncate, r"main_data.hdf5 is damaged .*: download or write it again"),
    "no file": (lambda p: (p / "data" / "main_data.hdf5").unlink(), "main_data.hdf5 cannot be read"),
    "no rewards": (lambda p: main(p).__delitem__("episode_2/rewards"), "episode 2 is damaged .*rewards.*download"),
    "no observations": (lambda p: main(p).__delitem__("episode_1/observations"), "episode 1 is damaged .*observations"),
    "episodes gone": (lambda p: main(p).__delitem__("episode_4"), "expected 5 episodes by metadata.json, got 4"),
    "observations short": (
        lambda p: put(main(p)["episode_0"], "observations", np.zeros((3, 3), np.float32)),
        r"mine-v0: episode 0: observations: expected the shape \(4, 3\), got \(3, 3\), for 3 steps",
    ),
    "wrong shape": (
        lambda p: put(main(p)["episode_3"], "actions", np.zeros((2, 5), np.float32)),
        "episode 3 is damaged .*reshape",
    ),
    "rewards of two": (
        lambda p: put(main(p)["episode_3"], "rewards", np.zeros((2, 2))),
        "episode 3: rewards, terminations and truncations: expected one number for each step",
    ),
    "no JSON": (lambda p: (p / "data" / "metadata.json").write_text("{"), "metadata.json is damaged .*download"),
    "no episodes": (lambda p: edit(p, total_episodes=0), "metadata.json is damaged .it has no episodes"),
    "no space": (lambda p: edit(p, observation_space=None), "has no observation_space: write the data set again"),
    "other space": (
        lambda p: edit(p, jrl=None, action_space='{"type": "Text"}'),
        "action_space: expected Box, .* got a space of the type Text",
    ),
    "our spaces": (lambda p: edit(p, jrl={"observation": {}}), "metadata.json is damaged"),
    "format": (lambda p: edit(p, data_format="csv"), "data_format: expected hdf5, got 'csv'"),
}


@pytest.mark.parametrize("case", BAD_MINARI)
def test_a_bad_minari_directory_is_one_error(written, case):
    spoil, message = BAD_MINARI[case]
    spoil(written)
    with pytest.raises(InputError, match=message) as e:
        data.read(written, format="minari")
    assert len(e.value.errors) == 1 and "mine-v0" in str(e.value)


def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(InputError, match="is not a Minari data set: data/metadata"):
        data.read(tmp_path, format="minari")


def test_infos_and_ends_that_cannot_be_kept_are_noted(written):
    with main(written) as file:
        file["episode_0/infos/odd"] = np.zeros(9)
        file["episode_1/infos/alone"] = np.zeros(2)
        file["episode_2/terminations"][1] = True
        file["episode_3"].attrs["place"] = "here"
        file["episode_4/infos/log_prob"][0] = 3.0
    store = data.read(written)
    assert list(store.columns) == ["log_prob", "state"] and sorted(store.labels) == ["policy", "seed"]
    for part in [
        "the info odd was left out: it is not a number or array for each step",
        "the info alone was left out: it differs between episodes",
        "episodes continue after a termination",
        "the label place was left out: it differs",
        "the info log_prob of resets was left out",
    ]:
        assert sum(part in note for note in store.notes) == 1


def test_a_picture_of_one_length_is_told_from_numbers(tmp_path):
    """JPEG files of equal sizes are an array [n, bytes], which is not one of pictures."""
    space = (Box((32, 32, 3), "uint8", 0.0, 255.0), Discrete(2, "int64"))
    path = data.write(stores.store(space), tmp_path / "grey-v0", format="minari")
    buffer = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), 77, np.uint8)).save(buffer, format="JPEG")
    file = np.frombuffer(buffer.getvalue(), np.uint8)
    with main(path) as opened:
        for e, steps in enumerate(stores.LENGTHS):
            put(opened[f"episode_{e}"], "observations", np.tile(file, (steps + 1, 1)))
    store = data.read(path)
    assert store.obs.shape == (20, 32, 32, 3) and (abs(store.obs.astype(int) - 77) < 3).all()
    assert "lossy" in store.notes[0]


# ---------------------------------------------------------------- D4RL


def flat_file(path, **arrays):
    """Two episodes of 3 and 4 transitions, the first of which terminates, and 2 of one that was cut; None goes."""
    step = np.arange(9, dtype=np.float32)
    found = {
        "observations": np.stack([step, -step], 1),
        "actions": step[:, None] / 10,
        "rewards": step,
        "terminals": step == 2,
        "timeouts": step == 6,
    } | arrays
    with h5py.File(path, "w") as file:
        for name, x in found.items():
            if x is not None:
                file[name] = x
    return path


def test_without_next_observations_what_is_unknown_is_dropped_or_repeated(tmp_path):
    store = data.read(flat_file(tmp_path / "x.hdf5", **{"infos/action_log_probs": np.arange(9) - 9.0}))
    assert store.lengths().tolist() == [3, 3, 1]
    assert store.obs[:, 0].tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8]
    assert store.reward.tolist() == [0, 1, 2, 0, 3, 4, 5, 0, 7, 0]
    assert store.columns["log_prob"].tolist() == [-9, -8, -7, 0, -6, -5, -4, 0, -2, 0]
    assert store.terminated.tolist() == [True, False, False] and store.truncated.tolist() == [False, True, False]
    assert store.observation == Box((2,)) and store.action_space == Box((1,), "float32", -1.0, 1.0)
    assert len(store.notes) == 2 and "the last transition of 2 episodes without a true end" in store.notes[0]


def test_with_next_observations_all_is_kept(tmp_path):
    following = np.stack([np.arange(1, 10), -np.arange(1, 10)], 1).astype(np.float32)
    following[[2, 6, 8]] = 50
    store = data.read(flat_file(tmp_path / "x.h5", next_observations=following))
    assert store.obs[:, 0].tolist() == [0, 1, 2, 50, 3, 4, 5, 6, 50, 7, 8, 50]
    assert store.lengths().tolist() == [3, 4, 2] and store.notes == ()


def test_rows_that_do_not_join_are_cuts(tmp_path):
    """Without timeouts: the row behind a time limit is not the next observation."""
    following = np.stack([np.arange(1, 10), -np.arange(1, 10)], 1).astype(np.float32)
    following[[2, 6]] = np.nan, 50
    path = flat_file(tmp_path / "x.h5", next_observations=following, timeouts=None)
    store = data.read(path)
    assert store.lengths().tolist() == [3, 4, 2] and not store.truncated.any()
    (note,) = store.notes
    assert note.startswith("at 1 place the next observation differs from the following step's: the episode was cut")


@pytest.mark.parametrize("rounding", [1e-9, -6e-8, np.float32])
def test_next_observations_that_differ_by_rounding_are_the_following_ones(tmp_path, rounding):
    """Stored as float32 beside float64, or computed twice."""
    obs = np.random.default_rng(0).normal(size=(40, 3)) * [1, 1e-3, 1e4]
    obs[5], obs[6, 0], obs[7] = 0.0, np.nan, np.inf
    following = np.concatenate([obs[1:], obs[:1]])
    following = (
        following.astype(np.float32) if rounding is np.float32 else following + np.multiply(rounding, [1, 1e-3, 1e4])
    )
    ends = {"rewards": np.zeros(40), "terminals": np.zeros(40, bool), "timeouts": np.arange(40) % 20 == 19}
    path = flat_file(
        tmp_path / "x.hdf5", observations=obs, actions=np.zeros((40, 1)), next_observations=following, **ends
    )
    store = data.read(path)
    assert store.lengths().tolist() == [20, 20] and store.notes == ()
    following[10, 1] += 1e-5  # not a rounding of a number of 1e-3
    with h5py.File(path, "r+") as file:
        file["next_observations"][...] = following
    store = data.read(path)
    assert store.lengths().tolist() == [11, 9, 20] and "episode was cut there" in store.notes[0]


@pytest.fixture(scope="module")
def pendulum():
    """4,000 random steps of Pendulum, whose episodes have 200: arrays of a file."""
    import gymnasium

    env, rng, rows = gymnasium.make("Pendulum-v1"), np.random.default_rng(0), []
    for e in range(20):
        obs, _ = env.reset(seed=e)
        for _ in range(200):
            action = rng.uniform(-2, 2, 1).astype(np.float32)
            after, reward, *_ = env.step(action)
            rows.append((obs, action, reward, after))
            obs = after
    names = ("observations", "actions", "rewards", "next_observations")
    return dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True)) | {"terminals": np.zeros(4000, bool)}


# change of the true timeouts -> messages for files without and with next observations
ENDS = {
    "right": (lambda x: x, "", ""),
    "none": (np.zeros_like, "ends of episodes may be missing", ""),  # the reader cuts there, and notes it
    "late": (lambda x: np.roll(x, 1), "timeouts seem to be marked a row too late", "a row too early or too late"),
    "early": (lambda x: np.roll(x, -1), "timeouts seem to be marked a row too early", "a row too early or too late"),
}


@pytest.mark.parametrize("case", ENDS)
def test_ends_in_other_rows_are_found_by_the_jumps_of_observations(tmp_path, capsys, pendulum, case):
    change, *expected = ENDS[case]
    arrays = pendulum | {"timeouts": change(np.arange(4000) % 200 == 199)}
    for name, told in zip(("x.hdf5", "y.hdf5"), expected, strict=True):
        path = flat_file(tmp_path / name, **arrays | ({"next_observations": None} if name == "x.hdf5" else {}))
        found = [finding for finding in check_data(data.read(path)) if finding.kind == "ends in other rows"]
        assert len(found) == bool(told)
        assert not found or (re.search(r"\d+ (of|steps inside of) ", found[0].what) and told in found[0].fix)
        assert command(["inspect", str(path)]) == 0
        assert told in capsys.readouterr().out
    if case == "late":  # a run that begins says so, too
        cfg = {"algo": {"name": "bc"}, "data": {"input": str(path)}, "run": {"log": []}, "stop": {"updates": 1}}
        with Session(config.load(cfg), endless=True) as session:
            assert any(str(path) in line and told in line for line in session.start())


def test_an_episode_of_a_single_cut_row_goes(tmp_path):
    """Of the timeouts at 3 and 4, the second is of an episode of one row."""
    step = np.arange(9)
    store = data.read(flat_file(tmp_path / "x.h5", timeouts=(step == 3) | (step == 4) | (step == 7)))
    assert store.lengths().tolist() == [3, 2]  # of rows 0-2, 3, 4, 5-7, 8
    assert store.obs[:, 0].tolist() == [0, 1, 2, 2, 5, 6, 7]
    assert "of 4 episodes without a true end" in store.notes[0]


BAD_D4RL = {
    "missing": ({"rewards": None, "actions": None}, "has no actions: .*got observations"),
    "no ends": ({"timeouts": None}, "has neither timeouts nor next_observations"),
    "rows": ({"terminals": np.zeros(8)}, r"terminated: expected the shape \(9,\), got \(8,\)"),
    "last rows": (
        {"metadata/last_rows": np.array([5, 3, 8])},
        "last_rows to rise to the last of 9 rows",
    ),
    "labels": ({"metadata/last_rows": np.array([8]), "metadata/labels/x": np.ones(2)}, "a label for each episode"),
    "wide": ({"rewards": np.zeros((9, 2))}, r"rewards: expected the shape \(9,\), got \(9, 2\)"),
    "next": ({"next_observations": np.zeros((9, 3))}, r"next observations: expected the shape \(9, 2\), got \(9, 3\)"),
    "nothing": (
        {n: np.zeros((0, 2)[: 1 + (n == "observations")]) for n in ("observations", "actions", "rewards")}
        | {n: np.zeros(0, bool) for n in ("terminals", "timeouts")},
        "observations, actions, terminals: expected a row for each step",
    ),
    "all cut": ({"terminals": np.zeros(9), "timeouts": np.ones(9)}, "expected transitions with next observations"),
    "minari": (
        dict.fromkeys(("observations", "actions", "rewards", "terminals")) | {"episode_0/rewards": np.zeros(2)},
        "is a file of a Minari data set: give the directory",
    ),
}


@pytest.mark.parametrize("case", BAD_D4RL)
def test_a_bad_d4rl_file_is_one_error(tmp_path, case):
    arrays, message = BAD_D4RL[case]
    with pytest.raises(InputError, match=message) as e:
        data.read(flat_file(tmp_path / "x.hdf5", **arrays))
    assert len(e.value.errors) == 1 and "x.hdf5" in str(e.value)


def test_a_truncated_d4rl_file_and_one_of_texts(tmp_path):
    path = flat_file(tmp_path / "x.hdf5")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"x\.hdf5 is damaged .*: download or write it again"):
        data.read(path)
    (tmp_path / "y.hdf5").write_text("no data")
    with pytest.raises(InputError, match=r"y\.hdf5 is damaged"):
        data.read(tmp_path / "y.hdf5")


def test_without_h5py_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = flat_file(tmp_path / "x.hdf5")
    shutil.copy(path, tmp_path / "y.hdf5")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(InputError, match=r"data: HDF5 files: h5py is not installed: pip install 'jrl\[data\]'"):
        data.read(path)
