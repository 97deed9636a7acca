"""Trained policies behind HTTP: `python -m jrl.serve RUN --no-learn`."""

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
from jrl.host import gc_pauses, interruption
from jrl.play import actor
from jrl.play.actor import Actor
from jrl.run.store import checkpoint
from jrl.serve.client_inference import ROWS, ClientInference, best_actions
from jrl.serve.http_server import Address
from jrl.serve.inference import Inference, Program, Weights
from jrl.serve.server import ALONE, Agent, Policy, Server
from jrl.serve.table import Table
from jrl.types import PyTree

_LOOK_S = 2.0  # seconds between two looks for a better checkpoint
_WHY = "these policies do not learn: there is nobody to log an action for"


def load(path: str, best: bool | None, one: str | None = None) -> Actor:
    """Returns the policy `one` of a run or a checkpoint. Raises InputError: it is missing, or cannot act here."""
    found = actor.load(path, best=best, policy=one)
    if asked := [history.KEYS[name] for name in history.history_options(found.config)]:
        raise InputError(
            f"{path}: its observations tell of earlier steps ({', '.join(asked)}): export it, and act there"
        )
    return found


def by_name(runs: Mapping[str, str], best: bool | None) -> dict[str, tuple[str, str | None]]:
    """Returns the name that clients say -> where the policy lies, and its name there.

    A run of several policies gives each by its own name, behind that of the run where several are named: run.policy.
    """
    found: dict[str, tuple[str, str | None]] = {}
    for name, path in runs.items():
        meta = checkpoint.read_meta(checkpoint.locate(Path(path), best=best))
        cfg = config.override(meta["config"], [])
        if multi_agent.the_one(cfg.multi_agent) is not None or not (several := multi_agent.followers(cfg.multi_agent)):
            found[name] = path, None
            continue
        found |= {one if len(runs) == 1 else f"{name}.{one}": (path, one) for one in several}
    return found


def weights(found: Actor) -> Weights:
    """Returns the weights that act, on the device."""
    return Weights(found.weights, jax.device_put(jax.random.key(0)), int(found.meta["iteration"]))


def serve(
    runs: Mapping[str, str], cfg: ExternalConfig, *, best: bool | None, follow: bool, interrupted: interruption.Signals
) -> None:
    """Answers until a signal comes, for policies by name: run directories or checkpoints.

    With `follow` later checkpoints act as they appear, with `best` not False better ones. Raises InputError: a policy
    cannot be loaded, or the address is taken.
    """
    address = Address(cfg)
    try:
        named = by_name(runs, best)
        found = {name: load(path, best, one) for name, (path, one) in named.items()}
    except InputError:
        address.close()
        raise
    server = Server(Table(None, 0, cfg.max_clients * cfg.max_batch), address)
    try:
        gc_pauses.pause_gc()
        inferences = {name: _served(server, name, loaded, cfg) for name, loaded in found.items()}
        gc_pauses.freeze_objects()
        server.http.open()
        print("clients:", address.url, flush=True)
        look = time.monotonic()
        while not interrupted:
            if time.monotonic() < look:
                time.sleep(0.05)
                continue
            look = time.monotonic() + _LOOK_S
            for name, (path, one) in named.items() if follow else ():
                if (later := _later(path, best, found[name], one)) is not None:
                    found[name] = later
                    inferences[name].publish(weights(later))
                    print(f"{name}: {later.checkpoint}", flush=True)
            for inference in inferences.values():
                if inference.failure is not None:
                    raise inference.failure
    finally:
        server.close()
        gc_pauses.unfreeze_objects()


def _served(server: Server, name: str, found: Actor, cfg: ExternalConfig) -> Inference:
    """Puts a policy behind the server."""
    before: PyTree = jax.tree.map(np.asarray, jax.device_get(found.algo.carry(1)))
    initial = lambda column: jax.tree.map(lambda x: x[0], before)
    spec = found.spec._replace(agents=(), kinds=())  # each agent plays an episode of its own
    program = Program(found.algo.act, found.to_env(), spec, None, explore=False, most=64)
    inference = Inference(server.table, program, initial, server.deliver, max_wait_ms=cfg.max_wait_ms)
    inference.publish(weights(found))
    inference.warm_up()
    name_of_algo, taken = config.algo_name(found.config), spec.env_action or spec.action
    client_inference = ClientInference(
        name_of_algo, best_actions(found.algo.act), found.algo.carry(1), spec, found.to_env(),
        explore=False, clips=False, random_steps=0, rows=ROWS,
    )  # fmt: skip
    agent = Agent(0, 0, found.observation_space, taken, spec.action, None)
    remembers = bool(jax.tree.leaves(before)) and found.config.network.recurrent
    server.by_name[name] = Policy(
        name_of_algo, {ALONE: agent}, inference, client_inference, learns=False, why=_WHY, remembers=remembers
    )
    return inference


def _later(path: str, best: bool | None, now: Actor, one: str | None) -> Actor | None:
    """Returns the checkpoint of a run that acts from now on; None: the same, or it is still being written."""
    try:
        return None if checkpoint.locate(Path(path), best=best) == now.checkpoint else load(path, best, one)
    except InputError as e:
        print(f"{path}: {e}; the policy that was loaded before goes on", flush=True)
        return None
