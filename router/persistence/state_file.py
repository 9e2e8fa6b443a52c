"""The state file: what survives a restart, saved every few seconds and at the end, and loaded at the start.

The file is lines of JSON: a header, one line for each piece of the scheduler's state (`router.core.model.saved`), and a
checksum of all lines before it. A new version is written to a temporary file, synced, and renamed, so that there is a
complete file at any time. It holds the names of clients and the hash secret, so that prompt hashes mean the same after
a restart, but no prompt text; its mode is 0600.
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

from router.channel.earlier_run import CoveredFront
from router.core.clients.rate_limits import RateWindow, RateWindows
from router.core.fleet.stored_responses import Responses, StoredResponse
from router.core.model.saved import Counters, Groups, Piece, Prefixes, UsageRows
from router.errors import ConfigError
from router.persistence.tagged_json import JSON, ByName
from router.runtime.atomic_file import replace_file
from router.runtime.periodic import PeriodicTask
from router.upstream.worker_registry import OperatorChanges

log = logging.getLogger(__name__)

FORMAT: Final = 2
"""Format version; increases when a router of the version before cannot read what this one writes."""
FORMATS: Final = (1, 2)
"""The formats that can be read."""
FILE_NAME: Final = "state"
"""Name of the file in the state directory."""


class NewerState(ValueError):
    """The state was written by a newer router."""


@dataclass(frozen=True, slots=True)
class StateHeader:
    """The first line."""

    d2lpm_state: int
    """The file's format, `FORMAT`."""
    router: str
    """The version of the router that wrote it."""
    saved: float
    """Wall clock time when the file was saved, in seconds since 1970."""
    policy: str
    """Name of the scheduling policy."""
    hash_secret: str
    """Key of the prompt hashes, hexadecimal."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """The last line."""

    sha256: str
    """SHA-256 of all lines before it, hexadecimal."""


@dataclass(frozen=True, slots=True)
class CoveredFronts:
    """What the state covers of each front."""

    rows: tuple[CoveredFront, ...]


StateLine = Piece | Responses | RateWindows | CoveredFronts | OperatorChanges
"""One line of the file: a piece of the scheduler's state, a part of the directory of stored responses, what is left of
clients' rate limits, or what a run that takes over must know of the fronts and of the operator's changes."""


class SavedState(NamedTuple):
    """The content of a state file."""

    header: StateHeader
    pieces: list[Piece]
    """The scheduler's state."""
    responses: Sequence[StoredResponse] = ()
    """Responses that workers store."""
    fronts: Sequence[CoveredFront] = ()
    """What the state covers of each front."""
    changes: OperatorChanges = OperatorChanges()
    """What the operator changed of the fleet."""
    windows: Sequence[RateWindow] = ()
    """What was left of clients' rate limits when it was saved."""
    too_old: bool = False
    """Whether it is only the usage in a state that is too old for anything else."""


_HEADER: Final = TypeAdapter(StateHeader)
_CHECKSUM: Final = TypeAdapter(Checksum)
_PIECE: Final = TypeAdapter[StateLine](Annotated[StateLine, ByName()], config=JSON)


def encode(piece: StateLine) -> bytes:
    """Encode one line, with its newline."""
    return _PIECE.dump_json(piece, warnings="error") + b"\n"


def encode_header(header: StateHeader) -> bytes:
    """Encode the first line, without its newline."""
    return _HEADER.dump_json(header)


def decode(content: bytes) -> SavedState:
    """Decode a file. Raises ValueError, with the reason, if it is damaged or of another format."""
    head, _, rest = content.partition(b"\n")
    header = _decode_header(head)
    body, _, last = content.removesuffix(b"\n").rpartition(b"\n")
    try:
        checksum = _CHECKSUM.validate_json(last).sha256
    except ValidationError:
        raise ValueError("it is damaged") from None
    if checksum != hashlib.sha256(body + b"\n").hexdigest():
        raise ValueError("it is damaged")
    return _decode_lines(header, rest.splitlines()[:-1])


def decode_lines(head: bytes, lines: Iterable[bytes]) -> SavedState:
    """Decode the first line and those of the pieces. Raises ValueError as `decode` does."""
    return _decode_lines(_decode_header(head), lines)


def format_of(head: bytes) -> int:
    """Return the format that the first line names. Raises ValueError if it is no first line."""
    return _HEADER.validate_json(head).d2lpm_state


def _decode_header(head: bytes) -> StateHeader:
    try:
        header = _HEADER.validate_json(head)
    except ValidationError:
        raise ValueError("it is not a state file of this router") from None
    if header.d2lpm_state > FORMAT:
        raise NewerState(f"it has format {header.d2lpm_state}, of a newer router; this one reads format {FORMAT}")
    if header.d2lpm_state not in FORMATS:
        raise ValueError(f"it has format {header.d2lpm_state}; this router reads format {FORMAT}")
    return header


def _decode_lines(header: StateHeader, lines: Iterable[bytes]) -> SavedState:
    try:
        saved = [_PIECE.validate_json(line) for line in lines]
    except (ValidationError, LookupError, TypeError):  # the last two where a pair is expected and missing
        raise ValueError("it is damaged") from None
    return _sorted_out(header, saved)


def _sorted_out(header: StateHeader, lines: Iterable[StateLine]) -> SavedState:
    pieces: list[Piece] = []
    responses: list[StoredResponse] = []
    fronts: list[CoveredFront] = []
    windows: list[RateWindow] = []
    changes = OperatorChanges()
    for line in lines:
        match line:
            case RateWindows(left):
                windows += left
            case Responses(rows):
                responses += rows
            case CoveredFronts(covered):
                fronts += covered
            case OperatorChanges():
                changes = line
            case _:
                pieces.append(line)
    return SavedState(header, pieces, responses, fronts, changes, windows)


def load(directory: Path, max_age: float, now: float) -> SavedState | None:
    """Load the state saved in a directory, or None if there is none. If it is too old, only its usage is loaded, which
    is about the past.

    `max_age`: seconds; `now`: the wall clock in seconds since 1970. A damaged file is set aside with one line in the
    log. Raises ConfigError if the directory cannot be used.
    """
    path = directory / FILE_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path}: Not a directory") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        state = decode(content)
    except ValueError as error:
        set_aside(directory, error)
        return None
    return not_too_old(state, max_age, now, str(path))


def not_too_old(state: SavedState, max_age: float, now: float, where: str) -> SavedState:
    """Return the state, or only its usage if it is too old, as `load` does. `where`: it was found, for the log."""
    age = now - state.header.saved
    if age <= max_age:
        return state
    log.warning("%s: %.0f s old, too old to be restored, except for the usage of past days", where, age)
    usage: list[Piece] = [piece for piece in state.pieces if isinstance(piece, UsageRows)]
    return SavedState(state.header, usage, too_old=True)


def set_aside(directory: Path, reason: object) -> None:
    """Rename a file that cannot be used, keep it for inspection, and log the reason."""
    path = directory / FILE_NAME
    aside = path.with_suffix(".broken")
    with suppress(OSError):
        path.replace(aside)
    log.warning("%s: set aside as %s: %s", path, aside.name, " ".join(str(reason).split()))


def usable_pieces(state: SavedState, policy: str, secret: bytes) -> Iterator[Piece]:
    """Yield the pieces that are valid under this policy and hash secret.

    Deficits depend on the policy and prefixes on the hash secret; the ledger depends on neither.
    """
    for piece in state.pieces:
        match piece:
            case Counters() | Groups() if state.header.policy != policy:
                continue
            case Prefixes() if state.header.hash_secret != secret.hex():
                continue
        yield piece


class StateFile(PeriodicTask):
    """Saves the state at regular intervals while its context is entered, and once more at the end.

    The pieces are built one at a time, and the event loop runs other tasks between any two; another thread writes the
    file. A failure is logged once, and saving is tried again at the next interval.
    """

    def __init__(
        self,
        directory: Path,
        pieces: Callable[[], Iterator[StateLine]],
        header: Callable[[], StateHeader],
        every: float,
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        """`pieces` and `header` return the state to save; `every`: seconds between two saves.

        `on_saved` is called after each save.
        """
        super().__init__(every)
        self._path = directory / FILE_NAME
        self._pieces = pieces
        self._header = header
        self._on_saved = on_saved
        self._failing = False
        self._writing: asyncio.Future[None] | None = None
        """The last write."""
        self._usage: dict[int, tuple[StateLine, bytes]] = {}
        """The lines of usage in the last save, each with its piece, by the id of that: past days do not change."""
        self.failures = 0

    @property
    def failing(self) -> bool:
        """Whether the last save failed."""
        return self._failing

    async def __aexit__(self, *leaving: object) -> None:
        """Stop, then save the state once more."""
        await super().__aexit__(*leaving)
        await self.save()

    async def save(self) -> None:
        """Save the state now."""
        await self._run_once()

    async def _run_once(self) -> None:
        lines = [encode_header(self._header()) + b"\n"]
        usage: dict[int, tuple[StateLine, bytes]] = {}
        for piece in self._pieces():
            _, line = self._usage.get(id(piece), (piece, b""))
            line = line or encode(piece)
            if isinstance(piece, UsageRows):
                usage[id(piece)] = piece, line
            lines.append(line)
            await asyncio.sleep(0)
        self._usage = usage
        try:
            await self._write(lines)
            self._failing = False
            self._on_saved()
        except OSError as error:
            if not self._failing:
                log.error("%s: the state cannot be saved: %s", self._path, error.strerror)
            self._failing = True
            self.failures += 1

    async def _write(self, lines: Iterable[bytes]) -> None:
        """Write the file in another thread, which goes on if this task is cancelled: then the next write waits for it,
        as both write to the same temporary file. Raises OSError.
        """
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        self._writing = asyncio.ensure_future(asyncio.to_thread(_write, self._path, lines))
        await asyncio.shield(self._writing)


def new_header(policy: str, secret: bytes) -> StateHeader:
    """Build a header with the current time."""
    return StateHeader(FORMAT, version("d2lpm-router"), time.time(), policy, secret.hex())


def _write(path: Path, lines: Iterable[bytes]) -> None:
    """Replace the file by these lines and their checksum."""
    replace_file(path, _with_checksum(lines))


def _with_checksum(lines: Iterable[bytes]) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
        yield line
    yield _CHECKSUM.dump_json(Checksum(digest.hexdigest())) + b"\n"
