"""Backends, the libraries that step environments, and their ids."""

import difflib
import importlib
from typing import Any

from jrl import registry
from jrl.envs.context import PETTINGZOO, is_in_jax
from jrl.errors import InputError
from jrl.fields.bounds import Backend, current_name

# backends in the order of `auto`. Each module has ids(), check(cfg), has_agents(cfg), goal_reward(cfg), make(cfg, ...)
_MODULES = {"envpool": "jrl.envs.envpool_env", "gymnasium": "jrl.envs.gym_ids", "jax": "jrl.envs.jax_ids"}
BACKENDS = tuple(_MODULES)
# suites of the jax backend: prefix of their ids -> function (name, cfg, options, state) -> JaxEnv
SUITES = {
    "gymnax": "jrl.envs.suites:make_gymnax",
    "craftax": "jrl.envs.suites:make_craftax",
    "brax": "jrl.envs.suites:make_brax",
    "playground": "jrl.envs.suites:make_playground",
    "jumanji": "jrl.envs.jumanji_env:make_jumanji",
    "xminigrid": "jrl.envs.grid_suites:make_xminigrid",
    "navix": "jrl.envs.grid_suites:make_navix",
    "pgx": "jrl.envs.pgx_env:make_pgx",
    "jaxmarl": "jrl.envs.jaxmarl_env:make_jaxmarl",
}
# jrl's own environments in JAX: id -> function that returns a Definition or MultiDefinition, for `registry.load`
IN_JAX = {
    "CartPole-v1": "jrl.envs.classic:cartpole",
    "Pendulum-v1": "jrl.envs.classic:pendulum",
    "MountainCar-v0": "jrl.envs.classic:mountain_car",
    "MountainCarContinuous-v0": "jrl.envs.classic:mountain_car_continuous",
    "Acrobot-v1": "jrl.envs.classic:acrobot",
    "Catch-v0": "jrl.envs.toys:catch",
    "StatelessCartPole-v1": "jrl.envs.toys:stateless_cartpole",
    "RepeatAfterMe-v0": "jrl.envs.toys:repeat_after_me",
    "Corridor-v0": "jrl.envs.toys:corridor",
    "BitFlip-v0": "jrl.envs.goals:bit_flip",
    "PointMaze-v0": "jrl.envs.goals:point_maze",
    "ParametricCartPole-v0": "jrl.envs.parametric:parametric_cartpole",
    "MultiAgentCartPole-v1": "jrl.envs.multi_toys:multi_agent_cartpole",
    "MultiAgentPendulum-v1": "jrl.envs.multi_toys:multi_agent_pendulum",
    "TwoStepGame-v0": "jrl.envs.multi_toys:two_step_game",
    "RockPaperScissors-v0": "jrl.envs.multi_toys:rock_paper_scissors",
    "SwitchRiddle-v0": "jrl.envs.multi_toys:switch_riddle",
    "SimpleSpread-v0": "jrl.envs.spread:simple_spread",
    "TicTacToe-v0": "jrl.envs.board_games:tic_tac_toe",
    "ConnectFour-v0": "jrl.envs.board_games:connect_four",
}


def module(backend: str) -> Any:
    """Returns the module of a backend."""
    return importlib.import_module(_MODULES[backend])


def ids(backend: str) -> tuple[str, ...]:
    """Returns the ids of a backend that can be listed; prefixes such as `gymnax:` name more."""
    return module(backend).ids()


def suite_of(id: str) -> str | None:
    """Returns the suite of the jax backend that has an id, such as `gymnax`; None: no suite's."""
    name, colon, _ = id.partition(":")
    return name if colon and name in SUITES and registry.registered(id) is None else None


def backends_of(id: str) -> tuple[str, ...]:
    """Returns the backends that have `id`, in the order of `auto`; empty for an unknown id."""
    return tuple(backend for backend in BACKENDS if has_id(id, backend))


def has_id(id: str, backend: str) -> bool:
    """Returns whether a backend has an id."""
    if registry.registered(id) is None:
        if ":" not in id:
            return id in ids(backend)
        if suite_of(id) is not None:
            return backend == "jax"
        if id.startswith(PETTINGZOO):
            return backend == "gymnasium"
    # a user's class or function; if it cannot be loaded, the backend reports the reason
    if backend == "envpool":
        return False
    try:
        found = module("gymnasium").load_class(id)
    except InputError:
        found = None
    in_jax = is_in_jax(found)
    return in_jax is not False if backend == "jax" else not in_jax


def resolve(id: str, backend: str = "auto") -> str:
    """Returns the backend that steps `id`; `auto`: the first of EnvPool, gymnasium and jax that has it.

    Raises:
      InputError: unknown id or backend, or the backend lacks the id.
    """
    backend = current_name(backend, Backend)
    if not id:
        raise InputError("env.id is missing: name an environment, e.g. --set env.id=CartPole-v1")
    if backend not in ("auto", *BACKENDS):
        raise InputError(f"env.backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    for candidate in BACKENDS if backend == "auto" else (backend,):
        if has_id(id, candidate):
            return candidate
    others, missing = backends_of(id), module("envpool").missing() if backend in ("auto", "envpool") else ""
    if others and missing:
        raise InputError(f"env.backend: {missing}, or use env.backend {' or '.join(others)}")
    if others:
        raise InputError(f"env.id {id}: not in the {backend} backend: use env.backend {' or '.join(others)}")
    known = [*registry.all_registered(), *(name for b in BACKENDS for name in ids(b))]
    near = [f"{name} ({', '.join(backends_of(name))})" for name in difflib.get_close_matches(id, set(known), 3)]
    fix = f"did you mean {', '.join(near)}?" if near else "name an id of EnvPool or Gymnasium, or package.module:Class"
    raise InputError(f"env.id {id}: not in any backend: {fix}{missing and f' ({missing})'}")


def is_atari(id: str) -> bool:
    """Returns whether `id` is an Atari game: EnvPool's `Pong-v5`, ale-py's `ALE/Pong-v5`, or `PongNoFrameskip-v4`."""
    if id.startswith("ALE/") or "NoFrameskip-v" in id:
        return True
    if not id.endswith("-v5") or "/" in id or ":" in id:  # saves the import of EnvPool
        return False
    envpool = module("envpool")
    return id in envpool.ids() and envpool.family(id).startswith("envpool.atari")
