"""A tokenizer without a vocabulary file: text splits into short pieces, and the token id encodes the piece.

A piece has at most seven UTF-8 bytes, so an id packs them behind a leading 1 into 57 bits. Ids are equal in all
processes, need no table, and decode back. English text has about 1.3 tokens per word.

The words of answers are chosen such that they split in the same way in any context: the next turn's prompt, which
repeats prompt and answer as text, has the same ids as before.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import orjson

_PIECE = re.compile(r"<\|im\|>|<\|end\|>| ?[A-Za-z0-9_]{1,6}| ?[\u00c0-\u07ff]{1,3}|.", re.DOTALL)
_MEMO_LIMIT = 1 << 16
END: Final = "<|end|>\n"
"""Follows each message of a chat."""


def _pack(piece: str) -> int:
    return int.from_bytes(b"\x01" + piece.encode(), "big")


class _Ids(dict[str, int]):
    """Piece -> id; caches common pieces, so that their ids are shared objects."""

    def __missing__(self, piece: str) -> int:
        token = _pack(piece)
        if len(self) < _MEMO_LIMIT:
            self[piece] = token
        return token


_ids = _Ids()

EOS: Final = _pack("<|end|>")

_WORDS = (
    "the of and to a in is it that was for on are with as at be this from or had by not but some what there we can out "
    "other were all your when up use word how said an each she which do their time if will way about many then them "
    "would write like so these her long make thing see him two has look more day could go come did my sound no most "
    "number who over know water than call first people may down side been now find any new work part take get place "
    "made live where after back little only round man year came show every good me give our under name"
)
VOCABULARY: tuple[int, ...] = tuple(
    _pack(piece)
    for piece in (
        *(f" {word}" for word in _WORDS.split()),
        *(" мир", " да", " не", "世", "界", "…", "🙂"),
        *(",", ",", ".", ".", "\n"),
    )
)
"""The tokens of answers. Each piece is split off alone, whatever precedes it and whichever of them follows."""


def encode(text: str) -> list[int]:
    """Return the token ids of `text`; `decode` is the inverse."""
    ids = _ids
    return [ids[piece] for piece in _PIECE.findall(text)]


def decode(tokens: Iterable[int]) -> str:
    """Return the text of `tokens`; an id that this tokenizer never makes reads as U+FFFD."""
    return "".join(map(_text, tokens))


def _text(token: int) -> str:
    raw = token.to_bytes((token.bit_length() + 7) // 8, "big")
    if len(raw) < 2 or raw[0] != 1:
        return "\ufffd"
    return raw[1:].decode(errors="replace")


def render_chat(
    messages: Sequence[Mapping[str, object]],
    tools: object = None,
    *,
    continue_last: bool = False,
) -> str:
    """Return the prompt text of a chat: tools first, each message between markers, then the opening of the answer.

    If the client sends the answer back unchanged, the text of a turn is a prefix of the next turn's. `continue_last`:
    the last message is the beginning of an answer, and nothing follows it.
    """
    rendered = [_marked("tools", orjson.dumps(tools).decode())] if tools else []
    rendered += [_marked(str(message.get("role")), _content(message)) for message in messages]
    if continue_last:
        rendered[-1] = rendered[-1].removesuffix(END)
    else:
        rendered.append("<|im|>assistant\n")
    return "".join(rendered)


def _marked(role: str, content: str) -> str:
    return f"<|im|>{role}\n{content}{END}"


def _content(message: Mapping[str, object]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    calls = message.get("tool_calls")
    return "".join(map(_part, parts)) + (orjson.dumps(calls).decode() if calls else "")


def _part(part: object) -> str:
    """Return text as it is, and anything else (an image's address, for example) as JSON."""
    if isinstance(part, dict) and "text" in part:
        part = part["text"]
    if part is None:
        return ""
    return part if isinstance(part, str) else orjson.dumps(part).decode()
