"""The policies of a run that is under way: their weights, and those that are added and removed as it goes on."""

import abc
import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.errors import InputError
from jrl.run import build, build_policies, checkpoint, resume, roster, several
from jrl.run.clock import NO_STEPS, Clock
from jrl.run.program import LoopState
from jrl.settings import config, multi_agent
from jrl.settings.config import RunConfig
from jrl.types import PyTree


class Policies(abc.ABC):
    """Access of a session to its policies.

    Attributes:
      config, run: the run and its parts.
      state: LoopState; taken over by the next call.
      seats: says who follows which policy in games to come; None: that does not change.
    """

    config: RunConfig
    run: build.Run
    state: LoopState
    seats: roster.Seats | None

    @abc.abstractmethod
    def replace_state(self, state: LoopState, steps: Clock = NO_STEPS) -> None:
        """Goes on from another state, which has learned from so many more steps."""

    def actor(self, policy: str | None = None) -> PyTree:
        """Returns what acting needs, of all policies or of the named one, on one device; valid until the next call."""
        found = self.run.program.actor(self.state)
        if policy is None or not self.run.groups:
            return found
        return several.by_policy_name(self.run.groups, found)[self._place(policy)]

    @property
    def policies(self) -> tuple[str, ...]:
        """Returns the names of the policies; () of a run with one agent, whose policy needs no name."""
        return tuple(multi_agent.followers(self.config))

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
        state = self.learner_state_of_all()
        if policy is None and (len(self.policies) < 2 or multi_agent.the_one(self.config)):
            policy = multi_agent.the_one(self.config)
        elif policy not in self.policies:
            raise ValueError(f"policy: expected one of {', '.join(self.policies) or 'none'}, got {policy!r}")
        return state[self._place(policy)] if isinstance(state, dict) else state

    def _place(self, policy: str | None) -> str:
        """Returns the place of a policy in the State of several; None: the one that is meant where none is named."""
        return multi_agent.places(self.config)[policy or multi_agent.the_one(self.config) or ""]

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
        whole = self.learner_state_of_all()
        if isinstance(whole, dict):
            state = {**whole, self._place(policy): state}
        self.replace_state(self.run.program.assign(self.state, state))

    def take_over(self, states: Mapping[Any, PyTree]) -> None:
        """Goes on with other States of some policies, their optimizers' included, as `learner_state` gives them.

        None is the name of a policy that is the only one.
        """
        whole = self.learner_state_of_all()
        if isinstance(whole, dict):
            whole = {**whole, **{self._place(name): state for name, state in states.items()}}
        else:
            (whole,) = states.values()
        self.replace_state(self.run.program.assign(self.state, whole))

    # ------------------------------------------------------------ policies that come and go

    def _seats(self, what: str) -> roster.Seats:
        """Returns the roster's Seats. Raises InputError: policies cannot change in this run."""
        if self.seats is None:
            raise InputError(
                f"{what}: this run keeps the policies that it began with: set multi_agent.capacity to the most that "
                "there may be, or .multi_agent(capacity=...)"
            )
        return self.seats

    def add_policy(
        self,
        name: str,
        *,
        state: PyTree | None = None,
        own: Mapping[str, Any] | None = None,
        mapping: Any = None,
        train: Any = None,
    ) -> None:
        """Adds a policy like the first of the run; compiles nothing.

        Args:
          name: of the policy.
          state: an algorithm's State to begin with, as `learner_state` gives one; None: fresh weights.
          own: what it has of its own, as in `multi_agent.policies`: numbers of `algo`. None: nothing.
          mapping: as `multi_agent.mapping`, for games that have not begun; or a function. None: as before.
          train: names of the policies that learn from now on, or a function of a name; None: as before.
        Raises:
          InputError: the run has no `multi_agent.capacity`, or no place is free; the name is taken; mapping or `train`
            name an unknown policy; it has more of its own than numbers.
        """
        seats = self._seats("add_policy")
        self._reseated(seats.add(self.state, name, given=state, own=own, mapping=mapping, train=train))

    def remove_policy(self, name: str, *, mapping: Any = None, train: Any = None) -> None:
        """Removes a policy; what is left of games in which agents follow it is not learned from. Arguments as
        `add_policy`. Raises InputError: it does not exist, or cannot be removed.
        """
        seats = self._seats("remove_policy")
        self._reseated(seats.remove(self.state, name, mapping=mapping, train=train))

    def _reseated(self, state: LoopState) -> None:
        assert self.seats is not None
        self.config = self.seats.config
        self.replace_state(state)

    def _as_saved(self, saved: Mapping[str, Any]) -> RunConfig:
        """Returns the config with a checkpoint's policies, which may have come and gone since its run began."""
        assert self.seats is not None and self.config.multi_agent is not None
        found = config.override({**saved}, []).multi_agent
        assert found is not None
        names = ("policies", "mapping", "policies_to_train")
        given = dataclasses.replace(self.config.multi_agent, **{name: getattr(found, name) for name in names})
        self.config = dataclasses.replace(self.config, multi_agent=given)
        self.seats.take(self.config)
        return self.config


def states(path: Path, names: Collection[str]) -> dict[str, PyTree]:
    """Reads the States of some policies of a checkpoint with several, on the host, by name.

    Raises:
      InputError: it does not have them.
    """
    meta = checkpoint.read_meta(path)
    cfg = config.override(meta["config"], [])
    known = multi_agent.places(cfg) if build_policies.are_several(cfg) else {}
    if not names or set(names) - set(known):
        expected = f"some of {', '.join(known)}" if known else "none, as the run has one policy"
        raise InputError(f"policy_ids: expected {expected}, got {', '.join(names) or 'none'}: {path}")
    algo = build.algorithm(config.without_loss(cfg), checkpoint.spec(meta))
    whole = resume.learner(path, jax.eval_shape(algo.init, jax.random.key(0)), beside=True)
    return {name: resume.held(path, name, whole[known[name]]) for name in names}


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(np.shape, tree)
