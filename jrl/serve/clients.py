"""The clients of a run: their server, and the source of the rollouts that they play."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrl.envs import played
from jrl.envs.played import Played
from jrl.host import faults
from jrl.rollout.source import Source
from jrl.run import build_policies
from jrl.serve import inference
from jrl.serve.client_inference import ROWS, ClientInference, best_actions
from jrl.serve.columns import Columns
from jrl.serve.http_server import Address
from jrl.serve.inference import GameProgram, Inference, Program
from jrl.serve.policy_info import AgentInfo, PolicyInfo
from jrl.serve.server import Policy, Server
from jrl.serve.source import ClientSource, capacity
from jrl.serve.table import Table
from jrl.settings import config, external
from jrl.settings.config import RunConfig
from jrl.types import ActOut, EnvSpec, PyTree, Space, element


class Clients:
    """Clients that play the episodes of a run; see `jrl.train.Clients`.

    Attributes:
      address: http://HOST:PORT where they come; "" before `open`.
    """

    def __init__(self) -> None:
        self._address: Address | None = None
        self.address = ""

    @contextlib.contextmanager
    def open(self, cfg: RunConfig) -> Iterator[None]:
        """Takes the address of the config; connections are refused until the first weights are there.

        Raises:
          InputError: as `Address`.
        """
        assert cfg.external is not None
        self._address = Address(cfg.external)
        self.address = self._address.url
        try:
            yield
        finally:
            self._address.close()

    def source(self, cfg: RunConfig, iteration: int, interrupted: faults.Signals) -> Callable[..., Source]:
        """Returns the maker of the source of a run, in the place of `rollout.sources.make`."""
        return functools.partial(self._source, cfg, iteration, interrupted)

    def _source(
        self,
        cfg: RunConfig,
        iteration: int,
        interrupted: faults.Signals,
        env: Played,
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
        cfg = build_policies.resolved(cfg)  # who follows which policy
        given, spec, num = cfg.external, env.spec, env.spec.num_envs
        assert given is not None
        before = jax.tree.map(np.asarray, jax.device_get(carry(num)))
        initial = lambda column: jax.tree.map(lambda x: x[column], before)
        most = capacity(length, replay=cfg.replay is not None, bytes_per_row=_bytes(spec), num=num)
        agents = build_policies.agents_if_any(cfg, spec)
        table = Table(Columns(num, length, most, agents), spec.games, given.max_clients, spec.num_agents)
        how_to: dict[str, Any] = {"explore": explore, "most": max(spec.games, min(given.max_batch, 64))}
        if agents is None:
            program = Program(act, env.to_env, **how_to)
        else:
            program = GameProgram(act, env.to_env, spec, agents, **how_to)
        if self._address is None or self._address.is_taken:
            self._address = Address(given)
            self.address = self._address.url
        found = Server(table, self._address, lambda: bool(interrupted))
        inference = Inference(table, program, initial, found.deliver, max_wait_ms=given.max_wait_ms)
        random_steps = getattr(cfg.algo.exploration, "random_timesteps", 0)
        memory = carry(1) if agents is None else ()  # of several agents no client acts by itself
        if choice is not None and not explore and cfg.replay is not None:
            choice = best_actions(act)  # nobody asks for the probability, and a policy of one action has none
        client_inference = ClientInference(
            config.algo_name(cfg), choice, memory, spec, env.to_env, explore=explore,
            clips=cfg.replay is not None, random_steps=random_steps, rows=length if cfg.replay is None else ROWS,
        )  # fmt: skip
        found.add("default", Policy(_info(cfg, spec), inference, client_inference))

        def begin() -> None:
            inference.warm_up(spec)
            found.http.open()
            print("clients:", self.address, flush=True)

        return _Serving(
            env, act, table=table, inference=inference, begin=begin, interrupted=lambda: bool(interrupted),
            max_lag=external.max_lag(cfg), version=iteration, length=length, carry=carry, explore=explore,
            server=found, **how,
        )  # fmt: skip


class _Serving(ClientSource):
    """A source that closes its server."""

    def __init__(self, *args: Any, server: Server, **options: Any):
        self._server = server
        super().__init__(*args, **options)

    def close(self) -> None:
        self._server.close()
        super().close()


def _info(cfg: RunConfig, spec: EnvSpec) -> PolicyInfo:
    name, taken = config.algo_name(cfg), spec.env_action or spec.action
    learns_any = cfg.replay is not None
    own = functools.partial(played.from_env, spec.action, taken) if learns_any else None
    why = f"{name} learns from actions that its own policy chose: ask for them; dqn, sac and td3 learn from any"
    seen = spec.env_observation or spec.observation
    agents = _agents(cfg, spec, learns_any=learns_any) if spec.is_multi_agent else {}
    lag = external.max_lag(cfg)
    return PolicyInfo(name, seen, taken, own, why, learns=True, policy_action=spec.action, agents=agents, max_lag=lag)


def _agents(cfg: RunConfig, spec: EnvSpec, *, learns_any: bool) -> dict[str, AgentInfo]:
    def own(kind: int, policy: Space, env: Space, action: PyTree) -> PyTree:
        return inference.embedded(spec, kind, played.from_env(policy, env, action))

    found, follows = {}, build_policies.agents_of(cfg, spec).policies
    for number, (name, of) in enumerate(zip(spec.agents, inference.of_agents(spec), strict=True)):
        kind, seen, acts, taken = of
        choose = functools.partial(own, kind, acts, taken) if learns_any else None
        found[name] = AgentInfo(number, follows[number], seen, taken, choose)
    return found


def _bytes(spec: EnvSpec) -> int:
    """Returns the bytes of a row, about: its observation and some numbers."""
    found = jax.tree.leaves(element(spec.observation))
    return 64 + sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in found)
