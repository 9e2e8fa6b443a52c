"""The journal: it is read back as it was written, and its failures do not affect the router."""

import io
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.core.model.commands import Command, WakeAt
from router.core.model.events import Arrived, Event, Finished, Progressed, Started, Ticked, WorkerLeft
from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.errors import ConfigError
from router.persistence.journal import (
    FORMAT,
    MAGIC,
    Journal,
    JournalEntry,
    JournalHeader,
    TornLine,
    decode,
    encode,
    open_journal,
    read,
)
from tests.support.running import until

# The core uses no mappings but dicts, and no other type could be restored.
st.register_type_strategy(Mapping, lambda kind: st.dictionaries(*map(st.from_type, get_args(kind))))

SECRET = b"0123456789abcdef"


def opened(path: Path) -> Journal:
    return open_journal(path, SECRET, 12.5, {"policy": "d2lpm", "seed": 3})


def lines_of(path: Path) -> list[JournalHeader | JournalEntry | TornLine]:
    with path.open("rb") as file:
        return list(read(file))


# The lines


@given(
    st.floats(allow_nan=False),
    st.one_of(*map(st.from_type, get_args(Event))),
    st.lists(st.one_of(*map(st.from_type, get_args(Command)))),
)
def test_every_event_and_command_is_read_as_it_was_written(at: float, event: Event, commands: list[Command]) -> None:
    """An event and its commands of any kind, with any text, bytes and numbers, take one line."""
    assume("nan" not in repr((event, commands)))  # NaN does not equal itself
    line = encode(at, event, commands)
    assert b"\n" not in line
    assert decode(line) == (at, event, commands)


@given(st.floats())
def test_floats_are_exact(value: float) -> None:
    """A float keeps its last bit and the sign of zero, because a replay at other times would give other commands."""
    entry = decode(encode(value, Ticked(), [WakeAt(value)]))
    assert repr(entry) == repr(JournalEntry(value, Ticked(), [WakeAt(value)]))


@given(st.dictionaries(st.from_type(RequestId), st.integers()))
def test_the_order_of_a_mapping_is_kept(tokens: dict[RequestId, int]) -> None:
    """A mapping keeps its order, because the scheduler charges in that order."""
    event = decode(encode(0.0, Progressed(tokens), [])).event
    assert isinstance(event, Progressed)
    assert list(event.output_tokens) == list(tokens)


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b"[0.5,[],[]]", b'[0.5,["Started"],[]]', b'[0.5,["No",{}],[]]'])
def test_an_invalid_line_is_rejected(line: bytes) -> None:
    """A line with invalid content is rejected, and so is the beginning of a line that a crash may leave."""
    with pytest.raises(ValueError, match="whole line"):
        decode(line)
    whole = encode(0.5, Started(RequestId("r")), [WakeAt(1.0)])
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="whole line"):
            decode(whole[:end])


def test_a_value_that_could_not_be_restored_is_not_written() -> None:
    """A value of another type than its field's is an error, so that no line holds something else."""
    with pytest.raises(ValueError, match="serializ"):
        encode(0.0, WorkerLeft(WorkerId("w\ud800")), [])


# The file


async def test_a_run_is_a_header_and_what_happened_in_order(tmp_path: Path) -> None:
    """The header says what the run was built from, entries follow in order, and only the owner can read the file."""
    path = tmp_path / "journal"
    key = PromptKey(os.urandom(16), 300)
    arrived = Arrived(Request(RequestId("r"), ClientId("ann"), "m", (key,)))
    async with opened(path) as journal:
        journal.observe(13.0, arrived, [WakeAt(14.0)])
        journal.observe(14.0, Ticked(), [])
    header, *entries = lines_of(path)
    assert isinstance(header, JournalHeader)
    assert (header.hash_secret, header.clock) == (SECRET.hex(), 12.5)
    assert header.settings == {"policy": "d2lpm", "seed": 3}
    assert entries == [JournalEntry(13.0, arrived, [WakeAt(14.0)]), JournalEntry(14.0, Ticked(), [])]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_lines_reach_the_file_while_the_run_goes_on(tmp_path: Path) -> None:
    """Lines are written during the run, so that a crash loses only the last of them."""
    path = tmp_path / "journal"
    async with opened(path) as journal:
        for at in (1.0, 2.0):
            journal.observe(at, Ticked(), [])
            await until(lambda at=at: lines_of(path)[-1] == JournalEntry(at, Ticked(), []))  # type: ignore[misc]
            assert len(lines_of(path)) == 1 + at


async def test_another_run_is_appended(tmp_path: Path) -> None:
    """A second run loses nothing of the first, not even the line that a crash cut short."""
    path = tmp_path / "journal"
    async with opened(path) as journal:
        journal.observe(1.0, Ticked(), [])
    path.write_bytes(path.read_bytes()[:-5])
    path.chmod(0o644)
    async with opened(path) as journal:
        journal.observe(2.0, Ticked(), [])
    first, torn, second, entry = lines_of(path)
    assert isinstance(first, JournalHeader)
    assert isinstance(second, JournalHeader)
    assert (torn, entry) == (TornLine(2), JournalEntry(2.0, Ticked(), []))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_file_has_one_writer(tmp_path: Path) -> None:
    """A second writer is rejected, because two runs that write at once could not be separated."""
    path = tmp_path / "journal"
    async with opened(path):
        with pytest.raises(ConfigError, match="another process"):
            opened(path)


def test_no_other_file_is_touched(tmp_path: Path) -> None:
    """A wrong path in the settings damages neither another file nor one that only looks like a journal."""
    text = tmp_path / "router.yaml"
    text.write_text("policy: d2lpm")
    text.chmod(0o644)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o644)
    for path in (text, tmp_path, tmp_path / "no" / "where"):
        with pytest.raises(ConfigError, match=str(path)):
            opened(path)
    with pytest.raises(ConfigError, match=f"{pipe}: not a regular file"):
        opened(pipe)
    assert text.read_text() == "policy: d2lpm"
    assert stat.S_IMODE(text.stat().st_mode) == 0o644


# Files that are not journals


def header_line(tmp_path: Path) -> bytes:
    """The first line of a file that has no other."""
    path = tmp_path / "header"
    opened(path)._file.close()
    line = path.read_bytes()
    path.unlink()
    return line


def test_a_file_that_is_not_a_journal_is_rejected(tmp_path: Path) -> None:
    """A file of another kind or of another format version is rejected."""
    with pytest.raises(ConfigError, match="not a journal"):
        list(read([b"policy: d2lpm\n"]))
    other = header_line(tmp_path).replace(MAGIC + b"%d" % FORMAT, MAGIC + b"%d" % (FORMAT + 1))
    with pytest.raises(ConfigError, match=f"format {FORMAT + 1}"):
        list(read([other]))
    with pytest.raises(ConfigError, match="header"):
        list(read([MAGIC + b"1}\n"]))


def test_only_the_last_line_of_a_run_may_be_torn(tmp_path: Path) -> None:
    """A torn line before others is an error, because what follows a gap cannot be replayed."""
    line = encode(1.0, Ticked(), [])
    assert list(read([header_line(tmp_path), line, line[:-2]]))[-1] == TornLine(3)
    with pytest.raises(ConfigError, match="line 2 is broken"):
        list(read([header_line(tmp_path), line[:-2], line]))


# Failures


class Gate(io.RawIOBase):
    """A disk that accepts a few bytes at a time, once it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.written = b""

    def write(self, block: object) -> int:
        assert isinstance(block, memoryview)
        self.open.wait()
        self.written += bytes(block[:7])
        return min(7, len(block))


async def test_a_full_disk_ends_the_journal_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk is logged in one line, and the router goes on."""
    async with Journal(io.FileIO("/dev/full", "w")) as journal:
        journal.observe(1.0, Ticked(), [])
        await until(lambda: bool(caplog.messages))
        for _ in range(3):
            journal.observe(2.0, Ticked(), [])
    assert caplog.messages == ["the journal ends here: No space left on device"]


async def test_a_disk_that_takes_little_at_a_time_gets_all() -> None:
    """A write that stored only a part is continued."""
    disk = Gate()
    disk.open.set()
    async with Journal(disk) as journal:
        for at in range(50):
            journal.observe(float(at), Ticked(), [])
    assert [decode(line).at for line in disk.written.splitlines()] == list(range(50))


async def test_a_slow_disk_does_not_fill_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Above its memory limit the journal ends, and what was written before is complete."""
    disk = Gate()
    event = Finished(RequestId("r"), None, (PromptKey(bytes(600), 1),))
    async with Journal(disk, max_pending_bytes=1000) as journal:
        journal.observe(1.0, event, [])
        journal.observe(2.0, event, [])
        journal.observe(3.0, event, [])
        disk.open.set()
    assert caplog.messages == ["the journal ends here: the disk is too slow for it"]
    assert disk.written == b""


async def test_an_event_that_cannot_be_written_ends_the_journal_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The journal keeps what came before and ends there, because a gap would make the rest worthless."""
    disk = Gate()
    disk.open.set()
    async with Journal(disk) as journal:
        journal.observe(1.0, Ticked(), [])
        journal.observe(2.0, Ticked(), [WakeAt("soon")])  # type: ignore[arg-type]
        journal.observe(3.0, Ticked(), [])
    assert len(caplog.messages) == 1
    assert "\n" not in caplog.text.strip()
    assert disk.written == encode(1.0, Ticked(), []) + b"\n"
