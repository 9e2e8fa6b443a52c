"""I/O: what a call on a prefill or decode engine does besides generating: its leg of a hand-off."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from workers.api.call import Body
from workers.api.choice import Choice
from workers.api.http import Routes
from workers.server.loop import Mailbox
from workers.server.transfer.exchange import Message


class EngineDied(Exception):
    """A call that takes down the server."""


class Leg:
    """One call. This one takes part in no hand-off; each method of others is called in this order."""

    hands_off = False
    """The engine holds the KV of its requests after their end."""
    pulls = False
    """The KV of its prompts comes from a prefill engine."""
    prefill_only = False
    """One token is generated, however many the call asks for."""

    rank: int | None = None
    """The rank that serves it if it is not pinned, None for the engine's own choice."""

    async def begin(self, mailbox: Mailbox, choices: Sequence[Choice]) -> None:
        """Wait until the engine may take the call, or until `mailbox` is interrupted. Raises ApiError."""

    def refuse(self) -> None:
        """Note that the call was refused, and that the engine will not take it."""

    def submit(self, mailbox: Mailbox, choices: Sequence[Choice]) -> None:
        """Note that the engine has the requests of the call."""

    async def end(self, mailbox: Mailbox, choices: Sequence[Choice]) -> None:
        """Finish a hand-off whose tokens all exist, before the end of the answer is sent. Raises ApiError."""

    def spoil(self, mailbox: Mailbox) -> None:
        """Lose the KV that is held, as if its time were over and other prompts had overwritten it."""

    def close(self, mailbox: Mailbox) -> None:
        """Note that the call is over, whichever way."""


NO_LEG: Final = Leg()


class Connector(Protocol):
    """What connects the engines of one worker with those of others."""

    def leg(self, body: Body, headers: Mapping[str, str], path: str) -> Leg:
        """Return the leg of a call. Raises ApiError if the call's parameters are invalid, and EngineDied."""

    async def answer(self, question: Message) -> Message:
        """Answer an engine of another worker."""

    def routes(self) -> Routes:
        """Return what the side port serves besides the exchange."""

    async def close(self) -> None:
        """Stop what is under way."""
