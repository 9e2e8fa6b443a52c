"""How right the router's belief of two real vLLM caches is: `python -m tests.engine.calibration`.

Two vLLM servers for CPU with 600 blocks of 32 tokens, and clients whose prefixes are three times that: conversations,
shared documents and trees of thoughts. Each request's prediction, made at its dispatch, is set beside the
`cached_tokens` of its answer. The same requests go through the router twice: with the mirror alone and with KV events.
What the map of plain LRU and a map without eviction would have predicted is computed from the journal of the former,
for the same dispatches. Then a worker is killed and started again amid requests, and the time is taken until nothing
is believed of it any more. Needs the engine environment (`make test-engine`); takes about four minutes.
"""

import argparse
import json
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tokenizers import Tokenizer

from router.core.commands import Dispatch
from router.core.model import BlocksLost, Evicted, RequestId, WorkerLeft
from router.journal import Entry, read

from .environment import is_complete
from .fleet import BLOCK_TOKENS, ENGINE_START_SECONDS, Engine, Router, launched_engine, make_model
from .old_maps import predictions
from .programs import ANSWER_TOKENS, Program, Question, programs
from .wire import CHAT, Answer, Json, call, listed, mapped

BLOCKS = 600
CAPACITY = (BLOCKS - 1) * BLOCK_TOKENS
AT_ONCE = 8
"""Requests under way."""
ACTIVE = 40
"""Programs that are asked in turn."""
AFTER_RESTART = 60
"""Requests at a restarted worker, after which enough is known."""
TARGETS = {"mirror": 0.05, "events": 0.01}
KINDS = ("chat", "documents", "thoughts")


class Result(NamedTuple):
    """One request and its answer, in tokens."""

    request: RequestId
    kind: str
    worker: str
    asked_at: float
    prompt: int
    predicted: int
    actual: int

    @property
    def error(self) -> float:
        """As a share of the prompt."""
        return abs(self.predicted - self.actual) / self.prompt


class Run:
    """Programs that go through a router, several at a time, in an order that is drawn."""

    def __init__(self, url: str, every: Iterator[Program], words: Sequence[int]) -> None:
        """`words`: the token ids that answers are made of."""
        self._words = words
        self.results: list[Result] = []
        self.failed = 0
        self._url = url
        self._left = every
        self._active: list[Program] = []
        self._draw = random.Random("turns")
        self._changed = threading.Condition()
        self._stopped = False

    def start(self) -> list[threading.Thread]:
        """Begin; it is over when all of these are."""
        threads = [threading.Thread(target=self._ask_on) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        return threads

    def stop(self) -> None:
        """Ask nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _ask_on(self) -> None:
        while (turn := self._turn()) is not None:
            program, question = turn
            text = self._ask(question)
            with self._changed:
                program.answered(question, text)
                self._changed.notify_all()

    def _turn(self) -> tuple[Program, Question] | None:
        with self._changed:
            while not self._stopped:
                self._active = [program for program in self._active if not program.over]
                while len(self._active) < ACTIVE and (new := next(self._left, None)) is not None:
                    self._active.append(new)
                if not self._active:
                    return None
                for program in self._draw.sample(self._active, len(self._active)):
                    if (question := program.take()) is not None:
                        return program, question
                self._changed.wait(1.0)
            return None

    def _ask(self, question: Question) -> str:
        body: Json = {
            **{"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": ANSWER_TOKENS, "stream": True},
            **{"stream_options": {"include_usage": True}, "messages": question.messages},
            "allowed_token_ids": self._words,
        }
        asked_at = time.monotonic()
        answer = call(self._url, CHAT, body, question.client)
        if answer.status != 200 or b'"error"' in answer.body:
            with self._changed:
                self.failed += 1
            time.sleep(0.2)  # not to run through all programs while nobody serves
            return "none"
        result, text = _read(answer, question.kind, asked_at)
        if result is not None:
            with self._changed:
                self.results.append(result)
        return text


def _read(answer: Answer, kind: str, asked_at: float) -> tuple[Result | None, str]:
    """The result and the text; None for one that another worker went on with, which tells nothing of the first."""
    events = answer.events()
    usage = mapped(events[-1]["usage"])
    details = usage.get("prompt_tokens_details")
    deltas = [mapped(part["delta"]) for event in events for part in listed(event["choices"])]
    text = "".join(str(delta.get("content") or "") for delta in deltas)
    if not details:
        return None, text
    headers = answer.headers
    result = Result(
        RequestId(headers["x-request-id"]),
        kind,
        headers["x-d2lpm-worker"],
        asked_at,
        int(str(usage["prompt_tokens"])),
        int(headers["x-d2lpm-predicted-cached-tokens"]),
        int(str(mapped(details)["cached_tokens"])),
    )
    return result, text


@contextmanager
def engines(model: Path, folder: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two small ones that publish KV events."""

    def small(name: str) -> Engine:
        flags = (f"--num-gpu-blocks-override={BLOCKS}", "--max-num-seqs=16")
        return launched_engine("vllm", name, model, folder / name, flags, {"VLLM_SERVER_DEV_MODE": "1"})

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
    """A router that keeps a journal, before engines whose caches are empty."""
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


def table(columns: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Mean error by kind, and how many requests are off by more than a block."""
    yield f"{'':12}" + "".join(f"{name:>22}" for name in columns)
    for kind in (*KINDS, "all"):
        cells = []
        for results in columns.values():
            chosen = [result for result in results if kind in ("all", result.kind)]
            tokens = fmean(abs(result.predicted - result.actual) for result in chosen)
            cells.append(f"{fmean(result.error for result in chosen):>12.2%} {tokens:>6.1f} tok")
        yield f"{kind:12}" + "".join(f"{cell:>22}" for cell in cells)
    beyond = [[abs(r.predicted - r.actual) > BLOCK_TOKENS for r in results] for results in columns.values()]
    yield f"{'> one block':12}" + "".join(f"{fmean(each):>22.2%}" for each in beyond)


def summary(results: Sequence[Result]) -> str:
    prompts, hits = sum(r.prompt for r in results), sum(r.actual for r in results)
    return f"{len(results)} requests, {prompts} prompt tokens, hit rate {hits / prompts:.2f}"


def with_predictions(results: Sequence[Result], predicted: Mapping[RequestId, int]) -> list[Result]:
    return [result._replace(predicted=predicted[result.request]) for result in results]


def play(url: str, scale: float, words: Sequence[int]) -> list[Result]:
    run = Run(url, programs(scale), words)
    for thread in run.start():
        thread.join()
    assert not run.failed, f"{run.failed} requests failed"
    return run.results


def whole_words(model: Path) -> list[int]:
    """Tokens that are a word and stay one when their text comes back in the next turn.

    A trained model answers in such; the tokens of a random one are not those into which its text is cut.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = {number: tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())}
    return [
        number
        for number, text in texts.items()
        if re.fullmatch(r" [a-z]{3,}", text) and tokenizer.encode(text).ids == [number]
    ]


def restart(name: str, started: Router, journal: Path, victim: Engine, words: Sequence[int]) -> Iterator[str]:
    """Kill a worker amid requests, start it again, and see what was believed of it, and is believed afterwards."""
    run = Run(started.url, programs(4.0), words)
    threads = run.start()
    id_ = str(started.worker(victim)["id"])
    try:
        _wait(lambda: len(run.results) >= 100, 60)
        killed = time.monotonic()
        victim.kill()
        victim.start_and_wait()
        back = time.monotonic()
        _wait(lambda: sum(r.worker == id_ and r.asked_at > back for r in list(run.results)) >= AFTER_RESTART, 120)
    finally:
        run.stop()
        for thread in threads:
            thread.join()
    gone, first = forgotten(journal, id_, killed)
    after = [result for result in run.results if result.worker == id_ and result.asked_at > back]
    error = fmean(result.error for result in after)
    yield (
        f"{name}: restart amid requests: stale entries gone after {gone:.2f} s; {run.failed} requests failed; "
        f"then predicted first {first} tokens; {len(after)} requests there since, mean error {error:.2%}"
    )


def forgotten(journal: Path, worker: str, since: float) -> tuple[float, int]:
    """Seconds after which the router believed nothing of a worker, and what it predicted there first after that."""
    gone: float | None = None
    with journal.open("rb") as lines:
        for item in read(lines):
            if isinstance(item, Entry) and item.at >= since:
                event = item.event
                if gone is None and isinstance(event, WorkerLeft | BlocksLost | Evicted) and event.worker == worker:
                    gone = item.at - since
                for command in item.commands:
                    if isinstance(command, Dispatch) and command.worker == worker and gone is not None:
                        return gone, command.cached_tokens
    raise AssertionError("the router never forgot the worker")


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the requests do not get on"
        time.sleep(0.05)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.calibration", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of programs (default: 1)")
    parser.add_argument("--keep", type=Path, help="a folder for logs, journals and results")
    given = parser.parse_args()
    assert is_complete(), "there is no engine environment; `make test-engine` makes it"
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measure(folder, given.scale)


def measure(folder: Path, scale: float) -> None:
    """Both runs and both restarts."""
    model = make_model()
    words = whole_words(model)
    with engines(model, folder) as pair:
        with router("mirror", pair, folder, "--kv-events=off") as (started, journal):
            mirror = play(started.url, scale, words)
        columns = {
            "no eviction": with_predictions(mirror, predictions(journal, None)),
            "plain LRU": with_predictions(mirror, predictions(journal, CAPACITY)),
            "mirror": mirror,
        }
        with router("events", pair, folder, f"--tokenizer={model}", "--token-budget=1") as (started, journal):
            columns["events"] = play(started.url, scale, words)
        for name, results in columns.items():
            (folder / f"{name}.json").write_text(json.dumps([result._asdict() for result in results]))
        print(f"mirror: {summary(mirror)}")
        print(f"events: {summary(columns['events'])}")
        print("\n".join(table(columns)), flush=True)
        for name, flags in (("mirror", ["--kv-events=off"]), ("events", [f"--tokenizer={model}", "--token-budget=1"])):
            with router(f"restart-{name}", pair, folder, *flags) as (started, journal):
                for line in restart(name, started, journal, pair[0], words):
                    print(line, flush=True)
    for name, target in TARGETS.items():
        error = fmean(result.error for result in columns[name])
        tokens = fmean(abs(result.predicted - result.actual) for result in columns[name])
        kept = error <= target or (name == "mirror" and tokens <= BLOCK_TOKENS)
        print(f"{name}: {error:.2%} of the prompt, target {target:.0%}: {'kept' if kept else 'MISSED'}")


if __name__ == "__main__":
    main()
