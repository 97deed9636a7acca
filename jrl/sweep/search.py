"""Search for the points of a sweep: a grid, points that are drawn, or Optuna's proposals from those before."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.errors import InputError
from jrl.sweep import space
from jrl.sweep.settings import PROPOSE, Plan
from jrl.sweep.space import Space


def check(plan: Plan) -> None:
    """Raises InputError: what proposes points is not installed."""
    kind = plan.settings.search
    if plan.settings.samples is None or kind not in PROPOSE:
        return
    missing = []
    for name in ("optuna", "torch")[: 2 if kind == "gp" else 1]:
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise InputError(f"--search {kind}: needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def rounds(plan: Plan) -> list[int]:
    """Returns the points in each round of a sweep: one round, unless points follow from the scores of those before."""
    settings = plan.settings
    if settings.samples is None:
        return [len(space.grid(plan.spaces))]
    if settings.search not in PROPOSE:
        return [settings.samples]
    whole, rest = divmod(settings.samples, settings.batch)
    return [settings.batch] * whole + [rest] * bool(rest)


def points(
    plan: Plan, count: int, *, seed: int, number: int, tried: Sequence[tuple[Mapping[str, Any], float]]
) -> list[dict[str, Any]]:
    """Returns the points of a round; the same seed and the same scores give the same points.

    Args:
      count, number: of the round, as `rounds` says.
      tried: points of the rounds before with their scores, NaN where there is none.
    """
    settings = plan.settings
    if settings.samples is None:
        return space.grid(plan.spaces)
    if settings.search in PROPOSE and number:
        return _proposed(plan.spaces, settings.search, count, [seed, number], tried)
    return space.drawn(plan.spaces, count, sobol=settings.search != "random", seed=seed)


def _proposed(
    spaces: Mapping[str, Space],
    kind: str,
    count: int,
    seed: Sequence[int],
    tried: Sequence[tuple[Mapping[str, Any], float]],
) -> list[dict[str, Any]]:
    """Asks Optuna, which is told the shares of the spaces: what their measures are is the spaces' own."""
    import numpy as np
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    number = int(np.random.default_rng(seed).integers(2**31))
    make: Any = optuna.samplers.TPESampler if kind == "tpe" else optuna.samplers.GPSampler
    sampler = make(seed=number, n_startup_trials=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    of: dict[str, optuna.distributions.BaseDistribution] = {
        key: CategoricalDistribution(range(len(own.values))) if own.kind == "choice" else FloatDistribution(0.0, 1.0)
        for key, own in spaces.items()
    }
    scores = [score for _, score in tried if math.isfinite(score)]
    worst = min(scores, default=0.0)
    for point, score in tried:
        told = {
            key: own.values.index(point[key]) if own.kind == "choice" else own.share_of(point[key])
            for key, own in spaces.items()
        }
        value = score if math.isfinite(score) else worst
        study.add_trial(optuna.trial.create_trial(params=told, distributions=of, value=value))
    asked = []
    for _ in range(count):
        trial = study.ask(of)
        asked.append(trial.params)
        study.tell(trial, worst)  # until its score is known, so that a round is no heap
    return [
        {key: own.values[params[key]] if own.kind == "choice" else own.at(params[key]) for key, own in spaces.items()}
        for params in asked
    ]
