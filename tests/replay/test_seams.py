"""What replay gives out beside a plain record of what was acted on, for whoever hands it rollouts.

Env runners x async x replay, environments out of step x memory x replay, EnvPool's options x replay, whole episodes.
"""

import dataclasses
import functools
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numbered
import numpy as np
import pytest
from cases import some_quick

from jrl import envs
from jrl.learn import parallel
from jrl.replay import ring, sequences
from jrl.replay.regroup import convert
from jrl.rollout import runner_group
from jrl.rollout.collect_async import AsyncCollector
from jrl.rollout.complete import Complete
from jrl.rollout.ray_hosts import EnvRunners, RunnerOptions
from jrl.rollout.sources import Pools
from jrl.types import ActOut

GAMMA, N_STEP, LENGTH, BURN_IN = 0.9, 3, 5, 2
SIZES = {"capacity": 3000, "batch_size": 64, "gamma": GAMMA, "n_step": N_STEP}


@functools.cache
def buffers(num_envs, in_step):
    """Of transitions with stacks rebuilt, and of sequences; their functions jitted."""
    options = {**SIZES, "num_envs": num_envs, "in_step": in_step, "frame_stack": ring.FrameStack(numbered.FRAMES)}
    of_rows = ring.make(numbered.OBS, numbered.ACTION, **options)
    of_sequences = sequences.make(
        numbered.OBS,
        numbered.ACTION,
        length=LENGTH,
        burn_in=BURN_IN,
        extras={"carry": numbered.CARRY},
        alpha=0.6,
        **options,
    )
    many = lambda buffer: jax.jit(jax.vmap(buffer.sample, (None, 0)))
    return [(buffer, jax.jit(buffer.add), many(buffer)) for buffer in (of_rows, of_sequences)]


def check(record, rollouts, *, in_step, runs=6):
    """Adds the rollouts, then holds samples against the record; (share of full windows, valid share)."""
    num_envs = rollouts[0].mask.shape[1]
    keys = jax.random.split(jax.random.key(0), runs)
    flat = lambda tree: jax.device_get(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree))
    (rows, add_rows, draw_rows), (seqs, add_seqs, draw_seqs) = buffers(num_envs, in_step)
    of_rows, of_sequences, collected = rows.init(), seqs.init(), 0
    for rollout in rollouts:
        collected += int(rollout.mask.sum())
        of_rows, of_sequences = add_rows(of_rows, rollout), add_seqs(of_sequences, rollout)
    assert int(rows.live(of_rows)) == collected  # none was lost
    batch = flat(draw_rows(of_rows, keys))
    spans = numbered.checked_transitions(record, batch, GAMMA, N_STEP)
    assert len(spans) > 0.5 * len(batch.weight)
    assert numbered.checked_sequences(record, flat(draw_seqs(of_sequences, keys)), BURN_IN) > 0
    return np.mean(np.asarray(spans) == N_STEP), collected / int(rows.size(of_rows))


# ------------------------------------------------------------ env runners


def collected(monkeypatch, cluster, *, length, lag=2, calls=40, num=2, learner=0.5, stand_in=False, **options):
    """Rollouts of runners on a cluster with a clock, and the record; the learner takes `learner` seconds a call."""
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setattr(runner_group, "Cluster", cluster)
    record, lags, rollouts = {}, [], []

    def make(index, restarts):
        first = 2 * index + 100 * restarts
        return numbered.Numbered(record, first, length=length, seed=first)

    join = functools.partial(parallel.deal, mesh=parallel.make_mesh(1))
    options = RunnerOptions(num=num, **options)
    source = EnvRunners(
        make, options, num_envs=2 * num, like=numbered.like(length), join=join, lag=lag, window=4, stand_in=stand_in
    )
    for _ in range(calls):
        rollouts.append(jax.device_get(source.next({}, jax.random.key(0))[0]))
        lags.append(source.metrics["rollout/policy_lag_max"])
        cluster.now += learner
    source.close()
    assert max(lags) <= (lag or 0)
    return record, rollouts  # on the host: what lies where would be a program each


SPEEDS = {
    "equal": {0: 1.0, 1: 1.0},
    "learner is slow": {0: 0.1, 1: 0.2},
    "uneven": {0: lambda n: 1.0 + (n % 3) / 2, 1: lambda n: 1.0 + (n % 4) / 3},
    "now and then late": {0: 1.0, 1: lambda n: 7.0 if n % 20 == 9 else 1.0},
    "one is slow": {0: 0.2, 1: 3.0},
}


@pytest.mark.parametrize(
    ("speeds", "lag"), some_quick([*((speeds, 2) for speeds in SPEEDS), ("uneven", 1)], ("uneven", 2))
)
def test_what_comes_from_runners_out_of_step(monkeypatch, speeds, lag):
    """As a run does it: one part of each in every call, each in its own block of columns, which goes on for ever."""
    record, rollouts = collected(monkeypatch, numbered.Cluster(SPEEDS[speeds]), length=1, lag=lag)
    assert all(np.all(rollout.contiguous) for rollout in rollouts[1:])
    full, valid = check(record, rollouts, in_step=False)
    assert valid > 0.85  # the rest are the rows between episodes
    assert full > 0.6


@pytest.mark.slow
def test_runners_that_stand_in_for_others(monkeypatch):
    """Where a part stands in the block of another, the column has a seam; nothing is lost or taken for another's."""
    cluster = numbered.Cluster(SPEEDS["one is slow"])
    record, rollouts = collected(monkeypatch, cluster, length=3, calls=30, stand_in=True)
    assert np.mean([np.mean(rollout.contiguous) for rollout in rollouts[1:]]) < 0.5
    check(record, rollouts, in_step=False)
    cluster = numbered.Cluster(SPEEDS["uneven"])
    record, rollouts = collected(monkeypatch, cluster, length=3, calls=30, stand_in=True)
    assert all(np.all(rollout.contiguous) for rollout in rollouts[1:])


@pytest.mark.parametrize("change", [{"recreate_failed_env_runners": True}, {"ignore_env_runner_failures": True}])
def test_a_runner_that_dies_leaves_a_seam(monkeypatch, change):
    cluster = numbered.Cluster(SPEEDS["uneven"], dies={1: 7})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        record, rollouts = collected(monkeypatch, cluster, length=3, calls=30, **change)
    who = {int(x) for rollout in rollouts[-5:] for x in np.asarray(rollout.obs["id"])[..., 0].ravel()}
    assert who == ({0, 1, 102, 103} if "recreate_failed_env_runners" in change else {0, 1})
    check(record, rollouts, in_step=False)


def test_synchronous_runners_one_of_which_is_gone(monkeypatch):
    """Its columns are void, and take no room."""
    cluster = numbered.Cluster(SPEEDS["equal"], dies={1: 7})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        record, rollouts = collected(
            monkeypatch, cluster, length=3, lag=None, calls=30, ignore_env_runner_failures=True
        )
    assert [int(rollout.count.sum()) for rollout in rollouts[5:10]] == [12, 12, 6, 6, 6]
    assert check(record, rollouts, in_step=False)[1] > 0.85


# ------------------------------------------------------------ one process


@pytest.mark.slow
def test_pools_that_are_reset():
    """Columns that move in step: a reset costs each of them a slot."""
    record = {}
    parts = [numbered.Numbered(record, 2 * i, length=3, seed=i) for i in range(2)]
    join = functools.partial(parallel.deal, mesh=parallel.make_mesh(1))
    pools = Pools(parts, devices=jax.devices()[:1] * 2, join=join, stack=parallel.stack)
    rollouts = []
    for i in range(20):
        if i in (7, 8, 15):
            pools.reset(jax.random.key(0))
        rollouts.append(jax.device_get(pools.next({}, jax.random.key(i))[0]))
    pools.close()
    _full, valid = check(record, rollouts, in_step=True)
    assert valid > 0.8


def test_padding_of_whole_episodes_is_not_stored():
    record = {}
    source = Complete(numbered.Numbered(record, 0, length=4, ends=0.3, num_envs=4), limit=40)
    rollouts = [jax.device_get(source.next({}, jax.random.key(i))[0]) for i in range(25)]
    assert source.metrics["rollout/padding"] > 0.7
    _full, valid = check(record, rollouts, in_step=False)
    assert valid > 0.5  # between episodes of three steps is a row, and one between rollouts
    ends = {place[:2]: place[2] for place, row in record.items() if row[2] or row[3]}
    ids = np.concatenate([np.asarray(r.obs["id"])[np.asarray(r.mask)] for r in rollouts]).astype(int)
    assert {tuple(x[:2]) for x in ids} <= set(ends)


# ------------------------------------------------------------ a replay that goes on with another way to collect


def as_dicts(x):
    """A replay's state of one device, as a checkpoint has it."""
    if dataclasses.is_dataclass(x):
        return {f.name: as_dicts(getattr(x, f.name)) for f in dataclasses.fields(x)}
    return jax.tree.map(lambda x: np.asarray(x)[None] if x.ndim == 0 else np.asarray(x), x)


def as_state(like, found):
    if dataclasses.is_dataclass(like):
        fields = dataclasses.fields(like)
        return like.replace(**{f.name: as_state(getattr(like, f.name), found[f.name]) for f in fields})
    return jax.tree.map(lambda x, y: jnp.asarray(y).reshape(x.shape), like, found)


@pytest.mark.parametrize("in_step", some_quick([True, False], True))
def test_a_run_goes_on_without_runners_or_with_them(monkeypatch, in_step):
    """Columns with a head each, half of which stood still for a while, get one for all; and the other way round."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        cluster = numbered.Cluster(SPEEDS["equal"], dies={1: 7})
        record, from_runners = collected(
            monkeypatch, cluster, length=3, lag=None, calls=30, ignore_env_runner_failures=True
        )
    source = numbered.Numbered(record, 50, length=3, num_envs=4, seed=9)
    from_here = [source.next(None, None)[0] for _ in range(12)]
    before, after = (from_runners, from_here) if in_step else (from_here, from_runners)
    flat = lambda tree: jax.device_get(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree))
    keys = jax.random.split(jax.random.key(0), 6)
    checks = (
        lambda sample: numbered.checked_transitions(record, sample, GAMMA, N_STEP),
        lambda sample: range(numbered.checked_sequences(record, sample, BURN_IN)),
    )
    for old, new, checked in zip(buffers(4, not in_step), buffers(4, in_step), checks, strict=True):
        state = old[0].init()
        for rollout in before:
            state = old[1](state, rollout)
        rows = sum(int(rollout.mask.sum()) for rollout in before)
        like = new[0].init()
        state = as_state(like, convert(as_dicts(state), like, 1))
        for rollouts in ([], after):
            for rollout in rollouts:
                state, rows = new[1](state, rollout), rows + int(rollout.mask.sum())
            assert int(new[0].live(state)) == rows
            sample = flat(new[2](state, keys))
            assert len(checked(sample)) > 0.4 * sample.weight.size
            which = {int(x) for x in np.asarray(sample.index).ravel() % 4}
            assert which == {0, 1, 2, 3}


# ------------------------------------------------------------ environments out of step


def counting(actor, obs, carry, key, explore=True):
    """The memory counts the steps of the episode; actions are as good as any."""
    return ActOut(jax.random.randint(key, carry.shape, 0, 2), carry + 1.0, {"carry": carry})


def recorded(env):
    """What an AsyncEnv is told and answers: observation -> action, reward, both ends, what came, the episode's step."""
    record, before, sent, step = {}, {}, {}, {}
    send, recv = env.send, env.recv

    def tell(action, env_id):
        sent.update(zip(np.asarray(env_id).tolist(), np.asarray(action).tolist()))
        send(action, env_id)

    def hear():
        ids, result = recv()
        for i, b in enumerate(np.asarray(ids).tolist()):
            obs, end = np.array(result.obs[i]), (bool(result.terminated[i]), bool(result.truncated[i]))
            if step.get(b) is not None:
                record[before[b].tobytes()] = (sent[b], float(result.reward[i]), *end, obs, step[b])
            going = step[b] + 1 if step.get(b) is not None else 0  # None: what comes begins an episode
            before[b], step[b] = obs, None if any(end) else going
        return ids, result

    env.send, env.recv = tell, hear
    return record


@functools.cache
def plain_buffers():
    """Of CartPole's transitions and sequences, with their jitted samples."""
    options = {**SIZES, "num_envs": 5, "in_step": False}
    of_rows = ring.make(jax.ShapeDtypeStruct((4,), jnp.float32), numbered.ACTION, **options)
    of_sequences = sequences.make(
        jax.ShapeDtypeStruct((4,), jnp.float32), numbered.ACTION, length=LENGTH, burn_in=BURN_IN,
        extras={"carry": numbered.CARRY}, **options,
    )  # fmt: skip
    return [(buffer, jax.jit(jax.vmap(buffer.sample, (None, 0)))) for buffer in (of_rows, of_sequences)]


@pytest.mark.slow
@pytest.mark.parametrize(("length", "batch_size"), [(1, 3), (4, 2)])
def test_what_comes_from_environments_out_of_step(length, batch_size):
    """EnvPool with `batch_size`: columns go on where they were, whatever padding the rollouts have in between."""
    env = envs.make("CartPole-v1", num_envs=5, batch_size=batch_size, options={"max_episode_steps": 9}, seed=3)
    record = recorded(env)
    source = AsyncCollector(env, counting, length=length, carry=jnp.zeros)
    rollouts = [jax.device_get(source.next((), jax.random.key(i))[0]) for i in range(120 // length)]
    source.close()
    counts = np.stack([rollout.count for rollout in rollouts])
    assert (counts < length).any()  # there was padding
    (of_rows, draw_rows), (of_sequences, draw_sequences) = plain_buffers()
    states = [buffer.init() for buffer in (of_rows, of_sequences)]
    adds = [jax.jit(buffer.add) for buffer in (of_rows, of_sequences)]
    for rollout in rollouts:
        states = [add(state, rollout) for add, state in zip(adds, states)]
    assert int(of_rows.size(states[0])) == counts.sum()  # nothing else is stored, and nothing twice
    assert int(of_rows.live(states[0])) == sum(int(rollout.mask.sum()) for rollout in rollouts)

    batch = jax.device_get(draw_rows(states[0], jax.random.split(jax.random.key(0), 8)))
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    spans = []
    for i in np.flatnonzero(batch.weight > 0):
        obs, total, discount, span = batch.obs[i], 0.0, 1.0, 0
        assert record[obs.tobytes()][0] == batch.action[i]
        while span < N_STEP and obs.tobytes() in record:
            _, reward, terminated, truncated, obs, _ = record[obs.tobytes()]
            total, discount, span = total + discount * reward, discount * GAMMA, span + 1
            if terminated or truncated or (obs == batch.next_obs[i]).all():
                break
        np.testing.assert_array_equal(batch.next_obs[i], obs)
        np.testing.assert_allclose(batch.reward[i], total, rtol=1e-5)
        np.testing.assert_allclose(batch.discount[i], 0.0 if terminated else discount, rtol=1e-5)
        if not (terminated or truncated):
            spans.append(span)
    assert np.mean(np.asarray(spans) == N_STEP) > 0.9  # only the newest are cut

    sample = jax.device_get(draw_sequences(states[1], jax.random.split(jax.random.key(1), 4)))
    sample = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sample)
    live = 0
    for n in range(len(sample.index)):
        memory = sample.window.carry[n]
        for t in range(BURN_IN + LENGTH):
            if t >= BURN_IN and sample.weight[n, t - BURN_IN] > 0:
                live += 1
                assert memory == record[sample.window.obs[n, t].tobytes()][-1]
            memory = 0 if sample.window.reset[n, t] else memory + 1
    assert live > 0.6 * sample.weight.size
