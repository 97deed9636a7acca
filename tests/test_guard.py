"""Updates that are not finite: noticed where they happen, the state before them kept, the run ended or rolled back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jrl import train
from jrl.fields.data import Fresh
from jrl.learn import guard, parallel
from jrl.metrics import loggers
from jrl.run.store import checkpoint
from jrl.types import NOT_FINITE, Algo, UpdateAux

SMALL = [
    "--set=env.backend=jax", "--set=env.num_envs=4", "--set=network.hidden=[8]", "--set=run.log=[jsonl]",
    "--set=run.compile_cache=false", "--set=run.report_every=50", "--set=rollout.iterations_per_call=2",
]  # fmt: skip
REPLAY = [
    "--set=replay.batch_size=8", "--set=replay.learning_starts=32", "--set=replay.capacity=400",
    "--set=replay.train_every=8", "--set=replay.updates_per_step=0.25",
]  # fmt: skip


@struct.dataclass
class State:
    params: dict


def toy(loss):
    """An algorithm of one number; its update subtracts the mean of the batch."""

    def update(state, batch, key):
        params = {"w": state.params["w"] - jnp.mean(batch)}
        return state.replace(params=params), UpdateAux({"loss/value": loss(batch), "other": jnp.nan})

    init = lambda key: State({"w": jnp.zeros(())})
    return Algo(init, lambda state: state.params, lambda n: (), lambda *args: None, update, data=Fresh())


GOOD, BAD = jnp.asarray([1.0, 3.0]), jnp.asarray([1.0, jnp.inf])


@pytest.mark.parametrize(
    ("loss", "flags"), [(jnp.sum, (True, True)), (lambda batch: jnp.zeros(()), (False, True))], ids=["loss", "params"]
)
@pytest.mark.parametrize("on", ["cpu", "accelerator"])
def test_the_state_before_the_first_bad_update_stays(monkeypatch, loss, flags, on):
    if on == "accelerator":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    algo = guard.refuse_bad_updates(toy(loss), jax.ShapeDtypeStruct((2,), jnp.float32))
    state, update = algo.init(jax.random.key(0)), jax.jit(algo.update)
    keys = jax.random.split(jax.random.key(1), 5)
    shares = []
    for key, batch in zip(keys, (GOOD, GOOD, BAD, GOOD, BAD * 2)):
        state, aux = update(state, batch, key)
        shares.append(float(aux.metrics[NOT_FINITE]))
    assert shares == [0, 0, 1, 1, 1]
    assert float(state.state.params["w"]) == -4.0
    fault = state.fault
    assert (bool(fault.found), bool(fault.in_loss), bool(fault.in_params)) == (True, *flags)
    np.testing.assert_array_equal(fault.batch, BAD)  # of the first
    np.testing.assert_array_equal(fault.key, jax.random.key_data(keys[2]))


def test_a_loss_alone_is_enough():
    algo = guard.refuse_bad_updates(toy(lambda batch: jnp.log(-batch[0])), jax.ShapeDtypeStruct((2,), jnp.float32))
    state, _ = algo.update(algo.init(jax.random.key(0)), GOOD, jax.random.key(1))
    assert bool(state.fault.in_loss) and not bool(state.fault.in_params)
    assert float(state.state.params["w"]) == 0


def test_what_is_kept_holds_the_rows_of_all_devices(four_devices):
    algo = guard.refuse_bad_updates(toy(jnp.sum), jax.ShapeDtypeStruct((8,), jnp.float32), axis_name=parallel.AXIS)
    update = parallel.pmap(
        lambda s, b, k: algo.update(s, b, k)[0],
        four_devices,
        (parallel.REPLICATED, parallel.PER_DEVICE, parallel.REPLICATED),
        parallel.REPLICATED,
    )
    batch = jnp.arange(8.0).at[0].set(jnp.nan)  # of one device; the parameters are not averaged
    state = update(algo.init(jax.random.key(0)), batch, jax.random.key(1))
    np.testing.assert_array_equal(state.fault.batch, batch)


@pytest.mark.parametrize(
    ("name", "more", "kind"),
    [
        pytest.param("ppo", ["--set=rollout.length=16"], "rollout", marks=pytest.mark.slow),
        ("dqn", REPLAY, "batch"),
    ],
)
def test_a_run_stops_with_a_bundle(name, more, kind, tmp_path, capsys):
    out = tmp_path / "a"
    args = ["--algo", name, "--env", "CartPole-v1", *SMALL, *more, "--set=algo.lr=1e38", "--stop=env_steps=5000"]
    assert train.main([*args, "--out", str(out)]) == 1
    text = capsys.readouterr()
    (bundle,) = (out / "nonfinite").iterdir()
    assert f"python -m jrl.debug {bundle}" in text.err and "Traceback" not in text.err
    meta = checkpoint.read_meta(bundle)
    assert meta["nonfinite"]["kind"] == kind and meta["nonfinite"]["found"]
    assert meta["env_steps"] < 5000
    learner = checkpoint.read(bundle, "learner")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(learner["params"]))
    rows = loggers.read_rows(out / "result.jsonl")
    assert NOT_FINITE not in rows[-1]


@pytest.mark.slow
def test_a_rollback_goes_on_from_the_last_checkpoint_with_smaller_steps(tmp_path, capsys):
    out = tmp_path / "a"
    args = ["--algo", "dqn", "--env", "CartPole-v1", *SMALL, *REPLAY, "--set=checkpoint.every=16"]
    args += ["--set=algo.lr=[[0, 1e-3], [200, 1e-3], [201, 3e38]]", "--set=run.on_nonfinite=rollback"]
    args += ["--set=run.rollback_lr=1e-41"]
    assert train.main([*args, "--stop=env_steps=800", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "rollback 1 of 3: from" in text and "resume: changed: algo.lr" in text
    steps = [row["env_steps"] for row in loggers.read_rows(out / "result.jsonl")]
    assert steps == sorted(set(steps)) and steps[-1] >= 800
    assert len(list((out / "nonfinite").iterdir())) == 1


@pytest.mark.slow
def test_rollbacks_come_to_an_end(tmp_path, capsys):
    args = ["--algo", "ppo", "--env", "CartPole-v1", *SMALL, "--set=rollout.length=16", "--set=algo.lr=1e38"]
    args += ["--set=run.on_nonfinite=rollback", "--set=run.max_rollbacks=1", "--set=run.rollback_lr=0.9"]
    assert train.main([*args, "--stop=env_steps=5000", "--out", str(tmp_path / "a")]) == 1
    assert "rollback 1 of 1: from the beginning" in capsys.readouterr().out


@pytest.mark.slow
def test_without_a_watch_a_run_goes_on(tmp_path):
    args = ["--algo", "ppo", "--env", "CartPole-v1", *SMALL, "--set=rollout.length=16", "--set=algo.lr=1e38"]
    assert (
        train.main([*args, "--set=run.on_nonfinite=ignore", "--stop=env_steps=500", "--out", str(tmp_path / "a")]) == 0
    )
    assert loggers.read_rows(tmp_path / "a" / "result.jsonl")[-1]["loss/policy"] is None
