"""How far workers hold the prompts of one request."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.cache.held_chunks import HeldChunks
from router.core.model.request import WorkerId

WORKERS = [WorkerId(name) for name in ("w1", "w2", "w3", "w4")]
ABLE = dict.fromkeys(WORKERS[:3])
"""The workers that a request may go to."""


@given(
    held=st.dictionaries(st.sampled_from(WORKERS), st.integers(1, 4)),
    changes=st.lists(st.tuples(st.sampled_from(WORKERS), st.integers(0, 4)), min_size=1),
)
def test_changes_lead_to_what_would_be_found_anew(
    held: dict[WorkerId, int], changes: list[tuple[WorkerId, int]]
) -> None:
    """Whatever changes one after the other: also of what some of the workers hold, asked for after each change."""
    changed = HeldChunks({**held})
    for worker, chunks in changes:
        changed.among(ABLE)
        held.pop(worker, None)
        if chunks:
            held[worker] = chunks
        changed = changed.changed(worker, chunks, {*held.values()})
        for found, anew in ((changed, HeldChunks(held)), (changed.among(ABLE), HeldChunks(held).among(ABLE))):
            assert (found.by_worker, found.most, found.least) == (anew.by_worker, anew.most, anew.least)
