"""python -m jrl.debug BUNDLE: repeats the update in which a run stopped being finite, and names what broke it.

    explanation = explain(algo, state, batch, key)    # what `algo.update(state, batch, key)` does wrong, and why
    print(explanation)

Infinities and NaN that do not reach the result, such as those of a mask or of a branch that `where` does not take, are
no finding.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.errors import InputError
from jrl.fields.paths import resolve
from jrl.host import command

if TYPE_CHECKING:
    from jrl.run.provenance import Operation
    from jrl.types import Algo, Batch, EnvSpec, Key, PyTree, Rollout, SequenceBatch

_MOST_ROWS = 8  # that are looked for and printed


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
class Transition:
    """One row of the batch: `index` is (row,) of a Batch and (step, column) of a Rollout."""

    index: tuple[int, ...]
    fields: Mapping[str, Any]  # obs, action, reward, ...
    non_finite: tuple[str, ...]  # fields that are not finite
    alone: bool  # whether the update is non-finite with this row and no other

    def __str__(self) -> str:
        where = f"row {self.index[0]}" if len(self.index) == 1 else f"step {self.index[0]} of column {self.index[1]}"
        said = [f"{' and '.join(self.non_finite)} not finite"] if self.non_finite else []
        said.append("enough by itself" if self.alone else "not enough by itself")
        width = max(map(len, self.fields))
        return "\n".join(
            [f"{where}: {', '.join(said)}", *(f"  {k:{width}}  {_text(v)}" for k, v in self.fields.items())]
        )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Explanation of an update that is not finite."""

    bad: tuple[str, ...]  # results that are not finite: parts of the state, losses
    operation: "Operation | None"
    transitions: tuple[Transition, ...]  # those with non-finite contents first
    note: str  # what else is to be said of the rows

    @property
    def finite(self) -> bool:
        """Returns whether the update is finite when repeated."""
        return not self.bad

    def __str__(self) -> str:
        if self.finite:
            return (
                "The update is finite when repeated: the bundle does not hold the cause. Either it was computed "
                "differently in training (another device, another version of jax or of the code, sums in another order "
                "close to overflow), or memory or hardware failed. Compare jrl and jax in checkpoint.json with what is "
                "installed, and run this on the device that trained."
            )
        more = f" and {len(self.bad) - 3} more" if len(self.bad) > 3 else ""
        found = [f"not finite when repeated: {', '.join(self.bad[:3])}{more}"]
        unknown = "With every intermediate number kept the update is finite: it overflows in the compiled program only."
        found.append(str(self.operation) if self.operation else unknown)
        return "\n".join([*found, *([self.note] if self.note else []), *map(str, self.transitions)])


def explain(algo: "Algo", state: "PyTree", batch: "Batch | SequenceBatch | Rollout", key: "Key") -> Explanation:
    """Repeats `algo.update(state, batch, key)` and looks for the operation and the rows that make it non-finite.

    Args:
      algo: made without axis_name.
      state: before the update.
      batch: what it learned from, Batch [N] or Rollout [T, B]. Of anything else only the operation is looked for.
      key: of the update.
    Returns:
      An Explanation; `finite` if the state after the update and the metrics `loss/...` are finite.
    """
    import jax
    import numpy as np

    from jrl.run import provenance

    def update(state, batch, key):
        state, aux = algo.update(state, batch, key)
        return state, {k: v for k, v in aux.metrics.items() if k.startswith("loss")}

    new, losses = jax.device_get(jax.jit(update)(state, batch, key))
    results = [(name, after, before) for (name, after), before in zip(_named(new), jax.tree.leaves(state), strict=True)]
    results += [(name, after, None) for name, after in _named(losses)]
    # what the update leaves as it was is none of its doing
    kept = lambda after, before: before is not None and np.array_equal(after, before, equal_nan=True)
    finite = provenance.is_finite
    bad = [i for i, (_, after, before) in enumerate(results) if not finite(after) and not kept(after, before)]
    if not bad:
        return Explanation((), None, (), "")
    arguments = [name for name, _ in (*_named(state, "state"), *_named(batch, "batch"))]
    first = next((i for i in bad if results[i][2] is None), bad[0])  # a loss, if one is bad: gradients come behind it
    operation = provenance.first_bad_operation(update, (state, batch, key), [*arguments, "key"], first)
    transitions, note = _transitions(update, state, batch, key, bad)
    return Explanation(tuple(results[i][0] for i in bad), operation, transitions, note)


# ---------------------------------------------------------------- the rows


def _transitions(update: Callable, state, batch, key, bad: list[int]) -> tuple[tuple[Transition, ...], str]:
    """Returns the rows that each make the results `bad` non-finite, and a note on them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jrl.types import Batch, Rollout

    if not isinstance(batch, Batch | Rollout):
        return (), ""
    batch = jax.device_get(batch)
    valid = batch.mask if isinstance(batch, Rollout) else batch.weight != 0
    rows = [_row(batch, tuple(map(int, index))) for index in np.argwhere(valid)]
    rows.sort(key=lambda row: (-len(row.non_finite), -_magnitude(row.fields)))

    @jax.jit
    def repeat(state, batch, key, keep):
        results = jax.tree.leaves(update(state, _only(batch, keep), key))
        return ~jnp.stack([jnp.isfinite(results[i]).all() for i in bad]).all()

    def is_bad(chosen: Iterable[int]) -> bool:
        keep = np.zeros(valid.shape, bool)
        for i in chosen:
            keep[rows[i].index] = True
        return bool(repeat(state, batch, key, keep))

    broken = tuple(row for row in rows if row.non_finite)[:_MOST_ROWS]
    if is_bad([]):
        return broken, f"Without any row it is not finite either: the state is the cause. {_largest(state)}"
    if not is_bad(range(len(rows))):
        return broken, "With the masked rows cleared it is finite: what stands on masked rows gets into the result."
    sets = _smallest(is_bad, list(range(len(rows))))
    alone = {s[0] for s in sets if len(s) == 1}
    named = [i for i, row in enumerate(rows) if row.non_finite or i in alone]
    note = ""
    if not alone:
        note = f"No row is enough by itself; these {len(sets[0])} of {len(rows)} are together, the largest first:"
        named = sets[0]
    elif len(sets) >= _MOST_ROWS:
        note = (
            f"{len(alone)} rows or more are each enough: the state or a setting, such as the learning rate, is the "
            f"cause rather than a transition. {_largest(state)}"
        )
        named = [i for i in named if rows[i].non_finite] or named[:2]
    return tuple(dataclasses.replace(rows[i], alone=i in alone) for i in named[:_MOST_ROWS]), note


def _smallest(is_bad: Callable[[list[int]], bool], rows: list[int]) -> list[list[int]]:
    """Sets of rows that are enough while neither half of them is, at most _MOST_ROWS; `rows` are enough."""
    found: list[list[int]] = []

    def search(rows: list[int]) -> None:
        half = (len(rows) + 1) // 2
        parts = [part for part in (rows[:half], rows[half:]) if len(rows) > 1 and is_bad(part)]
        if not parts:
            found.append(rows)
        for part in parts:
            if len(found) < _MOST_ROWS:
                search(part)

    search(rows)
    return found


def _only(batch: "Batch | Rollout", keep) -> Any:
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


def _row(batch: "Batch | Rollout", index: tuple[int, ...]) -> Transition:
    import jax

    from jrl.run.provenance import is_finite
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


def _text(x: Any) -> str:
    from jrl.run.provenance import compact

    return compact(x)


def _named(tree, prefix: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves with their names, such as params.policy.kernel."""
    import jax

    names = lambda path: filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator=".")))
    return [(".".join(names(path)), x) for path, x in jax.tree.leaves_with_path(tree)]


def _magnitude(tree) -> float:
    """Returns the largest finite absolute value among the floats."""
    import numpy as np

    floats = (np.abs(np.asarray(x, np.float64)) for _, x in _named(tree) if np.issubdtype(x.dtype, np.floating))
    return max((float(x[np.isfinite(x)].max(initial=0.0)) for x in floats), default=0.0)


def _largest(state) -> str:
    name, value = max(((name, _magnitude(x)) for name, x in _named(state)), key=lambda pair: pair[1])
    return f"The largest number in the state is {value:.4g}, in {name}."


if __name__ == "__main__":
    sys.exit(command.run(main))
