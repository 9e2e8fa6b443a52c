"""The headers that pass between clients and engines. All others end at the router.

A client could steer an engine by other headers, such as a priority, a rank or another request's id; and an engine's
other headers are about its connection with the router.
"""

from collections.abc import Mapping
from typing import Final

TO_THE_CLIENT: Final = frozenset(
    {
        *(b"content-type", b"cache-control", b"retry-after", b"allow"),
        *(b"endpoint-load-metrics", b"openai-processing-ms", b"openai-version"),
    }
)
RATE_LIMITS: Final = b"x-ratelimit-"
"""What OpenAI's rate limit headers begin with."""
TO_THE_WORKER: Final = (b"traceparent", b"tracestate", b"baggage", b"endpoint-load-metrics-format")
"""The context of a trace (W3C), and the wish for a report of the engine's load (ORCA)."""


def to_the_client(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an engine's answer that its client gets; names are in lower case."""
    return [(name, value) for name, value in headers.items() if name in TO_THE_CLIENT or name.startswith(RATE_LIMITS)]


def to_the_worker(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the headers of a client's call that its worker gets; names are in lower case."""
    return {name.decode(): headers[name].decode("latin-1") for name in TO_THE_WORKER if name in headers}
