"""Clients of a run: their server, and the source of their rollouts."""

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
from jrl.serve.client_inference import DEFAULT_ROWS, ClientInference, build_best_choice
from jrl.serve.client_source import ClientSource
from jrl.serve.episode_table import SINGLE, EpisodeTable
from jrl.serve.http_server import Address
from jrl.serve.inference import ActionProgram, Inference, zeros
from jrl.serve.row_rings import RowRings
from jrl.serve.server import ServedAgent, ServedPolicy, Server
from jrl.types import ActOut, EnvSpec, PyTree, element

_MAX_ITEMS = 64  # items of one agent in a call of the policy


class Clients:
    """Clients that play the episodes of a run.

    Attributes:
      address: http://HOST:PORT of the server; "" before `open`.
    """

    def __init__(self) -> None:
        self._address: Address | None = None
        self.address = ""

    @contextlib.contextmanager
    def open(self, given: external.ExternalConfig | None) -> Iterator[None]:
        """Binds the address of the section `external`. Connections are refused until the first weights exist.

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
        """Returns the function that builds a run's source, instead of `rollout.sources.make`."""
        return functools.partial(self._build_source, cfg, iteration, interrupted)

    def _build_source(
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
        key: Any = None,  # only used by environments written in JAX
        device: Any = None,  # the actor's device is used instead
        **options: Any,
    ) -> Source:
        cfg = resolved(cfg)  # fills in the policy of each agent
        section, spec, num = cfg.external, env.spec, env.spec.num_envs
        assert section is not None
        memories = jax.tree.map(np.asarray, jax.device_get(carry(num)))
        initial = lambda column: jax.tree.map(lambda x: x[column], memories)
        has_replay, name = cfg.replay is not None, config.algo_name(cfg)
        leaves = jax.tree.leaves(element(spec.observation))
        row_bytes = 64 + sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in leaves)  # about
        # with replay, waiting rows of a column: what 256 MiB hold, at most 4096, at least 4 rollouts
        capacity = max(4 * length, min(4096, 2**28 // (row_bytes * num))) if has_replay else length
        columns = agents.make(cfg, spec).columns
        table = EpisodeTable(RowRings(num, length, capacity, columns), spec.games, section.max_clients, spec.num_agents)
        max_items = max(spec.games, min(section.max_batch, _MAX_ITEMS))
        program = ActionProgram(act, env.to_env, spec, columns, explore=explore, max_items=max_items)
        if self._address is None or self._address.is_used:
            self._address = Address(section)
            self.address = self._address.url
        server = Server(table, self._address, lambda: bool(interrupted))
        inference = Inference(table, program, initial, server.deliver, max_wait_ms=section.max_wait_ms)
        memory = carry(1) if columns is None else ()  # local inference is for single agents
        if choice is not None and not explore and has_replay:
            choice = build_best_choice(act)  # replay needs no probabilities, and deterministic policies have none
        client_inference = ClientInference(
            name, choice, memory, spec, env.to_env, explore=explore, clips=has_replay,
            random_steps=getattr(cfg.algo.exploration, "random_timesteps", 0),
            rows=DEFAULT_ROWS if has_replay else length,
        )  # fmt: skip
        max_lag = external.max_lag(section, cfg.algo)
        server.by_name["default"] = ServedPolicy(
            name, _build_agents(spec, columns, learns_any=has_replay), inference, client_inference, learns=True,
            refusal=f"{name} learns from actions that its own policy chose: ask for them; dqn, sac, td3 learn from any",
            max_lag=max_lag,
        )  # fmt: skip
        return ClientSource(
            env, act, server=server, inference=inference, interrupted=lambda: bool(interrupted), max_lag=max_lag,
            version=iteration, length=length, carry=carry, explore=explore, **options,
        )  # fmt: skip


def _build_agents(spec: EnvSpec, columns: Agents | None, *, learns_any: bool) -> dict[str, ServedAgent]:
    """Returns the agents of an episode by name. `learns_any`: the run learns from clients' actions, too."""
    parts = spaces.by_kind(spec)

    def to_policy_action(kind: int, action: PyTree) -> PyTree:
        own = parts[kind]
        action = client_spaces.to_policy_action(own.action, own.env_action or own.action, action)
        if len(parts) == 1:
            return action
        return tuple(action if k == kind else zeros(element(part.action)) for k, part in enumerate(parts))

    names = spec.agents or (SINGLE,)
    policies = columns.policies if columns else (0,)
    by_name = {}
    for kind, part in enumerate(parts):
        observation, action = part.env_observation or part.observation, part.env_action or part.action
        convert = functools.partial(to_policy_action, kind) if learns_any else None
        for name in part.agents or names:
            number = names.index(name)
            by_name[name] = ServedAgent(number, policies[number], observation, action, part.action, convert)
    return {name: by_name[name] for name in names}
