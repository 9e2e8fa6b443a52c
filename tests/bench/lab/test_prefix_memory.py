"""The measurement of what a believed chunk takes."""

import pytest

from bench.lab.micro.prefix_memory import PROMPT_CHUNKS, Believed


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_it_fills_the_tree_with_what_it_says(engine: str) -> None:
    """As many chunks as asked for, of as many workers, all of them whole and none pinned."""
    believed = Believed(2000, 4, engine)
    believed.tree.check_integrity()
    assert 2000 - PROMPT_CHUNKS <= believed.tree.chunks <= 2000
    assert len(believed.tree.match(believed.prompt().hashes)) <= 4
    assert min(believed.match_micros()) > 0
