"""Every bad input gets an error in OpenAI's shape and does not affect other clients."""

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


async def test_each_bad_input_gets_its_error_and_affects_no_other_call() -> None:
    """Each reply has the expected status, code, member and message, as in the document, and an ordinary call after it
    succeeds.
    """
    replies = await send_each()
    assert {bad.name: reply for bad, reply in replies.items()} == {bad.name: bad.expected for bad in all_bad_inputs()}
    assert table_in_document(DOCUMENT.read_text("utf-8")) == table(replies), (
        "write it by python -m tests.bad_input.all --write"
    )


async def test_all_bad_inputs_at_once_affect_no_other_call() -> None:
    """A concurrent stream is complete, and ordinary calls are served."""
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


def test_bad_inputs_are_many_and_distinct() -> None:
    """No two bad inputs have the same name or the same bytes."""
    assert len(all_bad_inputs()) > 150
    for counts in (Counter(bad.name for bad in all_bad_inputs()), Counter(bad.data for bad in all_bad_inputs())):
        assert max(counts.values()) == 1
