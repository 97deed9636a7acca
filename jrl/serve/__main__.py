"""python -m jrl.serve CONFIG: a run that learns from episodes that clients play over HTTP.

python -m jrl.serve RUN --no-learn: trained policies behind HTTP.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from jrl import config, train
from jrl.config.external import ExternalConfig
from jrl.errors import InputError, shown
from jrl.fields import schema
from jrl.fields.paths import resolve
from jrl.host import command, interruption

_TRAINING_OPTIONS = ("algo", "env", "rllib", "drop", "out", "resume", "init_from", "policy_only", "as_test", "stop")
_PACKAGES = ("starlette", "uvicorn", "httptools")
_SWITCH_S = 0.0005  # Python's default of 5 ms is longer than an answer takes


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, without importing jax."""
    p = train.parser("serve", "Train on episodes that clients play over HTTP, or serve trained policies.")
    p.add_argument("--host", help="short for --set external.host=...")
    p.add_argument("--port", type=int, help="short for --set external.port=...")
    p.add_argument("--token-file", help="short for --set external.token_file=...")
    p.add_argument("--no-learn", action="store_true", help="serve the policy of a run directory or checkpoint")
    p.add_argument(
        "--policy", action="append", default=[], metavar="NAME=RUN", help="with --no-learn: a policy by its name"
    )
    p.add_argument("--follow", action="store_true", help="with --no-learn: load better checkpoints as they appear")
    p.add_argument("--latest", action="store_true", help="with --no-learn: the latest checkpoint, not the best")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `jrl.train`."""
    args = parser().parse_args(argv)
    sys.setswitchinterval(_SWITCH_S)
    try:
        if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
            raise InputError(f"jrl.serve: {' and '.join(missing)} not installed: pip install 'jrl[serve]'")
        if args.token_file is not None:
            args.token_file = schema.flow(str(resolve(args.token_file, "--token-file", "file")))
    except InputError as e:
        return command.report_input_error(e)
    short = {"host": args.host, "port": args.port, "token_file": args.token_file}
    args.overrides += [f"external.{name}={value}" for name, value in short.items() if value is not None]
    if not args.no_learn:
        if args.policy or args.follow or args.latest:
            print("error: --policy, --follow and --latest are for --no-learn: add --no-learn", file=sys.stderr)
            return 2
        args.overrides = ["external={}", *args.overrides]
        return train.run(args, _build_clients)
    try:
        return _serve_policies(args)
    except InputError as e:
        return command.report_input_error(e)


def _serve_policies(args: argparse.Namespace) -> int:
    if options := [name for name in _TRAINING_OPTIONS if getattr(args, name)]:
        raise InputError(f"--no-learn: --{options[0].replace('_', '-')} is for runs that learn: leave it out")
    runs: dict[str, str] = {}
    for text in (*([f"default={args.config}"] if args.config else ()), *args.policy):
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in runs:
            raise InputError(f"--policy {shown(text)}: expected NAME=RUN, each name once")
        runs[name] = str(resolve(path, f"--policy {shown(name)}", "any"))
    if not runs:
        raise InputError("--no-learn: expected a run directory or a checkpoint, or several by --policy NAME=RUN")
    cfg = _build_section(args.overrides)
    from jrl.serve import trained_policies

    with interruption.watch_signals("ending after the current requests") as interrupted:
        best = False if args.latest else None
        trained_policies.serve(runs, cfg, best=best, follow=args.follow, interrupted=interrupted)
    return interrupted.exit_status or 0


def _build_section(overrides: Sequence[str]) -> ExternalConfig:
    """Returns the section `external` of a server that does not learn. Raises InputError."""
    for text in overrides:
        if not text.startswith("external.") or "=" not in text:
            raise InputError(f"--set {shown(text)}: --no-learn takes only keys of external, such as external.port=9900")
    ignored = {"observation": {"box": [1]}, "action": {"discrete": 1}}  # the spaces are those of the policies
    cfg = config.override({"algo": {"name": "ppo"}, "external": ignored}, overrides).external
    assert cfg is not None
    return cfg


def _build_clients() -> Any:
    from jrl.serve.clients import Clients

    return Clients()


if __name__ == "__main__":
    sys.exit(command.run(main))
