"""The recorded load: calls with fixed prompts of token ids and fixed lengths, the same in each run.

The answers of earlier turns are recorded in the prompts too, so that no prompt depends on an engine's answer. The calls
come from conversations, questions about shared documents, and trees of thoughts.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .. import prompts
from ..wire import Json

TOGETHER = 24
"""Programs whose calls are interleaved at a time."""
CANCELLED = 0.08
"""Share of calls that their client leaves."""
LONG_ANSWER = 64


@dataclass(frozen=True, slots=True)
class Call:
    """One completion."""

    number: int
    """The call's position in the load."""
    prompt: tuple[int, ...]
    answer_tokens: int
    cancelled_after: int | None
    """Tokens of the answer after which the client closes the connection."""

    def body(self) -> Json:
        return {
            **{"model": "tiny", "prompt": list(self.prompt), "max_tokens": self.answer_tokens},
            **{"ignore_eos": True, "temperature": 0, "stream": True},
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


Prompt = tuple[int, ...]


def conversation(name: str, turns: int) -> Iterator[Prompt]:
    """Yield the prompt of each turn, which repeats all turns before it with their recorded answers."""
    said = prompts.tokens(f"{name} system", 100)
    for turn in range(turns):
        said += prompts.tokens(f"{name} user {turn}", 62)
        yield tuple(said)
        said += prompts.tokens(f"{name} answer {turn}", 25)


def questions(name: str, documents: int, count: int) -> Iterator[Prompt]:
    """Yield short questions about documents, some of which are asked about more often than others."""
    draw = random.Random(name)
    weights = [1 / (rank + 1) ** 0.6 for rank in range(documents)]
    for number, document in enumerate(draw.choices(range(documents), weights, k=count)):
        length = random.Random(f"length {document}").randrange(300, 800)
        yield (*prompts.tokens(f"document {document}", length), *prompts.tokens(f"{name} {number}", 20))


def thoughts(name: str, branches: int, depth: int) -> Iterator[Prompt]:
    """Yield a task, and recorded thoughts about it that branch, level by level."""
    level = [tuple(prompts.tokens(f"{name} task", 230))]
    for step in range(depth + 1):
        yield from level
        level = [
            (*prompt, *prompts.tokens(f"{name} {step} {number} {branch}", 55))
            for number, prompt in enumerate(level)
            for branch in range(branches)
        ]


def recorded(count: int) -> list[Call]:
    """Return the first `count` calls of the load, which has 640 calls with prefixes of 60,000 tokens."""
    draw = random.Random("recorded load")
    programs = [conversation(f"chat {number}", turns=6) for number in range(36)]
    programs += [questions(f"reader {number}", documents=42, count=6) for number in range(36)]
    programs += [thoughts(f"tree {number}", branches=3, depth=2) for number in range(16)]
    draw.shuffle(programs)
    return [_call(number, prompt, draw) for number, prompt in enumerate(_mixed(programs, draw))][:count]


def _mixed(programs: list[Iterator[Prompt]], draw: random.Random) -> Iterator[Prompt]:
    """Yield the calls of all programs, interleaved at random, with `TOGETHER` programs active at a time."""
    active = programs[:TOGETHER]
    left = iter(programs[TOGETHER:])
    while active:
        program = draw.choice(active)
        prompt = next(program, None)
        if prompt is not None:
            yield prompt
            continue
        active.remove(program)
        active.extend(new for new in [next(left, None)] if new is not None)


def _call(number: int, prompt: Prompt, draw: random.Random) -> Call:
    answer, after = draw.randint(8, 48), draw.randint(1, 16)
    if draw.random() < CANCELLED:
        return Call(number, prompt, LONG_ANSWER, after)
    return Call(number, prompt, answer, None)


def prefix_tokens(calls: list[Call], block: int) -> int:
    """Return the tokens in distinct whole blocks of all prompts: a cache of this size would never evict one."""
    ends = {call.prompt[:end] for call in calls for end in range(block, len(call.prompt) + 1, block)}
    return len(ends) * block
