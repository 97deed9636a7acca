"""What TD3 has for data sets, TD3+BC and ReBRAC, against the equations written out, and what cannot be together."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_td3
from cases import some_quick
from fakes import assert_close, assert_same

from jrl.algos import td3
from jrl.types import NEXT_ACTION, InputError

KEY, N = test_td3.KEY, test_td3.N
BASE = dataclasses.replace(test_td3.BASE, num_critics=2)
FLAGS = {
    "TD3+BC": {"bc_alpha": 2.5},
    "actor": {"actor_bc": 0.7},
    "critic": {"critic_bc": 0.4},
    "ReBRAC": {"actor_bc": 0.7, "critic_bc": 0.4},
}


def start():
    """(state, batch) of `test_td3`; of a third of the transitions the data have no next action."""
    _, state, batch = test_td3.setting(BASE)
    assert 5 < int(batch.extras[NEXT_ACTION]["valid"].sum()) < N - 5
    return state, batch


def update(cfg, state, batch):
    return jax.jit(td3.make(cfg, test_td3.SPEC, fakes.NETWORK).update)(state, batch, KEY)


@pytest.mark.parametrize("flags", some_quick(FLAGS, "TD3+BC"))
def test_one_update_by_hand(flags):
    cfg = dataclasses.replace(BASE, **FLAGS[flags])
    state, batch = start()
    after, aux = update(cfg, state, batch)
    params, _, metrics, _ = test_td3.reference(cfg, state, batch, KEY)
    assert_close(dict(after.params), params, atol=2e-6, rtol=3e-5)
    for name in ("value/target", "loss/policy"):
        np.testing.assert_allclose(aux.metrics[name], metrics[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_stands_where_the_data_have_no_next_action_is_not_read():
    cfg = dataclasses.replace(BASE, critic_bc=0.4)
    state, batch = start()
    known = batch.extras[NEXT_ACTION]
    other = jnp.where(known["valid"][:, None], known["action"], jnp.nan)
    spoiled = batch.replace(extras={NEXT_ACTION: {**known, "action": other}})
    assert_same(update(cfg, state, batch), update(cfg, state, spoiled))


def test_what_cannot_be_together():
    both = td3.Config(bc_alpha=2.5, actor_bc=0.1).validate()
    assert len(both) == 1
    assert "set bc_alpha (TD3+BC) or actor_bc (ReBRAC), and the other to null" in both[0]
    assert td3.Config(bc_alpha=2.5, critic_bc=0.1).validate() == td3.Config(actor_bc=0.1).validate() == []


def test_a_buffer_without_the_next_action_is_named():
    state, batch = start()
    with pytest.raises(
        InputError, match=r"critic_bc: the batch has no next action.*next_action=True, or set critic_bc"
    ):
        update(dataclasses.replace(BASE, critic_bc=0.4), state, batch.replace(extras={}))


def test_it_reads_what_its_options_need():
    assert td3.Config(bc_alpha=2.5, actor_bc=None).reads == td3.Config(actor_bc=0.5).reads == ()
    assert td3.Config(critic_bc=0.0).reads == (NEXT_ACTION,)
