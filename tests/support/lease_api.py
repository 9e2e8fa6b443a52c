"""A part of the Kubernetes API on a real socket: Leases of coordination.k8s.io/v1, as the API server serves them."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from aiohttp import web

PATH: Final = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


def refused(code: int, reason: str) -> web.Response:
    """Return a refusal as the API words it."""
    return web.json_response({"kind": "Status", "status": "Failure", "reason": reason, "code": code}, status=code)


class LeaseApi:
    """The API, with Leases that a test reads and changes."""

    def __init__(self) -> None:
        self.url = ""
        self.leases: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str]] = []
        """The method and the authorization of each call; WATCH is the method of a watch."""
        self.down = False
        """Whether calls are answered with 503."""
        self.forbidden = False
        """Whether calls are answered with 403, as without a Role."""
        self.before_write: list[tuple[str, Mapping[str, object]]] = []
        """What another client writes right before the next writes that arrive: a Lease's name, and changes of its spec.
        """
        self._version = 0
        self._changes: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        self._closed = False
        self._cut = 0

    def spec(self, name: str) -> dict[str, Any]:
        """Return the spec of a Lease."""
        found: dict[str, Any] = self.leases[name]["spec"]
        return found

    def change(self, name: str, **spec: object) -> None:
        """Have another client change a Lease."""
        lease = self.leases[name]
        self._keep(name, {**lease, "spec": {**lease["spec"], **spec}})

    def put(self, name: str, lease: dict[str, Any]) -> None:
        """Have another client create or replace a Lease."""
        self._keep(name, {"metadata": {"name": name, "namespace": "default"}, **lease})

    def delete(self, name: str) -> None:
        """Delete a Lease."""
        self._tell("DELETED", self.leases.pop(name))

    def cut_watches(self) -> None:
        """End all watches that are open."""
        self._cut += 1
        self._wake()

    def expire_watches(self) -> None:
        """Have all watches end, because the version that they began with is too old."""
        self._tell("ERROR", {"kind": "Status", "code": 410, "metadata": {"name": ""}})

    def close(self) -> None:
        """End all watches for good."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _keep(self, name: str, lease: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        kind = "MODIFIED" if name in self.leases else "ADDED"
        metadata = {**lease["metadata"], "resourceVersion": str(self._version), "uid": f"uid-of-{name}"}
        self.leases[name] = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease, "metadata": metadata}
        self._tell(kind, self.leases[name])
        return self.leases[name]

    def _tell(self, kind: str, lease: dict[str, Any]) -> None:
        self._changes.append({"type": kind, "object": lease})
        self._wake()

    def _refusal(self, request: web.Request, method: str) -> web.Response | None:
        self.calls.append((method, request.headers.get("authorization", "")))
        if self.down:
            return refused(503, "ServiceUnavailable")
        return refused(403, "Forbidden") if self.forbidden else None

    async def get(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if (no := self._refusal(request, "GET")) is not None:
            return no
        return web.json_response(self.leases[name]) if name in self.leases else refused(404, "NotFound")

    async def create(self, request: web.Request) -> web.StreamResponse:
        lease = await request.json()
        if (no := self._refusal(request, "POST")) is not None:
            return no
        self._cross()
        name = lease["metadata"]["name"]
        if name in self.leases:
            return refused(409, "AlreadyExists")
        return web.json_response(self._keep(name, lease), status=201)

    async def replace(self, request: web.Request) -> web.StreamResponse:
        lease, name = await request.json(), request.match_info["name"]
        if (no := self._refusal(request, "PUT")) is not None:
            return no
        self._cross()
        if name not in self.leases:
            return refused(404, "NotFound")
        if lease["metadata"]["resourceVersion"] != self.leases[name]["metadata"]["resourceVersion"]:
            return refused(409, "Conflict")
        return web.json_response(self._keep(name, lease))

    def _cross(self) -> None:
        if self.before_write:
            name, spec = self.before_write.pop(0)
            if name in self.leases:
                self.change(name, **spec)
            else:
                self.put(name, {"spec": dict(spec)})

    async def watch(self, request: web.Request) -> web.StreamResponse:
        if (no := self._refusal(request, "WATCH")) is not None:
            return no
        assert request.query["watch"] == "true"
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        answer = web.StreamResponse()
        await answer.prepare(request)
        with suppress(ConnectionError):  # the client is gone
            await self._follow(name, answer)
        return answer

    async def _follow(self, name: str, answer: web.StreamResponse) -> None:
        seen, cut = len(self._changes), self._cut
        if name in self.leases:  # without a version, a watch begins with what there is
            await answer.write(json.dumps({"type": "ADDED", "object": self.leases[name]}).encode() + b"\n")
        while not self._closed and cut == self._cut:
            for change in self._changes[seen:]:
                seen += 1
                if change["type"] == "ERROR" or change["object"]["metadata"]["name"] == name:
                    await answer.write(json.dumps(change).encode() + b"\n")
                if change["type"] == "ERROR":
                    return
            changed = self._changed
            if seen == len(self._changes) and not self._closed and cut == self._cut:
                await changed.wait()


@asynccontextmanager
async def lease_api() -> AsyncIterator[LeaseApi]:
    """Serve the API at a free port."""
    api = LeaseApi()
    app = web.Application()
    app.router.add_get(PATH, api.watch)
    app.router.add_post(PATH, api.create)
    app.router.add_get(PATH + "/{name}", api.get)
    app.router.add_put(PATH + "/{name}", api.replace)
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
