"""What a restored state says of the fronts that an earlier run of the scheduler had, until they have reported."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from router.core.model.request import RequestId


@dataclass(frozen=True, slots=True)
class CoveredFront:
    """What a saved state covers of one front."""

    session: str
    """As in `Hello`."""
    messages: int
    """How many of its messages are part of the state."""
    renamed: tuple[tuple[RequestId, RequestId], ...] = ()
    """Its live requests that the scheduler knows by another id: the id in the front, and that one."""
    name: str = ""
    """The name of the front in its cluster. If its process is started again, the next one has the same."""
    late: bool = False
    """Whether it had not reported yet to the run that saved the state."""


class EarlierRun:
    """The fronts and live requests of the restored state of which nothing has been reported yet.

    The id of a live request is kept for that request, for under this id the state says what it was charged. A front may
    report a new request with the same id before.
    """

    def __init__(self, fronts: Iterable[CoveredFront] = (), live: Collection[RequestId] = ()) -> None:
        """`live`: the ids of the live requests."""
        self._fronts = {front.session: front for front in fronts}
        self._ids: Mapping[str, Mapping[RequestId, RequestId]] = {
            session: dict(front.renamed) for session, front in self._fronts.items()
        }
        self.unclaimed: Final = set(live)
        """Ids that are kept for requests that have not been reported. Read only."""

    @property
    def fronts(self) -> Iterator[CoveredFront]:
        """The fronts that have not reported."""
        return (replace(front, late=True) for front in self._fronts.values())

    def messages_of(self, session: str) -> int:
        """Return how many messages of a front the restored state covers."""
        return self._fronts[session].messages if session in self._fronts else 0

    def claim(self, session: str, own_id: RequestId) -> RequestId:
        """Return the id that a live request of a front has in the state, and keep it no longer.

        `own_id`: that in its front.
        """
        claimed = self._ids.get(session, {}).get(own_id, own_id)
        self.unclaimed.discard(claimed)
        return claimed

    def has_reported(self, session: str, name: str) -> None:
        """Forget a front that has reported all it had, and those before it. `name`: as in `CoveredFront`."""
        self._fronts.pop(session, None)
        if name:
            self._fronts = {key: front for key, front in self._fronts.items() if front.name != name}
