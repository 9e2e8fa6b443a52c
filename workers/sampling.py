"""Which token an emulated model says next: a fixed walk from the seed and the prompt, so that answers repeat."""

from collections.abc import Iterable

from workers.tokenizer import EOS, VOCABULARY

_MASK = (1 << 64) - 1
_EOS_ONE_IN = 256
_WORDS = len(VOCABULARY)


def initial_state(seed: int, prompt: Iterable[int], sample: int) -> int:
    """The walk's 64-bit state before the first token: hashes of integers alone, so equal in every process."""
    return hash((seed, sample, tuple(prompt))) & _MASK


def next_state(state: int) -> int:
    """One step of Knuth's MMIX linear congruential generator."""
    return (state * 6364136223846793005 + 1442695040888963407) & _MASK


def token_at(state: int, ignore_eos: bool) -> int:
    """The token that `state` stands for; one in 256 is the end of the answer unless `ignore_eos`.

    Reads the high bits alone: the low bits of such a generator have short periods.
    """
    if not ignore_eos and (state >> 40) % _EOS_ONE_IN == 0:
        return EOS
    return VOCABULARY[(state >> 48) % _WORDS]
