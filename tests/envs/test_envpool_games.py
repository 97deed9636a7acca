"""EnvPool's games of several players: whose row is whose, who may do what, and that a policy learns from it."""

import json

import numpy as np
import pytest

from jrl import envs, train
from jrl.envs.checker import check_env
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete, MultiBinary

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium", "ignore:.*fork.*")

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def allowed(rng, mask):
    """An action that each row of a mask allows, drawn."""
    return (rng.random(mask.shape) * (mask != 0)).argmax(-1).astype(np.int32)


def test_tic_tac_toe_is_that_of_a_plain_loop():
    """Seven games by four threads: boards, turns, masks, rewards and ends by the rules, in the order of the games."""
    games, rng = 7, np.random.default_rng(0)
    env = envs.make("TicTacToe-v1", num_envs=games, options={"num_threads": 4})
    mask = Box((10,), "bool", 0.0, 1.0)
    assert env.spec.observation == Dict((("obs", MultiBinary((3, 3, 2))), ("action_mask", mask)))
    assert env.spec.action == Discrete(10) and env.spec.agents == ("player_0", "player_1")
    assert env.spec.num_envs == 2 * games and env.spec.games == games and env.spec.max_episode_steps is None
    obs, over = env.reset(), np.zeros(games, bool)
    boards = [{} for _ in range(games)]  # square -> player
    first = [int(obs["action_mask"][2 * g, 9]) for g in range(games)]  # the player who begins: the other one waits
    ends = 0
    for t in range(60):
        for g, board in enumerate(boards):
            mover = (first[g] + len(board)) % 2
            for k in (0, 1):
                column = 2 * g + k
                mine, theirs = ([s in board and (board[s] == k) == own for s in range(9)] for own in (True, False))
                seen = np.stack([mine, theirs], -1).reshape(3, 3, 2)
                np.testing.assert_array_equal(obs["obs"][column], seen, err_msg=f"step {t}")
                may = [s not in board for s in range(9)] if k == mover else [False] * 9
                if not over[g]:
                    np.testing.assert_array_equal(obs["action_mask"][column], [*may, k != mover])
        action = allowed(rng, obs["action_mask"])
        result = env.step(action)
        obs = result.obs
        np.testing.assert_array_equal(result.several.absent, np.repeat(over, 2))
        for g in range(games):
            columns = slice(2 * g, 2 * g + 2)
            if over[g]:
                boards[g], over[g], want, end = {}, False, [0, 0], False
                first[g] = int(obs["action_mask"][2 * g, 9])
            else:
                mover = (first[g] + len(boards[g])) % 2
                boards[g][int(action[2 * g + mover])] = mover
                won = any(all(boards[g].get(s) == mover for s in line) for line in LINES)
                over[g] = end = won or len(boards[g]) == 9
                want = [0, 0] if not won else [1, -1] if mover == 0 else [-1, 1]
            np.testing.assert_array_equal(result.reward[columns], want)
            assert result.terminated[columns].tolist() == [end, end] and not result.truncated.any()
            ends += end
        np.testing.assert_array_equal(result.several.over, over)
        np.testing.assert_array_equal(result.several.there, np.repeat(~over, 2))
    env.close()
    assert ends > 30


class Shuffled:
    """A pool whose rows come in another order each time, as threads may be done."""

    def __init__(self, pool):
        self._pool, self._rng, self.orders = pool, np.random.default_rng(0), []

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def _mixed(self, rows, info):
        order = self._rng.permutation(len(info["env_id"]))
        self.orders.append(order.tolist())
        size = len(info["players"]["env_id"]) // len(order)
        columns = (np.argsort(info["players"]["env_id"], kind="stable").reshape(-1, size)[order]).reshape(-1)
        games = np.argsort(info["env_id"])[order]
        mix = lambda x: x[games] if len(x) == len(games) else x[columns]
        told = {name: mix(x) for name, x in info.items() if name != "players"}
        return [mix(x) for x in rows], {**told, "players": {name: x[columns] for name, x in info["players"].items()}}

    def reset(self):
        obs, info = self._pool.reset()
        (obs,), info = self._mixed([obs], info)
        return obs, info

    def step(self, action):
        *rows, info = self._pool.step(action)
        rows, info = self._mixed(rows, info)
        return (*rows, info)


@pytest.mark.parametrize("id", ["KuhnPoker-v1", "SparrowMahjong-v1", "IntersectionMultiAgent-v1"])
def test_the_order_in_which_threads_are_done_changes_nothing(id):
    plain, mixed = (envs.make(id, num_envs=5, seed=3, options={"num_threads": 1}) for _ in range(2))
    mixed._pool = Shuffled(mixed._pool)
    a, b = plain.reset(), mixed.reset()
    rng, ends = np.random.default_rng(1), 0
    for _ in range(40):
        seen = [x if isinstance(x, dict) else {"obs": x} for x in (a, b)]
        for name in seen[0]:
            np.testing.assert_array_equal(seen[0][name], seen[1][name])
        n, B = plain.spec.action.n, plain.spec.num_envs
        action = allowed(rng, seen[0].get("action_mask", np.ones((B, n))))
        one, other = plain.step(action), mixed.step(action)
        for x, y in zip((*one[1:4], *one.several), (*other[1:4], *other.several), strict=True):
            np.testing.assert_array_equal(x, y)
        a, b, ends = one.obs, other.obs, ends + int(one.several.over.sum())
    assert ends > 4 and any(order != sorted(order) for order in mixed._pool.orders)
    plain.close(), mixed.close()


def test_players_who_all_act_at_once_have_actions_of_their_own():
    """Two cars at 10 m/s in each of three games: after a step that speeds up one has 22.4 m/s, after any other 18.3."""
    env = envs.make("IntersectionMultiAgent-v1", num_envs=3)
    assert env.spec.observation == Box((5, 5)) and env.spec.action == Discrete(3) and env.spec.num_envs == 6
    speed = lambda obs: 80 * np.hypot(obs[:, 0, 3], obs[:, 0, 4])  # one's own velocity, of 80 m/s at most
    np.testing.assert_allclose(speed(env.reset()), 10, rtol=1e-3)
    result = env.step(np.array([0, 2, 1, 0, 2, 2], np.int32))
    env.close()
    np.testing.assert_allclose(speed(result.obs), [18.3, 22.4, 18.3, 18.3, 22.4, 22.4], rtol=5e-3)


ALL = [
    "AnimalShogi-v1",
    "Backgammon-v1",
    "Chess-v1",
    "ChineseGo13x13-v1",
    "ChineseGo19x19-v1",
    "ChineseGo9x9-v1",
    "ConnectFour-v1",
    "GardnerChess-v1",
    "Go13x13-v1",
    "Go19x19-v1",
    "Go9x9-v1",
    "Hex-v1",
    "IntersectionMultiAgent-v0",
    "IntersectionMultiAgent-v1",
    "KuhnPoker-v1",
    "LeducHoldem-v1",
    "Othello-v1",
    "Shogi-v1",
    "SparrowMahjong-v1",
    "TicTacToe-v1",
]


@pytest.mark.parametrize("id", ALL)
def test_every_game_of_several_players_that_envpool_has(id):
    assert envs.is_multi_agent(id, backend="envpool") and envs.check(id, num_envs=2) == []
    env = envs.make(id, num_envs=2)
    assert len(env.spec.agents) == (3 if id == "SparrowMahjong-v1" else 2)
    obs, rng = env.reset(), np.random.default_rng(0)
    for _ in range(3):
        everything = np.ones((env.spec.num_envs, env.spec.action.n))
        obs = env.step(allowed(rng, obs["action_mask"] if isinstance(obs, dict) else everything)).obs
    env.close()


def test_other_environments_of_envpool_have_one_agent():
    for id in ("CartPole-v1", "Pong-v5", "Intersection-v1", "CoinrunEasy-v0"):
        assert not envs.is_multi_agent(id, backend="envpool")


@pytest.mark.parametrize("id", ["ConnectFour-v1", "IntersectionMultiAgent-v1"])
def test_the_checker_finds_nothing_wrong(id):
    assert check_env(id, backend="envpool", num_envs=3, steps=60).problems == []


def test_who_is_to_move_must_not_wait():
    env = envs.make("TicTacToe-v1", num_envs=2)
    obs = env.reset()
    action = np.array([0, 0, 0, 0], np.int32)
    action[2 + int(obs["action_mask"][2, 9])] = 9
    with pytest.raises(ValueError, match=r"game 1: player_\d: expected a move, got the waiting action"):
        env.step(action)
    env.close()


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"batch_size": 2}, ["env.batch_size: TicTacToe-v1 has several agents", "leave it out"]),
        ({"state": True}, ["multi_agent.state: EnvPool's TicTacToe-v1 has no global state: leave it out"]),
        ({"horizon": 9}, ["env.horizon: EnvPool's TicTacToe-v1 continues beyond max_episode_steps", "leave it out"]),
        ({"options": {"max_episode_steps": 9}}, ["env.options.max_episode_steps", "continues beyond it"]),
        ({"action_mask_info": "boards"}, ["env.action_mask_info boards", "no such entry"]),
        ({"action_mask_info": "current_player"}, ["has 1 entries", "9 choices"]),
        ({"soft_horizon": True, "horizon": 5}, ["env.soft_horizon"]),
    ],
)
def test_what_does_not_go_with_games(settings, parts):
    with pytest.raises(InputError) as e:
        envs.make("TicTacToe-v1", num_envs=4, **settings)
    for part in parts:
        assert part in str(e.value)


def test_an_intersection_does_not_end_at_a_horizon_either():
    for horizon in (5, 50):  # below and above the limit that it says it has
        with pytest.raises(InputError, match=r"env\.horizon: EnvPool's IntersectionMultiAgent-v1 .* leave it out"):
            envs.make("IntersectionMultiAgent-v1", num_envs=1, horizon=horizon)


@pytest.mark.slow
def test_a_run_by_command(tmp_path, capsys):
    path, out = tmp_path / "run.yaml", tmp_path / "run"
    cfg = {
        "env": {"id": "TicTacToe-v1", "num_envs": 8},
        "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 2},
        "network": {"hidden": [8]},
        "multi_agent": {"mapping": "by_agent"},
        "rollout": {"length": 32},
        "run": {"compile_cache": False, "log": ["jsonl"], "report_every": 512},
    }
    path.write_text(json.dumps(cfg))
    assert train.main([str(path), "--stop=env_steps=1024", f"--out={out}"]) == 0
    assert "policy player_0: player_0, 1 agent x 8 envs" in capsys.readouterr().out
    row = json.loads((out / "result.jsonl").read_text().splitlines()[-1])
    assert row["episode/return"] == 0 and row["agent/player_0/return"] == -row["agent/player_1/return"]
    assert 5 <= row["episode/length"] <= 9 and row["agent_steps"] == 2 * row["env_steps"]
