"""Estimates of a policy's return by episodes that others played: `data.estimate`, and `python -m jrl.data estimate`."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.algos import fqe
from jrl.config import RunConfig, plan
from jrl.config.datasets import EstimateConfig
from jrl.data import EpisodeStore
from jrl.data.findings import log_probs
from jrl.data.store import LOG_PROB, concatenated
from jrl.errors import InputError, counted
from jrl.learn.clock import StepInfo
from jrl.learn.keys import Role, role_key
from jrl.ops import estimators
from jrl.play import action_probabilities
from jrl.replay import ring
from jrl.run import data_sets, reporter
from jrl.types import Algo, Array, Batch, Buffer, Discrete, EnvSpec, Key, PyTree, element

_FITTED = ("dm", "dr", "wdr")  # methods that need values of the policy
_UPDATES = 1000  # of fitted Q evaluation in one dispatch
_SPARE = 3  # slots of a ring beside its rows
_FEW = 10  # episodes, effectively: of fewer nothing can be said
_SMALL = 0.05  # share of the episodes, effectively
_RATIOS = (0.5, 2.0)  # the mean ratio is 1 where behaviour is what it is said to be


class Report(NamedTuple):
    """Estimates and what they rest on; plain numbers."""

    estimates: dict[str, dict[str, float]]  # method -> value, error, low, high
    ess: float | None  # effective sample size, in episodes; None where no method weighs them
    episodes: int
    mean_return: float  # discounted, of the episodes themselves
    warnings: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """Returns the report by keys of result rows."""
        found = {"estimate/return": self.mean_return}
        for name, each in self.estimates.items():
            ends = {f"estimate/{name}_{end}": each[end] for end in ("low", "high")}
            found |= {f"estimate/{name}": each["value"], **ends}
        return found if self.ess is None else {**found, "estimate/ess": self.ess}


class Episodes(NamedTuple):
    """E episodes padded to T steps."""

    reward: Array  # [E, T] f32
    mask: Array  # [E, T] bool
    log_ratio: Array  # [E, T] f32
    q: Array | None  # [E, T] f32
    value: Array | None  # [E, T + 1] f32


class Judge:
    """Estimates what policies of one algorithm would earn, by one data set.

    Args:
      cfg: the run of the policies; its `algo.gamma` discounts.
      how: the settings.
      algo, spec: of the policies.
      store: the data, in the policies' spaces.
      mend: how a user says other methods, and how that the policy explores, for errors.
    Raises:
      InputError: the data or the policy lack what a method needs.
    """

    def __init__(
        self, cfg: RunConfig, how: EstimateConfig, algo: Algo, spec: EnvSpec, store: EpisodeStore,
        mend: tuple[str, str] = ("data.estimate.methods=[dm]", "data.estimate.explore=true"),
    ):  # fmt: skip
        if not store.has_rewards:
            raise InputError(
                f"{store.name} has no rewards, so that nothing can be said of returns: give data with them"
            )
        if how.episodes is not None and how.episodes < store.num_episodes:
            chosen = np.random.default_rng(0).permutation(store.num_episodes)[: how.episodes]
            store = store.take(np.sort(chosen))
        self._cfg, self._how, self._algo, self._spec, self._store = cfg, how, algo, spec, store
        self._gamma = float(np.asarray(cfg.algo.gamma))
        explore = action_probabilities.is_stochastic(algo, spec) if how.explore is None else how.explore
        weighing = [name for name in how.methods if name != "dm"]
        if weighing:
            check_log_probs(store, weighing, mend[0])
        if weighing or isinstance(spec.action, Discrete):  # of a set of choices the values ask for probabilities, too
            _check_choice(algo, spec, explore, weighing or how.methods, mend)
        fits = any(name in _FITTED for name in how.methods)
        self._asked = action_probabilities.Request(explore, bool(weighing), how.fqe.actions if fits else 0)
        self._fit = _Fit(cfg, how, spec, store, self._gamma) if fits else None
        self._begins = store.offsets[:-1]

    def __call__(self, actor: PyTree, key: Key) -> Report:
        """Estimates the return of a policy, `actor` of the algorithm; the same key gives the same result."""
        store, how = self._store, self._how
        along_key, fit_key = jax.random.split(key)
        found = action_probabilities.compute_probabilities(self._algo, self._spec, actor, store, self._asked, along_key)
        q = value = None
        if self._fit is not None and found.choices is not None:
            q, value = (
                self._padded(x, more) for x, more in zip(self._fit(found.choices, fit_key), (0, 1), strict=True)
            )
            ended = np.flatnonzero(store.terminated)
            value[ended, store.lengths()[ended]] = 0.0
        ratio = np.zeros(store.num_rows, np.float32)
        if found.log_prob is not None:
            ratio = (found.log_prob - store.columns[LOG_PROB]).astype(np.float32)
        mask = np.arange(store.lengths().max())[None] < store.lengths()[:, None]
        episodes = Episodes(self._padded(store.reward), mask, self._padded(ratio), q, value)
        interval, ess, mean_ratio, mean = jax.device_get(_estimated(how.methods, self._gamma, episodes))
        estimates: dict[str, dict[str, float]] = {
            name: {field: float(x[i]) for field, x in interval._asdict().items()} for i, name in enumerate(how.methods)
        }
        weighs = self._asked.log_prob
        told = tuple(_warnings(self._gamma, how.methods, store, float(ess), float(mean_ratio), weighs))
        return Report(estimates, float(ess) if weighs else None, store.num_episodes, float(mean), told)

    def _padded(self, x: Array, more: int = 0) -> np.ndarray:
        """Returns numbers [R] as [E, T + more], anything behind an episode's rows."""
        steps = np.minimum(np.arange(self._store.lengths().max() + more)[None], self._store.lengths()[:, None])
        return np.asarray(x)[self._begins[:, None] + steps].astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _estimated(methods: tuple[str, ...], gamma: float, episodes: Episodes):
    reward, mask, ratio, q, value = episodes

    def one(name: str, weight: Array) -> Array:
        match name:
            case "dm":
                return estimators.direct(value[:, 0], weight)  # type: ignore[index]  # there is one where a method needs it
            case "dr":
                return estimators.doubly_robust(reward, mask, ratio, q, value, gamma, weight)
            case "wdr":
                return estimators.weighted_doubly_robust(reward, mask, ratio, q, value, gamma, weight)
        return _OF_RATIOS[name](reward, mask, ratio, gamma, weight)

    of_all = lambda weight: jnp.stack([one(name, weight) for name in methods])
    interval = estimators.bootstrap(of_all, reward.shape[0], jax.random.key(0))
    ess = estimators.effective_sample_size(mask, ratio)
    return interval, ess, estimators.mean_ratio(mask, ratio), estimators.returns(reward, mask, gamma)


_OF_RATIOS = {
    "is": estimators.importance_sampling,
    "wis": estimators.weighted_importance_sampling,
    "pdis": estimators.per_decision,
    "wpdis": estimators.weighted_per_decision,
}


class _Fit:
    def __init__(self, cfg: RunConfig, how: EstimateConfig, spec: EnvSpec, store: EpisodeStore, gamma: float):
        self._settings, self._store = how.fqe, store
        to_end = data_sets.to_end(store, gamma)["reward"][store.is_step()]
        fit = fqe.Settings(how.fqe.updates, how.fqe.lr, how.fqe.tau, how.fqe.hidden)
        level, scale = float(to_end.mean()), max(float(to_end.std()), 1e-3)
        self._fqe = fqe.make(spec, cfg.network, fit, level=level, scale=scale)
        self._ring = functools.partial(
            ring.make, element(spec.observation), element(spec.action), num_envs=1, batch_size=how.fqe.batch_size,
            gamma=gamma, capacity=store.num_rows + _SPARE,
        )  # fmt: skip
        self._values = jax.jit(self._fqe.values)
        self._buffer: Buffer | None = None
        self._steps = jax.jit(self._updated, donate_argnums=0)

    def __call__(self, choices: Array, key: Key) -> tuple[np.ndarray, np.ndarray]:
        """Returns Q of the actions taken and V of each row, [R] f32, of the policy with these choices."""
        store = self._store
        extras = {fqe.NEXT: np.concatenate([choices[1:], choices[:1]])}  # behind the last row there is nothing
        self._buffer = self._buffer or self._ring(
            extras={name: data_sets.element_of(column) for name, column in extras.items()}
        )
        rows = data_sets.fold(self._buffer.add, jax.jit(self._buffer.init)(), store, extras=extras)
        begin, draw = jax.random.split(key)
        observe = lambda state, rollout: self._fqe.observe(state, rollout.obs, rollout.mask)
        state = data_sets.fold(observe, self._fqe.init(begin), store)
        for first in range(0, self._settings.updates, _UPDATES):
            count = min(_UPDATES, self._settings.updates - first)
            state = self._steps(state, rows, draw, np.int32(first), np.int32(count))
        found = []
        for first in range(0, store.num_rows, data_sets.CHUNK):
            part = lambda x, first=first: x[first : first + data_sets.CHUNK]
            obs, action = jax.tree.map(part, (store.obs, store.action))
            found.append(jax.device_get(self._values(state, obs, action, part(choices))))
        q, v = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return q, v

    def _updated(self, state: fqe.State, rows: PyTree, key: Key, first: Any, count: Any) -> fqe.State:
        def body(i: Any, state: fqe.State) -> fqe.State:
            assert self._buffer is not None
            batch = self._buffer.sample(rows, jax.random.fold_in(key, i))
            assert isinstance(batch, Batch)
            return self._fqe.update(state, batch)[0]

        return jax.lax.fori_loop(first, first + count, body, state)


# ---------------------------------------------------------------- beside training


class Beside:
    """Estimates beside a run from data alone: when, and of which weights.

    Args:
      cfg: the run.
      judge: by its data.
    """

    def __init__(self, cfg: RunConfig, judge: Judge):
        self._seed, self._judge = cfg.run.seed, judge
        self._every = plan.estimate_every(cfg)
        self._reached: Callable[[StepInfo], bool] = lambda info: False
        self._told: set[str] = set()

    def begin(self, updates: int, most: int) -> None:
        """Begins to count, from so many updates on, of which a call makes `most`."""
        if self._every is not None:
            self._reached = reporter.reached(self._every, most=most, env_steps=updates)

    @property
    def with_evaluations(self) -> bool:
        """Returns whether there is an estimate with each evaluation, instead of one after so many updates."""
        return self._every is None

    def after(self, info: StepInfo, actor: Callable[[PyTree], PyTree]) -> dict[str, float]:
        """Returns keys of the row that ends with a call, where an estimate is due; else {}.

        Args:
          info: the call.
          actor: of the learner's state, what acts.
        """
        return self.of(actor(info.state.learner), info.iteration) if self._reached(info) else {}

    def of(self, actor: PyTree, iteration: int) -> dict[str, float]:
        """Returns keys of result rows: the estimates of an actor after so many iterations."""
        # on one device, wherever the run learns
        acting = jax.device_put(jax.device_get(actor), jax.local_devices()[0])
        report = self._judge(acting, role_key(self._seed, Role.ESTIMATE, iteration))
        for text in report.warnings:
            if (kind := text.split(":")[0]) not in self._told:
                self._told.add(kind)
                warnings.warn(f"data.estimate: {text}", RuntimeWarning, stacklevel=2)
        return report.metrics()


def beside(cfg: RunConfig, found: data_sets.Inputs, algo: Algo) -> Beside | None:
    """Makes the estimates of a run from these data, by those held out if any; None: `data.estimate` is not set.

    Raises:
      InputError: the data or the policy lack what a method needs.
    """
    if cfg.data.estimate is None:
        return None
    store = concatenated(list((found.validation or found.train).values()))
    return Beside(cfg, Judge(cfg, cfg.data.estimate, algo, found.spec, store))


# ---------------------------------------------------------------- what cannot be, and what should be known


def check_log_probs(store: EpisodeStore, methods: Sequence[str], mend: str) -> None:
    """Raises InputError: the behaviour policy's log-probabilities are missing, or are no such."""
    needing = f"{', '.join(methods)} {'needs' if len(methods) == 1 else 'need'}"
    if LOG_PROB not in store.columns:
        raise InputError(
            f"{store.name}: there is no column {LOG_PROB}, the log-probability of each action under the policy that "
            f"took it, which {needing}: record the data with jrl (python -m jrl.data record), or judge without: {mend}"
        )
    given = np.asarray(store.columns[LOG_PROB])[store.is_step()]
    if (wrong := ~np.isfinite(given)).any():
        episode = int(np.searchsorted(np.cumsum(store.lengths()), np.argmax(wrong), "right"))
        raise InputError(
            f"{store.name}: column {LOG_PROB}: {counted(int(wrong.sum()), 'number', ',')} not finite (first: episode "
            f"{episode}), and {needing} them: leave these episodes out, or judge without: {mend}"
        )
    for finding in log_probs(store):
        raise InputError(f"{store.name}: {finding.what}: {finding.mend}; or judge without: {mend}")


def _check_choice(algo: Algo, spec: EnvSpec, explore: bool, methods: Sequence[str], mend: tuple[str, str]) -> None:
    if algo.choice is None:
        raise InputError(f"the algorithm does not tell the probability of actions, for {', '.join(methods)}: {mend[0]}")

    def asked(key: Key, obs: PyTree) -> None:
        assert algo.choice is not None
        algo.choice(algo.actor(algo.init(key)), obs, algo.carry(1), explore)

    try:
        jax.eval_shape(asked, jax.random.key(0), spaces.elements(spec.observation, 1))
    except InputError as e:
        other = "" if explore else f", or judge it with the noise of its exploration: {mend[1]}"
        raise InputError(f"{', '.join(methods)}: {e}: judge it by its values: {mend[0]}{other}") from e


def _warnings(
    gamma: float, methods: Sequence[str], store: EpisodeStore, ess: float, mean_ratio: float, weighs: bool
) -> Iterator[str]:
    num = store.num_episodes
    if weighs and ess < max(min(_FEW, num), _SMALL * num):
        yield (
            f"weights explode: {counted(num, 'episode', ',')} weigh as much as {ess:.1f}: the policy does what the "
            "data hardly have, and no interval of a weighting method can be trusted; dm is left, or data of a policy "
            "that is more like it"
        )
    if weighs and not _RATIOS[0] <= mean_ratio <= _RATIOS[1]:
        yield (
            f"the ratio of the policy's to the data's probabilities is {mean_ratio:.3g} on average, where 1 is "
            f"expected: the column {LOG_PROB} is of other actions or another policy, or the policy does what the data "
            "never have"
        )
    goes_on = ~store.terminated
    if goes_on.any():
        share = f"{counted(int(goes_on.sum()), 'episode', ',')} of {num:,} did not come to a true end"
        bootstraps = [name for name in methods if name in _FITTED]
        if bootstraps and gamma == 1:
            yield f"{share}: without a discount {', '.join(bootstraps)} count on without an end: use a gamma below 1"
        elif bootstraps and weighs:
            yield f"{share}: {', '.join(bootstraps)} count what comes behind, the others what was recorded"


__all__ = ["Beside", "Judge", "Report", "beside", "check_log_probs"]
