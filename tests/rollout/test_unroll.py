"""The scan of the graph path against a plain Python loop over `env.step` and `act`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tasks import ACTOR, INITIAL, act, carry, drift

from jrl import envs
from jrl.envs.jax_env import build
from jrl.errors import InputError
from jrl.rollout import unroll
from jrl.types import ActOut

T, B, GAMMA, ROLLOUTS = 9, 5, 0.9, 3


def transform(reward):
    return jnp.clip(reward, -0.5, 0.5)


def by_loop(env, keys, start):
    """Every row as it happens; one dictionary of lists per rollout."""
    step, policy = jax.jit(env.step), jax.jit(act)
    state, obs = env.reset(start)
    done, memory = np.zeros(B, bool), np.full((B, 3), INITIAL, np.float32)
    total, length, running = np.zeros(B), np.zeros(B, int), np.zeros(B)
    for key in keys:
        rows = {
            k: []
            for k in ("obs", "action", "reward", "terminated", "truncated", "mask", "log_prob", "memory", "running")
        }
        rows |= {"carry": memory.copy(), "ended": []}
        for act_key, env_key in jax.random.split(key, (T, 2)):
            out = policy(ACTOR, obs, {"memory": jnp.asarray(memory)}, act_key)
            rows["obs"].append(np.array(obs))
            rows["action"].append(np.array(out.action))
            rows["log_prob"].append(np.array(out.extras["log_prob"]))
            rows["memory"].append(np.array(out.extras["memory"]))
            rows["mask"].append(~done)
            state, (obs, reward, terminated, truncated, *_) = step(state, out.action, env_key)
            rows["reward"].append(np.array(reward))
            rows["terminated"].append(np.array(terminated))
            rows["truncated"].append(np.array(truncated))
            memory = np.array(out.carry["memory"])
            memory[done] = INITIAL  # this step was the reset
            now = np.array(terminated | truncated)
            for b in range(B):
                if not done[b]:
                    total[b], length[b] = total[b] + reward[b], length[b] + 1
                    running[b] = reward[b] + GAMMA * running[b]
            rows["running"].append(running.copy())
            for b in np.flatnonzero(now):
                rows["ended"].append((total[b], length[b]))
                total[b], length[b], running[b] = 0, 0, 0
            done = now
        rows["last_obs"] = np.array(obs)
        yield {k: np.array(v) if k != "ended" else v for k, v in rows.items()}


@pytest.fixture(scope="module")
def both():
    """(what unroll gives, what the loop gives) of consecutive rollouts."""
    env = build(drift(), B)
    functions = unroll.make(env, act, length=T, carry=carry, running_return_gamma=GAMMA)
    clipped = unroll.make(env, act, length=T, carry=carry, running_return_gamma=None, reward_transform=transform)
    start, *keys = jax.random.split(jax.random.key(7), ROLLOUTS + 1)
    state, other, found = functions.init(start), clipped.init(start), []
    step, clipped_step = jax.jit(functions.step), jax.jit(clipped.step)
    for key in keys:
        state, rollout, report = step(state, ACTOR, key)
        other, transformed, raw_report = clipped_step(other, ACTOR, key)
        found.append((rollout, report, transformed, raw_report))
    return found, list(by_loop(env, keys, start))


def test_the_task_asks_every_question(both):
    _, loop = both
    terminated, truncated, mask = (np.stack([r[k] for r in loop]) for k in ("terminated", "truncated", "mask"))
    assert terminated.sum() > 3
    assert truncated.sum() > 3
    assert (~mask).sum() > 6
    assert (terminated | truncated)[:-1, -1].any()  # an end on a rollout's last row: the next one begins with a reset


@pytest.mark.parametrize("i", range(ROLLOUTS))
def test_rows(both, i):
    rollout, _, _, _ = both[0][i]
    loop = both[1][i]
    for name in ("action", "terminated", "truncated", "mask"):
        np.testing.assert_array_equal(getattr(rollout, name), loop[name], err_msg=name)
    for name in ("obs", "reward", "last_obs"):
        np.testing.assert_allclose(getattr(rollout, name), loop[name], atol=1e-5, err_msg=name)
    for name in ("log_prob", "memory"):
        np.testing.assert_allclose(rollout.extras[name], loop[name], atol=1e-5, err_msg=name)
    np.testing.assert_allclose(rollout.carry["memory"], loop["carry"], atol=1e-5)
    running = np.where(loop["mask"], loop["running"], 0)
    np.testing.assert_allclose(np.where(loop["mask"], rollout.extras["running_return"], 0), running, atol=1e-4)
    np.testing.assert_array_equal(rollout.contiguous, np.full(B, i > 0))


@pytest.mark.parametrize("i", range(ROLLOUTS))
def test_episodes(both, i):
    _, report, _, _ = both[0][i]
    loop = both[1][i]
    returns, lengths = np.array(loop["ended"]).T
    assert (int(report.count), int(report.length_sum), int(report.steps)) == (
        len(returns),
        lengths.sum(),
        loop["mask"].sum(),
    )
    np.testing.assert_allclose(report.return_sum, returns.sum(), rtol=1e-4)


def test_a_reward_transform_is_for_the_learner_only(both):
    for rollout, report, transformed, raw_report in both[0]:
        np.testing.assert_array_equal(transformed.reward, np.clip(rollout.reward, -0.5, 0.5))
        assert float(rollout.reward.max()) > 0.5
        for a, b in zip(jax.tree.leaves(report), jax.tree.leaves(raw_report)):
            np.testing.assert_array_equal(a, b)
        assert "running_return" not in transformed.extras


def test_without_exploration():
    env = build(drift(), B)
    functions = unroll.make(env, act, length=T, carry=carry, explore=False)
    _, rollout, _ = jax.jit(functions.step)(functions.init(jax.random.key(0)), ACTOR, jax.random.key(1))
    logit = 3.0 * (rollout.extras["memory"].sum(-1) - 1.5)
    np.testing.assert_array_equal(rollout.action, logit > 0)


@pytest.mark.slow
def test_each_of_several_vectors_knows_which_environments_are_its_own():
    """What an exploration starts an episode with, at first and after each reset."""

    def which(batch_size, first=0, total=None):
        return (first + jnp.arange(batch_size, dtype=jnp.float32)) / total

    def act(actor, obs, carry, key, explore=True):
        return ActOut(jax.random.randint(key, carry.shape, 0, 2), carry, {"who": carry})

    second = unroll.make(build(drift(), B), act, length=2 * T, carry=which, place=3 * B)
    state, rollout, _ = jax.jit(second.step)(second.init(jax.random.key(0), 1), (), jax.random.key(1), 1)
    assert not rollout.mask.all()
    who = np.broadcast_to((B + np.arange(B)) / (3 * B), (2 * T, B))
    np.testing.assert_allclose(rollout.extras["who"], who, rtol=1e-6)
    np.testing.assert_allclose(state.carry, who[0], rtol=1e-6)


def test_environments_that_are_not_in_a_program_are_refused_with_the_backend():
    for settings in ({"backend": "gymnasium"}, {"backend": "envpool", "host": True}):
        env = envs.make("CartPole-v1", num_envs=2, **settings)
        with pytest.raises(InputError, match=r"^unroll.make: expected a JaxEnv.* backend=\"jax\""):
            unroll.make(env, act, length=4)
        env.close()
    env = build(drift(), B)
    with pytest.raises(InputError, match=r"^length: expected a whole number, got a traced"):
        jax.vmap(lambda n: unroll.make(env, act, length=n) and 0)(jnp.array([4, 8]))


def test_a_pool_is_not_vmapped():
    env = envs.make("CartPole-v1", num_envs=2, backend="envpool")
    policy = lambda actor, obs, carry, key, explore: ActOut(jnp.zeros(2, jnp.int32) + actor, carry, {})
    collect = unroll.make(env, policy, length=4)
    state = collect.init(jax.random.key(0))
    with pytest.raises(InputError, match=r"^jax.vmap: expected environments whose state .* backend=\"jax\""):
        jax.vmap(lambda actor: collect.step(state, actor, jax.random.key(1))[1].reward)(jnp.arange(2))
    env.close()
