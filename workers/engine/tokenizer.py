"""A tokenizer without a vocabulary file: text splits into short pieces, and a token id is its piece.

Pieces are at most seven UTF-8 bytes, so an id packs them behind a leading 1 into 57 bits: ids are stable across
processes, need no table, and decode back. English comes to about 1.3 tokens a word.

The answers' words are chosen so that they split the same wherever they stand: the next turn's prompt, which repeats
prompt and answer as text, has the same ids as before.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import orjson

_PIECE = re.compile(r"<\|im\|>|<\|end\|>| ?[A-Za-z0-9_]{1,6}| ?[\u00c0-\u07ff]{1,3}|.", re.DOTALL)
_MEMO_LIMIT = 1 << 16
END = "<|end|>\n"
"""Behind each message of a chat."""


def _pack(piece: str) -> int:
    return int.from_bytes(b"\x01" + piece.encode(), "big")


class _Ids(dict[str, int]):
    """Piece -> id; remembers common pieces so that their ids are shared objects."""

    def __missing__(self, piece: str) -> int:
        token = _pack(piece)
        if len(self) < _MEMO_LIMIT:
            self[piece] = token
        return token


_ids = _Ids()

EOS = _pack("<|end|>")

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
"""What answers are made of. Each piece splits off alone whatever stands before it and whichever of them follows."""


def encode(text: str) -> list[int]:
    """Token ids of `text`; `decode` gives the text back."""
    ids = _ids
    return [ids[piece] for piece in _PIECE.findall(text)]


def decode(tokens: Iterable[int]) -> str:
    """Text of `tokens`; an id that this tokenizer never makes reads as U+FFFD."""
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
    go_on: bool = False,
) -> str:
    """The prompt text of a chat: tools first, each message between markers, then the opening of the answer.

    The text of one turn is a prefix of the next turn's where the client sends the answer back unchanged. `go_on`: the
    last message is an answer's beginning, and nothing comes after it.
    """
    rendered = [_marked("tools", orjson.dumps(tools).decode())] if tools else []
    rendered += [_marked(str(message.get("role")), _content(message)) for message in messages]
    if go_on:
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
    """Text as it is; what is no text (an image's address, say) as JSON."""
    if isinstance(part, dict) and "text" in part:
        part = part["text"]
    if part is None:
        return ""
    return part if isinstance(part, str) else orjson.dumps(part).decode()
