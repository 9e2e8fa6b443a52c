"""The paths of the live page: its files, for everybody, and what it shows, with the operator's key if there is one."""

from collections.abc import AsyncIterator, Callable
from os import PathLike, stat_result
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, Depends, FastAPI, Query
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from router.control.page.feed import READER_LIMIT, PageFeed
from router.control.page.frame import search
from router.core.model.request import ClientId
from router.errors import BadRequest, CapacityError, Unauthorized
from router.telemetry.history import FairnessHistory, FairnessSample
from router.telemetry.report import ClientReport

FILES: Final = Path(__file__).parent / "static"
EVENT_STREAM: Final = "text/event-stream"
STREAM_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}
EVENTS_PATH: Final = "/ui/events"
"""Path of the stream of frames, which has no end."""
HEADERS: Final = {
    # No script or style but ours, and no connection to another host.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # ask each time whether it is still the same; a router may be upgraded
}


class PageFiles(StaticFiles):
    """The files of the page, with headers that keep foreign code and foreign hosts out of it.

    A file is read whole before its answer begins, as it is small: a reader that leaves then leaves no file open.
    """

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        if isinstance(response, FileResponse):
            described = {**response.headers, "accept-ranges": "none"}
            response = Response(Path(full_path).read_bytes(), status_code, described)
        response.headers.update(HEADERS)
        return response


class Page(NamedTuple):
    """The live page."""

    feed: PageFeed
    history: FairnessHistory
    check: Callable[..., None]
    """A dependency of routes that raises Unauthorized if a call may not read what the page shows."""

    def add_to(self, app: FastAPI) -> None:
        """Serve the page from an application."""
        app.include_router(_data(self))
        app.mount("/ui", PageFiles(directory=FILES, html=True))


def _data(page: Page) -> APIRouter:
    feed, checked = page.feed, [Depends(page.check)]
    routes = APIRouter(tags=["page"])

    @routes.get("/ui", include_in_schema=False)
    async def index() -> Response:
        return RedirectResponse("ui/")  # relative, as a proxy may serve the router below another path

    refused: dict[int | str, dict[str, Any]] = {
        Unauthorized.status: {"description": "The operator's key is missing or wrong."}
    }
    wrong: dict[int | str, dict[str, Any]] = {BadRequest.status: {"description": "The query has an invalid value."}}
    streamed: dict[int | str, dict[str, Any]] = {
        **refused,
        **wrong,
        200: {"description": "A stream of frames.", "content": {EVENT_STREAM: {}}},
        CapacityError.status: {"description": f"The page has {READER_LIMIT} readers already."},
    }

    @routes.get(EVENTS_PATH, dependencies=checked, response_class=StreamingResponse, responses=streamed)
    async def events(
        updates: Annotated[int | None, Query(ge=1, description="End the stream after this many frames.")] = None,
    ) -> Response:
        """What the live page shows, as server-sent events: a frame at once, and then at most one a second.

        A frame has `/fairness` with the clients that are first by share, requests, wait, time unserved or lag; totals
        of all clients; and the latest decisions.
        """
        feed.check_room()
        return StreamingResponse(_events(feed, updates), media_type=EVENT_STREAM, headers=STREAM_HEADERS)

    @routes.get("/ui/history", dependencies=checked, responses=refused)
    async def past() -> list[FairnessSample]:
        """Shares, queues, gaps with their bounds and hit rates, sampled over the last hour, oldest first."""
        return page.history.samples

    @routes.get("/ui/clients", dependencies=checked, responses={**refused, **wrong})
    async def clients(
        search_text: Annotated[str, Query(alias="search", max_length=256, description="Part of a name.")] = "",
    ) -> dict[ClientId, ClientReport]:
        """The first clients by share whose name has this text in it, as in /fairness."""
        return search((await feed.report()).clients, search_text)

    return routes


async def _events(feed: PageFeed, updates: int | None) -> AsyncIterator[bytes]:
    sent = 0
    async for frame in feed.frames():
        yield b"data: %b\n\n" % frame
        sent += 1
        if sent == updates:
            return
