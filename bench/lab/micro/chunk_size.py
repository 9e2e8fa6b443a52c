"""Measure the costs of a chunk size: time to hash and to match a prompt, memory, and tokens lost at the cut.

The tree is filled with the same seeded chat traffic for every size: system prompts that many conversations share, each
followed by a text of its own, and a few long documents. Its hashes are random bytes, which the tree cannot tell from
real ones. A token counts as four bytes. Times are the best of several rounds, since the machine may be busy with other
work.
"""

import argparse
import gc
import hashlib
import hmac
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final, Protocol

from bench.report.columns import aligned
from router.core.cache.prefix_tree import PrefixTree
from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptHasher
from router.core.model.request import WorkerId

SIZES: Final = (32, 64, 128, 256, 512)
BYTES_PER_TOKEN: Final = 4
SHORT: Final = 4 << 10
LONG: Final = 100 << 10
SECRET: Final = b"the bench's secret"
WORKERS: Final = tuple(WorkerId(f"worker-{number}") for number in range(16))
PROBES: Final = 200

SYSTEM_PROMPTS: Final = 50
SYSTEM_BYTES: Final = 3 << 10
OWN_BYTES: Final = 4 << 10
"""Mean length of a conversation's own text; exponentially distributed."""
DOCUMENT_SHARE: Final = 0.005
"""Share of the prompts that have a document of `LONG` bytes."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts as byte lengths: the system prompt with which each begins, and the length of its own text."""

    prompts: Sequence[tuple[int, int]]

    @property
    def tokens(self) -> int:
        """Distinct tokens."""
        return (SYSTEM_PROMPTS * SYSTEM_BYTES + sum(own for _, own in self.prompts)) // BYTES_PER_TOKEN


def chat_traffic(random: Random, size: int) -> Traffic:
    """Draw prompts until they have `size` distinct bytes."""
    prompts: list[tuple[int, int]] = []
    while size > 0:
        is_document = random.random() < DOCUMENT_SHARE
        own = LONG if is_document else int(random.expovariate(1 / OWN_BYTES))
        prompts.append((random.randrange(SYSTEM_PROMPTS), own))
        size -= own
    return Traffic(prompts)


def hashes_of(traffic: Traffic, chunk_bytes: int, random: Random) -> list[bytes]:
    """Generate the chunk hashes of every prompt."""
    systems = [random.randbytes(SYSTEM_BYTES // chunk_bytes * HASH_BYTES) for _ in range(SYSTEM_PROMPTS)]
    return [systems[system] + random.randbytes(own // chunk_bytes * HASH_BYTES) for system, own in traffic.prompts]


def filled_tree(prompts: Sequence[bytes]) -> PrefixTree:
    """Insert each prompt at one of the workers in turn."""
    tree = PrefixTree(limit=sys.maxsize)
    for number, hashes in enumerate(prompts):
        tree.insert(hashes, WORKERS[number % len(WORKERS)], float(number))
    return tree


def measured_tree(prompts: Sequence[bytes]) -> tuple[PrefixTree, int]:
    """Build a tree and return it with the bytes of memory that it uses (not counting what malloc leaves unused)."""
    gc.collect()
    tracemalloc.start()
    try:
        tree = filled_tree(prompts)
        return tree, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def probes(prompts: Sequence[bytes], size: int, random: Random) -> list[bytes]:
    """Draw prompts of `size` bytes of hashes that leave a known path at any place, most of them inside a node."""
    long_enough = [prompt for prompt in prompts if len(prompt) >= size]
    cuts = [random.randrange(size // HASH_BYTES) * HASH_BYTES for _ in range(PROBES)]
    return [random.choice(long_enough)[:cut] + random.randbytes(size - cut) for cut in cuts]


def microseconds(call: Callable[[bytes], object], arguments: Sequence[bytes], rounds: int) -> float:
    """Time a call, averaged over its arguments, in the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for argument in arguments:
            call(argument)
        best = min(best, time.perf_counter() - start)
    return best / len(arguments) * 1e6


def size_row(chunk_bytes: int, options: argparse.Namespace) -> list[str]:
    random = Random(options.seed)
    traffic = chat_traffic(random, options.megabytes << 20)
    prompts = hashes_of(traffic, chunk_bytes, random)
    tree, memory = measured_tree(prompts)
    hasher = PromptHasher(SECRET, chunk_bytes)
    times = []
    for size in (SHORT, LONG):
        known = probes(prompts, size // chunk_bytes * HASH_BYTES, random)
        times.append(microseconds(hasher.prompt, [random.randbytes(size) for _ in range(20)], options.rounds))
        times.append(microseconds(tree.match, known, options.rounds))
    return [
        f"{chunk_bytes}",
        *(f"{figure:.1f}" for figure in times),
        f"{SHORT // chunk_bytes}",
        f"{memory / traffic.tokens * 1000:.0f}",
        f"{memory / tree.chunks:.0f}",
        f"{(chunk_bytes - 1) / 2 / BYTES_PER_TOKEN:.0f}",
    ]


class RunningDigest(Protocol):
    """The part of a hashlib or hmac object that is used here."""

    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


def chunks_of(text: bytes) -> Iterator[bytes]:
    return (text[start : start + CHUNK_BYTES] for start in range(0, len(text) - CHUNK_BYTES + 1, CHUNK_BYTES))


def running(begin: Callable[[], RunningDigest], text: bytes) -> bytes:
    """Read one hash object, fed with the whole text, after each chunk."""
    digest = begin()
    hashes = []
    for chunk in chunks_of(text):
        digest.update(chunk)
        hashes.append(digest.digest()[:HASH_BYTES])
    return b"".join(hashes)


def chained(hash_one: Callable[[bytes], bytes], text: bytes) -> bytes:
    """Hash each chunk together with the full hash of the chunks before it."""
    link = SECRET
    hashes = []
    for chunk in chunks_of(text):
        link = hash_one(link + chunk)
        hashes.append(link[:HASH_BYTES])
    return b"".join(hashes)


CONSTRUCTIONS: Final[Mapping[str, Callable[[bytes], object]]] = {
    "the router's: SHA-256, keyed state": PromptHasher(SECRET).prompt,
    "BLAKE2b, keyed, running digest": partial(running, partial(hashlib.blake2b, key=SECRET, digest_size=HASH_BYTES)),
    "HMAC-SHA-256, running digest": partial(running, partial(hmac.new, SECRET, digestmod="sha256")),
    "BLAKE2b, keyed, one hash per chunk": partial(chained, lambda data: hashlib.blake2b(data, key=SECRET).digest()),
    "SHA-256, one hash per chunk": partial(chained, lambda data: hashlib.sha256(data).digest()),
}


def construction_row(name: str, options: argparse.Namespace) -> list[str]:
    random = Random(options.seed)
    texts = [[random.randbytes(size) for _ in range(20)] for size in (SHORT, LONG)]
    return [name, *(f"{microseconds(CONSTRUCTIONS[name], each, options.rounds):.1f}" for each in texts)]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--megabytes", type=int, default=25, help="megabytes of distinct text in the tree (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="number of rounds; the best counts (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> None:
    header = ["chunk", "hash 4K µs", "match 4K µs", "hash 100K µs", "match 100K µs"]
    header += ["chunks/4K", "B/1000 tok", "B/chunk", "tokens lost"]
    print(*aligned([header, *(size_row(size, options) for size in SIZES)]), "", sep="\n")
    rows = [construction_row(name, options) for name in CONSTRUCTIONS]
    print(*aligned([[f"construction, {CHUNK_BYTES} bytes", "4K µs", "100K µs"], *rows]), sep="\n")
