"""Evaluation: exactly N episodes, the first of each slot, from a reset, without favour to short ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cluster import FakeCluster

from jrl.envs.jax_env import Definition, build
from jrl.envs.make import make
from jrl.errors import EnvironmentFailed
from jrl.play import player as evaluation
from jrl.play.player import Deadline, EvaluationRunners, Player
from jrl.play.tally import Goal, PlayedRows, Tally
from jrl.rollout import runner_group
from jrl.rollout.ray_cluster import RunnerOptions
from jrl.types import ActOut, Box, Discrete, EnvSpec, StepResult


def act(actor, obs, carry, key, explore=True):
    action = jnp.full(obs.shape[:1], 1 if explore else 0, jnp.int32)
    return ActOut(action, carry, {})


def short_or_long() -> Definition:
    """Half of the episodes have one step and reward 0, the others ten steps and reward 1."""

    def step(state, action, draws):
        length, elapsed = state[:, 0], state[:, 1] + 1
        done = elapsed >= length
        return jnp.stack([length, elapsed], -1), jnp.where(done & (length > 1), 1.0, 0.0), done

    reset = lambda draws: jnp.stack([jnp.where(draws[0] < 0.5, 1.0, 10.0), jnp.zeros_like(draws[0])], -1)
    return Definition(Box((2,)), Discrete(2), None, 1, reset, step, lambda state: state)


def test_short_episodes_are_not_favoured():
    """The first 400 to finish of 400 environments would be nearly all short: a mean of about 0.02 instead of 0.5."""
    found = Player(build(short_or_long(), 400), act).play((), jax.random.key(0), Goal(400))
    assert found.returns.shape == found.lengths.shape == (400,)
    assert abs(found.returns.mean() - 0.5) < 4 * 0.5 / np.sqrt(400)
    np.testing.assert_array_equal(found.lengths, np.where(found.returns > 0, 10, 1))
    summary = found.summary()
    assert summary["episodes"] == 400
    assert summary["return"] == pytest.approx(found.returns.mean())
    assert summary["length"] == pytest.approx(found.lengths.mean())
    assert (summary["return_min"], summary["return_max"]) == (0.0, 1.0)
    assert summary["return_std"] == pytest.approx(found.returns.std())


def test_what_each_agent_earns_is_told_of_the_games_that_count():
    """late_arrivals, all by action 1: who comes back has earned in both of its lives."""
    one = lambda actor, obs, carry, key, explore: ActOut(jnp.ones(len(obs["obs"]), jnp.int32), carry, {})
    player = Player(make("late_arrivals:late_arrivals", num_envs=2), one, length=8)
    for goal in (Goal(5), Goal(5, reset=False), Goal(30, "timesteps"), Goal(None)):
        found = player.play((), jax.random.key(0), goal, deadline=Deadline(0.0) if goal.amount is None else None)
        assert len(found.returns) in (2, 4, 5) and found.policy_ids is None
        np.testing.assert_array_equal(found.agents, [[156, 144, 12 + 72, 153]] * len(found.returns))
        np.testing.assert_array_equal(found.agents.sum(-1), found.returns)


class Counting:
    """Host environments: episode k of slot b has b + k + 1 steps and gives 100 b + k on its last; then a reset row."""

    def __init__(self, num_envs):
        self.spec = EnvSpec(Box((1,)), Discrete(2), num_envs)
        self.resets, self.actions = 0, set()

    def reset(self):
        self.resets += 1
        self._episode, self._elapsed = (np.zeros(self.spec.num_envs, int) for _ in range(2))
        self._done = np.zeros(self.spec.num_envs, bool)
        return np.zeros((self.spec.num_envs, 1), np.float32)

    def step(self, action):
        self.actions |= set(action.tolist())
        slot = np.arange(self.spec.num_envs)
        self._episode += self._done
        self._elapsed = np.where(self._done, 0, self._elapsed + 1)
        end = ~self._done & (self._elapsed == slot + self._episode + 1)
        reward = np.where(end, 100.0 * slot + self._episode, 0).astype(np.float32)
        self._done = end
        truncated = end & (slot % 2 == 1)
        return StepResult(np.zeros((self.spec.num_envs, 1), np.float32), reward, end & ~truncated, truncated)

    def close(self):
        pass


def test_each_slot_plays_its_first_episodes():
    env = Counting(4)
    player = Player(env, act)
    expected = [0, 1, 2, 100, 101, 102, 200, 201, 300, 301]  # 3, 3, 2, 2
    for i in range(2):  # the second time as well: from a reset
        found = player.play((), jax.random.key(i), Goal(10))
        np.testing.assert_array_equal(found.returns, expected)
        np.testing.assert_array_equal(found.lengths, [1, 2, 3, 2, 3, 4, 3, 4, 4, 5])
    assert env.resets == 2
    assert env.actions == {0}  # explore=False reached act


def test_exploration_on_request():
    env = Counting(2)
    Player(env, act, explore=True).play((), jax.random.key(0), Goal(2))
    assert env.actions == {1}


def test_graph_environments_are_reset_and_follow_the_key():
    player = Player(build(short_or_long(), 8), act)
    first, again, other = (player.play((), jax.random.key(k), Goal(20)) for k in (0, 0, 1))
    np.testing.assert_array_equal(first.returns, again.returns)
    assert not np.array_equal(first.returns, other.returns)


def test_episodes_that_never_end(monkeypatch):
    monkeypatch.setattr(evaluation, "_STALL_STEPS", 64)
    task = short_or_long()._replace(reset=lambda draws: jnp.full((draws.shape[1], 2), 1e9))
    task = task._replace(step=lambda state, action, draws: (state, state[:, 0], jnp.zeros(state.shape[:1], bool)))
    words = "no episode has ended in the last 64 steps of each environment: set env.horizon"
    with pytest.warns(RuntimeWarning, match=words) as told, pytest.raises(EnvironmentFailed) as e:
        Player(build(task, 2), act).play((), jax.random.key(0), Goal(3), max_steps=192)
    assert len(told) == 1
    assert str(e.value).startswith("evaluation: 0 of 3 episodes ended within 192 steps per environment: set env.")
    assert "evaluation.timeout_s" in str(e.value)


def test_no_warning_where_episodes_end_or_steps_are_counted(monkeypatch, recwarn):
    monkeypatch.setattr(evaluation, "_STALL_STEPS", 64)
    player = Player(build(short_or_long(), 2), act)
    for goal in (Goal(40), Goal(512, "timesteps")):
        player.play((), jax.random.key(0), goal)
    assert not [w for w in recwarn if "no episode" in str(w.message)]


# ---------------------------------------------------------------- goals


def test_the_remainder_is_played_by_the_first():
    assert [g.amount for g in Goal(10).split(7)] == [2, 2, 2, 1, 1, 1, 1]
    assert [g.amount for g in Goal(3).split(4)] == [1, 1, 1, 0]
    assert [g.amount for g in Goal(200, "timesteps").split(7)] == [29] * 7  # rounded up
    assert [g.amount for g in Goal(None).split(2)] == [None, None]


def played(num_envs, num_rows):
    """What `Counting` gives: (row, slot, return, length) of the episodes in the order of their ends, and steps so far
    after each row."""
    ends, steps, total = [], [], 0
    for b in range(num_envs):
        t, k = -1, 0
        while t < num_rows:
            t += b + k + 1  # its last row; a reset row comes after it
            ends.append((t, b, 100.0 * b + k, b + k + 1))
            t, k = t + 1, k + 1
    reset_rows = {(t + 1, b) for t, b, *_ in ends}
    for t in range(num_rows):
        total += sum((t, b) not in reset_rows for b in range(num_envs))
        steps.append(total)
    return sorted(e for e in ends if e[0] < num_rows), steps


@pytest.mark.parametrize("amount", [1, 29, 200, 500])
def test_timesteps_end_with_the_row_that_reaches_them(amount):
    ends, steps = played(3, 300)
    last = next(t for t, n in enumerate(steps) if n >= amount)
    found = Player(Counting(3), act).play((), jax.random.key(0), Goal(amount, "timesteps"))
    assert found.timesteps == steps[last]
    assert found.returns.tolist() == [r for t, _, r, _ in ends if t <= last]
    summary = found.summary()
    assert summary["episodes"] == len(found.returns) and ("return" in summary)


def test_no_episode_is_no_number():
    summary = Tally(Goal(10, "timesteps"), 2).result().summary()
    assert summary["episodes"] == 0 and np.isnan(summary["return"]) and np.isnan(summary["length"])


def test_going_on_counts_every_episode_once_in_the_order_of_their_ends():
    """Three environments, whose episodes often end on one row; evaluations of 4 go on from each other."""
    ends, _ = played(3, 300)
    env = Counting(3)
    player, found = Player(env, act, length=1), []
    for i in range(6):
        result = player.play((), jax.random.key(i), Goal(4, reset=False))
        assert len(result.returns) == 4 and result.timesteps == result.lengths.sum()
        found += zip(result.returns.tolist(), result.lengths.tolist())
    assert found == [(r, n) for _, _, r, n in ends[:24]]
    assert env.resets == 1


def test_a_stop_leaves_what_has_ended():
    deadline = Deadline()
    deadline.stop()
    player = Player(Counting(2), act)
    found = player.play((), jax.random.key(0), Goal(1000), deadline)
    ends, _ = played(2, 64)  # one block
    assert sorted(found.returns) == sorted(r for *_, r, _ in ends)
    assert player.missing == 1000 - len(ends)


def test_a_watch_sees_the_episodes_that_count_and_no_other():
    seen = []
    watch = lambda rollout, infos: seen.append((rollout, infos))
    found = Player(Counting(4), act).play((), jax.random.key(0), Goal(10), on_rows=[watch])
    ended = [(r.terminated | r.truncated) & r.mask for r, _ in seen]
    rewards = [r.reward[e] for (r, _), e in zip(seen, ended)]
    assert sorted(np.concatenate(rewards)) == sorted(found.returns)
    assert sum(int(r.mask.sum()) for r, _ in seen) == found.lengths.sum()  # nothing of an episode that does not
    assert all(infos is None and isinstance(r.obs, np.ndarray) for r, infos in seen)


def test_a_share_that_grows_takes_the_next_episodes_of_its_environments():
    rows = lambda *values: PlayedRows(*(np.asarray(v) for v in values))
    one = np.ones((4, 2), bool)
    block = rows(one, one, np.arange(8.0).reshape(4, 2), one.astype(int))  # an episode on every row
    tally = Tally(Goal(3), 2)  # 2 and 1
    np.testing.assert_array_equal(tally.add(block), [[1, 1], [1, 0], [0, 0], [0, 0]])
    assert tally.result().returns.tolist() == [0, 2, 1]
    tally.add_amount(3)  # 3 and 3: played already
    assert tally.missing == 0 and tally.result().returns.tolist() == [0, 2, 4, 1, 3, 5]
    tally.add_amount(4)  # 5 and 5, of which 4 each are there
    assert tally.missing == 2
    assert tally.give_up() == 2 and tally.missing == 0 and len(tally.result().returns) == 8


# ---------------------------------------------------------------- runners, without Ray


def runners(monkeypatch, num, num_envs, faults=None, make=None, **options):
    monkeypatch.setattr(runner_group, "Cluster", FakeCluster(faults))
    make = make or (lambda count, index, restarts: Player(Counting(num_envs), act))
    given = RunnerOptions(num=num, **options)
    return EvaluationRunners(make, given, num_envs=[num_envs] * num, length=64)


def test_runners_share_the_episodes(monkeypatch):
    group = runners(monkeypatch, 7, 1)
    found = group.play((), jax.random.key(0), Goal(10), Deadline())
    assert found.returns.tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0, 0]  # the first three play two
    assert group.healthy == 7 and group.missing == 0
    steps = group.play((), jax.random.key(0), Goal(20, "timesteps"), Deadline())
    assert steps.timesteps == 7 * 3


def test_what_a_runner_leaves_is_played_by_the_others(monkeypatch):
    faults = {(1, 0, 2): "fail"}  # its second block
    group = runners(monkeypatch, 3, 2, faults, ignore_env_runner_failures=True)
    with pytest.warns(RuntimeWarning, match="runner 1 of the evaluation failed, the others go on without it: it broke"):
        found = group.play((), jax.random.key(0), Goal(90), Deadline())
    assert len(found.returns) == 90 and group.healthy == 2 and group.missing == 0
    block = {r for *_, r, _ in played(2, 64)[0]}
    assert len(block) < 30 and all(np.sum(found.returns == r) == 3 for r in block)  # what it had played counts
    assert len(group.play((), jax.random.key(0), Goal(5), Deadline()).returns) == 5  # by the two that are left


def test_another_runner_plays_what_is_missing(monkeypatch):
    faults = {(1, 0, 2): "fail"}
    group = runners(monkeypatch, 2, 2, faults, recreate_failed_env_runners=True)
    with pytest.warns(RuntimeWarning, match="another starts in its place"):
        found = group.play((), jax.random.key(0), Goal(60), Deadline())
    first = [r for _, _, r, _ in played(2, 64)[0]]
    of_second = found.returns[30:].tolist()
    assert len(of_second) == 30
    for b in (0, 1):  # what had ended counts, then the episodes of the new environments from their beginning
        mine = [r for r in of_second if r // 100 == b]
        block = [r for r in first if r // 100 == b]
        assert mine == block + [100.0 * b + k for k in range(15 - len(block))]
    assert group.recreated == [1] and group.healthy == 2


def test_a_runner_that_hangs_is_replaced_when_the_time_is_over(monkeypatch):
    group = runners(monkeypatch, 2, 1, {(1, 0, 1): "hang"})
    found = group.play((), jax.random.key(0), Goal(6), Deadline(0.1))
    assert found.returns.tolist() == [0, 1, 2] and group.missing == 3
    assert group._cluster.killed == [(1, 0)] and group.recreated == [1]
    assert len(group.play((), jax.random.key(0), Goal(6), Deadline()).returns) == 6
