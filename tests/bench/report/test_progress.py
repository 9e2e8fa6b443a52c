"""The progress bar of the bench."""

import io

from bench.report.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_shows_the_simulated_time() -> None:
    """The bar is drawn in place, and closing it clears its line."""
    stream = Terminal()
    bar = ProgressBar(stream, "s")
    bar.show(5.0, 10.0)
    assert stream.getvalue() == "\r[" + "#" * 20 + "." * 20 + "] 5.0 of 10 s"
    bar.close()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_without_a_terminal_there_is_no_bar() -> None:
    """The bar writes nothing to a stream that is no terminal, such as a log."""
    stream = io.StringIO()
    bar = ProgressBar(stream, "s")
    bar.show(5.0, 10.0)
    bar.close()
    assert stream.getvalue() == ""
