"""Messages of the channel as bytes: MessagePack, each message as its type's name and its fields by name.

The name is needed because some types have the same fields. Fields by name let a newer version add fields with defaults.
A question is written with its own name, followed by its number.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Final, Generic, TypeVar, cast, get_args

import msgspec

from router.channel.messages import AnyQuestion, Ask, FrontMessage, SchedulerMessage

M = TypeVar("M")

_ENCODER: Final = msgspec.msgpack.Encoder()
_PARTS: Final = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw, int | None])


class MessageDecoder(Generic[M]):
    """Decodes the messages of one direction."""

    def __init__(self, types: Sequence[type[M]]) -> None:
        self._decoders = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in types}

    def decode(self, encoded: bytes) -> M:
        """Return the message. Raises ValueError if it is not one of this direction, or a field has a wrong type."""
        name, fields, number = _PARTS.decode(encoded)
        decoder = self._decoders.get(name)
        if decoder is None:
            raise ValueError(f"unknown message {name!r}")
        decoded = decoder.decode(fields)
        return decoded if number is None else cast("M", Ask(number, cast("AnyQuestion", decoded)))


_FRONT_TYPES: Final = [kind for kind in get_args(FrontMessage) if kind is not Ask] + list(get_args(AnyQuestion))
_SCHEDULER_TYPES: Final = get_args(SchedulerMessage)
FRONT_DECODER: Final[MessageDecoder[FrontMessage]] = MessageDecoder(_FRONT_TYPES)
SCHEDULER_DECODER: Final[MessageDecoder[SchedulerMessage]] = MessageDecoder(_SCHEDULER_TYPES)


def encode(message: FrontMessage | SchedulerMessage) -> bytes:
    """Return a message as bytes."""
    if isinstance(message, Ask):
        return _ENCODER.encode((type(message.question).__name__, message.question, message.number))
    return _ENCODER.encode((type(message).__name__, message, None))


@cache
def channel_version() -> str:
    """Return a digest of all types of messages with their fields. Both ends of a channel must have the same.

    Computed and not numbered, so that no change of a message can forget to raise it.
    """
    _, schema = msgspec.json.schema_components([*_FRONT_TYPES, *_SCHEDULER_TYPES])
    return blake2b(msgspec.json.encode(schema, order="deterministic"), digest_size=8).hexdigest()
