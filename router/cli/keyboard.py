"""Single keys of a terminal, as they are pressed."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

BLOCK_BYTES: Final = 1024
NAMES: Final[Mapping[bytes, str]] = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\t": "tab",
}
"""Names of keys by what a terminal sends, the longest of a common beginning first."""


@contextmanager
def keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` with each key, without echo and without waiting for the end of a line, until the context is left."""
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        for key in split(os.read(terminal, BLOCK_BYTES)):
            press(key)

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def split(block: bytes) -> Iterator[str]:
    """Yield the names of the keys in what a terminal sent; a printable key is its own name."""
    while block:
        code = next((code for code in NAMES if block.startswith(code)), block[:1])
        yield NAMES.get(code, code.decode("latin-1"))
        block = block[len(code) :]
