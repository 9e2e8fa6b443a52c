"""How the engines' prefix caches differ, as far as a mirror of them needs to know.

Read in the sources of vLLM 0.33 and SGLang 0.5.23. What they have in common: only full blocks count, in tokens; what
running requests hold is not evicted; the last token of a prompt is always computed; answers are cached like prompts;
and of what no request uses, what was released first is evicted first, the end of a prompt before its beginning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple


@dataclass(frozen=True, slots=True)
class CacheRules:
    """The rules of one kind of engine."""

    block_tokens: int = 1
    """Tokens per block, or page, if the engine does not report it."""
    found_when_computed: bool = False
    """Whether a prompt can be hit only once all of it is computed; else each part once it is scheduled."""
    whole_nodes: bool = False
    """Whether eviction takes all that one request added to the cache, until there is room; else block by block."""
    searches_beams: bool = False
    """Whether it searches beams for a call that asks for that, so that `resent_tokens` holds."""


@dataclass(frozen=True, slots=True)
class Tracking:
    """How closely a cache is followed; less than everything serves for comparison."""

    evicts: bool = True
    """Whether evictions are modelled."""
    replays: bool = True
    """Whether running requests pin what they use and fill the cache as they grow, and batches are distinguished."""
    corrects: bool = True
    """Whether the engine's reports about its cache correct the model."""


TRACK_ALL: Final = Tracking()

GENERIC: Final = CacheRules()
ENGINE_RULES: Final[Mapping[str, CacheRules]] = {
    "vllm": CacheRules(block_tokens=16, searches_beams=True),
    "sglang": CacheRules(found_when_computed=True, whole_nodes=True),
}
"""By the engine's name; `GENERIC` applies to any other."""


def rules_of(engine: str) -> CacheRules:
    """Return the rules of the engine with this name."""
    return ENGINE_RULES.get(engine, GENERIC)


def computes_anew(engine: str, computed_anew_by: frozenset[str]) -> bool:
    """Return whether an engine computes prompts in full, whatever is cached; see `Request.computed_anew_by`."""
    return bool(computed_anew_by) and (engine in computed_anew_by or engine not in ENGINE_RULES)


def resent_tokens(prompt: int, beams: int, length: int, block: int) -> int:
    """Return the input tokens that vLLM's beam search computes after the prompt, and that no usage reports.

    For each token after the first it sends every beam again, and finds the full blocks of all but the last token in its
    cache. `prompt`: tokens of the prompt; `length`: tokens of each beam; `block`: tokens of a block.
    """

    def computed(longest: int) -> int:
        """Prompts with 1 to so many tokens, one each: a prompt computes as many as lie past its last full block."""
        blocks, rest = divmod(longest, block)
        return (blocks * block * (block + 1) + rest * (rest + 1)) // 2

    return beams * (computed(prompt + length - 1) - computed(prompt)) if length > 1 else 0


def whole_blocks(tokens: float, block: int) -> int:
    """Round tokens down to full blocks."""
    return int(tokens) // block * block


class MatchWorth(NamedTuple):
    """How many tokens a match at one worker counts for."""

    block_tokens: int
    """The size of a block; only full blocks are found."""
    share: float
    """Less than 1 while matches at this worker prove to be wrong."""

    def discounted(self, tokens: int) -> int:
        """Return what a match of this many tokens of full blocks counts for."""
        return tokens if self.share == 1.0 else int(tokens * self.share)
