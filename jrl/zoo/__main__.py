"""python -m jrl.zoo list | play NAME | get NAME: trained policies that come with jrl."""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jrl import zoo
from jrl.errors import InputError
from jrl.fields.paths import resolve
from jrl.host import command


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Neither jax nor an environment library is imported for it."""
    p = command.parser("zoo", "Trained policies that come with jrl, with their results.")
    p.add_argument("action", choices=("list", "play", "get"), help="play: print returns; get: write a run directory")
    p.add_argument("name", nargs="?", help="name of the policy, from `list`")
    p.add_argument("--episodes", type=int, default=10, help="with play: number of episodes (default 10)")
    p.add_argument("--record", metavar="FILE", help="with play: write a video of one episode: FILE.mp4 or FILE.gif")
    p.add_argument("--out", help="with get: new directory (default: runs/NAME)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, 1 if an environment fails, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        if args.action == "list":
            print(format_table())
            return 0
        if args.name is None:
            raise InputError(
                f"zoo {args.action}: expected the name of a policy: choose one of {', '.join(zoo.entries())}"
            )
        return play(args) if args.action == "play" else get(args)
    except InputError as e:
        return command.report_input_error(e)


def format_table() -> str:
    """Returns the entries as lines of text."""
    rows = [("name", "environment", "algorithm", "steps", "return", "needs")]
    for name, entry in zoo.entries().items():
        result = f"{entry['return']:.1f} ± {entry['return_std']:.1f}"
        rows.append((name, entry["env"], entry["algorithm"], f"{entry['env_steps']:,}", result, entry["needs"] or ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def play(args: argparse.Namespace) -> int:
    """Evaluates or records a policy."""
    zoo.check_name(args.name)
    with tempfile.TemporaryDirectory(prefix="jrl-zoo-") as directory:
        run = Path(directory) / args.name
        zoo.extract(args.name, run)
        if args.record:
            from jrl import record

            return record.main([str(run), "--out", args.record])
        from jrl import evaluate

        return evaluate.main([str(run), "--episodes", str(args.episodes)])


def get(args: argparse.Namespace) -> int:
    """Writes a policy as a run directory and prints what can be done with it."""
    directory = resolve(args.out, "--out", "new directory") if args.out else Path("runs") / args.name
    zoo.extract(args.name, directory)
    run, steps = shlex.quote(str(directory)), zoo.entries()[args.name]["env_steps"]
    print(f"run: {run}")
    print(f"evaluate: {command.format_command('evaluate')} {run} --episodes 100")
    print(f"train on: {command.format_command('train')} --resume {run} --stop env_steps={2 * steps}")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
