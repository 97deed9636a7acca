"""Batch renormalisation (arXiv:1702.03275): learning uses the batch's statistics, acting the running statistics.

The running statistics are parameters whose names begin with `running_`, so a State, checkpoints, exports and target
networks hold them. They have no gradient. In its place a learning pass returns their change, which `agent.descend` adds
to them: changes are averaged over chunks of a batch and over devices as gradients are.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jrl.networks.dense import parameter

# settings of CrossQ (arXiv:1902.05605)
_WARM_UP = 100_000  # first learning passes, in which r is 1 and d is 0
_R_MAX, _D_MAX = 3.0, 5.0
_MOMENTUM, _EPS = 0.99, 1e-3


@jax.custom_vjp
def _with_change(y, running, change):
    """Returns y [N, F]; `change`, a tree like `running`, is the gradient of `running`."""
    return y


def _backward(change, gradient):
    return gradient, change, jax.tree.map(jnp.zeros_like, change)


_with_change.defvjp(lambda y, running, change: (y, change), _backward)


class BatchRenorm(nn.Module):
    """Normalises each column of x [N, F], with the parameters `scale` and `bias` [F] (algorithm 1).

    A learning pass returns scale ((x - m) / s r + d) + bias with the batch's mean m and deviation s. Without gradient:

        r = clip(s / running s, 1 / 3, 3)        d = clip((m - running m) / running s, -5, 5)

    Other passes return scale (x - running m) / running s + bias.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, valid=None):
        """Returns [N, F]; `valid` [N] bool: rows of a learning pass that m and s are computed of."""
        ones, zeros, size = nn.initializers.ones, nn.initializers.zeros, x.shape[-1:]
        make: Any = functools.partial(parameter, self)
        scale, bias = make("scale", ones, size), make("bias", zeros, size)
        running = make("running_mean", zeros, size), make("running_var", ones, size), make("running_steps", zeros, ())
        mean, var, steps = jax.lax.stop_gradient(running)
        x, std = x.astype(jnp.float32), jnp.sqrt(var + _EPS)
        if valid is None:
            y = (x - mean[None]) / std[None]
        else:
            weight = valid.astype(jnp.float32)[:, None] / jnp.maximum(valid.sum(), 1)
            m = jnp.sum(weight * x, 0)
            v = jnp.sum(weight * jnp.square(x - m[None]), 0)
            s = jnp.sqrt(v + _EPS)
            is_warm = steps >= _WARM_UP
            r = jnp.where(is_warm, jnp.clip(s / std, 1.0 / _R_MAX, _R_MAX), 1.0)
            d = jnp.where(is_warm, jnp.clip((m - mean) / std, -_D_MAX, _D_MAX), 0.0)
            r, d = jax.lax.stop_gradient((r, d))
            y = (x - m[None]) / s[None] * r[None] + d[None]
            moved = (1.0 - _MOMENTUM) * (m - mean), (1.0 - _MOMENTUM) * (v - var), jnp.ones(())
            change = jax.tree.map(lambda x: jnp.where(valid.any(), x, 0.0), jax.lax.stop_gradient(moved))
            y = _with_change(y, running, change)
        return (scale[None] * y + bias[None]).astype(self.dtype)
