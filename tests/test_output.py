"""What a command prints: where nobody listens any more, and in its file."""

import io
import logging
import os
import re
import subprocess
import sys

import pytest

from jrl.host import files
from jrl.host.output import SafeStream, Transcript, open_log, record_output


def broken():
    """A stream into a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def test_a_stream_outlives_its_reader():
    kept = []
    pipe = broken()
    stream = SafeStream(pipe, kept.append)
    print("one", file=stream, flush=True)
    print("two", file=stream, flush=True)
    assert "".join(kept) == "one\ntwo\n" and not stream.isatty()
    os.write(pipe.fileno(), b"nobody is surprised")
    pipe.close()


def test_streams_that_are_closed_or_were_never_there():
    closed = io.StringIO()
    closed.close()
    for stream in (SafeStream(None), SafeStream(closed)):
        print("x", file=stream, flush=True)
        assert not stream.isatty()
        with pytest.raises(AttributeError):
            stream.fileno()


def test_a_character_that_a_stream_cannot_encode_silences_nothing(tmp_path):
    below = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", newline="\n")
    kept = []
    stream = SafeStream(below, kept.append)
    for text in ("one \u2713", "two \U0001f600 \udcff", "three"):
        print(text, file=stream, flush=True)
    assert below.buffer.getvalue() == b"one \\u2713\ntwo \\U0001f600 \\udcff\nthree\n"
    assert "".join(kept) == "one \u2713\ntwo \U0001f600 \udcff\nthree\n"


def test_a_transcript_has_what_was_printed_without_control_characters(tmp_path, capsys):
    path = tmp_path / "log.txt"
    with record_output() as transcript:
        print("before\tthe file")
        print("\x1b[1mbold\x1b[0m \x1b]0;title\x07and\x00 plain", file=sys.stderr)
        transcript.open(path)
        print("10%\r20%\r30%")
        print("not shown", file=transcript.file)
        print("a bar", file=transcript.screen)
        print("no end", end="")
    assert sys.stdout.__class__ is not SafeStream
    head, *lines = path.read_text().split("\n")
    assert head.startswith("# 20")
    assert lines == ["before\tthe file", "bold and plain", "30%", "not shown", "no end", ""]
    out, err = capsys.readouterr()
    assert out == "before\tthe file\n10%\r20%\r30%\na bar\nno end" and err.startswith("\x1b[1mbold")


def test_a_transcript_has_what_a_bar_prints_above_itself(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    from rich.console import Console
    from rich.progress import Progress

    screen, before = Terminal(), sys.stdout
    sys.stdout = screen
    try:
        with record_output() as transcript:
            transcript.open(tmp_path / "log.txt")
            with Progress(console=Console(file=transcript.screen, force_terminal=True), auto_refresh=False) as bar:
                transcript.listen()
                task = bar.add_task("training", total=2)
                print("above the bar")
                bar.update(task, completed=1, refresh=True)
            print("below the bar")
    finally:
        sys.stdout = before
    assert (tmp_path / "log.txt").read_text().splitlines()[1:] == ["above the bar", "below the bar"]
    assert all(text in screen.getvalue() for text in ("above the bar", "training", "below the bar"))


def test_loggers_are_heard_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    logger = logging.getLogger("jrl.somewhere")
    with record_output() as transcript:
        transcript.open(tmp_path / "log.txt")
        logging.basicConfig()  # as absl does with the first that it logs, and so orbax with the first checkpoint
        logger.warning("take care")
    assert capsys.readouterr().err == "WARNING jrl.somewhere: take care\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 2 and re.fullmatch(r"20\S+ \S+ WARNING jrl.somewhere: take care", lines[1])
    assert not logging.getLogger("jrl").handlers and logging.getLogger("jrl").propagate


def test_a_log_file_has_what_loggers_say_and_python_shows_it_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(sys.stderr))
    logging.lastResort.setLevel(logging.WARNING)
    logger, paths = logging.getLogger("jrl.somewhere"), [tmp_path / "a", tmp_path / "b"]
    with open_log(paths[0]) as one, open_log(paths[1]):
        print("rows", file=one)
        logger.warning("take care")
        logging.basicConfig(format="mine: %(message)s")
        logger.warning("again")
    logger.warning("after")
    assert capsys.readouterr().err == "take care\nmine: again\nmine: after\n"
    for path, first in zip(paths, (["rows"], []), strict=True):
        head, *lines = path.read_text().splitlines()
        assert head.startswith("# 20") and lines[: len(first)] == first
        assert [line.partition("somewhere: ")[2] for line in lines[len(first) :]] == ["take care", "again"]


def test_a_transcript_is_continued_and_ends_with_the_reason(tmp_path):
    path = tmp_path / "log.txt"
    for text in ("first", "second"):
        with pytest.raises(ZeroDivisionError), record_output() as transcript:
            transcript.open(path)
            transcript.open(path)  # of a run that was rolled back
            print(text)
            1 // 0  # noqa: B018
    text = path.read_text()
    assert text.count("# 20") == 2 and text.index("first") < text.index("second")
    assert text.count("Traceback") == 2 and text.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_a_transcript_on_a_full_disk_is_silent(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    transcript = Transcript(None)
    transcript.open(tmp_path / "log.txt")
    monkeypatch.setattr(files, "append", full)
    transcript.write("lost\n")
    monkeypatch.undo()
    transcript.write("kept\n")
    transcript.close()
    assert (tmp_path / "log.txt").read_text().endswith("kept\n")


CLOSED = """
import os, sys
from jrl.host import output
with output.record_output():
    handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr, flush=True)
    os.write(1, b"of a library")
    sys.exit(7 if handle > 2 else 1)
"""


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "<&- >&- 2>&-", "| true"])
def test_a_command_whose_standard_files_are_closed(redirection, tmp_path):
    """Its own files are not mistaken for them, and its exit status is its own."""
    code = f'set -o pipefail; "$0" -c "$1" "$2" {redirection}'
    command = ["bash", "-c", code, sys.executable, CLOSED, str(tmp_path / "file")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 7
    assert (tmp_path / "file").read_bytes() == b""
