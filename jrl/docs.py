"""python -m jrl.docs: serves the documentation site of this installation on this machine, without a network."""

import contextlib
import functools
import http.server
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jrl.errors import InputError
from jrl.host import command


def directory() -> Path:
    """Returns the folder of the site: `jrl/site` of an installed wheel, `build/site` of a source checkout.

    Raises:
      InputError: the site is not built.
    """
    package = Path(__file__).parent
    for folder in (package / "site", package.parent / "build" / "site"):
        if (folder / "index.html").is_file():
            return folder
    raise InputError("docs: this installation has no built site: run `make site` in the source checkout")


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def make_server(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """Returns a server of `folder` that only this machine reaches; port 0: a free port.

    Raises:
      InputError: the port is in use, or is not a port of this user.
    """
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_Handler, directory=str(folder)))
    except (OSError, OverflowError) as e:
        reason = getattr(e, "strerror", None) or e
        raise InputError(f"--port: cannot listen on {port} ({reason}): choose another port, or 0 for a free one") from e


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C. Returns the exit status: 0, or 2 for bad input."""
    p = command.parser("docs", "Serve the documentation on this machine, without a network, until Ctrl-C.")
    p.add_argument("--port", type=int, default=8000, help="port (default: 8000); 0: a free port")
    args = p.parse_args(argv)
    try:
        server = make_server(directory(), args.port)
    except InputError as e:
        return command.report_input_error(e)
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"documentation: http://127.0.0.1:{server.server_port}/index.html (Ctrl-C ends the server)", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
