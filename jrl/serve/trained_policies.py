"""Trained policies behind HTTP: `python -m jrl.serve RUN --no-learn`."""

import gc
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jrl import config
from jrl.config import multi_agent
from jrl.config.external import ExternalConfig
from jrl.envs import history
from jrl.errors import InputError
from jrl.host import interruption
from jrl.play import actor
from jrl.play.actor import Actor
from jrl.run.store import checkpoint
from jrl.serve.client_inference import ClientInference, build_best_choice
from jrl.serve.episode_table import SINGLE, EpisodeTable
from jrl.serve.http_server import Address
from jrl.serve.inference import ActionProgram, Inference, Weights
from jrl.serve.server import ServedAgent, ServedPolicy, Server
from jrl.types import PyTree

_POLL_S = 2.0  # seconds between two checks for a better checkpoint
_MAX_ITEMS = 64  # items in a call of a policy
_REFUSAL = "these policies do not learn: log_action is for servers that learn"


def serve(
    runs: Mapping[str, str], cfg: ExternalConfig, *, best: bool | None, follow: bool, interrupted: interruption.Signals
) -> None:
    """Serves trained policies until a signal.

    Args:
      runs: name -> run directory or checkpoint.
      cfg: section `external`.
      best: see `jrl.load`.
      follow: whether a better checkpoint (`best` False: a later checkpoint) replaces the policy.
      interrupted: received signals.
    Raises:
      InputError: a policy cannot be loaded, or the address is in use.
    """
    address = Address(cfg)
    try:
        paths = list_policies(runs, best)
        actors = {name: _load_actor(path, best, policy) for name, (path, policy) in paths.items()}
    except InputError:
        address.close()
        raise
    server = Server(EpisodeTable(None, 0, cfg.max_clients * cfg.max_batch), address)
    try:
        for name, loaded in actors.items():
            _add_policy(server, name, loaded, cfg)
        gc.freeze()  # compiled programs: a full collection would stop all requests for 0.1 s
        server.http.open()
        print("clients:", address.url, flush=True)
        next_poll = time.monotonic()
        while not interrupted:
            if time.monotonic() < next_poll:
                time.sleep(0.05)
                continue
            next_poll = time.monotonic() + _POLL_S
            for name, (path, policy) in paths.items() if follow else ():
                if (other := _load_other(path, best, actors[name], policy)) is not None:
                    actors[name] = other
                    server.by_name[name].inference.publish(_build_weights(other))
                    print(f"{name}: {other.checkpoint}", flush=True)
            for served in server.by_name.values():
                if served.inference.failure is not None:
                    raise served.inference.failure
    finally:
        server.close()
        gc.unfreeze()


def list_policies(runs: Mapping[str, str], best: bool | None) -> dict[str, tuple[str, str | None]]:
    """Returns policy name for clients -> (run directory or checkpoint, policy id).

    Policies of a multi-policy run have the names run.policy, or just policy if it is the only run.
    """
    paths: dict[str, tuple[str, str | None]] = {}
    for name, path in runs.items():
        meta = checkpoint.read_meta(checkpoint.locate(Path(path), best=best))
        cfg = config.override(meta["config"], [])
        if multi_agent.the_one(cfg.multi_agent) is not None or not (policies := multi_agent.followers(cfg.multi_agent)):
            paths[name] = path, None
            continue
        paths |= {policy if len(runs) == 1 else f"{name}.{policy}": (path, policy) for policy in policies}
    return paths


def _load_actor(path: str, best: bool | None, policy: str | None = None) -> Actor:
    loaded = actor.load(path, best=best, policy=policy)
    if keys := [history.KEYS[name] for name in history.history_options(loaded.config)]:
        raise InputError(
            f"{path}: its observations hold earlier steps ({', '.join(keys)}), which clients do not send: export the "
            "policy with jrl.export"
        )
    return loaded


def _build_weights(loaded: Actor) -> Weights:
    return Weights(loaded.weights, jax.device_put(jax.random.key(0)), int(loaded.meta["iteration"]))


def _add_policy(server: Server, name: str, loaded: Actor, cfg: ExternalConfig) -> None:
    memory: PyTree = jax.tree.map(lambda x: np.asarray(x)[0], jax.device_get(loaded.algo.carry(1)))
    spec = loaded.spec._replace(agents=(), kinds=())  # each agent plays its own episode
    program = ActionProgram(loaded.algo.act, loaded.to_env(), spec, None, explore=False, max_items=_MAX_ITEMS)
    inference = Inference(server.table, program, lambda column: memory, server.deliver, max_wait_ms=cfg.max_wait_ms)
    inference.publish(_build_weights(loaded))
    inference.warm_up()
    algorithm, choice = config.algo_name(loaded.config), build_best_choice(loaded.algo.act)
    client_inference = ClientInference(algorithm, choice, loaded.algo.carry(1), spec, loaded.to_env(), explore=False)
    agent = ServedAgent(0, 0, loaded.observation_space, spec.env_action or spec.action, spec.action, None)
    has_memory = bool(jax.tree.leaves(memory)) and loaded.config.network.recurrent
    server.by_name[name] = ServedPolicy(
        algorithm, {SINGLE: agent}, inference, client_inference, learns=False, refusal=_REFUSAL,
        has_memory=has_memory,
    )  # fmt: skip


def _load_other(path: str, best: bool | None, current: Actor, policy: str | None) -> Actor | None:
    """Returns the run's checkpoint if it is not `current`; None: the same checkpoint, or it cannot be loaded yet."""
    try:
        is_same = checkpoint.locate(Path(path), best=best) == current.checkpoint
        return None if is_same else _load_actor(path, best, policy)
    except InputError as e:
        print(f"{path}: {e}; the loaded policy stays", flush=True)
        return None
