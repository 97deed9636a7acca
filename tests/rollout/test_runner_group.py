"""Runners that fail or are late, whose turn it is, which columns go on, and what fits into a cluster; without Ray."""

import collections
import random

import jax
import jax.numpy as jnp
import pytest
import ray_sources
from fake_cluster import FakeCluster

from jrl import envs
from jrl.errors import InputError, RunnersLost
from jrl.play.player import EvaluationRunners, Player
from jrl.play.tally import Goal
from jrl.rollout import runner_group
from jrl.rollout.ray_cluster import RunnerOptions, check_fits
from jrl.rollout.ray_hosts import EnvRunners, Part, Slots, newest_allowed
from jrl.types import ActOut


def test_no_part_is_taken_too_late_and_quick_runners_are_not_held_up():
    """A simulation of runners of random speed, for many numbers of them, requests in flight and bounds."""
    draw = random.Random(0)
    for _ in range(200):
        num, lag = draw.randint(1, 4), draw.randint(1, 4)
        in_flight, speed = draw.randint(1, lag), [draw.random() ** 3 + 1e-3 for _ in range(num)]
        under_way = [collections.deque([0] * in_flight) for _ in range(num)]
        for call in range(30):
            for taken in range(num):
                newest = newest_allowed(
                    [v for q in under_way for v in q], call=call, left=num - taken, per_call=num, lag=lag
                )
                heads = [i for i in range(num) if under_way[i][0] <= newest]
                i = draw.choices(heads, [speed[i] for i in heads])[0]
                assert call - under_way[i].popleft() <= lag
                under_way[i].append(call)


def test_a_quick_runner_may_overtake_until_the_bound():
    # lag 2, two runners, in call 3 with two parts to take: the two of version 1 have to be taken now
    assert newest_allowed([1, 1, 2, 2], call=3, left=2, per_call=2, lag=2) == 1
    # one of version 1 alone may wait until the other place of this call
    assert newest_allowed([1, 2, 2, 3], call=3, left=2, per_call=2, lag=2) == 3
    assert newest_allowed([1, 2, 2, 3], call=3, left=1, per_call=2, lag=2) == 1
    # in call 2 as well: there are two more places in call 3
    assert newest_allowed([1, 1, 1, 2], call=2, left=2, per_call=2, lag=2) == 2


def part(runner, number, restarts=0):
    return Part(runner, restarts, number, 0, None, None, {})


def test_a_block_of_columns_goes_on_only_from_the_rollout_before_of_the_same_runner():
    slots = Slots(2)
    look = lambda *parts: [(p and (p.runner, p.number), goes_on) for p, goes_on in slots.assign(parts)]
    assert look(part(1, 0), part(0, 0)) == [((0, 0), False), ((1, 0), False)]  # in their own blocks
    assert look(part(0, 1), part(1, 1)) == [((0, 1), True), ((1, 1), True)]
    assert look(part(1, 2), part(1, 3)) == [((1, 3), False), ((1, 2), True)]  # runner 1 in place of 0
    assert look(part(0, 2), part(1, 4)) == [((1, 4), True), ((0, 2), False)]  # where its part before was, it goes on
    assert look(part(0, 3), part(1, 5)) == [((1, 5), True), ((0, 3), True)]
    assert look(part(0, 4)) == [(None, False), ((0, 4), True)]
    assert look(part(0, 5), part(1, 6)) == [((1, 6), False), ((0, 5), True)]  # void in between
    assert look(part(0, 6, restarts=1), part(1, 7)) == [((1, 7), True), ((0, 6), False)]  # another runner 0
    assert look(part(0, 8, restarts=1), part(1, 8)) == [((1, 8), True), ((0, 8), False)]  # one was lost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num": 5}, "5 runners with 1 CPU each, placement PACK, .*4 CPU on 2 nodes: at most 4 runners"),
        ({"num_cpus": 1.5, "num": 3}, "3 runners with 1.5 CPU each.*at most 2 runners"),
        ({"num": 3, "placement": "STRICT_PACK"}, "at most 2"),
        ({"num": 3, "placement": "STRICT_SPREAD"}, "at most 2"),
        ({"num": 1, "num_gpus": 0.5}, "num_gpus: no node of the Ray cluster has 'GPU'; they have CPU, tape"),
        ({"num": 1, "custom_resources": {"disk": 1}}, "custom_resources: no node of the Ray cluster has 'disk'"),
        ({"num": 2, "custom_resources": {"tape": 1}}, "2 runners with 1 CPU, 1 tape each.*at most 1 runners"),
    ],
)
def test_what_can_never_be_placed_is_one_clear_error(change, message):
    nodes = [{"CPU": 2.0, "node:a": 1.0}, {"CPU": 2.0, "tape": 1.0}]
    with pytest.raises(InputError, match=f"(?s){message}"):
        check_fits(RunnerOptions(**change), nodes)


@pytest.mark.parametrize("change", [{"num": 4}, {"num": 8, "num_cpus": 0.5}, {"num": 20, "num_cpus": 0}])
def test_what_fits_is_no_error(change):
    check_fits(RunnerOptions(**change), [{"CPU": 2.0}, {"CPU": 2.0}])


# ---------------------------------------------------------------- the life of a group, of both kinds


def collecting(options):
    """Env runners and what they send, one rollout of each."""
    given = {"num_envs": options.num * ray_sources.B, "like": ray_sources.like(), "join": ray_sources.join}
    group = EnvRunners(lambda index, restarts: ray_sources.Counting(index, restarts), options, **given)
    return group, lambda: group.next({"version": 0}, jax.random.key(0))


def evaluating(options):
    """Runners of an evaluation, and one episode of each."""
    env = lambda: envs.make("CartPole-v1", backend="jax", num_envs=1, options={"max_episode_steps": 4})
    act = lambda actor, obs, carry, key, explore: ActOut(jnp.zeros(len(obs), jnp.int32), carry, {})
    make = lambda count, index, restarts: Player(env(), act, length=8)
    group = EvaluationRunners(make, options, num_envs=[1] * options.num, length=8)
    return group, lambda: group.play((), jax.random.key(0), Goal(options.num))


KINDS = [(collecting, ""), (evaluating, " of the evaluation")]
AGAIN, WITHOUT = {"recreate_failed_env_runners": True}, {"ignore_env_runner_failures": True}


def group_of(monkeypatch, kind, faults, **options):
    monkeypatch.setattr(runner_group, "Cluster", cluster := FakeCluster(faults))
    return cluster, *kind(RunnerOptions(**{"num": 2} | options))


@pytest.mark.parametrize(("kind", "of"), KINDS)
@pytest.mark.parametrize("fault", ["fail", "hang"])
@pytest.mark.parametrize("call", [0, 1])
def test_a_runner_that_fails_or_is_late_ends_the_run(monkeypatch, kind, of, fault, call):
    options = {"sample_timeout_s": 0.05, "health_check_timeout_s": 0.05 if call == 0 else 0.0}
    cluster, group, work = group_of(monkeypatch, kind, {(1, 0, call): fault}, **options)
    late = "has not started" if call == 0 else "has sent nothing"
    key = "health_check_timeout_s" if call == 0 else "sample_timeout_s"
    cause = "it broke" if fault == "fail" else rf"it {late} within 0.05 s \(env_runners.{key}\)"
    with pytest.raises(RunnersLost, match=f"(?s)^environment runner 1{of} failed: {cause}\n.*recreate.*ignore_env"):
        work()
    assert cluster.killed == [(1, 0)] and cluster.started == [(0, 0), (1, 0)]
    group.close()
    group.close()
    assert cluster.closed == [[(0, 0)]]


@pytest.mark.parametrize(("kind", "of"), KINDS)
def test_another_starts_in_the_place_of_one_that_fails_as_often_as_the_options_say(monkeypatch, kind, of):
    faults = {(1, 0, 2): "fail", (1, 1, 1): "fail"}
    cluster, group, work = group_of(monkeypatch, kind, faults, **AGAIN, max_restarts=1)
    work()
    warns = pytest.warns(RuntimeWarning, match=f"^environment runner 1{of} failed, another starts in its place: it b")
    lost = pytest.raises(RunnersLost, match=rf"(?s)1{of} failed: it broke\n1 runners have been replaced .*max_restarts")
    with warns, lost:
        for _ in range(3):
            work()
    assert cluster.killed == [(1, 0), (1, 1)] and cluster.started[2:] == [(1, 1)]
    assert group.recreated == [1]


@pytest.mark.parametrize(("kind", "of"), KINDS)
def test_runners_that_never_work_are_not_replaced_for_ever(monkeypatch, kind, of):
    faults = {(index, restarts, 0): "fail" for index in range(2) for restarts in range(9)}
    cluster, _, work = group_of(monkeypatch, kind, faults, **AGAIN)
    lost = "as others did before: it broke"
    with pytest.warns(RuntimeWarning, match="another starts"), pytest.raises(RunnersLost, match=lost):
        work()
    assert len(cluster.started) == 4  # each once, and one in the place of each


@pytest.mark.parametrize(("kind", "of"), KINDS)
def test_the_others_go_on_until_nobody_is_left(monkeypatch, kind, of):
    cluster, group, work = group_of(monkeypatch, kind, {(1, 0, 1): "fail"}, **WITHOUT)
    with pytest.warns(RuntimeWarning, match=f"^environment runner 1{of} failed, the others go on without it: it broke"):
        work()
    assert group.foreach_worker(lambda source: 5) == [5]
    (runner,) = group._ready()
    cluster.faults[0, 0, runner.actor.calls + 1] = "fail"
    with pytest.raises(RunnersLost, match=f"environment runner 0{of}, the last one, failed: it broke"):
        work()
    with pytest.raises(RunnersLost, match=f"no environment runner{of} is left"):
        work()


def test_a_batch_is_never_all_void(monkeypatch):
    """Where nobody is left who could fill a rollout, it waits for the one that starts."""
    _, group, work = group_of(monkeypatch, collecting, {(0, 0, 2): "fail"}, **AGAIN, num=1)
    work()
    with pytest.warns(RuntimeWarning, match="another starts"):
        rollout, _ = work()
    made = [rollout.extras[name][0].tolist() for name in ("restarts", "made")]
    assert made == [[1.0] * ray_sources.B, [0.0] * ray_sources.B] and rollout.mask.all()
    assert not rollout.contiguous.any() and group.recreated == [0]
