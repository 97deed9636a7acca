"""AlphaZero and MuZero: what a search finds where the answer is known, and the targets by hand."""

import importlib.util
from pathlib import Path

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from fakes import differ

import jrl
from jrl import config, train
from jrl.algos import alphazero, muzero
from jrl.algos.search import Search
from jrl.config import EnvConfig
from jrl.envs import board_games, multi_agent
from jrl.envs.board_games import _Board
from jrl.envs.jax_ids import load_definition
from jrl.envs.make import make as make_env
from jrl.envs.multi_agent import GamesState
from jrl.errors import InputError
from jrl.networks import NetworkConfig
from jrl.rollout import unroll
from jrl.run import build
from jrl.types import Box, Discrete, EnvSpec

KEY = jax.random.key(5)
ROOT = Path(__file__).parents[2]
NETWORK = NetworkConfig(hidden=(8,))
SMALL = {
    "env": {"id": "TicTacToe-v0", "num_envs": 4},
    "algo": {"name": "alphazero", "search": {"simulations": 2}, "num_minibatches": 2},
    "network": {"hidden": [8]},
    "rollout": {"length": 8, "iterations_per_call": 1},
    "run": {"compile_cache": False, "log": ["jsonl"]},
}


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- AlphaZero: positions

# own squares, the other player's squares, the best move; the player that moves has as many or one less
POSITIONS = [
    ((0, 1), (3, 4), 2),  # player_0 wins
    ((0, 8), (3, 4), 5),  # player_0 prevents a line
    ((3, 4), (0, 1, 8), 5),  # player_1 wins
    ((4, 8), (0, 1, 5), 2),  # player_1 prevents a line
    ((0, 2, 4, 5), (1, 3, 6, 7), 8),  # player_0 fills the board with a line
]


def positions():
    """The games' state and observations [2 G, *]."""
    pieces, turn = np.zeros((len(POSITIONS), 2, 9), bool), np.zeros(len(POSITIONS), np.int32)
    for i, (own, other, _) in enumerate(POSITIONS):
        turn[i] = len(own) < len(other)
        pieces[i, turn[i], list(own)] = pieces[i, 1 - turn[i], list(other)] = True
    board = _Board(jnp.asarray(pieces.reshape(-1, 2, 3, 3)), jnp.asarray(turn))
    games = GamesState(board, jnp.asarray(pieces.sum((1, 2)), jnp.int32), jnp.ones((len(POSITIONS), 2), bool))
    obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), board_games.tic_tac_toe().observe(board))
    return games, obs


def found(search, params_of=lambda params: params):
    """The actions of the search by an untrained network, [G, 2], and the outputs of acting."""
    env = multi_agent.build(board_games.tic_tac_toe(), len(POSITIONS))
    algo = alphazero.make(alphazero.Config(gamma=1.0, search=search), env.spec, NETWORK)
    state = algo.init(KEY)
    actor = algo.actor(state.replace(params=params_of(state.params)))
    games, obs = positions()
    out = jax.jit(algo.act_in(env), static_argnums=4)(actor, obs, (), KEY, False, games)
    return np.asarray(out.action).reshape(-1, 2), out, games


@pytest.mark.parametrize("kind", ["gumbel", "puct"])
def test_the_search_wins_and_prevents_a_loss_for_both_players(kind):
    # the value of a move is that of the player that makes it: a wrong sign makes the opponent's win welcome
    action, out, games = found(Search(kind=kind, simulations=96, rescale=False, value_scale=1.0))
    turn = np.asarray(games.inner.turn)
    mine, other = action[np.arange(len(turn)), turn], action[np.arange(len(turn)), 1 - turn]
    assert mine.tolist() == [best for *_, best in POSITIONS]
    assert (other == 9).all()  # waits
    share = np.asarray(out.extras["search"]).reshape(-1, 2, 10)
    np.testing.assert_allclose(share.sum(-1), 1.0, rtol=1e-5)
    assert (share[np.arange(len(turn)), 1 - turn, 9] == 1).all()
    taken = np.asarray(games.inner.pieces).any(1).reshape(-1, 9)
    assert share[np.arange(len(turn)), turn, :9][taken].max() < 1e-6


def test_no_value_of_the_network_counts_at_or_below_an_end():
    """All moves but those that end the game look like +10; the last position has only ends."""

    def pessimist(params):
        return jax.tree.map_with_path(
            lambda path, x: x - 10.0 if "value" in jax.tree_util.keystr(path[-2:]) and x.shape == (1,) else x, params
        )

    plain, wild = found(Search(simulations=32)), found(Search(simulations=32), pessimist)
    share = lambda out: np.asarray(out.extras["search"]).reshape(-1, 2, 10)
    np.testing.assert_allclose(share(plain[1])[-1], share(wild[1])[-1], atol=1e-6)
    assert np.abs(share(plain[1])[1] - share(wild[1])[1]).max() > 0.01  # elsewhere they count


def test_a_rollout_of_self_play_records_the_search_of_the_player_that_moves():
    env = multi_agent.build(board_games.tic_tac_toe(), 2)
    cfg = alphazero.Config(search=Search(simulations=4), num_minibatches=2)
    algo = alphazero.make(cfg, env.spec, NETWORK)
    state = algo.init(KEY)
    collect = unroll.make(env, algo.act, length=12, act_in=algo.act_in)
    start = collect.init(KEY)
    _, rollout, _ = jax.jit(collect.step)(start, algo.actor(state), KEY)
    mask, waits = np.asarray(rollout.mask), np.asarray(rollout.obs["action_mask"][..., 9]) == 1
    share = np.asarray(rollout.extras["search"])
    assert (share[waits & mask][:, 9] == 1).all()
    assert not share[~waits & mask][:, 9].any()
    # each step has one move, which the mask allowed, until the game ends
    assert ((~waits).reshape(12, 2, 2).sum(-1)[mask.reshape(12, 2, 2).all(-1)] == 1).all()
    allowed = np.take_along_axis(np.asarray(rollout.obs["action_mask"]), np.asarray(rollout.action)[..., None], -1)
    assert (allowed[mask] == 1).all()
    # the value's targets of the two players are opposite at the end, and waiting rows have no target of the policy
    rows, _ = alphazero.targets(cfg, algo.update.args[1], state, rollout)
    ends = np.asarray(rollout.terminated) & mask
    assert ends.any()
    np.testing.assert_allclose(np.asarray(rows.target)[ends], np.asarray(rollout.reward)[ends], atol=1e-6)
    assert not np.asarray(rows.chooses)[waits].any()


def test_random_moves_are_allowed_and_not_learned():
    env = multi_agent.build(board_games.tic_tac_toe(), 16)
    algo = alphazero.make(alphazero.Config(search=Search(simulations=2), random_moves=1.0), env.spec, NETWORK)
    env_state, obs = env.reset(KEY)
    act = jax.jit(algo.act_in(env), static_argnums=4)
    acted = lambda explore: act(algo.actor(algo.init(KEY)), obs, (), KEY, explore, env_state)
    out, greedy = acted(True), acted(False)
    moves = np.asarray(out.action).reshape(16, 2)
    assert len(set(moves[:, 0])) > 4 and moves[:, 0].max() < 9 and (moves[:, 1] == 9).all()
    assert np.asarray(out.extras["random_move"]).all() and not np.asarray(greedy.extras["random_move"]).any()
    assert len(set(np.asarray(greedy.action)[::2])) == 1
    share, value = (np.asarray(out.extras[name]) for name in ("search", "search_value"))
    assert (share[::2, 9] < 1e-6).all() and (share[1::2, 9] == 1).all()
    np.testing.assert_array_equal(value[::2], -value[1::2])  # the player that waits has the opposite value


def test_the_search_replaces_the_return_after_a_random_move():
    env_spec = EnvSpec(Box((4,)), Discrete(2), 1)
    cfg = alphazero.Config(gamma=0.5, search=Search(simulations=2))
    algo = alphazero.make(cfg, env_spec, NETWORK)
    state = algo.init(KEY)
    rollout = fakes.rollout(algo, env_spec, algo.actor(state), T=4)
    column = lambda *x: jnp.asarray(x)[:, None]
    rollout = rollout.replace(
        reward=column(1.0, 2.0, 4.0, 8.0),
        terminated=column(False, False, False, True),
        truncated=column(False, False, False, False),
        mask=column(True, True, True, True),
        extras={
            **rollout.extras,
            "search_value": column(10.0, 20.0, 30.0, 40.0),
            "random_move": column(False, True, False, False),
        },
    )
    rows, _ = alphazero.targets(cfg, algo.update.args[1], state, rollout)
    np.testing.assert_allclose(np.asarray(rows.target)[:, 0], [1.0 + 0.5 * 20.0, 20.0, 4.0 + 0.5 * 8.0, 8.0])


def test_the_player_that_looks_one_move_ahead():
    """It wins if it can, prevents a loss if it must, and makes an allowed move otherwise."""
    games, _ = positions()
    definition = board_games.tic_tac_toe()
    move = script("one_ply_games").one_ply(definition, games.inner, KEY)
    assert np.asarray(move).tolist() == [best for *_, best in POSITIONS]
    empty = definition.reset(jnp.zeros((1, 64)))
    assert len(set(np.asarray(script("one_ply_games").one_ply(definition, empty, KEY)).tolist())) == 9


def test_single_agent_search_uses_the_environment():
    """CartPole one step before it falls: only the push back keeps the pole up, and only the environment shows it."""
    env = make_env(EnvConfig(id="CartPole-v1", backend="jax", num_envs=2))
    algo = alphazero.make(alphazero.Config(search=Search(simulations=32)), env.spec, NETWORK)
    env_state, _ = env.reset(KEY)
    angle, spin = jnp.array([0.2, -0.2]), jnp.array([0.3, -0.3])
    definition = load_definition("CartPole-v1", {})
    inner = (jnp.zeros(2), jnp.zeros(2), angle, spin)
    env_state = env_state.replace(inner=inner)
    obs = definition.observe(inner)
    act = jax.jit(algo.act_in(env), static_argnums=4)
    out = act(algo.actor(algo.init(KEY)), obs, (), KEY, False, env_state)
    assert np.asarray(out.action).tolist() == [1, 0]


# ---------------------------------------------------------------- MuZero: targets and losses


def test_targets_of_the_model_by_hand():
    """Four rows of one environment; the episode ends truly on row 1, row 2 is masked, row 3 begins another."""
    env_spec = EnvSpec(Box((4,)), Discrete(2), 1)
    cfg = muzero.Config(gamma=0.5, gae_lambda=1.0, unroll_steps=2, search=Search(simulations=2))
    algo = muzero.make(cfg, env_spec, NETWORK)
    state = algo.init(KEY)
    rollout = fakes.rollout(algo, env_spec, algo.actor(state), T=4)
    column = lambda *x: jnp.asarray(x)[:, None]
    share = jnp.stack([column(1.0, 0.75, 0.5, 0.25), column(0.0, 0.25, 0.5, 0.75)], -1)
    rollout = rollout.replace(
        reward=column(1.0, 2.0, 0.0, 4.0),
        terminated=column(False, True, False, False),
        truncated=column(False, False, False, False),
        mask=column(True, True, False, True),
        action=column(1, 0, 1, 1),
        extras={**rollout.extras, "search": share, "search_value": column(10.0, 20.0, 30.0, 40.0)},
    )
    last = float(algo.outputs(state, rollout.last_obs)["value"][0])
    rows, _ = muzero.targets(cfg, algo.update.args[1], state, rollout)
    at = lambda x, t: np.asarray(x)[t, 0]
    # row 0: returns 1 + 0.5 * 2 and 2, then 0 for ever
    np.testing.assert_allclose(at(rows.target, 0), [2.0, 2.0, 0.0])
    np.testing.assert_allclose(at(rows.reward, 0), [1.0, 2.0])
    np.testing.assert_allclose(at(rows.action, 0), [1, 0])
    np.testing.assert_allclose(at(rows.valid, 0), [1, 1, 1])
    np.testing.assert_allclose(at(rows.chooses, 0), [1, 1, 0])
    np.testing.assert_allclose(at(rows.share, 0)[:2], [[1.0, 0.0], [0.75, 0.25]])
    # row 1: the end comes first, and nothing of the next episode is seen
    np.testing.assert_allclose(at(rows.target, 1), [2.0, 0.0, 0.0])
    np.testing.assert_allclose(at(rows.reward, 1), [2.0, 0.0])
    np.testing.assert_allclose(at(rows.chooses, 1), [1, 0, 0])
    np.testing.assert_allclose(at(rows.valid, 1), [1, 1, 1])
    # row 3: the rollout ends, so later states have no targets
    np.testing.assert_allclose(at(rows.target, 3)[0], 4.0 + 0.5 * last, rtol=1e-5)
    np.testing.assert_allclose(at(rows.valid, 3), [1, 0, 0])
    np.testing.assert_allclose(at(rows.chooses, 3), [1, 0, 0])
    np.testing.assert_allclose(np.asarray(rows.weight)[:, 0], [4 / 3, 4 / 3, 0.0, 4 / 3], rtol=1e-6)
    # at a time limit the value of the final observation is unknown: no target from there on
    limit = rollout.replace(terminated=rollout.terminated & False, truncated=rollout.terminated)
    rows, _ = muzero.targets(cfg, algo.update.args[1], state, limit)
    np.testing.assert_allclose(at(rows.target, 0)[:2], [1.0 + 0.5 * (2.0 + 0.5 * 30.0), 2.0 + 0.5 * 30.0])
    np.testing.assert_allclose(at(rows.valid, 0), [1, 1, 0])


def test_values_as_two_atoms():
    """h(3) = 1.003 lies between the atoms 1 and 2: shares 0.997 and 0.003."""
    logits = jnp.log(jnp.array([[1e-9, 1e-9, 1e-9, 1e-9, 0.997, 0.003, 1e-9]]))
    np.testing.assert_allclose(muzero.to_scalar(logits), [3.0], rtol=1e-4)
    expected = -(0.997 * np.log(0.997) + 0.003 * np.log(0.003))
    np.testing.assert_allclose(muzero.cross_entropy(logits, jnp.array([3.0])), [expected], rtol=1e-3)


def test_latents_are_between_0_and_1():
    x = muzero.scale_latent(jnp.array([[-4.0, 0.0, 4.0], [2.0, 2.0, 2.0]]))
    np.testing.assert_allclose(x, [[0.0, 0.5, 1.0], [0.0, 0.0, 0.0]])


def test_without_search_evaluations_act_by_the_network():
    env_spec = fakes.spec(num_envs=8)
    make = lambda flag: muzero.make(muzero.Config(search=Search(simulations=4, in_evaluation=flag)), env_spec, NETWORK)
    algo = make(False)
    state = fakes.perturbed(fakes.made_up_state(algo))
    obs = fakes.observations(np.random.default_rng(0), env_spec.observation, (8,))
    out = algo.act(algo.actor(state), obs, (), KEY, False)
    dist = algo.outputs(state, obs)["distribution"]
    np.testing.assert_array_equal(out.action, dist.mode())
    np.testing.assert_allclose(out.extras["search"], jax.nn.softmax(dist.logits), rtol=1e-5)
    assert differ(out.extras["search"], make(True).act(algo.actor(state), obs, (), KEY, False).extras["search"])


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"env": {"id": "CartPole-v1", "num_envs": 4, "backend": "gymnasium"}},
            r"algo.name alphazero: expected environments written in JAX, which its search steps, got CartPole-v1 of "
            r"gymnasium: set env.backend=jax",
        ),
        (
            {"multi_agent": {"mapping": "by_agent"}},
            r"algo.name alphazero: expected one policy for all agents, whose actions its search chooses together, "
            r"got 2 policies: leave multi_agent out, or use ppo",
        ),
        ({"env": {"id": "SimpleSpread-v0", "num_envs": 4}}, r"expected one agent, or two agents that move in turn"),
    ],
)
def test_environments_that_cannot_be_searched(changed, message):
    from jrl.run import preflight

    with pytest.raises(InputError, match=message):
        build.run(preflight.check(config.from_dict(config.merge(SMALL, changed))))


@pytest.mark.slow  # tests/test_elo.py has a run in the quick set
def test_a_run_its_evaluation_and_its_export(tmp_path):
    """Self-play from the command line; the run is evaluated by search, loaded and exported by the network."""
    from jrl.export.__main__ import main as export

    out = tmp_path / "run"
    sets = ["--set", "stop.env_steps=64", "--set", "evaluation.every=32", "--set", "evaluation.duration=4"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SMALL))
    train.main([str(tmp_path / "config.yaml"), "--out", str(out), *sets])
    row = [line for line in (out / "result.jsonl").read_text().splitlines() if '"evaluation/return"' in line]
    assert row
    policy = jrl.load(out, policy="shared")
    obs = {"obs": np.zeros(19, np.float32), "action_mask": np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 0], np.int8)}
    assert 1 <= policy.act(obs) <= 8
    results = script("one_ply_games").play(str(out), 4)
    assert [found.total() for found in results] == [2, 2]
    export([str(out), "--out", str(tmp_path / "exported"), "--format", "npz"])
    assert list((tmp_path / "exported").iterdir())


@pytest.mark.slow
def test_tic_tac_toe_is_never_lost(tmp_path):
    """Over all replies; the config's comment has the measured numbers."""
    losses = script("tictactoe_losses")
    train.main([str(ROOT / "configs" / "alphazero_tictactoe.yaml"), "--out", str(tmp_path / "run")])
    choose = losses.chooser(str(tmp_path / "run"))
    assert [losses.play(choose(seat), seat)[1]["loss"] for seat in (0, 1)] == [0, 0]
