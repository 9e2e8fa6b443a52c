"""The path of a request through the files, counted on the running router."""

import re
import subprocess
import sys

from bench.lab.micro.request_path import Step, Way, measured

MOST_FILES_PER_CHUNK = 5
MOST_CHANGES_PER_CHUNK = 8


def test_a_change_of_file_is_a_call_into_another_file() -> None:
    """Calls within a file, and repeated calls of a function, are not changes."""
    steps = [Step("a.py", "f"), Step("a.py", "g"), Step("b.py", "f"), Step("a.py", "f")]
    assert measured(steps) == Way(files=2, functions=3, changes=2)


def test_a_chunk_takes_a_short_way_to_the_client() -> None:
    """A chunk of a streamed chat passes through few files, and in one direction."""
    command = [sys.executable, "-m", "bench", "request-path", "--repeats", "3"]
    table = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    row = re.search(r"^chunk +(\d+) +\d+ +(\d+)$", table, re.MULTILINE)
    assert row is not None, table
    assert int(row[1]) <= MOST_FILES_PER_CHUNK
    assert int(row[2]) <= MOST_CHANGES_PER_CHUNK
