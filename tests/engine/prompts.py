"""Draws prompts that are the same in each run and share no prefix with one another."""

import random

VOWELS = "aeiou"
CONSONANTS = "bdfgklmnprst"


def text(name: str, words: int = 80) -> str:
    """Return words drawn for this name, of about three tokens each."""
    draw = random.Random(name)
    return " ".join(
        "".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(draw.randint(1, 3))) for _ in range(words)
    )


def tokens(name: str, count: int = 200) -> list[int]:
    """Return token ids drawn for this name, none of them special."""
    draw = random.Random(name)
    return [draw.randrange(300, 4000) for _ in range(count)]
