"""SGLang: both workers get the same call at once, and meet in a room of the prefill worker's bootstrap server.

After `sglang/srt/disaggregation` and `entrypoints/openai/protocol.py` of 0.5.23. A call with several answers takes
consecutive rooms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from router.api.body.json_object import cut_members, put_members

ABORT_PATH: Final = "/abort_request"
MOST_ROOMS: Final = 2**63
"""Rooms have lower numbers."""


@dataclass(frozen=True, slots=True)
class SglangRoom:
    """One request's room."""

    host: str
    """Of the prefill worker's bootstrap server."""
    port: int
    number: int
    abort_id: str
    """The id of both calls, of a fixed length: SGLang aborts all calls whose ids begin with the one that is named."""
    prefill_rank: int | None
    """The data-parallel rank of the prefill worker, if its calls name one. Else that is the number modulo its ranks."""

    kept_params = None

    def prefill_body(self, body: bytes) -> bytes:
        """The answer is not streamed, as its one token is the decode worker's to send."""
        if b'"stream_options"' in body:
            body = cut_members(body, {"stream_options"})
        return self._put(body, {"stream": b"false"})

    def decode_body(self, body: bytes) -> bytes:
        rank = self.prefill_rank
        return self._put(body, {} if rank is None else {"disagg_prefill_dp_rank": orjson.dumps(rank)})

    def _put(self, body: bytes, added: Mapping[str, bytes]) -> bytes:
        values = {
            "bootstrap_host": orjson.dumps(self.host),
            "bootstrap_port": orjson.dumps(self.port),
            "bootstrap_room": orjson.dumps(self.number),
            "rid": orjson.dumps(self.abort_id),
            **added,
        }
        return put_members(body, values, orjson.loads(body))

    def check_prefill(self, answer: Mapping[str, Any]) -> None:
        """Whatever ended the answer, the cache was sent before it."""


def abort_body(abort_id: str) -> bytes:
    """Return the body of a call to `ABORT_PATH`."""
    return orjson.dumps({"rid": abort_id})
