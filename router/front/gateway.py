"""The entry of the data path: serves one client call and answers every failure.

A call passes these modules:

1. auth.identity and auth.admission: the client and its rate limits, from the head
2. byte_budget and exchange: the body
3. parsing and api: the call
4. auth.admission: the model and the tokens
5. relay, channel and core: queue and placement
6. upstream.connections: forwarding
7. api.answer: counting tokens, and removing what only the router asked for
8. channel and core: settling
9. exchange: the answer to the client
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from operator import attrgetter
from typing import Final

from router.api.answer.usage import TOKEN_COUNT_LIMIT
from router.api.body.call import COMPLETIONS, NOT_STORED, Call
from router.api.body.fields import BYTE_ORDER_MARK
from router.api.endpoints.chat import PATH as CHAT
from router.api.endpoints.other import request_target
from router.api.endpoints.responses import stored_id
from router.api.families import OTHER, Family, without_slash
from router.auth.admission import Admission, AdmissionTicket
from router.auth.identity import Identity, budget_owner
from router.channel.client import SchedulerClient
from router.core.model.block_key import BlockKey
from router.core.model.prompt_key import PromptHasher, PromptKey
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.errors import MethodNotAllowed, RouterError, ShuttingDown
from router.front.byte_budget import ByteBudget, Hold
from router.front.drain import Drain
from router.front.exchange import ClientGone, Exchange, new_request_id
from router.front.handoff.upkeep import Handoffs
from router.front.outgoing import OutgoingCall
from router.front.parsing import BodyParser, Isolation, ParseSlots, Sender
from router.front.relay import Relay, RelaySettings
from router.front.session_labels import UNLABELLED, SessionLabels
from router.front.stored.calls import ResponseCalls
from router.upstream.connections import ServedModel, WorkerConnections
from router.upstream.ranks.pinning import can_name_rank

log = logging.getLogger(__name__)

SPLIT_PATHS: Final = frozenset({CHAT, COMPLETIONS})
"""The paths at which a call can say where its prompt was computed. If decode workers cannot compute prompts, all calls
to these paths are computed in two parts, whatever they ask for."""
RETRY_KEY_BYTES: Final = 16
_key = attrgetter("key")

BlockKeys = Callable[[str, bytes, str, ClientId], Awaitable[tuple[BlockKey, ...]]]
"""Takes the path, body and model of a call; returns one key per prompt, or none."""


class Gateway:
    """Serves the calls that are meant for engines."""

    def __init__(
        self,
        scheduler_client: SchedulerClient,
        connections: WorkerConnections,
        admission: Admission,
        hasher: PromptHasher,
        budget: ByteBudget,
        body_limit: int,
        settings: RelaySettings,
        block_keys: BlockKeys,
        drain: Drain,
        responses: ResponseCalls,
        handoffs: Handoffs,
        isolation: Isolation | None,
        session_labels: SessionLabels | None,
    ) -> None:
        """`budget`: of the bytes held for clients; `body_limit`: bytes; `block_keys`: computes keys from prompt tokens.

        `drain`: counts the calls in flight; `handoffs`: looks after what is between prefill and decode workers;
        `isolation`: how cached prefixes are kept apart, None if all clients share them.
        `session_labels`: reads which session a call belongs to; None if sessions are off.
        """
        self._scheduler_client = scheduler_client
        self._connections = connections
        self._admission = admission
        self._slots = ParseSlots()
        self._parser = BodyParser(
            self._slots,
            hasher,
            admission.identifier,
            connections,
            isolation,
            ids=settings.continuation == "ids",
            strict=settings.strict,
        )
        self._budget = budget
        self._body_limit = body_limit
        self._settings = settings
        self._block_keys = block_keys
        self._drain = drain
        self._responses = responses
        self._handoffs = handoffs
        self._session_labels = session_labels

    async def serve(self, exchange: Exchange, family: Family) -> None:
        """Serve one call to a path of this family. Any failure becomes the answer of this call and affects no other."""
        try:
            if self._drain.begun and self._drain.refuses:
                raise ShuttingDown
            if exchange.path.endswith("/") and (moved := without_slash(exchange.path)) is not None:
                target = request_target(exchange.head._replace(path=moved))
                await exchange.respond(307, [(b"location", target.encode())], b"")
                return
            if exchange.method not in family.methods:
                raise MethodNotAllowed(exchange.method, ", ".join(family.methods))
            response = stored_id(exchange.path, exchange.method) if family is OTHER else None
            self._drain.calls += 1
            try:
                await self._admit(family, exchange, response)
            finally:
                self._drain.calls -= 1
        except ClientGone:
            if exchange.record is not None:
                exchange.record.note_id(exchange.request_id)
                exchange.record.note_gone()
        except asyncio.CancelledError:  # at shutdown; the server would log it as an error of the application
            await exchange.fail(ShuttingDown())
        except RouterError as error:
            await exchange.fail(error)
        except Exception:
            log.exception("a call to %s failed inside the router", exchange.path)
            await exchange.fail(RouterError("The router failed on this call."))

    async def _admit(self, family: Family, exchange: Exchange, response: str | None) -> None:
        """Serve a call if its client may make one now. `response`: the stored response that it is about, if any."""
        if self._scheduler_client.behind is not None:
            self._scheduler_client.check_lag()
        with self._admission.ticket() as ticket:
            if response is None:
                await self._admission.admit_head(ticket, exchange.headers, exchange.address)
            else:
                self._admission.admit_uncounted(ticket, exchange.headers, exchange.address)
            owner = budget_owner(ticket.identity, exchange.address)
            if owner != exchange.address:  # the connection counts them against its address otherwise
                exchange.charge_unread_to(owner)
            with self._budget.hold(owner) as hold:
                body = await exchange.body(self._body_limit, hold)
                body = body.removeprefix(BYTE_ORDER_MARK) or body
                if body:
                    family.check_type(exchange.head)
                with exchange.while_connected():
                    if response is None:
                        await self._serve(family, exchange, body, hold, ticket)
                    else:
                        await self._responses.serve(exchange, body, hold, response, self._response_owner(exchange))

    def _response_owner(self, exchange: Exchange) -> ClientId:
        """Return the client whose stored responses a call can create and read.

        Only the head of the call counts, because a call about a stored response may have no body.
        """
        return self._admission.identifier.identify(exchange.headers, None, exchange.address).client

    async def _serve(
        self, family: Family, exchange: Exchange, body: bytes, hold: Hold, ticket: AdmissionTicket
    ) -> None:
        """Parse a call whose body is complete, check its limits and relay it."""
        arrived = self._scheduler_client.clock()
        sender = Sender(exchange.headers, exchange.address, hold.owner)
        call, served = await self._parser.parse(family, exchange.head, body, sender, exchange.deployment)
        keys: tuple[PromptKey, ...] = tuple(map(_key, call.prompts))
        held, tokens = len(call.body), 0
        for key in keys:
            held += len(key.hashes)
            # Estimated at four bytes per token of text. The engine's usage corrects the rate limit later.
            tokens += key.size // 4 if key.tokens is None else key.tokens
        identity = ticket.identity or await self._admission.identify(exchange.headers, call.user, exchange.address)
        if exchange.record is not None:
            exchange.record.note_call(identity.client, call.model)
        await self._admission.admit(ticket, identity, call.model, tokens, call.adapters)
        keeper = worker = None
        if call.storage != NOT_STORED:
            owner = self._response_owner(exchange)
            keeper = await self._responses.keeper(call, owner, ticket)
            worker = await self._responses.worker_of_previous(call, owner)
        if held != hold.amount:
            hold.set(held)
        blocks: tuple[BlockKey, ...] = ()
        if served.block_sizes and family.tokenizable:
            blocks = await self._block_keys(call.path, call.body, call.model, identity.client)
        request = self._request(exchange, call, keys, served, identity, blocks, worker)
        overhead = self._scheduler_client.clock() - arrived
        outgoing = OutgoingCall(call, request.id, exchange, hold, self._scheduler_client)
        relay = Relay(
            request,
            call,
            family,
            exchange,
            hold,
            self._slots,
            self._scheduler_client,
            self._connections,
            outgoing,
            overhead,
            self._handoffs,
            keeper,
        )
        try:
            await relay.run(self._settings)
        finally:
            ticket.tokens = relay.tokens

    def _request(
        self,
        exchange: Exchange,
        call: Call,
        keys: tuple[PromptKey, ...],
        served: ServedModel,
        identity: Identity,
        blocks: tuple[BlockKey, ...],
        worker: WorkerId | None,
    ) -> Request:
        if exchange.id_given and RequestId(exchange.request_id) in self._scheduler_client:
            exchange.request_id = new_request_id()
        retry_key = exchange.headers.get(b"idempotency-key")
        label = UNLABELLED if self._session_labels is None else self._session_labels.read(exchange, call)
        return Request(
            id=RequestId(exchange.request_id),
            client=identity.client,
            model=call.model,
            prompts=keys,
            output_limit=None if call.output_limit is None else min(call.output_limit, TOKEN_COUNT_LIMIT),
            streamed=bool(call.streamed),
            weight=identity.weight,
            blocks=blocks,
            body_bytes=len(call.body),
            group=identity.shared_group,
            group_weight=identity.group_weight,
            answers=min(max(1, call.choices * len(call.prompts)), TOKEN_COUNT_LIMIT),
            computed_anew_by=call.computed_anew_by,
            beam_search=call.beam_search,
            worker=worker,
            whole=served.has_roles and call.whole and (served.decodes_alone or call.path not in SPLIT_PATHS),
            pinned=not served.rank_engines or can_name_rank(call.path, served.rank_engines),
            session=label.session,
            parent=label.parent,
            last_of_session=label.last,
            retry_key=_retry_key(retry_key, exchange.path, call.body) if retry_key else None,
        )


def _retry_key(given: bytes, path: str, body: bytes) -> bytes:
    """Return what only a repetition of the same call has, too, with the key that the client gave for that."""
    digest = blake2b(digest_size=RETRY_KEY_BYTES)
    for part in (given, path.encode(), body):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
