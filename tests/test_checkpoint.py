"""Checkpoints: what is kept, what a damaged or foreign one says, and what stays when a save fails."""

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import config, spaces_json
from jrl.errors import InputError
from jrl.run.store import checkpoint
from jrl.run.store.writer import Checkpointer
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple

FIXTURES = Path(__file__).parent / "fixtures"
CFG = config.load(None, [], algo="ppo", env="CartPole-v1", stop=["env_steps=1000"])
SPEC = EnvSpec(Box((4,)), Discrete(2), 8, 500)
TREE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.uint32(7), "b": jnp.ones((3,), jnp.bfloat16)}


def keep(**changes):
    return dataclasses.replace(CFG.checkpoint, **changes)


def save_all(directory, steps, policy=None, metrics=None):
    """One checkpoint per entry of `steps`; iteration i has 100 i environment steps."""
    with Checkpointer(directory, policy) as checkpoints:
        for i in steps:
            counters = {"iteration": i, "env_steps": 100 * i, "time_s": 0.0}
            more = {"metrics": {"episode/return": metrics[i]}} if metrics else {}
            checkpoints.save(i, {"learner": TREE}, checkpoint.build_meta(CFG, SPEC, counters=counters, **more))


def names(directory):
    return sorted(int(p.name) for p in directory.iterdir())


def test_a_checkpoint_gives_back_what_was_saved(tmp_path):
    save_all(tmp_path, [3])
    found = checkpoint.locate(tmp_path)
    restored = checkpoint.restore(found, "learner", TREE)
    for a, b in zip(jax.tree.leaves(TREE), jax.tree.leaves(restored), strict=True):
        assert np.asarray(a).dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    meta = checkpoint.read_meta(found)
    assert (meta["format"], meta["jax"], meta["iteration"]) == (1, jax.__version__, 3)
    assert len(meta["config_hash"]) == 16 and meta["config"]["env"]["id"] == "CartPole-v1"


def test_names_that_are_alike_are_kept_apart(tmp_path):
    """Orbax joins the names on a path by dots: the arrays of {"x.y": a, "x": {"y": b}} had one name."""
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    pairs = {f"obs{i}": {one: zeros, two: {"y": ones}} for i, (one, two) in enumerate([("x.y", "x"), ("~", "~0")])}
    tree = {**pairs, "n": (np.uint32(1), np.uint32(2))}
    meta = checkpoint.build_meta(CFG, SPEC, counters={"iteration": 1, "env_steps": 1, "time_s": 0.0})
    checkpoint.write(tmp_path / "1", {"learner": tree}, meta)
    found = checkpoint.restore(checkpoint.locate(tmp_path), "learner", tree)
    jax.tree.map(np.testing.assert_array_equal, found, tree)


def test_spaces_survive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bounded = Box((2,), low=(-2.0, -math.inf), high=(2.0, math.inf))
    spec = EnvSpec(Box((84, 84, 4), "uint8", 0, 255), Box((2,), low=-1.0, high=1.0), 2, 200, bounded)
    meta = checkpoint.build_meta(CFG, spec, counters={"iteration": 1, "env_steps": 0})
    checkpoint.write(Path("1"), {"learner": TREE}, meta)  # a path below the working directory will do
    text = (tmp_path / "1" / "checkpoint.json").read_text()
    json.loads(text, parse_constant=lambda x: pytest.fail(f"{x} is no JSON"))
    assert checkpoint.read_spec(checkpoint.read_meta(tmp_path / "1")) == spec._replace(num_envs=1)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, [7, 8, 9]),
        ({"keep_last": 1, "keep_every": 300}, [1, 3, 6, 9]),
        ({"keep_last": 2, "keep_best_by": "episode/return"}, [6, 8, 9]),
        ({"keep_last": 1, "keep_best_by": "episode/return", "keep_best": "min"}, [2, 9]),
    ],
)
def test_what_is_kept(policy, expected, tmp_path):
    metrics = {1: math.nan, 2: -5.0, 3: 1.0, 4: 8.0, 5: 2.0, 6: 8.0, 7: 0.0, 8: math.inf, 9: 1.0}
    save_all(tmp_path, range(1, 10), keep(**policy), metrics)
    assert names(tmp_path) == expected


def test_the_best_one_is_found_by_the_metric_of_the_run(tmp_path):
    cfg = dataclasses.replace(CFG, checkpoint=keep(keep_best_by="episode/return"))
    for i, value in enumerate([3.0, 9.0, 4.0]):
        counters = {"iteration": i, "env_steps": i}
        meta = checkpoint.build_meta(cfg, SPEC, counters=counters, metrics={"episode/return": value})
        checkpoint.write(tmp_path / "checkpoints" / str(i), {"learner": TREE}, meta)
    assert checkpoint.locate(tmp_path).name == "2"
    assert checkpoint.locate(tmp_path, best=True).name == checkpoint.locate(tmp_path, best=None).name == "1"
    save_all(tmp_path / "other", [1, 2])
    assert checkpoint.locate(tmp_path / "other", best=None).name == "2"  # no evaluation says which is best
    with pytest.raises(InputError, match=r"has the metric of its checkpoint\.keep_best_by \(evaluation/return\)"):
        checkpoint.locate(tmp_path / "other", best=True)


def test_going_back_on_a_run_removes_what_it_had_become(tmp_path):
    save_all(tmp_path, [1, 2, 3])
    save_all(tmp_path, [2])
    assert names(tmp_path) == [1, 2]


def test_what_a_killed_process_left_is_no_checkpoint_and_goes(tmp_path):
    save_all(tmp_path, [1])
    shutil.copytree(tmp_path / "1", tmp_path / "2.unfinished")
    (tmp_path / "3").mkdir()
    shutil.copytree(tmp_path / "1" / "learner", tmp_path / "3" / "learner")
    assert checkpoint.locate(tmp_path).name == "1"
    with Checkpointer(tmp_path):
        assert not (tmp_path / "2.unfinished").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("RESOURCE_EXHAUSTED: disk full")])
def test_a_full_disk_is_one_clear_error_and_leaves_the_checkpoint_before(error, tmp_path, monkeypatch):
    save_all(tmp_path, [1])

    def fail(*args):
        raise error

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(InputError, match=r"cannot write to .*(No space|disk full).*earlier checkpoints are complete"):
        save_all(tmp_path, [2])
    monkeypatch.undo()
    assert names(tmp_path) == [1]
    checkpoint.restore(checkpoint.locate(tmp_path), "learner", TREE)


def test_a_save_that_failed_is_told_before_the_next_and_a_rescue_that_fails_raises_nothing(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device", "disk")

    monkeypatch.setattr(checkpoint, "write", fail)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"learner": TREE}, {"env_steps": 100})
        with pytest.raises(InputError, match=r"cannot write to .*: No space left"):
            for _ in range(1000):
                checkpoints.check()
                time.sleep(0.01)
        assert not checkpoints.rescue(2, {"learner": TREE}, {"env_steps": 200})


def test_what_improves(tmp_path):
    policy = keep(keep_best_by="evaluation/return", keep_best="min")
    with Checkpointer(tmp_path, policy) as checkpoints:
        assert not checkpoints.improves({}) and not checkpoints.improves({"evaluation/return": math.nan})
        assert checkpoints.improves({"evaluation/return": 5.0})
        counters = {"iteration": 1, "env_steps": 100, "time_s": 0.0}
        checkpoints.save(
            1, {"learner": TREE}, checkpoint.build_meta(CFG, SPEC, counters=counters, metrics={"evaluation/return": 5})
        )
        found = [checkpoints.improves({"evaluation/return": x}) for x in (6.0, 5.0, 4.0)]
        assert found == [False, True, True]


def test_a_directory_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"run.out: cannot write to .*choose another --out"):
        Checkpointer(tmp_path / "file" / "checkpoints").__enter__()


def files(directory):
    return sorted(p for p in (directory / "learner").rglob("*") if p.is_file() and p.stat().st_size > 8)


def test_every_truncated_file_is_noticed(tmp_path):
    save_all(tmp_path, [1])
    intact = tmp_path / "1"
    refused = 0
    for file in files(intact):
        damaged = tmp_path / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(intact, damaged)
        target = damaged / file.relative_to(intact)
        target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
        try:
            restored = checkpoint.restore(damaged, "learner", TREE)
        except InputError as e:
            assert "is damaged or not made by jrl (its learner: " in str(e)
            refused += 1
        else:  # a file that reading does not need
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), TREE, restored)
    assert refused >= 2


def test_other_numbers_than_those_written_are_noticed(tmp_path):
    save_all(tmp_path, [1])
    other = {**TREE, "w": TREE["w"] + 1}
    checkpoint.write(tmp_path / "2", {"learner": other}, {"format": 1})
    shutil.rmtree(tmp_path / "1" / "learner")
    shutil.copytree(tmp_path / "2" / "learner", tmp_path / "1" / "learner")
    with pytest.raises(InputError, match=r"\(its learner: its checksum differs\): use that of another run"):
        checkpoint.restore(tmp_path / "1", "learner", TREE)


def test_other_arrays_than_were_saved(tmp_path):
    save_all(tmp_path, [1])
    fault = "does not hold the learner state"
    other = {**TREE, "w": np.zeros((2, 4), np.float32)}, {"w": TREE["w"]}, {**TREE, "more": TREE["w"]}
    for template, message in zip(other, (r"w is float32\[2, 3\], not float32\[2, 4\]", fault, fault), strict=True):
        with pytest.raises(InputError, match=message):
            checkpoint.restore(tmp_path / "1", "learner", template)
    with pytest.raises(InputError, match=r"does not hold the replay state .*\(it holds learner\)"):
        checkpoint.restore(tmp_path / "1", "replay", TREE)


def test_what_jrl_did_not_write(tmp_path):
    (tmp_path / "7").mkdir()
    texts = ["{", "[]", '{"format": "1"}', "[" * 100_000, "\0" * 5000, "", '{"format": 1, "iteration": 1e400}']
    for text in texts:
        (tmp_path / "7" / "checkpoint.json").write_text(text)
        with pytest.raises(InputError, match=r"damaged or not made by jrl.*this run has no intact checkpoint"):
            checkpoint.read_meta(checkpoint.locate(tmp_path))
    (tmp_path / "7" / "checkpoint.json").write_text('{"format": 99}')
    with pytest.raises(InputError, match="has format 99, this jrl reads up to 1: update jrl"):
        checkpoint.read_meta(checkpoint.locate(tmp_path))


def edited(directory, change, *, checksum=False):
    """Changes what a checkpoint.json holds; without `checksum` it becomes a file of an earlier version, without one."""
    file = directory / "checkpoint.json"
    found = json.loads(file.read_text())
    if not checksum:
        del found["sha256"]
    change(found)
    file.write_text(json.dumps(found))


ABSURD = [
    (lambda m: m.pop("iteration"), "'iteration' is missing"),
    (lambda m: m.update(env_steps="7"), "env_steps: expected int, got '7'"),
    (lambda m: m.update(config=[]), "config: "),
    (lambda m: m.update(time_s=None), "time_s: "),
    (lambda m: m["spec"].pop("action"), "'action' is missing"),
    (lambda m: m["spec"]["observation"].update(shape=[100_000, 1_000_000]), "spec: expected a size"),
    (lambda m: m["spec"]["observation"].update(shape=[-1]), "spec: expected a size"),
    (lambda m: m["spec"]["observation"].update(dtype="float33"), "float33"),
    (lambda m: m["spec"]["observation"].update(dtype="O"), "spec: expected a dtype of numbers, got O"),
    (lambda m: m["spec"]["observation"].update(low=[0.0]), "a bound with one element for each element"),
    (lambda m: m["spec"]["action"].update(n=10**30), "spec: expected a size of 1"),
    (lambda m: m["spec"]["action"].update(kind="Sphere"), "spec: unknown space"),
]


def test_a_file_that_can_be_parsed_but_lacks_or_mistypes_something(tmp_path):
    save_all(tmp_path, [1, 2])
    file = tmp_path / "2" / "checkpoint.json"
    edited(tmp_path / "2", lambda m: m.update(rows={}, devices=1, counted=0))
    assert checkpoint.read_meta(tmp_path / "2", resumable=True)["iteration"] == 2
    valid = file.read_text()
    for change, message in ABSURD:
        file.write_text(valid)
        edited(tmp_path / "2", change, checksum=True)
        with pytest.raises(InputError) as e:
            checkpoint.read_meta(tmp_path / "2", resumable=True)
        assert message in str(e.value) and f"use another one, such as {tmp_path / '1'}" in str(e.value)


def test_a_file_with_a_checksum_is_what_was_written(tmp_path):
    save_all(tmp_path, [1])
    assert checkpoint.read_meta(tmp_path / "1")["env_steps"] == 100
    edited(tmp_path / "1", lambda m: m.update(env_steps=101), checksum=True)
    with pytest.raises(InputError, match="its checksum differs"):
        checkpoint.read_meta(tmp_path / "1")


def test_a_damaged_checkpoint_names_the_latest_that_is_whole_and_does_not_stop_others(tmp_path):
    save_all(tmp_path, [1, 2, 3])
    (tmp_path / "2" / "learner" / "manifest.ocdbt").write_bytes(b"no")
    edited(tmp_path / "3", lambda m: m.update(checksums={"learner": "00000000"}))
    with pytest.raises(InputError, match=f"its learner: its checksum differs.*such as {tmp_path}/1$"):
        checkpoint.restore(tmp_path / "3", "learner", TREE)
    (tmp_path / "2" / "checkpoint.json").write_text("")
    save_all(tmp_path, [4, 5])
    assert names(tmp_path) == [2, 3, 4, 5]  # the damaged one was not counted, nor deleted


def test_nothing_to_find(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        checkpoint.locate(tmp_path / "no")
    with pytest.raises(InputError, match="holds no complete checkpoint: give a run directory"):
        checkpoint.locate(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(InputError, match=f"holds no complete checkpoint: .*--out {tmp_path} --resume auto"):
        checkpoint.locate(tmp_path)


def test_nothing_is_pickled(tmp_path):
    save_all(tmp_path, [1])
    for file in (p for p in tmp_path.rglob("*") if p.is_file()):
        head = file.read_bytes()[:2]
        assert head[:1] != b"\x80" and head != b"PK", file  # pickle, and the archives that hold one


@pytest.mark.parametrize("name", ["ppo_v1", "dqn_v1"])
def test_checkpoints_of_format_1_stay_readable(name):
    """Written by `python -m jrl.train` when the format was new; see tests/fixtures/README.md."""
    from jrl.run import build

    found = checkpoint.locate(FIXTURES / name)
    meta = checkpoint.read_meta(found)
    cfg = config.override(meta["config"], [])
    algo = build.algorithm(cfg, checkpoint.read_spec(meta))
    state = checkpoint.restore(found, "learner", jax.eval_shape(algo.init, jax.random.key(0)))
    obs = jnp.asarray([[0.0, 0.1, 0.02, -0.3], [0.5, -0.1, -0.1, 0.9]])
    action = algo.act(algo.actor(state), obs, (), jax.random.key(0), explore=False).action
    expected = json.loads((FIXTURES / name / "expected.json").read_text())
    assert action.tolist() == expected["action"]
    assert float(jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(state.params)]).sum()) == pytest.approx(
        expected["params_sum"], abs=1e-4
    )


def test_spaces_come_back_from_json():
    leaves = (
        Box((2,), "int8", (-1.0, 0.0), (1.0, math.inf)),
        Discrete(3),
        MultiDiscrete((2, 4), "uint8"),
        MultiBinary((2, 2)),
    )
    space = Dict((("z", Tuple(leaves)), ("a", Dict((("inner", Box((), "bool", 0.0, 1.0)),)))))
    cfg = config.load(None, algo="ppo", env="CartPole-v1", stop=["env_steps=1"])
    spec = EnvSpec(space, Tuple(leaves[1:]), 1, 7)
    written = checkpoint.build_meta(cfg, spec, counters={})
    read = json.loads(json.dumps(spaces_json.plain(written), allow_nan=False))
    assert checkpoint.read_spec(read) == spec and checkpoint.read_spec(read).env_observation is None
    assert list(read["spec"]["observation"]["spaces"]) == ["z", "a"]
    read["spec"]["env_observation"] = read["spec"]["observation"]
    assert checkpoint.read_spec(read).env_observation == space
    del read["spec"]["env_observation"]  # as earlier versions wrote it
    assert checkpoint.read_spec(read).env_observation is None


def test_kinds_of_agents_come_back():
    cfg = config.load(None, algo="ppo", env="CartPole-v1", stop=["env_steps=1"])
    both = Tuple((Box((2,)), Discrete(3)))
    spec = EnvSpec(both, Tuple((Discrete(2), Discrete(2))), 3, 7, agents=("a", "b", "c"), kinds=((0, 2), (1,)))
    read = json.loads(json.dumps(spaces_json.plain(checkpoint.build_meta(cfg, spec, counters={})), allow_nan=False))
    assert checkpoint.read_spec(read) == spec


# ---------------------------------------------------------------- names that a library below takes for patterns


@pytest.mark.parametrize("name", ["x[1]", "a*b"])
def test_a_directory_of_any_name_is_read_back_and_no_neighbour(tmp_path, name):
    for neighbour in ("x1", "acb"):
        (tmp_path / neighbour / "3").mkdir(parents=True)
        (tmp_path / neighbour / "3" / "learner").write_text("not what is meant")
    save_all(tmp_path / name, [3])
    restored = checkpoint.restore(checkpoint.locate(tmp_path / name), "learner", TREE)
    np.testing.assert_array_equal(restored["w"], TREE["w"])
    moved = (tmp_path / name).rename(tmp_path / "moved")
    np.testing.assert_array_equal(checkpoint.restore(moved / "3", "learner", TREE)["w"], TREE["w"])


def test_what_cannot_be_read_back_is_no_checkpoint(tmp_path, monkeypatch):
    """Whatever the library leaves: a directory counts as a checkpoint once its arrays were read."""
    import orbax.checkpoint as ocp

    real = ocp.Checkpointer.save

    def loses_a_file(self, directory, *args, **keywords):
        real(self, directory, *args, **keywords)
        for path in directory.rglob("manifest.ocdbt"):
            path.unlink()

    monkeypatch.setattr(ocp.Checkpointer, "save", loses_a_file)
    with pytest.raises(OSError, match="cannot be read back"):
        checkpoint.write(tmp_path / "1", {"learner": TREE}, {"format": 1})
    refused = pytest.raises(InputError, match=r"cannot be read back: .*earlier checkpoints are complete: continue with")
    with refused:
        save_all(tmp_path, [2])
    assert not checkpoint.exists(tmp_path)
