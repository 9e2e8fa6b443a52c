"""The journal: a log of every event with its time and the commands that the scheduler returned, one JSON line each.

A run of the router begins with a header, a JSON object with all that the scheduler was built from. The other lines are
`[at, [EVENT, {...}], [[COMMAND, {...}], ...]]`, in order of time. A file may hold several runs, one after the other.
`d2lpm replay` feeds them to a new scheduler.

The line format follows from the classes in `router.core.model`, so that a new field or event needs no change here;
bytes are base64. The file holds no prompt text, but it does hold the names of clients and the hash secret: with the
secret, anyone who guesses a prompt can check whether it was sent. So the file is as secret as the hash secret; its mode
is 0600.
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

from router.core.model.commands import Command
from router.core.model.events import EVENTS, Event
from router.core.model.saved import Piece
from router.errors import ConfigError
from router.persistence.tagged_json import JSON, ByName

log = logging.getLogger(__name__)

FORMAT: Final = 1
"""Format version; increases when files of the previous format can no longer be read."""
FLUSH_SECONDS: Final = 0.2
"""Seconds between two writes: a crash loses at most the lines of this time."""
MAX_PENDING_BYTES: Final = 64 * 1024 * 1024
"""Bytes of lines that may wait for a slow disk; above this, the journal ends."""
MAGIC: Final = b'{"d2lpm_journal":'


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """The first line of a run."""

    d2lpm_journal: int
    """The file's format, `FORMAT`."""
    router: str
    """The version of the router that wrote it."""
    started: str
    """Wall clock time at the start of the run, ISO 8601, for people."""
    clock: float
    """Time of the monotonic clock at the same moment, in seconds."""
    hash_secret: str
    """Key of the prompt hashes, hexadecimal."""
    settings: dict[str, JsonValue]
    """The settings that the scheduler depends on: policy, seed, limits and all policy parameters."""
    restored: tuple[Annotated[Piece, ByName()], ...] = ()
    """State restored from before a restart."""


class JournalEntry(NamedTuple):
    """An event, its time on the monotonic clock in seconds, and the commands that followed."""

    at: float
    event: Event
    commands: list[Command]


class TornLine(NamedTuple):
    """An incomplete line, left when the router or its machine died."""

    line: int


# `| None`, because pydantic accepts no config for a dataclass alone.
_HEADER: Final = TypeAdapter[JournalHeader | None](JournalHeader | None, config=JSON)
_ENTRY: Final = TypeAdapter[tuple[float, Event, list[Command]]](
    tuple[float, Annotated[Event, ByName()], list[Annotated[Command, ByName()]]],
    config=JSON,
)


def encode(at: float, event: Event, commands: Sequence[Command]) -> bytes:
    """Encode one line, without its newline. Raises ValueError for a value that `decode` would not restore.

    Such values are strings that are not valid Unicode, and values whose type is not that of their field; `decode`
    returns any mapping as a dict.
    """
    return _ENTRY.dump_json((at, event, list(commands)), warnings="error")


def decode(line: bytes) -> JournalEntry:
    """Decode one line. Raises ValueError if it is incomplete."""
    try:
        return JournalEntry(*_ENTRY.validate_json(line))
    except (ValueError, LookupError, TypeError) as error:  # the last two where a pair is expected and missing
        raise ValueError("not a whole line of a journal") from error


def read(lines: Iterable[bytes]) -> Iterator[JournalHeader | JournalEntry | TornLine]:
    """Read the runs of a journal line by line.

    Raises ConfigError, with the line number, for a line that no router wrote. Only the last line of a run may be
    incomplete.
    """
    torn = in_run = False
    for number, line in enumerate(lines, 1):
        if line.startswith(MAGIC):
            yield _header(line)
            in_run, torn = True, False
        elif not in_run:
            raise ConfigError("not a journal of this router")
        elif torn:
            raise ConfigError(f"line {number - 1} is broken")
        else:
            try:
                yield decode(line)
            except ValueError:
                yield TornLine(number)
                torn = True
    if not in_run:
        raise ConfigError("empty, and so not a journal")


def _header(line: bytes) -> JournalHeader:
    try:
        header = _HEADER.validate_json(line)
    except ValidationError:
        raise ConfigError(f"a journal of another format than {FORMAT}, or with a broken header") from None
    assert header is not None, "the line begins like a header"
    if header.d2lpm_journal != FORMAT:
        raise ConfigError(f"a journal of format {header.d2lpm_journal}; this router reads format {FORMAT}")
    return header


class Journal:
    """Observer that appends every event and its commands to a file, every `FLUSH_SECONDS` and in another thread.

    An error ends the journal with one line in the log; the router goes on without it.
    """

    event_types: ClassVar[Collection[type[Event]]] = EVENTS

    def __init__(self, file: io.RawIOBase, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        """`file` is written while the context is entered, and closed at its end.

        `max_pending_bytes`: bytes of lines that may wait for a slow disk before the journal ends.
        """
        self._file = file
        self._max_pending_bytes = max_pending_bytes
        self._lines: list[bytes] = []
        """Lines not yet written."""
        self._pending_bytes = 0
        """Their size in bytes."""
        self._ended = False
        self._closing = asyncio.Event()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
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
        """Whether the journal has ended because of an error."""
        return self._ended

    @property
    def failures(self) -> int:
        """Failed writes: the first one ends the journal."""
        return int(self._ended)

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Write what is left and close the file."""
        self._closing.set()
        await self._writer
        await self._flush()
        with suppress(OSError):  # every byte is written, or the error has been logged
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
        """End the journal. After a gap in the events, no later one could be replayed."""
        if not self._ended:
            log.error("the journal ends here: %s", " ".join(str(reason).split()))
        self._ended = True


def open_journal(
    path: Path, hash_secret: bytes, clock: float, settings: dict[str, JsonValue], restored: Iterable[Piece] = ()
) -> Journal:
    """Open a file, or create it, and begin a new run at its end.

    `clock`: the current time on the clock of the events; `restored`: the saved state that the scheduler was given.
    Raises ConfigError if the file cannot be written, is not a journal, or is being written by another process.
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
        raise ConfigError(f"{path}: another process is writing it") from None
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
        _append(file, b"\n")  # ends a line that a crash left incomplete
    _append(file, _HEADER.dump_json(header) + b"\n")


def _append(file: io.RawIOBase, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[file.write(rest) or 0 :]
