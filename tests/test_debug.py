"""Poisoned transitions among good ones, and bundles on disk: what `jrl.debug` names."""

import functools
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "algos"))
import fakes

from jrl import config, debug
from jrl.fields import hyper
from jrl.networks import NetworkConfig
from jrl.rollout import unroll
from jrl.run import build
from jrl.run.store import checkpoint
from jrl.types import Batch, Discrete, SequenceBatch, UpdateAux, Window

KEY = jax.random.key(3)
NAN, INF = jnp.nan, jnp.inf
LINEAR = NetworkConfig(hidden=(), init="lecun")


@functools.cache
def setting(name, network=LINEAR, **options):
    spec = fakes.spec(name=name)
    algo = fakes.make(name, spec, network, **options)
    state = fakes.perturbed(jax.jit(algo.init)(jax.random.key(0)))
    return algo, state, fakes.data(algo, spec, algo.actor(state), T=4)


def changed(data, *changes):
    """`data` with other values: (index, {field: value}) each."""
    for index, fields in changes:
        data = data.replace(**{name: getattr(data, name).at[index].set(value) for name, value in fields.items()})
    return data


# ---------------------------------------------------------------- replay


def test_dqn_a_reward_whose_square_overflows():
    algo, state, batch = setting("dqn")
    found = debug.explain(algo, state, changed(batch, (7, {"reward": 1e38, "weight": 1.0})), KEY)
    assert not found.finite and "loss/value" in found.bad
    first, file, text, callers = found.operation.splitlines()
    assert "square" in first and file.startswith("  jrl/algos/q_heads.py:")
    assert "jnp.square(x)" in text
    assert "jrl/algos/dqn.py:" in callers
    assert [(t.row, t.alone, t.non_finite) for t in found.transitions] == [((7,), True, ())]
    assert found.transitions[0].fields["reward"] == np.float32(1e38)
    assert "row 7: enough by itself" in str(found) and "\n  reward    1.e+38\n" in str(found)


def test_dqn_rows_that_are_not_finite_come_first():
    algo, state, batch = setting("dqn")
    poison = changed(batch, (3, {"reward": -1e38, "weight": 1.0}), (9, {"obs": NAN, "weight": 1.0}))
    found = debug.explain(algo, state, poison, KEY)
    assert found.note.startswith("batch.obs is not finite before the update") and found.operation == ""
    assert [(t.row, t.alone, t.non_finite) for t in found.transitions] == [((9,), True, ("obs",)), ((3,), True, ())]
    assert "row 9: obs not finite, enough by itself" in str(found)


def test_void_rows_are_left_out():
    algo, state, batch = setting("dqn")
    void = changed(batch, (5, {"obs": NAN, "reward": INF, "weight": 0.0}))
    assert debug.explain(algo, state, void, KEY).finite
    found = debug.explain(algo, state, changed(void, (7, {"reward": 1e38, "weight": 1.0})), KEY)
    assert [t.row for t in found.transitions] == [(7,)]
    assert "\n  jrl/algos/q_heads.py:" in found.operation


def test_a_weight_that_is_not_finite():
    algo, state, batch = setting("dqn")
    found = debug.explain(algo, state, changed(batch, (2, {"weight": NAN})), KEY)
    assert [(t.row, t.non_finite) for t in found.transitions] == [((2,), ("weight",))]


def test_the_state_is_named_where_it_is_the_cause():
    algo, state, batch = setting("dqn")
    params = jax.tree.map(lambda x: x.at[0].set(NAN), state.params)
    found = debug.explain(algo, state.replace(params=params), batch, KEY)
    assert found.note.startswith("state.params.") and found.operation == ""
    assert found.transitions == ()
    assert "the state is the cause" in found.note


def test_what_is_finite_is_said_to_be():
    found = debug.explain(*setting("dqn"), KEY)
    assert found.finite and found.operation == ""
    assert str(found).startswith("The update is finite when repeated")


# ---------------------------------------------------------------- rollouts


def test_an_observation_that_is_not_finite():
    algo, state, rollout = setting("a2c")
    found = debug.explain(algo, state, changed(rollout, ((1, 3), {"obs": NAN, "mask": True})), KEY)
    assert found.note.startswith("batch.obs is not finite before the update")
    assert [(t.row, t.non_finite, t.alone) for t in found.transitions] == [((1, 3), ("obs",), True)]


def test_a_last_observation_belongs_to_the_step_before():
    algo, state, rollout = setting("a2c")
    valid = {"mask": True, "terminated": False, "truncated": False}
    rollout = changed(rollout, ((3, 6), valid))
    rollout = rollout.replace(last_obs=rollout.last_obs.at[6].set(NAN))
    found = debug.explain(algo, state, rollout, KEY)
    assert [(t.row, t.non_finite, t.alone) for t in found.transitions] == [((3, 6), ("next_obs",), True)]


# ---------------------------------------------------------------- algorithms made for it


def rows(reward, weight=None):
    n = len(reward)
    zeros = jnp.zeros((n,))
    weight = jnp.ones((n,)) if weight is None else jnp.asarray(weight, jnp.float32)
    return Batch(zeros[:, None], zeros, jnp.asarray(reward, jnp.float32), zeros, zeros[:, None], weight, zeros)


def learner(loss):
    """An algorithm whose one parameter becomes the loss."""

    def update(state, batch, key):
        value = loss(state["params"], batch)
        return {"params": value}, UpdateAux({"loss/value": value, "value/untold": value * INF})

    return types.SimpleNamespace(update=update)


STATE = {"params": jnp.ones(())}


def test_rows_that_are_enough_only_together():
    algo = learner(lambda params, batch: jnp.sum(batch.weight * batch.reward))
    found = debug.explain(algo, STATE, rows([1.0, 2e38, 3.0, 2.5e38, 4.0]), KEY)
    assert "reduce_sum" in found.operation and "\n    algo = learner(" in found.operation
    assert [(t.row, t.alone) for t in found.transitions] == [((3,), False), ((1,), False)]
    assert "No row is enough by itself; these 2 of 5" in found.note


def test_every_row_is_enough():
    algo = learner(lambda params, batch: jnp.sum(jnp.where(batch.weight > 0, batch.reward / (params - 1.0), 0.0)))
    found = debug.explain(algo, STATE, rows(np.arange(1.0, 41.0)), KEY)
    assert "div" in found.operation
    assert [t.row for t in found.transitions] == [(39,), (38,)]  # for an example
    assert found.note.startswith("Many rows are each enough: the state or a setting")
    assert found.note.endswith("The largest number in the state is 1, in params.")


def test_a_void_row_that_gets_into_the_result():
    algo = learner(lambda params, batch: jnp.mean(batch.weight * batch.reward))
    found = debug.explain(algo, STATE, rows([1.0, NAN, 2.0], [1.0, 0.0, 1.0]), KEY)
    assert "masked rows" in found.note


def test_long_rows_are_summed_up():
    image = np.zeros((5, 4), np.float32)
    image[2, 2] = np.nan
    assert debug.compact(image) == "float32[5, 4] 0 .. 0, 1 not finite"
    assert debug.compact(np.arange(20.0, dtype=np.float32)) == "float32[20] 0 .. 19"
    assert debug.compact(np.float32(2.5)) == "2.5"


def operation(loss):
    """The operation and its line in an update whose loss is not finite for rewards [1, 4, 2] and parameter 1."""
    first, file, text, *_ = debug.explain(learner(loss), STATE, rows([1.0, 4.0, 2.0]), KEY).operation.splitlines()
    assert f"/{Path(__file__).name}:" in file
    return first, text.strip()


def test_a_branch_that_is_not_taken_is_no_finding_unless_its_gradient_is():
    def loss(params, batch):
        harmless = jnp.where(batch.weight > 0, batch.reward, -jnp.inf)  # a mask
        return jnp.sum(jnp.exp(harmless - jnp.max(harmless))) + jnp.sum(jnp.log(params - batch.reward))

    assert operation(loss)[1].endswith("jnp.sum(jnp.log(params - batch.reward))")

    def gradient(params, batch):
        def root(params):
            return jnp.sum(jnp.where(params > 1, jnp.sqrt(params - 1), 0.0) * batch.reward * batch.weight)

        return jax.grad(root)(params)

    first, text = operation(gradient)
    assert "sqrt(params - 1)" in text and "in the backward pass" in first


def test_inside_a_loop_and_a_jitted_function():
    @jax.jit
    def inner(x):
        return jnp.reciprocal(x)

    def loss(params, batch):
        return jax.lax.scan(lambda carry, x: (carry + inner(x - 4.0) * 0.0, None), params, batch.reward)[0]

    assert operation(loss)[1] == "return jnp.reciprocal(x)"


# ---------------------------------------------------------------- bundles


def bundle(directory, algo_name, poison, *overrides):
    """A bundle as training writes it; `poison` changes the data."""
    spec = fakes.spec(Discrete(3))
    overrides = ["network.hidden=[]", "network.init=lecun", *overrides]
    cfg = config.load(None, overrides, algo=algo_name, env="CartPole-v1", stop=["env_steps=100000"])
    algo = build.algorithm(cfg, spec)
    state = fakes.perturbed(jax.jit(algo.init)(jax.random.key(0)))
    data = poison(fakes.data(algo, spec, algo.actor(state), T=4))
    kind = "batch" if isinstance(data, Batch) else "rollout"
    note = {"iteration": 12, "key": jax.random.key_data(KEY).tolist(), "kind": kind, "found": ["loss", "params"]}
    counters = {"iteration": 12, "env_steps": 960, "time_s": 1.0}
    meta = checkpoint.build_meta(cfg, spec, counters=counters, nonfinite=note)
    path = directory / "nonfinite" / "12"
    checkpoint.write(path, {"learner": state, "batch": data}, meta)
    return path, algo, state, data


def test_command_on_a_replay_bundle(tmp_path, capsys):
    path, *_ = bundle(tmp_path, "dqn", lambda b: changed(b, (7, {"obs": NAN, "weight": 1.0})))
    assert debug.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("not finite in training, before iteration 12: loss and params\n")
    assert "batch.obs is not finite before the update" in out and "row 7: obs not finite, enough by itself" in out


def test_command_on_a_finite_bundle_of_a_run(tmp_path, capsys):
    bundle(tmp_path, "dqn", lambda b: b)
    assert debug.main([str(tmp_path)]) == 1
    assert "The update is finite when repeated" in capsys.readouterr().out


def test_a_rollout_comes_back_as_it_was(tmp_path):
    """With distributions among the extras, stored as dicts, and a running return, which `act` does not give."""
    options = ["algo.kl_coef=0.2", "algo.normalize_reward=true"]
    path, algo, state, data = bundle(tmp_path, "ppo", lambda r: r, *options)
    meta, (found, restored, batch, key) = debug.load(path)
    assert meta["nonfinite"]["iteration"] == 12
    fakes.assert_same(restored, jax.device_get(state))
    fakes.assert_same(batch, jax.device_get(data))
    assert jax.tree.structure(batch) == jax.tree.structure(data)
    assert (jax.random.key_data(key) == jax.random.key_data(KEY)).all()
    assert found.on_policy and algo.on_policy


@pytest.mark.slow
def test_sequences_of_replay_come_back_with_their_memory(tmp_path):
    def sequences(batch):
        rows = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], 3, *x.shape[1:]))
        window = Window(rows(batch.obs), like.extras["carry"], jnp.zeros((32, 3), bool))
        reward, ahead = rows(batch.reward)[:, :2], jnp.tile(jnp.array([1, 2]), (32, 1))
        return SequenceBatch(window, rows(batch.action)[:, :2], reward, reward, ahead, reward, batch.index)

    spec, network = fakes.spec(name="dqn"), NetworkConfig(hidden=(), init="lecun", core=hyper.Lstm(size=8))
    like = unroll.rollout_like(spec, fakes.make("dqn", spec, network), length=1, num_envs=32)
    like = jax.tree.map(lambda x: jnp.ones(x.shape[1:], x.dtype), like)
    path, algo, _, data = bundle(tmp_path, "dqn", sequences, "network.core={name: lstm, size: 8}")
    _, (_, _, batch, _) = debug.load(path)
    fakes.assert_same(batch, jax.device_get(data))
    assert isinstance(batch, SequenceBatch) and algo.sequences


def test_bad_input_is_named(tmp_path, capsys):
    assert debug.main([str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    path, *_ = bundle(tmp_path, "dqn", lambda b: b)
    meta = checkpoint.read_meta(path)
    plain = tmp_path / "checkpoints" / "1"
    meta.pop("nonfinite")
    checkpoint.write(plain, {"learner": checkpoint.read(path, "learner")}, meta)
    assert debug.main([str(plain)]) == 2
    assert "expected the bundle of a non-finite update" in capsys.readouterr().err


def test_a_rollout_that_does_not_fit_is_named(tmp_path, capsys):
    path, _, state, data = bundle(tmp_path, "ppo", lambda r: r)
    poorer = data.replace(extras={name: x for name, x in data.extras.items() if name != "log_prob"})
    other = tmp_path / "other"
    checkpoint.write(other, {"learner": state, "batch": poorer}, checkpoint.read_meta(path))
    assert debug.main([str(other)]) == 2
    assert "extras.log_prob is not in it" in capsys.readouterr().err
