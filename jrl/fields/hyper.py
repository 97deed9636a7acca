"""Types that configs share with the code below them. Imports no jax: configs are read before jax loads.

`NetworkConfig` is not in `jrl.networks`, whose package imports jax.
"""

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len

from jrl.fields.bounds import Count, Few, Name, Positive, Schedule, Unit, Width, Widths
from jrl.fields.validation import section

__all__ = ["NO_OPTIONS", "Core", "Gru", "Gtrxl", "Lru", "Lstm", "NetworkConfig", "NoCore", "Options", "Schedule"]


class Options(dict):
    """A dict that can be part of a static argument."""

    def __hash__(self):  # type: ignore[override]  # a dict has none
        return hash(repr(sorted(self.items(), key=repr)))


NO_OPTIONS = Options()


@section
class NoCore:
    """No memory: the network's outputs depend on the present observation alone."""

    name: Literal["none"] = "none"


@section
class Lstm:
    """Long short-term memory (Hochreiter and Schmidhuber, 1997)."""

    name: Literal["lstm"] = "lstm"
    size: Width = 128  # of its state, and of its output


@section
class Gru:
    """Gated recurrent unit (arXiv:1406.1078)."""

    name: Literal["gru"] = "gru"
    size: Width = 128  # of its state, and of its output


@section
class Gtrxl:
    """Attention over the latest steps, with gates instead of residual connections (GTrXL, arXiv:1910.06764)."""

    name: Literal["gtrxl"] = "gtrxl"
    size: Width = 64  # of its input, its layers and its output
    layers: Few = 1  # transformer blocks
    heads: Width = 2  # of attention, in each block
    head_size: Width = 32  # of a query, key and value
    memory: Width = 32  # earlier steps of the episode that each layer attends to
    mlp: Width = 64  # width of the dense layer in each block
    # of the gates: how much of a block is passed by at the start
    gate_bias: Annotated[float, Interval(ge=-100, le=100)] = 2.0


@section
class Lru:
    """Linear recurrent units (arXiv:2303.06349): trained in a number of steps that grows with the logarithm of time."""

    name: Literal["lru"] = "lru"
    size: Width = 128  # of its input and its output
    state: Width = 64  # complex numbers of each layer's state
    layers: Few = 1
    r_min: Unit = 0.9  # least modulus of the eigenvalues at the start: how fast the state forgets
    r_max: Unit = 0.999  # greatest


Core = NoCore | Lstm | Gru | Gtrxl | Lru


@section
class NetworkConfig:
    """Shape of the policy and value networks. Hashable, so that it can be a static argument.

    What a network reads goes through an encoder for each array of the observation, then through the torso's dense
    layers, the core and the heads. Of an observation that is one image, the torso is its encoder.
    """

    # auto, mlp: dense layers, behind a CNN for each image; nature_cnn, impala, small_cnn: that CNN;
    # package.module:name: the user's own (docs/networks.md)
    torso: Name = "auto"
    torso_options: dict[str, Any] = NO_OPTIONS  # keyword arguments of the user's own torso
    hidden: Widths = (64, 64)  # widths of the dense layers, first to last
    critic_hidden: Widths | None = None  # the same of critics and value networks alone; null: as hidden
    activation: Literal["tanh", "relu", "gelu", "silu", "elu"] = "tanh"  # after each dense layer
    head_hidden: Widths = ()  # widths of each head's own dense layers, behind the torso
    shared: bool = False  # one torso for policy and value
    # parts of a Dict observation, such as state or goal/velocity, that value and critics read and the policy does not
    value_inputs: Annotated[tuple[Name, ...], Len(0, 100)] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the layers; parameters and outputs are float32
    # initial weights. orthogonal; lecun: normal, variance 1 / inputs, flax's default; uniform: in +-1 / sqrt(inputs),
    # biases too, torch's default; null: the algorithm's own, of which docs/networks.md has a table
    init: Literal["orthogonal", "lecun", "uniform"] | None = None
    layer_norm: bool = False  # normalise each dense layer's output
    critic_layer_norm: bool = False  # the same in critics and value networks alone, not in what acts
    log_std_init: Annotated[float, Interval(ge=-20, le=20)] = 0.0  # initial log standard deviation of a Gaussian policy
    state_dependent_std: bool = False  # the network predicts log_std; false: one free parameter per action element
    # path of an array of the observation, such as camera or goal/0 -> its encoder: flat (as it is, integers one-hot),
    # mlp, embedding, nature_cnn, impala, small_cnn
    encoders: dict[str, str] = NO_OPTIONS
    encoder_hidden: Widths = (64,)  # widths of the encoder mlp, and of embeddings (the last one)
    flatten: bool = False  # all of an observation as one vector, images too
    image_max: Positive = 255.0  # images of uint8 are divided by it
    transform: Name | None = None  # pure function of one observation, package.module:name, in front of the network
    core: Core = NoCore()  # memory, behind the torso
    max_seq_len: Count | None = None  # steps that a gradient goes back through; null: a rollout's, and 20 with replay
    use_prev_action: bool = False  # the previous action is part of what the network reads
    use_prev_reward: bool = False  # the previous reward is

    def __post_init__(self):
        for name in ("torso_options", "encoders"):
            object.__setattr__(self, name, Options(getattr(self, name)))

    @property
    def recurrent(self) -> bool:
        return not isinstance(self.core, NoCore)

    def of_critics(self) -> "NetworkConfig":
        """Returns what critics and value networks are built by."""
        hidden = self.hidden if self.critic_hidden is None else self.critic_hidden
        return dataclasses.replace(self, hidden=hidden, layer_norm=self.layer_norm or self.critic_layer_norm)

    def sharing_faults(self) -> list[str]:
        """Returns why the value cannot have what the policy has not, one message each."""
        if not self.shared:
            return []
        errors = []
        if self.value_inputs:
            errors.append(
                "network.value_inputs: expected a torso for the value alone, got network.shared true, by which the "
                "policy reads what the value reads: set network.shared: false, or leave this out"
            )
        if self.critic_layer_norm:
            errors.append(
                "network.critic_layer_norm: expected a torso for the value alone, got network.shared true: set "
                "network.shared: false, or network.layer_norm: true for both"
            )
        if self.critic_hidden is not None:
            errors.append(
                "network.critic_hidden: expected a torso for the value alone, got network.shared true: set "
                "network.shared: false, or leave this out: network.hidden are the widths of both"
            )
        return errors
