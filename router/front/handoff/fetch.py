"""Watches that a decode worker can fetch a kept prompt before the prefill worker lets go of it.

A decode worker that stands still, or cannot be reached for a while, reads its calls once it goes on. By then a prompt's
lease may be over, and vLLM answers with status 200 and wrong text. A worker that has read a call in time renews the
lease itself, for as long as the call waits there.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.core.model.request import WorkerId
from router.front.handoff.releases import HeldPrompt, PromptReleases


class FetchTooLate(Exception):
    """A decode worker may have read its call when the prompt was gone: its answer cannot be trusted."""


@asynccontextmanager
async def fetching(held: HeldPrompt, worker: WorkerId, releases: PromptReleases, now: float) -> AsyncIterator[None]:
    """Wait in this context for an answer to begin, which shows that the worker has read the call.

    If the answer has not begun when the prompt is too old to be sent, the worker is asked for a sign of life: one that
    gives it has read what it was sent before. Raises FetchTooLate, and cancels what runs in the context, if it gives
    none.
    """
    loop = asyncio.get_running_loop()
    asking: list[asyncio.Task[None]] = []
    limit = asyncio.timeout(None)

    async def ask() -> None:
        if not await releases.is_alive(worker):
            limit.reschedule(loop.time())

    left = max(0.0, held.since + releases.seconds - now)
    timer = loop.call_later(left, lambda: asking.append(loop.create_task(ask())))
    try:
        async with limit:
            try:
                yield
            finally:
                timer.cancel()
                for task in asking:
                    task.cancel()
                    await asyncio.wait([task])
    except TimeoutError as error:
        if limit.expired():
            raise FetchTooLate from error
        raise
