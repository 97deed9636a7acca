"""Runs that learn from data sets: what is sampled is what stands in the files, and resuming changes no bit."""

import dataclasses
import json
import zipfile

import h5py
import jax
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jrl import config, data, registry, spaces
from jrl.data import findings
from jrl.data.rollouts import fold_rollouts
from jrl.envs.scaling import action_transform
from jrl.errors import InputError
from jrl.replay import ring
from jrl.run import build_collect, build_data, data_sets
from jrl.run.session import Session
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, element

GAMMA = 0.9


def store(seed=0, *, lengths=(3, 1, 7, 4, 12, 2), action=None, low=-2.0):
    """Episodes whose observation says which row it is: [number of the row, episode, step]."""
    rng, episodes, row = np.random.default_rng(seed), [], 0
    for e, steps in enumerate(lengths):
        obs = np.array([[row + t, e, t] for t in range(steps + 1)], np.float32)
        row += steps + 1
        actions = rng.integers(0, 2, steps) if action is None else rng.uniform(low, 2, (steps, 1))
        logs = {"log_prob": rng.normal(size=steps).astype(np.float32)}
        ends = (e % 3 == 0, e % 3 == 1)  # truly ended, at a time limit, cut
        episodes.append(data.Episode(obs, actions, rng.normal(size=steps), *ends, logs, {"number": e}))
    return data.of_episodes(Box((3,)), action or Discrete(2, "int64"), episodes, meta={"env": "made up"})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return str(data.write(store(), tmp_path_factory.mktemp("written") / "set"))


def run_config(path, *overrides, **sections):
    base = {
        "algo": {"name": "dqn", "gamma": GAMMA}, "data": {"input": path}, "replay": {"batch_size": 64},
        "network": {"hidden": [8]}, "run": {"compile_cache": False, "log": ["jsonl"]}, "stop": {"updates": 60},
    }  # fmt: skip
    return config.override(config.merge(base, sections), overrides)


def buffer_of(cfg, devices=1):
    """One device's buffer, the replay of all devices as one device sees its part, and the store."""
    found = build_data.inputs(cfg)
    algo = build_collect.algorithm(cfg, found.spec)
    buffer, sets = build_data.of_stores(
        config.Sizes(cfg), algo, found.train, found.spec, devices, cfg.replay.batch_size // devices, online=None
    )
    full, like = jax.device_get(sets.fill()), jax.eval_shape(buffer.init)
    parts = [jax.tree.map(lambda x, own, d=d: x.reshape(devices, *own.shape)[d], full, like) for d in range(devices)]
    return buffer, parts, next(iter(found.train.values()))


def check_transitions(batch, held, n):
    """Every transition of weight is that of the plain record."""
    for i in np.flatnonzero(np.asarray(batch.weight)):
        row = int(batch.obs[i, 0])
        e = int(held.obs[row, 1])
        last = held.offsets[e + 1] - 1
        steps = min(n, last - row)
        assert steps > 0, "a final observation was sampled"
        assert batch.action[i] == held.action[row]
        np.testing.assert_allclose(
            batch.reward[i], sum(GAMMA**k * held.reward[row + k] for k in range(steps)), rtol=2e-6, atol=1e-6
        )
        ended = row + steps == last and held.terminated[e]
        np.testing.assert_allclose(batch.discount[i], 0.0 if ended else GAMMA**steps, rtol=1e-6)
        assert batch.next_obs[i, 0] == row + steps


@pytest.mark.parametrize(
    ("n", "devices"), [pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(3, 1, marks=pytest.mark.slow), (2, 2)]
)
def test_transitions_are_those_of_the_record(written, n, devices):
    buffer, parts, held = buffer_of(run_config(written, f"replay.n_step={n}", "replay.batch_size=1024"), devices)
    seen = set()
    for d, part in enumerate(parts):
        batch = jax.jit(buffer.sample)(part, jax.random.key(d))
        check_transitions(jax.tree.map(np.asarray, batch), held, n)
        seen |= set(np.asarray(batch.obs[:, 0])[np.asarray(batch.weight) > 0].tolist())
        assert int(buffer.live(part)) == data_sets.deal(held, devices)[d].num_steps
    assert len(seen) == held.num_steps  # of 1024 draws of 29 rows all come


def test_transitions_to_the_end_are_those_of_the_record(written):
    held = store()
    extras = data_sets.to_end(held, GAMMA)
    like = {"to_end": data_sets.element_of(extras)}
    rows = ring.make(
        element(held.observation), element(Discrete(2)), capacity=held.num_rows + 4, num_envs=1, batch_size=64,
        gamma=GAMMA, extras=like, to_end=True,
    )  # fmt: skip
    spec = data_sets.read(run_config(written), None).spec
    ready = data_sets.prepared(run_config(written), held, spec)
    state = fold_rollouts(rows.add, rows.init(), ready, extras={"to_end": extras})
    check_transitions(jax.tree.map(np.asarray, jax.jit(rows.sample)(state, jax.random.key(0))), ready, n=100)


def test_sequences_are_those_of_the_record(written):
    cfg = run_config(written, "network.core.name=lstm", "network.max_seq_len=3", "replay.burn_in=2")
    buffer, (part,), held = buffer_of(cfg)
    batch = jax.tree.map(np.asarray, jax.jit(buffer.sample)(part, jax.random.key(0)))
    rows = batch.window.obs[:, :, 0].astype(int)
    follow = np.minimum(rows[:, :-1] + 1, held.num_rows - 1)  # six rows; behind the last final observation is no other
    np.testing.assert_array_equal(rows[:, 1:], follow)
    steps = held.is_step()
    np.testing.assert_array_equal(batch.window.reset[:, :-1], ~steps[rows[:, :-1]])
    live = batch.weight > 0
    np.testing.assert_array_equal(live, steps[rows[:, 2:5]])
    np.testing.assert_array_equal(batch.action[live], held.action[rows[:, 2:5]][live])
    np.testing.assert_allclose(batch.reward[live], held.reward[rows[:, 2:5]][live], rtol=1e-6)
    assert all(not np.any(x) for x in jax.tree.leaves(batch.window.carry))


def test_a_full_ring_is_that_of_the_same_rollouts():
    held = store()
    make = lambda: ring.make(
        element(held.observation), element(Discrete(2)), capacity=held.num_rows + 9, num_envs=1, batch_size=32,
        gamma=GAMMA,
    )  # fmt: skip
    ready = dataclasses.replace(held, action=held.action.astype(np.int32), reward=held.reward.astype(np.float32))
    at_once = fold_rollouts(make().add, make().init(), ready)
    step_by_step, add = make().init(), jax.jit(make().add)
    whole = jax.device_get(fold_rollouts(lambda nothing, rollout: rollout, (), ready))
    for t in range(held.num_rows):  # as a run collects them
        cut = lambda x, t=t: x[t : t + 1]
        rows = {k: jax.tree.map(cut, getattr(whole, k)) for k in ("obs", "action", "reward", "terminated", "truncated")}
        after = whole.obs[min(t + 1, held.num_rows - 1)]
        one = dataclasses.replace(whole, **rows, mask=cut(whole.mask), last_obs=after, contiguous=np.array([t > 0]))
        step_by_step = add(step_by_step, one)
    jax.tree.map(np.testing.assert_array_equal, at_once, step_by_step)


def test_actions_of_the_environment_become_those_of_the_policy(tmp_path):
    given = store(action=Box((1,), "float64", -2.0, 4.0), low=-1.5)
    data.write(given, tmp_path / "set")
    cfg = run_config(str(tmp_path / "set"), algo={"name": "sac", "gamma": GAMMA})
    found = data_sets.read(cfg, None)
    assert found.spec.action == Box((1,), "float32", -1.0, 1.0)
    (ready,) = found.train.values()
    steps = given.is_step()
    np.testing.assert_allclose(ready.action[steps] * 3 + 1, given.action[steps], rtol=1e-5, atol=1e-6)
    # a density in [-1, 1] is three times that in [-2, 4]
    shift = ready.columns["log_prob"][steps] - given.columns["log_prob"][steps]
    np.testing.assert_allclose(shift, np.log(3.0), rtol=1e-5)
    as_they_are = run_config(str(tmp_path / "set"), "data.actions_in_input_normalized=true", algo={"name": "sac"})
    (raw,) = data_sets.read(as_they_are, None).train.values()
    np.testing.assert_allclose(raw.action, given.action, rtol=1e-6)


BOUNDS = [(-1, 3), (-1, 0), (-3, 1), (0, 1), (-1, 1), (2, 2), (-2, np.inf), (-1, np.inf), (-np.inf, np.inf), (0.1, 0.3)]


@pytest.mark.parametrize("where", ["one box", "an element each", "a tree"])
@pytest.mark.parametrize("clip", [True, False])
def test_actions_of_a_data_set_are_what_the_policy_would_have_chosen(where, clip):
    """Whatever the bounds: the environment's transform of the prepared actions gives the recorded ones again."""
    low, high = np.array(BOUNDS).T.astype(np.float32)
    if where == "one box":
        each = [Box((2,), "float32", float(a), float(b)) for a, b in BOUNDS]
    elif where == "an element each":
        each = [Box((len(BOUNDS),), "float32", tuple(map(float, low)), tuple(map(float, high)))]
    else:
        parts = tuple((f"{i}", Box((), "float32", float(a), float(b))) for i, (a, b) in enumerate(BOUNDS))
        each = [Dict((("box", Dict(parts)), ("choice", Discrete(3, "int32"))))]
    rng = np.random.default_rng(0)

    def draw(leaf):
        if isinstance(leaf, Discrete):
            return rng.integers(0, leaf.n, 8)
        first, last = (np.clip(b, -5, 5) for b in leaf.bounds())
        return (first + (last - first) * rng.random((8, *leaf.shape))).astype(np.float32)

    for space in each:
        cfg = run_config("x", f"env.clip_actions={str(clip).lower()}", algo={"name": "bc"})
        taken = spaces.from_leaves(space, [draw(leaf) for _, leaf in spaces.leaves(space)])
        episode = data.Episode(np.zeros((9, 1), np.float32), taken, np.zeros(8), True, False, {"log_prob": np.zeros(8)})
        held = data.of_episodes(Box((1,)), space, [episode])
        chosen, to_env = action_transform(space, normalize=True, clip=clip)
        spec = EnvSpec(Box((1,)), chosen, 1, None, None if chosen == space else space)
        ready = data_sets.prepared(cfg, held, spec)
        steps = jax.tree.map(lambda x: x[:-1], ready.action)
        again = steps if to_env is None else to_env(steps)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), again, taken)
        for (_, leaf), x in zip(spaces.leaves(chosen), jax.tree.leaves(steps), strict=True):
            if isinstance(leaf, Box):
                assert (x >= leaf.bounds()[0] - 1e-5).all() and (x <= leaf.bounds()[1] + 1e-5).all()
        assert np.isfinite(ready.columns["log_prob"]).all()


VALUES = {  # the space of the environment, what the file has, and what it becomes: a dtype, or the number that is wrong
    "floats": (Discrete(3, "int64"), [0.0, 2.0, 1.0], "int32"),
    "fractions": (Discrete(3, "int64"), [0.0, 0.6, 1.6], "got 0.6 in 2 rows, first in episode 0, step 1"),
    "too large": (Discrete(3, "int64"), [0.0, 4.0, 8.0], "got 4.0 in 2 rows, first in episode 0, step 1"),
    "below": (Discrete(3, "int64"), [0, -1, 1], "got -1 in 1 row, first in episode 0, step 1"),
    "NaN": (Discrete(3, "int64"), [0, 1, np.nan], "got nan in 1 row, first in episode 0, step 2"),
    "bools": (Discrete(2, "int64"), [True, False, True], "int32"),
    "one axis more": (Discrete(3, "int64"), [[0], [2], [1]], "int32"),
    "one axis less": (Box((1,), "float32", -1.0, 1.0), [0.5, 0.2, 0.1], "float32"),
    "several": (MultiDiscrete((2, 3), "int64"), [[1.0, 2.0], [0.0, 0.0], [1.0, 2.5]], r"got \[1.0, 2.5\] in 1 row"),
    "bits": (MultiBinary((2,)), [[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], r"got \[0.0, 2.0\] in 1 row"),
}


@pytest.mark.parametrize("as_observation", [False, True])
@pytest.mark.parametrize("case", VALUES)
def test_numbers_are_read_by_the_space_and_not_by_the_dtype_of_the_file(case, as_observation):
    space, given, expected = VALUES[case]
    given = np.array(given)
    if as_observation:
        held = of_arrays(np.concatenate([given, given[:1]]), np.zeros(3, int))
        spec = EnvSpec(data_sets.narrow(space), Discrete(2), 1, None)
    else:
        held = of_arrays(np.zeros((4, 1), np.float32), given)
        spec = EnvSpec(Box((1,)), data_sets.narrow(space, action=True), 1, None)
    cfg = run_config("x", algo={"name": "bc"})
    if "got" in expected:
        with pytest.raises(InputError, match=f"(observations|actions): expected {type(space).__name__}.*{expected}"):
            data_sets.prepared(cfg, held, spec)
        return
    found = data_sets.prepared(cfg, held, spec)
    x, leaf = (found.obs, spec.observation) if as_observation else (found.action, spec.action)
    assert x.dtype == leaf.dtype and x.shape[1:] == leaf.shape
    np.testing.assert_array_equal(x[:3].reshape(-1), given.reshape(-1).astype(x.dtype))


def of_arrays(obs, action):
    """One episode of arrays as a file has them, whose spaces are of their dtypes."""
    space = Box(action.shape[1:], action.dtype.name)
    return data.of_episodes(
        Box(obs.shape[1:], obs.dtype.name), space, [data.Episode(obs, action, np.zeros(len(action)), True, False)]
    )


@pytest.mark.parametrize(("name", "given"), [("uint8", 300), ("uint8", 0.25), ("int32", 2**40), ("float32", 1e300)])
def test_observations_that_a_cast_would_change_are_refused(name, given):
    obs = np.zeros((4, 1), np.asarray(given).dtype)
    obs[2] = given
    spec = EnvSpec(Box((1,), name), Discrete(2), 1, None)
    with pytest.raises(InputError, match=r"observations: expected Box.*, got .* in 1 row, first in episode 0, step 2"):
        data_sets.prepared(run_config("x", algo={"name": "bc"}), of_arrays(obs, np.zeros(3, int)), spec)


def test_what_observations_tell_of_earlier_steps(written):
    past = ("network.use_prev_action=true", "network.use_prev_reward=true", "env.frame_stack=2")
    found = data_sets.read(run_config(written, *past), None)
    (ready,), held = found.train.values(), store()
    assert [path for path, _ in spaces.leaves(found.spec.observation)] == ["obs", "prev_action", "prev_reward"]
    begins = np.isin(np.arange(held.num_rows), held.offsets[:-1])
    before = np.maximum(np.arange(held.num_rows) - 1, 0)
    np.testing.assert_array_equal(ready.obs["prev_action"], np.where(begins, 0, held.action[before]))
    np.testing.assert_allclose(ready.obs["prev_reward"], np.where(begins, 0, held.reward[before]), rtol=1e-6)
    stacked = np.stack([np.where(begins[:, None], held.obs, held.obs[before]), held.obs], 1)
    np.testing.assert_array_equal(ready.obs["obs"], stacked)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("normalize=range", lambda r, s: r * 1000 / (s.returns().max() - s.returns().min())),
        ("normalize=std", lambda r, s: r / s.reward[s.is_step()].std()),
        ("scale=2 shift=-0.5 clip=[-1,1]", lambda r, s: (2 * r - 0.5).clip(-1, 1)),
    ],
)
def test_rewards(written, how, expected):
    cfg = run_config(written, *(f"data.reward.{x}" for x in how.split()))
    (ready,) = data_sets.read(cfg, None).train.values()
    held, steps = store(), store().is_step()
    np.testing.assert_allclose(ready.reward[steps], expected(held.reward[steps], held), rtol=1e-5)
    assert not ready.reward[~steps].any()


def trained(cfg, calls, saved=None, kept=None):
    """(what a checkpoint would hold, the metrics of the last call) after so many calls."""
    with Session(cfg) as session:
        session.start()
        if kept is not None:
            session.replace_state(session.run.program.place(kept))
            session.iteration = saved
            session.clock = session.clock._replace(env_steps=saved)
        for _ in range(calls):
            info = session.advance()
        found = jax.device_get(session.run.program.keep(session.state))
        return found, {k: np.asarray(v) for k, v in info.metrics.items()}, session.iteration


LEARN = ("data.updates_per_iteration=20", "data.validation=0.3")
HOST = "data.placement=host"
SCHEDULED = {"name": "dqn", "lr": [[0, 1.0e-3], [60, 0.0]], "normalize_obs": True}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replay.prioritized=true", "devices.fake=2", HOST])
def test_a_run_that_is_continued_is_the_same_to_the_bit(written, how):
    cfg = run_config(written, *LEARN, how)
    whole, metrics, _ = trained(cfg, 3)
    half, _, iteration = trained(cfg, 1)
    resumed, again, _ = trained(cfg, 2, iteration, half)
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    for name in metrics:
        np.testing.assert_array_equal(metrics[name], again[name], name)
    assert any(name.startswith("validation/loss") for name in metrics)
    assert (jax.tree.leaves(half.replay) != []) == ("prioritized" in how)  # data are no part of a checkpoint


def test_where_data_lie_changes_no_bit(written):
    cfg = run_config(written, "data.updates_per_iteration=20", algo=SCHEDULED)
    on_device = trained(cfg, 3)[0]
    on_host = trained(config.override(config.to_dict(cfg), [HOST]), 3)[0]
    jax.tree.map(np.testing.assert_array_equal, on_device, on_host)


def test_schedules_count_updates_and_statistics_of_observations_are_those_of_the_data(written):
    cfg = run_config(written, "data.updates_per_iteration=20", algo=SCHEDULED)
    (kept, first, _), (_, third, _) = trained(cfg, 1), trained(cfg, 3)
    expected = [np.mean(1 - np.arange(20) / 60) / 1e3, np.mean(1 - np.arange(40, 60) / 60) / 1e3]
    np.testing.assert_allclose([first["train/lr"], third["train/lr"]], expected, rtol=1e-4)
    held = store()
    np.testing.assert_allclose(kept.learner.obs_stats.mean, held.obs[held.is_step()].mean(0), rtol=1e-4)


def test_a_mix_has_its_share_of_each(written, tmp_path):
    other = dataclasses.replace(store(1), obs=store(1).obs + 1000)
    data.write(other, tmp_path / "other")
    cfg = run_config({written: 0.75, str(tmp_path / "other"): 0.25})
    found = build_data.inputs(cfg)
    algo = build_collect.algorithm(cfg, found.spec)
    buffer, sets = build_data.of_stores(config.Sizes(cfg), algo, found.train, found.spec, 1, 64, online=None)
    full = jax.tree.map(lambda x, like: x.reshape(like.shape), sets.fill(), jax.eval_shape(buffer.init))
    batch = jax.jit(buffer.sample)(full, jax.random.key(3))
    np.testing.assert_array_equal(np.asarray(batch.obs[:, 0]) >= 1000, np.arange(64) >= 48)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.input=nowhere"], "nowhere does not exist"),
        (["data.input=null", "data.where={policy: main}", "env.id=CartPole-v1"], "selects, got null: set data.input"),
        (["env.id=Acrobot-v1", "env.backend=jax"], "leave env.id out"),
        (["algo.name=ppo", "replay=null"], "learns from its own rollouts"),
        (["evaluation.every=10"], "evaluations need an environment"),
        ([HOST, "replay.prioritized=true"], "leave replay.prioritized out"),
        (["devices.fake=4", "replay.batch_size=63"], "not divisible by 4 devices"),
    ],
)
def test_what_cannot_be_is_refused_by_name(written, overrides, message):
    with pytest.raises(InputError, match=message):
        cfg = run_config(written, *overrides)
        build_data.inputs(cfg)


@pytest.mark.slow
def test_batches_that_were_fetched_ahead_are_those_of_the_seed(written):
    """A program that begins anew with another seed draws its own."""
    cfg = run_config(written, *LEARN, HOST)

    def after(program, seed):
        state, _, _ = program.advance(program.init(seed), seed, 20, 5)
        return jax.device_get(state.learner)

    with Session(cfg) as session:
        session.start()
        session.advance()  # fetches those from update 20 on, of seed 0
        again = after(session.run.program, 1)
    with Session(cfg) as session:
        jax.tree.map(np.testing.assert_array_equal, again, after(session.run.program, 1))


def test_data_are_named_by_a_list_of_paths_or_a_name_of_ones_own(tmp_path):
    paths = [str(data.write(store(seed), tmp_path / str(seed))) for seed in (0, 1)]
    (listed,) = data_sets.read(run_config(paths), None).train.values()
    assert listed.num_steps == 2 * store().num_steps
    np.testing.assert_array_equal(listed.obs, np.concatenate([store(0).obs, store(1).obs]))
    registry.register("mine_of_two", lambda: store(1))
    (own,) = data_sets.read(run_config("mine_of_two"), None).train.values()
    np.testing.assert_array_equal(own.reward, store(1).reward.astype(np.float32))
    (chosen,) = data_sets.read(run_config(paths, "data.where={number: 2}"), None).train.values()
    np.testing.assert_array_equal(chosen.obs, np.concatenate([store(seed).episode(2).obs for seed in (0, 1)]))


# ---------------------------------------------------------------- files that lack what a run does not read


def unrewarded(path, kind):
    """A data set of 2 episodes without rewards, as others write it."""
    obs, choice = np.arange(20, dtype=np.float32)[:, None] * [1, -1], np.arange(20) % 3
    ends = np.arange(20) % 10 == 9
    if kind == "x.npz":
        data.write(store(), path)
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist() if name != "reward.npy"}
        with zipfile.ZipFile(path, "w") as archive:
            for name, x in members.items():
                archive.writestr(name, x)
    elif kind == "x.hdf5":
        with h5py.File(path, "w") as file:
            file["observations"], file["actions"], file["terminals"] = obs, choice[:, None], ends
            file["timeouts"] = np.zeros(20, bool)
    else:
        columns = {"obs": obs.tolist(), "actions": choice.tolist(), "terminateds": ends.tolist()}
        if kind == "x.json":
            path.write_text(json.dumps({"type": "SampleBatch", **columns}))
        else:
            parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("kind", ["x.npz", "x.hdf5", "x.json", "x.parquet"])
def test_data_without_rewards_teach_imitation_and_nothing_that_reads_them(tmp_path, kind):
    path = unrewarded(tmp_path / kind, kind)
    held = data.read(path)
    assert not held.has_rewards and not held.reward.any() and isinstance(held.action_space, Discrete)
    assert [f.kind for f in findings.check_data(held) if "reward" in f.kind] == ["no rewards"]
    for format, name in (("jrl", "y.npz"), ("d4rl", "y.hdf5"), ("minari", "y-v0"), ("rllib-json", "y.json")):
        assert not data.read(data.write(held, tmp_path / name, format)).has_rewards
    cfg = run_config(str(path), algo={"name": "bc"})
    assert data_sets.read(cfg, None).spec.action == data_sets.narrow(held.action_space, action=True)
    for reads in (
        {"algo": {"name": "bc", "top_fraction": 0.5}}, {"algo": {"name": "marwil"}}, {"algo": {"name": "dqn"}},
        {"algo": {"name": "bc"}, "data": {"estimate": {"methods": ["dm"]}}},
        {"algo": {"name": "bc"}, "network": {"use_prev_reward": True}},
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"has no rewards, which this run reads: write them, or imitate"):
            data_sets.read(run_config(str(path), **reads), None)
    rewarded = dataclasses.replace(held, meta={})
    with pytest.raises(InputError, match="have different rewards: None and none"):
        data.concatenated([rewarded, held])


def test_files_of_d3rlpy_1_are_read(tmp_path):
    """`episode_terminals` marks any end, `terminals` the true ones; actions may be integers [N, 1]."""
    row = np.arange(12)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["observations"], file["actions"] = row[:, None] * np.ones((1, 2), np.float32), (row % 3)[:, None]
        file["rewards"], file["terminals"] = row[:, None].astype(np.float32), (row == 4).astype(np.float32)
        file["episode_terminals"] = ((row == 4) | (row == 8) | (row == 11)).astype(np.float32)
        file["discrete_action"], file["version"] = True, "1.0"
    held = data.read(tmp_path / "x.h5")
    assert held.lengths().tolist() == [5, 3, 2] and held.action_space == Discrete(3, "int64")
    assert held.terminated.tolist() == [True, False, False] and held.truncated.tolist() == [False, True, True]
    assert held.reward.tolist() == [0, 1, 2, 3, 4, 0, 5, 6, 7, 0, 9, 10, 0]
