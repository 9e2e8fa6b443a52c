"""The questions of three kinds of clients: conversations, shared documents and trees of thoughts, equal in each run.

`take` returns a program's next question, and `answered` reports its answer; several questions may be open at once.
"""

import random
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from . import prompts
from .wire import Json

ANSWER_TOKENS = 24


class Question(NamedTuple):
    """One request of a program."""

    kind: str
    client: str
    messages: list[Json]
    place: int = 0
    """In a tree."""


class Program(Protocol):
    """Questions that depend on earlier answers."""

    def take(self) -> Question | None:
        """Return the next question; None if there is none now, or none any more."""

    def answered(self, question: Question, text: str) -> None:
        """Report the answer of a question that was taken."""

    @property
    def over(self) -> bool:
        """True if no question is left."""


def message(role: str, content: str) -> Json:
    return {"role": role, "content": content}


class Conversation:
    """Each turn repeats all earlier ones."""

    def __init__(self, name: str, client: str, turns: int = 6) -> None:
        self._name = name
        self._client = client
        self._left = turns
        self._waits = False
        self._messages = [message("system", prompts.text(f"{name} system", words=100))]

    def take(self) -> Question | None:
        if self._waits or self.over:
            return None
        self._waits = True
        self._messages.append(message("user", prompts.text(f"{self._name} turn {self._left}", words=40)))
        return Question("chat", self._client, list(self._messages))

    def answered(self, question: Question, text: str) -> None:  # noqa: ARG002 - one at a time
        self._messages.append(message("assistant", text))
        self._left -= 1
        self._waits = False

    @property
    def over(self) -> bool:
        return self._left == 0


class Reader:
    """Questions about documents that other readers also ask about, some more often than others."""

    def __init__(self, name: str, client: str, documents: int, questions: int = 6) -> None:
        draw = random.Random(name)
        weights = [1 / (rank + 1) ** 0.6 for rank in range(documents)]
        self._name = name
        self._client = client
        self._choices = draw.choices(range(documents), weights, k=questions)

    def take(self) -> Question | None:
        if self.over:
            return None
        number = self._choices.pop()
        asked = prompts.text(f"{self._name} question {len(self._choices)}", words=12)
        document = prompts.text(f"document {number}", words=330)
        return Question("documents", self._client, [message("system", document), message("user", asked)])

    def answered(self, question: Question, text: str) -> None:
        pass

    @property
    def over(self) -> bool:
        return not self._choices


class Tree:
    """A task, and thoughts about it that branch: all continuations of a thought are asked for at once."""

    def __init__(self, name: str, client: str, branches: int = 3, depth: int = 2) -> None:
        self._client = client
        self._branches = branches
        self._depth = depth
        self._waiting = 0
        self._draw = random.Random(name)
        task = [message("system", prompts.text(f"{name} task", words=230)), message("user", "Think.")]
        self._open = deque([(task, 0)])

    def take(self) -> Question | None:
        if not self._open:
            return None
        thoughts, place = self._open.popleft()
        self._waiting += 1
        return Question("thoughts", self._client, thoughts, place)

    def answered(self, question: Question, text: str) -> None:
        self._waiting -= 1
        if question.place < self._depth:
            for branch in range(self._branches):
                asked = f"{branch}: {prompts.text(str(self._draw.random()), words=25)}"
                thoughts = [*question.messages, message("assistant", text), message("user", asked)]
                self._open.append((thoughts, question.place + 1))

    @property
    def over(self) -> bool:
        return not self._open and not self._waiting


def programs(scale: float = 1.0) -> Iterator[Program]:
    """A mix of all kinds; at scale 1 about 750 questions, and prefixes of 120,000 tokens."""
    draw = random.Random("programs")
    every: list[Program] = [Conversation(f"chat {n}", f"client {n % 3}") for n in range(round(32 * scale))]
    every += [Reader(f"reader {n}", f"client {n % 4}", round(42 * scale)) for n in range(round(40 * scale))]
    every += [Tree(f"tree {n}", f"client {n % 5}") for n in range(round(25 * scale))]
    draw.shuffle(every)
    yield from every
