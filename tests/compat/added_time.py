"""Measure with `vllm bench serve` what the router adds to the time per token and to the first token.

It starts a vLLM server on a random model and a router before it, and calls both in turn at each concurrency, round
after round. Prints a table in Markdown: medians over the rounds, and the range of the difference in brackets. Engine,
router and client share the machine, so what the router adds includes the CPU time that it takes from the others.
Usage: python -m tests.compat.added_time [--rounds N] [--stream-interval TOKENS]
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.engine.fleet import ENGINE_START_SECONDS, VLLM_ENVIRONMENT, VLLM_FLAGS, Router, make_model
from tests.engine.wire import WORKER_KEY, get

from .environments import ENGINE, VLLM_TESTS
from .fork_server import ForkedVllm, ForkServer
from .source import source_folder

CALLS: Mapping[int, int] = {1: 6, 8: 32, 32: 96}
"""Calls in a run, by concurrency: some seconds."""
ROUNDS = 5
SIZES = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768}
"""A model whose steps take about as long as on a GPU: with shorter ones, vLLM's engine hardly lets its output go."""
MODEL_FLAGS = ("--load-format=dummy", f"--hf-overrides={json.dumps(SIZES)}".replace("{", "{{").replace("}", "}}"))
INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
WARMUPS = 2
RUN_SECONDS = 120.0
ROUTER_START_SECONDS = 120.0
FIGURES: Mapping[str, str] = {
    "to the first token": "median_ttft_ms",
    "per token": "median_tpot_ms",
    "whole answer": "median_e2el_ms",
}
"""What is measured, in milliseconds, by its name in vLLM's results."""
CPU = "router_cpu_us"
"""The router's CPU time per output token, in microseconds, among the results of a run."""
ROUTES = ("direct", "routed")
Results = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Client:
    """Runs `vllm bench serve`."""

    forks: ForkServer
    model: Path
    folder: Path
    """For results and logs."""
    stream_interval: int
    """Tokens that vLLM puts into an event."""

    def run(self, url: str, concurrency: int, seed: int) -> Results:
        """Return the figures of one run. Raises RuntimeError if a call fails, and TimeoutExpired."""
        begun = cpu_seconds(url)
        options = {
            "backend": "openai-chat",
            "base-url": url,
            "endpoint": "/v1/chat/completions",
            "model": "tiny",
            "tokenizer": self.model,
            "dataset-name": "random",
            "random-input-len": INPUT_TOKENS,
            "random-output-len": OUTPUT_TOKENS,
            "num-prompts": CALLS[concurrency],
            "max-concurrency": concurrency,
            "num-warmups": WARMUPS,
            "percentile-metrics": "ttft,tpot,e2el",
            "seed": seed,  # another one in each run, so that no prompt is cached
            "extra-body": json.dumps({"stream_interval": self.stream_interval}),
            "result-dir": self.folder,
            "result-filename": f"{seed}.json",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        log = self.folder / "bench"
        arguments = ["bench", "serve", *flags, "--ignore-eos", "--save-result", "--disable-tqdm"]
        self.forks.fork("vllm", arguments, {"OPENAI_API_KEY": WORKER_KEY}, log).wait(RUN_SECONDS)
        file = self.folder / f"{seed}.json"
        results = json.loads(file.read_text()) if file.exists() else {}
        if results.get("completed") != CALLS[concurrency]:
            raise RuntimeError(f"not all calls to {url} were answered; the log ends:\n{log.read_text()[-3000:]}")
        tokens = (CALLS[concurrency] + WARMUPS) * OUTPUT_TOKENS
        cpu = (cpu_seconds(url) - begun) / tokens * 1e6
        return {CPU: cpu, **{name: float(results[name]) for name in FIGURES.values()}}


def cpu_seconds(url: str) -> float:
    """Return the CPU time of the router at this address; of an engine 0."""
    page = get(f"{url}/metrics").body.decode()
    found = re.search(r'^d2lpm_process_cpu_seconds_total\{process="router"\} (\S+)$', page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.added_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens that vLLM puts into an event")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(Path(folder), given.rounds, given.stream_interval):
            print(line, flush=True)


def measure(folder: Path, rounds: int, stream_interval: int) -> Iterator[str]:
    """Yield the lines of the table."""
    model = make_model(ENGINE / "python")
    arguments = ["serve", str(model), *VLLM_FLAGS, f"--max-num-seqs={max(CALLS)}", *MODEL_FLAGS]
    with ForkServer(VLLM_TESTS, source_folder(VLLM_TESTS), VLLM_ENVIRONMENT, folder / "fork server") as forks:
        engine = ForkedVllm("vllm", arguments, {}, folder / "vllm", forks)
        try:
            engine.start()
            engine.wait_ready("/health", ENGINE_START_SECONDS)
            router = Router("router", [engine], (), folder / "router")
            try:
                router.start()
                router.wait_ready("/ready", ROUTER_START_SECONDS)
                urls = dict(zip(ROUTES, (engine.url, router.url), strict=True))
                yield from table(Client(forks, model, folder, stream_interval), urls, rounds)
            finally:
                router.stop()
        finally:
            engine.kill()


def table(client: Client, urls: Mapping[str, str], rounds: int) -> Iterator[str]:
    """Call both addresses in turn, the first one of a round second in the next, and yield a row per concurrency."""
    client.run(urls["routed"], 1, 0)  # the first calls compile
    runs: dict[int, list[Mapping[str, Results]]] = {concurrency: [] for concurrency in CALLS}
    seed = 0
    for number in range(rounds):
        for concurrency, done in runs.items():
            results = {}
            for route in ROUTES if number % 2 == 0 else ROUTES[::-1]:
                seed += 1
                results[route] = client.run(urls[route], concurrency, seed)
            done.append(results)
    heads = [f"{what}, ms: {part}" for what in FIGURES for part in ("direct", "routed", "added")]
    yield f"| calls at once | {' | '.join(heads)} | router's CPU per token, µs |"
    yield f"| ---: |{' ---: |' * (len(heads) + 1)}"
    for concurrency, done in runs.items():
        row = [cell for name in FIGURES.values() for cell in cells(name, done)]
        cpu = median([run["routed"][CPU] for run in done])
        yield f"| {concurrency} | {' | '.join(row)} | {cpu:.0f} |"


def cells(name: str, runs: list[Mapping[str, Results]]) -> list[str]:
    """Return the medians of one figure for both routes and of their difference in a round, with its range."""
    direct, routed = ([run[route][name] for run in runs] for route in ROUTES)
    added = [through - without for without, through in zip(direct, routed, strict=True)]
    return [
        f"{median(direct):.2f}",
        f"{median(routed):.2f}",
        f"{median(added):.2f} ({min(added):.2f} to {max(added):.2f})",
    ]


if __name__ == "__main__":
    main()
