"""Mechanisms that SAC and TD3 share: initial random steps, and step sizes of actor and critics."""

import dataclasses

import jax.numpy as jnp
import pytest
import test_sac
import test_td3
from cases import some_quick
from fakes import assert_same, differ

# their settings, and the step size of each part
OF = {"sac": test_sac, "td3": test_td3}
RATES = {
    "sac": {"critic": "lr", "actor": "actor_lr", "log_ent_coef": "ent_coef_lr"},
    "td3": {"critic": "lr", "actor": "actor_lr"},
}


@pytest.mark.parametrize("name", some_quick(OF, "sac"))
def test_step_sizes_are_schedules_and_separate(name):
    of, rates = OF[name], RATES[name]
    _, state, batch = of.setting()
    updated = lambda cfg, state: of.update(dataclasses.replace(of.BASE, **cfg), state, batch)[0].params
    moved = lambda cfg, state: {part for part, x in updated(cfg, state).items() if differ(x, state.params[part])}
    always, later = (((0, a), (10, a), (10, 0.1), (20, 0.1)) for a in (0.1, 0.0))
    for part, field in rates.items():
        cfg = {**dict.fromkeys(rates.values(), later), field: always}
        assert moved(cfg, state) == {part}
    assert moved(cfg, state.replace(env_steps=jnp.uint32(2**31))) == set(rates)
    # null: that of the critics
    spelt = dict.fromkeys(rates.values(), always)
    assert_same(updated({**dict.fromkeys(rates.values()), "lr": always}, state), updated(spelt, state))
