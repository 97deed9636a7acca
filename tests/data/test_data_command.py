"""python -m jrl.data inspect, convert, split and merge: what they print and write, and what they refuse."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import stores

from jrl import data, train
from jrl.data import Episode, __main__, formats, inspection
from jrl.data.findings import check_data
from jrl.types import Box, Discrete

ROOT = Path(__file__).parents[2]


def run(*argv):
    """The exit status of the command; that of argparse, too."""
    try:
        return __main__.main([str(word) for word in argv])
    except SystemExit as e:
        return e.code


@pytest.fixture
def path(tmp_path):
    return data.write(stores.store(stores.CHOICES, source="a test"), tmp_path / "given")


# ---------------------------------------------------------------- inspect


def plain_episode(seed, steps=10, reward=None):
    rng = np.random.default_rng(seed)
    return Episode(
        obs=rng.uniform(-1, 1, (steps + 1, 3)),
        action=rng.integers(0, 2, steps),
        reward=rng.normal(size=steps) if reward is None else np.full(steps, reward),
        terminated=True,
        truncated=False,
        columns={"log_prob": np.log(rng.uniform(0.1, 1, steps))},
    )


def found_in(*episodes, action=None, observation=None, notes=()):
    """What is found in a data set of these episodes, as (kind, what)."""
    spaces = observation or Box((3,), "float64", -1.0, 1.0), action or Discrete(2, "int64")
    store = data.of_episodes(*spaces, episodes or [plain_episode(0), plain_episode(1)], notes=notes)
    return [(finding.kind, finding.what) for finding in check_data(store)]


def changed(name, at, value, seed=1):
    """An episode with one number of an array changed."""
    episode = plain_episode(seed)
    arrays = {"obs": episode.obs, "action": episode.action, "reward": episode.reward, **episode.columns}
    arrays[name][at] = value
    return episode


def test_nothing_is_found_in_a_good_one():
    assert found_in() == []


@pytest.mark.parametrize(
    ("name", "at", "value", "told"),
    [
        ("obs", (10, 2), np.nan,
         ("not finite", "obs: numbers are NaN or infinite in 1 row, first in episode 1, step 10")),
        ("reward", 3, np.inf,
         ("not finite", "reward: numbers are NaN or infinite in 1 row, first in episode 1, step 3")),
        ("log_prob", slice(4, 6), np.nan,
         ("not finite", "column log_prob: numbers are NaN or infinite in 2 rows, first in episode 1, step 4")),
        ("obs", (10, 0), 1.1,
         ("obs outside its space", "obs: outside of Box(shape=(3,), dtype='float64', low=-1.0, high=1.0) in 1 row, "
          "first in episode 1, step 10")),
        ("action", 0, 2,
         ("action outside its space", "action: outside of Discrete(n=2, dtype='int64') in 1 row, first in episode 1, "
          "step 0")),
        ("action", 9, -1,
         ("action outside its space", "action: outside of Discrete(n=2, dtype='int64') in 1 row, first in episode 1, "
          "step 9")),
        ("log_prob", 2, 0.7,
         ("log_prob", "column log_prob: above 0 in 1 row, first in episode 1, step 2, of choices: no probability is "
          "above 1")),
    ],
)  # fmt: skip
def test_a_number_that_is_wrong_is_found_where_it_is(name, at, value, told):
    assert found_in(plain_episode(0), changed(name, at, value)) == [told]


def test_probabilities_taken_for_log_probabilities():
    steps = np.linspace(0.2, 0.9, 10, dtype=np.float32)
    episodes = [changed("log_prob", slice(None), steps, seed) for seed in (0, 1)]
    ((kind, what),) = found_in(*episodes)
    assert kind == "log_prob" and what.endswith(
        "above 0 in 20 rows, first in episode 0, step 0, of choices: they are probabilities"
    )
    above = [changed("log_prob", slice(None), 1.5, seed) for seed in (0, 1)]
    assert found_in(*above)[0][1].endswith("of choices: no probability is above 1")
    box = [e.replace(action=e.obs[:-1]) for e in above]
    assert found_in(*box, action=Box((3,), "float64", -1.0, 1.0)) == []  # a density may be above 1


def test_ends_rewards_and_constant_features_are_found():
    cut = plain_episode(0).replace(terminated=False)
    assert found_in(plain_episode(1), cut) == [
        ("cut episodes", "1 episode neither terminated nor truncated (first: 1)")
    ]
    assert found_in(plain_episode(1), plain_episode(0, steps=1)) == [
        ("episodes of one step", "1 episode of one step (first: 1)")
    ]
    assert found_in(*(plain_episode(seed, reward=2.5) for seed in (0, 1))) == [
        ("rewards all alike", "every reward is 2.5")
    ]
    still = [plain_episode(seed) for seed in (0, 1)]
    for episode in still:
        episode.obs[:, 1] = 0.25
    told = ("constant features", "obs: 1 feature without any change, number 1 of 3")
    assert found_in(*still) == [told]


def test_what_a_reader_noted_is_found():
    assert found_in(notes=["the info x was left out"]) == [("reader", "the info x was left out")]


def test_copies_are_found():
    assert found_in(plain_episode(0), plain_episode(1), plain_episode(0)) == [
        ("duplicate episodes", "of 3 episodes 1 is a copy of an earlier one (first: 2, of 0)")
    ]
    episode, other = plain_episode(0), plain_episode(1)
    other.obs[3:5], other.action[3], other.reward[3] = episode.obs[7:9], episode.action[7], episode.reward[7]
    assert found_in(episode, other) == [
        ("duplicate transitions", "of 20 transitions 1 is in the data set before, in another episode or step")
    ]
    other.obs[4] += 1e-3  # another observation behind it
    assert found_in(episode, other) == []


def test_every_finding_says_what_to_do():
    episodes = [changed("obs", (0, 0), np.nan), plain_episode(2, steps=1, reward=1).replace(terminated=False)]
    episodes += [plain_episode(3), plain_episode(3)]
    store = data.of_episodes(Box((3,), "float64"), Discrete(2, "int64"), episodes, notes=["a"])
    assert len(found := check_data(store)) == 5 and all(finding.fix for finding in found)


def test_inspect_says_what_is_there(path, capsys):
    assert run("inspect", path) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for part in [
        "given/data.npz: jrl, 1 file",
        "environment  CartPole-v1",
        "source       a test",
        "episodes     5: 1 terminated, 1 truncated, 1 both, 2 cut",
        "steps        15,",
        "action       Discrete(n=3, dtype='int64'), the environment's own",
        "behaviour    with log-probabilities of the actions",
        "columns      log_prob float32[], state float64[2]",
        "lengths      3 ± 1.41421 (min 1, q25 2, median 3, q75 4, max 5)",
        "2 findings:\n- 2 episodes neither terminated nor truncated (first: 2)\n  -> none needed for learning",
    ]:
        assert part in out, out
    assert run("inspect", path, "--strict") == 1


def test_inspect_as_json_and_as_a_picture(path, tmp_path, capsys):
    assert run("inspect", path, "--json", "--out", tmp_path / "x.png") == 0
    found = json.loads(capsys.readouterr().out)
    store = data.read(path)
    assert (found["episodes"], found["steps"], found["log_prob"]) == (5, 15, True)
    assert found["returns"]["mean"] == store.returns().mean() and found["checksum"] == store.checksum()
    assert found["ends"] == {"terminated": 1, "truncated": 1, "both": 1, "cut": 2}
    assert [finding["kind"] for finding in found["findings"]] == ["cut episodes", "episodes of one step"]
    assert found["observation"]["high"] == [1.0, 2.0, 3.0, 4.0] and found["observation"]["low"] == -5.0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_histogram_counts():
    assert inspection.format_histogram(np.array([0.0, 0.5, 1.0, 10.0, np.nan]), bins=2, width=4) == [
        " 0 .. 5   ████ 3",
        " 5 .. 10  ██ 1",
    ]
    assert len(inspection.format_histogram(np.array([np.nan]))) == 10


# ---------------------------------------------------------------- convert, split, merge


def test_convert_there_and_back(path, tmp_path, capsys):
    pytest.importorskip("h5py")
    assert run("convert", path, "--to", "minari", "--out", tmp_path / "a-v0") == 0
    assert run("convert", tmp_path / "a-v0", "--to", "d4rl", "--out", tmp_path / "b", "--no-compress") == 0
    assert run("convert", tmp_path / "b", "--to", "jrl", "--out", tmp_path / "c.npz") == 0
    out, err = capsys.readouterr()
    assert [line.split(": ")[1] for line in out.splitlines()] == [
        "minari, 5 episodes, 15 steps, 2 files, 0.1 MiB",
        "d4rl, 5 episodes, 15 steps, 1 file, 0.0 MiB",
        "jrl, 5 episodes, 15 steps, 1 file, 0.0 MiB",
    ]
    assert err == ""
    stores.same(data.read(path), data.read(tmp_path / "c.npz"))


def test_files_roll_over_and_merge_to_the_same(path, tmp_path, capsys):
    """An episode of n steps has 64 n + 32 bytes here: 320, 448 and 352 in the files."""
    assert run("convert", path, "--to", "jrl", "--out", tmp_path / "a", "--max-file-mb", 480 / 2**20) == 0
    assert "5 episodes, 15 steps, 3 files" in capsys.readouterr().out
    assert [data.read(p).num_episodes for p in sorted((tmp_path / "a").iterdir())] == [2, 2, 1]
    assert run("merge", tmp_path / "a" / "*.npz", "--out", tmp_path / "b.npz") == 0
    stores.same(data.read(path), data.read(tmp_path / "b.npz"))


def test_episodes_are_chosen_by_their_labels(path, tmp_path, capsys):
    given = data.read(path)
    assert run("convert", path, "--to", "jrl", "--out", tmp_path / "one", "--where", "policy=no. 3") == 0
    stores.same(data.read(tmp_path / "one"), given.take(np.array([3])))
    stores.same(data.read(path, where={"policy": "no. 1", "seed": 11}), given.take(np.array([1])))
    assert run("inspect", path, "--where", "seed=12", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 1


def test_split(path, tmp_path, capsys):
    assert run("split", path, "--share", "0.4", "--seed", "3", "--out", tmp_path / "a") == 0
    train, validation = data.read(tmp_path / "a" / "train"), data.read(tmp_path / "a" / "validation")
    assert train.num_steps + validation.num_steps == 15 and validation.num_steps >= 6
    assert validation.checksum() == data.read(path).split(0.4, 3)[1].checksum()
    assert capsys.readouterr().out.count("wrote ") == 2


def test_what_a_reader_noted_is_told_and_kept(tmp_path, capsys):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for name, x in {"observations": np.eye(4), "actions": np.eye(4), "rewards": np.ones(4)}.items():
            file[name] = x
        file["terminals"], file["timeouts"] = np.zeros(4), np.zeros(4)
    assert run("convert", tmp_path / "x.hdf5", "--to", "jrl", "--out", tmp_path / "a") == 0
    assert "note: " in (err := capsys.readouterr().err) and "the last transition of 1 episode without a true end" in err
    assert len(data.read(tmp_path / "a").notes) == 1


REFUSED = [
    ("insect x", "insect: unknown command: did you mean inspect?"),
    ("zzz", "expected one of record, inspect, convert, split, merge"),
    ("inspect no/such", "data: no/such does not exist: give a file, a directory of files, or a glob"),
    ("inspect GIVEN --from csv", "data format 'csv': expected one of jrl"),
    ("inspect GIVEN --out x.jpg", "--out: expected a new file NAME.png"),
    ("inspect GIVEN --out /proc/no/x.png", "--out: cannot write to /proc/no/x.png: No such file"),
    ("inspect", "the following arguments are required: PATH"),
    ("inspect GIVEN --where policy", "--where: expected LABEL=VALUE, such as policy=main, got 'policy'"),
    ("inspect GIVEN --where agent=red", "has no label agent: it has policy, seed"),
    ("inspect GIVEN --where seed=3", "has no episode with seed=3: it has 10, 11, 12, 13, 14"),
    ("convert GIVEN --to csv --out OUT", "data format 'csv': expected one of jrl"),
    ("convert GIVEN --to jrl --out GIVEN", "exists: choose another path, or remove it"),
    ("convert GIVEN --to minari --out GIVEN", "expected a directory, got a file: choose another path"),
    (
        "convert GIVEN --to minari --out OUT --max-file-mb 3",
        "--max-file-mb: the format minari does not split files: leave it out",
    ),
    ("convert GIVEN --to jrl --out OUT.npz --max-file-mb 3", "OUT.npz is one file: give a directory, or leave it out"),
    ("convert GIVEN --to jrl --out OUT --max-file-mb nan", "--max-file-mb: expected more than 0, got nan"),
    ("convert GIVEN --out OUT", "the following arguments are required: --to"),
    ("split GIVEN --share 1.5 --out OUT", "--share: expected a number above 0 and below 1, got 1.5"),
    ("split GIVEN --seed -1 --out OUT", "--seed: expected a number of at least 0, got -1"),
    ("merge GIVEN --out OUT", "data merge: expected two or more data sets"),
]


def test_a_set_of_a_shipped_config_that_is_not_there_is_told_how_to_make(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["bc", "--out", str(tmp_path / "run")]
    sets = tmp_path / "runs" / "data"
    record = f"record one with `python -m jrl.data record RUN --out {sets}/cartpole-expert`"
    assert train.main(given) == 2
    script = os.path.relpath(ROOT / "scripts" / "make_data.py")
    make = f"make it with `python {script} cartpole --kinds expert --out {sets}`, or "
    assert capsys.readouterr().err == f"error: data: {sets}/cartpole-expert does not exist: {make}{record}\n"
    monkeypatch.setattr(formats, "_MAKE_DATA", tmp_path / "scripts" / "make_data.py")  # as in an installed package
    assert train.main(given) == 2
    assert capsys.readouterr().err == f"error: data: {sets}/cartpole-expert does not exist: {record}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_cannot_be_is_one_error(path, tmp_path, capsys, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    before = path.read_bytes()
    assert run(*(str(path) if word == "GIVEN" else word for word in line.split())) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err and err.count("error: ") == 1, err
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["given"]


def test_data_sets_of_different_spaces_are_not_merged(path, tmp_path, capsys):
    other = data.write(stores.store(), tmp_path / "other")
    assert run("merge", path, other, "--out", tmp_path / "out") == 2
    assert "have different observations" in capsys.readouterr().err and not (tmp_path / "out").exists()
