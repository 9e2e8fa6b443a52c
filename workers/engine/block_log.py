"""What a cache stored and dropped, as its engine would publish it, and the hashes of its blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from workers.engine.engine import Engine


ROOT_HASH: Final = 0


def chained_hashes(parent: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """Return the hashes of the full blocks of `tokens` that follow block `parent` (`ROOT_HASH` before the first).

    Equal in every process.
    """
    hashes = []
    # `block_size` references to one iterator: zip takes the tokens of a block from it in turn.
    for block in zip(*[iter(tokens)] * block_size, strict=False):
        parent = hash((parent, block))
        hashes.append(parent)
    return hashes


REFRESH_DECODE_STEPS: Final = 40
"""Decode steps after which SGLang publishes what it stored and refreshes its gauges."""


class Stored(NamedTuple):
    """Consecutive full blocks became findable; `parent` is the block before them, None at the start of a prompt."""

    hashes: Sequence[int]
    parent: int | None
    tokens: Sequence[int]


class Removed(NamedTuple):
    """These blocks are not findable any more."""

    hashes: Sequence[int]


class Cleared(NamedTuple):
    """No block is findable any more."""


BlockEvent = Stored | Removed | Cleared


class BlockLog:
    """Collects events in order until they are taken."""

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def add(self, event: BlockEvent) -> None:
        self._events.append(event)

    def take(self) -> list[BlockEvent]:
        """Return all events since the last call."""
        events, self._events = self._events, []
        return events


def publishes_after_step(engine: "Engine") -> bool:
    """True if an engine publishes events after the step that it has just run.

    vLLM does so after each step, SGLang if `refreshes_after_step` is true or the engine has become idle.
    """
    return engine.config.dialect == "vllm" or refreshes_after_step(engine) or not engine.has_work


def refreshes_after_step(engine: "Engine") -> bool:
    """True if SGLang refreshes its gauges after the step just run: a prefill, or every 40th decode step."""
    decodes = engine.counters.steps - engine.counters.prefill_steps
    return engine.last_step_prefilled or decodes % REFRESH_DECODE_STEPS == 0
