"""A part of the Kubernetes API on a real socket: EndpointSlices, listed and watched."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


def endpoint_slice(name: str, *addresses: str, port: int = 8000, **more: object) -> dict[str, Any]:
    """Return a slice as the API shows it. The pods of its addresses are named pod-0, pod-1 and so on."""
    return {
        "metadata": {"name": name, "namespace": "default", "labels": {"app": "vllm"}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "targetRef": {"kind": "Pod", "name": f"pod-{number}", "namespace": "default"},
                "nodeName": "node",
            }
            for number, address in enumerate(addresses)
        ],
        **more,
    }


class FakeApi:
    """The API, with slices that a test changes."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[Mapping[str, str]] = []
        """The parameters and the authorization of each call."""
        self.failing = False
        """Whether lists are answered with 500."""
        self.ends_watches = False
        """Whether each watch ends at once."""
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 1
        self._changes: list[dict[str, Any]] = []
        """All events so far; that of version 2 is the first."""
        self._changed = asyncio.Event()
        self._closed = False

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self._changed.set()

    def put(self, changed: dict[str, Any]) -> None:
        """Create or replace a slice."""
        name = changed["metadata"]["name"]
        self._record("MODIFIED" if name in self._slices else "ADDED", changed)
        self._slices[name] = changed

    def delete(self, name: str) -> None:
        """Delete a slice."""
        self._record("DELETED", self._slices.pop(name))

    def forget(self) -> None:
        """Have all watches end, because the version that they began with is too old."""
        self._record("ERROR", {"kind": "Status", "code": 410, "metadata": {}})

    def bookmark(self) -> None:
        """Tell the watches the present version."""
        self._record("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})

    def _record(self, kind: str, changed: dict[str, Any]) -> None:
        self._version += 1
        shown = {**changed, "metadata": {**changed["metadata"], "resourceVersion": str(self._version)}}
        self._changes.append({"type": kind, "object": shown})
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.calls.append({**request.query, "authorization": request.headers.get("authorization", "")})
        if request.query.get("watch") == "true":
            return await self._watch(request)
        if self.failing:
            raise web.HTTPInternalServerError
        items: Sequence[object] = list(self._slices.values())
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        seen = int(request.query["resourceVersion"]) - 1
        while not (self._closed or self.ends_watches):
            for change in self._changes[seen:]:
                await answer.write(json.dumps(change).encode() + b"\n")
                seen += 1
                if change["type"] == "ERROR":
                    return answer
            await self._changed.wait()
        return answer


@asynccontextmanager
async def fake_api() -> AsyncIterator[FakeApi]:
    """Serve the API at a free port."""
    api = FakeApi()
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", api._serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        api.close()
        await runner.cleanup()
