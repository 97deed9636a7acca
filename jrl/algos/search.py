"""Acting by Monte-Carlo tree search, the section `algo.search` of AlphaZero and MuZero. It uses the package mctx.

    search = Search(simulations=32)
    found = run(search, key, root, model, blocked, explore=True)         # found.action [N], found.share [N, A]

A tree has one node per state. `model` makes the child of a node: by the environment (AlphaZero, arXiv:1712.01815) or by
learned dynamics (MuZero, arXiv:1911.08265). `gumbel` is the search of "Policy improvement by planning with Gumbel"
(ICLR 2022): it improves the policy with few simulations. `puct` is the search of the two older papers.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jrl.errors import InputError, cannot_import
from jrl.fields.bounds import Few, Positive
from jrl.types import Array, Key, PyTree, hyperparams


@hyperparams
class Search:
    """Options of the search."""

    kind: Literal["gumbel", "puct"] = "gumbel"
    simulations: Few = 32  # nodes that a search adds to its tree, each with one pass of the network
    max_considered_actions: Few = 16  # actions that the root tries; not with puct, which tries all
    max_depth: Few | None = None  # steps from the root to its farthest node; null: simulations
    # weight of values against prior logits; null: 0.1, in a learned model 0.02. Not with puct
    value_scale: Positive | None = None
    # whether each node scales the values of its actions to [0, 1], for returns of any size; false: for returns in
    # [-1, 1], as of games: equal actions then stay equal. Not with puct
    rescale: bool = True
    in_evaluation: bool = True  # whether evaluations act by search; false: by the policy network alone


class Root(NamedTuple):
    """N states where searches begin."""

    logits: Array  # [N, A] f32 of the policy network
    value: Array  # [N] f32
    node: PyTree  # state for `Model`, leaves [N, ...]


class Child(NamedTuple):
    """Results of one step of the model from N nodes."""

    reward: Array  # [N] f32, for the player that moved
    discount: Array  # [N] f32, factor of the child's value: negative if the other player moves next, 0 after an end
    logits: Array  # [N, A] f32
    value: Array  # [N] f32, for the player that moves next
    node: PyTree


class Found(NamedTuple):
    """Results of N searches."""

    action: Array  # [N] i32
    share: Array  # [N, A] f32, the improved policy: probabilities of the actions
    value: Array  # [N] f32, value of the root


Model = Callable[[Key, Array, PyTree], Child]  # (key, action [N] i32, node) -> the children


def import_mctx() -> Any:
    """Returns the module mctx. Raises InputError: it is not installed, or does not fit this jax."""
    try:
        import mctx
    except (ImportError, AttributeError) as e:
        raise InputError(f"algo.search: {cannot_import('mctx', e)}") from e
    return mctx


def reward_faults(cfg: Any) -> list[str]:
    """Returns a message if the rewards of an algorithm that searches in the environment are not the environment's."""
    if not cfg.normalize_reward:
        return []
    return [
        "normalize_reward: expected false, because the search adds rewards of the environment to values, got true: "
        "leave it out"
    ]


def check_states(name: str, env_state: PyTree, num_envs: int) -> None:
    """Raises InputError if a leaf of the environments' state has no axis of environments, by which states are copied.

    Args:
      name: name of the algorithm.
      env_state: state of the environments.
      num_envs: number of environments, which divides the length of this axis.
    """
    for x in jax.tree.leaves(env_state):
        if not x.ndim or x.shape[0] % num_envs:
            raise InputError(
                f"algo.name {name}: expected states with an axis of {num_envs} environments first, got an array "
                f"{x.shape}: change the environment, or use ppo"
            )


def run(
    cfg: Search, key: Key, root: Root, model: Model, blocked: Array | None, *, explore: bool, value_scale: float = 0.1
) -> Found:
    """Searches from N roots.

    Args:
      cfg: options.
      key: random key.
      root: states where the searches begin.
      model: makes the children of nodes.
      blocked: [N, A] bool, actions that the root must not take; None: none. Inside the tree the logits decide: those of
        blocked actions have to be far below all others.
      explore: whether actions are drawn, as while learning; False: the best action.
      value_scale: default of `cfg.value_scale`.
    """
    mctx = import_mctx()

    def step(params: Any, key: Key, action: Array, node: PyTree) -> tuple[Any, PyTree]:
        reward, discount, logits, value, node = model(key, action, node)
        out = mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value)
        return out, node

    scale = value_scale if cfg.value_scale is None else cfg.value_scale
    begin = mctx.RootFnOutput(prior_logits=root.logits, value=root.value, embedding=root.node)
    given = ((), key, begin, step, cfg.simulations, blocked, cfg.max_depth)
    if cfg.kind == "puct":
        fraction = 0.25 if explore else 0.0
        found = mctx.muzero_policy(*given, dirichlet_fraction=fraction, temperature=1.0 if explore else 0.0)
    else:

        def scaled(tree: Any, node: Any) -> Array:
            return mctx.qtransform_completed_by_mix_value(tree, node, value_scale=scale, rescale_values=cfg.rescale)

        considered = min(cfg.max_considered_actions, root.logits.shape[-1])
        found = mctx.gumbel_muzero_policy(
            *given, qtransform=scaled, max_num_considered_actions=considered, gumbel_scale=1.0 if explore else 0.0
        )
    value = found.search_tree.summary().value
    return Found(found.action.astype(jnp.int32), found.action_weights, value)
