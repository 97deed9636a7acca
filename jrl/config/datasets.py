"""The `data` section: data sets to learn from, instead of environments or together with them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jrl.fields.bounds import Amount, Count, Few, Name, Positive, Share, Steps, Widths
from jrl.fields.validation import section

SAMPLER = "sampler"  # input of a mix that stands for the run's own environments
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
    """Files with the episodes that a run collects. A file is written whole or not at all."""

    path: str | None = None  # directory; null: `data` in the run directory
    # file format; `python -m jrl.data convert` makes other formats
    format: Literal["jrl", "d4rl", "rllib-json", "rllib-parquet"] = "jrl"
    max_file_mb: Annotated[float, Interval(gt=0, le=2**20)] = 64.0  # size of a file's arrays; then a new file begins
    # extras of acting to record beside the action, such as [log_prob, value]; null: all except memories
    columns: tuple[Name, ...] | None = None
    compress: bool = True  # compress the files


@section
class FqeConfig:
    """Fitted Q evaluation: fits the action values of the evaluated policy, from scratch for each estimate."""

    updates: Count = 10_000  # gradient steps
    batch_size: Count = 256  # transitions per gradient step
    lr: Positive = 1e-3  # initial step size of Adam; it falls linearly to 0
    tau: Share = 0.05  # step size of the target network towards the network
    hidden: Widths | None = None  # widths of the network's dense layers; null: as network.hidden
    actions: Few = 8  # sampled actions per observation for the mean, unless actions are Discrete


Method = Literal["is", "wis", "pdis", "wpdis", "dm", "dr", "wdr"]


@section
class EstimateConfig:
    """Estimates of the policy's return from data, in metrics estimate/*. Uses the validation episodes, if any."""

    # is, wis: importance sampling, plain and weighted; pdis, wpdis: per decision; dm: direct, by fitted Q evaluation;
    # dr, wdr: doubly robust
    methods: tuple[Method, ...] = ("is", "wis", "pdis", "dm", "dr")
    # updates between two estimates; null: as evaluations, or without them a tenth of stop.updates
    every: Steps | None = None
    episodes: Count | None = None  # most episodes, drawn once; null: all
    # true: evaluate the exploring policy; false: its best actions; null: true if the policy is a distribution
    explore: bool | None = None
    fqe: FqeConfig = FqeConfig()  # options of dm, dr and wdr


@section
class DataConfig:
    """Data sets to learn from. In a run without environments, keys that count environment steps count updates."""

    # path, glob, or a list of them; {sampler: 0.5, PATH: 0.5}: share of each batch, sampler for the run's own
    # environments; package.module:name of a function () -> EpisodeStore. null: environments only
    input: str | tuple[str, ...] | dict[str, Weight] | None = None
    # file format; null: recognised from the files
    format: Literal["jrl", "rllib-json", "rllib-parquet", "minari", "d4rl"] | None = None
    # label -> required value, to select episodes, such as {policy: main}; null: all episodes
    where: dict[str, str | Amount] | None = None
    # updates in one call of the program; null: chosen by the intervals of reports, evaluations and checkpoints
    updates_per_iteration: Annotated[int, Interval(ge=1, le=1_000_000)] | None = None
    validation: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # share of the steps for validation, in whole episodes
    validation_batches: Annotated[int, Interval(ge=1, le=10_000)] = 4  # batches per call for metrics validation/*
    # true: Box actions are scaled to [-1, 1]; false: they are the environment's actions; null: as the data state, or
    # false
    actions_in_input_normalized: bool | None = None
    reward: DataRewardConfig = DataRewardConfig()  # changes to the rewards of the data
    # memory of the data. device: the learning devices; host: the host's memory, with batches fetched ahead; auto:
    # device if the data fit
    placement: Literal["auto", "device", "host"] = "auto"
    # estimates of the policy's return from data; null: none
    estimate: EstimateConfig | None = None
    # files with the run's own episodes; null: none
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
    return len(inputs := shares(data)) > 1 and SAMPLER in inputs


def alone(cfg: Any) -> bool:
    """Returns whether a run learns from data only and collects nothing."""
    return cfg.data.input is not None and cfg.replay is not None and SAMPLER not in shares(cfg.data)


def plays(cfg: Any) -> bool:
    """Returns whether a run has environments for evaluations."""
    return bool(cfg.env.id) or not alone(cfg)


def title(cfg: Any) -> str:
    """Returns the id of a run's environment, or the name of its data."""
    nameless = "data" if cfg.external is None else "clients"
    return cfg.env.id or next((Path(name).name for name in shares(cfg.data)), nameless)


def counts(shares: dict[str, float], batch_size: int) -> dict[str, int]:
    """Returns the number of rows of each input in a batch, at least 1; they sum to the batch size.

    >>> counts({"sampler": 0.5, "a": 0.25, "b": 0.25}, 7)
    {'sampler': 3, 'a': 2, 'b': 2}
    """
    exact = {name: share * batch_size for name, share in shares.items()}
    rows = {name: max(1, int(n)) for name, n in exact.items()}
    for name in sorted(exact, key=lambda name: rows[name] - exact[name])[: max(0, batch_size - sum(rows.values()))]:
        rows[name] += 1
    return rows
