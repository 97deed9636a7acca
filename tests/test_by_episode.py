"""Policies of which it may change from game to game who follows which, and that are added and removed."""

import dataclasses
import json
from typing import ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl import api, config, evaluate, registry
from jrl.agents import Fixed, by_game
from jrl.callbacks import Callbacks
from jrl.config import multi_agent
from jrl.config.policy_mapping import TABLE, NewEpisode
from jrl.envs.agent_options import GAME, OBS
from jrl.errors import InputError
from jrl.learn import parallel
from jrl.learn.program import own_replay
from jrl.rollout.unroll import RAW_STEPS
from jrl.run import build, build_learner
from jrl.types import POLICY_ID

GAMES, STEPS = 4, 12


def by_turns(agent, episode, **_):
    """Who was first in one game of an environment is second in the next."""
    return "main" if (agent == "left") == (episode.id_ // GAMES % 2 == 0) else "other"


def by_lot(agent, episode):
    return ("main", "other", "third")[(7 * episode.id_ + (agent == "left")) % 3]


by_lot_of_module = by_lot

for known_as, what in {"by-turns": by_turns, "by-lot": by_lot}.items():
    registry.register(known_as, what)

SMALL = {
    "env": {"id": "games:numbered", "num_envs": GAMES},
    "algo": {"name": "a2c"},
    "network": {"hidden": [8]},
    "rollout": {"length": STEPS, "iterations_per_call": 1},
    "run": {"compile_cache": False, "log": [], "report_every": 240},
}
TURNS = {"policies": {"main": {}, "other": {}}, "mapping": "by-turns"}


def made(**sections):
    return config.merge(SMALL, {**sections, "multi_agent": TURNS | sections.get("multi_agent", {})})


def built(**sections):
    return api.AlgorithmConfig.from_dict(made(**sections)).build()


def trained(algo, count=1):
    for _ in range(count):
        algo.train()
    return algo.session.reporter.row


@pytest.fixture(scope="module")
def algo():
    """A run in which `other` does not learn; each test leaves it with `main` and `other`."""
    with built(multi_agent={"policies_to_train": ["main"]}) as found:
        yield found


def rows_of(session):
    """A rollout, the policy that each row should be of, and that which it is of."""
    rollout, _ = session.manual_steps.sample()
    number = np.asarray(rollout.extras[by_game.GAME_NUMBER])
    ask, wanted = registry.load(session.config.multi_agent.mapping, "mapping"), np.empty(number.shape, object)
    for t, b in np.ndindex(*number.shape):
        episode = NewEpisode(int(number[t, b]) * GAMES + b // 2, b // 2)
        wanted[t, b] = ask(("left", "right")[b % 2], episode)
    return rollout, wanted, names_of(session, rollout)


def names_of(session, rollout):
    """The policy that each row is of."""
    return np.array(session.run.policies.numbered, object)[np.asarray(rollout.extras[POLICY_ID])]


def copied(tree):
    """A tree that may be donated."""
    return jax.jit(lambda x: jax.tree.map(jnp.copy, x))(tree)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ---------------------------------------------------------------- who follows which


def test_each_row_is_of_the_policy_that_the_mapping_said_of_its_game(algo):
    trained(algo, 3)
    rollout, wanted, found = rows_of(algo.session)
    assert (wanted == found).all() and {*found.ravel()} == {"main", "other"}
    # games count one on, on the row behind that on which one was over
    number, over = np.asarray(rollout.obs[GAME]), np.asarray(rollout.over)
    assert (np.diff(number[:, ::2], axis=0)[1:] == over[:-2]).all() and over.any()
    assert (np.asarray(rollout.obs[OBS])[..., 0] == np.repeat(np.arange(GAMES), 2)).all()
    (extras,) = (x for name, x in rollout.extras.items() if name in [g.label for g in algo.session.run.policies.groups])
    for name in ("main", "other"):  # each acts with its own weights
        mine = found == name
        said = algo.get_policy(name).compute_log_likelihoods(rollout.action[mine], rollout.obs[OBS][mine])
        np.testing.assert_allclose(extras["log_prob"][mine], said, rtol=1e-4, atol=1e-5)


def test_a_policy_learns_from_its_own_rows_alone_and_others_stay_bit_for_bit(algo):
    session = algo.session
    before = algo.get_policy("other").get_state()
    row = trained(algo, 2)
    equal(before, algo.get_policy("other").get_state())
    assert np.isfinite(row["policy/main/loss/policy"]) and "policy/other/loss/policy" not in row
    assert row["policy/main/window"] > 0 and row["policy/other/window"] > 0
    rollout, _, found = rows_of(session)
    outcomes = []
    for noise in (0.0, 1.0):  # what the other earned says nothing to main
        changed = dataclasses.replace(rollout, reward=rollout.reward + noise * (found == "other"))
        state, *_ = session.run.program.learn(copied(session.state), changed, 0, 99)
        kept = session.run.program.keep(state).learner
        outcomes.append(jax.device_get(kept["main"]))
    equal(*outcomes)


def test_returns_are_of_the_episodes_in_which_a_policy_was_followed(algo):
    session = algo.session
    rollout, *_ = rows_of(session)
    rollout, found = jax.device_get(rollout), names_of(session, rollout)
    record = rollout.extras[RAW_STEPS]
    ended = rollout.terminated & rollout.mask
    seen = jax.device_get(jax.jit(by_game.watched)(by_game.empty(8, GAMES, 2, 2), rollout))
    for k, name in enumerate(session.policies):
        wanted = record["episode_return"][ended & (found == name)]
        assert np.nanmean(seen.recent.window_return[k]) == pytest.approx(wanted.mean(), rel=1e-6)
    assert (np.asarray(seen.latest) == rollout.extras[by_game.GAME_NUMBER].max(0)[::2]).all()


# ---------------------------------------------------------------- policies come and go


@pytest.mark.slow
def test_policies_are_added_and_removed_and_the_others_go_on(algo):
    session = algo.session
    trained(algo, 2)
    steps, iteration = session.counted(), session.iteration
    given, others = algo.get_policy("main").get_state(), algo.get_policy("other").get_state()
    returns = np.asarray(session.state.learner[TABLE].recent.window_return)
    session.add_policy("third", mapping="by-lot", train=["main", "third"])
    session.add_policy("copy", state=given)
    assert (session.counted(), session.iteration) == (steps, iteration)
    np.testing.assert_array_equal(session.state.learner[TABLE].recent.window_return[:2], returns)
    assert list(algo.policy_map) == ["main", "other", "third", "copy"]
    equal(algo.get_policy("copy").get_state(), given)
    equal((algo.get_policy("main").get_state(), algo.get_policy("other").get_state()), (given, others))
    row = trained(algo, 2)
    _, wanted, rows = rows_of(session)
    assert (wanted == rows).all() and {*rows.ravel()} == {"main", "other", "third"}
    assert row["env_steps"] > steps and np.isfinite(row["policy/third/loss/policy"])
    assert "policy/copy/loss/policy" not in row
    equal((algo.get_policy("copy").get_state(), algo.get_policy("other").get_state()), (given, others))
    third = algo.get_policy("third").get_state()
    algo.remove_policy("copy")
    equal(algo.get_policy("third").get_state(), third)
    algo.remove_policy("third", policy_mapping_fn="by-turns", policies_to_train=["main"])
    assert session.policies == ("main", "other")
    with pytest.raises(InputError, match=r"expected one of several policies, main, other, got 'third'"):
        algo.remove_policy("third")


@pytest.mark.slow
def test_replays_go_on_by_policy():
    """Of policies in one program that are three afterwards, and of a policy with a network of its own."""
    dqn = {"algo": {"name": "dqn"}, "replay": {"capacity": 512, "batch_size": 8, "learning_starts": 8}}

    def replays(session):
        kept = jax.device_get(session.run.program.keep(session.state))
        return session.run.policies._replays(kept.replay, session.run.plan.learners)

    with built(**dqn, rollout={"length": 4}, devices={"fake": 2}) as algo:
        trained(algo, 4)
        before = replays(algo.session)
        wide = {"network": {"hidden": [4]}}
        algo.session.add_policy("third", own=wide, mapping=third_and_main)  # `other` has no agent for now
        found = replays(algo.session)
        equal({name: found[name] for name in before}, before)
        row = trained(algo, 4)
        assert np.isfinite(row["policy/third/loss/value"]) and len(algo.session.run.policies.groups) == 2
    with built(multi_agent={"mapping": "by_agent", "policies": {"left": {}, "right": {}}}) as algo:
        trained(algo, 1)
        left = algo.get_policy("left").get_state()
        with pytest.raises(InputError, match="no agent follows left"):
            algo.add_policy("third", policy_mapping_fn={"left": "third", "right": "right"})
        algo.add_policy("third", policy_mapping_fn=lambda agent: "third" if agent == "left" else agent)
        equal(algo.get_policy("left").get_state(), left)
        assert np.isfinite(trained(algo, 1)["policy/third/loss/policy"])
        algo.remove_policy("left")
        assert isinstance(algo.session.run.policies, Fixed) and algo.session.policies == ("right", "third")
        assert np.isfinite(trained(algo, 1)["policy/third/loss/policy"])


def third_and_main(agent):
    return "third" if agent == "left" else "main"


def test_a_run_goes_on_exactly_with_the_policies_that_it_had(algo, tmp_path, capsys):
    algo.add_policy("third", policy_mapping_fn=by_lot_of_module, policies_to_train=["third"])
    trained(algo, 1)
    saved = algo.save(tmp_path / "saved")
    trained(algo, 2)
    wanted = jax.device_get(algo.session.learner_state_of_all())
    algo.remove_policy("third", policy_mapping_fn="by-turns", policies_to_train=["main"])
    with api.Algorithm.from_checkpoint(saved) as again:
        assert again.session.policies == ("main", "other", "third")
        trained(again, 2)
        equal(again.session.learner_state_of_all(), wanted)
        third = again.get_policy("third").get_state()
        at = again.save(tmp_path / "later")
    policy = jrl.load(at, policy="third")
    equal(jax.tree.leaves(policy.weights), jax.tree.leaves(third.params))
    assert policy.act(np.zeros(3, np.float32)) in (0, 1)
    assert evaluate.main([str(at), "--episodes", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["episodes"] == 4 and found["agent/left/return"] + found["agent/right/return"] == found["return"]
    played = [x for name in ("main", "other", "third") if np.isfinite(x := found[f"policy/{name}/return"])]
    assert played and min(played) <= found["return"] / 2 <= max(played)
    with pytest.raises(InputError, match="expected one of main, other, third, got 'forth'"):
        jrl.load(at, policy="forth")


def quick_and_still(agent):
    return "quick" if agent == "left" else "still"


@pytest.mark.slow
def test_a_policy_that_is_added_may_have_numbers_of_its_own(algo, tmp_path):
    trained(algo, 1)
    given = algo.get_policy("main").get_state()
    both, train = quick_and_still, ["quick", "still"]
    algo.session.add_policy("still", state=given, own={"algo": {"lr": 0.0}})
    algo.session.add_policy("quick", state=given, own={"algo": {"lr": 0.01}}, mapping=both, train=train)
    rows = [trained(algo, 2)]
    saved = algo.save(tmp_path / "saved")
    for name in train:
        algo.remove_policy(name, policy_mapping_fn="by-turns", policies_to_train=["main"])
    with api.Algorithm.from_checkpoint(saved) as again:
        rows.append(trained(again, 1))
        states = [again.get_policy(name).get_state() for name in train]
    changed = [not np.array_equal(a, b) for a, b in zip(*(jax.tree.leaves(s.params) for s in states), strict=True)]
    rates = {row[f"policy/{name}/train/lr"] for row in rows for name in train}
    assert all(changed) and rates == {0.0, np.float32(0.01)}
    equal(states[1].params, given.params)
    # its config is RLlib's, or ours
    algo.add_policy("third", config={"entropy_coeff": 0.25})
    own, first = (multi_agent.policy_config(algo.session.config, name).algo for name in ("third", "main"))
    assert own == dataclasses.replace(first, ent_coef=0.25)
    algo.remove_policy("third")


def test_what_fails_changes_nothing(algo):
    before = algo.session.state

    def nobody(agent, episode):
        return "main" if episode.id_ % 2 else "nobody"

    for name, more in {
        "third": {"policy_mapping_fn": nobody},
        "fourth": {"policy_mapping_fn": {".*": "nobody"}},
        "fifth": {"policies_to_train": ["nobody"]},
        "no/name": {},
    }.items():
        with pytest.raises(InputError, match=r"nobody|expected names"):
            algo.add_policy(name, **more)
    with pytest.raises(InputError, match="lrr"):
        algo.add_policy("third", config={"lrr": 1.0})
    with pytest.raises(InputError, match=r"expected one of the policies main, got 'other' for (left|right)"):
        algo.remove_policy("other")
    assert algo.session.policies == ("main", "other")
    assert algo.session.state is before
    assert np.isfinite(trained(algo)["policy/main/loss/policy"])


# ---------------------------------------------------------------- with other things


@pytest.mark.slow
def test_replays_hold_the_rows_of_their_own_policy():
    dqn = {"algo": {"name": "dqn"}, "replay": {"capacity": 512, "batch_size": 8, "learning_starts": 8}}
    with built(**dqn, rollout={"length": 4}, multi_agent={"mapping": registry.reference(by_number)}) as algo:
        trained(algo, 4)
        session, (group,) = algo.session, algo.session.run.policies.groups
        learn, mesh = session.run.learn, session.run.plan.mesh
        algo_of_one = build.algorithm_of_one(group.cfg, group.spec, axis_name=parallel.AXIS)
        make, _ = build_learner.maker(config.Sizes(group.cfg), algo_of_one, group.spec, devices=1, length=4)
        learner = make(group.cfg.algo, algo_of_one)

        def drawn(replay, place, key):
            mine = jax.tree.map(lambda x: x[place], own_replay(replay, learn)[group.label])
            return learner.sample(mine, key)

        same = parallel.REPLICATED
        draw = parallel.pmap(drawn, mesh, (parallel.PER_DEVICE, same, same), parallel.PER_DEVICE)
        for place in (0, 1):
            batch = draw(session.state.replay, np.int32(place), jax.random.key(7))
            mine = np.asarray(batch.obs)[:, 0] % 2 == place
            counts = np.asarray(batch.weight) > 0  # the rows of others have no weight
            assert counts.any() and mine[counts].all()


def by_number(agent, episode):
    """Whose environment has an even number."""
    return "main" if episode.env_index % 2 == 0 else "other"


@pytest.mark.slow
def test_algorithms_may_differ_and_one_policy_may_see_nothing_of_another():
    """On two devices."""
    both = {"policies": {"main": {}, "other": {"network": {"hidden": [4]}}}, "mapping": "by-turns"}
    with built(multi_agent=both, devices={"fake": 2}) as algo:
        row = trained(algo, 2)
        rollout, wanted, found = rows_of(algo.session)
        assert (wanted == found).all() and len(algo.session.run.policies.groups) == 2
        assert all(np.isfinite(row[f"policy/{name}/loss/policy"]) for name in ("main", "other"))
        for name, group in zip(("main", "other"), algo.session.run.policies.groups, strict=True):
            mine = found == name
            said = algo.get_policy(name).compute_log_likelihoods(rollout.action[mine], rollout.obs[OBS][mine])
            np.testing.assert_allclose(rollout.extras[group.label]["log_prob"][mine], said, rtol=1e-4, atol=1e-5)


class Watches(Callbacks):
    """Writes down who followed whom in which game, and what they saw first."""

    games: ClassVar[list] = []
    made: ClassVar[list] = []

    def on_create_policy(self, *, policy_id, policy, **kwargs):
        self.made.append(policy_id)

    def on_episode_end(self, *, episode, **kwargs):
        shape = {x.shape for x in (episode.last_observation_for(agent) for agent in episode.get_agents())}
        self.games.append((episode.env_index, tuple(episode.policy_for(agent) for agent in ("left", "right")), shape))


@pytest.mark.slow
def test_callbacks_are_told_who_follows_whom_in_each_game():
    with built(custom={"callbacks": [registry.reference(Watches)]}) as algo:
        trained(algo, 2)
        for game in range(GAMES):
            mine = [players for env, players, _ in Watches.games if env == game]
            assert len(mine) > 3 and mine[:4] == 2 * [("main", "other"), ("other", "main")]
        assert all(shape == {(3,)} for *_, shape in Watches.games)
        algo.add_policy("third", policy_mapping_fn=third_and_main)
        count = len(Watches.games)
        trained(algo, 2)
        assert Watches.made == ["main", "other", "third"]
        assert {players for _, players, _ in Watches.games[count + GAMES :]} == {("third", "main")}


class Rounds:
    """RLlib's protocol: two agents, of whom one comes a step later; a game is over after three steps."""

    possible_agents = ("left", "right")
    observation_spaces = dict.fromkeys(possible_agents, gymnasium.spaces.Box(-1.0, 1.0, (1,)))
    action_spaces = dict.fromkeys(possible_agents, gymnasium.spaces.Discrete(2))

    def __init__(self, config=None):
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return {"left": np.zeros(1, np.float32)}, {}

    def step(self, action):
        self.steps += 1
        over = self.steps == 3
        obs = {agent: np.full(1, self.steps / 3, np.float32) for agent in self.possible_agents}
        rewards = dict.fromkeys(action, 1.0)
        return obs, rewards, {"__all__": over}, {"__all__": False}, {}


@pytest.mark.slow
def test_environments_that_begin_anew_are_asked_of_from_their_first_game_on(tmp_path):
    """Those of the host: nobody can say where their games stand."""
    host = {
        "env": {"id": f"{__name__}:Rounds"},
        "multi_agent": {"mapping": "by-lot", "policies": {**TURNS["policies"], "third": {}}},
    }
    with built(**host) as algo:
        row = trained(algo, 2)
        _, wanted, found = rows_of(algo.session)
        assert (wanted == found).all()
        assert all(np.isfinite(row[f"policy/{name}/loss/policy"]) for name in ("main", "other", "third"))
        games = np.asarray(algo.session.state.learner[TABLE].latest)
        assert (games > 16).all()  # more than a call is told of
        saved = algo.save(tmp_path / "saved")
    with api.Algorithm.from_checkpoint(saved) as again:
        assert (np.asarray(again.session.state.learner[TABLE].latest) == 0).all()
        rollout, wanted, found = rows_of(again.session)
        assert (wanted == found).all() and np.asarray(rollout.extras[by_game.GAME_NUMBER])[0].max() == 0
        trained(again, 1)
        _, wanted, found = rows_of(again.session)
        assert (wanted == found).all()


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"multi_agent": {"policies": {}}}, "policies must be known by name: list them"),
        ({"multi_agent": {"mapping": "by-nothing"}}, "expected shared, by_agent, a table or package.module:name"),
        ({"multi_agent": {"mapping": None, "policies": {}, "group": {"all": ["left", "right"]},
                          "policies_to_train": ["all"]}}, "one team of all agents has one policy"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_starts(sections, told):
    with pytest.raises(InputError, match=told):
        built(**sections)


def test_a_run_of_one_agent_gets_no_policies():
    alone = {"env": {"id": "CartPole-v1", "num_envs": GAMES}, "algo": SMALL["algo"], "rollout": SMALL["rollout"]}
    with (
        api.AlgorithmConfig.from_dict({**alone, "run": SMALL["run"]}).build() as algo,
        pytest.raises(InputError, match="add_policy: expected a run with several agents"),
    ):
        algo.add_policy("third")
