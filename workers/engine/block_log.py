"""What a cache stored and dropped, as its engine would publish it, and the names of its blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from workers.engine.engine import Engine


ROOT_HASH = 0


def chained_hashes(parent: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """Hashes of the full blocks of `tokens` behind `parent` (`ROOT_HASH` before the first); equal in every process."""
    hashes = []
    # The same iterator so many times: zip takes a block's tokens from it in turn.
    for block in zip(*[iter(tokens)] * block_size, strict=False):
        parent = hash((parent, block))
        hashes.append(parent)
    return hashes


DECODES: Final = 40
"""Decode steps after which SGLang tells of itself: what it stored, and its gauges."""


class Stored(NamedTuple):
    """Full blocks that follow on each other became findable; `parent` is the one before, None at the head."""

    hashes: Sequence[int]
    parent: int | None
    tokens: Sequence[int]


class Removed(NamedTuple):
    """These blocks are not findable any more."""

    hashes: Sequence[int]


class Cleared(NamedTuple):
    """No block is."""


BlockEvent = Stored | Removed | Cleared


class BlockLog:
    """Events in their order, until they are taken."""

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def add(self, event: BlockEvent) -> None:
        self._events.append(event)

    def take(self) -> list[BlockEvent]:
        """All since the last call."""
        events, self._events = self._events, []
        return events


def tells_after_step(engine: "Engine") -> bool:
    """Whether an engine publishes after the step that it has just taken.

    vLLM does after each, SGLang where `refreshes_after_step`, and when it has become idle.
    """
    return engine.config.dialect == "vllm" or refreshes_after_step(engine) or not engine.has_work


def refreshes_after_step(engine: "Engine") -> bool:
    """Whether SGLang sets its gauges after the step that it has just taken: a prefill, or every 40th that decodes."""
    decodes = engine.counters.steps - engine.counters.prefill_steps
    return engine.last_step_prefilled or decodes % DECODES == 0
