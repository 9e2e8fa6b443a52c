"""What each client and each group may have at a time and in a minute: the one door for every call to a model.

Requests and tokens a minute are token buckets of one minute's size. A call's input is taken in advance, by an
estimate, and what it really used when it ended: so the calls in flight may overdraw a bucket, and what comes after them
waits for it to be full again as far as it must be. A call that is larger than a bucket goes when that is full.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self

from router.core.model import ClientId
from router.errors import ModelNotAllowed, Refused
from router.identity import UNLIMITED, Identifier, Identity, Limits, address_id

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

    def missing(self, amount: float, now: float) -> float:
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


class Meter:
    """What one holder of limits has in flight, and had lately."""

    __slots__ = ("_requests", "_tokens", "in_flight", "limits")

    def __init__(self, limits: Limits, now: float) -> None:
        self.in_flight = 0
        self.limit(limits, now)

    def limit(self, limits: Limits, now: float) -> None:
        """From now on these are the limits; a bucket of another size begins full."""
        self.limits = limits
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)

    def shortage(self, tokens: int, now: float) -> Shortage | None:
        """What stands in the way of one more call with so much input."""
        most, per_minute, tokens_per_minute = self.limits
        if most is not None and self.in_flight >= most:
            return Shortage("rejected-limit-in-flight", f"at most {most} requests in flight", 1.0)
        if self._requests is not None and (seconds := self._requests.missing(1.0, now)):
            return Shortage("rejected-limit-requests", f"{per_minute:g} requests a minute", seconds)
        if self._tokens is not None and (seconds := self._tokens.missing(tokens, now)):
            return Shortage("rejected-limit-tokens", f"{tokens_per_minute:g} tokens a minute", seconds)
        return None

    def begin(self, tokens: int, now: float) -> None:
        """One more call."""
        self.in_flight += 1
        if self._requests is not None:
            self._requests.take(1.0, now)
        self.use(tokens, now)

    def use(self, tokens: int, now: float) -> None:
        """So many more tokens than were counted before."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def is_idle(self, now: float) -> bool:
        """Whether a new one would say the same."""
        buckets = [bucket for bucket in (self._requests, self._tokens) if bucket is not None]
        return not self.in_flight and all(bucket.level(now) >= bucket.size for bucket in buckets)


class Permit:
    """One call that was let in, and is under way as long as the context is entered."""

    __slots__ = ("_clock", "_estimate", "_meters", "tokens")

    def __init__(self, meters: Sequence[Meter], estimate: int, clock: Callable[[], float]) -> None:
        """`estimate`: about how many tokens of input it has; it counts with these meters."""
        self.tokens: int | None = None
        """What it used; None where nobody knows, and then the estimate counts."""
        self._meters = meters
        self._estimate = estimate
        self._clock = clock

    def __enter__(self) -> Self:
        for meter in self._meters:
            meter.begin(self._estimate, self._clock())
        return self

    def __exit__(self, *_: object) -> None:
        used = self._estimate if self.tokens is None else self.tokens
        for meter in self._meters:
            meter.in_flight -= 1
            meter.use(used - self._estimate, self._clock())


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
        self._meters: OrderedDict[str, Meter] = OrderedDict()
        self._arrivals: OrderedDict[str, Meter] = OrderedDict()
        """Of new names, by address."""

    def identify(self, headers: Mapping[bytes, bytes], user: str | None, address: str | None) -> Identity:
        """Whose call it is, if it is one of a client that may call at all. Raises InvalidKey.

        Beyond the names that may come from an address in a minute, whoever is new there goes by the address.
        """
        identity = self.identifier.identify(headers, user, address)
        most = self.identifier.book.anonymous.new_per_minute
        if most is None or not identity.anonymous or self._is_known(identity.client):
            return identity
        now = self._clock()
        meter = self._meter(self._arrivals, address or "", Limits(requests_per_minute=most), now)
        if meter.shortage(0, now) is not None:
            return identity._replace(client=address_id(address))
        meter.begin(0, now)
        meter.in_flight = 0
        return identity

    def admitted(self, identity: Identity, model: str, tokens: int, adapters: Iterable[str] = ()) -> Permit:
        """A call to this model, with about so many tokens of input, is let in; the permit is to be entered at once.

        Raises ModelNotAllowed, and Refused where the client or its group has as much as it may.
        """
        for name in (model, *adapters):
            if identity.models is not None and name not in identity.models:
                self.refusals["model-not-allowed"] += 1
                raise ModelNotAllowed(name)
        now = self._clock()
        meters = self._meters_of(identity, now)
        for owner, meter in meters:
            if (shortage := meter.shortage(tokens, now)) is not None:
                self.refusals[shortage.reason] += 1
                message = f"{owner} may have {shortage.what}; try again later."
                raise Refused(message, code="rate_limit_exceeded", retry_after=shortage.seconds, reason=shortage.reason)
        return Permit([meter for _, meter in meters], tokens, self._clock)

    def _meters_of(self, identity: Identity, now: float) -> list[tuple[str, Meter]]:
        """Those that count, with whom they belong to."""
        group = identity.group
        meters = []
        if identity.limits != UNLIMITED:
            meters.append(("You", self._meter(self._meters, f"client {identity.client}", identity.limits, now)))
        if group is not None and group.limits != UNLIMITED:
            meters.append(("Your group", self._meter(self._meters, f"group {group.name}", group.limits, now)))
        return meters

    @staticmethod
    def _meter(meters: OrderedDict[str, Meter], name: str, limits: Limits, now: float) -> Meter:
        """One of these meters, with these limits; the one not looked at for longest is forgotten if it is of no use."""
        oldest = next(iter(meters), name)
        if oldest != name and meters[oldest].is_idle(now):
            del meters[oldest]
        elif meters:
            meters.move_to_end(oldest)
        meter = meters.get(name)
        if meter is None:
            meter = meters[name] = Meter(limits, now)
        elif meter.limits != limits:
            meter.limit(limits, now)
        return meter


def _bucket(size: float | None, now: float) -> Bucket | None:
    return None if size is None else Bucket(size, now)
