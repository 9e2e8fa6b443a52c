"""Admission of calls to models: limits on calls in flight, requests per minute and tokens per minute.

The limits apply to each client and to each group. Requests and tokens per minute are token buckets that hold one
minute's worth. A call's estimated input is taken from the bucket in advance and corrected by its real usage when it
ends, so calls in flight may overdraw a bucket; later calls are refused until it has refilled far enough for them. A
call larger than the bucket is admitted when the bucket is full.

Admission has two stages. Before the body is read, the call is counted as in flight and against the requests per minute,
if its head identifies the client: so no client can have more bodies received and parsed than calls admitted. Model and
tokens are checked once the body is parsed; a call refused there still counts as a request.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self

from router.auth.identity import UNLIMITED, ClientLimits, Identifier, Identity, address_id
from router.core.model.request import ClientId
from router.errors import ModelNotAllowed, Refused

MINUTE: Final = 60.0
"""Seconds."""


class Bucket:
    """A token bucket: it fills at a steady rate, up to one minute's worth."""

    __slots__ = ("_at", "_level", "size")

    def __init__(self, size: float, now: float) -> None:
        self.size = size
        self._level = size
        self._at = now

    def level(self, now: float) -> float:
        """The present content; negative if the bucket is overdrawn."""
        self._level = min(self.size, self._level + (now - self._at) * self.size / MINUTE)
        self._at = now
        return self._level

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds this much, or is full if the amount exceeds its size; 0 if it does now."""
        return max(0.0, min(amount, self.size) - self.level(now)) * MINUTE / self.size

    def take(self, amount: float, now: float) -> None:
        """Take an amount, even beyond what the bucket holds; a negative amount gives back."""
        self._level = min(self.size, self.level(now) - amount)


class Shortage(NamedTuple):
    """A limit that a call would exceed."""

    reason: str
    what: str
    seconds: float
    """Estimated time until the call would be within the limit."""


class RateLimiter:
    """Enforces the limits of one client or group."""

    __slots__ = ("_requests", "_tokens", "in_flight", "limits")

    def __init__(self, limits: ClientLimits, now: float) -> None:
        self.in_flight = 0
        self.set_limits(limits, now)

    def set_limits(self, limits: ClientLimits, now: float) -> None:
        """Replace the limits; the buckets start full."""
        self.limits = limits
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)

    def call_shortage(self, now: float) -> Shortage | None:
        """Return the limit that one more call would exceed, before its input is known; None if it may begin."""
        limit, per_minute, _ = self.limits
        if limit is not None and self.in_flight >= limit:
            return Shortage("rejected-limit-in-flight", f"at most {limit} requests in flight", 1.0)
        if self._requests is not None and (seconds := self._requests.seconds_until(1.0, now)):
            return Shortage("rejected-limit-requests", f"{per_minute:g} requests a minute", seconds)
        return None

    def token_shortage(self, tokens: int, now: float) -> Shortage | None:
        """Return the limit that a call with this many input tokens would exceed; None if it may proceed."""
        tokens_per_minute = self.limits.tokens_per_minute
        if self._tokens is not None and (seconds := self._tokens.seconds_until(tokens, now)):
            return Shortage("rejected-limit-tokens", f"{tokens_per_minute:g} tokens a minute", seconds)
        return None

    def begin_call(self, now: float) -> None:
        """Count one more call."""
        self.in_flight += 1
        if self._requests is not None:
            self._requests.take(1.0, now)

    def take_tokens(self, tokens: int, now: float) -> None:
        """Take tokens in addition to those taken before; a negative number gives back."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def is_idle(self, now: float) -> bool:
        """True if nothing is in flight and all buckets are full, so that a new limiter would behave the same."""
        buckets = [bucket for bucket in (self._requests, self._tokens) if bucket is not None]
        return not self.in_flight and all(bucket.level(now) >= bucket.size for bucket in buckets)


class AdmissionTicket:
    """One admitted call, which counts as in flight while the context is entered."""

    __slots__ = ("_clock", "_estimate", "_limiters", "identity", "tokens")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.identity: Identity | None = None
        """The client; None while only the body can name it."""
        self.tokens: int | None = None
        """The tokens that the call has used, set by the caller; if it stays None, the estimate counts."""
        self._limiters: Sequence[OwnedLimiter] = ()
        self._estimate = 0
        self._clock = clock

    def begin_call(self, identity: Identity, limiters: Sequence["OwnedLimiter"]) -> None:
        """Count the call with these limiters. Raises Refused, and counts it with none, if any limit is reached."""
        now = self._clock()
        for owned in limiters:
            owned.check(owned.limiter.call_shortage(now))
        self.identity = identity
        self._limiters = limiters
        for owned in limiters:
            owned.limiter.begin_call(now)

    def take_input(self, tokens: int) -> None:
        """Take the estimated input tokens from the buckets. Raises Refused if a bucket holds too few."""
        now = self._clock()
        for owned in self._limiters:
            owned.check(owned.limiter.token_shortage(tokens, now))
        self._estimate = tokens
        for owned in self._limiters:
            owned.limiter.take_tokens(tokens, now)

    def transfer(self) -> "AdmissionTicket":
        """Return a new ticket that takes over this one's count, for work that outlives the call.

        The caller must enter the new ticket; this one no longer counts.
        """
        other = AdmissionTicket(self._clock)
        other.identity, other._limiters, other._estimate = self.identity, self._limiters, self._estimate
        self._limiters = ()
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        used = self._estimate if self.tokens is None else self.tokens
        for owned in self._limiters:
            owned.limiter.in_flight -= 1
            owned.limiter.take_tokens(used - self._estimate, self._clock())


class OwnedLimiter(NamedTuple):
    """A limiter and how to address its owner in the error message."""

    owner: str
    limiter: RateLimiter

    def check(self, shortage: Shortage | None) -> None:
        """Raise Refused if there is a shortage."""
        if shortage is not None:
            message = f"{self.owner} may have {shortage.what}; try again later."
            raise Refused(message, code="rate_limit_exceeded", retry_after=shortage.seconds, reason=shortage.reason)


class Admission:
    """Identifies the client of each call and admits or refuses the call."""

    def __init__(
        self, identifier: Identifier, is_known: Callable[[ClientId], bool], clock: Callable[[], float]
    ) -> None:
        """`is_known`: whether a client has been seen before; `clock`: a monotonic clock, in seconds."""
        self.identifier = identifier
        self.refusals: Counter[str] = Counter()
        """The number of refused calls, by reason."""
        self._is_known = is_known
        self._clock = clock
        self._limiters: OrderedDict[str, RateLimiter] = OrderedDict()
        self._arrivals: OrderedDict[str, RateLimiter] = OrderedDict()
        """Limits the rate of new anonymous clients, by address."""

    def identify(self, headers: Mapping[bytes, bytes], user: str | None, address: str | None) -> Identity:
        """Return the client of a call. Raises InvalidKey if the client may not call at all.

        An address that brings too many new anonymous clients in a minute is itself the client of further new ones.
        """
        return self._within_cap(self.identifier.identify(headers, user, address), address)

    def _within_cap(self, identity: Identity, address: str | None) -> Identity:
        """Return the client itself, or its address if that has brought too many new clients recently."""
        limit = self.identifier.directory.anonymous.new_per_minute
        if limit is None or not identity.anonymous or self._is_known(identity.client):
            return identity
        now = self._clock()
        limiter = self._limiter(self._arrivals, address or "", ClientLimits(requests_per_minute=limit), now)
        if limiter.call_shortage(now) is not None:
            return identity._replace(client=address_id(address))
        limiter.begin_call(now)
        limiter.in_flight = 0
        return identity

    def admit_head(self, headers: Mapping[bytes, bytes], address: str | None) -> AdmissionTicket:
        """Admit a call by its head, if the head identifies the client. The caller must enter the ticket at once.

        Raises InvalidKey, and Refused if the client or its group is at its limit of calls.
        """
        ticket = AdmissionTicket(self._clock)
        if (identity := self.identifier.identify_head(headers, address)) is not None:
            self._begin_call(ticket, self._within_cap(identity, address))
        return ticket

    def admit_uncounted(self, headers: Mapping[bytes, bytes], address: str | None) -> AdmissionTicket:
        """Admit a call that computes nothing, whatever its client has in flight. Raises InvalidKey.

        A client at its limit must still be able to look up and cancel its requests.
        """
        ticket = AdmissionTicket(self._clock)
        ticket.identity = self.identifier.identify(headers, None, address)
        return ticket

    def admit(
        self, ticket: AdmissionTicket, identity: Identity, model: str, tokens: int, adapters: Iterable[str] = ()
    ) -> None:
        """Admit a parsed call of this client to this model, with an estimated number of input tokens.

        Raises ModelNotAllowed, and Refused if the client or its group is at a limit.
        """
        for name in (model, *adapters):
            if identity.models is not None and name not in identity.models:
                self.refusals["model-not-allowed"] += 1
                raise ModelNotAllowed(name)
        if ticket.identity is None:
            self._begin_call(ticket, identity)
        try:
            ticket.take_input(tokens)
        except Refused as refused:
            self.refusals[refused.reason or ""] += 1
            raise

    def _begin_call(self, ticket: AdmissionTicket, identity: Identity) -> None:
        try:
            ticket.begin_call(identity, self._limiters_of(identity, self._clock()))
        except Refused as refused:
            self.refusals[refused.reason or ""] += 1
            raise

    def _limiters_of(self, identity: Identity, now: float) -> list[OwnedLimiter]:
        """Return the limiters that apply to a client: its own and its group's."""
        group = identity.group
        limiters: list[OwnedLimiter] = []
        if identity.limits != UNLIMITED:
            limiters.append(
                OwnedLimiter("You", self._limiter(self._limiters, f"client {identity.client}", identity.limits, now))
            )
        if group is not None and group.limits != UNLIMITED:
            limiters.append(
                OwnedLimiter("Your group", self._limiter(self._limiters, f"group {group.name}", group.limits, now))
            )
        return limiters

    @staticmethod
    def _limiter(limiters: OrderedDict[str, RateLimiter], name: str, limits: ClientLimits, now: float) -> RateLimiter:
        """Return the limiter of this name, created if need be, with these limits.

        Each call also checks one other limiter, and drops it if it is idle, so that idle limiters do not pile up.
        """
        oldest = next(iter(limiters), name)
        if oldest != name and limiters[oldest].is_idle(now):
            del limiters[oldest]
        elif limiters:
            limiters.move_to_end(oldest)
        limiter = limiters.get(name)
        if limiter is None:
            limiter = limiters[name] = RateLimiter(limits, now)
        elif limiter.limits != limits:
            limiter.set_limits(limits, now)
        return limiter


def _bucket(size: float | None, now: float) -> Bucket | None:
    return None if size is None else Bucket(size, now)
