"""Which algorithm can do what: each cell of a table is a short training run.

    python scripts/matrix.py                                  # all cells, as a table
    python scripts/matrix.py --algo ppo dqn --column mask     # some of them
    python scripts/matrix.py --write docs/matrix.md           # all, and the table goes between the markers of a file
    python scripts/matrix.py --reuse a.jsonl --write docs/matrix.md     # without the cells that --json a.jsonl wrote

A cell trains for some seconds in a small environment written in JAX, and the greedy policy has to reach a return that
is well above that of random actions. Beside that, no action that the policy with a mask takes may be a forbidden one,
and a run that continues from a checkpoint has to end with the same arrays as one that was not interrupted, bit by bit.
Several agents are two, each with the task of its own: their policies have to be one stack, or the two are a team. An
algorithm that acts for teams alone has a team in each column. Returns are sums over agents. What is tried is
scripts/matrix_tasks.py.
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
import numpy as np
from matrix_tasks import COLUMNS, Task, settings, task_of, train_teacher

from jrl import algos, config, spaces
from jrl.algos import uniform
from jrl.config import Sizes
from jrl.errors import InputError
from jrl.fields.data import traits
from jrl.rollout import unroll
from jrl.run import build
from jrl.run.session import Session
from jrl.run.store import checkpoint
from jrl.types import ActOut, JaxEnv, PyTree, Rollout

START, END = "<!-- matrix -->", "<!-- /matrix -->"
EPISODES = 64  # of an evaluation
SAMPLES = (64, 64)  # environments and steps in which the actions under a mask are looked at, exploring and greedy each

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
                if traits(cfg.algo).has_teacher:
                    train_teacher(column)
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
        session.finish_call(info)


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
    session.finish_call(info)
    each = max(1, session.counted())  # steps of a call
    train(session, until=session.iteration * ((Sizes(session.config).total_steps or 0) // (2 * each)))
    with tempfile.TemporaryDirectory() as directory:
        saved, steps = Path(directory) / "half", session.counted()
        checkpoint.write(saved, checkpoint.copy_to_host(session.parts()), session.description())
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


def train_and_count_stacks(session: Session) -> dict[str, Any]:
    """Trains, and looks whether the agents' policies are two in one program."""
    train(session)
    stacks = [group.names for group in session.run.policies.groups]
    if len(stacks) != 1 or len(stacks[0]) != 2:
        raise Failed(f"expected two policies in one stack, got {stacks}")
    return {"stacked policies": len(stacks[0])}


PROOFS: dict[str, Callable[[Session], dict[str, Any] | None]] = {
    "nothing": _train_only,
    "mask": train_and_look_at_actions,
    "resume": train_and_resume,
    "stacked": train_and_count_stacks,
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


def read(path: Path) -> list[Cell]:
    """The cells of a file that --json wrote."""
    return [Cell(**json.loads(text)) for text in path.read_text().splitlines()]


def line(cell: Cell) -> str:
    """One cell for whoever waits."""
    if cell.status == "learned":
        what = f"return {cell.mean_return:g}, at least {cell.threshold:g} (random {cell.random:g})"
        what += "".join(f", {value} {name}" for name, value in (cell.proof or {}).items())
    else:
        what = cell.reason
    return f"{cell.algo:11}{cell.column:18}{cell.status:9}{cell.seconds:5.1f} s  {what}"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--algo", nargs="+", choices=algos.names(), default=algos.names(), help="rows (all)")
    p.add_argument("--column", nargs="+", choices=tuple(COLUMNS), default=tuple(COLUMNS), help="columns (all)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="file for one JSON line per cell")
    p.add_argument("--reuse", type=Path, nargs="+", default=[], help="files of --json, whose cells are not run again")
    p.add_argument("--write", type=Path, help=f"file with {START} and {END} for the table of all cells")
    args = p.parse_args(argv)
    whole = tuple(args.algo) == algos.names() and len(args.column) == len(COLUMNS)
    if args.write and not whole:
        p.error("--write is for the whole table: leave --algo and --column out")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with contextlib.suppress(RuntimeError):  # jax has started already
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", 2)
    build.enable_compile_cache()
    cells = []
    known = {(cell.algo, cell.column): cell for path in args.reuse for cell in read(path)}
    with open(args.json or os.devnull, "w", buffering=1) as file:
        for algo in args.algo:
            for column in args.column:
                cells.append(known.get((algo, column)) or run(algo, column, seed=args.seed))
                print(line(cells[-1]), flush=True)
                file.write(json.dumps(dataclasses.asdict(cells[-1])) + "\n")
                jax.clear_caches()  # programs of a cell are of no use to the next
    print("", terminal(cells), f"{sum(cell.seconds for cell in cells):.0f} s", sep="\n")
    if args.write:
        write(args.write, cells)
    return int(any(cell.status == "failed" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
