"""python -m jrl.data record RUN... --out DIR: records a data set with trained policies or random actions."""

import argparse
import functools
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.errors import EnvironmentFailed, InputError, counted
from jrl.fields.paths import resolve, unwritable
from jrl.host import command

if TYPE_CHECKING:
    from jrl.data.store import EpisodeStore
    from jrl.play.behaviour_policy import Behaviour

_RANDOM = "random"
_NUM_ENVS = 16


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Neither jax nor an environment library is imported for it."""
    p = command.parser("data record", "Record a data set with trained policies, random actions or a mix of them.")
    p.add_argument("runs", nargs="*", metavar="RUN", help="run directories or checkpoints, with equal shares")
    checkpoint = p.add_mutually_exclusive_group()
    checkpoint.add_argument("--best", action="store_true", default=None, help="best checkpoint of each run (default)")
    checkpoint.add_argument(
        "--latest", action="store_false", dest="best", default=None, help="take the latest checkpoint of each run"
    )
    mix_help = "shares of the steps; `random` is a policy"
    p.add_argument("--mix", nargs="+", default=[], metavar="RUN=SHARE", help=mix_help)
    p.add_argument("--random", type=float, default=0.0, metavar="SHARE", help="share of steps with random actions")
    p.add_argument("--env", help="id of the environment for random actions, without RUN")
    p.add_argument("--steps", type=int, default=100_000, help="steps, summed over environments (default 100000)")
    p.add_argument("--out", required=True, help="new directory for the data set")
    p.add_argument("--format", default="jrl", help="file format: jrl (default), or another format that jrl.data writes")
    p.add_argument("--max-file-mb", type=float, default=64.0, help="maximum MiB of arrays in a file (default 64)")
    p.add_argument("--no-compress", action="store_false", dest="compress", help="write uncompressed files")
    p.add_argument("--seed", type=int, default=0, help="seed of environments and actions (default 0)")
    p.add_argument(
        "--epsilon", type=float, default=0.0, metavar="E", help="share of steps with a random action instead"
    )
    how = p.add_mutually_exclusive_group()
    sample_help = "sample actions as in training (default, if the policy has a distribution of actions)"
    how.add_argument("--explore", action="store_true", default=None, help=sample_help)
    how.add_argument("--greedy", action="store_false", dest="explore", default=None, help="take the best actions")
    p.add_argument("--num-envs", type=int, default=_NUM_ENVS, help=f"number of environments (default {_NUM_ENVS})")
    p.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides", help="override the config")
    return p


def run(args: argparse.Namespace) -> int:
    """Records a data set; returns the exit status: 1 if an environment fails. Raises InputError."""
    try:
        print(*record(args), sep="\n")
    except EnvironmentFailed as e:
        return command.report_failure(e)
    return 0


def read_shares(args: argparse.Namespace) -> list[tuple[str, float]]:
    """Returns (run or `random`, share of the steps) of each policy. Raises InputError."""
    shares = (("random", args.random), ("epsilon", args.epsilon))
    errors = [f"--{name}: expected a share from 0 to 1, got {x}" for name, x in shares if not 0 <= x <= 1]
    counts = (("steps", args.steps), ("num-envs", args.num_envs))
    if errors := errors + [f"--{name}: expected at least 1, got {x}" for name, x in counts if x < 1]:
        raise InputError(*errors)
    if args.mix and (args.runs or args.random):
        raise InputError("--mix: expected no other runs and no --random, since it names all policies: leave them out")
    if args.mix:
        return _read_mix(args.mix)
    rest = 1.0 - args.random
    if args.runs and not rest:
        raise InputError(
            "--random: expected a share below 1 with runs, got 1: lower it, or leave out the runs and give --env"
        )
    if not args.runs and rest:
        raise InputError("record: expected a policy, got none: give a run, or --env ID --random 1")
    found = [(name, rest / len(args.runs)) for name in args.runs]
    return [*found, (_RANDOM, args.random)] if args.random else found


def _read_mix(texts: Sequence[str]) -> list[tuple[str, float]]:
    shares = []
    for text in texts:
        name, _, share = text.rpartition("=")
        try:
            number = float(share)
        except ValueError:
            number = math.nan
        if not name or not 0 < number <= 1:
            raise InputError(f"--mix {text}: expected RUN=SHARE with a share above 0 up to 1, such as runs/a=0.5")
        shares.append((name, number))
    if abs((total := sum(share for _, share in shares)) - 1) > 1e-6:
        raise InputError(f"--mix: expected shares that sum to 1, got {total:g}: change them")
    return shares


def record(args: argparse.Namespace) -> Iterator[str]:
    """Records the data set and yields lines that describe it."""
    shares = read_shares(args)
    out = resolve(args.out, "--out", "new directory")
    if out.exists():
        raise InputError(
            f"--out: expected a new directory, got {out}, which exists: choose another directory, or remove it"
        )
    from jrl import data
    from jrl.data import formats
    from jrl.run import build

    formats.load_format(args.format)  # checks the name before the first step
    build.enable_compile_cache()
    behaviours = _load_behaviours(args, shares)
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        names = _play(args, behaviours, unfinished)
        unfinished.rename(out)
    except OSError as e:
        raise unwritable(out, "--out", e) from e
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for name in names:
        yield from _describe(data.read(out / name), out / name)


def _load_behaviours(args: argparse.Namespace, shares: list[tuple[str, float]]) -> "list[Behaviour]":
    from jrl import config
    from jrl.play import behaviour_policy

    settings = args.overrides
    load = functools.partial(behaviour_policy.load_behaviour, best=args.best, settings=settings)
    trained = {name: load(name, share) for name, share in shares if name != _RANDOM}
    if trained and args.env:
        raise InputError("--env: expected no environment, since each run has its own: leave it out")
    if not trained and not args.env:
        raise InputError("record: expected an environment for random actions, got none: give --env ID, or a run")
    if trained:
        cfg = next(iter(trained.values())).cfg
    else:
        cfg = config.load({"algo": {"name": "ppo"}, "env": {"id": args.env}, "stop": {"env_steps": 1}}, settings)
    return [trained.get(name) or behaviour_policy.Behaviour(name, share, cfg, None) for name, share in shares]


def _play(args: argparse.Namespace, behaviours: "list[Behaviour]", directory: Path) -> list[str]:
    """Records the data sets of all kinds of agents; returns their paths relative to `directory`."""
    from jrl import data
    from jrl.config.datasets import OutputConfig
    from jrl.data import formats
    from jrl.data.episode import Episode
    from jrl.play import behaviour_policy
    from jrl.run import data_output

    action_options = behaviour_policy.ActionOptions(args.explore, args.epsilon)
    specs = [behaviour_policy.find_spec(behaviour, args.num_envs) for behaviour in behaviours]
    first = specs[0]
    for behaviour, spec in zip(behaviours, specs, strict=True):
        if (spec.observation, spec.action, spec.agents) != (first.observation, first.action, first.agents):
            raise InputError(
                f"{behaviours[0].name} and {behaviour.name} have different observations, actions or agents"
            )
    has_log_prob = True
    for behaviour, spec in zip(behaviours, specs, strict=True):
        if not behaviour_policy.build_act(behaviour, spec, action_options)[1]:
            has_log_prob = False
            print(f"{behaviour.name}: the probability of its actions is unknown: the data set has no log_prob")
    meta: dict[str, Any] = {"env": behaviours[0].cfg.env.id, "source": "jrl", "seed": args.seed}
    is_one_file = args.format not in formats.FILE_FORMATS
    names = [str(path.relative_to(directory)) for path in data_output.list_directories(directory, first)]
    episodes: list[list[Episode]] = [[] for _ in names]
    writers = []
    if not is_one_file:
        output = OutputConfig(None, args.format, args.max_file_mb, None, args.compress)
        writers = data_output.open_writers(directory, first, meta, output)
    take = (lambda kind, x: episodes[kind].append(x)) if is_one_file else lambda kind, x: writers[kind].add(x)
    for index, behaviour in enumerate(behaviours):
        steps = max(1, round(behaviour.share * args.steps))
        options: dict[str, Any] = {"seed": args.seed, "index": index, "num_envs": args.num_envs}
        behaviour_policy.play(behaviour, steps, take, options=action_options, log_prob=has_log_prob, **options)
    for writer in writers:
        writer.close()
    if not is_one_file:
        return names
    from jrl import spaces

    for name, spec, found in zip(names, spaces.by_kind(first), episodes, strict=True):
        notes = {**meta, **data_output.describe_actions(spec)}
        store = data.of_episodes(spec.observation, spec.action, found, meta=notes)
        data.write(store, directory / name / "data", args.format, compress=args.compress)
    return [str(Path(name) / "data") for name in names]


def _describe(store: "EpisodeStore", path: Path) -> Iterator[str]:
    """Yields lines on a data set: sizes, and returns of episodes that were not cut, by policy."""
    count = f"{counted(store.num_episodes, 'episode', ',')}, {counted(store.num_steps, 'step', ',')}"
    yield f"wrote {path}: {count}, checksum {store.checksum()}"
    if "source" not in store.labels:
        return
    returns, ended, source = store.returns(), store.terminated | store.truncated, store.labels["source"]
    for name in dict.fromkeys(source.tolist()):
        found = returns[ended & (source == name)]
        count = f"{counted(len(found), 'whole episode')}, {int((~ended & (source == name)).sum())} cut"
        if len(found):
            count = f"return {found.mean():.1f} ± {found.std():.1f} ({found.min():.1f} to {found.max():.1f}), {count}"
        yield f"  {name}: {count}"
