"""What survives a restart, on disk: written every few seconds and at the end, read at the start.

The file is a line of JSON for its header, one for each piece of the scheduler's state (`core.saved`), and at last one
with the checksum of all before it. It is written beside its place, synced, and renamed: at any time there is a whole
one. It holds the hash secret, so that the hashes of prompts mean the same after a restart, and the names of clients,
but no text; its mode is 0600.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from router.channel.codec import JSON, ByName
from router.core.model.saved import Counters, Groups, Piece, Prefixes
from router.errors import ConfigError
from router.front.stored.owners import Responses, StoredResponse
from router.runtime.atomic_file import replace_file
from router.runtime.periodic import PeriodicTask

log = logging.getLogger(__name__)

FORMAT: Final = 1
"""Rises when what was written before cannot be read any more."""
FILE_NAME: Final = "state"
"""Of the file in its directory."""


@dataclass(frozen=True, slots=True)
class StateHeader:
    """The first line."""

    d2lpm_state: int
    """The file's format, `FORMAT`."""
    router: str
    """The version of the router that wrote it."""
    saved: float
    """The wall clock's time, in seconds since 1970."""
    policy: str
    hash_secret: str
    """In hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """The last line."""

    sha256: str
    """Of all lines before it, in hexadecimal digits."""


StateLine = Piece | Responses
"""What is saved: of the scheduler, and the directory of stored responses."""


class SavedState(NamedTuple):
    """What a file holds."""

    header: StateHeader
    pieces: list[Piece]
    """Of the scheduler."""
    responses: Sequence[StoredResponse] = ()
    """Those that workers keep."""


_HEADER: Final = TypeAdapter(StateHeader)
_CHECKSUM: Final = TypeAdapter(Checksum)
_PIECE: Final = TypeAdapter[StateLine](Annotated[StateLine, ByName()], config=JSON)


def encode(piece: StateLine) -> bytes:
    """A line, with its end."""
    return _PIECE.dump_json(piece, warnings="error") + b"\n"


def decode(content: bytes) -> SavedState:
    """What a file holds. Raises ValueError, which says why, for one that is damaged or of another format."""
    head, _, rest = content.partition(b"\n")
    try:
        header = _HEADER.validate_json(head)
    except ValidationError:
        raise ValueError("it is not a state of this router") from None
    if header.d2lpm_state != FORMAT:
        raise ValueError(f"it has format {header.d2lpm_state}; this router reads format {FORMAT}")
    body, _, last = content.removesuffix(b"\n").rpartition(b"\n")
    try:
        checksum = _CHECKSUM.validate_json(last).sha256
        if checksum != hashlib.sha256(body + b"\n").hexdigest():
            raise ValueError("it is damaged")
        lines = rest.splitlines()[:-1]
        saved = [_PIECE.validate_json(line) for line in lines]
    except (ValidationError, LookupError, TypeError):  # the latter two from what should be a pair and is none
        raise ValueError("it is damaged") from None
    pieces = [piece for piece in saved if not isinstance(piece, Responses)]
    return SavedState(header, pieces, [row for piece in saved if isinstance(piece, Responses) for row in piece.rows])


def load(directory: Path, fresh: float, now: float) -> SavedState | None:
    """The state saved in a directory, unless it is older than `fresh` seconds at this time of the wall clock.

    A file that cannot be read as one is set aside, with one line in the log. Raises ConfigError where the directory
    cannot be used.
    """
    path = directory / FILE_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except FileExistsError:
        raise ConfigError(f"{path}: Not a directory") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        state = decode(content)
    except ValueError as error:
        set_aside(directory, error)
        return None
    age = now - state.header.saved
    if age > fresh:
        log.warning("%s: not loaded, it is %.0f s old", path, age)
        return None
    return state


def set_aside(directory: Path, reason: object) -> None:
    """Rename a file that is of no use, so that somebody can look at it."""
    path = directory / FILE_NAME
    aside = path.with_suffix(".broken")
    with suppress(OSError):
        path.replace(aside)
    log.warning("%s: set aside as %s: %s", path, aside.name, " ".join(str(reason).split()))


def usable_pieces(state: SavedState, policy: str, secret: bytes) -> Iterator[Piece]:
    """What of a scheduler's state has a meaning under this policy and this hash secret: the ledger always has."""
    for piece in state.pieces:
        match piece:
            case Counters() | Groups() if state.header.policy != policy:
                continue
            case Prefixes() if state.header.hash_secret != secret.hex():
                continue
        yield piece


class StateFile(PeriodicTask):
    """Writes the state as long as it is entered, every few seconds, and once more at the end.

    Its pieces are made one at a time, so that between any two the event loop can do something else; the disk is
    another thread's business. What goes wrong is told in one line in the log, and tried again.
    """

    def __init__(
        self,
        directory: Path,
        pieces: Callable[[], Iterator[StateLine]],
        header: Callable[[], StateHeader],
        every: float,
    ) -> None:
        """`every`: seconds between two states."""
        super().__init__(every)
        self._path = directory / FILE_NAME
        self._pieces = pieces
        self._header = header
        self._failing = False

    @property
    def failing(self) -> bool:
        """Whether it could not be written the last time."""
        return self._failing

    async def __aexit__(self, *leaving: object) -> None:
        """Save the last state."""
        await super().__aexit__(*leaving)
        await self._turn()

    async def _turn(self) -> None:
        lines = [_HEADER.dump_json(self._header()) + b"\n"]
        for piece in self._pieces():
            lines.append(encode(piece))
            await asyncio.sleep(0)
        try:
            await asyncio.to_thread(_write, self._path, lines)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.error("%s: the state cannot be saved: %s", self._path, error.strerror)
            self._failing = True


def new_header(policy: str, secret: bytes) -> StateHeader:
    """A header of now."""
    return StateHeader(FORMAT, version("d2lpm-router"), time.time(), policy, secret.hex())


def _write(path: Path, lines: Iterable[bytes]) -> None:
    """Put these lines and their checksum in the place of what is there."""
    replace_file(path, _with_checksum(lines))


def _with_checksum(lines: Iterable[bytes]) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
        yield line
    yield _CHECKSUM.dump_json(Checksum(digest.hexdigest())) + b"\n"
