"""Members of a population: each is the same run as alone, whatever the other members do."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest

from jrl import config
from jrl.learn.population import Population
from jrl.run import build_population
from jrl.run.session import Session
from jrl.sweep import one_program

SMALL = {
    "env": {"id": "CartPole-v1", "backend": "jax", "num_envs": 4}, "network": {"hidden": [8]},
    "rollout": {"iterations_per_call": 2}, "run": {"log": [], "compile_cache": False},
    "stop": {"env_steps": 10_000},
}  # fmt: skip
REPLAY = {"batch_size": 16, "learning_starts": 8, "capacity": 64, "prioritized": True}
# config, and floats of each member
KINDS = {
    "ppo": (
        {"algo": {"name": "ppo", "num_epochs": 2, "num_minibatches": 2}, "rollout": {"length": 8}},
        [{}, {"lr": 1e-2, "gamma": 0.5, "clip_eps": 0.1, "ent_coef": 0.1}],
    ),
    "dqn": (
        {"algo": {"name": "dqn"}, "replay": REPLAY},
        [{}, {"lr": 1e-2, "gamma": 0.5, "replay": {"priority_alpha": 0.9, "priority_beta": 1.0}}, {"tau": 0.5}],
    ),
    "sac": (
        {"algo": {"name": "sac"}, "env": {"id": "Pendulum-v1"}, "replay": {**REPLAY, "prioritized": False}},
        [{}, {"lr": 1e-2, "ent_coef": 0.1, "tau": 0.5}],
    ),
    "pqn": ({"algo": {"name": "pqn", "num_minibatches": 2}, "rollout": {"length": 8}}, [{}, {"lr": 1e-2}]),
}  # fmt: skip


def configs(sections, floats, **more):
    """Returns configs with seeds 5, 6, ..."""
    data, found = config.merge(config.merge(SMALL, sections), more), []
    for i, own in enumerate(floats):
        of_replay = {"replay": own["replay"]} if "replay" in own else {}
        algo = {key: value for key, value in own.items() if key != "replay"}
        found.append(config.from_dict(config.merge(data, {"algo": algo, "run": {"seed": 5 + i}, **of_replay})))
    return found


@pytest.fixture
def members(request):
    """Yields (population, sessions of its members), after their start."""

    def begun(configs):
        population, runs = build_population.make(configs)
        request.addfinalizer(population.close)
        sessions = [Session(cfg, run=run) for cfg, run in zip(configs, runs, strict=True)]
        for session in sessions:
            session.start()
        return population, sessions

    return begun


def advanced(population, sessions, calls):
    for _ in range(calls):
        asked = {i: (session.iteration, session.next_count()) for i, session in enumerate(sessions)}
        for i, made in population.advance(asked).items():
            sessions[i].reporter.add(sessions[i].count_call(sessions[i].state, *made))


def alone(cfg, calls):
    """Returns kept state, actor and row of a single run after the same number of calls."""
    with Session(cfg) as session:
        session.start()
        for _ in range(calls):
            session.reporter.add(session.advance())
        session.reporter.flush()
        kept, actor = jax.device_get((session.run.program.keep(session.state), session.actor()))
        return kept, actor, session.reporter.row


def close(found, expected, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(*map(plain, (a, b)), rtol=tolerance, atol=tolerance), found, expected
    )


def plain(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def of_time(name):
    return name.startswith(("time", "perf/"))


each = [pytest.param(name, marks=[] if name == "ppo" else [pytest.mark.slow]) for name in KINDS]


@pytest.mark.parametrize("name", each)
def test_each_member_is_the_same_run_as_alone(name, members):
    made = configs(*KINDS[name])
    population, sessions = members(made)
    advanced(population, sessions, 1)
    session = sessions[1]  # its floats differ from those of the first member, whose config builds the program
    kept, actor, row = alone(made[1], 1)
    close(jax.device_get(session.run.program.keep(session.state)), kept)
    close(session.actor(), actor)
    assert row["updates"] > 0 and any(np.isfinite(row[key]) for key in row if key.startswith("loss/"))
    session.reporter.flush()
    found = {key: value for key, value in session.reporter.row.items() if not of_time(key)}
    assert found == pytest.approx({key: row[key] for key in found}, rel=1e-3, abs=1e-4, nan_ok=True)
    first, second = (jax.tree.leaves(session.learner_state().params) for session in sessions[:2])
    assert not all(map(np.array_equal, first, second))


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"custom": {"callbacks": ["x:y"]}}, "custom: code of one's own"),
        ({"run": {"on_nonfinite": "rollback"}}, "rollback begins a run again"),
        ({"run": {"disable_jit": True}}, "there are no programs"),
        ({"multi_agent": {}}, "policies have configs of their own"),
    ],
)
def test_members_that_cannot_be_one_program_have_a_reason(section, why):
    made = configs(config.merge({"algo": {"name": "ppo"}}, section), [{}, {"lr": 1e-2}])
    ((numbers, reason),) = build_population.grouped(made)
    assert numbers == [0, 1] and why in reason


def test_members_that_differ_in_more_than_floats_are_another_program():
    made = configs({"algo": {"name": "ppo"}}, [{}, {"num_epochs": 3}, {"lr": 1e-2}, {"num_epochs": 3, "gamma": 0.5}])
    wide = config.from_dict(config.merge(config.to_dict(made[0]), {"network": {"hidden": [4]}}))
    assert build_population.grouped([*made, wide]) == [([0, 2], ""), ([1, 3], ""), ([4], "")]


@pytest.mark.slow
def test_members_do_not_depend_on_each_other_or_on_devices(members):
    """Paused members, a smaller program and two devices do not change the bits of advanced members."""
    made = configs(*KINDS["dqn"])
    expected = []
    population, sessions = members(made)
    advanced(population, sessions, 2)
    expected = [jax.device_get(population.of(i)) for i in range(3)]
    again, sessions = members(made)
    advanced(again, sessions, 1)
    asked = {i: (session.iteration, session.next_count()) for i, session in enumerate(sessions)}
    again.advance({1: asked[1]}, hold=True)
    again.advance({0: asked[0], 2: asked[2]}, hold=True)
    for i in range(3):
        jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(plain, x) for x in (again.of(i), expected[i])))
    fewer, sessions = members(made)
    advanced(fewer, sessions, 1)
    fewer.keep_alone([2])
    fewer.advance({2: (sessions[2].iteration, sessions[2].next_count())})
    close(jax.device_get(fewer.of(2)), expected[2])
    dealt, sessions = members(
        [dataclasses.replace(c, devices=dataclasses.replace(c.devices, learners=(0, 1))) for c in made]
    )
    advanced(dealt, sessions, 2)
    for i in range(3):
        close(jax.device_get(dealt.of(i)), expected[i])


def test_the_shown_steps_never_decrease():
    """Members end between two rows; the last member ends, too."""
    shown, runs = [], []
    rows = [[(100, 0), (200, 1)], [(400, 0), (200, 1)], [(500, 1), (200, 1)]]  # (steps, whether it has ended)
    show = one_program.MeanRow(runs, [shown.append])
    for count, now in enumerate(rows):
        runs[:] = [
            types.SimpleNamespace(
                ended="x" if ended else None, checkpoints=True,
                session=types.SimpleNamespace(reporter=types.SimpleNamespace(count=count, row={"env_steps": steps})),
            )
            for steps, ended in now
        ]  # fmt: skip
        show()
    assert [row["env_steps"] for row in shown] == [100, 400, 400]


class Places:
    """The places of a population, without its program."""

    def __init__(self, count):
        self.members = list(range(count))

    def keep_alone(self, members):
        assert set(members) < set(self.members)
        self.members = members


@pytest.mark.parametrize(
    ("ends", "iteration", "left"),
    [
        ([10.0] * 11 + [math.inf] * 5, 100, 16),  # more than a quarter continues
        ([10.0] * 12 + [math.inf] * 4, 12, 16),
        ([10.0] * 12 + [math.inf] * 4, 13, 4),
        ([10.0] * 12 + [12.0] * 3 + [math.inf], 13, 1),  # members have ended
        ([10.0] * 12 + [14.0] * 3 + [math.inf], 15, 4),  # as before the kill
        ([10.0] * 12 + [14.0] * 3 + [math.inf], 18, 1),
        ([10.0, 10.0, math.inf], 100, 3),
    ],
)
def test_the_iteration_of_the_smaller_program_depends_on_the_ends(ends, iteration, left):
    places = Places(len(ends))
    Population.narrow(places, ends, iteration)
    assert len(places.members) == left
    Population.narrow(places, ends, iteration)
    assert len(places.members) == left
