"""The clients of a run: the server where they come, and the source of what they play."""

import contextlib
import functools
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrl.envs import played
from jrl.envs.played import Played
from jrl.host import faults
from jrl.rollout.source import Source
from jrl.run import build_policies
from jrl.serve import address, game_program, origins
from jrl.serve.columns import Columns
from jrl.serve.game_program import GameProgram
from jrl.serve.inference import Inference, Program
from jrl.serve.local import ROWS, Local, best_actions
from jrl.serve.served import Agent, Facts
from jrl.serve.server import Server
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
        self._socket: socket.socket | None = None
        self._token: bytes | None = None
        self._tls: ssl.SSLContext | None = None
        self.address = ""

    @contextlib.contextmanager
    def open(self, cfg: RunConfig) -> Iterator[None]:
        """Takes the address of the config; connections are refused until the first weights are there.

        Raises:
          InputError: it is taken, or the files of token or certificate do not do.
        """
        assert cfg.external is not None
        self._token, self._tls = address.token_of(cfg.external), address.tls(cfg.external)
        origins.allowed(cfg.external, self._token)
        self._socket = address.bound(cfg.external, self._token)
        self.address = address.url(self._socket, tls=self._tls is not None)
        try:
            yield
        finally:
            if self._socket is not None:
                self._socket.close()

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
        agents, size = build_policies.agents_of(cfg, spec) if spec.agents else None, max(1, len(spec.agents))
        table = Table(Columns(num, length, most, agents), spec.games, given.max_clients, size)
        how_to: dict[str, Any] = {"explore": explore, "most": max(spec.games, min(given.max_batch, 64))}
        if agents is None:
            program = Program(act, env.to_env, **how_to)
        else:
            program = GameProgram(act, env.to_env, spec, agents, **how_to)
        found = Server(table, given, self._token, lambda: bool(interrupted))
        inference = Inference(table, program, initial, found.deliver, max_wait_ms=given.max_wait_ms)
        random_steps = getattr(cfg.algo.exploration, "random_timesteps", 0)
        memory = carry(size) if agents is None else ()  # of several agents nobody acts by themselves
        if choice is not None and not explore and cfg.replay is not None:
            choice = best_actions(act)  # nobody asks for the probability, and a policy of one action has none
        local = Local(
            config.algo_name(cfg), choice, memory, spec, env.to_env, explore=explore,
            clips=cfg.replay is not None, random_steps=random_steps, rows=length if cfg.replay is None else ROWS,
        )  # fmt: skip
        found.add("default", facts(cfg, spec), inference, local)

        def begin() -> None:
            inference.warm_up(spec)
            sock, self._socket = self._socket or address.bound(given, self._token), None
            self.address = address.url(sock, tls=self._tls is not None)
            found.web.open(sock, self._tls)
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


def facts(cfg: RunConfig, spec: EnvSpec) -> Facts:
    """Returns the facts of a run's policy that its server needs."""
    name, taken = config.algo_name(cfg), spec.env_action or spec.action
    learns_any = cfg.replay is not None
    own = functools.partial(played.from_env, spec.action, taken) if learns_any else None
    why = f"{name} learns from actions that its own policy chose: ask for them; dqn, sac and td3 learn from any"
    seen = spec.env_observation or spec.observation
    told = _agents(cfg, spec, learns_any=learns_any) if spec.agents else {}
    return Facts(
        name, seen, taken, own, why, learns=True, policy_action=spec.action, agents=told, max_lag=external.max_lag(cfg)
    )


def _agents(cfg: RunConfig, spec: EnvSpec, *, learns_any: bool) -> dict[str, Agent]:
    """Returns the facts of each agent."""

    def own(kind: int, policy: Space, env: Space, action: PyTree) -> PyTree:
        return game_program.embedded(spec, kind, played.from_env(policy, env, action))

    found, follows = {}, build_policies.agents_of(cfg, spec).policies
    for number, (name, of) in enumerate(zip(spec.agents, game_program.of_agents(spec), strict=True)):
        kind, seen, acts, taken = of
        choose = functools.partial(own, kind, acts, taken) if learns_any else None
        found[name] = Agent(number, follows[number], seen, taken, choose)
    return found


def _bytes(spec: EnvSpec) -> int:
    """Returns the bytes of a row, about: its observation and some numbers."""
    found = jax.tree.leaves(element(spec.observation))
    return 64 + sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in found)
