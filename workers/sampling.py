"""Which token an emulated model says next: a fixed walk from the seed and the prompt, so that answers repeat.

As with a real model, what it says next depends on all tokens before and not on who said them: the last word of the
prompt that no answer has says which walk it is, and the words after it how far that has gone. So a prompt that ends
in the beginning of an answer is answered with the rest of it.
"""

from collections.abc import Iterable

from workers.tokenizer import EOS, VOCABULARY

_MASK = (1 << 64) - 1
_EOS_ONE_IN = 256
_WORDS = len(VOCABULARY)
_SAYABLE = frozenset(VOCABULARY)


def initial_state(seed: int, prompt: Iterable[int], sample: int) -> int:
    """The walk's 64-bit state after `prompt`: hashes of integers alone, so equal in every process."""
    tokens = tuple(prompt)
    begun = len(tokens)
    while begun and tokens[begun - 1] in _SAYABLE:
        begun -= 1
    state = hash((seed, sample, tokens[:begun])) & _MASK
    for _ in tokens[begun:]:
        state = next_state(state)
    return state


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


def walk(state: int, ignore_eos: bool, steps: int) -> tuple[list[int], int]:
    """The tokens of so many steps from `state`, and the state after them."""
    tokens = []
    for _ in range(steps):
        tokens.append(token_at(state, ignore_eos))
        state = next_state(state)
    return tokens, state


def answer_length(state: int, ignore_eos: bool, limit: int) -> int:
    """Tokens from `state` to the end of the answer, that one included; `limit` if it comes no earlier."""
    if ignore_eos:
        return limit
    for length in range(1, limit):
        if token_at(state, ignore_eos) == EOS:
            return length
        state = next_state(state)
    return limit
