"""python -m jrl.export CHECKPOINT --format npz|stablehlo|onnx|c --out DIR: a policy as files that run without jrl."""

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jrl.errors import InputError
from jrl.export.directory import check_free
from jrl.fields.paths import resolve
from jrl.host import command
from jrl.host.machine import require

FORMATS = ("npz", "stablehlo", "onnx", "c")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, without importing jax or an environment library."""
    p = command.parser(
        "export",
        "Write a trained policy as files that run without jrl. Actions are deterministic, in the environment's own "
        "units; observation statistics and preprocessing are part of the policy.",
    )
    command.add_checkpoint_arguments(p)
    kinds = "npz (needs only numpy; default), stablehlo, onnx, c (a header without dependencies)"
    p.add_argument("--format", choices=FORMATS, default="npz", help=kinds)
    p.add_argument("--out", required=True, help="new directory, or an earlier export to replace")
    p.add_argument("--policy", help="name of a policy, if the run has several; the export acts for one agent")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a JSON object; returns the exit status: 0, or 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        print(json.dumps(export(args)))
    except InputError as e:
        return command.report_input_error(e)
    return 0


def export(args: argparse.Namespace) -> dict[str, Any]:
    """Writes an export, and returns its summary as `formats.export`.

    Raises:
      InputError: bad input, or a policy that the format cannot express.
    """
    out = resolve(args.out, "--out", "new directory")
    check_free(out)
    missing = [name for name in ("jax2onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if args.format == "onnx" and missing:
        raise InputError(f"--format onnx needs {' and '.join(missing)}: pip install 'jrl[onnx]', or use --format npz")
    if args.format == "stablehlo":
        require("flatbuffers", "export", "--format stablehlo")
    compiler = os.environ.get("CC", "cc")
    if args.format == "c" and shutil.which(compiler) is None:
        raise InputError(
            f"--format c needs a C compiler to check the header, got {compiler}, which is not installed: install gcc "
            "or clang, set CC, or use --format npz"
        )
    from jrl.export import formats, policy_function

    policy = policy_function.load_function(Path(args.checkpoint), best=args.best, policy_id=args.policy)
    return formats.export(policy, format=args.format, out=out)


if __name__ == "__main__":
    sys.exit(command.run(main))
