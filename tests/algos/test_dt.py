"""DT: it is told the return to come, takes off what was received, and clones who received that much."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl import config, data
from jrl.algos import bc, dt
from jrl.errors import InputError
from jrl.fields.data import RETURN_TO_GO, TIMESTEP
from jrl.fields.hyper import Gtrxl, NetworkConfig
from jrl.run import build_data
from jrl.run.session import Session
from jrl.types import Batch, Box, Dict, Discrete, EnvSpec, SequenceBatch, Window

PAST = Dict((("obs", Box((2,))), ("prev_action", Discrete(2)), ("prev_reward", Box(()))))
SPEC = EnvSpec(PAST, Discrete(2), 4)
CFG = dt.Config(target_return=6.0, return_scale=2.0, step_scale=10.0)
CORE = Gtrxl(size=8, heads=1, head_size=8, layers=1, mlp=8, memory=4)
SMALL = NetworkConfig(hidden=(8,), core=CORE, max_seq_len=3)


def seen_by(algo, rewards):
    """What the network is told at each step, of an algorithm whose policy is asked with these rewards before."""
    told, seen = [], []
    original = bc.policy

    def spy(cfg, agent, actor, obs, memory, explore):
        seen.append((obs[RETURN_TO_GO], obs[TIMESTEP]))
        return original(cfg, agent, actor, obs, memory, explore)

    actor, carry = algo.actor(fakes.made_up_state(algo)), algo.carry(4)

    @jax.jit
    def act(obs, carry):
        seen.clear()
        return algo.act(actor, obs, carry, jax.random.key(1)).carry, seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bc, "policy", spy)
        for reward in rewards:
            obs = {
                "obs": jnp.zeros((4, 2)),
                "prev_action": jnp.zeros((4,), jnp.int32),
                "prev_reward": jnp.asarray(reward),
            }
            carry, one = act(obs, carry)
            told.append(one)
    return told


@pytest.mark.parametrize("network", some_quick([SMALL, NetworkConfig(hidden=(8,))], NetworkConfig(hidden=(8,))))
def test_what_was_received_is_taken_off(network):
    rewards = [np.full(4, 99.0), np.arange(4.0), np.ones(4)]  # the first is of no step
    told = seen_by(dt.make(CFG, SPEC, network), rewards)
    to_go = [np.full(4, 6.0), 6.0 - np.arange(4.0), 5.0 - np.arange(4.0)]
    for i, (returns, step) in enumerate(told):
        np.testing.assert_allclose(returns, to_go[i] / 2.0, rtol=1e-6)
        np.testing.assert_allclose(step, i / 10.0, rtol=1e-6)


def batch_of(sequences):
    rng, shape = np.random.default_rng(0), (16, 3) if sequences else (16,)
    observed = (16, 4) if sequences else (16,)
    obs = {
        "obs": rng.normal(size=(*observed, 2)).astype("f4"),
        "prev_action": rng.integers(0, 2, observed).astype("i4"),
        "prev_reward": rng.normal(size=observed).astype("f4"),
    }
    extras = {RETURN_TO_GO: rng.normal(size=shape).astype("f4"), TIMESTEP: rng.integers(0, 9, shape).astype("i4")}
    common = {
        "action": rng.integers(0, 2, shape).astype("i4"), "reward": np.zeros(shape, "f4"), "extras": extras,
        "discount": np.ones(shape, "f4"), "weight": np.ones(shape, "f4"), "index": np.arange(16),
    }  # fmt: skip
    if not sequences:
        return Batch(obs=obs, next_obs=obs, **common)
    window = Window(obs, (), np.zeros((16, 4), bool))
    return SequenceBatch(window=window, ahead=np.broadcast_to(np.arange(1, 4), shape), **common)


@pytest.mark.parametrize("sequences", some_quick([False, True], False))
def test_an_update_is_that_of_cloning_conditioned_observations(sequences):
    network = SMALL if sequences else NetworkConfig(hidden=(8,))
    algo, batch = dt.make(CFG, SPEC, network), batch_of(sequences)
    told = {RETURN_TO_GO: lambda x: x / 2.0, TIMESTEP: lambda x: x.astype("f4") / 10.0}
    added = {name: fn(batch.extras[name]) for name, fn in told.items()}
    if sequences:
        longer = {name: np.concatenate([x, x[:, -1:]], 1) for name, x in added.items()}
        plain = dataclasses.replace(batch, window=dataclasses.replace(batch.window, obs={**batch.window.obs, **longer}))
    else:
        plain = dataclasses.replace(batch, obs={**batch.obs, **added}, next_obs={**batch.obs, **added})
    cloning = bc.make(bc.Config(), dt.conditioned_spec(SPEC), network)
    state = fakes.made_up_state(algo)
    ours, aux = jax.jit(algo.update)(state, batch, jax.random.key(1))
    theirs, wanted = jax.jit(cloning.update)(fakes.made_up_state(cloning), plain, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, (ours, aux.metrics), (theirs, wanted.metrics))
    changed = dataclasses.replace(batch, extras={**batch.extras, RETURN_TO_GO: batch.extras[RETURN_TO_GO] + 1})
    other, _ = jax.jit(algo.update)(state, changed, jax.random.key(1))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(other.params), strict=True))


def test_it_is_refused_what_it_cannot_do():
    with pytest.raises(InputError, match="use_prev_reward"):
        dt.make(CFG, SPEC._replace(observation=Box((2,))))
    warming = batch_of(True)
    warming = dataclasses.replace(warming, **{k: getattr(warming, k)[:, 1:] for k in ("action", "reward", "weight")})
    algo = dt.make(CFG, SPEC, SMALL)
    state = jax.eval_shape(algo.init, jax.random.key(0))
    with pytest.raises(InputError, match="burn_in"):
        jax.eval_shape(algo.update, state, warming, jax.random.key(0))
    with pytest.raises(InputError, match="data sets"):
        jax.eval_shape(algo.update, state, dataclasses.replace(batch_of(True), extras={}), jax.random.key(0))


def obedient(tmp_path):
    """Episodes of five steps: who takes action 1 is paid 1 and 0 for the other; half of them always take the one."""
    episodes = []
    for e in range(64):
        action = np.full(5, e % 2)
        obs = np.zeros((6, 2), np.float32)
        episodes.append(data.Episode(obs, action, action.astype(np.float32), False, True))
    data.write(data.of_episodes(Box((2,)), Discrete(2, "int64"), episodes), tmp_path / "set")
    return {
        "algo": {"name": "dt", "lr": 0.01, "target_return": 5.0, "return_scale": 5.0, "normalize_obs": True},
        "data": {"input": str(tmp_path / "set"), "updates_per_iteration": 100, "validation": 0.2},
        "network": {"hidden": [16], "use_prev_action": False, "use_prev_reward": True},
        "replay": {"batch_size": 64, "burn_in": 0}, "run": {"compile_cache": False, "log": ["jsonl"]},
        "stop": {"updates": 300},
    }  # fmt: skip


@pytest.mark.slow
def test_it_obeys(tmp_path):
    cfg = config.from_dict(obedient(tmp_path))
    with Session(cfg) as session:
        session.start()
        for _ in range(3):
            session.advance()
        state = jax.device_get(session.run.program.keep(session.state).learner)
    spec, seen = build_data.inputs(cfg).spec, {"obs": jnp.zeros((1, 2)), "prev_reward": jnp.zeros((1,))}

    @jax.jit
    def act(target):
        algo = dt.make(dataclasses.replace(cfg.algo, target_return=target), spec, cfg.network)
        return algo.act(algo.actor(state), seen, algo.carry(1), jax.random.key(0), explore=False).action[0]

    assert (int(act(5.0)), int(act(0.0))) == (1, 0)
