"""Recurrent cores after the torso: `make(config.core, in_size) -> Core(size, init, carry, step, unroll)`.

    core = make(hyper.Lstm(size=128), in_size=64)
    params = core.init(key)
    y, carry = core.step(params, x, core.carry(batch_size))       # acting: x [B, 64] -> [B, 128]
    y, carry = core.unroll(params, x, carry, reset)               # learning: x [N, L, 64], reset [N, L] -> [N, L, 128]

`unroll` is `step` over L rows; after a row with `reset` the state is the initial state. Parameters and states are f32
(and i32), whatever the `dtype` of the products.
"""

from collections.abc import Callable

from jrl.errors import InputError
from jrl.fields import hyper
from jrl.networks.attention import gtrxl
from jrl.networks.lru import lru
from jrl.networks.recurrent import Core, gru, lstm

_MAKERS: dict[type, Callable[..., Core]] = {hyper.Lstm: lstm, hyper.Gru: gru, hyper.Gtrxl: gtrxl, hyper.Lru: lru}


def faults(cfg: hyper.Core) -> list[str]:
    """Returns one message per invalid combination of a core's hyper-parameters."""
    if not isinstance(cfg, hyper.Lru) or cfg.r_min < cfg.r_max:
        return []
    return [f"network.core.r_min: expected a number below network.core.r_max {cfg.r_max:g}, got {cfg.r_min:g}"]


def make(cfg: hyper.Core, in_size: int, *, dtype: str = "float32", weights: str | None = None) -> Core:
    """Builds a core.

    Args:
      cfg: Lstm, Gru, Gtrxl or Lru.
      in_size: size of each input vector.
      dtype: dtype of the products, float32 or bfloat16; outputs are f32.
      weights: `NetworkConfig.init` for all kernels except the recurrent kernels of LSTM and GRU, which are orthogonal.
        Initial biases depend on the core.
    Raises:
      InputError: invalid combination of hyper-parameters, or `cfg` is NoCore.
    """
    if type(cfg) not in _MAKERS:
        raise InputError(f"network.core.name: expected lstm, gru, gtrxl or lru, got {cfg.name}")
    errors = faults(cfg)
    if errors:
        raise InputError(*errors)
    return _MAKERS[type(cfg)](cfg, in_size, dtype=dtype, weights=weights)
