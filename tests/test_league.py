"""The league of self-play: when copies are taken, which place is written over, who plays, ratings."""

import dataclasses

import jax
import numpy as np

from jrl.agents import league
from jrl.config.sections import SelfPlayConfig
from jrl.metrics import payoff

# ---------------------------------------------------------------- what is decided


def standing(**fields):
    """A league of three places in numpy."""
    return dataclasses.replace(jax.tree.map(np.array, league.init(3)), **fields)


def against(*won, games=10):
    """Counts of a learner that has won so many of its games against each place and lost the others."""
    return np.array([[w, 0, games - w if w is not None else 0] if w is not None else [0, 0, 0] for w in won], np.int32)


def rules(**given):
    return SelfPlayConfig(pool=3, **{"window": 20, **given})


def test_when_a_copy_is_taken():
    at = lambda league_, own, steps=0: league.decide(league_, own, steps, (0, 1))[1]
    known = standing(counts=against(9, 9, 6), generation=np.array([0, 1, 2], np.int32), copies=np.int32(2))
    assert at(known, rules(snapshot_win_rate=0.8)) == 0  # 24 of 30
    assert at(known, rules(snapshot_win_rate=0.81)) == 3
    assert at(known, rules(snapshot_win_rate=0.8, window=31)) == 3
    every = rules(snapshot_win_rate=None, snapshot_every=100)
    assert at(known, every, 99) == 3 and at(known, every, 100) == 0
    assert at(dataclasses.replace(known, marks=np.int32(1)), every, 199) == 3


def test_which_place_is_written_over():
    place = lambda copies, generation, counts, **own: league.least_useful(
        standing(copies=np.int32(copies), generation=np.array(generation, np.int32), counts=counts), rules(**own)
    )
    assert place(0, [0, 0, 0], against(9, None, None)) == 1
    assert place(1, [0, 1, 0], against(9, 3, None)) == 2
    assert place(2, [0, 1, 2], against(5, 9, 10)) == 1  # the newest stays
    assert place(2, [0, 1, 2], against(5, 5, 9)) == 0  # as often: the older
    assert place(5, [5, 3, 4], against(None, None, 9)) == 2
    assert place(5, [5, 3, 4], against(9, None, None), opponents="latest") == 1


def test_who_plays():
    known = standing(copies=np.int32(2), generation=np.array([3, 1, 2], np.int32), latest=against(10, 10, 4))
    assert league.pick_opponents(known, rules(opponents="latest"), (0, 0)).tolist() == [0, 0, 0]
    assert league.pick_opponents(known, rules(opponents="uniform"), (0, 0)).tolist() == [0, 1, 2]
    # only the third is ever not beaten
    assert league.pick_opponents(known, rules(opponents="prioritised"), (0, 0)).tolist() == [2, 2, 2]
    some = dataclasses.replace(known, latest=against(5, 10, 5))
    drawn = np.array([league.pick_opponents(some, rules(opponents="prioritised"), (0, i)) for i in range(200)])
    assert 0.4 < (drawn == 0).mean() < 0.6 and not (drawn == 1).any()
    one = standing()
    assert league.pick_opponents(one, rules(opponents="uniform"), (0, 0)).tolist() == [0, 0, 0]


# ---------------------------------------------------------------- what rows tell


def test_win_rates_have_binomial_standard_errors():
    # 9 of 10 and 5 of 10 games won, the third place has not been met: 14 of 20 together
    row = league.metrics(standing(counts=against(9, 5, None)), rules())
    rates = [row[f"league/win_rate{end}"] for end in ("", "/1", "/2", "/3")]
    errors = [row[f"league/win_rate_se{end}"] for end in ("", "/1", "/2", "/3")]
    np.testing.assert_allclose(rates, [0.7, 0.9, 0.5, np.nan], rtol=1e-6)
    np.testing.assert_allclose(errors, [(0.21 / 20) ** 0.5, 0.009**0.5, 0.025**0.5, np.nan], rtol=1e-6)
    # before there are `window` games there is no rate over all, and so no error
    row = league.metrics(standing(counts=against(9, None, None)), rules())
    np.testing.assert_equal([row["league/win_rate"], row["league/win_rate_se"]], [np.nan, np.nan])


# ---------------------------------------------------------------- ratings


def test_elo_of_two_by_hand():
    # 30 wins and 10 losses: odds of 3, 400 log10(3) = 190.85; error 400 / ln 10 * sqrt(1 / 30 + 1 / 10) = 63.433
    rating, error = payoff.compute_elo(np.array([[0.0, 10.0], [30.0, 0.0]]))
    np.testing.assert_allclose(rating, [0, 190.848], atol=1e-3)
    np.testing.assert_allclose(error, [0, 63.433], atol=1e-3)
    # a drawn game beside: 30.5 to 10.5
    rating, _ = payoff.compute_elo(np.array([[0.0, 10.0], [30.0, 0.0]]), prior=1.0)
    np.testing.assert_allclose(rating[1], 400 * np.log10(30.5 / 10.5))


def test_elo_of_a_chain_adds_up_and_who_is_not_tied_has_none():
    scores = np.zeros((5, 5))
    scores[1, 0], scores[0, 1], scores[2, 1], scores[1, 2] = 20, 10, 40, 10
    scores[3, 0] = 5  # has won everything
    rating, error = payoff.compute_elo(scores)
    one, two = 400 * np.log10(2), 400 * np.log10(4)
    np.testing.assert_allclose(rating[:3], [0, one, one + two])
    variance = np.array([1 / 20 + 1 / 10, 1 / 40 + 1 / 10])
    np.testing.assert_allclose(error[1:3], payoff.SCALE * np.sqrt(np.cumsum(variance)))
    assert np.isnan(rating[3:]).all() and np.isnan(error[3:]).all()
    moved, _ = payoff.compute_elo(scores, anchor=1)
    np.testing.assert_allclose(moved[:3], rating[:3] - one, atol=1e-9)
    assert np.isfinite(payoff.compute_elo(scores, prior=1.0)[0][:4]).all()
