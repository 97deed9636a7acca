"""What networks begin with: the algorithm's own choice, unless the config makes one."""

import fakes
import jax
import pytest
from cases import some_quick

from jrl.networks import NetworkConfig


@pytest.mark.parametrize(
    ("name", "init", "biases"),
    some_quick(
        [
            ("dqn", None, True),  # uniform, as its table in docs/networks.md says
            ("dqn", "orthogonal", False),
            ("pqn", None, False),
            ("pqn", "uniform", True),
            ("sac", None, False),
            ("td3", "uniform", True),
            ("ppo", None, False),
        ],
        ("dqn", None, True),
        ("dqn", "orthogonal", False),
        ("ppo", None, False),
    ),
)
def test_an_algorithm_has_initial_weights_of_its_own(name, init, biases):
    algo = fakes.make(name, network=NetworkConfig(hidden=(8,), init=init))
    params = jax.jit(algo.init)(jax.random.key(0)).params
    found = [bool(x.any()) for path, x in jax.tree.leaves_with_path(params) if "bias" in jax.tree_util.keystr(path)]
    assert len(found) >= 2 and set(found) == {biases}
