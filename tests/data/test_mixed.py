"""Experience beside data sets: each batch has its share of both, and of the data nothing is in a checkpoint."""

import jax
import numpy as np
import pytest

from jrl import config, data
from jrl.config import Sizes
from jrl.errors import InputError
from jrl.learn import memory
from jrl.learn.program import own_replay
from jrl.run import build_population
from jrl.run.session import Session
from jrl.types import Box, Discrete

OF_DATA = -1.0  # its rewards; CartPole's own are 1
STEPS = 230  # of the data
MEMORY = ("network.core={name: gru, size: 4}", "network.max_seq_len=4", "replay.burn_in=2", "network.hidden=[4]")
DEVICES = "devices.learners=[0, 1]"
BETA = "replay.priority_beta=[[0, 0.0], [100, 1.0]]"
KINDS = {
    "transitions": (),
    "transitions by priority": ("replay.prioritized=true", BETA),
    "of three steps by priority, on two devices": ("replay.n_step=3", "replay.prioritized=true", DEVICES),
    "sequences by priority": (*MEMORY, "replay.prioritized=true"),
    "sequences, on two devices": (*MEMORY, DEVICES),
}


def mostly_slow(kinds):
    return [pytest.param(kind, marks=[] if kind == "transitions by priority" else [pytest.mark.slow]) for kind in kinds]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A data set of CartPole's spaces, in which every reward is OF_DATA."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("mixed") / "set"
    episodes = [
        data.Episode(
            rng.normal(0, 0.1, (n + 1, 4)).astype(np.float32), rng.integers(0, 2, n),
            np.full(n, OF_DATA, np.float32), n % 2 == 0, n % 2 == 1,
        )
        for n in (60, 51, 80, 39)
    ]  # fmt: skip
    data.write(data.of_episodes(Box((4,)), Discrete(2, "int64"), episodes), path)
    return str(path)


def run_config(path, *overrides, share=0.25):
    base = {
        "algo": {"name": "dqn"}, "env": {"id": "CartPole-v1", "backend": "jax", "num_envs": 4},
        "data": {"input": {"sampler": share, path: 1 - share}}, "network": {"hidden": [8]},
        "replay": {"capacity": 512, "batch_size": 32, "learning_starts": 64, "train_every": 4, "updates_per_step": 0.5},
        "run": {"compile_cache": False, "log": ["jsonl"]}, "stop": {"env_steps": 1_000_000},
        "rollout": {"iterations_per_call": 10},
    }  # fmt: skip
    return config.override(base, overrides)


def trained(cfg, calls, kept=None, iteration=0, steps=0):
    """(the Session's state, its learner, what a checkpoint would hold, iteration, steps) after so many calls."""
    with Session(cfg) as session:
        session.start()
        program = session.run.program
        if kept is not None:
            session.replace_state(program.place(kept))
            session.iteration, session.clock = iteration, session.clock._replace(env_steps=steps)
        for _ in range(calls):
            info = session.advance()
        jax.block_until_ready(session.state)
        found = jax.device_get(program.keep(session.state))
        return session.state, session.run.learn, found, session.iteration, info.env_steps_after()


def parts_of(tree, devices):
    """The devices' own parts of a replay."""
    return [
        jax.tree.map(lambda x, d=d: x.reshape(devices, -1, *x.shape[1:])[d], jax.device_get(tree))
        for d in range(devices)
    ]


@pytest.mark.parametrize("kind", mostly_slow(KINDS))
def test_every_batch_has_its_share_of_each(kind, written):
    """A quarter of each device's batch is of the environment, the rest of the data."""
    state, learn, *_ = trained(run_config(written, *KINDS[kind]), 3)
    sample = jax.jit(learn.data.buffer.sample)
    devices = 2 if DEVICES in KINDS[kind] else 1
    size = 32 // devices
    for part in parts_of(state.replay, devices):
        for k in range(5):
            batch = jax.device_get(sample(own_replay(part, learn), jax.random.key(k)))
            rows = batch.reward.reshape(size, -1)
            live = batch.weight.reshape(size, -1) > 0
            online = np.arange(size) < size // 4
            assert live[online].any() and live[~online].any()
            assert (rows[online][live[online]] > 0).all() and (rows[~online][live[~online]] < 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["of three steps by priority, on two devices", "sequences by priority"])
def test_a_run_that_is_continued_is_the_same_to_the_bit(kind, written):
    cfg = run_config(written, *KINDS[kind])
    whole = trained(cfg, 5)[2]
    _, _, half, iteration, steps = trained(cfg, 2)
    resumed = trained(cfg, 3, half, iteration, steps)[2]
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)


@pytest.mark.parametrize("memory_", [(), pytest.param(MEMORY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_schedule_of_priority_beta_counts_updates_of_data(memory_, is_alone, written):
    """Weights w ** beta of the data go from w ** 0 to w ** 1 in 100 updates; w are those of beta 1."""
    more = ["replay.prioritized=true", *memory_]
    more += [f"data.input={written}", "data.updates_per_iteration=20"] if is_alone else []
    cfg = run_config(written, *more, BETA)
    fixed = config.override(config.to_dict(cfg), ["replay.priority_beta=1.0"])
    for calls in (3, 9):
        state, learn, kept, *_ = trained(cfg, calls)
        with Session(fixed) as session:
            plain = session.run.learn
        replay = learn.data.with_rows(state.replay, learn.data.fill()) if is_alone else state.replay
        part = own_replay(replay, learn)
        drawn = [jax.jit(one.data.buffer.sample)(part, jax.random.key(0)) for one in (learn, plain)]
        weights = [np.asarray(batch.weight) for batch in drawn]
        of_data = slice(0 if is_alone else 8, None)
        scheduled, full = (weight.reshape(32, -1)[of_data] for weight in weights)
        live = full > 0
        assert full[live].min() < 0.95 * full[live].max()
        ratio = np.log(scheduled[live].max() / scheduled[live]), np.log(full[live].max() / full[live])
        np.testing.assert_allclose(ratio[0], min(kept.learner.updates / 100, 1.0) * ratio[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", mostly_slow([*KINDS][:3]))
def test_a_checkpoint_holds_nothing_of_the_data(kind, written):
    kept = trained(run_config(written, *KINDS[kind]), 3)[2]
    online, of_data = kept.replay.parts
    rows = getattr(online, "rows", online)
    assert (np.asarray(rows.reward) == 1).any() and not (np.asarray(rows.reward) == OF_DATA).any()
    sizes = [x.size for x in jax.tree.leaves(of_data)]
    assert bool(sizes) == ("by priority" in kind)


def test_the_plan_says_what_a_batch_is_of(written):
    assert f"of each batch 25% from replay, 75% from {written}" in list(Sizes(run_config(written)).lines())


def test_the_plan_says_how_large_the_data_are(written):
    with Session(run_config(written, DEVICES)) as session:
        said = session.run.replay
    assert f"; data: 4 episodes of {STEPS} steps, in 0.0 MB on each of 2 devices" in said


def test_data_that_do_not_fit_beside_replay_are_refused(written, monkeypatch):
    cfg = run_config(written)
    room_left = []  # nobody can tell, until replay has its place
    monkeypatch.setattr(memory, "available", lambda device=None: room_left[0] if room_left else None)
    check = memory.check_fits
    monkeypatch.setattr(memory, "check_fits", lambda *given, **more: (check(*given, **more), room_left.append(1000))[0])
    with pytest.raises(InputError, match=r"data.input: the data take 0.0 MB on the device beside .* of replay"):
        Session(cfg)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transitions", "of three steps by priority", "sequences by priority"])
def test_members_of_a_population_are_the_runs_that_they_would_be_alone(kind, written, tmp_path):
    """With floats of their own, from the beginning and from a checkpoint: the same updates, the same weights."""
    options = [
        option for option in KINDS.get(kind, ("replay.n_step=3", "replay.prioritized=true")) if option != DEVICES
    ]
    own = ["run.seed=1", "algo.gamma=0.9", "replay.priority_alpha=0.3", "replay.priority_beta=0.7"]
    configs = [run_config(written, *options), run_config(written, *options, *own)]
    expected = [trained(cfg, 4)[2] for cfg in configs]
    assert all(kept.learner.updates > 0 for kept in expected)
    for first, later in ((4, 0), (2, 2)):
        states, counts = [None, None], [(0, 0)] * 2
        for calls in filter(None, (first, later)):
            population, runs = build_population.make(configs)
            sessions = [Session(cfg, run=run) for cfg, run in zip(configs, runs, strict=True)]
            for session, kept, (iteration, steps) in zip(sessions, states, counts, strict=True):
                session.start()
                if kept is not None:
                    session.replace_state(session.run.program.place(kept))
                    session.iteration, session.clock = iteration, session.clock._replace(env_steps=steps)
            for _ in range(calls):
                asked = {i: (session.iteration, session.next_count()) for i, session in enumerate(sessions)}
                for i, made in population.advance(asked).items():
                    sessions[i].count_call(sessions[i].state, *made)
            states = [jax.device_get(session.run.program.keep(session.state)) for session in sessions]
            counts = [(session.iteration, session.counted()) for session in sessions]
            population.close()
        for kept, alone in zip(states, expected, strict=True):
            assert kept.learner.updates == alone.learner.updates
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *map(plain, (kept, alone))
            )


def plain(tree):
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, (tree.learner, tree.replay))
