"""Measure the cost of the prefix map: memory per chunk believed to be cached at a worker, and the time of a match.

Prompts of 8 KB begin with one of the shared prefixes (half of the prompt). Each is sent to one worker and answered
there, until the given number of chunks is believed to be cached. Then new prompts of 8 KB are matched against the full
tree.
"""

import argparse
import gc
import resource
import sys
from random import Random
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Final

from router.core.cache.cache_mirror import CacheMirror
from router.core.cache.engine_rules import TRACK_ALL
from router.core.cache.prefix_tree import PrefixTree
from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey
from router.core.model.request import ClientId, Request, RequestId, Worker, WorkerId
from router.core.predict.token_estimates import Estimates

MODEL: Final = "m"
PROMPT_CHUNKS: Final = 8192 // CHUNK_BYTES
SHARED_CHUNKS: Final = PROMPT_CHUNKS // 2
PREFIXES: Final = 10_000
MATCHES: Final = 2000


class Believed:
    """A cache mirror of several workers, filled with prompts."""

    def __init__(self, chunks: int, workers: int, engine: str) -> None:
        self._random = Random(1)
        self._prefixes = [self._random.randbytes(SHARED_CHUNKS * HASH_BYTES) for _ in range(PREFIXES)]
        self.tree = PrefixTree(chunks)
        self._mirror = CacheMirror(self.tree, Estimates(), 10**9, TRACK_ALL)
        self._workers = [WorkerId(f"w{number}") for number in range(workers)]
        for worker in self._workers:
            self._mirror.update_worker(Worker(worker, frozenset([MODEL]), engine=engine))
        self._sent = 0
        while self.tree.chunks < chunks - PROMPT_CHUNKS:
            self._serve()

    def _serve(self) -> None:
        self._sent += 1
        now, worker = float(self._sent), self._workers[self._sent % len(self._workers)]
        request = Request(RequestId(f"r{self._sent}"), ClientId("c"), MODEL, (self.prompt(),))
        run = self._mirror.dispatch(request, worker, now, 0, 2048, lambda sent: sent)
        self._mirror.end(run, None, (), now, computed=True)

    def prompt(self) -> PromptKey:
        """Return a new prompt that begins like others."""
        own = self._random.randbytes((PROMPT_CHUNKS - SHARED_CHUNKS) * HASH_BYTES)
        return PromptKey(self._random.choice(self._prefixes) + own, PROMPT_CHUNKS * CHUNK_BYTES)

    def match_micros(self) -> list[float]:
        """Return the microseconds of each of some matches."""
        spent = []
        for prompt in [self.prompt() for _ in range(MATCHES)]:
            began = perf_counter_ns()
            self.tree.match(prompt.hashes)
            spent.append((perf_counter_ns() - began) / 1000)
        return spent


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument(
        "--chunks", type=int, default=10_000_000, help="distinct chunks over all workers (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=16, help="number of workers (default: %(default)s)")
    parser.add_argument(
        "--engine", default="vllm", help="vllm, or sglang, which evicts whole nodes (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> None:
    """Print the results."""
    before = _megabytes()
    believed = Believed(options.chunks, options.workers, options.engine)
    gc.collect()
    grown = _megabytes() - before
    micros = believed.match_micros()
    believed.tree.check_integrity()
    print(f"{believed.tree.chunks:,} chunks at {options.workers} workers like {options.engine}: {grown:,.0f} MB")
    print(f"{grown * 1e6 / believed.tree.chunks:.1f} bytes a chunk of {CHUNK_BYTES} bytes of text")
    print(f"match of an 8 KB prompt: median {median(micros):.1f} us, p99 {quantiles(micros, n=100)[-1]:.1f} us")


def _megabytes() -> float:
    """Return the peak memory of this process."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6
