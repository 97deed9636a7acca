"""The clients of a run: their server, and the source of the rollouts that they play."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrl import agents, config, spaces
from jrl.config import RunConfig, external
from jrl.envs import client_spaces
from jrl.envs.client_spaces import ClientEnv
from jrl.host import interruption
from jrl.rollout.complete import Agents
from jrl.rollout.source import Source
from jrl.run.preflight import resolved
from jrl.serve.client_inference import ROWS, ClientInference, best_actions
from jrl.serve.columns import Columns
from jrl.serve.http_server import Address
from jrl.serve.inference import Inference, Program, zeros
from jrl.serve.server import ALONE, Agent, Policy, Server
from jrl.serve.source import ClientSource, capacity
from jrl.serve.table import Table
from jrl.types import ActOut, EnvSpec, PyTree, element


class Clients:
    """Clients that play the episodes of a run.

    Attributes:
      address: http://HOST:PORT where they come; "" before `open`.
    """

    def __init__(self) -> None:
        self._address: Address | None = None
        self.address = ""

    @contextlib.contextmanager
    def open(self, given: external.ExternalConfig | None) -> Iterator[None]:
        """Takes the address of the section `external`; connections are refused until the first weights are there.

        Raises:
          InputError: as `Address`.
        """
        assert given is not None
        self._address = Address(given)
        self.address = self._address.url
        try:
            yield
        finally:
            self._address.close()

    def source(self, cfg: RunConfig, iteration: int, interrupted: interruption.Signals) -> Callable[..., Source]:
        """Returns the maker of the source of a run, in the place of `rollout.sources.make`."""
        return functools.partial(self._source, cfg, iteration, interrupted)

    def _source(
        self,
        cfg: RunConfig,
        iteration: int,
        interrupted: interruption.Signals,
        env: ClientEnv,
        act: Callable[..., ActOut],
        *,
        length: int,
        carry: Callable[..., PyTree],
        explore: bool,
        choice: Callable[..., tuple[Any, PyTree]] | None,
        key: Any = None,  # of environments written in JAX
        device: Any = None,  # the actor says where it acts
        **how: Any,
    ) -> Source:
        cfg = resolved(cfg)  # who follows which policy
        given, spec, num = cfg.external, env.spec, env.spec.num_envs
        assert given is not None
        before = jax.tree.map(np.asarray, jax.device_get(carry(num)))
        initial = lambda column: jax.tree.map(lambda x: x[column], before)
        most = capacity(length, replay=cfg.replay is not None, bytes_per_row=_bytes(spec), num=num)
        columns = agents.make(cfg, spec).columns
        table = Table(Columns(num, length, most, columns), spec.games, given.max_clients, spec.num_agents)
        at_once = max(spec.games, min(given.max_batch, 64))
        program = Program(act, env.to_env, spec, columns, explore=explore, most=at_once)
        if self._address is None or self._address.is_taken:
            self._address = Address(given)
            self.address = self._address.url
        found = Server(table, self._address, lambda: bool(interrupted))
        inference = Inference(table, program, initial, found.deliver, max_wait_ms=given.max_wait_ms)
        random_steps = getattr(cfg.algo.exploration, "random_timesteps", 0)
        memory = carry(1) if columns is None else ()  # of several agents no client acts by itself
        if choice is not None and not explore and cfg.replay is not None:
            choice = best_actions(act)  # nobody asks for the probability, and a policy of one action has none
        client_inference = ClientInference(
            config.algo_name(cfg), choice, memory, spec, env.to_env, explore=explore,
            clips=cfg.replay is not None, random_steps=random_steps, rows=length if cfg.replay is None else ROWS,
        )  # fmt: skip
        max_lag = external.max_lag(given, cfg.algo)
        learns_any, name = cfg.replay is not None, config.algo_name(cfg)
        found.by_name["default"] = Policy(
            name, _agents(spec, columns, learns_any=learns_any), inference, client_inference, learns=True,
            why=f"{name} learns from actions that its own policy chose: ask for them; dqn, sac and td3 learn from any",
            max_lag=max_lag,
        )  # fmt: skip

        def begin() -> None:
            inference.warm_up()
            found.http.open()
            print("clients:", self.address, flush=True)

        return ClientSource(
            env, act, inference=inference, begin=begin, interrupted=lambda: bool(interrupted),
            max_lag=max_lag, version=iteration, length=length, carry=carry, explore=explore,
            server=found, **how,
        )  # fmt: skip


def _agents(spec: EnvSpec, columns: Agents | None, *, learns_any: bool) -> dict[str, Agent]:
    parts = spaces.by_kind(spec)

    def own(kind: int, action: PyTree) -> PyTree:
        one = parts[kind]
        found = client_spaces.to_policy_action(one.action, one.env_action or one.action, action)
        if len(parts) == 1:
            return found
        return tuple(found if q == kind else zeros(element(part.action)) for q, part in enumerate(parts))

    names = spec.agents or (ALONE,)
    follows = columns.policies if columns else (0,)
    found = {}
    for kind, one in enumerate(parts):
        seen, taken = one.env_observation or one.observation, one.env_action or one.action
        choose = functools.partial(own, kind) if learns_any else None
        for name in one.agents or names:
            number = names.index(name)
            found[name] = Agent(number, follows[number], seen, taken, one.action, choose)
    return {name: found[name] for name in names}


def _bytes(spec: EnvSpec) -> int:
    """Returns the bytes of a row, about: its observation and some numbers."""
    found = jax.tree.leaves(element(spec.observation))
    return 64 + sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in found)
