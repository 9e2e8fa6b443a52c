"""The path of a request through the files, counted on the running router."""

import re
import subprocess
import sys

from bench.lab.micro.request_path import HTTP_CLIENT, Recorder, Step, Way, measured, one_by_one, only_stores

MOST_FILES_PER_CHUNK = 5
MOST_CHANGES_PER_CHUNK = 8
MOST_CHANGES_PER_DECISION = 50
MOST_CHANGES_PER_REQUEST = 320
"""About 300, and as many more as timers of the router add on a busy machine."""


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
