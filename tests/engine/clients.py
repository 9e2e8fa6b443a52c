"""Clients that send the questions of programs through a router, and what each answer reveals of the engine's cache."""

import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from router.core.model.request import RequestId

from .programs import ANSWER_TOKENS, Program, Question, programs
from .wire import CHAT, Answer, Json, call, listed, mapped

AT_ONCE = 8
"""Concurrent requests."""
ACTIVE = 40
"""Programs that are asked in turn."""
WORDS = 100
"""Different words in answers: enough to distinguish answers, and few, since each request lists them all."""
CERTAIN = 100
"""A logit bias that no token without one can outweigh; the largest that vLLM accepts."""


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
        """The error as a share of the prompt."""
        return abs(self.predicted - self.actual) / self.prompt


class Clients:
    """Threads that ask the programs' questions in a random order."""

    def __init__(self, url: str, every: Iterator[Program], bias: Mapping[str, int]) -> None:
        """`bias`: for the tokens of answers, so that both engines answer only in these."""
        self.results: list[Result] = []
        self.failed = 0
        self._url = url
        self._left = every
        self._bias = bias
        self._active: list[Program] = []
        self._draw = random.Random("turns")
        self._changed = threading.Condition()
        self._stopped = False

    def start(self) -> list[threading.Thread]:
        """Start the threads and return them; the clients have finished when all of them have."""
        threads = [threading.Thread(target=self._ask_on) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        return threads

    def stop(self) -> None:
        """Send no more questions."""
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
            "logit_bias": self._bias,
        }
        asked_at = time.monotonic()
        answer = call(self._url, CHAT, body, question.client)
        if answer.status != 200 or b'"error"' in answer.body:
            with self._changed:
                self.failed += 1
            time.sleep(0.2)  # so that not all programs are used up while no worker serves
            return "none"
        result, text = _read(answer, question.kind, asked_at)
        if result is not None:
            with self._changed:
                self.results.append(result)
        return text


def _read(answer: Answer, kind: str, asked_at: float) -> tuple[Result | None, str]:
    """Return the result and the text; None for a result that another worker continued, which reveals nothing of the
    first.
    """
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


def play(url: str, scale: float, bias: Mapping[str, int]) -> list[Result]:
    """Ask all questions and return all results. AssertionError if a request fails."""
    clients = Clients(url, programs(scale), bias)
    for thread in clients.start():
        thread.join()
    assert not clients.failed, f"{clients.failed} requests failed"
    return clients.results


def words_alone(model: Path) -> dict[str, int]:
    """Return a logit bias for tokens that are one word each and stay one token when the text is sent back.

    The answers of a trained model have this property. Those of a random model are split differently when they come back
    as a part of the next prompt, so that no cache would hold them.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = {number: tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())}
    words = [
        number
        for number, text in texts.items()
        if re.fullmatch(r" [a-z]{3,}", text) and tokenizer.encode(text).ids == [number]
    ]
    return {str(number): CERTAIN for number in words[:: len(words) // WORDS]}
