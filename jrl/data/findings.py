"""Findings about a data set: what is wrong with it, or may be, and what to do about it; all at once."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import spaces
from jrl.data import jumps
from jrl.data.store import LOG_PROB, EpisodeStore
from jrl.errors import counted
from jrl.types import Box, Discrete, Leaf, MultiBinary, MultiDiscrete, PyTree

_BLOCK_BYTES = 2**26  # of rows that are looked at together
_TOLERANCE = 1e-6  # beyond a bound, relative to it: a clip in another dtype


class Finding(NamedTuple):
    kind: str  # a name for it, as `nan`
    what: str  # where it is
    mend: str  # what to do


def findings(store: EpisodeStore) -> list[Finding]:
    """Returns all findings about a data set; [] for none."""
    checks: tuple[Callable[[EpisodeStore], Iterator[Finding]], ...] = (
        _notes, _not_finite, _outside, log_probs, _ends, _jumps, _rewards, _constant, _duplicates,
    )  # fmt: skip
    return [finding for check in checks for finding in check(store)]


def _notes(store: EpisodeStore) -> Iterator[Finding]:
    for note in store.notes:
        yield Finding("reader", note, "none needed, if that is what you expect: learning uses the data set so")


def _named(store: EpisodeStore) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Yields (name, array [R, *], whether final rows count) of every array."""
    for name, space, tree in (("obs", store.observation, store.obs), ("action", store.action_space, store.action)):
        for (path, _), x in zip(spaces.leaves(space), jax.tree.leaves(tree), strict=True):
            yield f"{name} {path}".strip(), x, name == "obs"
    yield "reward", store.reward, False
    for name, tree in store.columns.items():
        for place, x in jax.tree.leaves_with_path(tree):
            yield " ".join(["column", name, *(str(key.key) for key in place)]), x, False


def rows_where(
    store: EpisodeStore, x: np.ndarray, wrong: Callable[[np.ndarray], np.ndarray], final: bool
) -> np.ndarray:
    """Returns whether `wrong(part)` [n, *] holds for any number of a row, [R] bool; computed block by block.

    Args:
      store: whose rows these are.
      x: [R, *].
      wrong: function of some of the rows.
      final: whether final observations count.
    """
    found = np.zeros(len(x), bool)
    size = max(1, _BLOCK_BYTES // max(1, x[:1].nbytes))
    for at in range(0, len(x), size):
        part = wrong(x[at : at + size])
        found[at : at + size] = part.reshape(len(part), -1).any(-1)
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
            yield Finding(
                "not finite",
                f"{name}: numbers are NaN or infinite in {place(store, rows)}",
                "leave out these episodes, or mend what wrote them: one such number makes every weight NaN",
            )


def _outside(store: EpisodeStore) -> Iterator[Finding]:
    for what, space, tree, mend in (
        ("obs", store.observation, store.obs, "give the data set the space that it has, or mend what wrote it"),
        ("action", store.action_space, store.action, "see whether actions were stored before or after scaling or "
         "clipping: a policy can neither take nor learn them as they are"),
    ):  # fmt: skip
        for (path, leaf), x in zip(spaces.leaves(space), jax.tree.leaves(tree), strict=True):
            rows = rows_where(store, x, _beyond(leaf), what == "obs")
            if rows.any():
                name = f"{what} {path}".strip()
                yield Finding(f"{what} outside its space", f"{name}: outside of {leaf} in {place(store, rows)}", mend)


def _beyond(leaf: Leaf) -> Callable[[np.ndarray], np.ndarray]:
    """Returns which numbers are outside a leaf's space; NaN is not among them."""
    match leaf:
        case Discrete() | MultiDiscrete() | MultiBinary():
            most = _choices(leaf)
            return lambda x: (x < 0) | (x >= most) | _is_fraction(x)
    low, high = leaf.bounds()
    margin = lambda bound: np.where(np.isfinite(bound), _TOLERANCE * np.maximum(1, abs(bound)), 0)
    least, most = low - margin(low), high + margin(high)
    return lambda x: (x < least) | (x > most)


def unlike(leaf: Leaf) -> Callable[[np.ndarray], np.ndarray]:
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
    choices = all(not isinstance(leaf, Box) for _, leaf in spaces.leaves(store.action_space))
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
        yield Finding(
            "cut episodes",
            f"{counted(int(cut.sum()), 'episode', ',')} neither terminated nor truncated (first: {np.argmax(cut)})",
            "none needed for learning, which bootstraps from the observation behind; their returns are those of a part",
        )
    short = store.lengths() == 1
    if short.any():
        yield Finding(
            "episodes of one step",
            f"{counted(int(short.sum()), 'episode', ',')} of one step (first: {np.argmax(short)})",
            "if they should be longer: ends are marked at every row, or transitions were shuffled before they were "
            "stored; returns, n-step targets and sequences need them in order",
        )


def _jumps(store: EpisodeStore) -> Iterator[Finding]:
    for what, mend in jumps.evidence(store):
        yield Finding("ends in other rows", what, mend)


def _rewards(store: EpisodeStore) -> Iterator[Finding]:
    reward = store.reward[store.is_step()]
    if not store.has_rewards:
        yield Finding(
            "no rewards", "there are no rewards", "none needed for imitation (bc), which alone can learn from it"
        )
        return
    if len(reward) > 1 and (reward == reward[0]).all():
        yield Finding(
            "rewards all alike",
            f"every reward is {float(reward[0]):g}",
            "none needed where an episode's length is what counts, as in CartPole; else the rewards were lost",
        )


def _constant(store: EpisodeStore) -> Iterator[Finding]:
    """Finds numbers of observations of at most one axis that never change; images are left out, where many do not."""
    if store.num_rows < 2:
        return
    for (path, leaf), x in zip(spaces.leaves(store.observation), jax.tree.leaves(store.obs), strict=True):
        same = np.atleast_1d((x == x[0]).all(0)) if len(leaf.shape) <= 1 else np.zeros(1, bool)
        if same.any():
            which = f", number {', '.join(map(str, np.flatnonzero(same)[:10]))} of {same.size}" if leaf.shape else ""
            yield Finding(
                "constant features",
                f"{f'obs {path}'.strip()}: {counted(int(same.sum()), 'feature')} without any change{which}",
                "none needed: normalised they are 0; but a policy that learns of them has seen no other number there",
            )


# ---------------------------------------------------------------- what is there twice


def _duplicates(store: EpisodeStore) -> Iterator[Finding]:
    rows = _hashes((store.obs, store.action, store.reward), store.num_rows)
    step = np.flatnonzero(store.is_step())
    position = np.arange(store.num_rows) - np.repeat(store.offsets[:-1], np.diff(store.offsets))
    episodes = np.add.reduceat(_mixed(rows + _mixed(position.astype(np.uint64))), store.offsets[:-1])
    _, first, which = np.unique(episodes, return_index=True, return_inverse=True)
    twice = np.flatnonzero(first[which] != np.arange(store.num_episodes))
    if len(twice):
        pair = f"{twice[0]}, of {first[which[twice[0]]]}"
        yield Finding(
            "duplicate episodes",
            f"of {counted(store.num_episodes, 'episode', ',')} {len(twice):,} "
            f"{'is a copy of an earlier one' if len(twice) == 1 else 'are copies of earlier ones'} (first: {pair})",
            "remove them: they count twice, and a validation split holds what is trained on; or the environment and "
            "the policy are deterministic, and every seed was the same",
        )
    only = _hashes(store.obs, store.num_rows)
    transitions = _mixed(rows[step]) + only[step + 1]
    alone = np.ones(store.num_episodes, bool)
    alone[twice] = False
    transitions = transitions[np.repeat(alone, store.lengths())]
    more = len(transitions) - len(np.unique(transitions))
    if more:
        yield Finding(
            "duplicate transitions",
            f"of {counted(store.num_steps, 'transition', ',')} {more:,} "
            f"{'is' if more == 1 else 'are'} in the data set before, in another episode or place",
            "none needed in an environment of few states or with deterministic starts; else parts were stored twice",
        )


def _hashes(tree: PyTree, rows: int) -> np.ndarray:
    """Returns a hash of each row of the arrays [R, *] of a tree, [R] u64: equal rows have equal ones."""
    found = np.zeros(rows, np.uint64)
    for number, x in enumerate(jax.tree.leaves(tree)):
        flat = np.ascontiguousarray(x).reshape(rows, -1)
        size = max(1, _BLOCK_BYTES // 8 // max(1, flat[:1].nbytes))
        for at in range(0, rows, size):
            octets = flat[at : at + size].view(np.uint8).reshape(-1, flat[:1].nbytes)
            padded = np.pad(octets, ((0, 0), (0, -octets.shape[1] % 4)))
            words = padded.view(np.uint32).astype(np.uint64)
            places = np.arange(words.shape[1], dtype=np.uint64) + np.uint64(number << 32)
            found[at : at + size] += _mixed(words ^ _mixed(places)).sum(1, dtype=np.uint64)
    return found


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mixes the bits of the numbers [*] u64: SplitMix64's last step (Steele et al., 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
