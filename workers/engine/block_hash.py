"""Names of full blocks by their content and all before it. PURE."""

from collections.abc import Sequence

ROOT_HASH = 0


def chained_hashes(parent: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """Hashes of the full blocks of `tokens` behind `parent` (`ROOT_HASH` before the first); equal in every process."""
    hashes = []
    # The same iterator so many times: zip takes a block's tokens from it in turn.
    for block in zip(*[iter(tokens)] * block_size, strict=False):
        parent = hash((parent, block))
        hashes.append(parent)
    return hashes
