"""Blocks of tokens are the second key space: per worker, as the workers' events report them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.cache.prefix_map import PrefixMap
from router.core.kv_blocks.token_blocks import ExpectedBlocks, TokenBlocks
from router.core.model.block_key import ROOT, BlockHasher
from router.core.model.events import BlocksChanged, BlocksFollowed
from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.predict.token_estimates import Estimates
from tests.core.scenario import MODEL, key

SIZE = 4
HASHER = BlockHasher(b"secret")
ONE, TWO = WorkerId("one"), WorkerId("two")


def request(*prompts: Sequence[int], name: str = "r", size: int = SIZE) -> Request:
    """Return a request with these token ids."""
    keys = tuple(HASHER.key(tokens, [size]) for tokens in prompts)
    return Request(RequestId(name), ClientId("c"), "m", tuple(PromptKey(b"", 0) for _ in keys), blocks=keys)


def blocks(tokens: Sequence[int]) -> bytes:
    """Return the hashes of a prompt's full blocks."""
    return HASHER.chain(ROOT, tokens, SIZE)


def followed(*workers: WorkerId, limit: int = 1000, ranks: int = 1) -> TokenBlocks:
    """Return the blocks of workers whose events are complete."""
    found = TokenBlocks(limit)
    for worker in workers:
        found.follow(BlocksFollowed(worker, SIZE, ranks))
    return found


def stored(worker: WorkerId, tokens: Sequence[int], rank: int = 0) -> BlocksChanged:
    return BlocksChanged(worker, rank, stored=blocks(tokens))


def test_the_longest_prefix_is_found() -> None:
    """A worker's match is the full blocks of the prompt that it holds from the first on."""
    held = followed(ONE, TWO)
    held.change(stored(ONE, range(12)))
    held.change(stored(TWO, range(4)))
    assert held.match(request([*range(10), 99, 98, 97, 96])) == {ONE: 8, TWO: 4}


def test_a_hit_never_covers_the_whole_prompt() -> None:
    """The last token is always computed, so a prompt of whole blocks misses its last one."""
    held = followed(ONE)
    held.change(stored(ONE, range(8)))
    assert held.match(request(range(8))) == {ONE: 4}
    assert held.match(request(range(9))) == {ONE: 8}


def test_a_hole_ends_the_match() -> None:
    """Blocks behind a removed block do not count until the hole is filled."""
    held = followed(ONE)
    held.change(stored(ONE, range(12)))
    held.change(BlocksChanged(ONE, removed=blocks(range(12))[8:16]))
    assert held.match(request(range(20))) == {ONE: 4}
    held.change(stored(ONE, range(8)))
    assert held.match(request(range(20))) == {ONE: 12}


def test_prompts_add_up() -> None:
    """A request with several prompts matches the sum of them."""
    held = followed(ONE)
    held.change(stored(ONE, range(8)))
    assert held.match(request(range(9), range(5), [7] * 9)) == {ONE: 12}


def test_ranks_are_averaged() -> None:
    """Either cache of a worker with two ranks may get the request: the match is their mean."""
    held = followed(ONE, ranks=2)
    held.change(stored(ONE, range(16), rank=0))
    held.change(stored(ONE, range(8), rank=1))
    assert held.match(request(range(20))) == {ONE: 12}
    held.change(BlocksChanged(ONE, 1, cleared=True))
    assert held.match(request(range(20))) == {ONE: 8}


def test_workers_without_comparable_blocks_are_left_out() -> None:
    """Without token ids, or without those of its block size, a worker is left to the other key space."""
    held = followed(ONE)
    held.change(stored(ONE, range(8)))
    assert held.match(request()) == {}
    assert held.match(request(range(8), size=2)) == {}


def test_an_unknown_worker_changes_nothing() -> None:
    """Events of a worker that is not followed are ignored."""
    held = followed(ONE)
    held.change(stored(TWO, range(8)))
    assert held.blocks == 0
    assert held.match(request(range(8))) == {ONE: 0}


def expected(held: TokenBlocks, tokens: Sequence[int]) -> ExpectedBlocks:
    """Send a request with these tokens to the first worker."""
    found = held.expect(request(tokens), ONE)
    assert found is not None
    return found


def test_an_unfollowed_worker_is_forgotten() -> None:
    """A worker that is no longer followed holds nothing, and starts empty when it is followed again."""
    held = followed(ONE, TWO)
    held.change(stored(ONE, range(8)))
    before = expected(held, range(12))
    held.unfollow(ONE)
    assert held.match(request(range(20))) == {TWO: 0}
    held.follow(BlocksFollowed(ONE, SIZE))
    expected(held, range(12))
    held.end(before, stored=False)
    held.check_integrity()
    assert held.match(request(range(20))) == {TWO: 0, ONE: 12}


def test_the_limit_is_kept() -> None:
    """The worker that exceeds the limit is no longer followed, and the others stay."""
    held = followed(ONE, TWO, limit=3)
    held.change(stored(ONE, range(8)))
    held.change(stored(TWO, range(8)))
    assert held.match(request(range(20))) == {ONE: 8}
    assert held.blocks == 2


def test_blocks_of_dispatched_requests_are_expected() -> None:
    """From its dispatch on, a request's blocks count as held, until it has ended and the next event has come."""
    held = followed(ONE)
    first = expected(held, range(8))
    assert held.match(request(range(20))) == {ONE: 8}
    held.end(first, stored=True)
    assert held.match(request(range(20))) == {ONE: 8}
    held.change(BlocksChanged(ONE))
    assert held.match(request(range(20))) == {ONE: 0}
    held.check_integrity()


def test_a_failed_request_leaves_nothing_expected() -> None:
    """A request that was not computed leaves nothing behind, and takes nothing from another one."""
    held = followed(ONE)
    first, second = expected(held, range(8)), expected(held, range(12))
    held.end(second, stored=False)
    assert held.match(request(range(20))) == {ONE: 8}
    held.end(first, stored=False)
    assert held.match(request(range(20))) == {ONE: 0}
    held.check_integrity()


def test_invalid_token_ids_are_rejected() -> None:
    """Anything that is not a token id raises an error."""
    for wrong in ([-1], [1.5], ["a"], [2**64]):
        with pytest.raises(ValueError, match="token id"):
            HASHER.chain(ROOT, wrong, 1)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 2**32), max_size=40), st.integers(1, 5), st.integers(0, 8))
def test_a_chain_may_be_continued(tokens: list[int], size: int, cut: int) -> None:
    """Hashing from any block on gives what hashing the whole gives."""
    whole = HASHER.chain(ROOT, tokens, size)
    at = min(cut, len(tokens) // size)
    parent = whole[(at - 1) * 8 : at * 8] if at else ROOT
    assert whole == whole[: at * 8] + HASHER.chain(parent, tokens[at * size :], size)


STEP = st.tuples(
    st.sampled_from(["store", "remove", "clear", "expect", "end", "fail", "lose", "follow"]),
    st.sampled_from([ONE, TWO]),
    st.lists(st.integers(0, 1), min_size=0, max_size=12),
)


@settings(max_examples=150)
@given(st.lists(STEP, max_size=40))
def test_counts_agree_with_contents(steps: list[tuple[str, WorkerId, list[int]]]) -> None:
    """In any order of calls the totals agree with the contents, and the match is that of a plain model."""
    held = followed(ONE, TWO, limit=12)
    on_their_way: list[ExpectedBlocks] = []
    for what, worker, tokens in steps:
        match what:
            case "store":
                held.change(stored(worker, tokens))
            case "remove":
                held.change(BlocksChanged(worker, removed=blocks(tokens)[-8:]))
            case "clear":
                held.clear(worker)
            case "expect":
                if (sent := held.expect(request(tokens), worker)) is not None:
                    on_their_way.append(sent)
            case "end" | "fail":
                if on_their_way:
                    held.end(on_their_way.pop(0), stored=what == "end")
            case "lose":
                held.unfollow(worker)
            case "follow":
                held.follow(BlocksFollowed(worker, SIZE))
        held.check_integrity()


def with_estimates(*workers: WorkerId, minimum: int = 0) -> PrefixMap:
    """Return a map with an estimated match of three chunks, 96 tokens, at these workers."""
    held = PrefixMap(1000, Estimates(), minimum)
    for worker in workers:
        held.insert(MODEL, [key("doc")], worker, 1.0)
    return held


def both(tokens: Sequence[int]) -> Request:
    """Return the request `doc!` in both key spaces."""
    return replace(request(tokens), model=MODEL, prompts=(key("doc!"),))


def test_complete_events_replace_the_estimate() -> None:
    """For a worker with complete events, the estimate does not count; for others it does."""
    held = with_estimates(ONE, TWO)
    held.blocks.follow(BlocksFollowed(ONE, SIZE))
    held.blocks.change(stored(ONE, range(40)))
    assert held.match(both(range(128))) == {ONE: 40, TWO: 96}
    held.blocks.change(BlocksChanged(ONE, cleared=True))
    assert held.match(both(range(128))) == {TWO: 96}
    held.blocks.unfollow(ONE)
    assert held.match(both(range(128))) == {ONE: 96, TWO: 96}


def test_incomplete_events_add_to_the_estimate() -> None:
    """If some of a worker's events were missed, the longer of the two matches counts."""
    held = with_estimates(ONE)
    held.blocks.follow(BlocksFollowed(ONE, SIZE, complete=False))
    assert held.match(both(range(128))) == {ONE: 96}
    held.blocks.change(stored(ONE, range(120)))
    assert held.match(both(range(128))) == {ONE: 120}


def test_without_tokens_the_estimate_counts() -> None:
    """A request whose tokens are unknown is matched by its bytes, whatever the events report."""
    held = with_estimates(ONE)
    held.blocks.follow(BlocksFollowed(ONE, SIZE))
    assert held.match(replace(both(range(128)), blocks=())) == {ONE: 96}


def test_the_minimum_and_the_size_hold_for_events_too() -> None:
    """A match below the minimum does not count; the input is as long as its tokens, and never matched as a whole."""
    held = with_estimates(ONE, minimum=64)
    held.blocks.follow(BlocksFollowed(TWO, SIZE))
    held.blocks.change(stored(TWO, range(60)))
    assert held.match(both(range(90))) == {ONE: 89}
    assert held.input_tokens(both(range(90))) == 90
    held.blocks.change(stored(TWO, range(68)))
    assert held.match(both(range(90))) == {ONE: 89, TWO: 68}
