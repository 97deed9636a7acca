"""python -m jrl.data estimate RUN PATH...: what a trained policy would earn, by episodes that others played."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from jrl.errors import InputError, counted
from jrl.host import command

if TYPE_CHECKING:
    from jrl.run.estimates import EstimateReport

_METHODS = ("is", "wis", "pdis", "wpdis", "dm", "dr", "wdr")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Neither jax nor an environment library is imported for it."""
    p = command.parser("data estimate", "Estimate what a trained policy would earn, by episodes that others played.")
    command.add_checkpoint_arguments(p)
    p.add_argument("paths", nargs="+", metavar="PATH", help="a file, a directory or a glob")
    p.add_argument("--from", dest="source_format", metavar="FORMAT", help="format of the data (default: by each path)")
    p.add_argument("--policy", help="of a run with several policies, the name of one")
    p.add_argument(
        "--methods",
        default="is,wis,pdis,dm,dr",
        help="importance sampling: is, weighted wis, per decision pdis, both wpdis; by fitted values: dm; doubly "
        "robust: dr, weighted wdr (default is,wis,pdis,dm,dr)",
    )
    p.add_argument("--episodes", type=int, help="most episodes, drawn from all (default: all)")
    p.add_argument("--gamma", type=float, help="discount (default: the run's algo.gamma)")
    p.add_argument("--updates", type=int, help="gradient steps of the fitted values, of dm, dr and wdr (default 10000)")
    p.add_argument("--seed", type=int, default=0, help="seed of the fit and of drawn actions (default 0)")
    how = p.add_mutually_exclusive_group()
    draws = "the policy as it acts in training (default, where it has a distribution of actions)"
    how.add_argument("--explore", action="store_true", default=None, help=draws)
    how.add_argument("--greedy", action="store_false", dest="explore", default=None, help="the policy's best actions")
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return p


def run(args: argparse.Namespace) -> int:
    """Prints the estimates; returns the exit status. Raises InputError."""
    methods = tuple(name.strip() for name in args.methods.split(",") if name.strip())
    errors = [f"--methods: {name}: expected one of {', '.join(_METHODS)}" for name in methods if name not in _METHODS]
    if not methods:
        errors.append(f"--methods names nothing: expected some of {','.join(_METHODS)}")
    if args.gamma is not None and not 0 <= args.gamma <= 1:
        errors.append(f"--gamma: expected a number in [0, 1], got {args.gamma:g}")
    for name, least, number in (("episodes", 1, args.episodes), ("updates", 1, args.updates), ("seed", 0, args.seed)):
        if number is not None and number < least:
            errors.append(f"--{name}: expected at least {least}, got {number}")
    if errors:
        raise InputError(*errors)
    report, about = _report(args, methods)
    if args.json:
        print(json.dumps({**about, **report._asdict()}))
        return 0
    print(f"policy       {about['policy']}", f"data         {about['data']}", sep="\n")
    print(f"judged       {about['judged']}, gamma {about['gamma']:g}", *table(report), sep="\n")
    return 0


def table(report: "EstimateReport") -> list[str]:
    """Returns a report as lines."""
    lines = ["", f"{'method':<8}{'estimate':>12}{'std. error':>12}   95 % interval"]
    for name, found in report.estimates.items():
        interval = f"{found['low']:.5g} .. {found['high']:.5g}"
        lines.append(f"{name:<8}{found['value']:>12.5g}{found['error']:>12.3g}   {interval}")
    lines += ["", f"mean return of the data  {report.mean_return:.5g}, {counted(report.episodes, 'episode', ',')}"]
    if report.ess is not None:
        lines.append(f"effective sample size    {report.ess:.1f} of {report.episodes:,} episodes")
    return lines + [f"warning: {text}" for text in report.warnings]


def _report(args: argparse.Namespace, methods: tuple[str, ...]) -> tuple["EstimateReport", dict[str, Any]]:
    """Makes the report, and describes its policy and data."""
    import dataclasses

    import jax

    from jrl import data
    from jrl.config import datasets, discount_by_action
    from jrl.play import action_probabilities, actor
    from jrl.run import data_sets, estimates

    trained = actor.load(args.checkpoint, best=args.best, policy=args.policy)
    cfg, spec, algo = trained.config, trained.spec._replace(num_envs=1), trained.algo
    if args.gamma is not None:
        cfg = dataclasses.replace(cfg, algo=dataclasses.replace(cfg.algo, gamma=args.gamma))
    as_recorded = cfg.data.actions_in_input_normalized if cfg.data.input is not None else None
    cfg = dataclasses.replace(cfg, data=datasets.DataConfig(actions_in_input_normalized=as_recorded))
    store = data.read(args.paths, args.source_format)
    try:
        store = data_sets.prepared(cfg, store, spec)
    except InputError as e:  # its fix names keys of a run
        fix = "give data of the environment that the policy was trained in"
        raise InputError(
            *(text.removeprefix("data.input: ").replace(data_sets.OTHER_ENV, fix) for text in e.errors)
        ) from e
    how = datasets.EstimateConfig(methods=methods, episodes=args.episodes, explore=args.explore)  # type: ignore[arg-type]  # they were looked at
    if args.updates is not None:
        how = dataclasses.replace(how, fqe=dataclasses.replace(how.fqe, updates=args.updates))
    judge = estimates.ReturnEstimator(
        discount_by_action(cfg).algo.gamma, cfg.network, how, algo, spec, store, fix=("--methods dm", "--explore")
    )
    explore = action_probabilities.is_stochastic(algo, spec) if args.explore is None else args.explore
    about = {
        "policy": args.checkpoint,
        "data": f"{store.name}: {counted(store.num_episodes, 'episode', ',')}, {counted(store.num_steps, 'step', ',')}",
        "judged": "as it acts in training" if explore else "its best actions",
        "gamma": float(cfg.algo.gamma),
    }
    return judge(trained.weights, jax.random.key(args.seed)), about
