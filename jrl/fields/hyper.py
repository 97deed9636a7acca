"""The `network` section of a config. Imports no jax, unlike `jrl.networks`: configs are read before jax loads."""

import dataclasses
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jrl.fields.bounds import Count, Few, Name, Positive, Unit, Width, Widths
from jrl.fields.validation import section


class Options(dict):
    """A hashable dict, which may be part of a static argument."""

    def __hash__(self):  # type: ignore[override]  # dict is not hashable
        return hash(repr(sorted(self.items(), key=repr)))


NO_OPTIONS = Options()


@section
class NoCore:
    """No memory: the network reads the present observation only."""

    name: Literal["none"] = "none"


@section
class Lstm:
    """Long short-term memory (Hochreiter and Schmidhuber, 1997)."""

    name: Literal["lstm"] = "lstm"
    size: Width = 128  # width of the state and of the output


@section
class Gru:
    """Gated recurrent unit (arXiv:1406.1078)."""

    name: Literal["gru"] = "gru"
    size: Width = 128  # width of the state and of the output


@section
class Gtrxl:
    """Attention over the latest steps, with gates instead of residual connections (GTrXL, arXiv:1910.06764)."""

    name: Literal["gtrxl"] = "gtrxl"
    size: Width = 64  # width of the input, the layers and the output
    layers: Few = 1  # transformer blocks
    heads: Width = 2  # attention heads of each block
    head_size: Width = 32  # width of a query, key and value
    memory: Width = 32  # earlier steps of the episode that each layer attends to
    mlp: Width = 64  # width of the dense layer in each block
    # initial bias of the gates: the larger, the more of a block's input bypasses the block
    gate_bias: Annotated[float, Interval(ge=-100, le=100)] = 2.0


@section
class Lru:
    """Linear recurrent units (arXiv:2303.06349): a parallel scan trains a sequence of n steps in log(n) passes."""

    name: Literal["lru"] = "lru"
    size: Width = 128  # width of the input and the output
    state: Width = 64  # complex numbers of each layer's state
    layers: Few = 1
    r_min: Unit = 0.9  # least initial modulus of the eigenvalues: the smaller, the faster the state forgets
    r_max: Unit = 0.999  # greatest initial modulus of the eigenvalues


Core = NoCore | Lstm | Gru | Gtrxl | Lru


Norm = Literal["none", "layer", "batch_renorm"]
DenseTorso = Literal["mlp", "simba", "simba_v2", "bro", "flash"]
RESIDUAL = ("simba", "simba_v2", "bro", "flash")  # torsos of residual blocks
Dropout = Annotated[float, Interval(ge=0, lt=1)]


@section
class NetworkConfig:
    """Shape of the policy and value networks. Hashable, so that it can be a static argument.

    The layers in order: an encoder for each array of the observation, the torso (dense layers), the core (memory) and
    the heads. If the observation is a single image, the torso is its encoder.
    """

    # auto, mlp: dense layers, after a CNN for each image; nature_cnn, impala, small_cnn: this CNN;
    # simba, simba_v2, bro, flash: residual blocks, one for each width of hidden; package.module:name: your own torso
    # (docs/networks.md)
    torso: Name = "auto"
    critic_torso: DenseTorso | None = None  # torso of critics and value networks; null: as torso
    torso_options: dict[str, Any] = NO_OPTIONS  # keyword arguments of your own torso
    hidden: Widths = (64, 64)  # widths of the dense layers, first to last
    critic_hidden: Widths | None = None  # widths for critics and value networks; null: as hidden
    activation: Literal["tanh", "relu", "gelu", "silu", "elu"] = "tanh"  # after each dense layer
    head_hidden: Widths = ()  # widths of each head's own dense layers, after the torso
    shared: bool = False  # one torso for policy and value
    # parts of a Dict observation, such as state or goal/velocity, for value and critics only, not for the policy
    value_inputs: tuple[Name, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the layers; parameters and outputs are float32
    # initial weights. orthogonal; lecun: normal, variance 1 / inputs, flax's default; uniform: in +-1 / sqrt(inputs),
    # biases too, torch's default; null: the algorithm's own, see the table of docs/networks.md
    init: Literal["orthogonal", "lecun", "uniform"] | None = None
    unit_weights: bool = False  # keep the weights of each output of the dense layers at norm 1 (arXiv:2502.07523)
    norm: Norm = "none"  # normalisation of each dense layer's output; batch_renorm: arXiv:1702.03275
    norm_after_activation: bool = False  # batch_renorm of the inputs and activations of dense layers, as in CrossQ
    critic_norm: Norm | None = None  # norm of critics and value networks; null: as norm
    dropout: Dropout = 0.0  # share of each dense layer's outputs that learning sets to 0; acting uses all of them
    critic_dropout: Dropout | None = None  # dropout of critics and value networks; null: as dropout
    log_std_init: Annotated[float, Interval(ge=-20, le=20)] = 0.0  # initial log standard deviation of a Gaussian policy
    state_dependent_std: bool = False  # the network predicts log_std; false: one free parameter per action element
    # path of an array of the observation, such as camera or goal/0 -> its encoder: flat (the values, integers one-hot),
    # mlp, embedding, grid, nature_cnn, impala, small_cnn
    encoders: dict[str, str] = NO_OPTIONS
    encoder_hidden: Widths = (64,)  # widths of the encoder mlp; the last is the width of embeddings and of grid's
    flatten: bool = False  # concatenate the observation to one vector, images too
    image_max: Positive = 255.0  # divisor of uint8 images
    transform: Name | None = None  # pure function of one observation, package.module:name, before the network
    core: Core = NoCore()  # memory, after the torso
    max_seq_len: Count | None = None  # steps of backpropagation through time; null: a whole rollout, 20 with replay
    use_prev_action: bool = False  # add the previous action to the observation
    use_prev_reward: bool = False  # add the previous reward to the observation

    def __post_init__(self):
        for name in ("torso_options", "encoders"):
            object.__setattr__(self, name, Options(getattr(self, name)))

    @property
    def recurrent(self) -> bool:
        return not isinstance(self.core, NoCore)

    @property
    def drops(self) -> bool:
        """Returns whether a network has dropout."""
        return self.dropout > 0 or (self.critic_dropout or 0.0) > 0

    @property
    def has_statistics(self) -> bool:
        """Returns whether a network has running statistics."""
        return "batch_renorm" in (self.norm, self.critic_norm) or "flash" in (self.torso, self.critic_torso)

    @property
    def has_unit_weights(self) -> bool:
        """Returns whether a network has weights that stay at norm 1."""
        return self.unit_weights or not {"simba_v2", "flash"}.isdisjoint((self.torso, self.critic_torso))

    def of_critics(self) -> "NetworkConfig":
        """Returns the section for critics and value networks."""
        own = {name: getattr(self, f"critic_{name}") for name in ("torso", "hidden", "norm", "dropout")}
        return dataclasses.replace(self, **{name: value for name, value in own.items() if value is not None})

    def sharing_faults(self) -> list[str]:
        """Returns a message for each key that needs a separate torso for the value but has a shared torso."""
        fixes = {
            "value_inputs": "leave network.value_inputs out: a shared torso would let the policy read them",
            "critic_torso": "network.torso for both",
            "critic_norm": "network.norm for both",
            "critic_dropout": "network.dropout for both",
            "critic_hidden": "leave network.critic_hidden out: network.hidden has the widths of both",
        }
        return [
            f"network.{key}: expected a torso for the value alone, got network.shared true: set network.shared: false, "
            f"or {fix}"
            for key, fix in fixes.items()
            if self.shared and getattr(self, key) != getattr(NetworkConfig, key)  # the default
        ]

    def torso_faults(self) -> list[str]:
        """Returns a message for each key that does not fit residual blocks or `critic_torso`."""
        errors: list[str] = []
        if self.critic_torso is not None and self.torso not in ("auto", "mlp", *RESIDUAL):
            errors.append(
                f"network.critic_torso: expected network.torso auto, mlp, {', '.join(RESIDUAL)}, got {self.torso}: "
                "leave network.critic_torso out"
            )
        if self.norm_after_activation and not {self.torso, self.critic_torso}.isdisjoint(RESIDUAL):
            errors.append("network.norm_after_activation: residual blocks have their own norms: set it to false")
        for key, own in (("network.", self), ("network.critic_", self.of_critics())):
            if own.torso not in RESIDUAL or (own is not self and own == self):
                continue
            if len(set(own.hidden)) != 1:
                errors.append(
                    f"{key}hidden: expected one width, repeated for each block of {own.torso}, got {list(own.hidden)}: "
                    f"set for example {key}hidden=[128, 128]"
                )
            if own.norm != "none":
                errors.append(f"{key}norm: expected none, as {own.torso} has its own, got {own.norm}: set it to none")
            if own.dropout:
                errors.append(f"{key}dropout: expected 0, as {own.torso} has none, got {own.dropout}: set it to 0")
        return errors
