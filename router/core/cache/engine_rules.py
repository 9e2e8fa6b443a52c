"""How the prefix caches of the engines differ, as far as a mirror of them must know.

Read in the sources of vLLM 0.33 and SGLang 0.5.23. What they have in common: full blocks only, counted in tokens; what
running requests hold is not evicted; the last token of a prompt is always computed; answers are cached like prompts;
and of what nobody uses goes first what was released first, the end of a prompt before its beginning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class CacheRules:
    """One kind of engine."""

    block_tokens: int = 1
    """A block, or page, where the engine does not tell its size."""
    found_when_computed: bool = False
    """Whether a prompt can be hit only when all of it is computed; else each part as soon as it is scheduled."""
    whole_nodes: bool = False
    """Whether what a request added to the cache is evicted as a whole, until there is enough room; else by blocks."""


@dataclass(frozen=True, slots=True)
class Tracking:
    """How much of what happens to a cache is followed; less than all is there to be compared with."""

    evicts: bool = True
    """Whether anything is believed to be evicted."""
    replays: bool = True
    """Whether running requests pin what they use and fill the cache as they grow, and batches are told apart."""
    corrects: bool = True
    """Whether the engine's word about its cache changes what is believed."""


TRACK_ALL: Final = Tracking()

GENERIC: Final = CacheRules()
ENGINE_RULES: Final[Mapping[str, CacheRules]] = {
    "vllm": CacheRules(block_tokens=16),
    "sglang": CacheRules(found_when_computed=True, whole_nodes=True),
}
"""By the engine's name; `GENERIC` for any other."""


def rules_of(engine: str) -> CacheRules:
    """The rules of the engine of this name."""
    return ENGINE_RULES.get(engine, GENERIC)


def computes_anew(engine: str, computed_anew_by: frozenset[str]) -> bool:
    """Whether an engine computes a request's prompts in full; see `Request.computed_anew_by`."""
    return bool(computed_anew_by) and (engine in computed_anew_by or engine not in ENGINE_RULES)


def whole_blocks(tokens: float, block: int) -> int:
    """The tokens of the full blocks among so many."""
    return int(tokens) // block * block


def blocks_for(tokens: float, block: int) -> int:
    """The tokens of the blocks that hold so many."""
    return -(-int(tokens) // block) * block
