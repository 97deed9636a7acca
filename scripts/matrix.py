"""Which algorithm can do what: each cell of a table is a short training run.

    python scripts/matrix.py                                  # all cells, as a table
    python scripts/matrix.py --algo ppo dqn --column mask     # some of them
    python scripts/matrix.py --write README.md                # all, and the table goes between the markers of a file

A cell trains for some seconds in a small environment written in JAX, and the greedy policy has to reach a return that
is well above that of random actions. Beside that, no action that the policy with a mask takes may be a forbidden one,
and a run that continues from a checkpoint has to end with the same arrays as one that was not interrupted, bit by bit.
What an algorithm cannot do is what is refused with an InputError that names it, before training; that message is the
cell's reason.
Anything else is a failure, and the exit status 1.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl import algos, registry, spaces
from jrl.algos import dqn, uniform
from jrl.envs.jax_env import Definition
from jrl.errors import InputError
from jrl.fields.data import Replay, learns_from
from jrl.rollout import unroll
from jrl.run import build, checkpoint
from jrl.run.session import Session
from jrl.settings import config
from jrl.types import ActOut, Box, JaxEnv, PyTree, Rollout

START, END = "<!-- matrix -->", "<!-- /matrix -->"
EPISODES = 64  # of an evaluation
SAMPLES = (64, 64)  # environments and steps in which the actions under a mask are looked at, exploring and greedy each
ECHO = "matrix-echo"  # `echo` as env.id

# ---------------------------------------------------------------- what is tried


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


# of Nested-v0, whoever does not read the image gets 4, 12, 28 and, with a mask, 6 at best
_nested = lambda **options: {"length": 8, **options}
TASKS = {
    "catch": Task("Catch-v0", {}, random=-0.63, threshold=0.6, best=1.0, gamma=0.95),
    "echo": Task(ECHO, {}, random=-3.4, threshold=6.0, best=10.0),
    "dict": Task("Nested-v0", _nested(), random=1.33, threshold=6.5, best=8.0),
    "dict, box": Task("Nested-v0", _nested(action="box"), random=6.6, threshold=13.0, best=16.0),
    "dict, multi_discrete": Task("Nested-v0", _nested(action="multi_discrete"), random=13.4, threshold=30.0, best=32.0),
    "mask": Task("Nested-v0", _nested(mask=True), random=2.6, threshold=7.0, best=8.0),
    "repeat": Task("RepeatAfterMe-v0", {"delay": 0, "episode_length": 10}, random=0.0, threshold=7.0, best=10.0),
    # without memory: 1 at best
    "memory": Task("RepeatAfterMe-v0", {"delay": 1, "episode_length": 10}, random=0.0, threshold=7.0, best=10.0),
    # without memory: 1 at best
    "memory, box": Task(ECHO, {"delay": 1}, random=-3.0, threshold=5.0, best=10.0),
}


@dataclasses.dataclass(frozen=True)
class Column:
    """A feature: the task in which it is tried, and what it needs in the config."""

    task: str
    box_task: str | None = None  # for those of BOX; None: the same
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    prove: str | None = None  # beside the return: a key of PROOFS


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
}
NAMES = tuple(name for name in algos.names() if not algos.get_config_class(name).in_teams)  # these tasks are no teams
BOX = ("td3",)  # tried with Box actions where a column leaves the kind open

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
}
_ALL = {
    "env": {"backend": "jax"},
    # what comes from an image is larger than the rest of an observation, and steps are large
    "network": {"hidden": [32], "activation": "relu", "layer_norm": True},
    "devices": {"learners": [0]},
    "run": {"log": [], "stall_seconds": None},
}


def task_of(algo: str, column: str) -> Task:
    found = COLUMNS[column]
    return TASKS[found.box_task or found.task if algo in BOX else found.task]


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
    for more in (_ALL, of_algorithm(algo), COLUMNS[column].config):
        tree = config.merge(tree, more)
    return config.merge(tree, {"run": {"report_every": tree["stop"]["env_steps"] // 8}})


# ---------------------------------------------------------------- one cell


@dataclasses.dataclass(frozen=True)
class Cell:
    """What came of one; `status` is learned, refused or failed, `reason` says why it is not the first."""

    algo: str
    column: str
    status: str
    reason: str = ""
    env: str = ""
    random: float | None = None
    threshold: float | None = None
    mean_return: float | None = None  # of the greedy policy
    env_steps: int | None = None
    seconds: float = 0.0
    proof: dict[str, Any] | None = None  # what was seen beside the return


class Failed(Exception):
    """A cell did not do what it has to; the message says what."""


def run(algo: str, column: str, *, seed: int = 0) -> Cell:
    """Trains one cell and looks at what it learned. Raises nothing that comes from the cell."""
    began, task = time.perf_counter(), task_of(algo, column)
    cell = Cell(algo, column, "failed", env=task.id, random=task.random, threshold=task.threshold)
    try:
        with contextlib.ExitStack() as stack:
            try:
                cfg = config.from_dict(settings(algo, column, seed))
                session = stack.enter_context(Session(cfg))
                session.start()
            except InputError as e:  # said before training: the library knows that it cannot
                reason = " ".join(e.errors)
                if algo not in reason:  # a mistake in the config of the cell would be one, too
                    raise Failed(f"refused, but not as something that {algo} cannot do: {reason}") from e
                return dataclasses.replace(cell, status="refused", reason=reason, seconds=_since(began))
            prove = PROOFS[COLUMNS[column].prove or "nothing"]
            proof = prove(session)
            found = session.evaluate(EPISODES)["return"]
            cell = dataclasses.replace(cell, mean_return=round(found, 3), env_steps=session.counted(), proof=proof)
            if not found >= task.threshold:
                raise Failed(f"a return of {found:.3g}, below {task.threshold:g}")
            cell = dataclasses.replace(cell, status="learned")
    except Failed as e:
        cell = dataclasses.replace(cell, reason=str(e))
    except Exception as e:  # the other cells are of interest as well
        traceback.print_exc()
        cell = dataclasses.replace(cell, reason=f"{type(e).__name__}: {e}"[:500])
    return dataclasses.replace(cell, seconds=_since(began))


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 1)


def train(session: Session, until: float = float("inf")) -> None:
    """To the end of the step budget, or until so many calls have been made."""
    while session.iteration < until and (info := session.advance()):
        session.after(info)


def train_and_look_at_actions(session: Session) -> dict[str, Any]:
    """Trains, and counts the forbidden ones among the actions that the policy takes."""
    train(session)
    num_envs, length = SAMPLES
    env, algo = build.environment(session.config, num_envs=num_envs, role="eval"), session.run.algo
    assert isinstance(env, JaxEnv)
    proof: dict[str, Any] = {}
    for explore in (True, False):
        play = unroll.make(env, algo.act, length=length, carry=algo.carry, explore=explore)
        _, rollout, _ = jax.jit(play.step)(play.init(jax.random.key(1)), session.actor(), jax.random.key(2))
        taken, forbidden = count_forbidden(env, rollout)
        proof |= {f"{'exploring' if explore else 'greedy'} actions": taken, "forbidden actions": forbidden}
        if forbidden:
            raise Failed(f"{forbidden} of {taken} actions were forbidden by the mask, explore={explore}")
    return proof


def count_forbidden(env: JaxEnv, rollout: Rollout) -> tuple[int, int]:
    """(actions taken, those of them that the mask of their row forbids); reset rows, which take none, aside."""
    counts = np.asarray(rollout.mask)
    can = np.asarray(spaces.split_mask(env.spec.observation, rollout.obs)[1])
    # from the choices of an action to entries of the mask
    forbidden, start = np.zeros(counts.shape, bool), 0
    for (_, leaf), action in zip(spaces.leaves(env.spec.action), jax.tree.leaves(rollout.action), strict=True):
        sizes = getattr(leaf, "nvec", (getattr(leaf, "n", 0),)) if spaces.num_choices(leaf) else ()
        for i, n in enumerate(sizes):
            chosen = np.asarray(action).reshape(*counts.shape, -1)[..., i]
            forbidden |= ~np.take_along_axis(can[..., start : start + n], chosen[..., None], -1)[..., 0]
            start += n
    return int(counts.sum()), int((forbidden & counts).sum())


def train_and_resume(session: Session) -> dict[str, Any]:
    """Trains, with a checkpoint on half of the way, and once more from there; compares what there is at the end."""
    info = session.advance()
    assert info is not None
    session.after(info)
    each = max(1, session.counted())  # steps of a call
    train(session, until=session.iteration * (session.config.stop["env_steps"] // (2 * each)))
    with tempfile.TemporaryDirectory() as directory:
        saved, steps = Path(directory) / "half", session.counted()
        checkpoint.write(saved, checkpoint.on_host(session.parts()), session.description())
        train(session)
        with Session(session.config) as other:
            other.start(saved)
            train(other)
            differ = differences(session.parts(), other.parts())
            counts = (session.counted(), other.counted())
    if differ or counts[0] != counts[1] or not 0 < steps < counts[0]:
        raise Failed(f"resumed at {steps} steps, {counts[1]} of {counts[0]} steps, other arrays: {differ[:5]}")
    return {"resumed at": steps, "arrays": len(jax.tree.leaves(session.parts()))}


def differences(a: PyTree, b: PyTree) -> list[str]:
    """Paths of the arrays that are not the same, bit by bit."""
    x, y = (jax.tree.leaves_with_path(jax.device_get(tree)) for tree in (a, b))
    same = lambda p, q: (p.shape, p.dtype, p.tobytes()) == (q.shape, q.dtype, q.tobytes())
    return [jax.tree_util.keystr(path) for (path, p), (_, q) in zip(x, y, strict=True) if not same(p, q)]


def _train_only(session: Session) -> None:
    train(session)


PROOFS: dict[str, Callable[[Session], dict[str, Any] | None]] = {
    "nothing": _train_only,
    "mask": train_and_look_at_actions,
    "resume": train_and_resume,
}


def random_return(task: Task, *, num_envs: int = 512, length: int = 128) -> float:
    """The mean return of the uniformly random actions of those that can be taken."""
    cfg = config.from_dict({"algo": {"name": "ppo"}, "env": {"id": task.id, "options": task.options, "backend": "jax"}})
    env = build.environment(cfg, num_envs=num_envs, role="eval")
    assert isinstance(env, JaxEnv)

    def act(actor, obs, carry, key, explore):
        mask = spaces.split_mask(env.spec.observation, obs)[1]
        return ActOut(uniform.sample(env.spec.action, key, (num_envs,), mask), carry, {})

    play = unroll.make(env, act, length=length, window=num_envs)
    state, _, _ = jax.jit(play.step)(play.init(jax.random.key(0)), (), jax.random.key(1))
    return float(np.nanmean(state.columns.window_return))


registry.register(ECHO, echo)

# ---------------------------------------------------------------- the table

_MARKS = {"learned": "✓", "refused": "-", "failed": "✗"}


def reasons(cells: Iterable[Cell]) -> dict[str, int]:
    """Why cells are empty -> number, in order; the same reason has one number."""
    found: dict[str, int] = {}
    for cell in cells:
        if cell.status != "learned":
            found.setdefault(cell.reason, len(found) + 1)
    return found


def grid(cells: Sequence[Cell], note: str) -> list[list[str]]:
    """Rows of texts, the first of them the names of the columns; `note` formats the number of a reason."""
    numbers, by_place = reasons(cells), {(cell.algo, cell.column): cell for cell in cells}
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*by_place))

    def text(cell: Cell | None) -> str:
        if cell is None:
            return ""
        return _MARKS[cell.status] + (note.format(numbers[cell.reason]) if cell.status != "learned" else "")

    return [["", *columns], *([row, *(text(by_place.get((row, column))) for column in columns)] for row in rows)]


def markdown(cells: Sequence[Cell]) -> str:
    """The table, the reasons of its empty cells, and how it was made."""
    head, *body = grid(cells, "<sup>{}</sup>")
    lines = [f"| {' | '.join(head)} |", f"| --- {'| :-: ' * (len(head) - 1)}|"]
    lines += [f"| `{name}` | {' | '.join(texts)} |" for name, *texts in body]
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons(cells).items())]
    learned = sum(cell.status == "learned" for cell in cells)
    steps = max((cell.env_steps or 0 for cell in cells), default=0)
    lines += [
        "",
        f"`make matrix` makes this table: each of the {learned} ✓ is a training run of at most {steps:,} steps that "
        "reached its\nreturn, each - what the library says when it is tried.",
    ]
    return "\n".join(lines)


def terminal(cells: Sequence[Cell]) -> str:
    """The same, for a terminal."""
    rows = grid(cells, " {}")
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{number}: {reason}" for reason, number in reasons(cells).items())])


def write(path: Path, cells: Sequence[Cell]) -> None:
    """Puts the table between the markers of a file.

    Raises:
      InputError: the file has no such markers.
    """
    text = path.read_text()
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise InputError(f"--write {path}: expected {START} and {END}, between which the table is to stand")
    path.write_text(f"{before}{START}\n{markdown(cells)}\n{END}{after}")


def line(cell: Cell) -> str:
    """One cell for whoever waits."""
    if cell.status == "learned":
        what = f"return {cell.mean_return:g}, at least {cell.threshold:g} (random {cell.random:g})"
        what += "".join(f", {value} {name}" for name, value in (cell.proof or {}).items())
    else:
        what = cell.reason
    return f"{cell.algo:8}{cell.column:18}{cell.status:9}{cell.seconds:5.1f} s  {what}"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--algo", nargs="+", choices=NAMES, default=NAMES, help="rows (all)")
    p.add_argument("--column", nargs="+", choices=tuple(COLUMNS), default=tuple(COLUMNS), help="columns (all)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="file for one JSON line per cell")
    p.add_argument("--write", type=Path, help=f"file with {START} and {END} for the table of all cells")
    args = p.parse_args(argv)
    whole = len(args.algo) == len(NAMES) and len(args.column) == len(COLUMNS)
    if args.write and not whole:
        p.error("--write is for the whole table: leave --algo and --column out")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with contextlib.suppress(RuntimeError):  # jax has started already
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", 2)
    build.enable_compile_cache()
    cells = []
    with open(args.json or os.devnull, "w") as file:
        for algo in args.algo:
            for column in args.column:
                cells.append(run(algo, column, seed=args.seed))
                print(line(cells[-1]), flush=True)
                file.write(json.dumps(dataclasses.asdict(cells[-1])) + "\n")
                jax.clear_caches()  # programs of a cell are of no use to the next
    print("", terminal(cells), f"{sum(cell.seconds for cell in cells):.0f} s", sep="\n")
    if args.write:
        write(args.write, cells)
    return int(any(cell.status == "failed" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
