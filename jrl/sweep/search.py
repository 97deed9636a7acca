"""Search for the points of a sweep: a grid, random or Sobol draws, or proposals of Optuna from earlier scores."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.errors import InputError
from jrl.sweep import space
from jrl.sweep.settings import OPTUNA_SEARCHES, SweepPlan
from jrl.sweep.space import Space


def check_installed(plan: SweepPlan) -> None:
    """Raises InputError if the search needs a package that is not installed."""
    kind = plan.settings.search
    if plan.settings.samples is None or kind not in OPTUNA_SEARCHES:
        return
    missing = []
    for name in ("optuna", "torch")[: 2 if kind == "gp" else 1]:
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise InputError(f"--search {kind}: needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def list_round_sizes(plan: SweepPlan) -> list[int]:
    """Returns the number of points of each round. Only Optuna's searches have several rounds."""
    settings = plan.settings
    if settings.samples is None:
        return [len(space.build_grid(plan.spaces))]
    if settings.search not in OPTUNA_SEARCHES:
        return [settings.samples]
    whole, rest = divmod(settings.samples, settings.batch)
    return [settings.batch] * whole + [rest] * bool(rest)


def propose_points(
    plan: SweepPlan, count: int, *, seed: int, number: int, tried: Sequence[tuple[Mapping[str, Any], float]]
) -> list[dict[str, Any]]:
    """Returns the points of a round. The same seed and scores give the same points.

    Args:
      plan: plan of the sweep.
      count: number of points of the round.
      seed: seed of the draws.
      number: index of the round.
      tried: points and scores of earlier rounds; NaN: no score.
    """
    settings = plan.settings
    if settings.samples is None:
        return space.build_grid(plan.spaces)
    if settings.search in OPTUNA_SEARCHES and number:
        return _ask_optuna(plan.spaces, settings.search, count, [seed, number], tried)
    return space.draw_points(plan.spaces, count, sobol=settings.search != "random", seed=seed)


def _ask_optuna(
    spaces: Mapping[str, Space],
    kind: str,
    count: int,
    seed: Sequence[int],
    tried: Sequence[tuple[Mapping[str, Any], float]],
) -> list[dict[str, Any]]:
    """Returns proposals of Optuna, which sees shares in [0, 1]: `Space` converts them to values."""
    import numpy as np
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    number = int(np.random.default_rng(seed).integers(2**31))
    make: Any = optuna.samplers.TPESampler if kind == "tpe" else optuna.samplers.GPSampler
    sampler = make(seed=number, n_startup_trials=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        key: CategoricalDistribution(range(len(own.values))) if own.kind == "choice" else FloatDistribution(0.0, 1.0)
        for key, own in spaces.items()
    }
    scores = [score for _, score in tried if math.isfinite(score)]
    worst = min(scores, default=0.0)
    for point, score in tried:
        params = {
            key: own.values.index(point[key]) if own.kind == "choice" else own.to_share(point[key])
            for key, own in spaces.items()
        }
        value = score if math.isfinite(score) else worst
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    proposals = []
    for _ in range(count):
        trial = study.ask(distributions)
        proposals.append(trial.params)
        study.tell(trial, worst)  # provisional score, so that the points of a round spread out
    return [
        {
            key: own.values[params[key]] if own.kind == "choice" else own.to_value(params[key])
            for key, own in spaces.items()
        }
        for params in proposals
    ]
