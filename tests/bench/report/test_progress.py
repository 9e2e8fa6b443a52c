"""The progress bar of the bench."""

import io

from bench.report.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_shows_how_far_it_is() -> None:
    """It is drawn in place, and its line is empty at the end."""
    stream = Terminal()
    bar = ProgressBar(stream, "s")
    bar.show(5.0, 10.0)
    assert stream.getvalue() == "\r[" + "#" * 20 + "." * 20 + "] 5.0 of 10 s"
    bar.close()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_where_there_is_no_terminal_there_is_no_bar() -> None:
    """A log is not filled with it."""
    stream = io.StringIO()
    bar = ProgressBar(stream, "s")
    bar.show(5.0, 10.0)
    bar.close()
    assert stream.getvalue() == ""
