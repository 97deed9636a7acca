"""Data sets of a run, `data.input`: read, brought into the policy's spaces, and divided among devices."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import data, registry, spaces
from jrl.config import EnvConfig, RunConfig, datasets
from jrl.config.datasets import DataConfig, DataRewardConfig
from jrl.data import EpisodeStore, chunks, findings
from jrl.data.formats.transitions import guess_space
from jrl.data.rollouts import fold_rollouts
from jrl.data.store import LOG_PROB, check_store
from jrl.envs.history import build_history, history_options
from jrl.envs.scaling import policy_actions
from jrl.envs.spec import NARROW
from jrl.errors import InputError, counted
from jrl.fields.data import RETURN_TO_GO, TIMESTEP, traits
from jrl.replay.frames import FrameStack, broken_stacks
from jrl.replay.layout import TO_END
from jrl.spaces_json import space_from_json
from jrl.types import Box, EnvSpec, PyTree, Space, element

OTHER_ENV = "give the environment that the data are of, or leave env.id out"


class Inputs(NamedTuple):
    """The data sets of a run in its policy's spaces, by the names of `datasets.shares`."""

    train: dict[str, EpisodeStore]
    validation: dict[str, EpisodeStore]  # held-out episodes; {} if there are none
    spec: EnvSpec  # spec of one environment
    checksums: dict[str, str]  # checksums of the data as they were read
    notes: tuple[str, ...] = ()  # notes of the readers, and evidence that ends are in other rows


def read(cfg: RunConfig, env_spec: EnvSpec | None) -> Inputs:
    """Reads the data sets of `data.input`, and brings them into the policy's spaces.

    Args:
      env_spec: spec of the run's environments; None: there are none, and the spaces are those of the data.
    Raises:
      InputError: files cannot be read or do not fit.
    """
    raw = {name: _source(cfg.data, name) for name in datasets.shares(cfg.data) if name != datasets.SAMPLER}
    best = getattr(cfg.algo, "top_fraction", None)
    own = {name: _chunked(cfg, _best(store, best), env_spec) for name, store in raw.items()}
    if env_spec is None:  # a policy's view of data without environments, with history where the run asks for it
        spec = _spec_of(cfg.data, cfg.env, next(iter(own.values())))
        history = build_history(spec, **history_options(cfg))
        spec = spec if history is None else history.spec
    else:
        spec = env_spec._replace(num_envs=1)
    train, validation = {}, {}
    for name, store in own.items():
        store = prepared(cfg, store, spec)
        if cfg.data.validation:
            store, validation[name] = store.split(cfg.data.validation, cfg.run.seed)
        train[name] = store
    notes = [f"data: {store.name}: {note}" for store in raw.values() for note in store.notes]
    for store in raw.values():
        notes += [f"data: {store.name}: {what}: {fix}" for _, what, fix in findings.check_misplaced_ends(store)]
    return Inputs(train, validation, spec, {name: store.checksum() for name, store in raw.items()}, tuple(notes))


def _source(section: DataConfig, name: str) -> EpisodeStore:
    """Reads the store that an input names: files, or the result of a user's function."""
    is_path = ":" not in name or Path(name).is_absolute() or Path(name).exists()
    if registry.registered(name) is not None or not is_path:
        found = registry.load(name, "data.input")()
        if not isinstance(found, EpisodeStore):
            raise InputError(f"data.input {name}: it should return a jrl.data.EpisodeStore, not {type(found).__name__}")
        return check_store(found).where(section.where or {})
    return data.read(name.split("\n"), section.format, section.where)


def _chunked(cfg: RunConfig, store: EpisodeStore, env_spec: EnvSpec | None) -> EpisodeStore:
    """Returns a store with chunks of actions if the run's policy chooses them; a recording of such a run has them."""
    length = cfg.env.action_chunk
    shapes = lambda space: [leaf.shape for _, leaf in spaces.leaves(space)]
    if length == 1 or (env_spec is not None and shapes(store.action_space) == shapes(env_spec.action)):
        return store
    return chunks.chunk(store, length)


def _best(store: EpisodeStore, share: float | None) -> EpisodeStore:
    """Returns the episodes of the highest returns that have that share of the steps; one at least."""
    if share is None or share >= 1:
        return store
    order = np.argsort(-store.returns(), kind="stable")
    count = int(np.searchsorted(np.cumsum(store.lengths()[order]), share * store.num_steps)) + 1
    return store.take(np.sort(order[:count]))


# ---------------------------------------------------------------- spaces


def _spec_of(section: DataConfig, env: EnvConfig, first: EpisodeStore) -> EnvSpec:
    env_action = None
    if _is_normalized(section, first):
        action = narrow(first.action_space, action=True)
        if "env_action" in first.meta:
            env_action = space_from_json(first.meta["env_action"])
    else:
        own = narrow(first.action_space, action=True)
        action, _ = policy_actions(own, env)
        env_action = None if action == own else own
    return EnvSpec(narrow(first.observation), action, 1, None, env_action)


def narrow(space: Space, *, action: bool = False) -> Space:
    """Returns a space in the dtypes of jax; with `action` in those that policies choose, int32 and float32."""

    def leaf(found: Any) -> Any:
        name = NARROW.get(found.dtype, found.dtype)
        if action:
            name = "float32" if isinstance(found, Box) else "int8" if type(found).__name__ == "MultiBinary" else "int32"
        return dataclasses.replace(found, dtype=name)

    return guess_space(lambda found: found, spaces.map_leaves(leaf, space))


def _is_normalized(section: DataConfig, store: EpisodeStore) -> bool:
    """Returns whether the Boxes of a store's actions are the policy's [-1, 1], and not the environment's own."""
    given = section.actions_in_input_normalized
    return store.meta.get("actions") == "normalized" if given is None else given


# ---------------------------------------------------------------- columns


def prepared(cfg: RunConfig, store: EpisodeStore, spec: EnvSpec) -> EpisodeStore:
    """Returns a store in a policy's spaces and dtypes, with rewards as the config changes them.

    Raises:
      InputError: observations or actions have another shape than the spaces.
    """
    reads = traits(cfg.algo).reads_rewards or cfg.network.use_prev_reward or cfg.data.estimate is not None
    if reads and not store.has_rewards:
        raise InputError(
            f"data.input: {store.name} has no rewards, which this run reads: write them, or imitate with algo.name=bc "
            "(without algo.top_fraction, data.estimate and network.use_prev_reward)"
        )
    env_action = spec.env_action or spec.action
    normalized = _is_normalized(cfg.data, store)
    shapes = lambda space: [(path, leaf.shape) for path, leaf in spaces.leaves(space)]
    options = history_options(cfg)
    lacks_history = bool(options) and shapes(store.observation) != shapes(spec.observation)
    own = spec.env_observation if lacks_history and spec.env_observation is not None else spec.observation
    obs = _cast(store, "observations", store.observation, store.obs, own)
    action = _cast(store, "actions", store.action_space, store.action, spec.action if normalized else env_action)
    columns = dict(store.columns)
    if not normalized and env_action != spec.action:
        action, shift = _as_chosen(env_action, spec.action, action)
        if LOG_PROB in columns:  # the density of what was chosen, not of what it stood for
            columns[LOG_PROB] = columns[LOG_PROB] + np.float32(shift)
    columns |= {name: column(store) for name, column in _MADE.items() if name in traits(cfg.algo).reads}
    if lacks_history:
        obs = _add_history(options, spec._replace(observation=own), store, obs, action)
    changes = {"obs": obs, "action": action, "reward": _rewards(cfg.data.reward, store), "columns": columns}
    return dataclasses.replace(store, observation=spec.observation, action_space=spec.action, **changes)


def _cast(store: EpisodeStore, what: str, found: Space, tree: PyTree, wanted: Space) -> PyTree:
    """Casts arrays of one space to another of the same shapes. Raises InputError: they do not fit."""
    want, given = spaces.leaves(wanted), spaces.leaves(found)
    if [path for path, _ in want] != [path for path, _ in given] or not all(
        _fits(a, b) for (_, a), (_, b) in zip(given, want, strict=True)
    ):
        raise InputError(
            f"data.input: {store.name} has {what} {found}, where the environment has {wanted}: {OTHER_ENV}"
        )
    arrays = []
    for (path, leaf), x in zip(want, jax.tree.leaves(tree), strict=True):
        x = x.reshape(len(x), *leaf.shape)
        rows = findings.find_rows(store, x, findings.build_cast_mask(leaf), what == "observations")
        if rows.any():
            first = int(np.argmax(rows))
            raise InputError(
                f"data.input: {store.name}: {f'{what} {path}'.strip()}: expected {leaf}, got "
                f"{str(x[first].tolist())[:80]} in {findings.describe_rows(store, rows)}: python -m jrl.data inspect "
                "shows what is in the data"
            )
        with np.errstate(invalid="ignore", over="ignore"):  # final rows of actions, which nothing reads
            arrays.append(x.astype(leaf.dtype, copy=False))
    return spaces.from_leaves(wanted, arrays)


def _fits(found: Any, wanted: Any) -> bool:
    """Returns whether arrays of a leaf can be reshaped: equal shapes, or [N, 1] for [N] and the reverse."""
    if found.shape == wanted.shape:
        return True
    is_one = {found.shape, wanted.shape} == {(), (1,)}
    return is_one and (isinstance(found, Box) or not isinstance(wanted, Box))  # a choice is not a number of a continuum


def _add_history(options: Mapping[str, Any], spec: EnvSpec, store: EpisodeStore, obs: PyTree, action: PyTree) -> PyTree:
    """Adds to observations [R, *] of `spec` the history that the run's environments would add."""
    found = build_history(spec, **options)
    assert found is not None
    at = lambda tree, index: jax.tree.map(lambda x: x[index], tree)
    out = jax.tree.map(lambda x: np.zeros((store.num_rows, *x.shape), x.dtype), element(found.spec.observation))
    order = np.argsort(-store.lengths(), kind="stable")
    starts, lengths = store.offsets[:-1][order], store.lengths()[order]
    memory, reward = found.empty(len(order)), store.reward.astype(np.float32)
    for step in range(int(lengths[0]) + 1):  # all episodes of this length at once
        rows = starts[: np.searchsorted(-lengths, -step, "right")] + step
        before = np.maximum(rows - 1, 0)
        memory = at(memory, slice(len(rows)))
        begins = np.full(len(rows), step == 0)
        memory, seen = found.see(memory, at(obs, rows), at(action, before), reward[before], begins)
        for held, x in zip(jax.tree.leaves(out), jax.tree.leaves(seen), strict=True):
            held[rows] = x
    return out


def _as_chosen(env: Space, policy: Space, action: PyTree) -> tuple[PyTree, float]:
    """Returns the environment's own actions as the policy's, in [-1, 1] where these are mapped to bounds, and the term
    to add to the logarithm of their density."""
    total = 0.0

    def leaf(own: Any, chosen: Any, x: np.ndarray) -> np.ndarray:
        nonlocal total
        if own == chosen or not isinstance(own, Box):
            return x
        (low, high), (least, most) = own.bounds(), chosen.bounds()
        # the inverse of `envs.action_transform`, element by element
        affine = np.isfinite(low) & np.isfinite(high) & (least == -1) & (most == 1) & (low < high)
        with np.errstate(invalid="ignore"):  # inf - inf, of elements that are not affine
            scale = np.where(affine, (high - low) / 2, 1.0)
            middle = np.where(affine, (high + low) / 2, np.where(low == high, low, 0.0))
        total += float(np.log(scale).sum())
        return ((x - middle) / scale).astype(np.float32)

    parts = zip(spaces.leaves(env), spaces.leaves(policy), jax.tree.leaves(action), strict=True)
    arrays = [leaf(own, chosen, x) for (_, own), (_, chosen), x in parts]
    return spaces.from_leaves(policy, arrays), total


def _return_to_go(store: EpisodeStore) -> np.ndarray:
    """Sums the rewards from each row to the end of its episode, [R] f32, without discount; 0 at its end."""
    total = np.cumsum(store.reward, dtype=np.float64)
    before = np.concatenate([[0.0], total[:-1]])
    return (np.repeat(total[store.offsets[1:] - 1], store.lengths() + 1) - before).astype(np.float32)


def _timestep(store: EpisodeStore) -> np.ndarray:
    return (np.arange(store.num_rows) - np.repeat(store.offsets[:-1], store.lengths() + 1)).astype(np.int32)


_MADE = {RETURN_TO_GO: _return_to_go, TIMESTEP: _timestep}  # columns that follow from the others


def _rewards(how: DataRewardConfig, store: EpisodeStore) -> np.ndarray:
    """Returns the rewards [R] f32 to learn from; 0 on final observations."""
    reward, steps = store.reward.astype(np.float64), store.is_step()
    if how.normalize == "range":
        found = store.returns()
        reward = reward * 1000.0 / max(float(found.max() - found.min()), 1e-8)
    elif how.normalize == "std":
        reward = reward / max(float(reward[steps].std()), 1e-8)
    reward = reward * how.scale + how.shift
    if how.clip is not None:
        reward = reward.clip(*how.clip)
    return np.where(steps, reward, 0.0).astype(np.float32)


# ---------------------------------------------------------------- rings


def to_end(store: EpisodeStore, gamma: float) -> dict[str, np.ndarray]:
    """Returns the extras TO_END of a store's rows [R]: see `jrl.replay.layout`."""
    reward = np.zeros(store.num_rows)
    steps = np.zeros(store.num_rows, np.int32)
    last = store.offsets[1:] - 1  # the final observation of each episode
    for back in range(1, int(store.lengths().max()) + 1):  # all episodes at once, from their ends on
        rows = (last - back)[store.lengths() >= back]
        reward[rows] = store.reward[rows] + gamma * reward[rows + 1]
        steps[rows] = back
    ends = np.repeat(store.terminated, store.lengths() + 1)
    discount = np.where(ends, 0.0, gamma ** steps.astype(np.float64))
    return {"reward": reward.astype(np.float32), "discount": discount.astype(np.float32), "steps": steps}


def extras_of(store: EpisodeStore, names: Sequence[str], gamma: Any) -> dict[str, PyTree]:
    """Returns further columns [R, *] of a ring: TO_END, or columns of the store. Raises InputError: one is missing."""
    if missing := [name for name in names if name != TO_END and name not in store.columns]:
        raise InputError(f"data.input: {store.name} has no column {', '.join(missing)}, which the algorithm needs")
    return {name: to_end(store, float(np.asarray(gamma))) if name == TO_END else store.columns[name] for name in names}


def deal(store: EpisodeStore, devices: int) -> list[EpisodeStore]:
    """Divides the episodes among devices, about as many rows for each. Raises InputError: too few episodes."""
    if devices == 1:
        return [store]
    if store.num_episodes < devices:
        raise InputError(
            f"data.input: {store.name} has {counted(store.num_episodes, 'episode')} for {devices} devices: use fewer"
        )
    which = np.searchsorted(np.linspace(0, store.num_rows, devices + 1)[1:-1], store.offsets[:-1], "right")
    parts = [np.flatnonzero(which == d) for d in range(devices)]
    if any(len(part) == 0 for part in parts):
        parts = [np.arange(store.num_episodes)[d::devices] for d in range(devices)]
    return [store.take(part) for part in parts]


def check_stacks(store: EpisodeStore, stack: FrameStack) -> None:
    """Raises InputError: observations that a ring of single frames could not put together again."""
    if float(fold_rollouts(lambda total, rollout: total + broken_stacks(rollout, stack), jnp.zeros(()), store)) > 0:
        raise InputError(
            f"replay.frame_stack {stack.size}: observations of {store.name} are not each the {stack.size} latest "
            "frames: use 1"
        )


def element_of(column: PyTree) -> PyTree:
    """Returns shapes and dtypes of one row of a column [R, *]."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.result_type(x)), column)
