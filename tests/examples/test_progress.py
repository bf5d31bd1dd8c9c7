import io

import pytest

from flightedl.examples.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_a_line_per_tenth():
    stream = io.StringIO()
    with progress("converting", 200, stream) as advance:
        for done in (0, 5, 19, 20, 110, 119, 200, 200):
            advance(done)
    assert stream.getvalue().splitlines() == [f"converting: {percent} %" for percent in (0, 10, 50, 100)]


def test_zero_items_count_as_complete():
    stream = io.StringIO()
    with progress("converting", 0, stream) as advance:
        advance(0)
    assert stream.getvalue() == "converting: 100 %\n"


@pytest.mark.parametrize("done", [50, 200])
def test_a_terminal_gets_a_bar(done, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress("converting", 200, stream) as advance:
        advance(done)
    assert "converting" in stream.getvalue()
    assert f"{done // 2}%" in stream.getvalue()
