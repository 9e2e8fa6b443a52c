"""The decision log: every event with its time, and the commands that came of it, one JSON line each.

A run of the router begins with a header, an object that holds all that the scheduler was built from; its other lines
are `[at, [EVENT, {...}], [[COMMAND, {...}], ...]]`, in the order in which they happened. A file may hold several runs,
one after the other. `replay` feeds them to a new scheduler.

What is written is read off the classes in `model`, so that a new field or event is written without a change here;
bytes are base64. No text of a prompt is in it, but the hash secret is, and the names of clients: with the secret,
whoever guesses a prompt can tell whether it was sent. So the file is as secret as the hash secret, and of mode 0600.
"""

import asyncio
import fcntl
import io
import logging
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, ClassVar, Final, NamedTuple, Self

from pydantic import JsonValue, TypeAdapter, ValidationError

from router.channel.codec import JSON, ByName
from router.core.model.commands import Command
from router.core.model.events import EVENTS, Event
from router.core.model.saved import Piece
from router.errors import ConfigError

log = logging.getLogger(__name__)

FORMAT: Final = 1
"""Rises when what was written before cannot be read any more."""
FLUSH_SECONDS: Final = 0.2
"""How long a line may be in memory alone."""
MAX_PENDING_BYTES: Final = 64 * 1024 * 1024
"""Bytes of lines that may wait for a slow disk; beyond that, the journal ends."""
MAGIC: Final = b'{"d2lpm_journal":'


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """The first line of a run."""

    d2lpm_journal: int
    """The file's format, `FORMAT`."""
    router: str
    """The version of the router that wrote it."""
    started: str
    """The wall clock's time in ISO 8601, for people, at this time of the monotonic clock:"""
    clock: float
    hash_secret: str
    """Key of the prompt hashes, in hexadecimal digits."""
    settings: dict[str, JsonValue]
    """All that the scheduler depends on: policy, seed, limits, and each group of policy parameters."""
    restored: tuple[Annotated[Piece, ByName()], ...] = ()
    """What it began with from before a restart."""


class JournalEntry(NamedTuple):
    """What happened, when on the monotonic clock, and what was done."""

    at: float
    event: Event
    commands: list[Command]


class TornLine(NamedTuple):
    """A line that was not written to its end, because the router or its machine died."""

    line: int


_HEADER: Final = TypeAdapter[JournalHeader | None](
    JournalHeader | None, config=JSON
)  # for a class alone, pydantic takes no config
_ENTRY: Final = TypeAdapter[tuple[float, Event, list[Command]]](
    tuple[float, Annotated[Event, ByName()], list[Annotated[Command, ByName()]]],
    config=JSON,
)


def encode(at: float, event: Event, commands: Sequence[Command]) -> bytes:
    """A line of the journal, without its end. Raises ValueError for what `decode` would not give back as it is.

    That is text that is not Unicode, and a value of another type than its field's; mappings are dicts.
    """
    return _ENTRY.dump_json((at, event, list(commands)), warnings="error")


def decode(line: bytes) -> JournalEntry:
    """What a line says; ValueError for one that is not whole."""
    try:
        return JournalEntry(*_ENTRY.validate_json(line))
    except (ValueError, LookupError, TypeError) as error:  # the latter two from what should be a pair and is none
        raise ValueError("not a whole line of a journal") from error


def read(lines: Iterable[bytes]) -> Iterator[JournalHeader | JournalEntry | TornLine]:
    """The runs of a journal, line by line.

    Raises ConfigError, which names the line, for what no router wrote; a line that was cut short may only be the last
    of its run.
    """
    torn = begun = False
    for number, line in enumerate(lines, 1):
        if line.startswith(MAGIC):
            yield _header(line)
            begun, torn = True, False
        elif not begun:
            raise ConfigError("not a journal of this router")
        elif torn:
            raise ConfigError(f"line {number - 1} is broken")
        else:
            try:
                yield decode(line)
            except ValueError:
                yield TornLine(number)
                torn = True
    if not begun:
        raise ConfigError("empty, and so not a journal")


def _header(line: bytes) -> JournalHeader:
    try:
        header = _HEADER.validate_json(line)
    except ValidationError:
        raise ConfigError(f"a journal of another format than {FORMAT}, or with a broken header") from None
    assert header is not None, "the line begins like one"
    if header.d2lpm_journal != FORMAT:
        raise ConfigError(f"a journal of format {header.d2lpm_journal}; this router reads format {FORMAT}")
    return header


class Journal:
    """Observer: appends what it hears to a file, in another thread and every `FLUSH_SECONDS`.

    What goes wrong ends the journal, with one line in the log, and nothing else.
    """

    event_types: ClassVar[Collection[type[Event]]] = EVENTS

    def __init__(self, file: io.RawIOBase, most_pending: int = MAX_PENDING_BYTES) -> None:
        """`file` is written as long as this is entered, and closed by it; `most_pending`: see there."""
        self._file = file
        self._max_pending_bytes = most_pending
        self._lines: list[bytes] = []
        """Not yet handed to the file."""
        self._pending_bytes = 0
        """Their bytes."""
        self._ended = False
        self._closing = asyncio.Event()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """See `Observer`."""
        if self._ended:
            return
        try:
            line = encode(now, event, commands)
        except ValueError as error:
            self._end(error)
            return
        self._lines.append(line)
        self._pending_bytes += len(line)
        if self._pending_bytes > self._max_pending_bytes:
            self._lines.clear()
            self._end("the disk is too slow for it")

    @property
    def failing(self) -> bool:
        """Whether it could not be written, and so has ended."""
        return self._ended

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Write what is left and close the file."""
        self._closing.set()
        await self._writer
        await self._flush()
        with suppress(OSError):  # every byte is written, or the end was told
            self._file.close()

    async def _write(self) -> None:
        while not self._closing.is_set():
            await self._flush()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._closing.wait()

    async def _flush(self) -> None:
        if self._lines:
            block = b"\n".join([*self._lines, b""])
            self._lines, self._pending_bytes = [], 0
            try:
                await asyncio.to_thread(_append, self._file, block)
            except OSError as error:
                self._lines.clear()
                self._end(error.strerror)

    def _end(self, reason: object) -> None:
        """Take in nothing more: after a gap, nothing could be replayed."""
        if not self._ended:
            log.error("the journal ends here: %s", " ".join(str(reason).split()))
        self._ended = True


def open_journal(
    path: Path, hash_secret: bytes, clock: float, settings: dict[str, JsonValue], restored: Iterable[Piece] = ()
) -> Journal:
    """A journal of a new run, at the end of this file, which is made if it is not there.

    `clock`: the time of now on the clock of the events; `restored`: what the scheduler was given then. Raises
    ConfigError where it cannot be written.
    """
    started = datetime.now(UTC).isoformat()
    header = JournalHeader(
        FORMAT, version("d2lpm-router"), started, clock, hash_secret.hex(), settings, tuple(restored)
    )
    try:
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+")
        try:
            _begin_run(file, header)
        except BaseException:
            file.close()
            raise
    except BlockingIOError:
        raise ConfigError(f"{path}: another process writes it") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Journal(file)


def _begin_run(file: io.FileIO, header: JournalHeader) -> None:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise ConfigError("not a regular file")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    size = file.seek(0, os.SEEK_END)
    if size and os.pread(file.fileno(), len(MAGIC), 0) != MAGIC:
        raise ConfigError("exists, and is not a journal")
    os.fchmod(file.fileno(), 0o600)
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        _append(file, b"\n")  # ends a line that a crash cut short
    _append(file, _HEADER.dump_json(header) + b"\n")


def _append(file: io.RawIOBase, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[file.write(rest) or 0 :]
