"""What each client and each group may have at a time and in a minute: the one door for every call to a model.

Requests and tokens a minute are token buckets of one minute's size. A call's input is taken in advance, by an
estimate, and what it really used when it ended: so the calls in flight may overdraw a bucket, and what comes after them
waits for it to be full again as far as it must be. A call that is larger than a bucket goes when that is full.

A call passes in two stages. Before its body is read, it is counted in flight and as one of a minute's requests, where
its head tells whose it is: so nobody can have more bodies received and parsed than it may have calls. Its model and its
tokens are looked at once it is parsed; one that fails there has still been a request.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self

from router.auth.identity import UNLIMITED, Identifier, Identity, Limits, address_id
from router.core.model.request import ClientId
from router.errors import ModelNotAllowed, Refused

MINUTE: Final = 60.0
"""Seconds."""


class Bucket:
    """What may be had of something now; it fills at a steady rate, up to one minute's worth."""

    __slots__ = ("_at", "_level", "size")

    def __init__(self, size: float, now: float) -> None:
        self.size = size
        self._level = size
        self._at = now

    def level(self, now: float) -> float:
        """What there is; negative where it is overdrawn."""
        self._level = min(self.size, self._level + (now - self._at) * self.size / MINUTE)
        self._at = now
        return self._level

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until there is this much, or all that there can be; 0 if there is."""
        return max(0.0, min(amount, self.size) - self.level(now)) * MINUTE / self.size

    def take(self, amount: float, now: float) -> None:
        """Have so much; negative gives back."""
        self._level = min(self.size, self.level(now) - amount)


class Shortage(NamedTuple):
    """A limit that a call would break."""

    reason: str
    what: str
    seconds: float
    """Until it would not, as far as that can be told."""


class RateLimiter:
    """What one holder of limits has in flight, and had lately."""

    __slots__ = ("_requests", "_tokens", "in_flight", "limits")

    def __init__(self, limits: Limits, now: float) -> None:
        self.in_flight = 0
        self.set_limits(limits, now)

    def set_limits(self, limits: Limits, now: float) -> None:
        """From now on these are the limits; a bucket of another size begins full."""
        self.limits = limits
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)

    def call_shortage(self, now: float) -> Shortage | None:
        """What stands in the way of one more call, before its input is known."""
        most, per_minute, _ = self.limits
        if most is not None and self.in_flight >= most:
            return Shortage("rejected-limit-in-flight", f"at most {most} requests in flight", 1.0)
        if self._requests is not None and (seconds := self._requests.seconds_until(1.0, now)):
            return Shortage("rejected-limit-requests", f"{per_minute:g} requests a minute", seconds)
        return None

    def token_shortage(self, tokens: int, now: float) -> Shortage | None:
        """What stands in the way of a call with so much input."""
        tokens_per_minute = self.limits.tokens_per_minute
        if self._tokens is not None and (seconds := self._tokens.seconds_until(tokens, now)):
            return Shortage("rejected-limit-tokens", f"{tokens_per_minute:g} tokens a minute", seconds)
        return None

    def begin_call(self, now: float) -> None:
        """One more call."""
        self.in_flight += 1
        if self._requests is not None:
            self._requests.take(1.0, now)

    def take_tokens(self, tokens: int, now: float) -> None:
        """So many more tokens than were counted before."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def is_idle(self, now: float) -> bool:
        """Whether a new one would say the same."""
        buckets = [bucket for bucket in (self._requests, self._tokens) if bucket is not None]
        return not self.in_flight and all(bucket.level(now) >= bucket.size for bucket in buckets)


class AdmissionTicket:
    """One call that is under way as long as the context is entered."""

    __slots__ = ("_clock", "_estimate", "_limiters", "identity", "tokens")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.identity: Identity | None = None
        """Whose call it is; None where its head did not tell, until its body does."""
        self.tokens: int | None = None
        """What it used; None where nobody knows, and then the estimate counts."""
        self._limiters: Sequence[OwnedLimiter] = ()
        self._estimate = 0
        self._clock = clock

    def begin_call(self, identity: Identity, meters: Sequence["OwnedLimiter"]) -> None:
        """It counts with these meters. Raises Refused, and counts with none, where one of them is used up."""
        now = self._clock()
        for owned in meters:
            owned.check(owned.limiter.call_shortage(now))
        self.identity = identity
        self._limiters = meters
        for owned in meters:
            owned.limiter.begin_call(now)

    def take_input(self, tokens: int) -> None:
        """It has about so many tokens of input. Raises Refused."""
        now = self._clock()
        for owned in self._limiters:
            owned.check(owned.limiter.token_shortage(tokens, now))
        self._estimate = tokens
        for owned in self._limiters:
            owned.limiter.take_tokens(tokens, now)

    def transfer(self) -> "AdmissionTicket":
        """A permit for what goes on after this call: it is to be entered, and this one counts no more."""
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
    """A meter and whom to name where it is used up."""

    owner: str
    limiter: RateLimiter

    def check(self, shortage: Shortage | None) -> None:
        """Raise Refused for a limit that a call would break."""
        if shortage is not None:
            message = f"{self.owner} may have {shortage.what}; try again later."
            raise Refused(message, code="rate_limit_exceeded", retry_after=shortage.seconds, reason=shortage.reason)


class Admission:
    """Says who calls, whether it may, and counts what it has."""

    def __init__(
        self, identifier: Identifier, is_known: Callable[[ClientId], bool], clock: Callable[[], float]
    ) -> None:
        """`is_known`: whether a client was here before; `clock` gives seconds and never falls."""
        self.identifier = identifier
        self.refusals: Counter[str] = Counter()
        """By their reason."""
        self._is_known = is_known
        self._clock = clock
        self._limiters: OrderedDict[str, RateLimiter] = OrderedDict()
        self._arrivals: OrderedDict[str, RateLimiter] = OrderedDict()
        """Of new names, by address."""

    def identify(self, headers: Mapping[bytes, bytes], user: str | None, address: str | None) -> Identity:
        """Whose call it is, if it is one of a client that may call at all. Raises InvalidKey.

        Beyond the names that may come from an address in a minute, whoever is new there goes by the address.
        """
        return self._within_cap(self.identifier.identify(headers, user, address), address)

    def _within_cap(self, identity: Identity, address: str | None) -> Identity:
        """The client itself, or its address where that has brought too many new names of late."""
        most = self.identifier.directory.anonymous.new_per_minute
        if most is None or not identity.anonymous or self._is_known(identity.client):
            return identity
        now = self._clock()
        meter = self._limiter(self._arrivals, address or "", Limits(requests_per_minute=most), now)
        if meter.call_shortage(now) is not None:
            return identity._replace(client=address_id(address))
        meter.begin_call(now)
        meter.in_flight = 0
        return identity

    def admit_head(self, headers: Mapping[bytes, bytes], address: str | None) -> AdmissionTicket:
        """A call with this head is let in as far as that tells who calls; the permit is to be entered at once.

        Raises InvalidKey, and Refused where the client or its group has as many calls as it may.
        """
        permit = AdmissionTicket(self._clock)
        if (identity := self.identifier.identify_head(headers, address)) is not None:
            self._begin_call(permit, self._within_cap(identity, address))
        return permit

    def admit_uncounted(self, headers: Mapping[bytes, bytes], address: str | None) -> AdmissionTicket:
        """A call with this head that computes nothing is let in, whatever its client has in flight. Raises InvalidKey.

        A client at its limit must be able to look at its requests, and to cancel them.
        """
        permit = AdmissionTicket(self._clock)
        permit.identity = self.identifier.identify(headers, None, address)
        return permit

    def admit(
        self, permit: AdmissionTicket, identity: Identity, model: str, tokens: int, adapters: Iterable[str] = ()
    ) -> None:
        """A call of this client to this model, with about so many tokens of input, is let in.

        Raises ModelNotAllowed, and Refused where the client or its group has as much as it may.
        """
        for name in (model, *adapters):
            if identity.models is not None and name not in identity.models:
                self.refusals["model-not-allowed"] += 1
                raise ModelNotAllowed(name)
        if permit.identity is None:
            self._begin_call(permit, identity)
        try:
            permit.take_input(tokens)
        except Refused as refused:
            self.refusals[refused.reason or ""] += 1
            raise

    def _begin_call(self, permit: AdmissionTicket, identity: Identity) -> None:
        try:
            permit.begin_call(identity, self._limiters_of(identity, self._clock()))
        except Refused as refused:
            self.refusals[refused.reason or ""] += 1
            raise

    def _limiters_of(self, identity: Identity, now: float) -> list[OwnedLimiter]:
        """Those that count, with whom they belong to."""
        group = identity.group
        meters: list[OwnedLimiter] = []
        if identity.limits != UNLIMITED:
            meters.append(
                OwnedLimiter("You", self._limiter(self._limiters, f"client {identity.client}", identity.limits, now))
            )
        if group is not None and group.limits != UNLIMITED:
            meters.append(
                OwnedLimiter("Your group", self._limiter(self._limiters, f"group {group.name}", group.limits, now))
            )
        return meters

    @staticmethod
    def _limiter(meters: OrderedDict[str, RateLimiter], name: str, limits: Limits, now: float) -> RateLimiter:
        """One of these meters, with these limits; the one not looked at for longest is forgotten if it is of no use."""
        oldest = next(iter(meters), name)
        if oldest != name and meters[oldest].is_idle(now):
            del meters[oldest]
        elif meters:
            meters.move_to_end(oldest)
        meter = meters.get(name)
        if meter is None:
            meter = meters[name] = RateLimiter(limits, now)
        elif meter.limits != limits:
            meter.set_limits(limits, now)
        return meter


def _bucket(size: float | None, now: float) -> Bucket | None:
    return None if size is None else Bucket(size, now)
