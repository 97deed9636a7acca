"""The policies of a run that is under way: their weights, and those that are added and removed as it goes on."""

import abc
import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl import agents, callbacks, config, registry
from jrl.config import RunConfig
from jrl.errors import InputError
from jrl.fields.schema import merge
from jrl.learn.clock import NO_STEPS, Clock
from jrl.learn.program import LoopState
from jrl.run import build, reporter
from jrl.run.preflight import resolved
from jrl.run.store import checkpoint, resume
from jrl.types import PyTree


class BaseSession(abc.ABC):
    """What the parts of a session know of it, and its policies.

    Attributes: see `jrl.run.session.Session`.
    """

    config: RunConfig
    run: build.Run
    state: LoopState
    iteration: int
    reporter: reporter.Reporter
    callback_list: callbacks.CallbackList | None
    manual_steps: Any  # jrl.run.manual_steps.ManualSteps

    @property
    @abc.abstractmethod
    def steps_per_call(self) -> int:
        """Returns the most steps of a call."""

    @property
    @abc.abstractmethod
    def env_steps(self) -> int:
        """Returns environment steps of the calls that are counted."""

    @abc.abstractmethod
    def counted(self) -> int:
        """Returns the environment steps so far, the latest call's included."""

    @abc.abstractmethod
    def rebuild(self, cfg: RunConfig, given: Mapping[str, PyTree]) -> None:
        """Makes the run anew with the policies of `cfg`; those of `given` begin with these States."""

    @abc.abstractmethod
    def replace_state(self, state: LoopState, steps: Clock = NO_STEPS) -> None:
        """Goes on from another state, which has learned from so many more steps."""

    def actor(self, policy: str | None = None) -> PyTree:
        """Returns what acting needs, of all policies or of the named one, on one device; valid until the next call."""
        found = self.run.program.actor(self.state)
        return found if policy is None else self.run.policies.by_name(found)[policy]

    @property
    def policies(self) -> tuple[str, ...]:
        """Returns the names of the policies; () of a run with one agent, whose policy needs no name."""
        return self.run.policies.names

    def learner_state_of_all(self) -> PyTree:
        """Returns the algorithm's State, on the host; of several policies a dict by name."""
        return jax.device_get(self.run.program.keep(self.state).learner)

    def learner_state(self, policy: str | None = None) -> PyTree:
        """Returns the algorithm's State, on the host.

        Args:
          policy: its name; may be left out where there is one.
        Raises:
          ValueError: there is no such policy, or there are several and none is named.
        """
        return self.run.policies.states(self.learner_state_of_all())[self._named(policy)]

    def _named(self, policy: str | None) -> str:
        the_one = self.run.policies.the_one
        if policy is None and (the_one or not self.policies):
            return the_one or ""
        if policy not in self.policies:
            raise ValueError(f"policy: expected one of {', '.join(self.policies) or 'none'}, got {policy!r}")
        return policy

    def get_weights(self, policy: str | None = None) -> dict[str, PyTree]:
        """Returns parameters, target parameters and statistics of the State, numpy arrays by field."""
        state = self.learner_state(policy)
        return {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in resume.NOT_WEIGHTS}

    def set_weights(self, weights: Mapping[str, PyTree], policy: str | None = None) -> None:
        """Takes over fields as `get_weights` gives them; the others, the optimizer's state among them, stay.

        Raises:
          ValueError: an unknown field, or arrays of other shapes.
        """
        state = self.learner_state(policy)
        for name, given in weights.items():
            if not hasattr(state, name) or name in resume.NOT_WEIGHTS:
                raise ValueError(f"set_weights: {name} is none of {', '.join(self.get_weights(policy))}")
            like = getattr(state, name)
            if (found := _shapes(given)) != (wanted := _shapes(like)):
                raise ValueError(f"set_weights: {name} has the shapes {wanted}, not {found}")
            taken = jax.tree.map(lambda x, old: np.asarray(x, old.dtype), given, like)
            state = dataclasses.replace(state, **{name: taken})
        self.take_over({policy: state})

    def take_over(self, states: Mapping[Any, PyTree]) -> None:
        """Goes on with other States of some policies, their optimizers' included, as `learner_state` gives them.

        None is the name of a policy that is the only one.
        """
        policies, whole = self.run.policies, self.learner_state_of_all()
        given = {self._named(name): one for name, one in states.items()}
        whole = policies.joined({**policies.states(whole), **given})
        self.replace_state(self.run.program.assign(self.state, whole))

    # ------------------------------------------------------------ policies that come and go

    def add_policy(
        self,
        name: str,
        *,
        state: PyTree | None = None,
        own: Mapping[str, Any] | None = None,
        mapping: Any = None,
        train: Any = None,
    ) -> None:
        """Adds a policy. The run is made anew with it: environments begin anew, and programs compile again.

        Args:
          name: of the policy.
          state: an algorithm's State to begin with, as `learner_state` gives one; None: fresh weights.
          own: sections of the config that differ from the first policy's, as in `multi_agent.policies`. None: nothing.
          mapping: as `multi_agent.mapping`, or a function. None: as before.
          train: names of the policies that learn from now on, or a function of a name; None: as before.
        Raises:
          InputError: the run has one agent or plays itself; the name is taken; mapping or `train` name an unknown
            policy; or the policy cannot be one of this run.
        """
        policies = self._policies_of("add_policy")
        if name in policies:
            raise InputError(f"add_policy: there is a policy {name!r} already: choose another name")
        first: dict[str, Any] = next(iter(policies.values()), {})
        cfg = self._with_policies({**policies, name: merge(first, dict(own or {}))}, mapping, train)
        self.rebuild(cfg, {} if state is None else {name: state})

    def remove_policy(self, name: str, *, mapping: Any = None, train: Any = None) -> None:
        """Removes a policy. Arguments, effects and errors as `add_policy`."""
        policies = self._policies_of("remove_policy")
        if name not in policies or len(policies) == 1:
            raise InputError(f"remove_policy: expected one of several policies, {', '.join(policies)}, got {name!r}")
        if train is None:
            train = [other for other in self.run.policies.trained if other != name]
        rest = {other: own for other, own in policies.items() if other != name}
        self.rebuild(self._with_policies(rest, mapping, train), {})

    def _policies_of(self, what: str) -> dict[str, Any]:
        """Returns what each policy has of its own. Raises InputError: policies cannot change in this run."""
        given = self.config.multi_agent
        if given is None or given.self_play is not None or self.config.external is not None:
            raise InputError(
                f"{what}: expected a run with several agents, without multi_agent.self_play and external: its policies "
                "stay as they are"
            )
        return {name: given.policies.get(name, {}) for name in self.policies}

    def _with_policies(self, policies: dict[str, Any], mapping: Any, train: Any) -> RunConfig:
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
    """Reads the States of some policies of a checkpoint with several, on the host, by name.

    Raises:
      InputError: it does not have them.
    """
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


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(np.shape, tree)
