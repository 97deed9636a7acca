"""What scripts/matrix.py tries: small tasks in JAX, a column for each feature, settings for each algorithm."""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from nested import nested

from jrl import algos, config, data, registry
from jrl.algos import dqn
from jrl.envs.jax_env import Definition
from jrl.envs.jax_ids import load_definition
from jrl.envs.multi_agent import MultiDefinition
from jrl.envs.multi_toys import copy_task as copies
from jrl.fields.data import DataSets, Replay, learns_from
from jrl.types import Box

ECHO, NESTED, TWO = "matrix-echo", "matrix-nested", "matrix-two"  # env.id of `echo`, `nested` and `two`


def echo(delay: int = 0, length: int = 10) -> Definition:
    """Say the number in [-1, 1] that was shown `delay` steps ago: 1 - 2 |error|, of 0 before the first number."""

    def reset(draws):
        shown = 2 * draws[0][:, None] - 1
        return jnp.concatenate([jnp.zeros((shown.shape[0], delay)), shown], -1), jnp.zeros(shown.shape[0], jnp.int32)

    def step(state, action, draws):
        history, steps = state
        reward = 1 - 2 * jnp.abs(action[:, 0] - history[:, 0])
        history = jnp.concatenate([history[:, 1:], 2 * draws[0][:, None] - 1], -1)
        return (history, steps + 1), reward, steps + 1 >= length

    space = Box((1,), "float32", -1.0, 1.0)
    return Definition(space, space, None, 1, reset, step, lambda state: state[0][:, -1:])


def two(task: str, **options: Any) -> MultiDefinition:
    """Two agents, each of which has a task of its own, of this id."""
    return copies(load_definition(task, options), 2)


registry.register(ECHO, echo)
registry.register(NESTED, nested)
registry.register(TWO, two)


@dataclasses.dataclass(frozen=True)
class Task:
    """An environment. `random` is the mean return of uniformly random actions (of those a mask allows), `best` of the
    best ones; a cell has to reach `threshold`.
    """

    id: str
    options: dict[str, Any]
    random: float
    threshold: float
    best: float
    gamma: float = 0.5  # all but Catch reward the present action

    def of_two(self) -> "Task":
        """The same of two agents, whose sum counts."""
        twice = {name: 2 * getattr(self, name) for name in ("random", "threshold", "best")}
        return dataclasses.replace(self, id=TWO, options={"task": self.id, **self.options}, **twice)


# of `nested`, whoever does not read the image gets 4, 12, 28 and, with a mask, 6 at best
_nested = lambda **options: {"length": 8, **options}
TASKS = {
    "catch": Task("Catch-v0", {}, random=-0.63, threshold=0.6, best=1.0, gamma=0.95),
    "echo": Task(ECHO, {}, random=-3.4, threshold=6.0, best=10.0),
    "dict": Task(NESTED, _nested(), random=1.33, threshold=6.5, best=8.0),
    "dict, box": Task(NESTED, _nested(action="box"), random=6.6, threshold=13.0, best=16.0),
    "dict, multi_discrete": Task(NESTED, _nested(action="multi_discrete"), random=13.4, threshold=30.0, best=32.0),
    "mask": Task(NESTED, _nested(mask=True), random=2.6, threshold=7.0, best=8.0),
    "repeat": Task("RepeatAfterMe-v0", {"delay": 0, "episode_length": 10}, random=0.0, threshold=7.0, best=10.0),
    # without memory: 1 at best
    "memory": Task("RepeatAfterMe-v0", {"delay": 1, "episode_length": 10}, random=0.0, threshold=7.0, best=10.0),
    # without memory: 1 at best
    "memory, box": Task(ECHO, {"delay": 1}, random=-3.0, threshold=5.0, best=10.0),
}


BOX = ("td3", "fql")  # tried with Box actions where a column leaves the kind open
_TEAM = {"group": {"team": ["agent_0", "agent_1"]}}


@dataclasses.dataclass(frozen=True)
class Column:
    """A feature: the task in which it is tried, and what it needs in the config."""

    task: str
    box_task: str | None = None  # for those of `boxed`; None: the same
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    prove: str | None = None  # beside the return: a key of matrix.PROOFS
    boxed: tuple[str, ...] = BOX
    several: dict[str, Any] | None = None  # the section multi_agent; None: one agent


_GRU = {"network": {"core": {"name": "gru", "size": 32}}}
_FLAT = {"network": {"encoders": {"image": "flat"}}}  # a CNN takes longest to compile: one column has it
COLUMNS = {
    "dict observation": Column("dict", "dict, box"),
    "action mask": Column("mask", config=_FLAT, prove="mask"),
    "recurrent": Column("memory", "memory, box", _GRU),
    "discrete": Column("catch", config={"stop": {"env_steps": 24_000}}),
    "continuous": Column("echo"),
    "multi-discrete": Column("dict, multi_discrete", config=_FLAT),
    "several devices": Column("repeat", "echo", {"devices": {"learners": [0, 1]}}),
    "async": Column("repeat", "echo", {"rollout": {"mode": "async"}}),
    "resume": Column("repeat", "echo", prove="resume"),
    "several agents": Column("repeat", "echo", prove="stacked", several={"mapping": "by_agent"}),
    "team": Column(
        "repeat", "echo", boxed=(*BOX, "sac"), several=_TEAM
    ),  # whose joint actions are MultiDiscrete or Box
}

_ON_POLICY = {"env": {"num_envs": 32}, "rollout": {"length": 16}, "stop": {"env_steps": 16_000}}
_SMALL = {"env": {"num_envs": 16}, "rollout": {"length": 8}}  # one update for each rollout: more of them
_REPLAY = {
    "env": {"num_envs": 16},
    "replay": {
        "capacity": 8_192,
        "batch_size": 64,
        "learning_starts": 512,
        "train_every": 64,
        "updates_per_step": 0.125,
    },
    "stop": {"env_steps": 8_000},
}
# from data alone: all episodes of ppo's cell of the column, from random ones to those of what it has learned
_DATA = {
    "replay": {"batch_size": 128, "burn_in": 0},
    "stop": {"updates": 1_500},
}
# populations: a step of the search is one rollout, in which each member ends two episodes of the longest task
# few parameters, since a score tells little about each: no hidden layer
_EVOLUTION = {
    "env": {"num_envs": 64},
    "rollout": {"length": 22},
    "network": {"hidden": []},
    "stop": {"env_steps": 400_000},
}
_EPSILON = {"exploration": {"name": "epsilon_greedy", "epsilon": [[0, 1.0], [4_000, 0.1]]}}
ALGOS: dict[str, dict[str, Any]] = {
    "ppo": {**_ON_POLICY, "algo": {"lr": 5e-3}},
    "a2c": {**_ON_POLICY, **_SMALL, "algo": {"lr": 1e-2, "normalize_advantage": True}},
    "impala": {**_ON_POLICY, **_SMALL, "algo": {"lr": 1e-2}},
    "appo": {**_ON_POLICY, "algo": {"lr": 5e-3}},
    "pqn": {**_ON_POLICY, **_SMALL, "algo": {"lr": 3e-3, **_EPSILON}},
    "dqn": {**_REPLAY, "algo": {"lr": 3e-3, "target_update_every": 50, **_EPSILON}},
    "sac": {**_REPLAY, "algo": {"lr": 3e-3, "tau": 0.02}},
    "td3": {**_REPLAY, "algo": {"lr": 3e-3, "tau": 0.02, "normalize_obs": True}},
    "iql": {**_REPLAY, "algo": {"lr": 3e-3, "tau": 0.02, "expectile": 0.9, "beta": 10.0}},
    "bc": {**_DATA, "algo": {"lr": 3e-3, "top_fraction": 0.2}},
    "marwil": {**_DATA, "algo": {"lr": 3e-3, "beta": 3.0}},
    "dt": {**_DATA, "algo": {"lr": 3e-3}},
    "distill": {**_ON_POLICY, "algo": {"lr": 5e-3}},
    "trpo": {**_ON_POLICY, "algo": {"lr": 5e-3, "target_kl": 0.03}},
    "vmpo": {**_ON_POLICY, "algo": {"lr": 5e-3, "mean_kl": 0.03}},
    "reppo": {**_ON_POLICY, "algo": {"lr": 3e-3, "critic": {"value_range": [-20, 20]}}},
    "mpo": {**_REPLAY, "algo": {"lr": 3e-3, "target_update_every": 20, "mean_kl": 0.02, "std_kl": 1e-3}},
    "fql": {**_REPLAY, "algo": {"lr": 3e-3, "tau": 0.02, "alpha": 0.1, "normalize_q": True}},
    "awr": {**_REPLAY, "algo": {"lr": 3e-3, "beta": 2.0}},
    "alphazero": {**_ON_POLICY, "algo": {"lr": 1e-3}},
    "ars": {**_EVOLUTION, "algo": {"lr": 0.05, "noise_std": 0.1}},
    "es": {**_EVOLUTION, "algo": {"lr": 0.05, "noise_std": 0.1}},
    "cma_es": {
        **_EVOLUTION,
        "env": {"num_envs": 128},
        "algo": {"noise_std": 0.3, "covariance": "diagonal"},
        "stop": {"env_steps": 800_000},
    },
    "spo": {**_ON_POLICY, "algo": {"lr": 5e-3, "mean_kl": 0.03}},
    "muzero": {
        **_ON_POLICY,
        "algo": {
            "num_minibatches": 4,
            "circular_buffer_num_batches": 20,
            "circular_buffer_iterations_per_batch": 64,
        },
        "stop": {"env_steps": 32_000},  # its model is learned first
    },
}
OF_CELLS = {  # settings of one cell; a score tells too little about the parameters of a CNN
    **{(algo, "dict observation"): _FLAT for algo in ("ars", "es", "cma_es")},
    ("muzero", "dict observation"): {"stop": {"env_steps": 48_000}},
}
_ALL = {
    "env": {"backend": "jax"},
    # what comes from an image is larger than the rest of an observation, and steps are large
    "network": {"hidden": [32], "activation": "relu", "norm": "layer"},
    "devices": {"learners": [0]},
    "run": {"log": [], "stall_seconds": None},
}


_teachers = tempfile.TemporaryDirectory()  # a run directory for each column


@functools.lru_cache
def train_teacher(column: str) -> None:
    """Trains ppo in its cell of a column, and saves its policy where `settings` names it as a teacher."""
    from jrl.run.session import Session
    from jrl.run.store import checkpoint

    with Session(config.from_dict(settings("ppo", column))) as session:
        session.start()
        while session.advance():
            pass
        path = Path(_teachers.name) / column
        checkpoint.write(path, checkpoint.copy_to_host(session.parts()), session.description())


@functools.lru_cache
def episodes(column: str) -> data.EpisodeStore:
    """What ppo collects in its cell of a column, from the first step to the last."""
    from jrl.run.session import Session

    with tempfile.TemporaryDirectory() as directory:
        tree = config.merge(settings("ppo", column), {"data": {"output": {"path": directory}}})
        with Session(config.from_dict(tree)) as session:
            session.start()
            while session.advance():
                pass
        return data.read(directory)


for _column in COLUMNS:
    registry.register(f"matrix-data-{_column}", functools.partial(episodes, _column))


def agents_of(algo: str, column: str) -> dict[str, Any] | None:
    """The section multi_agent of a cell; algorithms of teams have one in all of them."""
    return COLUMNS[column].several or (_TEAM if algos.get_config_class(algo).in_teams else None)


def task_of(algo: str, column: str) -> Task:
    """The task of a cell."""
    found = COLUMNS[column]
    task = TASKS[found.box_task or found.task if algo in found.boxed else found.task]
    return task.of_two() if agents_of(algo, column) else task


def of_algorithm(algo: str) -> dict[str, Any]:
    """What an algorithm is tried with; one without settings of its own as the one that it is most like."""
    found = algos.get_config_class(algo)
    like = "dqn" if issubclass(found, dqn.QLearning) else "sac" if learns_from(found) is Replay else "ppo"
    return ALGOS.get(algo) or ALGOS[like]


def settings(algo: str, column: str, seed: int = 0) -> dict[str, Any]:
    """The config of a cell, as a YAML file would have it."""
    task = task_of(algo, column)
    tree: dict[str, Any] = {
        "algo": {"name": algo, "gamma": task.gamma},
        "env": {"id": task.id, "options": task.options},
        "run": {"seed": seed},
    }
    for more in (_ALL, of_algorithm(algo), COLUMNS[column].config, OF_CELLS.get((algo, column), {})):
        least = tree.get("stop", {}).get("env_steps", 0)  # a column may raise the number of steps
        tree = config.merge(tree, more)
        if "env_steps" in tree.get("stop", {}):
            tree["stop"]["env_steps"] = max(least, tree["stop"]["env_steps"])
    if learns_from(algos.get_config_class(algo)) is DataSets:
        tree = config.merge(tree, {"data": {"input": f"matrix-data-{column}"}})
    if algos.get_config_class(algo).has_teacher:
        tree = config.merge(tree, {"algo": {"teacher": str(Path(_teachers.name) / column)}})
    if algo == "dt":
        told = {"target_return": task.best, "return_scale": abs(task.best), "step_scale": 10.0}
        tree = config.merge(tree, {"algo": told, "network": {"use_prev_reward": True, "use_prev_action": True}})
    if several := agents_of(algo, column):
        tree = config.merge(tree, {"multi_agent": several})
        if "group" in several and "mixer" in {field.name for field in dataclasses.fields(algos.get_config_class(algo))}:
            tree = config.merge(tree, {"algo": {"mixer": "sum"}})
    steps = tree["stop"].get("updates") or tree["stop"]["env_steps"]
    return config.merge(tree, {"run": {"report_every": steps // 8}})
