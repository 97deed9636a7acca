"""Runs that learn in hindsight: what an update gets beside the rules of the environment, wherever rewards come from."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import config, envs, registry, train
from jrl.errors import InputError
from jrl.fields import schema
from jrl.run import build

BITS, GAMMA = 4, 0.9


class GymBitFlip(gymnasium.Env):
    """BitFlip with Gymnasium's interface; rewards -1 and 0, as in the paper."""

    def __init__(self, bits=BITS):
        space = gymnasium.spaces.MultiBinary(bits)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = gymnasium.spaces.Dict(dict.fromkeys(names, space))
        self.action_space = gymnasium.spaces.Discrete(bits)

    def _observe(self):
        return {"observation": self.bits, "achieved_goal": self.bits, "desired_goal": self.goal}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(0, 2, (2, BITS), np.int8)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.bits = self.bits.copy()
        self.bits[action] ^= 1
        self.steps += 1
        end = self.compute_terminated(self.bits, self.goal, {})
        reward = float(self.compute_reward(self.bits, self.goal, {}))
        return self._observe(), reward, end, self.steps == BITS and not end, {}

    def compute_reward(self, achieved, desired, info):
        assert isinstance(achieved, np.ndarray)
        return -(achieved != desired).any(-1).astype(np.float32)

    def compute_terminated(self, achieved, desired, info):
        return bool((achieved == desired).all())


class NeedsInfos(GymBitFlip):
    def compute_reward(self, achieved, desired, info):
        return info["reward"]


class OfOne(GymBitFlip):
    def compute_reward(self, achieved, desired, info):
        return -float((achieved != desired).any())


def paid(achieved, desired):
    """The user's function: like BitFlip-v0's, but ten times as much."""
    end = (achieved == desired).all(-1)
    return 10.0 * end, end


def one_number(achieved, desired):
    return (achieved == desired).all()


def make_loss(at_goal, off_goal):
    """DQN's loss, and how many transitions of the batch break the rules."""

    def loss(default, net, params, batch):
        value, metrics = default(params, batch)
        obs, after = batch.obs, batch.next_obs
        reached = (after["achieved_goal"] == after["desired_goal"]).all(-1)
        flipped = obs["achieved_goal"] ^ jax.nn.one_hot(batch.action, BITS, dtype=jnp.int8)
        broken = (after["achieved_goal"] != flipped).any(-1)
        broken |= (after["desired_goal"] != obs["desired_goal"]).any(-1)
        broken |= batch.reward != jnp.where(reached, at_goal, off_goal)
        broken |= batch.discount != jnp.where(reached, 0.0, jnp.float32(GAMMA))
        live = batch.weight > 0
        counts = {"broken": broken & live, "reached": reached & live, "live": live}
        return value, metrics | {name: x.sum().astype(jnp.float32) for name, x in counts.items()}

    return loss


def settings(id, **replay):
    return {
        "algo": {"name": "dqn", "gamma": GAMMA},
        "env": {"id": id, "num_envs": 4},
        "network": {"hidden": [8]},
        "replay": {
            "capacity": 200, "batch_size": 64, "learning_starts": 50, "train_every": 8, "updates_per_step": 0.25,
            "hindsight": replay,
        },
        "custom": {"loss": "rules"},
        "run": {"log": ["jsonl"], "report_every": 200, "compile_cache": False},
        "stop": {"env_steps": 600},
    }  # fmt: skip


RUNS = {
    "in JAX": ({"env": {"options": {"bits": BITS}}}, "BitFlip-v0", {}, (1.0, 0.0)),
    "two devices": (
        {"env": {"options": {"bits": BITS}}, "devices": {"learners": [0, 1]}},
        "BitFlip-v0",
        {"strategy": "episode"},
        (1.0, 0.0),
    ),
    "scaled": ({"env": {"options": {"bits": BITS}, "reward_scale": 0.5}}, "BitFlip-v0", {}, (0.5, 0.0)),
    "user's": (
        {"env": {"options": {"bits": BITS}}, "custom": {"reward": f"{__name__}:unchanged"}},
        "BitFlip-v0",
        {"reward": f"{__name__}:paid", "share": 1.0},
        (10.0, 0.0),
    ),
    "of Gymnasium": ({}, f"{__name__}:GymBitFlip", {}, (0.0, -1.0)),
}  # fmt: skip


def unchanged(reward):
    assert reward.ndim == 2
    return reward


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("two devices", "of Gymnasium") else [pytest.mark.slow]) for n in RUNS]
)
def test_what_is_learned_follows_the_rules(name, tmp_path, monkeypatch):
    """Each transition is one of the game under its goal; far more of them reach it than do without hindsight."""
    more, id, replay, rewards = RUNS[name]
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("rules", make_loss(*rewards))
    (tmp_path / "c.yaml").write_text(config.to_yaml(config.from_dict(schema.merge(settings(id, **replay), more))))
    assert train.main([str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run")]) == 0
    rows = [schema.parse(line) for line in (tmp_path / "run" / "result.jsonl").read_text().splitlines()]
    learned = [row for row in rows if "broken" in row]
    assert learned and all(row["broken"] == 0 for row in learned)
    assert np.mean([row["reached"] / row["live"] for row in learned]) > 0.25


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env": {"id": "CartPole-v1"}}, r"replay\.hindsight: expected .*achieved_goal.*, CartPole-v1 has Box: leave"),
        ({"replay": {"hindsight": {"reward": f"{__name__}:one_number"}}}, r"one_number: expected \(reward \[N\], end"),
        ({"replay": {"hindsight": {"reward": f"{__name__}:no_such"}}}, r"replay\.hindsight\.reward .* has no function"),
        ({"env": {"id": f"{__name__}:NeedsInfos"}}, r"compute_reward of .*NeedsInfos fails: .*KeyError"),
        ({"env": {"id": f"{__name__}:OfOne"}}, r"compute_reward of .*OfOne: expected one reward per"),
        ({"env": {"id": "HandManipulateBlock-v1"}, "algo": {"name": "sac"}}, r"hindsight\.reward: HandM.* name a func"),
    ],
)
def test_what_has_no_goals_or_rewards_is_refused(given, message):
    cfg = schema.merge(settings("BitFlip-v0"), {**given, "custom": {"loss": None}})
    with pytest.raises(InputError, match=message):
        build.run(config.from_dict(cfg)).close()


@pytest.mark.parametrize("id", ["FetchReach-v4", pytest.param("FetchReachDense-v4", marks=pytest.mark.slow)])
def test_rewards_of_fetch_are_envpools(id):
    env = envs.make(id, num_envs=8, host=True)
    reward_of, seen = envs.goal_reward(envs.section(id)), set()
    obs = env.reset()
    for _ in range(49):
        towards_the_goal = 5 * (obs["desired_goal"] - obs["achieved_goal"])
        result = env.step(np.clip(np.pad(towards_the_goal, [(0, 0), (0, 1)]), -1, 1).astype(np.float32))
        obs = result.obs
        reward, end = reward_of(result.obs["achieved_goal"], result.obs["desired_goal"])
        np.testing.assert_allclose(result.reward, reward, atol=1e-5)
        assert not end.any() and not result.terminated.any()
        seen |= set(np.unique(result.reward))
    env.close()
    assert len(seen) > 1


@pytest.mark.slow
def test_hindsight_is_turned_on_and_off(tmp_path, monkeypatch):
    """A stored replay of the other kind is read: its rows have ages of fewer bits, or of more."""
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("rules", make_loss(1.0, 0.0))
    options = {"env": {"options": {"bits": BITS}}, "replay": {"hindsight": None}}
    (tmp_path / "c.yaml").write_text(config.to_yaml(config.from_dict(schema.merge(settings("BitFlip-v0"), options))))
    out = tmp_path / "run"
    assert train.main([str(tmp_path / "c.yaml"), "--out", str(out)]) == 0
    for steps, hindsight in ((1200, "{share: 1.0}"), (1800, "null")):
        more = [f"--set=replay.hindsight={hindsight}", f"--stop=env_steps={steps}", "--resume=auto"]
        assert train.main([str(tmp_path / "c.yaml"), *more, "--out", str(out)]) == 0
    rows = [schema.parse(line) for line in (out / "result.jsonl").read_text().splitlines()]
    assert all(row.get("broken", 0) == 0 for row in rows)
    reached = [[r["reached"] / r["live"] for r in rows if "live" in r and r["env_steps"] // 601 == i] for i in range(3)]
    assert np.mean(reached[1]) > 1.5 * np.mean(reached[0])
