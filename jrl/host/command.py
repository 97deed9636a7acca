"""Functions shared by all commands: names, parsers, errors. Imports nothing slow."""

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

# name as typed after `jrl` -> description; the module is `module_name`
COMMANDS = {
    "train": "train a policy as a config says, or continue a run",
    "sweep": "train with many hyper-parameters and seeds side by side",
    "evaluate": "play episodes with a trained policy",
    "record": "write a video of a trained policy",
    "plot": "draw learning curves of runs",
    "report": "compare runs: tables with intervals, learning curves, cautions",
    "reproduce": "train a published result again, and compare",
    "export": "write a trained policy as files that run without jrl",
    "import": "make a run of a policy of Stable-Baselines3",
    "serve": "train on episodes that clients play over HTTP, or serve trained policies",
    "config": "list, show or check configs, or migrate RLlib's",
    "zoo": "trained policies that come with jrl: list, play or copy them",
    "data": "look at data sets, and write them in other formats",
    "check-env": "check an environment against its own spaces",
    "debug": "explain an update that was not finite",
    "docs": "serve the documentation on this machine, without a network",
}
_MODULES = {"import": "importer"}  # `import` is a keyword of Python
MODULE = "python -m jrl."  # prefix of a command typed by its module
_prefix = MODULE
_python_format = warnings.formatwarning


def set_prefix(prefix: str) -> None:
    """Sets the prefix of command names in usage lines of this process: `jrl `, or MODULE."""
    global _prefix
    _prefix = prefix


def module_name(name: str) -> str:
    """Returns the module of command `name`, of COMMANDS, below jrl: `check_env` for `check-env`."""
    return _MODULES.get(name, name.replace("-", "_"))


def format_command(name: str) -> str:
    """Returns command `name`, of COMMANDS, as this user types it: `jrl check-env`, or `python -m jrl.check_env`."""
    return _prefix + (module_name(name) if _prefix == MODULE else name)


_REPEATED = ("--set", "--stop")  # options with one value, which may be repeated
_INT64 = 2**63 - 1


def _parse_integer(text: str) -> int:
    """Returns an option's integer; larger integers than 64 bits would fail later with an obscure error."""
    found = int(text)
    if abs(found) > _INT64:
        raise argparse.ArgumentTypeError(f"expected a whole number of at most {_INT64:,}, got {short(text)}")
    return found


class _ArgumentParser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register("type", int, _parse_integer)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, but suggests the right command for settings that are not one `key=value`."""
        words = sys.argv[1:] if args is None else list(args)
        for i, word in enumerate(words):
            flag, attached, _ = word.partition("=")
            rest = words[i + 1 if attached else i + 2 :]
            more = [*itertools.takewhile(_is_setting, rest)] if flag in _REPEATED else []
            if flag in _REPEATED and not attached and len(words) > i + 2:
                key, value = words[i + 1 : i + 3]
                is_option = re.match(r"-\D", value) is not None  # a value may be a negative number
                if re.fullmatch(r"[a-z_][\w./]*", key) and "=" not in value and not is_option:
                    self.error(f"{flag} {key}: expected key=value: write {flag} {key}={value}")
            if more:
                repeated = " ".join(f"{flag} {setting}" for setting in more)
                self.error(f"{' '.join(more)}: {flag} takes one value: repeat it, ... {repeated}")
        found, extra = self.parse_known_intermixed_args(words, namespace)  # files may follow options
        if extra:
            from jrl.host import foreign_options

            known = foreign_options.OPTIONS.get(self.prog.removeprefix(_prefix), {})
            answers = {flag: known[flag] for word in extra if (flag := word.partition("=")[0]) in known}
            if answers:
                self.error("; ".join(f"{flag}: {answer}" for flag, answer in answers.items()))
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        return found

    def error(self, text: str) -> NoReturn:
        """Ends the command with exit status 2 and a message without control characters.

        argparse's usage is left out: its list of all options hides the message.
        """
        self.exit(2, f"error: {message(text)}\n{self.prog} --help lists the arguments\n")


def _is_setting(word: str) -> bool:
    return re.match(r"[\w./]+=", word) is not None and not os.path.exists(word)


def parser(name: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Returns an argument parser of the command `name`, without abbreviations of options."""
    return _ArgumentParser(prog=format_command(name), description=description, allow_abbrev=False, **options)


def run(main: Callable[[], int]) -> int:
    """Calls the `main` of a command; returns the exit status.

    141 if the reader of the output has gone (`jrl config list | head -1`), as after SIGPIPE; 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack "±"
    warnings.formatwarning = _format_warning
    try:
        status = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        return 141
    except KeyboardInterrupt:  # outside of the part of a command that handles it
        print("interrupted", file=sys.stderr)
        return 130
    return status


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats jrl's own warnings without their place in the code; other warnings as Python does."""
    is_jrl = Path(filename).is_relative_to(Path(__file__).parent.parent)
    return f"warning: {message}\n" if is_jrl else _python_format(message, category, filename, lineno, line)


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument `checkpoint` and the options that select it: `best` is True, False or None."""
    parser.add_argument("checkpoint", help="run directory, or a checkpoint inside it")
    of_run = parser.add_mutually_exclusive_group()
    best = "the run's best checkpoint by checkpoint.keep_best_by (default, if the run has evaluations)"
    of_run.add_argument("--best", action="store_true", default=None, help=best)
    of_run.add_argument("--latest", action="store_false", dest="best", default=None, help="the run's latest checkpoint")


def report_input_error(error: InputError, *, verbose: bool | None = None) -> int:
    """Prints the errors of the input, one per line, on stderr; returns the exit status, 2.

    With `verbose`, the traceback of the user's code follows, if any; with False, a hint how to print it.
    """
    _print_error(error, error.errors, verbose)
    return 2


def report_failure(error: Exception, *, verbose: bool | None = None) -> int:
    """Prints why a run failed, as `report_input_error` does; returns the exit status, 1."""
    _print_error(error, (str(error),), verbose)
    return 1


def _print_error(error: Exception, lines: tuple[str, ...], verbose: bool | None) -> None:
    print(*(f"error: {line}" for line in lines), sep="\n", file=sys.stderr)
    if verbose is not None and (found := details(error)):
        print(found.rstrip() if verbose else "-v prints the whole traceback", file=sys.stderr)
