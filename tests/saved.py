"""Checkpoints of policies that were never trained, for the tests of what uses them."""

from pathlib import Path

import jax

from jrl import algos, config, spaces_json
from jrl.fields.data import DataSets, learns_from
from jrl.run import build
from jrl.run.preflight import resolved
from jrl.run.store import checkpoint


def save(
    directory: Path, algo: str, spec, *overrides: str, env: str = "CartPole-v1", change=lambda state: state, own=None
):
    """A run directory with one checkpoint, at 77 steps; returns the algorithm and its state.

    `own` is the environment's observation space, where `spec` has what frame stacks or previous actions make of it.
    """
    stop, given = "env_steps=100000", ["network.hidden=[8]", *overrides]
    if learns_from(algos.get_config_class(algo)) is DataSets:
        stop, given = "updates=100000", [*given, "data.input=nowhere"]
    if algos.get_config_class(algo).has_teacher:
        given = [*given, "algo.teacher=nowhere"]
    cfg = config.load(None, given, algo=algo, env=env, stop=[stop])
    return _written(directory, cfg, spec, change, own)


def save_games(directory: Path, **sections):
    """The same of a run with several agents, of sections of a config."""
    data = {"network": {"hidden": [8]}, "run": {"compile_cache": False}}
    cfg = resolved(config.from_dict(config.merge(data, sections)))
    env = build.environment(cfg, num_envs=cfg.env.num_envs)
    env.close()
    return _written(directory, cfg, env.spec, lambda state: state, None)


def _written(directory: Path, cfg, spec, change, own):
    made = build.algorithm(config.without_loss(cfg), spec)
    state = change(jax.jit(made.init)(jax.random.key(1)))
    meta = checkpoint.build_meta(cfg, spec, counters={"iteration": 3, "env_steps": 77, "time_s": 1.0})
    if own is not None:
        meta["spec"]["env_observation"] = spaces_json.space_to_json(own)
    checkpoint.write(directory / "checkpoints" / "3", {"learner": state}, meta)
    return made, state
