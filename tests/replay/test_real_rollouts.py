"""What real environments give, kept and sampled: EnvPool's frame stacks, and CartPole's ends of both kinds."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl import config, envs
from jrl.envs.envpool_env import load_envpool
from jrl.errors import InputError
from jrl.replay import frames, ring, storage
from jrl.rollout import unroll
from jrl.run import build_learner
from jrl.types import ActOut

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium", "ignore:.*fork.*")


@pytest.fixture(scope="module", autouse=True)
def _specs_made_once():
    """Making an environment asks EnvPool for a game's spec five times, which takes a tenth of a second each time."""
    load_envpool()
    registry = sys.modules["envpool.registration"].registry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "make_spec", functools.cache(registry.make_spec))
        yield


def rollouts(env, length, count):
    """Rollouts of random actions, on the host."""
    n, B = env.spec.action.n, env.spec.num_envs
    act = lambda actor, obs, carry, key, explore: ActOut(jax.random.randint(key, (B,), 0, n), carry, {})
    program = unroll.make(env, act, length=length)
    state, step = program.init(jax.random.key(0)), jax.jit(program.step)
    for i in range(count):
        state, rollout, _ = step(state, (), jax.random.key(i))
        yield jax.device_get(rollout)


def replayed(spec, parts, slots, **options):
    """All rows of a full ring beside those of the rollouts that it holds: batch, rows [n, B, *], valid."""
    like = lambda space: jax.ShapeDtypeStruct(space.shape, jnp.dtype(space.dtype))
    B = spec.num_envs
    rows = storage.make(like(spec.observation), like(spec.action), capacity=slots * B, num_envs=B, gamma=0.9, **options)
    state, add = rows.init(), jax.jit(rows.add, donate_argnums=0)
    for part in parts:
        state = add(state, part)
    total = sum(part.reward.shape[0] for part in parts)
    first = total - int(state.length)
    assert first > slots  # it went round
    t, column = (x.reshape(-1) for x in np.mgrid[first:total, :B].astype(np.int32))
    slot = (t + rows.layout.spare - 1) % slots  # in front of the first lie the older frames of its stack
    batch = jax.device_get(jax.jit(rows.transitions)(state, slot, column, np.ones(t.shape), jax.random.key(0)))
    join = lambda name: np.concatenate([getattr(part, name) for part in parts])
    obs, flags = join("obs"), {name: join(name) for name in ("reward", "terminated", "truncated", "mask")}
    obs = np.concatenate([obs, parts[-1].last_obs[None]])
    return batch, obs, flags, t, column


def test_pong_stacks_are_rebuilt_to_the_last_bit():
    env = envs.make("Pong-v5", num_envs=2, options={"max_episode_steps": 23})
    parts = list(rollouts(env, length=10, count=16))
    env.close()
    n_step, stack = 3, ring.FrameStack(4)
    batch, obs, flags, t, column = replayed(env.spec, parts, slots=64, n_step=n_step, frame_stack=stack)
    assert obs.shape[2:] == (4, 84, 84)
    live = flags["mask"][t, column]
    assert flags["truncated"].sum() >= 10
    assert 100 < live.sum() < len(live)
    np.testing.assert_array_equal(batch.obs, obs[t, column])  # of void rows, too: they hold the final observation
    done = flags["terminated"] | flags["truncated"]
    for i in np.flatnonzero(live):
        k = 0
        while k < n_step and t[i] + k < len(done):
            k += 1
            if done[t[i] + k - 1, column[i]]:
                break
        np.testing.assert_array_equal(batch.next_obs[i], obs[t[i] + k, column[i]])
        np.testing.assert_allclose(batch.discount[i], 0.9**k, rtol=1e-6)
    stacked = obs[t, column]
    repeated = (stacked[:, 0] == stacked[:, 1]).all((1, 2)) & (stacked[:, 1] != stacked[:, 3]).any((1, 2))
    assert repeated.any()  # stacks of an episode's first steps were among them


@pytest.mark.parametrize("backend", some_quick(["jax", "envpool"], "jax"))
def test_cartpole_bootstraps_at_time_limits_only(backend):
    env = envs.make("CartPole-v1", backend=backend, num_envs=4, options={"max_episode_steps": 15})
    parts = list(rollouts(env, length=32, count=6))
    env.close()
    batch, obs, flags, t, column = replayed(env.spec, parts, slots=70)
    live = flags["mask"][t, column]
    at = lambda name: flags[name][t, column][live]
    assert at("terminated").sum() > 5
    assert at("truncated").sum() > 5
    np.testing.assert_array_equal(batch.obs[live], obs[t, column][live])
    np.testing.assert_array_equal(batch.next_obs[live], obs[t + 1, column][live])
    np.testing.assert_allclose(batch.discount[live], np.where(at("terminated"), 0.0, 0.9), rtol=1e-6)
    np.testing.assert_array_equal(batch.reward[live], at("reward"))
    # after a termination the pole lies beyond the limit; the observation of a new episode never stands in its place
    fallen = (np.abs(batch.next_obs[live][:, [0, 2]]) > [2.4, 12 * 2 * np.pi / 360]).any(1)
    assert fallen[at("terminated")].all()
    assert not fallen[~(at("terminated") | at("truncated"))].any()  # EnvPool calls an end on the last step a truncation


SMALL = {"img_height": 24, "img_width": 24}


def breakout(options, on_top, num_envs=3):
    cfg = {"algo": {"name": "dqn"}, "env": {"id": "Breakout-v5", "options": options, "frame_stack": on_top}}
    options = {**options, **SMALL, "max_episode_steps": 30}
    return config.from_dict(cfg), envs.make("Breakout-v5", num_envs=num_envs, options=options, frame_stack=on_top)


@pytest.mark.parametrize(
    ("options", "on_top", "want"),
    [
        ({"stack_num": 2}, 1, ring.FrameStack(2)),
        ({"gray_scale": False, "stack_num": 1}, 4, None),
        ({}, 2, None),
    ],
)
def test_the_frames_of_a_stack_are_those_of_the_options(options, on_top, want):
    cfg, env = breakout(options, on_top, num_envs=1)
    env.close()
    assert build_learner.frame_stack(cfg, env.spec) == want


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "on_top", "want"),
    [
        ({"episodic_life": True}, 1, ring.FrameStack(4, restarts=False)),
        ({"episodic_life": True, "stack_num": 1}, 3, ring.FrameStack(3)),
        ({"gray_scale": False}, 1, None),
    ],
)
def test_what_replay_gives_is_what_was_observed_whatever_the_options(options, on_top, want):
    """The frames of EnvPool's Atari go on behind a lost life, are of three colours, or are stacked once more."""
    cfg, env = breakout(options, on_top)
    stack = build_learner.frame_stack(cfg, env.spec)
    assert stack == want
    parts = list(rollouts(env, length=10, count=15))
    env.close()
    batch, obs, flags, t, column = replayed(env.spec, parts, slots=60, frame_stack=stack)
    live = flags["mask"][t, column]
    assert (flags["terminated"] | flags["truncated"]).sum() > 8
    np.testing.assert_array_equal(batch.obs, obs[t, column])
    np.testing.assert_array_equal(batch.next_obs[live], obs[t + 1, column][live])
    share = jax.jit(frames.broken_stacks, static_argnums=1)
    broken = lambda stack: sum(float(share(part, stack)) for part in parts)
    if stack is None:  # what such a guess would cost
        stack, wrong = ring.FrameStack(1), ring.FrameStack(env.spec.observation.shape[0])
        assert broken(wrong) > 0.5
    assert broken(stack) == 0
    if not stack.restarts:
        assert broken(ring.FrameStack(4)) > 0
        with pytest.raises(InputError, match=r"replay\.frame_stack 3: .* observes stacks of 4 frames: use null"):
            build_learner.frame_stack(config.from_dict({**config.to_dict(cfg), "replay": {"frame_stack": 3}}), env.spec)
