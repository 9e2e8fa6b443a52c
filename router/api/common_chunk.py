"""The form that nearly all chunks of a chat stream have, taken apart as text: the fast way through the per-chunk path.

One choice, the first; some text without escapes and nothing else said; usage, which we asked for, as the last member.
Such chunks of one stream differ only in their text and their usage, so what the last one had around its text is looked
for in the next as it stands. Whatever has any other form is read as JSON.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

_NULLS: Final = rb'(?:, ?"\w+": ?null)*+'
# Up to the quote before the text; from the quote behind it.
_BEFORE: Final = rb'\{[^{\[]*"choices": ?\[\{"index": ?0, ?"delta": ?\{(?:"\w+": ?null, ?)*+"content": ?"'
_BEHIND: Final = _NULLS + rb"\}" + _NULLS + rb"\}\]"
_USAGE: Final = rb"\{[^}]*\}(?:[^{}]*\})?"
# Before the choices there is no other brace, so they are a member of the root, and so is the usage after them: of valid
# JSON the last brace closes the root. A raw quote cannot stand inside a string, so names are names.
_COMMON: Final = re.compile(rb'(%b)([^"\\\x00-\x1f]+)"(%b)(, ?"usage": ?)(%b)\}' % (_BEFORE, _BEHIND, _USAGE))
_LAST: Final = re.compile(_USAGE + rb"\}")


class Run(NamedTuple):
    """Chunks of one form in a row."""

    seen: bytes
    """They as plain events, without their usage."""
    text: bytes
    """What they say together, in UTF-8."""
    usage: bytes
    """The usage of the last, as JSON: it counts for all of them."""


class Form(NamedTuple):
    """What the common chunks of one stream share."""

    before: bytes
    """All before the text, its quote included."""
    behind: bytes
    """From the quote behind the text to the end of the choices."""
    to_usage: bytes
    """From there to the usage, its name included."""

    def run(self, texts: list[bytes], usage: bytes) -> Run:
        """The chunks that say these texts; `usage` is the last one's."""
        end = b'"' + self.behind + b"}\n\n"
        start = b"data: " + self.before
        return Run(start + (end + start).join(texts) + end, b"".join(texts), usage)


class CommonChunks:
    """Finds the common chunks of one stream."""

    __slots__ = ("_form",)

    def __init__(self) -> None:
        self._form = Form(b"\n", b"", b"")
        """Of the last one; to begin with, of none."""

    def take_apart(self, data: Iterable[bytes]) -> Iterator[Run | bytes]:
        """Chunks in their order: the common ones run by run, each other by itself and as it is."""
        form = self._form
        texts: list[bytes] = []
        usage = b""
        for chunk in data:
            if chunk.startswith(form.before):
                text, _, rest = chunk[len(form.before) :].partition(b'"')
                last = rest[len(form.to_usage) :]
                if text and b"\\" not in text and rest.startswith(form.to_usage) and _LAST.fullmatch(last):
                    texts.append(text)
                    usage = last[:-1]
                    continue
            if texts:
                yield form.run(texts, usage)
                texts = []
            if (common := _COMMON.fullmatch(chunk)) is None:
                yield chunk
            else:
                before, text, behind, to_usage, usage = common.groups()
                form = self._form = Form(before, behind, behind + to_usage)
                texts = [text]
        if texts:
            yield form.run(texts, usage)
