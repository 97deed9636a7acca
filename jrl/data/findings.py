"""Checks of a data set: its faults and possible faults, each with a fix."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.data.store import LOG_PROB, EpisodeStore
from jrl.errors import counted
from jrl.types import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, PyTree

_BLOCK_BYTES = 2**26  # rows checked at a time
_MAX_ROWS = 100_000  # the search for jumps reads the first rows only
_MAX_FEATURES = 256  # leaves out images
_JUMP = 3.3  # score of a jump: on twelve control tasks 1 step of 10,000 exceeds it, and about 8 of 10 resets
_MIN_EVIDENCE = 3  # jumps, or episodes, that make a finding
_TOLERANCE = 1e-6  # relative to a bound: data may have been clipped in another dtype

Mask = Callable[[np.ndarray], np.ndarray]  # numbers [n, *] -> bool, True for wrong numbers


class Finding(NamedTuple):
    kind: str  # name of the fault
    what: str  # fault and its place, in words
    fix: str


def check_data(store: EpisodeStore) -> list[Finding]:
    """Returns all findings of a data set."""
    checks: tuple[Callable[[EpisodeStore], Iterator[Finding]], ...] = (
        _check_finite, _check_bounds, check_log_prob_values, _check_cut_episodes, check_misplaced_ends,
        _check_rewards, _check_constant, _check_duplicates,
    )  # fmt: skip
    fix = "none needed if you expect this: learning uses the data set as described"
    notes = [Finding("reader", note, fix) for note in store.notes]
    return [*notes, *(finding for check in checks for finding in check(store))]


def _list_arrays(store: EpisodeStore) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Yields (name, array [R, *], whether to check final rows) of every array."""
    yield from ((f"obs {path}".strip(), x, True) for path, _, x in store.observations())
    yield from ((f"action {path}".strip(), x, False) for path, _, x in store.actions())
    yield "reward", store.reward, False
    for name, tree in store.columns.items():
        for path, x in jax.tree.leaves_with_path(tree):
            yield " ".join(["column", name, *(str(key.key) for key in path)]), x, False


def find_rows(store: EpisodeStore, x: np.ndarray, wrong: Mask, final: bool) -> np.ndarray:
    """Returns which rows of an array x [R, *] of a data set have a wrong number, [R] bool.

    `wrong` is called block by block. `final` is whether final observations count.
    """
    size = max(1, _BLOCK_BYTES // max(1, x[:1].nbytes))
    parts = [wrong(x[start : start + size]) for start in range(0, len(x), size)]
    found = np.concatenate([part.reshape(len(part), -1).any(-1) for part in parts])
    return found if final else found & store.is_step()


def describe_rows(store: EpisodeStore, rows: np.ndarray) -> str:
    """Returns the number of rows [R] bool, and the episode and step of the first row, in words."""
    first = int(np.argmax(rows))
    episode = int(np.searchsorted(store.offsets, first, "right")) - 1
    step = first - int(store.offsets[episode])
    return f"{counted(int(rows.sum()), 'row', ',')}, first in episode {episode}, step {step}"


def _check_finite(store: EpisodeStore) -> Iterator[Finding]:
    for name, x, final in _list_arrays(store):
        if x.dtype.kind == "f" and (rows := find_rows(store, x, lambda part: ~np.isfinite(part), final)).any():
            fix = "leave out these episodes, or fix the program that wrote them: one such number makes all weights NaN"
            yield Finding("not finite", f"{name}: numbers are NaN or infinite in {describe_rows(store, rows)}", fix)


def _check_bounds(store: EpisodeStore) -> Iterator[Finding]:
    for what, leaves, fix in (
        ("obs", store.observations(), "give the data set its real space, or fix the program that wrote it"),
        ("action", store.actions(), "see whether actions were stored before or after scaling or clipping: a policy can "
         "neither take nor learn them as they are"),
    ):  # fmt: skip
        for path, leaf, x in leaves:
            rows = find_rows(store, x, _build_bounds_mask(leaf), what == "obs")
            if rows.any():
                name = f"{what} {path}".strip()
                yield Finding(
                    f"{what} outside its space", f"{name}: outside of {leaf} in {describe_rows(store, rows)}", fix
                )


def _build_bounds_mask(leaf: Leaf) -> Mask:
    """Returns the mask of numbers outside a leaf's space, without NaN."""
    match leaf:
        case Discrete() | MultiDiscrete() | MultiBinary():
            most = _count_choices(leaf)
            return lambda x: (x < 0) | (x >= most) | _is_fraction(x)
    low, high = leaf.bounds()
    margin = lambda bound: np.where(np.isfinite(bound), _TOLERANCE * np.maximum(1, abs(bound)), 0)
    least, most = low - margin(low), high + margin(high)
    return lambda x: (x < least) | (x > most)


def build_cast_mask(leaf: Leaf) -> Mask:
    """Returns the mask of numbers that a cast to the leaf's dtype would change.

    Integers stored as floats are fine. 0.6 for a choice, 300 for a uint8 or 1e300 for a float32 are not. The bounds of
    a Box are ignored: a policy can learn from numbers beyond them.
    """
    if isinstance(leaf, Box) and np.dtype(leaf.dtype).kind == "f":
        most = float(np.finfo(leaf.dtype).max)
        width = np.dtype(leaf.dtype).itemsize
        return lambda x: _all_false(x) if x.dtype.itemsize <= width else np.isfinite(x) & (abs(x) > most)
    if isinstance(leaf, Box):
        kind = np.dtype(leaf.dtype)
        low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
        return lambda x: _all_false(x) if x.dtype in (kind, bool) else ~((x >= low) & (x <= high)) | _is_fraction(x)
    choices = _count_choices(leaf)
    return lambda x: ~((x >= 0) & (x < choices)) | _is_fraction(x)  # ~: NaN is wrong, too


def _count_choices(leaf: Any) -> Any:
    return 2 if isinstance(leaf, MultiBinary) else leaf.n if isinstance(leaf, Discrete) else np.array(leaf.nvec)


def _is_fraction(x: np.ndarray) -> np.ndarray:
    return _all_false(x) if x.dtype.kind in "biu" else np.isfinite(x) & (x != np.floor(x))


def _all_false(x: np.ndarray) -> np.ndarray:
    return np.zeros(x.shape, bool)


def check_log_prob_values(store: EpisodeStore) -> Iterator[Finding]:
    """Yields a finding if log-probabilities of choices are above 0, or if all are in [0, 1], like probabilities."""
    column = store.columns.get(LOG_PROB)
    if not isinstance(column, np.ndarray):
        return
    choices = all(not isinstance(leaf, Box) for _, leaf, _ in store.actions())
    x = column[store.is_step()]
    probabilities = bool(len(x) and ((x >= 0) & (x <= 1)).all() and x.min() < x.max())
    rows = find_rows(store, column, lambda x: x > 1e-5, False)
    if (choices and rows.any()) or probabilities:
        what = "they are probabilities" if probabilities else "no probability is above 1"
        fix = "take their logarithm" if probabilities else "store the logarithm of the probability of the action taken"
        kind = "choices" if choices else "a continuum"
        yield Finding("log_prob", f"column {LOG_PROB}: above 0 in {describe_rows(store, rows)}, of {kind}: {what}", fix)


def _check_cut_episodes(store: EpisodeStore) -> Iterator[Finding]:
    cut = ~store.terminated & ~store.truncated
    if cut.any():
        what = f"{counted(int(cut.sum()), 'episode', ',')} neither terminated nor truncated (first: {np.argmax(cut)})"
        fix = "none needed for learning, which bootstraps from the last observation; their returns are incomplete"
        yield Finding("cut episodes", what, fix)
    short = store.lengths() == 1
    if short.any():
        fix = "none needed if this is right; otherwise ends are marked at every row, or transitions are shuffled"
        what = f"{counted(int(short.sum()), 'episode', ',')} of one step (first: {np.argmax(short)})"
        yield Finding("episodes of one step", what, fix)


def _check_rewards(store: EpisodeStore) -> Iterator[Finding]:
    reward = store.reward[store.is_step()]
    if not store.has_rewards:
        fix = "none needed for imitation (bc); other algorithms cannot learn from these data"
        yield Finding("no rewards", "there are no rewards", fix)
    elif len(reward) > 1 and (reward == reward[0]).all():
        fix = "none needed if only the length of an episode counts, as in CartPole; otherwise the rewards were lost"
        yield Finding("rewards all alike", f"every reward is {float(reward[0]):g}", fix)


def _check_constant(store: EpisodeStore) -> Iterator[Finding]:
    """Finds constant features of observations. Images, with many constant pixels, are left out."""
    if store.num_rows < 2:
        return
    for path, leaf, x in store.observations():
        same = np.atleast_1d((x == x[0]).all(0)) if len(leaf.shape) <= 1 else np.zeros(1, bool)
        if same.any():
            which = f", number {', '.join(map(str, np.flatnonzero(same)[:10]))} of {same.size}" if leaf.shape else ""
            what = f"{f'obs {path}'.strip()}: {counted(int(same.sum()), 'feature')} without any change{which}"
            fix = "none needed: their normalised value is 0; but the policy has seen no other value of these features"
            yield Finding("constant features", what, fix)


def check_misplaced_ends(store: EpisodeStore) -> Iterator[Finding]:
    """Yields findings of episode ends that seem to be missing or in wrong rows."""
    found = partial(Finding, "ends in other rows")
    lengths = store.lengths()
    first, last = store.offsets[:-1], store.offsets[1:] - 2
    short = int((lengths == 1).sum())
    mixed = short * 4 >= len(lengths) and (lengths > 1).any()
    if short >= _MIN_EVIDENCE and mixed and not store.terminated[lengths == 1].any():
        what = f"{short:,} of {len(lengths):,} episodes have one step and no true end"
        fix = "timeouts may be marked a row too early or too late: mark the last row of each episode"
        yield found(f"{what}, beside others of up to {lengths.max():,} steps", fix)
    jump = _jump_scores(store) > _JUMP
    inside = jump.copy()
    inside[first] = inside[last] = False
    rows = np.flatnonzero(inside)
    if len(rows) >= max(
        _MIN_EVIDENCE, 2 * len(lengths)
    ):  # a lander that falls over bounces once or twice in an episode
        episode = np.searchsorted(store.offsets, rows, "right") - 1
        where = ", ".join(f"{row - store.offsets[e]} of episode {e}" for row, e in list(zip(rows, episode))[:3])
        what = f"{len(rows):,} steps inside of {len(lengths):,} episodes jump to an observation far away"
        fix = "mark the last row of each in terminals or timeouts, or values bootstrap across resets"
        yield found(f"{what}, as a reset does (steps {where})", f"ends of episodes may be missing: {fix}")
        return
    whole = lengths > 2
    for what, rows, limited in (
        ("last", last, store.truncated & ~store.terminated),
        ("first", first, np.concatenate([[False], ~store.terminated[:-1]])),
    ):
        at_limit = rows[whole & limited & (rows < _MAX_ROWS - 1)]
        count = int(jump[at_limit].sum())
        if count >= _MIN_EVIDENCE and 2 * count >= len(at_limit):
            which = "late" if what == "last" else "early"
            where = f"the {what} step of {count:,} of {len(at_limit):,} episodes beside a time limit"
            fix = f"timeouts seem to be marked a row too {which}: mark the last row of each episode"
            yield found(f"{where} jumps to an observation far away, as a reset does", fix)


def _jump_scores(store: EpisodeStore) -> np.ndarray:
    """Returns a score of the size of each step's change of the observation, [R] f64, about 1 for the largest tenth.

    The score is the geometric mean of two sizes: of the change, and of the error of a linear prediction from
    observation and action. A reset is large in both. The score is 0 on final rows, after the first 100,000 rows, and
    for observations that are not continuous.
    """
    scores = np.zeros(store.num_rows)
    rows = min(store.num_rows, _MAX_ROWS)
    x = _stack_features(store, rows)
    step = store.is_step()[: rows - 1]
    if x is None or step.sum() < 50:
        return scores
    change = np.diff(x, axis=0)
    usual = np.median(abs(change[step]), 0)
    kept = usual > 0  # a feature that is usually constant, such as a contact, jumps whenever it changes
    if not kept.any():
        return scores
    inputs = np.concatenate([x, _stack_actions(store, rows), np.ones((rows, 1))], 1)[:-1]
    inputs /= np.maximum(abs(inputs).max(0), 1e-12)
    square = inputs[step].T @ inputs[step] + 1e-6 * np.eye(inputs.shape[1])
    error = change[:, kept] - inputs @ np.linalg.solve(square, inputs[step].T @ change[step][:, kept])
    total = np.ones(rows - 1)
    for part, scale in ((change[:, kept], usual[kept]), (error, np.median(abs(error[step]), 0))):
        size = np.sqrt(((part / np.maximum(scale, 1e-12)) ** 2).mean(1))
        total *= size / max(np.quantile(size[step], 0.9), 1e-12)
    scores[: rows - 1] = np.where(step, np.sqrt(total), 0)
    return scores


def _stack_features(store: EpisodeStore, rows: int) -> np.ndarray | None:
    """Returns the observations as numbers [rows, F]; None for images, choices or numbers that are not finite."""
    parts = [
        x[:rows].reshape(rows, -1)
        for _, leaf, x in store.observations()
        if isinstance(leaf, Box) and x.dtype.kind == "f" and x[:1].size <= _MAX_FEATURES
    ]
    x = np.concatenate(parts, 1).astype(np.float64) if parts else np.zeros((rows, 0))
    return x if 0 < x.shape[1] <= _MAX_FEATURES and np.isfinite(x).all() and abs(x).max() < 1e100 else None


def _stack_actions(store: EpisodeStore, rows: int) -> np.ndarray:
    """Returns the actions for a linear prediction, [rows, A]; A is 0 if they are neither numbers nor a choice."""
    if isinstance(store.action_space, Discrete) and store.action_space.n <= _MAX_FEATURES:
        return np.asarray(store.action[:rows, None] == np.arange(store.action_space.n), np.float64)
    if isinstance(store.action_space, Box) and isinstance(store.action, np.ndarray):
        x = store.action[:rows].reshape(rows, -1).astype(np.float64)
        if x.shape[1] <= _MAX_FEATURES and np.isfinite(x).all() and abs(x).max(initial=0) < 1e100:
            return x
    return np.zeros((rows, 0))


def _check_duplicates(store: EpisodeStore) -> Iterator[Finding]:
    rows = _hash_rows((store.obs, store.action, store.reward), store.num_rows)
    bounds = zip(store.offsets.tolist(), store.offsets[1:].tolist(), strict=False)
    episodes = [hash(rows[first:last].tobytes()) for first, last in bounds]
    _, first, which = np.unique(episodes, return_index=True, return_inverse=True)
    twice = np.flatnonzero(first[which] != np.arange(store.num_episodes))
    if len(twice):
        copies = "is a copy of an earlier one" if len(twice) == 1 else "are copies of earlier ones"
        what = f"of {counted(store.num_episodes, 'episode', ',')} {len(twice):,} {copies}"
        fix = "remove copies: they count twice, also in a validation split; or environment and policy are deterministic"
        yield Finding("duplicate episodes", f"{what} (first: {twice[0]}, of {first[which[twice[0]]]})", fix)
    is_new = np.ones(store.num_episodes, bool)
    is_new[twice] = False
    steps = np.flatnonzero(store.is_step() & np.repeat(is_new, np.diff(store.offsets)))
    transitions = 31 * rows[steps] + _hash_rows(store.obs, store.num_rows)[steps + 1]
    more = len(steps) - len(np.unique(transitions))
    if more:
        copies = f"{'is' if more == 1 else 'are'} in the data set before, in another episode or step"
        fix = "none needed with few states or deterministic starts; otherwise parts were stored twice"
        what = f"of {counted(store.num_steps, 'transition', ',')} {more:,} {copies}"
        yield Finding("duplicate transitions", what, fix)


def _hash_rows(tree: PyTree, rows: int) -> np.ndarray:
    """Returns a hash of each row of a tree of arrays [R, *], [R] i64: equal rows have equal hashes."""
    flat = [np.zeros((rows, 1), np.uint8)]  # an observation may have no elements
    flat += [np.ascontiguousarray(x).reshape(rows, -1).view(np.uint8) for x in jax.tree.leaves(tree)]
    width, hashes = sum(x.shape[1] for x in flat), np.empty(rows, np.int64)
    size = max(1, _BLOCK_BYTES // width)
    for start in range(0, rows, size):
        block = np.concatenate([x[start : start + size] for x in flat], 1)
        hashes[start : start + size] = [*map(hash, block.view(f"V{width}")[:, 0].tolist())]
    return hashes
