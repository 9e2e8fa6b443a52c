"""KV events are read in the engines' encodings, with missing messages and the engines' own names for blocks."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.kv_blocks.block_names import BlockChange, BlockNames, TooManyBlocks
from router.core.kv_blocks.kv_events import (
    MARKS_KEPT,
    Cleared,
    Continuity,
    KvEventFault,
    MessageOrder,
    Removed,
    Stored,
    read_batch,
)
from router.core.model.block_key import ROOT, BlockHasher

HASHER = BlockHasher(b"secret")
VLLM_STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
}
STORED = Stored([11, 12], None, [1, 2, 3, 4], 2, 2)


def hashes(*tokens: int) -> bytes:
    """Return the hashes of blocks of two tokens."""
    return HASHER.chain(ROOT, tokens, 2)


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (VLLM_STORED, STORED),
        ({"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 0}, Removed([11])),
        ({"type": "AllBlocksCleared"}, Cleared()),
        # SGLang, whose hashes are signed and whose medium may be left out:
        (
            {
                "type": "BlockStored",
                **{"block_hashes": [-5], "parent_block_hash": -4, "token_ids": [7], "block_size": 1, "lora_id": None},
            },
            Stored([-5], -4, [7], 1, 1),
        ),
        ({"type": "BlockRemoved", "block_hashes": [-5]}, Removed([-5])),
        # As arrays, and with hashes of 32 bytes:
        (["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU"], STORED),
        (["BlockStored", [b"a" * 32], b"b" * 32, [1, 2], 2, None], Stored([b"a" * 32], b"b" * 32, [1, 2], 2, 1)),
        (["BlockRemoved", [11], "GPU"], Removed([11])),
        (["AllBlocksCleared"], Cleared()),
    ],
)
def test_both_encodings(raw: object, read: object) -> None:
    """The encodings as maps and as arrays, of vLLM and of SGLang, mean the same."""
    assert read_batch([1.0, [raw], 3]) == (3, (read,), ())


@pytest.mark.parametrize(
    "extra",
    [{"lora_id": 1}, {"lora_name": "adapter"}, {"cache_salt": "s"}, {"extra_keys": [["salt"], None]}],
)
def test_blocks_of_more_than_tokens_are_unmatchable(extra: dict[str, object]) -> None:
    """A block with an adapter, a salt or media differs from the block of a plain prompt."""
    (event,) = read_batch([1.0, [VLLM_STORED | extra]]).events
    assert event == STORED._replace(matchable=0)


def test_blocks_before_media_are_matchable() -> None:
    """What precedes an image, such as a system prompt, serves plain prompts, too."""
    batch = read_batch([1.0, [VLLM_STORED | {"extra_keys": [None, [["image", 3]]]}]])
    assert batch.events == (STORED._replace(matchable=1),)
    names = BlockNames(HASHER, 100)
    change = names.apply([*batch.events, Stored([13], 12, [5, 6], 2, 1)])
    assert change == BlockChange(False, b"", hashes(1, 2))
    assert names.apply([Removed([13, 12, 11])]) == BlockChange(False, hashes(1, 2), b"")
    assert not names.faults


@pytest.mark.parametrize("elsewhere", [{"medium": "CPU"}, {"medium": "DISK"}, {"group_idx": 1}])
def test_blocks_in_other_memory_are_left_out(elsewhere: dict[str, object]) -> None:
    """Blocks on another medium, or of another group of layers, are neither stored nor a fault."""
    removed = {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 0}
    assert read_batch([1.0, [VLLM_STORED | elsewhere, removed | elsewhere]]) == (None, (), ())


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (None, KvEventFault.UNKNOWN_KIND),
        ([], KvEventFault.UNKNOWN_KIND),
        (["BlockEaten", [1]], KvEventFault.UNKNOWN_KIND),
        ({"type": ["BlockStored"]}, KvEventFault.UNKNOWN_KIND),
        ({"block_hashes": [1]}, KvEventFault.UNKNOWN_KIND),
        (["BlockRemoved"], KvEventFault.BAD_FIELDS),
        (["BlockRemoved", ["name"], "GPU"], KvEventFault.BAD_FIELDS),
        (VLLM_STORED | {"block_size": 0}, KvEventFault.BAD_FIELDS),
        (VLLM_STORED | {"block_size": True}, KvEventFault.BAD_FIELDS),
        (VLLM_STORED | {"token_ids": [1, 2, 3]}, KvEventFault.BAD_FIELDS),
        (VLLM_STORED | {"token_ids": None}, KvEventFault.BAD_FIELDS),
        (VLLM_STORED | {"parent_block_hash": "name"}, KvEventFault.BAD_FIELDS),
    ],
)
def test_a_bad_event_is_named(raw: object, fault: KvEventFault) -> None:
    """An invalid event is left out and counted, and the events around it are read."""
    assert read_batch([1.0, [["AllBlocksCleared"], raw, ["AllBlocksCleared"]]]) == (
        None,
        (Cleared(), Cleared()),
        (fault,),
    )


@pytest.mark.parametrize("payload", [None, 7, "text", {}, [], [1.0], [1.0, "events"], [1.0, {"a": 1}]])
def test_a_message_without_a_batch_is_rejected(payload: object) -> None:
    """The message is rejected as a whole."""
    with pytest.raises(ValueError, match="batch"):
        read_batch(payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", *VLLM_STORED]),
            inner | st.sampled_from(["BlockStored", "BlockRemoved"]),
            max_size=9,
        )
    ),
    max_leaves=12,
)


@given(JSON, st.lists(JSON, max_size=3))
def test_any_message_is_read_or_rejected(first: object, events: list[object]) -> None:
    """No content raises anything but ValueError, and applying what was read of it raises nothing."""
    names = BlockNames(HASHER, 100)
    for payload in (first, [1.0, events], [1.0, [VLLM_STORED, *events]]):
        try:
            batch = read_batch(payload)
        except ValueError:
            continue
        names.apply(batch.events)


def test_message_numbers_show_gaps_repeats_and_restarts() -> None:
    """Numbers show the next message, a repeated one, missing ones, and a new publisher."""
    seen = Continuity()
    assert seen.order(0, 100) is MessageOrder.NEXT
    assert seen.order(5, 105) is MessageOrder.GAP
    for number in range(3):
        seen.record(number, 100 + number)
    assert seen.order(3, 103) is MessageOrder.NEXT
    assert seen.order(1, 101) is MessageOrder.REPEATED
    assert seen.order(0, 7) is MessageOrder.RESTARTED
    assert seen.order(4, 104) is MessageOrder.GAP


def test_a_gap_may_stay() -> None:
    """A message applied after a gap determines the next number."""
    seen = Continuity()
    seen.record(0, 100)
    seen.record(2, 102)
    assert seen.order(3, 103) is MessageOrder.NEXT
    assert seen.order(2, 102) is MessageOrder.REPEATED


def test_marks_are_bounded() -> None:
    """A very old message cannot be distinguished from another one with its number."""
    seen = Continuity()
    for number in range(MARKS_KEPT + 1):
        seen.record(number, number)
    assert seen.order(1, 1) is MessageOrder.REPEATED
    assert seen.order(0, 0) is MessageOrder.RESTARTED


def test_blocks_are_chained_by_name() -> None:
    """Blocks that follow a named block have the hashes of the whole prefix, whatever the engine's names are."""
    names = BlockNames(HASHER, 100)
    assert names.apply([STORED]) == BlockChange(False, b"", hashes(1, 2, 3, 4))
    followed = names.apply([Stored([13], 12, [5, 6], 2, 1)])
    assert followed.stored == hashes(1, 2, 3, 4, 5, 6)[16:]
    assert names.apply([Removed([12, 13])]) == BlockChange(False, hashes(1, 2, 3, 4, 5, 6)[8:], b"")
    assert len(names) == 1
    assert not names.faults


def test_a_batch_reports_the_final_state() -> None:
    """A batch reports only how it leaves each block."""
    names = BlockNames(HASHER, 100)
    change = names.apply([STORED, Removed([12]), Removed([11]), Stored([11], None, [1, 2], 2, 1)])
    assert change == BlockChange(False, hashes(1, 2, 3, 4)[8:], hashes(1, 2))
    assert names.apply([Cleared(), STORED]) == BlockChange(True, b"", hashes(1, 2, 3, 4))


def test_copies_are_counted() -> None:
    """A content that was stored twice is cached until it was removed twice."""
    names = BlockNames(HASHER, 100)
    names.apply([STORED])
    again = [Stored([11], None, [1, 2], 2, 1), Stored([12], 11, [3, 4], 2, 1)]
    assert names.apply(again) == BlockChange(False, b"", b"")
    assert names.apply([Removed([12, 11])]) == BlockChange(False, b"", b"")
    gone = names.apply([Removed([12, 11])])
    assert sorted([gone.removed[:8], gone.removed[8:]]) == sorted([hashes(1, 2), hashes(1, 2, 3, 4)[8:]])


def test_a_prompt_that_is_computed_anew_adds_copies() -> None:
    """A store from the head of a prompt on that has a new block is no report of hits: its blocks are copies."""
    names = BlockNames(HASHER, 100)
    names.apply([STORED, Stored([11, 12, 13], None, [1, 2, 3, 4, 5, 6], 2, 3)])
    assert names.apply([Removed([12, 11])]) == BlockChange(False, b"", b"")
    assert len(names.apply([Removed([13, 12, 11])]).removed) == 24
    assert not names.faults


def test_a_report_of_hits_is_no_copy() -> None:
    """A removed block does not stay because a client has its engine report hits as stored blocks."""
    names = BlockNames(HASHER, 100)
    names.apply([STORED])
    assert names.apply([STORED, STORED]) == BlockChange(False, b"", b"")
    assert len(names.apply([Removed([12, 11])]).removed) == 16
    assert len(names) == 0


def test_unknown_parent() -> None:
    """Blocks after an unknown block match nothing, nor do those that follow; the fault is counted once."""
    names = BlockNames(HASHER, 100)
    orphan = Stored([21], 99, [1, 2], 2, 1)
    assert names.apply([orphan, Stored([22], 21, [3, 4], 2, 1), Removed([21])]) == BlockChange(False, b"", b"")
    assert names.faults == [KvEventFault.UNKNOWN_PARENT]


def test_unmatchable_blocks_match_nothing() -> None:
    """Unmatchable blocks, and all behind them, are known by name alone."""
    names = BlockNames(HASHER, 100)
    change = names.apply([STORED._replace(matchable=0), Stored([13], 12, [5, 6], 2, 1)])
    assert change == BlockChange(False, b"", b"")
    assert not names.faults
    assert len(names) == 3


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (Removed([99]), KvEventFault.UNKNOWN_BLOCK),
        (Stored([13], 12, [5, 6, 7], 3, 1), KvEventFault.ODD_BLOCK),
        (Stored([13], 12, [-5, 6], 2, 1), KvEventFault.BAD_FIELDS),
    ],
)
def test_faults_of_names(event: Removed | Stored, fault: KvEventFault) -> None:
    """An event that contradicts the known blocks is counted, and changes nothing that can be matched."""
    names = BlockNames(HASHER, 100)
    names.apply([STORED])
    assert names.apply([event]) == BlockChange(False, b"", b"")
    assert names.faults == [fault]


def test_too_many_blocks() -> None:
    """A publisher that exceeds the limit is given up."""
    names = BlockNames(HASHER, 1)
    with pytest.raises(TooManyBlocks):
        names.apply([STORED])


def test_random_caches_are_followed() -> None:
    """The changes add up to what an engine's cache holds after any history, with copies."""
    random_ = random.Random(5)
    names, held = BlockNames(HASHER, 1000), set[bytes]()
    engine: list[int] = []
    for _ in range(2000):
        if engine and random_.random() < 0.45:
            change = names.apply([Removed([engine.pop(random_.randrange(len(engine)))])])
        else:
            name = random_.randrange(40)
            engine.append(name)
            change = names.apply([Stored([name], None, [name, name], 2, 1)])
        held -= {change.removed[at : at + 8] for at in range(0, len(change.removed), 8)}
        held |= {change.stored[at : at + 8] for at in range(0, len(change.stored), 8)}
        assert held == {hashes(name, name) for name in engine}
    assert not names.faults
