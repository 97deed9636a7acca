"""Whole episodes: against a plain Python loop over the rows of each column, and with real sources and learners."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tasks

from jrl.algos import ppo
from jrl.envs.jax_env import build
from jrl.errors import InputError
from jrl.learn import learner, parallel
from jrl.learn.program import train
from jrl.learn.staged import Staged
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.networks import NetworkConfig
from jrl.rollout import complete
from jrl.rollout.complete import Complete, longest_episode
from jrl.rollout.sources import JaxSource
from jrl.types import Rollout

T, B, H = 5, 6, 7  # the task's episodes have at most 7 steps
KEY = jax.random.key(3)


def source(length=T, num_envs=B, seed=0):
    env = build(tasks.drift(), num_envs)
    return JaxSource(
        env, tasks.act, key=jax.random.key(seed), length=length, carry=tasks.carry, running_return_gamma=0.9
    )


def collect(source, calls):
    """Rollouts on the host, and the reports."""
    made = [source.next(tasks.ACTOR, jax.random.fold_in(KEY, i)) for i in range(calls)]
    return jax.device_get([m[0] for m in made]), [m[1] for m in made]


def split(rollouts, column):
    """The episodes of a column, each a list of rows, by a plain loop: (obs, action, reward, terminated, truncated,
    log_prob, running return) and last the observation after it; those that have not ended are left out.
    """
    found, rows = [], []
    for r in rollouts:
        if not r.contiguous[column]:
            rows = []
        for t in range(len(r.reward)):
            if not r.mask[t, column]:
                continue
            extras = (r.extras["log_prob"][t, column], r.extras["running_return"][t, column])
            end = r.terminated[t, column], r.truncated[t, column]
            rows.append((r.obs[t, column], r.action[t, column], r.reward[t, column], *end, *extras))
            if any(end):
                after = r.obs[t + 1, column] if t + 1 < len(r.reward) else r.last_obs[column]
                found.append([*rows, after])
                rows = []
    return found


def packed_episodes(rollout, column):
    """What `split` gives, of one rollout of whole episodes."""
    rows = np.asarray(rollout.mask[:, column])
    assert not rows[-1]
    # each run of unmasked rows ends with an end, and nothing else does
    ends = rollout.terminated[:, column] | rollout.truncated[:, column]
    np.testing.assert_array_equal(ends[:-1], rows[:-1] & ~rows[1:])
    assert not ends[-1]
    # packed at the front: the first of two masked rows in a row is followed by masked rows only
    void = np.flatnonzero(~rows[:-1] & ~rows[1:])
    assert not rows[0] or not len(void) or not rows[void[0] :].any()
    assert rows.any() == rows[0]
    return split([rollout.replace(contiguous=np.zeros_like(rollout.contiguous))], column)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            jax.tree.map(np.testing.assert_array_equal, x, y)


@pytest.fixture(scope="module")
def played():
    """The source's own rollouts, and whole episodes of an equal source."""
    plain, reports = collect(source(), 12)
    whole, whole_reports = collect(Complete(source(), limit=H, carry=tasks.carry), 12)
    return plain, reports, whole, whole_reports


def test_rollouts_hold_exactly_the_episodes_that_were_played(played):
    plain, reports, whole, whole_reports = played
    assert all(r.mask.shape == (T + H, B) for r in whole)
    for column in range(B):
        expected = split(plain, column)
        # a column has its own keys only by call: the same calls collect the same, one rollout each
        found = [e for r in whole for e in packed_episodes(r, column)]
        assert len(expected) >= 6
        assert_same(found, expected)
    assert sum(int(r.count) for r in reports) == sum(len(split(plain, c)) for c in range(B))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(reports), jax.device_get(whole_reports))


def test_what_a_rollout_says_beside_its_rows(played):
    plain, _, whole, _ = played
    for before, rollout in zip(plain, whole):
        assert not rollout.contiguous.any()
        np.testing.assert_array_equal(rollout.carry["memory"], np.full((B, 3), tasks.INITIAL))
        np.testing.assert_array_equal(rollout.last_obs, before.last_obs)
        assert not rollout.reward[~rollout.mask].any()
        # the policy's memory, recorded after each step, goes along: row 0 begins from the initial one
        first = 0.7 * tasks.INITIAL + rollout.obs[0, :, :1] * np.asarray(tasks.ACTOR["w"])[None]
        live = rollout.mask[0]
        np.testing.assert_allclose(rollout.extras["memory"][0][live], first[live], rtol=1e-5)


# ---------------------------------------------------------------- rows that were written down


class Written:
    """A source of one column per string: `.` a step, `T` and `t` a true end and a time limit, `r` a void row, `|` the
    start of a rollout that does not continue the one before. Row n has observation n.
    """

    def __init__(self, *columns, length):
        self._rows, self._length, self._at = columns, length, 0
        self.metrics, self.columns, self.closed = {"rollout/other": 1.0}, None, False
        self.began = [True] * len(columns)

    def next(self, actor, key):
        at, length, size = self._at, self._length, len(self._rows)
        rows = np.array([list(c.replace("|", "")[at : at + length]) for c in self._rows]).T
        bars = [len(c.split("|")[0]) if "|" in c else -1 for c in self._rows]
        obs = np.broadcast_to(np.arange(at, at + length + 1, dtype=np.float32)[:, None], (length + 1, size))
        going_on = np.array([at > 0 and at != bar for bar in bars])
        flags = [rows == "T", rows == "t", rows != "r"]
        self._at += length
        rollout = Rollout(obs[:-1], obs[-1], obs[:-1] * 10, obs[:-1] + 1, *flags, going_on, {}, ())
        rollout = jax.tree.map(jnp.asarray, rollout)
        # the statistics of a rollout: as many steps as there are, nothing else
        zero = jnp.int32(0)
        report = episodes.Episodes(
            zero, zero, jnp.inf, -jnp.inf, zero, flags[2].sum(dtype=jnp.int32), obs[0] * 0, obs[0]
        )
        return rollout, jax.tree.map(jnp.asarray, report)

    def reset(self, key):
        self.was_reset = True

    def foreach_env(self, fn):
        return [fn(c) for c in self._rows]

    foreach_worker = foreach_env

    def close(self):
        self.closed = True


def written(*columns, length, limit, calls):
    """By call, by column: the rows as text, `.` step, T and t ends, `_` void; and the observations of live rows."""
    source = Complete(Written(*columns, length=length), limit=limit)
    out = []
    for _ in range(calls):
        r = jax.device_get(source.next(None, KEY)[0])
        text = np.where(r.mask, np.where(r.terminated, "T", np.where(r.truncated, "t", ".")), "_").T
        obs = [r.obs[: "".join(row).rstrip("_").__len__() + 1, c].tolist() for c, row in enumerate(text)]
        out.append([("".join(row), o) for row, o in zip(text, obs)])
        for c, row in enumerate(text):
            np.testing.assert_array_equal(r.action[row != "_", c], 10 * r.obs[row != "_", c])
            np.testing.assert_array_equal(r.reward[row != "_", c], 1 + r.obs[row != "_", c])
    return out


def test_written_rows():
    """Ends of both kinds, at the last row of a rollout and at the first; two in one rollout; broken environments."""
    columns = ("..TrT" + "r.Tr.", "...tr" + "|" + "..Tr.", "..tr." + "Trr.T")
    (a, b, c), (d, e, f) = written(*columns, length=5, limit=4, calls=2)
    # the second episode ends with the rollout: its last observation is that after the rollout
    assert a == ("..T_T____", [0, 1, 2, 3, 4, 5])
    assert d == (".T_______", [6, 7, 8])  # the reset row, which nothing precedes, is gone
    assert b == ("...t_____", [0, 1, 2, 3, 4])
    assert e == ("..T______", [5, 6, 7, 8])
    # an episode of two rollouts; then two void rows, the second of a reset that failed
    assert c == ("..t______", [0, 1, 2, 3])
    assert f == (".T_.T____", [4, 5, 6, 8, 9, 10])


def test_an_episode_that_broke_off_is_cut_where_it_broke():
    """A void row upon one that is no end."""
    ((a,), (b,)) = written("..r.." + ".T...", length=5, limit=4, calls=2)
    assert a == (".t_______", [0, 1, 2])
    assert b == ("...T_____", [3, 4, 5, 6, 7])


def test_rows_that_do_not_go_on_are_dropped():
    ((a,), (b,)) = written("Tr..." + "|" + "..Tr.", length=5, limit=4, calls=2)
    assert a == ("T________", [0, 1])
    assert b == ("..T______", [5, 6, 7, 8])


def test_an_episode_beyond_the_limit_is_cut():
    """Pieces of 3 steps, each with a true successor; one step in four is lost, but none where a rollout ends."""
    ((a,), (b,)) = written("....." + "..Tr.", length=5, limit=3, calls=2)
    assert a == ("..t_____", [0, 1, 2, 3])
    # row 4 waits; 5 and 6 follow, and row 7 is lost
    assert b == ("..t_____", [4, 5, 6, 7])
    ((a,), (b,)) = written("..." + "..T", length=3, limit=3, calls=2)
    assert a == ("..t___", [0, 1, 2, 3])
    assert b == ("..T___", [3, 4, 5, 6])


def test_it_collects_until_an_episode_has_ended():
    source = Complete(Written(".......", "......T", length=1), limit=6 + 1)
    rollout, report = source.next(None, KEY)
    assert int(report.steps) == 14  # seven rollouts of one row
    assert rollout.mask.sum(0).tolist() == [7, 7]
    assert rollout.truncated[6].tolist() == [True, False]  # the limit
    assert source.metrics == {"rollout/other": 1.0, complete.PADDING: pytest.approx(1 - 14 / 16)}
    # rows that are all void do not keep it for ever
    rollout, report = Complete(Written("r" * 20, length=1), limit=4).next(None, KEY)
    assert not rollout.mask.any()
    assert int(report.steps) == 0


def test_a_reset_drops_what_waits_and_the_rest_is_the_source():
    inner = Written("..Tr..", ".....T", length=3)
    source = Complete(inner, limit=6)
    source.next(None, KEY)
    source.reset(KEY)
    assert inner.was_reset
    rollout, _ = source.next(None, KEY)
    assert rollout.mask.sum(0).tolist() == [0, 3]
    assert source.foreach_env(len) == source.foreach_worker(len) == [6, 6]
    source.columns = 3
    assert inner.columns == source.columns == 3
    source.close()
    assert inner.closed


def test_the_longest_episode():
    assert longest_episode(500) == 500
    with pytest.raises(InputError, match=r"set env\.horizon"):
        longest_episode(None)
    with pytest.raises(ValueError, match="limit"):
        Complete(None, limit=0)


# ---------------------------------------------------------------- learners


@pytest.mark.slow
def test_columns_of_several_devices_stay_where_they_are(four_devices):
    class Dealt(JaxSource):
        def next(self, actor, key):
            rollout, report = super().next(actor, key)
            return parallel.shard(rollout, four_devices, parallel.ROLLOUT), report

    env = build(tasks.drift(), 8)
    make = lambda cls: Complete(cls(env, tasks.act, key=KEY, length=T, carry=tasks.carry), limit=H, carry=tasks.carry)
    one, four = make(JaxSource), make(Dealt)
    for i in range(3):
        a, b = (jax.block_until_ready(s.next(tasks.ACTOR, jax.random.fold_in(KEY, i))[0]) for s in (one, four))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(b)} == {4}
    assert b.obs.addressable_shards[0].data.shape == (T + H, 2, 2)


@pytest.mark.slow
def test_a_run_counts_steps_when_they_are_taken():
    env = build(tasks.drift(), B)
    made = ppo.make(
        ppo.Config(num_epochs=1, num_minibatches=2), env.spec, NetworkConfig(hidden=(8,)), axis_name=parallel.AXIS
    )
    make = lambda key: Complete(JaxSource(env, made.act, key=key, length=T), limit=H)
    program = Staged(learner.on_policy(made), make, parallel.make_mesh(1), rows=T * B, timers=Timers(), stage="collect")
    learned = []
    for info in train(program, program.init(0), seed=0, total_env_steps=4 * T * B):
        learned.append(int(info.state.learner.env_steps))
        assert 0 < learned[-1] <= info.env_steps_after()
        assert 0 < info.metrics[complete.PADDING] < 1
    assert info.env_steps_after() >= 4 * T * B
