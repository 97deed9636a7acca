"""python -m jrl.data record RUN... --out DIR: plays trained policies, random actions or a mix into a data set."""

import argparse
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
    p = command.parser("data record", "Play trained policies, random actions or a mix of them into a data set.")
    p.add_argument("runs", nargs="*", metavar="RUN", help="run directories or checkpoints, with equal shares")
    of_run = p.add_mutually_exclusive_group()
    of_run.add_argument("--best", action="store_true", default=None, help="of runs, the best checkpoint (default)")
    of_run.add_argument("--latest", action="store_false", dest="best", default=None, help="of runs, the latest one")
    p.add_argument("--mix", nargs="+", default=[], metavar="RUN=SHARE", help="of the steps; `random` is a policy, too")
    p.add_argument("--random", type=float, default=0.0, metavar="SHARE", help="of the steps: uniformly random actions")
    p.add_argument("--env", help="without RUN: id of the environment, for random actions")
    p.add_argument("--steps", type=int, default=100_000, help="steps of all environments together (default 100000)")
    p.add_argument("--out", required=True, help="new directory for the data set")
    p.add_argument("--format", default="jrl", help="of the files: jrl (default), or another that jrl.data writes")
    p.add_argument("--max-file-mb", type=float, default=64.0, help="most MiB of arrays in a file (default 64)")
    p.add_argument("--no-compress", action="store_false", dest="compress", help="write uncompressed files")
    p.add_argument("--seed", type=int, default=0, help="seed of environments and actions (default 0)")
    p.add_argument(
        "--epsilon", type=float, default=0.0, metavar="E", help="share of steps with a random action instead"
    )
    how = p.add_mutually_exclusive_group()
    draws = "draw actions as in training (default, where the policy has a distribution of them)"
    how.add_argument("--explore", action="store_true", default=None, help=draws)
    how.add_argument("--greedy", action="store_false", dest="explore", default=None, help="take the best actions")
    p.add_argument("--num-envs", type=int, default=_NUM_ENVS, help=f"environments at once (default {_NUM_ENVS})")
    p.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides", help="override the config")
    return p


def run(args: argparse.Namespace) -> int:
    """Plays and writes. Returns 0, or 1 where an environment fails. Raises InputError."""
    try:
        print(*record(args), sep="\n")
    except EnvironmentFailed as e:
        return command.report_failure(e)
    return 0


def shares(args: argparse.Namespace) -> list[tuple[str, float]]:
    """Returns the players, each with its share of the steps. Raises InputError."""
    errors = [
        f"--{name}: expected {what}, got {value}"
        for name, value, what, ok in (
            ("random", args.random, "a share from 0 to 1", 0 <= args.random <= 1),
            ("epsilon", args.epsilon, "a share from 0 to 1", 0 <= args.epsilon <= 1),
            ("steps", args.steps, "at least 1", args.steps >= 1),
            ("num-envs", args.num_envs, "at least 1", args.num_envs >= 1),
        )
        if not ok
    ]
    if errors:
        raise InputError(*errors)
    if args.mix and (args.runs or args.random):
        raise InputError("--mix names who plays and how much: leave out the runs beside it, and --random")
    if args.mix:
        return _mixed(args.mix)
    left = 1.0 - args.random
    if args.runs and not left:
        raise InputError("--random 1: no step is left for the runs: leave them out and give --env, or lower it")
    if not args.runs and left:
        raise InputError("record: there is no player: give a run, or --env ID --random 1")
    found = [(name, left / len(args.runs)) for name in args.runs]
    return [*found, (_RANDOM, args.random)] if args.random else found


def _mixed(given: Sequence[str]) -> list[tuple[str, float]]:
    found = []
    for text in given:
        name, _, share = text.rpartition("=")
        try:
            number = float(share)
        except ValueError:
            number = math.nan
        if not name or not 0 < number <= 1:
            raise InputError(f"--mix {text}: expected RUN=SHARE with a share above 0 up to 1, such as runs/a=0.5")
        found.append((name, number))
    if abs(sum(share for _, share in found) - 1) > 1e-6:
        raise InputError(f"--mix: the shares sum to {sum(share for _, share in found):g}: expected 1")
    return found


def record(args: argparse.Namespace) -> Iterator[str]:
    """Plays, writes the data set, and prints what is in it."""
    who = shares(args)
    out = resolve(args.out, "--out", "new directory")
    if out.exists():
        raise InputError(f"--out: {out} exists: choose another directory, or remove it")
    from jrl import data
    from jrl.data import formats
    from jrl.run import build

    formats.load_format(args.format)  # whose name is checked before anybody plays
    build.enable_compile_cache()
    players = _players(args, who)
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        written = _play(args, players, unfinished)
        unfinished.rename(out)
    except OSError as e:
        raise unwritable(out, "--out", e) from e
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for name in written:
        yield from _told(data.read(out / name), out / name)


def _players(args: argparse.Namespace, who: list[tuple[str, float]]) -> "list[Behaviour]":
    from jrl import config
    from jrl.play import behaviour_policy

    settings = args.overrides
    of_runs = {
        name: behaviour_policy.trained(name, share, best=args.best, settings=settings)
        for name, share in who
        if name != _RANDOM
    }
    if of_runs and args.env:
        raise InputError("--env: the runs play in their own environments: leave it out")
    if not of_runs and not args.env:
        raise InputError("record: random actions need an environment: give --env ID, or a run whose environment it is")
    if of_runs:
        cfg = next(iter(of_runs.values())).cfg
    else:
        cfg = config.load({"algo": {"name": "ppo"}, "env": {"id": args.env}, "stop": {"env_steps": 1}}, settings)
    return [of_runs.get(name) or behaviour_policy.Behaviour(name, share, cfg, None) for name, share in who]


def _play(args: argparse.Namespace, players: "list[Behaviour]", directory: Path) -> list[str]:
    """Writes the data sets into the directory; returns their paths in it, one for each kind of agents."""
    from jrl import data
    from jrl.config.datasets import OutputConfig
    from jrl.data import formats
    from jrl.data.store import Episode
    from jrl.play import behaviour_policy
    from jrl.run import data_output

    acts = behaviour_policy.Acts(args.explore, args.epsilon)
    specs = [behaviour_policy.spec_of(player, args.num_envs) for player in players]
    first = specs[0]
    for player, spec in zip(players, specs, strict=True):
        if (spec.observation, spec.action, spec.agents) != (first.observation, first.action, first.agents):
            raise InputError(f"{players[0].name} and {player.name} have different observations, actions or agents")
    known = [behaviour_policy.acting(player, spec, acts)[1] for player, spec in zip(players, specs, strict=True)]
    for player, ok in zip(players, known, strict=True):
        if not ok:
            print(f"{player.name}: how probable its actions are is not known: the data set has no log_prob")
    meta: dict[str, Any] = {"env": players[0].cfg.env.id, "source": "jrl", "seed": args.seed}
    whole = args.format not in formats.FILE_FORMATS
    names = [str(path.relative_to(directory)) for path in data_output.directories(directory, first)]
    held: list[list[Episode]] = [[] for _ in names]
    writers = []
    if not whole:
        output = OutputConfig(None, args.format, args.max_file_mb, None, args.compress)
        writers = data_output.writers(directory, first, meta, output)
    take = (lambda kind, episode: held[kind].append(episode)) if whole else lambda kind, e: writers[kind].add(e)
    for index, player in enumerate(players):
        steps = max(1, round(player.share * args.steps))
        options: dict[str, Any] = {"seed": args.seed, "index": index, "num_envs": args.num_envs}
        behaviour_policy.play(player, steps, take, acts=acts, log_prob=all(known), **options)
    for writer in writers:
        writer.close()
    if whole:
        from jrl import spaces

        for name, one, episodes in zip(names, spaces.by_kind(first), held, strict=True):
            store = data.of_episodes(one.observation, one.action, episodes, meta={**meta, **data_output.actions(one)})
            where = directory / name / "data"
            data.write(store, where, args.format, compress=args.compress)
        names = [str(Path(name) / "data") for name in names]
    return names


def _told(store: "EpisodeStore", path: Path) -> Iterator[str]:
    """Describes a data set: the returns of episodes that were not cut, by their players."""
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
