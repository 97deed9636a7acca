"""python -m jrl.check_env ID: step an environment and report its faults; see `jrl.envs.checker`."""

import argparse
import sys
import types
from collections.abc import Sequence
from typing import Any

from jrl.errors import InputError, counted
from jrl.host import command


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Neither jax nor an environment library is imported for it."""
    p = command.parser("check-env", "Step an environment with random actions and report its faults.")
    p.add_argument("id", help="env.id of a config: an id, or package.module:Class")
    p.add_argument("--backend", default="auto", help="auto (default), envpool, gymnasium or jax")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="options", help="an env option")
    p.add_argument("--action-mask-info", metavar="NAME", help="env.action_mask_info of a config")
    p.add_argument("--steps", type=int, default=200, help="steps of each environment (default 200)")
    p.add_argument("--envs", type=int, default=2, help="environments side by side (default 2)")
    p.add_argument("--seed", type=int, default=0, help="seed of environments and actions (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per finding; returns the exit status 0, or 2 if there is a problem."""
    args = parser().parse_args(argv)
    try:
        options = _options(args.options)
        from jrl.envs.checker import check_env

        report = check_env(
            args.id,
            backend=args.backend,
            options=options,
            steps=args.steps,
            num_envs=args.envs,
            seed=args.seed,
            action_mask_info=args.action_mask_info,
        )
    except InputError as e:
        return command.report_input_error(e)
    for line in report.problems:
        print(f"problem: {line}")
    for line in report.notes:
        print(f"note: {line}")
    if report.ok:
        print(f"ok: {args.id}, {counted(args.envs, 'environment')} of {counted(args.steps, 'step')}")
    return 0 if report.ok else 2


def _options(given: Sequence[str]) -> dict[str, Any]:
    from jrl.fields import schema

    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InputError(f"--set {text}: expected NAME=VALUE, such as --set size=9")
        options[name] = schema.parse(value)
    return options


class _Command(types.ModuleType):
    """Callable module: importing it replaces the function `jrl.check_env`, which has the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from jrl.envs.checker import check_env

        return check_env(*args, **kwargs)


sys.modules[__name__].__class__ = _Command

if __name__ == "__main__":
    sys.exit(command.run(main))
