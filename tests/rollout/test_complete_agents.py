"""Whole episodes of several agents: those that were acted in, agent by agent, as a plain loop writes them down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import config, envs, registry
from jrl.algos import parts
from jrl.rollout.complete import Agents, Complete
from jrl.rollout.sources import JaxSource
from jrl.run.session import Session
from jrl.types import COUNTS_STEP, ActOut

GAMES, T, H = 2, 5, 6
AGENTS = ("steady", "late", "guest", "waiting")
KEY = jax.random.key(3)


def act(actor, obs, carry, key, explore):
    """Draws among the actions that are allowed; records what each agent saw, by policy."""
    noise = jax.random.uniform(key, obs["action_mask"].shape)
    action = jnp.where(obs["action_mask"] != 0, noise, -1.0).argmax(-1).astype(jnp.int32)
    seen = obs["obs"].reshape(-1, 4, 2)
    extras = {"a": seen[:, [0, 2]].reshape(-1, 2), "b": seen[:, [1, 3]].reshape(-1, 2), "drawn": noise}
    return ActOut(action, (), extras)


def source():
    return JaxSource(envs.make("late_arrivals:late_arrivals", num_envs=GAMES), act, key=KEY, length=T)


def collected(made, calls):
    rollouts = [made.next((), jax.random.fold_in(KEY, i))[0] for i in range(calls)]
    return [jax.device_get(rollout) for rollout in rollouts]


def column_of(rollout, column):
    """The rows of a column: (what is seen, action, reward, noise, whether it is terminated, and truncated)."""
    rows = (rollout.obs["obs"], rollout.action, rollout.reward, rollout.extras["drawn"])
    flags = (rollout.terminated, rollout.truncated)
    return [tuple(np.asarray(x[t, column]).tolist() for x in (*rows, *flags)) for t in range(len(rollout.mask))]


def played(rollouts, column):
    """The episodes of a column that have ended, each as its rows, in one pass over what was acted on."""
    found, under_way = [], []
    for rollout in rollouts:
        for t, row in enumerate(column_of(rollout, column)):
            if rollout.mask[t, column]:
                under_way.append(row)
                if row[-1] or row[-2]:
                    found.append(under_way)
                    under_way = []
    return found


def whole(rollouts, column):
    """The episodes that stand in packed rollouts: a masked row ends each."""
    found = []
    for rollout in rollouts:
        under_way = []
        for t, row in enumerate(column_of(rollout, column)):
            if rollout.mask[t, column]:
                under_way.append(row)
            elif under_way:
                found.append(under_way)
                under_way = []
        assert not under_way
    return found


@pytest.fixture(scope="module")
def both():
    layout = Agents((0, 1, 0, 1), extras={"a": (0, 2), "b": (1, 3)})
    return collected(source(), 9), collected(Complete(source(), limit=H, agents=layout), 9)


def test_each_agents_episodes_are_those_that_were_played(both):
    plain, packed = both
    for column in range(4 * GAMES):
        expected = played(plain, column)
        assert whole(packed, column) == expected
        # of six games: the guest has two lives in each, of two steps and of two
        assert [len(rows) for rows in expected[:4]] == [[6] * 4, [4] * 4, [2] * 4, [6] * 4][column % 4]
        assert all(rows[-1][-2] and not any(row[-2] for row in rows[:-1]) for rows in expected)


def test_what_policies_record_goes_with_their_agents(both):
    for rollout in both[1]:
        seen = rollout.obs["obs"].reshape(T + H, GAMES, 4, 2)
        live = rollout.mask.reshape(T + H, GAMES, 4)
        for name, agents in (("a", [0, 2]), ("b", [1, 3])):
            recorded = rollout.extras[name].reshape(T + H, GAMES, 2, 2)
            np.testing.assert_array_equal(recorded[live[:, :, agents]], seen[:, :, agents][live[:, :, agents]])
        np.testing.assert_array_equal(seen[live][:, 1] % 4, np.broadcast_to(np.arange(4), live.shape)[live])


def test_a_step_of_a_game_is_counted_once(both):
    plain, packed = both
    steps = lambda rollouts: sum(int(parts.count_steps(jnp.uint32(0), rollout, None)) for rollout in rollouts)
    assert all(COUNTS_STEP in rollout.extras and rollout.over is None for rollout in packed)
    # six games have ended; of policy a steady is there on each step, of policy b waiting is, late is beside it
    games = sum(int(rollout.over[:, 0].sum()) for rollout in plain)
    assert games == 6 and steps(packed) == 2 * GAMES * 6 * games


SMALL = {
    "env": {"id": "late_arrivals:late_arrivals", "num_envs": 4},
    "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 2},
    "network": {"hidden": [8]},
    "rollout": {"length": 8, "batch_mode": "complete_episodes"},
    "run": {"compile_cache": False, "log": []},
}
registry.register("by-game", lambda agent, episode: "ab"[episode.id_ // 4 % 2])
REPLAY = {"algo": {"name": "dqn"}, "replay": {"batch_size": 8, "learning_starts": 16, "updates_per_step": 0.25}}


def learned(**sections):
    """(State of all policies, the last row) after seven rollouts of eight rows: eight games, each with its reset."""
    with Session(config.from_dict(config.merge(SMALL, sections)), endless=True) as session:
        session.start()
        for _ in range(7):
            session.reporter.add(session.advance())
        session.reporter.flush()
        return session.learner_state_of_all(), session.reporter.row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "policies"),
    [
        ({**REPLAY, "rollout": {"count_steps_by": "agent_steps"}}, {}),
        (
            {
                "multi_agent": {"policies": {"a": {}, "b": REPLAY}, "mapping": {"late|guest": "b", ".*": "a"}},
                "network": {"hidden": [], "core": {"name": "gru", "size": 8}, "max_seq_len": 4},
            },
            {"a": 192, "b": 192},  # on each step somebody of either is there
        ),
        (
            {"multi_agent": {"mapping": "by_agent"}},
            dict(zip(AGENTS, (192, 128, 128, 192), strict=True)),
        ),
        (
            {"multi_agent": {"policies": {"a": {}, "b": REPLAY}, "mapping": "by-game"}},
            {"a": 96, "b": 96},
        ),
    ],
)
def test_runs_learn_from_whole_episodes(sections, policies):
    state, row = learned(**sections)
    assert row["rollout/padding"] > 0
    assert row["agent/guest/count"] == 2 * 4 * 8 and row["episode/count"] == 4 * 8
    if policies:
        assert {name: int(state[name].env_steps) for name in policies} == policies
        return
    assert int(state.env_steps) == 4 * 8 * (6 + 4 + 4 + 6)  # of agents
