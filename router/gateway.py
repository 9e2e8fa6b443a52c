"""The data path: a plain ASGI callable that turns a client's call into a journey, and a failure into an answer.

The files in the order in which a call meets them: exchange (its body), api (parsed), identity (its client), journey,
conductor and core (its turn), fleet (forwarded), api.answer (counted, and what only we asked for taken out),
exchange (to the client), conductor and core (settled).
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from starlette.types import Receive, Scope, Send

from router.api import family_of
from router.api.call import Call, Head
from router.api.family import Family
from router.conductor import Conductor
from router.core.block_key import BlockKey
from router.core.model import Request, RequestId
from router.core.prompt_key import PromptHasher
from router.errors import MethodNotAllowed, NoWorker, RouterError, UnknownModel, UnknownPath
from router.exchange import ClientGone, Exchange, Intake
from router.fleet import Fleet
from router.identity import Identifier
from router.journey import Journey, JourneySettings

log = logging.getLogger(__name__)

AT_ONCE: Final = 64 * 1024
"""Bytes of a body that is parsed and hashed at once, in a millisecond or less; for a longer one, nobody waits."""

BlockKeys = Callable[[str, bytes, str], Awaitable[tuple[BlockKey, ...]]]
"""Takes the path, body and model of a call; gives one key per prompt, or none."""


class Gateway:
    """Answers the calls to engines."""

    def __init__(
        self,
        conductor: Conductor,
        fleet: Fleet,
        identifier: Identifier,
        hasher: PromptHasher,
        intake: Intake,
        settings: JourneySettings,
        block_keys: BlockKeys,
    ) -> None:
        """`intake`: what may be received of bodies; `block_keys` is asked for the prompts by their tokens."""
        self._conductor = conductor
        self._fleet = fleet
        self._identifier = identifier
        self._hasher = hasher
        self._intake = intake
        self._settings = settings
        self._block_keys = block_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call; whatever goes wrong becomes its answer, and harms no other."""
        exchange = Exchange(scope, receive, send)
        exchange.request_id = _usable(exchange.headers.get(b"x-request-id")) or _new_id()
        try:
            family = family_of(exchange.path)
            if family is None:
                raise UnknownPath(exchange.path)
            if exchange.method not in family.methods:
                raise MethodNotAllowed(exchange.method, ", ".join(family.methods))
            body = await exchange.body(self._intake)
            arrived = self._conductor.clock()
            call = await self._parse(family, exchange.head, body)
            blocks = await self._block_keys(call.path, body, call.model) if family.tokenised else ()
            request = self._request(exchange, call, blocks)
            overhead = self._conductor.clock() - arrived
            journey = Journey(request, call, family, exchange, self._conductor, self._fleet, overhead)
            with exchange.while_connected():
                await journey.run(self._settings)
        except ClientGone:
            pass
        except asyncio.CancelledError:  # the server waits no longer; it would log this as a failure of ours
            await exchange.fail(NoWorker("The router is shutting down.", reason="rejected-shutting-down"))
        except RouterError as error:
            await exchange.fail(error)
        except Exception:
            log.exception("a call to %s failed inside the router", exchange.path)
            await exchange.fail(RouterError("The router failed on this call."))

    async def _parse(self, family: Family, head: Head, body: bytes) -> Call:
        parse = partial(family.parse, head, body, self._hasher, ids=self._settings.continuation == "ids")
        call = parse() if len(body) <= AT_ONCE else await asyncio.to_thread(parse)
        if not call.model:
            return call._replace(model=self._fleet.any_model())
        if not self._fleet.knows(call.model):
            raise UnknownModel(call.model)
        return call

    def _request(self, exchange: Exchange, call: Call, blocks: tuple[BlockKey, ...]) -> Request:
        identity = self._identifier.identify(exchange.headers, call.user, exchange.address)
        if RequestId(exchange.request_id) in self._conductor:
            exchange.request_id = _new_id()
        return Request(
            id=RequestId(exchange.request_id),
            client=identity.client,
            model=call.model,
            prompts=tuple(prompt.key for prompt in call.prompts),
            output_limit=call.output_limit,
            streamed=call.streamed,
            weight=identity.weight,
            blocks=blocks,
            body_bytes=len(call.body),
        )


def _usable(given: bytes | None) -> str | None:
    """The client's own request id, where it is fit for headers and logs."""
    if given and len(given) <= 128 and given.isascii() and given.decode().isprintable():
        return given.decode()
    return None


def _new_id() -> str:
    return secrets.token_hex(16)
