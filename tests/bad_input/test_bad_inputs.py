"""Whatever a client sends, it is told what is wrong in OpenAI's shape, and nobody else notices."""

import asyncio
from collections import Counter

from tests.bad_input.all import (
    DOCUMENT,
    all_bad_inputs,
    answering,
    check_serves,
    router_under_test,
    send,
    send_each,
    table,
    table_in_document,
)
from tests.support.running import chat
from tests.support.scripted_engine import DONE, chunk, usage_chunk


async def test_each_is_told_what_is_wrong_and_harms_nobody() -> None:
    """Status, code, member and message are as written down, in the document too; an ordinary call follows each."""
    seen = await send_each()
    assert {bad.name: told for bad, told in seen.items()} == {bad.name: bad.expected for bad in all_bad_inputs()}
    assert table_in_document(DOCUMENT.read_text("utf-8")) == table(seen), (
        "write it by python -m tests.bad_input.all --write"
    )


async def test_all_at_once_harm_nobody() -> None:
    """Amid them a stream comes whole, and ordinary calls are served."""
    async with router_under_test(seconds=5.0) as (engine, router), router.post(chat(stream=True)) as post:
        call = await engine.call()
        await call.begin()
        async with answering(engine):
            sending = [asyncio.ensure_future(send(router, bad.data)) for bad in all_bad_inputs()]
            for index in range(20):
                await call.write(chunk(f"{index}"))
                await check_serves(router)
            assert await asyncio.gather(*sending) == [bad.expected for bad in all_bad_inputs()]
        await call.write(chunk("", "stop") + usage_chunk(9, 20) + DONE)
        await call.end()
        assert await post.read() == b"".join([*map(chunk, map(str, range(20))), chunk("", "stop"), DONE])


def test_there_are_many_and_no_two_are_the_same() -> None:
    """Neither by name nor by what is sent."""
    assert len(all_bad_inputs()) > 150
    for counts in (Counter(bad.name for bad in all_bad_inputs()), Counter(bad.data for bad in all_bad_inputs())):
        assert max(counts.values()) == 1
