"""The `data` section: data sets to learn from, in the place of environments or beside them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jrl.fields.bounds import Amount, Count, Few, Name, Positive, Share, Steps, Widths
from jrl.fields.data import Fixed, Fresh, learns_from
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


def shares(cfg: Any) -> dict[str, float]:
    """Returns the inputs of a run and their shares of each batch, which sum to 1; {} without data."""
    given = cfg.data.input
    if given is None:
        return {}
    if isinstance(given, dict):
        total = sum(given.values()) or 1.0
        return {name: share / total for name, share in given.items() if share > 0}
    return {given if isinstance(given, str) else "\n".join(given): 1.0}


def paths(cfg: Any, name: str) -> list[str]:
    """Returns the paths that an input of `shares` stands for."""
    return name.split("\n")


def is_mixed(cfg: Any) -> bool:
    """Returns whether a run learns from its environments and from data."""
    return len(found := shares(cfg)) > 1 and SAMPLER in found


def alone(cfg: Any) -> bool:
    """Returns whether a run learns from data alone, without environments to collect from."""
    return cfg.data.input is not None and cfg.replay is not None and SAMPLER not in shares(cfg)


def plays(cfg: Any) -> bool:
    """Returns whether a run has environments to play evaluations in."""
    return bool(cfg.env.id) or not alone(cfg)


def title(cfg: Any) -> str:
    """Returns the id of a run's environment, or the name of its data."""
    return cfg.env.id or next((Path(name).name for name in shares(cfg)), "data" if cfg.external is None else "clients")


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


def faults(cfg: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields what does not go with data sets, or without them: the keys that were read, and the message."""
    yield from estimate_faults(cfg)
    kind, given = learns_from(cfg.algo), cfg.data.input
    name = type(cfg.algo).__module__.rpartition(".")[2]
    if kind is Fixed and (given is None or SAMPLER in shares(cfg)):
        mend = "set it, e.g. data.input=runs/data/cartpole-expert" if given is None else f"leave {SAMPLER} out"
        yield ("data.input", "algo.name"), f"data.input: {name} learns from a data set alone: {mend}"
        return
    if given is None:
        if cfg.data.where:
            yield ("data.where", "data.input"), "data.where: it chooses among the episodes of data.input: set that, too"
        if not cfg.env.id and cfg.external is None:
            yield ("env.id",), "env.id is missing: expected the name of an environment, such as CartPole-v1"
        return
    found = shares(cfg)
    if not found or not all(found):
        yield ("data.input",), "data.input names nothing: give a path, a list of paths, or {path: share}"
        return
    if set(found) == {SAMPLER}:
        yield ("data.input",), f"data.input: {SAMPLER} alone is a run without data: leave data.input out"
        return
    if kind is Fresh:
        yield (
            ("data.input", "algo.name"),
            f"data.input: {name} learns from its own rollouts: use bc, marwil, iql, or sac, td3 or dqn with their "
            "flags for data sets",
        )
        return
    if kind is Fixed and cfg.replay is not None and cfg.replay.prioritized:
        yield (
            ("replay.prioritized", "algo.name"),
            f"replay.prioritized: {name} gives no priorities, it draws all rows alike: leave it out",
        )
    if cfg.multi_agent is not None:
        message = f"data.input: {name} learns from a data set, which teaches one policy: leave multi_agent out"
        yield ("data.input", "multi_agent"), message
    if SAMPLER in found:
        if not cfg.env.id and cfg.external is None:
            yield ("env.id", "data.input"), f"env.id is missing: data.input names {SAMPLER}, which acts in environments"
        if cfg.replay is not None and len(found) > cfg.replay.batch_size:
            yield ("data.input", "replay.batch_size"), "data.input: more inputs than rows of a batch: raise it"
        yield from _beside_environments(cfg.data)
        return
    yield from _without_environment(cfg, name)


def estimate_faults(cfg: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields what does not go with `data.estimate`."""
    if cfg.data.estimate is None:
        return
    if cfg.data.input is None or SAMPLER in shares(cfg):
        yield ("data.estimate", "data.input"), "data.estimate: it is for runs that learn from data.input alone"
    if not cfg.data.estimate.methods:
        yield ("data.estimate.methods",), "data.estimate.methods names nothing: leave data.estimate out"
    if (getattr(cfg.algo, "top_fraction", None) or 1.0) < 1.0:
        yield (
            ("data.estimate", "algo.top_fraction"),
            "data.estimate: episodes that were chosen by their returns say nothing of another policy: leave "
            "algo.top_fraction or data.estimate out",
        )


def _beside_environments(data: DataConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    usual = DataConfig()
    for key, is_set, mend in (
        ("validation", data.validation > 0, "leave it out, and judge by evaluation.every"),
        ("validation_batches", data.validation_batches != usual.validation_batches, "leave it out"),
        (
            "updates_per_iteration",
            data.updates_per_iteration is not None,
            "use replay.updates_per_step, the updates for each environment step",
        ),
        ("placement", data.placement == "host", "the data lie beside replay, on the devices: leave it out"),
    ):
        if is_set:
            yield (
                (f"data.{key}", "data.input"),
                f"data.{key}: it is for runs that learn from data.input alone, and data.input names {SAMPLER}: {mend}",
            )


def _without_environment(cfg: Any, name: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, is_set, why in (
        ("env_runners.num", cfg.env_runners.num, "nobody collects"),
        ("rollout.mode", cfg.rollout.mode != "sync", "nobody collects"),
        ("rollout.fake", cfg.rollout.fake, "nobody collects"),
        ("rollout.batch_mode", cfg.rollout.batch_mode != "truncate_episodes", "nobody collects"),
        ("devices.actors", cfg.devices.actors, "nobody acts"),
        ("data.output", cfg.data.output, "nobody collects"),
        ("custom.transforms", cfg.custom.transforms, "there are no rollouts: use custom.batch"),
        ("custom.reward", cfg.custom.reward, "there are no rollouts: use data.reward"),
        ("custom.training_step", cfg.custom.training_step, "an iteration is an update"),
        ("custom.env_task", cfg.custom.env_task, "there are no environments"),
        ("external", cfg.external is not None, "nobody plays"),
    ):
        if is_set:
            yield ("data.input", key), f"{key}: {name} learns from data.input alone, and {why}: leave it out"
    if getattr(cfg.algo, "normalize_reward", False):
        yield (
            ("algo.normalize_reward", "data.input"),
            "algo.normalize_reward: its statistics are of rewards as environments give them, and the run learns from "
            "data.input alone: use data.reward.normalize",
        )
    for stop in (name for name in cfg.stop if name.startswith("validation/loss")):
        yield (
            (f"stop.{stop}",),
            f"stop.{stop}: a criterion is met by a value of at least that much, and a loss falls: leave it out; "
            f"checkpoint.keep_best_by={stop} with checkpoint.keep_best=min keeps the best weights",
        )
    by_data = cfg.data.estimate is not None and cfg.data.estimate.every is None
    if not plays(cfg) and not by_data and (cfg.evaluation.every or cfg.evaluation.interval):
        yield (
            ("env.id", "evaluation.every", "evaluation.interval"),
            "env.id is missing: evaluations are played in an environment: set it, or leave evaluation.every and "
            "evaluation.interval out, or estimate the policy by its data, data.estimate={}",
        )
    if cfg.data.placement == "host" and cfg.replay is not None and cfg.replay.prioritized:
        yield (
            ("data.placement", "replay.prioritized"),
            "data.placement host: batches are drawn ahead, before the priorities of those under way are known: use "
            "device, or leave replay.prioritized out",
        )
