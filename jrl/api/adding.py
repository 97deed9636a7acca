"""Policies that are added to an Algorithm and removed from it, by RLlib's names."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jrl.api import translation
from jrl.api.policy import ActionPolicy
from jrl.run.by_hand import known
from jrl.run.session import Session
from jrl.settings.config import algo_name
from jrl.types import PyTree

_WHERE = (
    "add_to_env_runners", "add_to_eval_env_runners", "add_to_learners", "remove_from_env_runners",
    "remove_from_eval_env_runners", "remove_from_learners", "evaluation_workers",
)  # fmt: skip


class Adds:
    """Methods of an Algorithm with `multi_agent(capacity=...)`: adding a policy compiles nothing."""

    session: Session
    get_policy: Callable[..., ActionPolicy]
    _policies: dict[str, ActionPolicy]

    def add_policy(
        self,
        policy_id: str,
        policy_cls: Any = None,
        policy: Any = None,
        *,
        observation_space: Any = None,
        action_space: Any = None,
        config: Mapping[str, Any] | None = None,
        policy_state: PyTree | None = None,
        policy_mapping_fn: Callable[..., str] | Mapping[str, str] | None = None,
        policies_to_train: Collection[str] | Callable[..., bool] | None = None,
        **where: bool,
    ) -> ActionPolicy:
        """Adds a policy, with the algorithm and the network of the first one.

        Args:
          policy_id: its name.
          policy_cls, policy, observation_space, action_space: RLlib's; those of the first policy, so that they may be
            left out.
          config: numbers of its algorithm that differ from the first policy's, such as `lr`, by RLlib's names or ours.
          policy_state: to begin with, as `get_policy("main").get_state()` gives one; None: fresh weights.
          policy_mapping_fn: (agent, episode) -> policy, or {agent: policy}, of games that have not begun; None: as it
            is.
          policies_to_train: the policies that learn from now on, or a function of a name; None: as it is.
          where: RLlib's `add_to_...`; there is one stack, to which it is added.
        Returns:
          The policy.
        Raises:
          InputError: no place is free, the name is taken, mapping and training name an unknown policy, or the config
            has more than such numbers.
        """
        _check_where("add_policy", where)
        own = _own(policy_id, config, algo_name(self.session.config)) if config else None
        self.session.add_policy(
            policy_id, state=policy_state, own=own, mapping=policy_mapping_fn, train=_asked(policies_to_train)
        )
        made = self.get_policy(policy_id)
        if self.session.callback_list:
            self.session.callback_list.call("on_create_policy", policy_id=policy_id, policy=made)
        return made

    def remove_policy(
        self,
        policy_id: str,
        *,
        policy_mapping_fn: Callable[..., str] | Mapping[str, str] | None = None,
        policies_to_train: Collection[str] | Callable[..., bool] | None = None,
        **where: bool,
    ) -> None:
        """Removes a policy, whose place another may take. Arguments as `add_policy`.

        Raises:
          InputError: there is no such policy, or it is not like the first, or a mapping still names it.
        """
        _check_where("remove_policy", where)
        self.session.remove_policy(policy_id, mapping=policy_mapping_fn, train=_asked(policies_to_train))
        self._policies.pop(policy_id, None)

    def add_module(
        self,
        module_id: str,
        module_spec: Any = None,
        *,
        config_overrides: Mapping[str, Any] | None = None,
        new_agent_to_module_mapping_fn: Callable[..., str] | None = None,
        new_should_module_be_updated: Collection[str] | Callable[..., bool] | None = None,
        **where: bool,
    ) -> ActionPolicy:
        """Does as `add_policy`, by the names of RLlib's newer stack."""
        return self.add_policy(
            module_id,
            config=config_overrides,
            policy_mapping_fn=new_agent_to_module_mapping_fn,
            policies_to_train=new_should_module_be_updated,
            **where,
        )

    def remove_module(
        self,
        module_id: str,
        *,
        new_agent_to_module_mapping_fn: Callable[..., str] | None = None,
        new_should_module_be_updated: Collection[str] | Callable[..., bool] | None = None,
        **where: bool,
    ) -> None:
        """Does as `remove_policy`, by the names of RLlib's newer stack."""
        self.remove_policy(
            module_id,
            policy_mapping_fn=new_agent_to_module_mapping_fn,
            policies_to_train=new_should_module_be_updated,
            **where,
        )

    @property
    def policy_map(self) -> dict[str, ActionPolicy]:
        """Policies of the run, by name."""
        return {name: self.get_policy(name) for name in known(self.session).ids}


def _own(policy_id: str, config: Mapping[str, Any], algo: str) -> dict[str, Any]:
    """Returns the settings that a policy has of its own, by sections. Raises InputError: unknown names."""
    from jrl import api

    return translation.policies({policy_id: config}, api.config_class(algo))[policy_id]


def _asked(train: Collection[str] | Callable[..., bool] | None) -> Any:
    """Turns RLlib's functions of (policy, batch) into functions of a name."""
    if not callable(train):
        return train
    return lambda name: bool(train(name, None) if _takes_two(train) else train(name))


def _takes_two(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn).bind("policy", None)
    except TypeError:
        return False
    return True


def _check_where(what: str, where: Mapping[str, bool]) -> None:
    """Raises TypeError: a name that is not RLlib's."""
    if unknown := [name for name in where if name not in _WHERE]:
        raise TypeError(f"{what}() got an unexpected keyword argument {unknown[0]!r}")
