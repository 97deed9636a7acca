"""--serve: the page over loopback, whose numbers follow runs that are under way."""

import hashlib
import http.server
import re
import shutil
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jrl.errors import InputError
from jrl.report import page, page_data

HOST = "127.0.0.1"
_REST = 1.0  # seconds at least between two looks at the files
_FOLLOWED = ("config.yaml", "result.jsonl", "videos", "nonfinite")  # of a run directory
_KINDS = {".mp4": "video/mp4", ".gif": "image/gif"}

Read = Callable[[page_data.Link], dict[str, Any]]  # of the runs as they are now; raises InputError without rows


class Following:
    """The numbers of runs, read again once their files have changed.

    Args:
      read: the data of the page.
      directories: the run directories that there are.
    """

    def __init__(self, read: Read, directories: Callable[[], list[Path]]):
        self._read, self._directories = read, directories
        self._lock = threading.Lock()
        self._seen: object = None
        self._looked = -_REST
        self._data: dict[str, Any] = {"waiting": "nothing was read yet"}
        self._text, self._tag = b"", ""
        self._videos: dict[str, Path] = {}

    def now(self) -> tuple[dict[str, Any], bytes, str]:
        """Returns the data, the same as JSON, and its tag, which changes with it."""
        with self._lock:
            if time.monotonic() - self._looked >= _REST:
                try:
                    seen = _state(self._directories())
                except InputError as e:  # what was named is not there any more
                    seen = [*e.errors]
                if seen != self._seen:
                    self._again()
                    self._seen = seen
                self._looked = time.monotonic()
            return self._data, self._text, self._tag

    def video(self, name: str) -> Path | None:
        """Returns the file of a link that the data has; nothing else on the disk has one."""
        return self._videos.get(name)

    def _again(self) -> None:
        videos: dict[str, Path] = {}

        def link(path: Path) -> str | None:
            if path.is_dir():
                return None
            name = f"videos/{hashlib.sha256(str(path).encode()).hexdigest()[:16]}{path.suffix}"
            videos[name] = path
            return name

        try:
            self._data = self._read(link)
        except InputError as e:
            self._data = {"waiting": "; ".join(e.errors)}
        self._videos = videos
        self._text = page.fitted(self._data, page.LIMIT).encode()
        self._tag = f'"{hashlib.sha256(self._text).hexdigest()[:20]}"'


def server(following: Following, code: str, port: int) -> http.server.ThreadingHTTPServer:
    """Makes a server of the page at `/`, its numbers at `/data.json` and its videos, for this machine alone.

    Args:
      following: whose numbers are served.
      code: of the drawing library.
      port: 0: any that is free.
    Raises:
      InputError: the port is taken.
    """

    class Handler(_Handler):
        pass

    Handler.following, Handler.code = following, code
    try:
        return http.server.ThreadingHTTPServer((HOST, port), Handler)
    except OSError as e:
        raise InputError(f"--serve {port}: {e.strerror}: choose another port") from e


class _Handler(http.server.BaseHTTPRequestHandler):
    following: Following
    code: str
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answers with the page, its numbers or one of its videos; all else is not found."""
        # another name that leads here belongs to a page that somebody else wrote
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (HOST, "localhost"):
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"only for this machine")
        path = urllib.parse.urlsplit(self.path).path
        if path in ("/", f"/{page.NAME}"):
            data, _, _ = self.following.now()
            return self._answer(
                HTTPStatus.OK, "text/html; charset=utf-8", page.html(data, self.code, live=True).encode()
            )
        if path == "/data.json":
            _, text, tag = self.following.now()
            if self.headers.get("If-None-Match") == tag:
                return self._answer(HTTPStatus.NOT_MODIFIED, "application/json", b"", ETag=tag)
            return self._answer(HTTPStatus.OK, "application/json", text, ETag=tag)
        if video := self.following.video(path.removeprefix("/")):
            return self._video(video)
        return self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self._headers(kind, len(body), {"Cache-Control": "no-store", **headers})
        self.wfile.write(body)

    def _headers(self, kind: str, length: int, more: dict[str, str]) -> None:
        for name, value in {"Content-Type": kind, "Content-Length": str(length), **more}.items():
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()

    def _video(self, path: Path) -> None:
        """Sends a file, or the part of it that a player asks for when somebody moves in it."""
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                first, last = 0, size - 1
                asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                if asked:
                    first, last = int(asked[1]), min(int(asked[2] or last), last)
                if first > last:
                    return self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "text/plain", b"")
                self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
                part = {"Content-Range": f"bytes {first}-{last}/{size}"} if asked else {}
                self._headers(_KINDS[path.suffix], last - first + 1, {"Accept-Ranges": "bytes", **part})
                file.seek(first)
                if last == size - 1:
                    shutil.copyfileobj(file, self.wfile)
                else:
                    self.wfile.write(file.read(last - first + 1))
        except FileNotFoundError:
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found")
        return None

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a page asks every two seconds."""

    def handle_one_request(self) -> None:
        """Handles a request; a browser that went away is no error."""
        try:
            super().handle_one_request()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


def forever(following: Following, code: str, port: int) -> None:
    """Serves until Ctrl-C. Raises InputError: the port is taken."""
    with server(following, code, port) as made:
        print(f"http://{HOST}:{made.server_address[1]}/  (for this machine alone; Ctrl-C ends it)", flush=True)
        try:
            made.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _state(directories: list[Path]) -> list[Any]:
    """Returns what changes when a run has gone on."""
    return [(directory, *_stamps(directory)) for directory in directories]


def _stamps(directory: Path) -> Iterator[object]:
    for name in _FOLLOWED:
        try:
            found = (directory / name).stat()
            yield found.st_mtime_ns, found.st_size
        except OSError:
            yield None
