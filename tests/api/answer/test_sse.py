from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.answer.sse import EventSplitter, event_data, with_data
from router.errors import WorkerBroke

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.sampled_from(
    [
        "data: {}",
        'data: {"a": "data: x"}',
        "data:x",
        "data",
        ": keep-alive",
        "event: done",
        "id: 7",
        "dat",
        "data: \u00e9",
    ]
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Lines and blank lines in any mixture of line ends."""
    lines = draw(st.lists(st.one_of(LINES, st.just("")), max_size=20))
    return "".join(line + draw(LINE_ENDS) for line in lines).encode()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def split(blocks: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    events = [event for block in blocks for event in splitter.feed(block)]
    return events, splitter.rest()


@given(streams(), st.lists(st.integers(min_value=0, max_value=1000), max_size=8))
def test_events_do_not_depend_on_the_cuts(stream: bytes, places: list[int]) -> None:
    """Any blocks of the same bytes give the same events, and together the events are these bytes."""
    events, rest = split(cut(stream, places))
    assert (events, rest) == split([stream])
    assert b"".join(events) + rest == stream


@given(streams())
def test_every_event_ends_in_its_only_blank_line(stream: bytes) -> None:
    """Events are not joined: apart from leading blank lines, only the last line is blank."""
    for event in split([stream])[0]:
        lines = event.lstrip(b"\r\n").splitlines()
        assert b"" not in lines[:-1]
        assert event.endswith((b"\n", b"\r"))


def test_event_leaves_with_its_last_byte() -> None:
    """A complete event is not held until the next one comes."""
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\n") == [b"data: a\n\n"]
    assert splitter.feed(b"data: b\r\n\r\n") == [b"data: b\r\n\r\n"]


def test_single_bytes_are_no_events() -> None:
    """A block too short to contain a blank line is held back."""
    splitter = EventSplitter()
    assert [splitter.feed(bytes([byte])) for byte in b"d\n"] == [[], []]
    assert splitter.rest() == b"d\n"
    assert splitter.rest() == b""


def test_event_beyond_the_limit_is_an_error() -> None:
    """A worker that never ends its event cannot exhaust the memory."""
    splitter = EventSplitter(limit=100)
    assert splitter.feed(b"data: " + b"x" * 94) == []
    with pytest.raises(WorkerBroke, match="100 bytes"):
        splitter.feed(b"x")
    with pytest.raises(WorkerBroke):
        EventSplitter(limit=100).feed(b"x" * 101)


def test_long_event_in_small_blocks_is_searched_once() -> None:
    """The time for an event in many blocks does not grow with the square of their number."""
    splitter = EventSplitter()
    for _ in range(200_000):
        assert splitter.feed(b"xxxxxxxx") == []
    assert [len(event) for event in splitter.feed(b"\n\n")] == [1_600_002]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"data:  two spaces\n\n", b" two spaces"),
        (b"data: a\r\ndata: b\r\n\r\n", b"a\nb"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
        (b"event: x\ndata: a\nid: 1\n\n", b"a"),
        (b"\xef\xbb\xbfdata: a\n\n", b"a"),
        (b"\n\ndata: a\n\n", b"a"),
        (b"data\n\n", b""),
        (b"data: \n\n", b""),
        (b"data: a", b"a"),
        (b"data: a\nx", b"a"),
        (b": keep-alive\n\n", None),
        (b"event: x\n\n", None),
        (b"database: x\n\n", None),
        (b"\n\n", None),
    ],
)
def test_data_of_an_event(event: bytes, data: bytes | None) -> None:
    """Data lines are joined by LF, one space after the colon goes, and other lines do not count."""
    assert event_data(event) == data


@pytest.mark.parametrize(
    ("event", "replaced"),
    [
        (b"data: old\n\n", b"data: new\n\n"),
        (b"data:old\r\n\r\n", b"data: new\r\n\r\n"),
        (b": c\ndata: o\nid: 1\ndata: ld\nid: 2\n\n", b": c\nid: 1\ndata: new\nid: 2\n\n"),
        (b"\xef\xbb\xbfdata: old\n\n", b"\xef\xbb\xbfdata: new\n\n"),
        (b"data: old", b"data: new"),
        (b"data: old\nid: 1", b"data: new\nid: 1"),
    ],
)
def test_replaced_data_leaves_the_other_lines(event: bytes, replaced: bytes) -> None:
    """Comments, other fields and the kind of line end stay as they came."""
    assert with_data(event, b"new") == replaced


@given(streams(), st.sampled_from([b"new", b"", b"two\nlines"]))
def test_replaced_data_is_read_back(stream: bytes, data: bytes) -> None:
    """Replaced data is read back unchanged, and the event stays one event."""
    for event in split([stream])[0]:
        if event_data(event) is not None:
            replaced = with_data(event, data)
            assert event_data(replaced) == data
            assert split([replaced, b"x"])[0] == [replaced]
