"""The differences that are meant, each with its reason, as docs/operations.md lists them."""

from ..wire import Answer
from .calls import Probe
from .differences import Difference


def accepted(probe: Probe, difference: Difference, direct: Answer, routed: Answer) -> str | None:
    """Return the reason for a difference; None if there is none."""
    if difference.part == "header x-request-id":
        return "every answer names its request"
    return None
