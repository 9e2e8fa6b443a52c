"""What an application sends is on the wire what uvicorn makes of it."""

import asyncio
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.front.byte_budget import ByteBudget
from router.front.http.response_writer import send
from router.front.http.unread_bytes import UnreadBytes

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
    """What is written to it, and whether it was closed."""

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


class Served:
    """A call, and what becomes of it."""

    def __init__(self, method: str, *, keep_alive: bool, dated: bool) -> None:
        self.wire = Wire()
        self.answered = 0
        self.unread = UnreadBytes(ByteBudget(0), self.wire, "address")
        log = logging.getLogger(__name__)
        self.cycle = RequestResponseCycle(
            scope={"type": "http", "method": method},  # type: ignore[typeddict-item]
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

    async def told(self, messages: list[Message], *, ours: bool) -> tuple[object, ...]:
        """All that can be seen after these: bytes, state, and after how many of them it failed."""
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
def test_it_is_what_uvicorn_sends(
    early: list[Message], start: list[Message], rest: list[Message], method: str, keep_alive: bool, dated: bool
) -> None:
    """To the byte, whatever comes in whatever order; and what is wrong is wrong at the same message."""
    for messages in (early + start + rest, start + rest):
        ours, theirs = (Served(method, keep_alive=keep_alive, dated=dated) for _ in range(2))
        seen = asyncio.run(ours.told(messages, ours=True))
        assert seen == asyncio.run(theirs.told(messages, ours=False))


@pytest.mark.parametrize("broken", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"a\r\n"])
async def test_no_header_becomes_two(broken: bytes) -> None:
    """One with a break of the line in it is not sent, in its value or in its name."""
    for header in ((b"x-a", broken), (broken, b"a")):
        served = Served("GET", keep_alive=True, dated=True)
        with pytest.raises(RuntimeError, match="line break"):
            await send(served.cycle, served.unread, {"type": "http.response.start", "status": 200, "headers": [header]})
        assert not served.wire.written


async def test_it_waits_for_who_does_not_read() -> None:
    """And sends nothing to who has left meanwhile."""
    for gone in (False, True):
        served = Served("GET", keep_alive=True, dated=False)
        served.cycle.flow.pause_writing()
        sending = asyncio.create_task(send(served.cycle, served.unread, {"type": "http.response.start", "status": 204}))
        await asyncio.sleep(0)
        assert not served.wire.written
        served.cycle.disconnected = gone
        served.cycle.flow.resume_writing()
        await sending
        assert bool(served.wire.written) is not gone
