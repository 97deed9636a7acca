"""Backends, the libraries that step environments, and their ids."""

import difflib

from jrl import registry
from jrl.envs.context import is_in_jax
from jrl.errors import InputError
from jrl.fields.bounds import Backend, current_name

BACKENDS = ("envpool", "gymnasium", "jax")  # in the order of `auto`
SUITES = ("gymnax:", "brax:", "jaxmarl:")  # prefixes of ids of the jax backend
PETTINGZOO = "pettingzoo:"  # prefix of ids of the gymnasium backend
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


def ids(backend: str) -> tuple[str, ...]:
    """Return the ids of a backend that can be listed; prefixes such as `gymnax:` name more."""
    if backend == "jax":
        return tuple(IN_JAX)
    if backend == "envpool":
        from jrl.envs import envpool_env

        return envpool_env.ids()
    from jrl.envs import gym_env

    return gym_env.ids()


def backends_of(id: str) -> tuple[str, ...]:
    """Return the backends that have `id`, in the order of `auto`; empty for an unknown id."""
    return tuple(backend for backend in BACKENDS if has_id(id, backend))


def has_id(id: str, backend: str) -> bool:
    """Return whether a backend has an id."""
    if registry.registered(id) is None:
        if ":" not in id:
            return id in ids(backend)
        if id.startswith(SUITES):
            return backend == "jax"
        if id.startswith(PETTINGZOO):
            return backend == "gymnasium"
    # a user's class or function; if it cannot be loaded, the backend reports the reason
    if backend == "envpool":
        return False
    from jrl.envs import gym_env

    try:
        found = gym_env.load_class(id)
    except InputError:
        found = None
    in_jax = is_in_jax(found)
    return in_jax is not False if backend == "jax" else not in_jax


def resolve(id: str, backend: str = "auto") -> str:
    """Return the backend that steps `id`; `auto`: the first of EnvPool, gymnasium and jax that has it.

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
    others = backends_of(id)
    if others:
        raise InputError(f"env.id {id}: not in the {backend} backend: use env.backend {' or '.join(others)}")
    known = [*registry.all_registered(), *(name for b in BACKENDS for name in ids(b))]
    near = [f"{name} ({', '.join(backends_of(name))})" for name in difflib.get_close_matches(id, set(known), 3)]
    fix = f"did you mean {', '.join(near)}?" if near else "name an id of EnvPool or Gymnasium, or package.module:Class"
    raise InputError(f"env.id {id}: not in any backend: {fix}")


def is_atari(id: str) -> bool:
    """Return whether `id` is an Atari game: EnvPool's `Pong-v5`, ale-py's `ALE/Pong-v5`, or `PongNoFrameskip-v4`."""
    if id.startswith("ALE/") or "NoFrameskip-v" in id:
        return True
    if not id.endswith("-v5") or "/" in id or ":" in id:  # saves the import of EnvPool
        return False
    from jrl.envs import envpool_env

    return id in envpool_env.ids() and envpool_env.family(id).startswith("envpool.atari")
