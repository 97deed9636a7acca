"""--serve: the page over loopback, rebuilt from the runs for each request."""

import hashlib
import http.server
import io
import sys
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from jrl.errors import InputError
from jrl.report import page

HOST = "127.0.0.1"


def make_server(make: Callable[[page.Link], str], port: int) -> http.server.ThreadingHTTPServer:
    """Return a server of the current page at `/` and of its linked videos, on loopback only. Port 0: any free port.

    Raises:
      InputError: the port is in use.
    """
    videos: dict[str, str] = {}  # address -> file; no other file is served

    def link(path: Path) -> str | None:
        if path.is_dir():
            return None
        address = f"videos/{hashlib.sha256(str(path).encode()).hexdigest()[:16]}{path.suffix}"
        videos[address] = str(path)
        return address

    class Handler(http.server.SimpleHTTPRequestHandler):
        def send_head(self) -> io.BytesIO | BinaryIO | None:
            # DNS rebinding: refuse requests with a foreign host name
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN, "only for this machine")
                return None
            if urllib.parse.urlsplit(self.path).path not in ("/", f"/{page.NAME}"):
                return super().send_head()
            body = make(link).encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            return io.BytesIO(body)

        def translate_path(self, path: str) -> str:
            return videos.get(path.removeprefix("/"), "")

        log_message = lambda *args: None

    try:
        return http.server.ThreadingHTTPServer((HOST, port), Handler)
    except OSError as e:
        raise InputError(f"--serve {port}: {e.strerror}: choose another port") from e


def serve(make: Callable[[page.Link], str], port: int) -> None:
    """Serve until Ctrl-C. Raises InputError: the port is in use."""
    with make_server(make, port) as made:
        print(f"http://{HOST}:{made.server_address[1]}/  (for this machine alone; Ctrl-C ends it)", flush=True)
        try:
            made.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
