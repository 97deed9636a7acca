"""Memory behind the torso: `make(config.core, in_size) -> Core(size, init, carry, step, unroll)`.

    core = make(hyper.Lstm(size=128), in_size=64)
    params = core.init(key)
    y, carry = core.step(params, x, core.carry(batch_size))       # acting: x [B, 64] -> [B, 128]
    y, carry = core.unroll(params, x, carry, reset)               # learning: x [N, L, 64], reset [N, L] -> [N, L, 128]

`unroll` is `step` over L, where the memory after a row with `reset` is that of an episode's start. Parameters and
memory are f32 (and i32), whatever `dtype` products are computed in.
"""

from collections.abc import Callable

from jrl.errors import InputError
from jrl.fields import hyper
from jrl.networks.attention import gtrxl
from jrl.networks.lru import lru
from jrl.networks.recurrent import Core, gru, lstm

__all__ = ["Core", "faults", "make"]

_MAKERS: dict[type, Callable[..., Core]] = {hyper.Lstm: lstm, hyper.Gru: gru, hyper.Gtrxl: gtrxl, hyper.Lru: lru}


def faults(cfg: hyper.Core) -> list[str]:
    """Lists the faults in the combination of a core's numbers, one message each."""
    if not isinstance(cfg, hyper.Lru) or cfg.r_min < cfg.r_max:
        return []
    return [f"network.core.r_min: expected a number below network.core.r_max {cfg.r_max:g}, got {cfg.r_min:g}"]


def make(cfg: hyper.Core, in_size: int, *, dtype: str = "float32", weights: str | None = None) -> Core:
    """Builds a core.

    Args:
      cfg: Lstm, Gru, Gtrxl or Lru.
      in_size: elements of each input vector.
      dtype: of the products, float32 or bfloat16; what comes out is f32.
      weights: `NetworkConfig.init`, of all kernels, but for the recurrent ones of LSTM and GRU, which are orthogonal.
        Biases are the core's own.
    Raises:
      InputError: its numbers do not fit together, or `cfg` is NoCore.
    """
    if type(cfg) not in _MAKERS:
        raise InputError(f"network.core.name: expected lstm, gru, gtrxl or lru, got {cfg.name}")
    errors = faults(cfg)
    if errors:
        raise InputError(*errors)
    return _MAKERS[type(cfg)](cfg, in_size, dtype=dtype, weights=weights)
