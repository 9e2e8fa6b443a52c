"""Compares the emulated SGLang's cache with the prefix tree of the real one under the same operations."""

import json
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from workers.engine.block_log import BlockLog, Removed, Stored
from workers.engine.caches.radix_cache import Node, RadixCache

from .environment import SGLANG

pytestmark = pytest.mark.engine

PAGES = (1, 2, 16)
PROGRAMS = 30
"""Programs for each page size."""
STEPS = 120
CAPACITY = 1_000_000


def program(seed: int, page: int) -> list[list[object]]:
    """Return random insertions, matches, unlocks and evictions, of prompts that share beginnings."""
    draw = random.Random(seed)
    prompts: list[list[int]] = [[]]
    locks = 0
    steps: list[list[object]] = []
    for _ in range(STEPS):
        start = draw.choice(prompts)[: draw.randrange(8) * page] if draw.random() < 0.7 else []
        prompt = start + [draw.randrange(50) for _ in range(draw.randrange(1, 9) * page)]
        match draw.choices(["insert", "match", "unlock", "evict"], [5, 3, 2, 2])[0]:
            case "insert":
                prompts.append(prompt)
                steps.append(["insert", prompt])
            case "match":
                locks += 1
                steps.append(["match", prompt])
            case "unlock" if locks:
                locks -= 1
                steps.append(["unlock"])
            case _:
                steps.append(["evict", draw.randrange(1, 7) * page])
    return steps


class Emulated:
    """The emulated cache with the operations of `tree_core.py`."""

    def __init__(self, page: int) -> None:
        self._log = BlockLog()
        self._cache = RadixCache(CAPACITY, page, self._log)
        self._locks: list[Node] = []
        self._pages: dict[int, Sequence[int]] = {}
        """Tokens of each page by its hash."""

    def insert(self, tokens: list[int]) -> None:
        _, present = self._cache.insert(tokens, len(tokens))
        self._cache.allocate(len(tokens) - present)
        for event in self._log.take():
            assert isinstance(event, Stored)
            for number, name in enumerate(event.hashes):
                self._pages[name] = event.tokens[number * self._cache.page : (number + 1) * self._cache.page]

    def match(self, tokens: list[int]) -> int:
        node, length = self._cache.match(tokens, len(tokens))
        self._cache.lock(node)
        self._locks.append(node)
        return length

    def unlock(self) -> None:
        self._cache.unlock(self._locks.pop(0))

    def evict(self, tokens: int) -> list[list[int]]:
        self._cache.make_room(self._cache.available + tokens)
        evicted = [event for event in self._log.take() if isinstance(event, Removed)]
        return [[token for page in leaf.hashes for token in self._pages[page]] for leaf in evicted]


def test_the_emulated_tree_finds_and_evicts_what_the_real_one_does() -> None:
    """Random insertions, matches with locks, and evictions have the same results in both, for each page size."""
    programs = [(page, program(seed, page)) for page in PAGES for seed in range(PROGRAMS)]
    script = Path(__file__).with_name("tree_core.py")
    done = subprocess.run(
        [SGLANG.python, script], input=json.dumps(programs), capture_output=True, text=True, check=True
    )
    for (page, steps), results in zip(programs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        emulated = Emulated(page)
        for (name, *arguments), result in zip(steps, results, strict=True):
            assert getattr(emulated, str(name))(*arguments) == result
