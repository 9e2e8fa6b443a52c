"""Measures how well the router predicts real caches: `python -m tests.engine.calibration`.

Two vLLM servers, then two SGLang servers, each with a cache of 19,168 tokens, serve clients whose prefixes are three
times as large as both caches: conversations, shared documents and trees of thoughts. The prediction for each request,
made at its dispatch, is compared with the `cached_tokens` of its answer. The same requests go through the router twice:
with the cache mirror alone, and with KV events. The journal of the first play gives what a map with plain LRU and a map
without eviction would have predicted for the same dispatches. Then a worker is killed and restarted during requests,
and the time is measured until the router believes nothing of its old cache. Last, the causes of wrong predictions are
printed, as far as the journals show them. Needs the engine environments (`make test-engine`); takes about four minutes
for each engine, and two more for each further run.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from router.core.model.request import RequestId

from .causes import Cause, causes
from .clients import Result, play, words_alone
from .environment import is_complete
from .fleet import BLOCK_TOKENS, ENGINE_START_SECONDS, ENGINES, Engine, Router, launched_engine, make_model
from .restart import restart
from .simpler_maps import predictions

BLOCKS = 600
CAPACITY = (BLOCKS - 1) * BLOCK_TOKENS
TARGETS = {"mirror": 0.035, "events": 0.01}
KINDS = ("chat", "documents", "thoughts")

Columns = Mapping[str, Sequence[Result]]
"""The results of each way to predict a cache, by its name."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Flags and environment of one kind of engine with a small cache."""

    flags: tuple[str, ...]
    environment: Mapping[str, str]


ENGINE_KINDS: Mapping[str, Kind] = {
    "vllm": Kind((f"--num-gpu-blocks-override={BLOCKS}", "--max-num-seqs=16"), {"VLLM_SERVER_DEV_MODE": "1"}),
    "sglang": Kind((f"--max-total-tokens={CAPACITY}", "--max-running-requests=16"), {}),
}


def ways(model: Path) -> Mapping[str, tuple[str, ...]]:
    """Return the router's flags for each way to learn of the engines' caches."""
    return {"mirror": ("--kv-events=off",), "events": (f"--tokenizer={model}", "--token-budget=1")}


@contextmanager
def engines(dialect: str, model: Path, folder: Path) -> Iterator[tuple[Engine, Engine]]:
    """Start two engines with small caches that publish KV events."""
    kind = ENGINE_KINDS[dialect]

    def small(name: str) -> Engine:
        return launched_engine(dialect, name, model, folder / name, kind.flags, kind.environment)

    pair = small("first"), small("second")
    try:
        for engine in pair:
            engine.start()
        for engine in pair:
            engine.wait_ready(engine.ready_path, ENGINE_START_SECONDS)
        yield pair
    finally:
        for engine in pair:
            engine.stop()


@contextmanager
def router(name: str, pair: Sequence[Engine], folder: Path, *flags: str) -> Iterator[tuple[Router, Path]]:
    """Empty the engines' caches, and start a router before them that keeps a journal."""
    for engine in pair:
        engine.flush()
    journal = folder / f"{name}.journal"
    started = Router(name, pair, (f"--journal={journal}", *flags), folder / name)
    started.start()
    try:
        started.wait_ready("/ready", 20.0)
        yield started, journal
    finally:
        started.stop()


def table(columns: Columns) -> Iterator[str]:
    """Yield the mean error by kind, the requests off by more than a block, and the tokens off in each direction."""
    yield f"{'':12}" + "".join(f"{name:>22}" for name in columns)
    for kind in (*KINDS, "all"):
        cells = []
        for results in columns.values():
            chosen = of_kind(results, kind)
            tokens = fmean(abs(result.predicted - result.actual) for result in chosen)
            cells.append(f"{error(chosen):>12.2%} {tokens:>6.1f} tok")
        yield f"{kind:12}" + "".join(f"{cell:>22}" for cell in cells)
    beyond = [[abs(r.predicted - r.actual) > BLOCK_TOKENS for r in results] for results in columns.values()]
    yield f"{'> one block':12}" + "".join(f"{fmean(each):>22.2%}" for each in beyond)
    for name, sign in (("false hits", 1), ("missed hits", -1)):
        tokens_off = [sum(max(0, sign * (r.predicted - r.actual)) for r in results) for results in columns.values()]
        yield f"{name:12}" + "".join(f"{tokens:>18} tok" for tokens in tokens_off)


def of_kind(results: Sequence[Result], kind: str) -> list[Result]:
    """Return the results of one kind of client, or of "all"."""
    return [result for result in results if kind in ("all", result.kind)]


def error(results: Sequence[Result]) -> float:
    """Return the mean error, as a share of the prompt."""
    return fmean(result.error for result in results)


def summary(results: Sequence[Result]) -> str:
    prompts, hits = sum(r.prompt for r in results), sum(r.actual for r in results)
    return f"{len(results)} requests, {prompts} prompt tokens, hit rate {hits / prompts:.2f}"


def with_predictions(results: Sequence[Result], predicted: Mapping[RequestId, int]) -> list[Result]:
    return [result._replace(predicted=predicted[result.request]) for result in results]


def measure(pair: Sequence[Engine], model: Path, folder: Path, scale: float) -> Columns:
    """Do both plays of one run. Prints the results and keeps them in the folder."""
    bias = words_alone(model)
    with router("mirror", pair, folder, *ways(model)["mirror"]) as (started, journal):
        mirror = play(started.url, scale, bias)
    columns = {
        "no eviction": with_predictions(mirror, predictions(journal, None)),
        "plain LRU": with_predictions(mirror, predictions(journal, CAPACITY)),
        "mirror": mirror,
    }
    with router("events", pair, folder, *ways(model)["events"]) as (started, _):
        columns["events"] = play(started.url, scale, bias)
    for name, results in columns.items():
        (folder / f"{name}.json").write_text(json.dumps([result._asdict() for result in results]))
    print(f"mirror: {summary(mirror)}")
    print(f"events: {summary(columns['events'])}")
    print("\n".join(table(columns)), flush=True)
    return columns


def medians(runs: Sequence[Columns]) -> Iterator[str]:
    """Yield the median over all runs of the mean error, by kind."""
    yield f"{'':12}" + "".join(f"{name:>14}" for name in runs[0])
    for kind in (*KINDS, "all"):
        each = {name: [error(of_kind(columns[name], kind)) for columns in runs] for name in runs[0]}
        yield f"{kind:12}" + "".join(f"{median(errors):>14.2%}" for errors in each.values())


def explained(journals: Mapping[str, Sequence[Path]]) -> Iterator[str]:
    """Yield how many calls of all runs have each cause, with their tokens of false and of missed hits."""
    yield f"{'':66}" + "".join(f"{name + ': calls':>16}{'false':>8}{'missed':>8}" for name in journals)
    found = {name: [each for path in paths for each in causes(path)] for name, paths in journals.items()}
    for cause in Cause:
        cells = []
        for each in found.values():
            wrong = [tokens for reason, tokens in each if reason is cause]
            false, missed = sum(max(0, tokens) for tokens in wrong), sum(max(0, -tokens) for tokens in wrong)
            cells.append(f"{len(wrong):>16}{false:>8}{missed:>8}")
        yield f"{cause:66}" + "".join(cells)


def verdicts(runs: Sequence[Columns]) -> Iterator[str]:
    """Yield the error of each run, and whether their median meets the target."""
    for name, target in TARGETS.items():
        errors = [error(columns[name]) for columns in runs]
        middle = median(errors)
        each = ", ".join(f"{one:.2%}" for one in errors)
        kept = "kept" if middle <= target else "MISSED"
        yield f"{name}: {each}; median {middle:.2%} of the prompt, target {target:.1%}: {kept}"


def calibrate(dialect: str, folder: Path, scale: float, runs: int) -> None:
    """Do all runs with one kind of engine, then a restart of a worker for each way to learn of its cache."""
    model = make_model()
    folder.mkdir(parents=True, exist_ok=True)
    with engines(dialect, model, folder) as pair:
        done = []
        for run in range(1, runs + 1):
            print(f"{dialect}, run {run} of {runs}")
            kept = folder / f"run-{run}"
            kept.mkdir(exist_ok=True)
            done.append(measure(pair, model, kept, scale))
        for name, flags in ways(model).items():
            with router(f"restart-{name}", pair, folder, *flags) as (started, journal):
                for line in restart(name, started, journal, pair[0], words_alone(model)):
                    print(line, flush=True)
    print(f"{dialect}, median of {runs} runs:")
    print("\n".join(medians(done)))
    kept_runs = [folder / f"run-{run}" for run in range(1, runs + 1)]
    print("\n".join(explained({name: [kept / f"{name}.journal" for kept in kept_runs] for name in TARGETS})))
    for line in verdicts(done):
        print(f"{dialect}: {line}", flush=True)


def main() -> None:
    """Measure the engines that the command line names, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.calibration", description=__doc__)
    parser.add_argument("--engine", choices=list(ENGINES), help="only this kind (default: both, one after the other)")
    parser.add_argument("--runs", type=int, default=1, help="how often all is asked of each kind (default: 1)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of programs (default: 1)")
    parser.add_argument("--keep", type=Path, help="a folder for logs, journals and results")
    given = parser.parse_args()
    assert is_complete(), "there is no engine environment; `make test-engine` makes it"
    with tempfile.TemporaryDirectory() as temporary:
        for dialect in [given.engine] if given.engine else ENGINES:
            calibrate(dialect, (given.keep or Path(temporary)) / dialect, given.scale, given.runs)


if __name__ == "__main__":
    main()
