"""Symmetry of a task (Mittal et al., 2024, arXiv:2403.04359): steps and their mirror images, for PPO. `algo.symmetry`.

A user's differentiable function maps observations [N, *] and actions [N, *] to their M mirror images [M N, *]: all
images by one reflection or rotation, then those by the next. Its arguments are observations of the environment, action
masks included, and actions of the policy. An image of an action must not depend on the observation.

    def mirror(obs, action):                       # CartPole: left becomes right
        return -obs, 1 - action
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl import registry, spaces
from jrl.algos import parts, sequences
from jrl.algos.agent import Agent
from jrl.algos.custom_loss import RowsLoss
from jrl.errors import InputError
from jrl.fields.bounds import Name, NonNegative
from jrl.fields.validation import section
from jrl.networks import NetworkConfig
from jrl.types import Array, Box, EnvSpec, Metrics, PyTree, Rollout

_KEY = "algo.symmetry.path"


@section
class Symmetry:
    """Mirror images of steps, with the advantage, target and old log-probability of the step."""

    path: Name  # function (obs, action) -> (obs, action) of the images: package.module:name, or a registered name
    augment: bool = True  # add the images of a minibatch's steps to the minibatch
    # weight of the squared error between the mode for an image and the image of the mode, for Box actions
    mirror_loss: NonNegative = 0.0


@struct.dataclass
class Images:
    """M mirror images of each row; leaves [..., M, *]."""

    obs: PyTree  # as the network reads them
    action: PyTree
    given: PyTree  # the row's own observation [..., *] before transform and normalisation; () without a mirror loss


def faults(cfg: Symmetry | None, kl_coef: Any) -> list[str]:
    """Returns one message per invalid combination of values."""
    if cfg is None:
        return []
    messages = []
    if not cfg.augment and not cfg.mirror_loss:
        messages.append("symmetry changes nothing: set symmetry.augment=true, or symmetry.mirror_loss above 0")
    if cfg.augment and kl_coef is not None:
        messages.append(
            "symmetry.augment: the policy before the update, from which kl_coef measures, is not known for mirror "
            "images: use target_kl, or leave kl_coef out"
        )
    return messages


def check(cfg: Symmetry | None, spec: EnvSpec, network: NetworkConfig) -> None:
    """Raises InputError if the function does not return mirror images, or the run cannot use them."""
    if cfg is None:
        return
    if network.recurrent:
        raise InputError(
            "algo.symmetry: the memory of mirror images is not known: set network.core.name=none, or leave "
            "algo.symmetry out"
        )
    is_real = lambda leaf: isinstance(leaf, Box) and np.issubdtype(np.dtype(leaf.dtype), np.floating)
    if cfg.mirror_loss and not all(is_real(leaf) for _, leaf in spaces.leaves(spec.action)):
        raise InputError(
            f"algo.symmetry.mirror_loss: expected float Box actions, got {spec.action}: use algo.symmetry.augment alone"
        )
    function = _load(cfg)
    given = spaces.elements(spec.observation, 2), spaces.elements(spec.action, 2)
    try:
        found = jax.eval_shape(function, *given)
    except Exception as e:  # user code, or any error of jax for code that cannot be traced
        reason = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        raise InputError(f"{_KEY} {cfg.path}: it cannot be traced for the run's spaces: {reason}") from e
    shape = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
    count = len(jax.tree.leaves(found)[0]) // 2 if jax.tree.leaves(found) else 0
    wanted = jax.tree.map(lambda x: ((2 * max(1, count), *x.shape[1:]), str(x.dtype)), given)
    if shape(found) != wanted:
        raise InputError(
            f"{_KEY} {cfg.path}: expected mirror images (obs, action) of M N rows, for N = 2 rows {wanted}, got "
            f"{shape(found)}: return arrays of the same shapes and dtypes as the arguments, M times as many rows"
        )


def _load(cfg: Symmetry) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    function: Any = registry.load(cfg.path, _KEY)
    registry.check_call(function, f"{_KEY} {cfg.path}", ("obs", "action"))
    return function


def images(cfg: Symmetry | None, agent: Agent, obs_stats: PyTree, rollout: Rollout) -> PyTree:
    """Returns the Images [T, B] of a rollout; () without symmetry."""
    if cfg is None:
        return ()
    batch, flat = rollout.reward.shape, sequences.flat
    unflat = lambda x: jnp.moveaxis(x.reshape(-1, *batch, *x.shape[1:]), 0, 2)
    action = parts.zero_masked(rollout.mask, rollout.action)
    obs, action = jax.tree.map(unflat, _load(cfg)(flat(rollout.obs), flat(action)))
    return Images(agent.observer.see(obs_stats, obs), action, rollout.obs if cfg.mirror_loss else ())


def with_images(cfg: Symmetry, agent: Agent, loss: RowsLoss) -> RowsLoss:
    """Returns the loss of Rows [N] and their images, weighted as in one batch; metrics are those of the rows.

    Args:
      loss: loss of Rows without images.
    """

    def symmetric(params: PyTree, rows: Any) -> tuple[Array, Metrics]:
        value, metrics = loss(params, rows)
        mirrored, num = _of_images(rows)
        if cfg.augment:
            value = (value + num * loss(params, mirrored)[0]) / (1 + num)
        if cfg.mirror_loss:
            error = _mirror_error(cfg, agent, params, rows, mirrored)
            value = value + cfg.mirror_loss * error
            metrics = metrics | {"loss/mirror": error}
        return value, metrics

    return symmetric


def _of_images(rows: Any) -> tuple[Any, int]:
    """Returns the images of Rows [N] as Rows [N M], those of the same row side by side, and M."""
    num = jax.tree.leaves(rows.images.action)[0].shape[1]
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    repeated = jax.tree.map(lambda x: jnp.repeat(x, num, axis=0), replace(rows, obs=(), action=(), images=()))
    return replace(
        repeated, obs=jax.tree.map(flat, rows.images.obs), action=jax.tree.map(flat, rows.images.action)
    ), num


def _mirror_error(cfg: Symmetry, agent: Agent, params: PyTree, rows: Any, mirrored: Any) -> Array:
    """Returns the squared error between the mode for an image and the image of the mode, which has no gradient.

    The mean over action elements and images (section III-C of the paper).
    """
    mode = lambda obs: agent.net.apply(params, obs)[0].mode()  # merged with the loss's own pass by the compiler
    wanted = _load(cfg)(rows.images.given, jax.lax.stop_gradient(mode(rows.obs)))[1]
    by_row = lambda x: jnp.swapaxes(x.reshape(-1, len(rows.weight), *x.shape[1:]), 0, 1).reshape(x.shape)
    error = lambda x, y: jnp.mean(jnp.square(x - by_row(y)), tuple(range(1, x.ndim)))
    errors = jax.tree.leaves(jax.tree.map(error, mode(mirrored.obs), wanted))
    return jnp.mean(mirrored.weight * sum(errors) / len(errors))
