"""Whose fault it is that an engine did not answer a call, by the status of its refusal."""

from collections.abc import Mapping
from typing import Final

from router.api.body.json_object import read_object
from router.core.model.events import Fault
from router.errors import WorkerBroke, WorkerRefused

UNAVAILABLE: Final = frozenset({429, 503})
"""By these an engine turns a call away because it is full."""
REFUSES_THE_ROUTER: Final = frozenset({401, 402, 403, 407, 408, 421, 426})
"""Statuses that say something about the router's key, connection or account at the worker. The client has sent none of
these, so it must not be told that its own are wrong."""
NOT_THERE: Final = frozenset({404, 405})
"""A model or path that the worker lacks."""


def fault_of(code: int | str | None) -> Fault:
    """Whose fault an error is that an engine tells inside an answer, by its code."""
    if code in UNAVAILABLE:
        return Fault.FULL
    if isinstance(code, int) and code < 500:
        return Fault.CALL
    return Fault.ERROR


def worker_refused(status: int, *, everywhere: bool) -> WorkerRefused | None:
    """The error for a refusal that is the worker's own fault; None for one that may be the call's.

    `everywhere`: every engine serves the call's path. Then a worker that lists the model and answers 404 is broken,
    while a path that some engines lack, or a stored object that is gone, is the call's own fault.
    """
    own = 300 <= status < 400 or status in REFUSES_THE_ROUTER or (everywhere and status in NOT_THERE)
    return WorkerRefused(status) if own else None


def lacks_path(status: int, body: bytes) -> bool:
    """Whether an engine says that it has no such path, as one that makes embeddings alone says of a chat.

    That is the words of its HTTP server, which name no model. They do not clear the worker, as one that is broken may
    say the same; but where no other worker has the path either, the client is to be told just that.
    """
    if status != 404 or len(body) > 1024:
        return False
    try:
        told = read_object(body)
    except WorkerBroke:
        return False
    error = told.get("error")
    return "Not Found" in (told.get("detail"), error.get("message") if isinstance(error, Mapping) else None)
