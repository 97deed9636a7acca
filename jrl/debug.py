"""python -m jrl.debug BUNDLE: repeat a non-finite update; name its first bad operation and the transitions behind it.

    print(explain(algo, state, batch, key))    # explains `algo.update(state, batch, key)`

The transitions are found by repeating the update with fewer rows. The operation is found by running the update
operation by operation, with jax's check of each result (`jax_debug_nans`, `jax_debug_infs`).
"""

import argparse
import dataclasses
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jrl.errors import InputError, format_names
from jrl.fields.paths import resolve
from jrl.host import command

if TYPE_CHECKING:
    from jrl.types import Algo, Batch, EnvSpec, Key, PyTree, Rollout, SequenceBatch

Row = tuple[int, ...]  # index of a transition in the batch: (row,) or (step, environment)

_MOST_ROWS = 4  # printed rows
_STEP_ARRAYS = ("action", "reward", "terminated", "truncated")  # arrays of a Rollout with an entry for each step
_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


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
        return command.report_input_error(e)
    fault = meta["nonfinite"]
    print(f"not finite in training, before iteration {fault['iteration']}: {' and '.join(fault['found'])}")
    print(explanation)
    return int(explanation.finite)


class Transition(NamedTuple):
    """One transition of the batch: `row` is (row,) of a Batch and (step, environment) of a Rollout."""

    row: Row
    fields: Mapping[str, Any]  # obs, action, reward, ...
    non_finite: tuple[str, ...]  # fields that are not finite
    alone: bool  # the update is non-finite with this row only

    def __str__(self) -> str:
        where = f"row {self.row[0]}" if len(self.row) == 1 else "step {} of column {}".format(*self.row)
        found = [f"{' and '.join(self.non_finite)} not finite"] if self.non_finite else []
        found.append("enough by itself" if self.alone else "not enough by itself")
        width = max(map(len, self.fields))
        values = [f"  {name:{width}}  {compact(x)}" for name, x in self.fields.items()]
        return "\n".join([f"{where}: {', '.join(found)}", *values])


class Explanation(NamedTuple):
    """Explanation of an update that is not finite."""

    bad: tuple[str, ...]  # results that are not finite: parts of the state, losses; () if the update is finite
    operation: str = ""  # first bad operation and its line; "": the inputs are not finite, or only the compiled update
    transitions: tuple[Transition, ...] = ()
    note: str = ""

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
        lines = [f"not finite when repeated: {format_names(self.bad, 3)}", self.operation, self.note]
        return "\n".join(str(line) for line in (*lines, *self.transitions) if line)


def explain(algo: "Algo", state: "PyTree", batch: "Batch | SequenceBatch | Rollout", key: "Key") -> Explanation:
    """Repeats `algo.update(state, batch, key)` and finds the operation and the rows that make it non-finite.

    Args:
      algo: Algo made without axis_name.
      state: State before the update.
      batch: data of the update: Batch [N], Rollout [T, B], or a SequenceBatch, whose rows are not searched.
      key: PRNG key of the update.
    Returns:
      An Explanation; `finite` if the state after the update and the metrics `loss/...` are finite.
    """
    import jax
    import jax.numpy as jnp

    from jrl.types import Batch, Rollout

    def update(state, batch):
        state, aux = algo.update(state, batch, key)
        return state, {k: v for k, v in aux.metrics.items() if k.startswith("loss")}

    results, before = _named(jax.device_get(jax.jit(update)(state, batch))), jax.tree.leaves(state)
    is_kept = lambda i, x: i < len(before) and np.array_equal(x, before[i], equal_nan=True)
    bad = [i for i, (_, x) in enumerate(results) if not is_finite(x) and not is_kept(i, x)]
    names = tuple(results[i][0].partition(".")[2] for i in bad)
    if not bad:
        return Explanation(())
    if not isinstance(batch, Batch | Rollout):
        note = _not_finite_before(state, batch)
        return Explanation(names, "" if note else _first_bad_operation(update, state, batch, False), note=note)

    @jax.jit
    def repeat(state, batch, keep):
        results = jax.tree.leaves(update(state, _only(batch, keep)))
        return ~jnp.stack([jnp.isfinite(results[i]).all() for i in bad]).all()

    def is_bad(rows: list[Row]) -> bool:
        keep = np.zeros_like(valid)
        for row in rows:
            keep[row] = True
        return bool(repeat(state, batch, keep))

    batch = jax.device_get(batch)
    valid = batch.mask if isinstance(batch, Rollout) else batch.weight != 0
    table, wrong = _table(batch)
    count = sum(x.astype(int) for x in wrong.values())
    floats = [np.abs(x).reshape(*valid.shape, -1).max(-1, initial=0) for x in table.values() if _is_float(x)]
    order = np.lexsort((-np.max(floats, 0)[valid], -count[valid]))  # with the largest numbers first
    rows: list[Row] = [tuple(row) for row in np.argwhere(valid)[order].tolist()]
    cause_is_state, found, alone = is_bad([]), list[Row](), list[Row]()
    if cause_is_state:
        note = "Without any row the update is not finite either: the state is the cause."
    elif not is_bad(rows):
        return Explanation(names, note="Finite if masked rows are cleared: masked rows affect the result.")
    else:
        found, alone, note = _causes(is_bad, rows)
        if len(alone) == _MOST_ROWS and not count[tuple(zip(*alone, strict=True))].any():
            found, cause_is_state = alone[:2], True
            note = "Many rows are each enough: the state or a setting, such as the learning rate, is the cause."
    if cause_is_state:
        largest = [(float(np.max(np.abs(x), initial=0)), name) for name, x in _named(state) if _is_float(x)]
        note += " The largest number in the state is {:.4g}, in {}.".format(*max(largest, default=(0.0, "")))
    operation, cleared = "", _only(batch, valid)
    if before_update := _not_finite_before(state, cleared):
        note = f"{before_update} {note}".strip()
    else:
        operation = _first_bad_operation(update, state, cleared, True)
        # the same infinities without any row belong to a mask: search for NaN only
        if operation and operation == _first_bad_operation(update, state, _only(batch, valid & False), True):
            operation = _first_bad_operation(update, state, cleared, False)
        overflows = "The update is finite operation by operation: only the compiled update overflows."
        note = note if operation else f"{overflows} {note}"
    transitions = [
        Transition(
            row=row,
            fields={name: x[row] for name, x in table.items()},
            non_finite=tuple(name for name, x in wrong.items() if x[row]),
            alone=row in alone,
        )
        for row in [*dict.fromkeys([*found, *(row for row in rows if count[row])])][:_MOST_ROWS]
    ]
    return Explanation(names, operation, tuple(transitions), note)


def _not_finite_before(state: Any, batch: Any) -> str:
    """Returns a sentence about arrays that were not finite before the update; "" if there are none."""
    names = [name for name, x in _named({"state": state, "batch": batch}) if not is_finite(x)]
    are = "is" if len(names) == 1 else "are"
    return f"{' and '.join(names[:3])} {are} not finite before the update." if names else ""


# ---------------------------------------------------------------- the rows


def _causes(is_bad: Callable[[list[Row]], bool], rows: list[Row]) -> tuple[list[Row], list[Row], str]:
    """Returns the rows that make the update non-finite, the rows that do so alone, and a note."""
    rest, alone = rows, list[Row]()
    while len(alone) < _MOST_ROWS and is_bad(rest):
        fewest = rest
        while len(fewest) > 1:  # until neither half is enough
            half = (len(fewest) + 1) // 2
            part = next((part for part in (fewest[:half], fewest[half:]) if is_bad(part)), None)
            if part is None:
                if alone:
                    return alone, alone, ""
                return fewest, [], f"No row is enough by itself; these {len(fewest)} of {len(rows)} are together:"
            fewest = part
        alone += fewest
        rest = [row for row in rest if row not in alone]
    return alone, alone, ""


def _only(batch: Any, keep: Any) -> Any:
    """Returns the batch with all rows masked and zero except those of `keep`, [N] or [T, B] bool."""
    import jax
    import jax.numpy as jnp

    from jrl.types import Batch

    select = lambda rows, x, y: jnp.where(jnp.expand_dims(rows, tuple(range(rows.ndim, x.ndim))), x, y)
    where = lambda rows, tree: jax.tree.map(lambda x: select(rows, x, jnp.zeros_like(x)), tree)
    if isinstance(batch, Batch):
        return dataclasses.replace(where(keep, batch), index=batch.index)
    # the row after a kept row holds its next observation; clear non-finite numbers that belong to a row of its own
    after = jnp.concatenate([jnp.zeros_like(keep[:1]), keep[:-1]])
    finite = lambda x: select(after & batch.mask & ~keep, jnp.nan_to_num(x, posinf=0.0, neginf=0.0), x)
    seen = lambda tree: where(keep | after, jax.tree.map(finite, tree))
    steps = {name: where(keep, getattr(batch, name)) for name in (*_STEP_ARRAYS, "mask")}
    last_obs = where(keep[-1], batch.last_obs)
    return dataclasses.replace(batch, **steps, obs=seen(batch.obs), last_obs=last_obs, extras=seen(batch.extras))


def _table(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (name -> array of all rows [N, *] or [T, B, *], name -> bool [N] or [T, B], not finite)."""
    import jax

    from jrl.types import Batch

    is_own: Any = True
    if isinstance(batch, Batch):
        parts = {name: getattr(batch, name) for name in ("obs", "action", "reward", "discount", "next_obs", "weight")}
    else:
        parts = {name: getattr(batch, name) for name in ("obs", *_STEP_ARRAYS)} | batch.extras
        join = lambda x, last: np.concatenate([x[1:], last[None]])
        parts["next_obs"] = jax.tree.map(join, batch.obs, batch.last_obs)
        is_own = ~join(batch.mask, np.zeros_like(batch.mask[0]))  # otherwise the number belongs to the next row
    table = dict(_named(parts))
    rows = batch.reward.ndim
    wrong = {name: ~np.isfinite(x).reshape(*x.shape[:rows], -1).all(-1) for name, x in table.items() if _is_float(x)}
    return table, {name: x & is_own if name.split(".")[0] == "next_obs" else x for name, x in wrong.items()}


# ---------------------------------------------------------------- the operation


def _first_bad_operation(update: Callable, state: Any, batch: Any, infinities: bool) -> str:
    """Runs the update operation by operation until a result is NaN (or infinite); returns its description, or ""."""
    import jax

    with jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(infinities):
        try:
            jax.block_until_ready(update(state, batch))
            return ""
        except FloatingPointError as e:
            error = e
    frames, forward = (
        [f for f in traceback.extract_tb(e.__traceback__) if not _is_library(f.filename)] if e else []
        for e in (error, error.__cause__)  # the cause of an error in a backward pass has its forward line
    )
    message = str(error).partition("\n")[0].rstrip(".") + (", in the backward pass" if forward else "")
    frames += forward
    if not frames:
        return f"first bad operation: {message}, in an unknown function"
    short = lambda f: f"{f.filename.removeprefix(_PACKAGE.removesuffix('jrl'))}:{f.lineno}"  # jrl/... for own files
    place, *callers = dict.fromkeys(map(short, reversed(frames)))
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    lines = [f"first bad operation: {message}, in {frames[-1].name}", f"  {place}", f"    {line}"]
    return "\n".join([*lines, *([f"  called at {', '.join(callers[:6])}"] if callers else [])])


def _is_library(name: str) -> bool:
    return name == __file__ or "<" in name or (name.startswith(_LIBRARIES) and not name.startswith(_PACKAGE))


# ---------------------------------------------------------------- the bundle


def load(path: Path) -> tuple[dict[str, Any], tuple["Algo", "PyTree", "Batch | SequenceBatch | Rollout", "Key"]]:
    """Reads the metadata of a bundle, or of a run directory's latest bundle, and the arguments of `explain`.

    Raises:
      InputError: there is no bundle, or the bundle is damaged or does not fit this version.
    """
    import jax
    import jax.numpy as jnp

    from jrl import config
    from jrl.agents.policies import rollout_like
    from jrl.host import runtime
    from jrl.run import build
    from jrl.run.store import checkpoint

    within = path / "nonfinite"
    found = checkpoint.locate(within if within.is_dir() else path)
    meta = checkpoint.read_meta(found)
    if "nonfinite" not in meta:
        raise InputError(
            f"debug: expected the bundle of a non-finite update, got the checkpoint {found}: give "
            "<run>/nonfinite/<iteration>"
        )
    cfg = config.override(meta["config"], [])
    runtime.apply(cfg.runtime)
    spec = checkpoint.read_spec(meta)
    algo = build.algorithm(cfg, spec)
    key = jax.random.wrap_key_data(jnp.asarray(meta["nonfinite"]["key"], jnp.uint32))
    state = checkpoint.restore(found, "learner", jax.eval_shape(algo.init, key))
    rollout: Any = rollout_like(config.Sizes(cfg), spec, algo, length=1, num_envs=1)
    extras = {} if algo.on_policy else checkpoint.read(found, "batch").get("extras", {})
    like = rollout if algo.on_policy else _sample_like(algo, spec, rollout, extras)
    return meta, (algo, state, checkpoint.read(found, "batch", like), key)


def _sample_like(
    algo: "Algo", spec: "EnvSpec", rollout: "Rollout", extras: "dict[str, PyTree]"
) -> "Batch | SequenceBatch":
    """Returns the structure of a replay's sample with these extras; the shapes of its leaves do not matter."""
    from jrl.types import NEXT_ACTION, Batch, SequenceBatch, Window, element

    obs, action, any_ = element(spec.observation), element(spec.action), rollout.reward
    if NEXT_ACTION in extras:
        extras = {**extras, NEXT_ACTION: {"action": action, "valid": any_}}
    if algo.sequences:
        window = Window(obs, rollout.extras.get("carry", ()), any_)
        return SequenceBatch(window, action, any_, any_, any_, any_, any_, extras)
    return Batch(obs, action, any_, any_, obs, any_, any_, extras)


# ---------------------------------------------------------------- arrays


def _is_float(x: Any) -> bool:
    import jax.numpy as jnp

    return x is not None and bool(jnp.issubdtype(x.dtype if hasattr(x, "dtype") else type(x), jnp.inexact))


def is_finite(x: Any) -> bool:
    """Returns whether an array, a number or None holds neither infinity nor NaN."""
    return not _is_float(x) or bool(np.isfinite(np.asarray(x)).all())


def compact(x: Any) -> str:
    """Describes a number, a short array, or the shape and range of a long one."""
    x = np.asarray(x)
    if x.size <= 16:
        return np.array2string(x, precision=4, max_line_width=100).replace("\n", "")
    finite = x[np.isfinite(x)]
    span = f"{finite.min():.4g} .. {finite.max():.4g}" if finite.size else "nothing finite"
    missing = f", {x.size - finite.size} not finite" if finite.size < x.size else ""
    return f"{x.dtype}{list(x.shape)} {span}{missing}"


def _named(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves with their names, such as params.policy.kernel."""
    import jax

    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return [(name(path), x) for path, x in jax.tree.leaves_with_path(tree)]


if __name__ == "__main__":
    sys.exit(command.run(main))
