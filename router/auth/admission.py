"""Admission of calls to models: which client a call belongs to, and whether its limits let it begin.

Admission has two stages. Before the body is read, the call is counted as in flight and against the requests per minute,
if its head identifies the client: so no client can have more bodies received and parsed than calls admitted. Model and
tokens are checked once the body is parsed; a call refused there still counts as a request. The limits themselves are
kept beside the scheduler (`core.clients.rate_limits`), so that they hold over all fronts; calls of clients without
limits ask nothing.
"""

from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from itertools import count
from typing import Self

from router.auth.identity import UNLIMITED, Identifier, Identity, address_id
from router.channel.client import SchedulerClient
from router.channel.messages import AdmitNewClient, BeginCall, CallEnded, TakeInput, TicketId
from router.core.clients.rate_limits import OwnerLimits, Shortage
from router.errors import ModelNotAllowed, Refused


class AdmissionTicket:
    """One call, which counts as in flight from its admission until the context is left."""

    __slots__ = ("_client", "_counted", "_id", "identity", "tokens")

    def __init__(self, scheduler_client: SchedulerClient, ticket: TicketId) -> None:
        self.identity: Identity | None = None
        """The client; None while only the body can name it."""
        self.tokens: int | None = None
        """The tokens that the call has used, set by the caller; if it stays None, the estimate counts."""
        self._client = scheduler_client
        self._id = ticket
        self._counted = False
        """Whether the call may be counted, so that its end must be reported."""

    async def begin_call(self, owners: tuple[OwnerLimits, ...]) -> None:
        """Count the call against these limits of its client and its group. Raises Refused if one is reached."""
        self._counted = True
        _check(await self._client.ask(BeginCall(self._id, owners)))

    async def take_input(self, tokens: int) -> None:
        """Take the estimated input tokens from the limits. Raises Refused if too few are left."""
        _check(await self._client.ask(TakeInput(self._id, tokens)))

    @property
    def counted(self) -> bool:
        """Whether the call may count against limits."""
        return self._counted

    def transfer(self) -> "AdmissionTicket":
        """Return a new ticket that takes over this one's count, for work that outlives the call.

        The caller must enter the new ticket; this one no longer counts.
        """
        other = AdmissionTicket(self._client, self._id)
        other.identity, other._counted = self.identity, self._counted
        self._counted = False
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._counted:
            self._client.report(CallEnded(self._id, self.tokens))


class Admission:
    """Identifies the client of each call and admits or refuses the call."""

    def __init__(self, identifier: Identifier, scheduler_client: SchedulerClient) -> None:
        self.identifier = identifier
        self.refusals: Counter[str] = Counter()
        """The number of refused calls, by reason."""
        self._client = scheduler_client
        self._tickets = count()

    def ticket(self) -> AdmissionTicket:
        """Return the ticket of a new call. It must be entered before the call is admitted."""
        return AdmissionTicket(self._client, TicketId(next(self._tickets)))

    async def identify(self, headers: Mapping[bytes, bytes], user: str | None, address: str | None) -> Identity:
        """Return the client of a call. Raises InvalidKey if the client may not call at all.

        An address that brings too many new anonymous clients in a minute is itself the client of further new ones.
        """
        identity = self.identifier.identify(headers, user, address)
        limit = self.identifier.directory.anonymous.new_per_minute
        return identity if limit is None else await self._within_cap(identity, address, limit)

    async def _within_cap(self, identity: Identity, address: str | None, limit: float) -> Identity:
        """Return the client itself, or its address if that has brought too many new clients recently.

        `limit`: new clients per minute.
        """
        if not identity.anonymous:
            return identity
        if await self._client.ask(AdmitNewClient(identity.client, address or "", limit)):
            return identity
        return identity._replace(client=address_id(address))

    async def admit_head(self, ticket: AdmissionTicket, headers: Mapping[bytes, bytes], address: str | None) -> None:
        """Admit a call by its head, if the head identifies the client.

        Raises InvalidKey, and Refused if the client or its group is at its limit of calls.
        """
        if (identity := self.identifier.identify_head(headers, address)) is not None:
            if (limit := self.identifier.directory.anonymous.new_per_minute) is not None:
                identity = await self._within_cap(identity, address, limit)
            await self._begin_call(ticket, identity)

    def admit_uncounted(self, ticket: AdmissionTicket, headers: Mapping[bytes, bytes], address: str | None) -> None:
        """Admit a call that computes nothing, whatever its client has in flight. Raises InvalidKey.

        A client at its limit must still be able to look up and cancel its requests.
        """
        ticket.identity = self.identifier.identify(headers, None, address)

    async def admit(
        self, ticket: AdmissionTicket, identity: Identity, model: str, tokens: int, adapters: Iterable[str] = ()
    ) -> None:
        """Admit a parsed call of this client to this model, with an estimated number of input tokens.

        Raises ModelNotAllowed, and Refused if the client or its group is at a limit.
        """
        if identity.models is not None:
            for name in (model, *adapters):
                if name not in identity.models:
                    self.refusals["model-not-allowed"] += 1
                    raise ModelNotAllowed(name)
        if ticket.identity is None:
            await self._begin_call(ticket, identity)
        if ticket.counted:
            await self._counting_refusal(ticket.take_input(tokens))

    async def _begin_call(self, ticket: AdmissionTicket, identity: Identity) -> None:
        if owners := tuple(_limited_owners(identity)):
            await self._counting_refusal(ticket.begin_call(owners))
        ticket.identity = identity

    async def _counting_refusal(self, check: Awaitable[None]) -> None:
        """Wait for a check of the limits, and count it if it refuses the call."""
        try:
            await check
        except Refused as refused:
            self.refusals[refused.reason or ""] += 1
            raise


def _limited_owners(identity: Identity) -> Iterator[OwnerLimits]:
    """Yield the client and its group, as far as they have limits."""
    if identity.limits != UNLIMITED:
        yield OwnerLimits(f"client {identity.client}", identity.limits)
    if identity.group is not None and identity.group.limits != UNLIMITED:
        yield OwnerLimits(f"group {identity.group.name}", identity.group.limits, is_group=True)


def _check(shortage: Shortage | None) -> None:
    """Raise Refused if there is a shortage."""
    if shortage is not None:
        owner = "Your group" if shortage.is_group else "You"
        message = f"{owner} may have {shortage.limit}; try again later."
        raise Refused(message, code="rate_limit_exceeded", retry_after=shortage.seconds, reason=shortage.reason)
