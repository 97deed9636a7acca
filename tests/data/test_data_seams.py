"""Runs that learn from data sets with the other parts of a run: what works together, and what is refused by name."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from test_from_data import run_config, store

from jrl import data, debug, train
from jrl.callbacks import CallbackList, Callbacks, in_program
from jrl.errors import InputError
from jrl.metrics import loggers
from jrl.run import build_data
from jrl.run.session import Session
from jrl.run.store import checkpoint
from jrl.types import Box, Discrete


def with_a_nan(path):
    """A data set of which one reward is NaN."""
    held = store()
    reward = held.reward.copy()
    reward[8] = np.nan
    data.write(dataclasses.replace(held, reward=reward), path)
    return str(path)


def train_on(path, out, *overrides, algo="dqn", stop=("updates=60",)):
    sets = [f"data.input={path}", "replay.batch_size=32", "network.hidden=[8]", "run.compile_cache=false",
            "run.log=[jsonl]", "data.updates_per_iteration=10", "run.report_every=10", *overrides]  # fmt: skip
    given = [part for value in sets for part in ("--set", value)]
    stops = [part for value in stop for part in ("--stop", value)]
    return train.main(["--algo", algo, *given, *stops, "--out", str(out)])


@pytest.fixture
def written(tmp_path):
    data.write(store(), tmp_path / "set")
    return str(tmp_path / "set")


@pytest.mark.parametrize(
    ("algo", "overrides", "message"),
    [
        *((name, ["replay.prioritized=true"], "replay.prioritized: .* has no priorities") for name in
          ("bc", "marwil", "dt")),
        ("bc", ["algo.normalize_reward=true"], "algo.normalize_reward: .* use data.reward.normalize"),
        ("dqn", ["algo.normalize_reward=true"], "algo.normalize_reward: .* use data.reward.normalize"),
        ("bc", ["stop={updates: 9, validation/loss/policy: 0.1}"], "a loss falls: .*checkpoint.keep_best=min"),
        ("dqn", ["replay.frame_stack=4"], "no stacks of 4 images"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_data_alone_is_refused_by_name(written, algo, overrides, message):
    with pytest.raises(InputError, match=message):
        build_data.make(*made_of(run_config(written, *overrides, algo={"name": algo})))


def made_of(cfg):
    from jrl.run import build_collect
    from jrl.run.plan import Plan

    found = build_data.inputs(cfg)
    return Plan(cfg, found.spec), build_collect.algorithm(cfg, found.spec), found


# ---------------------------------------------------------------- images


def images(stacked, seed=0):
    """Episodes of images whose latest 3 frames are an observation; or of unrelated images."""
    rng, episodes = np.random.default_rng(seed), []
    for steps in (5, 3, 9):
        frames = rng.integers(0, 256, (steps + 3, 8, 8)).astype(np.uint8)
        frames[:2] = frames[2]  # the first of an episode is repeated
        obs = np.stack([frames[t : t + 3] for t in range(steps + 1)])
        if not stacked:
            obs = rng.integers(0, 256, obs.shape).astype(np.uint8)
        episodes.append(data.Episode(obs, rng.integers(0, 2, steps), rng.normal(size=steps), True, False))
    return data.of_episodes(Box((3, 8, 8), "uint8", 0, 255), Discrete(2, "int64"), episodes)


@pytest.mark.slow
def test_stacks_of_frames_are_kept_as_frames(tmp_path):
    data.write(images(True), tmp_path / "set")
    drawn = {}
    for size in (1, 3):
        cfg = run_config(str(tmp_path / "set"), f"replay.frame_stack={size}", "replay.n_step=2")
        plan, algo, found = made_of(cfg)
        buffer, sets = build_data.of_stores(plan, algo, found.train, found.spec, 1, 1024, online=None)
        state = jax.tree.map(lambda x, like: x.reshape(like.shape), sets.fill(), jax.eval_shape(buffer.init))
        batch = jax.jit(buffer.sample)(state, jax.random.key(0))
        drawn[size] = {(obs.tobytes(), nxt.tobytes(), int(a)) for obs, nxt, a, w in zip(
            np.asarray(batch.obs), np.asarray(batch.next_obs), np.asarray(batch.action), np.asarray(batch.weight),
            strict=True) if w > 0}  # fmt: skip
        drawn[f"{size} bytes"] = sum(x.nbytes for x in jax.tree.leaves(state) if x.dtype == np.uint8)
    assert len(drawn[1]) == 17 and drawn[1] == drawn[3]  # all steps there are
    assert drawn["3 bytes"] < drawn["1 bytes"] / 2


def test_images_that_are_no_stacks_are_not_kept_as_frames(tmp_path):
    data.write(images(False), tmp_path / "set")
    made = made_of(run_config(str(tmp_path / "set"), "replay.frame_stack=3"))
    with pytest.raises(InputError, match=r"replay\.frame_stack 3: .* use 1"):
        build_data.make(*made)


# ---------------------------------------------------------------- numbers that are not finite


def assert_debugged(directory, errors, capsys):
    """A run has ended at an update of the bad reward, and its bundle tells so."""
    assert "ended by an update that was not finite" in errors
    assert debug.main([str(directory)]) == 0
    out = capsys.readouterr().out
    assert "not finite in training" in out and "batch.reward is not finite" in out


@pytest.mark.slow
def test_the_bundle_is_of_the_very_update_however_many_a_call_makes(tmp_path, capsys):
    path, found = with_a_nan(tmp_path / "set"), {}
    for name, more in {
        "by one": ["data.updates_per_iteration=1"], "by ten": [], "from the host": ["data.placement=host"],
    }.items():  # fmt: skip
        assert (
            train_on(
                path, tmp_path / name, "replay.batch_size=1", "algo.conservative=true", *more, stop=["updates=600"]
            )
            == 1
        )
        _, (_, state, batch, _) = debug.load(next((tmp_path / name / "nonfinite").iterdir()))
        found[name] = jax.device_get((state.updates, batch)), jax.device_get(state.params)
        if name == "by ten":
            assert_debugged(tmp_path / name, capsys.readouterr().err, capsys)
    capsys.readouterr()
    exactly, params = found.pop("by one")
    assert exactly[0] > 0 and exactly[0] % 10  # in the midst of a call of ten
    for others, weights in found.values():
        jax.tree.map(np.testing.assert_array_equal, others, exactly)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), weights, params)


# ---------------------------------------------------------------- the user's code


def twice(default, net, params, batch):
    value, metrics = default(params, batch)
    return 2.0 * value, metrics | {"mine/loss": value}


def opposite(batch):
    return batch.replace(action=1 - batch.action)


@pytest.mark.slow
def test_custom_loss_and_batch(written, tmp_path):
    code = ["custom.loss=test_data_seams:twice", "custom.batch=[test_data_seams:opposite]"]
    final = {}
    for name, more in (("plain", []), ("custom", code)):
        assert train_on(written, tmp_path / name, *more, "algo.lr=0.01", algo="bc", stop=("updates=300",)) == 0
        final[name] = loggers.read_rows(tmp_path / name / "result.jsonl")[-1]
    assert "mine/loss" in final["custom"] and "mine/loss" not in final["plain"]
    saved = [checkpoint.read(checkpoint.locate(tmp_path / name), "learner") for name in final]
    heads = [np.asarray(state["params"]["policy_head"]["bias"]) for state in saved]
    assert np.sign(heads[0][0] - heads[0][1]) == -np.sign(heads[1][0] - heads[1][1])  # the other action is cloned


class Episodic(Callbacks):
    def on_episode_end(self, *, episode, **kwargs):
        pass


class Sampling(Callbacks):
    @in_program
    def on_sample_end(self, samples):
        return samples


class Learning(Callbacks):
    def on_learn_on_batch(self, *, policy, train_batch, result, **kwargs):
        pass


class Rows(Callbacks):
    def on_train_result(self, *, algorithm, result, **kwargs):
        result["mine"] = 1.0


@pytest.mark.parametrize(
    ("name", "evaluates", "message"),
    [
        ("Episodic", False, "on_episode_end: the run learns from data.input alone"),
        ("Episodic", True, None),
        ("Sampling", True, "on_sample_end: the run learns from data.input alone"),
        ("Learning", True, r"mark the method with @jrl\.callbacks\.in_program$"),
        ("Rows", False, None),
    ],
)
def test_callbacks_get_what_there_is(written, name, evaluates, message):
    called = CallbackList(globals()[name]())
    if message is None:
        called.check(on_policy=False, collects=False, evaluates=evaluates)
        return
    with pytest.raises(InputError, match=message):
        called.check(on_policy=False, collects=False, evaluates=evaluates)
    if not evaluates:
        with pytest.raises(InputError, match=message):
            Session(run_config(written, f"custom.callbacks=[test_data_seams:{name}]"))


# ---------------------------------------------------------------- checkpoints


BEST = ["checkpoint.keep_best_by=validation/loss/policy", "checkpoint.keep_best=min", "checkpoint.every=10",
        "checkpoint.keep_last=1", "data.validation=0.4", "algo.lr=0.05"]  # fmt: skip


def test_the_checkpoint_of_the_least_validation_loss_is_kept(written, tmp_path):
    assert train_on(written, tmp_path / "run", *BEST, algo="bc", stop=("updates=100",)) == 0
    found = checkpoint.read_meta(checkpoint.locate(tmp_path / "run", best=None))
    rows = loggers.read_rows(tmp_path / "run" / "result.jsonl")
    losses = [row["validation/loss/policy"] for row in rows]
    assert losses.index(min(losses)) == rows.index(next(row for row in rows if row["updates"] == found["iteration"]))
    assert found["metrics"]["validation/loss/policy"] == min(losses) < losses[-1]


@pytest.mark.slow
def test_a_resumed_run_says_that_its_data_are_others(written, tmp_path, capsys):
    assert train_on(written, tmp_path / "run", *BEST, algo="bc") == 0
    meta = checkpoint.read_meta(checkpoint.locate(tmp_path / "run"))
    assert meta["data"] == {written: data.read(written).checksum()}
    capsys.readouterr()
    assert train.main(["--resume", str(tmp_path / "run"), "--stop", "updates=80"]) == 0
    assert "other content" not in capsys.readouterr().out
    data.write(store(seed=1), tmp_path / "other")
    for file in (tmp_path / "set").iterdir():
        file.unlink()
    for file in (tmp_path / "other").iterdir():
        file.rename(tmp_path / "set" / file.name)
    assert train.main(["--resume", str(tmp_path / "run"), "--stop", "updates=100"]) == 0
    checksum = data.read(written).checksum()
    told = f"changed: data.input {written} has other content, checksum {meta['data'][written]} -> {checksum}"
    assert told in capsys.readouterr().out
