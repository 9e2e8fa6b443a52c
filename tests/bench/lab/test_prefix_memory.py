"""The measurement of the memory that a believed chunk of the prefix tree takes."""

import pytest

from bench.lab.micro.prefix_memory import PROMPT_CHUNKS, Believed


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_tree_has_the_chunks_asked_for(engine: str) -> None:
    """The tree holds as many chunks of as many workers as asked for, and is consistent."""
    believed = Believed(2000, 4, engine)
    believed.tree.check_integrity()
    assert 2000 - PROMPT_CHUNKS <= believed.tree.chunks <= 2000
    assert len(believed.tree.match(believed.prompt().hashes)) <= 4
    assert min(believed.match_micros()) > 0
