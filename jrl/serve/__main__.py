"""python -m jrl.serve CONFIG: a run that learns from the episodes that clients play over HTTP."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jrl import train


def parser() -> argparse.ArgumentParser:
    """The command line; nothing heavy is imported for it."""
    p = train.parser("serve", "Train on episodes that clients play over HTTP.")
    p.add_argument("--host", help="short for --set external.host=...")
    p.add_argument("--port", type=int, help="short for --set external.port=...")
    p.add_argument("--token-file", help="short for --set external.token_file=...")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: as `jrl.train`."""
    args = parser().parse_args(argv)
    short = {"host": args.host, "port": args.port, "token_file": args.token_file}
    given = [f"external.{name}={value}" for name, value in short.items() if value is not None]
    args.overrides = ["external={}", *args.overrides, *given]
    return train.run(args, _Clients())


class _Clients:
    """`jrl.serve.clients.Clients`, which imports jax once it is asked."""

    def __init__(self) -> None:
        self._found: Any = None

    def _clients(self) -> Any:
        from jrl.serve.clients import Clients

        self._found = self._found or Clients()
        return self._found

    def open(self, *given: Any) -> Any:
        return self._clients().open(*given)

    def source(self, *given: Any) -> Any:
        return self._clients().source(*given)


if __name__ == "__main__":
    sys.exit(main())
