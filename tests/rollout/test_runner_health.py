"""Whose turn it is, which columns go on, and what fits into a cluster; without Ray."""

import collections
import random

import pytest

from jrl.errors import InputError
from jrl.rollout.runner_health import Part, RunnerOptions, Slots, check_fits, newest_allowed


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
