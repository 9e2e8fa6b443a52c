"""Which token an emulated model says next: a fixed walk from the seed and the prompt, so that answers repeat.

As with a real model, what it says next depends on all tokens before and not on who said them: the last word of the
prompt that no answer has says which walk it is, and the words after it how far that has gone. So a prompt that ends
in the beginning of an answer is answered with the rest of it.
"""

from collections.abc import Iterable

from workers.engine.tokenizer import EOS, VOCABULARY

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
    return walk(state, True, len(tokens) - begun)[1]


def say(state: int, ignore_eos: bool) -> tuple[int, int]:
    """The token that `state` stands for, and the state after it, by Knuth's MMIX linear congruential generator.

    One token in 256 is the end of the answer unless `ignore_eos`. Reads the high bits alone: the low bits of such a
    generator have short periods.
    """
    ends = not ignore_eos and (state >> 40) % _EOS_ONE_IN == 0
    token = EOS if ends else VOCABULARY[(state >> 48) % _WORDS]
    return token, (state * 6364136223846793005 + 1442695040888963407) & _MASK


def walk(state: int, ignore_eos: bool, steps: int) -> tuple[list[int], int]:
    """The tokens of so many steps from `state`, and the state after them."""
    tokens = []
    for _ in range(steps):
        token, state = say(state, ignore_eos)
        tokens.append(token)
    return tokens, state


def answer_length(state: int, ignore_eos: bool, limit: int) -> int:
    """Tokens from `state` to the end of the answer, that one included; `limit` if it comes no earlier."""
    if ignore_eos:
        return limit
    for length in range(1, limit):
        token, state = say(state, ignore_eos)
        if token == EOS:
            return length
    return limit
