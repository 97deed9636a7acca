"""Policy of an Algorithm: its actions, and the outputs of its networks for an observation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrl.envs import client_spaces
from jrl.envs.history import PREV_ACTION, PREV_REWARD
from jrl.play.actor import Actor, Memory, Past
from jrl.rllib import hints
from jrl.run.manual_steps import POLICY, find_policy_ids
from jrl.run.workers import Worker, WorkerPolicy
from jrl.types import Dict, PyTree, Tuple, element

if TYPE_CHECKING:
    from jrl.run.session import Session


class ActionPolicy(WorkerPolicy):
    """Policy with the present weights of a run, by RLlib's names.

    Args:
      session: session of the run.
      actor: actor of one environment; takes the weights of the run.
      policy_id: id of the policy.
    Attributes:
      observation_space, action_space: jrl.types spaces of one environment, in the environment's units.
      recurrent: whether actions depend on earlier steps, by memory, frame stacks, or the previous action or reward.
    """

    def __init__(self, session: "Session", actor: Actor, policy_id: str = POLICY):
        super().__init__(Worker(None, 0, session.actor, find_policy_ids(session), session, whole=True), policy_id)
        self._name = policy_id if session.policies else None
        self._session, self._actor, self._reader = session, actor, actor.reader
        self._cfg, self._spec = actor.config, actor.spec
        self.observation_space, self.action_space = actor.observation_space, self._spec.env_action or self._spec.action
        self.recurrent = self._cfg.network.recurrent or actor.history is not None
        self._version = -1  # version of the weights that the actor has
        self._outputs = jax.jit(actor.algo.outputs) if actor.algo.outputs else None

    def _read(self, obs: Any, prev_action: PyTree = None, prev_reward: Any = None, *, single: bool = False) -> Any:
        """Returns observations [N, *], the items of the previous step, and N."""
        if isinstance(obs, tuple) and len(obs) == 2 and isinstance(obs[1], dict):
            space = self.observation_space
            if not (isinstance(space, Tuple) and len(space.items) == 2):
                raise ValueError("observation: expected obs, got (obs, info) of reset: pass obs")
        found, items, alone = self._reader.batch(obs, name="observation")
        if alone is not single:
            expected = "one observation: use compute_actions for many" if single else "a batch [N, *]"
            raise ValueError(f"observations: expected {expected}")
        num = len(jax.tree.leaves(found)[0])
        if prev_action is not None and self._spec.env_action is not None:
            prev_action = client_spaces.to_policy_action(self._spec.action, self._spec.env_action, prev_action)
        for name, x in ((PREV_ACTION, prev_action), (PREV_REWARD, prev_reward)):
            if x is None:
                continue
            if name not in self._reader.added:
                raise ValueError(f"{name}: this policy does not read {name} (network.use_{name}): leave it out")
            items[name] = self._reader.item(name, x, num, single=single)
        return found, items, num

    def _act(
        self, obs: Any, state: PyTree, explore: bool | None, past: tuple[Any, Any], *, single: bool,
        begins: Any = None, **units: Any,
    ) -> tuple[PyTree, PyTree, dict[str, PyTree]]:  # fmt: skip
        """Returns (actions, state, extras), without the axis N for one observation. `units`: of `Actor.compute`."""
        obs, given, num = self._read(obs, *past, single=single)
        if self._version != self._session.version:
            self._actor.set_weights(self._session.actor(self._name))
            self._version = self._session.version
        if _is_empty(state):
            memory = self._actor.init_memory(num)
        else:
            rows = jax.tree.map(lambda x: np.asarray(x)[None], state) if single else state
            memory = Memory(rows, None) if self._actor.history is None else Memory(rows[0], Past(*rows[1]))
            if begins is not None:
                memory = self._actor.begin_episodes(np.broadcast_to(np.asarray(begins, bool), num), memory)
        explore = self._cfg.rollout.explore if explore is None else bool(explore)
        acted = self._actor.compute(obs, memory, given=given, explore=explore, extras=True, **units)
        found = acted.action, _to_state(acted.memory), acted.extras
        return jax.tree.map(lambda x: x[0], found) if single else found

    def get_initial_state(self) -> PyTree:
        """Returns the state of one environment at an episode's start; [] if the policy is not `recurrent`."""
        return jax.tree.map(lambda x: np.asarray(x)[0], _to_state(self._actor.init_memory(1))) if self.recurrent else []

    def is_recurrent(self) -> bool:
        """Returns `recurrent`, by RLlib's name."""
        return self.recurrent

    def compute_single_action(
        self, obs: Any, state: PyTree = None, *, prev_action: PyTree = None, prev_reward: Any = None,
        explore: bool | None = None, full_fetch: bool = False, unsquash_action: bool | None = None,
        clip_action: bool | None = None,
    ) -> Any:  # fmt: skip
        """Returns the action for one observation, in the environment's units. Observation statistics do not change.

        Args:
          obs: [*] observation of one environment, with the structure of its space.
          state: state of the policy after the previous step; None, or `get_initial_state()`: an episode begins.
          prev_action, prev_reward: action and reward of the previous step, in the environment's units, if the network
            reads them. None: the state has the action; the reward is required except at an episode's start.
          explore: whether to sample as in training; None: the value of `env_runners(explore=...)`.
          full_fetch: whether to return state and extras.
          unsquash_action, clip_action: whether to map the action to the environment's bounds, and to clip it; None: the
            config's values.
        Returns:
          The action; (action, state, extras) with `full_fetch`, with a `state`, and from a `recurrent` policy.
        Raises:
          ValueError: an observation of another shape or kind, an action mask without a valid action, no prev_reward.
        """
        units = {"normalize": unsquash_action, "clip": clip_action}
        found = self._act(obs, state, explore, (prev_action, prev_reward), single=True, **units)
        return found if full_fetch or self._gives_state(state) else found[0]

    def compute_actions(
        self, observations: Any, state: PyTree = None, *, prev_action: PyTree = None, prev_reward: Any = None,
        explore: bool | None = None,
    ) -> Any:  # fmt: skip
        """Returns the actions for many observations: [N, *] for [N, *], a dict by agent for a dict by agent.

        Without exploration the actions equal those of N calls of `compute_single_action`. A state has a leading axis N.
        The result is (actions, state, extras) whenever `compute_single_action` returns a state.
        """
        by_agent = isinstance(observations, Mapping) and not self._is_batch(observations)
        obs = jax.tree.map(lambda *x: np.stack(x), *observations.values()) if by_agent else observations
        actions, after, extras = self._act(obs, state, explore, (prev_action, prev_reward), single=False)
        if by_agent:
            actions = {name: jax.tree.map(lambda x, i=i: x[i], actions) for i, name in enumerate(observations)}
        return (actions, after, extras) if self._gives_state(state) else actions

    def predict(
        self, observation: Any, state: PyTree = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, PyTree]:
        """Returns (actions, state) of one observation [*] or many observations [N, *], with SB3's arguments.

        Args:
          observation: [*] or [N, *].
          state: state after the previous step; None: an episode begins.
          episode_start: [N] bool or bool: whether an episode begins with this observation, so that `state` is ignored.
          deterministic: whether to return the best action instead of a sample as in training.
        """
        alone = self._reader.batch(observation, name="observation")[2]
        found = self._act(observation, state, not deterministic, (None, None), single=alone, begins=episode_start)
        return found[0], found[1] if self._gives_state(state) else None

    def compute_log_likelihoods(self, actions: PyTree, obs_batch: Any) -> np.ndarray:
        """Returns log pi(a | s) [N] f32 of the policy's actions [N, *]. Raises ValueError: no distribution."""
        return np.asarray(self.distribution(obs_batch).log_prob(actions))

    def __getattr__(self, name: str) -> Any:
        raise hints.build_error(self, name, "policy")

    def _gives_state(self, state: PyTree) -> bool:
        return self.recurrent or not _is_empty(state)

    def _is_batch(self, observations: Mapping) -> bool:
        """Returns whether a mapping is a batch of a Dict space, not observations by agent."""
        space = self.observation_space
        names = {name for name, _ in space.items} if isinstance(space, Dict) else {"obs"}
        return names <= set(observations) and set(observations) - names <= set(self._reader.added)

    def outputs(self, observations: Any) -> dict[str, Any]:
        """Returns the outputs of the networks for observations [N, *], with memory at an episode's start.

        Returns:
          The outputs of the algorithm by name: `distribution` (batched [N], with sample(key), log_prob(action),
          entropy() and mode()), `value` [N], `q` [N, A].
        Raises:
          ValueError: the algorithm has no outputs.
        """
        if self._outputs is None:
            raise ValueError(f"{self._cfg.algo} has no outputs except actions")
        obs, given, num = self._read(observations)
        obs = self._actor.build_observation(obs, self._actor.init_memory(num), given=given)[0]
        return self._outputs(self._session.learner_state(self._name), obs)

    def distribution(self, observations: Any) -> Any:
        """Returns the distribution of the actions, batched [N]. Raises ValueError for algorithms without one."""
        return _get_output(self.outputs(observations), "distribution")

    def value_function(self, observations: Any) -> np.ndarray:
        """Returns V [N] f32 of observations [N, *]; for an algorithm with Q, the value of the best action."""
        found = self.outputs(observations)
        if "value" not in found and "q" in found:
            return np.asarray(found["q"]).max(-1)
        return np.asarray(_get_output(found, "value"))

    def q_values(self, observations: Any) -> np.ndarray:
        """Returns q [N, A] f32 of observations [N, *]. Raises ValueError for algorithms without one."""
        return np.asarray(_get_output(self.outputs(observations), "q"))

    @property
    def dist_class(self) -> type | None:
        """Returns the class of `distribution`; None for algorithms without one."""
        if self._outputs is None:
            return None
        zeros = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), element(self._spec.observation))
        found = self._outputs(self._session.learner_state(self._name), zeros).get("distribution")
        return None if found is None else type(found)

    def parameters(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Returns (name, shape, number of elements) of every array of the learning networks."""
        params = self._session.learner_state(self._name).params
        name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
        return [(name(path), tuple(x.shape), int(x.size)) for path, x in jax.tree.leaves_with_path(params)]

    def summary(self) -> str:
        """Returns the parameters as a table, with the total number."""
        rows = self.parameters()
        shown = [(name, str(shape), count) for name, shape, count in rows]
        shown.append(("total", "", sum(count for _, _, count in rows)))
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"{name:<{width}}  {shape:<20} {count:>10,}" for name, shape, count in shown)


def _get_output(found: dict[str, Any], name: str) -> Any:
    if name not in found:
        raise ValueError(f"this algorithm has no {name}: it has {', '.join(found)}")
    return found[name]


def _to_state(memory: Memory) -> PyTree:
    return memory.carry if memory.past is None else tuple(memory)


def _is_empty(state: PyTree) -> bool:
    """Returns whether a state is missing: programs of RLlib pass [] to policies without state."""
    return state is None or (isinstance(state, list | tuple) and not state)
