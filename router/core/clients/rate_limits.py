"""Limits of clients and groups: calls in flight, requests per minute and tokens per minute.

Requests and tokens per minute are token buckets that hold one minute's worth. A call's estimated input is taken from
the bucket in advance and corrected by its real usage when it ends, so calls in flight may overdraw a bucket; later
calls are refused until it has refilled far enough for them. A call larger than the bucket is admitted when the bucket
is full.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from router.core.model.saved import in_rows

MINUTE: Final = 60.0
"""Seconds."""


class ClientLimits(NamedTuple):
    """The limits of a client or a group; None means no limit."""

    in_flight: int | None = None
    """Calls that wait or run at a time."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Input and output tokens, cached or not, as the engine reports them."""


class OwnerLimits(NamedTuple):
    """A client or group with its limits."""

    owner: str
    """A name that no other client or group has."""
    limits: ClientLimits
    is_group: bool = False


class RateWindow(NamedTuple):
    """What is left of the limits per minute of a client or a group."""

    owner: str
    limits: ClientLimits
    requests: float | None
    """The level of its bucket; None without such a limit."""
    tokens: float | None


@dataclass(frozen=True, slots=True)
class RateWindows:
    """A section of the saved state with the limits that are not at their full."""

    rows: tuple[RateWindow, ...]


@dataclass(frozen=True, slots=True)
class Shortage:
    """A limit that a call would exceed."""

    reason: str
    limit: str
    """The limit in words."""
    seconds: float
    """Estimated time until the call would be within the limit."""
    is_group: bool = False
    """Whether it is the limit of the client's group."""


class Bucket:
    """A token bucket: it fills at a steady rate, up to one minute's worth."""

    __slots__ = ("_at", "_level", "size")

    def __init__(self, size: float, now: float) -> None:
        self.size = size
        self._level = size
        self._at = now

    def level(self, now: float) -> float:
        """Return the present content; negative if the bucket is overdrawn."""
        self._level = min(self.size, self._level + (now - self._at) * self.size / MINUTE)
        self._at = now
        return self._level

    def set_level(self, level: float, at: float) -> None:
        """Set the content as it was at a time."""
        self._level, self._at = level, at

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket holds this much, or is full if the amount exceeds its size; 0 if it does
        now.
        """
        return max(0.0, min(amount, self.size) - self.level(now)) * MINUTE / self.size

    def take(self, amount: float, now: float) -> None:
        """Take an amount, even beyond what the bucket holds; a negative amount gives back."""
        self._level = min(self.size, self.level(now) - amount)


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

    def window(self, owner: str, now: float) -> RateWindow:
        """Return what is left for this owner."""
        levels = [None if bucket is None else bucket.level(now) for bucket in (self._requests, self._tokens)]
        return RateWindow(owner, self.limits, *levels)

    def set_window(self, window: RateWindow, at: float) -> None:
        """Set what was left at a time."""
        for bucket, level in ((self._requests, window.requests), (self._tokens, window.tokens)):
            if bucket is not None and level is not None:
                bucket.set_level(level, at)

    def is_idle(self, now: float) -> bool:
        """Return whether nothing is in flight and all buckets are full, so that a new limiter would behave the same."""
        buckets = [bucket for bucket in (self._requests, self._tokens) if bucket is not None]
        return not self.in_flight and all(bucket.level(now) >= bucket.size for bucket in buckets)


@dataclass(slots=True)
class CountedCall:
    """A call that is counted by the limiters of its owners."""

    limiters: Sequence[tuple[OwnerLimits, RateLimiter]]
    estimate: int = 0
    """Tokens that were taken for it."""


class RateLimits:
    """The limits of all clients and groups, and the calls that they count."""

    def __init__(self) -> None:
        self._limiters: OrderedDict[str, RateLimiter] = OrderedDict()
        self._new_clients: OrderedDict[str, RateLimiter] = OrderedDict()
        """Limits the rate of new anonymous clients, by address."""
        self._calls: dict[Hashable, CountedCall] = {}

    def __len__(self) -> int:
        """Return the number of counted calls."""
        return len(self._calls)

    def saved(self, now: float) -> Iterator[RateWindows]:
        """Yield what is left of the limits per minute, for those of which something is used."""
        used = [limiter.window(owner, now) for owner, limiter in self._limiters.items() if not limiter.is_idle(now)]
        for rows in in_rows(used):
            yield RateWindows(rows)

    def restore(self, windows: Iterable[RateWindow], at: float) -> None:
        """Go on with what was left at a time, which may be past. To be called before the first call."""
        for window in windows:
            limiter = self._limiters[window.owner] = RateLimiter(window.limits, at)
            limiter.set_window(window, at)

    def begin_call(self, call: Hashable, owners: Sequence[OwnerLimits], now: float) -> Shortage | None:
        """Count a call with its owners' limiters. Returns the limit that it would exceed instead, if there is one."""
        limiters = self._limiters_of(owners, now)
        for owner, limiter in limiters:
            if (shortage := limiter.call_shortage(now)) is not None:
                return _of(owner, shortage)
        for _, limiter in limiters:
            limiter.begin_call(now)
        self._calls[call] = CountedCall(limiters)
        return None

    def count_again(self, call: Hashable, owners: Sequence[OwnerLimits], now: float) -> None:
        """Count a call that an earlier run has admitted, however many there are now, and take nothing for it."""
        limiters = self._limiters_of(owners, now)
        for _, limiter in limiters:
            limiter.in_flight += 1
        self._calls[call] = CountedCall(limiters)

    def set_estimate(self, call: Hashable, tokens: int) -> None:
        """Set what was taken for a counted call. Ignored if it is not counted."""
        if (counted := self._calls.get(call)) is not None:
            counted.estimate = tokens

    def _limiters_of(self, owners: Sequence[OwnerLimits], now: float) -> Sequence[tuple[OwnerLimits, RateLimiter]]:
        limiters = [(owner, _limiter(self._limiters, owner.owner, owner.limits, now)) for owner in owners]
        # Looking up the second limiter may have dropped the first, which was idle until now.
        self._limiters.update((owner.owner, limiter) for owner, limiter in limiters)
        return limiters

    def take_input(self, call: Hashable, tokens: int, now: float) -> Shortage | None:
        """Take the estimated input of a call. Returns the limit that it would exceed instead, if there is one.

        A call that is not counted has no limits.
        """
        if (counted := self._calls.get(call)) is None:
            return None
        for owner, limiter in counted.limiters:
            if (shortage := limiter.token_shortage(tokens, now)) is not None:
                return _of(owner, shortage)
        counted.estimate = tokens
        for _, limiter in counted.limiters:
            limiter.take_tokens(tokens, now)
        return None

    def end_call(self, call: Hashable, tokens: int | None, now: float) -> None:
        """Stop counting a call that used this many tokens, or as many as estimated if None. Ignored if not counted."""
        if (counted := self._calls.pop(call, None)) is None:
            return
        used = counted.estimate if tokens is None else tokens
        for _, limiter in counted.limiters:
            limiter.in_flight -= 1
            limiter.take_tokens(used - counted.estimate, now)

    def admit_new_client(self, address: str, per_minute: float, now: float) -> bool:
        """Count a new anonymous client from this address. Returns False if that exceeds the clients per minute."""
        limiter = _limiter(self._new_clients, address, ClientLimits(requests_per_minute=per_minute), now)
        if limiter.call_shortage(now) is not None:
            return False
        limiter.begin_call(now)
        limiter.in_flight = 0
        return True


def _of(owner: OwnerLimits, shortage: Shortage) -> Shortage:
    return Shortage(shortage.reason, shortage.limit, shortage.seconds, owner.is_group)


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
