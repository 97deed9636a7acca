"""The surface that RLlib's users know, over the same loop as `python -m jrl.train`: names of `jrl.rllib`.

from jrl.api import PPOConfig

with PPOConfig().environment("CartPole-v1").training(lr=3e-4).build() as algo:
    for _ in range(10):
        print(algo.train()["episode_return_mean"])
    path = algo.save()
"""

from typing import TYPE_CHECKING

from jrl.rllib import algorithm_class as algorithm_class
from jrl.rllib import config_class as config_class
from jrl.rllib import find_public as __getattr__  # noqa: F401
from jrl.rllib import list_public as __dir__  # noqa: F401

if TYPE_CHECKING:
    from jrl.rllib.algorithm import Algorithm as Algorithm
    from jrl.rllib.builder import AlgorithmConfig as AlgorithmConfig
