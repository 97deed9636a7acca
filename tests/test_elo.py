"""Elo ratings of a policy that plays both sides: matches, rows of a run, and a resumed run."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
import yaml

from jrl import config, train
from jrl.errors import InputError
from jrl.play import build_evaluation
from jrl.play.elo import Elo, random_moves
from jrl.run import build, preflight

KEY = jax.random.key(3)
SMALL = {
    "env": {"id": "TicTacToe-v0", "num_envs": 4},
    "algo": {"name": "alphazero", "search": {"simulations": 2}, "num_minibatches": 2},
    "network": {"hidden": [8]},
    "rollout": {"length": 8, "iterations_per_call": 1},
    "evaluation": {"every": 32, "duration": 2, "elo_games": 8},
    "stop": {"env_steps": 192},
    "checkpoint": {"every": 32, "keep_last": 9},
    "run": {"log": ["jsonl"], "seed": 7},
}


@pytest.fixture(scope="module")
def strong_search():
    """Elo of 128 games by a search of 48 simulations, and the actor of an untrained network."""
    search = {"simulations": 48, "rescale": False, "value_scale": 1.0}
    more = {"algo": {"search": search}, "evaluation": {"elo_games": 128}}
    cfg = build_evaluation.build_config(preflight.resolved(config.from_dict(config.merge(SMALL, more))))
    elo = Elo(cfg, seed=0)
    algo = build.algorithm(cfg, build_evaluation.build_environments(cfg, 2).spec)
    return elo, algo.actor(algo.init(KEY))


def test_a_policy_gains_nothing_against_itself(strong_search):
    elo, actor = strong_search
    elo.begin(actor)
    wins, draws, losses = elo.match(actor, actor, KEY)
    assert wins == losses and wins + draws + losses == 128
    assert elo.play(actor, count=1)["elo"] == pytest.approx(0.0, abs=1e-6)


def test_a_search_beats_random_moves_and_gains_their_difference(strong_search):
    elo, actor = strong_search
    scale = lambda path, x: x * 1e4 if "policy" in jax.tree_util.keystr(path) else x
    arbitrary = actor.replace(params=jax.tree_util.tree_map_with_path(scale, actor.params))  # logits outweigh values
    elo.begin(arbitrary)
    rows = [elo.play(actor, count=1), elo.play(actor, count=2), elo.play(arbitrary, count=3)]
    wins, _, losses = elo.match(actor, arbitrary, KEY)
    assert wins > 2 * losses
    assert rows[0]["elo"] > 50 and 0 < rows[0]["elo_se"] < 50
    assert rows[1]["elo"] == pytest.approx(rows[0]["elo"]) and rows[1]["elo_se"] > rows[0]["elo_se"]
    assert rows[2]["elo"] < rows[1]["elo"] - 50


def test_the_openings_are_allowed_and_played_twice():
    mask = np.zeros((8, 10), np.int8)
    mask[0::2, 3:7] = mask[1::2, 9] = 1
    moves = np.stack([random_moves({"action_mask": mask}, jax.random.key(i)) for i in range(20)]).reshape(20, 2, 2, 2)
    assert (moves[..., 1] == 9).all() and set(moves[..., 0].ravel().tolist()) == {3, 4, 5, 6}
    np.testing.assert_array_equal(moves[:, :, 0], moves[:, :, 1])
    assert (moves[:, 0] != moves[:, 1]).any()


def rows_of(out):
    rows = [json.loads(line) for line in (out / "result.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k in ("env_steps", "evaluation/elo", "evaluation/elo_se")} for row in rows]


def test_a_resumed_run_has_the_ratings_of_an_uninterrupted_run(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SMALL))
    out, sets = tmp_path / "run", ["--set", "algo.search.in_evaluation=false", "--set", "algo.lr=0.02"]
    assert train.main([str(tmp_path / "config.yaml"), *sets, "--out", str(out)]) == 0
    rows = rows_of(out)
    ratings = [row["evaluation/elo"] for row in rows if row.get("evaluation/elo") is not None]
    assert len(ratings) >= 4 and len(set(ratings)) > 2 and all(map(math.isfinite, ratings))
    _, *later = sorted((out / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    for path in later:
        shutil.rmtree(path)
    assert train.main(["--resume", str(out)]) == 0
    assert rows_of(out) == rows


def test_one_player_has_no_rating():
    given = {"env": {"id": "CartPole-v1", "backend": "jax"}, "multi_agent": None}
    cfg = build_evaluation.build_config(preflight.resolved(config.from_dict(config.merge(SMALL, given))))
    with pytest.raises(
        InputError, match=r"elo_games: expected a game of two players, got env.id CartPole-v1, which has 1"
    ):
        Elo(cfg, seed=0)
