"""Self-play: who sits where, what is counted, what a copy is, and that a resumed run decides as it would have."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_runs import whole_and_resumed
from jax import monitoring

import jrl
from jrl import config, evaluate, train
from jrl.agents import league, self_play
from jrl.agents.self_play import seats
from jrl.config import multi_agent
from jrl.errors import InputError
from jrl.learn import parallel
from jrl.rollout.unroll import RAW_STEPS
from jrl.run import build, build_learner
from jrl.run.session import Session
from jrl.types import Rollout

POOL = 2
SMALL = {
    "env": {"id": "TicTacToe-v0", "num_envs": 8},
    "algo": {"name": "a2c", "normalize_obs": True},
    "network": {"hidden": [8]},
    "rollout": {"length": 16, "iterations_per_call": 1},
    "multi_agent": {"self_play": {"pool": POOL, "window": 8, "snapshot_win_rate": 0.0}},
    "run": {"compile_cache": False, "log": [], "report_every": 200},
}
DQN = {"algo": {"name": "dqn"}, "replay": {"batch_size": 16, "learning_starts": 32, "updates_per_step": 0.0625}}


def made(**sections):
    return config.from_dict(config.merge(SMALL, sections))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def session():
    """A run that has begun: its programs are compiled once. Tests look at a copy of its state, or let it go on."""
    with Session(made(), endless=True) as found:
        found.start()
        yield found


def copied(session):
    """The state, which may be donated."""
    return jax.jit(lambda x: jax.tree.map(jnp.copy, x))(session.state)


# ---------------------------------------------------------------- who sits where


@pytest.mark.parametrize(("agents", "pool"), [(2, 1), (2, 3), (3, 2)])
def test_every_seat_meets_every_place_as_often(agents, pool):
    mine, theirs = seats(agents, pool)
    assert mine.shape == (1, agents * pool) and theirs.shape == (pool, agents * (agents - 1))
    assert sorted([*mine.ravel(), *theirs.ravel()]) == list(range(agents * agents * pool))
    met = []
    for game in range(agents * pool):
        columns = range(game * agents, (game + 1) * agents)
        own = [c for c in columns if c in mine]
        others = {k for k in range(pool) for c in columns if c in theirs[k]}
        assert len(own) == 1 and len(others) == 1
        met.append((own[0] % agents, others.pop()))
    assert sorted(met) == [(seat, k) for seat in range(agents) for k in range(pool)]


def test_each_column_acts_with_the_weights_of_who_sits_there(session):
    """The log-probability of what was done is that of the one policy that has the column."""
    # different copies: the learner's weights, scaled
    scaled = lambda name, x: jax.tree.map(lambda leaf: leaf * (2.0 + int(name[-1])), x)
    state = copied(session)
    kept = jax.device_get(session.run.program.keep(state).learner)
    for name in ("main-1", "main-2"):
        kept[name] = dataclasses.replace(kept[name], params=scaled(name, kept[name].params))
    kept["league"] = dataclasses.replace(kept["league"], pick=np.array([1, 0], np.int32))
    state = session.run.program.assign(state, kept)
    _, rollout, _ = session.run.program.collect(state, 0, 0)
    rollout, policies, actors = jax.device_get(rollout), session.run.policies, session.run.program.actor(state)
    learner, pool = policies.bind(build.algorithm_of_one)
    by_name = policies.by_name(actors)
    games = rollout.mask.shape[1] // 2
    mine = [2 * g + g % 2 for g in range(games)]
    theirs = [[2 * g + 1 - g % 2 for g in range(games) if g // 2 % POOL == k] for k in range(POOL)]

    @jax.jit
    def log_prob(params, obs, action):
        actor = dataclasses.replace(kept["main"], params=params)
        return learner.algo.outputs(actor, obs)["distribution"].log_prob(action)

    for columns, params, extras in (
        (mine, kept["main"].params, rollout.extras[learner.label]["log_prob"][0]),
        (theirs[0], kept["main-2"].params, None),
        (theirs[1], kept["main-1"].params, None),
    ):
        found = log_prob(params, *jax.tree.map(lambda x, c=columns: x[0][c], (rollout.obs, rollout.action)))
        if extras is None:  # of the pool, by blocks: block, place, column
            whole = rollout.extras[pool.label]["log_prob"][0].reshape(-1, POOL, 2)
            extras = whole[:, 0 if columns == theirs[0] else 1].reshape(-1)
        np.testing.assert_allclose(found, extras, rtol=1e-4, atol=1e-5)
    equal(by_name["main-1"].params, kept["main-2"].params)  # as `pick` says


def test_the_learner_learns_from_its_columns_as_from_a_plain_record(session):
    program, learner = session.run.program, session.run.policies.groups[0]
    algo = build.algorithm_of_one(learner.cfg, learner.spec, axis_name=parallel.AXIS)
    make, size = build_learner.maker(config.Sizes(learner.cfg), algo, learner.spec, devices=1, length=16)
    taught = make(learner.cfg.algo, algo), size
    state, rollout, _ = program.collect(copied(session), 0, 0)
    before = jax.jit(lambda x: jax.tree.map(jnp.copy, x))(state.learner[learner.label])
    learned, _ = program.learn(state, rollout, 0, 0)
    key = program._keys(0, 0, 0)[1]
    columns, rollout = np.array([2 * g + g % 2 for g in range(8)]), jax.device_get(rollout)
    by_row = ("obs", "action", "reward", "terminated", "truncated", "mask")
    record = Rollout(
        **{name: jax.tree.map(lambda x: x[:, columns], getattr(rollout, name)) for name in by_row},
        last_obs=jax.tree.map(lambda x: x[columns], rollout.last_obs),
        contiguous=rollout.contiguous[columns],
        extras=rollout.extras[learner.label],
        carry=(),
        over=rollout.over,
    )
    step = lambda *args: jax.vmap(lambda _: taught[0].step(*args)[0], axis_name="device")(jnp.zeros(1))
    alone = jax.jit(step)(before, (), record, jax.random.fold_in(key, 0))
    found, alone = jax.device_get((learned.learner[learner.label], alone))
    close = lambda a, b: np.testing.assert_allclose(a, b[0], rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found.state.params, alone.state.params)


# ---------------------------------------------------------------- copies


def test_a_copy_is_the_learner_to_the_bit_and_nothing_else_moves(session):
    """The first of the run."""
    session.reporter.add(session.advance())
    before = jax.device_get(session.run.program.keep(session.state))
    session.reporter.flush()
    after = jax.device_get(session.run.program.keep(session.state))
    assert session.reporter.row["league/copies"] == 1 and session.reporter.row["league/size"] == 3
    for name in ("params", "obs_stats", "env_steps"):
        equal(getattr(after.learner["main-2"], name), getattr(before.learner["main"], name))
    equal(after.learner["main"], before.learner["main"])
    equal(after.learner["main-1"], before.learner["main-1"])
    equal((after.source, after.replay), (before.source, before.replay))
    known = after.learner["league"]
    assert known.generation.tolist() == [0, 1] and known.pick.tolist() == [0, 1]
    assert not known.counts.any() and known.since == 1


# ---------------------------------------------------------------- what counts


def plain_count(record, done, mask, since, agents, pool, pick):
    """By a loop over rows and games: results of the learner against each place."""
    found = np.zeros((pool, 3), int)
    for t in range(mask.shape[0]):
        for g in range(mask.shape[1] // agents):
            own = g * agents + g % agents
            others = [c for c in range(g * agents, (g + 1) * agents) if c != own]
            if not (done[t, own] and mask[t, own]) or record["length"][t, own] > since + t + 1:
                continue
            mine, best = record["episode_return"][t, own], record["episode_return"][t, others].max()
            found[pick[g // agents % pool], 0 if mine > best else 1 if mine == best else 2] += 1
    return found


@functools.cache
def counted_of(agents):
    return jax.jit(lambda league, rollout: self_play.counted(league, rollout, agents))


@pytest.mark.parametrize("swapped", [True, False])
def test_games_that_were_under_way_at_a_swap_do_not_count(session, swapped):
    pick = np.array([1, 1], np.int32)
    session.advance()
    state = copied(session)
    kept = jax.device_get(session.run.program.keep(state).learner)
    since = kept["league"].since + np.int32(swapped)  # games of TicTacToe are shorter than a rollout
    kept["league"] = before = dataclasses.replace(kept["league"], since=since, pick=pick)
    state = session.run.program.assign(state, kept)
    _, rollout, _ = session.run.program.collect(state, 0, 1)
    after = jax.device_get(counted_of(2)(before, rollout))
    host, rows = jax.device_get(rollout), 0 if swapped else 100  # since the swap
    expected = plain_count(host.extras[RAW_STEPS], host.terminated | host.truncated, host.mask, rows, 2, POOL, pick)
    np.testing.assert_array_equal(after.counts - before.counts, expected)
    ended = int(host.over.sum())
    assert expected.sum() < ended if swapped else expected.sum() == ended
    assert expected[0].sum() == 0 and expected.sum() > 0


def test_the_return_above_all_others_wins():
    record = {
        "episode_return": np.array([[3.0, 1.0, 2.0, 0.0, 5.0, 5.0, 1.0, 2.0, 0.0]], np.float32),
        "length": np.full((1, 9), 1),
        "terminated": np.ones((1, 9), bool),
        "truncated": np.zeros((1, 9), bool),
    }
    no = np.zeros((1, 9), bool)
    extras = {RAW_STEPS: record, "league": np.zeros((1, 9), np.int32)}
    rollout = Rollout({}, {}, no, no, ~no, no, ~no, no[0], extras, ())
    found = counted_of(3)(league.init(1), rollout)
    # game 0 is won by seat 0; in game 1 seat 1 has as much as seat 2; in game 2 seat 2 has least
    np.testing.assert_array_equal(found.counts, [[1, 1, 1]])


def run_on(session, calls):
    """Advances, and returns how many copies there were after each call."""
    found = []
    for _ in range(calls):
        session.finish_call(session.advance())
        found.append(int(self_play.on_host(session.state).copies))
    return found


def test_nothing_is_compiled_again_when_copies_are_taken(session):
    compiled = []
    listen = lambda event, seconds, **about: compiled.append(event) if "backend_compile" in event else None
    taken = run_on(session, 6)
    assert taken[-1] >= 2
    monitoring.register_event_duration_secs_listener(listen)
    try:
        more = run_on(session, 6)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert more[-1] >= taken[-1] + 2
    assert compiled == []


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(
            {
                "multi_agent": {
                    "self_play": {"opponents": "prioritised", "snapshot_win_rate": None, "snapshot_every": 300}
                }
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"multi_agent": {"self_play": {"pool": 1, "opponents": "latest"}}, "devices": {"fake": 2}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(tmp_path, more):
    data = config.merge(SMALL, config.merge({"run": {"log": ["jsonl"], "report_every": 128}}, more))
    last = whole_and_resumed(tmp_path, data, cut=400, steps=900)
    assert last[0]["league/copies"] >= 2
    names = [k for k in last[0] if k.startswith(("league/", "policy/")) or k == "env_steps"]
    assert {k: last[0][k] for k in names} == {k: last[1][k] for k in names}
    tables = [json.loads((tmp_path / out / "league.json").read_text()) for out in ("whole", "cut")]
    assert tables[0] == tables[1]
    assert more or (tmp_path / "cut" / "league.png").stat().st_size > 1000


@pytest.mark.slow
def test_replay_learns_from_the_learners_columns_alone():
    with Session(made(**DQN), endless=True) as session:
        session.start()
        run_on(session, 3)
        row = session.reporter.row
    assert row["policy/main/replay/size"] == row["iteration"] * 8 * 16 and "policy/main-1/replay/size" not in row


# ---------------------------------------------------------------- around it


@pytest.mark.slow
def test_an_evaluation_tells_the_learners_return(tmp_path, capsys):
    path, out = tmp_path / "run.yaml", tmp_path / "run"
    more = {"evaluation": {"interval": 1, "duration": 10, "explore": True}, "run": {"log": ["jsonl"]}}
    path.write_text(json.dumps(config.merge(SMALL, more)))
    assert train.main([str(path), "--stop=env_steps=300", f"--out={out}"]) == 0
    capsys.readouterr()
    assert evaluate.main([str(out), "--episodes=10", "--json", "--per-episode", "--explore"]) == 0
    returns = json.loads(capsys.readouterr().out)["returns"]
    assert len(returns) == 10 and set(returns) <= {-1.0, 0.0, 1.0} and any(returns)
    row = json.loads((out / "result.jsonl").read_text().splitlines()[-1])
    assert row["evaluation/policy/main/return"] == row["evaluation/return"] and "evaluation/agent" not in str(row)
    policy = jrl.load(out)
    obs = {"obs": np.zeros(19, np.float32), "action_mask": np.array([0, 1] + [0] * 8)}
    assert policy.act(obs) == 1 == jrl.load(out, policy="main-1").act(obs)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"env": {"num_envs": 6}}, ["env.num_envs 6", "2 seats x 2 places of the pool = 4", "use 4 or 8"]),
        ({"env": {"num_envs": 4}, "devices": {"fake": 2}}, ["x 2 devices = 8", "use 8"]),
        (
            {"multi_agent": {"policies": {"a": {}}}},
            ["multi_agent.policies: multi_agent.self_play decides about the policies"],
        ),
        ({"multi_agent": {"mapping": "by_agent"}}, ["multi_agent.mapping", "leave one of them out"]),
        (
            {"multi_agent": {"group": {"t": ["player_0", "player_1"]}}},
            ["multi_agent.self_play", "leave out multi_agent.group"],
        ),
        ({"multi_agent": {"self_play": {"policy": "league"}}}, ["multi_agent.self_play.policy", "rename it"]),
        ({"multi_agent": {"self_play": {"snapshot_win_rate": None}}}, ["when copies are taken", "snapshot_every=1"]),
        ({"env": {"num_envs": 12}, "env_runners": {"num": 2}}, ["of the pool x 2 env runners = 8", "use 8 or 16"]),
        ({"env": {"id": "MultiAgentCartPole-v1", "options": {"num_agents": 1}}}, ["two agents or more"]),
    ],
)
def test_what_does_not_go_with_self_play(sections, parts):
    with pytest.raises(InputError) as e:
        Session(made(**sections))
    for part in parts:
        assert part in str(e.value)


def test_the_plan_says_who_plays():
    cfg = multi_agent.with_agents(made(), ("player_0", "player_1"))
    assert list(multi_agent.lines(cfg)) == [
        "policy main: one of 2 seats in each of 8 games, every seat equally often",
        "policies main-1, main-2: 2 places of frozen copies, equally often",
    ]


# ---------------------------------------------------------------- learning


LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def winner(board):
    return next((board[a] for a, b, c in LINES if board[a] and board[a] == board[b] == board[c]), 0)


@functools.cache
def worth(board, turn):
    """What perfect play brings who moves."""
    if won := winner(board):
        return 1 if won == turn else -1
    if 0 not in board:
        return 0
    return max(-worth(after, 3 - turn) for after in moves(board, turn))


def moves(board, turn):
    return [(*board[:i], turn, *board[i + 1 :]) for i in range(9) if not board[i]]


def lost_games(policy, seat, *, perfect):
    """Boards on which the policy, in seat 1 or 2, has lost, over all games that the other player can make of it."""
    boards, lost, turn = {(0,) * 9}, [], 1
    while boards:
        if turn == seat:
            held = sorted(boards)
            array, ones = np.array(held), np.ones((len(held), 1))
            obs = np.concatenate([array == seat, array == 3 - seat, ones], 1).astype(np.float32)
            mask = np.concatenate([array == 0, 0 * ones], 1).astype(np.int8)
            actions = policy.act({"obs": obs, "action_mask": mask})
            after = {(*b[:a], seat, *b[a + 1 :]) for b, a in zip(held, actions, strict=True)}
        else:
            worst = {b: -worth(b, turn) if perfect else 1 for b in boards}  # what the policy may be left with at most
            after = {n for b in boards for n in moves(b, turn) if worth(n, seat) <= worst[b]}
        lost += [b for b in after if winner(b) == 3 - seat]
        boards = {b for b in after if not winner(b) and 0 in b}
        turn = 3 - turn
    return lost


@pytest.mark.slow
def test_tictactoe_is_never_lost(tmp_path):
    assert train.main(["configs/tictactoe.yaml", f"--out={tmp_path / 'run'}"]) == 0
    policy = jrl.load(tmp_path / "run")
    for seat in (1, 2):
        assert lost_games(policy, seat, perfect=True) == []
