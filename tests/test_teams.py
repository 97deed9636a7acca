"""Runs of several teams in one game: who follows which policy, what each learns, what is told of them."""

import functools
import json
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_runs import whole_and_resumed, without

import jrl
from jrl import config, envs, evaluate, train
from jrl.agents import fixed
from jrl.config import multi_agent
from jrl.envs import multi_toys
from jrl.envs.multi_agent import MultiDefinition
from jrl.envs.team import join_groups
from jrl.envs.transform import transformed
from jrl.errors import InputError
from jrl.export.__main__ import main as export
from jrl.replay import ring
from jrl.rollout import unroll
from jrl.run import preflight
from jrl.run.session import Session
from jrl.types import ActOut, element

ID = "test_teams:two_games"
AGENTS = ("left_0", "left_1", "right_0", "right_1")
LATE = ("steady", "late", "guest", "waiting")
TEAMS = {"left": ["left_0", "left_1"], "right": ["right_0", "right_1"]}


def two_games() -> MultiDefinition:
    """Two two-step games side by side, each of two agents, which end together."""
    one = multi_toys.two_step_game()
    both = lambda fn, *parts: jnp.concatenate([fn(*(x[i] for x in parts)) for i in range(2)], 1)

    def step(state, actions, draws):
        moved = [one.step(state[i], actions[:, 2 * i : 2 * i + 2], draws) for i in range(2)]
        states, rewards, ends = zip(*moved)
        return states, jnp.concatenate(rewards, 1), jnp.concatenate(ends, 1)

    return one._replace(
        agents=AGENTS,
        reset=lambda draws: (one.reset(draws), one.reset(draws) + 0),
        step=step,
        observe=lambda state: both(one.observe, state),
        state=None,
        view=None,
    )


VDN = {
    "env": {"id": ID, "num_envs": 16},
    "algo": {
        "name": "vdn", "lr": 2e-3, "target_update_every": 100, "exploration": {"name": "epsilon_greedy", "epsilon": 1.0}
    },
    "multi_agent": {"group": TEAMS, "mapping": "by_agent"},
    "network": {"hidden": [32]},
    "replay": {
        "capacity": 20_000, "batch_size": 64, "learning_starts": 1000, "train_every": 16, "updates_per_step": 0.0625
    },
    "run": {"compile_cache": False, "log": ["jsonl"]},
}  # fmt: skip
PPO = {
    "env": {"id": "late_arrivals:late_arrivals", "num_envs": 4},
    "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 2},
    "network": {"hidden": [8]},
    "rollout": {"length": 14, "iterations_per_call": 1},
    "run": {"compile_cache": False, "log": []},
}


def made(base=PPO, /, **sections):
    return config.from_dict(config.merge(base, sections))


def resolved(**section):
    return preflight.resolved(made(multi_agent=section))


@pytest.mark.slow
def test_each_team_learns_its_own_answer(tmp_path, capsys):
    """By the command, with its reports. VDN's sum must earn 7 on the left, QMIX 8 on the right.

    Under uniform exploration the best sum for the second game is [[-1.5, 2.5], [2.5, 6.5]], whose greatest value is
    below the 7 of the first; a monotone mixer represents [[0, 1], [1, 8]].
    """
    path, out = tmp_path / "run.yaml", tmp_path / "run"
    policies = {"left": {"algo": {"mixer": "sum"}}, "right": {"algo": {"mixer": "qmix"}}}
    path.write_text(json.dumps(config.merge(VDN, {"multi_agent": {"policies": policies}})))
    assert train.main([str(path), "--stop=env_steps=5000", f"--out={out}"]) == 0
    said = capsys.readouterr().out
    assert "policy left: left, 1 agent x 16 envs: Dict(" in said and "policy right: right, 1 agent x 16 envs" in said
    row = json.loads((out / "result.jsonl").read_text().splitlines()[-1])
    assert row["episode/return"] == pytest.approx(row["agent/left/return"] + row["agent/right/return"])
    assert row["agent_steps"] == 2 * row["env_steps"] and row["policy/left/return"] == row["agent/left/return"]
    assert evaluate.main([str(out), "--episodes=4", "--json", "--per-episode"]) == 0
    assert json.loads(capsys.readouterr().out)["returns"] == [15.0] * 4
    stage = np.eye(3, dtype=np.float32)
    see = lambda number: {"agents": stage[[number, number]], "present": np.ones(2, np.int8)}
    left, right = (jrl.load(out, policy=name) for name in TEAMS)
    assert left.act(see(0))[0] == 0 and right.act(see(0))[0] == 1  # who leads goes to the first game, or the second
    assert right.act(see(2)).tolist() == [1, 1]


def test_what_replay_gives_is_the_plain_record_of_the_members():
    """late_arrivals, random joint actions: each transition of a team is that of a loop over its members' own rows."""
    made = envs.make("late_arrivals:late_arrivals", num_envs=3)
    groups = {"comers": ["late", "guest"], "stayers": ["steady", "waiting"]}
    env = transformed(made, functools.partial(join_groups, groups=groups))
    width, steps, size = len(env.spec.agents), 40, 2
    act = lambda actor, obs, carry, key, explore: ActOut(
        jax.random.randint(key, (env.spec.num_envs, size), 0, 3), carry, {}
    )
    source = unroll.make(env, act, length=steps)
    played = jax.jit(lambda a, b: source.step(source.init(a), (), b)[1])
    rollout = jax.device_get(played(jax.random.key(0), jax.random.key(1)))
    for place, (name, members) in enumerate({"stayers": (0, 3), "comers": (1, 2)}.items()):
        assert env.spec.agents[place] == name
        plain = plain_record(made, rollout.action.reshape(steps, 3, width, size), members, place)
        own = fixed.Group((name,), np.array([[place]]), cast(Any, None))
        buffer = ring.make(
            element(env.spec.observation), element(env.spec.action),
            capacity=3 * (steps + 2), num_envs=3, batch_size=4096, gamma=0.9,
        )  # fmt: skip

        @jax.jit
        def drawn(rollout, buffer=buffer, own=own):
            rows = fixed._rollout_of(own, width, rollout)
            return buffer.sample(buffer.add(buffer.init(), rows), jax.random.key(2))

        batch = jax.device_get(drawn(rollout.replace(extras={name: {}}, carry={name: ()})))
        found = set()
        for i in np.flatnonzero(batch.weight):
            seen = [tree["agents"]["obs"][i] if isinstance(tree["agents"], dict) else tree["agents"][i]
                    for tree in (batch.obs, batch.next_obs)]  # fmt: skip
            found.add(key_of(seen[0], batch.action[i], batch.reward[i], batch.discount[i], seen[1]))
        assert found == plain


def key_of(obs, action, reward, discount, after):
    """A transition as something to compare; floats are whole numbers but for the discount."""
    numbers = [np.asarray(x).astype(int).ravel().tolist() for x in (obs, action, reward, after)]
    return (*map(tuple, numbers), round(float(discount), 4))


def plain_record(env, actions, members, place):
    """The transitions of a team by a loop over games and rows; `actions` [T, G, teams, 2]."""
    state, obs = jax.device_get(jax.jit(env.reset)(jax.random.key(0)))
    step, own = jax.jit(env.step), {"stayers": (0, 3), "comers": (1, 2)}
    before, found = obs["obs"].reshape(3, 4, 2), set()
    for joint in actions:
        single = np.zeros((3, 4), np.int32)
        for team, numbers in enumerate(own.values()):
            single[:, numbers] = joint[:, team]
        state, result = step(state, single.reshape(-1), jax.random.key(0))  # nothing in this game is drawn
        result = jax.device_get(result)
        after, absent = result.obs["obs"].reshape(3, 4, 2), result.several.absent.reshape(3, 4)
        for game in range(3):
            if not absent[game, list(members)].all():
                reward = result.reward.reshape(3, 4)[game, list(members)].sum()
                discount = 0.0 if result.several.over[game] else 0.9
                rows = (x[game, list(members)] for x in (before, after))
                first, last = rows
                found.add(key_of(first, joint[game, place], reward, discount, last))
        before = after
    return found


# ---------------------------------------------------------------- runs of other kinds


@pytest.mark.slow
def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(tmp_path):
    """A team has a policy of its own, two agents alone share another; they come and go, and have memory."""
    teams = {"group": {"pair": ["late", "guest"]}, "mapping": {"pair": "pair", ".*": "alone"}}
    data = config.merge(PPO, {"multi_agent": teams, "network": {"hidden": [], "core": {"name": "gru", "size": 4}}})
    data = config.merge(data, {"run": {"log": ["jsonl"], "report_every": 48}})
    rows = whole_and_resumed(tmp_path, data, cut=96, steps=192)
    # what is counted since the row before depends on where that was
    last = [without(row, "time", "perf", "/count", "/return_m") for row in rows]
    assert last[0] == last[1]
    assert {f"policy/{name}/loss/policy" for name in ("alone", "pair")} <= set(last[0])
    assert np.isfinite(last[0]["agent/pair/return"])
    for policy in ("pair", "alone"):  # of different spaces
        assert export([str(tmp_path / "cut"), "--policy", policy, "--out", str(tmp_path / policy)]) == 0
        about = json.loads((tmp_path / policy / "policy.json").read_text())
        assert about["action"]["kind"] == ("MultiDiscrete" if policy == "pair" else "Discrete")


@pytest.mark.slow
def test_teams_play_against_copies_of_themselves():
    own = {"group": TEAMS, "self_play": {"pool": 2, "window": 8, "snapshot_win_rate": 0.0}}
    with Session(
        made(env={"id": ID, "num_envs": 8}, multi_agent=own, run={"report_every": 30}), endless=True
    ) as session:
        session.start()
        for _ in range(8):
            session.finish_call(session.advance())
        session.reporter.flush()
        row = session.reporter.row
        assert set(session.policies) == {"main", "main-1", "main-2"}
    assert row["league/copies"] >= 2 and 0 <= row["league/win_rate"] <= 1


# ---------------------------------------------------------------- who follows whom, and what is refused


def test_teams_follow_policies_as_agents_do():
    follow = lambda **section: multi_agent.followers(resolved(**section).multi_agent)
    pairs = {"red": ["steady", "late"], "blue": ["guest", "waiting"]}
    assert follow(group=pairs) == {"shared": ("red", "blue")}
    assert follow(group=pairs, mapping="by_agent") == {"red": ("red",), "blue": ("blue",)}
    assert follow(group=pairs, policies={"a": {}, "b": {}}, mapping={"r.*": "a", ".*": "b"}) == {
        "a": ("red",), "b": ("blue",),
    }  # fmt: skip
    assert follow(group={"red": ["steady", "late"]}) == {"red": ("red",), "guest": ("guest", "waiting")}
    assert follow(group={"red_0": ["steady"], "red_1": ["late"]}) == {
        "red": ("red_0", "red_1"),
        "guest": ("guest", "waiting"),
    }
    again = preflight.resolved(resolved(group=pairs))
    assert again == resolved(group=pairs) and again.multi_agent.agents == ("red", "blue")
    assert list(multi_agent.lines(again)) == [
        *(f"team {name}: {', '.join(members)} act as one, 1 agent x 4 envs" for name, members in pairs.items()),
        "policy shared: red, blue, 2 agents x 4 envs",
    ]
    alone = {"agents": None, "group": {"my team": ["steady", "late", "guest", "waiting"]}}
    assert follow(**alone) == {} and resolved(**alone).multi_agent.agents is None


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"group": {}}, ["multi_agent.group: expected a team or more", "leave it out"]),
        ({"group": {"a": []}}, ["multi_agent.group.a: expected agents, got none", "leave the team out"]),
        ({"group": {"a": ["stady"]}}, ["multi_agent.group.a: expected names of steady, late", "did you mean steady?"]),
        ({"group": {"a": ["x"]}}, ["got 'x': leave it out"]),
        ({"group": {"a": ["late", "late"]}}, ["multi_agent.group: late is in a and in a: name each agent once"]),
        ({"group": {"a": ["late"], "b": ["late"]}}, ["late is in a and in b"]),
        ({"group": {"a/b": ["late"]}}, ["expected names of letters", "got 'a/b': rename it"]),
        ({"group": {"guest": ["late"]}}, ["multi_agent.group.guest: an agent in no team has that name"]),
        ({"group": {"a": ["late"]}, "agents": ["steady"]}, ["multi_agent.agents: expected steady, a", "group makes"]),
        ({"group": {"a": ["late"]}, "mapping": "shared"}, ["agents of equal spaces", "steady", " a ("]),
        ({"group": {"a": list(LATE)}, "mapping": "by_agent"}, ["one team of all agents has one policy: leave it out"]),
        ({"group": {"a": list(LATE)}, "agents": list(LATE)}, ["multi_agent.agents: one team of all agents"]),
        (
            {"group": {"a": ["late", "guest"]}, "self_play": {"pool": 1}},
            ["multi_agent.self_play: expected agents of equal spaces, got steady (", "make teams of as many agents"],
        ),
    ],
)
def test_what_does_not_go_together(section, parts):
    with pytest.raises(InputError) as e:
        resolved(**section)
    for part in parts:
        assert part in str(e.value)


def test_a_policy_that_acts_for_teams_does_not_act_for_an_agent_alone():
    cfg = config.from_dict({**VDN, "multi_agent": {"group": {"left": TEAMS["left"]}, "mapping": "by_agent"}})
    with pytest.raises(InputError, match=r"vdn acts for a team.* multi_agent\.group"), Session(cfg) as session:
        session.start()
