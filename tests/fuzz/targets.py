"""All targets."""

from collections.abc import Mapping
from typing import Final

from . import bodies, families, reports, states, streams
from .engine import Target

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (
        *(streams.SSE, streams.STREAM, streams.ANSWER),
        *(bodies.BODY, bodies.INTAKE, bodies.MEMBERS, states.STATE, reports.REPORT, reports.EVENTS),
        *(families.CALL, families.FOLLOWED, families.WHOLE, families.WORDS),
    )
}
"""The targets by name."""
