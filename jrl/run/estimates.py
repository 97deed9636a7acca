"""Off-policy estimates of a policy's return from recorded episodes: `data.estimate`, `python -m jrl.data estimate`."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.algos import fqe
from jrl.config import NetworkConfig
from jrl.config.datasets import EstimateConfig
from jrl.data import EpisodeStore
from jrl.data.findings import check_log_prob_values
from jrl.data.rollouts import CHUNK, fold_rollouts
from jrl.data.store import LOG_PROB, concatenated
from jrl.errors import InputError, counted
from jrl.learn.program import Role, StepInfo, role_key
from jrl.ops import estimators
from jrl.play import action_probabilities
from jrl.replay import ring
from jrl.run import data_sets, reporter
from jrl.run.plan import Plan
from jrl.types import Algo, Array, Batch, Buffer, Discrete, EnvSpec, Key, PyTree, element

_FITTED = ("dm", "dr", "wdr")  # methods that need values of the policy
_UPDATES = 1000  # updates of fitted Q evaluation in one dispatch
_SPARE = 3  # slots of a ring beyond its rows
_MIN_ESS = 10  # minimum effective sample size, in episodes
_MIN_ESS_SHARE = 0.05  # minimum effective share of the episodes
_RATIOS = (0.5, 2.0)  # plausible range of the mean ratio, which is 1 if the recorded log_prob is right


class EstimateReport(NamedTuple):
    """Estimates with their effective sample size and warnings; plain numbers."""

    estimates: dict[str, dict[str, float]]  # method -> value, error, low, high
    ess: float | None  # effective sample size, in episodes; None: no method uses weights
    episodes: int
    mean_return: float  # mean discounted return of the recorded episodes
    warnings: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """Returns the report by keys of result rows."""
        found = {"estimate/return": self.mean_return}
        for name, each in self.estimates.items():
            ends = {f"estimate/{name}_{end}": each[end] for end in ("low", "high")}
            found |= {f"estimate/{name}": each["value"], **ends}
        return found if self.ess is None else {**found, "estimate/ess": self.ess}


class RatedEpisodes(NamedTuple):
    """E episodes padded to T steps."""

    reward: Array  # [E, T] f32
    mask: Array  # [E, T] bool
    log_ratio: Array  # [E, T] f32
    q: Array | None  # [E, T] f32
    value: Array | None  # [E, T + 1] f32


class ReturnEstimator:
    """Estimates the return of policies of one algorithm from one data set.

    Args:
      gamma: discount of the rewards.
      how: options of the estimates.
      network, algo, spec: network, algorithm and spec of the policies.
      store: recorded episodes, in the policies' spaces.
      fix: how a user selects the method `dm`, and exploring policies; for error messages.
    Raises:
      InputError: the data or the policy lack what a method needs.
    """

    def __init__(
        self, gamma: Any, network: NetworkConfig, how: EstimateConfig, algo: Algo, spec: EnvSpec, store: EpisodeStore,
        fix: tuple[str, str] = ("data.estimate.methods=[dm]", "data.estimate.explore=true"),
    ):  # fmt: skip
        if not store.has_rewards:
            raise InputError(f"{store.name}: expected data with rewards, got none: estimates need them")
        if how.episodes is not None and how.episodes < store.num_episodes:
            chosen = np.random.default_rng(0).permutation(store.num_episodes)[: how.episodes]
            store = store.take(np.sort(chosen))
        self._how, self._algo, self._spec, self._store = how, algo, spec, store
        self._gamma = float(np.asarray(gamma))
        explore = action_probabilities.is_stochastic(algo, spec) if how.explore is None else how.explore
        weighing = [name for name in how.methods if name != "dm"]
        if weighing:
            check_log_probs(store, weighing, fix[0])
        if weighing or isinstance(spec.action, Discrete):  # values of discrete actions need probabilities, too
            _check_choice(algo, spec, explore, weighing or how.methods, fix)
        fits = any(name in _FITTED for name in how.methods)
        self._request = action_probabilities.ProbabilityRequest(explore, bool(weighing), how.fqe.actions if fits else 0)
        self._fit = _Fit(network, how, spec, store, self._gamma) if fits else None
        self._begins = store.offsets[:-1]

    def __call__(self, actor: PyTree, key: Key) -> EstimateReport:
        """Returns the estimates of a policy, given its ActorState; equal keys give equal results."""
        store, how = self._store, self._how
        along_key, fit_key = jax.random.split(key)
        found = action_probabilities.compute_probabilities(
            self._algo, self._spec, actor, store, self._request, along_key
        )
        q = value = None
        if self._fit is not None and found.choices is not None:
            q, value = self._fit(found.choices, fit_key)
            q, value = self._padded(q), self._padded(value, 1)
            ended = np.flatnonzero(store.terminated)
            value[ended, store.lengths()[ended]] = 0.0
        ratio = np.zeros(store.num_rows, np.float32)
        if found.log_prob is not None:
            ratio = (found.log_prob - store.columns[LOG_PROB]).astype(np.float32)
        mask = np.arange(store.lengths().max())[None] < store.lengths()[:, None]
        episodes = RatedEpisodes(self._padded(store.reward), mask, self._padded(ratio), q, value)
        interval, ess, mean_ratio, mean = jax.device_get(_estimated(how.methods, self._gamma, episodes))
        fields, weighs = interval._asdict().items(), self._request.log_prob
        estimates = {str(name): {field: float(x[i]) for field, x in fields} for i, name in enumerate(how.methods)}
        warned = tuple(_warnings(self._gamma, how.methods, store, float(ess), float(mean_ratio), weighs))
        return EstimateReport(estimates, float(ess) if weighs else None, store.num_episodes, float(mean), warned)

    def _padded(self, x: Array, more: int = 0) -> np.ndarray:
        """Returns values [R] as [E, T + more], with arbitrary padding."""
        steps = np.minimum(np.arange(self._store.lengths().max() + more)[None], self._store.lengths()[:, None])
        return np.asarray(x)[self._begins[:, None] + steps].astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _estimated(methods: tuple[str, ...], gamma: float, episodes: RatedEpisodes):
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
    """Fitted Q evaluation on one data set."""

    def __init__(self, network: NetworkConfig, how: EstimateConfig, spec: EnvSpec, store: EpisodeStore, gamma: float):
        self._settings, self._store = how.fqe, store
        to_end = data_sets.to_end(store, gamma)["reward"][store.is_step()]
        fit = fqe.Settings(how.fqe.updates, how.fqe.lr, how.fqe.tau, how.fqe.hidden)
        level, scale = float(to_end.mean()), max(float(to_end.std()), 1e-3)
        self._fqe = fqe.make(spec, network, fit, level=level, scale=scale)
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
        rows = fold_rollouts(self._buffer.add, jax.jit(self._buffer.init)(), store, extras=extras)
        begin, draw = jax.random.split(key)
        observe = lambda state, rollout: self._fqe.observe(state, rollout.obs, rollout.mask)
        state = fold_rollouts(observe, self._fqe.init(begin), store)
        for first in range(0, self._settings.updates, _UPDATES):
            count = min(_UPDATES, self._settings.updates - first)
            state = self._steps(state, rows, draw, np.int32(first), np.int32(count))
        found = []
        for first in range(0, store.num_rows, CHUNK):
            part = lambda x, first=first: x[first : first + CHUNK]
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


# ---------------------------------------------------------------- estimates during training


class ScheduledEstimates:
    """Schedules the estimates during a run that learns from data only.

    Args:
      every: updates between two estimates; None: estimates are made with each evaluation.
    """

    def __init__(self, seed: int, every: int | None, estimator: ReturnEstimator):
        self._seed, self._every, self._estimator = seed, every, estimator
        self.with_evaluations = every is None
        self.is_due: Callable[[StepInfo], bool] = lambda info: False
        self._warned: set[str] = set()

    def begin(self, updates: int, most: int) -> None:
        """Starts to count from `updates` updates; a call makes `most` updates."""
        if self._every is not None:
            self.is_due = reporter.every_steps(self._every, most=most, env_steps=updates)

    def estimate(self, actor: PyTree, iteration: int) -> dict[str, float]:
        """Returns the metrics of an ActorState's estimates after `iteration` iterations."""
        # on one device, even if the run learns on several
        acting = jax.device_put(jax.device_get(actor), jax.local_devices()[0])
        report = self._estimator(acting, role_key(self._seed, Role.ESTIMATE, iteration))
        for text in report.warnings:
            if (kind := text.split(":")[0]) not in self._warned:
                self._warned.add(kind)
                warnings.warn(f"data.estimate: {text}", RuntimeWarning, stacklevel=2)
        return report.metrics()


def build_estimates(plan: Plan, inputs: data_sets.Inputs, algo: Algo) -> ScheduledEstimates | None:
    """Returns the estimates of a run, on validation data if there are any; None: `data.estimate` is not set.

    Raises:
      InputError: the data or the policy lack what a method needs.
    """
    cfg, how = plan.policies.groups[0].cfg, plan.cfg.data.estimate
    if how is None:
        return None
    store = concatenated(list((inputs.validation or inputs.train).values()))
    estimator = ReturnEstimator(cfg.algo.gamma, cfg.network, how, algo, inputs.spec, store)
    return ScheduledEstimates(cfg.run.seed, plan.estimate_every, estimator)


# ---------------------------------------------------------------- checks and warnings


def check_log_probs(store: EpisodeStore, methods: Sequence[str], fix: str) -> None:
    """Raises InputError: the behaviour policy's log-probabilities are missing or invalid."""
    needing = f"{', '.join(methods)} {'needs' if len(methods) == 1 else 'need'}"
    if LOG_PROB not in store.columns:
        raise InputError(
            f"{store.name}: there is no column {LOG_PROB}, the log-probability of each action under the policy that "
            f"took it, which {needing}: record the data with jrl (python -m jrl.data record), or judge without: {fix}"
        )
    given = np.asarray(store.columns[LOG_PROB])[store.is_step()]
    if (wrong := ~np.isfinite(given)).any():
        episode = int(np.searchsorted(np.cumsum(store.lengths()), np.argmax(wrong), "right"))
        raise InputError(
            f"{store.name}: column {LOG_PROB}: {counted(int(wrong.sum()), 'number', ',')} not finite (first: episode "
            f"{episode}), and {needing} them: leave these episodes out, or judge without: {fix}"
        )
    for finding in check_log_prob_values(store):
        raise InputError(f"{store.name}: {finding.what}: {finding.fix}; or judge without: {fix}")


def _check_choice(algo: Algo, spec: EnvSpec, explore: bool, methods: Sequence[str], fix: tuple[str, str]) -> None:
    if algo.choice is None:
        raise InputError(f"the algorithm does not tell the probability of actions, for {', '.join(methods)}: {fix[0]}")

    try:
        choose = lambda key, obs: algo.choice(algo.actor(algo.init(key)), obs, algo.carry(1), explore)
        jax.eval_shape(choose, jax.random.key(0), spaces.elements(spec.observation, 1))
    except InputError as e:
        other = "" if explore else f", or judge it with the noise of its exploration: {fix[1]}"
        raise InputError(f"{', '.join(methods)}: {e}: judge it by its values: {fix[0]}{other}") from e


def _warnings(
    gamma: float, methods: Sequence[str], store: EpisodeStore, ess: float, mean_ratio: float, weighs: bool
) -> Iterator[str]:
    num = store.num_episodes
    if weighs and ess < max(min(_MIN_ESS, num), _MIN_ESS_SHARE * num):
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
