"""One agent session, and one client with its sessions."""

from dataclasses import dataclass, field

from router.core.model.request import ClientId, Request, RequestId, SessionId, WorkerId


@dataclass(slots=True, eq=False)
class Session:
    """One growing context of a client: each of its calls resends what the calls before it sent and were answered.

    Several contexts under one label are several sessions.
    """

    client: "SessionClient"
    model: str
    label: SessionId | None
    parent: SessionId | None
    number: int
    """Rises with each session."""
    since: float
    """When it began, or came back after it had neither a place nor a call for longer than the idle limit, in seconds.
    The older of a client's sessions go first.
    """
    head: bytes
    """Hash of the first chunks of its prompts; empty if its first prompt has no whole chunk."""
    first_call: RequestId
    anchors: tuple[bytes, ...] = ()
    """Hashes of the last whole chunks of its latest prompt and of what that was answered: a prompt with one of them
    continues the session.
    """
    first_chunks: int = 0
    """Whole chunks of its first prompt, or of a later one if that has fewer. Other sessions may begin with the same
    ones. One that has the next chunk in common, too, is taken for this one while that has no call.
    """
    own_anchor: bytes = b""
    """Hash of the next chunk of its latest prompt: a prompt with it continues the session if it has no call, though the
    client has changed what comes after. Empty if there is none.
    """
    context: int = 0
    """Tokens of its latest prompt, with the answer if that is complete. Of several calls at once, of the largest."""
    calls: dict[RequestId, int] = field(default_factory=dict)
    """Its live calls, each with its tokens so far."""
    paused: dict[RequestId, Request] = field(default_factory=dict)
    """Those of the calls that the gate holds back."""
    paused_since: float = 0.0
    """When the first of them was held back, in seconds."""
    idle_since: float = 0.0
    """When its last call ended, in seconds."""
    ended_turn: bool = False
    """Whether the latest answer ended the turn, so that a person is to speak next."""
    came_back: bool = False
    """Whether it has made a second call; another try of the first one is none."""
    hot: bool = False
    """Whether it has a live call, or had one within the idle limit."""
    worker: WorkerId | None = None
    """Where it has a place: its context is reserved in this worker's KV cache. None without a place."""
    reserved: int = 0
    """Tokens that it takes of a KV cache: its context and what it is expected to grow by."""
    turn_left: float = 0.0
    """What is left of its turn, in cost units."""
    prefilled: bool = False
    """Whether its first prefill in this place is over, from which on its turn is spent."""
    lost_context: int = 0
    """Tokens of its context when it lost its last place; 0 if it has had none, or has one now."""
    passed: int = 0
    """How many sessions behind it were admitted since it began to wait, because they fitted and it did not."""
    displaced: bool = False
    """Whether it lost its last place with the worker, so that it goes first within its client."""

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Sorts the sessions of one client in the order in which they get places."""
        return not self.displaced, self.since, self.number


@dataclass(slots=True, eq=False)
class SessionClient:
    """A client with sessions."""

    name: ClientId
    number: int
    """Of clients with equal accounts, the one with the smaller number goes first."""
    weight: float = 1.0
    """Its effective weight at its latest call."""
    served: float = 0.0
    """Its service per weight, in cost units, by a counter as in VTC (Algorithm 2): a client that returns is lifted to
    the least of the active clients.
    """
    unspent: float = 0.0
    """What is left of the turns of its sessions that have places, in cost units."""
    hot: int = 0
    """Its hot sessions; it is active while it has one."""
    sessions: dict[Session, None] = field(default_factory=dict)
    """Its remembered sessions."""
    spent: dict[Session, None] = field(default_factory=dict)
    """Its sessions with a place, a spent turn and no call."""
    admitted_tokens: int = 0
    """What its sessions with places have reserved, in tokens."""

    @property
    def account(self) -> float:
        """Its service per weight, unspent turns included, in cost units: the client with the least goes first."""
        return self.served + self.unspent / self.weight
