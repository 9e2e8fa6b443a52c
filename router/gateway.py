"""The data path: a plain ASGI callable that turns a client's call into a journey, and a failure into an answer.

The files in the order in which a call meets them: exchange (its body), api (parsed), identity and limits (its client),
journey, conductor and core (its turn), fleet (forwarded), api.answer (counted, and what only we asked for taken out),
exchange (to the client), conductor and core (settled).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from router.api import family_of
from router.api.alias import rename
from router.api.call import Call, Head
from router.api.family import Family
from router.api.isolation import isolated
from router.api.token_ids import check_vocabulary
from router.conductor import Conductor
from router.core.block_key import BlockKey
from router.core.model import Request, RequestId
from router.core.prompt_key import PromptHasher
from router.errors import MethodNotAllowed, RouterError, ShuttingDown, UnknownModel, UnknownPath
from router.exchange import AT_ONCE, ClientGone, Exchange, Intake, new_request_id
from router.fleet import Fleet
from router.identity import Identity
from router.journey import Journey, JourneySettings
from router.limits import Admission

log = logging.getLogger(__name__)


class Isolation(NamedTuple):
    """Whose prefixes are kept apart."""

    by_group: bool
    """Those of a group are not kept apart from each other."""
    secret: bytes

    def side_of(self, identity: Identity) -> str:
        """Whose cache a client's prefixes are found in."""
        group = identity.group if self.by_group else None
        return f"client {identity.client}" if group is None else f"group {group.name}"


BlockKeys = Callable[[str, bytes, str], Awaitable[tuple[BlockKey, ...]]]
"""Takes the path, body and model of a call; gives one key per prompt, or none."""


class Gateway:
    """Answers the calls to engines."""

    def __init__(
        self,
        conductor: Conductor,
        fleet: Fleet,
        admission: Admission,
        hasher: PromptHasher,
        intake: Intake,
        settings: JourneySettings,
        block_keys: BlockKeys,
        isolation: Isolation | None = None,
    ) -> None:
        """`intake`: what may be received of bodies; `block_keys` is asked for the prompts by their tokens.

        `isolation`: whose prefixes are kept apart from others'; None if nobody's are.
        """
        self._conductor = conductor
        self._fleet = fleet
        self._admission = admission
        self._hasher = hasher
        self._intake = intake
        self._settings = settings
        self._block_keys = block_keys
        self._isolation = isolation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call; whatever goes wrong becomes its answer, and harms no other."""
        exchange = Exchange(scope, receive, send)
        exchange.request_id = _usable(exchange.headers.get(b"x-request-id")) or new_request_id()
        try:
            family = family_of(exchange.path)
            if family is None:
                raise UnknownPath(exchange.path)
            if exchange.method not in family.methods:
                raise MethodNotAllowed(exchange.method, ", ".join(family.methods))
            if self._admission.identifier.may_refuse:  # so that nobody's body is read whose key is wrong
                self._identify(exchange, None)
            body = await exchange.body(self._intake)
            if body:
                family.check_type(exchange.head)
            arrived = self._conductor.clock()
            if self._isolation is not None:
                body = await self._isolated(self._isolation, exchange, body)
            body, call = await self._parse(family, exchange.head, body)
            identity = self._admission.identify(exchange.headers, call.user, exchange.address)
            with self._admission.admitted(identity, call.model, _input_tokens(call), call.adapters) as permit:
                blocks = await self._block_keys(call.path, body, call.model) if family.tokenised else ()
                request = self._request(exchange, call, identity, blocks)
                overhead = self._conductor.clock() - arrived
                journey = Journey(request, call, family, exchange, self._conductor, self._fleet, overhead)
                try:
                    with exchange.while_connected():
                        await journey.run(self._settings)
                finally:
                    permit.tokens = journey.tokens
        except ClientGone:
            pass
        except asyncio.CancelledError:  # the server waits no longer; it would log this as a failure of ours
            await exchange.fail(ShuttingDown())
        except RouterError as error:
            await exchange.fail(error)
        except Exception:
            log.exception("a call to %s failed inside the router", exchange.path)
            await exchange.fail(RouterError("The router failed on this call."))

    def _identify(self, exchange: Exchange, user: str | None) -> Identity:
        return self._admission.identifier.identify(exchange.headers, user, exchange.address)

    async def _isolated(self, isolation: Isolation, exchange: Exchange, body: bytes) -> bytes:
        """The body, with a salt of its client's side."""

        def side(user: str | None) -> str:
            return isolation.side_of(self._identify(exchange, user))

        salt = partial(isolated, body, side, isolation.secret)
        return salt() if len(body) <= AT_ONCE else await asyncio.to_thread(salt)

    async def _parse(self, family: Family, head: Head, body: bytes) -> tuple[bytes, Call]:
        """The call, and its body, in which a model stands under the name that workers know."""
        if len(body) <= AT_ONCE:
            body, call = self._parse_as_known(family, head, body)
        else:
            body, call = await asyncio.to_thread(self._parse_as_known, family, head, body)
        if not call.model:
            call = call._replace(model=self._fleet.any_model())
        elif not self._fleet.knows(call.model):
            raise UnknownModel(call.model)
        check_vocabulary(call.largest_id, self._fleet.vocabulary(call.model))
        return body, call

    def _parse_as_known(self, family: Family, head: Head, body: bytes) -> tuple[bytes, Call]:
        ids = self._settings.continuation == "ids"
        call = family.parse(head, body, self._hasher, ids=ids)
        if (model := self._fleet.aliases.get(call.model)) is None:
            return body, call
        known = rename(body, call.content_type, model)
        return known, family.parse(head, known, self._hasher, ids=ids)

    def _request(self, exchange: Exchange, call: Call, identity: Identity, blocks: tuple[BlockKey, ...]) -> Request:
        if RequestId(exchange.request_id) in self._conductor:
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
        )


def _input_tokens(call: Call) -> int:
    """About how many, by a rule of thumb for text; what it is held against is corrected by the engine's word."""
    return sum([prompt.key.size // 4 if prompt.key.tokens is None else prompt.key.tokens for prompt in call.prompts])


def _usable(given: bytes | None) -> str | None:
    """The client's own request id, where it is fit for headers and logs."""
    if given and len(given) <= 128 and given.isascii() and given.decode().isprintable():
        return given.decode()
    return None
