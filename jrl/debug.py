"""python -m jrl.debug BUNDLE: repeats the update in which a run stopped being finite, and names what broke it.

    explanation = explain(algo, state, batch, key)    # what `algo.update(state, batch, key)` does wrong, and why
    print(explanation)

Transitions are found by repeating the update with fewer rows, the operation by jax's own check of each result
(`jax_debug_nans`, `jax_debug_infs`) while the update runs operation by operation.
"""

import argparse
import dataclasses
import functools
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.errors import InputError
from jrl.fields.paths import resolve
from jrl.host import command

if TYPE_CHECKING:
    from jrl.types import Algo, Batch, EnvSpec, Key, PyTree, Rollout, SequenceBatch

_MOST_ROWS = 4  # that are printed


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Neither jax nor an environment library is imported for it."""
    text = "Name the operation and the transition that made a run's update non-finite."
    p = command.parser("debug", text)
    p.add_argument("bundle", help="<run>/nonfinite/<iteration>, or a run directory: its latest bundle")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the explanation; exit status 0, 1 if the update is finite when repeated, 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        meta, (algo, state, batch, key) = load(resolve(args.bundle, "debug", "any"))
        explanation = explain(algo, state, batch, key)
    except InputError as e:
        return command.refused(e)
    fault = meta["nonfinite"]
    print(f"not finite in training, before iteration {fault['iteration']}: {' and '.join(fault['found'])}")
    print(explanation)
    return 1 if explanation.finite else 0


@dataclasses.dataclass(frozen=True)
class Operation:
    """The first operation whose result is not finite, and its source line."""

    message: str  # jax's: which value of which primitive
    file: str  # "" if not known
    line: int
    function: str
    text: str  # source code of the line
    callers: tuple[str, ...]  # file:line, innermost first

    def __str__(self) -> str:
        lines = [f"first bad operation: {self.message}, in {self.function or 'an unknown function'}"]
        lines += [f"  {self.file}:{self.line}", f"    {self.text}"] if self.file else []
        return "\n".join([*lines, *([f"  called at {', '.join(self.callers)}"] if self.callers else [])])


@dataclasses.dataclass(frozen=True)
class Transition:
    """One row of the batch: `index` is (row,) of a Batch and (step, environment) of a Rollout."""

    index: tuple[int, ...]
    fields: Mapping[str, Any]  # obs, action, reward, ...
    non_finite: tuple[str, ...]  # fields that are not finite
    alone: bool = False  # whether the update is non-finite with this row and no other

    def __str__(self) -> str:
        where = f"row {self.index[0]}" if len(self.index) == 1 else "step {} of column {}".format(*self.index)
        found = [f"{' and '.join(self.non_finite)} not finite"] if self.non_finite else []
        found.append("enough by itself" if self.alone else "not enough by itself")
        width = max(map(len, self.fields))
        values = [f"  {name:{width}}  {compact(x)}" for name, x in self.fields.items()]
        return "\n".join([f"{where}: {', '.join(found)}", *values])


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Explanation of an update that is not finite."""

    bad: tuple[str, ...]  # results that are not finite: parts of the state, losses
    operation: Operation | None  # None: non-finite numbers were given, or arise in the compiled program only
    transitions: tuple[Transition, ...]  # rows with non-finite contents first
    note: str

    @property
    def finite(self) -> bool:
        """Returns whether the update is finite when repeated."""
        return not self.bad

    def __str__(self) -> str:
        if self.finite:
            return (
                "The update is finite when repeated: the bundle does not hold the cause. Another device, or another "
                "version of jax or jrl (see checkpoint.json), may compute it differently, or memory failed. "
                "Repeat this on the device that trained."
            )
        more = f" and {len(self.bad) - 3} more" if len(self.bad) > 3 else ""
        lines = [f"not finite when repeated: {', '.join(self.bad[:3])}{more}"]
        lines += [str(part) for part in (self.operation, self.note) if part]
        return "\n".join([*lines, *map(str, self.transitions)])


def explain(algo: "Algo", state: "PyTree", batch: "Batch | SequenceBatch | Rollout", key: "Key") -> Explanation:
    """Repeats `algo.update(state, batch, key)` and finds the operation and the rows that make it non-finite.

    Args:
      algo: made without axis_name.
      state: before the update.
      batch: what the update learned from: Batch [N], Rollout [T, B]. Of a SequenceBatch no rows are looked for.
      key: of the update.
    Returns:
      An Explanation; `finite` if the state after the update and the metrics `loss/...` are finite.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jrl.types import Batch, Rollout

    def update(state, batch):
        state, aux = algo.update(state, batch, key)
        return state, {k: v for k, v in aux.metrics.items() if k.startswith("loss")}

    new, losses = jax.device_get(jax.jit(update)(state, batch))
    kept = [np.array_equal(x, y, equal_nan=True) for x, y in zip(*map(jax.tree.leaves, (new, state)), strict=True)]
    results = _named((new, losses))
    bad = [i for i, (_, x) in enumerate(results) if not is_finite(x) and not (kept + [False] * len(losses))[i]]
    if not bad:
        return Explanation((), None, (), "")
    names = tuple(results[i][0].partition(".")[2] for i in bad)
    given = [f"state.{name}" for name, x in _named(state) if not is_finite(x)]
    if not isinstance(batch, Batch | Rollout):
        given += [f"batch.{name}" for name, x in _named(batch) if not is_finite(x)]
        operation = None if given else _first_bad_operation(update, (state, batch), infinities=False)
        return Explanation(names, operation, (), _before(given))

    @jax.jit
    def repeat(state, batch, keep):
        results = jax.tree.leaves(update(state, _only(batch, keep)))
        return ~jnp.stack([jnp.isfinite(results[i]).all() for i in bad]).all()

    batch = jax.device_get(batch)
    valid = batch.mask if isinstance(batch, Rollout) else batch.weight != 0
    is_bad = lambda rows: bool(repeat(state, batch, _mask(rows, valid.shape)))
    rows = [_row(batch, tuple(map(int, index))) for index in np.argwhere(valid)]
    rows.sort(key=lambda row: (-len(row.non_finite), -_largest(row.fields)[0]))
    without_rows = is_bad([])
    if not without_rows and not is_bad(rows):
        return Explanation(names, None, (), "Finite if masked rows are cleared: what they hold gets into the result.")
    size, name = _largest(state)
    if without_rows:
        found, note = list[Transition](), "Without any row the update is not finite either: the state is the cause."
    else:
        found, note = _causes(is_bad, rows)
    if without_rows or "a setting" in note:
        note += f" The largest number in the state is {size:.4g}, in {name}."
    broken = [row for row in rows if row.non_finite and row.index not in {x.index for x in found}]
    operation = None
    given += sorted({f"batch.{name}" for row in rows for name in row.non_finite})
    if given:
        note = f"{_before(given)} {note}".strip()
    else:
        at = functools.partial(_first_bad_operation, update)
        operation = at((state, _only(batch, valid)), infinities=True)
        if operation and operation == at((state, _only(batch, _mask([], valid.shape))), infinities=True):
            operation = at((state, _only(batch, valid)), infinities=False)  # that one was a mask's: no row is needed
        note = note if operation else f"Operation by operation the update is finite: the compiled one overflows. {note}"
    return Explanation(names, operation, tuple([*found, *broken][:_MOST_ROWS]), note)


def _before(given: Sequence[str]) -> str:
    """Says that arrays were not finite before the update; "" for none."""
    are = "is" if len(given) == 1 else "are"
    return f"{' and '.join(given[:3])} {are} not finite before the update." if given else ""


# ---------------------------------------------------------------- the rows


def _causes(is_bad: Callable[[list[Transition]], bool], rows: list[Transition]) -> tuple[list[Transition], str]:
    """Returns the rows that are each enough to make the update non-finite, or are so together; and a note."""
    rest, alone = rows, list[Transition]()
    while len(alone) < _MOST_ROWS and is_bad(rest):
        fewest = _fewest(is_bad, rest)
        if len(fewest) > 1:
            if alone:
                break
            return fewest, f"No row is enough by itself; these {len(fewest)} of {len(rows)} are together:"
        alone.append(dataclasses.replace(fewest[0], alone=True))
        rest = [row for row in rest if row.index != fewest[0].index]
    if len(alone) < _MOST_ROWS or any(row.non_finite for row in alone):
        return alone, ""
    return alone[:2], "Many rows are each enough: the state or a setting, such as the learning rate, is the cause."


def _fewest(is_bad: Callable[[list[Transition]], bool], rows: list[Transition]) -> list[Transition]:
    """Returns some of `rows`, which are enough, such that no half of them is enough."""
    while len(rows) > 1:
        half = (len(rows) + 1) // 2
        part = next((part for part in (rows[:half], rows[half:]) if is_bad(part)), None)
        if part is None:
            break
        rows = part
    return rows


def _mask(rows: Sequence[Transition], shape: tuple[int, ...]):
    import numpy as np

    mask = np.zeros(shape, bool)
    for row in rows:
        mask[row.index] = True
    return mask


def _only(batch: Any, keep) -> Any:
    """Returns the batch with every row masked and zero that is not in `keep`, [N] or [T, B] bool."""
    import jax
    import jax.numpy as jnp

    from jrl.types import Batch

    select = lambda rows, x, y: jnp.where(jnp.expand_dims(rows, tuple(range(rows.ndim, x.ndim))), x, y)
    where = lambda rows, tree: jax.tree.map(lambda x: select(rows, x, jnp.zeros_like(x)), tree)
    if isinstance(batch, Batch):
        return dataclasses.replace(where(keep, batch), index=batch.index)
    # the row after a kept one holds its next observation; what is not finite there is that row's fault, if it counts
    after = jnp.concatenate([jnp.zeros_like(keep[:1]), keep[:-1]])
    numbers = lambda x: jnp.nan_to_num(x, posinf=0.0, neginf=0.0) if jnp.issubdtype(x.dtype, jnp.inexact) else x
    seen = lambda tree: jax.tree.map(
        lambda x, cleared: select(after & batch.mask & ~keep, numbers(x), cleared),
        tree,
        where(keep | (after & ~batch.mask), tree),
    )
    return dataclasses.replace(
        batch,
        obs=seen(batch.obs),
        last_obs=where(keep[-1], batch.last_obs),
        extras=seen(batch.extras),
        **{name: where(keep, getattr(batch, name)) for name in ("action", "reward", "terminated", "truncated", "mask")},
    )


def _row(batch: Any, index: tuple[int, ...]) -> Transition:
    import jax

    from jrl.types import Batch

    at = lambda tree, index=index: jax.tree.map(lambda x: x[index], tree)
    if isinstance(batch, Batch):
        names = ("obs", "action", "reward", "discount", "next_obs", "weight")
        fields = {part: x for name in names for part, x in _named(at(getattr(batch, name)), name)}
        return Transition(index, fields, tuple(k for k, v in fields.items() if not is_finite(v)), False)
    step, column = index
    last = step + 1 == batch.reward.shape[0]
    fields = {name: at(getattr(batch, name)) for name in ("obs", "action", "reward", "terminated", "truncated")}
    fields["next_obs"] = at(batch.last_obs, (column,)) if last else at(batch.obs, (step + 1, column))
    fields = {part: x for name, tree in fields.items() for part, x in _named(tree, name)}
    fields |= {name: at(x) for name, x in _named(batch.extras)}
    another = lambda name: name.partition(".")[0] == "next_obs" and not last and batch.mask[step + 1, column]
    own = {k: v for k, v in fields.items() if not another(k)}
    return Transition(index, fields, tuple(k for k, v in own.items() if not is_finite(v)), False)


# ---------------------------------------------------------------- the operation


def _first_bad_operation(fn: Callable, args: tuple, infinities: bool) -> Operation | None:
    """Evaluates `fn(*args)` operation by operation until a result is NaN (or infinite, if asked for)."""
    import jax

    with jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(infinities):
        try:
            jax.block_until_ready(fn(*args))
        except FloatingPointError as e:
            return _operation(e)
    return None


_PACKAGE = Path(__file__).parent
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def _operation(error: FloatingPointError) -> Operation:
    """Returns the operation that jax's error is about; the cause of one in a backward pass is its forward line."""
    forward = error.__cause__
    frames = [f for e in (error, forward) if e for f in traceback.extract_tb(e.__traceback__) if not _is_library(f)]
    backward = forward is not None and any(not _is_library(f) for f in traceback.extract_tb(forward.__traceback__))
    message = str(error).partition("\n")[0].rstrip(".") + (", in the backward pass" if backward else "")
    frame = frames[-1] if frames else traceback.FrameSummary("", 0, "")
    text = linecache.getline(frame.filename, frame.lineno or 0).strip()
    callers = tuple(dict.fromkeys(f"{_short(f.filename)}:{f.lineno}" for f in reversed(frames)))[1:7]
    return Operation(message, _short(frame.filename), frame.lineno or 0, frame.name, text, callers)


def _is_library(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    return name == __file__ or "<" in name or (name.startswith(_LIBRARIES) and str(_PACKAGE) not in name)


def _short(filename: str) -> str:
    """Returns the path of jrl's file from `jrl/` on."""
    return filename.removeprefix(f"{_PACKAGE.parent}/")


# ---------------------------------------------------------------- the bundle


def load(path: Path) -> tuple[dict[str, Any], tuple["Algo", "PyTree", "Batch | SequenceBatch | Rollout", "Key"]]:
    """Reads what stands beside the arrays of a bundle, and the arguments of `explain`.

    Args:
      path: of a bundle, or of a run directory: its latest one.
    Raises:
      InputError: there is none, it is damaged, or does not fit this version.
    """
    import jax
    import jax.numpy as jnp

    from jrl.host import runtime
    from jrl.run import build, build_policies, checkpoint
    from jrl.settings import config

    within = path / "nonfinite"
    found = checkpoint.locate(within if within.is_dir() else path)
    meta = checkpoint.read_meta(found)
    if "nonfinite" not in meta:
        raise InputError(f"{found} is a checkpoint, no bundle of a non-finite update: give <run>/nonfinite/<iteration>")
    cfg = config.override(meta["config"], [])
    runtime.apply(cfg.runtime)
    spec = checkpoint.spec(meta)
    algo = build.algorithm(cfg, spec)
    key = jax.random.wrap_key_data(jnp.asarray(meta["nonfinite"]["key"], jnp.uint32))
    state = checkpoint.restore(found, "learner", jax.eval_shape(algo.init, key))
    rollout = build_policies.rollout_like(cfg, spec, algo, length=1, num_envs=1)
    extras = {} if algo.on_policy else checkpoint.read(found, "batch").get("extras", {})
    return meta, (algo, state, checkpoint.read(found, "batch", _like(algo, spec, rollout, extras)), key)


def _like(
    algo: "Algo", spec: "EnvSpec", rollout: "Rollout", extras: "dict[str, PyTree]"
) -> "Batch | SequenceBatch | Rollout":
    """Returns the containers of what an algorithm learns from; their leaves are of any shape.

    Args:
      algo, spec: of the run.
      rollout: of it.
      extras: of a sample, as they were saved: in dicts and lists.
    """
    from jrl.types import NEXT_ACTION, Batch, SequenceBatch, Window, element

    if algo.on_policy:
        return rollout
    obs, action, any_ = element(spec.observation), element(spec.action), rollout.reward
    if NEXT_ACTION in extras:
        extras = {**extras, NEXT_ACTION: {"action": action, "valid": any_}}
    if algo.sequences:
        window = Window(obs, rollout.extras["carry"], any_)
        return SequenceBatch(window, action, any_, any_, any_, any_, any_, extras)
    return Batch(obs, action, any_, any_, obs, any_, any_, extras)


# ---------------------------------------------------------------- arrays


def is_finite(x: Any) -> bool:
    """Returns whether an array, a number or None holds neither infinity nor NaN."""
    import jax.numpy as jnp
    import numpy as np

    is_float = x is not None and jnp.issubdtype(x.dtype if hasattr(x, "dtype") else type(x), jnp.inexact)
    return not is_float or bool(np.isfinite(np.asarray(x)).all())


def compact(x: Any) -> str:
    """Describes a number, a short array, or the shape and range of a long one."""
    import numpy as np

    x = np.asarray(x)
    if x.size <= 16:
        return np.array2string(x, precision=4, max_line_width=100).replace("\n", "")
    finite = x[np.isfinite(x)]
    span = f"{finite.min():.4g} .. {finite.max():.4g}" if finite.size else "nothing finite"
    missing = f", {x.size - finite.size} not finite" if finite.size < x.size else ""
    return f"{x.dtype}{list(x.shape)} {span}{missing}"


def _named(tree, prefix: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves with their names, such as params.policy.kernel."""
    import jax

    names = lambda path: filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator=".")))
    return [(".".join(names(path)), x) for path, x in jax.tree.leaves_with_path(tree)]


def _largest(tree) -> tuple[float, str]:
    """Returns the largest finite absolute value among the floats, and the name of its array."""
    import numpy as np

    floats = [(np.abs(np.asarray(x, np.float64)), n) for n, x in _named(tree) if np.issubdtype(x.dtype, np.floating)]
    return max(((float(x[np.isfinite(x)].max(initial=0.0)), name) for x, name in floats), default=(0.0, ""))


if __name__ == "__main__":
    sys.exit(command.run(main))
