"""Sends all bad inputs to a router and writes the table of its replies in docs/operations.md.

python -m tests.bad_input.all --write
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tests.bad_input.bodies import JSON, MEMBERS
from tests.bad_input.http import BODY_ENDS, HTTP, NAMES, PATHS
from tests.bad_input.inputs import ADMIN_KEY, BadInput, Reply
from tests.support.running import TIMEOUT_S, RunningRouter, chat, running_router
from tests.support.scripted_engine import ScriptedEngine, scripted_engine, usage

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "operations.md"
BEGIN: Final = "<!-- written by tests/bad_input/all.py -->\n"
END: Final = "<!-- to here -->\n"
TYPES: Final = {404: "not_found_error", 403: "permission_error", 401: "authentication_error"}
CHOICE: Final = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
ANSWER: Final = json.dumps({"id": "c", "object": "chat.completion", "choices": [CHOICE], "usage": usage(1, 1)}).encode()

BAD_INPUTS: Final[Mapping[str, tuple[BadInput, ...]]] = {
    "HTTP": HTTP,
    "The length of a body": BODY_ENDS,
    "The body of a chat": JSON,
    "Members of a chat or a completion": MEMBERS,
    "Paths and methods": PATHS,
    "Keys and names": NAMES,
}
"""The bad inputs, grouped by the part of a call that is wrong."""

Replies = Mapping[BadInput, Reply]


@asynccontextmanager
async def router_under_test(seconds: float = 1.0) -> AsyncIterator[tuple[ScriptedEngine, RunningRouter]]:
    """Run a router with one engine and default limits, except `seconds` for the headers and for a body to arrive."""
    async with scripted_engine() as engine:
        settings = {"admin_key": ADMIN_KEY, "header_timeout": seconds, "body_timeout": seconds}
        async with running_router(worker=[{"url": engine.url, "id": "w"}], **settings) as router:
            yield engine, router


@asynccontextmanager
async def answering(engine: ScriptedEngine) -> AsyncIterator[None]:
    """Let the engine answer every call."""
    task = asyncio.create_task(_answer(engine))
    try:
        yield
    finally:
        task.cancel()


async def _answer(engine: ScriptedEngine) -> None:
    while True:
        call = await engine.calls.get()
        await call.respond(200, ANSWER)


async def send(router: RunningRouter, sent: bytes) -> Reply:
    """Send only these bytes on a new connection and return the first reply."""
    reader, writer = await asyncio.open_connection(*router.address)
    try:
        writer.write(sent)
        async with asyncio.timeout(TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            line, *lines = head.decode("latin-1").strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
            return _reply(int(line.split(" ")[1]), headers, await reader.readexactly(int(headers["content-length"])))
    finally:
        writer.transport.abort()


def _reply(status: int, headers: Mapping[str, str], body: bytes) -> Reply:
    if status < 400:
        forwarded = "x-d2lpm-worker" in headers
        message = f"Forwarded to an engine for `{headers['x-d2lpm-client']}`." if forwarded else "Served."
        return Reply(status, None, None, message)
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == TYPES.get(status, "invalid_request_error")
    return Reply(status, error["code"], error["param"], error["message"])


async def check_serves(router: RunningRouter) -> None:
    """Check that an ordinary call is answered."""
    async with router.post(chat()) as post:
        assert (await post.response()).status == 200


async def send_each() -> Replies:
    """Send each bad input, one after the other, with an ordinary call after each."""
    replies = {}
    async with router_under_test() as (engine, router), answering(engine):
        for bad in all_bad_inputs():
            replies[bad] = await send(router, bad.data)
            await check_serves(router)
    return replies


def all_bad_inputs() -> list[BadInput]:
    return [bad for family in BAD_INPUTS.values() for bad in family]


def table(replies: Replies) -> str:
    """Return the text between the two marks in docs/operations.md."""
    pieces = []
    for family, inputs in BAD_INPUTS.items():
        pieces.append(f"\n| {family} | status | `code` | `param` | `message` |\n| --- | --- | --- | --- | --- |\n")
        pieces += [_row(bad.name, replies[bad]) for bad in inputs]
    return "".join([*pieces, "\n"])


def _row(name: str, reply: Reply) -> str:
    status = "the engine's" if reply.message.startswith("Forwarded") else str(reply.status)
    shown = [name, status, _code(reply.code), _code(reply.param), _cell(reply.message)]
    return f"| {' | '.join(shown)} |\n"


def _code(name: str | None) -> str:
    return "" if name is None else f"`{name}`"


def _cell(message: str) -> str:
    """Shorten long runs of one letter, and escape what a table cannot show."""
    short = message.replace("x" * 190, "...")
    return json.dumps(short, ensure_ascii=True)[1:-1].replace("|", "\\|")


def table_in_document(document: str) -> str:
    """Return the table that the document contains."""
    return document.partition(BEGIN)[2].partition(END)[0]


def main(arguments: Iterable[str]) -> int:
    """Write the table, or exit with status 1 if the document's table is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args(list(arguments))
    document = DOCUMENT.read_text("utf-8")
    new = table(asyncio.run(send_each()))
    if options.write:
        DOCUMENT.write_text(document.replace(BEGIN + table_in_document(document), BEGIN + new), "utf-8")
    return int(not options.write and table_in_document(document) != new)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
