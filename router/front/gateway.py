"""The data path: a plain ASGI callable that turns a client's call into a journey, and a failure into an answer.

The files in the order in which a call meets them: identity and limits (its client, as its head tells), byte_budget and
exchange (its body), parse_slots and api (parsed), limits (its model and tokens), relay, scheduler host and core (its
turn), fleet (forwarded), api.answer (counted, and what only we asked for taken out), scheduler host and core (settled),
exchange (to the client).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from router.api.body.call import Call, Head
from router.api.body.checks import check_vocabulary, check_weight
from router.api.body.edits import rename, with_cache_salt
from router.api.endpoints.responses import stored_id
from router.api.family import Family
from router.api.registry import family_of
from router.auth.admission import Admission, AdmissionTicket
from router.auth.identity import Identity
from router.channel.host import SchedulerHost
from router.core.model.block_key import BlockKey
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.errors import MethodNotAllowed, RouterError, ShuttingDown, UnknownModel, UnknownPath
from router.front.byte_budget import ByteBudget, Hold
from router.front.exchange import ClientGone, Exchange, new_request_id
from router.front.parse_slots import INLINE_BYTES, ParseSlots
from router.front.relay import Relay, RelaySettings
from router.front.stored.calls import ResponseCalls
from router.upstream.directory import WorkerDirectory

log = logging.getLogger(__name__)


class Isolation(NamedTuple):
    """Whose prefixes are kept apart."""

    by_group: bool
    """Those of a group are not kept apart from each other."""
    secret: bytes

    def cache_scope_of(self, identity: Identity) -> str:
        """Whose cache a client's prefixes are found in."""
        group = identity.group if self.by_group else None
        return f"client {identity.client}" if group is None else f"group {group.name}"


BlockKeys = Callable[[str, bytes, str], Awaitable[tuple[BlockKey, ...]]]
"""Takes the path, body and model of a call; gives one key per prompt, or none."""


class Gateway:
    """Answers the calls to engines."""

    def __init__(
        self,
        scheduler_host: SchedulerHost,
        fleet: WorkerDirectory,
        admission: Admission,
        hasher: PromptHasher,
        budget: ByteBudget,
        body_limit: int,
        settings: RelaySettings,
        block_keys: BlockKeys,
        responses: ResponseCalls,
        isolation: Isolation | None = None,
    ) -> None:
        """`budget`: what may be held; `body_limit`: bytes; `block_keys` is asked for the prompts by their tokens.

        `isolation`: whose prefixes are kept apart from others'; None if nobody's are.
        """
        self._scheduler_host = scheduler_host
        self._fleet = fleet
        self._admission = admission
        self._hasher = hasher
        self._budget = budget
        self._body_limit = body_limit
        self._slots = ParseSlots()
        self._settings = settings
        self._block_keys = block_keys
        self._responses = responses
        self._isolation = isolation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call; whatever goes wrong becomes its answer, and harms no other."""
        exchange = Exchange(scope, receive, send)
        exchange.request_id = _usable(exchange.headers.get(b"x-request-id")) or new_request_id()
        try:
            family = _family(exchange)
            response = stored_id(exchange.path, exchange.method)
            let_in = self._admission.entered if response is None else self._admission.uncounted
            with let_in(exchange.headers, exchange.address) as permit:
                owner = _owner(permit.identity, exchange.address)
                exchange.charge_unread_to(owner)
                with self._budget.hold(owner) as hold:
                    body = await exchange.body(self._body_limit, hold)
                    if body:
                        family.check_type(exchange.head)
                    with exchange.while_connected():
                        if response is None:
                            await self._serve(family, exchange, body, hold, permit)
                        else:
                            await self._responses.serve(exchange, body, hold, response, self._owner_of(exchange))
        except ClientGone:
            pass
        except asyncio.CancelledError:  # the server waits no longer; it would log this as a failure of ours
            await exchange.fail(ShuttingDown())
        except RouterError as error:
            await exchange.fail(error)
        except Exception:
            log.exception("a call to %s failed inside the router", exchange.path)
            await exchange.fail(RouterError("The router failed on this call."))

    def _owner_of(self, exchange: Exchange) -> ClientId:
        """Whose responses a call may make and see: whom its head names, since a call about one has no other part."""
        return self._admission.identifier.identify(exchange.headers, None, exchange.address).client

    async def _serve(
        self, family: Family, exchange: Exchange, body: bytes, hold: Hold, permit: AdmissionTicket
    ) -> None:
        """Parse a call that is here as a whole, let it in, and see it through."""
        arrived = self._scheduler_host.clock()
        if self._isolation is not None:
            body = await self._isolated(self._isolation, exchange, body, hold.owner)
        body, call = await self._parse(family, exchange.head, body, hold.owner)
        identity = permit.identity or self._admission.identify(exchange.headers, call.user, exchange.address)
        self._admission.admit(permit, identity, call.model, _input_tokens(call), call.adapters)
        owner = self._owner_of(exchange)
        keeper = self._responses.keeper(call, owner, permit)
        worker = self._responses.worker_of_previous(call, owner)
        hold.set(len(body) + sum([len(prompt.key.hashes) for prompt in call.prompts]))
        blocks = await self._block_keys(call.path, body, call.model) if family.tokenizable else ()
        request = self._request(exchange, call, identity, blocks, worker)
        overhead = self._scheduler_host.clock() - arrived
        journey = Relay(
            *(request, call, family, exchange, hold, self._slots, self._scheduler_host, self._fleet, overhead, keeper)
        )
        try:
            await journey.run(self._settings)
        finally:
            permit.tokens = journey.tokens

    async def _isolated(self, isolation: Isolation, exchange: Exchange, body: bytes, owner: str) -> bytes:
        """The body, with a salt of its client's side."""

        def side(user: str | None) -> str:
            return isolation.cache_scope_of(
                self._admission.identifier.identify(exchange.headers, user, exchange.address)
            )

        def salted() -> bytes:
            _check_size(body)
            return with_cache_salt(body, side, isolation.secret)

        return await self._slots.run(owner, len(body), salted)

    async def _parse(self, family: Family, head: Head, body: bytes, owner: str) -> tuple[bytes, Call]:
        """The call, and its body, in which a model stands under the name that workers know."""
        body, call = await self._slots.run(owner, len(body), partial(self._parse_as_known, family, head, body))
        if not call.model:
            call = call._replace(model=self._fleet.any_model())
        elif not self._fleet.knows(call.model):
            raise UnknownModel(call.model)
        check_vocabulary(call.largest_id, self._fleet.vocabulary(call.model))
        return body, call

    def _parse_as_known(self, family: Family, head: Head, body: bytes) -> tuple[bytes, Call]:
        _check_size(body)
        ids = self._settings.continuation == "ids"
        call = family.parse(head, body, self._hasher, ids=ids)
        call.check_names()
        if (model := self._fleet.aliases.get(call.model)) is None:
            return body, call
        known = rename(body, call.content_type, model)
        return known, family.parse(head, known, self._hasher, ids=ids)

    def _request(
        self, exchange: Exchange, call: Call, identity: Identity, blocks: tuple[BlockKey, ...], worker: WorkerId | None
    ) -> Request:
        if RequestId(exchange.request_id) in self._scheduler_host:
            exchange.request_id = new_request_id()
        return Request(
            id=RequestId(exchange.request_id),
            client=identity.client,
            model=call.model,
            prompts=tuple([prompt.key for prompt in call.prompts]),
            output_limit=call.output_limit,
            streamed=bool(call.streamed),
            weight=identity.weight,
            blocks=blocks,
            body_bytes=len(call.body),
            group=identity.shared_group,
            group_weight=identity.group_weight,
            answers=max(1, call.choices * len(call.prompts)),
            computed_anew_by=call.computed_anew_by,
            worker=worker,
        )


def _family(exchange: Exchange) -> Family:
    """Raises UnknownPath and MethodNotAllowed."""
    family = family_of(exchange.path)
    if family is None:
        raise UnknownPath(exchange.path)
    if exchange.method not in family.methods:
        raise MethodNotAllowed(exchange.method, ", ".join(family.methods))
    return family


def _owner(identity: Identity | None, address: str | None) -> str:
    """Whose budget a call counts against: a client's that somebody vouches for, else its address's."""
    return address or "" if identity is None or identity.anonymous else f"client {identity.client}"


def _check_size(body: bytes) -> None:
    """Raise TooManyMembers for a long body that would take too much memory."""
    if len(body) > INLINE_BYTES:
        check_weight(body)


def _input_tokens(call: Call) -> int:
    """About how many, by a rule of thumb for text; what it is held against is corrected by the engine's word."""
    return sum([prompt.key.size // 4 if prompt.key.tokens is None else prompt.key.tokens for prompt in call.prompts])


def _usable(given: bytes | None) -> str | None:
    """The client's own request id, where it is fit for headers and logs."""
    if given and len(given) <= 128 and given.isascii() and given.decode().isprintable():
        return given.decode()
    return None
