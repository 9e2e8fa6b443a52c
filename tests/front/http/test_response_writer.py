"""The response writer sends the same bytes as uvicorn to clients of HTTP/1.1."""

import asyncio
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.front.byte_budget import ByteBudget, UnreadBytes
from router.front.http.response_writer import send

Message = dict[str, Any]
HEADERS = st.lists(
    st.sampled_from(
        [
            (b"content-length", b"0"),
            (b"content-length", b"5"),
            (b"connection", b"close"),
            (b"connection", b"keep-alive"),
            (b"x-request-id", b"a\tb \xe4"),
        ]
    ),
    max_size=3,
    unique_by=lambda header: header[0],
)
STARTS = st.builds(
    lambda status, headers: {"type": "http.response.start", "status": status, "headers": headers},
    st.sampled_from([200, 204, 304, 404, 599]),
    HEADERS,
)
BODIES = st.fixed_dictionaries(
    {"type": st.just("http.response.body")},
    optional={"body": st.sampled_from([b"", b"hello", b"x" * 300]), "more_body": st.booleans()},
)


class Wire(asyncio.Transport):
    """A transport that records what is written, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


class Answer:
    """One call and the answer written to it."""

    def __init__(self, method: str, *, keep_alive: bool, dated: bool) -> None:
        self.wire = Wire()
        self.answered = 0
        self.unread = UnreadBytes(ByteBudget(0), self.wire, "address")
        log = logging.getLogger(__name__)
        self.cycle = RequestResponseCycle(
            scope={"type": "http", "http_version": "1.1", "method": method},  # type: ignore[typeddict-item]
            transport=self.wire,
            flow=FlowControl(self.wire),
            logger=log,
            access_logger=log,
            access_log=False,
            default_headers=[(b"date", b"today")] if dated else [],
            message_event=asyncio.Event(),
            expect_100_continue=True,
            keep_alive=keep_alive,
            on_response=self._count,
        )

    def _count(self) -> None:
        self.answered += 1

    async def outcome(self, messages: list[Message], *, ours: bool) -> tuple[object, ...]:
        """Send these messages; return how many succeeded, the bytes written and the state."""
        done = 0
        try:
            for message in messages:
                await (send(self.cycle, self.unread, message) if ours else self.cycle.send(message))  # type: ignore[arg-type]
                done += 1
        except RuntimeError:
            pass
        cycle = self.cycle
        return (
            *(done, self.answered, self.wire.written, self.wire.closed, cycle.message_event.is_set()),
            *(cycle.response_started, cycle.response_complete, cycle.keep_alive, cycle.waiting_for_100_continue),
        )


@given(
    st.lists(STARTS | BODIES, max_size=1),
    st.lists(STARTS, min_size=1, max_size=1),
    st.lists(STARTS | BODIES, max_size=5),
    st.sampled_from(["GET", "POST", "HEAD"]),
    st.booleans(),
    st.booleans(),
)
def test_the_bytes_are_those_of_uvicorn(
    early: list[Message], start: list[Message], rest: list[Message], method: str, keep_alive: bool, dated: bool
) -> None:
    """Any messages in any order give the same bytes, or fail at the same message."""
    for messages in (early + start + rest, start + rest):
        ours, theirs = (Answer(method, keep_alive=keep_alive, dated=dated) for _ in range(2))
        seen = asyncio.run(ours.outcome(messages, ours=True))
        assert seen == asyncio.run(theirs.outcome(messages, ours=False))


@pytest.mark.parametrize("broken", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"a\r\n"])
async def test_a_header_with_a_line_break_is_not_sent(broken: bytes) -> None:
    """The line break can be in its value or in its name."""
    for header in ((b"x-a", broken), (broken, b"a")):
        answer = Answer("GET", keep_alive=True, dated=True)
        with pytest.raises(RuntimeError, match="line break"):
            await send(answer.cycle, answer.unread, {"type": "http.response.start", "status": 200, "headers": [header]})
        assert not answer.wire.written


async def test_writing_waits_for_a_client_that_does_not_read() -> None:
    """If the client disconnects meanwhile, nothing is sent."""
    for gone in (False, True):
        answer = Answer("GET", keep_alive=True, dated=False)
        answer.cycle.flow.pause_writing()
        sending = asyncio.create_task(send(answer.cycle, answer.unread, {"type": "http.response.start", "status": 204}))
        await asyncio.sleep(0)
        assert not answer.wire.written
        answer.cycle.disconnected = gone
        answer.cycle.flow.resume_writing()
        await sending
        assert bool(answer.wire.written) is not gone
