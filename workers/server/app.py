"""I/O: the emulated engine as an ASGI application that speaks its dialect.

A generation call is owned by the task that answers it: it submits, reads its mailbox, and on any way out aborts in the
engine whatever has not finished. A second task per call watches for the client's disconnect.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, NamedTuple

from workers.api.call import ApiError, Body, Call, parse_call
from workers.api.choice import Choice
from workers.api.dialect import DONE, Answer, Wire
from workers.api.forms import Form
from workers.api.http import (
    HttpRequest,
    Receive,
    Response,
    Routes,
    Scope,
    Send,
    json_response,
    read_request,
    send_response,
)
from workers.api.messages import CHECKED, MessagesForm
from workers.api.pooling import POOLED, Pooled
from workers.api.responses import ResponsesForm
from workers.dialects.ranks import own_choice, pinned_rank
from workers.dialects.sglang import SglangWire
from workers.dialects.sglang_status import SglangStatus
from workers.dialects.vllm import VllmWire
from workers.dialects.vllm_status import VllmStatus
from workers.engine.engine import Engine, create_engine
from workers.engine.model import NO_TOKEN, FinishReason, Output, QueueFull
from workers.engine.sglang_engine import SglangEngine
from workers.engine.transfer.leases import Leases
from workers.engine.vllm_engine import VllmEngine
from workers.server.faults import COMMANDS, Fault, Faults, refusal
from workers.server.loop import CallEnded, EngineLoop, Mailbox
from workers.server.transfer.exchange import PATH
from workers.server.transfer.legs import NO_LEG, Connector, EngineDied, Leg
from workers.server.transfer.nixl import NixlConnector
from workers.server.transfer.setup import bootstrap_connector, vllm_connector
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from workers.server.kv_events import KvPublisher, RankPublishers

log = logging.getLogger(__name__)

STREAM_HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
QUEUE: Final = "/emulated/queue"
"""Not a path of any real engine: measurements of the engine's own queue, if the settings ask for them."""
GROUP: Final = "/emulated/group"
"""The same, of the loads of several ranks: sums over all steps so far."""
GENERATION: Final = {"/v1/chat/completions": True, "/v1/completions": False}  # path: True if it is a chat


Answering = tuple[list[int], int, int]
"""The prompt, the most tokens and the number of one answer."""


class Generation(NamedTuple):
    """A call that an engine is to answer, and who waits for it."""

    form: "Wire | Form"
    answer: Answer
    mailbox: Mailbox
    choices: list[Choice]
    leg: Leg
    fault: Fault | None
    send: Send


class WorkerApp:
    """One worker. It answers calls only while `loop.run()` is running."""

    def __init__(self, settings: WorkerSettings, side_port: int | None = None) -> None:
        """`side_port`: the port that other engines know, None if the engine is not disaggregated."""
        engines = [create_engine(settings.engine_config(), settings.machine()) for _ in range(settings.ranks)]
        engine = engines[0]
        max_model_len = min(settings.max_model_len, engine.max_request_tokens)
        self._settings = settings
        self._side_port = side_port
        self._connector: Connector | None = None
        self._faults = Faults()
        self._dead = False
        self.die: Callable[[], None] = lambda: None
        """Ends the worker, for the faults that ask for it."""
        self._calls: dict[str, Mailbox] = {}
        self._own_choice = own_choice(settings.dialect, engines)
        self._pooled = POOLED[settings.dialect]
        self._forms: Mapping[str, Form] = {
            "/v1/messages": MessagesForm(settings.dialect, engine.config.block_size),
            "/v1/responses": ResponsesForm(settings.dialect),
        }
        self._wire: Wire
        self._routes: Routes
        self.publisher = _publisher(settings, engines)
        steps = [] if self.publisher is None else [self.publisher.after_step]
        if isinstance(engine, SglangEngine):
            ranks = [each for each in engines if isinstance(each, SglangEngine)]
            descriptor = None if self.publisher is None else self.publisher.descriptor()
            status = SglangStatus(settings, ranks, max_model_len, descriptor, side_port=side_port)
            self.loop = EngineLoop(engines, settings.speed, (*steps, status.after_step), measure=settings.measure)
            if side_port is not None:
                self._connector = bootstrap_connector(ranks, self.loop, settings)
            self._wire = SglangWire(settings.model, max_model_len)
            self._routes = {**status.routes(), ("POST", "/abort_request"): self._abort_request}
        else:
            self.loop = EngineLoop(engines, settings.speed, steps, measure=settings.measure)
            self._wire = VllmWire(
                settings.model, max_model_len, None if settings.hide_cached else engine.config.block_size
            )
            sources = {} if self.publisher is None else self.publisher.sources()
            leases: Sequence[Leases] = ()
            if side_port is not None:
                each = [engine for engine in engines if isinstance(engine, VllmEngine)]
                connector = vllm_connector(each, self.loop, settings, side_port)
                self._connector = connector
                leases = connector.leases if isinstance(connector, NixlConnector) else ()
            self._routes = VllmStatus(settings, engines, max_model_len, sources, leases, side_port).routes()
        self._routes = {**self._routes, **self._emulated(several=len(engines) > 1)}

    def _emulated(self, *, several: bool) -> Routes:
        """Return the paths that no real engine has."""
        faults: Routes = {("GET", COMMANDS): self._faults.show, ("POST", COMMANDS): self._faults.command}
        if not self._settings.measure:
            return faults
        if several:
            return {**faults, ("GET", GROUP): self._group}
        return {**faults, ("GET", QUEUE): self._queue, ("POST", QUEUE): self._measure}

    async def close(self) -> None:
        """Close connections to other engines."""
        if self._connector is not None:
            await self._connector.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request: the ASGI entry point."""
        if self._dead:
            await asyncio.Future()  # the connection is cut
        try:
            request = await read_request(scope, receive)
            if self._side_port is not None and scope["server"][1] == self._side_port:
                await send_response(send, await self._answer_engine(request))
            else:
                await self._respond(request, receive, send)
        except (ConnectionResetError, CallEnded):
            if self._dead:
                await asyncio.Future()
            return
        except ApiError as error:
            form = self._forms.get(scope["path"].removesuffix("/count_tokens"), self._wire)
            await send_response(send, Response(form.error(error), error.status))
        except Exception:
            log.exception("%s failed", scope["path"])
            raise

    async def _respond(self, request: HttpRequest, receive: Receive, send: Send) -> None:
        if not self._authorized(request):
            await send_response(send, json_response({"error": "Unauthorized"}, 401))
        elif request.method == "POST" and request.path in GENERATION:
            chat = GENERATION[request.path]
            await self._generate(request, lambda body: parse_call(body, chat), self._wire, receive, send)
        elif request.method == "POST" and (form := self._forms.get(request.path)) is not None:
            await self._generate(request, form.parse, form, receive, send)
        elif request.method == "POST" and (pooled := self._pooled.get(request.path)) is not None:
            await self._pool(request, pooled, receive, send)
        elif handler := self._routes.get((request.method, request.path)):
            await send_response(send, handler(request))
        else:
            await send_response(send, self._not_served(request.path))

    def _pinned(self, request: HttpRequest, body: Body) -> int | None:
        """Return the rank that a call is pinned to. Raises ApiError 400 if there is no such rank."""
        return pinned_rank(self._settings.dialect, request.path, request.headers, body, self._settings.ranks)

    def _authorized(self, request: HttpRequest) -> bool:
        """Check the key: on vLLM only for the paths of the APIs, on SGLang for all but health and metrics."""
        if self._settings.api_key is None or self._open_to_all(request.path):
            return True
        return request.headers.get("authorization") == f"Bearer {self._settings.api_key}"

    def _open_to_all(self, path: str) -> bool:
        if self._settings.dialect == "vllm":
            return not path.startswith(("/v1", "/v2", "/inference", "/cohere"))
        return path.startswith(("/health", "/ready", "/metrics"))

    def _not_served(self, path: str) -> Response:
        """Return what the web framework of both engines answers for a path or a method that is not served."""
        posted = {*GENERATION, *self._forms, *self._pooled}
        if path in posted or any(served == path for _, served in self._routes):
            return json_response({"detail": "Method Not Allowed"}, 405)
        return json_response({"detail": "Not Found"}, 404)

    async def _answer_engine(self, request: HttpRequest) -> Response:
        """Answer another engine, or a router that asks for one, at the side port."""
        assert self._connector is not None
        if (request.method, request.path) == ("POST", PATH):
            return json_response(await self._connector.answer(request.json()))
        handler = self._connector.routes().get((request.method, request.path))
        return json_response({"detail": "Not Found"}, 404) if handler is None else handler(request)

    async def _generate(
        self, request: HttpRequest, parse: Callable[[Body], Call], form: "Wire | Form", receive: Receive, send: Send
    ) -> None:
        body = request.json()
        leg = self._leg(request, body)
        fault = self._faults.take(leg)
        try:
            if (refused := refusal(fault)) is not None:
                raise refused
            self._wire.check(body, request.path)
            call, rank = parse(body), self._pinned(request, body)
            header = "x-request-id" if self._settings.dialect == "vllm" else "x-override-rid"
            answer = self._wire.answer(call, request.headers.get(header))
            prompts = self._prompts(call, leg)
        except ApiError as error:
            if error.kind != CHECKED:
                leg.refuse()
            raise
        choices = [Choice(index, prompt) for index, (prompt, _, _) in enumerate(prompts)]
        for choice in choices:
            choice.pulled = leg.pulls
        generation = Generation(form, answer, Mailbox(), choices, leg, fault, send)
        async with self._answering(answer.id, generation.mailbox, receive, streams=call.stream):
            if await self._admit(generation, prompts, rank):
                await self._answer(generation)

    def _leg(self, request: HttpRequest, body: Body) -> Leg:
        """Return what a call does besides generating. Raises ApiError, and CallEnded if it takes down the server."""
        if self._connector is None:
            return NO_LEG
        try:
            return self._connector.leg(body, request.headers, request.path)
        except EngineDied:
            self._die()
            raise CallEnded from None

    async def _admit(self, generation: "Generation", prompts: Sequence[Answering], rank: int | None) -> bool:
        """Give a call to the engine, unless it is over before. Returns False if its refusal has been answered."""
        call, leg, mailbox = generation.answer.call, generation.leg, generation.mailbox
        self._die_if(generation.fault == "die_before")
        if generation.fault == "empty_length":
            leg.refuse()
            _end_without_tokens(generation, "length")
            return True
        try:
            await leg.begin(mailbox, generation.choices)
            if mailbox.aborted:
                _end_without_tokens(generation, "abort")
            elif not mailbox.interrupted.is_set():
                self._submit(mailbox, prompts, call.ignore_eos, rank, leg)
                leg.submit(mailbox, generation.choices)
        except QueueFull as error:
            leg.refuse()
            await self._refuse(generation, str(error))
            return False
        except ApiError as error:
            if not call.stream:
                raise
            await self._fail_stream(generation, error, started=False)
            return False
        self._die_if(generation.fault == "die_during")
        return True

    async def _answer(self, generation: "Generation") -> None:
        """Answer a call that the engine has, whole or as a stream."""
        mailbox, choices, leg = generation.mailbox, generation.choices, generation.leg
        try:
            if generation.answer.call.stream:
                await self._stream(generation)
            else:
                await _finish(mailbox, choices)
                await self._end(generation)
                await send_response(generation.send, Response(generation.form.full(generation.answer, choices)))
        finally:
            leg.close(mailbox)
        self._die_if(generation.fault == "die_after")

    async def _end(self, generation: "Generation") -> None:
        """Finish the hand-off of a call whose tokens all exist, unless the engine never had it."""
        if not generation.mailbox.ids:
            return
        if generation.fault == "expire":
            generation.leg.spoil(generation.mailbox)
        await generation.leg.end(generation.mailbox, generation.choices)
        if generation.fault in ("no_params", "odd_params"):
            for choice in generation.choices:
                choice.transfer = None if generation.fault == "no_params" else "no object"

    def _die_if(self, fault: bool) -> None:
        """End the worker, whose calls get no answer from now on. Raises CallEnded then."""
        if fault:
            self._die()
            raise CallEnded

    def _die(self) -> None:
        self._dead = True
        self.die()

    async def _pool(self, request: HttpRequest, pooled: Pooled, receive: Receive, send: Send) -> None:
        """Compute the prompts up to their first token, which is not sent."""
        body = request.json()
        prompts = pooled.prompts(body)
        whole = {"model": body.get("model"), "prompt": prompts, "max_tokens": 1}
        call = parse_call(whole, False)
        answer = self._wire.answer(call, None)
        answers = self._prompts(call, NO_LEG)
        mailbox, choices = Mailbox(), [Choice(index, prompt) for index, (prompt, _, _) in enumerate(answers)]
        try:
            self._submit(mailbox, answers, call.ignore_eos, None, NO_LEG)
        except QueueFull as error:
            raise ApiError(503, str(error), "Service Unavailable") from error
        async with self._answering(answer.id, mailbox, receive, streams=False):
            await _finish(mailbox, choices)
            await send_response(send, Response(pooled.answer(body, answer.model, choices)))

    @asynccontextmanager
    async def _answering(self, name: str, mailbox: Mailbox, receive: Receive, *, streams: bool) -> AsyncIterator[None]:
        """Register the call for aborts and watch for its client's disconnect; at the end, abort what is unfinished."""
        self._calls[name] = mailbox
        seconds = self.loop.scaled(self._wire.disconnect_poll)
        watch = asyncio.create_task(_watch(receive, mailbox, seconds, streams))
        try:
            yield
        finally:
            watch.cancel()
            self.loop.close(mailbox)
            if self._calls.get(name) is mailbox:
                del self._calls[name]

    def _prompts(self, call: Call, leg: Leg) -> list[Answering]:
        """Return the prompt, the most tokens and the number of each answer to a call. Raises ApiError."""
        limits = [self._wire.max_tokens(call, prompt) for prompt in call.prompts]
        return [
            (prompt, 1 if leg.prefill_only else limit, sample)
            for prompt, limit in zip(call.prompts, limits, strict=True)
            for sample in range(call.n)
        ]

    def _submit(
        self,
        mailbox: Mailbox,
        answers: Sequence[Answering],
        ignore_eos: bool,
        rank: int | None,
        leg: Leg,
    ) -> None:
        """Submit a call to a rank, or each of its answers to the rank of the engine's own choice."""
        if rank is None:
            rank = leg.rank
        chosen = self._own_choice if rank is None else lambda: rank
        self.loop.open(mailbox, answers, ignore_eos, chosen, hands_off=leg.hands_off, pulls=leg.pulls)

    async def _refuse(self, generation: "Generation", message: str) -> None:
        """Report that the queue is full: by status, or inside a stream of status 200."""
        kind = "Service Unavailable" if self._settings.dialect == "vllm" else "503"
        error = ApiError(503, message, kind)
        if not (generation.answer.call.stream and self._wire.queue_full_in_band):
            raise error
        await self._fail_stream(generation, error, started=False)

    async def _stream(self, generation: "Generation") -> None:
        send, choices, writer = generation.send, generation.choices, generation.form.writer(generation.answer)
        started = self._wire.headers_at_once
        if started:
            await _start_stream(send)
        unfinished = len(choices)
        while unfinished:
            try:
                touched = await _take(generation.mailbox, choices)
                unfinished -= sum(choice.finish is not None for choice in touched)
                if not unfinished:
                    await self._end(generation)
            except ApiError as error:
                await self._fail_stream(generation, error, started=started)
                return
            interval = generation.answer.call.stream_interval
            ready = [choice for choice in touched if choice.should_send(interval)]
            events = b"".join([writer.update(choice) for choice in ready])
            for choice in ready:
                choice.mark_sent()
            if not unfinished:
                events += writer.end(choices)
            if events and not started:
                started = True
                await _start_stream(send)
            if events:
                await _send_body(send, events, more=unfinished > 0)
                self._die_if(generation.fault == "die_in_stream")

    async def _fail_stream(self, generation: "Generation", error: ApiError, *, started: bool) -> None:
        """Report an error within a stream of status 200, and end it."""
        if not started:
            await _start_stream(generation.send)
        events = generation.form.stream_error(error) + (DONE if generation.form is self._wire else b"")
        await _send_body(generation.send, events, more=False)

    def _queue(self, _request: HttpRequest) -> Response:
        queue = self.loop.queue
        return json_response({} if queue is None else queue._asdict())

    def _group(self, _request: HttpRequest) -> Response:
        totals = self.loop.totals
        return json_response({} if totals is None else asdict(totals))

    def _measure(self, _request: HttpRequest) -> Response:
        self.loop.measure()
        return Response()

    def _abort_request(self, request: HttpRequest) -> Response:
        body = request.json()
        for rid in list(self._calls) if body.get("abort_all") else [str(body.get("rid"))]:
            if rid in self._calls:
                self.loop.abort(self._calls[rid])
        return Response()


def _publisher(settings: WorkerSettings, engines: Sequence[Engine]) -> "KvPublisher | RankPublishers | None":
    if settings.kv_events is None:
        return None
    from workers.server.kv_events import KvPublisher, RankPublishers  # noqa: PLC0415 - they need an optional extra

    if len(engines) == 1:
        return KvPublisher(engines[0], settings.dialect, settings.host, settings.kv_events)
    return RankPublishers(engines, settings.dialect, settings.host, settings.kv_events)


def _end_without_tokens(generation: Generation, finish: FinishReason) -> None:
    for choice in generation.choices:
        generation.mailbox.put(choice.index, Output("", NO_TOKEN, finish, 0))


async def _take(mailbox: Mailbox, choices: list[Choice]) -> list[Choice]:
    """Wait for tokens and add them to their choices. Returns the choices that gained some, by index."""
    touched = {}
    for index, output in await mailbox.take():
        choices[index].add(output)
        touched[index] = choices[index]
    return [touched[index] for index in sorted(touched)]


async def _finish(mailbox: Mailbox, choices: list[Choice]) -> None:
    """Wait until all choices have ended."""
    unfinished = len(choices)
    while unfinished:
        touched = await _take(mailbox, choices)
        unfinished -= sum(choice.finish is not None for choice in touched)


async def _watch(receive: Receive, mailbox: Mailbox, poll: float, streams: bool) -> None:
    """End the call after its client has disconnected.

    At once if `poll` is 0 or the answer is streaming. Before the stream begins, and if the answer is sent whole, the
    engine checks for its client only every `poll` seconds.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    while (await receive())["type"] != "http.disconnect":
        pass
    if poll:
        with suppress(TimeoutError):
            async with asyncio.timeout(poll - (clock() - began) % poll):
                await (mailbox.begun.wait() if streams else asyncio.sleep(poll))
    mailbox.disconnect()


async def _start_stream(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})


async def _send_body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
