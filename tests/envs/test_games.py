"""Games of several agents: exact values, rules against brute force, returns that others measured."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import jitted

from jrl import envs
from jrl.envs.board_games import connect_four, tic_tac_toe
from jrl.envs.multi_toys import rock_paper_scissors, switch_riddle, two_step_game
from jrl.envs.spread import simple_spread


def draws_for(definition, num_envs, value=0.0):
    return np.full((definition.num_draws, num_envs), value, np.float32)


# ---------------------------------------------------------------- TwoStepGame


def test_two_step_game_pays_the_table():
    """All eight courses at once: 2A pays the team 7, 2B 0, 1, 1 and 8; half to each, at the end."""
    game = jitted(two_step_game())
    plays = np.array(list(itertools.product(range(2), repeat=3)), np.int32)  # first of agent_0, then of both
    draws = draws_for(game, 8)
    state = game.reset(draws)
    np.testing.assert_array_equal(game.observe(state)[:, 1], np.tile([1, 0, 0], (8, 1)))
    first = np.stack([plays[:, 0], 1 - plays[:, 0]], -1)  # agent_1 has no say
    state, reward, ended = game.step(state, first, draws)
    assert not np.any(reward) and not np.any(ended)
    np.testing.assert_array_equal(game.observe(state)[:, 0], np.eye(3)[1 + plays[:, 0]])
    state, reward, ended = game.step(state, plays[:, 1:], draws)
    assert np.all(ended) and np.asarray(reward).sum(-1).tolist() == [7, 7, 7, 7, 0, 1, 1, 8]
    np.testing.assert_array_equal(reward[:, 0], reward[:, 1])


# ---------------------------------------------------------------- RockPaperScissors


def test_the_move_that_beats_the_other():
    """Paper beats rock, scissors beat paper, rock beats scissors; each player then sees the other's move."""
    game = jitted(rock_paper_scissors(moves=2))
    moves = np.array(list(itertools.product(range(3), repeat=2)), np.int32)
    state = game.reset(draws_for(game, 9))
    assert np.all(np.asarray(game.observe(state)) == 3)
    state, reward, ended = game.step(state, moves, draws_for(game, 9))
    winners = {(1, 0), (2, 1), (0, 2)}
    expected = [((a, b) in winners) - ((b, a) in winners) for a, b in moves.tolist()]
    np.testing.assert_array_equal(reward, np.stack([expected, np.negative(expected)], -1))
    np.testing.assert_array_equal(game.observe(state), moves[:, ::-1])
    assert not np.any(ended) and np.all(game.step(state, moves, draws_for(game, 9))[2])


def test_the_opponents_that_do_not_learn():
    """Whoever knows the opponent wins all but the first move; which it is, is drawn for each game."""
    game = jitted(rock_paper_scissors(opponent="heuristic"))
    assert game.agents == ("learned",)
    rng = np.random.default_rng(0)
    draws = lambda: rng.random((2, 3000), np.float32)
    state, step = game.reset(draws()), game.step
    habit, seen, mine, total = np.asarray(state.habit), None, None, np.zeros(3000)
    for t in range(15):
        # the next move of one that repeats itself, and of one that beats my last
        coming = np.zeros(3000, int) if seen is None else np.where(habit < 3, seen, (mine + 1) % 3)
        mine = (coming + 1) % 3
        state, reward, ended = step(state, mine[:, None].astype(np.int32), draws())
        seen = np.asarray(game.observe(state))[:, 0]
        total += np.asarray(reward)[:, 0]
        assert t == 0 or (np.asarray(reward) == 1).all()
    assert np.all(ended)
    assert np.unique(total).tolist() == [13, 14, 15] and abs(total.mean() - 14) < 0.06  # 0.015 a standard error
    assert np.allclose(np.bincount(habit) / 3000, [1 / 6, 1 / 6, 1 / 6, 1 / 2], atol=0.04)


# ---------------------------------------------------------------- SwitchRiddle


def riddle_returns(policy, n=3):
    """Mean of the team's returns over all courses of rooms, of which each of n ** days is as likely as the others."""
    game = jitted(switch_riddle(n))
    days = 4 * n - 6
    rooms = np.array(list(itertools.product(range(n), repeat=days)))
    draws = ((rooms + 0.5) / n).T.astype(np.float32)
    state, step = game.reset(draws[:1]), game.step
    total, going = np.zeros(len(rooms)), np.ones(len(rooms), bool)
    for day in range(days):
        assert (np.asarray(game.observe(state)["obs"])[..., 0].argmax(-1) == rooms[:, day]).all()
        actions = np.array(policy(day, rooms), np.int32)
        state, reward, ended = step(state, actions, draws[min(day + 1, days - 1)][None])
        total += np.where(going, np.asarray(reward).sum(-1), 0)
        going &= ~np.asarray(ended)[:, 0]
    assert not going.any()
    return total.mean()


def test_an_oracle_earns_20_of_27():
    """It tells on the first day on which all have been in the room: 540 of 729 courses have one within six days."""

    def oracle(day, rooms):
        all_been = np.array([len(set(course[: day + 1])) == 3 for course in rooms.tolist()])
        return np.repeat(all_been[:, None], 3, axis=1)

    assert abs(riddle_returns(oracle) - 20 / 27) < 1e-6


def test_the_light_is_seen_in_the_room_only_and_switched_there_only():
    game = jitted(switch_riddle(3))
    state = game.reset(draws_for(game, 1))  # agent_0 is there
    assert np.asarray(game.observe(state)["action_mask"])[0].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    outside, inside = np.array([[0, 2, 1]], np.int32), np.array([[2, 0, 0]], np.int32)
    dark, reward, ended = game.step(state, outside, draws_for(game, 1, 0.5))
    assert not np.any(dark.light) and not np.any(reward) and not np.any(ended)
    lit, _, _ = game.step(state, inside, draws_for(game, 1, 0.5))  # agent_1 is next
    assert np.asarray(game.observe(lit)["obs"])[0].tolist() == [[0, 0], [1, 1], [0, 0]]
    np.testing.assert_allclose(np.asarray(game.view(lit))[0], [1, 1 / 6, 0, 1, 0, 1, 1, 0], rtol=1e-6)
    lit_off, _, _ = game.step(lit, np.array([[0, 2, 0]], np.int32), draws_for(game, 1))
    assert not np.any(lit_off.light)


# ---------------------------------------------------------------- SimpleSpread


def spread_sums(policy, num_envs=2000):
    """Sums over 3 agents of the returns of 25 steps: their mean, and its standard error."""
    env = envs.make("SimpleSpread-v0", backend="jax", num_envs=num_envs)

    @jax.jit
    def play(key):
        state, obs = env.reset(key)

        def body(loop, key):
            state, obs, total = loop
            state, result = env.step(state, policy(obs, key), key)
            return (state, result.obs, total + result.reward), result.truncated.all()

        loop = (state, obs, jnp.zeros(3 * num_envs))
        (_, _, total), truncated = jax.lax.scan(body, loop, jax.random.split(jax.random.fold_in(key, 1), 25))
        return total.reshape(-1, 3).sum(-1), truncated

    total, truncated = play(jax.random.key(1))
    assert truncated[-1] and not truncated[:-1].any()
    return float(total.mean()), float(total.std()) / num_envs**0.5


@pytest.mark.slow
def test_spread_pays_who_does_nothing_what_mpe_pays():
    """-71.8, measured elsewhere with 2,000 episodes, too."""
    mean, error = spread_sums(lambda obs, key: jnp.zeros(obs.shape[0], jnp.int32))
    assert error < 0.6 and abs(mean + 71.8) < 4 * error * 2**0.5


@pytest.mark.slow
def test_spread_pays_random_agents_what_mpe_pays():
    """-79.0, measured elsewhere with 2,000 episodes, too."""
    mean, error = spread_sums(lambda obs, key: jax.random.randint(key, obs.shape[:1], 0, 5))
    assert error < 0.6 and abs(mean + 79.0) < 4 * error * 2**0.5


@pytest.mark.slow
def test_spread_pays_who_goes_straight_to_its_landmark():
    """-24.1 in the mean; those who brake a little earlier or later are from -22.5 to -26, so that 1 is allowed."""
    orders = jnp.array(list(itertools.permutations(range(3))))
    force = jnp.array([[0, 0], [-5, 0], [5, 0], [0, -5], [0, 5]], jnp.float32)

    def greedy(obs, key):
        own = obs.reshape(-1, 3, 18)
        velocity, landmarks = own[..., 0:2], own[..., 4:10].reshape(-1, 3, 3, 2)  # as each agent sees them
        distance = jnp.linalg.norm(landmarks, axis=-1)  # [G, agent, landmark]
        best = orders[distance[:, jnp.arange(3), orders].sum(-1).argmin(-1)]
        target = jnp.take_along_axis(landmarks, best[..., None, None], axis=2)  # [G, agent, 1, 2]
        then = 0.1 * velocity[:, :, None] + 0.3 * (0.75 * velocity[:, :, None] + 0.1 * force[None, None])
        return jnp.linalg.norm(target - then, axis=-1).argmin(-1).reshape(-1).astype(jnp.int32)

    mean, error = spread_sums(greedy)
    assert error < 0.3 and abs(mean + 24.1) < 1.0


def test_spread_rewards_and_observations_by_hand():
    """Two agents at rest 0.2 apart, so that they overlap; landmarks at (0, 1) and (1, 0)."""
    game = jitted(simple_spread(2))
    state = game.reset(draws_for(game, 1, 0.5))
    state = state.replace(
        position=jnp.array([[[0.0, 0.2], [0.0, 0.0]]]), landmark=jnp.array([[[0.0, 1.0], [1.0, 0.0]]])
    )
    obs = np.asarray(game.observe(state))
    np.testing.assert_allclose(obs[0, 0], [0, 0, 0, 0, 0, 1, 1, 0, 0.2, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(obs[0, 1], [0, 0, 0.2, 0, -0.2, 1, 0.8, 0, -0.2, 0, 0, 0], atol=1e-6)
    after, reward, ended = game.step(state, np.array([[0, 4]], np.int32), draws_for(game, 1))
    # nobody has moved yet: agent_0 is 1 from the first landmark, agent_1 0.8 from the second
    np.testing.assert_allclose(reward, [[-0.5 * 1.8 - 0.5] * 2], rtol=1e-6)
    assert not np.any(ended)
    # discs 0.1 deep into each other: a force of 100 x 0.1 apart; agent_1 goes up by 5
    np.testing.assert_allclose(after.velocity, [[[-1.0, 1.0], [0.0, 0.5]]], atol=1e-5)
    np.testing.assert_array_equal(after.position, state.position)
    later, _, _ = game.step(after, np.array([[0, 0]], np.int32), draws_for(game, 1))
    np.testing.assert_allclose(later.position, [[[-0.1, 0.3], [0.0, 0.05]]], atol=1e-5)


# ---------------------------------------------------------------- boards


def lines(rows, cols, length):
    """All lines, as lists of squares."""
    inside = lambda r, c: 0 <= r < rows and 0 <= c < cols
    found = []
    for r, c, (dr, dc) in itertools.product(range(rows), range(cols), ((0, 1), (1, 0), (1, 1), (1, -1))):
        squares = [(r + i * dr, c + i * dc) for i in range(length)]
        if all(inside(*square) for square in squares):
            found.append([a * cols + b for a, b in squares])
    return found


def wins(board, of_lines):
    """Who has a line on a board [squares] of -1, 0 and 1; None if nobody has."""
    for line in of_lines:
        owners = {board[square] for square in line}
        if len(owners) == 1 and owners != {-1}:
            return owners.pop()
    return None


def test_tic_tac_toe_has_the_games_that_it_has():
    """All courses of play, breadth first: 255,168 games, won 131,184 and 77,904 times, drawn 46,080 times.

    Equal boards are one row, with the number of courses that lead to it.
    """
    game, of_lines = jitted(tic_tac_toe()), lines(3, 3, 3)
    step, observe, room = game.step, game.observe, 1600  # rows, one program for all plies
    boards = {(-1,) * 9: 1}
    results = {1.0: 0, -1.0: 0, 0.0: 0}
    for ply in range(9):
        turn, known = ply % 2, list(boards)
        pieces = np.zeros((room, 2, 9), bool)
        pieces[: len(known)] = np.stack([np.array(known) == k for k in range(2)], 1)
        state = game.reset(draws_for(game, room)).replace(
            pieces=jnp.asarray(pieces.reshape(room, 2, 3, 3)), turn=jnp.full(room, turn, jnp.int32)
        )
        obs = {name: np.asarray(x)[: len(known)] for name, x in observe(state).items()}
        free = np.array(known) == -1
        np.testing.assert_array_equal(obs["action_mask"][:, turn], np.pad(free, ((0, 0), (0, 1))))
        assert (obs["action_mask"][:, 1 - turn] == [0] * 9 + [1]).all()
        np.testing.assert_array_equal(obs["obs"][:, turn, :9], np.array(known) == turn)
        np.testing.assert_array_equal(obs["obs"][:, turn, 9:18], np.array(known) == 1 - turn)
        assert (obs["obs"][:, turn, 18] == 1).all() and (obs["obs"][:, 1 - turn, 18] == 0).all()
        after: dict[tuple[int, ...], int] = {}
        for square in range(9):
            actions = np.full((room, 2), 9, np.int32)
            actions[:, turn] = square
            _, reward, ended = step(state, actions, draws_for(game, room))
            reward, ended = (np.asarray(x)[: len(known)] for x in (reward, ended))
            np.testing.assert_array_equal(reward[:, 0], -reward[:, 1])
            for i, board in enumerate(known):
                if not free[i, square]:
                    assert ended[i].all() and reward[i, turn] == -1  # a move that is not allowed
                    continue
                new = (*board[:square], turn, *board[square + 1 :])
                winner = wins(new, of_lines)
                assert ended[i].all() == ended[i].any() == (winner is not None or -1 not in new)
                if ended[i].all():
                    assert reward[i, 0] == (0 if winner is None else 1 - 2 * winner)
                    results[float(reward[i, 0])] += boards[board]
                else:
                    assert not reward[i].any()
                    after[new] = after.get(new, 0) + boards[board]
        boards = after
    assert results == {1.0: 131_184, -1.0: 77_904, 0.0: 46_080} and not boards


def test_connect_four_is_that_of_a_plain_loop():
    """Random allowed moves in 300 games: where pieces fall, who wins, when a column is full."""
    game, of_lines, n = jitted(connect_four()), lines(6, 7, 4), 300
    rng, step = np.random.default_rng(0), game.step
    state = game.reset(draws_for(game, n))
    boards, going, won = np.full((n, 42), -1), np.ones(n, bool), np.zeros(3, int)
    for ply in range(42):
        turn = ply % 2
        obs = jax.tree.map(np.asarray, game.observe(state))
        free = boards.reshape(n, 6, 7)[:, 0] == -1
        np.testing.assert_array_equal(obs["action_mask"][going][:, turn], np.pad(free, ((0, 0), (0, 1)))[going])
        assert (obs["action_mask"][going][:, 1 - turn] == [0] * 7 + [1]).all()
        np.testing.assert_array_equal(obs["obs"][going][:, turn, :42], boards[going] == turn)
        actions = np.full((n, 2), 7, np.int32)
        actions[:, turn] = (rng.random((n, 7)) * free).argmax(-1)
        state, reward, ended = step(state, actions, draws_for(game, n))
        reward, ended = np.asarray(reward), np.asarray(ended)
        for i in np.flatnonzero(going):
            column = actions[i, turn]
            lowest = max(r for r in range(6) if boards[i, 7 * r + column] == -1)
            boards[i, 7 * lowest + column] = turn
            winner = wins(boards[i].tolist(), of_lines)
            assert ended[i].tolist() == [winner is not None or ply == 41] * 2
            assert reward[i].tolist() == ([0, 0] if winner is None else [1 - 2 * winner, 2 * winner - 1])
            if ended[i, 0]:
                going[i] = False
                won[2 if winner is None else winner] += 1
    assert not going.any() and won[:2].min() > 50


def test_doing_nothing_in_ones_turn_loses():
    for game, nothing in ((jitted(tic_tac_toe()), 9), (jitted(connect_four()), 7)):
        state = game.reset(draws_for(game, 1))
        _, reward, ended = game.step(state, np.array([[nothing, nothing]], np.int32), draws_for(game, 1))
        assert np.asarray(reward).tolist() == [[-1, 1]] and np.all(ended)
