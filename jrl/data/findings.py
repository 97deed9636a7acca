"""Findings about a data set: what is wrong with it, or may be, and what to do about it; all at once."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.data.store import LOG_PROB, EpisodeStore
from jrl.errors import counted
from jrl.types import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, PyTree

_BLOCK_BYTES = 2**26  # of rows that are looked at together
_MOST_ROWS = 100_000  # the search for jumps reads the first rows only
_MOST_FEATURES = 256  # pictures are left out
_JUMP = 3.3  # score of a jump. On twelve control tasks 1 step of 10,000 has it, and about 8 of 10 resets
_LEAST = 3  # jumps, or episodes, that are evidence
_TOLERANCE = 1e-6  # beyond a bound, relative to it: a clip in another dtype


Mask = Callable[[np.ndarray], np.ndarray]  # numbers [n, *] -> bool, True where a number is wrong


class Finding(NamedTuple):
    kind: str  # a name for it, as `nan`
    what: str  # where it is
    mend: str  # what to do


def findings(store: EpisodeStore) -> list[Finding]:
    """Returns all findings about a data set; [] for none."""
    checks: tuple[Callable[[EpisodeStore], Iterator[Finding]], ...] = (
        _notes, _not_finite, _outside, log_probs, _ends, misplaced_ends, _rewards, _constant, _duplicates,
    )  # fmt: skip
    return [finding for check in checks for finding in check(store)]


def _notes(store: EpisodeStore) -> Iterator[Finding]:
    for note in store.notes:
        yield Finding("reader", note, "none needed, if that is what you expect: learning uses the data set so")


# ---------------------------------------------------------------- numbers


def _named(store: EpisodeStore) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Yields (name, array [R, *], whether final rows count) of every array."""
    yield from ((f"obs {path}".strip(), x, True) for path, _, x in store.observations())
    yield from ((f"action {path}".strip(), x, False) for path, _, x in store.actions())
    yield "reward", store.reward, False
    for name, tree in store.columns.items():
        for place, x in jax.tree.leaves_with_path(tree):
            yield " ".join(["column", name, *(str(key.key) for key in place)]), x, False


def rows_where(store: EpisodeStore, x: np.ndarray, wrong: Mask, final: bool) -> np.ndarray:
    """Returns whether `wrong(part)` [n, *] holds for any number of a row of `x` [R, *], [R] bool.

    `wrong` is called block by block. `final` says whether final observations count.
    """
    size = max(1, _BLOCK_BYTES // max(1, x[:1].nbytes))
    parts = [wrong(x[at : at + size]) for at in range(0, len(x), size)]
    found = np.concatenate([part.reshape(len(part), -1).any(-1) for part in parts])
    return found if final else found & store.is_step()


def place(store: EpisodeStore, rows: np.ndarray) -> str:
    """Returns the number of the rows [R] bool and the episode and step of the first, in words."""
    first = int(np.argmax(rows))
    episode = int(np.searchsorted(store.offsets, first, "right")) - 1
    place = f"episode {episode}, step {first - int(store.offsets[episode])}"
    return f"{counted(int(rows.sum()), 'row', ',')}, first in {place}"


def _not_finite(store: EpisodeStore) -> Iterator[Finding]:
    for name, x, final in _named(store):
        if x.dtype.kind == "f" and (rows := rows_where(store, x, lambda part: ~np.isfinite(part), final)).any():
            mend = "leave out these episodes, or mend what wrote them: one such number makes every weight NaN"
            yield Finding("not finite", f"{name}: numbers are NaN or infinite in {place(store, rows)}", mend)


def _outside(store: EpisodeStore) -> Iterator[Finding]:
    for what, leaves, mend in (
        ("obs", store.observations(), "give the data set the space that it has, or mend what wrote it"),
        ("action", store.actions(), "see whether actions were stored before or after scaling or clipping: a policy can "
         "neither take nor learn them as they are"),
    ):  # fmt: skip
        for path, leaf, x in leaves:
            rows = rows_where(store, x, _beyond(leaf), what == "obs")
            if rows.any():
                name = f"{what} {path}".strip()
                yield Finding(f"{what} outside its space", f"{name}: outside of {leaf} in {place(store, rows)}", mend)


def _beyond(leaf: Leaf) -> Mask:
    """Returns which numbers are outside a leaf's space; NaN is not among them."""
    match leaf:
        case Discrete() | MultiDiscrete() | MultiBinary():
            most = _choices(leaf)
            return lambda x: (x < 0) | (x >= most) | _is_fraction(x)
    low, high = leaf.bounds()
    margin = lambda bound: np.where(np.isfinite(bound), _TOLERANCE * np.maximum(1, abs(bound)), 0)
    least, most = low - margin(low), high + margin(high)
    return lambda x: (x < least) | (x > most)


def unlike(leaf: Leaf) -> Mask:
    """Returns which numbers are not a leaf's own once they have its dtype, so that a cast would change them silently.

    Files keep integers as floats, which is fine; 0.6 for a choice, 300 for a uint8 or 1e300 for a float32 are not. The
    bounds of a Box are not looked at: numbers beyond them are a finding, and can be learned from.
    """
    if isinstance(leaf, Box) and np.dtype(leaf.dtype).kind == "f":
        most = float(np.finfo(leaf.dtype).max)
        width = np.dtype(leaf.dtype).itemsize
        return lambda x: _no(x) if x.dtype.itemsize <= width else np.isfinite(x) & (abs(x) > most)
    if isinstance(leaf, Box):
        kind = np.dtype(leaf.dtype)
        low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
        return lambda x: _no(x) if x.dtype in (kind, bool) else ~((x >= low) & (x <= high)) | _is_fraction(x)
    choices = _choices(leaf)
    return lambda x: ~((x >= 0) & (x < choices)) | _is_fraction(x)  # NaN is neither


def _choices(leaf: Any) -> Any:
    return 2 if isinstance(leaf, MultiBinary) else leaf.n if isinstance(leaf, Discrete) else np.array(leaf.nvec)


def _is_fraction(x: np.ndarray) -> np.ndarray:
    return _no(x) if x.dtype.kind in "biu" else np.isfinite(x) & (x != np.floor(x))


def _no(x: np.ndarray) -> np.ndarray:
    return np.zeros(x.shape, bool)


def log_probs(store: EpisodeStore) -> Iterator[Finding]:
    """Checks log-probabilities: those of choices are not above 0; where all are in [0, 1], they are probabilities."""
    found = store.columns.get(LOG_PROB)
    if not isinstance(found, np.ndarray):
        return
    choices = all(not isinstance(leaf, Box) for _, leaf, _ in store.actions())
    given = found[store.is_step()]
    probabilities = bool(len(given) and ((given >= 0) & (given <= 1)).all() and given.min() < given.max())
    rows = rows_where(store, found, lambda x: x > 1e-5, False)
    if (choices and rows.any()) or probabilities:
        what = "they are probabilities" if probabilities else "no probability is above 1"
        mend = "take their logarithm" if probabilities else "store the logarithm of the probability of the action taken"
        kind = "choices" if choices else "a continuum"
        yield Finding("log_prob", f"column {LOG_PROB}: above 0 in {place(store, rows)}, of {kind}: {what}", mend)


def _ends(store: EpisodeStore) -> Iterator[Finding]:
    cut = ~store.terminated & ~store.truncated
    if cut.any():
        what = f"{counted(int(cut.sum()), 'episode', ',')} neither terminated nor truncated (first: {np.argmax(cut)})"
        mend = "none needed for learning, which bootstraps from the observation behind; their returns are of a part"
        yield Finding("cut episodes", what, mend)
    short = store.lengths() == 1
    if short.any():
        mend = "none needed if that is right; else ends are marked at every row, or the file has shuffled transitions"
        what = f"{counted(int(short.sum()), 'episode', ',')} of one step (first: {np.argmax(short)})"
        yield Finding("episodes of one step", what, mend)


def _rewards(store: EpisodeStore) -> Iterator[Finding]:
    reward = store.reward[store.is_step()]
    if not store.has_rewards:
        mend = "none needed for imitation (bc), which alone can learn from it"
        yield Finding("no rewards", "there are no rewards", mend)
    elif len(reward) > 1 and (reward == reward[0]).all():
        mend = "none needed where an episode's length is what counts, as in CartPole; else the rewards were lost"
        yield Finding("rewards all alike", f"every reward is {float(reward[0]):g}", mend)


def _constant(store: EpisodeStore) -> Iterator[Finding]:
    """Finds numbers of observations of at most one axis that never change; images are left out, where many do not."""
    if store.num_rows < 2:
        return
    for path, leaf, x in store.observations():
        same = np.atleast_1d((x == x[0]).all(0)) if len(leaf.shape) <= 1 else np.zeros(1, bool)
        if same.any():
            which = f", number {', '.join(map(str, np.flatnonzero(same)[:10]))} of {same.size}" if leaf.shape else ""
            what = f"{f'obs {path}'.strip()}: {counted(int(same.sum()), 'feature')} without any change{which}"
            mend = "none needed: normalised they are 0; but a policy that learns of them has seen no other number there"
            yield Finding("constant features", what, mend)


# ---------------------------------------------------------------- ends, which resets show by jumps between steps


def misplaced_ends(store: EpisodeStore) -> Iterator[Finding]:
    """Yields findings where the ends of episodes seem to be missing or in other rows."""
    found = partial(Finding, "ends in other rows")
    lengths = store.lengths()
    first, last = store.offsets[:-1], store.offsets[1:] - 2
    alone = int((lengths == 1).sum())
    mixed = alone * 4 >= len(lengths) and (lengths > 1).any()
    if alone >= _LEAST and mixed and not store.terminated[lengths == 1].any():
        what = f"{alone:,} of {len(lengths):,} episodes have one step and no true end"
        mend = "timeouts may be marked a row too early or too late: mark the last row of each episode"
        yield found(f"{what}, beside others of up to {lengths.max():,} steps", mend)
    jump = _jump_scores(store) > _JUMP
    inside = jump.copy()
    inside[first] = inside[last] = False
    places = np.flatnonzero(inside)
    if len(places) >= max(_LEAST, 2 * len(lengths)):  # a lander that falls over bounces once or twice in an episode
        episode = np.searchsorted(store.offsets, places, "right") - 1
        where = ", ".join(f"{row - store.offsets[e]} of episode {e}" for row, e in list(zip(places, episode))[:3])
        what = f"{len(places):,} steps inside of {len(lengths):,} episodes jump to an observation far away"
        mend = "mark the last row of each in terminals or timeouts, or a value learns to look through resets"
        yield found(f"{what}, as a reset does (steps {where})", f"ends of episodes may be missing: {mend}")
        return
    whole = lengths > 2
    for what, rows, limited in (
        ("last", last, store.truncated & ~store.terminated),
        ("first", first, np.concatenate([[False], ~store.terminated[:-1]])),
    ):
        those = rows[whole & limited & (rows < _MOST_ROWS - 1)]
        count = int(jump[those].sum())
        if count >= _LEAST and 2 * count >= len(those):
            which = "late" if what == "last" else "early"
            where = f"the {what} step of {count:,} of {len(those):,} episodes beside a time limit"
            mend = f"timeouts seem to be marked a row too {which}: mark the last row of each episode"
            yield found(f"{where} jumps to an observation far away, as a reset does", mend)


def _jump_scores(store: EpisodeStore) -> np.ndarray:
    """Returns how unlike the others each step's change of the observation is, [R] f64, about 1 for the largest tenth.

    The change is measured twice, as it is and as the error of a linear prediction from observation and action: a reset
    is far away, and follows from neither. The score is the geometric mean of both. 0 on final rows, behind the first
    100,000 rows, and where observations are not numbers of a continuum.
    """
    found = np.zeros(store.num_rows)
    rows = min(store.num_rows, _MOST_ROWS)
    x = _features(store, rows)
    step = store.is_step()[: rows - 1]
    if x is None or step.sum() < 50:
        return found
    change = np.diff(x, axis=0)
    usual = np.median(abs(change[step]), 0)
    kept = usual > 0  # what stands still most of the time, as a contact does, jumps whenever it moves
    if not kept.any():
        return found
    given = np.concatenate([x, _actions(store, rows), np.ones((rows, 1))], 1)[:-1]
    given /= np.maximum(abs(given).max(0), 1e-12)
    square = given[step].T @ given[step] + 1e-6 * np.eye(given.shape[1])
    error = change[:, kept] - given @ np.linalg.solve(square, given[step].T @ change[step][:, kept])
    total = np.ones(rows - 1)
    for part, scale in ((change[:, kept], usual[kept]), (error, np.median(abs(error[step]), 0))):
        size = np.sqrt(((part / np.maximum(scale, 1e-12)) ** 2).mean(1))
        total *= size / max(np.quantile(size[step], 0.9), 1e-12)
    found[: rows - 1] = np.where(step, np.sqrt(total), 0)
    return found


def _features(store: EpisodeStore, rows: int) -> np.ndarray | None:
    """Returns the observations as numbers [rows, F]; None where they are pictures, choices or not finite."""
    parts = [
        x[:rows].reshape(rows, -1)
        for _, leaf, x in store.observations()
        if isinstance(leaf, Box) and x.dtype.kind == "f" and x[:1].size <= _MOST_FEATURES
    ]
    x = np.concatenate(parts, 1).astype(np.float64) if parts else np.zeros((rows, 0))
    return x if 0 < x.shape[1] <= _MOST_FEATURES and np.isfinite(x).all() and abs(x).max() < 1e100 else None


def _actions(store: EpisodeStore, rows: int) -> np.ndarray:
    """Returns the actions for a linear prediction, [rows, A]; A is 0 where they are neither numbers nor a choice."""
    if isinstance(store.action_space, Discrete) and store.action_space.n <= _MOST_FEATURES:
        return np.asarray(store.action[:rows, None] == np.arange(store.action_space.n), np.float64)
    if isinstance(store.action_space, Box) and isinstance(store.action, np.ndarray):
        x = store.action[:rows].reshape(rows, -1).astype(np.float64)
        if x.shape[1] <= _MOST_FEATURES and np.isfinite(x).all() and abs(x).max(initial=0) < 1e100:
            return x
    return np.zeros((rows, 0))


# ---------------------------------------------------------------- what is there twice


def _duplicates(store: EpisodeStore) -> Iterator[Finding]:
    rows = _hashes((store.obs, store.action, store.reward), store.num_rows)
    bounds = zip(store.offsets.tolist(), store.offsets[1:].tolist(), strict=False)
    episodes = [hash(rows[first:last].tobytes()) for first, last in bounds]
    _, first, which = np.unique(episodes, return_index=True, return_inverse=True)
    twice = np.flatnonzero(first[which] != np.arange(store.num_episodes))
    if len(twice):
        copies = "is a copy of an earlier one" if len(twice) == 1 else "are copies of earlier ones"
        what = f"of {counted(store.num_episodes, 'episode', ',')} {len(twice):,} {copies}"
        mend = "remove them: they count twice, also in a validation split; or environment and policy have no randomness"
        yield Finding("duplicate episodes", f"{what} (first: {twice[0]}, of {first[which[twice[0]]]})", mend)
    is_new = np.ones(store.num_episodes, bool)
    is_new[twice] = False
    steps = np.flatnonzero(store.is_step() & np.repeat(is_new, np.diff(store.offsets)))
    transitions = 31 * rows[steps] + _hashes(store.obs, store.num_rows)[steps + 1]
    more = len(steps) - len(np.unique(transitions))
    if more:
        copies = f"{'is' if more == 1 else 'are'} in the data set before, in another episode or place"
        mend = "none needed in an environment of few states or with deterministic starts; else parts were stored twice"
        what = f"of {counted(store.num_steps, 'transition', ',')} {more:,} {copies}"
        yield Finding("duplicate transitions", what, mend)


def _hashes(tree: PyTree, rows: int) -> np.ndarray:
    """Returns a hash of each row of the arrays [R, *] of a tree, [R] i64: equal rows have equal hashes."""
    flat = [np.zeros((rows, 1), np.uint8)]  # observations may have no numbers
    flat += [np.ascontiguousarray(x).reshape(rows, -1).view(np.uint8) for x in jax.tree.leaves(tree)]
    width, found = sum(x.shape[1] for x in flat), np.empty(rows, np.int64)
    size = max(1, _BLOCK_BYTES // width)
    for at in range(0, rows, size):
        block = np.concatenate([x[at : at + size] for x in flat], 1)
        found[at : at + size] = [*map(hash, block.view(f"V{width}")[:, 0].tolist())]
    return found
