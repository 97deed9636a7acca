"""Evaluation beside training: its config, its threads, its results."""

import dataclasses
import threading
import time

import jax
import pytest

from jrl import agents, config
from jrl.errors import InputError
from jrl.learn.program import Role, role_key
from jrl.play import build_evaluation
from jrl.play.evaluation import Evaluations
from jrl.play.player import Player
from jrl.play.tally import SUMMARY, Goal
from jrl.run import build


def run_config(**sections):
    """PPO on CartPole in the program, with `env.id` and so on over it."""
    base = {
        "algo": {"name": "ppo"},
        "network": {"hidden": [8]},
        "env": {"id": "CartPole-v1", "backend": "jax", "num_envs": 4, "options": {"max_episode_steps": 30}},
        "rollout": {"length": 8},
        "evaluation": {"duration": 6, "num_envs": 4},
        "run": {"seed": 3},
    }
    return config.from_dict(config.merge(base, sections))


def trained(cfg, seed=0):
    """An actor of the policy that `cfg` trains."""
    env = build.environment(cfg, num_envs=1)
    env.close()
    algo = build.algorithm(cfg, env.spec)
    return jax.jit(lambda key: algo.actor(algo.init(key)))(jax.random.key(seed))


GYMNASIUM = {"backend": "gymnasium"}


@pytest.mark.parametrize("env", [{}, pytest.param(GYMNASIUM, marks=pytest.mark.slow)])
def test_the_episodes_are_those_of_a_player(env):
    cfg = run_config(env=env)
    own = build.environment(cfg, num_envs=4, role="eval")
    algo = build.algorithm(cfg, own.spec)
    player = Player(own, algo.act, carry=algo.carry)
    actor = trained(cfg)
    evaluations = Evaluations(cfg)
    for count in (7, 8):
        found = evaluations.play(actor, count=count, version=2)
        want = player.play(actor, role_key(3, Role.EVALUATE, count), Goal(6)).summary()
        assert {name: found[name] for name in want} == want
        assert found["weights_version"] == 2 and found["timed_out"] == 0 and found["time_s"] > 0
        assert found["timesteps"] == round(want["length"] * 6)
    assert set(found) == set(evaluations.names) == {n.removeprefix("evaluation/") for n in evaluations.nan_metrics()}
    more = evaluations.play(actor, count=9, version=2, duration=3)
    assert more["episodes"] == 3
    evaluations.restart(5)  # other environments, those of the count
    again = [evaluations.play(actor, count=9, version=2) for _ in range(1)]
    fresh = Evaluations(cfg)
    fresh.restart(5)
    again.append(fresh.play(actor, count=9, version=2))
    assert [row["return"] for row in again] == [again[0]["return"]] * 2
    evaluations.close()
    fresh.close()


def test_parallel_plays_with_a_copy_of_the_weights():
    cfg = run_config(evaluation={"parallel": True})
    evaluations = Evaluations(cfg)
    expected = evaluations.play(trained(cfg), count=4, version=0)
    actor = trained(cfg)
    evaluations.begin(actor, count=4, version=3)
    jax.tree.map(lambda x: x.delete(), actor)  # as the learner's next update does
    assert evaluations.is_busy
    with pytest.raises(RuntimeError, match="unfinished evaluation"):
        evaluations.begin(trained(cfg), count=5, version=4)
    found = evaluations.finish()
    assert not evaluations.is_busy and evaluations.finish() is None
    assert {n: found[n] for n in SUMMARY} == {n: expected[n] for n in SUMMARY}
    assert found["weights_version"] == 3
    evaluations.close()


def test_auto_lasts_until_training_is_done():
    cfg = run_config(evaluation={"parallel": True, "duration": "auto", "timeout_s": 60.0})
    evaluations = Evaluations(cfg)
    actor = trained(cfg)
    evaluations.begin(actor, count=0, version=0)
    short = evaluations.finish()  # at once: one block
    assert short["timed_out"] == 0 and 0 < short["timesteps"] <= 4 * 64 and short["episodes"] > 0
    evaluations.begin(actor, count=0, version=0)
    time.sleep(0.5)
    future = evaluations._running.future
    assert evaluations.is_busy and future.running() is False and not future.done()
    long = evaluations.finish()
    assert long["timesteps"] > short["timesteps"] and long["episodes"] > short["episodes"]
    assert not any(t.name == "jrl-evaluate" for t in threading.enumerate())
    assert evaluations.play(actor, count=0, version=0)["episodes"] == 4  # nothing beside it: one of each environment
    evaluations.close()


def test_timesteps():
    evaluations = Evaluations(run_config(evaluation={"duration": 100, "unit": "timesteps"}))
    found = evaluations.play(trained(run_config()), count=0, version=0)
    assert 100 <= found["timesteps"] < 104 and 0 < found["episodes"] * found["length"] <= found["timesteps"]


# ---------------------------------------------------------------- evaluation.config


def test_own_environments():
    sizes = lambda cfg: build_evaluation.num_envs(cfg.evaluation, agents.make(cfg))
    cfg = run_config(evaluation={"config": {"env": {"options": {"max_episode_steps": 7}, "num_envs": 3}}})
    assert cfg.env.options == {"max_episode_steps": 30} and sizes(cfg) == [4]  # evaluation.num_envs
    cfg = dataclasses.replace(cfg, evaluation=dataclasses.replace(cfg.evaluation, num_envs=None))
    assert sizes(cfg) == [3]
    assert build_evaluation.build_config(cfg).env.options == {"max_episode_steps": 7}
    assert build_evaluation.build_config(cfg).env.num_envs == 4  # of training: what suits batches and devices
    found = Evaluations(cfg).play(trained(cfg), count=0, version=0)
    assert found["length"] <= 7 and found["return_max"] == 7


def test_exploration_is_off_unless_one_of_two_keys_says_otherwise():
    explore = lambda **given: build_evaluation.build_config(run_config(evaluation=given)).rollout.explore
    assert not explore()
    assert explore(explore=True)
    assert explore(config={"rollout": {"explore": True}})
    assert not explore(explore=True, config={"rollout": {"explore": False}})
    members = config.load("ars")  # whose members must explore in training
    for given in ({}, {"rollout": {"explore": False}}, {"env": {"options": {"max_episode_steps": 7}}}):
        evaluation = dataclasses.replace(members.evaluation, config=given)
        assert not build_evaluation.build_config(dataclasses.replace(members, evaluation=evaluation)).rollout.explore
    cfg, sampled = (run_config(evaluation={"explore": e, "duration": 50}) for e in (False, True))
    a, b = (Evaluations(c).play(trained(cfg), count=0, version=0) for c in (cfg, sampled))
    assert a["return"] != b["return"]


def test_environments_of_other_spaces_are_refused_before_anything_is_played():
    other = {"env": {"id": "MountainCar-v0", "options": {"max_episode_steps": 30}}}
    evaluations = Evaluations(run_config(evaluation={"config": other}))
    with pytest.raises(InputError, match=r"expected environments with the observation space of training"):
        evaluations.prepare()
    unknown = {"env": {"options": {"max_steps": 30}}}
    with pytest.raises(InputError, match=r"env\.options\.max_steps: CartPole-v1 has no such option"):
        Evaluations(run_config(evaluation={"config": unknown})).prepare()
    few = run_config(evaluation={"num_env_runners": 5})
    with pytest.raises(InputError, match=r"evaluation\.num_envs: expected at least 5, one per env runner, got 4"):
        Evaluations(few)


def test_settings_that_need_other_weights_are_refused():
    cfg = run_config(evaluation={"config": {"algo": {"normalize_obs": True}}}, algo={"normalize_obs": False})
    with pytest.raises(InputError, match=r"evaluation\.config\.algo: expected the trained .* by normalize_obs"):
        Evaluations(cfg).prepare()


# ---------------------------------------------------------------- time


def test_an_environment_that_hangs_costs_its_evaluation_only():
    stalling = {"id": "faulty_envs:Stalling", "backend": "gymnasium", "options": {"at": 250, "seconds": 600.0}}
    env = {**stalling, "num_envs": 1}
    base = run_config(evaluation={"duration": 50, "num_envs": 1, "timeout_s": 15.0})
    cfg = dataclasses.replace(base, env=dataclasses.replace(base.env, **env))
    evaluations, actor = Evaluations(cfg), trained(cfg)
    assert (
        evaluations.play(actor, count=0, version=0, duration=2)["timed_out"] == 0
    )  # compiles, on a busy machine too; 61 steps
    with pytest.warns(RuntimeWarning, match=r"timeout_s: \d+ episodes are missing after 15 s"):
        found = evaluations.play(actor, count=1, version=1)
    assert found["timed_out"] == 1 and 6 <= found["episodes"] < 12
    assert found["return"] == pytest.approx(found["length"])  # a reward of 1 per step
    assert found["weights_version"] == 1
    again = evaluations.play(actor, count=2, version=2, duration=2)  # in new environments
    assert again["timed_out"] == 0 and again["episodes"] == 2 and again["return"] == 20
    evaluations.close()


# ---------------------------------------------------------------- custom functions and callbacks


def by_length(algorithm, evaluation_workers):
    """Two lengths of pole, through the environments themselves."""
    found = {}
    for steps in (5, 9):
        evaluation_workers.foreach_env(lambda env, n=steps: setattr(env.get_wrapper_attr("spec"), "unused", n))
        evaluation_workers.foreach_env(lambda env, n=steps: env.set_wrapper_attr("_max_episode_steps", n))
        result = evaluation_workers.play(3)
        found[f"steps_{steps}"] = {"longest": result.lengths.max(), "episodes": len(result.returns)}
    sampled = evaluation_workers.sample(1)
    return {**found, "sampled": sampled.timesteps, "name": len(algorithm)}


@pytest.mark.parametrize("parallel", [False, True])
def test_a_custom_function_takes_the_place_of_playing(parallel):
    cfg = run_config(
        env=GYMNASIUM, evaluation={"parallel": parallel}, custom={"evaluation": "test_evaluation:by_length"}
    )
    evaluations = Evaluations(cfg, algorithm="three")
    with pytest.raises(RuntimeError, match="inside a custom evaluation function"):
        evaluations.workers.play(1)
    if parallel:
        evaluations.begin(trained(cfg), count=0, version=6)
        found = evaluations.finish()
    else:
        found = evaluations.play(trained(cfg), count=0, version=6)
    found.pop("time_s")
    own = {"weights_version": 6, "timed_out": 0, "sampled": found["sampled"], "name": 5}
    steps = {f"steps_{n}/{k}": v for n in (5, 9) for k, v in (("longest", n), ("episodes", 3))}
    assert found == {**steps, **own} and 256 <= found["sampled"] < 260
    evaluations.close()


def no_numbers(algorithm, evaluation_workers):
    return {"text": "good"}


def test_what_a_custom_function_returns_must_be_numbers():
    cfg = run_config(custom={"evaluation": "test_evaluation:no_numbers"})
    with pytest.raises(InputError, match=r"custom\.evaluation: text: expected a number"):
        Evaluations(cfg).play(trained(cfg), count=0, version=0)
    with pytest.raises(InputError, match=r"custom\.evaluation test_evaluation:nothing"):
        Evaluations(run_config(custom={"evaluation": "test_evaluation:nothing"}))


class Watching:
    def __init__(self):
        self.made, self.seen = [], []

    def episode_watch(self, num_envs, evaluation):
        self.made.append((num_envs, evaluation))
        return lambda rollout, infos: self.seen.append((rollout, infos))


def test_callbacks_see_the_episodes_that_count():
    cfg, callbacks = run_config(env=GYMNASIUM), Watching()
    evaluations = Evaluations(cfg, callbacks=callbacks)
    found = [evaluations.play(trained(cfg), count=count, version=0) for count in (0, 1)]
    assert callbacks.made == [(4, True)]  # one for all evaluations, whose episodes may go on
    reward = sum(float(r.reward[r.mask].sum()) for r, _ in callbacks.seen)
    assert reward == pytest.approx(sum(row["return"] * 6 for row in found))
    assert all(len(infos) == 64 and isinstance(infos[0][0], dict | None) for _, infos in callbacks.seen)
    evaluations.close()


# ---------------------------------------------------------------- runners


@pytest.mark.slow
def test_runners_play_exactly_the_episodes_asked_for():
    runners = {"num_cpus": 0.5}
    cfg = run_config(
        evaluation={"num_env_runners": 2, "num_envs": 2, "duration": 5, "timeout_s": None}, env_runners=runners
    )
    evaluations, actor = Evaluations(cfg, callbacks=(callbacks := Watching())), trained(cfg)
    try:
        first, again = (evaluations.play(actor, count=0, version=1) for _ in range(2))
        assert first["episodes"] == 5 and first["num_healthy_workers"] == 2 and 8 <= first["return"] <= 30
        assert {**first, "time_s": 0} == {**again, "time_s": 0}
        assert set(first) == set(evaluations.names)
        assert evaluations.workers.foreach_worker(lambda source: source.columns.length.shape) == [(1,), (1,)]
        assert sum(float(r.reward[r.mask].sum()) for r, _ in callbacks.seen) == pytest.approx(first["return"] * 10)
        evaluations.restart(4)
        assert evaluations.play(actor, count=0, version=2)["episodes"] == 5
    finally:
        evaluations.close()
