"""Repeated actions: counters whose sums, ends and observations are a plain loop, on every backend that repeats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import Stepper

from jrl import config, envs
from jrl.envs.jax_env import Definition
from jrl.learn import parallel
from jrl.run import build, build_collect
from jrl.types import Box, Discrete, InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*")
ENDS = (5, 2)  # steps of the environment after which the two environments end, as those of `counter_env.Counter`


def counter() -> Definition:
    """Shows and pays its steps since the reset; `counter_env.Counter` in a program."""

    def step(count, action, draws):
        count = count + 1.0
        return count, count, count == jnp.array(ENDS, jnp.float32)

    reset = lambda draws: jnp.zeros_like(draws[0])
    return Definition(Box((1,)), Discrete(2), None, 1, reset, step, lambda count: count[:, None])


KINDS = {
    "jax": {"env": "test_action_repeat:counter", "backend": "jax"},
    "gymnasium": {"env": "counter_env:Counter"},
    "workers": {"env": "counter_env:Counter", "remote_worker_envs": True},
    "ready_workers": {"env": "counter_env:Counter", "remote_worker_envs": True, "batch_wait_ms": 0.0},
}


def recorded(times, steps, horizon=None, soft=False):
    """Plays the counters in a loop: (obs, reward, terminated, truncated) [T, 2] of the policy's steps."""
    rows = np.zeros((4, steps, 2))
    for i, end in enumerate(ENDS):
        count, since, over, at_horizon = 0, 0, False, False
        for t in range(steps):
            reward, terminated, truncated = 0, False, False
            if over:  # one step resets, or goes on from the same state
                count, since = count if soft and at_horizon else 0, 0
            else:
                for _ in range(times):
                    count, since = count + 1, since + 1
                    reward, terminated = reward + count, count == end
                    truncated = since == horizon and not terminated
                    if terminated or truncated:
                        break
            over, at_horizon = terminated or truncated, truncated
            rows[:, t, i] = count, reward, terminated, truncated
    return rows


CASES = [("jax", 3, None, False), ("jax", 2, 3, True), ("gymnasium", 3, None, False), ("gymnasium", 2, 3, False)]
CASES += [("gymnasium", 2, 3, True), ("workers", 2, 3, True), ("ready_workers", 3, None, False)]


@pytest.mark.parametrize(("kind", "times", "horizon", "soft"), CASES)
def test_rewards_are_summed_up_to_the_end(kind, times, horizon, soft):
    env = envs.make(num_envs=2, action_repeat=times, horizon=horizon, soft_horizon=soft, **KINDS[kind])
    assert env.spec.max_episode_steps == (None if horizon is None else 2)  # actions: 2 and 1 steps of the environment
    stepper = Stepper(env)
    try:
        stepper.reset()
        rows = [stepper.step(np.zeros(2, np.int32)) for _ in range(9)]
    finally:
        env.close()
    found = [np.stack(x) for x in zip(*((r.obs[:, 0], r.reward, r.terminated, r.truncated) for r in rows))]
    np.testing.assert_array_equal(found, recorded(times, 9, horizon, soft))


def test_a_limit_of_the_environment_counts_its_own_steps():
    """Pendulum with a limit of 7 and actions of 3 steps: the third action is one step, whose reward is above -17."""
    for backend in ("jax", "gymnasium"):
        options = {"backend": backend, "num_envs": 1, "options": {"max_episode_steps": 7}}
        stepper = Stepper(envs.make("Pendulum-v1", action_repeat=3, **options))
        assert stepper.spec.max_episode_steps == 3
        stepper.reset()
        rows = [stepper.step(np.full((1, 1), 0.5, np.float32)) for _ in range(5)]
        stepper.env.close()
        assert [bool(r.truncated[0]) for r in rows] == [False, False, True, False, False]
        assert rows[3].reward[0] == 0 and abs(rows[2].reward[0]) < 17 and not any(r.terminated[0] for r in rows)


def test_masks_are_those_after_the_last_step(tmp_path):
    """`space_envs.Masked` has its mask in the infos; the mask goes inside of the repetition."""
    env = envs.make("test_action_repeat:masked", num_envs=1, action_repeat=2, horizon=3, soft_horizon=True)
    stepper = Stepper(env)
    seen = [stepper.reset()["action_mask"][0].tolist()]
    seen += [stepper.step(np.zeros(1, np.int32)).obs["action_mask"][0].tolist() for _ in range(4)]
    env.close()
    allowed = lambda count: [int(i == count % 3) for i in range(3)]
    assert seen == [allowed(n) for n in (0, 2, 3, 3, 5)]


def masked():
    import gymnasium

    class Masked(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(0, 99, (1,)), gymnasium.spaces.Discrete(3)

        def info(self):
            return {"action_mask": np.arange(3) == self.count % 3}

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.count = 0
            return np.zeros(1, np.float32), self.info()

        def step(self, action):
            self.count += 1
            return np.full(1, self.count, np.float32), 1.0, False, False, self.info()

    return Masked()


SMALL = ["env.num_envs=2", "rollout.length=8", "network.hidden=[8]", "stop.env_steps=1000"]


def test_history_and_memory_are_of_actions():
    """With a GRU, frames and previous rewards: rows of both backends are those of the record."""
    want = recorded(3, 8)
    found = {}
    for kind in ("jax", "gymnasium"):
        given = {**KINDS[kind], "frame_stack": 2, "action_repeat": 3}
        id = given.pop("env")
        cfg = config.load({"algo": {"name": "ppo"}, "env": {"id": id, **given}}, [
            *SMALL, "network.core.name=gru", "network.use_prev_reward=true", "algo.num_minibatches=1",
        ])  # fmt: skip
        source, actor = build_collect.collector(cfg)
        rollout, report = source.next(actor, jax.random.key(1))
        source.close()
        found[kind] = jax.tree.map(np.asarray, rollout)
        assert int(report.steps) == found[kind].mask.sum()
        obs = found[kind].obs
        np.testing.assert_array_equal(found[kind].reward, want[1])
        np.testing.assert_array_equal(obs["obs"][1:, :, 1, 0], want[0][:-1])
        begins = np.concatenate([np.ones((1, 2), bool), ~found[kind].mask])[:-1]
        np.testing.assert_array_equal(obs["obs"][..., 0, 0], np.where(
            begins, obs["obs"][..., 1, 0], np.roll(obs["obs"][..., 1, 0], 1, 0)))  # fmt: skip
        np.testing.assert_array_equal(obs["prev_reward"][1:], np.where(begins[1:], 0, want[1][:-1]))
        np.testing.assert_array_equal(found[kind].mask[1:], ~(want[2] + want[3]).astype(bool)[:-1])
    for name in ("terminated", "truncated", "mask", "reward"):
        np.testing.assert_array_equal(getattr(found["jax"], name), getattr(found["gymnasium"], name))


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_the_learner_discounts_by_action(algo):
    """From one rollout, gamma 0.9 with actions of two steps teaches as gamma 0.81 with actions of one step."""
    more = ["replay.learning_starts=8", "replay.capacity=100"] if algo == "dqn" else ["algo.normalize_reward=true"]
    base = {"algo": {"name": algo}, "env": {"id": "test_action_repeat:counter", "backend": "jax"}}
    repeated = config.load(base, [*SMALL, *more, "env.action_repeat=2", "algo.gamma=0.9"])
    source, actor = build_collect.collector(repeated)
    rollout, _ = source.next(actor, jax.random.key(1))
    learned = []
    for cfg in (repeated, config.load(base, [*SMALL, *more, "algo.gamma=0.81"])):
        learner = build.run(cfg).learn
        once = lambda key, learner=learner: learner.step(learner.init(key), learner.init_replay(), rollout, key)
        mapped = jax.vmap(once, axis_name=parallel.AXIS)
        learned.append(jax.device_get(jax.jit(mapped)(jax.random.key(0)[None])))
    tree, other = (jax.tree.map(lambda x: x.astype(float), jax.tree.leaves(x)) for x in learned)
    for x, y in zip(tree, other, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    assert repeated.algo.gamma == 0.9  # as the user gave it


@pytest.mark.parametrize(
    ("id", "settings", "message"),
    [
        ("Pendulum-v1", {}, "env.action_repeat: EnvPool steps and resets all .* use env.backend gymnasium or jax"),
        ("TwoStepGame-v0", {}, "env.action_repeat: TwoStepGame-v0 has several agents, .* leave it out"),
        ("Catch-v0", {"action_repeat": 0}, "env.action_repeat: expected a whole number of at least 1"),
    ],
)
def test_what_cannot_repeat_is_refused(id, settings, message):
    with pytest.raises(InputError, match=message):
        envs.make(id, num_envs=2, **{"action_repeat": 2, **settings})
