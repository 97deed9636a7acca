"""Features that a config names together: what the learner gets, beside the rules of an environment.

Masks x {whole episodes, env runners, asynchronous collection, memory, random exploration, replay} x reward statistics.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ruled_env import Rules, allowed, length, paid

from jrl import registry
from jrl.api import algorithm_class
from jrl.callbacks import Callbacks
from jrl.fields import schema

GAMMA = 0.9


class Recorder(Callbacks):
    """Keeps the rollouts that the learner gets."""

    rollouts: ClassVar[list] = []

    def on_sample_end(self, *, samples, **kwargs):
        self.rollouts.append(jax.device_get(samples))


def policys_loss(default, net, params, rows):
    """PPO's, and how far the learner's log-probability is from the one that was stored when it acted."""
    value, metrics = default(params, rows)
    dist, _ = net.apply(params, rows.obs)
    away = jnp.abs(dist.log_prob(rows.action) - rows.log_prob)
    return value, metrics | {"gap": jnp.max(jnp.where(rows.weight > 0, away, 0.0))}


def critics_loss(default, net, params, batch):
    """SAC's, and how many of its transitions break the rules."""
    value, metrics = default(params, batch)
    x = batch.obs["x"].astype(jnp.int32)
    broken = ~jnp.take_along_axis(allowed(x), batch.action[:, None], 1)[:, 0]
    broken |= jnp.any(batch.obs["action_mask"].astype(bool) != allowed(x), -1)
    broken |= jnp.abs(batch.reward - paid(batch.obs["x"], batch.action)) > 1e-4
    after, ends = batch.next_obs["x"] - batch.obs["x"], batch.obs["x"][:, 2] + 1 == length(x[:, 0], x[:, 1])
    broken |= jnp.any(after != jnp.array([[0.0, 0.0, 1.0]]), -1) & (batch.discount > 0)
    broken |= ends & (x[:, 1] % 2 == 0) & (batch.discount > 0)
    return value, metrics | {"broken": (broken & (batch.weight > 0)).sum().astype(jnp.float32)}


COMMON = {
    "env": {"id": "rules", "backend": "gymnasium", "num_envs": 4},
    "network": {"hidden": [8]},
    "custom": {"callbacks": ["recorder"]},
    "run": {"log": [], "report_every": 1},
    "stop": {"env_steps": 100_000},
}
PPO = {
    "algo": {"name": "ppo", "lr": 0.0, "num_epochs": 1, "num_minibatches": 1, "gamma": GAMMA, "normalize_reward": True},
    "rollout": {"length": 16},
    "custom": {"loss": "policys"},
}
SAC = {
    "algo": {"name": "sac", "gamma": GAMMA},
    "replay": {"capacity": 2_000, "batch_size": 32, "learning_starts": 16},
    "rollout": {"length": 8},
    "custom": {"loss": "critics"},
}
MEMORY = {"network": {"core": {"name": "lstm", "size": 8}, "use_prev_action": True}}
WHOLE = {"rollout": {"batch_mode": "complete_episodes"}, "env": {"horizon": 10}}
RUNNERS, ASYNC = {"env_runners": {"num": 2}}, {"rollout": {"mode": "async"}}
PAIRS = {
    "PPO, memory, whole episodes": (PPO, MEMORY, WHOLE),
    "PPO, random actions": (PPO, {"algo": {"exploration": {"name": "random"}}}),
    "SAC, whole episodes": (SAC, WHOLE),
    "PPO, asynchronous runners, whole episodes": (PPO, RUNNERS, ASYNC, WHOLE),
    "PPO, memory, runners, whole episodes": (PPO, MEMORY, RUNNERS, WHOLE),
    "SAC, asynchronous runners": (SAC, RUNNERS, ASYNC),
    "SAC, runners, whole episodes": (SAC, RUNNERS, WHOLE),
}
QUICK = ("PPO, memory, whole episodes",)


def rows_of(rollouts):
    """The steps that count, by the state they began in: {(index, episode, step): (action, reward, end, extras)}."""
    found = {}
    for r in rollouts:
        for t, b in np.argwhere(r.mask):
            x = r.obs["x"][t, b]
            state = tuple(int(v) for v in x)
            assert state not in found  # none comes twice
            assert (r.obs["action_mask"][t, b] == allowed(x)).all()
            after = r.obs["x"][t + 1, b] if t + 1 < len(r.reward) else r.last_obs["x"][b]
            ended = bool(r.terminated[t, b] or r.truncated[t, b])
            if r.count is None or t + 1 < len(r.reward):
                assert tuple(after) == (x[0], x[1], x[2] + 1)
            extras = {name: leaf[t, b] for name, leaf in r.extras.items() if name in ("log_prob", "running_return")}
            found[state] = (int(r.action[t, b]), float(r.reward[t, b]), ended, extras)
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in PAIRS])
def test_what_is_learned_follows_the_rules(name, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(Recorder, "rollouts", [])
    for known_as, found in {
        "rules": Rules, "recorder": Recorder, "policys": policys_loss, "critics": critics_loss,
    }.items():  # fmt: skip
        registry.register(known_as, found)
    cfg = COMMON
    for part in PAIRS[name]:
        cfg = schema.merge(cfg, part)
    algo = algorithm_class(cfg["algo"]["name"])(cfg)
    metrics = []
    try:
        for _ in range(8):
            metrics.append(algo.train().get("learners", {}).get("default_policy", {}))
        stats = algo.session.get_weights().get("return_stats")
    finally:
        algo.stop()
    steps = rows_of(Recorder.rollouts)
    assert len(steps) > 100 and len({x[0] for x in steps}) == 4
    returns = {}
    for (index, episode, step), (action, reward, ended, extras) in sorted(steps.items()):
        x = np.array([index, episode, step], np.float32)
        assert allowed(x)[action]
        np.testing.assert_allclose(reward, paid(x, action), rtol=1e-5)
        assert ended == (step + 1 == length(index, episode))
        if "random" in name:
            np.testing.assert_allclose(extras["log_prob"], -np.log(allowed(x).sum()), rtol=1e-5)
        if (index, episode, step - 1) in returns or step == 0:
            before = returns.get((index, episode, step - 1), 0.0)
            returns[index, episode, step] = GAMMA * before + reward
            if "running_return" in extras:
                np.testing.assert_allclose(extras["running_return"], returns[index, episode, step], rtol=1e-4)
    if "PPO" in name:
        assert all("running_return" in extras for *_, extras in steps.values())
        # those of the discounted returns so far, over all steps and all runners
        assert float(stats.count) == len(returns) == len(steps)
        np.testing.assert_allclose(stats.m2 / stats.count, np.var(list(returns.values())), rtol=1e-3)
        if "random" not in name:
            assert max(m["gap"] for m in metrics) < 1e-5
    else:
        found = [m["broken"] for m in metrics if "broken" in m]
        assert found and max(found) == 0
