"""Draws random calls of the streamed paths, some of which their client leaves at random moments."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import orjson

from . import prompts
from .wire import CHAT, COMPLETIONS, Json

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
PATHS = COMPLETIONS, CHAT, RESPONSES, MESSAGES
SHARED = 6
"""How many beginnings the prompts share."""
SHARED_WORDS = 600
MOST_WORDS = 200
"""Limit of the words that only one prompt has, of about three tokens each."""
MOST_OUTPUT = 200
SEVERAL = 0.2
"""Share of completions and chats that ask for two to four answers."""
ANEW = 0.1
"""Share of the other calls whose prompt the engine computes again even if it is cached."""
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """One streamed call."""

    path: str
    body: Json
    answers: int
    leaves_after: int | None
    """Events after which the client leaves; None if it stays to the end."""


def draw(name: str, count: int, anew: Mapping[str, Json], *, leaving: float) -> list[Asked]:
    """Return calls that are the same for the same name, and share no prompt with another name's.

    `anew`: by path, the fields that have a prompt computed anew; `leaving`: the share of calls that are left.
    """
    source = random.Random(name)
    return [_draw(name, number, source, anew, leaving) for number in range(count)]


def _draw(name: str, number: int, source: random.Random, anew: Mapping[str, Json], leaving: float) -> Asked:
    path = source.choice(PATHS)
    shared = prompts.text(f"{name} shared {source.randrange(SHARED)}", source.randint(0, SHARED_WORDS))
    text = f"{shared} {prompts.text(f'{name} {number}', source.randint(1, MOST_WORDS))}"
    limit = source.randint(1, MOST_OUTPUT)
    answers = source.randint(2, 4) if source.random() < SEVERAL and path in (COMPLETIONS, CHAT) else 1
    body = _body(path, text, limit)
    if answers > 1:
        body |= {"n": answers, "temperature": 0.7}  # vLLM rejects a call for several equal answers
    elif source.random() < ANEW:
        body |= anew.get(path, {})
    leaves = source.randint(1, limit * answers) if source.random() < leaving else None
    return Asked(path, body, answers, leaves)


def _body(path: str, text: str, limit: int) -> Json:
    turn = [{"role": "user", "content": text}]
    common: Json = {"model": "tiny", "stream": True, "temperature": 0}
    match path:
        case "/v1/completions":
            return {**common, "prompt": text, "max_tokens": limit, "ignore_eos": True}
        case "/v1/chat/completions":
            return {**common, "messages": turn, "max_tokens": limit, "ignore_eos": True}
        case "/v1/responses":
            return {**common, "input": text, "max_output_tokens": limit, "ignore_eos": True}
        case _:
            return {**common, "messages": turn, "max_tokens": limit}


def run(url: str, calls: Sequence[Asked]) -> None:
    """Send all calls, `AT_ONCE` at a time, and disconnect from some as drawn. Raises AssertionError if one is
    refused.
    """
    asyncio.run(_run(url, calls))


async def _run(url: str, calls: Sequence[Asked]) -> None:
    waiting = iter(calls)

    async def send_in_turn(session: aiohttp.ClientSession) -> None:
        for asked in waiting:
            await _ask(session, url, asked)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(send_in_turn(session))


async def _ask(session: aiohttp.ClientSession, url: str, asked: Asked) -> None:
    events = 0
    headers = {"content-type": "application/json", "authorization": "Bearer random"}
    async with session.post(url + asked.path, data=orjson.dumps(asked.body), headers=headers) as answer:
        assert answer.status == 200, (asked.path, asked.answers, await answer.text())
        async for line in answer.content:
            events += line.startswith(b"data: ")
            if events == asked.leaves_after:
                answer.close()
                return
