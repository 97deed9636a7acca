"""Episodes of a client, compared with the same environment in this process."""

import functools
import threading

import gymnasium
import jax
import numpy as np
import pytest
import serving
from ruled_env import Rules

from jrl import config, envs, registry
from jrl.run import build
from jrl.serve.client import EpisodeLost, PolicyClient
from jrl.serve.clients import Clients

ROLLOUTS, LENGTH, SEED = 6, 16, 3


def played(address, env, seed, stop, mode):
    """Plays until the stop event, or until the server ends."""
    client = PolicyClient(address, patience_s=0.0, inference_mode=mode)
    first = True
    try:
        while not stop.is_set():
            obs, _ = env.reset(seed=seed if first else None)
            first, episode, over = False, client.start_episode(), False
            while not over:
                obs, reward, terminated, truncated, _ = env.step(client.get_action(episode, obs))
                client.log_returns(episode, reward)
                over = terminated or truncated
            client.end_episode(episode, obs, truncated=truncated)
    except (ConnectionError, EpisodeLost):
        pass
    finally:
        client.close()


def rollouts(cfg, external=None, count=ROLLOUTS):
    """Returns rollouts of a run without learning, on the host, and their episode reports."""
    run = build.run(cfg, external=external)
    state = run.program.init(cfg.run.seed)
    found = []
    for i in range(count):
        _, rollout, report = run.program.collect(state, cfg.run.seed, i)
        found.append(jax.device_get((rollout, report)))
    run.program.close()
    return found


def settings(algo, env_id, core):
    return {
        "algo": {"name": algo, "normalize_obs": True},
        "env": {"id": env_id, "backend": "gymnasium", "num_envs": 1},
        "network": {"hidden": [8], **({"core": {"name": core, "size": 4}} if core else {})},
        "rollout": {"length": LENGTH, "explore": False},
        "run": {"seed": SEED},
    }


@functools.cache
def played_here(*given):
    """Expected rollouts: the environment is stepped in this process."""
    return rollouts(config.from_dict(settings(*given)))


@pytest.fixture
def rules(monkeypatch):
    """An environment with dict observations and an action mask that changes at each step."""
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("rules", Rules)


@pytest.mark.parametrize(
    ("algo", "env_id", "mode", "core"),
    [
        pytest.param("dqn", "CartPole-v1", "remote", "lstm", marks=pytest.mark.slow),
        pytest.param("dqn", "CartPole-v1", "local", "lstm", marks=pytest.mark.slow),
        ("dqn", "rules", "remote", None),
        pytest.param("dqn", "rules", "local", None, marks=pytest.mark.slow),
        pytest.param("sac", "Pendulum-v1", "remote", None, marks=pytest.mark.slow),
        pytest.param("td3", "Pendulum-v1", "local", None, marks=pytest.mark.slow),
    ],
)
def test_a_clients_rows_equal_those_of_the_environment(algo, env_id, mode, core, rules):
    here = played_here(algo, env_id, core)
    cfg = config.from_dict({**settings(algo, env_id, core), "external": {"port": 0, "max_wait_ms": 0}})
    clients, stop = Clients(), threading.Event()
    with clients.open(cfg.external):
        env, seed = Rules() if env_id == "rules" else gymnasium.make(env_id), envs.seed_range(SEED)
        args = (clients, env, seed, stop, mode, wrong := [])
        thread = threading.Thread(target=_after_listening, args=args, daemon=True)
        thread.start()
        there = rollouts(cfg, clients.source(cfg, 0, wrong))
        stop.set()
        thread.join(10)
    rows, ends, masks = 0, 0, set()
    # numpy rounds continuous actions differently, which changes the following steps
    rounded = mode == "local" and env_id == "Pendulum-v1"
    apart = {"rtol": 1e-4, "atol": 1e-4} if rounded else {"rtol": 1e-6}
    for (a, report), (b, found) in zip(here, there, strict=True):
        real = a.mask
        assert np.array_equal(real, b.mask)
        for name in ("terminated", "truncated", *(() if rounded else ("reward",))):
            assert np.array_equal(np.where(real, getattr(a, name), 0), np.where(real, getattr(b, name), 0)), name
        same = lambda mine, its: np.testing.assert_allclose(mine, its, **apart)
        jax.tree.map(same, (a.obs, a.last_obs, a.reward[real]), (b.obs, b.last_obs, b.reward[real]))
        np.testing.assert_allclose(a.action[real], b.action[real], rtol=1e-5, atol=1e-4 if rounded else 0)
        assert jax.tree.structure(a.extras) == jax.tree.structure(b.extras)
        assert np.array_equal(a.contiguous, b.contiguous)
        memory = [((x.carry, x.extras.get("carry", ())), len(jax.tree.leaves(x.carry))) for x in (a, b)]
        jax.tree.map(lambda mine, its: np.testing.assert_allclose(mine, its, atol=1e-5), memory[0][0], memory[1][0])
        assert (memory[0][1] > 0) == (core is not None)
        assert (report.count, report.steps) == (found.count, found.steps)
        np.testing.assert_allclose(report.return_sum, found.return_sum, rtol=1e-6)
        rows, ends = rows + real.sum(), ends + report.count
        if env_id == "rules":
            allowed = b.obs["action_mask"][real]
            assert np.take_along_axis(allowed, b.action[real][:, None], 1).all()
            masks |= set(map(tuple, allowed))
    assert rows > (60 if env_id == "rules" else 80)
    assert ends > 0 or env_id == "Pendulum-v1"
    assert len(masks) > 2 or env_id != "rules"


def _after_listening(clients, env, seed, stop, mode, wrong):
    """Plays; an exception ends the run, too."""
    serving.listening(clients.address)
    try:
        played(clients.address, env, seed, stop, mode)
    except Exception as e:
        wrong.append(e)
        raise


@pytest.mark.parametrize("mode", ["remote", "local"])
def test_the_learner_gets_every_step_once_and_in_order(mode):
    """Observations number the steps; the episodes of a request end at different times."""
    cfg = serving.settings(
        "dqn", envs=4, replay={"capacity": 10_000, "learning_starts": 100_000, "train_every": 32, "batch_size": 8}
    )
    clients = Clients()

    def play():
        serving.listening(clients.address)
        client = PolicyClient(clients.address, inference_mode=mode)
        ids = client.start_episodes(4)
        for t in range(200):
            obs = np.full((4, 4), 4.0 * t)
            obs[:, 0] += np.arange(4)
            over = np.arange(4) == t % 7 if t else np.zeros(4, bool)
            try:
                ids = client.steps(ids, obs, np.ones(4), terminated=over, final_observations=-obs).episodes
            except EpisodeLost:  # the run has ended
                break
        client.close()

    with clients.open(cfg.external):
        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        found = rollouts(cfg, clients.source(cfg, 0, []), count=20)
        thread.join(10)
    for column in range(4):
        rows = [
            (rollout.obs[t, column, 0], rollout.mask[t, column], rollout.terminated[t, column])
            for rollout, _ in found
            for t in range(rollout.count[column])
        ]
        numbers = [number for number, real, _ in rows if real]
        assert numbers == [4.0 * t + column for t in range(len(numbers))]
        assert len(numbers) > 100
        finals = [number for number, real, _ in rows if not real]
        before = [rows[i - 1] for i, row in enumerate(rows) if not row[1]]
        assert all(ended for _, _, ended in before)
        assert finals == [-(number + 4.0) for number, _, _ in before]
    assert sum(report.steps for _, report in found) == sum(int(rollout.mask.sum()) for rollout, _ in found)
