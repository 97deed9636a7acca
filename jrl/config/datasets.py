"""The `data` section: data sets to learn from, in the place of environments or beside them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jrl.fields.bounds import Amount, Count, Few, Name, Positive, Share, Steps, Widths
from jrl.fields.validation import section

SAMPLER = "sampler"  # among the inputs of a mix: the run's own environments
Weight = Annotated[float, Interval(ge=0, le=1)]


@section
class DataRewardConfig:
    """Changes to the rewards of a data set, in this order: normalize, scale, shift, clip."""

    # range: times 1000 / (largest - smallest return of an episode); std: divided by the rewards' deviation
    normalize: Literal["none", "range", "std"] = "none"
    scale: float = 1.0  # factor
    shift: float = 0.0  # added
    clip: tuple[float, float] | None = None  # [low, high]; null: none


@section
class OutputConfig:
    """Output of the episodes that a run collects. Each file is there whole or not at all."""

    path: str | None = None  # directory; null: data in the run directory
    # of the files; others can be made of them by `python -m jrl.data convert`
    format: Literal["jrl", "d4rl", "rllib-json", "rllib-parquet"] = "jrl"
    max_file_mb: Annotated[float, Interval(gt=0, le=2**20)] = 64.0  # of arrays; then the next file begins
    # what acting records beside the action, such as [log_prob, value]; null: all, but memories
    columns: tuple[Name, ...] | None = None
    compress: bool = True


@section
class FqeConfig:
    """Fit of the action values of the judged policy, anew for each estimate."""

    updates: Count = 10_000  # gradient steps
    batch_size: Count = 256  # transitions of each
    lr: Positive = 1e-3  # Adam's step size at the start; it falls to 0
    tau: Share = 0.05  # share of the way that the target network moves with each step
    hidden: Widths | None = None  # of the network; null: as network.hidden
    actions: Few = 8  # drawn at each observation where actions are not Discrete, to average over


Method = Literal["is", "wis", "pdis", "wpdis", "dm", "dr", "wdr"]


@section
class EstimateConfig:
    """Estimates of the policy's return from the data: rows estimate/*. Of the episodes held out, if there are any."""

    # is, wis: importance sampling, plain and weighted; pdis, wpdis: per decision; dm: direct, by fitted Q evaluation;
    # dr, wdr: doubly robust
    methods: tuple[Method, ...] = ("is", "wis", "pdis", "dm", "dr")
    # updates between two estimates; null: one with each evaluation, or without any a tenth of stop.updates
    every: Steps | None = None
    episodes: Count | None = None  # at most so many, drawn once; null: all
    # the policy as it acts when exploring; null: where it has a distribution, its best actions elsewhere
    explore: bool | None = None
    fqe: FqeConfig = FqeConfig()


@section
class DataConfig:
    """Data sets to learn from. Without environments, what counts environment steps elsewhere counts updates."""

    # a path, a glob, or a list of them; {sampler: 0.5, PATH: 0.5}: so much of each batch, sampler for the run's own
    # environments; package.module:name of a function () -> EpisodeStore. null: environments alone
    input: str | tuple[str, ...] | dict[str, Weight] | None = None
    # of the files; null: as they show
    format: Literal["jrl", "rllib-json", "rllib-parquet", "minari", "d4rl"] | None = None
    # labels and the values that episodes have to have, such as {policy: main}; null: all episodes
    where: dict[str, str | Amount] | None = None
    # updates in one call of the program; null: chosen by how often something is reported, evaluated or saved
    updates_per_iteration: Annotated[int, Interval(ge=1, le=1_000_000)] | None = None
    validation: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # share of the steps, in whole episodes, that is held out
    validation_batches: Annotated[int, Interval(ge=1, le=10_000)] = 4  # of it, in each call, for metrics validation/*
    # Boxes of actions are in [-1, 1] and stand for the bounds; false: they are the environment's own; null: as the
    # data say, those that say nothing have the environment's own
    actions_in_input_normalized: bool | None = None
    reward: DataRewardConfig = DataRewardConfig()
    # where the data lie: on the devices that learn, or in the host's memory, from where batches are fetched ahead;
    # auto: on the devices if they fit
    placement: Literal["auto", "device", "host"] = "auto"
    # how good the policy is, by what the data say; null: it is not estimated
    estimate: EstimateConfig | None = None
    # the run's own episodes, written as they are collected; null: they are not
    output: OutputConfig | None = None


def shares(data: DataConfig) -> dict[str, float]:
    """Returns the inputs of a run and their shares of each batch, which sum to 1; {} without data."""
    given = data.input
    if given is None:
        return {}
    if isinstance(given, dict):
        total = sum(given.values()) or 1.0
        return {name: share / total for name, share in given.items() if share > 0}
    return {given if isinstance(given, str) else "\n".join(given): 1.0}


def is_mixed(data: DataConfig) -> bool:
    """Returns whether a run learns from its environments and from data."""
    return len(found := shares(data)) > 1 and SAMPLER in found


def alone(cfg: Any) -> bool:
    """Returns whether a run learns from data alone, without environments to collect from."""
    return cfg.data.input is not None and cfg.replay is not None and SAMPLER not in shares(cfg.data)


def plays(cfg: Any) -> bool:
    """Returns whether a run has environments to play evaluations in."""
    return bool(cfg.env.id) or not alone(cfg)


def title(cfg: Any) -> str:
    """Returns the id of a run's environment, or the name of its data."""
    nameless = "data" if cfg.external is None else "clients"
    return cfg.env.id or next((Path(name).name for name in shares(cfg.data)), nameless)


def counts(shares: dict[str, float], batch_size: int) -> dict[str, int]:
    """Returns the rows of a batch that each input gives: whole numbers that sum to the batch's size, 1 at least.

    >>> counts({"sampler": 0.5, "a": 0.25, "b": 0.25}, 7)
    {'sampler': 3, 'a': 2, 'b': 2}
    """
    exact = {name: share * batch_size for name, share in shares.items()}
    found = {name: max(1, int(n)) for name, n in exact.items()}
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[: max(0, batch_size - sum(found.values()))]:
        found[name] += 1
    return found
