"""The policy of an Algorithm: acts, and shows what its networks say of an observation."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrl.config import RunConfig
from jrl.types import Algo, Array, EnvSpec, PyTree

if TYPE_CHECKING:
    from jrl.session import Session


class ActionPolicy:
    """The policy with the weights that the run has when it is asked.

    Args:
      algo, spec, cfg: of the run, for one environment.
      to_env: (normalize, clip) -> function from the policy's actions to the environment's; None: they are the same.
      session: of the run.
    Attributes:
      observation_space, action_space: jrl.types spaces of one environment; `action_space` is the environment's own.
    """

    def __init__(
        self,
        algo: Algo,
        spec: EnvSpec,
        cfg: RunConfig,
        to_env: Callable[[bool, bool], Callable[[Array], Array] | None],
        session: "Session",
    ):
        self._algo, self._cfg, self._to_env, self._session = algo, cfg, to_env, session
        self.observation_space, self.action_space = spec.observation, spec.env_action or spec.action
        self._key = jax.random.key(cfg.run.seed)
        self._calls = 0
        self._seen = -1  # version of the weights below
        self._actor: PyTree = None
        self._step = functools.cache(self._program)
        self._outputs = jax.jit(algo.outputs) if algo.outputs else None

    def _program(self, explore: bool, normalize: bool, clip: bool) -> Callable[..., Any]:
        transform = self._to_env(normalize, clip)

        def step(actor, obs, carry, key, calls):
            out = self._algo.act(actor, obs, carry, jax.random.fold_in(key, calls), explore)
            return out.action if transform is None else transform(out.action), out.carry, out.extras

        return jax.jit(step)

    def _act(self, obs: np.ndarray, state: PyTree, explore: bool | None, normalize: bool | None, clip: bool | None):
        env = self._cfg.env
        step = self._step(
            self._cfg.rollout.explore if explore is None else bool(explore),
            env.normalize_actions if normalize is None else bool(normalize),
            env.clip_actions if clip is None else bool(clip),
        )
        if self._seen != self._session.version:
            self._actor, self._seen = self._session.actor(), self._session.version
        carry = self._algo.carry(len(obs)) if state is None else state
        action, carry, extras = step(self._actor, obs, carry, self._key, np.uint32(self._calls % 2**32))
        self._calls += 1
        return np.array(action), carry, extras

    def _observations(self, obs: Any) -> np.ndarray:
        space = self.observation_space
        if isinstance(obs, tuple) and len(obs) == 2 and isinstance(obs[1], dict):
            raise ValueError("observation: this is (obs, info), as reset returns it: pass obs")
        found = np.asarray(obs)
        if found.ndim != len(space.shape) + 1:
            raise ValueError(f"observations: expected [N, {', '.join(map(str, space.shape))}], got {list(found.shape)}")
        if found.shape[1:] != space.shape or not np.can_cast(found.dtype, space.dtype, "same_kind"):
            raise ValueError(f"observation: expected {space.dtype} {space.shape}, got {found.dtype} {found.shape[1:]}")
        return found.astype(space.dtype, copy=False)

    def compute_single_action(
        self,
        obs: Any,
        state: PyTree = None,
        *,
        explore: bool | None = None,
        full_fetch: bool = False,
        unsquash_action: bool | None = None,
        clip_action: bool | None = None,
    ) -> Any:
        """See `Algorithm.compute_single_action`."""
        batch = self._observations(obs if isinstance(obs, tuple) else np.asarray(obs)[None])
        rows = None if state is None else jax.tree.map(lambda x: x[None], state)
        action, carry, extras = self._act(batch, rows, explore, unsquash_action, clip_action)
        if state is None and not full_fetch:
            return action[0]
        first = lambda tree: jax.tree.map(lambda x: x[0], tree)
        return action[0], first(carry), first(extras)

    def compute_actions(self, observations: Any, state: PyTree = None, *, explore: bool | None = None) -> Any:
        """See `Algorithm.compute_actions`."""
        if isinstance(observations, Mapping):
            names = list(observations)
            found = self.compute_actions(np.stack([observations[n] for n in names]), state, explore=explore)
            if state is None:
                return dict(zip(names, found))
            return (dict(zip(names, found[0])), *found[1:])
        action, carry, extras = self._act(self._observations(observations), state, explore, None, None)
        return action if state is None else (action, carry, extras)

    # ------------------------------------------------------------ what the networks say

    def outputs(self, observations: Any) -> dict[str, Any]:
        """What the networks say of observations [N, *].

        Returns:
          Of `distribution` (batched [N]: sample(key), log_prob(action), entropy(), mode()), `value` [N] and `q` [N, A]
          those that the algorithm has.
        """
        if self._outputs is None:
            raise ValueError(f"{self._cfg.algo} does not say more than its actions")
        return self._outputs(self._session.learner_state(), self._observations(observations))

    def distribution(self, observations: Any) -> Any:
        """Of the actions, batched [N]. Raises ValueError for algorithms without one."""
        return self._one("distribution", observations)

    def value_function(self, observations: Any) -> np.ndarray:
        """V [N] f32 of observations [N, *]; where the algorithm learns Q, the value of its best action."""
        found = self.outputs(observations)
        if "value" not in found and "q" in found:
            return np.asarray(found["q"]).max(-1)
        return np.asarray(self._pick(found, "value"))

    def q_values(self, observations: Any) -> np.ndarray:
        """Q [N, A] f32 of observations [N, *]. Raises ValueError for algorithms without one."""
        return np.asarray(self._one("q", observations))

    def _one(self, name: str, observations: Any) -> Any:
        return self._pick(self.outputs(observations), name)

    def _pick(self, found: dict[str, Any], name: str) -> Any:
        if name not in found:
            raise ValueError(f"this algorithm has no {name}: it has {', '.join(found)}")
        return found[name]

    @property
    def dist_class(self) -> type | None:
        """The class of `distribution`; None for algorithms without one."""
        low = np.zeros((1, *self.observation_space.shape), self.observation_space.dtype)
        return type(self.outputs(low).get("distribution")) if "distribution" in self.outputs(low) else None

    # ------------------------------------------------------------ parameters

    def get_weights(self) -> dict[str, PyTree]:
        """The fields of the algorithm's State that are weights, numpy arrays."""
        return self._session.get_weights()

    def set_weights(self, weights: Mapping[str, PyTree]) -> None:
        """Takes over what `get_weights` gave. Raises ValueError where shapes differ."""
        self._session.set_weights(weights)

    def parameters(self) -> list[tuple[str, tuple[int, ...], int]]:
        """(name, shape, count) of every array of the networks that learn."""
        params = self._session.learner_state().params
        name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
        return [(name(path), tuple(x.shape), int(x.size)) for path, x in jax.tree.leaves_with_path(params)]

    def summary(self) -> str:
        """The parameters as a table, with their sum."""
        rows = self.parameters()
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{name:<{width}}  {shape!s:<20} {count:>10,}" for name, shape, count in rows]
        return "\n".join([*lines, f"{'in all':<{width}}  {'':<20} {sum(count for _, _, count in rows):>10,}"])
