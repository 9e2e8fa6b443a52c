"""The path of a request through the files, counted on the running router."""

import asyncio
import re
import subprocess
import sys

from bench.lab.micro.request_path import (
    HTTP_CLIENT,
    WITHOUT_A_CHAT,
    Recorder,
    Step,
    Way,
    measured,
    one_by_one,
    only_stores,
    step_of,
)
from router.api.answer.usage import token_count
from router.process.server import DrainingServer
from router.runtime.mistakes import unknown
from router.telemetry.loop_lag import LoopLag

MOST_FILES_PER_CHUNK = 5
MOST_CHANGES_PER_CHUNK = 8
MOST_CHANGES_PER_DECISION = 50
MOST_CHANGES_PER_REQUEST = 320
"""About 300, and as many more as reports of progress and polls add on a busy machine."""


def test_a_change_of_file_is_a_call_into_another_file() -> None:
    """Calls within a file, and repeated calls of a function, are not changes."""
    steps = [Step("a.py", "f"), Step("a.py", "g"), Step("b.py", "f"), Step("a.py", "f")]
    assert measured(steps) == Way(files=2, functions=3, changes=2)


def test_a_chat_counts_only_if_its_chunks_came_one_by_one() -> None:
    """A chat of which two chunks came in one block is left out, although its path is the shortest."""
    block, other = Step(HTTP_CLIENT, "Connection.data_received"), Step("a.py", "f")
    apart, together = Recorder(steps=[block, other] * 5), Recorder(steps=[block, other] * 4)
    assert one_by_one([apart, together, apart]) == [apart, apart]


class Stores:
    """Stores what it is given."""

    def __init__(self, given: int) -> None:
        self.given, self.more = given, [given]


class Asks:
    """Calls something."""

    def __init__(self, given: str) -> None:
        self.given = len(given)

    def given_again(self) -> int:
        return self.given


def test_a_constructor_that_calls_something_is_a_step() -> None:
    """One that only stores is none, and any other function is one."""
    functions = Stores.__init__, Asks.__init__, Asks.given_again
    assert [only_stores(function.__code__) for function in functions] == [True, False, False]


def test_what_the_loop_also_calls_without_a_chat_is_no_step() -> None:
    """Nor is what that calls; anything else that the loop calls is a step."""
    recorder = Recorder(on=True, left_out=frozenset([Step("runtime/mistakes.py", "unknown")]))

    async def call_both() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(unknown, "name", "a", ("b",))
        loop.call_soon(token_count, {"a": 1}, "a")

    sys.setprofile(recorder)
    try:
        asyncio.run(call_both())
    finally:
        sys.setprofile(None)
    assert recorder.steps == [Step("api/answer/usage.py", "token_count")]


def test_what_is_left_out_exists() -> None:
    """Each function that is left out is one of the router's."""
    there = {DrainingServer.on_tick.__code__, LoopLag._measure.__code__}
    assert {step_of(code) for code in there} == WITHOUT_A_CHAT


def test_a_chat_takes_a_short_way() -> None:
    """A streamed chat, its decision and each of its chunks pass through few files, mostly in one direction."""
    command = [sys.executable, "-m", "bench", "request-path", "--repeats", "3"]
    table = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    rows = re.findall(r"^(request|decision|chunk) +(\d+) +\d+ +(\d+)$", table, re.MULTILINE)
    files, changes = ({row[0]: int(row[column]) for row in rows} for column in (1, 2))
    assert files["chunk"] <= MOST_FILES_PER_CHUNK
    assert changes["chunk"] <= MOST_CHANGES_PER_CHUNK
    assert changes["decision"] <= MOST_CHANGES_PER_DECISION
    assert changes["request"] <= MOST_CHANGES_PER_REQUEST
