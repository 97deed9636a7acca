"""Types that configs share with the code below them. Imports no jax: configs are read before jax loads.

`NetworkConfig` is not in `jrl.networks`, whose package imports jax.
"""

import dataclasses
from typing import Literal

# A hyper-parameter that may change during training: one number, or a piecewise linear function of the environment
# steps, such as ((0, 3e-4), (1_000_000, 0)). The first step is 0.
Schedule = float | tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """Shape of the policy and value networks. Hashable, so that it can be a static argument."""

    torso: Literal["auto", "mlp", "nature_cnn", "impala"] = "auto"  # auto: nature_cnn for images, mlp for vectors
    hidden: tuple[int, ...] = (64, 64)  # widths of the dense layers, first to last
    activation: Literal["tanh", "relu", "gelu", "silu", "elu"] = "tanh"  # after each dense layer
    head_hidden: tuple[int, ...] = ()  # widths of each head's own dense layers, behind the torso
    shared: bool = False  # one torso for policy and value
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the activations; parameters are always float32
    orthogonal: bool = True  # orthogonal initial weights; false: flax's default
    layer_norm: bool = False  # normalise each dense layer's output
    log_std_init: float = 0.0  # initial log standard deviation of a Gaussian policy
    state_dependent_std: bool = False  # the network predicts log_std; false: one free parameter per action element
