"""Several agents: what they are as columns, who learns from which, what a run reports of them."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_runs import trained, whole_and_resumed, without

import jrl
from jrl import config, envs, evaluate, train
from jrl.algos import a2c
from jrl.config import multi_agent
from jrl.envs import classic, jax_env
from jrl.errors import InputError
from jrl.learn import learner
from jrl.metrics import episodes
from jrl.rollout import unroll
from jrl.run.session import Session
from jrl.run.store import checkpoint
from jrl.types import JaxEnv, Several

GAMES, STEPS = 4, 16
SMALL = {
    "env": {"id": "MultiAgentCartPole-v1", "num_envs": GAMES},
    "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 1},
    "network": {"hidden": [8]},
    "rollout": {"length": STEPS, "iterations_per_call": 1},
    "run": {"compile_cache": False, "log": []},
}
TWO = {"mapping": "by_agent"}
REPLAY = {"algo": {"name": "dqn"}, "replay": {"batch_size": 16, "learning_starts": 32, "updates_per_step": 0.25}}


def made(**sections):
    return config.from_dict(config.merge(SMALL, sections))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def pairs_of(env):
    """B columns of environments that end together, by their time limit alone, as the agents of B / 2 games."""

    def step(state, action, key):
        fresh = state[1]
        inner, result = env.step(state[0], action, key)
        done = result.terminated | result.truncated
        over = done.reshape(-1, 2).all(-1)
        return (inner, done), result._replace(several=Several(fresh, over))

    def reset(key):
        inner, obs = env.reset(key)
        return (inner, jnp.zeros(env.spec.num_envs, bool)), obs

    return JaxEnv(env.spec._replace(agents=("a", "b")), reset, step)


def test_one_policy_of_two_agents_is_one_agent_with_twice_the_environments_to_the_bit():
    alone = jax_env.build(classic.pendulum()._replace(max_episode_steps=7), 2 * GAMES)
    together = pairs_of(alone)
    algo = a2c.make(a2c.Config(), alone.spec, jrl.networks.NetworkConfig(hidden=(8,)))
    learn, states = learner.on_policy(algo), []
    for env in (alone, together):
        collect = unroll.make(env, algo.act, length=STEPS, carry=algo.carry)

        @jax.jit
        def iteration(state, source, key, collect=collect):
            source, rollout, report = collect.step(source, algo.actor(state), key)
            state, _, metrics = learn.step(state, (), rollout, key)
            return state, source, metrics, report

        state, source = jax.jit(lambda a, b, init=collect.init: (algo.init(a), init(b)))(
            jax.random.key(0), jax.random.key(1)
        )
        for i in range(4):
            state, source, metrics, report = iteration(state, source, jax.random.key(2 + i))
        states.append((state, metrics, report))
    (one, losses, counted), (two, also, games) = states
    equal(one.params, two.params)
    equal(one.opt_state, two.opt_state)
    equal(losses, also)
    assert int(one.env_steps) == 2 * int(two.env_steps)  # of games
    assert int(counted.steps) == 2 * int(games.steps) == int(games.agents.steps.sum())
    assert float(counted.return_sum) == pytest.approx(float(games.return_sum), rel=1e-6)
    assert int(counted.count) == 2 * int(games.count)


# ---------------------------------------------------------------- what is collected


def late_arrivals(act_by, *, length=20, num_envs=2):
    """A rollout of late_arrivals in which everybody takes the same action, where it is allowed."""
    env = envs.make("late_arrivals:late_arrivals", num_envs=num_envs)

    def act(actor, obs, carry, key, explore):
        allowed = obs["action_mask"][:, act_by] != 0
        return jrl.types.ActOut(jnp.where(allowed, act_by, 0).astype(jnp.int32), (), {})

    collect = unroll.make(env, act, length=length)
    found = jax.jit(lambda a, b: collect.step(collect.init(a), (), b)[1:])
    return jax.device_get(found(jax.random.key(0), jax.random.key(1)))


def test_late_arrivals_as_its_script_says():
    rollout, report = late_arrivals(1)
    mask, reward = (np.asarray(x)[:, :4] for x in (rollout.mask, rollout.reward))
    script = ("xxxxxE", "..xxxE", "xE.xE.", "wxwxwE")
    there = np.array([[mark != "." for mark in line] for line in script]).T
    acts = np.array([[mark in "xE" for mark in line] for line in script]).T
    paid = np.where(there, 10.0 * np.arange(6)[:, None] + acts, 0.0)
    for game in range(2):  # six steps and the one that resets
        rows = slice(7 * game, 7 * game + 6)
        np.testing.assert_array_equal(mask[rows], there)
        np.testing.assert_array_equal(reward[rows], paid)
        assert not mask[7 * game + 6].any() and not reward[7 * game + 6].any()
    over = np.asarray(rollout.over)[:, 0]
    assert np.flatnonzero(over).tolist() == [5, 12, 19]
    assert int(report.count) == 6 and int(report.steps) == 2 * 18
    assert float(report.return_sum) == 6 * (156 + 144 + 12 + 72 + 153)
    np.testing.assert_array_equal(report.agents.count, [6, 6, 12, 6])
    np.testing.assert_array_equal(report.agents.return_sum, [6 * 156, 6 * 144, 6 * 84, 6 * 153])
    np.testing.assert_array_equal(report.agents.steps, [36, 24, 24, 36])


def test_returns_of_who_comes_leaves_and_waits_are_those_of_a_plain_loop():
    rollout, _ = late_arrivals(2, length=13, num_envs=1)
    gamma, lam = 0.9, 0.8
    value = np.random.default_rng(0).normal(size=(14, 4)).astype(np.float32)
    done = rollout.terminated | rollout.truncated
    advantage, _ = jax.device_get(
        jax.jit(lambda *x: jrl.ops.returns.gae(*x, gamma=gamma, gae_lambda=lam))(
            rollout.reward, rollout.terminated, done, value
        )
    )
    mask, reward, terminated, end = (rollout.mask, rollout.reward, rollout.terminated, done)
    for k in range(4):
        for t in np.flatnonzero(mask[:, k]):
            expected, weight = 0.0, 1.0
            for s in range(t, 13):
                delta = reward[s, k] + gamma * (1 - terminated[s, k]) * value[s + 1, k] - value[s, k]
                expected += weight * delta
                weight *= gamma * lam
                if end[s, k]:
                    break
            assert advantage[t, k] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("algo", [{}, pytest.param(REPLAY, marks=pytest.mark.slow)])
def test_what_stands_on_rows_of_nobody_changes_nothing(algo):
    cfg = made(env={"id": "late_arrivals:late_arrivals"}, **algo)
    with Session(cfg, endless=True) as session:
        session.start()
        program, found = session.run.program, []
        state, rollout, _ = program.collect(session.state, 0, 0)
        rollout, copied = jax.device_get(rollout), jax.jit(lambda x: jax.tree.map(jnp.copy, x))
        assert (~rollout.mask).sum() > rollout.mask.size // 4
        for seed in (None, 1):
            noise = np.random.default_rng(seed)
            blur = lambda x, noise=noise, seed=seed: np.where(
                np.expand_dims(rollout.mask, tuple(range(2, x.ndim))) | (seed is None),
                x,
                noise.integers(0, 2, x.shape).astype(x.dtype),
            )
            changed = dataclasses.replace(
                rollout,
                action=blur(rollout.action),
                reward=blur(rollout.reward),
                extras=jax.tree.map(blur, rollout.extras),
            )
            learned, metrics = program.learn(copied(state), changed, 0, 0)
            found.append(jax.device_get((learned.learner.state.params, metrics)))
    equal(*found)


# ---------------------------------------------------------------- policies


def test_different_algorithms_learn_beside_each_other():
    own = {"a": {"algo": {"name": "a2c"}}, "b": REPLAY}
    cfg = made(multi_agent={"policies": own, "mapping": {"agent_0": "a", ".*": "b"}})
    state, row = trained(cfg)
    assert row["policy/b/replay/size"] == 3 * GAMES * STEPS and row["policy/a/loss/policy"] != 0
    assert int(state["b"].updates) == 3 * 16 and int(state["a"].updates) == 3  # 64 steps x 1 / 4, and rollouts


@pytest.mark.slow
def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(tmp_path):
    """On two devices, in lockstep; tests of teams and of kinds say the same of PPO with memory."""
    policies = {"agent_0": {}, "agent_1": {"algo": {"lr": 1e-2}}}
    more = {
        "multi_agent": {"policies": policies, "agent_id": True, "replay_mode": "lockstep"},
        "devices": {"fake": 2},
        **REPLAY,
    }
    data = config.merge(SMALL, config.merge({"run": {"log": ["jsonl"], "report_every": 64}}, more))
    rows = whole_and_resumed(tmp_path, data, cut=128, steps=256)
    # what is counted since the row before depends on where that was
    whole, resumed = (without(row, "time", "perf", "/count", "/return_m") for row in rows)
    assert whole == resumed
    assert whole["policy/agent_0/loss/value"] != whole["policy/agent_1/loss/value"]
    assert whole["updates"] == 2 * 16 * whole["iteration"]  # each policy's are as many


# ---------------------------------------------------------------- after training


@pytest.mark.slow
def test_evaluation_counts_games_and_a_policy_is_loaded_by_its_name(tmp_path, capsys):
    path, out = tmp_path / "run.yaml", tmp_path / "run"
    more = {
        "multi_agent": TWO, "evaluation": {"interval": 1, "duration": 3}, "run": {"log": ["jsonl"], "report_every": 64},
        "checkpoint": {"keep_best_by": "evaluation/policy/agent_1/return"}
    }  # fmt: skip
    path.write_text(json.dumps(config.merge(SMALL, more)))
    stop = ["--stop=env_steps=640", "--stop=evaluation/agent/agent_0/return=1"]
    assert train.main([str(path), *stop, f"--out={out}"]) == 0
    rows = [json.loads(line) for line in (out / "result.jsonl").read_text().splitlines()]
    by_agent = [rows[-1][f"evaluation/agent/agent_{i}/return"] for i in (0, 1)]
    assert sum(by_agent) == pytest.approx(rows[-1]["evaluation/return"]) and min(by_agent) >= 1  # which ends the run
    assert by_agent == [rows[-1][f"evaluation/policy/agent_{i}/return"] for i in (0, 1)] and len(rows) == 1
    best = checkpoint.read_meta(checkpoint.locate(out, best=True))
    assert best["metrics"]["evaluation/policy/agent_1/return"] == by_agent[1]
    capsys.readouterr()
    assert evaluate.main([str(out), "--episodes=2"]) == 0
    assert re.match(r"agent agent_0: return [\d.]+\nagent agent_1: return [\d.]+\nreturn ", capsys.readouterr().out)
    assert evaluate.main([str(out), "--episodes=4", "--json", "--per-episode"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["returns"]) == 4
    assert found["policy/agent_0/return"] + found["agent/agent_1/return"] == pytest.approx(found["return"])
    # each earns 1 a step until it falls: the sum is more than the longer of both, and twice that at most
    assert all(n < r <= 2 * n for n, r in zip(found["lengths"], found["returns"], strict=True))
    policy = jrl.load(out, policy="agent_1")
    assert policy.act(np.zeros((3, 4), np.float32)).shape == (3,)
    with pytest.raises(InputError, match=r"policy: expected one of agent_0, agent_1, got None"):
        jrl.load(out)


def test_windows_of_agents_and_policies():
    reports = [late_arrivals(1)[1]]
    names = ("steady", "late", "guest", "waiting")
    found = episodes.summarize_agents(reports, names, {"a": names[:2], "b": names[2:]})
    assert (
        found["agent/steady/return"] == 156 and found["agent/guest/return"] == 42 and found["agent/guest/count"] == 12
    )
    assert found["agent/guest/window"] == 12 > found["agent/steady/window"]
    assert found["policy/b/window"] == min(found["agent/guest/window"], found["agent/waiting/window"]) > 0
    assert found["policy/a/return"] == 150 and found["policy/b/return"] == (42 + 153) / 2


# ---------------------------------------------------------------- who follows whom

AGENTS = ("adversary_0", "adversary_1", "agent_0")


MAPPING = {"adversary_.*": "hunter", ".*": "prey"}


def resolved(**section):
    cfg = config.from_dict({**SMALL, "multi_agent": section})
    return multi_agent.with_agents(cfg, AGENTS)


def test_mappings():
    follow = lambda **section: multi_agent.followers(resolved(**section).multi_agent)
    assert follow() == {"shared": AGENTS}
    assert follow(policies={"main": {}}) == {"main": AGENTS}
    assert follow(mapping="by_agent") == {name: (name,) for name in AGENTS}
    assert follow(mapping={"adversary_.*": "b", ".*": "a"}) == {"b": AGENTS[:2], "a": AGENTS[2:]}
    assert follow(policies={"a": {}, "b": {}}, mapping={".*_0": "a", ".*": "b"}) == {
        "a": ("adversary_0", "agent_0"),
        "b": ("adversary_1",),
    }


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"agents": ["x"]}, ["multi_agent.agents", "adversary_0, adversary_1, agent_0", "got x"]),
        ({"policies": {"a": {}, "b": {}}}, ["no policy for adversary_0", "multi_agent.mapping="]),
        ({"policies": {"a": {}, "b": {}}, "mapping": "shared"}, ["multi_agent.mapping: shared is one policy"]),
        ({"mapping": {"agent_.*": "a"}}, ["no entry fits adversary_0, adversary_1", "agent_0"]),
        ({"mapping": {"(": "a"}}, ["multi_agent.mapping: expected a regular expression, got '('"]),
        ({"policies": {"main": {}}, "mapping": {".*": "mian"}}, ["'mian'", "did you mean main?"]),
        ({"policies": {"a": {}, "b": {}}, "mapping": {".*": "a"}}, ["no agent follows b"]),
        ({"policies": {"a": {"algos": {}}}}, ["unknown key multi_agent.policies.a.algos", "did you mean algo?"]),
        ({"policies": {"a/b": {}}}, ["multi_agent.policies.a/b: expected names"]),
        ({"policies_to_train": ["sharde"]}, ["multi_agent.policies_to_train", "did you mean shared?"]),
    ],
)
def test_what_does_not_go_together(section, parts):
    with pytest.raises(InputError) as e:
        resolved(**section)
    found = "\n".join(e.value.errors)
    for part in parts:
        assert part in found


def test_a_policys_own_settings_are_checked_by_name():
    cfg = resolved(policies={"a": {"algo": {"lrr": 1}}}, mapping={".*": "a"})
    with pytest.raises(InputError, match=r"multi_agent.policies.a: unknown key algo.lrr: did you mean algo.lr\?"):
        multi_agent.policy_config(cfg, "a")


@pytest.mark.parametrize("metric", ["agent/agent_1/return", "policy/huntr/loss/policy"])
def test_a_criterion_of_nobody_is_refused(metric):
    cfg = lambda *names: config.from_dict(
        {**SMALL, "stop": dict.fromkeys(names, 1), "multi_agent": {"mapping": MAPPING}}
    )
    good = cfg("agent/agent_0/return", "policy/hunter/return", "policy/entropy", "env_steps")
    assert multi_agent.with_agents(good, AGENTS).stop == good.stop
    with pytest.raises(InputError, match=rf"stop\.{metric}: expected one of .*: did you mean (agent_0|hunter)\?"):
        multi_agent.with_agents(cfg(metric), AGENTS)


def test_a_team_is_told_before_the_run():
    team = {"team": ["agent_0", "agent_1"]}
    cfg = made(env={"id": "TwoStepGame-v0"}, multi_agent={"group": team})
    assert list(multi_agent.lines(cfg)) == ["team team: agent_0, agent_1 act as one, 1 agent x 4 envs"]


def test_a_view_with_a_typo():
    with pytest.raises(InputError, match=r"network\.value_inputs: .*did you mean state, the global state"):
        Session(made(network={"value_inputs": ["stat"]}))


def test_one_agent_has_no_policies_to_map():
    with pytest.raises(InputError, match="multi_agent: CartPole-v1 has one agent"):
        Session(made(env={"id": "CartPole-v1", "backend": "jax"}, multi_agent={}))
