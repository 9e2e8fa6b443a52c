"""A prompt as the engine will see it, without its text: keyed hashes of fixed-size chunks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A prompt's chained chunk hashes and its size."""

    hashes: bytes
    """8 bytes per full chunk; each covers its chunk and everything before it."""
    size: int
    """Length of the canonical bytes, the part after the last full chunk included."""
    tokens: int | None = None
    """The exact number of tokens where the prompt came as token ids."""
