"""Action chunks: what an environment gets of them is a plain loop over their actions, on every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import Stepper

from jrl import config, envs
from jrl.envs.jax_env import Definition
from jrl.run import build_collect
from jrl.types import Box, InputError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*")
ENDS = (5, 2)  # steps of the environment after which the two environments end, as those of `counter_env.Pusher`


def pusher() -> Definition:
    """`counter_env.Pusher` in a program."""

    def step(state, action, draws):
        count = state[:, 0] + 1.0
        state = jnp.stack([count, state[:, 1] + count * action.sum(-1)], -1)
        return state, action[:, 0] + 10.0 * action[:, 1], count == jnp.array(ENDS, jnp.float32)

    action = Box((2,), "float32", -2.0, 2.0)
    return Definition(Box((2,)), action, None, 1, lambda draws: jnp.zeros((len(draws[0]), 2)), step, lambda x: x)


KINDS = {
    "jax": {"env": "test_action_chunk:pusher", "backend": "jax"},
    "gymnasium": {"env": "counter_env:Pusher"},
    "ready_workers": {"env": "counter_env:Pusher", "remote_worker_envs": True, "batch_wait_ms": 0.0},
}


def recorded(actions, repeat=1, horizon=None, soft=False):
    """Plays chunks [T, 2, n, 2] in a loop: (count, total, reward, terminated, truncated) [T, 2] of the chunks."""
    rows = np.zeros((5, *actions.shape[:2]))
    for i, end in enumerate(ENDS):
        count, total, since, over, at_horizon = 0, 0.0, 0, False, False
        for t, chunk in enumerate(actions[:, i]):
            reward, terminated, truncated = 0.0, False, False
            if over:  # one step resets, or goes on from the same state
                count, total, since = (count, total, 0) if soft and at_horizon else (0, 0.0, 0)
            else:
                for action in np.repeat(chunk, repeat, 0):
                    count, since = count + 1, since + 1
                    total, reward = total + count * action.sum(), reward + action[0] + 10 * action[1]
                    terminated = count == end
                    truncated = since == horizon and not terminated
                    if terminated or truncated:
                        break
            over, at_horizon = terminated or truncated, truncated
            rows[:, t, i] = count, total, reward, terminated, truncated
    return rows


CASES = [("jax", 3, {}), ("jax", 3, {"horizon": 4}), ("jax", 2, {"horizon": 3, "soft_horizon": True})]
CASES += [("jax", 2, {"action_repeat": 2}), ("gymnasium", 3, {}), ("gymnasium", 2, {"action_repeat": 2})]
CASES += [("gymnasium", 2, {"horizon": 3, "soft_horizon": True}), ("ready_workers", 3, {"horizon": 4})]


@pytest.mark.parametrize(("kind", "length", "options"), CASES)
def test_actions_of_a_chunk_are_taken_in_order_up_to_the_end(kind, length, options):
    """Chunks end at terminations and at horizons in their middle; actions in [-1, 1] are scaled to [-2, 2]."""
    chosen = np.random.default_rng(0).integers(-2, 3, (9, 2, length, 2)).astype(np.float32) / 2
    env = envs.make(num_envs=2, action_chunk=length, **options, **KINDS[kind])
    assert env.spec.action == Box((length, 2), "float32", -1.0, 1.0)
    repeat, horizon = options.get("action_repeat", 1), options.get("horizon")
    assert env.spec.max_episode_steps == (None if horizon is None else 2)
    stepper = Stepper(env)
    try:
        stepper.reset()
        rows = [stepper.step(action) for action in chosen]
    finally:
        env.close()
    found = [(*r.obs.T, r.reward, r.terminated, r.truncated) for r in rows]
    want = recorded(2 * chosen, repeat, horizon, options.get("soft_horizon", False))
    np.testing.assert_array_equal(np.swapaxes(np.array(found), 0, 1), want)


SMALL = ["env.num_envs=2", "rollout.length=8", "network.hidden=[8]", "stop.env_steps=1000", "algo.num_minibatches=1"]


@pytest.mark.parametrize("kind", ["jax", "gymnasium"])
def test_rollouts_are_those_of_a_plain_loop(kind):
    """Frames and previous actions are of chunks; two rollouts, the second from the state of the first."""
    given = {"id": KINDS[kind]["env"], "frame_stack": 2, "action_chunk": 3}
    given |= {"backend": KINDS[kind]["backend"]} if "backend" in KINDS[kind] else {}
    cfg = config.load({"algo": {"name": "ppo"}, "env": given}, [
        *SMALL, "network.use_prev_action=true", "algo.normalize_obs=true",
    ])  # fmt: skip
    source, actor = build_collect.collector(cfg)
    parts = [source.next(actor, jax.random.key(i))[0] for i in range(2)]
    source.close()
    parts = [jax.device_get((x.obs, x.action, x.reward, x.terminated, x.mask)) for x in parts]
    obs, action, reward, terminated, mask = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    want = recorded(2 * np.clip(action, -1, 1))
    assert action.shape == (16, 2, 3, 2) and (np.abs(action) > 1).any()
    np.testing.assert_allclose(reward, want[2], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(terminated, want[3])
    np.testing.assert_array_equal(mask[1:], ~want[3].astype(bool)[:-1])
    np.testing.assert_allclose(obs["obs"][1:, :, -1], np.moveaxis(want[:2], 0, -1)[:-1], rtol=1e-5, atol=1e-5)
    begins = np.concatenate([np.ones((1, 2), bool), ~mask])[:-1][..., None]
    before = np.roll(obs["obs"][:, :, -1], 1, 0)
    np.testing.assert_array_equal(obs["obs"][:, :, 0], np.where(begins, obs["obs"][:, :, -1], before))
    np.testing.assert_array_equal(obs["prev_action"][1:], np.where(begins[1:, ..., None], 0, action[:-1]))


def test_the_discount_is_of_the_steps_of_a_chunk():
    cfg = config.load({"algo": {"name": "sac"}, "env": {"id": "Pendulum-v1", "backend": "jax"}}, [
        "env.action_chunk=3", "env.action_repeat=2", "algo.gamma=0.9", "stop.env_steps=9999",
    ])  # fmt: skip
    assert config.discount_by_action(cfg).algo.gamma == pytest.approx(0.9**6) and cfg.algo.gamma == 0.9


@pytest.mark.parametrize(
    ("id", "settings", "message"),
    [
        ("Pendulum-v1", {}, "env.action_chunk: EnvPool steps and resets all .* use env.backend gymnasium or jax"),
        ("TwoStepGame-v0", {}, "env.action_chunk: TwoStepGame-v0 has several agents, .* leave it out"),
        ("Catch-v0", {"backend": "jax"}, "env.action_chunk: expected actions in a Box of floats, got Discrete"),
        ("CartPole-v1", {"backend": "gymnasium"}, "env.action_chunk: expected actions in a Box of floats, got Discr"),
    ],
)
def test_what_has_no_chunks_is_refused(id, settings, message):
    with pytest.raises(InputError, match=message):
        envs.make(id, num_envs=2, **{"action_chunk": 2, **settings})
