"""Weights of norm 1 (torso simba_v2, unit_weights) in learning, and rewards scaled by the bound of returns."""

import fakes
import jax
import numpy as np
import pytest

from jrl import train
from jrl.algos import parts, ppo, sac
from jrl.metrics import loggers
from jrl.networks import NetworkConfig
from jrl.ops import normalize
from jrl.types import Box

KEY = jax.random.key(0)
SPEC = fakes.spec(Box((2,), low=-1.0, high=1.0))
NETWORK = NetworkConfig(hidden=(8,), activation="relu", torso="flash", critic_torso="simba_v2")


def norms(params):
    """Norms of the weights of each output of each layer with such weights."""
    flat = jax.tree_util.tree_leaves_with_path(params)
    return [np.linalg.norm(x, axis=-2) for path, x in flat if "unit_kernel" in jax.tree_util.keystr(path)]


def test_weights_keep_their_norm_in_learning():
    """Weights of FlashSAC's policy and SimbaV2's critics keep norm 1 after steps so large that they would lose it."""
    algo = sac.make(sac.Config(lr=0.1), SPEC, NETWORK)
    first = state = jax.jit(algo.init)(KEY)
    update = jax.jit(algo.update)
    for i in range(3):
        state, _ = update(state, fakes.data(algo, SPEC, algo.actor(state), seed=i), jax.random.key(i))
        assert len(norms(state.params)) == 9
        for norm in norms(state.params):
            np.testing.assert_allclose(norm, 1.0, rtol=1e-5)
    change = jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), first.params, state.params)
    assert all(norm.mean() > 0.1 for norm in norms(change))


def test_dense_layers_have_such_weights_on_request():
    algo = sac.make(sac.Config(), SPEC, NetworkConfig(hidden=(8, 8), unit_weights=True))
    found = norms(jax.jit(algo.init)(KEY).params)
    assert [norm.shape for norm in found] == [(8,)] * 2 + [(2, 8)] * 2
    np.testing.assert_allclose(np.concatenate([norm.ravel() for norm in found]), 1.0, rtol=1e-5)


def test_rewards_are_divided_so_that_returns_stay_below_the_bound():
    """By a loop over two rollouts: first the deviation divides, then the greatest return."""
    cfg = ppo.Config(normalize_reward=True, normalize_reward_bound=2.0, gamma=0.9)
    stats = parts.init_returns(cfg)
    seen = []
    for returns in ([[1.0, -3.0], [2.5, 90.0]], [[100.0, 4.0], [-50.0, 0.0]]):
        mask = np.array([[True, True], [True, False]])
        rollout = RowsOf(mask, np.float32(returns))
        stats = jax.jit(lambda stats, mask, returns: parts.observe_returns(stats, RowsOf(mask, returns), None))(
            stats, mask, rollout.extras["running_return"]
        )
        seen += list(np.float64(returns)[mask])
        divisor = max(np.std(seen), max(np.abs(seen)) / 2.0)
        np.testing.assert_allclose(parts.scale_reward(cfg, stats, np.float32(3.0)), 3.0 / divisor, rtol=1e-5)
    assert divisor == 50.0 and float(stats.peak) == 100.0
    assert isinstance(parts.init_returns(ppo.Config(normalize_reward=True)), normalize.RunningStats)


class RowsOf:
    def __init__(self, mask, returns):
        self.mask, self.extras = mask, {"running_return": returns}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simba", "simba_v2", "bro", "xqc", "flash_sac"])
def test_shipped_configs_learn_pendulum(name, tmp_path):
    """Random actions have a return of about -1,200; the budget is twice what the configs need."""
    settings = ["--set=run.log=[jsonl]", "--stop=env_steps=10000", f"--out={tmp_path / 'run'}"]
    assert train.main([name, *settings]) == 0
    assert loggers.read_rows(tmp_path / "run" / "result.jsonl")[-1]["evaluation/return"] > -300
