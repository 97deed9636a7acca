"""Dropout and running statistics of networks: learning changes them, acting reads them."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl import train
from jrl.algos import gradients
from jrl.algos.optimizers import AdamW
from jrl.learn import parallel
from jrl.metrics import loggers
from jrl.types import Discrete, InputError, UpdateAux

KEY = jax.random.key(0)
NORMED = dataclasses.replace(fakes.NETWORK, norm="batch_renorm")
CRITIC_NORMED = dataclasses.replace(fakes.NETWORK, critic_norm="batch_renorm")
DROPPED = dataclasses.replace(fakes.NETWORK, norm="layer", dropout=0.3)
QLEARNING = some_quick(["dqn", "iqn"], "dqn")
CRITICS = some_quick([("sac", fakes.BOX), ("sac", Discrete(3)), ("td3", fakes.BOX)], ("sac", fakes.BOX))


def made(name, network, action=None, **overrides):
    """The algorithm, its state away from the first parameters, and data."""
    spec = fakes.spec(action, name=name)
    algo = fakes.make(name, spec, network, **overrides)
    state = fakes.made_up_state(algo)
    return algo, state, fakes.data(algo, spec, algo.actor(state))


def statistics(params):
    """Path -> each running statistic."""
    found = {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree.leaves_with_path(params)}
    return {path: np.asarray(x) for path, x in found.items() if "running_" in path}


def after_a_batch(x, kernel, bias, valid):
    """Statistics of the first layer's outputs after one learning pass over the valid rows."""
    y = (np.asarray(x, np.float64) @ np.asarray(kernel) + np.asarray(bias))[np.asarray(valid)]
    return 0.01 * y.mean(0), 0.99 + 0.01 * y.var(0)


def check_layer(before, after, x, valid):
    """The statistics of the first of `after`'s layers are those of one learning pass over `x`."""
    mean, var = after_a_batch(x, before["Dense_0"]["kernel"], before["Dense_0"]["bias"], valid)
    normed = after["BatchRenorm_0"]
    np.testing.assert_allclose(normed["running_mean"], mean, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(normed["running_var"], var, rtol=1e-3, atol=1e-5)
    assert normed["running_steps"] == 1


STILL = {"lr": 0.0, "optimizer": AdamW(weight_decay=0.5), "max_grad_norm": 1e-3}  # none of them concerns statistics


@pytest.mark.parametrize("name", QLEARNING)
def test_q_learning_moves_statistics_by_its_batch(name):
    algo, state, data = made(name, NORMED, **STILL)
    after, _ = jax.jit(algo.update)(state, data, KEY)
    torso = (lambda params: params["base"]["torso"]) if name == "iqn" else (lambda params: params["torso"])
    check_layer(torso(state.params), torso(after.params), data.obs, data.weight > 0)
    moved = statistics(after.params)
    fakes.assert_same(*(jax.tree.map_with_path(lambda p, x: () if "running" in str(p[-1]) else x, s.params)
                        for s in (state, after)))  # fmt: skip
    target = statistics(after.target_params)
    assert moved.keys() == target.keys() and len(moved) == 6


@pytest.mark.parametrize(("name", "action"), CRITICS)
def test_critics_and_policy_move_their_own(name, action):
    algo, state, data = made(name, NORMED, action, policy_every=1, **STILL)
    after, _ = jax.jit(algo.update)(state, data, KEY)
    valid = data.weight > 0
    old, new = state.params["actor"]["policy_torso"], after.params["actor"]["policy_torso"]
    check_layer(old, new, data.obs, valid)
    layers = "value_torso" if isinstance(action, Discrete) else "layers"
    x = data.obs if isinstance(action, Discrete) else np.concatenate([data.obs, data.action], -1)
    for i in range(2):
        old, new = (fakes.part(s.params["critic"][layers], i) for s in (state, after))
        check_layer(old, new, x, valid)
    for path, x in statistics(after.target_params["critic"]).items():  # they follow as all parameters of critics do
        first, moved = (statistics(s.params["critic"])[path] for s in (state, after))
        np.testing.assert_allclose(x, 0.995 * first + 0.005 * moved, rtol=1e-5)


def test_ppo_moves_statistics_of_its_values():
    algo, state, data = made("ppo", CRITIC_NORMED, num_epochs=1, num_minibatches=1, **STILL)
    after, _ = jax.jit(algo.update)(state, data, KEY)
    obs, valid = data.obs.reshape(-1, 4), data.mask.reshape(-1)
    check_layer(state.params["value_torso"], after.params["value_torso"], obs, valid)
    assert not statistics(after.params["policy_torso"])


@pytest.mark.parametrize("name", some_quick(["dqn", "sac", "td3"], "sac"))
def test_acting_reads_the_statistics_row_by_row(name):
    action = None if name == "dqn" else fakes.BOX
    algo, state, data = made(name, NORMED, action)
    obs, carry = np.asarray(data.obs[:4]), algo.carry(4)
    act = jax.jit(lambda state, obs, carry: algo.act(algo.actor(state), obs, carry, KEY, False).action)
    outputs = jax.jit(algo.outputs)
    moved = lambda path, x: x + 1.0 if getattr(path[-1], "key", "") == "running_mean" else x
    other = state.replace(params=jax.tree.map_with_path(moved, state.params))
    assert fakes.differ(outputs(state, obs), outputs(other, obs))
    other_rows = np.concatenate([obs[:1], 100.0 * obs[1:]])
    fakes.assert_close(act(state, obs, carry)[0], act(state, other_rows, carry)[0], atol=1e-6)


@pytest.mark.parametrize("name", some_quick(["dqn", "sac"], "dqn"))
def test_two_devices_average_their_changes(name):
    """And the statistics of each are those of its own rows."""
    algo, state, data = made(name, NORMED, None if name == "dqn" else fakes.BOX, **STILL)
    update = jax.jit(algo.update)
    halves = [jax.tree.map(lambda x, i=i: x[i * len(x) // 2 : (i + 1) * len(x) // 2], data) for i in range(2)]
    alone = [statistics(update(state, half, KEY)[0].params["critic" if name == "sac" else "torso"]) for half in halves]
    spec = fakes.spec(None if name == "dqn" else fakes.BOX, name=name)
    mapped = fakes.make(name, spec, NORMED, axis_name=parallel.AXIS, **STILL)
    mesh, rows = parallel.make_mesh(2), parallel.PER_DEVICE
    inputs, outputs = (
        (parallel.REPLICATED, rows, parallel.REPLICATED),
        (
            parallel.REPLICATED,
            UpdateAux(parallel.REPLICATED, rows),
        ),
    )
    run = parallel.pmap(mapped.update, mesh, inputs, outputs)
    after = run(parallel.replicate(state, mesh), parallel.shard(data, mesh), KEY)[0]
    found = statistics(jax.device_get(after.params)["critic" if name == "sac" else "torso"])
    assert not np.allclose(*(x["BatchRenorm_0.running_mean" if name == "dqn" else "layers.BatchRenorm_0.running_mean"]
                             for x in alone), atol=1e-5)  # fmt: skip
    for path, x in found.items():
        np.testing.assert_allclose(x, (alone[0][path] + alone[1][path]) / 2, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    ("name", "action", "more"),
    some_quick(
        [("ppo", None, {}), ("sac", fakes.BOX, {}), ("td3", fakes.BOX, {}), ("dqn", None, {"noisy": True})],
        ("sac", fakes.BOX, {}),
        ("dqn", None, {"noisy": True}),
    ),
)
def test_dropout_is_drawn_in_learning_alone(name, action, more):
    """Two updates from the same state differ by their keys, as without dropout they do not; acting has none."""
    algo, state, data = made(name, DROPPED, action, **more)
    plain = fakes.make(name, fakes.spec(action, name=name), dataclasses.replace(DROPPED, dropout=0.0), **more)
    obs = np.asarray(data.obs[0] if algo.on_policy else data.obs[:4])
    for explore in (True, False):
        act = lambda a, explore=explore: a.act(a.actor(state), obs, a.carry(len(obs)), KEY, explore)
        fakes.assert_same(act(algo).action, act(plain).action)
    update = jax.jit(fakes.learn(algo))
    one, same, other = (update(state, data, jax.random.key(i))[0].params for i in (1, 1, 2))
    fakes.assert_same(one, same)
    assert fakes.differ(one, other)
    assert fakes.differ(one, jax.jit(fakes.learn(plain))(state, data, jax.random.key(1))[0].params)


def test_gradients_taken_and_given_have_the_changes():
    algo, state, data = made("dqn", NORMED, lr=0.1)
    make = lambda: fakes.make("dqn", fakes.spec(name="dqn"), NORMED, lr=0.1)
    with gradients.taken():
        taking = make()
    with gradients.given():
        giving = make()
    none = jax.eval_shape(taking.init, KEY).opt_state
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), none)
    taken = jax.jit(taking.update)(state.replace(opt_state=none), data, KEY)[0]
    fakes.assert_same(taken.params, state.params)
    given = gradients.Given(state.opt_state, taken.opt_state.mean(), jnp.zeros((), bool))
    after = jax.jit(giving.update)(state.replace(opt_state=given), data, KEY)[0]
    fakes.assert_close(after.params, jax.jit(algo.update)(state, data, KEY)[0].params, atol=1e-6)


def test_other_algorithms_refuse_both():
    for network, key in ((DROPPED, "dropout"), (NORMED, "norm")):
        with pytest.raises(
            InputError, match=rf"network\.{key}: a2c supports neither .*: use ppo, appo, dqn, iqn, sac or"
        ):
            fakes.make("a2c", None, network)


@pytest.mark.slow
def test_sac_learns_pendulum_with_dropout_and_layer_norm(tmp_path):
    """DroQ's critics (arXiv:2110.02034); random actions have a return of about -1,200."""
    given = ["network.hidden=[64,64]", "network.critic_norm=layer", "network.critic_dropout=0.01", "env.backend=jax"]
    given += ["replay.batch_size=128", "run.log=[jsonl]", "evaluation.every=2000"]
    settings = [f"--set={text}" for text in given]
    assert train.main(["sac", *settings, "--stop=env_steps=10000", f"--out={tmp_path / 'run'}"]) == 0
    assert loggers.read_rows(tmp_path / "run" / "result.jsonl")[-1]["evaluation/return"] > -350
