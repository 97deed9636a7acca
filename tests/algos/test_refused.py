"""What an algorithm cannot be made for: action spaces, explorations and networks, each with its mend."""

import fakes
import pytest

from jrl import algos
from jrl.algos.exploration import Gaussian, ParameterNoiseAction, ParameterNoiseQ, Stochastic
from jrl.errors import InputError
from jrl.fields import hyper
from jrl.networks import NetworkConfig
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple

BOX, CHOICES = Box((2,), low=-1.0, high=1.0), MultiDiscrete((3, 2))
MASKED = Dict((("obs", Box((3,))), ("action_mask", Box((3,), "int8", 0, 1))))
SHARED = NetworkConfig(shared=True)
MEMORY = NetworkConfig(hidden=(8,), core=hyper.Gru(size=5))
TREES = (MultiBinary((3,)), Dict((("a", BOX),)), Tuple((BOX, Discrete(2))))
INTEGERS = Box((2,), "int32", 0, 5)
SPACES = [
    *(("dqn", space, r"dqn needs a Discrete action space.*: use .*ppo") for space in (Box((2,)), CHOICES)),
    ("pqn", Box((2,)), r"pqn needs a Discrete action space, not .*: use ppo"),
    ("sac", CHOICES, "sac needs a Discrete or float Box action space, not .*: use ppo"),
    ("iql", CHOICES, "iql needs a Discrete or float Box action space, not .*: use ppo"),
    ("td3", CHOICES, "td3 needs a float Box action space, not .*: use ppo"),
    ("td3", Discrete(3), "td3 needs a float Box action space, not .*: use ppo, a2c, .*, vmpo, .* or awr"),
    *((name, space, "use ppo, a2c, impala, appo, trpo, vmpo or awr")
      for name in ("sac", "td3", "iql") for space in TREES),
    *((name, INTEGERS, "no algorithm handles a Box of integers") for name in ("sac", "td3", "iql")),
    *((name, Box((2,), low=low, high=high), r"env\.normalize_actions=true")
      for name in ("sac", "td3", "iql") for low, high in ((-2.0, 2.0), ((-1.0, -2.0), 1.0))),
    *((name, Box((2,)), "finite bounds") for name in ("sac", "td3", "iql")),
    # and every kind of actions that is not an algorithm's own
    *((name, space, "for a team of agents, not for a single agent" if name == "vdn" else "action space")
      for name in algos.names() for space in (Discrete(3), CHOICES, BOX, INTEGERS, *TREES)
      if space is INTEGERS or not fakes.acts_in(name, type(space))),
]  # fmt: skip
SETTINGS = [
    *((name, BOX, {"network": SHARED}, r"network\.shared") for name in ("sac", "td3", "iql")),
    ("sac", BOX, {"observation": MASKED}, "no choices to mask"),
    ("pqn", Discrete(3), {"exploration": Gaussian()},
     r"exploration: expected EpsilonGreedy or .*, got Gaussian"),
    ("td3", BOX, {"exploration": Stochastic()}, r"exploration: expected Gaussian or .*, got Stochastic"),
    ("dqn", Discrete(3), {"exploration": ParameterNoiseQ(), "network": MEMORY},
     r"parameter_noise: not with network.core gru: use epsilon_greedy"),
    ("td3", BOX, {"exploration": ParameterNoiseAction(), "network": MEMORY},
     r"parameter_noise: not with network\.core gru"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "action", "message"), SPACES, ids=str)
def test_an_action_space_that_does_not_fit(name, action, message):
    with pytest.raises(InputError, match=message) as e:
        fakes.make(name, EnvSpec(fakes.observes(name, fakes.VECTOR), action, 8))
    assert name == "vdn" or "action space" in str(e.value)


@pytest.mark.parametrize(("name", "action", "options", "message"), SETTINGS)
def test_settings_that_do_not_fit(name, action, options, message):
    env_spec = fakes.spec(action, options.get("observation", fakes.VECTOR))
    with pytest.raises(InputError, match=message):
        fakes.make(name, env_spec, **{key: value for key, value in options.items() if key != "observation"})


def test_an_unknown_algorithm():
    with pytest.raises(InputError, match=r"unknown algorithm 'pop': choose one of .*ppo"):
        algos.get("pop")
    for name in algos.names():
        assert algos.get_config_class(name) is algos.get(name).Config
        assert algos.get_config_class(name)().validate() == []
