"""A Population, made of RunConfigs that differ in their seed and floats."""

import dataclasses
from collections.abc import Sequence

import jax

from jrl import algos, config, envs
from jrl.agents.policies import differing, with_floats, without_floats
from jrl.config import RunConfig, Sizes, datasets
from jrl.config.sections import CustomConfig, ReplayConfig
from jrl.errors import InputError
from jrl.host import runtime
from jrl.learn import parallel
from jrl.learn.fused import Fused
from jrl.learn.population import MemberProgram, Population
from jrl.run import build
from jrl.types import PyTree

_OF_REPLAY = ("priority_alpha", "priority_beta", "priority_eps")  # fields of the section replay


class NotOneProgram(InputError):
    """Members of a population that cannot be one program, though each can be run."""


def grouped(configs: Sequence[RunConfig]) -> list[tuple[list[int], str]]:
    """Returns the indices of each group of runs that differ only in seed and `numbers`, and why they cannot be one
    program, by their configs; "" if they can."""
    found: list[tuple[object, list[int]]] = []
    for i, common in enumerate(map(_common, configs)):
        group = next((numbers for other, numbers in found if other == common), None)
        if group is None:
            found.append((common, group := []))
        group.append(i)
    return [(numbers, _why_not([configs[i] for i in numbers])) for _, numbers in found]


def vmapped(cfg: RunConfig) -> set[str]:
    """Returns the keys whose values are numbers in a run's program: members of one program differ in these alone."""
    algo, replay = numbers(cfg)
    own = {} if algos.is_own(config.algo_name(cfg)) else {"algo": algo}
    leaves = jax.tree.leaves_with_path({**own, "replay": replay})
    return {"run.seed", *(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)}


def numbers(cfg: RunConfig) -> tuple[PyTree, dict[str, PyTree]]:
    """Returns the floats that can be numbers in a run's program: of its algorithm, and of its replay by name."""
    return cfg.algo, {name: getattr(cfg.replay, name) for name in _OF_REPLAY if cfg.replay is not None}


def _why_not(configs: Sequence[RunConfig]) -> str:
    first = configs[0]
    if first.custom != CustomConfig():
        return "custom: code of one's own may look at one run at a time"
    if first.run.on_nonfinite == "rollback":
        return "run.on_nonfinite rollback begins a run again with other step sizes"
    if first.env.on_nonfinite == "stop":
        return "env.on_nonfinite stop ends a run with an error"
    if first.run.disable_jit:
        return "run.disable_jit: there are no programs"
    if first.multi_agent is not None:
        return "multi_agent: policies have configs of their own, and who plays may change between calls"
    if datasets.alone(first):
        return "data.input: it learns from data alone"
    if two := Sizes(first).why_two_programs:
        return f"one program collects, another learns: {two}"
    backend = envs.resolve(first.env.id, first.env.backend)
    return "" if backend == "jax" else f"{backend} steps the environments, outside the program that learns"


def make(configs: Sequence[RunConfig], also: Sequence[RunConfig] = ()) -> tuple[Population, list[build.Run]]:
    """Makes the program of all members, and the Run of each member.

    Args:
      configs: configs of the members.
      also: configs that members may get later: the program takes the floats in which they differ, too.
    Raises:
      InputError: the run cannot be made.
      NotOneProgram: the environments are not pure, or not part of a program.
    """
    cfg = configs[0]
    wanted, most = cfg.devices, min(len(configs), runtime.cpu_threads())
    found = parallel.devices(**dataclasses.asdict(wanted), of_cpu=most)
    devices = list(found.learners.devices.flat)
    number = jax.local_devices().index(devices[0])
    alone = dataclasses.replace(cfg, devices=dataclasses.replace(cfg.devices, learners=(number,)))
    run = build.run(alone)
    if run.rebuild_with is None:
        run.program.close()
        raise NotOneProgram(f"{run.programs} ({run.backend})")
    rebuild_with = run.rebuild_with
    found_floats = differing([numbers(each) for each in (*configs, *also)])
    floats = {i: values[: len(configs)] for i, values in found_floats.items()}

    fused = run.program
    assert isinstance(fused, Fused)

    def with_values(values: PyTree) -> Fused:
        if not floats:
            return fused
        algo, replay = with_floats(numbers(alone), values)  # values may be traced
        kept = alone.replay and dataclasses.replace(alone.replay, **replay)
        return rebuild_with(dataclasses.replace(alone, algo=algo, replay=kept))

    seeds = [each.run.seed for each in configs]
    population = Population(fused, with_values, seeds=seeds, floats=floats, devices=devices)
    runs = [run._replace(program=MemberProgram(population, i)) for i in range(len(configs))]
    return population, runs


def _common(cfg: RunConfig) -> tuple[object, ...]:
    """Returns what members share: the config without its seed, its directory and its `numbers`."""
    replay = numbers(cfg)[1]
    kept = cfg.replay and dataclasses.replace(cfg.replay, **{name: getattr(ReplayConfig(), name) for name in replay})
    rest = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, seed=0, out=None), replay=kept)
    return cfg.multi_agent, jax.tree.structure(replay), *without_floats(rest)
