"""Games whose players change, whoever collects them: what is learned from is what a plain record says was acted on."""

import jax
import numpy as np
import pytest
from fake_cluster import FakeCluster

from jrl import config, registry
from jrl.agents import self_play
from jrl.config.multi_agent import LEAGUE
from jrl.config.policy_mapping import NewEpisode
from jrl.envs.agent_options import GAME
from jrl.rollout import runner_group
from jrl.rollout.collect_async import AsyncCollector
from jrl.rollout.sources import JaxSource
from jrl.run.session import Session
from jrl.types import POLICY_ID

POOL, GAMES, LAG = 2, 8, 2
RUNNERS, ASYNC = {"env_runners": {"num": 2}}, {"rollout": {"mode": "async", "max_policy_lag": LAG}}
WHOLE = {"rollout": {"batch_mode": "complete_episodes"}, "env": {"horizon": 9}}
# few: each is a process that imports jax
READY = {
    "env": {"id": "games:Numbered", "num_envs": 4, "remote_worker_envs": True, "batch_wait_ms": 0.0},
    "run": {"report_every": 125},
}
WAYS = {
    "runners": (RUNNERS,),
    "in a thread": (ASYNC,),
    "processes that do not wait": (READY,),
    "asynchronous runners, whole episodes": (RUNNERS, ASYNC, WHOLE),
    "whole episodes": (WHOLE,),
    "in a thread, whole episodes": (ASYNC, WHOLE),
    "asynchronous runners": (RUNNERS, ASYNC),
    "runners, whole episodes": (RUNNERS, WHOLE),
}
QUICK = ("in a thread",)
EVERY_WAY = [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in WAYS]
SMALL = {
    "env": {"num_envs": GAMES},
    "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 1},
    "network": {"hidden": [8]},
    "rollout": {"length": 16},
    "run": {"compile_cache": False, "log": [], "report_every": 250},
}


def session(way, **sections):
    data = config.merge(SMALL, sections)
    for part in WAYS.get(way, ()):
        data = config.merge(data, part)
    return Session(config.from_dict(data), endless=True)


@pytest.fixture
def acted(monkeypatch):
    """What each source in this process has made: pairs of who acted and the rollout, one after the other."""
    monkeypatch.setattr(runner_group, "Cluster", FakeCluster())
    found = {}
    for kind in (JaxSource, AsyncCollector):

        def noted(self, actor, key, make=kind.next):
            rollout, report = make(self, actor, key)
            found.setdefault(self, []).append(jax.device_get((actor, rollout)))
            return rollout, report

        monkeypatch.setattr(kind, "next", noted)
    return found


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def advanced(run, count, look):
    """Makes calls of a run; `look` says of its state what is to be known before and after it learns from a rollout."""
    program, found = run.run.program, []
    learn = program.learn

    def noted(state, rollout, *number):
        before = look(state)
        state, metrics = learn(state, rollout, *number)
        found.append((before, jax.device_get(rollout), look(state)))
        return state, metrics

    program.learn = noted
    for _ in range(count):
        run.finish_call(run.advance())
    program.learn = learn
    return found


# ---------------------------------------------------------------- self-play


def games_of(made):
    """The games that a source has played to their end, by their place in it: (swap under which they began, returns)."""
    games = made[0][1].mask.shape[1] // 2
    ended, began, earned = [[] for _ in range(games)], [None] * games, np.zeros((games, 2))
    for actor, rollout in made:
        for t, g in np.ndindex(len(rollout.mask), games):
            both = slice(2 * g, 2 * g + 2)
            if not rollout.mask[t, 2 * g]:
                began[g] = None
                continue
            if began[g] is None:
                began[g], earned[g] = int(actor[LEAGUE]), 0.0
            assert (rollout.extras[LEAGUE][t, both] == began[g]).all()
            earned[g] += rollout.reward[t, both]
            if rollout.terminated[t, 2 * g]:
                ended[g].append((began[g], tuple(earned[g])))
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("way", EVERY_WAY)
def test_games_of_self_play_are_those_that_were_played_and_count_if_no_copy_was_swapped(way, acted):
    own = {"self_play": {"pool": POOL, "window": 8, "snapshot_win_rate": 0.0}}
    with session(way, env={"id": "TicTacToe-v0"}, multi_agent=own) as run:
        run.start()
        actor = run.run.program.actor
        pool = run.run.policies.groups[1].label
        look = lambda state: jax.device_get((self_play.on_host(state), state.learner[pool], actor(state)))
        learned = advanced(run, 14, look)
    sources = list(acted.values())
    assert len(sources) == (2 if "runners" in way else 1)
    games = [ended for made in sources for ended in games_of(made)]
    late, left = 0, 0
    for (before, copies, _), rollout, (after, same, _) in learned:
        equal(copies, same)  # to the bit
        counts = np.zeros((POOL, 3), int)
        for g, ended in enumerate(games):
            mine, other = 2 * g + g % 2, 2 * g + 1 - g % 2
            for _ in range(int((rollout.terminated & rollout.mask)[:, mine].sum())):
                began, returns = ended.pop(0)
                won, lost = (returns[(g + k) % 2] for k in (0, 1))
                late, left = late + (began != before.since), left + 1
                if began == before.since:
                    counts[before.pick[g // 2 % POOL], 0 if won > lost else 1 if won == lost else 2] += 1
            assert (rollout.mask[:, mine] == rollout.mask[:, other]).all()
        np.testing.assert_array_equal(after.counts - before.counts, counts)
        assert after.since == before.since
    assert 0 < late < left and learned[-1][0][0].copies >= 3
    # who acted is who was to act when the rollout was ordered
    for made in sources if "whole" not in way else ():
        for n, (player, _) in enumerate(made):
            behind = 0 if "async" not in str(WAYS[way]) else LAG if "thread" in way else None
            if behind is None:  # at most so many updates
                assert any(_same(player, learned[max(0, n - k)][0][2]) for k in range(LAG + 1))
            elif n < len(learned) + behind:
                equal(player, learned[max(0, n - behind)][0][2])


def _same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# ---------------------------------------------------------------- policies by game


def by_turns(agent, episode, **_):
    """Who was first in one game of an environment is second in the next."""
    return "main" if (agent == "left") == (episode.id_ // GAMES % 2 == 0) else "other"


def by_lot(agent, episode):
    return ("main", "other", "third")[(7 * episode.id_ + (agent == "left")) % 3]


def policies(**sections):
    registry.register("turns", by_turns)
    two = {"policies": {"main": {}, "other": {}}, "mapping": "turns"}
    return {"env": {"id": "games:numbered"}, "multi_agent": two, **sections}


def names_of(run):
    """The names of policies by their numbers."""
    return dict(enumerate(run.run.policies.numbered))


def played(made):
    """The agents' episodes that a source has played to their end, by column: (number of the game, rewards)."""
    ended = [[] for _ in range(made[0][1].mask.shape[1])]
    under_way = [[] for _ in ended]
    for _, rollout in made:
        for t, b in np.ndindex(*rollout.mask.shape):
            if not rollout.mask[t, b]:
                continue
            under_way[b].append(float(rollout.reward[t, b]))
            if rollout.terminated[t, b]:
                ended[b].append((int(rollout.obs[GAME][t, b]), under_way[b]))
                under_way[b] = []
    return ended


def whole(rollout, b):
    """The episodes of a column that have ended in a rollout: (whether all of it stands there, rewards, policies)."""
    found, under_way, begun = [], [], not rollout.contiguous[b]
    for t in range(len(rollout.mask)):
        if not rollout.mask[t, b]:
            under_way, begun = [], True
            continue
        under_way.append((float(rollout.reward[t, b]), int(rollout.extras[POLICY_ID][t, b])))
        if rollout.terminated[t, b]:
            found.append((begun, *zip(*under_way)))
    return found


@pytest.mark.parametrize("way", EVERY_WAY[1:])  # with runners alone where one of them is lost, below
def test_who_follows_whom_is_as_the_mapping_said_of_each_game(way, acted):
    with session(way, **policies()) as run:
        run.start()
        look = lambda state: jax.device_get(state.learner["roster"])
        learned = advanced(run, 8, look)
        row, names = run.reporter.row, names_of(run)
    sources = list(acted.values())
    games = [ended for made in sources for ended in played(made)]
    side_by_side = len(games) // 2
    returns, last = {"main": [], "other": []}, np.zeros(side_by_side, int)
    for _, rollout, after in learned:
        for b in range(2 * side_by_side):
            for begun, rewards, who in whole(rollout, b):
                number, wanted = games[b].pop(0)
                last[b // 2] = number
                name = by_turns(("left", "right")[b % 2], NewEpisode(number * side_by_side + b // 2, b // 2))
                assert {names[k] for k in who} == {name}
                assert list(rewards) == wanted[-len(rewards) :] and (not begun or len(rewards) == len(wanted))
                returns[name].append(sum(wanted))
        for k, name in enumerate(returns):  # of the latest episodes in which it was followed
            latest = after.recent.window_return[k]
            if len(returns[name]) <= 100:
                assert np.nanmean(latest) == pytest.approx(np.mean(returns[name]), rel=1e-5)
        assert (after.latest >= last).all()
    assert all(len(found) > 20 for found in returns.values())
    # a game's return is the sum over its agents
    assert row["episode/return"] == pytest.approx(row["agent/left/return"] + row["agent/right/return"], rel=1e-5)
    assert all(np.isfinite(row[f"policy/{name}/loss/policy"]) for name in returns)


@pytest.mark.slow
def test_policies_come_and_go_beside_a_thread_that_collects(acted):
    registry.register("lot", by_lot)
    with session("in a thread", **policies()) as run:
        run.start()
        run.advance()
        run.add_policy("third", mapping="lot")
        state, names = run.learner_state("third"), names_of(run)
        for _, rollout, _ in advanced(run, LAG + 2, lambda state: None):
            for t, b in np.argwhere(np.asarray(rollout.mask)):
                episode = NewEpisode(int(rollout.extras["game"][t, b]) * GAMES + b // 2, b // 2)
                assert names[int(rollout.extras[POLICY_ID][t, b])] == by_lot(("left", "right")[b % 2], episode)
        assert not jax.tree.all(jax.tree.map(np.array_equal, state, run.learner_state("third")))
        run.remove_policy("main", mapping=lambda agent, episode: "third" if episode.id_ % 2 else "other")
        advanced(run, 2, lambda state: None)
        assert run.policies == ("other", "third")


@pytest.mark.slow
def test_a_runner_in_the_place_of_another_plays_games_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(runner_group, "Cluster", FakeCluster({(1, 0, 3): "fail"}))
    again = {"recreate_failed_env_runners": True}
    with session("runners", **policies(env_runners=again)) as run:
        run.start()
        with pytest.warns(RuntimeWarning, match="another starts in its place"):
            learned = advanced(run, 6, lambda state: jax.device_get(state.learner["roster"]))
        run.reporter.flush()
        row, names = run.reporter.row, names_of(run)
    assert all(np.isfinite(row[f"policy/{name}/loss/policy"]) for name in ("main", "other"))
    for _, rollout, roster in learned[-3:]:
        number, who = rollout.extras["game"], np.vectorize(names.get)(rollout.extras[POLICY_ID])
        for t, b in np.argwhere(rollout.mask):
            episode = NewEpisode(int(number[t, b]) * GAMES + b // 2, b // 2)
            assert who[t, b] == by_turns(("left", "right")[b % 2], episode)
        assert rollout.mask[:, GAMES:].any() and (roster.latest[4:] >= number[:, GAMES::2].max(0)).all()
