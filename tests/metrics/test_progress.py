"""Plain lines at most every so often, a bar in a terminal."""

import io
import re

import pytest

from jrl.metrics.progress import RunProgress, open_progress


def test_plain_lines_are_limited_and_the_last_row_is_told():
    now, stream = [0.0], io.StringIO()
    progress = open_progress({"env_steps": 1000}, stream, interval=2.0, clock=lambda: now[0])
    for second in range(6):
        now[0] = float(second)
        progress.update({"env_steps": 100 * second})
    progress.close()
    progress.close()
    # 0 at once, then 2 s and 4 s later; 500 waits for close, which tells it once.
    assert [line.split()[4] for line in stream.getvalue().splitlines()] == ["0", "200", "400", "500"]


def test_no_rows_no_lines():
    stream = io.StringIO()
    open_progress({"env_steps": 10}, stream).close()
    assert stream.getvalue() == ""


def described(stop, *rows, short=False, window=0):
    course = RunProgress(stop, window)
    for row in rows:
        course.add_row(row)
    return "  ".join(course.describe(short))


def at(steps, time_s, **more):
    return {"env_steps": steps, "time_s": time_s, **{k.replace("__", "/"): v for k, v in more.items()}}


def test_a_run_without_an_end_tells_where_it_is():
    rows = at(100, 1.0, episode__return=5.0), at(300, 2.0, episode__return=20.0)
    assert described({}, *rows) == "300 steps  return 20.0  200 steps/s"


def test_no_estimate_before_compilation_is_over():
    """The first row holds the compilation: 1,000 steps in 100 s. The next 1,000 take one second."""
    stop = {"env_steps": 100_000}
    assert described(stop, at(1000, 100.0)) == "1% of 100,000 steps  1,000 steps  return -"
    second = described(stop, at(1000, 100.0), at(2000, 101.0, episode__return=21.46))
    assert described({"env_steps": 1}, at(1, 1.0)) == "100% of 1 step  1 step  return -"
    assert second == "2% of 100,000 steps  2,000 steps  return 21.5  0:01:38 left  1,000 steps/s"


def test_the_speed_is_that_of_the_latest_rows():
    rows = [at(1000 * i, float(i)) for i in range(12)] + [at(11_000 + 10 * i, 11.0 + i) for i in range(1, 10)]
    assert described({"env_steps": 100_000}, *rows).endswith("10 steps/s")
    assert "left" not in described({"env_steps": 100_000}, at(5, 1.0), at(5, 2.0))  # no step in between
    assert "  years left  " in described({"env_steps": 10**18}, at(0, 0.0), at(1, 2.0))


def test_the_nearest_criterion():
    stop = {"env_steps": 100_000, "episode/return": 475, "time_s": 1000}
    first = at(10_000, 20.0, episode__return=25.0, episode__window=100)
    assert described(stop, first).startswith("10% of 100,000 steps")
    later = at(20_000, 30.0, episode__return=340.0, episode__window=100)  # 315 of the 450 from 25 to 475
    said = described(stop, first, later)
    assert said == "70% of return 475  20,000 steps  return 340.0  at most 0:01:20 left  1,000 steps/s"
    assert described(stop, first, at(21_000, 900.0)).startswith("90% of 1000 s")
    assert "0:00:10 left" in described({"time_s": 40}, first, later)  # by the clock, whatever the steps
    luck = at(20_000, 30.0, episode__return=490.0, episode__window=3)
    assert described(stop, first, luck, window=100).startswith("20% of 100,000 steps")
    almost = at(20_000, 30.0, episode__return=474.9999, episode__window=100)
    assert described(stop, first, almost).startswith("99% of return 475")
    costs = {"env_steps": 100_000, "evaluation/return": -100}
    rows = (at(1, 1.0, evaluation__return=float("nan")), at(2, 2.0, evaluation__return=-500.0))
    assert described(costs, *rows).startswith("0% of 100,000 steps")
    assert described(costs, *rows, at(3, 3.0, evaluation__return=-200.0)).startswith("75% of evaluation return -100")


def test_evaluations_are_told():
    row = at(5, 1.0, episode__return=2.0, evaluation__return=3.25)
    assert described({"env_steps": 10}, row) == "50% of 10 steps  5 steps  return 2.00  evaluation 3.25"
    assert described({"env_steps": 10}, row, short=True) == "50% of 10 steps  return 2.00  eval 3.25"


def test_what_ended_the_run_is_the_last_that_is_shown():
    stop, stream = {"env_steps": 1000, "episode/return": 475}, io.StringIO()
    progress = open_progress(stop, stream, interval=0.0)
    rows = [
        at(100, 1.0, episode__return=20.0),
        at(200, 2.0, episode__return=476.1),
        at(300, 3.0, episode__return=474.0),
    ]
    for row in rows:
        progress.update(row)
    progress.close()
    assert stream.getvalue().splitlines()[1:] == ["100% of return 475  200 steps  return 476.1  100 steps/s"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(text):
    """The lines that a terminal shows in the end: each frame begins with a return of the carriage."""
    lines = [""]
    for piece in re.split(r"(\r|\n)", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)):
        if piece == "\r":
            lines[-1] = ""
        elif piece == "\n":
            lines.append("")
        else:
            lines[-1] += piece
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (160, "70% of return 475  123k steps  return 342.1  eval 400.0  <0:01:54 left  1.55k steps/s"),
        (80, "70% of return 475  123k steps  return 342.1  eval 400.0"),
        (60, "70% of return 475  123k steps  return 342.1"),
        (30, "70% of return 475"),
    ],
)
def test_a_terminal_gets_a_bar_that_fits(monkeypatch, width, words):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    progress = open_progress({"env_steps": 300_000, "episode/return": 475}, stream)
    progress.update(at(61_440, 60.0, episode__return=21.0))
    progress.update(at(122_880, 99.7, episode__return=342.13, evaluation__return=400.0))
    progress.close()
    lines = screen(stream.getvalue())
    assert len(lines) == 1 and lines[0].rstrip().endswith(words) and len(lines[0]) <= width
    assert lines[0].count("━") + lines[0].count("╸") + lines[0].count("╺") >= 10


def test_a_terminal_without_a_cursor_gets_lines(monkeypatch):
    """An editor's shell window sets TERM=dumb; a bar would be shown at the end of the run alone."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    progress = open_progress({"env_steps": 1000}, stream)
    progress.update(at(100, 1.0, episode__return=21.0))
    assert stream.getvalue() == "10% of 1,000 steps  100 steps  return 21.0\n"
    progress.close()


def test_a_bar_before_the_first_row(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    open_progress({"env_steps": 10}, stream).close()
    assert len(screen(stream.getvalue())) == 1 and "compiling" in stream.getvalue()
