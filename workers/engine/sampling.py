"""The tokens that an emulated model generates: a fixed walk from the seed and the prompt, so that answers repeat.

As with a real model, the next token depends on all tokens before it and not on who wrote them. The last word of the
prompt that cannot be part of an answer selects the walk, and the words after it determine how far the walk has gone. So
a prompt that ends in the beginning of an answer is answered with the rest of that answer.
"""

from collections.abc import Iterable

from workers.engine.tokenizer import EOS, VOCABULARY

_MASK = (1 << 64) - 1
_EOS_ONE_IN = 256
_WORDS = len(VOCABULARY)
_SAYABLE = frozenset(VOCABULARY)


def initial_state(seed: int, prompt: Iterable[int], sample: int) -> int:
    """Return the walk's 64-bit state after `prompt`. Hashes integers alone, so it is equal in every process."""
    tokens = tuple(prompt)
    begun = len(tokens)
    while begun and tokens[begun - 1] in _SAYABLE:
        begun -= 1
    state = hash((seed, sample, tokens[:begun])) & _MASK
    return walk(state, True, len(tokens) - begun)[1]


def next_token(state: int, ignore_eos: bool) -> tuple[int, int]:
    """Return the token of `state` and the state after it, by Knuth's MMIX linear congruential generator.

    One token in 256 is the end of the answer, unless `ignore_eos`. Only the high bits are used: the low bits of such a
    generator have short periods.
    """
    ends = not ignore_eos and (state >> 40) % _EOS_ONE_IN == 0
    token = EOS if ends else VOCABULARY[(state >> 48) % _WORDS]
    return token, (state * 6364136223846793005 + 1442695040888963407) & _MASK


def walk(state: int, ignore_eos: bool, steps: int) -> tuple[list[int], int]:
    """Return the next `steps` tokens from `state`, and the state after them."""
    tokens = []
    for _ in range(steps):
        token, state = next_token(state, ignore_eos)
        tokens.append(token)
    return tokens, state


def answer_length(state: int, ignore_eos: bool, limit: int) -> int:
    """Return the tokens from `state` to the end of the answer, the end included, but at most `limit`."""
    if ignore_eos:
        return limit
    for length in range(1, limit):
        token, state = next_token(state, ignore_eos)
        if token == EOS:
            return length
    return limit
