"""Plain lines at most every so often, a bar in a terminal."""

import io

import pytest

from jrl.metrics.progress import describe, open_progress


def test_plain_lines_are_limited_and_the_last_row_is_told():
    now, stream = [0.0], io.StringIO()
    progress = open_progress(1000, stream, interval=2.0, clock=lambda: now[0])
    for second in range(6):
        now[0] = float(second)
        progress.update({"env_steps": 100 * second})
    progress.close()
    progress.close()
    # 0 at once, then 2 s and 4 s later; 500 waits for close, which tells it once.
    assert [line.split(" /")[0] for line in stream.getvalue().splitlines()] == ["0", "200", "400", "500"]


def test_no_rows_no_lines():
    stream = io.StringIO()
    open_progress(10, stream).close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"env_steps": 12_800, "perf/steps_per_s": 5120.0, "episode/return": 21.46},
            "12,800 / 100,000 steps (12%)  5,120 steps/s  return 21.5  0:00:17 left",  # 87,200 / 5,120 = 17.03
        ),
        ({"env_steps": 0, "episode/return": float("nan")}, "0 / 100,000 steps (0%)  return -"),
        (
            {"env_steps": 200_000, "perf/steps_per_s": 1.0, "episode/return": None},
            "200,000 / 100,000 steps (200%)  1 steps/s  return -  0:00:00 left",
        ),
        (
            {"env_steps": 1, "perf/steps_per_s": 1e-12},
            "1 / 100,000 steps (0%)  0 steps/s  return -  years left",
        ),
        ({"env_steps": 1, "perf/steps_per_s": 0.0}, "1 / 100,000 steps (0%)  0 steps/s  return -"),
    ],
)
def test_describe(row, words):
    assert describe(row, 100_000) == words


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    progress = open_progress(1000, stream)
    progress.update({"env_steps": 250, "episode/return": 3.0})
    progress.update({"env_steps": 1000, "episode/return": 9.0})
    progress.close()
    text = stream.getvalue()
    assert "━" in text and "250 / 1,000 steps (25%)  return 3.0" in text and "1,000 / 1,000 steps (100%)" in text
