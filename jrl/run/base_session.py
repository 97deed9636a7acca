"""Base class of sessions: state, progress, weights of policies, and adding and removing policies during a run."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrl import config, registry
from jrl.config import RunConfig
from jrl.errors import InputError
from jrl.fields.schema import merge
from jrl.learn.program import NO_STEPS, Calls, Clock, LoopState, StepInfo
from jrl.run import reporter
from jrl.run.preflight import resolved
from jrl.run.store import checkpoint
from jrl.types import PyTree

if TYPE_CHECKING:
    from jrl import callbacks
    from jrl.run import build


class BaseSession:
    """State and progress of a session, and the weights of its policies. Attributes: see `jrl.run.session.Session`."""

    config: RunConfig
    run: "build.Run"
    state: LoopState
    iteration: int
    clock: Clock
    version: int
    reporter: reporter.Reporter
    callback_list: "callbacks.CallbackList | None"
    manual_steps: Any  # `jrl.run.manual_steps.ManualSteps`
    rebuild: Callable[[RunConfig, Mapping[str, PyTree]], None]
    _calls: Calls | None = None
    _latest: StepInfo | None = None

    @property
    def steps_per_call(self) -> int:
        """Returns the maximum environment steps of a call, if a custom training step samples only once."""
        return self.run.program.iterations * self.run.program.rows

    @property
    def env_steps(self) -> int:
        """Returns the environment steps of the counted calls."""
        return self.clock.env_steps

    def clock_now(self) -> Clock:
        """Returns the clock after the latest call; waits for the call."""
        return self._latest.clock_after() if self._latest else self.clock

    def counted(self) -> int:
        """Returns the environment steps after the latest call; waits for the call."""
        return self.clock_now().env_steps

    def replace_state(self, state: LoopState, steps: Clock = NO_STEPS) -> None:
        """Replaces the state; `steps` are added to the clock."""
        now = self.clock_now()
        env_steps, agent_steps = now.env_steps + steps.env_steps, now.agent_steps + steps.agent_steps
        self.clock = now._replace(env_steps=env_steps, agent_steps=agent_steps)
        self.state, self._calls, self._latest = state, None, None
        self.version += 1

    def actor(self, policy: str | None = None) -> PyTree:
        """Returns the ActorState of all policies or of the named policy, on one device; valid until the next call."""
        actor = self.run.program.actor(self.state)
        return actor if policy is None else self.run.policies.by_name(actor)[policy]

    @property
    def policies(self) -> tuple[str, ...]:
        """Returns the names of the policies; () with a single agent."""
        return self.run.policies.names

    def learner_state_of_all(self) -> PyTree:
        """Returns the algorithm's State on the host; with several policies, a dict by name."""
        return jax.device_get(self.run.program.keep(self.state).learner)

    def learner_state(self, policy: str | None = None) -> PyTree:
        """Returns a policy's State, on the host; None: the only policy. Raises ValueError: unknown policy."""
        return self.run.policies.states(self.learner_state_of_all())[self._resolve_name(policy)]

    def _resolve_name(self, policy: str | None) -> str:
        the_one = self.run.policies.the_one
        if policy is None and (the_one or not self.policies):
            return the_one or ""
        if policy not in self.policies:
            raise ValueError(f"policy: expected one of {', '.join(self.policies) or 'none'}, got {policy!r}")
        return policy

    def get_weights(self, policy: str | None = None) -> dict[str, PyTree]:
        """Returns parameters, target parameters and statistics of the State, numpy arrays by field."""
        state = self.learner_state(policy)
        return {
            f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in checkpoint.NOT_WEIGHTS
        }

    def set_weights(self, weights: Mapping[str, PyTree], policy: str | None = None) -> None:
        """Sets fields from `get_weights`; others, such as the optimizer's state, are kept.

        Raises:
          ValueError: an unknown field, or arrays of other shapes.
        """
        state = self.learner_state(policy)
        for name, given in weights.items():
            if not hasattr(state, name) or name in checkpoint.NOT_WEIGHTS:
                raise ValueError(f"set_weights: expected some of {', '.join(self.get_weights(policy))}, got {name}")
            like = getattr(state, name)
            if (shapes := jax.tree.map(np.shape, given)) != (wanted := jax.tree.map(np.shape, like)):
                raise ValueError(f"set_weights: {name}: expected the shapes {wanted}, got {shapes}")
            taken = jax.tree.map(lambda x, old: np.asarray(x, old.dtype), given, like)
            state = dataclasses.replace(state, **{name: taken})
        self.take_over({policy: state})

    def take_over(self, states: Mapping[Any, PyTree]) -> None:
        """Sets the States of some policies, from `learner_state`, with their optimizer states.

        The key None is the only policy.
        """
        policies, whole = self.run.policies, self.learner_state_of_all()
        given = {self._resolve_name(name): state for name, state in states.items()}
        whole = policies.join({**policies.states(whole), **given})
        self.replace_state(self.run.program.assign(self.state, whole))

    # ------------------------------------------------------------ adding and removing policies

    def add_policy(
        self,
        name: str,
        *,
        state: PyTree | None = None,
        own: Mapping[str, Any] | None = None,
        mapping: Any = None,
        train: Any = None,
    ) -> None:
        """Adds a policy. The run is rebuilt: environments are reset, and programs compile again.

        Args:
          name: name of the policy.
          state: initial State, from `learner_state`; None: new weights.
          own: config sections that differ from the first policy's, as in `multi_agent.policies`; None: no difference.
          mapping: new `multi_agent.mapping`, or a function; None: unchanged.
          train: names of the policies that learn, or a function of a name; None: unchanged.
        Raises:
          InputError: the run has a single agent or self-play; the name exists; `mapping` or `train` name an unknown
            policy; or the policy does not fit the run.
        """
        policies = self._own_sections("add_policy")
        if name in policies:
            raise InputError(f"add_policy: expected a new name, got {name!r}, which exists: choose another name")
        first: dict[str, Any] = next(iter(policies.values()), {})
        cfg = self._build_config({**policies, name: merge(first, dict(own or {}))}, mapping, train)
        self.rebuild(cfg, {} if state is None else {name: state})

    def remove_policy(self, name: str, *, mapping: Any = None, train: Any = None) -> None:
        """Removes a policy. Arguments, effects and errors as `add_policy`."""
        policies = self._own_sections("remove_policy")
        if name not in policies or len(policies) == 1:
            raise InputError(f"remove_policy: expected one of several policies, {', '.join(policies)}, got {name!r}")
        if train is None:
            train = [other for other in self.run.policies.trained if other != name]
        rest = {other: own for other, own in policies.items() if other != name}
        self.rebuild(self._build_config(rest, mapping, train), {})

    def _own_sections(self, method: str) -> dict[str, Any]:
        """Returns policy -> its own config sections. Raises InputError: policies of this run cannot change."""
        given = self.config.multi_agent
        if given is None or given.self_play is not None or self.config.external is not None:
            raise InputError(
                f"{method}: expected a run with several agents, without multi_agent.self_play and external: its "
                "policies cannot change"
            )
        return {name: given.policies.get(name, {}) for name in self.policies}

    def _build_config(self, policies: dict[str, Any], mapping: Any, train: Any) -> RunConfig:
        changes: dict[str, Any] = {"policies": policies}
        if mapping is not None:
            changes["mapping"] = dict(mapping) if isinstance(mapping, Mapping) else registry.reference(mapping)
        if callable(train):
            train = [name for name in policies if train(name)]
        if train is not None:
            changes["policies_to_train"] = tuple(train)
        given = dataclasses.replace(self.config.multi_agent, **changes)  # type: ignore[type-var]  # there is one
        return resolved(dataclasses.replace(self.config, multi_agent=given))


def load_states(path: Path, names: Collection[str]) -> dict[str, PyTree]:
    """Returns name -> State of some policies of a checkpoint, on the host.

    Raises:
      InputError: the checkpoint lacks a policy.
    """
    from jrl import agents
    from jrl.run import build
    from jrl.run.store import resume

    meta = checkpoint.read_meta(path)
    cfg = config.override(meta["config"], [])
    policies = agents.make(cfg)
    known = policies.names if policies.several else ()
    if not names or set(names) - set(known):
        expected = f"some of {', '.join(known)}" if known else "none, as the run has one policy"
        raise InputError(f"policy_ids: expected {expected}, got {', '.join(names) or 'none'}: {path}")
    algo = build.algorithm(config.without_loss(cfg), checkpoint.read_spec(meta))
    whole = resume.restore_learner(path, jax.eval_shape(algo.init, jax.random.key(0)), allow_missing=True)
    return {name: resume.require_policy(path, name, whole[name]) for name in names}
