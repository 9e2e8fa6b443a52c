"""Why predictions of a cache were wrong, as far as a router's journal shows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from router.core.model.commands import Dispatch
from router.core.model.events import Arrived, BlocksChanged, Finished, Started
from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES
from router.core.model.request import Request, RequestId, Usage, WorkerId
from router.persistence.journal import JournalEntry, read

from .fleet import BLOCK_TOKENS

LATE = 0.35
"""Seconds by which an engine's report of an event or a first token may be delayed."""
FEW = 2 * BLOCK_TOKENS
"""About the tokens between the end of a chunk of text and the place where prompts differ."""


class Cause(StrEnum):
    """The causes in the order in which they are checked."""

    RIGHT = "right to the token"
    EARLY = "sent before the router had read all events from before its start"
    AT_ONCE = "another call with that prefix was computed at about the same time"
    TURN = "evicted between its dispatch and its turn"
    FEW = f"up to {FEW} tokens: where prompts part, or what is told late"
    ORDER = "other than predicted was evicted"


class Removed(NamedTuple):
    """Blocks that an engine reported as evicted."""

    at: float
    worker: WorkerId
    blocks: frozenset[int]


@dataclass(slots=True)
class Call:
    """A dispatched call."""

    request: Request
    worker: WorkerId
    dispatched: float
    predicted: int
    started: float = float("inf")
    usage: Usage | None = None

    def shared(self, other: "Call") -> int:
        """Return the bytes that both prompts begin with, in whole chunks."""
        ours, theirs = (call.request.prompts[0].hashes for call in (self, other))
        end = 0
        while end < len(ours) and ours[end : end + HASH_BYTES] == theirs[end : end + HASH_BYTES]:
            end += HASH_BYTES
        return end // HASH_BYTES * CHUNK_BYTES

    def blocks(self, start: int, end: int) -> set[int]:
        """Return the hashes of its blocks between two positions (tokens); none if its tokens are unknown."""
        found: set[int] = set()
        for key in self.request.blocks:
            for size, hashes in key.hashes.items():
                found.update(memoryview(hashes).cast("Q").tolist()[start // size : end // size])
        return found


def causes(journal: Path) -> Iterator[tuple[Cause, int]]:
    """Yield, for each answered call, why its prediction was wrong, and by how many tokens (negative if too few)."""
    calls, removed = _events(journal)
    followed = any(call.request.blocks for call in calls.values())
    for call in calls.values():
        if call.usage is not None and call.usage.cached_tokens is not None:
            wrong = call.predicted - call.usage.cached_tokens
            early = wrong and followed and not call.request.blocks
            yield Cause.EARLY if early else _cause(call, call.usage.cached_tokens, calls.values(), removed), wrong


def _events(journal: Path) -> tuple[dict[RequestId, Call], list[Removed]]:
    requests: dict[RequestId, Request] = {}
    calls: dict[RequestId, Call] = {}
    removed: list[Removed] = []
    with journal.open("rb") as lines:
        for entry in (item for item in read(lines) if isinstance(item, JournalEntry)):
            match entry.event:
                case Arrived(request):
                    requests[request.id] = request
                case Started(id_):
                    calls[id_].started = entry.at
                case Finished(id_, usage):
                    calls[id_].usage = usage
                    calls[id_].started = min(calls[id_].started, entry.at)
                case BlocksChanged(worker=worker, removed=blocks):
                    removed.append(Removed(entry.at, worker, frozenset(memoryview(blocks).cast("Q").tolist())))
            for command in entry.commands:
                if isinstance(command, Dispatch):
                    request = requests[command.request]
                    calls[request.id] = Call(request, command.worker, entry.at, command.cached_tokens)
    return calls, removed


def _cause(call: Call, found: int, calls: Iterable[Call], removed: Iterable[Removed]) -> Cause:
    wrong = call.predicted - found
    if not wrong:
        return Cause.RIGHT
    assert call.usage is not None, "it is answered"
    size = call.request.prompts[0].size / call.usage.input_tokens
    certain = min(call.predicted, found) * size + CHUNK_BYTES
    if any(
        other.shared(call) > certain and other.dispatched < call.started and other.started > call.dispatched
        for other in calls
        if other is not call and other.worker == call.worker
    ):
        return Cause.AT_ONCE
    lost = call.blocks(found, call.predicted)
    reported = [each.blocks for each in removed if each.worker == call.worker and -LATE < each.at - call.started < LATE]
    if any(not lost.isdisjoint(blocks) for blocks in reported):
        return Cause.TURN
    return Cause.FEW if abs(wrong) <= FEW else Cause.ORDER
