"""Functions that commands share: their names, how they were typed, how they answer bad input. Imports nothing slow."""

import argparse
import io
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jrl.errors import InputError, details, message, short
from jrl.host import foreign_options

# name as typed after `jrl` -> what it does; its module has the same name, with _ for -
COMMANDS = {
    "train": "train a policy as a config says, or continue a run",
    "sweep": "train with many hyper-parameters and seeds side by side",
    "evaluate": "play episodes with a trained policy",
    "record": "write a video of a trained policy",
    "plot": "draw learning curves of runs",
    "report": "compare runs: tables with intervals, learning curves, cautions",
    "export": "write a trained policy as files that run without jrl",
    "serve": "train on episodes that clients play over HTTP, or serve trained policies",
    "config": "list, show or check configs, or migrate RLlib's",
    "data": "look at data sets, and write them in other formats",
    "check-env": "check an environment against its own spaces",
    "debug": "explain an update that was not finite",
}
MODULE = "python -m jrl."  # how a command is typed by its module
_prefix = MODULE
_python_format = warnings.formatwarning


def typed_as(prefix: str) -> None:
    """Sets the words before a command's name in usage lines of this process: `jrl `, or MODULE."""
    global _prefix
    _prefix = prefix


def typed(name: str) -> str:
    """Returns command `name`, of COMMANDS, as this user types it: `jrl check-env`, or `python -m jrl.check_env`."""
    return _prefix + (name.replace("-", "_") if _prefix == MODULE else name)


_REPEATED = ("--set", "--stop")  # options that take one value each time


_INT64 = 2**63 - 1


def _whole(text: str) -> int:
    """Reads a whole number of an option; larger ones than the machine's would fail far from here."""
    found = int(text)
    if abs(found) > _INT64:
        raise argparse.ArgumentTypeError(f"expected a whole number of at most {_INT64:,}, got {short(text)}")
    return found


class _ArgumentParser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register("type", int, _whole)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, but tells what to type where several values follow an option that takes one."""
        given = sys.argv[1:] if args is None else list(args)
        for at, word in enumerate(given):
            flag, attached, _ = word.partition("=")
            rest = given[at + 1 if attached else at + 2 :]
            more = [*itertools.takewhile(_is_setting, rest)] if flag in _REPEATED else []
            if more:
                repeated = " ".join(f"{flag} {setting}" for setting in more)
                self.error(f"{' '.join(more)}: {flag} takes one value: repeat it, ... {repeated}")
        found, extra = self.parse_known_intermixed_args(given, namespace)  # files may stand behind options
        known = foreign_options.OPTIONS.get(self.prog.removeprefix(_prefix), {})
        answers = {flag: known[flag] for word in extra if (flag := word.partition("=")[0]) in known}
        if answers:
            self.error("; ".join(f"{flag}: {answer}" for flag, answer in answers.items()))
        if extra:
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        return found

    def error(self, text: str) -> NoReturn:
        """Ends the command as argparse does, with a message that can be read whatever was typed."""
        super().error(message(text))


def _is_setting(word: str) -> bool:
    return re.match(r"[\w./]+=", word) is not None and not os.path.exists(word)


def parser(name: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Returns an argument parser of the command `name`, which does not abbreviate options."""
    return _ArgumentParser(prog=typed(name), description=description, allow_abbrev=False, **options)


def run(main: Callable[[], int]) -> int:
    """Calls the `main` of a command and returns the exit status: its own, or 141 where nobody reads its output any more
    (`jrl config list | head -1`), as of a process that SIGPIPE ends, or 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may know no "±"
    warnings.formatwarning = _one_line
    try:
        status = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 141
    except KeyboardInterrupt:  # before or after the part of a command that answers it itself
        print("interrupted", file=sys.stderr)
        return 130
    return status


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats a warning of jrl's own for a user, to whom its place in the code says nothing; others as Python does."""
    ours = Path(filename).is_relative_to(Path(__file__).parent.parent)
    return f"warning: {message}\n" if ours else _python_format(message, category, filename, lineno, line)


def take_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds the argument `checkpoint` and the options that say which of a run is taken: `best` True, False or None."""
    parser.add_argument("checkpoint", help="run directory, or a checkpoint inside it")
    of_run = parser.add_mutually_exclusive_group()
    best = "the run's best checkpoint by checkpoint.keep_best_by (default, where evaluations tell which that is)"
    of_run.add_argument("--best", action="store_true", default=None, help=best)
    of_run.add_argument("--latest", action="store_false", dest="best", default=None, help="the run's latest checkpoint")


def refused(error: InputError, *, verbose: bool | None = None) -> int:
    """Prints what is wrong with the input, a line each, on stderr; returns the exit status, 2.

    With `verbose` the traceback of the user's own code follows, if there is one; with False a word on how to see it.
    """
    _say(error, error.errors, verbose)
    return 2


def failed(error: Exception, *, verbose: bool | None = None) -> int:
    """Prints why a run failed, as `refused` does; returns the exit status, 1."""
    _say(error, (str(error),), verbose)
    return 1


def _say(error: Exception, lines: tuple[str, ...], verbose: bool | None) -> None:
    print(*(f"error: {line}" for line in lines), sep="\n", file=sys.stderr)
    if verbose is not None and (found := details(error)):
        print(found.rstrip() if verbose else "-v prints the whole traceback", file=sys.stderr)
