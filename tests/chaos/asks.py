"""The requests of the clients and the expected answer to each, whatever faults it meets. Pure."""

from dataclasses import dataclass
from random import Random
from typing import Any, Final

import orjson

from workers.engine.sampling import initial_state, walk
from workers.engine.tokenizer import EOS, decode, encode, render_chat

MODEL: Final = "m"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
OUTPUT_TOKENS: Final = (8, 24)
"""Bounds of the output tokens of an answer."""
DOCUMENT: Final = "A long text that many ask about, which is why whoever holds it in its cache should be asked. " * 8


@dataclass(frozen=True, slots=True)
class Ask:
    """One call and its expected answer."""

    client: str
    path: str
    body: bytes
    texts: tuple[str, ...]
    """The expected texts, one for each choice."""
    reasons: tuple[str, ...]
    """The finish reason of each choice."""
    prompt_tokens: int
    output_tokens: int
    """Output tokens of all choices together."""
    streamed: bool
    usage_wanted: bool
    continuable: bool
    """True if another worker can continue a part of the answer."""

    @property
    def chat(self) -> bool:
        """True for a chat, False for a completion."""
        return self.path == CHAT


class Asks:
    """The sequence of requests of one client."""

    def __init__(self, client: str, random: Random, *, shared: bool, times: int = 1) -> None:
        """`shared`: prompts are about a document that other clients also ask about; else no cache holds any part of
        them. `times`: how often a prompt says its question.
        """
        self._client = client
        self._random = random
        self._shared = shared
        self._times = times
        self._number = 0

    def next(self) -> Ask:
        """Return a request with another prompt and another form."""
        self._number += 1
        question = f"{self._client} asks for the {self._number}. time, which nobody has before. "
        question *= self._times
        prompt = DOCUMENT + question if self._shared else question
        fields: dict[str, Any] = {
            "model": MODEL,
            "user": self._client,
            "max_tokens": self._random.randint(*OUTPUT_TOKENS),
        }
        fields["ignore_eos"] = self._random.random() < 0.8
        form = self._random.random()
        if form < 0.2:
            return self._ask(COMPLETIONS, {**fields, "prompt": prompt, "stream": True})
        fields["messages"] = [{"role": "user", "content": prompt}]
        if form < 0.35:
            return self._ask(CHAT, fields)
        if form < 0.4:
            return self._ask(CHAT, {**fields, "stream": True, "n": 2})
        if form < 0.5:
            fields["stop"] = ["what no answer says"]
        if form < 0.75:
            fields["stream_options"] = {"include_usage": True}
        return self._ask(CHAT, {**fields, "stream": True})

    def _ask(self, path: str, fields: dict[str, Any]) -> Ask:
        prompt = encode(render_chat(fields["messages"]) if path == CHAT else fields["prompt"])
        choices = fields.get("n", 1)
        answers = [answer(prompt, fields["max_tokens"], fields["ignore_eos"], sample) for sample in range(choices)]
        streamed = fields.get("stream", False)
        return Ask(
            client=self._client,
            path=path,
            body=orjson.dumps(fields),
            texts=tuple(decode([token for token in tokens if token != EOS]) for tokens in answers),
            reasons=tuple("stop" if tokens[-1] == EOS else "length" for tokens in answers),
            prompt_tokens=len(prompt),
            output_tokens=sum(map(len, answers)),
            streamed=streamed,
            usage_wanted="stream_options" in fields or not streamed,
            continuable=streamed and choices == 1,
        )


def answer(prompt: list[int], limit: int, ignore_eos: bool, sample: int) -> list[int]:
    """Return what an emulated worker of seed 0 answers, including how it finishes."""
    tokens, _ = walk(initial_state(0, prompt, sample), ignore_eos, limit)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
