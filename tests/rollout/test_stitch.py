"""Episodes replayed from rollouts are those that the environments played, however they were collected."""

import contextlib
import functools
import itertools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tasks import ACTOR, AsyncStreams, Stream, Streams, act, carry, drift, scripts

from jrl import envs
from jrl.envs.jax_env import build
from jrl.learn import parallel
from jrl.rollout import sources
from jrl.rollout.collect import HostCollector
from jrl.rollout.collect_async import AsyncCollector
from jrl.rollout.sources import JaxSource
from jrl.rollout.stitch import Moments, Stitch
from jrl.rollout.unroll import RAW_STEPS, rollout_like
from jrl.rollout.watch import Watch
from jrl.types import ActOut

T, B = 7, 4


class Seen(NamedTuple):
    """What there is of an episode."""

    obs: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool


class Logged(Stream):
    """A stream that writes down its episodes; one that breaks is forgotten."""

    def __init__(self, index, script):
        super().__init__(index, script)
        self.episodes, self._open = [], None

    def begin(self):
        self._open = ([super().begin()], [], [])
        return self._open[0][0]

    def step(self, action):
        was_done = self.done
        found = super().step(action)
        obs, reward, terminated, truncated, failed = found
        if not was_done and not failed:
            for into, value in zip(self._open, (obs, action, reward)):
                into.append(value)
            if terminated or truncated:
                self.episodes.append(Seen(*map(np.array, self._open), terminated))
        return found


def logged(cls):
    class Of(cls):
        def reset(self):
            made = super().reset()
            self.streams = [Logged(b, script) for b, script in enumerate(self.scripts)]
            for stream in self.streams:
                stream.begin()
            return made

    return Of


def moments(step=False, created=None):
    """(what happens, episodes that ended, all moments by name)"""
    ended, order = [], []

    def note(name):
        return lambda episode: order.append((name, episode.env_index, episode.episode_id, episode.length))

    def end(episode):
        note("end")(episode)
        seen = Seen(episode.obs, episode.actions, episode.rewards, episode.terminated)
        assert episode.is_done
        assert episode.truncated != episode.terminated
        assert episode.length == len(seen.rewards)
        np.testing.assert_array_equal(episode.last_obs, seen.obs[-1])
        assert episode.last_action == seen.actions[-1]
        assert episode.last_reward == seen.rewards[-1]
        ended.append((episode.env_index, seen, episode.total_reward))

    stepped = note("step") if step else None
    found = Moments(
        created or note("created"),
        note("start"),
        stepped,
        end,
        note("finished"),
        itertools.count(),
        contextlib.nullcontext(),
    )
    return found, ended, order


def watched(source, **kwargs):
    found, ended, order = moments(**kwargs)
    make = lambda watch, num_envs, worker, first: Stitch(num_envs, moments=found, worker_index=worker, first=first)
    return Watch(source, make, [], B), ended, order


def same_episodes(ended, streams, complete):
    """The episodes of each column, in their order; `complete` (b) of them must have been told of."""
    for b, stream in enumerate(streams):
        told = [seen for column, seen, _ in ended if column == b]
        assert len(told) == complete(b)
        for a, expected in zip(told, stream.episodes):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), tuple(a), tuple(expected))


@pytest.mark.parametrize("step", [False, True])
def test_episodes_in_step(step):
    env = logged(Streams)(scripts(B, 3, "......elf"))
    sign = lambda reward: jnp.sign(reward) * 0.5  # the learner's rewards are other ones
    source = HostCollector(env, act, length=T, carry=carry, record=True, reward_transform=sign)
    watch, ended, order = watched(source, step=step)
    counts = []
    for i in range(12):
        rollout, report = watch.next(ACTOR, jax.random.key(i))
        assert RAW_STEPS not in rollout.extras
        assert set(np.unique(rollout.reward)) <= {0.0, 0.5, -0.5}
        counts.append((int(report.count), float(report.return_sum)))
    same_episodes(ended, env.streams, lambda b: len(env.streams[b].episodes))
    assert len(ended) > 15  # across rollouts of 7 rows, and some broke off
    # what is reported of the same episodes
    assert sum(n for n, _ in counts) == len(ended)
    np.testing.assert_allclose(sum(total for _, total in counts), sum(total for *_, total in ended), rtol=1e-6)
    names = [name for name, *_ in order]
    assert names.count("finished") == names.count("end") == len(ended)
    for number in {number for _, _, number, _ in order}:
        mine = [(name, length) for name, _, n, length in order if n == number]
        steps = [("step", n) for n in range(1, mine[-1][1] + 1)] if step else []
        tail = [("end", mine[-1][1]), ("finished", mine[-1][1])]
        whole = [("created", 0), ("start", 0), *steps, *tail]
        assert mine == (whole if mine[-1][0] == "finished" else whole[: len(mine)])


def test_steps_are_told_row_by_row_and_within_a_row_column_by_column():
    env = Streams(["....e", "..l", "..."])
    watch, _, order = watched(HostCollector(env, act, length=4, carry=carry, record=True), step=True)
    watch._num_envs = 3
    watch.next(ACTOR, jax.random.key(0))
    # rows 0 .. 3 of columns 0, 1, 2; column 1 ends on row 2, and its row 3 is the reset
    told = [(name, column) for name, column, *_ in order if name != "finished"]
    first = [(name, b) for b in range(3) for name in ("created", "start", "step")]
    second = [("step", b) for b in range(3)]
    third = [("step", 0), ("step", 1), ("end", 1), ("step", 2)]
    assert told == [*first, *second, *third, ("step", 0), ("step", 2)]


def test_episodes_out_of_step():
    env = logged(AsyncStreams)(scripts(B, 5, "......elf"), batch_size=2, least=2, delay=lambda b: 1.0 + 2.5 * b)
    source = AsyncCollector(env, act, length=T, carry=carry, record=True)
    watch, ended, _ = watched(source, step=True)
    for i in range(12):
        watch.next(ACTOR, jax.random.key(i))
    # the environments are ahead of what has been told: an action under way belongs to the next rollout
    behind = [len(stream.episodes) - sum(b == column for column, *_ in ended) for b, stream in enumerate(env.streams)]
    assert all(0 <= n <= 1 for n in behind)
    same_episodes(ended, env.streams, lambda b: len(env.streams[b].episodes) - behind[b])
    assert len(ended) > 10


def test_without_a_record_the_flags_say_it():
    env_scripts = scripts(B, 9, "......elf")
    found = []
    for record in (True, False):
        env = Streams(env_scripts)
        source = HostCollector(env, act, length=T, carry=carry, record=record, cut=record)
        watch, ended, order = watched(source, step=True)
        for i in range(8):
            watch.next(ACTOR, jax.random.key(i))
        source.reset()
        watch.next(ACTOR, jax.random.key(99))
        found.append((order, [(b, total) for b, _, total in ended]))
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) > 5
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)


@pytest.mark.parametrize("length", [1, 5])  # rows of a rollout; the memory is 2
def test_from_a_program_and_with_a_short_memory(length):
    graph = lambda: JaxSource(build(drift(), B), act, key=jax.random.key(0), length=length, carry=carry, record=True)
    whole, memory = [], []
    for kept, history in ((whole, None), (memory, 2)):
        found, ended, _ = moments()
        if history:
            note = lambda e: kept.append(Seen(e.obs, e.actions, e.rewards, e.terminated))  # noqa: B023
            found = found._replace(end=note)
        make = lambda watch, n, worker, first, found=found, n_kept=history: Stitch(n, moments=found, history=n_kept)
        watch = Watch(graph(), make, [], B)
        for i in range(30 // length):
            watch.next(ACTOR, jax.random.key(i))
            past = [episode._parts for episode in watch._stitches[0].unfinished()]
            assert history is None or all(sum(len(rows.reward) for rows in parts) <= 2 for parts in past)
        kept += [seen for _, seen, _ in ended]
    assert len(whole) == len(memory) > 5
    for a, b in zip(whole, memory):
        n = min(2, len(a.rewards))
        np.testing.assert_array_equal(a.obs[-n - 1 :], b.obs)
        np.testing.assert_array_equal(a.actions[-n:], b.actions)
        np.testing.assert_array_equal(a.rewards[-n:], b.rewards)


def test_without_memory_observations_stay_where_they_are():
    def end(episode):
        with pytest.raises(RuntimeError, match=r"Callbacks.history: .* set it to 1"):
            _ = episode.last_obs
        totals.append((episode.length, episode.total_reward, episode.last_reward))

    totals: list = []
    found = moments()[0]._replace(end=end)
    source = HostCollector(Streams(["..e."] * B), act, length=5, carry=carry, record=True)
    watch = Watch(source, lambda watch, n, worker, first: Stitch(n, moments=found, history=0), [], B)
    for i in range(3):
        watch.next(ACTOR, jax.random.key(i))
    assert [n for n, *_ in totals] == [3] * len(totals)
    assert len(totals) == 4 * B


class Runners:
    """A source whose blocks change places, as those of environment runners that are not waited for."""

    def __init__(self, parts, order):
        self._parts, self._order, self._made = parts, order, [0] * len(parts)

    def next(self, actor, key):
        blocks, found = [], []
        for runner in self._order.pop(0):
            if runner is None:
                void = jax.tree.map(np.zeros_like, found[0])
                found.append(void)
                blocks.append(None)
                continue
            blocks.append((runner, 0, self._made[runner]))
            self._made[runner] += 1
            found.append(jax.device_get(self._parts[runner].next(actor, key)[0]))
        self.blocks = blocks
        stack = lambda *x: np.concatenate(x, axis=1 if x[0].ndim > 1 and len(x[0]) == T else 0)
        joined = jax.tree.map(stack, *(rollout.replace(carry=()) for rollout in found))
        return joined.replace(contiguous=np.zeros_like(joined.contiguous)), None


def test_episodes_of_a_runner_whose_rollouts_stand_elsewhere():
    made = [logged(Streams)(scripts(2, seed, "....el")) for seed in (1, 2)]
    parts = [HostCollector(env, act, length=T, carry=carry, record=True) for env in made]
    order = [(0, 1), (1, 0), (0, 0), (1, None), (0, 1)]
    watch, ended, _ = watched(Runners(parts, order))
    for i in range(5):
        watch.next(ACTOR, jax.random.key(i))
    streams = [stream for env in made for stream in env.streams]
    same_episodes(ended, streams, lambda b: len(streams[b].episodes))
    assert len(ended) > 8


def test_an_episode_whose_beginning_was_not_seen_is_none():
    source = HostCollector(Streams(["...e."] * B), act, length=T, carry=carry, record=True)
    rollouts = [jax.device_get(source.next(ACTOR, jax.random.key(i))[0]) for i in range(2)]
    found, ended, _ = moments()
    Stitch(B, moments=found).add(rollouts[1])  # rows 7 .. 13; an episode takes 5, with its reset
    # the one of rows 5 .. 9 is unknown, that of rows 10 .. 13 is whole
    assert [(b, len(seen.rewards)) for b, seen, _ in ended] == [(b, 4) for b in range(B)]


def test_the_shapes_of_a_record_are_known_beforehand():
    env = build(drift(), B)
    algo = SimpleNamespace(
        init=lambda key: ACTOR, actor=lambda state: state, carry=carry, act=act, running_return_gamma=None
    )
    like = rollout_like(env.spec, algo, length=T, num_envs=B, record=True)
    graph = JaxSource(env, act, key=jax.random.key(0), length=T, carry=carry, record=True)
    made, _ = graph.next(ACTOR, jax.random.key(0))
    kind = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert kind(like.extras[RAW_STEPS]) == kind(made.extras[RAW_STEPS])


# ---------------------------------------------------------------- infos


def choose(actor, obs, carry, key, explore=True):
    return ActOut(jnp.zeros(obs.shape[:1], jnp.int32), (), {})


def infos_of(kind, rollouts):
    """(obs, infos) of each episode of Counters."""
    settings = {
        "here": {},
        "workers": {"remote_worker_envs": True},
        "ready": {"remote_worker_envs": True, "batch_wait_ms": 0.0},
    }[kind]
    env = envs.make("counting_envs:Counter", backend="gymnasium", num_envs=3, **settings)
    collect = AsyncCollector if kind == "ready" else HostCollector
    source = collect(env, choose, length=4, record=True, record_infos=True)
    found: list = []

    def end(episode):
        assert episode.last_info is episode.infos[-1]
        found.append((episode.obs, [info["where"] for info in episode.infos]))

    def start(episode):
        assert episode.last_info["where"] == tuple(episode.last_obs)

    plain = moments()[0]
    moved = plain._replace(end=end, start=start, step=start)
    watch = Watch(source, lambda watch, n, worker, first: Stitch(n, moments=moved), [], 3)
    try:
        for _ in range(rollouts):
            watch.next({"w": jnp.zeros(1)}, jax.random.key(0))
    finally:
        watch.close()
    return found


@pytest.mark.parametrize("kind", ["here", "workers", "ready"])
def test_infos_go_with_their_steps(kind):
    found = infos_of(kind, 8)
    assert len(found) > 10
    for obs, infos in found:
        assert obs.shape == (len(infos), 3)
        np.testing.assert_array_equal(obs, infos)
        index, episode, _ = infos[0]
        assert infos == [(index, episode, n) for n in range(3 + index)]


def test_infos_are_not_kept_unless_asked_for():
    env = envs.make("counting_envs:Counter", backend="gymnasium", num_envs=2)
    source = HostCollector(env, choose, length=4)
    source.next({"w": jnp.zeros(1)}, jax.random.key(0))
    assert source.infos is None
    assert list(env.infos.latest) == [None, None]
    env.close()


def test_infos_of_a_pool():
    """EnvPool counts the steps of an episode itself; two pools side by side, collected in a thread."""
    pools = [envs.make("CartPole-v1", backend="envpool", num_envs=4, seed=s, host=True) for s in (0, 1)]
    parts = [sources.make(p, choose, key=jax.random.key(0), length=8, record=True, record_infos=True) for p in pools]
    device = jax.local_devices()[0]
    mesh = parallel.make_mesh(1)
    join = functools.partial(parallel.deal, mesh=mesh)
    both = sources.Pools(parts, devices=[device] * 2, join=join, stack=parallel.stack)
    source = sources.Async(both, lag=1)
    counts: list = []
    note = lambda e: counts.append([int(info["elapsed_step"]) for info in e.infos])
    found = moments()[0]._replace(end=note)
    watch = Watch(source, lambda watch, n, worker, first: Stitch(n, moments=found), [], 8)
    for i in range(5):
        watch.next(jax.device_put({"w": jnp.zeros(1)}, device), jax.random.key(i))
    watch.close()
    assert len(counts) >= 16
    assert all(steps == list(range(len(steps))) for steps in counts)
    assert {len(steps) for steps in counts} <= set(range(9, 13))  # always to one side: the pole falls
