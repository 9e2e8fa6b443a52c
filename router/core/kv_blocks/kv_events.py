"""What engines publish about their KV caches: decoded messages in, cache events out, and which messages are missing.

A message is a sequence number and a batch: a time, events, and the data-parallel rank. vLLM and SGLang send events as
maps; earlier versions sent arrays, in the order of `_POSITIONS`. Read in the sources of vLLM 0.32 and SGLang 0.5.23.

A router that matches prompts by their tokens can use only some of the blocks: those in the device's own memory, in the
first group of layers, that depend on tokens alone. Blocks of an adapter, of a cache salt or of media are not, nor are
the blocks after them: they are known by name, so that what follows them does not count as unknown, and never matched.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final, NamedTuple

EngineHash = int | bytes
"""What an engine calls a block. Equal ones name the same content; nothing else is known of it."""

DEVICE: Final = (None, "GPU")
"""The media of blocks that a prefill can use at once."""
MARKS_KEPT: Final = 10_000
"""Messages whose marks are kept; as many as engines keep for replay."""
_POSITIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys", "group_idx"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class KvEventFault(StrEnum):
    """What can be wrong with a publisher's messages; the values are metric labels."""

    UNREADABLE = "unreadable"
    """Not a message, or a message without a batch."""
    UNKNOWN_KIND = "unknown-kind"
    BAD_FIELDS = "bad-fields"
    """An event that lacks a field of its kind, or has a wrong value in one."""
    FOREIGN_TOPIC = "foreign-topic"
    UNKNOWN_PARENT = "unknown-parent"
    """Blocks that follow a block that was never stored."""
    UNKNOWN_BLOCK = "unknown-block"
    """Removal of a block that was never stored."""
    ODD_BLOCK = "odd-block"
    """Blocks of another size than the blocks before."""
    GAP = "gap"
    """Missing messages."""
    UNREPAIRED = "unrepaired"
    """Missing messages that no replay returned."""
    FLOOD = "flood"
    """More bytes than the router reads; it ignores the worker's events for a while."""
    TOO_MANY_BLOCKS = "too-many-blocks"
    SILENT = "silent"
    """No message about requests that must have filled blocks."""
    DISCONNECTED = "disconnected"


@dataclass(frozen=True, slots=True)
class EventsReport:
    """How well one worker's cache is known from its events."""

    publishers: int
    followed: bool
    """Whether its blocks are known from events at all; if not, from the mirror alone."""
    complete: bool
    """Whether its blocks are known from events alone."""
    faults: Mapping[KvEventFault, int]


class Stored(NamedTuple):
    """A chain of blocks is cached now."""

    names: Sequence[EngineHash]
    parent: EngineHash | None
    """The block before the first one; None at the head of a prompt."""
    tokens: Sequence[int]
    block_tokens: int
    matchable: int
    """How many of the blocks, from the first on, depend on nothing but tokens, and so serve plain prompts."""


class Removed(NamedTuple):
    """These blocks are no longer cached."""

    names: Sequence[EngineHash]


class Cleared(NamedTuple):
    """No block is cached any more."""


CacheEvent = Stored | Removed | Cleared


class EventBatch(NamedTuple):
    """The usable content of one message, in order."""

    rank: int | None
    """Data-parallel rank; None if the message has none."""
    events: tuple[CacheEvent, ...]
    faults: tuple[KvEventFault, ...]
    """One for each event that had to be left out."""


def read_batch(payload: object) -> EventBatch:
    """Read an unpacked message, leaving out invalid events. Raises ValueError if the message is not a batch."""
    if not isinstance(payload, list | tuple) or len(payload) < 2 or not isinstance(payload[1], list | tuple):
        raise ValueError("not a batch of events")
    rank = payload[2] if len(payload) > 2 else None
    events: list[CacheEvent] = []
    faults: list[KvEventFault] = []
    for raw in payload[1]:
        read = _read_event(raw)
        if isinstance(read, KvEventFault):
            faults.append(read)
        elif read is not None:
            events.append(read)
    return EventBatch(rank if type(rank) is int and rank >= 0 else None, tuple(events), tuple(faults))


def _read_event(raw: object) -> CacheEvent | KvEventFault | None:
    """Read one event. Returns a fault if it is invalid, and None if it is about other memory than the device's."""
    fields = _fields(raw)
    if fields is None:
        return KvEventFault.UNKNOWN_KIND
    kind = fields["type"]
    if kind == "AllBlocksCleared":
        return Cleared()
    names = fields.get("block_hashes")
    if not isinstance(names, list | tuple) or not all(isinstance(name, int | bytes) for name in names):
        return KvEventFault.BAD_FIELDS
    if fields.get("medium") not in DEVICE or fields.get("group_idx") not in (None, 0):
        return None
    return Removed(names) if kind == "BlockRemoved" else _stored(names, fields)


def _fields(raw: object) -> Mapping[str, object] | None:
    """Return an event's fields by name, whichever way it is encoded; None for an unknown kind."""
    if isinstance(raw, Mapping):
        kind = raw.get("type")
        return raw if isinstance(kind, str) and kind in _POSITIONS else None
    if isinstance(raw, list | tuple) and raw and isinstance(raw[0], str) and raw[0] in _POSITIONS:
        return {"type": raw[0], **dict(zip(_POSITIONS[raw[0]], raw[1:], strict=False))}
    return None


def _stored(names: Sequence[EngineHash], fields: Mapping[str, object]) -> Stored | KvEventFault:
    parent, tokens, size = fields.get("parent_block_hash"), fields.get("token_ids"), fields.get("block_size")
    if not isinstance(tokens, list | tuple) or type(size) is not int or size < 1:
        return KvEventFault.BAD_FIELDS
    if not isinstance(parent, int | bytes | None) or len(tokens) != size * len(names):
        return KvEventFault.BAD_FIELDS
    matchable = len(names)
    if any(fields.get(name) is not None for name in ("lora_id", "lora_name", "cache_salt")):
        matchable = 0
    elif isinstance(extra := fields.get("extra_keys"), list | tuple):  # one for each block
        matchable = min([place for place, each in enumerate(extra[:matchable]) if each], default=matchable)
    return Stored(names, parent, tokens, size, matchable)


class MessageOrder(Enum):
    """What the number of a message means."""

    NEXT = auto()
    REPEATED = auto()
    """It was applied before, from a replay."""
    GAP = auto()
    """Messages before it are missing."""
    RESTARTED = auto()
    """Its publisher counts from the start again: another process, with another cache."""


class Continuity:
    """Which messages of one publisher were applied, by number and by a mark that equal contents share."""

    def __init__(self) -> None:
        self.next_number = 0
        """The number of the next message; at first, that of the first message ever published."""
        self._marks: OrderedDict[int, int] = OrderedDict()

    def order(self, number: int, mark: int) -> MessageOrder:
        """Return how a message follows those before it. Changes nothing."""
        if number == self.next_number:
            return MessageOrder.NEXT
        if number > self.next_number:
            return MessageOrder.GAP
        return MessageOrder.REPEATED if self._marks.get(number) == mark else MessageOrder.RESTARTED

    def record(self, number: int, mark: int) -> None:
        """Record that a message was applied: the next one, or one after a gap that stays."""
        self.next_number = number + 1
        self._marks[number] = mark
        if len(self._marks) > MARKS_KEPT:
            self._marks.popitem(last=False)
