"""Linear recurrent units: a diagonal linear recurrence with parallel steps (arXiv:2303.06349).

    h_t = exp(-exp(nu) + i exp(theta)) h_{t-1} + exp(gamma) (B u_t)        y_t = Re(C h_t) + D u_t

The complex state is two f32 arrays. All rows are computed together, in steps that double the number of summed rows
(Hillis and Steele, 1986). Compared with `jax.lax.associative_scan` this is more work in fewer operations: as fast for
128 rows on CPU, and compiled in half the time.
"""

import math

import jax
import jax.numpy as jnp

from jrl.fields import hyper
from jrl.networks.recurrent import Core, dense, kernels, layer_norm, layer_norm_params
from jrl.ops import random


def lru(cfg: hyper.Lru, in_size: int, *, dtype: str = "float32", weights: str | None = None) -> Core:
    """Makes a Core with the state {"real", "imaginary": f32 [B, layers, state]}.

    A layer is x + (W g + b) sigmoid(W' g + b') with g = gelu(LRU(layer_norm(x))).
    """
    size, states, layers = cfg.size, cfg.state, cfg.layers

    def init(key):
        first, *rest = jax.random.split(key, layers + 1)
        params = {"input_kernel": kernels(first, in_size, size, init=weights), "input_bias": jnp.zeros(size)}
        for layer, key in enumerate(rest):
            ring, phase, b, c, d, glu = jax.random.split(key, 6)
            nu, theta, gamma = _eigenvalues(cfg, ring, phase)
            block = {
                **layer_norm_params("norm", size),
                "nu_log": nu,
                "theta_log": theta,
                "gamma_log": gamma,
                # b: real and imaginary parts side by side; c: one above the other
                "b_kernel": random.normal(b, (size, 2 * states)) / math.sqrt(2 * size),
                "c_kernel": random.normal(c, (2 * states, size)) / math.sqrt(states),
                "d": random.normal(d, (size,)),
                "glu_kernel": kernels(glu, size, size, 2, init=weights),
                "glu_bias": jnp.zeros(2 * size),
            }
            params |= {f"layer_{layer}_{name}": value for name, value in block.items()}
        return params

    def carry(batch_size):
        return {name: jnp.zeros((batch_size, layers, states)) for name in ("real", "imaginary")}

    def unroll(params, x, carry, reset):
        x, reset = dense(params, "input", x.swapaxes(0, 1), dtype), reset.T
        episode = jnp.cumsum(reset, 0, dtype=jnp.int32) - reset  # number of resets before each row
        after = []
        for layer in range(layers):
            prefix = f"layer_{layer}_"
            block = {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
            start = carry["real"][:, layer], carry["imaginary"][:, layer]
            normed = layer_norm(block, "norm", x)
            parts = jnp.split(dense(block, "b", normed, dtype), 2, -1)
            scale = jnp.exp(block["gamma_log"])[None, None]
            states = _recurrence(_multiplier(block), episode, (scale * parts[0], scale * parts[1]), start)
            y = dense(block, "c", jnp.concatenate(states, -1), dtype) + block["d"][None, None] * normed
            value, gate = jnp.split(dense(block, "glu", jax.nn.gelu(y), dtype), 2, -1)
            x = x + value * jax.nn.sigmoid(gate)
            after.append([jnp.where(reset[-1][:, None], 0.0, part[-1]) for part in states])
        real, imaginary = (jnp.stack(parts, 1) for parts in zip(*after, strict=True))
        return x.swapaxes(0, 1), {"real": real, "imaginary": imaginary}

    def step(params, x, carry):
        y, carry = unroll(params, x[:, None], carry, jnp.zeros((x.shape[0], 1), bool))
        return y[:, 0], carry

    return Core(size, init, carry, step, unroll)


def _eigenvalues(cfg, ring, phase):
    """Returns log nu, theta and gamma, f32 [P]: eigenvalues uniform in a ring (lemma 3.2), gamma by section 3.4."""
    area = random.uniform(ring, (cfg.state,)) * (cfg.r_max**2 - cfg.r_min**2) + cfg.r_min**2
    area = jnp.clip(area, 1e-8, 1.0 - 1e-6)  # squared moduli; the logarithms below need 0 < area < 1
    angle = 2.0 * math.pi * jnp.maximum(random.uniform(phase, (cfg.state,)), 1e-8)
    return jnp.log(-0.5 * jnp.log(area)), jnp.log(angle), 0.5 * jnp.log(1.0 - area)


def _multiplier(params):
    """Returns the real and imaginary parts of the eigenvalues, f32 [P]."""
    modulus, angle = jnp.exp(-jnp.exp(params["nu_log"])), jnp.exp(params["theta_log"])
    return modulus * jnp.cos(angle), modulus * jnp.sin(angle)


def _times(a, b):
    """Multiplies two complex numbers (real, imaginary)."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _scan(multiplier, episode, inputs, reverse=False):
    """Returns h_t = multiplier h_{t-1} + inputs_t, without the first term at the start of an episode.

    multiplier (real, imaginary) [P], episode i32 [L, N], inputs (real, imaginary) [L, N, P]. `reverse` uses h_{t+1}
    instead of h_{t-1}.
    """
    length = len(episode)

    def shifted(x, rows, fill):
        """Shifts x by `rows` rows (backwards if `reverse`), with `fill` at the end."""
        pads = (0, length, 0) if reverse else (length, 0, 0)
        x = jax.lax.pad(x, jnp.asarray(fill, x.dtype), (pads, *[(0, 0, 0)] * (x.ndim - 1)))
        return jax.lax.dynamic_slice_in_dim(x, rows if reverse else length - rows, length)

    def double(_, state):
        h, power, rows = state  # sums over `rows` rows, and multiplier ** rows
        same = (episode == shifted(episode, rows, -1))[..., None]
        earlier = tuple(jnp.where(same, shifted(part, rows, 0.0), 0.0) for part in h)
        more = _times(tuple(part[None, None] for part in power), earlier)
        return tuple(part + extra for part, extra in zip(h, more)), _times(power, power), 2 * rows

    # a loop, because XLA on CPU fuses unrolled code and would recompute sine and cosine for each element
    return jax.lax.fori_loop(0, (length - 1).bit_length(), double, (inputs, multiplier, 1))[0]


@jax.custom_vjp
def _recurrence(multiplier, episode, inputs, start):
    """Returns the states (real, imaginary) f32 [L, N, P] of all rows; as `_scan`, with the state `start` [N, P]."""
    return _recurrence_forward(multiplier, episode, inputs, start)[0]


def _recurrence_forward(multiplier, episode, inputs, start):
    first = _times(tuple(part[None] for part in multiplier), start)
    states = _scan(multiplier, episode, tuple(part.at[0].add(more) for part, more in zip(inputs, first)))
    return states, (multiplier, episode, states, start)


def _recurrence_backward(residuals, grads):
    multiplier, episode, states, start = residuals
    conjugate = multiplier[0], -multiplier[1]
    dinputs = _scan(conjugate, episode, grads, reverse=True)
    same = (episode[1:] == episode[:-1])[..., None]
    before = tuple(
        jnp.concatenate([first[None], jnp.where(same, part[:-1], 0.0)]) for first, part in zip(start, states)
    )
    dmultiplier = tuple(jnp.sum(part, (0, 1)) for part in _times(dinputs, (before[0], -before[1])))
    dstart = _times(tuple(part[None] for part in conjugate), tuple(part[0] for part in dinputs))
    return dmultiplier, None, dinputs, dstart


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)
